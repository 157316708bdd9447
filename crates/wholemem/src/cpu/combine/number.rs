//! The arithmetic of a reduction, without branches, so that the compiler vectorizes it.

use super::machine::Machine;

/// An element type, and the type in which its elements are combined.
pub(super) trait Number: Copy {
    type Total: Copy;

    /// Loads elements and widens them.
    ///
    /// # Safety
    /// As [`Machine::load`].
    #[inline(always)]
    unsafe fn load<M: Machine, const COUNT: usize>(from: *const u8) -> [Self::Total; COUNT] {
        // SAFETY: passed on from the caller.
        Self::widen::<M, COUNT>(unsafe { M::load(from) })
    }

    /// The same values in the type in which they are combined, in an order that [`narrow`](Self::narrow) reverses.
    fn widen<M: Machine, const COUNT: usize>(elements: [Self; COUNT]) -> [Self::Total; COUNT];

    /// The nearest elements. Every NaN becomes the canonical NaN.
    fn narrow<M: Machine, const COUNT: usize>(totals: [Self::Total; COUNT]) -> [Self; COUNT];
}

/// The operations of every type in which elements are combined.
pub(super) trait Arithmetic: Copy {
    fn plus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    fn least(self, other: Self) -> Self;
    fn most(self, other: Self) -> Self;
    fn over(self, ranks: usize) -> Self;
}

/// The additional operations of integers.
pub(super) trait Bits: Copy {
    fn and(self, other: Self) -> Self;
    fn or(self, other: Self) -> Self;
    fn xor(self, other: Self) -> Self;
}

/// One of the operations.
pub(super) trait Operation<T> {
    /// What has been combined so far, with the next value.
    fn with(total: T, next: T) -> T;

    /// The result, when all ranks have been combined.
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
    ($($Operation:ident: $can:ident, $method:ident;)*) => {$(
        impl<T: $can> Operation<T> for $Operation {
            #[inline(always)]
            fn with(total: T, next: T) -> T {
                total.$method(next)
            }
        }
    )*};
}

operations! {
    Sum: Arithmetic, plus;
    Min: Arithmetic, least;
    Max: Arithmetic, most;
    Prod: Arithmetic, times;
    And: Bits, and;
    Or: Bits, or;
    Xor: Bits, xor;
}

impl<T: Arithmetic> Operation<T> for Avg {
    #[inline(always)]
    fn with(total: T, next: T) -> T {
        total.plus(next)
    }

    #[inline(always)]
    fn of_all(total: T, ranks: usize) -> T {
        total.over(ranks)
    }
}

macro_rules! integers {
    ($($type:ident by $divisor:ident)*) => {$(
        impl Number for $type {
            type Total = Self;

            #[inline(always)]
            fn widen<M: Machine, const COUNT: usize>(elements: [Self; COUNT]) -> [Self; COUNT] {
                elements
            }

            #[inline(always)]
            fn narrow<M: Machine, const COUNT: usize>(totals: [Self; COUNT]) -> [Self; COUNT] {
                totals
            }
        }

        impl Arithmetic for $type {
            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn times(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            #[inline(always)]
            fn least(self, other: Self) -> Self {
                self.min(other)
            }

            #[inline(always)]
            fn most(self, other: Self) -> Self {
                self.max(other)
            }

            #[inline(always)]
            #[expect(clippy::allow_attributes, reason = "the casts are none for some of the types")]
            #[allow(clippy::cast_possible_truncation, reason = "a quotient is no larger; ranks are not billions")]
            #[allow(clippy::cast_possible_wrap, reason = "the bits are what counts")]
            fn over(self, ranks: usize) -> Self {
                // There may be more ranks than the type can count.
                ($divisor::from(self) / ranks as $divisor) as Self
            }
        }

        impl Bits for $type {
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
        impl Number for $type {
            type Total = Self;

            #[inline(always)]
            fn widen<M: Machine, const COUNT: usize>(elements: [Self; COUNT]) -> [Self; COUNT] {
                elements
            }

            #[inline(always)]
            fn narrow<M: Machine, const COUNT: usize>(totals: [Self; COUNT]) -> [Self; COUNT] {
                one_nan(totals, Self::is_nan, Self::NAN)
            }
        }

        impl Arithmetic for $type {
            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                self + other
            }

            #[inline(always)]
            fn times(self, other: Self) -> Self {
                self * other
            }

            /// Asked both ways, each of the questions has one of the equal values for an answer, or of any values if one of
            /// them is a NaN. Their bits together are -0 if one of the zeros is, and NaN if one of the values is.
            #[inline(always)]
            fn least(self, other: Self) -> Self {
                let one = if self < other { self } else { other };
                let same = if other < self { other } else { self };
                Self::from_bits(one.to_bits() | same.to_bits())
            }

            /// The bits that both answers have are +0 if one of the zeros is, but nothing at all of a NaN.
            #[inline(always)]
            fn most(self, other: Self) -> Self {
                let one = if self > other { self } else { other };
                let same = if other > self { other } else { self };
                let nan = if self.is_nan() | other.is_nan() { !0 } else { 0 };
                Self::from_bits(one.to_bits() & same.to_bits() | nan)
            }

            #[inline(always)]
            fn over(self, ranks: usize) -> Self {
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
