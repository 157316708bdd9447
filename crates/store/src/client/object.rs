//! A sealed object, held by a pin.

use std::sync::Arc;

use wholemem_hal::{BackendKind, Device, Mapping, Span};
use wholemem_os::access_fault::{self, NamedRange};
use wholemem_os::{PrivateMap, SharedSlice};

use super::{Core, Entry, PackObject, inherit};
use crate::convert::to_usize;
use crate::index::Location;
use crate::protocol::SMALL;
use crate::{Error, ObjectId, Result};

/// A pin, let go when dropped.
#[derive(Debug)]
pub(super) struct Hold {
    core: Arc<Core>,
    id: ObjectId,
    pin_at: usize,
}

impl Hold {
    pub(super) fn new(core: &Arc<Core>, id: ObjectId, pin_at: usize) -> Self {
        Self { core: Arc::clone(core), id, pin_at }
    }

    pub(super) fn id(&self) -> ObjectId {
        self.id
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // In a forked child the pin is the parent's.
        if self.core.epoch.is_current() {
            self.core.unpin(self.id, self.pin_at);
        }
    }
}

/// A sealed object. Its bytes never change, and stay while this lives, whatever becomes of its maker, its name and the
/// server.
#[derive(Debug)]
pub struct Object {
    /// Its name for the handler of faults, where that is installed.
    _named: Option<NamedRange>,
    // After the pin nothing may be used: fields are dropped in this order.
    mapping: Arc<Mapping>,
    offset: usize,
    len: usize,
    hold: Hold,
}

impl Object {
    pub(super) fn new(hold: Hold, location: Location, mapping: Arc<Mapping>) -> Result<Self> {
        let (offset, len) = (to_usize(location.offset), to_usize(location.len));
        if offset.checked_add(len).is_none_or(|end| end > mapping.len()) {
            return Err(Error::Protocol { rule: "an object lies within its memory" });
        }
        let mut object = Self { _named: None, mapping, offset, len, hold };
        if access_fault::is_installed() && object.is_cpu() {
            object._named = object.named()?;
        }
        Ok(object)
    }

    /// Names its memory for the handler of faults.
    #[cold]
    fn named(&self) -> Result<Option<NamedRange>> {
        let at = self.mapping.bytes()?.part(self.offset, self.len)?.as_ptr();
        let name = self.entry()?.name;
        let name = if name.is_empty() { self.id().to_string() } else { name };
        Ok(NamedRange::register(at, self.len, &name))
    }

    /// Its id.
    #[must_use]
    #[doc(alias = "ObjectID")]
    pub fn id(&self) -> ObjectId {
        self.hold.id
    }

    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether it is in host memory.
    #[must_use]
    pub fn is_cpu(&self) -> bool {
        self.mapping.device().backend().kind() == BackendKind::Host
    }

    /// Never: it is sealed.
    #[must_use]
    pub fn is_mutable(&self) -> bool {
        false
    }

    /// What there is to know of it.
    ///
    /// # Errors
    /// [`Error::Protocol`].
    pub fn entry(&self) -> Result<Entry> {
        let core = &self.hold.core;
        let read = core.index.read(self.id());
        let (_, record) = read.ok_or(Error::Protocol { rule: "a pinned object has a record" })?;
        let entry = core.entry(self.id(), record);
        entry.ok_or(Error::Protocol { rule: "the memory of a pinned object is in the index" })
    }

    /// What its maker says of it; what [`Object::entry`] says besides takes longer to find.
    #[must_use]
    pub fn meta(&self) -> Vec<u8> {
        self.hold.core.index.meta(self.id())
    }

    /// Whether it is a pack: an object of which others are parts.
    #[must_use]
    pub fn is_pack(&self) -> bool {
        self.hold.core.index.pack(self.id()) == Some(self.id())
    }

    /// Its bytes, in host memory. There is no `&[u8]` to them: a process of the server's user may undo what keeps them
    /// as they are.
    ///
    /// # Errors
    /// [`Error::OnDevice`].
    pub fn bytes(&self) -> Result<SharedSlice<'_>> {
        if !self.is_cpu() {
            return Err(Error::OnDevice { object: self.id() });
        }
        Ok(self.mapping.bytes()?.part(self.offset, self.len)?)
    }

    /// Maps some of its bytes once more, in host memory, so that they can be written: for code that cannot be told that it
    /// must not write them. Writes stay in the new map. It shows the object's bytes only while this object is held.
    ///
    /// # Errors
    /// [`Error::OnDevice`]; [`Error::OutOfRange`]; [`Error::Memory`] for no bytes, and when the kernel refuses.
    #[doc(alias = "MAP_PRIVATE")]
    pub fn map_private(&self, offset: usize, len: usize) -> Result<Arc<PrivateMap>> {
        if !self.is_cpu() {
            return Err(Error::OnDevice { object: self.id() });
        }
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(Error::OutOfRange { offset, len, size: self.len });
        }
        let map = Arc::new(self.mapping.map_private(self.offset + offset, len)?);
        // Memory of large objects is never used again.
        if (self.len as u64) < SMALL {
            inherit::add_private(self.core(), &map);
        }
        Ok(map)
    }

    /// A copy of its bytes, from host memory.
    ///
    /// # Errors
    /// [`Error::OnDevice`].
    pub fn to_vec(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.len];
        self.bytes()?.read_at(0, &mut bytes)?;
        Ok(bytes)
    }

    /// Its place, for streams to copy from and kernels to read.
    ///
    /// # Errors
    /// [`Error::Memory`].
    #[doc(alias = "data")]
    pub fn span(&self) -> Result<Span> {
        Ok(self.mapping.span(self.offset, self.len)?)
    }

    /// All objects of the pack that this is the first of, held by the same pin.
    ///
    /// # Errors
    /// [`Error::Protocol`].
    pub fn into_pack(self) -> Result<PackObject> {
        PackObject::open(self)
    }

    /// The device whose memory it is in, or the host's.
    #[must_use]
    pub fn device(&self) -> Device {
        self.mapping.device()
    }

    pub(super) fn core(&self) -> &Arc<Core> {
        &self.hold.core
    }
}
