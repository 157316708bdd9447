//! The blocks of other ranks that this rank has mapped, so that each block of `cudaMalloc` memory is mapped once, however many
//! windows lie in it.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use wholemem_comm::Rank;
use wholemem_hal::{
    Allocation, CudaMallocBuffer, Device, Grant, Mapping, Reservation, Rights, ShareHandle, Span,
};

use super::shared_block::{BlockHandle, SharedBlock};
use super::window_part::malformed;
use crate::Result;

/// The mapped blocks of other ranks. A block is unmapped with the last window in it.
#[derive(Debug, Default)]
pub(super) struct PeerBlocks {
    mapped: Mutex<HashMap<(Rank, SharedBlock), Weak<PeerBlock>>>,
}

/// A block of another rank, which this rank has mapped.
#[derive(Debug)]
pub(super) struct PeerBlock {
    /// All memory of the block.
    pub(super) all: Span,
}

impl PeerBlocks {
    /// Returns a mapping of a block of rank `peer`, for kernels of `device`. `descriptors` are those of its allocations.
    ///
    /// # Errors
    /// [`Error::Hal`](crate::Error::Hal) if the memory cannot be mapped, for example because the other rank has freed it.
    pub(super) fn map(
        &self,
        device: &Device,
        peer: Rank,
        block: &SharedBlock,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Arc<PeerBlock>> {
        let BlockHandle::CudaIpc(token) = block.handle else {
            // The allocation of each descriptor is mapped anew, because it is not known whether two descriptors refer to the same
            // allocation.
            return Ok(Arc::new(PeerBlock { all: map_allocations(device, peer, block, descriptors)? }));
        };
        let key = (peer, block.clone());
        let known = block.is_identified().then(|| self.lock().get(&key).and_then(Weak::upgrade)).flatten();
        if let Some(known) = known {
            return Ok(known);
        }
        let handle = ShareHandle::CudaIpc { token, offset: 0 };
        let mapped =
            Arc::new(PeerBlock { all: CudaMallocBuffer::import(device, &handle, block.len())?.all() });
        let mut known = self.lock();
        known.retain(|_, block| block.strong_count() > 0);
        if block.is_identified() {
            known.insert(key, Arc::downgrade(&mapped));
        }
        Ok(mapped)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<(Rank, SharedBlock), Weak<PeerBlock>>> {
        // Each change under this lock is one insert, or removes entries that are not used, so the map is consistent after a panic.
        self.mapped.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Maps the allocations of a block of rank `peer` at adjacent addresses.
fn map_allocations(
    device: &Device,
    peer: Rank,
    block: &SharedBlock,
    descriptors: Vec<OwnedFd>,
) -> Result<Span> {
    if descriptors.len() != block.segments.len() {
        return Err(malformed(peer));
    }
    let reservation = Reservation::create(device.backend(), block.len())?;
    let grants = [Grant { device: device.id(), rights: Rights::ReadWrite }];
    let (mut at, mut mapped) = (0, Vec::new());
    for (descriptor, segment) in descriptors.into_iter().zip(&block.segments) {
        let memory = Allocation::import(device, descriptor.into(), segment.len)?;
        mapped.push(Mapping::create(&reservation, at, &memory, &grants)?.all());
        at += segment.len;
    }
    Ok(Span::join(&mapped)?)
}
