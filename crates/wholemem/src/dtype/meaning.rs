//! `Meaning`: logical types that are stored as another type.

use std::fmt;

use super::Dtype;

/// What a tensor's elements stand for, where it is not the number that they are stored as. It is kept in files, and nothing is
/// computed by it: such elements are moved, for those who know them.
///
/// The numbers are those that files use, and never change.
///
/// ```
/// use wholemem::{Dtype, Meaning};
///
/// assert_eq!(Meaning::Bool.stored_as(), Some(Dtype::U8));
/// assert_eq!(Meaning::Number.stored_as(), None); // as any
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u32)]
pub enum Meaning {
    /// The number that is stored.
    #[default]
    Number = 0,
    /// A truth value: zero or one, in a byte.
    Bool = 1,
    /// Two numbers of single precision, in eight bytes.
    Complex64 = 2,
    /// A float of one byte: four bits of exponent, no infinities.
    Float8E4m3fn = 3,
    /// The same without a negative zero.
    Float8E4m3fnuz = 4,
    /// A float of one byte: five bits of exponent.
    Float8E5m2 = 5,
    /// The same without infinities and a negative zero.
    Float8E5m2fnuz = 6,
    /// A power of two, in a byte.
    Float8E8m0fnu = 7,
}

impl Meaning {
    /// Every meaning, in the order of their numbers.
    pub const ALL: [Self; 8] = [
        Self::Number,
        Self::Bool,
        Self::Complex64,
        Self::Float8E4m3fn,
        Self::Float8E4m3fnuz,
        Self::Float8E5m2,
        Self::Float8E5m2fnuz,
        Self::Float8E8m0fnu,
    ];

    /// Its number.
    #[must_use]
    pub fn code(self) -> u32 {
        self as u32
    }

    /// The meaning of a number.
    #[must_use]
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.get(usize::try_from(code).ok()?).copied()
    }

    /// The type that elements of it are stored as; `None` if that is what they are.
    #[must_use]
    pub fn stored_as(self) -> Option<Dtype> {
        match self {
            Self::Number => None,
            Self::Complex64 => Some(Dtype::U64),
            _ => Some(Dtype::U8),
        }
    }

    /// Whether elements of a type can have it.
    #[must_use]
    pub fn is_of(self, dtype: Dtype) -> bool {
        self.stored_as().is_none_or(|stored| stored == dtype)
    }
}

impl fmt::Display for Meaning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Number => "number",
            Self::Bool => "bool",
            Self::Complex64 => "complex64",
            Self::Float8E4m3fn => "float8_e4m3fn",
            Self::Float8E4m3fnuz => "float8_e4m3fnuz",
            Self::Float8E5m2 => "float8_e5m2",
            Self::Float8E5m2fnuz => "float8_e5m2fnuz",
            Self::Float8E8m0fnu => "float8_e8m0fnu",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_meaning_is_found_by_its_number() {
        for (code, meaning) in (0..).zip(Meaning::ALL) {
            assert_eq!((meaning.code(), Meaning::from_code(code)), (code, Some(meaning)));
        }
        assert_eq!(Meaning::from_code(8), None);
    }
}
