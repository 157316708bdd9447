//! Shape and type of an array, as its object carries them: the words that `.safetensors` files have for them.
//!
//! So an array that was put from Python is a tensor to the program, and a file that the program put is arrays here:
//! `{"dtype":"F32","shape":[2,3]}`. What was a `.npy` file carries that file's header. A pack is told by its members, and
//! one without any by what is said of it, as of every pack of arrays: `safetensors`. Any other object is bytes.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use wholemem::Dtype;
use wholemem::files::npy;

use crate::array::{Element, Layout};
use crate::error::Raised;
use crate::number::signed;

/// How the description of an object begins that was a `.npy` file.
const NPY: &str = "npy ";

/// What the users of a pack of arrays are told of it as a whole; what a file said of itself may follow.
pub(super) const PACK: &str = "safetensors";

#[derive(Serialize, Deserialize)]
struct Said<'a> {
    #[serde(borrow)]
    dtype: Cow<'a, str>,
    shape: Cow<'a, [i64]>,
}

/// What the users of an array's object are told.
pub(super) fn describe(layout: &Layout) -> Vec<u8> {
    let name = layout.element.name;
    // A type without a name in such files is called as in Python.
    let dtype = Dtype::from_python_name(name).and_then(|dtype| dtype.info().safetensors).unwrap_or(name);
    let said = Said { dtype: dtype.into(), shape: layout.shape[..].into() };
    serde_json::to_vec(&said).unwrap_or_default()
}

/// Whether an object of so many bytes, of which there are no parts, is a pack of no arrays.
pub(super) fn is_empty_pack(meta: &[u8], len: usize) -> bool {
    let rest = meta.strip_prefix(PACK.as_bytes()).filter(|_| len == 0);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(b" "))
}

/// The array that an object of so many bytes is.
pub(super) fn understand(meta: &[u8], len: usize) -> Result<Layout, Raised> {
    let layout = match read(meta)? {
        Some(layout) => layout,
        None => Layout::contiguous(Element::BYTE, &[signed(len)])?,
    };
    if layout.len() != len {
        let (name, shape) = (layout.element.name, &layout.shape);
        let message = format!("an object of {len} bytes is said to be {name} of shape {shape:?}");
        return Err(
            Raised::new("WrongValue", message).hint("the program that stored it described it wrongly")
        );
    }
    Ok(layout)
}

/// The array that is described, if one is.
fn read(meta: &[u8]) -> Result<Option<Layout>, Raised> {
    let Ok(text) = std::str::from_utf8(meta) else { return Ok(None) };
    if let Some(header) = text.strip_prefix(NPY) {
        let Ok(header) = npy::NpyHeader::parse(header) else { return Ok(None) };
        let Ok(element) = Element::of_typestr(&header.descr) else { return Ok(None) };
        let shape = header.shape.iter().map(|len| i64::try_from(*len)).collect::<Result<Vec<_>, _>>();
        let shape = shape.map_err(|_| {
            let message = format!("an object is said to have the shape {:?}", header.shape);
            Raised::new("WrongValue", message).hint("the program that stored it described it wrongly")
        })?;
        return if header.columns_first {
            columns_first(element, shape)
        } else {
            Layout::contiguous(element, &shape)
        }
        .map(Some);
    }
    let Ok(Said { dtype, shape }) = serde_json::from_str(text) else { return Ok(None) };
    let name = Dtype::from_safetensors(&dtype).map_or(&*dtype, |dtype| dtype.info().python_name);
    let Some(element) = Element::named(name) else { return Ok(None) };
    Layout::contiguous(element, &shape).map(Some)
}

/// Elements without gaps, the first dimension fastest.
fn columns_first(element: Element, mut shape: Vec<i64>) -> Result<Layout, Raised> {
    shape.reverse();
    let mut layout = Layout::contiguous(element, &shape)?;
    layout.shape.reverse();
    layout.strides.reverse();
    Ok(layout)
}
