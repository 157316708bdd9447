//! The header of a `.safetensors` file: a JSON object that says of each tensor what it is and where.

use serde_json::{Map, Value};

use super::error::FileProblem;
use crate::Dtype;

/// The longest header that is read, as others have it.
pub(super) const LONGEST: u64 = 100_000_000;

const FRONT: u64 = 8;

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    /// Where its elements begin in the file.
    pub(super) offset: u64,
}

fn malformed(what: &'static str) -> FileProblem {
    FileProblem::Malformed { format: ".safetensors file", what }
}

/// How long the header is, from the first eight bytes of a file that is `file_len` long.
pub(super) fn header_len(front: [u8; 8], file_len: u64) -> Result<usize, FileProblem> {
    let len = u64::from_le_bytes(front);
    let fits = len <= LONGEST && len.checked_add(FRONT).is_some_and(|end| end <= file_len);
    match usize::try_from(len) {
        Ok(len) if fits => Ok(len),
        _ => Err(malformed("its header is longer than it")),
    }
}

/// Reads the header of a file that is `file_len` long, and returns its tensors in the order of their places.
pub(super) fn decode(header: &[u8], file_len: u64) -> Result<Vec<Entry>, FileProblem> {
    let data = FRONT + header.len() as u64;
    let room = file_len.checked_sub(data).ok_or_else(|| malformed("its header is longer than it"))?;
    let header: Map<String, Value> =
        serde_json::from_slice(header).map_err(|_| malformed("its header is no JSON object"))?;
    let tensors = header.into_iter().filter(|(name, _)| name != "__metadata__");
    let mut entries =
        tensors.map(|(name, value)| entry(name, &value, data, room)).collect::<Result<Vec<_>, _>>()?;
    entries.sort_by(|a, b| (a.offset, &a.name).cmp(&(b.offset, &b.name)));
    Ok(entries)
}

/// One tensor, whose elements are within `room` bytes from `data` on.
fn entry(name: String, value: &Value, data: u64, room: u64) -> Result<Entry, FileProblem> {
    let numbers =
        |key: &str| -> Option<Vec<u64>> { value.get(key)?.as_array()?.iter().map(Value::as_u64).collect() };
    let shape = numbers("shape").ok_or_else(|| malformed("a tensor has no shape"))?;
    let places = numbers("data_offsets").ok_or_else(|| malformed("a tensor has no place"))?;
    let &[start, end] = &places[..] else { return Err(malformed("a tensor has no place")) };
    let dtype =
        value.get("dtype").and_then(Value::as_str).ok_or_else(|| malformed("a tensor has no type"))?;
    let dtype = self::dtype(dtype)?;
    let len = shape.iter().try_fold(dtype.len() as u64, |len, count| len.checked_mul(*count));
    if start > end || end > room || len != Some(end - start) {
        return Err(malformed("a tensor is not of the length that its type and shape make"));
    }
    // A tensor here has rows: a single number is one of one element.
    let shape = if shape.is_empty() { vec![1] } else { shape };
    Ok(Entry { name, dtype, shape, offset: data + start })
}

fn dtype(name: &str) -> Result<Dtype, FileProblem> {
    Ok(match name {
        // Eight-bit floats are passed as they are.
        "BOOL" | "U8" | "F8_E4M3" | "F8_E5M2" | "F8_E8M0" => Dtype::U8,
        "I8" => Dtype::I8,
        "U16" => Dtype::U16,
        "I16" => Dtype::I16,
        "U32" => Dtype::U32,
        "I32" => Dtype::I32,
        "U64" => Dtype::U64,
        "I64" => Dtype::I64,
        "F16" => Dtype::F16,
        "BF16" => Dtype::Bf16,
        "F32" => Dtype::F32,
        "F64" => Dtype::F64,
        _ => return Err(FileProblem::UnknownType { name: name.to_owned() }),
    })
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
        let expected = [("a", Dtype::F32, vec![1], data), ("b", Dtype::Bf16, vec![2, 3], data + 4)];
        let found: Vec<_> = entries
            .iter()
            .map(|entry| (&entry.name[..], entry.dtype, entry.shape.clone(), entry.offset))
            .collect();
        assert_eq!(found, expected);
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
        assert_eq!(decode(b"[]", 0), Err(malformed("its header is no JSON object")));
        assert!(header_len(u64::MAX.to_le_bytes(), 100).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..80), file_len: u64) {
            let _ = decode(&bytes, file_len);
        }
    }
}
