//! Copies of bytes that are well defined while another process writes the same bytes.
//!
//! A racing `memcpy` is undefined behaviour: the compiler may read a byte twice and assume that both reads are equal.
//! Here each byte is read once and written once by instructions that the compiler does not interpret: a string
//! instruction on x86-64, volatile accesses on other processors and under Miri. Bytes are copied in ascending order.
//! A race yields a mix of old and new bytes, and nothing else.

/// Copies `len` bytes that other threads and processes may write concurrently.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes by this process, as raw memory: other threads and processes
/// may write either concurrently. If the ranges overlap and `to` is above `from`, bytes are repeated.
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: the caller of `copy` guarantees that `from` is readable and `to` is writable for `len` bytes; the ABI
    // guarantees a clear direction flag.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") len => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            options(nostack, preserves_flags)
        );
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    // SAFETY: the caller of `copy` guarantees that `from` is readable and `to` is writable for `len` bytes.
    unsafe {
        copy_volatile(from, to, len);
    }
}

/// Sets `len` bytes of memory that other threads and processes may access concurrently to `value`.
///
/// # Safety
/// `to` is writable for `len` bytes by this process, as raw memory.
pub(super) unsafe fn fill(to: *mut u8, value: u8, len: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: the caller of `fill` guarantees that `to` is writable for `len` bytes; the ABI guarantees a clear
    // direction flag.
    unsafe {
        std::arch::asm!(
            "rep stosb",
            inout("rcx") len => _,
            inout("rdi") to => _,
            in("al") value,
            options(nostack, preserves_flags)
        );
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    // SAFETY: the caller of `fill` guarantees that `to` is writable for `len` bytes.
    unsafe {
        fill_volatile(to, value, len);
    }
}

const WORD: usize = size_of::<u64>();

/// Copies `len` bytes with volatile accesses: the portable form of [`copy`].
///
/// # Safety
/// As [`copy`].
#[cfg_attr(
    all(target_arch = "x86_64", not(miri), not(test)),
    expect(dead_code, reason = "the portable form")
)]
unsafe fn copy_volatile(from: *const u8, to: *mut u8, len: usize) {
    let mut at = 0;
    // Whole words are copied only if both addresses have the same misalignment, since a volatile access must be
    // aligned.
    if from.addr() % WORD == to.addr() % WORD {
        let head = from.align_offset(WORD).min(len);
        // SAFETY: `head` is at most `len`, and the caller guarantees that `from` is readable and `to` is writable for
        // `len` bytes.
        unsafe { copy_bytes(from, to, 0, head) };
        at = head;
        while len - at >= WORD {
            // SAFETY: `at + WORD <= len`, so the address is within the `len` bytes at `from`.
            let source = unsafe { from.add(at) };
            // SAFETY: `at + WORD <= len`, so the address is within the `len` bytes at `to`.
            let target = unsafe { to.add(at) };
            // SAFETY: a whole word at `source` is in range, and `source` is aligned after the `head` bytes.
            let word = unsafe { source.cast::<u64>().read_volatile() };
            // SAFETY: a whole word at `target` is in range, and `target` is aligned after the `head` bytes, since
            // both addresses have the same misalignment.
            unsafe { target.cast::<u64>().write_volatile(word) };
            at += WORD;
        }
    }
    // SAFETY: `at` is at most `len`, and the caller guarantees that `from` is readable and `to` is writable for `len`
    // bytes.
    unsafe { copy_bytes(from, to, at, len) };
}

/// Copies the bytes `start..end` one by one with volatile accesses.
///
/// # Safety
/// `start..end` is within the ranges that the caller of [`copy`] guarantees.
unsafe fn copy_bytes(from: *const u8, to: *mut u8, start: usize, end: usize) {
    for at in start..end {
        // SAFETY: `at` is in `start..end`, which is within the bytes at `from`, as the caller of `copy_bytes`
        // guarantees.
        let source = unsafe { from.add(at) };
        // SAFETY: `at` is in `start..end`, which is within the bytes at `to`, as the caller of `copy_bytes`
        // guarantees.
        let target = unsafe { to.add(at) };
        // SAFETY: `source` is in range, and a byte is always aligned.
        let byte = unsafe { source.read_volatile() };
        // SAFETY: `target` is in range, and a byte is always aligned.
        unsafe { target.write_volatile(byte) };
    }
}

/// Sets `len` bytes with volatile accesses: the portable form of [`fill`].
///
/// # Safety
/// As [`fill`].
#[cfg_attr(
    all(target_arch = "x86_64", not(miri), not(test)),
    expect(dead_code, reason = "the portable form")
)]
unsafe fn fill_volatile(to: *mut u8, value: u8, len: usize) {
    for at in 0..len {
        // SAFETY: `at` is less than `len`, and the caller guarantees that `to` is writable for `len` bytes.
        let target = unsafe { to.add(at) };
        // SAFETY: `target` is in range, and a byte is always aligned.
        unsafe { target.write_volatile(value) };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The maximum length of the copies in these tests. Miri is several hundred times slower than native code.
    const MAX_LEN: usize = if cfg!(miri) { 40 } else { 200 };

    type Copy = unsafe fn(*const u8, *mut u8, usize);
    type Fill = unsafe fn(*mut u8, u8, usize);

    proptest! {
        #[test]
        fn shared_copies_equal_a_plain_copy(
            source in proptest::collection::vec(any::<u8>(), 0..MAX_LEN),
            start in 0_usize..9,
            shift in 0_usize..9,
        ) {
            let from = start.min(source.len());
            let expected = &source[from..];
            for copy in [copy as Copy, copy_volatile as Copy] {
                let mut target = vec![0xAA; shift + expected.len() + 8];
                let to = target[shift..].as_mut_ptr();
                // SAFETY: `to` points to the length of `expected` plus eight writable bytes.
                unsafe { copy(expected.as_ptr(), to, expected.len()) };
                prop_assert!(target[..shift].iter().all(|&byte| byte == 0xAA));
                prop_assert_eq!(&target[shift..shift + expected.len()], expected);
                prop_assert_eq!(&target[shift + expected.len()..], &[0xAA; 8]);
            }
        }

        #[test]
        fn shared_fills_set_exactly_their_range(len in 0_usize..MAX_LEN / 2, shift in 0_usize..9, value: u8) {
            for fill in [fill as Fill, fill_volatile as Fill] {
                let mut target = vec![!value; shift + len + 8];
                let to = target[shift..].as_mut_ptr();
                // SAFETY: `to` points to `len + 8` writable bytes.
                unsafe { fill(to, value, len) };
                let outside = target[..shift].iter().chain(&target[shift + len..]);
                prop_assert!(outside.copied().all(|byte| byte == !value));
                prop_assert!(target[shift..shift + len].iter().all(|&byte| byte == value));
            }
        }
    }

    #[test]
    fn an_overlapping_copy_to_a_lower_address_preserves_every_byte() {
        for copy in [copy as Copy, copy_volatile as Copy] {
            let mut bytes: Vec<u8> = (0..64).collect();
            let at = bytes.as_mut_ptr();
            let from = at.wrapping_add(8);
            // SAFETY: both ranges are within the 64 bytes, and the target is below the source.
            unsafe { copy(from, at, 56) };
            assert!(bytes[..56].iter().copied().eq(8..64));
        }
    }
}
