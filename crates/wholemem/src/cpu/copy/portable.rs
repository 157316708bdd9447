//! Rows moved by volatile accesses: for processors without assembly of ours, and for Miri.

const WORD: usize = size_of::<u64>();

/// Moves `len` bytes.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes, as raw memory that others may write meanwhile; they do not
/// overlap.
pub(in crate::cpu) unsafe fn any(from: *const u8, to: *mut u8, len: usize) {
    let mut at = 0;
    // A volatile access is aligned, so words only where both sides are.
    if (from.addr() | to.addr()).is_multiple_of(WORD) {
        while len - at >= WORD {
            // SAFETY: the word is within the caller's `len` bytes, and aligned because `from` is and `at` is a multiple of a word.
            let word = unsafe { from.wrapping_add(at).cast::<u64>().read_volatile() };
            // SAFETY: the word is within the caller's `len` bytes, and aligned because `to` is and `at` is a multiple of a word.
            unsafe { to.wrapping_add(at).cast::<u64>().write_volatile(word) };
            at += WORD;
        }
    }
    while at < len {
        // SAFETY: the byte is within the caller's `len` bytes.
        let byte = unsafe { from.wrapping_add(at).read_volatile() };
        // SAFETY: the byte is within the caller's `len` bytes.
        unsafe { to.wrapping_add(at).write_volatile(byte) };
        at += 1;
    }
}

/// How many bytes the widest registers hold: there are none that we know of.
pub(in crate::cpu) fn widest() -> usize {
    16
}

/// Moves `len` bytes to a place that nobody else writes.
///
/// # Safety
/// As [`any`]; `len` is `WIDTH * COUNT` to twice that.
pub(in crate::cpu) unsafe fn ends<const WIDTH: usize, const COUNT: usize>(
    from: *const u8,
    to: *mut u8,
    len: usize,
) {
    // SAFETY: passed on from the caller.
    unsafe { any(from, to, len) }
}

/// Moves more bytes than [`ends`] can.
///
/// # Safety
/// As [`any`]; `len` is `4 * WIDTH` at least.
pub(in crate::cpu) unsafe fn long<const WIDTH: usize>(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: passed on from the caller.
    unsafe { any(from, to, len) }
}

/// Moves `len` bytes that another core has read, or will.
///
/// # Safety
/// As [`any`].
pub(in crate::cpu) unsafe fn over(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: passed on from the caller.
    unsafe { any(from, to, len) }
}

/// Lets go of wide registers.
pub(in crate::cpu) fn leave() {}

/// Moves `LEN` bytes.
///
/// # Safety
/// As [`any`].
#[inline(always)]
pub(in crate::cpu) unsafe fn exact<const LEN: usize>(from: *const u8, to: *mut u8) {
    // SAFETY: passed on from the caller.
    unsafe { any(from, to, LEN) }
}

/// Moves `len` bytes that nobody will look at soon.
///
/// # Safety
/// As [`any`]; `to` begins a cache line, and `len` is whole lines.
pub(in crate::cpu) unsafe fn streaming(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: passed on from the caller.
    unsafe { any(from, to, len) }
}

/// Makes what was streamed visible to others before what follows.
pub(in crate::cpu) fn finish() {}

/// Says that a cache line will be read soon.
pub(in crate::cpu) fn will_read(_: *const u8) {}

/// Says that a cache line will be written soon.
pub(in crate::cpu) fn will_write(_: *const u8) {}
