//! Element types: their names and encodings, conversion, addition and reduction.
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

/// The type of a tensor's elements. Other types, such as structures, are stored as rows of `U8`.
///
/// The codes never change. Kernels and files use the codes of the number types; files use the code of the storage type for the
/// other types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, IntoBytes, TryFromBytes, Immutable, KnownLayout)]
#[non_exhaustive]
#[repr(u32)]
pub enum Dtype {
    /// Unsigned, one byte; also for raw bytes.
    U8 = 0,
    /// Signed, one byte.
    I8 = 1,
    /// Unsigned, two bytes.
    U16 = 2,
    /// Signed, two bytes.
    I16 = 3,
    /// Unsigned, four bytes.
    U32 = 4,
    /// Signed, four bytes.
    I32 = 5,
    /// Unsigned, eight bytes.
    U64 = 6,
    /// Signed, eight bytes.
    I64 = 7,
    /// IEEE half precision.
    F16 = 8,
    /// The upper half of a single precision number.
    Bf16 = 9,
    /// IEEE single precision.
    F32 = 10,
    /// IEEE double precision.
    F64 = 11,
    /// A Boolean, zero or one, in one byte.
    Bool = 12,
    /// Two single precision numbers, in eight bytes: the real and the imaginary part.
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
    /// Every type, in the order of their codes.
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

    /// The number types, in the order of their codes.
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

    /// The code of the type.
    #[must_use]
    pub fn code(self) -> u32 {
        self as u32
    }

    /// The type with this code; `None` if there is none.
    #[must_use]
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.get(usize::try_from(code).ok()?).copied()
    }

    /// The length of an element in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "an element is never empty")]
    pub fn len(self) -> usize {
        self.info().len
    }

    /// The number type of the same length as which elements are stored and copied. A number type is stored as itself.
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

    /// Whether elements are numbers, which can be converted, added and reduced.
    #[must_use]
    pub fn is_number(self) -> bool {
        matches!(self.info().kind, DtypeKind::Unsigned | DtypeKind::Signed | DtypeKind::Float)
    }

    /// Whether elements are floats of 16 bits or more.
    #[must_use]
    pub fn is_float(self) -> bool {
        self.info().kind == DtypeKind::Float
    }

    /// Whether elements can be converted to `other`: floats to floats, integers to integers.
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

/// The error for an unknown element type name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown element type `{name}`: use u8 to u64, i8 to i64, f16, bf16, f32, f64, bool, complex64 or float8 with e4m3fn, e4m3fnuz, e5m2, e5m2fnuz or e8m0fnu"
)]
pub struct UnknownDtype {
    /// The unknown name.
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
