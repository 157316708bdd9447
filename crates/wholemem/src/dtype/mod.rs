//! The types of a tensor's elements.

mod element;
mod meaning;
mod reduce;

use std::fmt;
use std::str::FromStr;

pub(crate) use element::{Element, add, convert, with_floats, with_integers, with_types};
pub use meaning::Meaning;
pub use reduce::{ReduceOp, UnknownReduceOp, combine_naive};

/// The type of a tensor's elements. Anything else, structures for one, is a row of `U8`.
///
/// The numbers are those that kernels, C and files use, and never change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u32)]
pub enum Dtype {
    /// Unsigned, one byte; also for truth values and raw bytes.
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
}

impl Dtype {
    /// Every type, in the order of their numbers.
    pub const ALL: [Self; 12] = [
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

    /// Its number.
    #[must_use]
    pub fn code(self) -> u32 {
        self as u32
    }

    /// The type of a number.
    #[must_use]
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.get(usize::try_from(code).ok()?).copied()
    }

    /// How many bytes an element takes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "an element is never empty")]
    pub fn len(self) -> usize {
        match self {
            Self::U8 | Self::I8 => 1,
            Self::U16 | Self::I16 | Self::F16 | Self::Bf16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
        }
    }

    /// Whether it has a fraction.
    #[must_use]
    pub fn is_float(self) -> bool {
        matches!(self, Self::F16 | Self::Bf16 | Self::F32 | Self::F64)
    }

    /// Whether elements can be converted to `other`: floats to floats, integers to integers.
    #[must_use]
    pub fn converts_to(self, other: Self) -> bool {
        self.is_float() == other.is_float()
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::F64 => "f64",
        })
    }
}

impl FromStr for Dtype {
    type Err = UnknownDtype;

    fn from_str(name: &str) -> Result<Self, UnknownDtype> {
        let found = Self::ALL.into_iter().find(|dtype| dtype.to_string() == name);
        found.ok_or_else(|| UnknownDtype { name: name.to_owned() })
    }
}

/// A name that no type of elements has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no type is called `{name}`: there are u8 to u64, i8 to i64, f16, bf16, f32 and f64")]
pub struct UnknownDtype {
    /// The name.
    pub name: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_lead_back() {
        for dtype in Dtype::ALL {
            assert_eq!(Dtype::from_code(dtype.code()), Some(dtype));
            assert_eq!(dtype.to_string().parse(), Ok(dtype));
        }
        assert_eq!(Dtype::from_code(12), None);
        assert_eq!("f8".parse::<Dtype>(), Err(UnknownDtype { name: "f8".to_owned() }));
    }
}
