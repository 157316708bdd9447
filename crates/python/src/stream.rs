//! The stream that a call's work goes to.
//!
//! On the host, work has run when the call returns. On a GPU it is enqueued: on the stream that the caller names, or on the
//! default one, with which frameworks begin too.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use wholemem_hal::{BackendKind, Error as HalError, Rights, Stream};
use wholemem_os::interrupt::{CHECK_INTERVAL, is_interrupted};
use wholemem_os::{Deadline, ForkEpoch};

use crate::array::{Array, Place, Turn, View, take};
use crate::communicator::CommState;
use crate::error::{Raised, Raises};
use crate::framework::Framework;
use crate::wait::waiting;

/// A stream, and how DLPack calls it.
#[derive(Debug)]
pub(crate) struct CallStream {
    pub(crate) stream: Stream,
    dlpack: Option<i64>,
    /// The stream as arrays remember who used them; `None` on the host, where nobody has to wait.
    turn: Option<Turn>,
}

impl CallStream {
    /// The stream that was given: a number, or an object of torch, CuPy or cuda.core.
    pub(crate) fn of(state: &CommState, given: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let device = state.comm.device();
        if device.backend().kind() == BackendKind::Host {
            // Not used, but no excuse for what is none.
            given.map(handle_of).transpose()?;
            return Ok(Self { stream: state.stream.clone(), dlpack: None, turn: None });
        }
        let handle = given.map_or(Ok(0), handle_of)?;
        // SAFETY: the calling Python code guarantees that the stream it names is one of the communicator's device, and that it is not
        // destroyed while work is enqueued on it or an array remembers it.
        let turn = unsafe { Turn::new(device, handle, given) };
        // Zero is not taken by DLPack, where one is the default stream.
        let dlpack = i64::try_from(handle.max(1)).ok();
        Ok(Self { stream: turn.stream(), dlpack, turn: Some(turn) })
    }

    /// The same for a call on arrays of a framework, whose own stream is taken if none is given.
    pub(crate) fn for_call<'py>(
        state: &CommState,
        given: Option<&Bound<'py, PyAny>>,
        framework: &Framework<'py>,
    ) -> PyResult<Self> {
        match given {
            Some(_) => Self::of(state, given),
            None => Self::of(state, framework.stream(state.place)?.as_ref()),
        }
    }

    /// An array, ready to be used on this stream.
    pub(crate) fn take(&self, given: &Bound<'_, PyAny>) -> PyResult<View> {
        if let (Some(turn), Ok(array)) = (&self.turn, given.cast::<Array>()) {
            return array.get().used_in(given.py(), turn).raised();
        }
        take(given, self.dlpack)
    }

    /// The same memory on the communicator's device: a copy if that is a GPU and the array is in host memory that the GPU does not
    /// reach. The call waits for the copy.
    pub(crate) fn on_device(
        &self,
        py: Python<'_>,
        state: &CommState,
        what: &str,
        view: View,
    ) -> PyResult<View> {
        if !self.needs_copy(state, &view) {
            return Ok(view);
        }
        let mut bytes = vec![0; view.layout.len()];
        view.bytes(what).raised()?.read_at(0, &mut bytes).raised()?;
        let copy = state.make(view.layout.clone()).raised()?;
        let span = copy.span(what, state.comm.device(), Rights::ReadWrite).raised()?;
        waiting(py, || self.stream.write(&span, &bytes))?;
        Ok(copy)
    }

    /// Whether a GPU does not reach a host array with elements.
    pub(crate) fn needs_copy(&self, state: &CommState, view: &View) -> bool {
        state.place.is_cuda() && view.place == Place::CPU && view.layout.count() > 0
    }

    /// Copies from memory of the device to a host array of the same layout, and waits for what is enqueued before.
    pub(crate) fn read_back(
        &self,
        py: Python<'_>,
        state: &CommState,
        from: &View,
        to: &View,
    ) -> PyResult<()> {
        let span = from.span("the output", state.comm.device(), Rights::Read).raised()?;
        let mut bytes = vec![0; from.layout.len()];
        waiting(py, || self.stream.read(&span, &mut bytes))?;
        to.write_bytes("the output", &bytes).raised()
    }

    /// Waits until what is enqueued has run.
    pub(crate) fn finish(&self) -> Result<(), HalError> {
        finish(&self.stream)
    }
}

/// Waits until what is enqueued on a stream has run, or the wait is interrupted; and lets go of what was used by the calls
/// that have run.
pub(crate) fn finish(stream: &Stream) -> Result<(), HalError> {
    loop {
        match stream.synchronize(Deadline::after(CHECK_INTERVAL)) {
            Err(HalError::TimedOut { .. }) if !is_interrupted() => {}
            Ok(()) => {
                // Each call knew the stream by its number only, and left behind what it used.
                stream.device().backend().collect();
                return Ok(());
            }
            failed => return failed,
        }
    }
}

/// The driver's number of a stream: given as a number, or as an object of torch, CuPy or cuda.core.
pub(crate) fn handle_of(given: &Bound<'_, PyAny>) -> PyResult<u64> {
    if let Ok(handle) = given.extract::<u64>() {
        return Ok(handle);
    }
    for name in ["cuda_stream", "ptr", "handle"] {
        if let Ok(handle) = given.getattr(name).and_then(|handle| handle.extract::<u64>()) {
            return Ok(handle);
        }
    }
    if let Ok((_, handle)) =
        given.call_method0("__cuda_stream__").and_then(|says| says.extract::<(u64, u64)>())
    {
        return Ok(handle);
    }
    let message = format!("`{}` is no stream", given.get_type().name()?);
    Err(Raised::new("WrongType", message).hint("give a stream of torch or CuPy, or its number").into())
}

/// The streams by whose numbers a framework has called so far, the latest one first. They are the framework's, which keeps them.
#[derive(Debug)]
pub(crate) struct Streams {
    epoch: ForkEpoch,
    known: Mutex<Vec<(u64, Stream)>>,
}

impl Streams {
    pub(crate) fn new() -> Result<Self, Raised> {
        Ok(Self { epoch: ForkEpoch::current()?, known: Mutex::default() })
    }
}

impl CommState {
    /// The stream that a framework calls by a number, remembered so that the next call finds it without allocating.
    ///
    /// # Safety
    /// The number is that of a stream of the communicator's device, which its framework does not destroy before the communicator
    /// is closed and its memory dropped, as torch destroys none of its own. On the host the number has no meaning.
    pub(crate) unsafe fn stream_at(&self, handle: u64) -> Stream {
        // In a child of a fork, which is told so by whatever it enqueues, the lock may be held by a thread that is not there.
        if !self.place.is_cuda() || !self.streams.epoch.is_current() {
            return self.stream.clone();
        }
        let mut known = self.streams.known.lock().unwrap_or_else(PoisonError::into_inner);
        let place = known.iter().position(|(number, _)| *number == handle).unwrap_or_else(|| {
            // SAFETY: the caller guarantees that the number is that of a stream of this device, and that the stream outlives the
            // communicator's memory, and so the last clone.
            known.push((handle, unsafe { Stream::from_foreign_static(self.comm.device(), handle) }));
            known.len() - 1
        });
        known.swap(0, place);
        known[0].1.clone()
    }
}
