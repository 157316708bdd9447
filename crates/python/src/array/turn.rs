//! In whose turn an array is: the stream whose work used it last, for which the next one waits.
//!
//! So an array that a call has just enqueued the writing of can be handed on at once: whoever takes it by DLPack says on
//! which stream it will be used, and that stream waits, not the processor.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use wholemem_hal::{Device, Event, EventKind, Stream};

use crate::error::Raised;

/// A stream of a GPU, as frameworks tell each other of it.
#[derive(Debug)]
pub(crate) struct Turn {
    device: Device,
    handle: u64,
    /// The framework's own stream, which is not to go while it is waited for.
    keeps: Option<Py<PyAny>>,
}

impl Turn {
    /// What frameworks call the default stream, which is zero to the driver.
    pub(crate) const DEFAULT: i64 = 1;

    /// The default stream of a device, which is always there.
    pub(crate) fn of_default(device: &Device) -> Self {
        Self { device: device.clone(), handle: Self::DEFAULT.unsigned_abs(), keeps: None }
    }

    /// A stream by its number; zero and one are the default stream. `stream` is the framework's object, which is kept.
    ///
    /// # Safety
    /// The number is that of a stream of the device, which is not destroyed before the last use of this value and its clones, nor
    /// before the work has run that is enqueued through them.
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

    /// The stream, to enqueue work on.
    pub(crate) fn stream(&self) -> Stream {
        let handle = if self.handle == Self::DEFAULT.unsigned_abs() { 0 } else { self.handle };
        // SAFETY: the default stream is always there; of another one, the caller of `new` guarantees that it is a stream of the
        // device and is not destroyed before the work has run.
        unsafe { Stream::from_foreign(&self.device, handle) }
    }

    /// Lets this stream's work come behind what is on another one now.
    pub(crate) fn follow(&self, before: &Self) -> Result<(), Raised> {
        if (self.device.id(), self.handle) == (before.device.id(), before.handle) {
            return Ok(());
        }
        let (first, then) = (before.stream(), self.stream());
        // What is recorded runs when it is played, and its order is up to whoever plays it.
        if first.is_capturing() || then.is_capturing() {
            return Ok(());
        }
        let reached = Event::create(&before.device, EventKind::Order)?;
        first.record(&reached)?;
        Ok(then.await_event(&reached)?)
    }
}

/// The stream that used an array last, if any did.
#[derive(Debug, Default)]
pub(crate) struct LastTurn(Mutex<Option<Turn>>);

impl LastTurn {
    /// A stream uses the array from now on, behind the one that did.
    pub(crate) fn pass(&self, py: Python<'_>, next: &Turn) -> Result<(), Raised> {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = last.as_ref() {
            next.follow(last)?;
        }
        // What it replaces may be the last to keep a stream, and goes when nothing is locked.
        let before = last.replace(next.clone_ref(py));
        drop(last);
        drop(before);
        Ok(())
    }

    /// The stream that used it last.
    pub(crate) fn get(&self, py: Python<'_>) -> Option<Turn> {
        let last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        last.as_ref().map(|turn| turn.clone_ref(py))
    }

    /// How others are told of it: the driver's number of the stream.
    pub(crate) fn told(&self) -> Option<u64> {
        let last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        last.as_ref().map(|turn| turn.handle)
    }
}
