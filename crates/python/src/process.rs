//! Ties a process to its parent, for the ranks that `wholemem.run` starts.

use pyo3::prelude::*;
use wholemem_os::pidfd;

use crate::error::IntoPyResult;

/// Requests that the kernel kills this process when the thread that started it ends.
///
/// Args:
///     parent: The process id of the parent.
///
/// Raises:
///     wholemem.errors.Error: The parent has ended.
#[pyfunction]
pub(crate) fn die_with_parent(parent: u32) -> PyResult<()> {
    pidfd::die_with_parent(parent).into_py()
}
