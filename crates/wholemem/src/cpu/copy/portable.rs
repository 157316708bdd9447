//! Copies of rows by volatile accesses, for CPUs other than x86-64, and for Miri.

const WORD: usize = size_of::<u64>();

/// Copies `len` bytes of shared memory by volatile accesses.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes, as raw memory that others may write concurrently; they do not
/// overlap.
pub(in crate::cpu) unsafe fn any(from: *const u8, to: *mut u8, len: usize) {
    let mut at = 0;
    // A volatile access must be aligned, so words are copied only if source and target are aligned.
    if (from.addr() | to.addr()).is_multiple_of(WORD) {
        while len - at >= WORD {
            // SAFETY: the word is within the `len` readable bytes that the caller guarantees, and aligned because `from` is and
            // `at` is a multiple of a word.
            let word = unsafe { from.wrapping_add(at).cast::<u64>().read_volatile() };
            // SAFETY: the word is within the `len` writable bytes that the caller guarantees, and aligned because `to` is and
            // `at` is a multiple of a word.
            unsafe { to.wrapping_add(at).cast::<u64>().write_volatile(word) };
            at += WORD;
        }
    }
    while at < len {
        // SAFETY: `at` is less than `len`, and the caller guarantees that `from` is readable for `len` bytes.
        let byte = unsafe { from.wrapping_add(at).read_volatile() };
        // SAFETY: `at` is less than `len`, and the caller guarantees that `to` is writable for `len` bytes.
        unsafe { to.wrapping_add(at).write_volatile(byte) };
        at += 1;
    }
}

/// Returns the width in bytes of the widest vector registers. This implementation uses none, so the value only selects a
/// function.
pub(in crate::cpu) fn widest() -> usize {
    16
}

/// Copies `len` bytes of shared memory to memory that has no other writer.
///
/// # Safety
/// As [`any`]; `len` is `WIDTH * COUNT` to twice that.
pub(in crate::cpu) unsafe fn ends<const WIDTH: usize, const COUNT: usize>(
    from: *const u8,
    to: *mut u8,
    len: usize,
) {
    // SAFETY: the caller of `ends` guarantees that `from` and `to` are valid for `len` bytes and do not overlap.
    unsafe { any(from, to, len) }
}

/// Copies `len` bytes, more than [`ends`] can copy, to memory that has no other writer.
///
/// # Safety
/// As [`any`]; `len` is `4 * WIDTH` at least.
pub(in crate::cpu) unsafe fn long<const WIDTH: usize>(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller of `long` guarantees that `from` and `to` are valid for `len` bytes and do not overlap.
    unsafe { any(from, to, len) }
}

/// Copies `len` bytes to memory that another core has read or will read.
///
/// # Safety
/// As [`any`].
pub(in crate::cpu) unsafe fn over(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller of `over` guarantees that `from` and `to` are valid for `len` bytes and do not overlap.
    unsafe { any(from, to, len) }
}

/// Ends the use of wide vector registers: no effect here, because none are used.
pub(in crate::cpu) fn leave() {}

/// Copies `LEN` bytes of shared memory, a constant length.
///
/// # Safety
/// As [`any`].
#[inline(always)]
pub(in crate::cpu) unsafe fn exact<const LEN: usize>(from: *const u8, to: *mut u8) {
    // SAFETY: the caller of `exact` guarantees that `from` and `to` are valid for `LEN` bytes and do not overlap.
    unsafe { any(from, to, LEN) }
}

/// Copies `len` bytes to memory that is not read soon.
///
/// # Safety
/// As [`any`]; `to` begins a cache line, and `len` is whole lines.
pub(in crate::cpu) unsafe fn streaming(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller of `streaming` guarantees that `from` and `to` are valid for `len` bytes and do not overlap.
    unsafe { any(from, to, len) }
}

/// Orders streaming stores before later stores: no effect here, because there are none.
pub(in crate::cpu) fn finish() {}

/// Prefetches a cache line for a read: no effect in this implementation.
pub(in crate::cpu) fn will_read(_: *const u8) {}

/// Prefetches a cache line for a write: no effect in this implementation.
pub(in crate::cpu) fn will_write(_: *const u8) {}
