//! Tensor element types: their names and encodings, conversion, addition and reduction.
//!
//! A number type (`U8` to `F64`) can be converted, added and reduced. The other types are stored as a number type of the same
//! length and only copied.

mod element;
mod element_type;
mod reduce;
mod table;

use std::fmt;
use std::str::FromStr;

pub(crate) use element::{ArithmeticElement, add, convert, with_floats, with_integers, with_types};
pub use element_type::Element;
pub use reduce::{ReduceOp, UnknownReduceOp, combine_naive};
pub use table::{DtypeInfo, DtypeKind};
use zerocopy::{Immutable, IntoBytes, KnownLayout, TryFromBytes};

/// The type of a tensor's elements. A tensor of other types, such as structures, has rows of `U8` bytes.
///
/// The codes never change. Kernels and files use the codes of the number types; files use the code of the storage type for the
/// other types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, IntoBytes, TryFromBytes, Immutable, KnownLayout)]
#[non_exhaustive]
#[repr(u32)]
pub enum Dtype {
    /// An unsigned integer of one byte; also the type of raw bytes.
    U8 = 0,
    /// A signed integer of one byte.
    I8 = 1,
    /// An unsigned integer of two bytes.
    U16 = 2,
    /// A signed integer of two bytes.
    I16 = 3,
    /// An unsigned integer of four bytes.
    U32 = 4,
    /// A signed integer of four bytes.
    I32 = 5,
    /// An unsigned integer of eight bytes.
    U64 = 6,
    /// A signed integer of eight bytes.
    I64 = 7,
    /// A 16-bit float in the IEEE half precision format.
    F16 = 8,
    /// A 16-bit float with the upper half of the bits of a single precision float (bfloat16).
    Bf16 = 9,
    /// A 32-bit float in the IEEE single precision format.
    F32 = 10,
    /// A 64-bit float in the IEEE double precision format.
    F64 = 11,
    /// A Boolean, zero or one, in one byte.
    Bool = 12,
    /// A complex number in eight bytes: the real and the imaginary part, both in single precision.
    Complex64 = 13,
    /// An 8-bit float with four exponent bits, without infinities.
    Float8E4m3fn = 14,
    /// An 8-bit float with four exponent bits, without infinities and negative zero.
    Float8E4m3fnuz = 15,
    /// An 8-bit float with five exponent bits.
    Float8E5m2 = 16,
    /// An 8-bit float with five exponent bits, without infinities and negative zero.
    Float8E5m2fnuz = 17,
    /// A power of two in one byte: eight exponent bits.
    Float8E8m0fnu = 18,
}

impl Dtype {
    /// Every element type, in the order of the types' codes.
    pub const ALL: [Self; 19] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::U64,
        Self::I64,
        Self::F16,
        Self::Bf16,
        Self::F32,
        Self::F64,
        Self::Bool,
        Self::Complex64,
        Self::Float8E4m3fn,
        Self::Float8E4m3fnuz,
        Self::Float8E5m2,
        Self::Float8E5m2fnuz,
        Self::Float8E8m0fnu,
    ];

    /// The element types that are numbers, in the order of their codes.
    pub const NUMBERS: [Self; 12] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::U64,
        Self::I64,
        Self::F16,
        Self::Bf16,
        Self::F32,
        Self::F64,
    ];

    /// Returns the numeric code of this element type.
    #[must_use]
    pub fn code(self) -> u32 {
        self as u32
    }

    /// Returns the element type with the given code; `None` if there is none.
    #[must_use]
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.get(usize::try_from(code).ok()?).copied()
    }

    /// Returns the length of an element in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "an element is never empty")]
    pub fn len(self) -> usize {
        self.info().len
    }

    /// Returns the number type of the same length as which elements of this type are stored and copied. A number type is stored
    /// as itself.
    ///
    /// ```
    /// use wholemem::Dtype;
    ///
    /// assert_eq!((Dtype::Bool.storage(), Dtype::F32.storage()), (Dtype::U8, Dtype::F32));
    /// ```
    #[must_use]
    pub fn storage(self) -> Self {
        self.info().storage
    }

    /// Returns true if elements of this type are numbers, which can be converted, added and reduced.
    #[must_use]
    pub fn is_number(self) -> bool {
        matches!(self.info().kind, DtypeKind::Unsigned | DtypeKind::Signed | DtypeKind::Float)
    }

    /// Returns true if elements of this type are floats of 16 bits or more.
    #[must_use]
    pub fn is_float(self) -> bool {
        self.info().kind == DtypeKind::Float
    }

    /// Returns true if elements of this type can be converted to `other`: floats to floats, integers to integers.
    #[must_use]
    pub fn converts_to(self, other: Self) -> bool {
        self.is_number() && other.is_number() && self.is_float() == other.is_float()
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.info().name)
    }
}

impl FromStr for Dtype {
    type Err = UnknownDtype;

    fn from_str(name: &str) -> Result<Self, UnknownDtype> {
        let found = Self::ALL.into_iter().find(|dtype| dtype.info().name == name);
        found.ok_or_else(|| UnknownDtype { name: name.to_owned() })
    }
}

/// The error for an unknown name of an element type.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown element type `{name}`: use u8 to u64, i8 to i64, f16, bf16, f32, f64, bool, complex64 or float8 with e4m3fn, e4m3fnuz, e5m2, e5m2fnuz or e8m0fnu"
)]
pub struct UnknownDtype {
    /// The unknown name of an element type.
    pub name: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_codes_round_trip() {
        for dtype in Dtype::ALL {
            assert_eq!(Dtype::from_code(dtype.code()), Some(dtype));
            assert_eq!(dtype.to_string().parse(), Ok(dtype));
        }
        assert_eq!(Dtype::from_code(19), None);
        assert_eq!("f8".parse::<Dtype>(), Err(UnknownDtype { name: "f8".to_owned() }));
    }

    #[test]
    fn exactly_the_number_types_convert_to_themselves() {
        let numbers: Vec<_> = Dtype::ALL.into_iter().filter(|dtype| dtype.converts_to(*dtype)).collect();
        assert_eq!(numbers, Dtype::NUMBERS);
        assert!(Dtype::ALL.into_iter().all(|dtype| !Dtype::Bool.converts_to(dtype)));
    }
}
