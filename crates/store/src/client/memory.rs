//! Memory that this process has mapped, kept for the next object that lies in it.

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
use crate::index::Index;
use crate::protocol::Memory;
use crate::{Error, Result};

/// The maps of this process, by allocation, and where it maps.
#[derive(Debug)]
pub(super) struct Maps {
    known: Mutex<HashMap<AllocationId, Arc<Mapping>>>,
    host: Device,
    /// The devices of the server, as it numbers them.
    uuids: Vec<[u8; 16]>,
    /// The backend of those devices: given, or opened when the first object on one is met.
    devices: OnceLock<Option<Backend>>,
}

impl Maps {
    pub(super) fn new(uuids: Vec<[u8; 16]>, devices: Option<Backend>) -> Result<Self> {
        let host = Backend::host(HostConfig::default())?.device(0)?;
        let given = devices.map_or_else(OnceLock::new, |devices| OnceLock::from(Some(devices)));
        Ok(Self { known: Mutex::default(), host, uuids, devices: given })
    }

    pub(super) fn known(&self, allocation: AllocationId) -> Option<Arc<Mapping>> {
        self.lock().get(&allocation).cloned()
    }

    /// Maps memory for reading, and keeps the map.
    pub(super) fn map(&self, memory: &Memory, fd: OwnedFd) -> Result<Arc<Mapping>> {
        let mapping = Arc::new(self.map_once(&self.import(memory, fd)?, Rights::Read)?);
        // Another thread may have been faster: then its map is the one.
        Ok(self.lock().entry(memory.allocation).or_insert(mapping).clone())
    }

    /// Takes memory in that the server has sent.
    pub(super) fn import(&self, memory: &Memory, fd: OwnedFd) -> Result<Allocation> {
        let len = to_usize(memory.allocation_len);
        Ok(Allocation::import(&self.device(memory.place)?, fd.into(), len)?)
    }

    /// Maps memory, for this once.
    pub(super) fn map_once(&self, allocation: &Allocation, rights: Rights) -> Result<Mapping> {
        let (device, len) = (allocation.device(), allocation.len());
        // Where large pages begin, they are mapped as such.
        let align = allocation.granularity().recommended.len();
        if len < align {
            return Ok(allocation.map(rights)?);
        }
        let reservation = Reservation::create_aligned(device.backend(), len, align)?;
        Ok(Mapping::create(&reservation, 0, allocation, &[Grant { device: device.id(), rights }])?)
    }

    /// The device of this process that a place of the server is.
    fn device(&self, place: u32) -> Result<Device> {
        let Some(number) = place.checked_sub(1) else { return Ok(self.host.clone()) };
        let open = || Backend::open(BackendKind::Cuda).ok();
        let backend = self.devices.get_or_init(open).as_ref().ok_or(Error::DeviceHidden)?;
        let uuid = self.uuids.get(number as usize).ok_or(Error::DeviceHidden)?;
        let info = backend.devices().iter().find(|info| info.uuid == *uuid).ok_or(Error::DeviceHidden)?;
        Ok(backend.device(info.id)?)
    }

    /// The server's number for a device of this process.
    pub(super) fn place(&self, device: &Device) -> Result<u32> {
        let uuid = device.info().uuid;
        let number = self.uuids.iter().position(|known| *known == uuid).ok_or(Error::DeviceHidden)?;
        Ok(u32::try_from(number + 1).expect("a server has fewer than 2^32 devices"))
    }

    /// The maps of host memory that is used for other objects when those that lie in it are gone.
    pub(super) fn arenas(&self, index: &Index<MappedCells>) -> Vec<Arc<Mapping>> {
        let is_arena = |id: AllocationId| index.allocation(id).is_none_or(|record| record.is_arena);
        let is_host = |mapping: &Mapping| mapping.device().backend().kind() == BackendKind::Host;
        let known = self.lock();
        let arenas = known.iter().filter(|(id, mapping)| is_arena(**id) && is_host(mapping));
        arenas.map(|(_, mapping)| Arc::clone(mapping)).collect()
    }

    /// Lets go maps of memory that is no more, and that nobody here uses.
    pub(super) fn trim(&self, index: &Index<MappedCells>) {
        self.lock().retain(|id, mapping| index.allocation(*id).is_some() || Arc::strong_count(mapping) > 1);
    }

    /// Lets go the map of an allocation whose object is gone, if nobody here uses it and it is no arena of others.
    pub(super) fn forget(&self, index: &Index<MappedCells>, allocation: AllocationId) {
        let is_shared = index.allocation(allocation).is_some_and(|record| record.is_arena);
        if let Entry::Occupied(known) = self.lock().entry(allocation)
            && !is_shared
            && Arc::strong_count(known.get()) == 1
        {
            known.remove();
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<AllocationId, Arc<Mapping>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
