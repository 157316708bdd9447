//! Collective calls on slices of host memory, which wait for the result.
//!
//! On the host backend the slices are operands as they are. On other devices they are staged in pinned memory: all ranks give
//! the same length, so all make the same calls.

use wholemem_comm::Rank;
use wholemem_hal::{Span, Stream};
use wholemem_os::Deadline;
use zerocopy::IntoBytes;

use super::Lane;
use crate::communicator::{STAGING_LEN, lend, lend_mut};
use crate::{Element, ReduceOp, Result};

impl Lane {
    /// Reduces the elements of all ranks in place: afterwards the slice of every rank has, at each position, the reduction of all
    /// ranks' elements at that position. It waits for the result, which is bitwise the same on every rank. Collective: all ranks give
    /// the same length and operation.
    ///
    /// [`all_reduce`](Self::all_reduce) does the same in order on a stream, and through a window without copies.
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
    /// As [`all_reduce`](Self::all_reduce); [`Error::Comm`](crate::Error::Comm) if a rank died or did not arrive in time.
    pub fn all_reduce_slice<T: Element>(&self, values: &mut [T], op: ReduceOp) -> Result<()> {
        self.in_place(values, |stream, span| self.all_reduce(stream, span, span, T::DTYPE, op))
    }

    /// Copies the root's slice to the slices of all ranks, and waits for the result. Collective: all ranks give the same length
    /// and root.
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
        self.in_place(values, |stream, span| self.broadcast(stream, root, span, span))
    }

    /// Returns the slices of all ranks, one after the other in the order of ranks, and waits for them. Collective: all ranks give
    /// the same length.
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
        self.group.with_staging(|staging| {
            let stream = staging.stream();
            if stream.runs_inline() {
                return lend(stream, values, |from| {
                    lend_mut(stream, &mut all, |to| self.all_gather(stream, from, to))
                });
            }
            let at_once = (STAGING_LEN / (size_of::<T>() * (ranks + 1))).max(1);
            for (piece, part) in values.chunks(at_once).enumerate() {
                let len = size_of_val(part);
                let buffer = staging.buffer(len * (ranks + 1))?;
                buffer.bytes()?.write_at(0, part.as_bytes())?;
                let (from, to) = (buffer.all().part(0, len)?, buffer.all().part(len, len * ranks)?);
                self.all_gather(staging.stream(), &from, &to)?;
                self.wait(staging.stream())?;
                for rank in 0..ranks {
                    let at = rank * values.len() + piece * at_once;
                    let target = all[at..at + part.len()].as_mut_bytes();
                    buffer.bytes()?.read_at(len + rank * len, target)?;
                }
            }
            self.check()
        })?;
        Ok(all)
    }

    /// Calls `call` with the memory of a slice, in place or staged piece by piece, and waits for the result.
    fn in_place<T: Element>(
        &self,
        values: &mut [T],
        call: impl Fn(&Stream, &Span) -> Result<()>,
    ) -> Result<()> {
        self.group.with_staging(|staging| {
            let stream = staging.stream();
            if stream.runs_inline() {
                return lend_mut(stream, values, |span| call(stream, span));
            }
            for part in values.chunks_mut(STAGING_LEN / size_of::<T>()) {
                let buffer = staging.buffer(size_of_val(part))?;
                buffer.bytes()?.write_at(0, part.as_bytes())?;
                call(staging.stream(), &buffer.all().part(0, size_of_val(part))?)?;
                self.wait(staging.stream())?;
                buffer.bytes()?.read_at(0, part.as_mut_bytes())?;
            }
            self.check()
        })
    }

    /// Waits for the calls on a stream.
    fn wait(&self, stream: &Stream) -> Result<()> {
        stream.synchronize(Deadline::NEVER)?;
        self.check()
    }
}
