//! Sealed objects of a store, held by pins (marks in shared memory that an object is in use).

use std::sync::Arc;

use wholemem_hal::{BackendKind, Device, Mapping, Span};
use wholemem_os::access_fault::{self, NamedRange};
use wholemem_os::{PrivateMap, SharedSlice};

use super::{ClientCore, Entry, PackObject, inherit};
use crate::convert::to_usize;
use crate::index::ObjectLocation;
use crate::protocol::SMALL;
use crate::{Error, ObjectId, Result};

/// A pin of an object that is released on drop.
#[derive(Debug)]
pub(super) struct PinGuard {
    core: Arc<ClientCore>,
    id: ObjectId,
    pin_at: usize,
}

impl PinGuard {
    pub(super) fn new(core: &Arc<ClientCore>, id: ObjectId, pin_at: usize) -> Self {
        Self { core: Arc::clone(core), id, pin_at }
    }

    pub(super) fn id(&self) -> ObjectId {
        self.id
    }
}

impl Drop for PinGuard {
    fn drop(&mut self) {
        // In a forked child the pin belongs to the parent, so the child does not release it.
        if self.core.epoch.is_current() {
            self.core.unpin(self.id, self.pin_at);
        }
    }
}

/// A sealed object of a store. Its bytes never change and stay valid while this value lives, even if its creator exits, its name
/// is removed or the server is replaced.
#[derive(Debug)]
pub struct Object {
    /// The registration of the object's name with the access fault handler, if the handler is installed.
    _fault_name: Option<NamedRange>,
    // Fields are dropped in this order, the map before the pin: the memory must not be used after the pin is released.
    mapping: Arc<Mapping>,
    offset: usize,
    len: usize,
    guard: PinGuard,
}

impl Object {
    pub(super) fn new(guard: PinGuard, location: ObjectLocation, mapping: Arc<Mapping>) -> Result<Self> {
        let (offset, len) = (to_usize(location.offset), to_usize(location.len));
        if offset.checked_add(len).is_none_or(|end| end > mapping.len()) {
            return Err(Error::Protocol { rule: "an object is within its allocation" });
        }
        let mut object = Self { _fault_name: None, mapping, offset, len, guard };
        if access_fault::is_installed() && object.is_cpu() {
            object._fault_name = object.fault_name()?;
        }
        Ok(object)
    }

    /// Registers the name and the memory of the object with the access fault handler.
    #[cold]
    fn fault_name(&self) -> Result<Option<NamedRange>> {
        let at = self.mapping.bytes()?.part(self.offset, self.len)?.as_ptr();
        let name = self.entry()?.name;
        let name = if name.is_empty() { self.id().to_string() } else { name };
        Ok(NamedRange::register(at, self.len, &name))
    }

    /// Returns the id of the object.
    #[must_use]
    #[doc(alias = "ObjectID")]
    pub fn id(&self) -> ObjectId {
        self.guard.id
    }

    /// Returns the length of the object in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the object has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns true if the object is in host memory.
    #[must_use]
    pub fn is_cpu(&self) -> bool {
        self.mapping.device().backend().kind() == BackendKind::Host
    }

    /// Returns false, because a sealed object cannot be written.
    #[must_use]
    pub fn is_mutable(&self) -> bool {
        false
    }

    /// Returns the description of the object: its id, name, metadata, length and origin.
    ///
    /// # Errors
    /// [`Error::Protocol`].
    pub fn entry(&self) -> Result<Entry> {
        let core = &self.guard.core;
        let read = core.index.read(self.id());
        let (_, record) = read.ok_or(Error::Protocol { rule: "a pinned object has a record" })?;
        let entry = core.entry(self.id(), record);
        entry.ok_or(Error::Protocol { rule: "the memory of a pinned object is in the index" })
    }

    /// Returns the metadata of the object. Faster than [`Object::entry`].
    #[must_use]
    pub fn meta(&self) -> Vec<u8> {
        self.guard.core.index.meta(self.id())
    }

    /// Returns true if the object is a pack, which contains other objects.
    #[must_use]
    pub fn is_pack(&self) -> bool {
        self.guard.core.index.pack(self.id()) == Some(self.id())
    }

    /// Returns the bytes of an object in host memory. The result is not a `&[u8]`, because a process of the server's user could
    /// still modify the bytes.
    ///
    /// # Errors
    /// [`Error::OnDevice`].
    pub fn bytes(&self) -> Result<SharedSlice<'_>> {
        if !self.is_cpu() {
            return Err(Error::OnDevice { object: self.id() });
        }
        Ok(self.mapping.bytes()?.part(self.offset, self.len)?)
    }

    /// Creates a private, writable map (copy-on-write) of some bytes of an object in host memory, for code that requires writable
    /// memory. Writes are not visible outside of the new map. The map shows the object's bytes only while this object is held.
    ///
    /// # Errors
    /// [`Error::OnDevice`]; [`Error::OutOfRange`]; [`Error::Memory`] if `len` is zero or the mapping fails.
    #[doc(alias = "MAP_PRIVATE")]
    pub fn map_private(&self, offset: usize, len: usize) -> Result<Arc<PrivateMap>> {
        if !self.is_cpu() {
            return Err(Error::OnDevice { object: self.id() });
        }
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(Error::OutOfRange { offset, len, size: self.len });
        }
        let map = Arc::new(self.mapping.map_private(self.offset + offset, len)?);
        // Only maps of small objects are registered: the memory of large objects is never reused, so a forked child may read it
        // without a pin.
        if (self.len as u64) < SMALL {
            inherit::add_private(self.core(), &map);
        }
        Ok(map)
    }

    /// Returns a copy of the bytes of an object in host memory.
    ///
    /// # Errors
    /// [`Error::OnDevice`].
    pub fn to_vec(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.len];
        self.bytes()?.read_at(0, &mut bytes)?;
        Ok(bytes)
    }

    /// Returns the memory of the object as a span, for copies by streams and for kernels.
    ///
    /// # Errors
    /// [`Error::Memory`].
    #[doc(alias = "data")]
    pub fn span(&self) -> Result<Span> {
        Ok(self.mapping.span(self.offset, self.len)?)
    }

    /// Returns all objects of the pack of which this is the first object, held by the same pin.
    ///
    /// # Errors
    /// [`Error::Protocol`].
    pub fn into_pack(self) -> Result<PackObject> {
        PackObject::open(self)
    }

    /// Returns the device of the object's memory, which is the host device for host memory.
    #[must_use]
    pub fn device(&self) -> Device {
        self.mapping.device()
    }

    pub(super) fn core(&self) -> &Arc<ClientCore> {
        &self.guard.core
    }
}
