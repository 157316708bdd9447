//! Packs: several objects in one allocation, created together, mapped at once, and each found by its name.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use wholemem_hal::{Device, Span};
use wholemem_os::SharedSlice;

use super::draft::{DraftMemory, SealError, Sealed};
use super::{ClientCore, Object, label};
use crate::convert::to_usize;
use crate::id::SlotState;
use crate::protocol::{Label, MemberSpec, Refusal, pack_layout};
use crate::{ObjectId, Result};

/// The specification of a pack (several objects in one memory) to be created.
///
/// ```
/// use wholemem_store::Pack;
///
/// let pack = Pack::new("model").add("model/a", 1000).add_with_meta("model/b", b"f32 [2, 3]", 24);
/// assert_eq!(pack.count(), 2);
/// ```
#[derive(Debug, Clone)]
pub struct Pack {
    label: Label,
    members: Vec<MemberSpec>,
    device: Option<Device>,
}

impl Pack {
    /// Creates the specification of an empty pack with a name.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self { label: label(name, &[]), members: Vec::new(), device: None }
    }

    /// Attaches metadata to the pack as a whole.
    #[must_use]
    pub fn with_meta(mut self, meta: &[u8]) -> Self {
        self.label.meta = meta.to_vec();
        self
    }

    /// Places the pack in the memory of a device instead of the host.
    #[must_use]
    pub fn on(self, device: &Device) -> Self {
        Self { device: Some(device.clone()), ..self }
    }

    /// Adds an object of `len` bytes to the pack.
    #[must_use]
    pub fn add(self, name: &str, len: usize) -> Self {
        self.add_with_meta(name, &[], len)
    }

    /// Adds an object of `len` bytes, with metadata, to the pack.
    #[must_use]
    pub fn add_with_meta(mut self, name: &str, meta: &[u8], len: usize) -> Self {
        self.members.push(MemberSpec { label: label(name, meta), len: len as u64 });
        self
    }

    /// Returns the number of objects of the pack.
    #[must_use]
    pub fn count(&self) -> usize {
        self.members.len()
    }
}

/// A pack (several objects in one memory) that is being written. Dropping this value abandons the pack.
#[derive(Debug)]
pub struct PackDraft {
    memory: DraftMemory,
    /// The offset and the length of each object of the pack, in bytes.
    ranges: Vec<(usize, usize)>,
    len: usize,
    core: Arc<ClientCore>,
}

impl PackDraft {
    pub(super) fn create(core: &Arc<ClientCore>, pack: &Pack, wait: Duration) -> Result<Self> {
        let place = pack.device.as_ref().map_or(Ok(0), |device| core.maps.place(device))?;
        let too_long = || Refusal::malformed("the length of a pack does not fit 64 bits");
        let lens = || pack.members.iter().map(|member| member.len);
        let (offsets, total) = pack_layout(lens()).ok_or_else(too_long)?;
        let narrow = |number: u64| usize::try_from(number).map_err(|_| too_long());
        let ranges = offsets.into_iter().zip(lens()).map(|(offset, len)| Ok((narrow(offset)?, narrow(len)?)));
        let ranges = ranges.collect::<Result<Vec<_>, Refusal>>()?;
        let len = narrow(total)?;
        let memory = DraftMemory::create(core, pack.label.clone(), pack.members.clone(), len, place, wait)?;
        Ok(Self { memory, ranges, len, core: Arc::clone(core) })
    }

    /// Writes bytes to the object with the index `member` of a pack in host memory.
    ///
    /// # Errors
    /// [`Error::OutOfRange`](crate::Error::OutOfRange), [`Error::OnDevice`](crate::Error::OnDevice).
    pub fn write_at(&mut self, member: usize, offset: usize, source: &[u8]) -> Result<()> {
        self.copy_at(member, offset, source.into())
    }

    /// Writes bytes that may change during the copy, as [`PackDraft::write_at`] does; then any mixture of old and new bytes may
    /// be written.
    ///
    /// # Errors
    /// As [`PackDraft::write_at`].
    pub fn copy_at(&mut self, member: usize, offset: usize, source: SharedSlice<'_>) -> Result<()> {
        let (start, size) = self.range(member);
        if offset.checked_add(source.len()).is_none_or(|end| end > size) {
            return Err(crate::Error::OutOfRange { offset, len: source.len(), size });
        }
        self.memory.copy_at(start + offset, source, self.len)
    }

    /// Returns the memory of one object of the pack as a span, for streams and kernels; `None` for a small pack in host memory.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub fn span(&self, member: usize) -> Result<Option<Span>> {
        let (start, len) = self.range(member);
        self.memory.span(start, len)
    }

    /// Returns the device of the pack's memory; `None` for a small pack in host memory.
    #[must_use]
    pub fn device(&self) -> Option<Device> {
        self.memory.device()
    }

    /// Seals all objects of the pack at once.
    ///
    /// # Errors
    /// As [`Draft::seal`](crate::Draft::seal).
    pub fn seal(self) -> Result<Sealed, SealError<Self>> {
        let Self { memory, ranges, len, core } = self;
        memory.seal(&core).map_err(|(error, memory)| {
            let draft = memory.map(|memory| Box::new(Self { memory: *memory, ranges, len, core }));
            SealError { error, draft }
        })
    }

    /// Returns the offset and the length of an object in the pack; zeros if no object has this index.
    fn range(&self, member: usize) -> (usize, usize) {
        self.ranges.get(member).copied().unwrap_or((0, 0))
    }
}

/// The description of one object of a pack.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PackMember {
    /// The id of this object of the pack.
    pub id: ObjectId,
    /// The index of the object in its pack, in the order in which objects were added.
    pub number: usize,
    /// The metadata that the creator of the object attached to it.
    pub meta: Vec<u8>,
    /// The offset of the object in its pack, in bytes.
    pub offset: usize,
    /// The length of this object of the pack, in bytes.
    pub len: usize,
}

/// A sealed pack (several objects in one memory), held by one pin.
#[derive(Debug)]
pub struct PackObject {
    object: Object,
    members: BTreeMap<String, PackMember>,
}

impl PackObject {
    pub(super) fn open(object: Object) -> Result<Self> {
        let core = object.core();
        let (_, first) = core
            .index
            .read(object.id())
            .ok_or(crate::Error::Protocol { rule: "a pinned object has a record" })?;
        let others = core.index.objects().filter(|(id, state, record)| {
            // An object stays part of the pack even if another object has taken its name.
            record.pack == Some(object.id()) && *id != object.id() && *state != SlotState::Created
        });
        let members = others.map(|(id, _, record)| {
            let offset = to_usize(record.offset.saturating_sub(first.offset));
            (record.name, PackMember { id, number: 0, meta: record.meta, offset, len: to_usize(record.len) })
        });
        let mut members: Vec<_> = members.collect();
        members.sort_unstable_by_key(|(_, member)| (member.offset, member.id.slot()));
        members.iter_mut().enumerate().for_each(|(number, (_, member))| member.number = number);
        Ok(Self { object, members: members.into_iter().collect() })
    }

    /// Returns the names and descriptions of the objects of the pack, sorted by name.
    pub fn members(&self) -> impl Iterator<Item = (&str, &PackMember)> {
        self.members.iter().map(|(name, member)| (name.as_str(), member))
    }

    /// Returns the description of the object of the pack that has the given name.
    #[must_use]
    pub fn member(&self, name: &str) -> Option<&PackMember> {
        self.members.get(name)
    }

    /// Returns the bytes of the object that has the given name, in a pack in host memory.
    ///
    /// # Errors
    /// [`Refusal::NoSuchName`]; [`Error::OnDevice`](crate::Error::OnDevice).
    pub fn bytes(&self, name: &str) -> Result<SharedSlice<'_>> {
        let member = self.find(name)?;
        Ok(self.object.bytes()?.part(member.offset, member.len)?)
    }

    /// Returns the memory of the object of the pack that has the given name as a span, for streams and kernels.
    ///
    /// # Errors
    /// [`Refusal::NoSuchName`]; [`Error::Memory`](crate::Error::Memory).
    pub fn span(&self, name: &str) -> Result<Span> {
        let member = self.find(name)?;
        Ok(self.object.span()?.part(member.offset, member.len)?)
    }

    /// Returns the object that covers the memory of the whole pack.
    #[must_use]
    pub fn whole(&self) -> &Object {
        &self.object
    }

    fn find(&self, name: &str) -> Result<&PackMember> {
        self.member(name).ok_or_else(|| Refusal::NoSuchName { name: name.to_owned() }.into())
    }
}
