//! What clones of a client share: the connection, the index, the pins, and the memory that is mapped.

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

use super::connection::{Connection, Greeting};
use super::draft::Sealed;
use super::memory::Maps;
use super::object::{Hold, Object};
use super::pulse::Pulse;
use super::{Client, Entry, unexpected};
use crate::cells::MappedCells;
use crate::convert::to_usize;
use crate::id::State;
use crate::index::{Index, Location, Record};
use crate::pin::{MAX_PINS, PINS_LEN, PinPage, Pinned};
use crate::protocol::{Answer, Ask, check_name};
use crate::{Error, ObjectId, Refusal, Result};

/// The variable that has faults in objects named on standard error, where it is `1`.
const FAULT_HANDLER: &str = "WHOLEMEM_FAULT_HANDLER";

/// How often a name that flips under the reader's eyes is looked up before the server is asked.
const TRIES: usize = 8;

/// A connection, and what is known through it.
#[derive(Debug)]
pub(crate) struct Core {
    pub(super) path: PathBuf,
    pub(super) index: Index<MappedCells>,
    /// Which file the index is: no other store has the same.
    pub(super) identity: FileIdentity,
    pub(super) pins: PinPage<MappedCells>,
    pub(super) maps: Maps,
    /// How many allocations had gone when maps were last looked at.
    seen_gone: AtomicU64,
    connection: Mutex<Connection>,
    pulse: Pulse,
    /// What has no answer, and could not be said while another thread was asking something. So nothing waits to be dropped.
    unsaid: Mutex<Vec<Ask>>,
    pub(super) epoch: ForkEpoch,
}

impl Core {
    pub(super) fn connect(path: &Path, devices: Option<Backend>, deadline: Deadline) -> Result<Self> {
        let epoch = ForkEpoch::current()?;
        if std::env::var_os(FAULT_HANDLER).is_some_and(|value| value == "1") {
            access_fault::install()?;
        }
        let (connection, greeting) = Connection::connect(path, deadline)?;
        let Greeting { index, index_len, pins, devices: uuids, .. } = greeting;
        let identity = memfd::identity(index.as_fd())?;
        let index = SharedMap::create(&Memfd::import(index, index_len)?, Protection::Read)?;
        let pins = SharedMap::create(&Memfd::import(pins, PINS_LEN)?, Protection::ReadWrite)?;
        Ok(Self {
            path: lasting(path),
            index: Index::open(MappedCells::new(index))?,
            identity,
            pins: PinPage::new(MappedCells::new(pins)),
            maps: Maps::new(uuids, devices)?,
            seen_gone: AtomicU64::new(0),
            connection: Mutex::new(connection),
            pulse: Pulse::default(),
            unsaid: Mutex::default(),
            epoch,
        })
    }

    pub(super) fn check_fork(&self) -> Result<()> {
        if self.epoch.is_current() { Ok(()) } else { Err(Error::Forked) }
    }

    /// Whether the other end of the connection is closed, as far as that can be seen without waiting: keeper and server are dead.
    pub(super) fn is_at_its_end(&self) -> bool {
        self.pulse.is_lost() || self.connection.try_lock().is_ok_and(|connection| connection.is_closed())
    }

    /// Whether anything can be got at all; and lets go maps of memory that has gone since the last time.
    #[inline]
    pub(super) fn check(&self) -> Result<()> {
        self.check_known()?;
        // A thread that is asking something finds out by itself.
        if self.pulse.feel(|| self.connection.try_lock().is_ok_and(|connection| connection.is_closed())) {
            return Err(Error::Disconnected);
        }
        self.trim();
        Ok(())
    }

    /// Whether anything can be asked, for all that is known.
    #[inline]
    fn check_known(&self) -> Result<()> {
        self.check_fork()?;
        if self.index.is_superseded() || self.pulse.is_lost() { Err(Error::Disconnected) } else { Ok(()) }
    }

    /// Whether the store has ended, for all that is known: then nothing is written over its objects any more. Asks no server.
    pub(super) fn is_over(&self) -> bool {
        let is_closed = || self.connection.try_lock().is_ok_and(|connection| connection.is_closed());
        self.index.is_superseded() || self.pulse.is_lost() || (self.epoch.is_current() && is_closed())
    }

    /// Lets go maps of memory that is no more, if any has gone since the last time.
    #[inline]
    pub(super) fn trim(&self) {
        let gone = self.index.gone();
        if self.seen_gone.load(Ordering::Relaxed) != gone {
            // Before the look: what goes meanwhile is found the next time.
            self.seen_gone.store(gone, Ordering::Relaxed);
            self.maps.trim(&self.index);
        }
    }

    /// Looks a name up without asking anybody but for the memory.
    pub(super) fn get_known(self: &Arc<Self>, name: &str) -> Result<Option<Object>> {
        self.pin_named(name)?.map(|(held, location)| self.with_memory(held, location)).transpose()
    }

    /// Looks a name up without asking anybody, and pins what has it.
    pub(super) fn pin_named(self: &Arc<Self>, name: &str) -> Result<Option<(Hold, Location)>> {
        for _ in 0..TRIES {
            let mut has_moved = false;
            for found in self.index.candidates(name) {
                match self.pins.pin(&self.index, found.id) {
                    Pinned::Held(pin_at) if self.index.is_named(found.id, name) => {
                        return self.hold(found.id, pin_at).map(Some);
                    }
                    Pinned::Held(pin_at) => self.unpin(found.id, pin_at),
                    Pinned::Missed { kick } => {
                        has_moved |= kick;
                        self.kick_if(kick, found.id);
                    }
                    Pinned::NoneLeft => return Err(too_many_pins()),
                }
            }
            if !has_moved {
                break;
            }
        }
        Ok(None)
    }

    /// Asks the server for a name, until what it says can be pinned.
    pub(super) fn get_asked(
        self: &Arc<Self>,
        name: &str,
        until: Deadline,
        patience: Deadline,
    ) -> Result<Object> {
        loop {
            let id = self.find(name, until, patience)?;
            if let Some(object) = self.pin(id)? {
                return Ok(object);
            }
        }
    }

    /// The same, on a connection of its own, so that other threads need not wait for their turn meanwhile.
    pub(super) fn get_awaited(
        self: &Arc<Self>,
        name: &str,
        until: Deadline,
        patience: Deadline,
    ) -> Result<Object> {
        let (mut aside, greeting) = self.connect_again(patience)?;
        drop(greeting);
        loop {
            let id = find(name, until, |ask| aside.request(ask, &[], patience))?;
            if let Some(object) = self.pin(id)? {
                return Ok(object);
            }
        }
    }

    /// One more connection to the same store.
    pub(super) fn connect_again(&self, deadline: Deadline) -> Result<(Connection, Greeting)> {
        let (connection, greeting) = Connection::connect(&self.path, deadline)?;
        // Another store may be served there now.
        let is_same = memfd::identity(greeting.index.as_fd())? == self.identity;
        if is_same { Ok((connection, greeting)) } else { Err(Error::Disconnected) }
    }

    /// Asks the server for a name that is there now or by some moment, and waits for its answer no longer than to another.
    pub(super) fn find(&self, name: &str, until: Deadline, patience: Deadline) -> Result<ObjectId> {
        find(name, until, |ask| self.request(ask, &[], patience))
    }

    /// What there is to know of the object that has a name, without holding it.
    pub(super) fn look_up(&self, name: &str) -> Result<Entry> {
        let named = |id: ObjectId| match self.index.read(id) {
            Some((State::Sealed, record)) if record.name == name => self.entry(id, record),
            _ => None,
        };
        loop {
            let known = self.index.candidates(name).find_map(|found| named(found.id));
            let entry = match known {
                Some(entry) => Some(entry),
                // It may be gone again by now: then another has the name, or none.
                None => named(self.find(name, Deadline::NOW, Deadline::after(Client::PATIENCE))?),
            };
            if let Some(entry) = entry {
                return Ok(entry);
            }
        }
    }

    /// Pins an object and maps its memory; `None` if it is gone.
    pub(super) fn pin(self: &Arc<Self>, id: ObjectId) -> Result<Option<Object>> {
        match self.pins.pin(&self.index, id) {
            Pinned::Held(pin_at) => {
                let (held, location) = self.hold(id, pin_at)?;
                self.with_memory(held, location).map(Some)
            }
            Pinned::Missed { kick } => {
                self.kick_if(kick, id);
                Ok(None)
            }
            Pinned::NoneLeft => Err(too_many_pins()),
        }
    }

    /// What a pin holds, and where it lies.
    fn hold(self: &Arc<Self>, id: ObjectId, pin_at: usize) -> Result<(Hold, Location)> {
        let held = Hold::new(self, id, pin_at);
        let location = self.index.location(id).ok_or(Error::Protocol { rule: "an object has a place" })?;
        Ok((held, location))
    }

    /// What a pin holds, with its memory.
    fn with_memory(&self, held: Hold, location: Location) -> Result<Object> {
        let mapping = match self.maps.known(location.allocation) {
            Some(mapping) => mapping,
            None => self.fetch(held.id())?,
        };
        Object::new(held, location, mapping)
    }

    fn fetch(&self, object: ObjectId) -> Result<Arc<Mapping>> {
        self.trim();
        let answer = self.request(Ask::Fetch { object }, &[], Deadline::after(Client::PATIENCE))?;
        let (Answer::Fetched { memory }, Ok([fd])) = (answer.0, <[_; 1]>::try_from(answer.1)) else {
            return Err(unexpected());
        };
        self.maps.map(&memory, fd)
    }

    pub(super) fn unpin(&self, id: ObjectId, pin_at: usize) {
        // While it is pinned its record says where it is.
        let location = self.index.location(id);
        let kick = self.pins.unpin(&self.index, id, pin_at);
        if kick && let Some(location) = location {
            // Deleted, and let go: its memory goes now, unless others lie there too.
            self.maps.forget(&self.index, location.allocation);
        }
        self.kick_if(kick, id);
    }

    /// Tells the server that a deleted object may be free, now or when another thread has done asking.
    fn kick_if(&self, kick: bool, id: ObjectId) {
        if kick {
            self.tell(Ask::Kick { object: id });
        }
    }

    /// Says what has no answer, now or when another thread has done asking.
    pub(super) fn tell(&self, ask: Ask) {
        self.unsaid.lock().unwrap_or_else(PoisonError::into_inner).push(ask);
        match self.connection.try_lock() {
            Ok(mut connection) => self.say(&mut connection),
            Err(TryLockError::Poisoned(connection)) => self.say(&mut connection.into_inner()),
            Err(TryLockError::WouldBlock) => {}
        }
    }

    fn say(&self, connection: &mut Connection) {
        let unsaid = std::mem::take(&mut *self.unsaid.lock().unwrap_or_else(PoisonError::into_inner));
        for ask in unsaid {
            connection.tell(ask);
        }
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn request(
        &self,
        ask: Ask,
        payload: &[u8],
        deadline: Deadline,
    ) -> Result<(Answer, Vec<OwnedFd>)> {
        self.request_with_id(ask, payload, deadline).map(|(_, answer, fds)| (answer, fds))
    }

    /// Asks for what is answered by a sealed object.
    pub(super) fn request_sealed(&self, ask: Ask, payload: &[u8]) -> Result<Sealed> {
        match self.request(ask, payload, Deadline::after(Client::PATIENCE))? {
            (Answer::Sealed { object, version }, _) => Ok(Sealed { id: object, version }),
            _ => Err(unexpected()),
        }
    }

    /// The same, giving the server a descriptor, which it takes from its own user only.
    pub(super) fn request_adoption(&self, ask: Ask, fd: BorrowedFd<'_>) -> Result<Sealed> {
        self.check_known()?;
        let mut connection = self.connection();
        let user = connection.server_user()?;
        if user != rustix::process::geteuid().as_raw() {
            return Err(Refusal::NotTrusted { user }.into());
        }
        let outcome =
            self.pulse.learn(connection.request_giving(ask, &[], &[fd], Deadline::after(Client::PATIENCE)));
        self.say(&mut connection);
        match outcome?.0 {
            Answer::Sealed { object, version } => Ok(Sealed { id: object, version }),
            _ => Err(unexpected()),
        }
    }

    /// Does what takes memory, and if the quota is full, again when somebody has made room.
    pub(super) fn with_room<T>(
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
            // On a connection of its own, so that other threads may delete something meanwhile.
            let (mut aside, _) = self.connect_again(Deadline::after(Client::PATIENCE))?;
            let left = deadline.remaining().unwrap_or(Duration::MAX);
            let wait = wait_millis(left);
            let patience = Deadline::after(left.saturating_add(Client::PATIENCE));
            let ask = Ask::AwaitRoom { len: len as u64, place, wait };
            aside.request(ask, &[], patience)?;
        }
    }

    /// The same as [`Core::request`], with the id of the request.
    pub(super) fn request_with_id(
        &self,
        ask: Ask,
        payload: &[u8],
        deadline: Deadline,
    ) -> Result<(u64, Answer, Vec<OwnedFd>)> {
        self.check_known()?;
        let mut connection = self.connection();
        let id = connection.last_id() + 1;
        let outcome = self.pulse.learn(connection.request(ask, payload, deadline));
        self.say(&mut connection);
        drop(connection);
        self.trim();
        outcome.map(|(answer, fds)| (id, answer, fds))
    }

    /// What there is to know of an object with this record. `None` if it has been freed since the record was read.
    pub(super) fn entry(&self, id: ObjectId, record: Record) -> Option<Entry> {
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

/// How many milliseconds a request waits. The longest that a request can name is more than half a billion years.
fn wait_millis(left: Duration) -> u64 {
    const LONGEST: u128 = u64::MAX as u128;
    u64::try_from(left.as_millis().min(LONGEST)).expect("it was limited to 64 bits")
}

/// Asks for a name that is there now or by some moment.
fn find(
    name: &str,
    until: Deadline,
    mut request: impl FnMut(Ask) -> Result<(Answer, Vec<OwnedFd>)>,
) -> Result<ObjectId> {
    check_name(name)?;
    loop {
        // Waiting for ever is waiting for long, again and again.
        let left = until.remaining().unwrap_or(Client::PATIENCE).min(Client::PATIENCE);
        let wait = wait_millis(left);
        match request(Ask::Find { name: name.to_owned(), wait }) {
            Ok((Answer::Found { object }, _)) => return Ok(object),
            Ok(_) => return Err(unexpected()),
            Err(Error::Refused(Refusal::NoSuchName { .. })) if !until.has_passed() => {}
            Err(error) => return Err(error),
        }
    }
}

/// The path of a socket as it is found also from another working folder, where the kernel takes a path of that length.
fn lasting(path: &Path) -> PathBuf {
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
    fn the_path_of_a_socket_is_found_also_from_another_folder_where_it_is_short_enough() {
        let here = std::env::current_dir().unwrap();
        assert_eq!(lasting(Path::new("socket")), here.join("socket"));
        assert_eq!(lasting(Path::new("/run/socket")), Path::new("/run/socket"));
        let long = "x".repeat(107);
        assert_eq!(lasting(Path::new(&long)), Path::new(&long), "an absolute path would be too long");
    }
}
