//! The interface to vector instructions for reductions: loads and stores of blocks of shared memory, and conversions of 16-bit
//! floats.

use std::mem::MaybeUninit;

use half::{bf16, f16};

use super::halves::{narrow_pairs, widen_pairs};
use crate::cpu::copy;

/// A set of vector instructions.
pub(super) trait VectorIsa {
    /// Loads elements of 16 bytes, or of a multiple of 32 bytes.
    ///
    /// # Safety
    /// `from` is readable for `COUNT` elements, for which every bit pattern is valid, as raw memory that others may write
    /// concurrently; the CPU has these instructions.
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

    /// Loads half-precision floats, and converts them to single precision.
    ///
    /// # Safety
    /// As [`load`](Self::load).
    #[inline(always)]
    unsafe fn load_halves<const COUNT: usize>(from: *const u8) -> [f32; COUNT] {
        // SAFETY: the caller guarantees the same preconditions.
        Self::widen_halves(unsafe { Self::load::<f16, COUNT>(from) })
    }

    /// Converts half-precision floats to single precision.
    fn widen_halves<const COUNT: usize>(halves: [f16; COUNT]) -> [f32; COUNT];

    /// Rounds to the nearest half-precision floats.
    fn narrow_to_halves<const COUNT: usize>(singles: [f32; COUNT]) -> [f16; COUNT];

    /// Converts bfloat16 to single precision. The result has another order, so that no element moves between lanes of a register:
    /// the elements are words of 32 bits with two elements each; the lower halves of all words come first, then the upper halves.
    fn widen_upper_halves<const COUNT: usize>(halves: [bf16; COUNT]) -> [f32; COUNT];

    /// Rounds to the nearest bfloat16, from the order of [`widen_upper_halves`](Self::widen_upper_halves). Every NaN of the input
    /// is the canonical NaN.
    fn narrow_to_upper_halves<const COUNT: usize>(singles: [f32; COUNT]) -> [bf16; COUNT];
}

/// The implementation for any CPU: copies of shared memory, for which the compiler chooses the instructions.
pub(super) struct PortableIsa;

impl VectorIsa for PortableIsa {
    #[inline(always)]
    unsafe fn load<T: Copy, const COUNT: usize>(from: *const u8) -> [T; COUNT] {
        let mut elements = MaybeUninit::<[T; COUNT]>::uninit();
        // SAFETY: the caller guarantees that `from` is readable for the elements; `elements` is a local of the same length.
        unsafe { copy::native::any(from, elements.as_mut_ptr().cast(), size_of::<[T; COUNT]>()) };
        // SAFETY: every byte was written, and every bit pattern is a valid element.
        unsafe { elements.assume_init() }
    }

    #[inline(always)]
    unsafe fn store<T: Copy, const COUNT: usize>(elements: [T; COUNT], to: *mut u8) {
        // SAFETY: the caller guarantees that `to` is writable for the elements; `elements` is a local of the same length.
        unsafe { copy::native::any(elements.as_ptr().cast(), to, size_of::<[T; COUNT]>()) }
    }

    #[inline(always)]
    unsafe fn stream<T: Copy, const COUNT: usize>(elements: [T; COUNT], to: *mut u8) {
        // SAFETY: the caller guarantees the same preconditions.
        unsafe { Self::store(elements, to) }
    }

    #[inline(always)]
    unsafe fn load_some<T: Copy, const COUNT: usize>(from: *const u8, len: usize) -> [T; COUNT] {
        const { assert!(size_of::<[T; COUNT]>() == 16) };
        let mut elements = MaybeUninit::<[T; COUNT]>::zeroed();
        // SAFETY: the caller guarantees that `from` is readable for `len` bytes, fewer than the 16 of the local `elements`.
        unsafe { copy::native::any(from, elements.as_mut_ptr().cast(), len) };
        // SAFETY: every byte was written, and every bit pattern is a valid element.
        unsafe { elements.assume_init() }
    }

    #[inline(always)]
    unsafe fn store_some<T: Copy, const COUNT: usize>(elements: [T; COUNT], to: *mut u8, len: usize) {
        const { assert!(size_of::<[T; COUNT]>() == 16) };
        // SAFETY: the caller guarantees that `to` is writable for `len` bytes, fewer than the 16 of the local `elements`.
        unsafe { copy::native::any(elements.as_ptr().cast(), to, len) }
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
