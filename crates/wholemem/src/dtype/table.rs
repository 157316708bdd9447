//! The table of element types: the names and encodings of each type in every format that wholemem uses.
//!
//! Everything else that depends on an element type is derived from this table: the file formats, the program's output, and
//! the Python package, which reads it from the native module. Only the arithmetic is defined elsewhere.

use super::Dtype;

/// The kind of a tensor element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DtypeKind {
    /// An unsigned integer type.
    Unsigned,
    /// A signed integer type in two's complement.
    Signed,
    /// A floating-point type of 16 bits or more.
    Float,
    /// A Boolean.
    Bool,
    /// A complex number of two floats: the real and the imaginary part.
    Complex,
    /// A floating-point type of 8 bits.
    Float8,
}

/// The names and encodings of an element type ([`Dtype`]).
///
/// ```
/// use wholemem::Dtype;
///
/// let info = Dtype::F32.info();
/// assert_eq!((info.name, info.python_name, info.npy), ("f32", "float32", Some("<f4")));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct DtypeInfo {
    /// The element type that the other fields describe.
    pub dtype: Dtype,
    /// The name of the element type in the command-line program and in messages, such as `f32`.
    pub name: &'static str,
    /// The name of the element type in Python, numpy and torch, such as `float32`.
    pub python_name: &'static str,
    /// The length of an element in bytes.
    pub len: usize,
    /// The kind of the element type, such as a signed integer.
    pub kind: DtypeKind,
    /// The number type of the same length as which elements are stored and copied. A number type is stored as itself.
    pub storage: Dtype,
    /// The code in saved tensors that distinguishes element types with the same storage type; 0 for number types.
    pub saved_meaning: u32,
    /// The `descr` of the element type in `.npy` files and in numpy's array interface; `None` if numpy has no such type.
    pub npy: Option<&'static str>,
    /// The name of the element type in `.safetensors` files; `None` if the format has no such type.
    pub safetensors: Option<&'static str>,
    /// The type code and the number of bits of the element type in DLPack.
    pub dlpack: (u8, u8),
    /// The format of the element type in Python's buffer protocol, in native size; `None` if the protocol has none.
    pub buffer_format: Option<&'static str>,
}

/// The type codes of DLPack.
mod dlpack {
    pub(super) const INT: u8 = 0;
    pub(super) const UINT: u8 = 1;
    pub(super) const FLOAT: u8 = 2;
    pub(super) const BFLOAT: u8 = 4;
    pub(super) const COMPLEX: u8 = 5;
    pub(super) const BOOL: u8 = 6;
    pub(super) const FLOAT8_E4M3FN: u8 = 10;
    pub(super) const FLOAT8_E4M3FNUZ: u8 = 11;
    pub(super) const FLOAT8_E5M2: u8 = 12;
    pub(super) const FLOAT8_E5M2FNUZ: u8 = 13;
    pub(super) const FLOAT8_E8M0FNU: u8 = 14;
}

const fn integer(
    dtype: Dtype,
    (name, python_name): (&'static str, &'static str),
    kind: DtypeKind,
    len: usize,
    (npy, safetensors, format): (&'static str, &'static str, &'static str),
) -> DtypeInfo {
    let code = if matches!(kind, DtypeKind::Unsigned) { dlpack::UINT } else { dlpack::INT };
    let names = (Some(npy), Some(safetensors), Some(format));
    number(dtype, (name, python_name), kind, len, names, code)
}

const fn number(
    dtype: Dtype,
    (name, python_name): (&'static str, &'static str),
    kind: DtypeKind,
    len: usize,
    (npy, safetensors, buffer_format): (Option<&'static str>, Option<&'static str>, Option<&'static str>),
    code: u8,
) -> DtypeInfo {
    let dlpack = (code, bits(len));
    let (storage, saved_meaning) = (dtype, 0);
    DtypeInfo {
        dtype,
        name,
        python_name,
        len,
        kind,
        storage,
        saved_meaning,
        npy,
        safetensors,
        dlpack,
        buffer_format,
    }
}

const fn float8(
    dtype: Dtype,
    name: &'static str,
    saved_meaning: u32,
    safetensors: Option<&'static str>,
    code: u8,
) -> DtypeInfo {
    let info = number(dtype, (name, name), DtypeKind::Float8, 1, (None, safetensors, None), code);
    DtypeInfo { storage: Dtype::U8, saved_meaning, ..info }
}

const fn bits(len: usize) -> u8 {
    match len {
        1 => 8,
        2 => 16,
        4 => 32,
        8 => 64,
        _ => panic!("an element has 1, 2, 4 or 8 bytes"),
    }
}

/// The names and encodings of every element type, in the order of the types' codes.
pub(super) const TABLE: [DtypeInfo; Dtype::ALL.len()] = {
    use Dtype::{Bf16, Bool, Complex64, F16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64};
    use DtypeKind::{Float, Signed, Unsigned};
    [
        integer(U8, ("u8", "uint8"), Unsigned, 1, ("|u1", "U8", "B")),
        integer(I8, ("i8", "int8"), Signed, 1, ("|i1", "I8", "b")),
        integer(U16, ("u16", "uint16"), Unsigned, 2, ("<u2", "U16", "H")),
        integer(I16, ("i16", "int16"), Signed, 2, ("<i2", "I16", "h")),
        integer(U32, ("u32", "uint32"), Unsigned, 4, ("<u4", "U32", "I")),
        integer(I32, ("i32", "int32"), Signed, 4, ("<i4", "I32", "i")),
        integer(U64, ("u64", "uint64"), Unsigned, 8, ("<u8", "U64", "Q")),
        integer(I64, ("i64", "int64"), Signed, 8, ("<i8", "I64", "q")),
        number(F16, ("f16", "float16"), Float, 2, (Some("<f2"), Some("F16"), Some("e")), dlpack::FLOAT),
        number(Bf16, ("bf16", "bfloat16"), Float, 2, (None, Some("BF16"), None), dlpack::BFLOAT),
        number(F32, ("f32", "float32"), Float, 4, (Some("<f4"), Some("F32"), Some("f")), dlpack::FLOAT),
        number(F64, ("f64", "float64"), Float, 8, (Some("<f8"), Some("F64"), Some("d")), dlpack::FLOAT),
        DtypeInfo {
            storage: U8,
            saved_meaning: 1,
            ..number(
                Bool,
                ("bool", "bool"),
                DtypeKind::Bool,
                1,
                (Some("|b1"), Some("BOOL"), Some("?")),
                dlpack::BOOL,
            )
        },
        DtypeInfo {
            storage: U64,
            saved_meaning: 2,
            ..number(
                Complex64,
                ("complex64", "complex64"),
                DtypeKind::Complex,
                8,
                (Some("<c8"), Some("C64"), Some("Zf")),
                dlpack::COMPLEX,
            )
        },
        float8(Dtype::Float8E4m3fn, "float8_e4m3fn", 3, Some("F8_E4M3"), dlpack::FLOAT8_E4M3FN),
        float8(Dtype::Float8E4m3fnuz, "float8_e4m3fnuz", 4, None, dlpack::FLOAT8_E4M3FNUZ),
        float8(Dtype::Float8E5m2, "float8_e5m2", 5, Some("F8_E5M2"), dlpack::FLOAT8_E5M2),
        float8(Dtype::Float8E5m2fnuz, "float8_e5m2fnuz", 6, None, dlpack::FLOAT8_E5M2FNUZ),
        float8(Dtype::Float8E8m0fnu, "float8_e8m0fnu", 7, Some("F8_E8M0"), dlpack::FLOAT8_E8M0FNU),
    ]
};

// The code of an element type must be its index in the table.
const _: () = {
    let mut code = 0;
    while code < TABLE.len() {
        assert!(TABLE[code].dtype as usize == code, "the table is not in the order of codes");
        code += 1;
    }
};

impl Dtype {
    /// Returns the names and encodings of this element type.
    #[must_use]
    #[inline]
    pub const fn info(self) -> &'static DtypeInfo {
        const ROWS: &[DtypeInfo; Dtype::ALL.len()] = &TABLE;
        &ROWS[self as usize]
    }

    /// Returns the first element type whose table entry satisfies a predicate.
    fn find(is_wanted: impl Fn(&DtypeInfo) -> bool) -> Option<Self> {
        TABLE.iter().find(|info| is_wanted(info)).map(|info| info.dtype)
    }

    /// Returns the element type with the given `descr` of `.npy` files, such as `<f4` or `|b1`.
    ///
    /// ```
    /// use wholemem::Dtype;
    ///
    /// assert_eq!(Dtype::from_npy("<f4"), Some(Dtype::F32));
    /// assert_eq!(Dtype::from_npy("=u1"), Some(Dtype::U8)); // byte order is ignored for one byte
    /// assert_eq!(Dtype::from_npy(">f4"), None);
    /// ```
    #[must_use]
    pub fn from_npy(descr: &str) -> Option<Self> {
        fn without_order(descr: &str) -> &str {
            descr.trim_start_matches(['<', '|', '='])
        }
        Self::find(|info| info.npy.is_some_and(|own| without_order(own) == without_order(descr)))
    }

    /// Returns the element type with the given name in `.safetensors` files, such as `F32` or `BOOL`.
    #[must_use]
    pub fn from_safetensors(name: &str) -> Option<Self> {
        Self::find(|info| info.safetensors == Some(name))
    }

    /// Returns the element type with the given name in Python, numpy and torch, such as `float32` or `bool`.
    #[must_use]
    pub fn from_python_name(name: &str) -> Option<Self> {
        Self::find(|info| info.python_name == name)
    }

    /// Returns the element type with the given codes in saved tensors: of the storage type, and of the meaning.
    pub(crate) fn from_saved(storage: u32, meaning: u32) -> Option<Self> {
        Self::find(|info| info.storage.code() == storage && info.saved_meaning == meaning)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::hash::Hash;

    use super::*;

    fn are_unique<T: Eq + Hash>(of: impl Fn(&DtypeInfo) -> Option<T>) -> bool {
        let all: Vec<_> = TABLE.iter().filter_map(of).collect();
        let count = all.len();
        all.into_iter().collect::<HashSet<_>>().len() == count
    }

    #[test]
    fn no_two_types_share_a_name_or_an_encoding() {
        assert!(are_unique(|info| Some(info.name)));
        assert!(are_unique(|info| Some(info.python_name)));
        assert!(are_unique(|info| info.npy));
        assert!(are_unique(|info| info.safetensors));
        assert!(are_unique(|info| Some(info.dlpack)));
        assert!(are_unique(|info| info.buffer_format));
        assert!(are_unique(|info| Some((info.storage.code(), info.saved_meaning))));
    }

    #[test]
    fn types_have_the_length_of_their_storage_type() {
        for info in TABLE {
            let storage = info.storage.info();
            assert_eq!((storage.storage, storage.len), (info.storage, info.len), "{}", info.name);
            assert_eq!(info.dtype.is_number(), info.storage == info.dtype, "{}", info.name);
            assert_eq!(usize::from(info.dlpack.1), info.len * 8, "{}", info.name);
        }
    }

    #[test]
    fn types_are_found_by_their_names_and_codes() {
        for info in TABLE {
            assert_eq!(info.npy.and_then(Dtype::from_npy), info.npy.map(|_| info.dtype));
            assert_eq!(
                info.safetensors.and_then(Dtype::from_safetensors),
                info.safetensors.map(|_| info.dtype)
            );
            assert_eq!(Dtype::from_python_name(info.python_name), Some(info.dtype));
            assert_eq!(Dtype::from_saved(info.storage.code(), info.saved_meaning), Some(info.dtype));
        }
        assert_eq!(Dtype::from_saved(Dtype::F32.code(), 1), None, "Booleans are stored as `U8`");
        assert_eq!(Dtype::from_saved(0, 8), None);
    }
}
