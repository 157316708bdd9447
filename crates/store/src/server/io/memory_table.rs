//! The memory that the store server has open: the allocations that hold objects, and the pin pages, in which clients mark objects
//! in use.
//!
//! Memory is opened for reading before a client can find an object in it, so that a request for it succeeds even if no descriptor
//! is left.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use wholemem_os::vm::Protection;
use wholemem_os::{Error as OsError, Memfd, SharedMap, memfd};

use super::workers;
use crate::cells::{Cells, MappedCells};
use crate::convert::to_usize;
use crate::id::{AllocationId, ClientId};
use crate::server::machine::{PAGE_WORK, PinPosition};
use crate::server::machine::{ServerMemory, SharedAllocation};
use crate::{Refusal, Result, pin};

/// The length up to which host memory is short: the kernel frees its pages in microseconds.
pub(super) const MAX_SHORT_LEN: usize = 4 << 20;

#[derive(Debug)]
struct OpenMemory {
    fd: Rc<OwnedFd>,
    /// The descriptor that clients get to read the memory; read-only for host memory. After the memory is sealed against writes,
    /// `fd` is the same descriptor.
    reader: Option<Rc<OwnedFd>>,
    is_host: bool,
    /// The mapping of an arena (memory that small objects share), through which the server writes small objects. Created with the
    /// first object.
    map: Option<SharedMap>,
}

/// The result of a call that seals memory against writes (`F_SEAL_WRITE`).
#[derive(Debug)]
pub(super) enum CloseResult {
    Done(Result<(), Refusal>),
    /// Sealing the memory may take long, so a worker thread has to seal it through this descriptor.
    ByWorker(OwnedFd),
}

impl OpenMemory {
    fn open_for_reading(&mut self) -> Result<Rc<OwnedFd>, OsError> {
        if let Some(reader) = &self.reader {
            return Ok(Rc::clone(reader));
        }
        let reader = match self.is_host {
            true => Rc::new(memfd::read_only_fd(self.fd.as_fd())?),
            false => Rc::clone(&self.fd),
        };
        if self.is_host && memfd::is_write_sealed(self.fd.as_fd())? {
            self.fd = Rc::clone(&reader);
        }
        self.reader = Some(Rc::clone(&reader));
        Ok(reader)
    }

    fn close(&mut self, at_once: bool) -> Result<Option<OwnedFd>, Refusal> {
        let reader = match self.open_for_reading() {
            Ok(reader) => reader,
            Err(error) => return Err(workers::refused(self.fd.as_fd(), &error)),
        };
        if Rc::ptr_eq(&reader, &self.fd) {
            return Ok(None);
        }
        if !at_once {
            let shared = memfd::share_fd(self.fd.as_fd());
            return shared.map(Some).map_err(|error| workers::refused(self.fd.as_fd(), &error));
        }
        workers::close(self.fd.as_fd())?;
        self.fd = reader;
        Ok(None)
    }
}

/// The memory of each allocation, and the pin page of each client (in which it marks objects in use).
#[derive(Debug, Default)]
pub(super) struct MemoryTable {
    memories: BTreeMap<AllocationId, OpenMemory>,
    pins: BTreeMap<ClientId, MappedCells>,
}

impl MemoryTable {
    /// Adds the memory of an allocation to the table. If the memory is already sealed against writes, it is opened for reading.
    pub(super) fn add(
        &mut self,
        allocation: AllocationId,
        fd: OwnedFd,
        is_host: bool,
    ) -> Result<(), OsError> {
        let is_closed = is_host && memfd::is_write_sealed(fd.as_fd())?;
        self.memories.insert(allocation, OpenMemory { fd: Rc::new(fd), reader: None, is_host, map: None });
        if is_closed { self.open_for_reading(allocation) } else { Ok(()) }
    }

    /// Opens the memory of an allocation for reading, because it may contain objects.
    pub(super) fn open_for_reading(&mut self, allocation: AllocationId) -> Result<(), OsError> {
        self.memories.get_mut(&allocation).map_or(Ok(()), |memory| memory.open_for_reading().map(drop))
    }

    /// Seals the memory of an allocation against writes (`F_SEAL_WRITE`), at once or through a worker thread.
    pub(super) fn close(&mut self, allocation: AllocationId, at_once: bool) -> CloseResult {
        let memory = self.memories.get_mut(&allocation).ok_or(Refusal::NothingToSeal);
        match memory.and_then(|memory| memory.close(at_once)) {
            Ok(Some(fd)) => CloseResult::ByWorker(fd),
            Ok(None) => CloseResult::Done(Ok(())),
            Err(refusal) => CloseResult::Done(Err(refusal)),
        }
    }

    /// Records that a worker thread has sealed the memory of an allocation against writes.
    pub(super) fn closed(&mut self, allocation: AllocationId) {
        if let Some(OpenMemory { fd, reader: Some(reader), .. }) = self.memories.get_mut(&allocation) {
            *fd = Rc::clone(reader);
        }
    }

    /// Returns true if the memory of an allocation is host memory that the kernel frees in microseconds.
    pub(super) fn is_short(&self, allocation: AllocationId) -> bool {
        let memory = self.memories.get(&allocation).filter(|memory| memory.is_host);
        memory.is_some_and(|memory| memfd::len_of(memory.fd.as_fd()).is_ok_and(|len| len <= MAX_SHORT_LEN))
    }

    pub(super) fn remove(&mut self, allocation: AllocationId) {
        self.memories.remove(&allocation);
    }

    /// Returns the pages of an unused allocation to the kernel, before its last descriptor is closed.
    pub(super) fn discard(&self, allocation: AllocationId) -> Result<(), OsError> {
        let memory = self.memories.get(&allocation).filter(|memory| memory.is_host);
        memory.map_or(Ok(()), |memory| memfd::discard(memory.fd.as_fd()))
    }

    pub(super) fn fds(&self) -> impl Iterator<Item = (AllocationId, &OwnedFd)> {
        self.memories.iter().map(|(allocation, memory)| (*allocation, &*memory.fd))
    }

    /// Returns a descriptor of an allocation for a client; read-only if the client may not write and the memory supports
    /// read-only descriptors.
    pub(super) fn share(&mut self, share: SharedAllocation) -> Result<Option<Rc<OwnedFd>>, Refusal> {
        let Some(memory) = self.memories.get_mut(&share.allocation) else { return Ok(None) };
        if share.is_writable {
            return Ok(Some(Rc::clone(&memory.fd)));
        }
        match memory.open_for_reading() {
            Ok(reader) => Ok(Some(reader)),
            Err(error) => Err(workers::refused(memory.fd.as_fd(), &error)),
        }
    }

    pub(super) fn add_pins(&mut self, client: ClientId, page: &Memfd) -> Result<()> {
        let cells = MappedCells::new(SharedMap::create(page, Protection::Read)?);
        // The first access faults in the client's pin page. Without this access, a delete request would wait for the page fault
        // when it reads the pins.
        cells.load_acquire(0);
        self.pins.insert(client, cells);
        Ok(())
    }

    /// Returns the secret with which a forked child can claim a client's pin page (in which objects in use are marked); `None` if
    /// the client has no page or no secret.
    pub(super) fn secret(&self, client: ClientId) -> Option<u64> {
        self.pins.get(&client).and_then(pin::secret)
    }

    /// Returns true if a client has pinned any object.
    pub(super) fn has_pins(&self, client: ClientId) -> bool {
        self.pins.get(&client).is_some_and(|page| pin::pinned(page).any(|pin| pin != 0))
    }

    fn map(&mut self, allocation: AllocationId) -> Result<Option<&SharedMap>> {
        let Some(memory) = self.memories.get_mut(&allocation) else { return Ok(None) };
        if memory.map.is_none() {
            let len = memfd::len_of(memory.fd.as_fd())?;
            let file = Memfd::import(memfd::share_fd(memory.fd.as_fd())?, len)?;
            let map = SharedMap::create(&file, Protection::ReadWrite)?;
            memory.open_for_reading()?;
            // An error is ignored: if the kernel cannot populate the mapping, its pages are faulted in one by one.
            let _ = map.populate();
            memory.map = Some(map);
        }
        Ok(memory.map.as_ref())
    }
}

impl ServerMemory for MemoryTable {
    fn write(&mut self, allocation: AllocationId, offset: u64, bytes: &[u8]) -> bool {
        let offset = to_usize(offset);
        let written = self.map(allocation).map(|map| map.map(|map| map.bytes().write_at(offset, bytes)));
        let is_written = matches!(written, Ok(Some(Ok(()))));
        if !is_written {
            tracing::error!(%allocation, ?written, "cannot write to an arena");
        }
        is_written
    }

    fn read_pins(
        &self,
        from: PinPosition,
        work: &mut usize,
        visit: &mut dyn FnMut(ClientId, u64) -> usize,
    ) -> Option<PinPosition> {
        for (client, page) in self.pins.range(from.client..) {
            let mut cell = if *client == from.client { from.cell } else { 0 };
            if *work == 0 {
                return Some(PinPosition { client: *client, cell });
            }
            if cell == 0 {
                *work = work.saturating_sub(PAGE_WORK);
                cell = 1;
            }
            for cell in cell..pin::used(page) {
                if *work == 0 {
                    return Some(PinPosition { client: *client, cell });
                }
                let pin = page.load_acquire(cell);
                *work = work.saturating_sub(if pin == 0 { 1 } else { visit(*client, pin) });
            }
        }
        None
    }

    fn take_pins(&mut self, client: ClientId) -> Vec<u64> {
        self.pins
            .remove(&client)
            // A client that was never admitted has no pin page.
            .map_or_else(Vec::new, |page| pin::pinned(&page).filter(|pin| *pin != 0).collect())
    }
}

#[cfg(test)]
mod tests {
    use wholemem_os::{Errno, fault};

    use super::*;

    const LEN: usize = 64 << 10;

    fn memory() -> Memfd {
        Memfd::create("test", LEN).unwrap()
    }

    fn shared(table: &mut MemoryTable, allocation: AllocationId, is_writable: bool) -> Rc<OwnedFd> {
        table.share(SharedAllocation { allocation, is_writable }).unwrap().unwrap()
    }

    fn is_writable(fd: &OwnedFd) -> bool {
        rustix::fs::fcntl_getfl(fd).unwrap().contains(rustix::fs::OFlags::RDWR)
    }

    #[test]
    fn memory_sealed_against_writes_has_one_read_only_descriptor() {
        for at_once in [true, false] {
            let (mut table, id) = (MemoryTable::default(), AllocationId::new(0, 0));
            table.add(id, memory().into_fd(), true).unwrap();
            assert!(is_writable(&shared(&mut table, id, true)));
            match table.close(id, at_once) {
                CloseResult::ByWorker(fd) if !at_once => {
                    workers::close(fd.as_fd()).unwrap();
                    table.closed(id);
                }
                outcome => assert!(at_once && matches!(outcome, CloseResult::Done(Ok(()))), "{outcome:?}"),
            }
            let fds = [true, false].map(|is_writable| shared(&mut table, id, is_writable));
            assert!(Rc::ptr_eq(&fds[0], &fds[1]) && !is_writable(&fds[0]));
            assert!(
                matches!(table.close(id, at_once), CloseResult::Done(Ok(()))),
                "sealing it again does nothing"
            );
        }
    }

    #[test]
    fn memory_that_is_still_mapped_is_not_sealed_and_stays_writable() {
        let (mut table, id, memory) = (MemoryTable::default(), AllocationId::new(0, 0), memory());
        let _map = SharedMap::create(&memory, Protection::ReadWrite).unwrap();
        table.add(id, memory.into_fd(), true).unwrap();
        assert!(matches!(table.close(id, true), CloseResult::Done(Err(Refusal::StillMapped))));
        assert!(is_writable(&shared(&mut table, id, true)));
    }

    #[test]
    fn the_refusal_of_memory_that_cannot_be_opened_has_length_and_limit() {
        let limit = wholemem_os::descriptors::limit();
        let reason = format!("the server has reached its limit of {limit} open descriptors (`ulimit -n`)");
        let expected = Refusal::NoMemory { len: LEN as u64, reason };
        let fstat_then_open = 2;
        for share in [true, false] {
            let (mut table, id) = (MemoryTable::default(), AllocationId::new(0, 0));
            table.add(id, memory().into_fd(), true).unwrap();
            let armed = fault::arm(fstat_then_open, Errno::MFILE);
            let refused = match share {
                true => table.share(SharedAllocation { allocation: id, is_writable: false }).unwrap_err(),
                false => match table.close(id, true) {
                    CloseResult::Done(Err(refused)) => refused,
                    outcome => panic!("{outcome:?}"),
                },
            };
            assert_eq!((armed.fired(), refused), (Some("open"), expected.clone()));
        }
    }

    #[test]
    fn memory_that_another_server_has_sealed_is_recognised() {
        let (mut table, id, memory) = (MemoryTable::default(), AllocationId::new(0, 0), memory());
        memfd::seal_writes(memory.as_fd()).unwrap();
        table.add(id, memory.read_only_fd().unwrap(), true).unwrap();
        assert!(matches!(table.close(id, true), CloseResult::Done(Ok(()))));
    }

    #[test]
    fn an_arena_is_opened_for_reading_with_its_first_object() {
        let (mut table, id) = (MemoryTable::default(), AllocationId::new(0, 0));
        table.add(id, memory().into_fd(), true).unwrap();
        assert!(table.write(id, 0, b"hello"));
        let reader = Rc::clone(table.memories[&id].reader.as_ref().unwrap());
        assert!(Rc::ptr_eq(&reader, &shared(&mut table, id, false)) && !is_writable(&reader));
        assert!(is_writable(&table.memories[&id].fd));
    }

    #[test]
    fn a_page_without_a_secret_cannot_be_claimed() {
        let mut table = MemoryTable::default();
        let pages = [1, 2].map(|number| {
            let page = Memfd::create("test", pin::PINS_LEN).unwrap();
            table.add_pins(ClientId(number), &page).unwrap();
            MappedCells::new(SharedMap::create(&page, Protection::ReadWrite).unwrap())
        });
        pin::set_secret(&pages[1], 7);
        assert_eq!([1, 2, 3].map(|number| table.secret(ClientId(number))), [None, Some(7), None]);
    }
}
