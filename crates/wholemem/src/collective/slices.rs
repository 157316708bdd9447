//! Collective calls on slices of host memory, which block until the result is in the slice.
//!
//! On the host backend kernels access the slices directly. On other devices slices are staged in pinned memory, piece by piece. All
//! ranks pass the same length, so all ranks divide the call into the same pieces. The stream and the buffer are created with the
//! lane: the driver may block an allocation of pinned memory until running kernels end, and such a kernel may wait for this rank.

use std::sync::{Mutex, MutexGuard, PoisonError};

use wholemem_comm::Rank;
use wholemem_hal::{PinnedBuffer, Span, Stream};
use wholemem_os::Deadline;
use zerocopy::IntoBytes;

use super::Lane;
use crate::communicator::{lend, lend_mut};
use crate::{Element, ReduceOp, Result};

/// The length in bytes of the pieces in which slices are staged for a collective call.
const PIECE_LEN: usize = 1 << 20;

/// The stream and the pinned buffer through which a lane stages slices of host memory, if its work does not run inline.
#[derive(Debug)]
pub(super) struct SliceStaging {
    used: Mutex<(Stream, PinnedBuffer)>,
}

impl SliceStaging {
    /// Creates the staging buffer for slices of a lane, on the device of `stream`, and keeps a clone of the stream. Returns
    /// `None` if work runs inline.
    pub(super) fn create(stream: &Stream) -> Result<Option<Self>> {
        if stream.runs_inline() {
            return Ok(None);
        }
        let buffer = PinnedBuffer::create(stream.device(), PIECE_LEN)?;
        Ok(Some(Self { used: Mutex::new((stream.clone(), buffer)) }))
    }

    fn lock(&self) -> MutexGuard<'_, (Stream, PinnedBuffer)> {
        // Every call writes the staging buffer before reading it, so its content after a panic does not matter.
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lane {
    /// Reduces the elements of all ranks in place: afterwards the slice of every rank has, at each position, the reduction of all
    /// ranks' elements at that position. Waits for the result, which is bitwise the same on every rank. Collective: all ranks
    /// pass the same length and operation.
    ///
    /// [`all_reduce`](Self::all_reduce) enqueues the same call on a stream, and needs no copies if the memory is a window.
    ///
    /// ```
    /// use wholemem::{Communicator, ReduceOp, SymmetricMemory, SymmetricSpec};
    ///
    /// Communicator::run_local(2, |comm| {
    ///     let symmetric = SymmetricMemory::create(comm, &SymmetricSpec::default())?;
    ///     let mut values = [1.5, comm.rank().0 as f32];
    ///     symmetric.all_reduce_slice(&mut values, ReduceOp::Sum)?;
    ///     assert_eq!(values, [3.0, 1.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), wholemem::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); [`Error::Comm`](crate::Error::Comm) if a rank died or did not arrive before the
    /// timeout.
    pub fn all_reduce_slice<T: Element>(&self, values: &mut [T], op: ReduceOp) -> Result<()> {
        self.in_place(values, |stream, span| self.all_reduce(stream, span, span, T::DTYPE, op))
    }

    /// Copies the slice of rank `root` to the slices of all ranks, and waits for the result. Collective: all ranks pass the same
    /// length and root.
    ///
    /// ```
    /// use wholemem::{Communicator, Rank, SymmetricMemory, SymmetricSpec};
    ///
    /// Communicator::run_local(2, |comm| {
    ///     let symmetric = SymmetricMemory::create(comm, &SymmetricSpec::default())?;
    ///     let mut values = [comm.rank().0; 3];
    ///     symmetric.broadcast_slice(Rank(1), &mut values)?;
    ///     assert_eq!(values, [1; 3]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), wholemem::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`broadcast`](Self::broadcast).
    pub fn broadcast_slice<T: Element>(&self, root: Rank, values: &mut [T]) -> Result<()> {
        self.in_place(values, |stream, span| self.broadcast_elements(stream, root, span, span, T::DTYPE))
    }

    /// Returns the slices of all ranks, concatenated in the order of ranks, after waiting for the result. Collective: all ranks
    /// pass the same length.
    ///
    /// ```
    /// use wholemem::{Communicator, SymmetricMemory, SymmetricSpec};
    ///
    /// Communicator::run_local(2, |comm| {
    ///     let symmetric = SymmetricMemory::create(comm, &SymmetricSpec::default())?;
    ///     let values = symmetric.all_gather_slice(&[comm.rank().0, 7])?;
    ///     assert_eq!(values, [0, 7, 1, 7]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), wholemem::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    pub fn all_gather_slice<T: Element>(&self, values: &[T]) -> Result<Vec<T>> {
        let ranks = self.group.size() as usize;
        let mut all = vec![T::default(); values.len() * ranks];
        let Some(staging) = &self.slice_staging else {
            self.group.with_staging(|staging| {
                let stream = staging.stream();
                lend(stream, values, |from| {
                    lend_mut(stream, &mut all, |to| self.all_gather_elements(stream, from, to, T::DTYPE))
                })
            })?;
            return Ok(all);
        };
        let staging = staging.lock();
        let (stream, buffer) = &*staging;
        self.check()?;
        let at_once = (PIECE_LEN / (size_of::<T>() * (ranks + 1))).max(1);
        // As in `in_place`, the last piece is shorter than the others, or empty.
        for begin in (0..=values.len()).step_by(at_once) {
            let part = &values[begin..values.len().min(begin + at_once)];
            let len = size_of_val(part);
            buffer.bytes()?.write_at(0, part.as_bytes())?;
            let (from, to) = (buffer.all().part(0, len)?, buffer.all().part(len, len * ranks)?);
            self.all_gather_elements(stream, &from, &to, T::DTYPE)?;
            self.wait(stream)?;
            for rank in 0..ranks {
                let at = rank * values.len() + begin;
                buffer.bytes()?.read_at(len + rank * len, all[at..at + part.len()].as_mut_bytes())?;
            }
        }
        Ok(all)
    }

    /// Makes a collective call on the memory of a slice, directly if work runs inline, otherwise staged piece by piece. Waits for
    /// the result.
    fn in_place<T: Element>(
        &self,
        values: &mut [T],
        call: impl Fn(&Stream, &Span) -> Result<()>,
    ) -> Result<()> {
        let Some(staging) = &self.slice_staging else {
            return self.group.with_staging(|staging| {
                let stream = staging.stream();
                lend_mut(stream, values, |span| call(stream, span))
            });
        };
        let staging = staging.lock();
        let (stream, buffer) = &*staging;
        self.check()?;
        let (len, at_once) = (values.len(), PIECE_LEN / size_of::<T>());
        // The last piece is shorter than the others, or empty. So if ranks pass different lengths, they disagree in some piece.
        for begin in (0..=len).step_by(at_once) {
            let part = &mut values[begin..len.min(begin + at_once)];
            buffer.bytes()?.write_at(0, part.as_bytes())?;
            call(stream, &buffer.all().part(0, size_of_val(part))?)?;
            self.wait(stream)?;
            buffer.bytes()?.read_at(0, part.as_mut_bytes())?;
        }
        Ok(())
    }

    /// Waits for the collective calls that were enqueued on a stream, and returns their error.
    fn wait(&self, stream: &Stream) -> Result<()> {
        stream.synchronize(Deadline::NEVER)?;
        self.check()
    }
}
