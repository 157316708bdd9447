//! The element types of arrays: the types of `wholemem::Dtype`, and `complex128`, which tables do not support.

use pyo3::prelude::*;
use wholemem::{Dtype, DtypeInfo};

use crate::error::Exception;

/// The type of an array's elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Element {
    /// The name of the element type in Python.
    pub(crate) name: &'static str,
    /// The type code in DLPack, which identifies the element type together with `bits`.
    pub(crate) code: u8,
    pub(crate) bits: u8,
    /// The type string of the element type in numpy's array interface, if numpy has the type.
    pub(crate) typestr: Option<&'static str>,
    /// The format of the element type in Python's buffer protocol, if the protocol has the type.
    format: Option<&'static str>,
    /// The matching element type of tables, if tables support the type.
    dtype: Option<Dtype>,
}

/// Two element types are equal if their type codes and numbers of bits in DLPack are equal.
impl PartialEq for Element {
    fn eq(&self, other: &Self) -> bool {
        (self.code, self.bits) == (other.code, other.bits)
    }
}

impl Eq for Element {}

const fn element(dtype: Dtype) -> Element {
    let DtypeInfo { python_name: name, npy: typestr, buffer_format: format, dlpack, .. } = *dtype.info();
    let (code, bits) = dlpack;
    Element { name, code, bits, typestr, format, dtype: Some(dtype) }
}

/// A complex number of two `float64`.
const COMPLEX128: Element = Element {
    name: "complex128",
    bits: 128,
    typestr: Some("<c16"),
    format: Some("Zd"),
    dtype: None,
    ..element(Dtype::Complex64)
};

static ALL: [Element; Dtype::ALL.len() + 1] = {
    let mut all = [COMPLEX128; Dtype::ALL.len() + 1];
    let mut code = 0;
    while code < Dtype::ALL.len() {
        all[code] = element(Dtype::ALL[code]);
        code += 1;
    }
    all
};

/// The index of each element type in `ALL`, by DLPack's type code and log2 of the bits. It makes the lookup fast enough for calls
/// that take a microsecond.
static POSITIONS: [[u8; 8]; 16] = {
    let (mut positions, mut position) = ([[u8::MAX; 8]; 16], ALL.len());
    while position > 0 {
        position -= 1;
        let Element { code, bits, .. } = ALL[position];
        #[expect(clippy::cast_possible_truncation, reason = "there are few")]
        let index = position as u8;
        let entry = &mut positions[code as usize][bits.trailing_zeros() as usize];
        assert!(*entry == u8::MAX && bits.is_power_of_two(), "two elements are alike");
        *entry = index;
    }
    positions
};

impl Element {
    /// The element type of indices that are given as Python ints.
    pub(crate) const INDEX: Self = element(Dtype::I64);

    /// The element type of memory that nothing describes as an array: bytes.
    pub(crate) const BYTE: Self = element(Dtype::U8);

    /// Returns the element type with the given name in Python.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        ALL.iter().copied().find(|element| element.name == name)
    }

    /// Returns the size of one element in bytes.
    pub(crate) fn len(self) -> usize {
        usize::from(self.bits / 8)
    }

    /// Returns `uint16` if this type is `bfloat16`, whose bits are the upper half of a `float32`; otherwise `None`.
    pub(crate) fn bfloat16_bits(self) -> Option<Self> {
        (self.dtype == Some(Dtype::Bf16)).then(|| Self::from_name("uint16")).flatten()
    }

    /// Returns true if elements of this type are valid as indices.
    pub(crate) fn is_index(self) -> bool {
        matches!(self.dtype, Some(Dtype::I32 | Dtype::I64))
    }

    /// Returns true if this element type is complex.
    pub(crate) fn is_complex(self) -> bool {
        self.code == COMPLEX128.code
    }

    /// Returns true if complex numbers consist of elements of this type. torch may negate such elements lazily (`is_neg`).
    pub(crate) fn is_part_of_complex(self) -> bool {
        matches!(self.dtype, Some(Dtype::F16 | Dtype::F32 | Dtype::F64))
    }

    /// Returns the element type of a table that stores elements of this type.
    pub(crate) fn table_dtype(self) -> Result<Dtype, Exception> {
        let refused = || {
            let message = format!("tables cannot store {}", self.name);
            Exception::new("WrongType", message).hint("convert the elements to another type first")
        };
        self.dtype.ok_or_else(refused)
    }

    /// Returns the matching element type of tables, or an error if the type does not support arithmetic.
    pub(crate) fn arithmetic_dtype(self) -> Result<Dtype, Exception> {
        self.dtype.filter(|dtype| dtype.is_number()).ok_or_else(|| {
            let message = format!("cannot compute with {}", self.name);
            Exception::new("WrongType", message).hint("convert the array to another type first")
        })
    }

    /// Returns the element type of arrays that matches an element type of tables.
    pub(crate) fn of(dtype: Dtype) -> Self {
        element(dtype)
    }

    /// Returns the element type with the given type code, bits and lanes of DLPack.
    pub(crate) fn of_code(code: u8, bits: u8, lanes: u16) -> Result<Self, Exception> {
        let position = POSITIONS
            .get(usize::from(code))
            .and_then(|positions| positions.get(bits.trailing_zeros() as usize));
        let found = position.and_then(|position| ALL.get(usize::from(*position)));
        found.copied().filter(|found| (found.bits, lanes) == (bits, 1)).ok_or_else(|| {
            let message =
                format!("DLPack type code {code} with {bits} bits and {lanes} lanes is not supported");
            Exception::new("WrongType", message)
        })
    }

    /// Returns the element type with the given type string of numpy's array interface.
    pub(crate) fn of_typestr(typestr: &str) -> Result<Self, Exception> {
        // A type of one byte has no byte order, so the first character of its type string is ignored.
        let same = |own: &str| own == typestr || own.ends_with('1') && own.get(1..) == typestr.get(1..);
        let found = ALL.iter().find(|element| element.typestr.is_some_and(same));
        found.copied().ok_or_else(|| {
            let message = format!("arrays of type `{typestr}` are not supported");
            Exception::new("WrongType", message).hint("pass numbers in the byte order of this machine")
        })
    }

    /// Returns the element type with the given format of Python's buffer protocol.
    pub(crate) fn of_format(format: &str) -> Result<Self, Exception> {
        let (order, letters) =
            format.split_at(format.len() - format.trim_start_matches(['@', '=', '<']).len());
        let is_standard = order.starts_with(['=', '<']);
        // The format `l` (`long`) has 8 bytes in native mode and 4 in standard mode. The format `c` (a character) is read as a
        // byte.
        let letters = match letters {
            "c" | "" => "B",
            "l" if is_standard => "i",
            "l" => "q",
            "L" if is_standard => "I",
            "L" => "Q",
            letters => letters,
        };
        ALL.iter().copied().find(|element| element.format == Some(letters)).ok_or_else(|| {
            let message = format!("buffers of format `{format}` are not supported");
            Exception::new("WrongType", message).hint("pass a buffer of plain numbers")
        })
    }
}

/// Lists the element types that tables support: the name, whether arithmetic is supported, and the format in Python's
/// buffer protocol.
///
/// Returns:
///     One tuple for each type. The format is ``None`` if the buffer protocol has none.
///
/// >>> from wholemem._native import element_types
/// >>> [row for row in element_types() if row[0] in ("float32", "bfloat16", "bool")]
/// [('bfloat16', True, None), ('float32', True, 'f'), ('bool', False, '?')]
#[pyfunction]
pub(crate) fn element_types() -> Vec<(&'static str, bool, Option<&'static str>)> {
    let row = |dtype: Dtype| (dtype.info().python_name, dtype.is_number(), dtype.info().buffer_format);
    Dtype::ALL.map(row).to_vec()
}

/// Extracts an element type from its name, or from a dtype of numpy, torch or another framework: `"float32"`, `np.float32`,
/// `torch.float32`.
impl<'py> FromPyObject<'_, 'py> for Element {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let name = match object.extract::<String>() {
            Ok(name) => name,
            // A scalar class such as `np.float32` has `__name__`; a dtype such as `torch.float32` prints as its name.
            Err(_) => match object.getattr("__name__") {
                Ok(name) => name.extract()?,
                Err(_) => object.str()?.extract()?,
            },
        };
        let name = name.rsplit('.').next().unwrap_or_default();
        let name = match name {
            "bool_" => "bool",
            "float" | "double" => "float64",
            "int" => "int64",
            "half" => "float16",
            name => name,
        };
        let found = Self::from_name(name).or_else(|| Some(Self::of(name.parse().ok()?)));
        found.ok_or_else(|| {
            Exception::new("WrongType", format!("the element type `{name}` does not exist"))
                .hint("pass a name such as `float32`, or a dtype of numpy or torch")
                .into()
        })
    }
}
