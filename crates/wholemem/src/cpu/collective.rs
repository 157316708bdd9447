//! The collective kernels on the CPU: the same requests and bitwise the same results as on a GPU.
//!
//! ```text
//!   packets    each rank stores its elements behind a flag, in its own slot; every rank reads all slots
//!   one-shot   each rank stages its elements, or they are read in their window; every rank reads those of all ranks
//!   two-shot   each rank reduces its slice of all ranks' elements; then all ranks gather the slices, or each rank stores
//!              its slice to all outputs
//! ```
//!
//! A staged call that is longer than the staging buffer runs in pieces of the length of the buffer, which stays in the caches.

use std::ops::Range;

use wholemem_hal::HostFunction;

use super::call::{Aborted, CollectiveCall, Rule, Signals};
use super::combine::{StorePolicy, combine};
use super::copy::native;
use super::row_lookup::pointer;
use crate::abi::{CollectiveRequest, WindowRef};
use wholemem_os::width::to_usize;

/// The minimum length in bytes of results that are stored with streaming stores, which bypass the caches.
const MIN_STREAMING_LEN: u64 = 8 << 20;

/// The alignment in bytes of the slices that ranks reduce in the two-shot algorithm: a cache line.
const SLICE_ALIGN: u64 = 64;

/// A function that runs one rank's part of a collective call on the CPU.
///
/// # Safety
/// The addresses in the request, including those of its lane, are valid for the lengths in the request.
pub(crate) type CollectiveFunction = unsafe fn(&CollectiveRequest);

macro_rules! collectives {
    ($($name:literal: $part:ident by $signals:ident;)*) => {
        /// The CPU functions of the collective kernels, by kernel name, for launches and graphs.
        pub(crate) const COLLECTIVES: &[(&str, HostFunction)] = &[$(($name, |_, args| {
            let request = args.read_value(0).expect("a kernel is launched with a request");
            // SAFETY: a launch is unsafe, and its caller guarantees that the addresses in the request are valid for its lengths.
            unsafe { $part(&request) }
        })),*];

        /// Returns the CPU function of the collective kernel with the given name, to be called without a launch; `None` if no
        /// kernel has that name.
        pub(crate) fn collective_function(name: &str) -> Option<CollectiveFunction> {
            match name {
                $($name => Some($part),)*
                _ => None,
            }
        }

        $(
            /// Runs this rank's part of one kind of collective call.
            ///
            /// # Safety
            /// As [`CollectiveFunction`].
            unsafe fn $part(request: &CollectiveRequest) {
                // SAFETY: the caller of this function guarantees that the addresses in the request are valid, so all words of the
                // lane are mapped, aligned and accessed as atomics only.
                let Ok(call) = (unsafe { CollectiveCall::begin(request, Signals::$signals) }) else { return };
                let mut rank_call = RankCall { request, call };
                // SAFETY: the caller of this function guarantees that the addresses in the request are valid. If the call is
                // aborted, the report has the cause.
                if unsafe { rank_call.$part() }.is_ok() {
                    rank_call.call.end();
                }
            }
        )*
    };
}

collectives! {
    "all_reduce_ll": reduce_packets by Packets;
    "all_reduce_one_shot": reduce_one_shot by Lines;
    "all_reduce_two_shot": reduce_two_shot by Lines;
    "all_gather_ll": gather_packets by Packets;
    "all_gather": gather by Lines;
    "broadcast_ll": copy_root_packets by Packets;
    "broadcast": copy_root by Lines;
    "barrier": barrier by Lines;
}

/// One rank's part of a collective call.
struct RankCall<'a> {
    request: &'a CollectiveRequest,
    call: CollectiveCall<'a>,
}

/// A piece of a staged collective call that is longer than the staging buffer.
#[derive(Debug, Clone, Copy)]
struct StagedPiece {
    number: u64,
    at: u64,
    len: u64,
}

// Every `unsafe fn` of `RankCall` requires that the addresses in `request` are valid for the lengths in `request`.
impl RankCall<'_> {
    unsafe fn barrier(&mut self) -> Result<(), Aborted> {
        self.call.sync(1, Rule::FirstBarrier)
    }

    unsafe fn reduce_packets(&mut self) -> Result<(), Aborted> {
        // SAFETY: the caller of `reduce_packets` guarantees that the addresses in `request` are valid, which `send` requires.
        unsafe { self.send(true) }?;
        let to = ReduceTargets { count: 1, at: &|_| self.request.output };
        // SAFETY: all ranks have sent `len` bytes to their packet slots, and the output has `len` bytes.
        unsafe { self.combine(|rank| self.packets_at(rank), &to, self.len(), StorePolicy::Cached) };
        Ok(())
    }

    unsafe fn gather_packets(&mut self) -> Result<(), Aborted> {
        // SAFETY: the caller of `gather_packets` guarantees that the addresses in `request` are valid, which `send` requires.
        unsafe { self.send(true) }?;
        for rank in 0..self.ranks() {
            let to = self.request.output + u64::from(rank) * self.len();
            // SAFETY: the rank has sent `len` bytes to its packet slot, and the output has `len` bytes for every rank.
            unsafe { copy(self.packets_at(rank), to, self.len()) };
        }
        Ok(())
    }

    unsafe fn copy_root_packets(&mut self) -> Result<(), Aborted> {
        let root = self.request.root;
        // SAFETY: the caller of `copy_root_packets` guarantees that the addresses in `request` are valid, which `send` requires.
        unsafe { self.send(self.own() == root) }?;
        // SAFETY: the root has sent `len` bytes to its packet slot, and the output has `len` bytes.
        unsafe { copy(self.packets_at(root), self.request.output, self.len()) };
        Ok(())
    }

    /// Copies this rank's elements to its packet slot if `has_data`, announces them, and waits for the packets of all other
    /// ranks.
    unsafe fn send(&mut self, has_data: bool) -> Result<(), Aborted> {
        if has_data {
            // SAFETY: a packet slot has space for the longest call that uses packets. No rank reads this slot: it was last used
            // two calls ago, and all ranks have finished that call.
            unsafe { copy(self.request.input, self.slot(self.own()), self.len()) };
        }
        self.call.announce(1);
        self.call.pause(1);
        if self.call.follows(Rule::CheckFlag) { self.call.await_all(1) } else { Ok(()) }
    }

    unsafe fn reduce_one_shot(&mut self) -> Result<(), Aborted> {
        let CollectiveRequest { inputs, output, .. } = *self.request;
        if inputs.is_none() {
            return self.staged(true, |own, piece| {
                let to = ReduceTargets { count: 1, at: &|_| output + piece.at };
                // SAFETY: every rank has staged `piece.len` bytes, and the caller of `reduce_one_shot` guarantees that the output
                // has `self.len()` bytes.
                unsafe {
                    own.combine(|rank| own.elements_at(rank, piece), &to, piece.len, StorePolicy::Cached)
                };
            });
        }
        self.call.sync(1, Rule::FirstBarrier)?;
        // SAFETY: the caller of `reduce_one_shot` guarantees that the addresses in `request` are valid, so every rank's input in
        // the window has `self.len()` bytes, and so has the output.
        unsafe {
            self.combine(
                |rank| address(&inputs, rank),
                &ReduceTargets { count: 1, at: &|_| output },
                self.len(),
                self.store_policy(),
            );
        }
        self.call.sync(2, Rule::SecondBarrier)
    }

    unsafe fn reduce_two_shot(&mut self) -> Result<(), Aborted> {
        let CollectiveRequest { inputs, outputs, output, .. } = *self.request;
        if !inputs.is_none() && !outputs.is_none() {
            self.call.sync(1, Rule::FirstBarrier)?;
            let slice = self.slice(self.own(), self.len());
            let from = |rank| address(&inputs, rank) + slice.start;
            let to = |rank| address(&outputs, rank) + slice.start;
            let to = ReduceTargets { count: self.ranks(), at: &to };
            // SAFETY: the caller of `reduce_two_shot` guarantees that the addresses in `request` are valid, so every rank's input
            // and output in the windows have `self.len()` bytes. If both windows are the same, only this rank reads and writes
            // this slice of them.
            unsafe { self.combine(from, &to, slice.end - slice.start, self.store_policy()) };
            return self.call.sync(2, Rule::SecondBarrier);
        }
        for piece in self.pieces() {
            if inputs.is_none() {
                for rank in self.call.others() {
                    // SAFETY: no rank reads this rank's staging buffer: it was last used by the piece before the previous one,
                    // which all ranks have finished.
                    unsafe { self.stage(piece, self.slice(rank, piece.len)) };
                }
            }
            self.call.sync(2 * piece.number + 1, Rule::FirstBarrier)?;
            let slice = self.slice(self.own(), piece.len);
            let at = slice.start;
            let from = |rank| self.elements_at(rank, piece) + at;
            let local =
                |index| if index == 0 { output + piece.at + at } else { self.result(self.own()) + at };
            let all_outputs = |rank| address(&outputs, rank) + piece.at + at;
            let to = if outputs.is_none() {
                ReduceTargets { count: 2, at: &local }
            } else {
                ReduceTargets { count: self.ranks(), at: &all_outputs }
            };
            // SAFETY: the slice is within the piece on every rank, and only this rank reads or writes this slice of the targets.
            unsafe { self.combine(from, &to, slice.end - at, StorePolicy::Cached) };
            self.call.sync(2 * piece.number + 2, Rule::SecondBarrier)?;
            if outputs.is_none() {
                for rank in self.call.others() {
                    let slice = self.slice(rank, piece.len);
                    let to = output + piece.at + slice.start;
                    // SAFETY: the other rank has stored its slice in its result buffer, and the output has space for the slices
                    // of all ranks.
                    unsafe { copy(self.result(rank) + slice.start, to, slice.end - slice.start) };
                }
            }
        }
        Ok(())
    }

    unsafe fn gather(&mut self) -> Result<(), Aborted> {
        let CollectiveRequest { inputs, outputs, input, output, .. } = *self.request;
        let (len, own) = (self.len(), self.own());
        let to = |rank: u32, at: u64| output + u64::from(rank) * len + at;
        let in_place = to(own, 0) == input;
        if !in_place {
            // SAFETY: `input` has `len` bytes, and the output has `len` bytes for every rank.
            unsafe { copy(input, to(own, 0), len) };
        }
        if in_place && !outputs.is_none() {
            // All ranks make the all-gather in place in this window, so the input of each rank is its own part of its output.
            self.call.sync(1, Rule::FirstBarrier)?;
            for rank in self.call.others() {
                let part = address(&outputs, rank) + u64::from(rank) * len;
                // SAFETY: every rank's output in the window has `len` bytes for every rank, and each rank writes only its own
                // part of it.
                unsafe { copy(part, to(rank, 0), len) };
            }
            return self.call.sync(2, Rule::SecondBarrier);
        }
        if inputs.is_none() {
            return self.staged(true, |own, piece| {
                for rank in own.call.others() {
                    // SAFETY: the other rank has staged `piece.len` bytes; the output has `len` bytes for every rank.
                    unsafe { copy(own.staging(rank, piece.number), to(rank, piece.at), piece.len) };
                }
            });
        }
        self.call.sync(1, Rule::FirstBarrier)?;
        for rank in self.call.others() {
            // SAFETY: every rank's part of the window has `len` bytes; the output has `len` bytes for every rank.
            unsafe { copy(address(&inputs, rank), to(rank, 0), len) };
        }
        self.call.sync(2, Rule::SecondBarrier)
    }

    unsafe fn copy_root(&mut self) -> Result<(), Aborted> {
        let CollectiveRequest { inputs, input, output, root, .. } = *self.request;
        let is_root = self.own() == root;
        if is_root && input != output {
            // SAFETY: input and output have `self.len()` bytes, the length of the broadcast.
            unsafe { copy(input, output, self.len()) };
        }
        if inputs.is_none() {
            return self.staged(is_root, |own, piece| {
                if !is_root {
                    // SAFETY: the root has staged `piece.len` bytes, and the output has the length of the broadcast.
                    unsafe { copy(own.staging(root, piece.number), output + piece.at, piece.len) };
                }
            });
        }
        self.call.sync(1, Rule::FirstBarrier)?;
        if !is_root {
            // SAFETY: the root's part of the window and the output have `self.len()` bytes, the length of the broadcast.
            unsafe { copy(address(&inputs, root), output, self.len()) };
        }
        self.call.sync(2, Rule::SecondBarrier)
    }

    /// Runs a staged collective call: for each piece, copies this rank's input to its staging buffer if `has_data`, waits for all
    /// ranks, and calls `consume`.
    fn staged(&mut self, has_data: bool, consume: impl Fn(&Self, StagedPiece)) -> Result<(), Aborted> {
        let mut count = 0;
        for piece in self.pieces() {
            if has_data {
                // SAFETY: no rank reads this rank's staging buffer: it was last used by the piece before the previous one, which
                // all ranks have finished.
                unsafe { self.stage(piece, 0..piece.len) };
            }
            self.call.sync(piece.number + 1, Rule::FirstBarrier)?;
            consume(self, piece);
            count += 1;
        }
        if count > 1 {
            // The next call may begin with either staging buffer, so all ranks must have finished with both.
            self.call.sync(count + 1, Rule::LastBarrier)?;
        }
        Ok(())
    }

    /// Copies a range of one piece of this rank's input to its staging buffer.
    unsafe fn stage(&self, piece: StagedPiece, range: Range<u64>) {
        let (from, to) = (self.request.input + piece.at, self.staging(self.own(), piece.number));
        // SAFETY: a piece is not longer than the staging buffer, and the caller of `stage` guarantees that no rank reads the
        // buffer.
        unsafe { copy(from + range.start, to + range.start, range.end - range.start) };
    }

    /// Returns the address of a rank's elements of one piece: in this rank's input, in the rank's staging buffer, or in its
    /// window.
    fn elements_at(&self, rank: u32, piece: StagedPiece) -> u64 {
        let CollectiveRequest { inputs, input, .. } = self.request;
        if rank == self.own() {
            input + piece.at
        } else if inputs.is_none() {
            self.staging(rank, piece.number)
        } else {
            address(inputs, rank) + piece.at
        }
    }

    /// Reduces `len` bytes of every rank, and stores the result to every target.
    unsafe fn combine(
        &self,
        from: impl Fn(u32) -> u64,
        to: &ReduceTargets<'_>,
        len: u64,
        store_policy: StorePolicy,
    ) {
        let CollectiveRequest { dtype, op, .. } = *self.request;
        let count = to_usize(len) / dtype.len();
        if count == 0 {
            return;
        }
        with_pointers(
            self.ranks(),
            |rank| pointer(from(rank)).cast_const(),
            |sources| {
                with_pointers(
                    to.count,
                    |index| pointer((to.at)(index)),
                    |targets| {
                        // SAFETY: the caller of `combine` guarantees that all sources and targets are valid for `len` bytes,
                        // which are `count` elements.
                        unsafe { combine(sources, targets, count, dtype, op, store_policy) };
                    },
                );
            },
        );
    }

    fn pieces(&self) -> impl Iterator<Item = StagedPiece> + use<> {
        let (len, most) = (self.len(), self.request.lane.staging_len);
        (0..len.div_ceil(most)).map(move |number| StagedPiece {
            number,
            at: number * most,
            len: most.min(len - number * most),
        })
    }

    /// Returns the range of bytes that a rank reduces in the two-shot algorithm, out of `len` bytes.
    fn slice(&self, rank: u32, len: u64) -> Range<u64> {
        let step = len.div_ceil(u64::from(self.ranks())).next_multiple_of(SLICE_ALIGN);
        let start = |rank: u32| (u64::from(rank) * step).min(len);
        start(rank)..start(rank + 1)
    }

    /// Returns the address of a rank's packets, which follow its progress and its mark.
    fn slot(&self, rank: u32) -> u64 {
        self.call.signal_at(rank) + 16
    }

    /// Returns the address from which this rank reads the elements that a rank has sent in packets. Its own elements are read
    /// from its input: reading its own slot would move the cache lines away from the cores that read them.
    fn packets_at(&self, rank: u32) -> u64 {
        if rank == self.own() { self.request.input } else { self.slot(rank) }
    }

    fn staging(&self, rank: u32, piece: u64) -> u64 {
        let lane = &self.request.lane;
        self.call.address(rank, lane.staging_at + self.call.parity(piece) * lane.staging_len)
    }

    fn result(&self, rank: u32) -> u64 {
        self.call.address(rank, self.request.lane.result_at)
    }

    /// Returns how the results of a call that is not staged are stored. The lines of a call in place are in the caches already,
    /// because they were just read.
    fn store_policy(&self) -> StorePolicy {
        let CollectiveRequest { input, output, .. } = *self.request;
        if self.len() < MIN_STREAMING_LEN || input == output {
            StorePolicy::Cached
        } else {
            StorePolicy::Streaming
        }
    }

    /// Returns the length of this rank's input in bytes.
    fn len(&self) -> u64 {
        self.request.count * self.request.dtype.len() as u64
    }

    fn own(&self) -> u32 {
        self.request.lane.rank
    }

    fn ranks(&self) -> u32 {
        self.request.lane.ranks
    }
}

/// The addresses to which the result of a reduction is stored: one or two on this rank, or one on each rank.
struct ReduceTargets<'a> {
    count: u32,
    at: &'a dyn Fn(u32) -> u64,
}

/// Returns the address of a rank's part of a window.
fn address(window: &WindowRef, rank: u32) -> u64 {
    if window.table == 0 {
        // The parts may be in descending order, so the distance may wrap.
        return window.base.wrapping_add(u64::from(rank).wrapping_mul(window.stride));
    }
    let table: *const u64 = pointer(window.table).cast_const().cast();
    let entry = table.wrapping_add(rank as usize);
    // SAFETY: the table of a window has an address for every rank, and is not written after its creation.
    window.base + unsafe { *entry }
}

/// Copies bytes; does nothing if both addresses are equal.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes. The two ranges are equal or do not overlap.
unsafe fn copy(from: u64, to: u64, len: u64) {
    if from != to {
        // SAFETY: the caller of `copy` guarantees that `from` and `to` are valid for `len` bytes; they differ, so they do not
        // overlap.
        unsafe { native::over(pointer(from), pointer(to), to_usize(len)) };
    }
}

/// Calls `call` with a slice of `count` pointers, which needs an allocation only for more than eight.
fn with_pointers<P: Copy>(count: u32, pointer: impl Fn(u32) -> P, call: impl FnOnce(&[P])) {
    const FEW: u32 = 8;
    if count > FEW {
        return call(&(0..count).map(pointer).collect::<Vec<_>>());
    }
    let mut few = [pointer(0); FEW as usize];
    for (place, index) in few.iter_mut().zip(0..count).skip(1) {
        *place = pointer(index);
    }
    call(&few[..count as usize]);
}
