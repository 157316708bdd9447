//! The header of a `.npy` file: a Python dictionary of three entries, in front of the elements.

use super::FileProblem;
use crate::Dtype;

const MAGIC: &[u8; 6] = b"\x93NUMPY";

/// The longest header that is read. An array has at most 64 dimensions; real headers have about a hundred bytes.
pub const LONGEST: usize = 64 << 10;

/// What a header says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Npy {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    /// Where the elements begin in the file.
    pub(super) offset: u64,
}

fn malformed(what: &'static str) -> FileProblem {
    FileProblem::Malformed { format: ".npy file", what }
}

/// The text of the header at the front of a file that is `file_len` long, and where the elements begin. `bytes` are the first
/// [`LONGEST`] of the file, or all. The elements are there, where their type is one of ours; how they are ordered does not
/// matter.
///
/// # Errors
/// [`FileProblem::Malformed`], [`FileProblem::WrongLength`].
pub fn header(bytes: &[u8], file_len: u64) -> Result<(&str, u64), FileProblem> {
    let (text, offset) = text(bytes)?;
    let Header { descr, shape, .. } = Header::parse(text)?;
    if let Ok(dtype) = dtype_of(&descr) {
        let len = shape.iter().try_fold(dtype.len() as u64, |len, count| len.checked_mul(*count));
        let needed = len.and_then(|len| len.checked_add(offset));
        let needed = needed.ok_or_else(|| malformed("it would be too long"))?;
        if needed > file_len {
            return Err(FileProblem::WrongLength { len: file_len, needed });
        }
    }
    Ok((text, offset))
}

fn text(bytes: &[u8]) -> Result<(&str, u64), FileProblem> {
    let rest = bytes.strip_prefix(MAGIC).ok_or_else(|| malformed("its first bytes are others"))?;
    let (version, rest) = rest.split_first_chunk::<2>().ok_or_else(|| malformed("its header is cut off"))?;
    let (len, rest) = match version {
        [1, _] => rest.split_first_chunk().map(|(len, rest)| (usize::from(u16::from_le_bytes(*len)), rest)),
        [2 | 3, _] => rest.split_first_chunk().map(|(len, rest)| (u32::from_le_bytes(*len) as usize, rest)),
        _ => return Err(malformed("its version is unknown")),
    }
    .ok_or_else(|| malformed("its header is cut off"))?;
    let text = rest.get(..len).ok_or_else(|| malformed("its header is cut off"))?;
    let text = std::str::from_utf8(text).map_err(|_| malformed("its header is no text"))?;
    Ok((text.trim(), (bytes.len() - rest.len() + len) as u64))
}

/// What the text of a [`header()`] says, whether a tensor can hold it or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// The type of the elements, as numpy writes it: such as `<f4`. One word for what is no single number.
    pub descr: String,
    /// Whether the first dimension is the fastest.
    pub columns_first: bool,
    /// The shape.
    pub shape: Vec<u64>,
}

impl Header {
    /// Reads the text of a header.
    ///
    /// ```
    /// use wholemem::files::npy::Header;
    ///
    /// let header = Header::parse("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }")?;
    /// assert_eq!((header.descr.as_str(), &header.shape[..]), ("<f4", &[3, 4][..]));
    /// # Ok::<(), wholemem::files::FileProblem>(())
    /// ```
    ///
    /// # Errors
    /// [`FileProblem::Malformed`].
    pub fn parse(text: &str) -> Result<Self, FileProblem> {
        let read =
            Dictionary { rest: text }.read().ok_or_else(|| malformed("its header is no dictionary"))?;
        match (read.descr, read.columns_first, read.shape) {
            (Some(descr), Some(columns_first), Some(shape)) => Ok(Self { descr, columns_first, shape }),
            _ => Err(malformed("its header lacks one of descr, fortran_order and shape")),
        }
    }
}

/// Reads the header at the front of a file, of which `bytes` are the first [`LONGEST`] or all.
pub(super) fn decode(bytes: &[u8]) -> Result<Npy, FileProblem> {
    let (text, offset) = text(bytes)?;
    let Header { descr, columns_first, shape } = Header::parse(text)?;
    if columns_first && shape.len() > 1 {
        return Err(FileProblem::ColumnsFirst);
    }
    Ok(Npy { dtype: dtype_of(&descr)?, shape, offset })
}

fn dtype_of(descr: &str) -> Result<Dtype, FileProblem> {
    Dtype::from_npy(descr).ok_or_else(|| FileProblem::UnknownType { name: descr.to_owned() })
}

/// What the dictionary holds of what is looked for.
#[derive(Default)]
struct Found {
    descr: Option<String>,
    columns_first: Option<bool>,
    shape: Option<Vec<u64>>,
}

/// A Python dictionary of texts, truth values and tuples of numbers, as it is read from the front.
struct Dictionary<'a> {
    rest: &'a str,
}

impl<'a> Dictionary<'a> {
    fn read(mut self) -> Option<Found> {
        let mut header = Found::default();
        self.take('{')?;
        while self.take('}').is_none() {
            let key = self.text()?;
            self.take(':')?;
            match key {
                // A structured type is a list: no tensor holds it, and its first bracket says enough.
                "descr" if self.rest.starts_with('[') => {
                    return Some(Found { descr: Some("structure".into()), ..full() });
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

/// A header in which nothing is missing.
fn full() -> Found {
    Found { descr: None, columns_first: Some(false), shape: Some(Vec::new()) }
}

/// The header of an array, as numpy would write it, up to where its elements begin.
pub(super) fn encode(dtype: Dtype, shape: &[u64]) -> Result<Vec<u8>, FileProblem> {
    let descr = dtype.info().npy.ok_or_else(|| FileProblem::UnknownType { name: dtype.to_string() })?;
    let numbers: String = shape.iter().map(|len| format!("{len}, ")).collect();
    // One dimension keeps its comma; more have none behind the last.
    let numbers = if shape.len() == 1 { numbers.trim_end() } else { numbers.trim_end_matches(", ") };
    front(&format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({numbers}), }}"))
}

/// The front of a file whose header is this text, up to where its elements begin: at a multiple of 64.
///
/// # Errors
/// [`FileProblem::Malformed`] for a text that is longer than 64 KiB.
pub fn front(text: &str) -> Result<Vec<u8>, FileProblem> {
    const FRONT: usize = 10;
    let len = (FRONT + text.len() + 1).next_multiple_of(64) - FRONT;
    let padding = " ".repeat(len - 1 - text.len());
    let len = u16::try_from(len).map_err(|_| malformed("it would have too many dimensions"))?;
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
    fn what_numpy_writes_is_read() {
        let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }          \n";
        let expected = Npy { dtype: Dtype::F32, shape: vec![3, 4], offset: 10 + header.len() as u64 };
        assert_eq!(decode(&file(header)), Ok(expected));
        let header = "{'descr': '|b1', 'fortran_order': True, 'shape': (7,), }\n";
        let read = decode(&file(header)).unwrap();
        assert_eq!(read.shape, [7], "one dimension has no order");
        assert_eq!(read.dtype, Dtype::Bool);
        let header = "{'shape': (), 'fortran_order': False, 'descr': '<i8'}";
        assert_eq!(decode(&file(header)).unwrap().shape, [0; 0]);
    }

    #[test]
    fn what_no_tensor_holds_is_refused_with_its_name() {
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
        fn a_written_header_is_read_again(
            dtype in prop::sample::select(&Dtype::ALL[..]),
            shape in prop::collection::vec(any::<u64>(), 0..9),
        ) {
            let header = encode(dtype, &shape);
            let is_numpys = !(dtype == Dtype::Bf16 || dtype.to_string().starts_with("float8"));
            prop_assert_eq!(header.is_ok(), is_numpys);
            if let Ok(header) = header {
                prop_assert_eq!(header.len() % 64, 0);
                let offset = header.len() as u64;
                prop_assert_eq!(decode(&header), Ok(Npy { dtype, shape, offset }));
            }
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..80), text in "[{}(),:'a-z0-9 ]{0,60}") {
            let _ = (decode(&bytes), header(&file(&text), 100));
            let _ = decode(&file(&text));
            let _ = decode(&[&MAGIC[..], &bytes].concat());
        }
    }
}
