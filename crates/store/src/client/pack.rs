//! Many objects in one piece of memory: made together, mapped at once, and each found by its name.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use wholemem_hal::{Device, Span};
use wholemem_os::SharedSlice;

use super::draft::{Sealed, Target, Unsealed};
use super::{Core, Object, label};
use crate::convert::to_usize;
use crate::id::State;
use crate::protocol::{Label, Member, Refusal, lay_out};
use crate::{ObjectId, Result};

/// What a pack is to hold.
///
/// ```
/// use wholemem_store::Pack;
///
/// let pack = Pack::new("model").add("model/a", 1000).add_described("model/b", b"f32 [2, 3]", 24);
/// assert_eq!(pack.count(), 2);
/// ```
#[derive(Debug, Clone)]
pub struct Pack {
    label: Label,
    members: Vec<Member>,
    device: Option<Device>,
}

impl Pack {
    /// A pack of this name, with nothing in it.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self { label: label(name, &[]), members: Vec::new(), device: None }
    }

    /// What its users are told of it as a whole.
    #[must_use]
    pub fn described(mut self, meta: &[u8]) -> Self {
        self.label.meta = meta.to_vec();
        self
    }

    /// In the memory of a device, instead of the host's.
    #[must_use]
    pub fn on(self, device: &Device) -> Self {
        Self { device: Some(device.clone()), ..self }
    }

    /// With one more object.
    #[must_use]
    pub fn add(self, name: &str, len: usize) -> Self {
        self.add_described(name, &[], len)
    }

    /// With one more object, and what its users are told of it.
    #[must_use]
    pub fn add_described(mut self, name: &str, meta: &[u8], len: usize) -> Self {
        self.members.push(Member { label: label(name, meta), len: len as u64 });
        self
    }

    /// How many objects it holds.
    #[must_use]
    pub fn count(&self) -> usize {
        self.members.len()
    }
}

/// A pack that is being written. Dropping it gives it up.
#[derive(Debug)]
pub struct PackDraft {
    target: Target,
    /// Where each object begins, and how long it is.
    ranges: Vec<(usize, usize)>,
    len: usize,
    core: Arc<Core>,
}

impl PackDraft {
    pub(super) fn create(core: &Arc<Core>, pack: &Pack, wait: Duration) -> Result<Self> {
        let place = pack.device.as_ref().map_or(Ok(0), |device| core.maps.place(device))?;
        let too_long = || Refusal::malformed("a pack is longer than there are numbers");
        let lens = || pack.members.iter().map(|member| member.len);
        let (offsets, total) = lay_out(lens()).ok_or_else(too_long)?;
        let narrow = |number: u64| usize::try_from(number).map_err(|_| too_long());
        let ranges = offsets.into_iter().zip(lens()).map(|(offset, len)| Ok((narrow(offset)?, narrow(len)?)));
        let ranges = ranges.collect::<Result<Vec<_>, Refusal>>()?;
        let len = narrow(total)?;
        let target = Target::create(core, pack.label.clone(), pack.members.clone(), len, place, wait)?;
        Ok(Self { target, ranges, len, core: Arc::clone(core) })
    }

    /// Writes bytes of the object that was added as number `member`, in host memory.
    ///
    /// # Errors
    /// [`Error::OutOfRange`](crate::Error::OutOfRange), [`Error::OnDevice`](crate::Error::OnDevice).
    pub fn write_at(&mut self, member: usize, offset: usize, source: &[u8]) -> Result<()> {
        self.copy_at(member, offset, source.into())
    }

    /// The same, of bytes that others may write meanwhile: then it is any of what they were that is written here.
    ///
    /// # Errors
    /// As [`PackDraft::write_at`].
    pub fn copy_at(&mut self, member: usize, offset: usize, source: SharedSlice<'_>) -> Result<()> {
        let (start, size) = self.range(member);
        if offset.checked_add(source.len()).is_none_or(|end| end > size) {
            return Err(crate::Error::OutOfRange { offset, len: source.len(), size });
        }
        self.target.copy_at(start + offset, source, self.len)
    }

    /// The place of one object, for streams and kernels; `None` for a small pack in host memory.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub fn span(&self, member: usize) -> Result<Option<Span>> {
        let (start, len) = self.range(member);
        self.target.span(start, len)
    }

    /// The device it is mapped on; `None` for a small pack in host memory.
    #[must_use]
    pub fn device(&self) -> Option<Device> {
        self.target.device()
    }

    /// Makes all of it everybody's, at once.
    ///
    /// # Errors
    /// As [`Draft::seal`](crate::Draft::seal).
    pub fn seal(self) -> Result<Sealed, Unsealed<Self>> {
        let Self { target, ranges, len, core } = self;
        target.seal(&core).map_err(|(error, target)| {
            let draft = target.map(|target| Box::new(Self { target: *target, ranges, len, core }));
            Unsealed { error, draft }
        })
    }

    /// An object that was never added has no bytes.
    fn range(&self, member: usize) -> (usize, usize) {
        self.ranges.get(member).copied().unwrap_or((0, 0))
    }
}

/// An object of a pack.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PackMember {
    /// Its id.
    pub id: ObjectId,
    /// Which of the pack's objects it is, in the order in which they were added.
    pub number: usize,
    /// What its maker says of it.
    pub meta: Vec<u8>,
    /// Where it begins, counted in the pack.
    pub offset: usize,
    /// Its length in bytes.
    pub len: usize,
}

/// A pack, held by one pin.
#[derive(Debug)]
pub struct PackObject {
    object: Object,
    members: BTreeMap<String, PackMember>,
}

impl PackObject {
    pub(super) fn open(object: Object) -> Result<Self> {
        let core = object.core();
        let (_, first) =
            core.index.read(object.id()).ok_or(crate::Error::Protocol { rule: "a pin holds" })?;
        let others = core.index.objects().filter(|(id, state, record)| {
            // One whose name has another object now is still part of the pack.
            record.pack == Some(object.id()) && *id != object.id() && *state != State::Created
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

    /// Its objects, by name.
    pub fn members(&self) -> impl Iterator<Item = (&str, &PackMember)> {
        self.members.iter().map(|(name, member)| (name.as_str(), member))
    }

    /// One of its objects.
    #[must_use]
    pub fn member(&self, name: &str) -> Option<&PackMember> {
        self.members.get(name)
    }

    /// The bytes of one of its objects, in host memory.
    ///
    /// # Errors
    /// [`Refusal::NoSuchName`]; [`Error::OnDevice`](crate::Error::OnDevice).
    pub fn bytes(&self, name: &str) -> Result<SharedSlice<'_>> {
        let member = self.find(name)?;
        Ok(self.object.bytes()?.part(member.offset, member.len)?)
    }

    /// The place of one of its objects, for streams and kernels.
    ///
    /// # Errors
    /// [`Refusal::NoSuchName`]; [`Error::Memory`](crate::Error::Memory).
    pub fn span(&self, name: &str) -> Result<Span> {
        let member = self.find(name)?;
        Ok(self.object.span()?.part(member.offset, member.len)?)
    }

    /// The pack as one object.
    #[must_use]
    pub fn whole(&self) -> &Object {
        &self.object
    }

    fn find(&self, name: &str) -> Result<&PackMember> {
        self.member(name).ok_or_else(|| Refusal::NoSuchName { name: name.to_owned() }.into())
    }
}
