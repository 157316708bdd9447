//! The client: how a process makes objects, finds them, and holds them.
//!
//! | room | what it holds |
//! |---|---|
//! | [`Client`] | a connection to a store: create, get, publish, delete, list |
//! | [`Draft`] | an object that is being written, until it is sealed |
//! | [`Object`] | a sealed object, held in memory until it is dropped |
//! | [`Pack`], [`PackDraft`], [`PackObject`] | many objects in one piece of memory |
//! | [`Watch`] | being told of what happens to names |
//! | [`Mirror`] | a host view of a buffer on a device |
//!
//! An object whose memory is mapped already is got without a system call: its name is looked up in the index, it is
//! pinned, and that is all. So it is got also while there is no server.

mod draft;
mod memory;
mod mirror;
mod object;
mod pack;
mod watch;
mod wire;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use wholemem_hal::{Backend, Device, Mapping};
use wholemem_os::vm::Protection;
use wholemem_os::{Deadline, ForkEpoch, Memfd, SharedMap};

use self::memory::Maps;
use self::wire::{Greeting, Wire};
use crate::cells::MappedCells;
use crate::id::State;
use crate::index::{Index, Record};
use crate::pin::{PINS_LEN, PinPage, Pinned};
use crate::protocol::{Answer, Ask, Label, SMALL, Status};
use crate::{Error, ObjectId, Refusal, Result};

pub use draft::{Draft, Sealed, Sealing};
pub use mirror::Mirror;
pub use object::Object;
pub use pack::{Pack, PackDraft, PackMember, PackObject};
pub use watch::Watch;

/// How often a name that flips under the reader's eyes is looked up before the server is asked.
const TRIES: usize = 8;

/// A connection to a store.
///
/// Clones are the same connection, and threads may share it. It goes when the last clone and the last object it gave
/// have gone. A process that was forked has no use for it, and asks for its own.
///
/// ```no_run
/// use wholemem_store::Client;
///
/// let client = Client::connect("/run/user/1000/wholemem.sock")?;
/// client.put("greeting", b"hello")?;
///
/// let object = client.get("greeting")?;
/// assert_eq!(object.to_vec()?, b"hello");
/// # Ok::<(), wholemem_store::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Client {
    core: Arc<Core>,
    /// How long objects that are created wait for room.
    wait: Duration,
}

/// What there is to know of an object without holding it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Entry {
    /// Its id.
    pub id: ObjectId,
    /// Its name; empty for an object that has none.
    pub name: String,
    /// What its maker says of it.
    pub meta: Vec<u8>,
    /// Its length in bytes.
    pub len: usize,
    /// Which object of its name it is.
    pub version: u64,
    /// Who made it.
    pub owner: u32,
    /// When it was made, in milliseconds of the Unix epoch.
    pub created: u64,
    /// Whether it is in host memory.
    pub is_cpu: bool,
    /// The first object of the pack it belongs to, which may be itself.
    pub pack: Option<ObjectId>,
}

#[derive(Debug)]
pub(crate) struct Core {
    path: PathBuf,
    index: Index<MappedCells>,
    pins: PinPage<MappedCells>,
    maps: Maps,
    /// How many allocations had gone when maps were last looked at.
    seen_gone: AtomicU64,
    wire: Mutex<Wire>,
    /// Kicks that could not be said while another thread was asking something.
    kicks: Mutex<Vec<ObjectId>>,
    epoch: ForkEpoch,
    /// Given to connections that this one opens besides.
    devices: Option<Backend>,
}

impl Client {
    /// How long an answer is waited for, where nothing else is said. Servers answer at once or not at all.
    pub const PATIENCE: Duration = Duration::from_secs(60);

    /// Connects to the store that is served at a socket.
    ///
    /// # Errors
    /// [`Error::NotServed`]; [`Refusal::OtherProtocol`].
    pub fn connect(path: impl AsRef<Path>) -> Result<Self> {
        Self::connect_with(path, None)
    }

    /// The same, with a backend of whose devices objects may be. Without one, CUDA is started when the first object on a
    /// device is met.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn connect_with(path: impl AsRef<Path>, devices: Option<Backend>) -> Result<Self> {
        let (path, epoch) = (path.as_ref().to_owned(), ForkEpoch::current()?);
        let (wire, greeting) = Wire::connect(&path, Deadline::after(Self::PATIENCE))?;
        let Greeting { index, index_len, pins, devices: uuids } = greeting;
        let index = SharedMap::create(&Memfd::import(index, index_len)?, Protection::Read)?;
        let pins = SharedMap::create(&Memfd::import(pins, PINS_LEN)?, Protection::ReadWrite)?;
        let core = Core {
            path,
            index: Index::open(MappedCells::new(index))?,
            pins: PinPage::new(MappedCells::new(pins)),
            maps: Maps::new(uuids, devices.clone())?,
            seen_gone: AtomicU64::new(0),
            wire: Mutex::new(wire),
            kicks: Mutex::default(),
            epoch,
            devices,
        };
        Ok(Self { core: Arc::new(core), wait: Duration::ZERO })
    }

    /// The same connection, through which creating something waits so long for others to delete something, where the quota
    /// is full. By default it does not wait.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # let client = wholemem_store::Client::connect("socket")?;
    /// let patient = client.waiting_for_room(Duration::from_secs(10));
    /// let draft = patient.create("weights", 16 << 30)?;
    /// # Ok::<(), wholemem_store::Error>(())
    /// ```
    #[must_use]
    pub fn waiting_for_room(&self, wait: Duration) -> Self {
        Self { core: Arc::clone(&self.core), wait }
    }

    /// Begins an object in host memory. An empty name makes one that is known by its id alone.
    ///
    /// # Errors
    /// [`Refusal::OverQuota`], [`Refusal::NameTooLong`], [`Refusal::NoMemory`].
    #[doc(alias = "CreateBuffer")]
    pub fn create(&self, name: &str, len: usize) -> Result<Draft> {
        self.create_described(name, &[], len)
    }

    /// The same, with what its users are told of it: up to 216 bytes.
    ///
    /// # Errors
    /// As [`Client::create`]; [`Refusal::MetaTooLong`].
    pub fn create_described(&self, name: &str, meta: &[u8], len: usize) -> Result<Draft> {
        Draft::create(&self.core, label(name, meta), len, 0, self.wait)
    }

    /// Begins an object in the memory of a device.
    ///
    /// # Errors
    /// As [`Client::create`]; [`Error::DeviceHidden`] for a device that the server has not.
    #[doc(alias = "CreateGPUBuffer")]
    #[doc(alias = "create_gpu_buffer")]
    pub fn create_on(&self, device: &Device, name: &str, len: usize) -> Result<Draft> {
        let place = self.core.maps.place(device)?;
        Draft::create(&self.core, label(name, &[]), len, place, self.wait)
    }

    /// Begins a pack: many objects in one piece of memory, sealed and found together or each by its name.
    ///
    /// # Errors
    /// As [`Client::create`]; [`Refusal::TooManyMembers`].
    pub fn create_pack(&self, pack: &Pack) -> Result<PackDraft> {
        PackDraft::create(&self.core, pack, self.wait)
    }

    /// Makes an object of these bytes in host memory, sealed.
    ///
    /// # Errors
    /// As [`Client::create`].
    pub fn put(&self, name: &str, bytes: &[u8]) -> Result<Sealed> {
        if (bytes.len() as u64) < SMALL {
            let label = label(name, &[]);
            label.check()?;
            let ask = Ask::Create { label, len: bytes.len() as u64, members: Vec::new(), place: 0 };
            return self
                .core
                .with_room(bytes.len(), 0, self.wait, || self.core.request_sealed(ask.clone(), bytes));
        }
        let mut draft = self.create(name, bytes.len())?;
        draft.write_at(0, bytes)?;
        draft.seal()
    }

    /// The object that has a name now.
    ///
    /// # Errors
    /// [`Refusal::NoSuchName`]; [`Error::TooManyPins`]; [`Error::Disconnected`] when the store has ended.
    #[inline]
    pub fn get(&self, name: &str) -> Result<Object> {
        self.core.check()?;
        if let Some(object) = self.core.get_known(name)? {
            return Ok(object);
        }
        self.core.get_asked(name, Deadline::NOW)
    }

    /// The object that has a name, now or before the deadline.
    ///
    /// # Errors
    /// [`Refusal::NoSuchName`] when nobody had it in time; [`Error::TooManyPins`].
    pub fn get_within(&self, name: &str, deadline: Deadline) -> Result<Object> {
        self.core.check_fork()?;
        match self.get(name) {
            Err(Error::Refused(Refusal::NoSuchName { .. })) if !deadline.has_passed() => {}
            outcome => return outcome,
        }
        // On a connection of its own, so that other threads need not wait for their turn meanwhile.
        let aside = Self::connect_with(&self.core.path, self.core.devices.clone())?;
        aside.core.find(name, deadline)?;
        self.core.get_asked(name, deadline)
    }

    /// The object with an id.
    ///
    /// # Errors
    /// [`Refusal::NoSuchObject`]; [`Error::TooManyPins`].
    #[doc(alias = "GetGPUBuffer")]
    #[doc(alias = "get_gpu_buffer")]
    pub fn get_by_id(&self, id: ObjectId) -> Result<Object> {
        self.core.check()?;
        self.core.pin(id)?.ok_or_else(|| Refusal::NoSuchObject { object: id }.into())
    }

    /// The objects with these names, in their order.
    ///
    /// # Errors
    /// As [`Client::get`], for the first that cannot be had.
    #[doc(alias = "GetGPUBuffers")]
    #[doc(alias = "get_gpu_buffers")]
    pub fn get_all<'a>(&self, names: impl IntoIterator<Item = &'a str>) -> Result<Vec<Object>> {
        names.into_iter().map(|name| self.get(name)).collect()
    }

    /// All objects of a pack, held by one pin.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn get_pack(&self, name: &str) -> Result<PackObject> {
        PackObject::open(self.get(name)?)
    }

    /// Gives a sealed object one more name. If another object had it, that one is deleted: readers keep theirs.
    ///
    /// # Errors
    /// [`Refusal::NoSuchObject`], [`Refusal::NameTooLong`].
    #[doc(alias = "PutName")]
    pub fn publish(&self, name: &str, object: ObjectId) -> Result<Sealed> {
        self.core.request_sealed(Ask::Publish { label: label(name, &[]), object }, &[])
    }

    /// Deletes an object: it is found no more, and its memory goes with the last who holds it. The first object of a pack
    /// takes all others along.
    ///
    /// # Errors
    /// [`Refusal::NoSuchObject`], [`Refusal::NotYours`].
    #[doc(alias = "DelData")]
    #[doc(alias = "del_data")]
    pub fn delete(&self, id: ObjectId) -> Result<()> {
        self.core.request(Ask::Delete { object: id }, &[], Deadline::after(Self::PATIENCE))?;
        self.core.trim();
        Ok(())
    }

    /// The objects there are whose names begin so, by name. No server is asked.
    ///
    /// # Errors
    /// [`Error::Forked`]; [`Error::Disconnected`].
    pub fn list(&self, prefix: &str) -> Result<Vec<Entry>> {
        self.core.check()?;
        let sealed = self.core.index.objects().filter(|(_, state, _)| *state == State::Sealed);
        let named = sealed.filter(|(_, _, record)| record.name.starts_with(prefix));
        let mut entries: Vec<_> = named.map(|(id, _, record)| self.core.entry(id, record)).collect();
        entries.sort_by(|a, b| (&a.name, a.id).cmp(&(&b.name, b.id)));
        Ok(entries)
    }

    /// What there is to know of the object that has a name now.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn stat(&self, name: &str) -> Result<Entry> {
        let object = self.get(name)?;
        object.entry()
    }

    /// Begins to be told of what happens to names that begin so.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn watch(&self, prefix: &str) -> Result<Watch> {
        Watch::open(&self.core.path, prefix)
    }

    /// How full the store is.
    ///
    /// # Errors
    /// [`Error::Disconnected`].
    pub fn status(&self) -> Result<Status> {
        match self.core.request(Ask::Status, &[], Deadline::after(Self::PATIENCE))? {
            (Answer::Status(status), _) => Ok(status),
            _ => Err(unexpected()),
        }
    }

    /// Lets go maps of memory whose objects are gone. Any other call does the same; a process that makes none for long may
    /// want to.
    pub fn trim(&self) {
        if self.core.epoch.is_current() {
            self.core.trim();
        }
    }
}

impl Core {
    pub(super) fn check_fork(&self) -> Result<()> {
        if self.epoch.is_current() { Ok(()) } else { Err(Error::Forked) }
    }

    /// Whether anything can be got at all; and lets go maps of memory that has gone since the last time.
    #[inline]
    fn check(&self) -> Result<()> {
        self.check_fork()?;
        if self.index.is_superseded() {
            return Err(Error::Disconnected);
        }
        self.trim();
        Ok(())
    }

    /// Lets go maps of memory that is no more, if any has gone since the last time.
    #[inline]
    fn trim(&self) {
        let gone = self.index.gone();
        if self.seen_gone.load(Ordering::Relaxed) != gone {
            // Before the look: what goes meanwhile is found the next time.
            self.seen_gone.store(gone, Ordering::Relaxed);
            self.maps.trim(&self.index);
        }
    }

    /// Looks a name up without asking anybody.
    fn get_known(self: &Arc<Self>, name: &str) -> Result<Option<Object>> {
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
    fn get_asked(self: &Arc<Self>, name: &str, deadline: Deadline) -> Result<Object> {
        loop {
            let id = self.find(name, deadline)?;
            if let Some(object) = self.pin(id)? {
                return Ok(object);
            }
        }
    }

    fn find(&self, name: &str, deadline: Deadline) -> Result<ObjectId> {
        loop {
            // Waiting for ever is waiting for long, again and again.
            let left = deadline.remaining().unwrap_or(Client::PATIENCE).min(Client::PATIENCE);
            let wait = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
            let ask = Ask::Find { name: name.to_owned(), wait };
            match self.request(ask, &[], Deadline::after(left + Client::PATIENCE)) {
                Ok((Answer::Found { object }, _)) => return Ok(object),
                Ok(_) => return Err(unexpected()),
                Err(Error::Refused(Refusal::NoSuchName { .. })) if !deadline.has_passed() => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Pins an object and maps its memory; `None` if it is gone.
    fn pin(self: &Arc<Self>, id: ObjectId) -> Result<Option<Object>> {
        match self.pins.pin(&self.index, id) {
            Pinned::Held(pin_at) => self.hold(id, pin_at).map(Some),
            Pinned::Missed { kick } => {
                self.kick_if(kick, id);
                Ok(None)
            }
            Pinned::NoneLeft => Err(too_many_pins()),
        }
    }

    /// What a pin holds, with its memory.
    fn hold(self: &Arc<Self>, id: ObjectId, pin_at: usize) -> Result<Object> {
        let held = object::Hold::new(self, id, pin_at);
        let location = self.index.location(id).ok_or(Error::Protocol { rule: "an object has a place" })?;
        let mapping = match self.maps.known(location.allocation) {
            Some(mapping) => mapping,
            None => self.fetch(id)?,
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
            self.kicks.lock().unwrap_or_else(PoisonError::into_inner).push(id);
            match self.wire.try_lock() {
                Ok(mut wire) => self.say_kicks(&mut wire),
                Err(TryLockError::Poisoned(wire)) => self.say_kicks(&mut wire.into_inner()),
                Err(TryLockError::WouldBlock) => {}
            }
        }
    }

    fn say_kicks(&self, wire: &mut Wire) {
        let kicks = std::mem::take(&mut *self.kicks.lock().unwrap_or_else(PoisonError::into_inner));
        for id in kicks {
            wire.kick(id);
        }
    }

    fn wire(&self) -> MutexGuard<'_, Wire> {
        self.wire.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn request(
        &self,
        ask: Ask,
        payload: &[u8],
        deadline: Deadline,
    ) -> Result<(Answer, Vec<std::os::fd::OwnedFd>)> {
        self.request_with_id(ask, payload, deadline).map(|(_, answer, fds)| (answer, fds))
    }

    /// Asks for what is answered by a sealed object.
    pub(super) fn request_sealed(&self, ask: Ask, payload: &[u8]) -> Result<Sealed> {
        match self.request(ask, payload, Deadline::after(Client::PATIENCE))? {
            (Answer::Sealed { object, version }, _) => Ok(Sealed { id: object, version }),
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
            let (mut aside, _) = Wire::connect(&self.path, Deadline::after(Client::PATIENCE))?;
            let left = deadline.remaining().unwrap_or(Client::PATIENCE);
            let wait = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
            let ask = Ask::AwaitRoom { len: len as u64, place, wait };
            let told = aside.request(ask, &[], Deadline::after(left + Client::PATIENCE));
            aside.tell(Ask::Goodbye);
            told?;
        }
    }

    /// The same as [`Core::request`], with the id of the request.
    pub(super) fn request_with_id(
        &self,
        ask: Ask,
        payload: &[u8],
        deadline: Deadline,
    ) -> Result<(u64, Answer, Vec<std::os::fd::OwnedFd>)> {
        self.check_fork()?;
        let mut wire = self.wire();
        let id = wire.last_id() + 1;
        let outcome = wire.request(ask, payload, deadline);
        self.say_kicks(&mut wire);
        drop(wire);
        self.trim();
        outcome.map(|(answer, fds)| (id, answer, fds))
    }

    fn entry(&self, id: ObjectId, record: Record) -> Entry {
        let place = self.index.allocation(record.region.allocation).map_or(0, |record| record.place);
        Entry {
            id,
            name: record.name,
            meta: record.meta,
            len: usize::try_from(record.len).unwrap_or(usize::MAX),
            version: record.version,
            owner: record.owner,
            created: record.created,
            is_cpu: place == 0,
            pack: record.pack,
        }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        if self.epoch.is_current() {
            let mut wire = self.wire();
            wire.tell(Ask::Goodbye);
        }
    }
}

fn label(name: &str, meta: &[u8]) -> Label {
    Label { name: name.to_owned(), meta: meta.to_vec() }
}

fn unexpected() -> Error {
    Error::Protocol { rule: "an answer fits its request" }
}

fn too_many_pins() -> Error {
    Error::TooManyPins { limit: PINS_LEN / size_of::<u64>() - 1 }
}
