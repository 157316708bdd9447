//! Orders the use of an array between streams: the next stream waits for the stream that used the array last.
//!
//! So an array can be exported immediately after a call has enqueued work that writes it: a DLPack consumer names the stream
//! on which it will use the array, and that stream waits, not the CPU.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use wholemem_hal::{Device, Event, EventKind, Stream};

use crate::error::Raised;

/// A stream of a GPU that a framework owns, identified by its handle.
#[derive(Debug)]
pub(crate) struct Turn {
    device: Device,
    handle: u64,
    /// The framework's stream object, which keeps the stream alive.
    keeps: Option<Py<PyAny>>,
}

impl Turn {
    /// DLPack's number of the default stream, whose handle in the driver is 0.
    pub(crate) const DEFAULT: i64 = 1;

    /// The default stream of a device, which always exists.
    pub(crate) fn of_default(device: &Device) -> Self {
        Self { device: device.clone(), handle: Self::DEFAULT.unsigned_abs(), keeps: None }
    }

    /// A stream by its handle; 0 and 1 are the default stream. `stream` is the framework's object, which is held.
    ///
    /// # Safety
    /// The handle is that of a stream of the device. The stream is not destroyed before the last use of this value and its
    /// clones, nor before the work that is enqueued through them has run.
    pub(crate) unsafe fn new(device: &Device, handle: u64, stream: Option<&Bound<'_, PyAny>>) -> Self {
        let keeps = stream.map(|stream| stream.clone().unbind());
        Self { device: device.clone(), handle: handle.max(Self::DEFAULT.unsigned_abs()), keeps }
    }

    pub(crate) fn clone_ref(&self, py: Python<'_>) -> Self {
        let keeps = self.keeps.as_ref().map(|stream| stream.clone_ref(py));
        Self { device: self.device.clone(), handle: self.handle, keeps }
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// The stream, for enqueueing work.
    pub(crate) fn stream(&self) -> Stream {
        let handle = if self.handle == Self::DEFAULT.unsigned_abs() { 0 } else { self.handle };
        // SAFETY: the default stream always exists. For another stream, the caller of `new` guarantees that it belongs to the
        // device and is not destroyed before the work has run.
        unsafe { Stream::from_foreign(&self.device, handle) }
    }

    /// Makes later work of this stream wait for the work that is now on another stream.
    pub(crate) fn follow(&self, before: &Self) -> Result<(), Raised> {
        if (self.device.id(), self.handle) == (before.device.id(), before.handle) {
            return Ok(());
        }
        let (first, then) = (before.stream(), self.stream());
        // Captured work runs when the graph is launched; the caller of the launch orders it.
        if first.is_capturing() || then.is_capturing() {
            return Ok(());
        }
        let reached = Event::create(&before.device, EventKind::Order)?;
        first.record(&reached)?;
        Ok(then.await_event(&reached)?)
    }
}

/// The stream that used an array last, if any.
#[derive(Debug, Default)]
pub(crate) struct LastTurn(Mutex<Option<Turn>>);

impl LastTurn {
    /// Records that `next` uses the array from now on, after the work of the stream that used it last.
    pub(crate) fn pass(&self, py: Python<'_>, next: &Turn) -> Result<(), Raised> {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = last.as_ref() {
            next.follow(last)?;
        }
        // The replaced value may hold the last reference to a stream object: drop it after the lock.
        let before = last.replace(next.clone_ref(py));
        drop(last);
        drop(before);
        Ok(())
    }

    /// The stream that used the array last.
    pub(crate) fn get(&self, py: Python<'_>) -> Option<Turn> {
        let last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        last.as_ref().map(|turn| turn.clone_ref(py))
    }

    /// The driver's handle of the stream that used the array last, for `__cuda_array_interface__`.
    pub(crate) fn told(&self) -> Option<u64> {
        let last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        last.as_ref().map(|turn| turn.handle)
    }
}
