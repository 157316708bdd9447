//! The interface to vector instructions for reductions: loads and stores of blocks of elements in shared memory, and conversions
//! of 16-bit floats.

use std::mem::MaybeUninit;

use half::{bf16, f16};

use super::halves::{narrow_pairs, widen_pairs};
use crate::cpu::copy;

/// A set of vector instructions with which reductions load, convert and store elements.
pub(super) trait VectorIsa {
    /// Loads `COUNT` elements, which have 16 bytes or a multiple of 32 bytes.
    ///
    /// # Safety
    /// `from` is readable for `COUNT` elements, for which every bit pattern is valid, as raw memory that others may write
    /// concurrently; the CPU supports this instruction set.
    unsafe fn load<T: Copy, const COUNT: usize>(from: *const u8) -> [T; COUNT];

    /// Stores `COUNT` elements, which have 16 bytes or a multiple of 32 bytes.
    ///
    /// # Safety
    /// As [`load`](Self::load), and writable.
    unsafe fn store<T: Copy, const COUNT: usize>(elements: [T; COUNT], to: *mut u8);

    /// Stores `COUNT` elements with stores that bypass the caches.
    ///
    /// # Safety
    /// As [`store`](Self::store); the elements have a multiple of 32 bytes, and `to` is aligned to 32 bytes.
    unsafe fn stream<T: Copy, const COUNT: usize>(elements: [T; COUNT], to: *mut u8);

    /// Loads the first `len` bytes of 16 bytes of elements. The other bytes are zero.
    ///
    /// # Safety
    /// As [`load`](Self::load), for `len` bytes, which are fewer than 16.
    unsafe fn load_some<T: Copy, const COUNT: usize>(from: *const u8, len: usize) -> [T; COUNT];

    /// Stores the first `len` bytes of 16 bytes of elements.
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
        // SAFETY: the caller of `load_halves` guarantees that `from` is readable for `COUNT` elements and that the CPU supports
        // this instruction set.
        let halves = unsafe { Self::load::<f16, COUNT>(from) };
        // SAFETY: the caller of `load_halves` guarantees that the CPU supports this instruction set.
        unsafe { Self::widen_halves(halves) }
    }

    /// Converts half-precision floats to single precision.
    ///
    /// # Safety
    /// The CPU supports this instruction set.
    unsafe fn widen_halves<const COUNT: usize>(halves: [f16; COUNT]) -> [f32; COUNT];

    /// Rounds single-precision floats to the nearest half-precision floats.
    ///
    /// # Safety
    /// The CPU supports this instruction set.
    unsafe fn narrow_to_halves<const COUNT: usize>(singles: [f32; COUNT]) -> [f16; COUNT];

    /// Converts bfloat16 to single precision. The result has another order, so that no element moves between lanes of a register:
    /// the input is read as 32-bit words with two elements each; the lower halves of all words come first in the result, then the
    /// upper halves.
    ///
    /// # Safety
    /// The CPU supports this instruction set.
    unsafe fn widen_upper_halves<const COUNT: usize>(halves: [bf16; COUNT]) -> [f32; COUNT];

    /// Rounds single-precision floats to the nearest bfloat16, and reverses the order of
    /// [`widen_upper_halves`](Self::widen_upper_halves). Every NaN of the input must be the canonical NaN.
    ///
    /// # Safety
    /// The CPU supports this instruction set.
    unsafe fn narrow_to_upper_halves<const COUNT: usize>(singles: [f32; COUNT]) -> [bf16; COUNT];
}

/// The implementation of vector operations for any CPU: copies of shared memory, for which the compiler chooses the instructions.
pub(super) struct PortableIsa;

impl VectorIsa for PortableIsa {
    #[inline(always)]
    unsafe fn load<T: Copy, const COUNT: usize>(from: *const u8) -> [T; COUNT] {
        let mut elements = MaybeUninit::<[T; COUNT]>::uninit();
        // SAFETY: the caller of `load` guarantees that `from` is readable for `COUNT` elements; `elements` is a local array of
        // the same length.
        unsafe { copy::native::any(from, elements.as_mut_ptr().cast(), size_of::<[T; COUNT]>()) };
        // SAFETY: the copy has written every byte of `elements`, and every bit pattern is a valid element.
        unsafe { elements.assume_init() }
    }

    #[inline(always)]
    unsafe fn store<T: Copy, const COUNT: usize>(elements: [T; COUNT], to: *mut u8) {
        // SAFETY: the caller of `store` guarantees that `to` is writable for `COUNT` elements; `elements` is a local array of the
        // same length.
        unsafe { copy::native::any(elements.as_ptr().cast(), to, size_of::<[T; COUNT]>()) }
    }

    #[inline(always)]
    unsafe fn stream<T: Copy, const COUNT: usize>(elements: [T; COUNT], to: *mut u8) {
        // SAFETY: the caller of `stream` guarantees that `to` is writable for `COUNT` elements, which is all that `store`
        // requires.
        unsafe { Self::store(elements, to) }
    }

    #[inline(always)]
    unsafe fn load_some<T: Copy, const COUNT: usize>(from: *const u8, len: usize) -> [T; COUNT] {
        const { assert!(size_of::<[T; COUNT]>() == 16) };
        let mut elements = MaybeUninit::<[T; COUNT]>::zeroed();
        // SAFETY: the caller of `load_some` guarantees that `from` is readable for `len` bytes and that `len` is less than 16,
        // the size of the local `elements` in bytes.
        unsafe { copy::native::any(from, elements.as_mut_ptr().cast(), len) };
        // SAFETY: every byte of `elements` is zero or copied, and every bit pattern is a valid element.
        unsafe { elements.assume_init() }
    }

    #[inline(always)]
    unsafe fn store_some<T: Copy, const COUNT: usize>(elements: [T; COUNT], to: *mut u8, len: usize) {
        const { assert!(size_of::<[T; COUNT]>() == 16) };
        // SAFETY: the caller of `store_some` guarantees that `to` is writable for `len` bytes and that `len` is less than 16, the
        // size of the local `elements` in bytes.
        unsafe { copy::native::any(elements.as_ptr().cast(), to, len) }
    }

    #[inline(always)]
    unsafe fn widen_halves<const COUNT: usize>(halves: [f16; COUNT]) -> [f32; COUNT] {
        halves.map(f16::to_f32)
    }

    #[inline(always)]
    unsafe fn narrow_to_halves<const COUNT: usize>(singles: [f32; COUNT]) -> [f16; COUNT] {
        singles.map(f16::from_f32)
    }

    #[inline(always)]
    unsafe fn widen_upper_halves<const COUNT: usize>(halves: [bf16; COUNT]) -> [f32; COUNT] {
        widen_pairs(halves)
    }

    #[inline(always)]
    unsafe fn narrow_to_upper_halves<const COUNT: usize>(singles: [f32; COUNT]) -> [bf16; COUNT] {
        narrow_pairs(singles)
    }
}
