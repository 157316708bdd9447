//! Describes an array in the metadata of its stored object: by shape and element type, as in `.safetensors` files.
//!
//! For example `{"dtype":"F32","shape":[2,3]}`. So the command line program reads arrays that Python put as tensors, and
//! Python reads its files as arrays. An object from a `.npy` file has that file's header. A pack is recognised by its
//! members; an empty pack by its metadata, `safetensors`, which every pack of arrays has. Any other object is bytes.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use wholemem::Dtype;
use wholemem::files::npy;

use crate::array::{Element, Layout};
use crate::error::Exception;
use crate::number::signed;

/// The prefix of the metadata of a stored object that was a `.npy` file.
const NPY: &str = "npy ";

/// The beginning of the metadata of a pack (several arrays in one object). The metadata of a `.safetensors` file may follow.
pub(super) const PACK: &str = "safetensors";

#[derive(Serialize, Deserialize)]
struct ArrayDescription<'a> {
    #[serde(borrow)]
    dtype: Cow<'a, str>,
    shape: Cow<'a, [i64]>,
}

/// Returns the metadata that describes an array with the given layout.
pub(super) fn describe(layout: &Layout) -> Vec<u8> {
    let name = layout.element.name;
    // An element type without a name in `.safetensors` files is described by its name in Python.
    let dtype = Dtype::from_python_name(name).and_then(|dtype| dtype.info().safetensors).unwrap_or(name);
    let description = ArrayDescription { dtype: dtype.into(), shape: layout.shape[..].into() };
    serde_json::to_vec(&description).unwrap_or_default()
}

/// Returns true if an object of `len` bytes without members is an empty pack (a pack is several arrays in one object).
pub(super) fn is_empty_pack(meta: &[u8], len: usize) -> bool {
    let rest = meta.strip_prefix(PACK.as_bytes()).filter(|_| len == 0);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(b" "))
}

/// Returns the layout of the array in a stored object of `len` bytes, from the object's metadata.
pub(super) fn layout_of(meta: &[u8], len: usize) -> Result<Layout, Exception> {
    let layout = match parse(meta)? {
        Some(layout) => layout,
        None => Layout::contiguous(Element::BYTE, &[signed(len)])?,
    };
    if layout.len() != len {
        let (name, shape) = (layout.element.name, &layout.shape);
        let message = format!("an object of {len} bytes is described as {name} of shape {shape:?}");
        return Err(Exception::new("WrongValue", message)
            .hint("the program that stored the object described it incorrectly"));
    }
    Ok(layout)
}

/// Parses the metadata of a stored object. Returns `None` if the metadata does not describe an array.
fn parse(meta: &[u8]) -> Result<Option<Layout>, Exception> {
    let Ok(text) = std::str::from_utf8(meta) else { return Ok(None) };
    if let Some(header) = text.strip_prefix(NPY) {
        let Ok(header) = npy::NpyHeader::parse(header) else { return Ok(None) };
        let Ok(element) = Element::of_typestr(&header.descr) else { return Ok(None) };
        let shape = header.shape.iter().map(|len| i64::try_from(*len)).collect::<Result<Vec<_>, _>>();
        let shape = shape.map_err(|_| {
            let message = format!("an object is described as having the shape {:?}", header.shape);
            Exception::new("WrongValue", message)
                .hint("the program that stored the object described it incorrectly")
        })?;
        return if header.columns_first {
            fortran_order(element, shape)
        } else {
            Layout::contiguous(element, &shape)
        }
        .map(Some);
    }
    let Ok(ArrayDescription { dtype, shape }) = serde_json::from_str(text) else { return Ok(None) };
    let name = Dtype::from_safetensors(&dtype).map_or(&*dtype, |dtype| dtype.info().python_name);
    let Some(element) = Element::from_name(name) else { return Ok(None) };
    Layout::contiguous(element, &shape).map(Some)
}

/// Creates a contiguous layout with the first dimension fastest (Fortran order).
fn fortran_order(element: Element, mut shape: Vec<i64>) -> Result<Layout, Exception> {
    shape.reverse();
    let mut layout = Layout::contiguous(element, &shape)?;
    layout.shape.reverse();
    layout.strides.reverse();
    Ok(layout)
}
