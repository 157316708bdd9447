//! Numbers for tables and communicators: torch's operators take numbers and tensors, and no other objects.
//!
//! An object gets its number when that is first asked for, and no other object ever gets the same. Handles are weak
//! references: `wholemem._handles.find` returns the object, or raises if it is gone.

use std::sync::OnceLock;

use pyo3::prelude::*;

/// The number of one object, once it has one.
#[derive(Debug, Default)]
pub(crate) struct Handle(OnceLock<u64>);

impl Handle {
    /// The number of `object`, whose handle this is.
    pub(crate) fn of(&self, object: &Bound<'_, PyAny>) -> PyResult<u64> {
        if let Some(number) = self.0.get() {
            return Ok(*number);
        }
        let number = object.py().import("wholemem._handles")?.getattr("give")?.call1((object,))?.extract()?;
        Ok(*self.0.get_or_init(|| number))
    }
}
