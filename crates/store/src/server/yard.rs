//! The memory and the pins that a server has: what its machine may touch.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use wholemem_os::vm::Protection;
use wholemem_os::{Memfd, SharedMap, memfd};

use super::machine::{Premises, Share};
use crate::Result;
use crate::cells::MappedCells;
use crate::id::{AllocationId, ClientId, ObjectId};
use crate::pin;

#[derive(Debug)]
struct Memory {
    fd: Rc<OwnedFd>,
    is_host: bool,
    /// Where small objects are written, once there was one.
    map: Option<SharedMap>,
}

/// Memory by its allocation, and the pages of pins by their client.
#[derive(Debug, Default)]
pub(super) struct Yard {
    memories: BTreeMap<AllocationId, Memory>,
    pins: BTreeMap<ClientId, MappedCells>,
}

impl Yard {
    pub(super) fn add(&mut self, allocation: AllocationId, fd: OwnedFd, is_host: bool) {
        self.memories.insert(allocation, Memory { fd: Rc::new(fd), is_host, map: None });
    }

    pub(super) fn remove(&mut self, allocation: AllocationId) {
        self.memories.remove(&allocation);
    }

    pub(super) fn fd(&self, allocation: AllocationId) -> Option<Rc<OwnedFd>> {
        self.memories.get(&allocation).map(|memory| Rc::clone(&memory.fd))
    }

    pub(super) fn fds(&self) -> impl Iterator<Item = (AllocationId, &OwnedFd)> {
        self.memories.iter().map(|(allocation, memory)| (*allocation, &*memory.fd))
    }

    /// A descriptor for a client. What it may not write is opened again for reading, where that can be done.
    pub(super) fn share(&self, share: Share) -> Result<Option<Rc<OwnedFd>>> {
        let Some(memory) = self.memories.get(&share.allocation) else { return Ok(None) };
        if share.is_writable || !memory.is_host {
            return Ok(Some(Rc::clone(&memory.fd)));
        }
        Ok(Some(Rc::new(memfd::read_only_fd(memory.fd.as_fd())?)))
    }

    pub(super) fn add_pins(&mut self, client: ClientId, page: &Memfd) -> Result<()> {
        let map = SharedMap::create(page, Protection::Read)?;
        self.pins.insert(client, MappedCells::new(map));
        Ok(())
    }

    pub(super) fn remove_pins(&mut self, client: ClientId) {
        self.pins.remove(&client);
    }

    fn map(&mut self, allocation: AllocationId) -> Result<Option<&SharedMap>> {
        let Some(memory) = self.memories.get_mut(&allocation) else { return Ok(None) };
        if memory.map.is_none() {
            let len = memfd::len_of(memory.fd.as_fd())?;
            let file = Memfd::import(memfd::share_fd(memory.fd.as_fd())?, len)?;
            let map = SharedMap::create(&file, Protection::ReadWrite)?;
            // Where the kernel cannot, pages are touched one by one.
            let _ = map.populate();
            memory.map = Some(map);
        }
        Ok(memory.map.as_ref())
    }
}

impl Premises for Yard {
    fn write(&mut self, allocation: AllocationId, offset: u64, bytes: &[u8]) -> bool {
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        let written = self.map(allocation).map(|map| map.map(|map| map.bytes().write_at(offset, bytes)));
        let is_written = matches!(written, Ok(Some(Ok(()))));
        if !is_written {
            tracing::error!(%allocation, ?written, "cannot write into an arena");
        }
        is_written
    }

    fn pinned(&self, objects: &BTreeSet<ObjectId>) -> BTreeSet<ObjectId> {
        let pins = self.pins.values().flat_map(pin::pinned).filter_map(ObjectId::from_u64);
        pins.filter(|pin| objects.contains(pin)).collect()
    }
}
