//! The methods of a lane (a sequence of collective calls) that check the arguments of a collective call, plan the call and launch
//! it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use wholemem_comm::{Error as CommError, Rank};
use wholemem_hal::{Attempt, Rights, Span, Stream};

use super::call_log::LoggedCall;
use super::find_window::RegisteredRange;
use super::kernel::CollectiveKind;
use super::terms::{Terms, WindowRange};
use super::tuning::{Algorithm, CallProperties, blocks, choose};
use super::window::Window;
use super::{Buffer, Lane};
use crate::{CollectiveRequest, Dtype, Error, ReduceOp, Result, WindowRef};
use wholemem_os::width::to_usize;

/// Returns the maximum number of staging buffers that a collective call may fill one after another. A phase number has 16 bits,
/// and the two-shot algorithm has two phases for each filled buffer. On GPUs half of that suffices, because so many buffers are
/// longer than device memory.
fn max_pieces(runs_inline: bool) -> u64 {
    if runs_inline { (1 << 15) - 1 } else { 1 << 14 }
}

/// An input or output of a collective call whose length, rights and alignment have been checked.
#[derive(Debug, Clone, Copy)]
struct CheckedBuffer<'a> {
    address: u64,
    /// The addresses of all ranks' inputs (or outputs), if ranks access them directly; otherwise empty.
    reference: WindowRef,
    /// The range of a window that the buffer is; `None` for other memory.
    range: Option<WindowRange>,
    /// Keeps the buffer's memory alive while the call is in flight.
    keep: Option<&'a Span>,
}

impl Lane {
    /// Reduces the elements at each position of all ranks' inputs, in the order of ranks, and stores the result in the output of
    /// every rank. Collective: all ranks pass the same length, type, operation and kind of buffer.
    ///
    /// The result is bitwise the same on every rank, for every algorithm, size and device. `input` and `output` must be the same
    /// buffer, or must not overlap.
    ///
    /// ```
    /// use wholemem::{Backend, Communicator, Dtype, HostConfig, PinnedBuffer, ReduceOp, SymmetricMemory, SymmetricSpec};
    ///
    /// let device = Backend::host(HostConfig::default())?.device(0)?;
    /// let groups = Communicator::local(&[device.clone(), device])?;
    /// let sums = Communicator::on_each(&groups, |group| {
    ///     let symmetric = SymmetricMemory::create(group, &SymmetricSpec::default())?;
    ///     let stream = group.device().stream()?;
    ///     let buffer = PinnedBuffer::create(group.device(), 12)?.all();
    ///     let own = (group.rank().0 + 1) as f32;
    ///     stream.write(&buffer, &[own; 3].map(f32::to_ne_bytes).concat())?;
    ///     symmetric.all_reduce(&stream, &buffer, &buffer, Dtype::F32, ReduceOp::Sum)?;
    ///     let mut sum = [0; 4];
    ///     stream.read(&buffer.part(8, 4)?, &mut sum)?;
    ///     Ok(f32::from_ne_bytes(sum))
    /// })?;
    /// assert_eq!(sums, [3.0; 2]);
    /// # Ok::<(), wholemem::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::OpNotForType`], [`Error::Misaligned`], [`Error::TooShort`], [`Error::Overlap`], [`Error::NoPart`],
    /// [`Error::ForeignWindow`], [`Error::StagedTooLong`], before the call is enqueued; [`Error::Hal`]; [`Error::Comm`] if
    /// an earlier call failed. On the host backend, where work runs inline, also if this call failed.
    #[doc(alias("ncclAllReduce", "one_shot_all_reduce", "two_shot_all_reduce_"))]
    pub fn all_reduce<'a>(
        &self,
        stream: &Stream,
        input: impl Into<Buffer<'a>>,
        output: impl Into<Buffer<'a>>,
        dtype: Dtype,
        op: ReduceOp,
    ) -> Result<()> {
        if !op.applies_to(dtype) {
            return Err(Error::OpNotForType { op, dtype });
        }
        let input = input.into();
        let count = (input.len() / dtype.len()) as u64;
        let kind = CollectiveKind::AllReduce;
        let call = CallArgs { kind, dtype, element: dtype, op, root: Rank(0), count, times: 1 };
        self.call(stream, &call, &input, &output.into())
    }

    /// Concatenates the inputs of all ranks, in the order of ranks, in the output of every rank. Collective: all ranks pass the
    /// same length.
    ///
    /// `input` may be this rank's part of `output` (in place); otherwise they must not overlap.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    #[doc(alias = "ncclAllGather")]
    pub fn all_gather<'a>(
        &self,
        stream: &Stream,
        input: impl Into<Buffer<'a>>,
        output: impl Into<Buffer<'a>>,
    ) -> Result<()> {
        self.all_gather_elements(stream, input, output, Dtype::U8)
    }

    /// Like [`all_gather`](Self::all_gather), for elements of type `element`, which must be equal on all ranks.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    pub fn all_gather_elements<'a>(
        &self,
        stream: &Stream,
        input: impl Into<Buffer<'a>>,
        output: impl Into<Buffer<'a>>,
        element: Dtype,
    ) -> Result<()> {
        let input = input.into();
        let (count, times) = (input.len() as u64, u64::from(self.group.size()));
        let (kind, dtype, op) = (CollectiveKind::AllGather, Dtype::U8, ReduceOp::Sum);
        let call = CallArgs { kind, dtype, element, op, root: Rank(0), count, times };
        self.call(stream, &call, &input, &output.into())
    }

    /// Copies the input of rank `root` to the output of every rank. Collective: all ranks pass the same length and root. The
    /// inputs of the other ranks are not read.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); [`Error::Comm`] for a root that does not exist.
    #[doc(alias = "ncclBroadcast")]
    pub fn broadcast<'a>(
        &self,
        stream: &Stream,
        root: Rank,
        input: impl Into<Buffer<'a>>,
        output: impl Into<Buffer<'a>>,
    ) -> Result<()> {
        self.broadcast_elements(stream, root, input, output, Dtype::U8)
    }

    /// Like [`broadcast`](Self::broadcast), for elements of type `element`, which must be equal on all ranks.
    ///
    /// # Errors
    /// As [`broadcast`](Self::broadcast).
    pub fn broadcast_elements<'a>(
        &self,
        stream: &Stream,
        root: Rank,
        input: impl Into<Buffer<'a>>,
        output: impl Into<Buffer<'a>>,
        element: Dtype,
    ) -> Result<()> {
        let size = self.group.size();
        if root.0 >= size {
            return Err(CommError::NoSuchRank { rank: root, size }.into());
        }
        let input = input.into();
        let count = input.len() as u64;
        let (kind, dtype, op) = (CollectiveKind::Broadcast, Dtype::U8, ReduceOp::Sum);
        self.call(
            stream,
            &CallArgs { kind, dtype, element, op, root, count, times: 1 },
            &input,
            &output.into(),
        )
    }

    /// Orders work between ranks: work that any rank enqueues after the barrier runs after the work that all ranks enqueued before
    /// it. Collective. On GPUs only the streams wait; on the host backend the calling thread waits.
    ///
    /// # Errors
    /// [`Error::Hal`], [`Error::Comm`].
    pub fn barrier(&self, stream: &Stream) -> Result<()> {
        let (terms, digest) = Terms::barrier().encode();
        let mut request =
            CollectiveRequest { terms, digest, ..CollectiveRequest::without_data(self.current()) };
        self.perform(stream, (CollectiveKind::Barrier, Algorithm::OneShot), 1, &mut request, [None; 2])
    }

    fn call(&self, stream: &Stream, call: &CallArgs, input: &Buffer<'_>, output: &Buffer<'_>) -> Result<()> {
        let len = call.count * call.dtype.len() as u64;
        let found = self.find_windows(stream, call.kind, (input, len), (output, len * call.times));
        let [input, output] = [(&found[0], input), (&found[1], output)]
            .map(|(found, given)| found.as_ref().map_or_else(|| given.clone(), RegisteredRange::buffer));
        let from = self.check_buffer(stream, call, &input, len, Rights::Read)?;
        let to = self.check_buffer(stream, call, &output, len * call.times, Rights::ReadWrite)?;
        let in_place = is_in_place(call, &from, &to, len, self.group.rank())?;
        let reduces = call.kind == CollectiveKind::AllReduce;
        let gathers_in_place = in_place && call.kind == CollectiveKind::AllGather && to.range.is_some();
        // The input of each rank is the rank's part of its output, which begins at another offset on each rank.
        let from = if gathers_in_place {
            CheckedBuffer { reference: WindowRef::default(), range: None, ..from }
        } else {
            from
        };
        let direct = |buffer: &CheckedBuffer<'_>| {
            if self.tuning.reads_window(len) { buffer.reference } else { WindowRef::default() }
        };
        let window = !direct(&from).is_none();
        // In-place calls are special only for a reduction, because only a reduction writes memory that other ranks may still
        // read.
        let in_place = in_place && reduces;
        let properties = CallProperties { ranks: self.group.size(), len, window, in_place, reduces };
        let algorithm = choose(&properties, &self.tuning, &self.limits);
        let limit = self.reference.staging_len.saturating_mul(max_pieces(stream.runs_inline()));
        if !window && len > limit {
            return Err(Error::StagedTooLong { len, limit });
        }
        let (terms, digest) = Terms {
            kind: call.kind,
            algorithm,
            dtype: call.element,
            op: call.op,
            root: call.root,
            count: call.count,
            // Each rank decides by itself whether memory that is not in a window is used in place.
            in_place: gathers_in_place || (in_place && from.range.is_some()),
            input: from.range,
            output: to.range,
        }
        .encode();
        let mut request = CollectiveRequest {
            lane: self.current(),
            input: from.address,
            output: to.address,
            count: call.count,
            inputs: direct(&from),
            outputs: direct(&to),
            dtype: call.dtype,
            op: call.op,
            root: call.root.0,
            programmatic: 0,
            terms,
            digest,
            reserved: 0,
        };
        let blocks = blocks(algorithm, &properties, &self.limits);
        let stages_output = algorithm == Algorithm::TwoShot && to.reference.is_none();
        if (from.reference.is_none() && !gathers_in_place) || stages_output {
            self.staged_calls.fetch_add(1, Ordering::Relaxed);
        }
        self.log_call(|| {
            // The input of an all-gather in place is read where its output is.
            let input_reference = if gathers_in_place { to.reference } else { from.reference };
            let operands = [(&input, input_reference), (&output, to.reference)];
            LoggedCall { kind: call.kind, dtype: call.dtype, len, operands, algorithm, blocks }
        });
        self.perform(stream, (call.kind, algorithm), blocks, &mut request, [from.keep, to.keep])
    }

    /// Runs or enqueues this rank's part of a collective call. If the call is enqueued, the stream keeps `buffers` alive until it
    /// has run.
    fn perform(
        &self,
        stream: &Stream,
        (kind, algorithm): (CollectiveKind, Algorithm),
        blocks: u32,
        request: &mut CollectiveRequest,
        buffers: [Option<&Span>; 2],
    ) -> Result<()> {
        let inline = stream.runs_inline();
        if !inline {
            self.check()?;
        }
        self.after_previous_call(stream, || {
            if self.kernels.run(stream, (kind, algorithm), request)? {
                return Ok(());
            }
            let operands = buffers.into_iter().flatten().chain([&self.operand]);
            self.kernels.launch(stream, (kind, algorithm), blocks, request, operands)
        })?;
        if !inline {
            return Ok(());
        }
        // If an earlier call of the lane failed, this call did nothing, and `check` returns the earlier error.
        let outcome = self.check();
        if outcome == Err(CommError::Aborted { by: self.group.rank() }.into()) {
            // The caller interrupted this rank (for example with Ctrl-C). As in every other wait, the interrupt aborts the group.
            self.group.bootstrap().abort();
        }
        outcome
    }

    /// Checks that a buffer of a collective call has `len` bytes on this rank; if the buffer is in a window, on all ranks.
    #[inline]
    fn check_buffer<'a>(
        &self,
        stream: &Stream,
        call: &CallArgs,
        buffer: &'a Buffer<'_>,
        len: u64,
        needed: Rights,
    ) -> Result<CheckedBuffer<'a>> {
        let align = call.dtype.len();
        let checked = match buffer {
            Buffer::Own(span) => {
                if (span.len() as u64) < len {
                    let (count, needed) = (call.count * call.times, u128::from(len));
                    return Err(Error::TooShort { items: "elements", count, needed, len: span.len() });
                }
                let attempt = || Attempt::Access { len: span.len() };
                span.check(stream.device(), needed, attempt)?;
                CheckedBuffer {
                    address: span.address(),
                    reference: WindowRef::default(),
                    range: None,
                    keep: Some(span),
                }
            }
            Buffer::Window { window, range } => {
                self.check_window_range(window, range.start, range.len(), len)?
            }
        };
        if !checked.address.is_multiple_of(align as u64) {
            return Err(Error::Misaligned {
                items: "elements",
                address: checked.address,
                stride: align,
                align,
            });
        }
        Ok(checked)
    }

    fn check_window_range<'a>(
        &self,
        window: &'a Window,
        offset: usize,
        has: usize,
        len: u64,
    ) -> Result<CheckedBuffer<'a>> {
        if !Arc::ptr_eq(&window.core().dropped, &self.dropped) {
            return Err(Error::ForeignWindow);
        }
        let len = to_usize(len);
        // The other ranks' parts of recorded memory are checked at the end of the recording.
        let is_known = |rank: &Rank| !window.core().is_recorded || *rank == self.group.rank();
        for rank in (0..self.group.size()).map(Rank).filter(is_known) {
            let end = offset.saturating_add(len.max(has));
            if len > has || end > window.len_of(rank) {
                let has = window.len_of(rank).saturating_sub(offset).min(has);
                return Err(Error::NoPart { rank, offset, len, available: has });
            }
        }
        let reference = window.window_ref();
        let reference = WindowRef { base: reference.base + offset as u64, ..reference };
        let address = window.local().map_or(0, |span| span.address() + offset as u64);
        let range = Some(WindowRange { window: window.core().id, offset: offset as u64 });
        Ok(CheckedBuffer { address, reference, range, keep: window.core().keep.as_ref() })
    }
}

/// The arguments of a collective call that are equal on all ranks.
#[derive(Debug, Clone, Copy)]
struct CallArgs {
    kind: CollectiveKind,
    /// The type that the call counts: bytes, unless it reduces.
    dtype: Dtype,
    /// The type of the elements, which the terms contain.
    element: Dtype,
    op: ReduceOp,
    root: Rank,
    /// The number of elements of each rank's input.
    count: u64,
    /// The length of the output divided by the length of the input: the number of ranks for an all-gather, otherwise 1.
    times: u64,
}

/// Returns true if the collective call is in place: the input is the output, or, for an all-gather, this rank's part of the
/// output.
fn is_in_place(
    call: &CallArgs,
    from: &CheckedBuffer<'_>,
    to: &CheckedBuffer<'_>,
    len: u64,
    own: Rank,
) -> Result<bool> {
    let (start, end) = (to.address, to.address + len * call.times);
    let overlaps = from.address < end && start < from.address + len;
    let same = start + if call.kind == CollectiveKind::AllGather { len * u64::from(own.0) } else { 0 };
    if overlaps && from.address != same {
        return Err(Error::Overlap { input: from.address, output: start, len });
    }
    Ok(overlaps)
}

#[cfg(test)]
mod tests {
    use super::max_pieces;
    use crate::abi::PHASE_BITS;

    #[test]
    fn phase_numbers_of_the_longest_call_do_not_wrap() {
        for inline in [true, false] {
            assert!(2 * max_pieces(inline) < 1 << PHASE_BITS);
        }
    }
}
