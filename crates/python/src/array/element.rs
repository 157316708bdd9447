//! The types of an array's elements: how Python, numpy and DLPack call each, and what the tensors below store it as.

use pyo3::prelude::*;
use wholemem::{Dtype, Meaning};

use crate::error::Raised;

/// Kinds of numbers, by DLPack's code.
mod code {
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
    /// What tensors store it as, and what that stands for: they count with numbers, and move the others.
    stored: Option<(Dtype, Meaning)>,
}

/// Code and bits tell one from another.
impl PartialEq for Element {
    fn eq(&self, other: &Self) -> bool {
        (self.code, self.bits) == (other.code, other.bits)
    }
}

impl Eq for Element {}

const fn element(
    name: &'static str,
    (code, bits): (u8, u8),
    typestr: Option<&'static str>,
    stored: Option<(Dtype, Meaning)>,
) -> Element {
    Element { name, code, bits, typestr, stored }
}

const fn number(name: &'static str, kind: (u8, u8), typestr: &'static str, dtype: Dtype) -> Element {
    element(name, kind, Some(typestr), Some((dtype, Meaning::Number)))
}

const fn small_float(name: &'static str, code: u8, meaning: Meaning) -> Element {
    element(name, (code, 8), None, Some((Dtype::U8, meaning)))
}

static ALL: [Element; 20] = [
    Element::BYTE,
    number("int8", (code::INT, 8), "|i1", Dtype::I8),
    number("uint16", (code::UINT, 16), "<u2", Dtype::U16),
    number("int16", (code::INT, 16), "<i2", Dtype::I16),
    number("uint32", (code::UINT, 32), "<u4", Dtype::U32),
    number("int32", (code::INT, 32), "<i4", Dtype::I32),
    number("uint64", (code::UINT, 64), "<u8", Dtype::U64),
    number("int64", (code::INT, 64), "<i8", Dtype::I64),
    number("float16", (code::FLOAT, 16), "<f2", Dtype::F16),
    number("float32", (code::FLOAT, 32), "<f4", Dtype::F32),
    number("float64", (code::FLOAT, 64), "<f8", Dtype::F64),
    element("bfloat16", (code::BFLOAT, 16), None, Some((Dtype::Bf16, Meaning::Number))),
    element("bool", (code::BOOL, 8), Some("|b1"), Some((Dtype::U8, Meaning::Bool))),
    element("complex64", (code::COMPLEX, 64), Some("<c8"), Some((Dtype::U64, Meaning::Complex64))),
    element("complex128", (code::COMPLEX, 128), Some("<c16"), None),
    small_float("float8_e4m3fn", code::FLOAT8_E4M3FN, Meaning::Float8E4m3fn),
    small_float("float8_e4m3fnuz", code::FLOAT8_E4M3FNUZ, Meaning::Float8E4m3fnuz),
    small_float("float8_e5m2", code::FLOAT8_E5M2, Meaning::Float8E5m2),
    small_float("float8_e5m2fnuz", code::FLOAT8_E5M2FNUZ, Meaning::Float8E5m2fnuz),
    small_float("float8_e8m0fnu", code::FLOAT8_E8M0FNU, Meaning::Float8E8m0fnu),
];

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
    /// What anything else is made of.
    pub(crate) const BYTE: Self = number("uint8", (code::UINT, 8), "|u1", Dtype::U8);

    /// The element that Python calls so.
    pub(crate) fn named(name: &str) -> Option<Self> {
        ALL.iter().copied().find(|element| element.name == name)
    }

    /// How many bytes it takes.
    pub(crate) fn len(self) -> usize {
        usize::from(self.bits / 8)
    }

    /// Whether it can name rows.
    pub(crate) fn is_index(self) -> bool {
        self.code == code::INT && matches!(self.bits, 32 | 64)
    }

    /// Whether it is a complex number.
    pub(crate) fn is_complex(self) -> bool {
        self.code == code::COMPLEX
    }

    /// Whether complex numbers are made of it: such elements can be the negatives of what is in memory.
    pub(crate) fn is_part_of_complex(self) -> bool {
        self.code == code::FLOAT
    }

    /// What a tensor stores it as.
    pub(crate) fn stored(self) -> Result<Dtype, Raised> {
        let refused = || {
            let message = format!("tensors do not hold {}", self.name);
            Raised::new("WrongType", message).hint("convert the elements to another type first")
        };
        self.stored.map(|(dtype, _)| dtype).ok_or_else(refused)
    }

    /// What that stands for.
    pub(crate) fn meaning(self) -> Meaning {
        self.stored.map(|(_, meaning)| meaning).unwrap_or_default()
    }

    /// What it is to those who count with it.
    pub(crate) fn number(self) -> Result<Dtype, Raised> {
        let number = self.stored.filter(|(_, meaning)| *meaning == Meaning::Number).map(|(dtype, _)| dtype);
        number.ok_or_else(|| {
            let message = format!("cannot compute with {}", self.name);
            Raised::new("WrongType", message).hint("convert the array to another type first")
        })
    }

    /// The element that a tensor's type is, where it stands for that.
    pub(crate) fn of(dtype: Dtype, meaning: Meaning) -> Self {
        let found = ALL.iter().find(|element| element.stored == Some((dtype, meaning)));
        // Every type and every meaning has a row of its own above.
        found.copied().unwrap_or(Self::BYTE)
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
        let long = if order.starts_with(['=', '<']) { 32 } else { 64 };
        let (code, bits) = match letters {
            "b" => (code::INT, 8),
            "B" | "c" | "" => (code::UINT, 8),
            "?" => (code::BOOL, 8),
            "h" => (code::INT, 16),
            "H" => (code::UINT, 16),
            "i" => (code::INT, 32),
            "I" => (code::UINT, 32),
            "l" => (code::INT, long),
            "L" => (code::UINT, long),
            "q" => (code::INT, 64),
            "Q" => (code::UINT, 64),
            "e" => (code::FLOAT, 16),
            "f" => (code::FLOAT, 32),
            "d" => (code::FLOAT, 64),
            "Zf" => (code::COMPLEX, 64),
            "Zd" => (code::COMPLEX, 128),
            _ => {
                let message = format!("buffers of `{format}` are not taken");
                return Err(Raised::new("WrongType", message).hint("give a buffer of plain numbers"));
            }
        };
        Self::of_code(code, bits, 1)
    }
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
        let found = Self::named(name).or_else(|| Some(Self::of(name.parse().ok()?, Meaning::Number)));
        found.ok_or_else(|| {
            Raised::new("WrongType", format!("no type of elements is called `{name}`"))
                .hint("give a name such as `float32`, or a dtype of numpy or torch")
                .into()
        })
    }
}
