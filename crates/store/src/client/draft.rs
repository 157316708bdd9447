//! Drafts: objects of a store that are being written, visible to their creator only.

use std::fmt;
use std::num::NonZero;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use wholemem_hal::{Allocation, Device, Event, EventKind, Mapping, Rights, Span, Stream};
use wholemem_os::fork::without_forks;
use wholemem_os::{Deadline, SharedSlice};

use super::{Client, ClientCore, unexpected};
use crate::convert::to_usize;
use crate::protocol::{Answer, Label, MemberSpec, RequestKind, SMALL, check_labels};
use crate::{Error, ObjectId, Refusal, Result};

/// The result of sealing an object: its id and its version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sealed {
    /// The id of the sealed object.
    pub id: ObjectId,
    /// The version of the object, one more than that of the object that had the same name before.
    pub version: u64,
}

/// The error of a failed seal, with the draft that was not sealed. Converting this error into an [`Error`] drops the draft.
///
/// ```no_run
/// use wholemem_store::{Client, Error, Refusal};
///
/// # let client = Client::connect("socket")?;
/// let draft = client.create("weights", 64 << 20)?;
/// let span = draft.span()?;
/// if let Err(failed) = draft.seal() {
///     assert!(matches!(failed.error, Error::Refused(Refusal::StillMapped)));
///     drop(span);
///     failed.draft.expect("a draft that is still mapped is returned").seal()?;
/// }
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct SealError<D> {
    /// The reason for which the draft was not sealed.
    pub error: Error,
    /// The draft, which can be written further and sealed again. A small draft is always returned; if the server did not answer,
    /// the server may have sealed the object nevertheless. A larger draft is returned if its memory is still mapped or if servers
    /// died during the seal ([`Refusal::ServersDied`]); otherwise the draft is abandoned.
    pub draft: Option<Box<D>>,
}

impl<D> fmt::Display for SealError<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<D: fmt::Debug> std::error::Error for SealError<D> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl<D> From<SealError<D>> for Error {
    fn from(unsealed: SealError<D>) -> Self {
        unsealed.error
    }
}

/// The memory of a draft: of an object or a pack that is being written.
#[derive(Debug)]
pub(super) enum DraftMemory {
    /// A small object in host memory. Its bytes are sent to the server with the request that seals it.
    Small { label: Label, members: Vec<MemberSpec>, bytes: Vec<u8>, wait: Duration },
    /// A large object, or an object on a device, in shared memory that is mapped in this process.
    MappedDraft(MappedDraft),
}

#[derive(Debug)]
pub(super) struct MappedDraft {
    /// The id of the request that created the draft, by which the server identifies the draft; zero once the draft is sealed.
    create: u64,
    object: ObjectId,
    /// The memory of the draft, which is mapped again if sealing fails.
    allocation: Allocation,
    /// The map of the draft's memory; `None` once the draft is sealed or abandoned.
    mapping: Option<Mapping>,
    /// True if forked children do not inherit the map of the draft, because an inherited map would prevent sealing. False once an
    /// address of the map is handed out.
    is_fork_private: AtomicBool,
    offset: usize,
    is_cpu: bool,
    core: Arc<ClientCore>,
}

impl DraftMemory {
    pub(super) fn create(
        core: &Arc<ClientCore>,
        label: Label,
        members: Vec<MemberSpec>,
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
        // The length of a pack is not sent, because the server computes it from the objects of the pack.
        let single = if members.is_empty() { len as u64 } else { 0 };
        let kind = RequestKind::Create { label, len: single, members, place };
        let (create, answer, fds) = core.with_space(len, place, wait, || {
            core.request_with_id(kind.clone(), &[], Deadline::after(Client::TIMEOUT))
        })?;
        let (Answer::Created { object, memory }, Ok([fd])) = (answer, <[_; 1]>::try_from(fds)) else {
            return Err(unexpected());
        };
        let offset = to_usize(memory.offset);
        let timed_out = |error| {
            core.notify(RequestKind::Abandon { create });
            error
        };
        let allocation = core.maps.import(&memory, fd).map_err(timed_out)?;
        let (is_fork_private, core) = (AtomicBool::new(false), Arc::clone(core));
        // The draft is constructed before its memory is mapped, so that `Drop` abandons the object if mapping fails.
        let mut mapped =
            MappedDraft { create, object, allocation, mapping: None, is_fork_private, offset, is_cpu, core };
        mapped.map()?;
        Ok(Self::MappedDraft(mapped))
    }

    pub(super) fn copy_at(&mut self, offset: usize, source: SharedSlice<'_>, size: usize) -> Result<()> {
        let out_of_range = Error::OutOfRange { offset, len: source.len(), size };
        match self {
            Self::Small { bytes, .. } => {
                let end = offset.checked_add(source.len());
                let range = end.and_then(|end| bytes.get_mut(offset..end)).ok_or(out_of_range)?;
                Ok(source.read_at(0, range)?)
            }
            Self::MappedDraft(mapped) if mapped.is_cpu => {
                let map = mapped.mapping()?.bytes()?.part(mapped.offset, size)?;
                copy_in(map, offset, source).map_err(|_| out_of_range)
            }
            Self::MappedDraft(mapped) => Err(Error::OnDevice { object: mapped.object }),
        }
    }

    pub(super) fn span(&self, offset: usize, len: usize) -> Result<Option<Span>> {
        match self {
            Self::Small { .. } => Ok(None),
            Self::MappedDraft(mapped) => {
                Ok(Some(mapped.inheritable_mapping()?.span(mapped.offset + offset, len)?))
            }
        }
    }

    pub(super) fn device(&self) -> Option<Device> {
        match self {
            Self::Small { .. } => None,
            Self::MappedDraft(mapped) => mapped.mapping.as_ref().map(Mapping::device),
        }
    }

    /// Seals the draft. If sealing fails, returns the error, and the draft if it is still usable.
    pub(super) fn seal(mut self, core: &ClientCore) -> Result<Sealed, (Error, Option<Box<Self>>)> {
        self.try_seal(core).map_err(|error| {
            let is_lost = matches!(&self, Self::MappedDraft(mapped) if mapped.mapping.is_none());
            (error, (!is_lost).then(|| Box::new(self)))
        })
    }

    fn try_seal(&mut self, core: &ClientCore) -> Result<Sealed> {
        core.check_fork()?;
        match self {
            Self::Small { label, members, bytes, wait } => {
                let len = if members.is_empty() { bytes.len() as u64 } else { 0 };
                let kind =
                    || RequestKind::Create { label: label.clone(), len, members: members.clone(), place: 0 };
                core.with_space(bytes.len(), 0, *wait, || core.request_sealed(kind(), bytes))
            }
            Self::MappedDraft(mapped) => mapped.seal(),
        }
    }
}

/// Copies bytes to the shared memory of a draft. Long copies use several threads, because one core does not reach the memory
/// bandwidth.
fn copy_in(to: SharedSlice<'_>, offset: usize, source: SharedSlice<'_>) -> wholemem_os::Result<()> {
    const BYTES_PER_THREAD: usize = 4 << 20;
    const MAX_THREADS: usize = 4;
    // The number of cores is cached, because counting them takes longer than a short copy.
    static CORES: OnceLock<usize> = OnceLock::new();
    let cores = || *CORES.get_or_init(|| thread::available_parallelism().map_or(1, NonZero::get));
    let threads = match source.len() / BYTES_PER_THREAD {
        0 | 1 => 1,
        parts => parts.min(MAX_THREADS).min(cores()),
    };
    let to = to.part(offset, source.len())?;
    let share = source.len().div_ceil(threads).max(1);
    let copy = move |at: usize| to.copy_from(at, &source.part(at, share.min(source.len() - at))?);
    thread::scope(|scope| {
        let others = (share..source.len()).step_by(share).map(|at| scope.spawn(move || copy(at)));
        let others: Vec<_> = others.collect();
        let others = others.into_iter().map(|other| other.join().expect("a copy does not panic"));
        others.fold(copy(0), Result::and)
    })
}

impl MappedDraft {
    fn map(&mut self) -> Result<()> {
        let map = || -> Result<_> {
            let mapping = self.core.maps.map_once(&self.allocation, Rights::ReadWrite)?;
            // If the kernel does not support maps that children do not inherit, sealing fails until children that were forked
            // meanwhile exit.
            let is_fork_private = self.is_cpu && mapping.set_inherited(false).is_ok();
            Ok((mapping, is_fork_private))
        };
        let (mapping, is_fork_private) = if self.is_cpu { without_forks(map)?? } else { map()? };
        self.is_fork_private = is_fork_private.into();
        if self.is_cpu {
            // Populating the map is 20 times faster than page faults. If the kernel does not support it, pages are faulted in one
            // by one.
            let _ = mapping.populate();
        }
        self.mapping = Some(mapping);
        Ok(())
    }

    fn seal(&mut self) -> Result<Sealed> {
        self.unmap()?;
        let outcome = self.core.request_sealed(RequestKind::Seal { create: self.create }, &[]);
        // The draft stays writable and can be sealed later, when a child that maps the memory has exited or the next server
        // succeeds.
        if matches!(outcome, Err(Error::Refused(Refusal::StillMapped | Refusal::ServersDied { .. }))) {
            self.map()?;
        }
        let sealed = outcome?;
        self.create = 0;
        Ok(sealed)
    }

    /// Unmaps the memory of the draft, because host memory that is mapped for writing cannot be sealed. Device memory cannot be
    /// protected, so a stream may hold its map until the stream's work has completed.
    fn unmap(&mut self) -> Result<()> {
        if self.is_cpu && self.mapping()?.is_in_use() {
            return Err(Refusal::StillMapped.into());
        }
        match self.mapping.take().map_or(Ok(()), Mapping::unmap) {
            Err(wholemem_hal::Error::InUse { .. }) if !self.is_cpu => Ok(()),
            outcome => Ok(outcome?),
        }
    }

    /// Returns the map of the draft's memory, for a caller that may also use the map in a forked child.
    fn inheritable_mapping(&self) -> Result<&Mapping> {
        let mapping = self.mapping()?;
        if self.is_fork_private.load(Ordering::Relaxed) {
            mapping.set_inherited(true)?;
            self.is_fork_private.store(false, Ordering::Relaxed);
        }
        Ok(mapping)
    }

    fn mapping(&self) -> Result<&Mapping> {
        self.mapping.as_ref().ok_or(Error::Protocol { rule: "a draft is mapped until it is sealed" })
    }
}

impl Drop for MappedDraft {
    fn drop(&mut self) {
        drop(self.mapping.take());
        if self.create != 0 && self.core.epoch.is_current() {
            self.core.notify(RequestKind::Abandon { create: self.create });
        }
    }
}

/// An object of a store that is being written. Dropping the draft abandons the object.
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
    memory: DraftMemory,
    len: usize,
    is_cpu: bool,
    core: Arc<ClientCore>,
}

/// A draft that is sealed in the background as soon as a stream has completed its submitted work.
#[derive(Debug)]
#[must_use = "dropping this does not cancel the seal, but its error is lost"]
pub struct PendingSeal(JoinHandle<Result<Sealed>>);

impl PendingSeal {
    /// Waits until the draft is sealed in the background, and returns the result.
    ///
    /// # Errors
    /// As [`Draft::seal`]; errors of the stream's work.
    pub fn wait(self) -> Result<Sealed> {
        self.0.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

impl Draft {
    pub(super) fn create(
        core: &Arc<ClientCore>,
        label: Label,
        len: usize,
        place: u32,
        wait: Duration,
    ) -> Result<Self> {
        let memory = DraftMemory::create(core, label, Vec::new(), len, place, wait)?;
        Ok(Self { memory, len, is_cpu: place == 0, core: Arc::clone(core) })
    }

    /// Returns the length of the draft in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the draft has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns true if the draft is in host memory.
    #[must_use]
    pub fn is_cpu(&self) -> bool {
        self.is_cpu
    }

    /// Returns true, because a draft can be written until it is sealed.
    #[must_use]
    pub fn is_mutable(&self) -> bool {
        true
    }

    /// Writes bytes to a draft in host memory, at an offset in bytes.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::OnDevice`].
    pub fn write_at(&mut self, offset: usize, source: &[u8]) -> Result<()> {
        self.copy_at(offset, source.into())
    }

    /// Writes bytes that may change during the copy, as [`Draft::write_at`] does; then any mixture of old and new bytes may be
    /// written.
    ///
    /// # Errors
    /// As [`Draft::write_at`].
    pub fn copy_at(&mut self, offset: usize, source: SharedSlice<'_>) -> Result<()> {
        self.memory.copy_at(offset, source, self.len)
    }

    /// Returns the writable memory of a draft of 1 MiB or more in host memory; `None` for a smaller draft, whose bytes are sent
    /// to the server when it is sealed.
    ///
    /// # Errors
    /// [`Error::OnDevice`].
    pub fn bytes(&self) -> Result<Option<SharedSlice<'_>>> {
        match &self.memory {
            DraftMemory::Small { .. } => Ok(None),
            DraftMemory::MappedDraft(mapped) if mapped.is_cpu => {
                Ok(Some(mapped.inheritable_mapping()?.bytes()?.part(mapped.offset, self.len)?))
            }
            DraftMemory::MappedDraft(mapped) => Err(Error::OnDevice { object: mapped.object }),
        }
    }

    /// Returns the memory of the draft as a span, for copies by streams and for kernels; `None` for a small draft in host memory.
    ///
    /// # Errors
    /// [`Error::Memory`].
    #[doc(alias = "mutable_data")]
    pub fn span(&self) -> Result<Option<Span>> {
        self.memory.span(0, self.len)
    }

    /// Returns the device of the draft's memory; `None` for a small draft in host memory.
    #[must_use]
    pub fn device(&self) -> Option<Device> {
        self.memory.device()
    }

    /// Seals the draft: the object becomes immutable and visible to all clients under its name. Streams must have completed their
    /// writes before.
    ///
    /// # Errors
    /// [`Refusal::StillMapped`] if its memory is still mapped for writing: by a [`Span`] that is not
    /// dropped, or by a child that was forked while a span or [bytes](Draft::bytes) existed. The error returns the draft, which
    /// can be sealed once the maps are gone.
    #[doc(alias = "Seal")]
    pub fn seal(self) -> Result<Sealed, SealError<Self>> {
        let Self { memory, len, is_cpu, core } = self;
        memory.seal(&core).map_err(|(error, memory)| {
            let draft = memory.map(|memory| Box::new(Self { memory: *memory, len, is_cpu, core }));
            SealError { error, draft }
        })
    }

    /// Seals the draft as soon as the stream has completed the work submitted so far. If this process dies earlier, the object is
    /// never sealed.
    ///
    /// # Errors
    /// [`Error::Memory`] if the event cannot be recorded on the stream.
    pub fn seal_after(self, stream: &Stream) -> Result<PendingSeal> {
        let reached = Event::create(stream.device(), EventKind::Order)?;
        stream.record(&reached)?;
        let seal = move || {
            reached.wait(Deadline::NEVER)?;
            Ok(self.seal()?)
        };
        let thread = thread::Builder::new().name("wm-store-seal".to_owned()).spawn(seal);
        thread.map(PendingSeal).map_err(|source| Error::Launch { source })
    }
}
