//! A host view of a buffer on a device: copied in if asked for, and written back when it is done with.

use std::sync::{Mutex, PoisonError};

use wholemem_hal::{Device, PinnedBuffer, Span, Stream};
use wholemem_os::{Deadline, SharedSlice};

use super::{Draft, Object};
use crate::{Error, Result};

/// A copy in host memory of a draft's or an object's bytes. That of a draft is written back when it is dropped,
/// unless it was given up.
#[derive(Debug)]
#[doc(alias = "CUDABufferMirror")]
pub struct Mirror {
    buffer: PinnedBuffer,
    stream: Stream,
    /// Where to write back to, until that is done or given up.
    back: Mutex<Option<Span>>,
    len: usize,
}

impl Mirror {
    /// Mirrors a draft, with the bytes it has now if `copy_in`.
    ///
    /// # Errors
    /// [`Error::Memory`]; [`Error::Protocol`] for a small draft in host memory, which is written directly.
    pub fn of_draft(draft: &Draft, copy_in: bool) -> Result<Self> {
        let rule = "a small object in host memory is written directly";
        let (span, device) = draft.span()?.zip(draft.device()).ok_or(Error::Protocol { rule })?;
        Self::of_span(span, &device, copy_in)
    }

    /// The same, of the [place](Draft::span) of a draft on its device.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn of_span(span: Span, device: &Device, copy_in: bool) -> Result<Self> {
        let mut mirror = Self::create(&span, copy_in, device)?;
        mirror.back = Mutex::new(Some(span));
        Ok(mirror)
    }

    /// Mirrors an object.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn of_object(object: &Object) -> Result<Self> {
        Self::create(&object.span()?, true, &object.device())
    }

    fn create(span: &Span, copy_in: bool, device: &Device) -> Result<Self> {
        let stream = device.stream()?;
        let buffer = PinnedBuffer::create(device, span.len().max(1))?;
        let mirror = Self { buffer, stream, back: Mutex::new(None), len: span.len() };
        if copy_in && mirror.len > 0 {
            mirror.stream.copy(&mirror.span()?, span)?;
            mirror.stream.synchronize(Deadline::NEVER)?;
        }
        Ok(mirror)
    }

    fn span(&self) -> Result<Span> {
        Ok(self.buffer.all().part(0, self.len)?)
    }

    /// The bytes, to be read, and for a draft to be written.
    ///
    /// # Errors
    /// [`Error::Memory`].
    #[doc(alias = "data")]
    #[doc(alias = "mutable_data")]
    pub fn bytes(&self) -> Result<SharedSlice<'_>> {
        let bytes = self.buffer.bytes()?.part(0, self.len)?;
        let is_written = self.back.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        Ok(if is_written { bytes } else { bytes.read_only() })
    }

    /// Writes a draft's mirror back, and says what came of it. Dropping does the same, silently.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn write_back(self) -> Result<()> {
        self.flush()
    }

    /// Gives up what was written to it: the draft stays as it is, and is let go, also while somebody still has the bytes.
    pub fn abandon(&self) {
        drop(self.take_back());
    }

    fn take_back(&self) -> Option<Span> {
        self.back.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn flush(&self) -> Result<()> {
        if let Some(back) = self.take_back()
            && self.len > 0
        {
            self.stream.copy(&back, &self.span()?)?;
            self.stream.synchronize(Deadline::NEVER)?;
        }
        Ok(())
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        if let Err(error) = self.flush() {
            tracing::error!(%error, "a mirror could not be written back");
        }
    }
}
