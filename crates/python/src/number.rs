//! Numbers that Python gives and that are none below zero: ranks, rows, bytes, shapes.

use pyo3::conversion::FromPyObjectOwned;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::error::Raised;

/// A number of a type that has no negative ones.
pub(crate) fn natural<'py, T: FromPyObjectOwned<'py, Error = PyErr>>(
    given: &Bound<'py, PyAny>,
) -> PyResult<T> {
    given.extract::<T>().map_err(|error| {
        if !error.is_instance_of::<PyOverflowError>(given.py()) {
            return error;
        }
        let (number, bits) = (given.to_string(), 8 * size_of::<T>());
        let hint = if number.starts_with('-') {
            "give a number that is not negative".to_owned()
        } else {
            format!("give one of at most {bits} bits")
        };
        Raised::new("WrongValue", format!("{number} is out of range")).hint(hint).into()
    })
}

/// A shape: as many numbers as there are dimensions, or the one that there is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shape(pub(crate) Vec<u64>);

impl Shape {
    /// The same as DLPack has it.
    pub(crate) fn signed(&self) -> Vec<i64> {
        self.0.iter().map(|len| i64::try_from(*len).unwrap_or(i64::MAX)).collect()
    }
}

impl<'py> FromPyObject<'_, 'py> for Shape {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let py = given.py();
        // Letters and bytes would be taken for lengths.
        let is_text = given.is_instance_of::<PyString>() || given.is_instance_of::<PyBytes>();
        let refused = |error: PyErr| {
            if !error.get_type(py).is(py.get_type::<PyTypeError>()) {
                return error;
            }
            let said = given.repr().map_or_else(|_| "this".to_owned(), |said| said.to_string());
            let raised = Raised::new("WrongType", format!("{said} is no shape"));
            raised.hint("give whole numbers, such as `(2, 3)`, or one").into()
        };
        if is_text {
            return Err(refused(PyTypeError::new_err(())));
        }
        match given.try_iter() {
            Ok(lens) => lens.map(|len| natural(&len?)).collect::<PyResult<_>>().map(Self).map_err(refused),
            Err(_) => natural(&given).map(|len| Self(vec![len])).map_err(refused),
        }
    }
}
