//! .npy and .safetensors files: what is in them, where, and how to write them again.

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};

/// A tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tensor {
    pub(super) name: String,
    /// What it is, as it is told to users of the object.
    pub(super) meta: String,
    /// Where its bytes begin in the file.
    pub(super) offset: usize,
    pub(super) len: usize,
}

const NPY: &[u8] = b"\x93NUMPY";

/// How the description of an object begins that was a .npy file.
const NPY_META: &str = "npy ";

/// Where the bytes of a .npy file begin, and what they are.
pub(super) fn read_npy(start: &[u8]) -> Result<(usize, String)> {
    let too_short = || "the file is too short for a .npy file";
    if !start.starts_with(NPY) {
        bail!("the file is no .npy file");
    }
    let version = *start.get(6).with_context(too_short)?;
    // The length of the header has two bytes in version 1, and four after that.
    let at = if version == 1 { 10 } else { 12 };
    let bytes = start.get(8..at).with_context(too_short)?;
    let len = bytes.iter().rev().fold(0, |len, byte| len << 8 | usize::from(*byte));
    let header = start.get(at..at + len).with_context(too_short)?;
    let header = std::str::from_utf8(header).context("the header of the .npy file is no text")?;
    Ok((at + len, format!("{NPY_META}{}", header.trim())))
}

/// The beginning of a .npy file with this description, if it is that of one.
pub(super) fn write_npy(meta: &[u8]) -> Option<Vec<u8>> {
    let header = std::str::from_utf8(meta).ok()?.strip_prefix(NPY_META)?;
    // Padded so that the bytes begin at a multiple of 64.
    let len = (10 + header.len() + 1).next_multiple_of(64) - 10;
    let mut start = [NPY, &[1, 0], &u16::try_from(len).ok()?.to_le_bytes(), header.as_bytes()].concat();
    start.resize(10 + len - 1, b' ');
    start.push(b'\n');
    Some(start)
}

/// How long the header of a .safetensors file is, by its first eight bytes.
pub(super) fn safetensors_header(start: [u8; 8]) -> Result<usize> {
    const MOST: u64 = 100 << 20;
    let len = u64::from_le_bytes(start);
    if len > MOST {
        bail!("the header of the .safetensors file is {len} bytes long");
    }
    Ok(usize::try_from(len)?)
}

/// The tensors of a .safetensors file, by its header. Offsets count from the beginning of the file.
pub(super) fn read_safetensors(header: &[u8]) -> Result<Vec<Tensor>> {
    let len = header.len();
    let header: Map<String, Value> = serde_json::from_slice(header).context("the header is no JSON")?;
    let begin = 8 + len;
    let mut tensors = Vec::new();
    for (name, value) in header.iter().filter(|(name, _)| *name != "__metadata__") {
        let number =
            |at: usize| value["data_offsets"][at].as_u64().and_then(|offset| usize::try_from(offset).ok());
        let range = number(0).zip(number(1)).filter(|(start, end)| start <= end);
        let (start, end) = range.with_context(|| format!("`{name}` has no place in the file"))?;
        let meta = json!({ "dtype": value["dtype"], "shape": value["shape"] }).to_string();
        tensors.push(Tensor { name: name.clone(), meta, offset: begin + start, len: end - start });
    }
    tensors.sort_by_key(|tensor| tensor.offset);
    Ok(tensors)
}

/// The beginning of a .safetensors file with these tensors, whose bytes follow each other.
pub(super) fn write_safetensors(tensors: &[Tensor]) -> Result<Vec<u8>> {
    let mut header = Map::new();
    let mut end = 0;
    for tensor in tensors {
        let mut value: Value = serde_json::from_str(&tensor.meta)
            .with_context(|| format!("`{}` does not say what it is", tensor.name))?;
        value["data_offsets"] = json!([end, end + tensor.len]);
        end += tensor.len;
        header.insert(tensor.name.clone(), value);
    }
    let mut text = serde_json::to_vec(&header)?;
    // The bytes begin at a multiple of 8.
    text.resize(text.len().next_multiple_of(8), b' ');
    let len = (text.len() as u64).to_le_bytes();
    Ok([&len[..], &text].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_npy_file_is_described_and_written_again() {
        let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }";
        let written = write_npy(format!("npy {header}").as_bytes()).unwrap();
        assert_eq!(written.len() % 64, 0);
        let (offset, meta) = read_npy(&written).unwrap();
        assert_eq!((offset, meta), (written.len(), format!("npy {header}")));
        assert_eq!(write_npy(b"something else"), None);
        assert!(read_npy(b"\x93NUMPY\x01\x00\xff\xff").is_err());
        assert!(read_npy(b"PK").is_err());
    }

    #[test]
    fn a_safetensors_file_is_taken_apart_and_put_together() {
        let tensor = |name: &str, offset, len| Tensor {
            name: name.to_owned(),
            meta: r#"{"dtype":"F32","shape":[2]}"#.to_owned(),
            offset,
            len,
        };
        let file = write_safetensors(&[tensor("b", 0, 8), tensor("a", 0, 4)]).unwrap();
        let len = safetensors_header(file[..8].try_into().unwrap()).unwrap();
        assert_eq!((len + 8, len % 8), (file.len(), 0));
        let found = read_safetensors(&file[8..]).unwrap();
        assert_eq!(found, [tensor("b", len + 8, 8), tensor("a", len + 16, 4)]);
        assert!(read_safetensors(b"{\"a\":{}}").is_err());
        assert!(safetensors_header([0xff; 8]).is_err());
    }
}
