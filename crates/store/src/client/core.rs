//! The state that clones of a client share: the connection, the index, the pins and the mapped memory.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use wholemem_hal::{Backend, Mapping};
use wholemem_os::memfd::FileIdentity;
use wholemem_os::packet::Address;
use wholemem_os::vm::Protection;
use wholemem_os::{Deadline, ForkEpoch, Memfd, SharedMap, access_fault, memfd};

use super::connection::{Connection, Welcome};
use super::connection_probe::ConnectionProbe;
use super::draft::Sealed;
use super::memory::MappingCache;
use super::object::{Object, PinGuard};
use super::{Client, Entry, unexpected};
use crate::cells::MappedCells;
use crate::convert::to_usize;
use crate::id::SlotState;
use crate::index::{ObjectIndex, ObjectLocation, ObjectRecord};
use crate::pin::{MAX_PINS, PINS_LEN, PinOutcome, PinPage};
use crate::protocol::{Answer, RequestKind, check_name};
use crate::{Error, ObjectId, Refusal, Result};

/// The environment variable that installs a signal handler if its value is `1`. At an access fault, the handler reports the name
/// of the object on standard error.
const FAULT_HANDLER: &str = "WHOLEMEM_FAULT_HANDLER";

/// The maximum number of lookups in the index while a name changes, before the client asks the server for the object.
const MAX_LOOKUPS: usize = 8;

/// The state that all clones of a [`Client`] share.
#[derive(Debug)]
pub(crate) struct ClientCore {
    pub(super) path: PathBuf,
    pub(super) index: ObjectIndex<MappedCells>,
    /// The identity of the index file, which is different for each store.
    pub(super) identity: FileIdentity,
    pub(super) pins: PinPage<MappedCells>,
    pub(super) maps: MappingCache,
    /// The number of allocations that the server had freed when this client last unmapped freed memory.
    seen_freed: AtomicU64,
    connection: Mutex<Connection>,
    probe: ConnectionProbe,
    /// Messages without an answer that could not be sent because another thread used the connection. They are sent later, so that
    /// dropping an object never blocks.
    unsent: Mutex<Vec<RequestKind>>,
    pub(super) epoch: ForkEpoch,
}

impl ClientCore {
    pub(super) fn connect(path: &Path, devices: Option<Backend>, deadline: Deadline) -> Result<Self> {
        let epoch = ForkEpoch::current()?;
        if std::env::var_os(FAULT_HANDLER).is_some_and(|value| value == "1") {
            access_fault::install()?;
        }
        let (connection, welcome) = Connection::connect(path, deadline)?;
        let Welcome { index, index_len, pins, devices: uuids, .. } = welcome;
        let identity = memfd::identity(index.as_fd())?;
        let index = SharedMap::create(&Memfd::import(index, index_len)?, Protection::Read)?;
        let pins = SharedMap::create(&Memfd::import(pins, PINS_LEN)?, Protection::ReadWrite)?;
        Ok(Self {
            path: absolute_path(path),
            index: ObjectIndex::open(MappedCells::new(index))?,
            identity,
            pins: PinPage::new(MappedCells::new(pins)),
            maps: MappingCache::new(uuids, devices)?,
            seen_freed: AtomicU64::new(0),
            connection: Mutex::new(connection),
            probe: ConnectionProbe::default(),
            unsent: Mutex::default(),
            epoch,
        })
    }

    pub(super) fn check_fork(&self) -> Result<()> {
        if self.epoch.is_current() { Ok(()) } else { Err(Error::Forked) }
    }

    /// Returns true if the connection is closed because the keeper and the server are dead. Does not block; returns false if
    /// another thread uses the connection.
    pub(super) fn is_peer_closed(&self) -> bool {
        self.probe.is_lost() || self.connection.try_lock().is_ok_and(|connection| connection.is_closed())
    }

    /// Checks that the store is usable, and unmaps memory of objects that was freed since the last call.
    #[inline]
    pub(super) fn check(&self) -> Result<()> {
        self.check_cached()?;
        // If another thread uses the connection, that thread finds that the connection is closed.
        if self.probe.check(|| self.connection.try_lock().is_ok_and(|connection| connection.is_closed())) {
            return Err(Error::Disconnected);
        }
        self.trim();
        Ok(())
    }

    /// Checks that the store is usable as far as this client knows without a system call.
    #[inline]
    fn check_cached(&self) -> Result<()> {
        self.check_fork()?;
        if self.index.is_superseded() || self.probe.is_lost() { Err(Error::Disconnected) } else { Ok(()) }
    }

    /// Returns true if the store has ended, as far as this process can see. The memory of its objects is then never overwritten.
    /// Sends no request.
    pub(super) fn has_ended(&self) -> bool {
        let is_closed = || self.connection.try_lock().is_ok_and(|connection| connection.is_closed());
        self.index.is_superseded() || self.probe.is_lost() || (self.epoch.is_current() && is_closed())
    }

    /// Unmaps allocations (memory of objects) that the server has freed since the last call.
    #[inline]
    pub(super) fn trim(&self) {
        let freed = self.index.freed_allocations();
        if self.seen_freed.load(Ordering::Relaxed) != freed {
            // The number is stored before the scan, so that an allocation that is freed during the scan is found by the next
            // scan.
            self.seen_freed.store(freed, Ordering::Relaxed);
            self.maps.trim(&self.index);
        }
    }

    /// Looks up a name in the index, and returns the object. Only the object's memory may be requested from the server.
    pub(super) fn get_from_index(self: &Arc<Self>, name: &str) -> Result<Option<Object>> {
        self.pin_named(name)?.map(|(guard, location)| self.with_memory(guard, location)).transpose()
    }

    /// Looks up a name in the index, and pins the object that has the name.
    pub(super) fn pin_named(self: &Arc<Self>, name: &str) -> Result<Option<(PinGuard, ObjectLocation)>> {
        for _ in 0..MAX_LOOKUPS {
            let mut has_changed = false;
            for found in self.index.candidates(name) {
                match self.pins.pin(&self.index, found.id) {
                    PinOutcome::Pinned(pin_at) if self.index.is_named(found.id, name) => {
                        return self.guard_pin(found.id, pin_at).map(Some);
                    }
                    PinOutcome::Pinned(pin_at) => self.unpin(found.id, pin_at),
                    PinOutcome::NotSealed { must_notify } => {
                        has_changed |= must_notify;
                        self.notify_if(must_notify, found.id);
                    }
                    PinOutcome::NoFreePin => return Err(too_many_pins()),
                }
            }
            if !has_changed {
                break;
            }
        }
        Ok(None)
    }

    /// Asks the server for the object that has a name, again and again until the object can be pinned.
    pub(super) fn get_from_server(
        self: &Arc<Self>,
        name: &str,
        until: Deadline,
        timeout: Deadline,
    ) -> Result<Object> {
        loop {
            let id = self.find(name, until, timeout)?;
            if let Some(object) = self.pin(id)? {
                return Ok(object);
            }
        }
    }

    /// Works as [`ClientCore::get_from_server`], on a separate connection, so that other threads can use the shared connection
    /// meanwhile.
    pub(super) fn get_on_new_connection(
        self: &Arc<Self>,
        name: &str,
        until: Deadline,
        timeout: Deadline,
    ) -> Result<Object> {
        let (mut separate, welcome) = self.connect_again(timeout)?;
        drop(welcome);
        loop {
            let id = find(name, until, |kind| separate.request(kind, &[], timeout))?;
            if let Some(object) = self.pin(id)? {
                return Ok(object);
            }
        }
    }

    /// Opens another connection to the store of this client.
    pub(super) fn connect_again(&self, deadline: Deadline) -> Result<(Connection, Welcome)> {
        let (connection, welcome) = Connection::connect(&self.path, deadline)?;
        // Another store may use the same socket path by now.
        let is_same = memfd::identity(welcome.index.as_fd())? == self.identity;
        if is_same { Ok((connection, welcome)) } else { Err(Error::Disconnected) }
    }

    /// Asks the server for the object that has a name. The server waits until `until` for the object to exist, and the client
    /// waits until `timeout` for the answer.
    pub(super) fn find(&self, name: &str, until: Deadline, timeout: Deadline) -> Result<ObjectId> {
        find(name, until, |kind| self.request(kind, &[], timeout))
    }

    /// Returns the description of the object that has a name, without pinning the object.
    pub(super) fn look_up(&self, name: &str) -> Result<Entry> {
        let named = |id: ObjectId| match self.index.read(id) {
            Some((SlotState::Sealed, record)) if record.name == name => self.entry(id, record),
            _ => None,
        };
        loop {
            let cached = self.index.candidates(name).find_map(|found| named(found.id));
            let entry = match cached {
                Some(entry) => Some(entry),
                // If the object was freed in the meantime, the client looks the name up again.
                None => named(self.find(name, Deadline::NOW, Deadline::after(Client::TIMEOUT))?),
            };
            if let Some(entry) = entry {
                return Ok(entry);
            }
        }
    }

    /// Pins an object and maps its memory; returns `None` if the object was freed or is not sealed.
    pub(super) fn pin(self: &Arc<Self>, id: ObjectId) -> Result<Option<Object>> {
        match self.pins.pin(&self.index, id) {
            PinOutcome::Pinned(pin_at) => {
                let (guard, location) = self.guard_pin(id, pin_at)?;
                self.with_memory(guard, location).map(Some)
            }
            PinOutcome::NotSealed { must_notify } => {
                self.notify_if(must_notify, id);
                Ok(None)
            }
            PinOutcome::NoFreePin => Err(too_many_pins()),
        }
    }

    /// Creates a guard that releases a pin on drop, and returns it with the location of the pinned object.
    fn guard_pin(self: &Arc<Self>, id: ObjectId, pin_at: usize) -> Result<(PinGuard, ObjectLocation)> {
        let guard = PinGuard::new(self, id, pin_at);
        let location = self
            .index
            .location(id)
            .ok_or(Error::Protocol { rule: "the record of an object has a valid location" })?;
        Ok((guard, location))
    }

    /// Creates an [`Object`] from a pin, and maps the object's memory if necessary.
    fn with_memory(&self, guard: PinGuard, location: ObjectLocation) -> Result<Object> {
        let mapping = match self.maps.get(location.allocation) {
            Some(mapping) => mapping,
            None => self.fetch(guard.id())?,
        };
        Object::new(guard, location, mapping)
    }

    fn fetch(&self, object: ObjectId) -> Result<Arc<Mapping>> {
        self.trim();
        let answer = self.request(RequestKind::Fetch { object }, &[], Deadline::after(Client::TIMEOUT))?;
        let (Answer::Fetched { memory }, Ok([fd])) = (answer.0, <[_; 1]>::try_from(answer.1)) else {
            return Err(unexpected());
        };
        self.maps.map(&memory, fd)
    }

    pub(super) fn unpin(&self, id: ObjectId, pin_at: usize) {
        // The location is read before the pin is released, because the record is only valid while the object is pinned.
        let location = self.index.location(id);
        let must_notify = self.pins.unpin(&self.index, id, pin_at);
        if must_notify && let Some(location) = location {
            // The object is deleted, so its memory is unmapped, unless this process still uses it or it is an arena (shared by
            // small objects).
            self.maps.evict(&self.index, location.allocation);
        }
        self.notify_if(must_notify, id);
    }

    /// Notifies the server that a pin of a deleted object was released.
    fn notify_if(&self, must_notify: bool, id: ObjectId) {
        if must_notify {
            self.notify(RequestKind::PinReleased { object: id });
        }
    }

    /// Sends a message that the server does not answer: now, or when another thread has finished its request.
    pub(super) fn notify(&self, kind: RequestKind) {
        self.unsent.lock().unwrap_or_else(PoisonError::into_inner).push(kind);
        match self.connection.try_lock() {
            Ok(mut connection) => self.send_queued(&mut connection),
            Err(TryLockError::Poisoned(connection)) => self.send_queued(&mut connection.into_inner()),
            Err(TryLockError::WouldBlock) => {}
        }
    }

    fn send_queued(&self, connection: &mut Connection) {
        let unsent = std::mem::take(&mut *self.unsent.lock().unwrap_or_else(PoisonError::into_inner));
        for kind in unsent {
            connection.notify(kind);
        }
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn request(
        &self,
        kind: RequestKind,
        payload: &[u8],
        deadline: Deadline,
    ) -> Result<(Answer, Vec<OwnedFd>)> {
        self.request_with_id(kind, payload, deadline).map(|(_, answer, fds)| (answer, fds))
    }

    /// Sends a request whose answer is a sealed object.
    pub(super) fn request_sealed(&self, kind: RequestKind, payload: &[u8]) -> Result<Sealed> {
        match self.request(kind, payload, Deadline::after(Client::TIMEOUT))? {
            (Answer::Sealed { object, version }, _) => Ok(Sealed { id: object, version }),
            _ => Err(unexpected()),
        }
    }

    /// Sends a request with the descriptor of memory, whose answer is a sealed object. The server accepts descriptors from its
    /// own user only.
    pub(super) fn request_adoption(&self, kind: RequestKind, fd: BorrowedFd<'_>) -> Result<Sealed> {
        self.check_cached()?;
        let mut connection = self.connection();
        let user = connection.server_user()?;
        if user != rustix::process::geteuid().as_raw() {
            return Err(Refusal::NotTrusted { user }.into());
        }
        let outcome = self.probe.observe(connection.request_with_fds(
            kind,
            &[],
            &[fd],
            Deadline::after(Client::TIMEOUT),
        ));
        self.send_queued(&mut connection);
        match outcome?.0 {
            Answer::Sealed { object, version } => Ok(Sealed { id: object, version }),
            _ => Err(unexpected()),
        }
    }

    /// Runs a request that allocates memory. If the memory quota is reached, waits for free space and runs the request again.
    pub(super) fn with_space<T>(
        &self,
        len: usize,
        place: u32,
        wait: Duration,
        mut attempt: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        let deadline = Deadline::after(wait);
        loop {
            match attempt() {
                Err(Error::Refused(Refusal::OverQuota { .. })) if !deadline.has_passed() => {}
                outcome => return outcome,
            }
            // The client waits for space on a separate connection, so that other threads can delete objects meanwhile.
            let (mut separate, _) = self.connect_again(Deadline::after(Client::TIMEOUT))?;
            let left = deadline.remaining().unwrap_or(Duration::MAX);
            let wait = wait_millis(left);
            let timeout = Deadline::after(left.saturating_add(Client::TIMEOUT));
            let kind = RequestKind::AwaitSpace { len: len as u64, place, wait };
            separate.request(kind, &[], timeout)?;
        }
    }

    /// Sends a request, and returns its id, its answer and the received descriptors.
    pub(super) fn request_with_id(
        &self,
        kind: RequestKind,
        payload: &[u8],
        deadline: Deadline,
    ) -> Result<(u64, Answer, Vec<OwnedFd>)> {
        self.check_cached()?;
        let mut connection = self.connection();
        let id = connection.last_id() + 1;
        let outcome = self.probe.observe(connection.request(kind, payload, deadline));
        self.send_queued(&mut connection);
        drop(connection);
        self.trim();
        outcome.map(|(answer, fds)| (id, answer, fds))
    }

    /// Creates the description of an object from its record; returns `None` if the object's memory was freed since the record was
    /// read.
    pub(super) fn entry(&self, id: ObjectId, record: ObjectRecord) -> Option<Entry> {
        let place = self.index.allocation(record.region.allocation)?.place;
        Some(Entry {
            id,
            name: record.name,
            meta: record.meta,
            len: to_usize(record.len),
            version: record.version,
            owner: record.owner,
            created: record.created,
            is_cpu: place == 0,
            pack: record.pack,
        })
    }
}

/// Converts the wait of a request to milliseconds, limited to 64 bits, which are more than half a billion years.
fn wait_millis(left: Duration) -> u64 {
    const MAX_MILLIS: u128 = u64::MAX as u128;
    u64::try_from(left.as_millis().min(MAX_MILLIS)).expect("the value is limited to 64 bits")
}

/// Asks the server for the object that has a name, until the object exists or the deadline `until` passes.
fn find(
    name: &str,
    until: Deadline,
    mut request: impl FnMut(RequestKind) -> Result<(Answer, Vec<OwnedFd>)>,
) -> Result<ObjectId> {
    check_name(name)?;
    loop {
        // A wait without a deadline is a sequence of waits with a limit.
        let left = until.remaining().unwrap_or(Client::TIMEOUT).min(Client::TIMEOUT);
        let wait = wait_millis(left);
        match request(RequestKind::Find { name: name.to_owned(), wait }) {
            Ok((Answer::Found { object }, _)) => return Ok(object),
            Ok(_) => return Err(unexpected()),
            Err(Error::Refused(Refusal::NoSuchName { .. })) if !until.has_passed() => {}
            Err(error) => return Err(error),
        }
    }
}

/// Makes the path of a socket absolute, so that it stays valid if the working directory changes, unless it would exceed the maximum
/// length of a socket address.
fn absolute_path(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).ok();
    let fits = |absolute: &PathBuf| Address::Path(absolute.clone()).encode().is_ok();
    absolute.filter(fits).unwrap_or_else(|| path.to_owned())
}

fn too_many_pins() -> Error {
    Error::TooManyPins { limit: MAX_PINS }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relative_socket_path_becomes_absolute_if_it_is_short_enough() {
        let folder = std::env::current_dir().unwrap();
        assert_eq!(absolute_path(Path::new("socket")), folder.join("socket"));
        assert_eq!(absolute_path(Path::new("/run/socket")), Path::new("/run/socket"));
        let long = "x".repeat(107);
        assert_eq!(absolute_path(Path::new(&long)), Path::new(&long), "an absolute path would be too long");
    }
}
