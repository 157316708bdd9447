//! Conversion and addition of tensor elements, for every element type.
//!
//! A conversion goes through the widest type of its kind (integer or float), which represents every value of the others
//! exactly, so it rounds or truncates once. Every NaN becomes the same NaN, because devices differ in the payload they keep.

use half::{bf16, f16};

use super::Dtype;

/// The arithmetic of a tensor element type: conversion and addition.
pub(crate) trait ArithmeticElement: Copy + 'static {
    /// The widest number type of the same kind: `u64` for integers, `f64` for floats.
    type Wide;

    /// Decodes an element from `bytes`, which must have exactly the length of an element.
    fn from_bytes(bytes: &[u8]) -> Self;

    /// Encodes this element to `place`, which must have exactly the length of an element.
    fn write_to(self, place: &mut [u8]);

    /// Converts this element to the widest type of its kind without changing the value.
    fn widen(self) -> Self::Wide;

    /// Converts a value of the widest type to the nearest value of this type; for integers, to the lower bits.
    fn narrow(wide: Self::Wide) -> Self;

    /// Returns the sum of two elements. Float sums are rounded once; integer sums wrap around.
    fn plus(self, other: Self) -> Self;
}

macro_rules! bytes {
    () => {
        fn from_bytes(bytes: &[u8]) -> Self {
            let mut copy = [0; size_of::<Self>()];
            copy.copy_from_slice(bytes);
            Self::from_ne_bytes(copy)
        }

        fn write_to(self, place: &mut [u8]) {
            place.copy_from_slice(&self.to_ne_bytes());
        }
    };
}

macro_rules! integers {
    ($($type:ident)*) => {$(
        impl ArithmeticElement for $type {
            type Wide = u64;

            bytes!();

            #[expect(clippy::allow_attributes, reason = "the cast changes nothing for some of the types")]
            #[allow(clippy::cast_sign_loss, reason = "the sign is extended, and only the bits matter")]
            #[allow(clippy::cast_lossless, reason = "there is no `From` for all of the types")]
            fn widen(self) -> u64 {
                self as u64
            }

            #[expect(clippy::allow_attributes, reason = "the cast changes nothing for some of the types")]
            #[allow(clippy::cast_possible_truncation, reason = "truncation to the lower bits is intended")]
            #[allow(clippy::cast_possible_wrap, reason = "only the bits matter")]
            fn narrow(wide: u64) -> Self {
                wide as Self
            }

            fn plus(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
        }
    )*};
}

integers!(u8 i8 u16 i16 u32 i32 u64 i64);

macro_rules! floats {
    ($($type:ident: $narrow:expr, $plus:expr;)*) => {$(
        impl ArithmeticElement for $type {
            type Wide = f64;

            bytes!();

            fn widen(self) -> f64 {
                self.into()
            }

            fn narrow(wide: f64) -> Self {
                if wide.is_nan() { Self::NAN } else { $narrow(wide) }
            }

            fn plus(self, other: Self) -> Self {
                $plus(self, other)
            }
        }
    )*};
}

#[expect(clippy::cast_possible_truncation, reason = "rounding to nearest is intended")]
fn to_f32(wide: f64) -> f32 {
    wide as f32
}

/// Converts a double to single precision with rounding to odd. A later rounding to a 16-bit float then gives the same result as
/// rounding `wide` directly, because the intermediate value is never a tie.
fn to_odd_f32(wide: f64) -> f32 {
    let near = to_f32(wide);
    let bits = near.to_bits();
    if near.is_nan() || f64::from(near) == wide || bits & 1 == 1 {
        return near;
    }
    // The bits of two floats of the same sign have the same order as their magnitudes.
    let toward = if f64::from(near).abs() < wide.abs() { bits + 1 } else { bits - 1 };
    f32::from_bits(toward)
}

// Rounding the sum of two 16-bit floats to single precision and then to 16 bits gives the same result as rounding once, because
// single precision has more than twice as many significant bits.
floats! {
    f16: |wide| f16::from_f32(to_odd_f32(wide)), |a: f16, b: f16| f16::from_f32(a.to_f32() + b.to_f32());
    bf16: |wide| bf16::from_f32(to_odd_f32(wide)), |a: bf16, b: bf16| bf16::from_f32(a.to_f32() + b.to_f32());
    f32: to_f32, |a, b| a + b;
    f64: |wide| wide, |a, b| a + b;
}

/// Evaluates `$body` with the Rust types of two [`Dtype`]s, and returns the result as `Some`. Returns `None` if one type is an
/// integer and one a float, or if one is not a number.
macro_rules! with_types {
    ($first:expr, $First:ident, $second:expr, $Second:ident => $body:expr) => {
        match ($first.is_float(), $second.is_float()) {
            (true, true) => $crate::dtype::with_floats!($first, $First =>
                $crate::dtype::with_floats!($second, $Second => Some($body))),
            (false, false) => $crate::dtype::with_integers!($first, $First =>
                $crate::dtype::with_integers!($second, $Second => Some($body))),
            _ => None,
        }
    };
}

macro_rules! with_integers {
    ($dtype:expr, $Type:ident => $body:expr) => {
        match $dtype {
            Dtype::U8 => {
                type $Type = u8;
                $body
            }
            Dtype::I8 => {
                type $Type = i8;
                $body
            }
            Dtype::U16 => {
                type $Type = u16;
                $body
            }
            Dtype::I16 => {
                type $Type = i16;
                $body
            }
            Dtype::U32 => {
                type $Type = u32;
                $body
            }
            Dtype::I32 => {
                type $Type = i32;
                $body
            }
            Dtype::U64 => {
                type $Type = u64;
                $body
            }
            Dtype::I64 => {
                type $Type = i64;
                $body
            }
            _ => None,
        }
    };
}

macro_rules! with_floats {
    ($dtype:expr, $Type:ident => $body:expr) => {
        match $dtype {
            Dtype::F16 => {
                type $Type = half::f16;
                $body
            }
            Dtype::Bf16 => {
                type $Type = half::bf16;
                $body
            }
            Dtype::F32 => {
                type $Type = f32;
                $body
            }
            Dtype::F64 => {
                type $Type = f64;
                $body
            }
            _ => None,
        }
    };
}

pub(crate) use {with_floats, with_integers, with_types};

/// Converts the elements of `source` to another type; returns `None` if the types do not convert.
pub(crate) fn convert(source: &[u8], from: Dtype, to: Dtype) -> Option<Vec<u8>> {
    if from == to || from == to.storage() {
        return Some(source.to_vec());
    }
    let mut target = vec![0; source.len() / from.len() * to.len()];
    with_types!(from, From, to, To => {
        for (place, bytes) in target.chunks_exact_mut(to.len()).zip(source.chunks_exact(from.len())) {
            To::narrow(From::from_bytes(bytes).widen()).write_to(place);
        }
    })?;
    Some(target)
}

/// Adds the elements of `source` to the elements of `target`, which have the same type.
pub(crate) fn add(target: &mut [u8], source: &[u8], dtype: Dtype) {
    // `with_types` returns `Some`, because a number type is of the same kind as itself.
    let _ = with_types!(dtype, Type, dtype, _Same => {
        for (place, bytes) in target.chunks_exact_mut(dtype.len()).zip(source.chunks_exact(dtype.len())) {
            Type::from_bytes(place).plus(Type::from_bytes(bytes)).write_to(place);
        }
    });
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn converted<From: ArithmeticElement, To: ArithmeticElement>(value: From, from: Dtype, to: Dtype) -> To {
        let mut bytes = vec![0; from.len()];
        value.write_to(&mut bytes);
        To::from_bytes(&convert(&bytes, from, to).unwrap())
    }

    #[test]
    fn integer_conversions_keep_the_lower_bits() {
        assert_eq!(converted::<i64, i8>(-1, Dtype::I64, Dtype::I8), -1);
        assert_eq!(converted::<i8, u64>(-1, Dtype::I8, Dtype::U64), u64::MAX);
        assert_eq!(converted::<u32, u8>(0x1234_5678, Dtype::U32, Dtype::U8), 0x78);
        assert_eq!(converted::<i16, i32>(-300, Dtype::I16, Dtype::I32), -300);
    }

    #[test]
    fn float_conversions_round_once_to_nearest() {
        // The values are slightly above the middle between two 16-bit floats. Rounding to single precision first would give the
        // middle, and then the even neighbour below.
        let above = 1.0 + 2_f64.powi(-11) + 2_f64.powi(-40);
        assert_eq!(converted::<f64, f16>(above, Dtype::F64, Dtype::F16).to_f64(), 1.0 + 2_f64.powi(-10));
        let above = 1.0 + 2_f64.powi(-8) + 2_f64.powi(-40);
        assert_eq!(converted::<f64, bf16>(above, Dtype::F64, Dtype::Bf16).to_f64(), 1.0 + 2_f64.powi(-7));
        for (huge, half) in [(1e9, f16::INFINITY), (-1e300, f16::NEG_INFINITY), (1e-300, f16::ZERO)] {
            assert_eq!(converted::<f64, f16>(huge, Dtype::F64, Dtype::F16), half);
        }
        let strange = bf16::from_bits(0xffc1);
        assert_eq!(converted::<bf16, f32>(strange, Dtype::Bf16, Dtype::F32).to_bits(), 0x7fc0_0000);
        assert_eq!(converted::<bf16, f16>(strange, Dtype::Bf16, Dtype::F16).to_bits(), 0x7e00);
    }

    #[test]
    fn floats_do_not_convert_to_integers_or_back() {
        assert_eq!(convert(&[0; 4], Dtype::F32, Dtype::I32), None);
    }

    #[test]
    fn sums_wrap_around() {
        let mut target = [250, 1];
        add(&mut target, &[10, 2], Dtype::U8);
        assert_eq!(target, [4, 3]);
    }

    proptest! {
        #[test]
        fn every_16_bit_float_round_trips_through_wider_floats(bits: u16) {
            let half = f16::from_bits(bits);
            for dtype in [Dtype::F32, Dtype::F64] {
                let wide = convert(&half.to_ne_bytes(), Dtype::F16, dtype).unwrap();
                let back = convert(&wide, dtype, Dtype::F16).unwrap();
                let back = f16::from_ne_bytes([back[0], back[1]]);
                prop_assert!(back == half || back.is_nan() && half.is_nan());
            }
        }

        #[test]
        fn sums_of_16_bit_floats_are_rounded_once(a: u16, b: u16) {
            // The sum of two 16-bit floats is exact in double precision.
            let (a, b) = (f16::from_bits(a), f16::from_bits(b));
            let exact = f16::narrow(a.to_f64() + b.to_f64());
            prop_assert!(a.plus(b) == exact || exact.is_nan());
        }

        #[test]
        fn conversion_gives_the_nearest_16_bit_float(bits: u16, away in -1.0_f64..1.0) {
            // The test converts a number between a 16-bit float and one of its neighbours.
            let half = f16::from_bits(bits & 0x7fff);
            let next = f16::from_bits((bits & 0x7fff) + 1);
            prop_assume!(half.is_finite() && next.is_finite());
            let number = half.to_f64() + (next.to_f64() - half.to_f64()) * away;
            let distance = |half: f16| (half.to_f64() - number).abs();
            let rounded = f16::narrow(number);
            for neighbour in [rounded.to_bits().wrapping_sub(1), rounded.to_bits() + 1].map(f16::from_bits) {
                // The neighbour of the largest finite float is infinity, which has no distance.
                let nearer = neighbour.is_finite() && distance(neighbour) < distance(rounded);
                prop_assert!(!nearer, "{} is nearer to {}", neighbour, number);
            }
        }
    }
}
