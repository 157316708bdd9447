//! The arithmetic of reductions on the CPU. It has no branches, so that the compiler vectorizes it.

use super::vector_isa::VectorIsa;

/// An element type of reductions, with the accumulator type in which its elements are combined.
pub(super) trait ReduceElement: Copy {
    type Accumulator: Copy;

    /// Loads elements and converts them to the accumulator type.
    ///
    /// # Safety
    /// As [`VectorIsa::load`].
    #[inline(always)]
    unsafe fn load<M: VectorIsa, const COUNT: usize>(from: *const u8) -> [Self::Accumulator; COUNT] {
        // SAFETY: the caller of `load` guarantees that `from` is readable for `COUNT` elements and that the CPU supports the
        // instruction set `M`.
        let elements = unsafe { M::load(from) };
        // SAFETY: the caller of `load` guarantees that the CPU supports the instruction set `M`.
        unsafe { Self::widen::<M, COUNT>(elements) }
    }

    /// Converts elements to the accumulator type, possibly in another order, which [`narrow`](Self::narrow) reverses.
    ///
    /// # Safety
    /// The CPU supports the instruction set `M`.
    unsafe fn widen<M: VectorIsa, const COUNT: usize>(elements: [Self; COUNT]) -> [Self::Accumulator; COUNT];

    /// Rounds accumulators to the nearest values of the element type. Every NaN becomes the canonical NaN.
    ///
    /// # Safety
    /// The CPU supports the instruction set `M`.
    unsafe fn narrow<M: VectorIsa, const COUNT: usize>(totals: [Self::Accumulator; COUNT]) -> [Self; COUNT];
}

/// The arithmetic operations that every accumulator type has.
pub(super) trait Arithmetic: Copy {
    fn add(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    fn minimum(self, other: Self) -> Self;
    fn maximum(self, other: Self) -> Self;
    fn divide(self, ranks: usize) -> Self;
}

/// The bitwise operations that integer types have.
pub(super) trait BitwiseOps: Copy {
    fn and(self, other: Self) -> Self;
    fn or(self, other: Self) -> Self;
    fn xor(self, other: Self) -> Self;
}

/// A reduction operation as a type, which combines one value after the other.
pub(super) trait ReduceOperation<T> {
    /// Combines the accumulator of the previous values with the next value.
    fn with(total: T, next: T) -> T;

    /// Computes the result of the reduction after the values of all ranks have been combined.
    #[inline(always)]
    fn of_all(total: T, _ranks: usize) -> T {
        total
    }
}

pub(super) struct Sum;
pub(super) struct Avg;
pub(super) struct Min;
pub(super) struct Max;
pub(super) struct Prod;
pub(super) struct And;
pub(super) struct Or;
pub(super) struct Xor;

macro_rules! operations {
    ($($ReduceOperation:ident: $can:ident, $method:ident;)*) => {$(
        impl<T: $can> ReduceOperation<T> for $ReduceOperation {
            #[inline(always)]
            fn with(total: T, next: T) -> T {
                total.$method(next)
            }
        }
    )*};
}

operations! {
    Sum: Arithmetic, add;
    Min: Arithmetic, minimum;
    Max: Arithmetic, maximum;
    Prod: Arithmetic, multiply;
    And: BitwiseOps, and;
    Or: BitwiseOps, or;
    Xor: BitwiseOps, xor;
}

impl<T: Arithmetic> ReduceOperation<T> for Avg {
    #[inline(always)]
    fn with(total: T, next: T) -> T {
        total.add(next)
    }

    #[inline(always)]
    fn of_all(total: T, ranks: usize) -> T {
        total.divide(ranks)
    }
}

macro_rules! integers {
    ($($type:ident by $divisor:ident)*) => {$(
        impl ReduceElement for $type {
            type Accumulator = Self;

            #[inline(always)]
            unsafe fn widen<M: VectorIsa, const COUNT: usize>(elements: [Self; COUNT]) -> [Self; COUNT] {
                elements
            }

            #[inline(always)]
            unsafe fn narrow<M: VectorIsa, const COUNT: usize>(totals: [Self; COUNT]) -> [Self; COUNT] {
                totals
            }
        }

        impl Arithmetic for $type {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn multiply(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            #[inline(always)]
            fn minimum(self, other: Self) -> Self {
                self.min(other)
            }

            #[inline(always)]
            fn maximum(self, other: Self) -> Self {
                self.max(other)
            }

            #[inline(always)]
            #[expect(clippy::allow_attributes, reason = "the cast changes nothing for some of the types")]
            #[allow(clippy::cast_possible_truncation, reason = "a quotient is not larger than the dividend, and there are fewer than 2^31 ranks")]
            #[allow(clippy::cast_possible_wrap, reason = "only the bits matter")]
            fn divide(self, ranks: usize) -> Self {
                // The number of ranks may not fit in the element type, so the division uses a wider type.
                ($divisor::from(self) / ranks as $divisor) as Self
            }
        }

        impl BitwiseOps for $type {
            #[inline(always)]
            fn and(self, other: Self) -> Self {
                self & other
            }

            #[inline(always)]
            fn or(self, other: Self) -> Self {
                self | other
            }

            #[inline(always)]
            fn xor(self, other: Self) -> Self {
                self ^ other
            }
        }
    )*};
}

integers!(u8 by u32 i8 by i32 u16 by u32 i16 by i32 u32 by u32 i32 by i32 u64 by u64 i64 by i64);

macro_rules! floats {
    ($($type:ident)*) => {$(
        impl ReduceElement for $type {
            type Accumulator = Self;

            #[inline(always)]
            unsafe fn widen<M: VectorIsa, const COUNT: usize>(elements: [Self; COUNT]) -> [Self; COUNT] {
                elements
            }

            #[inline(always)]
            unsafe fn narrow<M: VectorIsa, const COUNT: usize>(totals: [Self; COUNT]) -> [Self; COUNT] {
                one_nan(totals, Self::is_nan, Self::NAN)
            }
        }

        impl Arithmetic for $type {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self + other
            }

            #[inline(always)]
            fn multiply(self, other: Self) -> Self {
                self * other
            }

            /// Returns the smaller value, selected with both orders of operands. For zeros of different sign, and for NaN, the
            /// two selections return different operands. Their bitwise OR is -0 if one zero is -0, and NaN if one value is NaN.
            #[inline(always)]
            fn minimum(self, other: Self) -> Self {
                let one = if self < other { self } else { other };
                let same = if other < self { other } else { self };
                Self::from_bits(one.to_bits() | same.to_bits())
            }

            /// Returns the larger value, computed like `minimum` but with bitwise AND, which is +0 if one zero is +0. NaN needs a
            /// separate selection.
            #[inline(always)]
            fn maximum(self, other: Self) -> Self {
                let one = if self > other { self } else { other };
                let same = if other > self { other } else { self };
                let nan = if self.is_nan() | other.is_nan() { !0 } else { 0 };
                Self::from_bits(one.to_bits() & same.to_bits() | nan)
            }

            #[inline(always)]
            fn divide(self, ranks: usize) -> Self {
                self / ranks as Self
            }
        }
    )*};
}

floats!(f32 f64);

#[inline(always)]
fn one_nan<T: Copy, const COUNT: usize>(
    mut values: [T; COUNT],
    is_nan: impl Fn(T) -> bool,
    nan: T,
) -> [T; COUNT] {
    for value in &mut values {
        *value = if is_nan(*value) { nan } else { *value };
    }
    values
}
