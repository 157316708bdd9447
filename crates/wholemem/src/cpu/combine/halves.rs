//! 16-bit floats, which are combined in single precision.

use half::{bf16, f16};

use super::reduce_element::ReduceElement;
use super::vector_isa::VectorIsa;

impl ReduceElement for f16 {
    type Accumulator = f32;

    #[inline(always)]
    unsafe fn load<M: VectorIsa, const COUNT: usize>(from: *const u8) -> [f32; COUNT] {
        // SAFETY: the caller guarantees the same preconditions.
        unsafe { M::load_halves(from) }
    }

    #[inline(always)]
    fn widen<M: VectorIsa, const COUNT: usize>(elements: [Self; COUNT]) -> [f32; COUNT] {
        M::widen_halves(elements)
    }

    #[inline(always)]
    fn narrow<M: VectorIsa, const COUNT: usize>(totals: [f32; COUNT]) -> [Self; COUNT] {
        M::narrow_to_halves(f32::narrow::<M, COUNT>(totals))
    }
}

impl ReduceElement for bf16 {
    type Accumulator = f32;

    #[inline(always)]
    fn widen<M: VectorIsa, const COUNT: usize>(elements: [Self; COUNT]) -> [f32; COUNT] {
        M::widen_upper_halves(elements)
    }

    #[inline(always)]
    fn narrow<M: VectorIsa, const COUNT: usize>(totals: [f32; COUNT]) -> [Self; COUNT] {
        M::narrow_to_upper_halves(f32::narrow::<M, COUNT>(totals))
    }
}

/// The upper half of a word.
const UPPER: u32 = 0xffff_0000;

/// [`VectorIsa::widen_upper_halves`] for any CPU.
#[inline(always)]
pub(super) fn widen_pairs<const COUNT: usize>(elements: [bf16; COUNT]) -> [f32; COUNT] {
    const { assert!(COUNT.is_multiple_of(2)) };
    let mut totals = [0.0; COUNT];
    for at in 0..COUNT / 2 {
        // SAFETY: the pair is within the elements.
        let word = unsafe { elements.as_ptr().cast::<u32>().wrapping_add(at).read_unaligned() };
        totals[at] = f32::from_bits(word << 16);
        totals[COUNT / 2 + at] = f32::from_bits(word & UPPER);
    }
    totals
}

/// [`VectorIsa::narrow_to_upper_halves`] for any CPU.
#[inline(always)]
pub(super) fn narrow_pairs<const COUNT: usize>(totals: [f32; COUNT]) -> [bf16; COUNT] {
    const { assert!(COUNT.is_multiple_of(2)) };
    let mut elements = [bf16::ZERO; COUNT];
    for at in 0..COUNT / 2 {
        let (lower, upper) = (rounded(totals[at]), rounded(totals[COUNT / 2 + at]));
        let place = elements.as_mut_ptr().cast::<u32>().wrapping_add(at);
        // SAFETY: the pair is within the elements.
        unsafe { place.write_unaligned(lower >> 16 | upper & UPPER) };
    }
    elements
}

/// Rounds a float to bfloat16 in the upper 16 bits, to nearest with ties to even. Values beyond the largest finite bfloat16 become infinity.
/// The canonical NaN has zeros in its lower bits, so it is unchanged.
#[inline(always)]
fn rounded(total: f32) -> u32 {
    let bits = total.to_bits();
    bits + 0x7fff + (bits >> 16 & 1)
}
