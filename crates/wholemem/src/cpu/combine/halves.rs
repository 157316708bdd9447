//! Reductions of 16-bit floats, whose elements are combined in single precision.

use half::{bf16, f16};

use super::reduce_element::ReduceElement;
use super::vector_isa::VectorIsa;

impl ReduceElement for f16 {
    type Accumulator = f32;

    #[inline(always)]
    unsafe fn load<M: VectorIsa, const COUNT: usize>(from: *const u8) -> [f32; COUNT] {
        // SAFETY: the caller of `load` guarantees that `from` is readable for `COUNT` elements and that the CPU supports the
        // instruction set `M`.
        unsafe { M::load_halves(from) }
    }

    #[inline(always)]
    unsafe fn widen<M: VectorIsa, const COUNT: usize>(elements: [Self; COUNT]) -> [f32; COUNT] {
        // SAFETY: the caller of `widen` guarantees that the CPU supports the instruction set `M`.
        unsafe { M::widen_halves(elements) }
    }

    #[inline(always)]
    unsafe fn narrow<M: VectorIsa, const COUNT: usize>(totals: [f32; COUNT]) -> [Self; COUNT] {
        // SAFETY: the caller of `narrow` guarantees that the CPU supports the instruction set `M`.
        let totals = unsafe { f32::narrow::<M, COUNT>(totals) };
        // SAFETY: the caller of `narrow` guarantees that the CPU supports the instruction set `M`.
        unsafe { M::narrow_to_halves(totals) }
    }
}

impl ReduceElement for bf16 {
    type Accumulator = f32;

    #[inline(always)]
    unsafe fn widen<M: VectorIsa, const COUNT: usize>(elements: [Self; COUNT]) -> [f32; COUNT] {
        // SAFETY: the caller of `widen` guarantees that the CPU supports the instruction set `M`.
        unsafe { M::widen_upper_halves(elements) }
    }

    #[inline(always)]
    unsafe fn narrow<M: VectorIsa, const COUNT: usize>(totals: [f32; COUNT]) -> [Self; COUNT] {
        // SAFETY: the caller of `narrow` guarantees that the CPU supports the instruction set `M`.
        let totals = unsafe { f32::narrow::<M, COUNT>(totals) };
        // SAFETY: the caller of `narrow` guarantees that the CPU supports the instruction set `M`.
        unsafe { M::narrow_to_upper_halves(totals) }
    }
}

/// A mask of the upper 16 bits of a 32-bit word.
const UPPER: u32 = 0xffff_0000;

/// Implements [`VectorIsa::widen_upper_halves`] for any CPU.
#[inline(always)]
pub(super) fn widen_pairs<const COUNT: usize>(elements: [bf16; COUNT]) -> [f32; COUNT] {
    const { assert!(COUNT.is_multiple_of(2)) };
    let mut totals = [0.0; COUNT];
    for at in 0..COUNT / 2 {
        // SAFETY: `at` is less than `COUNT / 2`, so the pair of elements is within `elements`.
        let word = unsafe { elements.as_ptr().cast::<u32>().wrapping_add(at).read_unaligned() };
        totals[at] = f32::from_bits(word << 16);
        totals[COUNT / 2 + at] = f32::from_bits(word & UPPER);
    }
    totals
}

/// Implements [`VectorIsa::narrow_to_upper_halves`] for any CPU.
#[inline(always)]
pub(super) fn narrow_pairs<const COUNT: usize>(totals: [f32; COUNT]) -> [bf16; COUNT] {
    const { assert!(COUNT.is_multiple_of(2)) };
    let mut elements = [bf16::ZERO; COUNT];
    for at in 0..COUNT / 2 {
        let (lower, upper) = (rounded(totals[at]), rounded(totals[COUNT / 2 + at]));
        let place = elements.as_mut_ptr().cast::<u32>().wrapping_add(at);
        // SAFETY: `at` is less than `COUNT / 2`, so the pair of elements is within `elements`.
        unsafe { place.write_unaligned(lower >> 16 | upper & UPPER) };
    }
    elements
}

/// Rounds a float to a bfloat16 in the upper 16 bits of the result, to nearest with ties to even. Values beyond the largest
/// finite bfloat16 become infinity. The canonical NaN has zeros in its lower bits, so it is unchanged.
#[inline(always)]
fn rounded(total: f32) -> u32 {
    let bits = total.to_bits();
    bits + 0x7fff + (bits >> 16 & 1)
}
