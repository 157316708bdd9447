//! Numbers that Python gives and that are none below zero: ranks, rows, bytes, shapes.

use pyo3::conversion::FromPyObjectOwned;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};
use wholemem_os::width::to_usize;

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

/// A length in memory or a count of elements there, as DLPack and numpy have it.
pub(crate) fn signed(len: usize) -> i64 {
    i64::try_from(len).expect("memory has fewer than 2^63 bytes")
}

/// One length of a shape.
fn length(given: &Bound<'_, PyAny>) -> PyResult<i64> {
    let len: u64 = natural(given)?;
    i64::try_from(len).map_err(|_| {
        Raised::new("WrongValue", format!("{len} is out of range")).hint("give one of at most 63 bits").into()
    })
}

/// A shape: as many numbers as there are dimensions, or the one that there is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shape(pub(crate) Vec<u64>);

impl Shape {
    fn of(lens: Vec<i64>) -> Self {
        Self(lens.into_iter().map(i64::cast_unsigned).collect())
    }

    /// The same as DLPack has it.
    pub(crate) fn signed(&self) -> Vec<i64> {
        self.0.iter().map(|len| signed(to_usize(*len))).collect()
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
            Ok(lens) => lens.map(|len| length(&len?)).collect::<PyResult<_>>().map(Self::of).map_err(refused),
            Err(_) => length(&given).map(|len| Self::of(vec![len])).map_err(refused),
        }
    }
}
