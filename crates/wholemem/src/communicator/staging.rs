//! Streams and staging buffers for blocking calls on slices of host memory.
//!
//! ```text
//!   work runs inline (host backend)     slice <──────────────────────────> kernel
//!   other devices                       slice <── copy ──> pinned buffer <──> kernel
//! ```
//!
//! A communicator pools its streams and buffers, because creating them takes longer than a short call. The pool has as many of them
//! as there were concurrent calls. A buffer has at most [`STAGING_LEN`] bytes, unless one row is longer; longer slices are copied
//! in pieces.

#![allow(unsafe_code, reason = "lends slices to kernels that run on the CPU")]

use std::sync::{Arc, Mutex, PoisonError};

use wholemem_hal::{Device, PinnedBuffer, Rights, Span, Stream};

use crate::dtype::Element;
use crate::error::Result;

/// The maximum length in bytes of a pooled staging buffer. Longer slices are staged in pieces.
pub(crate) const STAGING_LEN: usize = 16 << 20;

/// The idle streams and staging buffers of a communicator.
#[derive(Debug, Default)]
pub(super) struct StagingPool {
    spare: Mutex<Vec<Staging>>,
}

impl StagingPool {
    /// Calls `work` with a stream and a staging buffer that no other call uses at the same time.
    pub(super) fn with<T>(&self, device: &Device, work: impl FnOnce(&mut Staging) -> Result<T>) -> Result<T> {
        let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut staging = match spare {
            Some(staging) => staging,
            None => Staging { stream: device.stream()?, buffer: None },
        };
        // If `work` fails, the device may still access the staging buffer, so the buffer is not reused.
        let outcome = work(&mut staging)?;
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).push(staging);
        Ok(outcome)
    }
}

/// A stream for one blocking call at a time, and a pinned staging buffer if the stream does not run inline.
#[derive(Debug)]
pub(crate) struct Staging {
    stream: Stream,
    buffer: Option<PinnedBuffer>,
}

impl Staging {
    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Returns a pinned staging buffer of at least `len` bytes. Later calls reuse the buffer if it is not longer than
    /// [`STAGING_LEN`].
    pub(crate) fn buffer(&mut self, len: usize) -> Result<PinnedBuffer> {
        if let Some(buffer) = self.buffer.as_ref().filter(|buffer| buffer.len() >= len) {
            return Ok(buffer.clone());
        }
        let is_pooled = len <= STAGING_LEN;
        let len = if is_pooled { len.next_power_of_two() } else { len };
        let buffer = PinnedBuffer::create(self.stream.device(), len)?;
        if is_pooled {
            self.buffer = Some(buffer.clone());
        }
        Ok(buffer)
    }
}

/// Calls `work` with a span of a slice's memory, which work of `stream` may read. The stream must run inline.
pub(crate) fn lend<T: Element, R>(stream: &Stream, slice: &[T], work: impl FnOnce(&Span) -> R) -> R {
    let address = slice.as_ptr().expose_provenance();
    lend_memory(stream, (address, size_of_val(slice)), Rights::Read, work)
}

/// Calls `work` with a span of a slice's memory, which work of `stream` may read and write. The stream must run inline.
pub(crate) fn lend_mut<T: Element, R>(stream: &Stream, slice: &mut [T], work: impl FnOnce(&Span) -> R) -> R {
    let address = slice.as_mut_ptr().expose_provenance();
    // Every bit pattern is a valid `T`, so any write to the slice leaves valid values.
    lend_memory(stream, (address, size_of_val(slice)), Rights::ReadWrite, work)
}

fn lend_memory<R>(
    stream: &Stream,
    (address, len): (usize, usize),
    rights: Rights,
    work: impl FnOnce(&Span) -> R,
) -> R {
    assert!(stream.runs_inline(), "a stream that does not run inline may access the memory after the call");
    let owner = Arc::new(());
    // The loan is declared before the span, so that it is dropped after the span, even if `work` panics.
    let _loan = SliceLoan { owner: &owner };
    // SAFETY: the caller of `lend_memory` has borrowed the `len` bytes at `address` until this function returns, mutably if the
    // rights include writing. Work of an inline stream has run when the enqueueing call returns. No later use is possible: if a
    // clone of the span remains, dropping the `SliceLoan` aborts the process.
    let span =
        unsafe { Span::foreign(stream.device(), address as u64, len, rights, Arc::<()>::clone(&owner)) };
    work(&span)
}

/// A borrow of memory that spans refer to. If a span still exists when the borrow ends, dropping it aborts the process.
struct SliceLoan<'a> {
    owner: &'a Arc<()>,
}

impl Drop for SliceLoan<'_> {
    fn drop(&mut self) {
        if Arc::strong_count(self.owner) != 1 {
            tracing::error!("a span of a borrowed slice outlives the borrow");
            std::process::abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use wholemem_hal::{Backend, HostConfig};

    use super::*;

    fn stream() -> Stream {
        Backend::host(HostConfig::default()).unwrap().device(0).unwrap().stream().unwrap()
    }

    #[test]
    fn streams_and_buffers_are_reused_unless_a_call_failed() {
        let (pool, stream) = (StagingPool::default(), stream());
        let device = stream.device();
        let address = |len| pool.with(device, |staging| Ok(staging.buffer(len)?.all().address())).unwrap();
        let first = address(100);
        assert_eq!([address(1), address(128)], [first; 2], "lengths are rounded up to a power of two");
        let spare = || {
            pool.spare
                .lock()
                .unwrap()
                .iter()
                .map(|one| one.buffer.as_ref().unwrap().len())
                .collect::<Vec<_>>()
        };
        assert_eq!(spare(), [128]);
        pool.with(device, |staging| {
            // A concurrent call uses another stream than the outer call.
            let other = pool.with(device, |other| Ok(other.stream().clone())).unwrap();
            assert_ne!(&other, staging.stream());
            Ok(())
        })
        .unwrap();
        assert_eq!(pool.spare.lock().unwrap().len(), 2);
        let failed: Result<()> = pool.with(device, |_| Err(crate::Error::Interrupted));
        assert_eq!(failed, Err(crate::Error::Interrupted));
        assert_eq!(pool.spare.lock().unwrap().len(), 1);
    }

    #[test]
    fn buffers_above_the_limit_are_not_pooled() {
        let (pool, stream) = (StagingPool::default(), stream());
        pool.with(stream.device(), |staging| {
            assert_eq!(staging.buffer(STAGING_LEN + 1)?.len(), STAGING_LEN + 1);
            assert!(staging.buffer.is_none());
            assert_eq!(staging.buffer(STAGING_LEN)?.len(), STAGING_LEN);
            assert!(staging.buffer.is_some());
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn lent_slices_are_read_and_written_in_place() {
        let stream = stream();
        let mut seen = [0; 8];
        lend(&stream, &[1_u32, 2], |span| stream.read(span, &mut seen)).unwrap();
        assert_eq!(seen, [1_u32, 2].map(u32::to_ne_bytes).concat()[..]);
        let written = lend(&stream, &[1_u32, 2], |span| stream.write(span, &seen));
        assert!(matches!(written, Err(wholemem_hal::Error::Denied { .. })), "{written:?}");
        let mut values = [0_u32; 2];
        lend_mut(&stream, &mut values, |span| stream.write(span, &seen)).unwrap();
        assert_eq!(values, [1, 2]);
        lend::<u32, _>(&stream, &[], |span| assert!(span.is_empty()));
    }
}
