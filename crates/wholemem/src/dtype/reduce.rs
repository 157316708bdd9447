//! Reductions of the elements of several ranks: the operations, and a naive implementation that tests compare with.
//!
//! The result is bitwise the same on every device. Ranks are combined in order, beginning with the value of rank 0. 16-bit
//! floats are combined in single precision and rounded once, at the end. Integers wrap around. An average is the sum divided by
//! the number of ranks; for integers it rounds towards zero. If a value is NaN, the result is the canonical NaN. -0 is smaller
//! than +0.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};
use zerocopy::{Immutable, IntoBytes, KnownLayout, TryFromBytes};

use super::Dtype;
use super::element::{ArithmeticElement, with_types};

/// A reduction operation, which combines the elements of all ranks.
///
/// The codes never change. Kernels and C use them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, IntoBytes, TryFromBytes, Immutable, KnownLayout)]
#[non_exhaustive]
#[repr(u32)]
pub enum ReduceOp {
    /// The sum of the elements; integers wrap around.
    Sum = 0,
    /// The sum of the elements divided by the number of ranks; for integers, the wrapped sum, divided with rounding towards zero.
    Avg = 1,
    /// The minimum of the elements, or NaN if an element is NaN. -0 is smaller than +0.
    Min = 2,
    /// The maximum of the elements, or NaN if an element is NaN. +0 is larger than -0.
    Max = 3,
    /// The product of the elements; integers wrap around.
    Prod = 4,
    /// The bitwise AND of the elements; integers only.
    And = 5,
    /// The bitwise OR of the elements; integers only.
    Or = 6,
    /// The bitwise XOR of the elements; integers only.
    Xor = 7,
}

impl ReduceOp {
    /// Every reduction operation, in the order of the operations' codes.
    pub const ALL: [Self; 8] =
        [Self::Sum, Self::Avg, Self::Min, Self::Max, Self::Prod, Self::And, Self::Or, Self::Xor];

    /// Returns the numeric code of this reduction operation.
    #[must_use]
    pub fn code(self) -> u32 {
        self as u32
    }

    /// Returns the reduction operation with the given code; `None` if there is none.
    #[must_use]
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.get(usize::try_from(code).ok()?).copied()
    }

    /// Returns true if the reduction supports an element type: bitwise operations support integers, the other operations support
    /// all numbers.
    ///
    /// ```
    /// use wholemem::{Dtype, ReduceOp};
    ///
    /// let op: ReduceOp = "xor".parse()?;
    /// assert!(op.applies_to(Dtype::U32));
    /// assert!(!op.applies_to(Dtype::F32));
    /// # Ok::<(), wholemem::UnknownReduceOp>(())
    /// ```
    #[must_use]
    pub fn applies_to(self, dtype: Dtype) -> bool {
        match self {
            Self::Sum | Self::Avg | Self::Min | Self::Max | Self::Prod => dtype.is_number(),
            Self::And | Self::Or | Self::Xor => dtype.is_number() && !dtype.is_float(),
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Sum => "sum",
            Self::Avg => "avg",
            Self::Min => "min",
            Self::Max => "max",
            Self::Prod => "prod",
            Self::And => "and",
            Self::Or => "or",
            Self::Xor => "xor",
        })
    }
}

impl FromStr for ReduceOp {
    type Err = UnknownReduceOp;

    fn from_str(name: &str) -> Result<Self, UnknownReduceOp> {
        let found = Self::ALL.into_iter().find(|op| op.to_string() == name);
        found.ok_or_else(|| UnknownReduceOp { name: name.to_owned() })
    }
}

/// The error for an unknown name of a reduction operation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown reduction `{name}`: use sum, avg, min, max, prod, and, or, xor")]
pub struct UnknownReduceOp {
    /// The unknown name of a reduction operation.
    pub name: String,
}

/// A naive implementation of reductions, one element at a time, by the rules in the module documentation.
trait NaiveReduce: ArithmeticElement {
    /// Reduces the values that the ranks have for one element, in the order of ranks. There is at least one value, and `op`
    /// supports the type.
    fn reduce_naive(values: &[Self], op: ReduceOp) -> Self;
}

macro_rules! integers {
    ($($type:ident by $divisor:ident)*) => {$(
        impl NaiveReduce for $type {
            fn reduce_naive(values: &[Self], op: ReduceOp) -> Self {
                let mut total = values[0];
                for value in &values[1..] {
                    total = match op {
                        ReduceOp::Sum | ReduceOp::Avg => total.wrapping_add(*value),
                        ReduceOp::Min => total.min(*value),
                        ReduceOp::Max => total.max(*value),
                        ReduceOp::Prod => total.wrapping_mul(*value),
                        ReduceOp::And => total & value,
                        ReduceOp::Or => total | value,
                        ReduceOp::Xor => total ^ value,
                    };
                }
                if op == ReduceOp::Avg {
                    // There may be more ranks than the element type can count, so the division uses a wider type.
                    let ranks = $divisor::try_from(values.len()).expect("the number of values in memory fits the type");
                    total = Self::try_from($divisor::from(total) / ranks).expect("a quotient is not larger than the dividend");
                }
                total
            }
        }
    )*};
}

integers!(u8 by u64 i8 by i64 u16 by u64 i16 by i64 u32 by u64 i32 by i64 u64 by u64 i64 by i64);

macro_rules! floats {
    ($($type:ident in $wide:ident: $round:expr;)*) => {$(
        impl NaiveReduce for $type {
            fn reduce_naive(values: &[Self], op: ReduceOp) -> Self {
                let smaller = |a: $wide, b: $wide| match a.partial_cmp(&b) {
                    None => $wide::NAN,
                    Some(order) if order.is_eq() => if a.is_sign_negative() { a } else { b },
                    Some(order) => if order.is_lt() { a } else { b },
                };
                let mut total = $wide::from(values[0]);
                for value in values[1..].iter().copied().map($wide::from) {
                    total = match op {
                        ReduceOp::Sum | ReduceOp::Avg => total + value,
                        ReduceOp::Min => smaller(total, value),
                        ReduceOp::Max => -smaller(-total, -value),
                        ReduceOp::Prod => total * value,
                        ReduceOp::And | ReduceOp::Or | ReduceOp::Xor => unreachable!("bitwise operations do not support floats"),
                    };
                }
                if op == ReduceOp::Avg {
                    total /= values.len() as $wide;
                }
                if total.is_nan() { Self::NAN } else { $round(total) }
            }
        }
    )*};
}

floats! {
    f16 in f32: f16::from_f32;
    bf16 in f32: bf16::from_f32;
    f32 in f32: |total| total;
    f64 in f64: |total| total;
}

/// Reduces the elements of all ranks, one slice for each rank, with a naive implementation for tests. `op` must support the type.
pub fn combine_naive(sources: &[&[u8]], dtype: Dtype, op: ReduceOp) -> Vec<u8> {
    let len = sources.first().map_or(0, |source| source.len());
    let mut target = vec![0; len];
    // `with_types` returns `Some`, because a number type is of the same kind as itself.
    let _ = with_types!(dtype, Type, dtype, _Same => {
        for (at, place) in target.chunks_exact_mut(dtype.len()).enumerate() {
            let bytes = at * dtype.len()..(at + 1) * dtype.len();
            let values: Vec<_> = sources.iter().map(|source| Type::from_bytes(&source[bytes.clone()])).collect();
            Type::reduce_naive(&values, op).write_to(place);
        }
    });
    target
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_codes_round_trip() {
        for op in ReduceOp::ALL {
            assert_eq!(ReduceOp::from_code(op.code()), Some(op));
            assert_eq!(op.to_string().parse(), Ok(op));
        }
        assert_eq!(ReduceOp::from_code(8), None);
        assert_eq!("mean".parse::<ReduceOp>(), Err(UnknownReduceOp { name: "mean".to_owned() }));
    }

    #[test]
    fn bitwise_operations_support_only_integers() {
        for dtype in Dtype::NUMBERS {
            for op in ReduceOp::ALL {
                let by_bits = matches!(op, ReduceOp::And | ReduceOp::Or | ReduceOp::Xor);
                assert_eq!(op.applies_to(dtype), !(by_bits && dtype.is_float()), "{op} of {dtype}");
            }
        }
        assert!(ReduceOp::ALL.into_iter().all(|op| !op.applies_to(Dtype::Bool)), "Booleans are only copied");
    }

    #[test]
    fn integers_wrap_and_averages_round_towards_zero() {
        use ReduceOp::{And, Avg, Max, Min, Or, Prod, Sum, Xor};
        assert_eq!(u8::reduce_naive(&[250, 10, 1], Sum), 5);
        assert_eq!(u8::reduce_naive(&[250, 10, 1], Avg), 1);
        assert_eq!(i8::reduce_naive(&[-3, -4], Avg), -3);
        assert_eq!(i8::reduce_naive(&[127, 1], Avg), -64);
        assert_eq!(i8::reduce_naive(&[i8::MIN], Avg), i8::MIN);
        assert_eq!(i64::reduce_naive(&[i64::MAX, 1], Sum), i64::MIN);
        assert_eq!(i16::reduce_naive(&[300, 300], Prod), 24464);
        assert_eq!(i32::reduce_naive(&[-1, 5, 0], Min), -1);
        assert_eq!(u32::reduce_naive(&[u32::MAX, 5, 0], Max), u32::MAX);
        assert_eq!(u16::reduce_naive(&[0b1100, 0b1010], And), 0b1000);
        assert_eq!(u16::reduce_naive(&[0b1100, 0b1010], Or), 0b1110);
        assert_eq!(u16::reduce_naive(&[0b1100, 0b1010], Xor), 0b0110);
    }

    #[test]
    fn averages_are_correct_for_more_than_255_ranks() {
        assert_eq!(i8::reduce_naive(&[-1; 128], ReduceOp::Avg), -1);
        assert_eq!(i8::reduce_naive(&[1; 300], ReduceOp::Avg), 0);
        assert_eq!(u8::reduce_naive(&[1; 300], ReduceOp::Avg), 0);
    }

    #[test]
    fn half_precision_sums_are_rounded_once_at_the_end() {
        // In half precision, the sum of the first two values would be rounded to 2048, and so would the total.
        let values = [2048.0, 1.0, 1.0].map(f16::from_f32);
        assert_eq!(f16::reduce_naive(&values, ReduceOp::Sum).to_f32(), 2050.0);
        let values = [256.0, 1.0, 1.0].map(bf16::from_f32);
        assert_eq!(bf16::reduce_naive(&values, ReduceOp::Sum).to_f32(), 258.0);
        // The sum of the two values overflows half precision, but their average does not.
        assert_eq!(f16::reduce_naive(&[f16::MAX, f16::MAX], ReduceOp::Avg), f16::MAX);
        assert_eq!(f16::reduce_naive(&[f16::MAX, f16::MAX], ReduceOp::Sum), f16::INFINITY);
        // Sums halfway between two half-precision floats round to the even one.
        let values = [2048.0, 1.0].map(f16::from_f32);
        assert_eq!(f16::reduce_naive(&values, ReduceOp::Sum).to_f32(), 2048.0);
        let values = [2050.0, 1.0].map(f16::from_f32);
        assert_eq!(f16::reduce_naive(&values, ReduceOp::Sum).to_f32(), 2052.0);
    }

    #[test]
    fn ranks_are_combined_in_order() {
        assert_eq!(f32::reduce_naive(&[1e30, -1e30, 1.0], ReduceOp::Sum), 1.0);
        assert_eq!(f32::reduce_naive(&[1.0, 1e30, -1e30], ReduceOp::Sum), 0.0);
        assert_eq!(f64::reduce_naive(&[1e300, 1e300, 1e-300], ReduceOp::Prod), f64::INFINITY);
        assert_eq!(f64::reduce_naive(&[1e300, 1e-300, 1e300], ReduceOp::Prod), 1e300);
    }

    #[test]
    fn the_sign_of_zero_is_preserved() {
        // The sum of -0 and -0 is -0. If the sum started at zero instead of rank 0's value, it would be +0.
        assert_eq!(f32::reduce_naive(&[-0.0, -0.0], ReduceOp::Sum).to_bits(), 1 << 31);
        assert_eq!(f32::reduce_naive(&[-0.0], ReduceOp::Avg).to_bits(), 1 << 31);
        for values in [[0.0, -0.0], [-0.0, 0.0]] {
            assert_eq!(f64::reduce_naive(&values, ReduceOp::Min).to_bits(), 1 << 63);
            assert_eq!(f64::reduce_naive(&values, ReduceOp::Max).to_bits(), 0);
            let halves = values.map(f16::from_f64);
            assert_eq!(f16::reduce_naive(&halves, ReduceOp::Min).to_bits(), 1 << 15);
            assert_eq!(f16::reduce_naive(&halves, ReduceOp::Max).to_bits(), 0);
        }
    }

    #[test]
    fn every_nan_becomes_the_canonical_nan() {
        use ReduceOp::{Avg, Max, Min, Prod, Sum};
        for op in [Sum, Avg, Min, Max, Prod] {
            for strange in [0x7f80_0001, 0xffc0_1234] {
                for values in [[f32::from_bits(strange), 1.0], [1.0, f32::from_bits(strange)]] {
                    assert_eq!(f32::reduce_naive(&values, op).to_bits(), 0x7fc0_0000, "{op}");
                    let values = values.map(f64::from);
                    assert_eq!(f64::reduce_naive(&values, op).to_bits(), 0x7ff8_0000_0000_0000, "{op}");
                }
                assert_eq!(f32::reduce_naive(&[f32::from_bits(strange)], op).to_bits(), 0x7fc0_0000, "{op}");
            }
            assert_eq!(f16::reduce_naive(&[f16::from_bits(0xfc01), f16::ONE], op).to_bits(), 0x7e00, "{op}");
            assert_eq!(
                bf16::reduce_naive(&[bf16::ONE, bf16::from_bits(0xffff)], op).to_bits(),
                0x7fc0,
                "{op}"
            );
        }
        assert_eq!(f32::reduce_naive(&[f32::INFINITY, f32::NEG_INFINITY], Sum).to_bits(), 0x7fc0_0000);
        assert_eq!(f32::reduce_naive(&[f32::INFINITY, 0.0], Prod).to_bits(), 0x7fc0_0000);
    }

    #[test]
    fn elements_are_reduced_independently() {
        let sources: [&[u8]; 3] = [&[1, 2, 0, 3], &[10, 20, 1, 0], &[100, 200, 0, 0]];
        assert_eq!(combine_naive(&sources, Dtype::U8, ReduceOp::Sum), [111, 222, 1, 3]);
        let bytes = |values: [u16; 2]| values.map(u16::to_ne_bytes).concat();
        let (one, other) = (bytes([1, 0xffff]), bytes([2, 2]));
        assert_eq!(combine_naive(&[&one, &other], Dtype::U16, ReduceOp::Sum), bytes([3, 1]));
    }
}
