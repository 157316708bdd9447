//! The header of a `.safetensors` file: a JSON object that says of each tensor what it is and where.

use serde_json::{Map, Value, json};

use super::FileProblem;
use crate::Dtype;

/// The longest header that is read, as others have it.
const LONGEST: u64 = 100_000_000;

const FRONT: u64 = 8;

/// What a header calls what it says of the file as a whole.
const METADATA: &str = "__metadata__";

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// The name of its type, as it is in the file: such as `BF16`.
    pub type_name: String,
    /// Its shape; a single number has none.
    pub shape: Vec<u64>,
    /// Where its bytes begin in the file.
    pub offset: u64,
    /// How many bytes it has.
    pub len: u64,
}

impl Entry {
    /// The type of its elements.
    pub(super) fn dtype(&self) -> Result<Dtype, FileProblem> {
        dtype_of(&self.type_name)
    }

    /// Its shape as that of rows: a single number is one of one element.
    pub(super) fn rows_shape(&self) -> Vec<u64> {
        if self.shape.is_empty() { vec![1] } else { self.shape.clone() }
    }
}

fn malformed(what: &'static str) -> FileProblem {
    FileProblem::Malformed { format: ".safetensors file", what }
}

/// How long the header is, from the first eight bytes of a file that is `file_len` long.
///
/// # Errors
/// [`FileProblem::Malformed`].
pub fn header_len(front: [u8; 8], file_len: u64) -> Result<usize, FileProblem> {
    let len = u64::from_le_bytes(front);
    let fits = len <= LONGEST && len.checked_add(FRONT).is_some_and(|end| end <= file_len);
    match usize::try_from(len) {
        Ok(len) if fits => Ok(len),
        _ => Err(malformed("its header is longer than it")),
    }
}

/// Reads the header of a file that is `file_len` long, and returns its tensors in the order of their places. They follow each
/// other, and are all there is in the file; of one whose type is known, the length is what type and shape make.
///
/// # Errors
/// [`FileProblem::Malformed`].
pub fn decode(header: &[u8], file_len: u64) -> Result<Vec<Entry>, FileProblem> {
    let data = FRONT + header.len() as u64;
    let room = file_len.checked_sub(data).ok_or_else(|| malformed("its header is longer than it"))?;
    let header: Map<String, Value> =
        serde_json::from_slice(header).map_err(|_| malformed("its header is no JSON object"))?;
    let tensors = header.into_iter().filter(|(name, _)| name != METADATA);
    let mut entries =
        tensors.map(|(name, value)| entry(name, &value, data, room)).collect::<Result<Vec<_>, _>>()?;
    // Those without bytes come before those that begin where they are.
    entries.sort_by(|a, b| (a.offset, a.len, &a.name).cmp(&(b.offset, b.len, &b.name)));
    let mut end = data;
    for entry in &entries {
        if entry.offset != end {
            return Err(malformed("its tensors overlap, or leave bytes between them"));
        }
        end += entry.len;
    }
    if end != file_len {
        return Err(malformed("it goes on behind its last tensor"));
    }
    Ok(entries)
}

/// One tensor, whose elements are within `room` bytes from `data` on.
fn entry(name: String, value: &Value, data: u64, room: u64) -> Result<Entry, FileProblem> {
    let numbers =
        |key: &str| -> Option<Vec<u64>> { value.get(key)?.as_array()?.iter().map(Value::as_u64).collect() };
    let shape = numbers("shape").ok_or_else(|| malformed("a tensor has no shape"))?;
    let places = numbers("data_offsets").ok_or_else(|| malformed("a tensor has no place"))?;
    let &[start, end] = &places[..] else { return Err(malformed("a tensor has no place")) };
    let type_name =
        value.get("dtype").and_then(Value::as_str).ok_or_else(|| malformed("a tensor has no type"))?;
    let wrong = || malformed("a tensor is not of the length that its type and shape make");
    let len = end.checked_sub(start).filter(|_| end <= room).ok_or_else(wrong)?;
    if let Ok(dtype) = dtype_of(type_name) {
        let made = shape.iter().try_fold(dtype.len() as u64, |len, count| len.checked_mul(*count));
        made.filter(|made| *made == len).ok_or_else(wrong)?;
    }
    Ok(Entry { name, type_name: type_name.to_owned(), shape, offset: data + start, len })
}

/// What the header of a file says of the file as a whole, in JSON, if anything.
#[must_use]
pub fn metadata(header: &[u8]) -> Option<String> {
    let header: Map<String, Value> = serde_json::from_slice(header).ok()?;
    header.get(METADATA).filter(|value| value.is_object()).map(Value::to_string)
}

/// The front of a file with these tensors, whose bytes follow each other in this order, and with what is said of the file as a
/// whole. Where they are now does not matter.
///
/// # Errors
/// [`FileProblem::Malformed`] for more than there are numbers, or what is no JSON.
pub fn front(entries: &[Entry], metadata: Option<&str>) -> Result<Vec<u8>, FileProblem> {
    let mut header = Map::new();
    if let Some(metadata) = metadata {
        let value = serde_json::from_str(metadata).map_err(|_| malformed("its metadata are no JSON"))?;
        header.insert(METADATA.to_owned(), value);
    }
    let mut end: u64 = 0;
    for Entry { name, type_name, shape, len, .. } in entries {
        let start = end;
        end = end.checked_add(*len).ok_or_else(|| malformed("it would be too long"))?;
        let value = json!({ "dtype": type_name, "shape": shape, "data_offsets": [start, end] });
        header.insert(name.clone(), value);
    }
    let mut text = Value::Object(header).to_string();
    // The bytes begin at a multiple of 8.
    text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
    Ok([&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat())
}

fn dtype_of(name: &str) -> Result<Dtype, FileProblem> {
    Dtype::from_safetensors(name).ok_or_else(|| FileProblem::UnknownType { name: name.to_owned() })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn tensors_are_found_in_the_order_of_their_places() {
        let header =
            br#"{"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},"__metadata__":{"by":"us"},
            "a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}"#;
        let data = 8 + header.len() as u64;
        let entries = decode(header, data + 16).unwrap();
        let expected = [("a", Ok(Dtype::F32), vec![1], data), ("b", Ok(Dtype::Bf16), vec![2, 3], data + 4)];
        let found: Vec<_> = entries
            .iter()
            .map(|entry| (&entry.name[..], entry.dtype(), entry.rows_shape(), entry.offset))
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn a_front_is_read_as_it_was_written_whatever_the_types_are() {
        let entry = |name: &str, type_name: &str, shape: &[u64], len| Entry {
            name: name.to_owned(),
            type_name: type_name.to_owned(),
            shape: shape.to_vec(),
            offset: 0,
            len,
        };
        let written = [entry("b", "F32", &[2], 8), entry("a", "F4", &[], 8), entry("c", "U8", &[0], 0)];
        let file = front(&written, Some(r#"{"by":"us"}"#)).unwrap();
        assert_eq!(metadata(&file[8..]).as_deref(), Some(r#"{"by":"us"}"#));
        let len = header_len(file[..8].try_into().unwrap(), file.len() as u64 + 16).unwrap();
        assert_eq!((len + 8, len % 8), (file.len(), 0));
        let mut read = decode(&file[8..], file.len() as u64 + 16).unwrap();
        let unknown = Err(FileProblem::UnknownType { name: "F4".to_owned() });
        assert_eq!(read[1].dtype(), unknown, "bytes of it can be passed on all the same");
        let offsets: Vec<_> = read.iter_mut().map(|entry| std::mem::take(&mut entry.offset)).collect();
        assert_eq!(offsets, [0, 8, 16].map(|at| at + file.len() as u64));
        assert_eq!(read, written);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let of = |entry: &str| format!("{{\"a\":{entry}}}").into_bytes();
        let decode = |header: &[u8], data: u64| decode(header, 8 + header.len() as u64 + data);
        let wrong = Err(malformed("a tensor is not of the length that its type and shape make"));
        let entry = |shape: &str, end: u64| {
            of(&format!("{{\"dtype\":\"F32\",\"shape\":{shape},\"data_offsets\":[0,{end}]}}"))
        };
        assert!(decode(&entry("[4]", 16), 16).is_ok());
        assert_eq!(decode(&entry("[4]", 16), 15), wrong, "beyond the file");
        assert_eq!(decode(&entry("[5]", 16), 16), wrong, "another shape");
        assert_eq!(decode(&entry("[4294967296,4294967296]", 0), 16), wrong, "more than there are bytes");
        assert_eq!(decode(&entry("[4]", 16), 17), Err(malformed("it goes on behind its last tensor")));
        assert_eq!(decode(b"[]", 0), Err(malformed("its header is no JSON object")));
        assert!(header_len(u64::MAX.to_le_bytes(), 100).is_err());
    }

    #[test]
    fn every_byte_is_of_one_tensor() {
        let decode = |places: &[(&str, u64, u64)]| {
            let entry = |(name, start, end): &(&str, u64, u64)| {
                let len = end - start;
                format!("\"{name}\":{{\"dtype\":\"U8\",\"shape\":[{len}],\"data_offsets\":[{start},{end}]}}")
            };
            let header = format!("{{{}}}", places.iter().map(entry).collect::<Vec<_>>().join(","));
            decode(header.as_bytes(), 8 + header.len() as u64 + 12).map(|entries| entries.len())
        };
        assert_eq!(decode(&[("b", 8, 12), ("a", 0, 8), ("none", 8, 8), ("last", 12, 12)]), Ok(4));
        let wrong = Err(malformed("its tensors overlap, or leave bytes between them"));
        assert_eq!(decode(&[("a", 0, 8), ("b", 4, 12)]), wrong);
        assert_eq!(decode(&[("a", 0, 12), ("b", 0, 12)]), wrong);
        assert_eq!(decode(&[("a", 0, 4), ("b", 8, 12)]), wrong);
        assert_eq!(decode(&[("a", 0, 8), ("a", 8, 12)]), wrong, "of one name twice, the first is none's");
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..80), file_len: u64) {
            let _ = decode(&bytes, file_len);
        }
    }
}
