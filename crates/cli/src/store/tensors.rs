//! Tensors of files as objects: what the users of an object are told, so that the file can be written again.

use anyhow::{Context, Result};
use serde_json::{Value, json};
use wholemem::Dtype;
use wholemem::files::npy;
use wholemem::files::safetensors::Entry;
use wholemem_command::terminal;

/// How the description of an object begins that was a .npy file.
const NPY: &str = "npy ";

/// How the description of a pack begins that was a .safetensors file. What the file said of itself follows.
const SAFETENSORS: &str = "safetensors";

/// How long that can be, in bytes: the longest description, less its beginning.
const MAX_METADATA: usize = 216 - SAFETENSORS.len() - 1;

/// Where the bytes of a .npy file begin that is so long, and what they are.
pub(super) fn read_npy(start: &[u8], file_len: u64) -> Result<(usize, String)> {
    let (text, offset) = npy::header(start, file_len)?;
    Ok((usize::try_from(offset)?, format!("{NPY}{text}")))
}

/// The beginning of a .npy file with this description, if it is that of one, or of a tensor that numpy has a type for.
pub(super) fn write_npy(meta: &[u8]) -> Option<Vec<u8>> {
    match std::str::from_utf8(meta).ok()?.strip_prefix(NPY) {
        Some(text) => npy::front(text).ok(),
        None => npy::front(&npy_text(&parse_description("the object", meta, 0).ok()?)?).ok(),
    }
}

/// The header of a .npy file that holds a tensor.
fn npy_text(tensor: &Entry) -> Option<String> {
    let descr = Dtype::from_safetensors(&tensor.type_name)?.info().npy?;
    let shape: String = tensor.shape.iter().map(|len| format!("{len}, ")).collect();
    Some(format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({}), }}", shape.trim_end()))
}

/// What the users of a pack are told whose file says this of itself.
pub(super) fn pack_description(metadata: Option<&str>) -> String {
    match metadata {
        None => SAFETENSORS.to_owned(),
        Some(metadata) if metadata.len() <= MAX_METADATA => format!("{SAFETENSORS} {metadata}"),
        Some(metadata) => {
            let len = metadata.len();
            terminal::note(&format!(
                "`__metadata__` of {len} bytes is left out: there is room for {MAX_METADATA}"
            ));
            SAFETENSORS.to_owned()
        }
    }
}

/// What a pack's file said of itself, if the pack was a file.
pub(super) fn parse_pack_description(meta: &[u8]) -> Option<Option<&str>> {
    let rest = std::str::from_utf8(meta).ok()?.strip_prefix(SAFETENSORS)?;
    if rest.is_empty() { Some(None) } else { rest.strip_prefix(' ').map(Some) }
}

/// What the users of a tensor's object are told.
pub(super) fn description(tensor: &Entry) -> String {
    json!({ "dtype": tensor.type_name, "shape": tensor.shape }).to_string()
}

/// A tensor of a file to be written, by what the users of its object are told.
pub(super) fn parse_description(name: &str, meta: &[u8], len: usize) -> Result<Entry> {
    let what = || format!("`{name}` does not say what it is");
    let value: Value = serde_json::from_slice(meta).with_context(what)?;
    let type_name = value["dtype"].as_str().with_context(what)?.to_owned();
    let shape = value["shape"].as_array().with_context(what)?;
    let shape = shape.iter().map(Value::as_u64).collect::<Option<_>>().with_context(what)?;
    Ok(Entry { name: name.to_owned(), type_name, shape, offset: 0, len: len as u64 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_npy_file_is_described_and_written_again() {
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
    fn a_pack_is_understood_as_it_was_described() {
        for metadata in [None, Some(r#"{"format":"pt"}"#)] {
            assert_eq!(parse_pack_description(pack_description(metadata).as_bytes()), Some(metadata));
        }
        for meta in [&b""[..], b"npy {}", b"safetensorsish", b"\xff"] {
            assert_eq!(parse_pack_description(meta), None);
        }
    }

    #[test]
    fn a_tensor_is_written_as_a_npy_file_where_numpy_has_its_type() {
        // As long as any of these is.
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
    fn a_tensor_is_understood_as_it_was_described() {
        let tensor = Entry {
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
            assert_eq!(error.to_string(), "`a` does not say what it is");
        }
    }
}
