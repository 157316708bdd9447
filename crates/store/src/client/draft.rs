//! An object that is being written: until it is sealed, its maker's alone.

use std::num::NonZero;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use wholemem_hal::{Device, Event, EventKind, Mapping, Rights, Span, Stream};
use wholemem_os::fork::without_forks;
use wholemem_os::{Deadline, SharedSlice};

use super::{Client, Core, unexpected};
use crate::protocol::{Answer, Ask, Label, Member, SMALL, check_labels};
use crate::{Error, ObjectId, Refusal, Result};

/// An object that has just been sealed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sealed {
    /// Its id.
    pub id: ObjectId,
    /// Which object of its name it is.
    pub version: u64,
}

/// Memory that is being written, of an object or of a pack.
#[derive(Debug)]
pub(super) enum Target {
    /// Small, on the host: goes to the server with the request, whole.
    Small { label: Label, members: Vec<Member>, bytes: Vec<u8>, wait: Duration },
    /// Mapped here.
    Mapped(Mapped),
}

#[derive(Debug)]
pub(super) struct Mapped {
    /// The request that made it, by which the server knows it.
    create: u64,
    object: ObjectId,
    /// `None` once it is sealed, or given up.
    mapping: Option<Mapping>,
    /// Whether no child has the map, which would keep it from being sealed: until anybody may have its address.
    is_hidden: AtomicBool,
    offset: usize,
    is_cpu: bool,
    core: Arc<Core>,
}

impl Target {
    pub(super) fn create(
        core: &Arc<Core>,
        label: Label,
        members: Vec<Member>,
        len: usize,
        place: u32,
        wait: Duration,
    ) -> Result<Self> {
        core.check()?;
        check_labels(&label, &members)?;
        let is_cpu = place == 0;
        if is_cpu && (len as u64) < SMALL {
            return Ok(Self::Small { label, members, bytes: vec![0; len], wait });
        }
        // The length of a pack is what its members make.
        let single = if members.is_empty() { len as u64 } else { 0 };
        let ask = Ask::Create { label, len: single, members, place };
        let (create, answer, fds) = core.with_room(len, place, wait, || {
            core.request_with_id(ask.clone(), &[], Deadline::after(Client::PATIENCE))
        })?;
        let (Answer::Created { object, memory }, Ok([fd])) = (answer, <[_; 1]>::try_from(fds)) else {
            return Err(unexpected());
        };
        let offset = usize::try_from(memory.offset).unwrap_or(usize::MAX);
        // Made before the map, so that a failure gives it up.
        let is_hidden = AtomicBool::new(false);
        let mut mapped =
            Mapped { create, object, mapping: None, is_hidden, offset, is_cpu, core: Arc::clone(core) };
        let map = || -> Result<_> {
            let mapping = core.maps.map_once(&memory, fd, Rights::ReadWrite)?;
            // Where the kernel cannot, a child that is forked meanwhile has to end first.
            let is_hidden = is_cpu && mapping.set_inherited(false).is_ok();
            Ok((mapping, is_hidden))
        };
        let (mapping, is_hidden) = if is_cpu { without_forks(map)?? } else { map()? };
        mapped.is_hidden = is_hidden.into();
        if is_cpu {
            // Twenty times faster than touching each page; where the kernel cannot, they are touched.
            let _ = mapping.populate();
        }
        mapped.mapping = Some(mapping);
        Ok(Self::Mapped(mapped))
    }

    pub(super) fn copy_at(&mut self, offset: usize, source: SharedSlice<'_>, size: usize) -> Result<()> {
        let out_of_range = Error::OutOfRange { offset, len: source.len(), size };
        match self {
            Self::Small { bytes, .. } => {
                let end = offset.checked_add(source.len());
                let range = end.and_then(|end| bytes.get_mut(offset..end)).ok_or(out_of_range)?;
                Ok(source.read_at(0, range)?)
            }
            Self::Mapped(mapped) if mapped.is_cpu => {
                let map = mapped.mapping()?.bytes()?.part(mapped.offset, size)?;
                copy_in(map, offset, source).map_err(|_| out_of_range)
            }
            Self::Mapped(mapped) => Err(Error::OnDevice { object: mapped.object }),
        }
    }

    pub(super) fn span(&self, offset: usize, len: usize) -> Result<Option<Span>> {
        match self {
            Self::Small { .. } => Ok(None),
            Self::Mapped(mapped) => Ok(Some(mapped.shown()?.span(mapped.offset + offset, len)?)),
        }
    }

    pub(super) fn device(&self) -> Option<Device> {
        match self {
            Self::Small { .. } => None,
            Self::Mapped(mapped) => mapped.mapping.as_ref().map(Mapping::device),
        }
    }

    pub(super) fn seal(self, core: &Core) -> Result<Sealed> {
        core.check_fork()?;
        match self {
            Self::Small { label, members, bytes, wait } => {
                let single = if members.is_empty() { bytes.len() as u64 } else { 0 };
                let ask = Ask::Create { label, len: single, members, place: 0 };
                core.with_room(bytes.len(), 0, wait, || core.request_sealed(ask.clone(), &bytes))
            }
            Self::Mapped(mut mapped) => {
                mapped.unmap()?;
                let sealed = core.request_sealed(Ask::Seal { create: mapped.create }, &[])?;
                mapped.create = 0;
                Ok(sealed)
            }
        }
    }
}

/// Copies bytes to shared memory: one core alone does not move as many as there could be.
fn copy_in(to: SharedSlice<'_>, offset: usize, source: SharedSlice<'_>) -> wholemem_os::Result<()> {
    const WORTH_A_THREAD: usize = 4 << 20;
    const MOST_THREADS: usize = 4;
    // Counting cores takes longer than a short copy.
    static CORES: OnceLock<usize> = OnceLock::new();
    let cores = || *CORES.get_or_init(|| thread::available_parallelism().map_or(1, NonZero::get));
    let threads = match source.len() / WORTH_A_THREAD {
        0 | 1 => 1,
        parts => parts.min(MOST_THREADS).min(cores()),
    };
    let to = to.part(offset, source.len())?;
    let share = source.len().div_ceil(threads).max(1);
    let copy = move |at: usize| to.copy_from(at, &source.part(at, share.min(source.len() - at))?);
    thread::scope(|scope| {
        let others = (share..source.len()).step_by(share).map(|at| scope.spawn(move || copy(at)));
        let others: Vec<_> = others.collect();
        let others = others.into_iter().map(|other| other.join().expect("copying does not panic"));
        others.fold(copy(0), Result::and)
    })
}

impl Mapped {
    /// Takes the map away: host memory that anybody can still write is not sealed. On a device that is a matter of
    /// honour, and a stream may hold the map until its work is known to be over.
    fn unmap(&mut self) -> Result<()> {
        let rule = "a draft is mapped until it is sealed";
        let mapping = self.mapping.take().ok_or(Error::Protocol { rule })?;
        match mapping.unmap() {
            Err(wholemem_hal::Error::InUse { .. }) if !self.is_cpu => Ok(()),
            Err(wholemem_hal::Error::InUse { .. }) => Err(Refusal::StillMapped.into()),
            outcome => Ok(outcome?),
        }
    }

    /// The map, for somebody who may use it in a child as well.
    fn shown(&self) -> Result<&Mapping> {
        let mapping = self.mapping()?;
        if self.is_hidden.load(Ordering::Relaxed) {
            mapping.set_inherited(true)?;
            self.is_hidden.store(false, Ordering::Relaxed);
        }
        Ok(mapping)
    }

    fn mapping(&self) -> Result<&Mapping> {
        self.mapping.as_ref().ok_or(Error::Protocol { rule: "a draft is mapped until it is sealed" })
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        drop(self.mapping.take());
        if self.create != 0 && self.core.epoch.is_current() {
            self.core.tell(Ask::Abandon { create: self.create });
        }
    }
}

/// An object that is being written. Dropping it gives it up.
///
/// ```no_run
/// # let client = wholemem_store::Client::connect("socket")?;
/// let mut draft = client.create("weights", 5)?;
/// draft.write_at(0, b"he")?;
/// draft.write_at(2, b"llo")?;
/// let sealed = draft.seal()?;
/// # Ok::<(), wholemem_store::Error>(())
/// ```
#[derive(Debug)]
#[doc(alias = "MutableBuffer")]
#[doc(alias = "BlobWriter")]
pub struct Draft {
    target: Target,
    len: usize,
    is_cpu: bool,
    core: Arc<Core>,
}

/// A draft that is sealed as soon as a stream has come so far.
#[derive(Debug)]
#[must_use = "dropping this does not keep the object from being sealed, but nobody hears if it cannot be"]
pub struct Sealing(JoinHandle<Result<Sealed>>);

impl Sealing {
    /// Waits until it is sealed.
    ///
    /// # Errors
    /// As [`Draft::seal`]; what the stream's work met.
    pub fn wait(self) -> Result<Sealed> {
        self.0.join().unwrap_or(Err(Error::Protocol { rule: "sealing does not panic" }))
    }
}

impl Draft {
    pub(super) fn create(
        core: &Arc<Core>,
        label: Label,
        len: usize,
        place: u32,
        wait: Duration,
    ) -> Result<Self> {
        let target = Target::create(core, label, Vec::new(), len, place, wait)?;
        Ok(Self { target, len, is_cpu: place == 0, core: Arc::clone(core) })
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
        self.is_cpu
    }

    /// Always, until it is sealed.
    #[must_use]
    pub fn is_mutable(&self) -> bool {
        true
    }

    /// Writes bytes of an object in host memory.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::OnDevice`].
    pub fn write_at(&mut self, offset: usize, source: &[u8]) -> Result<()> {
        self.copy_at(offset, source.into())
    }

    /// The same, of bytes that others may write meanwhile: then it is any of what they were that is written here.
    ///
    /// # Errors
    /// As [`Draft::write_at`].
    pub fn copy_at(&mut self, offset: usize, source: SharedSlice<'_>) -> Result<()> {
        self.target.copy_at(offset, source, self.len)
    }

    /// Its bytes where they will stay, for an object of a mebibyte or more in host memory; `None` for a smaller one, which
    /// goes to the server when it is sealed.
    ///
    /// # Errors
    /// [`Error::OnDevice`].
    pub fn bytes(&self) -> Result<Option<SharedSlice<'_>>> {
        match &self.target {
            Target::Small { .. } => Ok(None),
            Target::Mapped(mapped) if mapped.is_cpu => {
                Ok(Some(mapped.shown()?.bytes()?.part(mapped.offset, self.len)?))
            }
            Target::Mapped(mapped) => Err(Error::OnDevice { object: mapped.object }),
        }
    }

    /// Its place, for streams to copy to and kernels to write; `None` for a small object in host memory.
    ///
    /// # Errors
    /// [`Error::Memory`].
    #[doc(alias = "mutable_data")]
    pub fn span(&self) -> Result<Option<Span>> {
        self.target.span(0, self.len)
    }

    /// The device it is mapped on; `None` for a small object in host memory.
    #[must_use]
    pub fn device(&self) -> Option<Device> {
        self.target.device()
    }

    /// Makes it everybody's, under its name. What was written by streams must be complete.
    ///
    /// # Errors
    /// [`Refusal::StillMapped`](crate::Refusal::StillMapped) when a copy of its memory is still mapped for writing: a
    /// [`Span`] that is kept, for instance, or a child that was forked while there was one, or [bytes](Draft::bytes).
    #[doc(alias = "Seal")]
    pub fn seal(self) -> Result<Sealed> {
        self.target.seal(&self.core)
    }

    /// The same, as soon as the stream has done what it was given so far. If this process dies before that, the object
    /// never was.
    ///
    /// # Errors
    /// [`Error::Memory`] when the stream takes no more work.
    pub fn seal_after(self, stream: &Stream) -> Result<Sealing> {
        let reached = Event::create(stream.device(), EventKind::Order)?;
        stream.record(&reached)?;
        let seal = move || {
            reached.wait(Deadline::NEVER)?;
            self.seal()
        };
        let thread = thread::Builder::new().name("wm-store-seal".to_owned()).spawn(seal);
        thread.map(Sealing).map_err(|source| Error::Launch { source })
    }
}
