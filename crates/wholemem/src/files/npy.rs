//! Reads and writes the header of `.npy` files: a Python dictionary with three entries, followed by the elements.

use super::FileProblem;
use crate::Dtype;

const MAGIC: &[u8; 6] = b"\x93NUMPY";

/// The maximum length of the header of a `.npy` file. An array has at most 64 dimensions, and usual headers have about 100 bytes.
pub const MAX_HEADER_LEN: usize = 64 << 10;

/// The element type, the shape and the offset of the elements that the header of a `.npy` file describes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NpyLayout {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    /// The offset in bytes of the elements in the file.
    pub(super) offset: u64,
}

fn malformed(what: &'static str) -> FileProblem {
    FileProblem::Malformed { format: ".npy file", reason: what }
}

/// Returns the text of the header of a `.npy` file and the offset of the elements. `bytes` are the first [`MAX_HEADER_LEN`] bytes
/// of a file of `file_len` bytes, or all of them. If the element type is a [`Dtype`], also checks that the file is long enough,
/// in either order of dimensions.
///
/// # Errors
/// [`FileProblem::Malformed`], [`FileProblem::WrongLength`].
pub fn header(bytes: &[u8], file_len: u64) -> Result<(&str, u64), FileProblem> {
    let (text, offset) = text(bytes)?;
    let NpyHeader { descr, shape, .. } = NpyHeader::parse(text)?;
    if let Ok(dtype) = dtype_of(&descr) {
        let len = shape.iter().try_fold(dtype.len() as u64, |len, count| len.checked_mul(*count));
        let needed = len.and_then(|len| len.checked_add(offset));
        let needed = needed.ok_or_else(|| malformed("the array is too long"))?;
        if needed > file_len {
            return Err(FileProblem::WrongLength { len: file_len, needed });
        }
    }
    Ok((text, offset))
}

fn text(bytes: &[u8]) -> Result<(&str, u64), FileProblem> {
    let rest =
        bytes.strip_prefix(MAGIC).ok_or_else(|| malformed("it does not begin with the magic bytes"))?;
    let (version, rest) =
        rest.split_first_chunk::<2>().ok_or_else(|| malformed("the header is truncated"))?;
    let (len, rest) = match version {
        [1, _] => rest.split_first_chunk().map(|(len, rest)| (usize::from(u16::from_le_bytes(*len)), rest)),
        [2 | 3, _] => rest.split_first_chunk().map(|(len, rest)| (u32::from_le_bytes(*len) as usize, rest)),
        _ => return Err(malformed("unknown version")),
    }
    .ok_or_else(|| malformed("the header is truncated"))?;
    let text = rest.get(..len).ok_or_else(|| malformed("the header is truncated"))?;
    let text = std::str::from_utf8(text).map_err(|_| malformed("the header is not UTF-8"))?;
    Ok((text.trim(), (bytes.len() - rest.len() + len) as u64))
}

/// The parsed header of a `.npy` file. Its element type need not be one that tensors support.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NpyHeader {
    /// The element type as numpy writes it, such as `<f4`; `structure` for a structured type.
    pub descr: String,
    /// True if the array is in Fortran order: the first dimension varies fastest.
    pub columns_first: bool,
    /// The shape of the array.
    pub shape: Vec<u64>,
}

impl NpyHeader {
    /// Parses the text of the header of a `.npy` file.
    ///
    /// ```
    /// use wholemem::files::npy::NpyHeader;
    ///
    /// let header = NpyHeader::parse("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }")?;
    /// assert_eq!((header.descr.as_str(), &header.shape[..]), ("<f4", &[3, 4][..]));
    /// # Ok::<(), wholemem::files::FileProblem>(())
    /// ```
    ///
    /// # Errors
    /// [`FileProblem::Malformed`].
    pub fn parse(text: &str) -> Result<Self, FileProblem> {
        let read =
            DictParser { rest: text }.read().ok_or_else(|| malformed("the header is not a dictionary"))?;
        match (read.descr, read.columns_first, read.shape) {
            (Some(descr), Some(columns_first), Some(shape)) => Ok(Self { descr, columns_first, shape }),
            _ => Err(malformed("the header lacks `descr`, `fortran_order` or `shape`")),
        }
    }
}

/// Decodes the header of a `.npy` file. `bytes` are the first [`MAX_HEADER_LEN`] bytes of the file, or all of them.
pub(super) fn decode(bytes: &[u8]) -> Result<NpyLayout, FileProblem> {
    let (text, offset) = text(bytes)?;
    let NpyHeader { descr, columns_first, shape } = NpyHeader::parse(text)?;
    if columns_first && shape.len() > 1 {
        return Err(FileProblem::ColumnsFirst);
    }
    Ok(NpyLayout { dtype: dtype_of(&descr)?, shape, offset })
}

fn dtype_of(descr: &str) -> Result<Dtype, FileProblem> {
    Dtype::from_npy(descr).ok_or_else(|| FileProblem::UnknownType { name: descr.to_owned() })
}

/// The entries of the dictionary in the header of a `.npy` file; `None` for a missing entry.
#[derive(Default)]
struct DictEntries {
    descr: Option<String>,
    columns_first: Option<bool>,
    shape: Option<Vec<u64>>,
}

/// A parser of a Python dictionary with string keys whose values are strings, Booleans and tuples of integers.
struct DictParser<'a> {
    rest: &'a str,
}

impl<'a> DictParser<'a> {
    fn read(mut self) -> Option<DictEntries> {
        let mut header = DictEntries::default();
        self.take('{')?;
        while self.take('}').is_none() {
            let key = self.text()?;
            self.take(':')?;
            match key {
                // The `descr` of a structured type is a list. Tensors do not support structured types, so the header is not
                // parsed further.
                "descr" if self.rest.starts_with('[') => {
                    return Some(DictEntries { descr: Some("structure".into()), ..structured_type() });
                }
                "descr" => header.descr = Some(self.text()?.to_owned()),
                "fortran_order" => header.columns_first = Some(self.truth()?),
                "shape" => header.shape = Some(self.tuple()?),
                _ => return None,
            }
            if self.take(',').is_none() {
                self.take('}')?;
                break;
            }
        }
        self.rest.is_empty().then_some(header)
    }

    fn take(&mut self, token: char) -> Option<()> {
        self.rest = self.rest.strip_prefix(token)?.trim_start();
        Some(())
    }

    fn text(&mut self) -> Option<&'a str> {
        let quote = self.rest.chars().next().filter(|quote| ['\'', '"'].contains(quote))?;
        let (text, rest) = self.rest[1..].split_once(quote)?;
        self.rest = rest.trim_start();
        Some(text)
    }

    fn truth(&mut self) -> Option<bool> {
        let value = [("True", true), ("False", false)].into_iter();
        let (word, value) = value.into_iter().find(|(word, _)| self.rest.starts_with(word))?;
        self.rest = self.rest[word.len()..].trim_start();
        Some(value)
    }

    fn tuple(&mut self) -> Option<Vec<u64>> {
        let mut numbers = Vec::new();
        self.take('(')?;
        while self.take(')').is_none() {
            let len = self.rest.find(|letter: char| !letter.is_ascii_digit())?;
            numbers.push(self.rest[..len].parse().ok()?);
            self.rest = self.rest[len..].trim_start();
            if self.take(',').is_none() {
                self.take(')')?;
                break;
            }
        }
        Some(numbers)
    }
}

/// Returns the entries of the header for an array of a structured type. The caller sets `descr`; order and shape are
/// placeholders.
fn structured_type() -> DictEntries {
    DictEntries { descr: None, columns_first: Some(false), shape: Some(Vec::new()) }
}

/// Encodes the header of a `.npy` file as numpy does, up to the offset of the elements.
pub(super) fn encode(dtype: Dtype, shape: &[u64]) -> Result<Vec<u8>, FileProblem> {
    let descr = dtype.info().npy.ok_or_else(|| FileProblem::UnknownType { name: dtype.to_string() })?;
    let numbers: String = shape.iter().map(|len| format!("{len}, ")).collect();
    // As in Python, a tuple of one number is written with a comma at the end.
    let numbers = if shape.len() == 1 { numbers.trim_end() } else { numbers.trim_end_matches(", ") };
    encode_header(&format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({numbers}), }}"))
}

/// Encodes the header of a `.npy` file with the given text, padded so that the elements begin at a multiple of 64 bytes.
///
/// # Errors
/// [`FileProblem::Malformed`] for a text that is longer than 64 KiB.
pub fn encode_header(text: &str) -> Result<Vec<u8>, FileProblem> {
    const PREFIX_LEN: usize = 10;
    let len = (PREFIX_LEN + text.len() + 1).next_multiple_of(64) - PREFIX_LEN;
    let padding = " ".repeat(len - 1 - text.len());
    let len = u16::try_from(len).map_err(|_| malformed("it has too many dimensions"))?;
    Ok([&MAGIC[..], &[1, 0], &len.to_le_bytes(), text.as_bytes(), padding.as_bytes(), b"\n"].concat())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file(header: &str) -> Vec<u8> {
        let len = u16::try_from(header.len()).unwrap().to_le_bytes();
        [&MAGIC[..], &[1, 0], &len, header.as_bytes(), &[0; 32]].concat()
    }

    #[test]
    fn headers_written_by_numpy_are_decoded() {
        let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }          \n";
        let expected = NpyLayout { dtype: Dtype::F32, shape: vec![3, 4], offset: 10 + header.len() as u64 };
        assert_eq!(decode(&file(header)), Ok(expected));
        let header = "{'descr': '|b1', 'fortran_order': True, 'shape': (7,), }\n";
        let read = decode(&file(header)).unwrap();
        assert_eq!(read.shape, [7], "an array of one dimension has no order");
        assert_eq!(read.dtype, Dtype::Bool);
        let header = "{'shape': (), 'fortran_order': False, 'descr': '<i8'}";
        assert_eq!(decode(&file(header)).unwrap().shape, [0; 0]);
    }

    #[test]
    fn unsupported_types_are_rejected_by_name() {
        let unknown = |name: &str| Err(FileProblem::UnknownType { name: name.to_owned() });
        let of =
            |descr: &str| file(&format!("{{'descr': {descr}, 'fortran_order': False, 'shape': (3,), }}"));
        assert_eq!(decode(&of("'>f4'")), unknown(">f4"));
        assert_eq!(decode(&of("'<c16'")), unknown("<c16"));
        assert_eq!(decode(&of("[('a', '<f4')]")), unknown("structure"));
        let columns_first = file("{'descr': '<f4', 'fortran_order': True, 'shape': (3, 4), }");
        assert_eq!(decode(&columns_first), Err(FileProblem::ColumnsFirst));
    }

    proptest! {
        #[test]
        fn encoded_headers_round_trip(
            dtype in prop::sample::select(&Dtype::ALL[..]),
            shape in prop::collection::vec(any::<u64>(), 0..9),
        ) {
            let header = encode(dtype, &shape);
            let is_numpys = !(dtype == Dtype::Bf16 || dtype.to_string().starts_with("float8"));
            prop_assert_eq!(header.is_ok(), is_numpys);
            if let Ok(header) = header {
                prop_assert_eq!(header.len() % 64, 0);
                let offset = header.len() as u64;
                prop_assert_eq!(decode(&header), Ok(NpyLayout { dtype, shape, offset }));
            }
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..80), text in "[{}(),:'a-z0-9 ]{0,60}") {
            let _ = (decode(&bytes), header(&file(&text), 100));
            let _ = decode(&file(&text));
            let _ = decode(&[&MAGIC[..], &bytes].concat());
        }
    }
}
