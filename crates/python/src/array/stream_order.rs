//! Orders the use of an array between streams: the next stream waits for the stream that used the array last.
//!
//! So an array can be exported immediately after a call has enqueued work that writes it: a DLPack consumer names the stream
//! on which it will use the array, and that stream waits, not the CPU.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use wholemem_hal::{Device, Event, EventKind, Stream};

use crate::error::Exception;

/// A stream of a GPU that a framework owns, identified by its handle.
#[derive(Debug)]
pub(crate) struct FrameworkStream {
    device: Device,
    handle: u64,
    /// The stream object of the framework, which keeps the stream alive.
    stream_object: Option<Py<PyAny>>,
}

impl FrameworkStream {
    /// The number of the default stream in DLPack. In the CUDA driver its handle is 0.
    pub(crate) const DEFAULT: i64 = 1;

    /// Returns the default stream of a device, which always exists.
    pub(crate) fn default_of(device: &Device) -> Self {
        Self { device: device.clone(), handle: Self::DEFAULT.unsigned_abs(), stream_object: None }
    }

    /// Creates a reference to the framework's stream with a handle; 0 and 1 are the default stream. `stream` is the framework's
    /// stream object, which is held.
    ///
    /// # Safety
    /// The handle is that of a stream of the device. The stream is not destroyed before the last use of this value and its
    /// clones, nor before the work that is enqueued through them has run.
    pub(crate) unsafe fn new(device: &Device, handle: u64, stream: Option<&Bound<'_, PyAny>>) -> Self {
        let stream_object = stream.map(|stream| stream.clone().unbind());
        Self { device: device.clone(), handle: handle.max(Self::DEFAULT.unsigned_abs()), stream_object }
    }

    pub(crate) fn clone_ref(&self, py: Python<'_>) -> Self {
        let stream_object = self.stream_object.as_ref().map(|stream| stream.clone_ref(py));
        Self { device: self.device.clone(), handle: self.handle, stream_object }
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the framework's stream as a [`Stream`] of wholemem, on which work can be enqueued.
    pub(crate) fn stream(&self) -> Stream {
        let handle = if self.handle == Self::DEFAULT.unsigned_abs() { 0 } else { self.handle };
        // SAFETY: the default stream always exists. For another stream, the caller of `new` guarantees that it belongs to the
        // device and is not destroyed before the work has run.
        unsafe { Stream::from_foreign(&self.device, handle) }
    }

    /// Makes later work of this stream wait for the work that is now on another stream.
    pub(crate) fn wait_for(&self, other: &Self) -> Result<(), Exception> {
        if (self.device.id(), self.handle) == (other.device.id(), other.handle) {
            return Ok(());
        }
        let (first, second) = (other.stream(), self.stream());
        // Captured work runs when its CUDA graph is launched, so the user who launches the graph orders the work.
        if first.is_capturing() || second.is_capturing() {
            return Ok(());
        }
        let event = Event::create(&other.device, EventKind::Order)?;
        first.record(&event)?;
        Ok(second.await_event(&event)?)
    }
}

/// The stream that used an array last, if any.
#[derive(Debug, Default)]
pub(crate) struct LastStream(Mutex<Option<FrameworkStream>>);

impl LastStream {
    /// Makes the stream `next` wait for the stream that used an array last, and records `next` as the array's last stream.
    pub(crate) fn update(&self, py: Python<'_>, next: &FrameworkStream) -> Result<(), Exception> {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = last.as_ref() {
            next.wait_for(last)?;
        }
        // The replaced value may hold the last reference to a Python stream object, so it is dropped after the lock is released.
        let previous = last.replace(next.clone_ref(py));
        drop(last);
        drop(previous);
        Ok(())
    }

    /// Returns the stream that used the array last, if any.
    pub(crate) fn get(&self, py: Python<'_>) -> Option<FrameworkStream> {
        let last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        last.as_ref().map(|stream| stream.clone_ref(py))
    }

    /// Returns the handle of the stream that used the array last, for `__cuda_array_interface__`.
    pub(crate) fn handle(&self) -> Option<u64> {
        let last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        last.as_ref().map(|stream| stream.handle)
    }
}
