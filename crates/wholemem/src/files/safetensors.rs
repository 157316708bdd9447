//! Reads and writes the header of `.safetensors` files: a JSON object with the type, shape and offsets of each tensor.

use serde_json::{Map, Value, json};

use super::FileProblem;
use crate::Dtype;

/// The maximum length of the header of a `.safetensors` file, as in the reference implementation.
const MAX_HEADER_LEN: u64 = 100_000_000;

const PREFIX_LEN: u64 = 8;

/// The key in the header of a `.safetensors` file under which its metadata is.
const METADATA_KEY: &str = "__metadata__";

/// One tensor of a `.safetensors` file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry {
    /// The name of the tensor.
    pub name: String,
    /// The name of the tensor's element type in the file, such as `BF16`.
    pub type_name: String,
    /// The shape of the tensor; empty for a scalar.
    pub shape: Vec<u64>,
    /// The offset of the tensor's bytes in the file.
    pub offset: u64,
    /// The length of the tensor in bytes.
    pub len: u64,
}

impl TensorEntry {
    /// Returns the element type of the tensor; an error if wholemem does not support it.
    pub(super) fn dtype(&self) -> Result<Dtype, FileProblem> {
        dtype_of(&self.type_name)
    }

    /// Returns the shape of the tensor with at least one dimension: a scalar is one row of one element.
    pub(super) fn shape_with_rows(&self) -> Vec<u64> {
        if self.shape.is_empty() { vec![1] } else { self.shape.clone() }
    }
}

fn malformed(what: &'static str) -> FileProblem {
    FileProblem::Malformed { format: ".safetensors file", reason: what }
}

/// Decodes the length of the header from the first eight bytes of a `.safetensors` file of `file_len` bytes.
///
/// # Errors
/// [`FileProblem::Malformed`].
pub fn header_len(encode_header: [u8; 8], file_len: u64) -> Result<usize, FileProblem> {
    let len = u64::from_le_bytes(encode_header);
    let fits = len <= MAX_HEADER_LEN && len.checked_add(PREFIX_LEN).is_some_and(|end| end <= file_len);
    match usize::try_from(len) {
        Ok(len) if fits => Ok(len),
        _ => Err(malformed("the header is longer than the file")),
    }
}

/// Decodes the header of a `.safetensors` file of `file_len` bytes, and returns its tensors in the order of their offsets. Checks
/// that the tensors are contiguous and fill the file, and that the length of each tensor of a known type matches its type and
/// shape.
///
/// # Errors
/// [`FileProblem::Malformed`].
pub fn decode(header: &[u8], file_len: u64) -> Result<Vec<TensorEntry>, FileProblem> {
    let data = PREFIX_LEN + header.len() as u64;
    let data_len =
        file_len.checked_sub(data).ok_or_else(|| malformed("the header is longer than the file"))?;
    let header: Map<String, Value> =
        serde_json::from_slice(header).map_err(|_| malformed("the header is not a JSON object"))?;
    let tensors = header.into_iter().filter(|(name, _)| name != METADATA_KEY);
    let mut entries =
        tensors.map(|(name, value)| entry(name, &value, data, data_len)).collect::<Result<Vec<_>, _>>()?;
    // If several tensors have the same offset, tensors without bytes come first.
    entries.sort_by(|a, b| (a.offset, a.len, &a.name).cmp(&(b.offset, b.len, &b.name)));
    let mut end = data;
    for entry in &entries {
        if entry.offset != end {
            return Err(malformed("its tensors overlap or have gaps between them"));
        }
        end += entry.len;
    }
    if end != file_len {
        return Err(malformed("there are bytes after its last tensor"));
    }
    Ok(entries)
}

/// Decodes the header entry of one tensor of a `.safetensors` file, whose tensors are in the `data_len` bytes from offset `data`
/// on.
fn entry(name: String, value: &Value, data: u64, data_len: u64) -> Result<TensorEntry, FileProblem> {
    let numbers =
        |key: &str| -> Option<Vec<u64>> { value.get(key)?.as_array()?.iter().map(Value::as_u64).collect() };
    let shape = numbers("shape").ok_or_else(|| malformed("a tensor has no `shape`"))?;
    let places = numbers("data_offsets").ok_or_else(|| malformed("a tensor has no valid `data_offsets`"))?;
    let &[start, end] = &places[..] else { return Err(malformed("a tensor has no valid `data_offsets`")) };
    let type_name =
        value.get("dtype").and_then(Value::as_str).ok_or_else(|| malformed("a tensor has no `dtype`"))?;
    let wrong_length = || malformed("the length of a tensor differs from that of its type and shape");
    let len = end.checked_sub(start).filter(|_| end <= data_len).ok_or_else(wrong_length)?;
    if let Ok(dtype) = dtype_of(type_name) {
        let shape_len = shape.iter().try_fold(dtype.len() as u64, |len, count| len.checked_mul(*count));
        shape_len.filter(|shape_len| *shape_len == len).ok_or_else(wrong_length)?;
    }
    Ok(TensorEntry { name, type_name: type_name.to_owned(), shape, offset: data + start, len })
}

/// Returns the metadata of a `.safetensors` file as JSON, if the header has some.
#[must_use]
pub fn metadata(header: &[u8]) -> Option<String> {
    let header: Map<String, Value> = serde_json::from_slice(header).ok()?;
    header.get(METADATA_KEY).filter(|value| value.is_object()).map(Value::to_string)
}

/// Encodes the header of a `.safetensors` file with the given metadata and tensors, which are contiguous and in this order. The
/// offsets of `entries` are ignored.
///
/// # Errors
/// [`FileProblem::Malformed`] if the length overflows, or if the metadata is not JSON.
pub fn encode_header(entries: &[TensorEntry], metadata: Option<&str>) -> Result<Vec<u8>, FileProblem> {
    let mut header = Map::new();
    if let Some(metadata) = metadata {
        let value = serde_json::from_str(metadata).map_err(|_| malformed("the metadata is not JSON"))?;
        header.insert(METADATA_KEY.to_owned(), value);
    }
    let mut end: u64 = 0;
    for TensorEntry { name, type_name, shape, len, .. } in entries {
        let start = end;
        end = end.checked_add(*len).ok_or_else(|| malformed("the file is too long"))?;
        let value = json!({ "dtype": type_name, "shape": shape, "data_offsets": [start, end] });
        header.insert(name.clone(), value);
    }
    let mut text = Value::Object(header).to_string();
    // The header is padded so that the tensors begin at a multiple of 8 bytes.
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
    fn tensors_are_returned_in_the_order_of_their_offsets() {
        let header =
            br#"{"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},"__metadata__":{"by":"us"},
            "a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}"#;
        let data = 8 + header.len() as u64;
        let entries = decode(header, data + 16).unwrap();
        let expected = [("a", Ok(Dtype::F32), vec![1], data), ("b", Ok(Dtype::Bf16), vec![2, 3], data + 4)];
        let decoded: Vec<_> = entries
            .iter()
            .map(|entry| (&entry.name[..], entry.dtype(), entry.shape_with_rows(), entry.offset))
            .collect();
        assert_eq!(decoded, expected);
    }

    #[test]
    fn headers_round_trip_also_with_unknown_types() {
        let entry = |name: &str, type_name: &str, shape: &[u64], len| TensorEntry {
            name: name.to_owned(),
            type_name: type_name.to_owned(),
            shape: shape.to_vec(),
            offset: 0,
            len,
        };
        let written = [entry("b", "F32", &[2], 8), entry("a", "F4", &[], 8), entry("c", "U8", &[0], 0)];
        let file = encode_header(&written, Some(r#"{"by":"us"}"#)).unwrap();
        assert_eq!(metadata(&file[8..]).as_deref(), Some(r#"{"by":"us"}"#));
        let len = header_len(file[..8].try_into().unwrap(), file.len() as u64 + 16).unwrap();
        assert_eq!((len + 8, len % 8), (file.len(), 0));
        let mut read = decode(&file[8..], file.len() as u64 + 16).unwrap();
        let unknown = Err(FileProblem::UnknownType { name: "F4".to_owned() });
        assert_eq!(read[1].dtype(), unknown, "the type is unknown, but its bytes can be copied");
        let offsets: Vec<_> = read.iter_mut().map(|entry| std::mem::take(&mut entry.offset)).collect();
        assert_eq!(offsets, [0, 8, 16].map(|at| at + file.len() as u64));
        assert_eq!(read, written);
    }

    #[test]
    fn inconsistent_lengths_are_rejected() {
        let of = |entry: &str| format!("{{\"a\":{entry}}}").into_bytes();
        let decode = |header: &[u8], data: u64| decode(header, 8 + header.len() as u64 + data);
        let wrong_length = Err(malformed("the length of a tensor differs from that of its type and shape"));
        let entry = |shape: &str, end: u64| {
            of(&format!("{{\"dtype\":\"F32\",\"shape\":{shape},\"data_offsets\":[0,{end}]}}"))
        };
        assert!(decode(&entry("[4]", 16), 16).is_ok());
        assert_eq!(decode(&entry("[4]", 16), 15), wrong_length, "the tensor is longer than the file");
        assert_eq!(decode(&entry("[5]", 16), 16), wrong_length, "the shape does not match the length");
        assert_eq!(
            decode(&entry("[4294967296,4294967296]", 0), 16),
            wrong_length,
            "the number of elements overflows"
        );
        assert_eq!(decode(&entry("[4]", 16), 17), Err(malformed("there are bytes after its last tensor")));
        assert_eq!(decode(b"[]", 0), Err(malformed("the header is not a JSON object")));
        assert!(header_len(u64::MAX.to_le_bytes(), 100).is_err());
    }

    #[test]
    fn every_byte_belongs_to_one_tensor() {
        let decode = |places: &[(&str, u64, u64)]| {
            let entry = |(name, start, end): &(&str, u64, u64)| {
                let len = end - start;
                format!("\"{name}\":{{\"dtype\":\"U8\",\"shape\":[{len}],\"data_offsets\":[{start},{end}]}}")
            };
            let header = format!("{{{}}}", places.iter().map(entry).collect::<Vec<_>>().join(","));
            decode(header.as_bytes(), 8 + header.len() as u64 + 12).map(|entries| entries.len())
        };
        assert_eq!(decode(&[("b", 8, 12), ("a", 0, 8), ("none", 8, 8), ("last", 12, 12)]), Ok(4));
        let wrong_length = Err(malformed("its tensors overlap or have gaps between them"));
        assert_eq!(decode(&[("a", 0, 8), ("b", 4, 12)]), wrong_length);
        assert_eq!(decode(&[("a", 0, 12), ("b", 0, 12)]), wrong_length);
        assert_eq!(decode(&[("a", 0, 4), ("b", 8, 12)]), wrong_length);
        assert_eq!(
            decode(&[("a", 0, 8), ("a", 8, 12)]),
            wrong_length,
            "a duplicate name leaves the first range without a tensor"
        );
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..80), file_len: u64) {
            let _ = decode(&bytes, file_len);
        }
    }
}
