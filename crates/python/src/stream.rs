//! Selects the stream on which the work of a Python call runs.
//!
//! On the host, the work has run when the call returns. On a GPU it is enqueued on the stream that the caller passes, or on
//! the default stream.

use pyo3::prelude::*;
use wholemem_hal::{BackendKind, Error as HalError, Rights, Stream};
use wholemem_os::Deadline;
use wholemem_os::interrupt::{CHECK_INTERVAL, is_interrupted};

use crate::array::{Array, DlDevice, FrameworkStream, View, import};
use crate::communicator::CommState;
use crate::error::{Exception, IntoPyResult};
use crate::framework::Framework;
use crate::wait::run_blocking;

/// The stream of a Python call, and the number of the stream in DLPack.
#[derive(Debug)]
pub(crate) struct CallStream {
    pub(crate) stream: Stream,
    dlpack: Option<i64>,
    /// The stream that arrays record as the one that used them last; `None` on the host, where work runs immediately.
    order: Option<FrameworkStream>,
}

impl CallStream {
    /// Selects the stream that the argument `stream` of a call names: a handle, or an object of torch, CuPy or cuda.core.
    pub(crate) fn of(state: &CommState, object: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let device = state.comm.device();
        if device.backend().kind() == BackendKind::Host {
            // Work on the host does not use the stream, but an invalid `stream` argument is still an error.
            object.map(handle_of).transpose()?;
            return Ok(Self { stream: state.stream.clone(), dlpack: None, order: None });
        }
        let handle = object.map_or(Ok(0), handle_of)?;
        // SAFETY: the calling Python code guarantees that `handle` is a stream of the communicator's device, and that it is not
        // destroyed while work is enqueued on it or while it is the last stream of an array.
        let foreign = unsafe { FrameworkStream::new(device, handle, object) };
        // DLPack does not allow 0 as the number of a CUDA stream; the number of the default stream is 1.
        let dlpack = i64::try_from(handle.max(1)).ok();
        Ok(Self { stream: foreign.stream(), dlpack, order: Some(foreign) })
    }

    /// Selects the stream of a call on arrays of a framework. Without an argument `stream`, it is the framework's current stream.
    pub(crate) fn for_call<'py>(
        state: &CommState,
        object: Option<&Bound<'py, PyAny>>,
        framework: &Framework<'py>,
    ) -> PyResult<Self> {
        match object {
            Some(_) => Self::of(state, object),
            None => Self::of(state, framework.stream(state.dl_device)?.as_ref()),
        }
    }

    /// Imports an array for use on the stream of this call.
    pub(crate) fn import(&self, object: &Bound<'_, PyAny>) -> PyResult<View> {
        if let (Some(order), Ok(array)) = (&self.order, object.cast::<Array>()) {
            return array.get().use_on(object.py(), order).into_py();
        }
        import(object, self.dlpack)
    }

    /// Returns the array in memory that the communicator's device can access. If the device is a GPU and the array is in pageable
    /// host memory, the array is copied to the GPU, and the call waits for the copy.
    pub(crate) fn on_device(
        &self,
        py: Python<'_>,
        state: &CommState,
        argument: &str,
        view: View,
    ) -> PyResult<View> {
        if !self.needs_copy(state, &view) {
            return Ok(view);
        }
        let mut bytes = vec![0; view.layout.len()];
        view.bytes(argument).into_py()?.read_at(0, &mut bytes).into_py()?;
        let copy = state.allocate(view.layout.clone()).into_py()?;
        let span = copy.span(argument, state.comm.device(), Rights::ReadWrite).into_py()?;
        run_blocking(py, || self.stream.write(&span, &bytes))?;
        Ok(copy)
    }

    /// Returns true if an array has elements in host memory that the communicator's GPU cannot access.
    pub(crate) fn needs_copy(&self, state: &CommState, view: &View) -> bool {
        state.dl_device.is_cuda() && view.dl_device == DlDevice::CPU && view.layout.count() > 0
    }

    /// Copies device memory to a host array of the same layout after the work that is enqueued before, and waits for the copy.
    pub(crate) fn read_back(
        &self,
        py: Python<'_>,
        state: &CommState,
        from: &View,
        to: &View,
    ) -> PyResult<()> {
        let span = from.span("the output", state.comm.device(), Rights::Read).into_py()?;
        let mut bytes = vec![0; from.layout.len()];
        run_blocking(py, || self.stream.read(&span, &mut bytes))?;
        to.write_bytes("the output", &bytes).into_py()
    }

    /// Waits until the work that is enqueued on the call's stream has run.
    pub(crate) fn finish(&self) -> Result<(), HalError> {
        finish(&self.stream)
    }
}

/// Waits until the work that is enqueued on a stream has run, or the wait is interrupted. Releases the operands of the work
/// that has run.
pub(crate) fn finish(stream: &Stream) -> Result<(), HalError> {
    loop {
        match stream.synchronize(Deadline::after(CHECK_INTERVAL)) {
            Err(HalError::TimedOut { .. }) if !is_interrupted() => {}
            Ok(()) => {
                // Each call creates its own `Stream` from a handle, so the operands of finished calls are released here.
                stream.device().backend().collect();
                return Ok(());
            }
            failed => return failed,
        }
    }
}

/// Returns the CUDA driver's handle of a stream, from an int or an object of torch, CuPy or cuda.core.
pub(crate) fn handle_of(object: &Bound<'_, PyAny>) -> PyResult<u64> {
    if let Ok(handle) = object.extract::<u64>() {
        return Ok(handle);
    }
    for name in ["cuda_stream", "ptr", "handle"] {
        if let Ok(handle) = object.getattr(name).and_then(|handle| handle.extract::<u64>()) {
            return Ok(handle);
        }
    }
    if let Ok((_, handle)) = object
        .call_method0("__cuda_stream__")
        .and_then(|version_handle| version_handle.extract::<(u64, u64)>())
    {
        return Ok(handle);
    }
    let message = format!("`{}` is not a stream", object.get_type().name()?);
    Err(Exception::new("WrongType", message)
        .hint("pass a stream of torch or CuPy, or its handle as an int")
        .into())
}
