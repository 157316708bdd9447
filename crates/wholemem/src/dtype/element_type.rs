//! The Rust types of tensor elements.

use std::fmt::Debug;

use half::{bf16, f16};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::Dtype;

/// A Rust type whose values are elements of a tensor: the integers and floats, `f16` and `bf16` of the crate `half`, and
/// `[f32; 2]` for a complex number. The typed calls of [`WholeTensor`](crate::WholeTensor) accept slices of these types.
///
/// Elements of the other types, such as Booleans and 8-bit floats, are read and written as their
/// [storage](Dtype::storage): `u8`.
///
/// ```
/// use wholemem::{Dtype, Element};
///
/// assert_eq!((f32::DTYPE, <[f32; 2]>::DTYPE), (Dtype::F32, Dtype::Complex64));
/// ```
pub trait Element:
    Copy + Debug + Default + Send + Sync + FromBytes + IntoBytes + Immutable + sealed::Sealed + 'static
{
    /// The element type of tensors whose elements are values of this Rust type.
    const DTYPE: Dtype;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! elements {
    ($($type:ty => $dtype:ident,)*) => {$(
        impl sealed::Sealed for $type {}

        impl Element for $type {
            const DTYPE: Dtype = {
                assert!(size_of::<$type>() == Dtype::$dtype.info().len, "the Rust type has the length of the element type");
                Dtype::$dtype
            };
        }
    )*};
}

elements! {
    u8 => U8,
    i8 => I8,
    u16 => U16,
    i16 => I16,
    u32 => U32,
    i32 => I32,
    u64 => U64,
    i64 => I64,
    f16 => F16,
    bf16 => Bf16,
    f32 => F32,
    f64 => F64,
    [f32; 2] => Complex64,
}
