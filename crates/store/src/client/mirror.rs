//! Mirrors: copies of drafts and objects in pinned host memory. Dropping the mirror of a draft writes it back to the draft,
//! unless the mirror was abandoned.

use std::sync::{Mutex, PoisonError};

use wholemem_hal::{Device, PinnedBuffer, Span, Stream};
use wholemem_os::{Deadline, SharedSlice};

use super::{Draft, Object};
use crate::{Error, Result};

/// A host copy of the bytes of a draft or an object. Dropping the copy of a draft writes it back to the draft, unless the copy
/// was abandoned.
#[derive(Debug)]
#[doc(alias = "CUDABufferMirror")]
pub struct Mirror {
    buffer: PinnedBuffer,
    stream: Stream,
    /// The memory to which the copy is written back; `None` for the copy of an object, or once the copy is written back or
    /// abandoned.
    destination: Mutex<Option<Span>>,
    len: usize,
}

impl Mirror {
    /// Creates a host copy of a draft, with the draft's present bytes if `copy_in`, else uninitialized.
    ///
    /// # Errors
    /// [`Error::Memory`]; [`Error::Protocol`] for a small draft in host memory, which can be written directly.
    pub fn of_draft(draft: &Draft, copy_in: bool) -> Result<Self> {
        let rule = "a small object in host memory is written directly";
        let (span, device) = draft.span()?.zip(draft.device()).ok_or(Error::Protocol { rule })?;
        Self::of_span(span, &device, copy_in)
    }

    /// Creates a host copy of a draft from its [span](Draft::span) and its device, as [`Mirror::of_draft`] does.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn of_span(span: Span, device: &Device, copy_in: bool) -> Result<Self> {
        let mut mirror = Self::create(&span, copy_in, device)?;
        mirror.destination = Mutex::new(Some(span));
        Ok(mirror)
    }

    /// Creates a read-only host copy of an object.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn of_object(object: &Object) -> Result<Self> {
        Self::create(&object.span()?, true, &object.device())
    }

    fn create(span: &Span, copy_in: bool, device: &Device) -> Result<Self> {
        let stream = device.stream()?;
        let buffer = PinnedBuffer::create(device, span.len().max(1))?;
        let mirror = Self { buffer, stream, destination: Mutex::new(None), len: span.len() };
        if copy_in && mirror.len > 0 {
            mirror.stream.copy(&mirror.span()?, span)?;
            mirror.stream.synchronize(Deadline::NEVER)?;
        }
        Ok(mirror)
    }

    fn span(&self) -> Result<Span> {
        Ok(self.buffer.all().part(0, self.len)?)
    }

    /// Returns the bytes of the host copy: read-only for an object, writable for a draft.
    ///
    /// # Errors
    /// [`Error::Memory`].
    #[doc(alias = "data")]
    #[doc(alias = "mutable_data")]
    pub fn bytes(&self) -> Result<SharedSlice<'_>> {
        let bytes = self.buffer.bytes()?.part(0, self.len)?;
        let is_written = self.destination.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        Ok(if is_written { bytes } else { bytes.read_only() })
    }

    /// Writes the host copy back to its draft, and returns errors. Dropping the mirror does the same, but only logs errors.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn write_back(self) -> Result<()> {
        self.flush()
    }

    /// Discards the changes to the host copy: the draft is not modified, and its memory is released even while the bytes of the
    /// copy are still borrowed.
    pub fn abandon(&self) {
        drop(self.take_destination());
    }

    fn take_destination(&self) -> Option<Span> {
        self.destination.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn flush(&self) -> Result<()> {
        if let Some(destination) = self.take_destination()
            && self.len > 0
        {
            self.stream.copy(&destination, &self.span()?)?;
            self.stream.synchronize(Deadline::NEVER)?;
        }
        Ok(())
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        if let Err(error) = self.flush() {
            tracing::error!(%error, "cannot write a mirror back");
        }
    }
}
