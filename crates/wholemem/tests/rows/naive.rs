//! The reference for tests of gather and scatter: conversions and additions of rows in plain vectors, implemented independently
//! of the library.

use half::{bf16, f16};
use wholemem::Dtype;

/// The exact value of an element: `f64` holds every float type exactly, and `i128` every integer type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum ExactValue {
    Float(f64),
    Integer(i128),
}

pub(crate) fn read(dtype: Dtype, bytes: &[u8]) -> ExactValue {
    macro_rules! number {
        ($type:ty) => {
            <$type>::from_ne_bytes(bytes.try_into().unwrap())
        };
    }
    match dtype {
        Dtype::U8 => ExactValue::Integer(number!(u8).into()),
        Dtype::I8 => ExactValue::Integer(number!(i8).into()),
        Dtype::U16 => ExactValue::Integer(number!(u16).into()),
        Dtype::I16 => ExactValue::Integer(number!(i16).into()),
        Dtype::U32 => ExactValue::Integer(number!(u32).into()),
        Dtype::I32 => ExactValue::Integer(number!(i32).into()),
        Dtype::U64 => ExactValue::Integer(number!(u64).into()),
        Dtype::I64 => ExactValue::Integer(number!(i64).into()),
        Dtype::F16 => ExactValue::Float(number!(f16).to_f64()),
        Dtype::Bf16 => ExactValue::Float(number!(bf16).to_f64()),
        Dtype::F32 => ExactValue::Float(number!(f32).into()),
        Dtype::F64 => ExactValue::Float(number!(f64)),
        other => panic!("unsupported type {other}"),
    }
}

pub(crate) fn write(dtype: Dtype, value: ExactValue) -> Vec<u8> {
    match (dtype, value) {
        (Dtype::F16, ExactValue::Float(value)) => {
            nearest(value, f16::from_f64(value).to_bits(), |bits| f16::from_bits(bits).to_f64()).to_vec()
        }
        (Dtype::Bf16, ExactValue::Float(value)) => {
            nearest(value, bf16::from_f64(value).to_bits(), |bits| bf16::from_bits(bits).to_f64()).to_vec()
        }
        (Dtype::F32, ExactValue::Float(value)) => (value as f32).to_ne_bytes().to_vec(),
        (Dtype::F64, ExactValue::Float(value)) => value.to_ne_bytes().to_vec(),
        // An integer is truncated to the lower bytes that its type has.
        (dtype, ExactValue::Integer(value)) => value.to_le_bytes()[..dtype.len()].to_vec(),
        (dtype, value) => panic!("{value:?} is not a value of {dtype}"),
    }
}

/// Rounds `value` to a 16-bit float, to nearest with ties to even. The result is `about`, an approximation, or one of its two
/// neighbours.
fn nearest(value: f64, about: u16, read: impl Fn(u16) -> f64) -> [u8; 2] {
    if !read(about).is_finite() {
        return about.to_ne_bytes();
    }
    let distance = |bits: &u16| (read(*bits) - value).abs();
    let around = [about.wrapping_sub(1), about, about + 1];
    let near = around.into_iter().filter(|bits| read(*bits).is_finite());
    let best = near.min_by(|a, b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1))));
    best.unwrap().to_ne_bytes()
}

pub(crate) fn convert(row: &[u8], from: Dtype, to: Dtype) -> Vec<u8> {
    if from == to {
        return row.to_vec();
    }
    row.chunks_exact(from.len()).flat_map(|bytes| write(to, read(from, bytes))).collect()
}

pub(crate) fn add(target: &mut [u8], row: &[u8], dtype: Dtype) {
    if dtype == Dtype::U8 {
        // Bytes are added on a fast path, because rows of bytes may have megabytes.
        return target.iter_mut().zip(row).for_each(|(place, byte)| *place = place.wrapping_add(*byte));
    }
    for (place, bytes) in target.chunks_exact_mut(dtype.len()).zip(row.chunks_exact(dtype.len())) {
        let sum = match (read(dtype, place), read(dtype, bytes)) {
            (ExactValue::Float(a), ExactValue::Float(b)) => ExactValue::Float(a + b),
            (ExactValue::Integer(a), ExactValue::Integer(b)) => ExactValue::Integer(a + b),
            other => panic!("values of different kinds: {other:?}"),
        };
        place.copy_from_slice(&write(dtype, sum));
    }
}
