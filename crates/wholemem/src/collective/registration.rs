//! Registers existing memory as windows: every rank keeps its memory where it is, and maps that of the others.
//!
//! ```text
//!   rank 0's tensor, in a block of its allocator        rank 1's tensor
//!   [      [tensor]        ]                            [ [tensor] ]
//!           |                                              |
//!           v              table of the window             v
//!        [ its own address | address of the mapping of rank 1's block + offset ]
//! ```
//!
//! A block is shared by the handle that its kind of memory has: `cudaMalloc` memory by a CUDA IPC handle, virtual memory and host
//! memory files by file descriptors. A rank of the same process on the same device passes its address instead: a process cannot open
//! its own CUDA IPC handle, and one page has one address in a process.
//!
//! Each rank keeps its memory alive until every rank has unmapped it: a CUDA IPC handle does not keep memory alive, and an
//! allocator could reuse it for another tensor, which the other ranks would then read. The ranks report what they have unmapped with
//! the next window that they create.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use wholemem_comm::Rank;
use wholemem_hal::{Allocation, Attempt, BackendKind, Device, MemoryBlock, Rights, Span};

use super::address_space::{WindowAddressSpace, WindowCall, export};
use super::memory_watch::MemoryWatch;
use super::peer_blocks::PeerBlock;
use super::shared_block::{BlockHandle, OwnMemory, SharedMemory, SharedPart};
use super::window::{DropNotice, Window};
use super::window_part::malformed;
use crate::communicator::agree;
use crate::{Error, Result};

/// For each rank, its memory in a new window, and a value to keep alive with it; `None` for a rank without bytes.
pub(super) type PeerSpans = Vec<Option<(Span, Option<Arc<PeerBlock>>)>>;

impl WindowAddressSpace {
    /// Creates a window of existing memory, which each rank continues to use at its own address. `is_registered` is false if the memory
    /// was allocated for the window. Collective.
    pub(super) fn register_span(&self, span: &Span, is_registered: bool) -> Result<Window> {
        let own = OwnMemory::of(self.group().device(), std::slice::from_ref(span));
        let (memory, mut all) = self.share(WindowCall::RegisterSpan, std::slice::from_ref(span), own)?;
        let spans = all.pop().expect("one span was shared, so there is one window");
        if spans.iter().all(Option::is_none) {
            return Err(Error::EmptyWindow);
        }
        let id = self.window_table().insert_unmapped();
        let notice = Arc::new(DropNotice::new(id, self.dropped()));
        self.owners().insert(id, span.clone());
        let keeping = |(span, block): (Span, _)| span.with_owner(Arc::new((block, Arc::clone(&notice))));
        let spans = spans.into_iter().map(|span| span.map(keeping)).collect();
        let watch = self.watch();
        if let Some(watch) = &watch {
            watch.set(memory.into_iter().flatten().collect());
        }
        self.window_of_parts(notice, spans, is_registered, watch).inspect_err(|_| {
            self.window_table().remove(id);
            drop(self.owners().remove(&id));
        })
    }

    /// Returns the watch that detects that registered memory of this rank was freed. The host backend needs no watch: only the
    /// owner of a span can free the memory, and the registration keeps the owner.
    pub(super) fn watch(&self) -> Option<Arc<MemoryWatch>> {
        let backend = self.group().device().backend();
        (backend.kind() != BackendKind::Host).then(|| Arc::new(MemoryWatch::new(backend)))
    }

    /// Shares `spans` of this rank, one for each new window, and maps those of all other ranks. Returns the blocks in which the own
    /// spans lie, and for each window the memory of all ranks. Collective.
    pub(super) fn share(
        &self,
        call: WindowCall,
        spans: &[Span],
        own: Result<OwnMemory>,
    ) -> Result<(Vec<Vec<MemoryBlock>>, Vec<PeerSpans>)> {
        let own = own.and_then(|own| Ok((own.shared, export(own.allocations)?, own.memory)));
        let (process_ranks, rank) = (self.group().process_ranks(), self.group().rank());
        let same_process: Vec<_> =
            process_ranks.ranks_on_backend(rank).into_iter().filter(|other| *other != rank).collect();
        let device = self.group().device().clone();
        same_process
            .iter()
            .for_each(|other| process_ranks.put(rank, *other, (device.clone(), spans.to_vec())));
        let (own, descriptors, memory) = match own {
            Ok((shared, descriptors, memory)) => (Ok(shared.to_bytes()), descriptors, memory),
            Err(error) => (Err(error), Vec::new(), Vec::new()),
        };
        let messages = self.exchange_messages(call, own);
        if messages.is_err() {
            // The spans are removed again: a rank of this process that made another call has not taken them, and would take them
            // in its next registration.
            let take_back = |other: &Rank| drop(process_ranks.take::<(Device, Vec<Span>)>(rank, *other));
            same_process.iter().for_each(take_back);
        }
        let passed: BTreeMap<Rank, (Device, Vec<Span>)> = same_process
            .iter()
            .filter_map(|other| Some((*other, process_ranks.take(*other, rank)?)))
            .collect();
        let decode = |(rank, bytes): (Rank, &Vec<u8>)| SharedMemory::from_bytes(rank, bytes);
        let all = (0..).map(Rank).zip(&messages?).map(decode).collect::<Result<Vec<_>>>()?;
        if let Some((rank, _)) =
            (0..).map(Rank).zip(&all).find(|(_, other)| other.parts.len() != all[0].parts.len())
        {
            return Err(Error::RanksDisagree { rank });
        }
        let descriptors = self.exchange_descriptors(&all, &descriptors)?;
        let mapped = (0..).map(Rank).zip(all).zip(descriptors).map(|((peer, memory), descriptors)| {
            self.map_peer(peer, &memory, descriptors, spans, passed.get(&peer))
        });
        let mapped = agree(self.group().bootstrap(), mapped.collect::<Result<Vec<_>>>())?;
        let windows = (0..spans.len()).map(|part| mapped.iter().map(|peer| peer[part].clone()).collect());
        Ok((memory, windows.collect()))
    }

    /// Sends the descriptors of this rank's allocations to all ranks, if any rank has allocations with descriptors. Collective.
    fn exchange_descriptors(
        &self,
        all: &[SharedMemory],
        own: &[(Allocation, OwnedFd)],
    ) -> Result<Vec<Vec<OwnedFd>>> {
        if all.iter().all(|memory| memory.descriptors() == 0) {
            return Ok(all.iter().map(|_| Vec::new()).collect());
        }
        let own: Vec<_> = own.iter().map(|(_, fd)| fd.as_fd()).collect();
        Ok(self.group().bootstrap().all_gather_fds(&own)?)
    }

    /// Returns the memory of rank `peer` in each new window.
    fn map_peer(
        &self,
        peer: Rank,
        memory: &SharedMemory,
        descriptors: Vec<OwnedFd>,
        own: &[Span],
        passed: Option<&(Device, Vec<Span>)>,
    ) -> Result<PeerSpans> {
        let (rank, device) = (self.group().rank(), self.group().device());
        if descriptors.len() != memory.descriptors() {
            return Err(malformed(peer));
        }
        let mut descriptors = descriptors.into_iter();
        let mut blocks = Vec::new();
        for block in &memory.blocks {
            let descriptors: Vec<_> = descriptors.by_ref().take(block.descriptors()).collect();
            // Another GPU of this process cannot access the address of virtual memory that was mapped for one GPU only.
            let is_passed = passed.is_some_and(|(other, _)| {
                other.id() == device.id() || matches!(block.handle, BlockHandle::CudaIpc(_))
            });
            let is_here = peer == rank || is_passed;
            let map = || self.peer_blocks().map(device, peer, block, descriptors);
            blocks.push(if is_here { None } else { Some(map()?) });
        }
        let spans = if peer == rank { own } else { passed.map_or(&[][..], |(_, spans)| spans) };
        let span = |(index, part): (usize, &SharedPart)| {
            if part.len == 0 {
                return Ok(None);
            }
            Ok(Some(match &blocks[part.block] {
                Some(block) => (block.all.part(part.skip, part.len)?, Some(Arc::clone(block))),
                None => {
                    let span = spans.get(index).ok_or_else(|| malformed(peer))?;
                    // Another GPU of this process has no access to memory from `cudaMalloc`.
                    span.check(device, Rights::ReadWrite, || Attempt::Access { len: span.len() })?;
                    (span.clone(), None)
                }
            }))
        };
        memory.parts.iter().enumerate().map(span).collect()
    }
}
