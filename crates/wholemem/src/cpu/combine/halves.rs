//! 16-bit floats, which are combined in single precision.

use half::{bf16, f16};

use super::machine::Machine;
use super::number::Number;

impl Number for f16 {
    type Total = f32;

    #[inline(always)]
    unsafe fn load<M: Machine, const COUNT: usize>(from: *const u8) -> [f32; COUNT] {
        // SAFETY: passed on from the caller.
        unsafe { M::load_halves(from) }
    }

    #[inline(always)]
    fn widen<M: Machine, const COUNT: usize>(elements: [Self; COUNT]) -> [f32; COUNT] {
        M::widen_halves(elements)
    }

    #[inline(always)]
    fn narrow<M: Machine, const COUNT: usize>(totals: [f32; COUNT]) -> [Self; COUNT] {
        M::narrow_to_halves(f32::narrow::<M, COUNT>(totals))
    }
}

impl Number for bf16 {
    type Total = f32;

    #[inline(always)]
    fn widen<M: Machine, const COUNT: usize>(elements: [Self; COUNT]) -> [f32; COUNT] {
        M::widen_upper_halves(elements)
    }

    #[inline(always)]
    fn narrow<M: Machine, const COUNT: usize>(totals: [f32; COUNT]) -> [Self; COUNT] {
        M::narrow_to_upper_halves(f32::narrow::<M, COUNT>(totals))
    }
}

/// The upper half of a word.
const UPPER: u32 = 0xffff_0000;

/// [`Machine::widen_upper_halves`], on any processor.
#[inline(always)]
pub(super) fn widen_pairs<const COUNT: usize>(elements: [bf16; COUNT]) -> [f32; COUNT] {
    const { assert!(COUNT.is_multiple_of(2)) };
    let mut totals = [0.0; COUNT];
    for at in 0..COUNT / 2 {
        // SAFETY: two of the elements.
        let word = unsafe { elements.as_ptr().cast::<u32>().wrapping_add(at).read_unaligned() };
        totals[at] = f32::from_bits(word << 16);
        totals[COUNT / 2 + at] = f32::from_bits(word & UPPER);
    }
    totals
}

/// [`Machine::narrow_to_upper_halves`], on any processor.
#[inline(always)]
pub(super) fn narrow_pairs<const COUNT: usize>(totals: [f32; COUNT]) -> [bf16; COUNT] {
    const { assert!(COUNT.is_multiple_of(2)) };
    let mut elements = [bf16::ZERO; COUNT];
    for at in 0..COUNT / 2 {
        let (lower, upper) = (rounded(totals[at]), rounded(totals[COUNT / 2 + at]));
        let place = elements.as_mut_ptr().cast::<u32>().wrapping_add(at);
        // SAFETY: two of the elements.
        unsafe { place.write_unaligned(lower >> 16 | upper & UPPER) };
    }
    elements
}

/// Bits whose upper half is the nearest to a total. It is the upper half of the total, unless there is more than a middle
/// behind it; a middle goes to the even one. Beyond the largest number there is infinity. The one NaN has nothing behind
/// it.
#[inline(always)]
fn rounded(total: f32) -> u32 {
    let bits = total.to_bits();
    bits + 0x7fff + (bits >> 16 & 1)
}
