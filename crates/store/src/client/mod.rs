//! The client: how a process makes objects, finds them, and holds them.
//!
//! | room | what it holds |
//! |---|---|
//! | [`Client`] | a connection to a store: create, get, publish, delete, list |
//! | [`Draft`] | an object that is being written, until it is sealed |
//! | [`Client::adopt`] | memory that this process has already, as an object |
//! | [`Object`] | a sealed object, held in memory until it is dropped |
//! | [`Pack`], [`PackDraft`], [`PackObject`] | many objects in one piece of memory |
//! | [`Watch`] | being told of what happens to names |
//! | [`Mirror`] | a host view of a buffer on a device |
//!
//! An object whose memory is mapped already is got without a system call: its name is looked up in the index, it is
//! pinned, and that is all. So it is got also while there is no server.
//!
//! A store whose keeper and server were both killed cannot say that it has ended. So every tenth of a second, at most,
//! such a call looks at the connection; and once any call has found out, all of them say [`Error::Disconnected`]. What
//! is held stays.

mod adopt;
mod connection;
mod core;
mod draft;
mod inherit;
mod memory;
mod mirror;
mod object;
mod pack;
mod pulse;
mod watch;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use wholemem_hal::{Backend, Device};
use wholemem_os::Deadline;

use self::core::Core;
use crate::id::State;
use crate::protocol::{Answer, Ask, Label, SMALL, Status, check_name};
use crate::{Error, ObjectId, Refusal, Result};

pub use draft::{Draft, Sealed, Sealing, Unsealed};
pub use mirror::Mirror;
pub use object::Object;
pub use pack::{Pack, PackDraft, PackMember, PackObject};
pub use watch::Watch;

/// How much later than a deadline an answer may come that says that it has passed: from a server that is busy, or just
/// being replaced.
const GRACE: Duration = Duration::from_secs(5);

/// A connection to a store.
///
/// Clones are the same connection, and threads may share it. It goes when the last clone and the last object it gave
/// have gone. A process that was forked has no use for it, and asks for its own; the objects that its parent held are held
/// for it too, until it exits.
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

/// Clients are equal if they are the same connection.
impl PartialEq for Client {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.core, &other.core)
    }
}

impl Eq for Client {}

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

impl Client {
    /// How long an answer is waited for, where nothing else is said. Servers answer at once or not at all.
    pub const PATIENCE: Duration = Duration::from_secs(60);

    /// Connects to the store that is served at a socket.
    ///
    /// # Errors
    /// [`Error::NotServed`]; [`Error::Socket`]; [`Refusal::OtherProtocol`].
    pub fn connect(path: impl AsRef<Path>) -> Result<Self> {
        Self::connect_with(path, None)
    }

    /// The same, with a backend of whose devices objects may be. Without one, CUDA is started when the first object on a
    /// device is met.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn connect_with(path: impl AsRef<Path>, devices: Option<Backend>) -> Result<Self> {
        let core = Core::connect(path.as_ref(), devices, Deadline::after(Self::PATIENCE))?;
        let core = Arc::new(core);
        inherit::add(&core)?;
        Ok(Self { core, wait: Duration::ZERO })
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
    /// [`Refusal::OverQuota`], [`Refusal::NameTooLong`], [`Refusal::NoMemory`]; [`Refusal::NameTaken`] for the name of
    /// another user's object.
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
        self.create_described_on(device, name, &[], len)
    }

    /// The same, with what its users are told of it: up to 216 bytes.
    ///
    /// # Errors
    /// As [`Client::create_on`]; [`Refusal::MetaTooLong`].
    pub fn create_described_on(&self, device: &Device, name: &str, meta: &[u8], len: usize) -> Result<Draft> {
        let place = self.core.maps.place(device)?;
        Draft::create(&self.core, label(name, meta), len, place, self.wait)
    }

    /// Begins a pack: many objects in one piece of memory, sealed and found together or each by its name.
    ///
    /// # Errors
    /// As [`Client::create`]; [`Refusal::TooManyMembers`]; [`Refusal::Malformed`] when two of its objects have one name.
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
        Ok(draft.seal()?)
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
        self.core.get_asked(name, Deadline::NOW, Deadline::after(Self::PATIENCE))
    }

    /// The object that has a name now, if this process has its memory mapped already. Nobody is asked, and nothing waits:
    /// this is what [`Client::get`] does first.
    ///
    /// # Errors
    /// [`Error::TooManyPins`]; [`Error::Disconnected`] when the store has ended.
    #[inline]
    pub fn get_mapped(&self, name: &str) -> Result<Option<Object>> {
        self.core.check()?;
        match self.core.pin_named(name)? {
            Some((held, location)) => match self.core.maps.known(location.allocation) {
                Some(mapping) => Object::new(held, location, mapping).map(Some),
                None => Ok(None),
            },
            None => Ok(None),
        }
    }

    /// The object that has a name, now or before the deadline.
    ///
    /// # Errors
    /// [`Refusal::NoSuchName`] when nobody had it in time; [`Error::TimedOut`] when no server said so, a few seconds
    /// later; [`Error::TooManyPins`].
    pub fn get_within(&self, name: &str, deadline: Deadline) -> Result<Object> {
        self.core.check()?;
        if let Some(object) = self.core.get_known(name)? {
            return Ok(object);
        }
        let left = deadline.remaining();
        let patience = left.map_or(Deadline::NEVER, |left| Deadline::after(left.saturating_add(GRACE)));
        match self.core.get_asked(name, Deadline::NOW, patience) {
            Err(Error::Refused(Refusal::NoSuchName { .. })) if !deadline.has_passed() => {}
            outcome => return outcome,
        }
        self.core.get_awaited(name, deadline, patience)
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
        self.get(name)?.into_pack()
    }

    /// Whether this connection, or a clone of it, gave an object: an id means nothing to another store.
    #[must_use]
    pub fn gave(&self, object: &Object) -> bool {
        Arc::ptr_eq(&self.core, object.core())
    }

    /// Gives a sealed object one more name. If another object had it, that one is deleted: readers keep theirs.
    ///
    /// # Errors
    /// [`Refusal::NoSuchObject`], [`Refusal::NameTooLong`], [`Refusal::NameTaken`]; [`Error::EmptyName`].
    #[doc(alias = "PutName")]
    pub fn publish(&self, name: &str, object: ObjectId) -> Result<Sealed> {
        self.publish_described(name, &[], object)
    }

    /// The same, with what users of the object are told of it under that name: up to 216 bytes.
    ///
    /// # Errors
    /// As [`Client::publish`]; [`Refusal::MetaTooLong`].
    pub fn publish_described(&self, name: &str, meta: &[u8], object: ObjectId) -> Result<Sealed> {
        if name.is_empty() {
            return Err(Error::EmptyName);
        }
        let label = label(name, meta);
        label.check()?;
        self.core.request_sealed(Ask::Publish { label, object, part: None }, &[])
    }

    /// Deletes an object: it is found no more, and its memory goes with the last who holds it. The first object of a pack
    /// takes all others along.
    ///
    /// # Errors
    /// [`Refusal::NoSuchObject`], [`Refusal::NotYours`]; [`Refusal::NotSealed`] for a draft, unless this is the server's user.
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
        Ok(self.entries(prefix, State::Sealed))
    }

    /// Lists drafts, by the names they will have: objects that were created and not sealed yet. A pack is listed once, by
    /// its first object. No server is asked.
    ///
    /// A draft belongs to the connection that created it, and is deleted when that connection's process exits. The user who
    /// runs the server can delete it before, by [`Client::delete`]; its writer's `seal` then fails.
    ///
    /// # Errors
    /// [`Error::Forked`]; [`Error::Disconnected`].
    pub fn drafts(&self, prefix: &str) -> Result<Vec<Entry>> {
        self.core.check()?;
        let mut drafts = self.entries(prefix, State::Created);
        drafts.retain(|entry| entry.pack.is_none_or(|first| first == entry.id));
        Ok(drafts)
    }

    /// The objects in a state whose names begin so, by name.
    fn entries(&self, prefix: &str, state: State) -> Vec<Entry> {
        let objects = self.core.index.objects().filter(|(_, found, _)| *found == state);
        let named = objects.filter(|(_, _, record)| record.name.starts_with(prefix));
        let mut entries: Vec<_> = named.filter_map(|(id, _, record)| self.core.entry(id, record)).collect();
        entries.sort_by(|a, b| (&a.name, a.id).cmp(&(&b.name, b.id)));
        entries
    }

    /// What there is to know of the object that has a name now. It is neither held nor mapped.
    ///
    /// # Errors
    /// [`Refusal::NoSuchName`]; [`Error::Disconnected`] when the store has ended.
    pub fn stat(&self, name: &str) -> Result<Entry> {
        self.core.check()?;
        self.core.look_up(name)
    }

    /// Begins to be told of what happens to names that begin so.
    ///
    /// # Errors
    /// As [`Client::connect`]; [`Error::Disconnected`] when the store has ended.
    pub fn watch(&self, prefix: &str) -> Result<Watch> {
        self.core.check()?;
        check_name(prefix)?;
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

fn label(name: &str, meta: &[u8]) -> Label {
    Label { name: name.to_owned(), meta: meta.to_vec() }
}

fn unexpected() -> Error {
    Error::Protocol { rule: "an answer fits its request" }
}
