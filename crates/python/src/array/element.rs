//! The element types of arrays: those of `wholemem`'s table, and `complex128`, which no tensor holds.

use pyo3::prelude::*;
use wholemem::{Dtype, DtypeInfo};

use crate::error::Raised;

/// The type of an array's elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Element {
    /// Its name in Python.
    pub(crate) name: &'static str,
    /// DLPack's code and bits.
    pub(crate) code: u8,
    pub(crate) bits: u8,
    /// numpy's name for it in interfaces, where numpy has it.
    pub(crate) typestr: Option<&'static str>,
    /// The format of the buffer protocol, where it has one.
    format: Option<&'static str>,
    /// The type of a tensor's elements, if tensors hold it.
    dtype: Option<Dtype>,
}

/// Code and bits tell one from another.
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

/// Two double precision numbers, in sixteen bytes.
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

/// Where each is among all, by its code and the logarithm of its bits: calls that take a microsecond ask.
static PLACES: [[u8; 8]; 16] = {
    let (mut places, mut place) = ([[u8::MAX; 8]; 16], ALL.len());
    while place > 0 {
        place -= 1;
        let Element { code, bits, .. } = ALL[place];
        #[expect(clippy::cast_possible_truncation, reason = "there are few")]
        let found = place as u8;
        let entry = &mut places[code as usize][bits.trailing_zeros() as usize];
        assert!(*entry == u8::MAX && bits.is_power_of_two(), "two elements are alike");
        *entry = found;
    }
    places
};

impl Element {
    /// What indices are that came as numbers of Python.
    pub(crate) const INDEX: Self = element(Dtype::I64);

    /// What anything else is made of.
    pub(crate) const BYTE: Self = element(Dtype::U8);

    /// The element that Python calls so.
    pub(crate) fn named(name: &str) -> Option<Self> {
        ALL.iter().copied().find(|element| element.name == name)
    }

    /// How many bytes it takes.
    pub(crate) fn len(self) -> usize {
        usize::from(self.bits / 8)
    }

    /// The integer of the same bits, if it is the upper half of a `float32`.
    pub(crate) fn half_of_float32(self) -> Option<Self> {
        (self.dtype == Some(Dtype::Bf16)).then(|| Self::named("uint16")).flatten()
    }

    /// Whether it can name rows.
    pub(crate) fn is_index(self) -> bool {
        matches!(self.dtype, Some(Dtype::I32 | Dtype::I64))
    }

    /// Whether it is a complex number.
    pub(crate) fn is_complex(self) -> bool {
        self.code == COMPLEX128.code
    }

    /// Whether complex numbers are made of it: such elements can be the negatives of what is in memory.
    pub(crate) fn is_part_of_complex(self) -> bool {
        matches!(self.dtype, Some(Dtype::F16 | Dtype::F32 | Dtype::F64))
    }

    /// The type of the elements of a tensor that holds it.
    pub(crate) fn stored(self) -> Result<Dtype, Raised> {
        let refused = || {
            let message = format!("tensors do not hold {}", self.name);
            Raised::new("WrongType", message).hint("convert the elements to another type first")
        };
        self.dtype.ok_or_else(refused)
    }

    /// The number type that it is, if it is one.
    pub(crate) fn number(self) -> Result<Dtype, Raised> {
        self.dtype.filter(|dtype| dtype.is_number()).ok_or_else(|| {
            let message = format!("cannot compute with {}", self.name);
            Raised::new("WrongType", message).hint("convert the array to another type first")
        })
    }

    /// The element of a tensor's type.
    pub(crate) fn of(dtype: Dtype) -> Self {
        element(dtype)
    }

    /// The element with DLPack's code and bits.
    pub(crate) fn of_code(code: u8, bits: u8, lanes: u16) -> Result<Self, Raised> {
        let place =
            PLACES.get(usize::from(code)).and_then(|places| places.get(bits.trailing_zeros() as usize));
        let found = place.and_then(|place| ALL.get(usize::from(*place)));
        found.copied().filter(|found| (found.bits, lanes) == (bits, 1)).ok_or_else(|| {
            let message =
                format!("no type of elements has DLPack's code {code} with {bits} bits in {lanes} lanes");
            Raised::new("WrongType", message)
        })
    }

    /// The element that numpy's interfaces name so.
    pub(crate) fn of_typestr(typestr: &str) -> Result<Self, Raised> {
        // One byte has no order, whatever stands in front.
        let same = |own: &str| own == typestr || own.ends_with('1') && own.get(1..) == typestr.get(1..);
        let found = ALL.iter().find(|element| element.typestr.is_some_and(same));
        found.copied().ok_or_else(|| {
            let message = format!("arrays of `{typestr}` are not taken");
            Raised::new("WrongType", message).hint("give numbers in the byte order of this machine")
        })
    }

    /// The element that a character of a buffer's format stands for.
    pub(crate) fn of_format(format: &str) -> Result<Self, Raised> {
        let (order, letters) =
            format.split_at(format.len() - format.trim_start_matches(['@', '=', '<']).len());
        let is_standard = order.starts_with(['=', '<']);
        // A `long` has 8 bytes in native size, and 4 in standard size. A character is a byte.
        let letters = match letters {
            "c" | "" => "B",
            "l" if is_standard => "i",
            "l" => "q",
            "L" if is_standard => "I",
            "L" => "Q",
            letters => letters,
        };
        ALL.iter().copied().find(|element| element.format == Some(letters)).ok_or_else(|| {
            let message = format!("buffers of `{format}` are not taken");
            Raised::new("WrongType", message).hint("give a buffer of plain numbers")
        })
    }
}

/// The types of a tensor's elements: name, whether they are numbers, and the format of the buffer protocol, if there is one.
///
/// >>> from wholemem._native import element_types
/// >>> [row for row in element_types() if row[0] in ("float32", "bfloat16", "bool")]
/// [('bfloat16', True, None), ('float32', True, 'f'), ('bool', False, '?')]
#[pyfunction]
pub(crate) fn element_types() -> Vec<(&'static str, bool, Option<&'static str>)> {
    let row = |dtype: Dtype| (dtype.info().python_name, dtype.is_number(), dtype.info().buffer_format);
    Dtype::ALL.map(row).to_vec()
}

/// A type by its name, or as numpy, torch and their like have it: `"float32"`, `np.float32`, `torch.float32`.
impl<'py> FromPyObject<'_, 'py> for Element {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let name = match given.extract::<String>() {
            Ok(name) => name,
            // A class of scalars has a name, everything else is written as its name.
            Err(_) => match given.getattr("__name__") {
                Ok(name) => name.extract()?,
                Err(_) => given.str()?.extract()?,
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
        let found = Self::named(name).or_else(|| Some(Self::of(name.parse().ok()?)));
        found.ok_or_else(|| {
            Raised::new("WrongType", format!("no type of elements is called `{name}`"))
                .hint("give a name such as `float32`, or a dtype of numpy or torch")
                .into()
        })
    }
}
