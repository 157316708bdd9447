//! The CPU operations of a reduction: loads and stores of blocks of shared memory, and conversions of 16-bit floats.

use std::mem::MaybeUninit;

use half::{bf16, f16};

use super::halves::{narrow_pairs, widen_pairs};
use crate::cpu::copy;

/// A set of CPU instructions.
pub(super) trait Machine {
    /// Loads elements of 16 bytes, or of a multiple of 32 bytes.
    ///
    /// # Safety
    /// `from` is readable for `COUNT` elements of which any bits are one, as raw memory that others may write concurrently;
    /// the CPU has these instructions.
    unsafe fn load<T: Copy, const COUNT: usize>(from: *const u8) -> [T; COUNT];

    /// Stores elements of 16 bytes, or of a multiple of 32.
    ///
    /// # Safety
    /// As [`load`](Self::load), and writable.
    unsafe fn store<T: Copy, const COUNT: usize>(elements: [T; COUNT], to: *mut u8);

    /// Stores elements, bypassing the caches.
    ///
    /// # Safety
    /// As [`store`](Self::store); they take a multiple of 32 bytes, and `to` is one too.
    unsafe fn stream<T: Copy, const COUNT: usize>(elements: [T; COUNT], to: *mut u8);

    /// Loads the first `len` of 16 bytes of elements. The others are zero.
    ///
    /// # Safety
    /// As [`load`](Self::load), for `len` bytes, which are fewer than 16.
    unsafe fn load_some<T: Copy, const COUNT: usize>(from: *const u8, len: usize) -> [T; COUNT];

    /// Stores the first `len` of 16 bytes of elements.
    ///
    /// # Safety
    /// As [`store`](Self::store), for `len` bytes, which are fewer than 16.
    unsafe fn store_some<T: Copy, const COUNT: usize>(elements: [T; COUNT], to: *mut u8, len: usize);

    /// Loads halves, and widens them.
    ///
    /// # Safety
    /// As [`load`](Self::load).
    #[inline(always)]
    unsafe fn load_halves<const COUNT: usize>(from: *const u8) -> [f32; COUNT] {
        // SAFETY: passed on from the caller.
        Self::widen_halves(unsafe { Self::load::<f16, COUNT>(from) })
    }

    /// The same values in single precision.
    fn widen_halves<const COUNT: usize>(halves: [f16; COUNT]) -> [f32; COUNT];

    /// The nearest halves.
    fn narrow_to_halves<const COUNT: usize>(singles: [f32; COUNT]) -> [f16; COUNT];

    /// The same values in single precision. They are taken in pairs, as words of 32 bits: first come the lower halves of
    /// all words, then the upper ones, so that nothing has to change its place in a register.
    fn widen_upper_halves<const COUNT: usize>(halves: [bf16; COUNT]) -> [f32; COUNT];

    /// The nearest to singles in that order, of which every NaN is the same.
    fn narrow_to_upper_halves<const COUNT: usize>(singles: [f32; COUNT]) -> [bf16; COUNT];
}

/// Any CPU: shared memory is copied, and the compiler chooses the instructions for the copies.
pub(super) struct Any;

impl Machine for Any {
    #[inline(always)]
    unsafe fn load<T: Copy, const COUNT: usize>(from: *const u8) -> [T; COUNT] {
        let mut elements = MaybeUninit::<[T; COUNT]>::uninit();
        // SAFETY: the caller guarantees that `from` is readable for the elements; `elements` is a local of the same length.
        unsafe { copy::machine::any(from, elements.as_mut_ptr().cast(), size_of::<[T; COUNT]>()) };
        // SAFETY: every byte was written, and any bits are an element.
        unsafe { elements.assume_init() }
    }

    #[inline(always)]
    unsafe fn store<T: Copy, const COUNT: usize>(elements: [T; COUNT], to: *mut u8) {
        // SAFETY: the caller guarantees that `to` is writable for the elements; `elements` is a local of the same length.
        unsafe { copy::machine::any(elements.as_ptr().cast(), to, size_of::<[T; COUNT]>()) }
    }

    #[inline(always)]
    unsafe fn stream<T: Copy, const COUNT: usize>(elements: [T; COUNT], to: *mut u8) {
        // SAFETY: passed on from the caller.
        unsafe { Self::store(elements, to) }
    }

    #[inline(always)]
    unsafe fn load_some<T: Copy, const COUNT: usize>(from: *const u8, len: usize) -> [T; COUNT] {
        const { assert!(size_of::<[T; COUNT]>() == 16) };
        let mut elements = MaybeUninit::<[T; COUNT]>::zeroed();
        // SAFETY: the caller guarantees that `from` is readable for `len` bytes, fewer than the 16 of the local `elements`.
        unsafe { copy::machine::any(from, elements.as_mut_ptr().cast(), len) };
        // SAFETY: every byte was written, and any bits are an element.
        unsafe { elements.assume_init() }
    }

    #[inline(always)]
    unsafe fn store_some<T: Copy, const COUNT: usize>(elements: [T; COUNT], to: *mut u8, len: usize) {
        const { assert!(size_of::<[T; COUNT]>() == 16) };
        // SAFETY: the caller guarantees that `to` is writable for `len` bytes, fewer than the 16 of the local `elements`.
        unsafe { copy::machine::any(elements.as_ptr().cast(), to, len) }
    }

    #[inline(always)]
    fn widen_halves<const COUNT: usize>(halves: [f16; COUNT]) -> [f32; COUNT] {
        halves.map(f16::to_f32)
    }

    #[inline(always)]
    fn narrow_to_halves<const COUNT: usize>(singles: [f32; COUNT]) -> [f16; COUNT] {
        singles.map(f16::from_f32)
    }

    #[inline(always)]
    fn widen_upper_halves<const COUNT: usize>(halves: [bf16; COUNT]) -> [f32; COUNT] {
        widen_pairs(halves)
    }

    #[inline(always)]
    fn narrow_to_upper_halves<const COUNT: usize>(singles: [f32; COUNT]) -> [bf16; COUNT] {
        narrow_pairs(singles)
    }
}
