//! Records the memory of all-reduces in CUDA graphs that a framework captures, so that the graphs are not staged.

use std::sync::{Mutex, OnceLock, PoisonError};

use pyo3::prelude::*;
use wholemem::RecordedWindows;

use crate::communicator::Communicator;
use crate::error::{Exception, IntoPyResult};
use crate::wait::run_blocking;
use crate::window::with_register_hint;

/// A recording of the memory of captured collectives, which ``Communicator._record_captures`` starts.
///
/// If it is dropped or canceled after a collective was captured, the group is aborted, because the graph cannot be used.
///
/// >>> import wholemem
/// >>> (comm,) = wholemem.Communicator.local(1, device="cpu")
/// >>> comm._record_captures().finish()
/// 0
#[pyclass(frozen, module = "wholemem._native")]
#[derive(Debug)]
pub(crate) struct CaptureRecording {
    recording: Mutex<Option<wholemem::CaptureRecording>>,
    /// The windows of the captured collectives, which keep the memory of all ranks mapped.
    windows: OnceLock<RecordedWindows>,
}

#[pymethods]
impl CaptureRecording {
    /// Ends the recording, and registers the memory of the captured collectives on all ranks. Every rank must call this method,
    /// after it has captured the same collectives. The memory of all ranks stays mapped while this object exists.
    ///
    /// Returns:
    ///     The number of arrays that were registered.
    ///
    /// Raises:
    ///     wholemem.errors.RanksDisagree: The ranks have captured different collectives.
    ///     wholemem.errors.Unsupported: On some rank, the memory of an array cannot be shared.
    fn finish(&self, py: Python<'_>) -> PyResult<usize> {
        let recording = self.recording.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(recording) = recording {
            let windows = run_blocking(py, || recording.finish().map_err(with_register_hint))?;
            // Only one call takes the recording out of the mutex, so the cell `windows` is still empty and `set` cannot fail.
            drop(self.windows.set(windows));
        }
        Ok(self.windows.get().map_or(0, RecordedWindows::len))
    }

    /// Ends the recording without registering anything, after a capture has failed. Aborts the group if a collective was captured.
    fn cancel(&self, py: Python<'_>) {
        // The GIL is released, because aborting wakes up threads that may need it.
        py.detach(|| drop(self.recording.lock().unwrap_or_else(PoisonError::into_inner).take()));
    }
}

#[pymethods]
impl Communicator {
    /// Starts to record the memory of collectives that are captured in CUDA graphs and whose arrays are not registered.
    ///
    /// Returns:
    ///     The recording.
    ///
    /// Raises:
    ///     wholemem.errors.WrongValue: Another recording is not finished.
    fn _record_captures(&self, py: Python<'_>) -> PyResult<CaptureRecording> {
        let state = self.state().into_py()?;
        let recording = run_blocking(py, || state.symmetric()?.record_captures().map_err(Exception::from))?;
        Ok(CaptureRecording { recording: Mutex::new(Some(recording)), windows: OnceLock::new() })
    }
}
