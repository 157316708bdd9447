//! Numbers for tensors and communicators, for places where only numbers go: the graphs of a compiler, for one.
//!
//! A number is given when it is first asked for, and never again to anything else. It keeps nothing: what it stands for is
//! looked for by `wholemem.handles.find`, which says so when it is gone.

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
        let number = object.py().import("wholemem.handles")?.getattr("give")?.call1((object,))?.extract()?;
        Ok(*self.0.get_or_init(|| number))
    }
}
