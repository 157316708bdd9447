//! Copies by volatile accesses: for CPUs other than x86-64, and for Miri.

const WORD: usize = size_of::<u64>();

/// Copies `len` bytes.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes, as raw memory that others may write concurrently; they do not
/// overlap.
pub(in crate::cpu) unsafe fn any(from: *const u8, to: *mut u8, len: usize) {
    let mut at = 0;
    // A volatile access must be aligned, so words are copied only if both sides are.
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

/// The width of the widest registers in bytes. None are used.
pub(in crate::cpu) fn widest() -> usize {
    16
}

/// Copies `len` bytes to memory that has no other writer.
///
/// # Safety
/// As [`any`]; `len` is `WIDTH * COUNT` to twice that.
pub(in crate::cpu) unsafe fn ends<const WIDTH: usize, const COUNT: usize>(
    from: *const u8,
    to: *mut u8,
    len: usize,
) {
    // SAFETY: the caller guarantees the same preconditions.
    unsafe { any(from, to, len) }
}

/// Copies more bytes than [`ends`].
///
/// # Safety
/// As [`any`]; `len` is `4 * WIDTH` at least.
pub(in crate::cpu) unsafe fn long<const WIDTH: usize>(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller guarantees the same preconditions.
    unsafe { any(from, to, len) }
}

/// Copies `len` bytes that another core has read or will read.
///
/// # Safety
/// As [`any`].
pub(in crate::cpu) unsafe fn over(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller guarantees the same preconditions.
    unsafe { any(from, to, len) }
}

/// Ends the use of wide registers.
pub(in crate::cpu) fn leave() {}

/// Copies `LEN` bytes.
///
/// # Safety
/// As [`any`].
#[inline(always)]
pub(in crate::cpu) unsafe fn exact<const LEN: usize>(from: *const u8, to: *mut u8) {
    // SAFETY: the caller guarantees the same preconditions.
    unsafe { any(from, to, LEN) }
}

/// Copies `len` bytes that are not read soon.
///
/// # Safety
/// As [`any`]; `to` begins a cache line, and `len` is whole lines.
pub(in crate::cpu) unsafe fn streaming(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller guarantees the same preconditions.
    unsafe { any(from, to, len) }
}

/// Orders streaming stores before later stores.
pub(in crate::cpu) fn finish() {}

/// Prefetches a cache line for a read.
pub(in crate::cpu) fn will_read(_: *const u8) {}

/// Prefetches a cache line for a write.
pub(in crate::cpu) fn will_write(_: *const u8) {}
