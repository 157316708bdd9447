//! The memory of the index (the table of all objects), which the first server of a store creates and its successors open.

use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use wholemem_os::packet::MAX_PACKET;
use wholemem_os::vm::Protection;
use wholemem_os::{Deadline, Memfd, PacketSocket, SharedMap, memfd};

use crate::cells::MappedCells;
use crate::index::{Geometry, ObjectIndex};
use crate::keeper::{DescriptorKey, ToKeeper};
use crate::{Error, Result};

/// The memory file of the index (the table of all objects).
#[derive(Debug)]
pub(super) struct IndexMemory {
    memory: Memfd,
    /// The read-only descriptor of the index, which clients get.
    reader: Rc<OwnedFd>,
}

impl IndexMemory {
    /// Opens the memory of an existing index, whose descriptor the keeper process has sent.
    pub(super) fn open(fd: OwnedFd) -> Result<(Self, ObjectIndex<MappedCells>)> {
        let len = memfd::len_of(fd.as_fd())?;
        let memory = Memfd::import(fd, len)?;
        let cells = MappedCells::new(SharedMap::create(&memory, Protection::ReadWrite)?);
        Ok((Self::new(memory)?, ObjectIndex::open(cells)?))
    }

    /// Creates the index of a new store, and waits until the keeper process holds its descriptor.
    pub(super) fn create(
        geometry: Geometry,
        quota: u64,
        keeper: &PacketSocket,
    ) -> Result<(Self, ObjectIndex<MappedCells>)> {
        let memory = Memfd::create_sparse("wholemem-index", geometry.len())?;
        let cells = MappedCells::new(SharedMap::create(&memory, Protection::ReadWrite)?);
        let index = ObjectIndex::format(cells, geometry);
        index.set_quota(quota);
        let park = postcard::to_allocvec(&ToKeeper::Park(vec![DescriptorKey::Index.encode()]));
        let park = park.map_err(|_| Error::Protocol { rule: "a message to the keeper cannot be encoded" })?;
        keeper.send(&park, &[memory.as_fd()], Deadline::NEVER)?;
        keeper.recv(&mut [0; MAX_PACKET], Deadline::NEVER)?;
        Ok((Self::new(memory)?, index))
    }

    fn new(memory: Memfd) -> Result<Self> {
        let reader = Rc::new(memory.read_only_fd()?);
        Ok(Self { memory, reader })
    }

    /// Returns the length of the index in bytes.
    pub(super) fn len(&self) -> u64 {
        self.memory.len() as u64
    }

    /// Returns the read-only descriptor of the index for a client.
    pub(super) fn reader(&self) -> Rc<OwnedFd> {
        Rc::clone(&self.reader)
    }

    /// Returns a duplicate of the index's descriptor for the keeper process.
    pub(super) fn share_fd(&self) -> Result<OwnedFd> {
        Ok(self.memory.share_fd()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_is_parked_and_opened_by_the_next_server() {
        let (local, keeper) = PacketSocket::pair().unwrap();
        // The keeper's answer is sent in advance, because the test has only one thread.
        keeper.send(&[0], &[], Deadline::NEVER).unwrap();
        let geometry = Geometry { slots: 8, allocations: 4 };
        let (memory, index) = IndexMemory::create(geometry, 77, &local).unwrap();
        let (_, fds) = keeper.recv_with_fds(&mut [0; 100], 1, Deadline::NEVER).unwrap();
        let (reopened, opened) = IndexMemory::open(fds.into_iter().next().unwrap()).unwrap();
        assert_eq!((opened.geometry(), opened.quota()), (geometry, 77));
        assert_eq!((memory.len(), reopened.len()), (geometry.len() as u64, geometry.len() as u64));
        index.begin_epoch();
        assert_eq!(opened.epoch(), 1, "both map the same memory");
        let flags = rustix::fs::fcntl_getfl(&*memory.reader()).unwrap();
        assert!(!flags.intersects(rustix::fs::OFlags::RDWR | rustix::fs::OFlags::WRONLY), "{flags:?}");
    }
}
