//! The address space of windows: one reservation in each process, and the creation of windows by all ranks together.
//!
//! ```text
//!   base            base + stride        base + 2 * stride
//!   [ rank 0: w0 w1 | rank 1: w0 w1      | rank 2: w0 w1      ]      one reservation in each process
//! ```

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use wholemem_comm::Rank;
use wholemem_hal::{
    Allocation, BackendKind, CudaMallocBuffer, Granule, HandleKind, Mapping, Reservation, Rights, Span,
};

use wholemem_os::Deadline;

use super::window::{Dropped, Window, WindowCore};
use super::window_part::{PlainWindowPart, WindowPart, malformed};
use super::window_table::WindowTable;
use crate::communicator::{agree, from_text, to_text, words_of};
use crate::{Communicator, Error, Kind, Location, MemorySpec, Result, WholeMemory, WindowRef};
use wholemem_os::width::to_usize;

/// Strides are multiples of this, so the upper half of a pointer identifies the rank.
const STEP: usize = 4 << 30;

/// The number of granules of the heap of small windows.
const HEAP_GRANULES: usize = 16;

/// One rank's pieces of memory, at adjacent addresses.
pub(super) type Pieces = Vec<Mapping>;

/// The addresses of one group's windows in this process.
#[derive(Debug)]
pub(super) struct Space {
    group: Communicator,
    granule: Granule,
    stride: usize,
    /// Shared with the other ranks of this process, which do not map themselves.
    reservation: Reservation,
    window_table: Mutex<WindowTable>,
    dropped: Dropped,
    /// Every rank's heap of small windows; created for the first one.
    heap: Mutex<Option<Vec<Pieces>>>,
}

impl Space {
    /// Reserves addresses. Collective: `wanted` bytes for all ranks together, divided evenly.
    pub(super) fn reserve(group: &Communicator, wanted: usize) -> Result<Self> {
        let comm = group.bootstrap();
        let granularity = agree(comm, group.device().granularity().map_err(Error::from))?;
        let own = [granularity.minimum.len() as u64, group.device().info().memory_len as u64];
        let own: Vec<u8> = own.into_iter().flat_map(u64::to_le_bytes).collect();
        let (mut granule_len, mut memory_len) = (0, 0);
        for (rank, bytes) in (0..).map(Rank).zip(comm.all_gather(&own)?) {
            let [granule, memory] = words_of(rank, &bytes)?;
            (granule_len, memory_len) =
                (to_usize(granule).max(granule_len), to_usize(memory).max(memory_len));
        }
        let granule = Granule::new(granule_len)?;
        let stride = stride(group.size(), memory_len, wanted)?;
        let reservation = Self::share(group, || {
            let len = stride.saturating_mul(group.size() as usize);
            Ok(Reservation::create_aligned(group.device().backend(), len, STEP.max(granule.len()))?)
        })?;
        let heap_len = HEAP_GRANULES * granule.len();
        let window_table = Mutex::new(WindowTable::new(group.size(), granule, stride, heap_len));
        let (dropped, heap) = (Dropped::default(), Mutex::default());
        Ok(Self { group: group.clone(), granule, stride, reservation, window_table, dropped, heap })
    }

    /// Calls `make` on one rank of each process, and returns the result on all its ranks. Collective.
    fn share<T: Clone + Send + 'static>(group: &Communicator, make: impl FnOnce() -> Result<T>) -> Result<T> {
        let (process_ranks, rank) = (group.process_ranks(), group.rank());
        let sharing = process_ranks.ranks_on_backend(rank);
        let leader = *sharing.first().expect("it includes this rank");
        let mut made = Ok(None);
        if leader == rank {
            made = make().map(Some);
            if let Ok(Some(made)) = &made {
                sharing.iter().skip(1).for_each(|other| process_ranks.put(rank, *other, made.clone()));
            }
        }
        let agreed = agree(group.bootstrap(), made);
        if leader == rank && agreed.is_err() {
            // The other ranks of this process may not take it any more.
            sharing.iter().skip(1).for_each(|other| drop(process_ranks.take::<T>(rank, *other)));
        }
        let made = agreed?;
        // Ranks of other backends in the same process have a leader of their own.
        let left = || process_ranks.take(leader, rank);
        made.or_else(left).ok_or(Error::Differs { rank: leader })
    }

    /// Creates a window of `len` bytes on this rank. Collective; the lengths may differ.
    pub(super) fn allocate(&self, len: usize) -> Result<Window> {
        let parts = self.exchange_parts(WindowPart::new(self.granule, len))?;
        let most = parts.iter().map(|part| part.len).max().unwrap_or(0);
        if most == 0 {
            return Err(Error::EmptyWindow);
        }
        if self.window_table().is_small(most) {
            return self.carve(&parts, most);
        }
        self.make(&parts, || self.fresh(&parts))
    }

    /// Creates a window of `len` bytes of host memory on this rank. Collective; the lengths may differ.
    pub(super) fn allocate_on_host(&self, len: usize) -> Result<Window> {
        if self.group.device().backend().kind() == BackendKind::Host {
            return self.allocate(len);
        }
        let lens: Vec<_> = self.exchange_parts(Ok(WindowPart { len, ..WindowPart::default() }))?;
        let lens: Vec<_> = lens.iter().map(|part| part.len as u64).collect();
        let all = lens.iter().fold(0, |sum: u64, len| sum.saturating_add(*len));
        if all == 0 {
            return Err(Error::EmptyWindow);
        }
        let (kind, location) = (Kind::Chunked, Location::Host);
        let spec = MemorySpec { kind, location, rows_of_each: Some(lens), ..MemorySpec::new(all, 1) };
        let memory = WholeMemory::create(&self.group, &spec)?;
        let part = |rank| {
            let Range { start, end } = memory.partition().range(rank);
            (start < end).then(|| memory.span(to_usize(start), to_usize(end - start))).transpose()
        };
        let spans = (0..self.group.size()).map(Rank).map(part).collect::<Result<Vec<_>>>();
        let spans = agree(self.group.bootstrap(), spans)?;
        let (id, _) = self.window_table().insert_own(0)?;
        self.scattered(id, spans).inspect_err(|_| self.window_table().remove(id))
    }

    /// Creates a window of existing memory. Collective.
    pub(super) fn register(&self, part: Result<(WindowPart, Vec<Allocation>)>) -> Result<Window> {
        let (part, pieces) = match part {
            Ok((part, pieces)) => (Ok(part), pieces),
            Err(error) => (Err(error), Vec::new()),
        };
        let parts = self.exchange_parts(part)?;
        if parts.iter().all(|part| part.len == 0) {
            return Err(Error::EmptyWindow);
        }
        self.make(&parts, || Ok(pieces))
    }

    /// Creates a window of buffers with CUDA IPC handles. Collective.
    pub(super) fn register_plain(&self, buffer: &CudaMallocBuffer) -> Result<Window> {
        let (process_ranks, rank) = (self.group.process_ranks(), self.group.rank());
        // A process cannot open its own CUDA IPC handle: its ranks pass each other the buffers.
        let relatives: Vec<_> =
            process_ranks.ranks_on_backend(rank).into_iter().filter(|other| *other != rank).collect();
        relatives.iter().for_each(|other| process_ranks.put(rank, *other, buffer.clone()));
        let messages = self.exchange_messages(PlainWindowPart::of(buffer).map(|part| part.to_bytes()));
        let left: BTreeMap<_, _> = relatives
            .iter()
            .filter_map(|other| Some((*other, process_ranks.take::<CudaMallocBuffer>(*other, rank)?)))
            .collect();
        let decode = |(rank, bytes): (Rank, &Vec<u8>)| PlainWindowPart::from_bytes(rank, bytes);
        let parts = (0..).map(Rank).zip(&messages?).map(decode).collect::<Result<Vec<_>>>()?;
        let open = |(peer, part): (Rank, &PlainWindowPart)| match left.get(&peer) {
            _ if peer == rank => Ok(Some(buffer.all())),
            Some(left) => Ok(Some(left.all())),
            None => Ok(Some(part.open(self.group.device())?.all())),
        };
        let spans = (0..).map(Rank).zip(&parts).map(open).collect::<Result<Vec<_>>>();
        let spans = agree(self.group.bootstrap(), spans)?;
        let (id, _) = self.window_table().insert_own(0)?;
        self.scattered(id, spans).inspect_err(|_| self.window_table().remove(id))
    }

    /// Allocates zeroed memory for this rank's part.
    fn fresh(&self, parts: &[WindowPart]) -> Result<Vec<Allocation>> {
        let own = parts.get(self.group.rank().index()).map_or(0, WindowPart::address_len);
        if own == 0 {
            return Ok(Vec::new());
        }
        Ok(vec![self.group.device().allocate(own)?])
    }

    /// Creates the memory of lanes, `len` bytes on each rank. Returns the mappings, the address of rank 0's memory and the stride.
    /// Collective.
    ///
    /// It is zeroed before other ranks get it. Otherwise the signals of a faster rank could be overwritten.
    pub(super) fn make_zeroed(&self, len: usize) -> Result<(Vec<Pieces>, u64, u64)> {
        let parts = vec![WindowPart::new(self.granule, len)?; self.group.size() as usize];
        let (_, offset) = self.window_table().insert_own(len)?;
        let pieces = self.exchange(&parts, offset, || {
            let memory = self.fresh(&parts)?;
            let stream = self.group.device().stream()?;
            for piece in &memory {
                stream.fill(&piece.map(Rights::ReadWrite)?.all(), 0)?;
            }
            stream.synchronize(Deadline::NEVER)?;
            Ok(memory)
        })?;
        Ok((pieces, self.reservation.address() + offset as u64, self.stride as u64))
    }

    fn exchange_parts(&self, own: Result<WindowPart>) -> Result<Vec<WindowPart>> {
        let parts = self.exchange_messages(own.map(|part| part.to_bytes()))?;
        (0..).map(Rank).zip(&parts).map(|(rank, bytes)| WindowPart::from_bytes(rank, bytes)).collect()
    }

    /// Exchanges with all ranks: each rank's part or error, and the windows that it has dropped.
    fn exchange_messages(&self, own: Result<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
        const FINE: u8 = 0;
        const FAILED: u8 = 1;
        let dropped = std::mem::take(&mut *lock(&self.dropped));
        let ids: Vec<u8> = dropped.iter().flat_map(|id| id.to_le_bytes()).collect();
        let ids = [&(dropped.len() as u64).to_le_bytes()[..], &ids].concat();
        let message = match &own {
            Ok(part) => [&[FINE][..], &ids, part].concat(),
            Err(error) => [&[FAILED][..], &ids, to_text(error).as_bytes()].concat(),
        };
        let mut parts = Vec::new();
        let mut failed = None;
        for (rank, message) in (0..).map(Rank).zip(self.group.bootstrap().all_gather(&message)?) {
            let Message { outcome, dropped, rest } =
                Message::decode(&message).ok_or_else(|| malformed(rank))?;
            let mut windows = self.window_table();
            dropped.iter().for_each(|id| windows.record_drop(u64::from_le_bytes(*id)));
            match outcome {
                FINE => parts.push(rest.to_vec()),
                FAILED => {
                    failed.get_or_insert_with(|| from_text(rank, &String::from_utf8_lossy(rest)));
                }
                _ => return Err(malformed(rank)),
            }
        }
        match (own, failed) {
            (Err(error), _) if self.group.size() == 1 => Err(error),
            (_, Some(error)) => Err(error),
            _ => Ok(parts),
        }
    }

    /// Creates a window with mappings of its own.
    fn make(&self, parts: &[WindowPart], own: impl FnOnce() -> Result<Vec<Allocation>>) -> Result<Window> {
        let most = parts.iter().map(WindowPart::address_len).max().unwrap_or(0);
        let (id, offset) = self.window_table().insert_own(most)?;
        let made = self.exchange(parts, offset, own).and_then(|maps| {
            let spans = maps.iter().zip(parts).map(|(pieces, part)| span(pieces, part.skip, part.len));
            let spans = spans.collect::<Result<Vec<_>>>()?;
            let skip = parts.first().map_or(0, |part| part.skip);
            if parts.iter().any(|part| part.skip != skip) {
                return self.scattered(id, spans);
            }
            self.window(id, spans, offset + skip)
        });
        if made.is_err() {
            self.window_table().remove(id);
        }
        made
    }

    /// A window whose parts are at equal distances.
    fn window(&self, id: u64, spans: Vec<Option<Span>>, offset: usize) -> Result<Window> {
        let base = self.reservation.address() + offset as u64;
        let reference = WindowRef { base, stride: self.stride as u64, table: 0 };
        let (dropped, own) = (Arc::clone(&self.dropped), self.group.rank());
        let keep = Span::keep_alive(spans.iter().flatten())?;
        Ok(Window::new(WindowCore { id, dropped, own, spans, keep, reference }))
    }

    /// A window with a table of the addresses of its parts.
    fn scattered(&self, id: u64, spans: Vec<Option<Span>>) -> Result<Window> {
        let device = self.group.device();
        let addresses: Vec<u8> =
            spans.iter().flat_map(|span| span.as_ref().map_or(0, Span::address).to_ne_bytes()).collect();
        let written = || {
            let len = device.granularity()?.minimum.round_up(addresses.len()).expect("bytes in memory");
            let table = device.allocate(len)?.map(Rights::ReadWrite)?;
            device.stream()?.write(&table.span(0, addresses.len())?, &addresses)?;
            Ok(table)
        };
        let table = agree(self.group.bootstrap(), written())?;
        let reference = WindowRef { base: 0, stride: 0, table: table.address() };
        let (dropped, own) = (Arc::clone(&self.dropped), self.group.rank());
        let keep = Span::keep_alive(spans.iter().flatten().chain([&table.all()]))?;
        Ok(Window::new(WindowCore { id, dropped, own, spans, keep, reference }))
    }

    /// Sends every rank's pieces to every rank, and maps them from `offset` of each rank's share on.
    fn exchange(
        &self,
        parts: &[WindowPart],
        offset: usize,
        own: impl FnOnce() -> Result<Vec<Allocation>>,
    ) -> Result<Vec<Pieces>> {
        let (comm, rank) = (self.group.bootstrap(), self.group.rank());
        let own = agree(comm, own().and_then(export))?;
        let handles: Vec<_> = own.iter().map(|(_, fd)| fd.as_fd()).collect();
        let handles = comm.all_gather_fds(&handles)?;
        let device = self.group.device();
        Self::share(&self.group, || {
            let grants =
                self.group.process_ranks().grants(&self.group.process_ranks().ranks_on_backend(rank));
            let mut all = Vec::new();
            for (peer, (part, fds)) in parts.iter().zip(handles).enumerate() {
                if fds.len() != part.pieces.len() {
                    return Err(malformed((0..).map(Rank).nth(peer).expect("ranks are numbered by a u32")));
                }
                let mut at = peer * self.stride + offset;
                let mut pieces = Vec::new();
                for (index, (fd, len)) in fds.into_iter().zip(&part.pieces).enumerate() {
                    let mine = own.get(index).filter(|_| peer == rank.index());
                    let memory = match mine {
                        Some((memory, _)) => memory.clone(),
                        None => Allocation::import(device, fd.into(), *len)?,
                    };
                    pieces.push(Mapping::create(&self.reservation, at, &memory, &grants)?);
                    at += len;
                }
                all.push(pieces);
            }
            Ok(all)
        })
    }

    /// Creates a window in the heap, which is created for the first one.
    fn carve(&self, parts: &[WindowPart], most: usize) -> Result<Window> {
        let mut kept = lock(&self.heap);
        let heap = match kept.take() {
            Some(heap) => heap,
            None => self.make_heap(parts.len())?,
        };
        let heap = kept.insert(heap);
        let (id, at) = self.window_table().insert_slot(most)?;
        let spans = heap.iter().zip(parts).map(|(pieces, part)| span(pieces, at, part.len));
        let spans = spans.collect::<Result<Vec<_>>>()?;
        let first =
            heap.first().and_then(|pieces| pieces.first()).expect("every rank has a heap of one piece");
        let offset = to_usize(first.address() - self.reservation.address()) + at;
        self.window(id, spans, offset)
    }

    /// Creates every rank's heap of small windows. Collective.
    fn make_heap(&self, ranks: usize) -> Result<Vec<Pieces>> {
        let len = HEAP_GRANULES * self.granule.len();
        let shares = vec![WindowPart::new(self.granule, len)?; ranks];
        let (id, offset) = self.window_table().insert_own(len)?;
        let made = self.exchange(&shares, offset, || self.fresh(&shares));
        made.inspect_err(|_| self.window_table().remove(id))
    }

    pub(super) fn dropped(&self) -> &Dropped {
        &self.dropped
    }

    fn window_table(&self) -> MutexGuard<'_, WindowTable> {
        lock(&self.window_table)
    }
}

/// What a rank sends in the exchange that begins the creation of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Message<'a> {
    outcome: u8,
    /// The ids of the windows that the rank has dropped since the last exchange.
    dropped: &'a [[u8; 8]],
    /// Its part of the window, or its error.
    rest: &'a [u8],
}

impl<'a> Message<'a> {
    /// `None` for bytes of another form.
    fn decode(bytes: &'a [u8]) -> Option<Self> {
        let (outcome, rest) = bytes.split_first()?;
        let (count, rest) = rest.split_first_chunk::<8>()?;
        let (ids, rest) = rest.split_at_checked(to_usize(u64::from_le_bytes(*count)).checked_mul(8)?)?;
        Some(Self { outcome: *outcome, dropped: ids.as_chunks().0, rest })
    }
}

/// Exports allocations for other ranks.
fn export(own: Vec<Allocation>) -> Result<Vec<(Allocation, OwnedFd)>> {
    let export = |memory: Allocation| match memory.export(HandleKind::Fd, Rights::ReadWrite)?.into_fd() {
        Some(fd) => Ok((memory, fd)),
        None => unreachable!("what is exported as a descriptor is one"),
    };
    own.into_iter().map(export).collect()
}

/// The `len` bytes of a rank's pieces from `skip` on; `None` for zero bytes.
fn span(pieces: &Pieces, skip: usize, len: usize) -> Result<Option<Span>> {
    if len == 0 {
        return Ok(None);
    }
    let all: Vec<_> = pieces.iter().map(Mapping::all).collect();
    Ok(Some(Span::join(&all)?.part(skip, len)?))
}

/// The distance of two ranks' shares: the length of the largest memory, if all shares fit then.
fn stride(ranks: u32, memory_len: usize, wanted: usize) -> Result<usize> {
    let fair = wanted / ranks.max(1) as usize / STEP * STEP;
    if fair == 0 {
        return Err(Error::NoWindowSpace { len: STEP.saturating_mul(ranks as usize), free: wanted });
    }
    Ok(memory_len.checked_next_multiple_of(STEP).unwrap_or(fair).clamp(STEP, fair))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is one step, so the value is consistent after a panic.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_as_long_as_the_memory_or_as_fits() {
        assert_eq!(stride(8, 141 << 30, 8 << 40).unwrap(), 144 << 30);
        assert_eq!(stride(1024, 141 << 30, 8 << 40).unwrap(), 8 << 30);
        assert_eq!(stride(2, 1, 8 << 40).unwrap(), STEP);
        let refused = Error::NoWindowSpace { len: 16 << 30, free: 12 << 30 };
        assert_eq!(stride(4, 1, 12 << 30), Err(refused));
    }

    #[test]
    fn a_message_of_another_form_is_refused() {
        let message = [&[0][..], &2_u64.to_le_bytes(), &[1; 16], b"rest"].concat();
        let decoded = Message { outcome: 0, dropped: &[[1; 8]; 2], rest: b"rest" };
        assert_eq!(Message::decode(&message), Some(decoded));
        for len in [0, 1, 8, 9, 24] {
            assert_eq!(Message::decode(&message[..len]), None, "{len}");
        }
        assert_eq!(Message::decode(&[&[0][..], &u64::MAX.to_le_bytes()].concat()), None);
    }
}
