//! Converts unsigned numbers from Python: ranks, rows, bytes and shapes.

use pyo3::conversion::FromPyObjectOwned;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};
use wholemem_os::width::to_usize;

use crate::error::Exception;

/// Extracts an unsigned number from a Python object. The error for a number that is out of range names the range.
pub(crate) fn unsigned<'py, T: FromPyObjectOwned<'py, Error = PyErr>>(
    object: &Bound<'py, PyAny>,
) -> PyResult<T> {
    object.extract::<T>().map_err(|error| {
        if !error.is_instance_of::<PyOverflowError>(object.py()) {
            return error;
        }
        let (number, bits) = (object.to_string(), 8 * size_of::<T>());
        let hint = if number.starts_with('-') {
            "pass a number that is not negative".to_owned()
        } else {
            format!("pass a number of at most {bits} bits")
        };
        Exception::new("WrongValue", format!("{number} is out of range")).hint(hint).into()
    })
}

/// Extracts an unsigned number or `None` from a Python object, with the errors of [`unsigned`].
pub(crate) fn optional_unsigned<'py, T: FromPyObjectOwned<'py, Error = PyErr>>(
    object: &Bound<'py, PyAny>,
) -> PyResult<Option<T>> {
    if object.is_none() { Ok(None) } else { unsigned(object).map(Some) }
}

/// Converts a length or count in memory to `i64`, which DLPack and numpy use.
pub(crate) fn signed(len: usize) -> i64 {
    i64::try_from(len).expect("memory has fewer than 2^63 bytes")
}

/// Extracts the length of one dimension of a shape from a Python object.
fn length(object: &Bound<'_, PyAny>) -> PyResult<i64> {
    let len: u64 = unsigned(object)?;
    i64::try_from(len).map_err(|_| {
        Exception::new("WrongValue", format!("{len} is out of range"))
            .hint("pass a number of at most 63 bits")
            .into()
    })
}

/// The shape of an array, which Python code passes as an iterable of lengths or as one length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shape(pub(crate) Vec<u64>);

impl Shape {
    fn of(lens: Vec<i64>) -> Self {
        Self(lens.into_iter().map(i64::cast_unsigned).collect())
    }

    /// Returns the lengths of the dimensions as `i64`, which DLPack uses.
    pub(crate) fn signed(&self) -> Vec<i64> {
        self.0.iter().map(|len| signed(to_usize(*len))).collect()
    }
}

impl<'py> FromPyObject<'_, 'py> for Shape {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let py = object.py();
        // A `str` or `bytes` is not a shape, although iterating over it gives characters or byte values.
        let is_text = object.is_instance_of::<PyString>() || object.is_instance_of::<PyBytes>();
        let refused = |error: PyErr| {
            if !error.get_type(py).is(py.get_type::<PyTypeError>()) {
                return error;
            }
            let text = object.repr().map_or_else(|_| "this object".to_owned(), |text| text.to_string());
            let raised = Exception::new("WrongType", format!("{text} is not a shape"));
            raised.hint("pass ints such as `(2, 3)`, or one int").into()
        };
        if is_text {
            return Err(refused(PyTypeError::new_err(())));
        }
        match object.try_iter() {
            Ok(lens) => lens.map(|len| length(&len?)).collect::<PyResult<_>>().map(Self::of).map_err(refused),
            Err(_) => length(&object).map(|len| Self::of(vec![len])).map_err(refused),
        }
    }
}
