//! The address space of windows: one reservation in each process, in which all ranks create windows collectively.
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
use wholemem_hal::{Allocation, BackendKind, Granule, HandleKind, Mapping, Reservation, Rights, Span};

use wholemem_os::Deadline;

use super::address_index::{AddressIndex, IndexEntry};
use super::address_tables::AddressTables;
use super::memory_watch::MemoryWatch;
use super::peer_blocks::PeerBlocks;
use super::window::{DropNotice, DroppedWindows, Window, WindowCore};
use super::window_part::{WindowPart, malformed};
use super::window_table::{WindowId, WindowTable};
use crate::communicator::{agree, from_text, to_text, words_of};
use crate::{Communicator, Error, Kind, Location, MemorySpec, Result, WholeMemory, WindowRef};
use wholemem_os::width::to_usize;

/// The distance between the address ranges of two ranks' windows is a multiple of 4 GiB, so that the upper 32 bits of an address
/// identify the rank.
const STRIDE_UNIT: usize = 4 << 30;

/// The length of each rank's heap of small windows, in granules (the unit of physical memory).
const HEAP_GRANULES: usize = 16;

/// The kind of call by which ranks create windows. Every message of a rank contains the kind, because the kinds have different
/// messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum WindowCall {
    Allocate,
    AllocateOnHost,
    AllocateByMalloc,
    Register,
    RegisterSpan,
    FinishRecording,
}

/// The mappings of one rank's memory in a window, at adjacent addresses.
pub(super) type RankMappings = Vec<Mapping>;

/// The addresses in this process at which the windows of one group are mapped.
#[derive(Debug)]
pub(super) struct WindowAddressSpace {
    group: Communicator,
    granule: Granule,
    stride: usize,
    /// The reserved addresses, which the group's ranks in this process share: one of them maps the windows' memory for all.
    reservation: Reservation,
    window_table: Arc<Mutex<WindowTable>>,
    dropped: DroppedWindows,
    /// This rank's memory in registered windows, which is kept until every rank has unmapped it.
    owners: Mutex<BTreeMap<WindowId, Span>>,
    peer_blocks: PeerBlocks,
    tables: Arc<AddressTables>,
    /// Finds the window in which an address of this rank lies.
    index: Arc<AddressIndex<WindowCore>>,
    /// The heap of small windows of every rank. It is created with the first small window.
    heap: Mutex<Option<Vec<RankMappings>>>,
}

impl WindowAddressSpace {
    /// Reserves the addresses for windows: at most `requested_len` bytes for all ranks together, with an equal share for each
    /// rank. Collective.
    pub(super) fn reserve(group: &Communicator, requested_len: usize) -> Result<Self> {
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
        let stride = stride(group.size(), memory_len, requested_len)?;
        let reservation = Self::create_once_per_process(group, || {
            let len = stride.saturating_mul(group.size() as usize);
            Ok(Reservation::create_aligned(group.device().backend(), len, STRIDE_UNIT.max(granule.len()))?)
        })?;
        let heap_len = HEAP_GRANULES * granule.len();
        let window_table = WindowTable::new(group.size(), granule, stride, heap_len);
        Ok(Self {
            group: group.clone(),
            granule,
            stride,
            reservation,
            window_table: Arc::new(Mutex::new(window_table)),
            dropped: DroppedWindows::default(),
            owners: Mutex::default(),
            peer_blocks: PeerBlocks::default(),
            tables: Arc::new(AddressTables::new(group.device())),
            index: Arc::new(AddressIndex::new()),
            heap: Mutex::default(),
        })
    }

    /// Calls `create` on one rank of each process, and returns clones of the result on all ranks of the process. Collective.
    fn create_once_per_process<T: Clone + Send + 'static>(
        group: &Communicator,
        create: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let (process_ranks, rank) = (group.process_ranks(), group.rank());
        let sharing = process_ranks.ranks_on_backend(rank);
        let leader = *sharing.first().expect("it includes this rank");
        let mut created = Ok(None);
        if leader == rank {
            created = create().map(Some);
            if let Ok(Some(created)) = &created {
                sharing.iter().skip(1).for_each(|other| process_ranks.put(rank, *other, created.clone()));
            }
        }
        let agreed = agree(group.bootstrap(), created);
        if leader == rank && agreed.is_err() {
            // The other ranks of this process do not take the created value if the creation failed on any rank, so remove it.
            sharing.iter().skip(1).for_each(|other| drop(process_ranks.take::<T>(rank, *other)));
        }
        let created = agreed?;
        // Only ranks with the same backend take the value from this leader; ranks of the same process with another backend have
        // another leader.
        let taken = || process_ranks.take(leader, rank);
        created.or_else(taken).ok_or(Error::RanksDisagree { rank: leader })
    }

    /// Creates a window with `len` bytes of device memory on this rank. Collective; the lengths of ranks may differ.
    pub(super) fn allocate(&self, len: usize) -> Result<Window> {
        let parts = self.exchange_parts(WindowCall::Allocate, WindowPart::new(self.granule, len))?;
        let most = parts.iter().map(|part| part.len).max().unwrap_or(0);
        if most == 0 {
            return Err(Error::EmptyWindow);
        }
        if self.window_table().is_small(most) {
            return self.create_in_heap(&parts, most);
        }
        self.create_mapped(&parts, false, || self.allocate_own_part(&parts))
    }

    /// Creates a window with `len` bytes of host memory on this rank. Collective; the lengths of ranks may differ.
    pub(super) fn allocate_on_host(&self, len: usize) -> Result<Window> {
        if self.group.device().backend().kind() == BackendKind::Host {
            return self.allocate(len);
        }
        let part = WindowPart { len, ..WindowPart::default() };
        let lens: Vec<_> = self.exchange_parts(WindowCall::AllocateOnHost, Ok(part))?;
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
        let id = self.window_table().insert_unmapped();
        let notice = Arc::new(DropNotice::new(id, &self.dropped));
        self.window_of_parts(notice, spans, false, None).inspect_err(|_| self.window_table().remove(id))
    }

    /// Creates a window of memory that already exists on each rank. Collective.
    pub(super) fn register(&self, part: Result<(WindowPart, Vec<Allocation>)>) -> Result<Window> {
        let (part, allocations) = match part {
            Ok((part, allocations)) => (Ok(part), allocations),
            Err(error) => (Err(error), Vec::new()),
        };
        let parts = self.exchange_parts(WindowCall::Register, part)?;
        if parts.iter().all(|part| part.len == 0) {
            return Err(Error::EmptyWindow);
        }
        self.create_mapped(&parts, true, || Ok(allocations))
    }

    /// Allocates zeroed memory for this rank's part of a window.
    fn allocate_own_part(&self, parts: &[WindowPart]) -> Result<Vec<Allocation>> {
        let own = parts.get(self.group.rank().index()).map_or(0, WindowPart::address_len);
        if own == 0 {
            return Ok(Vec::new());
        }
        Ok(vec![self.group.device().allocate(own)?])
    }

    /// Allocates `len` bytes on each rank for lanes (sequences of collective calls). Returns the mappings, the address of rank
    /// 0's memory and the distance to the next rank's memory. Collective.
    ///
    /// The memory is zeroed before other ranks can access it. Otherwise zeroing could overwrite signals of a faster rank.
    pub(super) fn allocate_zeroed(&self, len: usize) -> Result<(Vec<RankMappings>, u64, u64)> {
        let parts = vec![WindowPart::new(self.granule, len)?; self.group.size() as usize];
        let (_, offset) = self.window_table().insert_mapped(len)?;
        let mappings = self.exchange_memory(&parts, offset, || {
            let memory = self.allocate_own_part(&parts)?;
            let stream = self.group.device().stream()?;
            for piece in &memory {
                stream.fill(&piece.map(Rights::ReadWrite)?.all(), 0)?;
            }
            stream.synchronize(Deadline::NEVER)?;
            Ok(memory)
        })?;
        Ok((mappings, self.reservation.address() + offset as u64, self.stride as u64))
    }

    fn exchange_parts(&self, call: WindowCall, own: Result<WindowPart>) -> Result<Vec<WindowPart>> {
        let parts = self.exchange_messages(call, own.map(|part| part.to_bytes()))?;
        (0..).map(Rank).zip(&parts).map(|(rank, bytes)| WindowPart::from_bytes(rank, bytes)).collect()
    }

    /// Sends this rank's part of a new window, or its error, and the ids of the windows that it has dropped, to all ranks.
    /// Returns the parts of all ranks, [`Error::RanksDisagree`] if a rank made another call, or else the error of the lowest
    /// rank that failed.
    pub(super) fn exchange_messages(&self, call: WindowCall, own: Result<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
        const SUCCEEDED: u8 = 0;
        const FAILED: u8 = 1;
        let dropped = std::mem::take(&mut *lock(&self.dropped));
        let ids: Vec<u8> = dropped.iter().flat_map(|id| id.to_le_bytes()).collect();
        let ids = [&(dropped.len() as u64).to_le_bytes()[..], &ids].concat();
        let message = match &own {
            Ok(part) => [&[call as u8, SUCCEEDED][..], &ids, part].concat(),
            Err(error) => [&[call as u8, FAILED][..], &ids, to_text(error).as_bytes()].concat(),
        };
        let mut parts = Vec::new();
        let mut failed = None;
        let (mut first_call, mut differing) = (None, None);
        // The memory of windows that all ranks have dropped. It is released after all locks: dropping an owner may take long, or run
        // code of another library.
        let mut released = Vec::new();
        for (rank, message) in (0..).map(Rank).zip(self.group.bootstrap().all_gather(&message)?) {
            let WindowMessage { call, outcome, dropped, payload } =
                WindowMessage::decode(&message).ok_or_else(|| malformed(rank))?;
            if *first_call.get_or_insert(call) != call {
                differing.get_or_insert(rank);
            }
            for id in dropped.iter().map(|id| u64::from_le_bytes(*id)) {
                if self.window_table().record_drop(id) {
                    released.extend(self.owners().remove(&id));
                }
            }
            match outcome {
                SUCCEEDED => parts.push(payload.to_vec()),
                FAILED => {
                    failed.get_or_insert_with(|| from_text(rank, &String::from_utf8_lossy(payload)));
                }
                _ => return Err(malformed(rank)),
            }
        }
        if let Some(rank) = differing {
            return Err(Error::RanksDisagree { rank });
        }
        match (own, failed) {
            (Err(error), _) if self.group.size() == 1 => Err(error),
            (_, Some(error)) => Err(error),
            _ => Ok(parts),
        }
    }

    /// Creates a window that has its own mappings, outside the heap of small windows.
    fn create_mapped(
        &self,
        parts: &[WindowPart],
        is_registered: bool,
        own: impl FnOnce() -> Result<Vec<Allocation>>,
    ) -> Result<Window> {
        let most = parts.iter().map(WindowPart::address_len).max().unwrap_or(0);
        let (id, offset) = self.window_table().insert_mapped(most)?;
        let created = self.exchange_memory(parts, offset, own).and_then(|maps| {
            let spans = maps.iter().zip(parts).map(|(mappings, part)| span(mappings, part.skip, part.len));
            let spans = spans.collect::<Result<Vec<_>>>()?;
            let skip = parts.first().map_or(0, |part| part.skip);
            if parts.iter().any(|part| part.skip != skip) {
                let notice = Arc::new(DropNotice::new(id, &self.dropped));
                return self.window_of_parts(notice, spans, is_registered, None);
            }
            self.window_with_stride(id, spans, offset + skip, is_registered)
        });
        if created.is_err() {
            self.window_table().remove(id);
        }
        created
    }

    /// Creates a window whose parts (one for each rank) are a constant number of bytes apart.
    fn window_with_stride(
        &self,
        id: u64,
        spans: Vec<Option<Span>>,
        offset: usize,
        is_registered: bool,
    ) -> Result<Window> {
        let base = self.reservation.address() + offset as u64;
        let reference = WindowRef { base, stride: self.stride as u64, table: 0 };
        let keep = Span::keep_alive(spans.iter().flatten())?;
        let notice = Arc::new(DropNotice::new(id, &self.dropped));
        let core = self.window_core(notice, spans, keep, reference);
        Ok(self.window(WindowCore { is_registered, ..core }))
    }

    /// Describes a window of the parts of all ranks, in memory that was allocated for it.
    fn window_core(
        &self,
        notice: Arc<DropNotice>,
        spans: Vec<Option<Span>>,
        keep: Option<Span>,
        reference: WindowRef,
    ) -> WindowCore {
        WindowCore {
            id: notice.id(),
            dropped: Arc::clone(&self.dropped),
            own: self.group.rank(),
            spans,
            keep,
            reference,
            memory: None,
            is_registered: false,
            is_recorded: false,
            _notice: notice,
        }
    }

    /// Creates a window, and adds this rank's part to the index of addresses.
    fn window(&self, core: WindowCore) -> Window {
        let start = core.spans.get(core.own.index()).and_then(Option::as_ref).map_or(0, Span::address);
        let (id, len, core) = (core.id, core.common_len(), Arc::new(core));
        if len > 0 {
            self.index.insert(IndexEntry { start, len, id, value: Arc::downgrade(&core) });
        }
        Window::of(core)
    }

    /// Creates a window of parts at any addresses: if they are not at equal distances, it has a table of the addresses. Collective.
    /// `memory` watches this rank's part, if its owner could free it although it is registered.
    pub(super) fn window_of_parts(
        &self,
        notice: Arc<DropNotice>,
        spans: Vec<Option<Span>>,
        is_registered: bool,
        memory: Option<Arc<MemoryWatch>>,
    ) -> Result<Window> {
        let addresses: Vec<_> = spans.iter().map(|span| span.as_ref().map_or(0, Span::address)).collect();
        let distance = constant_distance(&addresses);
        let written = || {
            if distance.is_some() {
                return Ok(None);
            }
            let table = self.tables.allocate(addresses.len())?;
            self.tables.write([(&table, &addresses[..])])?;
            Ok(Some(table))
        };
        let table = agree(self.group.bootstrap(), written())?;
        let reference = match (distance, &table) {
            (Some(stride), _) => WindowRef { base: addresses[0], stride, table: 0 },
            (None, table) => WindowRef { base: 0, stride: 0, table: table.as_ref().map_or(0, Span::address) },
        };
        let keep = Span::keep_alive(spans.iter().flatten().chain(&table))?;
        let core = self.window_core(notice, spans, keep, reference);
        Ok(self.window(WindowCore { is_registered, memory, ..core }))
    }

    /// Exchanges the allocations of all ranks, and maps each at `offset` in the rank's share of the window addresses. Collective.
    fn exchange_memory(
        &self,
        parts: &[WindowPart],
        offset: usize,
        own: impl FnOnce() -> Result<Vec<Allocation>>,
    ) -> Result<Vec<RankMappings>> {
        let (comm, rank) = (self.group.bootstrap(), self.group.rank());
        let own = agree(comm, own().and_then(export))?;
        let handles: Vec<_> = own.iter().map(|(_, fd)| fd.as_fd()).collect();
        let handles = comm.all_gather_fds(&handles)?;
        let device = self.group.device();
        Self::create_once_per_process(&self.group, || {
            let grants =
                self.group.process_ranks().grants(&self.group.process_ranks().ranks_on_backend(rank));
            let mut all = Vec::new();
            for (peer, (part, fds)) in parts.iter().zip(handles).enumerate() {
                if fds.len() != part.allocation_lens.len() {
                    return Err(malformed((0..).map(Rank).nth(peer).expect("ranks are numbered by a u32")));
                }
                let mut at = peer * self.stride + offset;
                let mut mappings = Vec::new();
                for (index, (fd, len)) in fds.into_iter().zip(&part.allocation_lens).enumerate() {
                    let own_memory = own.get(index).filter(|_| peer == rank.index());
                    let memory = match own_memory {
                        Some((memory, _)) => memory.clone(),
                        None => Allocation::import(device, fd.into(), *len)?,
                    };
                    mappings.push(Mapping::create(&self.reservation, at, &memory, &grants)?);
                    at += len;
                }
                all.push(mappings);
            }
            Ok(all)
        })
    }

    /// Creates a window in the heap of small windows. The first call also creates the heap.
    fn create_in_heap(&self, parts: &[WindowPart], most: usize) -> Result<Window> {
        let mut heap_slot = lock(&self.heap);
        let heap = match heap_slot.take() {
            Some(heap) => heap,
            None => self.create_heap(parts.len())?,
        };
        let heap = heap_slot.insert(heap);
        let (id, at) = self.window_table().insert_in_heap(most)?;
        let spans = heap.iter().zip(parts).map(|(mappings, part)| span(mappings, at, part.len));
        let spans = spans.collect::<Result<Vec<_>>>()?;
        let first =
            heap.first().and_then(|mappings| mappings.first()).expect("every rank's heap is one mapping");
        let offset = to_usize(first.address() - self.reservation.address()) + at;
        self.window_with_stride(id, spans, offset, false)
    }

    /// Creates every rank's heap of small windows. Collective.
    fn create_heap(&self, ranks: usize) -> Result<Vec<RankMappings>> {
        let len = HEAP_GRANULES * self.granule.len();
        let shares = vec![WindowPart::new(self.granule, len)?; ranks];
        let (id, offset) = self.window_table().insert_mapped(len)?;
        let created = self.exchange_memory(&shares, offset, || self.allocate_own_part(&shares));
        created.inspect_err(|_| self.window_table().remove(id))
    }

    pub(super) fn dropped(&self) -> &DroppedWindows {
        &self.dropped
    }

    pub(super) fn group(&self) -> &Communicator {
        &self.group
    }

    pub(super) fn index(&self) -> &Arc<AddressIndex<WindowCore>> {
        &self.index
    }

    pub(super) fn tables(&self) -> &Arc<AddressTables> {
        &self.tables
    }

    pub(super) fn shared_window_table(&self) -> Arc<Mutex<WindowTable>> {
        Arc::clone(&self.window_table)
    }

    pub(super) fn peer_blocks(&self) -> &PeerBlocks {
        &self.peer_blocks
    }

    pub(super) fn owners(&self) -> MutexGuard<'_, BTreeMap<WindowId, Span>> {
        lock(&self.owners)
    }

    pub(super) fn window_table(&self) -> MutexGuard<'_, WindowTable> {
        lock(&self.window_table)
    }
}

/// The message that a rank sends at the start of the creation of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct WindowMessage<'a> {
    /// The [`WindowCall`] of the sending rank.
    call: u8,
    outcome: u8,
    /// The ids of the windows that the sending rank has dropped since the previous message.
    dropped: &'a [[u8; 8]],
    /// The encoded part of the window that the sending rank provides, or its encoded error.
    payload: &'a [u8],
}

impl<'a> WindowMessage<'a> {
    /// Decodes a message about a new window; returns `None` if the message is malformed.
    fn decode(bytes: &'a [u8]) -> Option<Self> {
        let ([call, outcome], rest) = bytes.split_first_chunk::<2>()?;
        let (count, rest) = rest.split_first_chunk::<8>()?;
        let (ids, payload) = rest.split_at_checked(to_usize(u64::from_le_bytes(*count)).checked_mul(8)?)?;
        Some(Self { call: *call, outcome: *outcome, dropped: ids.as_chunks().0, payload })
    }
}

/// Exports allocations as file descriptors for other ranks.
pub(super) fn export(own: Vec<Allocation>) -> Result<Vec<(Allocation, OwnedFd)>> {
    let export = |memory: Allocation| match memory.export(HandleKind::Fd, Rights::ReadWrite)?.into_fd() {
        Some(fd) => Ok((memory, fd)),
        None => unreachable!("an allocation exported as `HandleKind::Fd` is a file descriptor"),
    };
    own.into_iter().map(export).collect()
}

/// Returns the `len` bytes at offset `skip` of the memory that one rank has mapped for a window; `None` for zero bytes.
fn span(mappings: &RankMappings, skip: usize, len: usize) -> Result<Option<Span>> {
    if len == 0 {
        return Ok(None);
    }
    let all: Vec<_> = mappings.iter().map(Mapping::all).collect();
    Ok(Some(Span::join(&all)?.part(skip, len)?))
}

/// Returns the distance between the window addresses of two ranks: the length of the largest device memory, or less if the
/// requested address space is too short for that.
fn stride(ranks: u32, memory_len: usize, requested_len: usize) -> Result<usize> {
    let even_share = requested_len / ranks.max(1) as usize / STRIDE_UNIT * STRIDE_UNIT;
    if even_share == 0 {
        return Err(Error::NoWindowSpace {
            len: STRIDE_UNIT.saturating_mul(ranks as usize),
            free: requested_len,
        });
    }
    Ok(memory_len.checked_next_multiple_of(STRIDE_UNIT).unwrap_or(even_share).clamp(STRIDE_UNIT, even_share))
}

/// Returns the distance from each address to the next one if it is the same for all, as between the parts of any two ranks. Kernels
/// then need no table. The distance wraps if the addresses are descending.
fn constant_distance(addresses: &[u64]) -> Option<u64> {
    if addresses.contains(&0) {
        return None;
    }
    let mut distances = addresses.windows(2).map(|pair| pair[1].wrapping_sub(pair[0]));
    let first = distances.next().unwrap_or(0);
    distances.all(|distance| distance == first).then_some(first)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change under this lock is a single operation, so the value is consistent after a panic.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stride_is_the_memory_length_limited_by_the_address_space() {
        assert_eq!(stride(8, 141 << 30, 8 << 40).unwrap(), 144 << 30);
        assert_eq!(stride(1024, 141 << 30, 8 << 40).unwrap(), 8 << 30);
        assert_eq!(stride(2, 1, 8 << 40).unwrap(), STRIDE_UNIT);
        let refused = Error::NoWindowSpace { len: 16 << 30, free: 12 << 30 };
        assert_eq!(stride(4, 1, 12 << 30), Err(refused));
    }

    #[test]
    fn parts_at_equal_distances_need_no_table() {
        assert_eq!(constant_distance(&[7]), Some(0));
        assert_eq!(constant_distance(&[100, 300, 500]), Some(200));
        let descending = constant_distance(&[500, 100]).unwrap();
        assert_eq!(500_u64.wrapping_add(descending), 100);
        for addresses in [&[100, 300, 501][..], &[0, 100], &[100, 0], &[]] {
            let expected = addresses.is_empty().then_some(0);
            assert_eq!(constant_distance(addresses), expected, "{addresses:?}");
        }
    }

    #[test]
    fn a_malformed_message_is_rejected() {
        let message = [&[3, 0][..], &2_u64.to_le_bytes(), &[1; 16], b"rest"].concat();
        let decoded = WindowMessage { call: 3, outcome: 0, dropped: &[[1; 8]; 2], payload: b"rest" };
        assert_eq!(WindowMessage::decode(&message), Some(decoded));
        for len in [0, 1, 2, 9, 10, 25] {
            assert_eq!(WindowMessage::decode(&message[..len]), None, "{len}");
        }
        assert_eq!(WindowMessage::decode(&[&[3, 0][..], &u64::MAX.to_le_bytes()].concat()), None);
    }
}
