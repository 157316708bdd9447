//! Reductions of the elements of several ranks: the operations, and a naive implementation as the reference.
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

/// How the elements of all ranks become one.
///
/// The numbers are those that kernels and C use, and never change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, IntoBytes, TryFromBytes, Immutable, KnownLayout)]
#[non_exhaustive]
#[repr(u32)]
pub enum ReduceOp {
    /// The sum; of integers, its lower bits.
    Sum = 0,
    /// The sum divided by the number of ranks; of integers, what `Sum` is, divided towards zero.
    Avg = 1,
    /// The smallest, or a NaN where there is one. -0 is smaller than +0.
    Min = 2,
    /// The largest, or a NaN where there is one. +0 is larger than -0.
    Max = 3,
    /// The product; of integers, its lower bits.
    Prod = 4,
    /// The bits that all have. Of integers only, as are the next two.
    And = 5,
    /// The bits that any has.
    Or = 6,
    /// The bits that an odd number of them have.
    Xor = 7,
}

impl ReduceOp {
    /// Every operation, in the order of their numbers.
    pub const ALL: [Self; 8] =
        [Self::Sum, Self::Avg, Self::Min, Self::Max, Self::Prod, Self::And, Self::Or, Self::Xor];

    /// Its number.
    #[must_use]
    pub fn code(self) -> u32 {
        self as u32
    }

    /// The operation of a number.
    #[must_use]
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.get(usize::try_from(code).ok()?).copied()
    }

    /// Whether elements of this type can be combined so: only numbers can, and by their bits, only integers.
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

/// A name that no operation has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no reduction is called `{name}`: there are sum, avg, min, max, prod, and, or and xor")]
pub struct UnknownReduceOp {
    /// The name.
    pub name: String,
}

/// An element that is combined as the text above says, one at a time: slow, and plain to see.
trait Combined: ArithmeticElement {
    /// The values of one element, in the order of ranks, of which there is one at least; `op` applies to it.
    fn combined(values: &[Self], op: ReduceOp) -> Self;
}

macro_rules! integers {
    ($($type:ident by $divisor:ident)*) => {$(
        impl Combined for $type {
            fn combined(values: &[Self], op: ReduceOp) -> Self {
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
                    // There may be more ranks than the type can count.
                    let ranks = $divisor::try_from(values.len()).expect("as many ranks as values fit in memory");
                    total = Self::try_from($divisor::from(total) / ranks).expect("a quotient is no larger");
                }
                total
            }
        }
    )*};
}

integers!(u8 by u64 i8 by i64 u16 by u64 i16 by i64 u32 by u64 i32 by i64 u64 by u64 i64 by i64);

macro_rules! floats {
    ($($type:ident in $wide:ident: $round:expr;)*) => {$(
        impl Combined for $type {
            fn combined(values: &[Self], op: ReduceOp) -> Self {
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
                        ReduceOp::And | ReduceOp::Or | ReduceOp::Xor => unreachable!("bits of a float"),
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

/// The elements of all ranks, one slice a rank, combined one by one; `op` applies to the type.
pub fn combine_naive(sources: &[&[u8]], dtype: Dtype, op: ReduceOp) -> Vec<u8> {
    let len = sources.first().map_or(0, |source| source.len());
    let mut target = vec![0; len];
    // A type is of one family with itself.
    let _ = with_types!(dtype, Type, dtype, _Same => {
        for (at, place) in target.chunks_exact_mut(dtype.len()).enumerate() {
            let bytes = at * dtype.len()..(at + 1) * dtype.len();
            let values: Vec<_> = sources.iter().map(|source| Type::from_bytes(&source[bytes.clone()])).collect();
            Type::combined(&values, op).write_to(place);
        }
    });
    target
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_lead_back() {
        for op in ReduceOp::ALL {
            assert_eq!(ReduceOp::from_code(op.code()), Some(op));
            assert_eq!(op.to_string().parse(), Ok(op));
        }
        assert_eq!(ReduceOp::from_code(8), None);
        assert_eq!("mean".parse::<ReduceOp>(), Err(UnknownReduceOp { name: "mean".to_owned() }));
    }

    #[test]
    fn bits_are_of_integers() {
        for dtype in Dtype::NUMBERS {
            for op in ReduceOp::ALL {
                let by_bits = matches!(op, ReduceOp::And | ReduceOp::Or | ReduceOp::Xor);
                assert_eq!(op.applies_to(dtype), !(by_bits && dtype.is_float()), "{op} of {dtype}");
            }
        }
        assert!(
            ReduceOp::ALL.into_iter().all(|op| !op.applies_to(Dtype::Bool)),
            "truth values are only copied"
        );
    }

    #[test]
    fn integers_wrap_and_are_divided_towards_zero() {
        use ReduceOp::{And, Avg, Max, Min, Or, Prod, Sum, Xor};
        assert_eq!(u8::combined(&[250, 10, 1], Sum), 5);
        assert_eq!(u8::combined(&[250, 10, 1], Avg), 1);
        assert_eq!(i8::combined(&[-3, -4], Avg), -3);
        assert_eq!(i8::combined(&[127, 1], Avg), -64);
        assert_eq!(i8::combined(&[i8::MIN], Avg), i8::MIN);
        assert_eq!(i64::combined(&[i64::MAX, 1], Sum), i64::MIN);
        assert_eq!(i16::combined(&[300, 300], Prod), 24464);
        assert_eq!(i32::combined(&[-1, 5, 0], Min), -1);
        assert_eq!(u32::combined(&[u32::MAX, 5, 0], Max), u32::MAX);
        assert_eq!(u16::combined(&[0b1100, 0b1010], And), 0b1000);
        assert_eq!(u16::combined(&[0b1100, 0b1010], Or), 0b1110);
        assert_eq!(u16::combined(&[0b1100, 0b1010], Xor), 0b0110);
    }

    #[test]
    fn there_may_be_more_ranks_than_a_byte_counts() {
        assert_eq!(i8::combined(&[-1; 128], ReduceOp::Avg), -1);
        assert_eq!(i8::combined(&[1; 300], ReduceOp::Avg), 0);
        assert_eq!(u8::combined(&[1; 300], ReduceOp::Avg), 0);
    }

    #[test]
    fn halves_are_rounded_once_and_at_the_end() {
        // In halves, the first sum would be 2048 again, and the second too.
        let values = [2048.0, 1.0, 1.0].map(f16::from_f32);
        assert_eq!(f16::combined(&values, ReduceOp::Sum).to_f32(), 2050.0);
        let values = [256.0, 1.0, 1.0].map(bf16::from_f32);
        assert_eq!(bf16::combined(&values, ReduceOp::Sum).to_f32(), 258.0);
        // The sum is beyond all halves, the average is not.
        assert_eq!(f16::combined(&[f16::MAX, f16::MAX], ReduceOp::Avg), f16::MAX);
        assert_eq!(f16::combined(&[f16::MAX, f16::MAX], ReduceOp::Sum), f16::INFINITY);
        // A middle goes to the even neighbour.
        let values = [2048.0, 1.0].map(f16::from_f32);
        assert_eq!(f16::combined(&values, ReduceOp::Sum).to_f32(), 2048.0);
        let values = [2050.0, 1.0].map(f16::from_f32);
        assert_eq!(f16::combined(&values, ReduceOp::Sum).to_f32(), 2052.0);
    }

    #[test]
    fn ranks_are_taken_in_their_order() {
        assert_eq!(f32::combined(&[1e30, -1e30, 1.0], ReduceOp::Sum), 1.0);
        assert_eq!(f32::combined(&[1.0, 1e30, -1e30], ReduceOp::Sum), 0.0);
        assert_eq!(f64::combined(&[1e300, 1e300, 1e-300], ReduceOp::Prod), f64::INFINITY);
        assert_eq!(f64::combined(&[1e300, 1e-300, 1e300], ReduceOp::Prod), 1e300);
    }

    #[test]
    fn zero_has_a_sign() {
        // From zero instead of rank 0's value, this would be +0.
        assert_eq!(f32::combined(&[-0.0, -0.0], ReduceOp::Sum).to_bits(), 1 << 31);
        assert_eq!(f32::combined(&[-0.0], ReduceOp::Avg).to_bits(), 1 << 31);
        for values in [[0.0, -0.0], [-0.0, 0.0]] {
            assert_eq!(f64::combined(&values, ReduceOp::Min).to_bits(), 1 << 63);
            assert_eq!(f64::combined(&values, ReduceOp::Max).to_bits(), 0);
            let halves = values.map(f16::from_f64);
            assert_eq!(f16::combined(&halves, ReduceOp::Min).to_bits(), 1 << 15);
            assert_eq!(f16::combined(&halves, ReduceOp::Max).to_bits(), 0);
        }
    }

    #[test]
    fn every_nan_is_the_same() {
        use ReduceOp::{Avg, Max, Min, Prod, Sum};
        for op in [Sum, Avg, Min, Max, Prod] {
            for strange in [0x7f80_0001, 0xffc0_1234] {
                for values in [[f32::from_bits(strange), 1.0], [1.0, f32::from_bits(strange)]] {
                    assert_eq!(f32::combined(&values, op).to_bits(), 0x7fc0_0000, "{op}");
                    let values = values.map(f64::from);
                    assert_eq!(f64::combined(&values, op).to_bits(), 0x7ff8_0000_0000_0000, "{op}");
                }
                assert_eq!(f32::combined(&[f32::from_bits(strange)], op).to_bits(), 0x7fc0_0000, "{op}");
            }
            assert_eq!(f16::combined(&[f16::from_bits(0xfc01), f16::ONE], op).to_bits(), 0x7e00, "{op}");
            assert_eq!(bf16::combined(&[bf16::ONE, bf16::from_bits(0xffff)], op).to_bits(), 0x7fc0, "{op}");
        }
        assert_eq!(f32::combined(&[f32::INFINITY, f32::NEG_INFINITY], Sum).to_bits(), 0x7fc0_0000);
        assert_eq!(f32::combined(&[f32::INFINITY, 0.0], Prod).to_bits(), 0x7fc0_0000);
    }

    #[test]
    fn elements_are_combined_one_by_one() {
        let sources: [&[u8]; 3] = [&[1, 2, 0, 3], &[10, 20, 1, 0], &[100, 200, 0, 0]];
        assert_eq!(combine_naive(&sources, Dtype::U8, ReduceOp::Sum), [111, 222, 1, 3]);
        let bytes = |values: [u16; 2]| values.map(u16::to_ne_bytes).concat();
        let (one, other) = (bytes([1, 0xffff]), bytes([2, 2]));
        assert_eq!(combine_naive(&[&one, &other], Dtype::U16, ReduceOp::Sum), bytes([3, 1]));
    }
}
