//! The memory of the index: made by the first server of a store, and opened by every server after it.

use std::os::fd::{AsFd, OwnedFd};

use wholemem_os::packet::MAX_PACKET;
use wholemem_os::vm::Protection;
use wholemem_os::{Deadline, Memfd, PacketSocket, SharedMap, memfd};

use crate::cells::MappedCells;
use crate::index::{Geometry, Index};
use crate::keeper::{Key, ToKeeper};
use crate::{Error, Result};

/// Opens the index that the keeper has.
pub(super) fn open_index(fd: OwnedFd) -> Result<(Memfd, Index<MappedCells>)> {
    let len = memfd::len_of(fd.as_fd())?;
    let memory = Memfd::import(fd, len)?;
    let cells = MappedCells::new(SharedMap::create(&memory, Protection::ReadWrite)?);
    Ok((memory, Index::open(cells)?))
}

/// Makes the index of a new store, and waits until the keeper has it.
pub(super) fn make_index(
    geometry: Geometry,
    quota: u64,
    keeper: &PacketSocket,
) -> Result<(Memfd, Index<MappedCells>)> {
    let memory = Memfd::create_sparse("wholemem-index", geometry.len())?;
    let cells = MappedCells::new(SharedMap::create(&memory, Protection::ReadWrite)?);
    let index = Index::format(cells, geometry);
    index.set_quota(quota);
    let park = postcard::to_allocvec(&ToKeeper::Park(vec![Key::Index.encode()]));
    let park = park.map_err(|_| Error::Protocol { rule: "a word for the keeper cannot be encoded" })?;
    keeper.send(&park, &[memory.as_fd()], Deadline::NEVER)?;
    keeper.recv(&mut [0; MAX_PACKET], Deadline::NEVER)?;
    Ok((memory, index))
}
