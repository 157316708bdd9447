//! Assigns integer handles to tables and communicators, because torch operators accept only tensors and plain values.
//!
//! An object gets its handle on first use, and handles are never reused. Handles are weak references:
//! `wholemem._handles.find` returns the object, or raises if it was dropped.

use std::sync::OnceLock;

use pyo3::prelude::*;

/// The integer handle of a table or communicator, assigned on first use.
#[derive(Debug, Default)]
pub(crate) struct Handle(OnceLock<u64>);

impl Handle {
    /// Returns the integer handle of `object`, which owns this value.
    pub(crate) fn of(&self, object: &Bound<'_, PyAny>) -> PyResult<u64> {
        if let Some(number) = self.0.get() {
            return Ok(*number);
        }
        let number =
            object.py().import("wholemem._handles")?.getattr("register")?.call1((object,))?.extract()?;
        Ok(*self.0.get_or_init(|| number))
    }
}
