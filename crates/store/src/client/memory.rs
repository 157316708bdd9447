//! The cache of this process's maps of allocations. All objects in an allocation share its map.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use wholemem_hal::{
    Allocation, Backend, BackendKind, Device, Grant, HostConfig, Mapping, Reservation, Rights,
};

use crate::cells::MappedCells;
use crate::convert::to_usize;
use crate::id::AllocationId;
use crate::index::ObjectIndex;
use crate::protocol::MemoryRef;
use crate::{Error, Result};

/// A cache of maps of allocations by id, and the devices on which memory is mapped.
#[derive(Debug)]
pub(super) struct MappingCache {
    cached: Mutex<HashMap<AllocationId, Arc<Mapping>>>,
    host: Device,
    /// The UUIDs of the server's devices, in the order in which the server numbers the devices.
    uuids: Vec<[u8; 16]>,
    /// The backend of the server's devices: given by the caller, or opened for the first object on a device.
    devices: OnceLock<Option<Backend>>,
}

impl MappingCache {
    pub(super) fn new(uuids: Vec<[u8; 16]>, devices: Option<Backend>) -> Result<Self> {
        let host = Backend::host(HostConfig::default())?.device(0)?;
        let backend = devices.map_or_else(OnceLock::new, |devices| OnceLock::from(Some(devices)));
        Ok(Self { cached: Mutex::default(), host, uuids, devices: backend })
    }

    pub(super) fn get(&self, allocation: AllocationId) -> Option<Arc<Mapping>> {
        self.lock().get(&allocation).cloned()
    }

    /// Maps an allocation for reading, and caches the map.
    pub(super) fn map(&self, memory: &MemoryRef, fd: OwnedFd) -> Result<Arc<Mapping>> {
        let mapping = Arc::new(self.map_once(&self.import(memory, fd)?, Rights::Read)?);
        // If another thread has mapped the allocation meanwhile, the map of that thread is used.
        Ok(self.lock().entry(memory.allocation).or_insert(mapping).clone())
    }

    /// Imports an allocation from the descriptor that the server has sent.
    pub(super) fn import(&self, memory: &MemoryRef, fd: OwnedFd) -> Result<Allocation> {
        let len = to_usize(memory.allocation_len);
        Ok(Allocation::import(&self.device(memory.place)?, fd.into(), len)?)
    }

    /// Maps an allocation without caching the map.
    pub(super) fn map_once(&self, allocation: &Allocation, rights: Rights) -> Result<Mapping> {
        let (device, len) = (allocation.device(), allocation.len());
        // The address of the map is aligned to large pages, so that the kernel uses large pages.
        let align = allocation.granularity().recommended.len();
        if len < align {
            return Ok(allocation.map(rights)?);
        }
        let reservation = Reservation::create_aligned(device.backend(), len, align)?;
        Ok(Mapping::create(&reservation, 0, allocation, &[Grant { device: device.id(), rights }])?)
    }

    /// Returns the device of this process for a place of the server (0 is the host, `n + 1` is the server's device `n`).
    fn device(&self, place: u32) -> Result<Device> {
        let Some(number) = place.checked_sub(1) else { return Ok(self.host.clone()) };
        let open = || Backend::open(BackendKind::Cuda).ok();
        let backend = self.devices.get_or_init(open).as_ref().ok_or(Error::DeviceHidden)?;
        let uuid = self.uuids.get(number as usize).ok_or(Error::DeviceHidden)?;
        let info = backend.devices().iter().find(|info| info.uuid == *uuid).ok_or(Error::DeviceHidden)?;
        Ok(backend.device(info.id)?)
    }

    /// Returns the place of a device of this process (`n + 1` for the server's device `n`).
    pub(super) fn place(&self, device: &Device) -> Result<u32> {
        let uuid = device.info().uuid;
        let number = self.uuids.iter().position(|cached| *cached == uuid).ok_or(Error::DeviceHidden)?;
        Ok(u32::try_from(number + 1).expect("a server has fewer than 2^32 devices"))
    }

    /// Returns the maps of host arenas (memory that small objects share), which are reused for other objects.
    pub(super) fn arenas(&self, index: &ObjectIndex<MappedCells>) -> Vec<Arc<Mapping>> {
        let is_arena = |id: AllocationId| index.allocation(id).is_none_or(|record| record.is_arena);
        let is_host = |mapping: &Mapping| mapping.device().backend().kind() == BackendKind::Host;
        let cached = self.lock();
        let arenas = cached.iter().filter(|(id, mapping)| is_arena(**id) && is_host(mapping));
        arenas.map(|(_, mapping)| Arc::clone(mapping)).collect()
    }

    /// Drops the cached maps of freed allocations that this process does not use.
    pub(super) fn trim(&self, index: &ObjectIndex<MappedCells>) {
        self.lock().retain(|id, mapping| index.allocation(*id).is_some() || Arc::strong_count(mapping) > 1);
    }

    /// Drops the cached map of an allocation whose object was deleted, unless the map is in use or the allocation is an arena
    /// (shared by small objects).
    pub(super) fn evict(&self, index: &ObjectIndex<MappedCells>, allocation: AllocationId) {
        let is_shared = index.allocation(allocation).is_some_and(|record| record.is_arena);
        if let Entry::Occupied(cached) = self.lock().entry(allocation)
            && !is_shared
            && Arc::strong_count(cached.get()) == 1
        {
            cached.remove();
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<AllocationId, Arc<Mapping>>> {
        self.cached.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
