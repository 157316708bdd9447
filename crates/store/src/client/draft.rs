//! An object that is being written: until it is sealed, its maker's alone.

use std::fmt;
use std::num::NonZero;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use wholemem_hal::{Allocation, Device, Event, EventKind, Mapping, Rights, Span, Stream};
use wholemem_os::fork::without_forks;
use wholemem_os::{Deadline, SharedSlice};

use super::{Client, Core, unexpected};
use crate::convert::to_usize;
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

/// Why a draft was not sealed, and the draft. As an [`Error`], it is the reason alone, and the draft is given up.
///
/// ```no_run
/// use wholemem_store::{Client, Error, Refusal};
///
/// # let client = Client::connect("socket")?;
/// let draft = client.create("weights", 64 << 20)?;
/// let span = draft.span()?;
/// if let Err(unsealed) = draft.seal() {
///     assert!(matches!(unsealed.error, Error::Refused(Refusal::StillMapped)));
///     drop(span);
///     unsealed.draft.expect("it is as it was").seal()?;
/// }
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct Unsealed<D> {
    /// Why.
    pub error: Error,
    /// The draft as it was, to be written further, and sealed again. A small one comes back always: where the server has not
    /// answered, it may have it already. Another one does where its memory is still mapped, or where servers died while it was
    /// being sealed ([`Refusal::ServersDied`]), and is given up otherwise.
    pub draft: Option<Box<D>>,
}

impl<D> fmt::Display for Unsealed<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<D: fmt::Debug> std::error::Error for Unsealed<D> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl<D> From<Unsealed<D>> for Error {
    fn from(unsealed: Unsealed<D>) -> Self {
        unsealed.error
    }
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
    /// The memory, to be mapped again where it could not be sealed.
    allocation: Allocation,
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
        let offset = to_usize(memory.offset);
        let given_up = |error| {
            core.tell(Ask::Abandon { create });
            error
        };
        let allocation = core.maps.import(&memory, fd).map_err(given_up)?;
        let (is_hidden, core) = (AtomicBool::new(false), Arc::clone(core));
        // Made before the map, so that a failure gives it up.
        let mut mapped =
            Mapped { create, object, allocation, mapping: None, is_hidden, offset, is_cpu, core };
        mapped.map()?;
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

    /// Seals it, or says why not, and gives it back if it is as it was.
    pub(super) fn seal(mut self, core: &Core) -> Result<Sealed, (Error, Option<Box<Self>>)> {
        self.try_seal(core).map_err(|error| {
            let is_lost = matches!(&self, Self::Mapped(mapped) if mapped.mapping.is_none());
            (error, (!is_lost).then(|| Box::new(self)))
        })
    }

    fn try_seal(&mut self, core: &Core) -> Result<Sealed> {
        core.check_fork()?;
        match self {
            Self::Small { label, members, bytes, wait } => {
                let len = if members.is_empty() { bytes.len() as u64 } else { 0 };
                let ask = || Ask::Create { label: label.clone(), len, members: members.clone(), place: 0 };
                core.with_room(bytes.len(), 0, *wait, || core.request_sealed(ask(), bytes))
            }
            Self::Mapped(mapped) => mapped.seal(),
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
    fn map(&mut self) -> Result<()> {
        let map = || -> Result<_> {
            let mapping = self.core.maps.map_once(&self.allocation, Rights::ReadWrite)?;
            // Where the kernel cannot, a child that is forked meanwhile has to end first.
            let is_hidden = self.is_cpu && mapping.set_inherited(false).is_ok();
            Ok((mapping, is_hidden))
        };
        let (mapping, is_hidden) = if self.is_cpu { without_forks(map)?? } else { map()? };
        self.is_hidden = is_hidden.into();
        if self.is_cpu {
            // Twenty times faster than touching each page; where the kernel cannot, they are touched.
            let _ = mapping.populate();
        }
        self.mapping = Some(mapping);
        Ok(())
    }

    fn seal(&mut self) -> Result<Sealed> {
        self.unmap()?;
        let outcome = self.core.request_sealed(Ask::Seal { create: self.create }, &[]);
        // A child that has it mapped may end, and a next server may live: until then it is written further.
        if matches!(outcome, Err(Error::Refused(Refusal::StillMapped | Refusal::ServersDied { .. }))) {
            self.map()?;
        }
        let sealed = outcome?;
        self.create = 0;
        Ok(sealed)
    }

    /// Takes the map away: host memory that anybody can still write is not sealed. On a device that is a matter of
    /// honour, and a stream may hold the map until its work is known to be over.
    fn unmap(&mut self) -> Result<()> {
        if self.is_cpu && self.mapping()?.is_in_use() {
            return Err(Refusal::StillMapped.into());
        }
        match self.mapping.take().map_or(Ok(()), Mapping::unmap) {
            Err(wholemem_hal::Error::InUse { .. }) if !self.is_cpu => Ok(()),
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
        self.0.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
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
    /// The draft comes back with it, and can be sealed when they have gone.
    #[doc(alias = "Seal")]
    pub fn seal(self) -> Result<Sealed, Unsealed<Self>> {
        let Self { target, len, is_cpu, core } = self;
        target.seal(&core).map_err(|(error, target)| {
            let draft = target.map(|target| Box::new(Self { target: *target, len, is_cpu, core }));
            Unsealed { error, draft }
        })
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
            Ok(self.seal()?)
        };
        let thread = thread::Builder::new().name("wm-store-seal".to_owned()).spawn(seal);
        thread.map(Sealing).map_err(|source| Error::Launch { source })
    }
}
