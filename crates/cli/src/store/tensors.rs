//! Descriptions of store objects that were put from tensor files. `get` creates the headers of files from them.

use anyhow::{Context, Result};
use serde_json::{Value, json};
use wholemem::Dtype;
use wholemem::files::npy;
use wholemem::files::safetensors::TensorEntry;
use wholemem_command::terminal;

/// The prefix of the description of an object that was put from a .npy file. The header of the file follows the prefix.
const NPY: &str = "npy ";

/// The prefix of the description of a pack that was put from a .safetensors file. The file's `__metadata__` follows the prefix.
const SAFETENSORS: &str = "safetensors";

/// The maximum length of a .safetensors file's `__metadata__` that fits in the description of a pack, in bytes.
const MAX_METADATA: usize = 216 - SAFETENSORS.len() - 1;

/// Parses the header of a .npy file of `file_len` bytes. Returns the offset of the elements, and the description of the store
/// object for the file.
pub(super) fn read_npy(start: &[u8], file_len: u64) -> Result<(usize, String)> {
    let (text, offset) = npy::header(start, file_len)?;
    Ok((usize::try_from(offset)?, format!("{NPY}{text}")))
}

/// Returns the header of the .npy file for an object's description `meta`, or `None` unless the object was put from a .npy
/// file or is a tensor of a type that numpy has.
pub(super) fn write_npy(meta: &[u8]) -> Option<Vec<u8>> {
    match std::str::from_utf8(meta).ok()?.strip_prefix(NPY) {
        Some(text) => npy::encode_header(text).ok(),
        None => npy::encode_header(&npy_text(&parse_description("the object", meta, 0).ok()?)?).ok(),
    }
}

/// Returns the header in the description of an object that was a .npy file, or `None` if the object was none.
pub(super) fn npy_header(meta: &[u8]) -> Option<npy::NpyHeader> {
    npy::NpyHeader::parse(std::str::from_utf8(meta).ok()?.strip_prefix(NPY)?).ok()
}

/// Returns the header dictionary of a .npy file for a tensor, or `None` if numpy lacks the tensor's element type.
fn npy_text(tensor: &TensorEntry) -> Option<String> {
    let descr = Dtype::from_safetensors(&tensor.type_name)?.info().npy?;
    let shape: String = tensor.shape.iter().map(|len| format!("{len}, ")).collect();
    Some(format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({}), }}", shape.trim_end()))
}

/// Returns the description of the pack for a .safetensors file with this `__metadata__`.
pub(super) fn pack_description(metadata: Option<&str>) -> String {
    match metadata {
        None => SAFETENSORS.to_owned(),
        Some(metadata) if metadata.len() <= MAX_METADATA => format!("{SAFETENSORS} {metadata}"),
        Some(metadata) => {
            let len = metadata.len();
            terminal::note(&format!(
                "`__metadata__` is not stored: it has {len} bytes, the limit is {MAX_METADATA}"
            ));
            SAFETENSORS.to_owned()
        }
    }
}

/// Returns the `__metadata__` in the description of a pack, or the outer `None` if the pack was not a .safetensors file.
pub(super) fn parse_pack_description(meta: &[u8]) -> Option<Option<&str>> {
    let rest = std::str::from_utf8(meta).ok()?.strip_prefix(SAFETENSORS)?;
    if rest.is_empty() { Some(None) } else { rest.strip_prefix(' ').map(Some) }
}

/// Returns the description of the store object for a tensor: its element type and shape as JSON.
pub(super) fn description(tensor: &TensorEntry) -> String {
    json!({ "dtype": tensor.type_name, "shape": tensor.shape }).to_string()
}

/// Parses the description of a store object into the entry of a tensor in the header of a file.
pub(super) fn parse_description(name: &str, meta: &[u8], len: usize) -> Result<TensorEntry> {
    let problem = || format!("the description of `{name}` has no type and shape");
    let value: Value = serde_json::from_slice(meta).with_context(problem)?;
    let type_name = value["dtype"].as_str().with_context(problem)?.to_owned();
    let shape = value["shape"].as_array().with_context(problem)?;
    let shape = shape.iter().map(Value::as_u64).collect::<Option<_>>().with_context(problem)?;
    Ok(TensorEntry { name: name.to_owned(), type_name, shape, offset: 0, len: len as u64 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_npy_header_round_trips_through_its_description() {
        let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }";
        let written = write_npy(format!("npy {header}").as_bytes()).unwrap();
        assert_eq!(written.len() % 64, 0);
        let (offset, meta) = read_npy(&written, written.len() as u64 + 24).unwrap();
        assert_eq!((offset, meta), (written.len(), format!("npy {header}")));
        assert_eq!(write_npy(b"something else"), None);
        assert!(read_npy(&written, written.len() as u64 + 23).is_err());
        assert!(read_npy(b"\x93NUMPY\x01\x00\xff\xff", 10).is_err());
        assert!(read_npy(b"PK", 2).is_err());
    }

    #[test]
    fn a_pack_description_parses_to_the_same_metadata() {
        for metadata in [None, Some(r#"{"format":"pt"}"#)] {
            assert_eq!(parse_pack_description(pack_description(metadata).as_bytes()), Some(metadata));
        }
        for meta in [&b""[..], b"npy {}", b"safetensorsish", b"\xff"] {
            assert_eq!(parse_pack_description(meta), None);
        }
    }

    #[test]
    fn a_tensor_has_a_npy_header_if_numpy_has_its_type() {
        // The file has 24 bytes of elements, enough for each of the shapes below.
        let read = |front: Vec<u8>| read_npy(&front, front.len() as u64 + 24).unwrap().1;
        let written = |meta: &str| write_npy(meta.as_bytes()).map(read);
        let text = |descr: &str, shape: &str| {
            Some(format!("npy {{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"))
        };
        assert_eq!(written(r#"{"dtype":"F32","shape":[2,3]}"#), text("<f4", "(2, 3,)"));
        assert_eq!(written(r#"{"dtype":"BOOL","shape":[]}"#), text("|b1", "()"));
        assert_eq!(written(r#"{"dtype":"BF16","shape":[2]}"#), None);
    }

    #[test]
    fn a_tensor_description_parses_to_the_same_tensor() {
        let tensor = TensorEntry {
            name: "a".to_owned(),
            type_name: "F8_E4M3".to_owned(),
            shape: vec![2, 3],
            offset: 0,
            len: 6,
        };
        assert_eq!(description(&tensor), r#"{"dtype":"F8_E4M3","shape":[2,3]}"#);
        assert_eq!(parse_description("a", description(&tensor).as_bytes(), 6).unwrap(), tensor);
        for meta in ["", "{}", r#"{"dtype":"F32","shape":[-1]}"#] {
            let error = parse_description("a", meta.as_bytes(), 6).unwrap_err();
            assert_eq!(error.to_string(), "the description of `a` has no type and shape");
        }
    }
}
