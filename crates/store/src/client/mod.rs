//! The client of a store, with which a process creates, finds and holds objects.
//!
//! | item | purpose |
//! |---|---|
//! | [`Client`] | a connection to a store: create, get, publish, delete, list |
//! | [`Draft`] | an object that is being written and not sealed yet |
//! | [`Client::adopt`] | creates an object from existing memory of this process |
//! | [`Object`] | a sealed object, pinned until it is dropped |
//! | [`Pack`], [`PackDraft`], [`PackObject`] | several objects in one allocation |
//! | [`Watch`] | a stream of events of names |
//! | [`Mirror`] | a host copy of device memory |
//!
//! An object whose memory is already mapped is obtained without a system call: its name is looked up in the index, and it is
//! pinned. This also works while no server runs.
//!
//! If the keeper and the server are both killed, they cannot mark the index as superseded. So such a call checks the connection
//! at most every 100 ms. Once a call has found the connection closed, all calls return [`Error::Disconnected`]. Objects that are
//! held stay valid.

mod adopt;
mod connection;
mod connection_probe;
mod core;
mod draft;
mod inherit;
mod memory;
mod mirror;
mod object;
mod pack;
mod watch;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use wholemem_hal::{Backend, Device};
use wholemem_os::Deadline;

use self::core::ClientCore;
use crate::id::SlotState;
use crate::protocol::{Answer, Label, MAX_COUNTED, RequestKind, SMALL, Statistics, Status, check_name};
use crate::{Error, ObjectId, Refusal, Result};

pub use draft::{Draft, PendingSeal, SealError, Sealed};
pub use mirror::Mirror;
pub use object::Object;
pub use pack::{Pack, PackDraft, PackMember, PackObject};
pub use watch::Watch;

/// The time for which the client waits for an answer after the deadline of a request, because the server may be busy or being
/// replaced.
const GRACE: Duration = Duration::from_secs(5);

/// A connection of a process to an object store.
///
/// Clones share the connection, and threads may share a client. The connection closes when the last clone and the last object
/// obtained from it are dropped. A forked child cannot use an inherited client and has to connect by itself; objects that the
/// parent held at the fork stay pinned for the child until it exits.
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
    core: Arc<ClientCore>,
    /// The time for which a request to create an object waits for free space.
    wait: Duration,
}

/// Clients are equal if they share one connection.
impl PartialEq for Client {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.core, &other.core)
    }
}

impl Eq for Client {}

/// The description of an object: its id, name, metadata, length and origin, but not its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Entry {
    /// The id of the object in the store.
    pub id: ObjectId,
    /// The name of the object; empty if it has none.
    pub name: String,
    /// The metadata that the creator of the object attached to it.
    pub meta: Vec<u8>,
    /// The length of the object in bytes.
    pub len: usize,
    /// The version of the object, one more than that of the object that had the same name before.
    pub version: u64,
    /// The user id of the creator of the object.
    pub owner: u32,
    /// The time at which the object was created, in milliseconds since the Unix epoch.
    pub created: u64,
    /// True if the object is in host memory.
    pub is_cpu: bool,
    /// The first object of the pack that contains this object, which may be this object itself; `None` outside a pack.
    pub pack: Option<ObjectId>,
}

impl Client {
    /// The time for which a client waits for an answer of the server if the caller gives no deadline.
    pub const TIMEOUT: Duration = Duration::from_secs(60);

    /// Connects to the store that is served at a socket.
    ///
    /// # Errors
    /// [`Error::NotServed`]; [`Error::Socket`]; [`Refusal::OtherProtocol`].
    pub fn connect(path: impl AsRef<Path>) -> Result<Self> {
        Self::connect_with(path, None)
    }

    /// Connects to the store that is served at a socket, and uses the given backend for objects in device memory. By default, the
    /// CUDA backend is opened for the first such object.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn connect_with(path: impl AsRef<Path>, devices: Option<Backend>) -> Result<Self> {
        let core = ClientCore::connect(path.as_ref(), devices, Deadline::after(Self::TIMEOUT))?;
        let core = Arc::new(core);
        inherit::add(&core)?;
        Ok(Self { core, wait: Duration::ZERO })
    }

    /// Returns a client of the same connection whose requests to create an object wait up to `wait` for free space if the memory
    /// quota is reached. By default, these requests do not wait.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # let client = wholemem_store::Client::connect("socket")?;
    /// let waiting = client.waiting_for_space(Duration::from_secs(10));
    /// let draft = waiting.create("weights", 16 << 30)?;
    /// # Ok::<(), wholemem_store::Error>(())
    /// ```
    #[must_use]
    pub fn waiting_for_space(&self, wait: Duration) -> Self {
        Self { core: Arc::clone(&self.core), wait }
    }

    /// Creates an object in host memory, which the caller writes and seals. An object with an empty name is found by its id only.
    ///
    /// # Errors
    /// [`Refusal::OverQuota`], [`Refusal::NameTooLong`], [`Refusal::NoMemory`]; [`Refusal::NameTaken`] if an object of another
    /// user has the name.
    #[doc(alias = "CreateBuffer")]
    pub fn create(&self, name: &str, len: usize) -> Result<Draft> {
        self.create_with_meta(name, &[], len)
    }

    /// Creates an object in host memory, with up to 216 bytes of metadata.
    ///
    /// # Errors
    /// As [`Client::create`]; [`Refusal::MetaTooLong`].
    pub fn create_with_meta(&self, name: &str, meta: &[u8], len: usize) -> Result<Draft> {
        Draft::create(&self.core, label(name, meta), len, 0, self.wait)
    }

    /// Creates an object in device memory, which the caller writes and seals.
    ///
    /// # Errors
    /// As [`Client::create`]; [`Error::DeviceHidden`] if the server does not have the device.
    #[doc(alias = "CreateGPUBuffer")]
    #[doc(alias = "create_gpu_buffer")]
    pub fn create_on(&self, device: &Device, name: &str, len: usize) -> Result<Draft> {
        self.create_on_with_meta(device, name, &[], len)
    }

    /// Creates an object in device memory, with up to 216 bytes of metadata.
    ///
    /// # Errors
    /// As [`Client::create_on`]; [`Refusal::MetaTooLong`].
    pub fn create_on_with_meta(&self, device: &Device, name: &str, meta: &[u8], len: usize) -> Result<Draft> {
        let place = self.core.maps.place(device)?;
        Draft::create(&self.core, label(name, meta), len, place, self.wait)
    }

    /// Creates a pack: several objects in one allocation, which are sealed together and found together or each by its name.
    ///
    /// # Errors
    /// As [`Client::create`]; [`Refusal::TooManyMembers`]; [`Refusal::Malformed`] if two objects of the pack have the same name.
    pub fn create_pack(&self, pack: &Pack) -> Result<PackDraft> {
        PackDraft::create(&self.core, pack, self.wait)
    }

    /// Creates and seals an object in host memory with the given bytes.
    ///
    /// # Errors
    /// As [`Client::create`].
    pub fn put(&self, name: &str, bytes: &[u8]) -> Result<Sealed> {
        if (bytes.len() as u64) < SMALL {
            let label = label(name, &[]);
            label.check()?;
            let kind = RequestKind::Create { label, len: bytes.len() as u64, members: Vec::new(), place: 0 };
            return self
                .core
                .with_space(bytes.len(), 0, self.wait, || self.core.request_sealed(kind.clone(), bytes));
        }
        let mut draft = self.create(name, bytes.len())?;
        draft.write_at(0, bytes)?;
        Ok(draft.seal()?)
    }

    /// Returns the object that has the given name.
    ///
    /// # Errors
    /// [`Refusal::NoSuchName`]; [`Error::TooManyPins`]; [`Error::Disconnected`] if the store has ended.
    #[inline]
    pub fn get(&self, name: &str) -> Result<Object> {
        self.core.check()?;
        if let Some(object) = self.core.get_from_index(name)? {
            return Ok(object);
        }
        self.core.get_from_server(name, Deadline::NOW, Deadline::after(Self::TIMEOUT))
    }

    /// Returns the object that has the given name if this process has already mapped its memory. Sends no request and never
    /// blocks. [`Client::get`] does the same first.
    ///
    /// # Errors
    /// [`Error::TooManyPins`]; [`Error::Disconnected`] if the store has ended.
    #[inline]
    pub fn get_mapped(&self, name: &str) -> Result<Option<Object>> {
        self.core.check()?;
        match self.core.pin_named(name)? {
            Some((guard, location)) => match self.core.maps.get(location.allocation) {
                Some(mapping) => Object::new(guard, location, mapping).map(Some),
                None => Ok(None),
            },
            None => Ok(None),
        }
    }

    /// Returns the object that has the given name; waits until the deadline for the object to exist.
    ///
    /// # Errors
    /// [`Refusal::NoSuchName`] if no object had the name before the deadline; [`Error::TimedOut`] if the server does not answer
    /// within a few seconds after it; [`Error::TooManyPins`].
    pub fn get_within(&self, name: &str, deadline: Deadline) -> Result<Object> {
        self.core.check()?;
        if let Some(object) = self.core.get_from_index(name)? {
            return Ok(object);
        }
        let left = deadline.remaining();
        let timeout = left.map_or(Deadline::NEVER, |left| Deadline::after(left.saturating_add(GRACE)));
        match self.core.get_from_server(name, Deadline::NOW, timeout) {
            Err(Error::Refused(Refusal::NoSuchName { .. })) if !deadline.has_passed() => {}
            outcome => return outcome,
        }
        self.core.get_on_new_connection(name, deadline, timeout)
    }

    /// Returns the object with the given id.
    ///
    /// # Errors
    /// [`Refusal::NoSuchObject`]; [`Error::TooManyPins`].
    #[doc(alias = "GetGPUBuffer")]
    #[doc(alias = "get_gpu_buffer")]
    pub fn get_by_id(&self, id: ObjectId) -> Result<Object> {
        self.core.check()?;
        self.core.pin(id)?.ok_or_else(|| Refusal::NoSuchObject { object: id }.into())
    }

    /// Returns the objects that have the given names, in the given order.
    ///
    /// # Errors
    /// As [`Client::get`], for the first name that fails.
    #[doc(alias = "GetGPUBuffers")]
    #[doc(alias = "get_gpu_buffers")]
    pub fn get_all<'a>(&self, names: impl IntoIterator<Item = &'a str>) -> Result<Vec<Object>> {
        names.into_iter().map(|name| self.get(name)).collect()
    }

    /// Returns the pack that has the given name; one pin holds all its objects.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn get_pack(&self, name: &str) -> Result<PackObject> {
        self.get(name)?.into_pack()
    }

    /// Returns true if the object was obtained through this client's connection. Ids of objects are only valid within one store.
    #[must_use]
    pub fn is_source_of(&self, object: &Object) -> bool {
        Arc::ptr_eq(&self.core, object.core())
    }

    /// Gives another name to a sealed object. If another object already has the name, that object is deleted; processes that hold
    /// it keep it.
    ///
    /// # Errors
    /// [`Refusal::NoSuchObject`], [`Refusal::NotSealed`], [`Refusal::NameTooLong`], [`Refusal::NameTaken`]; [`Error::EmptyName`].
    #[doc(alias = "PutName")]
    pub fn publish(&self, name: &str, object: ObjectId) -> Result<Sealed> {
        self.publish_with_meta(name, &[], object)
    }

    /// Gives another name to a sealed object, with up to 216 bytes of metadata under that name.
    ///
    /// # Errors
    /// As [`Client::publish`]; [`Refusal::MetaTooLong`].
    pub fn publish_with_meta(&self, name: &str, meta: &[u8], object: ObjectId) -> Result<Sealed> {
        if name.is_empty() {
            return Err(Error::EmptyName);
        }
        let label = label(name, meta);
        label.check()?;
        self.core.request_sealed(RequestKind::Publish { label, object, part: None }, &[])
    }

    /// Deletes an object. Its name is removed at once; its memory is freed when no process holds the object any more. Deleting
    /// the first object of a pack deletes the whole pack.
    ///
    /// # Errors
    /// [`Refusal::NoSuchObject`], [`Refusal::NotYours`]; [`Refusal::NotSealed`] for a draft, unless the caller is the server's
    /// user.
    #[doc(alias = "DelData")]
    #[doc(alias = "del_data")]
    pub fn delete(&self, id: ObjectId) -> Result<()> {
        self.core.request(RequestKind::Delete { object: id }, &[], Deadline::after(Self::TIMEOUT))?;
        self.core.trim();
        Ok(())
    }

    /// Lists the sealed objects whose names begin with `prefix`, sorted by name. Sends no request.
    ///
    /// # Errors
    /// [`Error::Forked`]; [`Error::Disconnected`].
    pub fn list(&self, prefix: &str) -> Result<Vec<Entry>> {
        self.core.check()?;
        Ok(self.entries(prefix, SlotState::Sealed))
    }

    /// Lists the drafts (objects that are created and not sealed yet) whose future names begin with `prefix`. A pack is listed
    /// once, by its first object. Sends no request.
    ///
    /// A draft belongs to the connection that created it, and is deleted when the process of that connection exits. The user who
    /// runs the server can delete it earlier with [`Client::delete`]; `seal` then fails for its writer.
    ///
    /// # Errors
    /// [`Error::Forked`]; [`Error::Disconnected`].
    pub fn drafts(&self, prefix: &str) -> Result<Vec<Entry>> {
        self.core.check()?;
        let mut drafts = self.entries(prefix, SlotState::Created);
        drafts.retain(|entry| entry.pack.is_none_or(|first| first == entry.id));
        Ok(drafts)
    }

    /// Returns the objects in the given state whose names begin with `prefix`, sorted by name.
    fn entries(&self, prefix: &str, state: SlotState) -> Vec<Entry> {
        let objects = self.core.index.objects().filter(|(_, found, _)| *found == state);
        let named = objects.filter(|(_, _, record)| record.name.starts_with(prefix));
        let mut entries: Vec<_> = named.filter_map(|(id, _, record)| self.core.entry(id, record)).collect();
        entries.sort_by(|a, b| (&a.name, a.id).cmp(&(&b.name, b.id)));
        entries
    }

    /// Returns the description of the object that has the given name. The object is neither pinned nor mapped.
    ///
    /// # Errors
    /// [`Refusal::NoSuchName`]; [`Error::Disconnected`] if the store has ended.
    pub fn stat(&self, name: &str) -> Result<Entry> {
        self.core.check()?;
        self.core.look_up(name)
    }

    /// Subscribes to the events of objects whose names begin with `prefix`.
    ///
    /// # Errors
    /// As [`Client::connect`]; [`Error::Disconnected`] if the store has ended.
    pub fn watch(&self, prefix: &str) -> Result<Watch> {
        self.core.check()?;
        check_name(prefix)?;
        Watch::open(&self.core.path, prefix, None)
    }

    /// Subscribes to the events of objects whose names begin with `prefix`, and first returns those behind a revision, the
    /// [`Event::revision`](crate::Event::revision) of the last event that the caller has seen. The server retains the latest events of all names, about
    /// 1 MiB of them; a replaced server has none. If it does not have all, the first call of [`Watch::next`] returns
    /// [`Error::EventsMissed`].
    ///
    /// # Errors
    /// As [`Client::watch`].
    pub fn watch_after(&self, prefix: &str, revision: u64) -> Result<Watch> {
        self.core.check()?;
        check_name(prefix)?;
        Watch::open(&self.core.path, prefix, Some(revision))
    }

    /// Returns the number of objects and clients of the store, and its memory usage.
    ///
    /// # Errors
    /// [`Error::Disconnected`].
    pub fn status(&self) -> Result<Status> {
        match self.core.request(RequestKind::Status, &[], Deadline::after(Self::TIMEOUT))? {
            (Answer::Status(status), _) => Ok(status),
            _ => Err(unexpected()),
        }
    }

    /// Returns the statistics of the store's server: its process id, counters, and latencies of requests.
    ///
    /// # Errors
    /// [`Error::Disconnected`].
    pub fn statistics(&self) -> Result<Statistics> {
        match self.core.request(RequestKind::Statistics, &[], Deadline::after(Self::TIMEOUT))? {
            (Answer::Statistics(statistics), _) => Ok(*statistics),
            _ => Err(unexpected()),
        }
    }

    /// Returns how many clients hold each of these objects: have obtained it and not dropped it. The counts may be out of date
    /// when they arrive.
    ///
    /// # Errors
    /// [`Error::Disconnected`].
    pub fn readers(&self, objects: &[ObjectId]) -> Result<Vec<u32>> {
        let mut all = Vec::new();
        for part in objects.chunks(MAX_COUNTED) {
            let kind = RequestKind::Readers { objects: part.to_vec() };
            match self.core.request(kind, &[], Deadline::after(Self::TIMEOUT))? {
                (Answer::Readers { counts }, _) if counts.len() == part.len() => all.extend(counts),
                _ => return Err(unexpected()),
            }
        }
        Ok(all)
    }

    /// Unmaps the memory of freed objects. Every other call of the client does this too; a process that makes no calls for a long
    /// time may call this function to release the memory.
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
    Error::Protocol { rule: "the type of an answer matches its request" }
}
