//! Shape and element type of an array in the metadata of its object, as Python and the program write and read them.
//!
//! The metadata is `{"dtype":"F32","shape":[2,3]}`, as in `.safetensors` files, or `npy ` and the header of a `.npy` file.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use wholemem::Dtype;
use wholemem::files::npy::NpyHeader;

use crate::argument::invalid;
use crate::failure::Result;

/// The prefix of the metadata of an object that was a `.npy` file.
const NPY: &str = "npy ";

/// Shape and element type of an array.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ArrayLayout {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    /// True if the first dimension is the fastest.
    pub(super) is_columns_first: bool,
}

#[derive(Serialize, Deserialize)]
struct ArrayDescription<'a> {
    #[serde(borrow)]
    dtype: Cow<'a, str>,
    shape: Cow<'a, [u64]>,
}

impl ArrayLayout {
    /// Returns the metadata of an array, whose last dimension is the fastest.
    pub(super) fn describe(dtype: Dtype, shape: &[u64]) -> Result<Vec<u8>> {
        let info = dtype.info();
        let name = info.safetensors.unwrap_or(info.python_name);
        serde_json::to_vec(&ArrayDescription { dtype: name.into(), shape: shape.into() })
            .map_err(|error| invalid(format!("the array cannot be described: {error}")))
    }

    /// Returns the length of the array in bytes; `None` if it exceeds 64 bits.
    pub(super) fn len(&self) -> Option<u64> {
        self.shape.iter().try_fold(self.dtype.info().len as u64, |len, rows| len.checked_mul(*rows))
    }

    /// Returns the layout that the metadata of an object of `len` bytes describes; `None` if it describes no array of this length.
    pub(super) fn of_metadata(meta: &[u8], len: u64) -> Option<Self> {
        let text = std::str::from_utf8(meta).ok()?;
        let layout = match text.strip_prefix(NPY) {
            Some(header) => {
                let NpyHeader { descr, columns_first, shape, .. } = NpyHeader::parse(header).ok()?;
                Self { dtype: Dtype::from_npy(&descr)?, shape, is_columns_first: columns_first }
            }
            None => {
                let ArrayDescription { dtype, shape } = serde_json::from_str(text).ok()?;
                let dtype = Dtype::from_safetensors(&dtype).or_else(|| Dtype::from_python_name(&dtype))?;
                Self { dtype, shape: shape.into_owned(), is_columns_first: false }
            }
        };
        (layout.len() == Some(len)).then_some(layout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_of_python_and_of_files_describes_arrays() {
        let meta = ArrayLayout::describe(Dtype::F32, &[2, 3]).unwrap();
        assert_eq!(meta, br#"{"dtype":"F32","shape":[2,3]}"#);
        let expected =
            |is_columns_first| ArrayLayout { dtype: Dtype::F32, shape: vec![2, 3], is_columns_first };
        assert_eq!(ArrayLayout::of_metadata(&meta, 24), Some(expected(false)));
        let header = b"npy {'descr': '<f4', 'fortran_order': True, 'shape': (2, 3), }";
        assert_eq!(ArrayLayout::of_metadata(header, 24), Some(expected(true)));
        let names = br#"{"dtype":"complex64","shape":[]}"#;
        let scalar = ArrayLayout { dtype: Dtype::Complex64, shape: Vec::new(), is_columns_first: false };
        assert_eq!(ArrayLayout::of_metadata(names, 8), Some(scalar));
    }

    #[test]
    fn other_metadata_and_other_lengths_describe_no_array() {
        let cases: [&[u8]; 6] = [
            b"",
            b"\xff",
            b"text",
            b"npy {}",
            br#"{"dtype":"F32","shape":[18446744073709551615,2]}"#,
            br#"{"dtype":"other","shape":[6]}"#,
        ];
        for meta in cases {
            assert_eq!(ArrayLayout::of_metadata(meta, 24), None, "{meta:?}");
        }
        assert_eq!(ArrayLayout::of_metadata(br#"{"dtype":"F32","shape":[2,3]}"#, 23), None);
    }
}
