//! A queue of work on a device, done in order.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use wholemem_os::{Deadline, SharedSlice};

use super::event::EventCore;
use super::{Event, Function};
use crate::backend::{Drain, InFlight, Operand, Owned, Recorded, Teardown};
use crate::memory::Addressable;
use crate::raw::{Address, RawQueue, RawStream};
use crate::{
    Args, Attempt, Cause, Device, DeviceLabel, Error, LaunchShape, PinnedBuffer, Result, Rights, Span,
};

/// How much a copy between a device and plain memory takes in one step.
const STAGE_LEN: usize = 4 << 20;

/// A queue of work on a device. What is enqueued runs in order; what it uses stays until it has run.
///
/// On the host backend work has run when the call returns. Do not rely on it: the same program on a GPU, or under
/// the test kit's deferred backend, runs it later. [`Stream::synchronize`] and [`Event`] are how to know.
///
/// Clones are the same stream.
///
/// ```
/// use wholemem_hal::{Backend, HostConfig, Rights};
///
/// let device = Backend::host(HostConfig::default())?.device(0)?;
/// let map = device.allocate(1 << 20)?.map(Rights::ReadWrite)?;
/// let stream = device.stream()?;
///
/// stream.write(&map.span(0, 5)?, b"hello")?;
/// stream.copy(&map.span(100, 5)?, &map.span(0, 5)?)?;
/// let mut seen = [0; 5];
/// stream.read(&map.span(100, 5)?, &mut seen)?;
/// assert_eq!(&seen, b"hello");
/// # Ok::<(), wholemem_hal::Error>(())
/// ```
#[derive(Debug, Clone)]
#[doc(alias = "CUstream")]
pub struct Stream {
    pub(super) core: Arc<StreamCore>,
}

#[derive(Debug)]
pub(super) struct StreamCore {
    device: Device,
    pub(super) raw: RawStream,
    /// Whether work has run when the call that enqueues it returns.
    inline: bool,
    state: Mutex<State>,
    pub(super) owner: StreamOwner,
}

/// Who destroys a stream, and when.
#[derive(Debug)]
pub(super) enum StreamOwner {
    /// This handle destroys it.
    Owned(Owned),
    /// Other code in the process, at any time while no work is being enqueued.
    Borrowed,
    /// Other code in the process, but not before this handle is dropped.
    BorrowedStatic,
}

#[derive(Debug, Default)]
pub(super) struct State {
    in_flight: InFlight,
    /// The operands of a capture, while there is one.
    pub(super) capture: Option<Vec<Operand>>,
    /// The buffer of the last copy between a device and plain memory, for the next.
    stage: Option<PinnedBuffer>,
}

impl StreamCore {
    #[inline]
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        // Panics under this lock can only come from a host kernel, which has run or has not; the lists are whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Streams are equal if they are clones of each other.
impl PartialEq for Stream {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.core, &other.core)
    }
}

impl Eq for Stream {}

impl Drop for StreamCore {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let in_flight = std::mem::take(&mut state.in_flight);
        let owned = match std::mem::replace(&mut self.owner, StreamOwner::Borrowed) {
            StreamOwner::Owned(owned) => Some(owned),
            StreamOwner::Borrowed | StreamOwner::BorrowedStatic => None,
        };
        let drain = Drain { device: self.device.clone(), raw: self.raw, in_flight, _owned: owned };
        self.device.backend().drain(drain);
    }
}

impl Device {
    /// Creates a stream that runs work here.
    ///
    /// # Errors
    /// As [`Stream::create`].
    pub fn stream(&self) -> Result<Stream> {
        Stream::create(self)
    }
}

impl Stream {
    /// Creates a stream.
    ///
    /// # Errors
    /// [`Error::Failed`].
    pub fn create(device: &Device) -> Result<Self> {
        let attempt = || Attempt::CreateStream { device: device.label() };
        let backend = device.backend();
        backend.check_fork(attempt)?;
        // SAFETY: the device exists, and this is no forked child.
        let raw = unsafe { backend.queue().create_stream(device.id()) }
            .map_err(|cause| backend.refused(device.id(), attempt(), cause))?;
        let owned = Owned::new(backend, Teardown::DestroyStream(raw));
        Ok(Self::new(device, raw, StreamOwner::Owned(owned)))
    }

    /// A stream that something else in this process made, by the driver's own number for it; zero is the device's
    /// default stream. Dropping it lets go of what its work used, and leaves the stream to its owner.
    ///
    /// While its owner captures the stream, work that is enqueued through this is recorded, and the graph holds what it uses.
    ///
    /// # Safety
    /// The number is that of a stream of this device, which stays at least as long as work is enqueued through this.
    #[must_use]
    #[doc(alias = "cudaStream_t")]
    pub unsafe fn from_foreign(device: &Device, handle: u64) -> Self {
        Self::new(device, RawStream { device: device.id(), handle }, StreamOwner::Borrowed)
    }

    /// A stream that something else in this process made, as [`from_foreign`](Self::from_foreign), and that outlives this
    /// value and its clones: its work costs no more than that of a stream made here.
    ///
    /// # Safety
    /// The number is that of a stream of this device, which stays until the last clone of this is dropped, and until what
    /// was enqueued through it has run.
    #[must_use]
    pub unsafe fn from_lasting(device: &Device, handle: u64) -> Self {
        Self::new(device, RawStream { device: device.id(), handle }, StreamOwner::BorrowedStatic)
    }

    fn new(device: &Device, raw: RawStream, owner: StreamOwner) -> Self {
        let inline = device.backend().queue().runs_inline();
        let core = StreamCore { device: device.clone(), raw, inline, state: Mutex::default(), owner };
        Self { core: Arc::new(core) }
    }

    /// The device it works on.
    #[must_use]
    #[inline]
    pub fn device(&self) -> &Device {
        &self.core.device
    }

    /// The driver's own number for it: what others in this process call it by.
    #[must_use]
    pub fn handle(&self) -> u64 {
        self.core.raw.handle
    }

    /// Whether work has run when the call that enqueues it returns, unless it is being recorded.
    #[must_use]
    #[inline]
    pub fn runs_inline(&self) -> bool {
        self.core.inline
    }

    /// Does something of the caller's own in the stream's turn, if work [runs inline](Self::runs_inline) and is not being
    /// recorded. Otherwise it would have to be kept for later: nothing is done, and the answer is `false`.
    ///
    /// Like a kernel of the host, `work` must not use the stream, which is locked meanwhile.
    ///
    /// ```
    /// use wholemem_hal::{Backend, HostConfig};
    ///
    /// let stream = Backend::host(HostConfig::default())?.device(0)?.stream()?;
    /// let mut sum = 0;
    /// assert!(stream.run_inline("sum", || sum = 2 + 2)?);
    /// assert_eq!(sum, 4);
    /// stream.capture(|stream| {
    ///     assert!(!stream.run_inline("sum", || sum = 5)?);
    ///     Ok(())
    /// })?;
    /// assert_eq!(sum, 4);
    /// # Ok::<(), wholemem_hal::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Forked`], with the name of the work.
    #[inline]
    pub fn run_inline(&self, name: &'static str, work: impl FnOnce()) -> Result<bool> {
        self.device().backend().check_fork(|| Attempt::Launch { name })?;
        if !self.core.inline {
            return Ok(false);
        }
        // Held while it works: threads that share the stream are one after the other, and no capture begins meanwhile.
        let state = self.core.state();
        let now = state.capture.is_none();
        if now {
            work();
        }
        Ok(now)
    }

    /// Copies `from` to `to`, which must be as long and not overlap it.
    ///
    /// Between two places of the host, drivers of GPUs make the caller wait for what is enqueued before, and other threads of
    /// the process with it: better copy such bytes oneself, behind [`synchronize`](Self::synchronize).
    ///
    /// # Errors
    /// [`Error::LengthsDiffer`], [`Error::ZeroLength`], [`Error::Overlap`], [`Error::Denied`], [`Error::WrongBackend`];
    /// [`Error::Failed`].
    #[doc(alias = "cuMemcpyAsync")]
    pub fn copy(&self, to: &Span, from: &Span) -> Result<()> {
        self.transfer(to, from, Recording::Allowed)
    }

    fn transfer(&self, to: &Span, from: &Span, recording: Recording) -> Result<()> {
        let attempt = || Attempt::Copy { len: from.len() };
        if to.len() != from.len() {
            return Err(Error::LengthsDiffer { from: from.len(), to: to.len() });
        }
        if from.is_empty() {
            return Err(Error::ZeroLength { attempt: attempt() });
        }
        to.check(self.device(), Rights::ReadWrite, attempt)?;
        from.check(self.device(), Rights::Read, attempt)?;
        if to.overlaps(from) {
            return Err(Error::Overlap { attempt: attempt() });
        }
        self.enqueue(attempt(), recording, [hold(to), hold(from)], |queue, stream| {
            // SAFETY: both ranges were checked above, and are held until the copy has run.
            unsafe { queue.copy(stream, to.at(), from.at(), from.len()) }
        })
    }

    /// Sets every byte of `to`.
    ///
    /// # Errors
    /// [`Error::ZeroLength`], [`Error::Denied`], [`Error::WrongBackend`]; [`Error::Failed`].
    #[doc(alias = "cuMemsetD8Async")]
    pub fn fill(&self, to: &Span, value: u8) -> Result<()> {
        let attempt = || Attempt::Fill { len: to.len() };
        if to.is_empty() {
            return Err(Error::ZeroLength { attempt: attempt() });
        }
        to.check(self.device(), Rights::ReadWrite, attempt)?;
        self.enqueue(attempt(), Recording::Allowed, [hold(to)], |queue, stream| {
            // SAFETY: the range was checked above, and is held until the fill has run.
            unsafe { queue.fill(stream, to.at(), value, to.len()) }
        })
    }

    /// Sets every byte of `to`, whatever rights were granted.
    ///
    /// # Safety
    /// Work that the device may not do is refused by the driver, or is what is wanted.
    pub(crate) unsafe fn fill_unchecked(&self, to: &Span, value: u8) -> Result<()> {
        self.enqueue(Attempt::Fill { len: to.len() }, Recording::Allowed, [hold(to)], |queue, stream| {
            // SAFETY: the range is mapped and held; the caller answers for the rights.
            unsafe { queue.fill(stream, to.at(), value, to.len()) }
        })
    }

    /// Runs a kernel. `operands` are the memory it touches, beyond what the caller keeps alive otherwise.
    ///
    /// # Errors
    /// [`Error::WrongBackend`]; [`Error::Failed`].
    ///
    /// # Safety
    /// The arguments are what the kernel takes. What it touches is accessible to the device, and is in `operands` or
    /// outlives the work. It keeps to the rights that were granted. Where it is [set up early](LaunchShape::early), it waits
    /// by itself for what is before it on the stream.
    #[doc(alias = "cuLaunchKernel")]
    pub unsafe fn launch<'a>(
        &self,
        function: &Function,
        shape: &LaunchShape,
        args: &Args,
        operands: impl IntoIterator<Item = &'a Span, IntoIter: Clone>,
    ) -> Result<()> {
        let attempt = || Attempt::Launch { name: function.name() };
        let operands = operands.into_iter();
        let strangers = operands.clone().any(|span| span.memory().backend() != self.device().backend());
        if function.device().backend() != self.device().backend() || strangers {
            return Err(Error::WrongBackend { attempt: attempt() });
        }
        self.check_device(function.device().label(), attempt)?;
        let held = operands.map(hold).chain(std::iter::once_with(|| function.operand()));
        self.enqueue(attempt(), Recording::Allowed, held, |queue, stream| {
            // SAFETY: the function is held until the work has run; the caller answers for arguments and memory.
            unsafe { queue.launch(stream, function.raw(), shape, args) }
        })
    }

    /// Marks the end of what is enqueued now.
    ///
    /// # Errors
    /// [`Error::WrongBackend`], [`Error::Capturing`]; [`Error::Failed`].
    #[doc(alias = "cuEventRecord")]
    pub fn record(&self, event: &Event) -> Result<()> {
        let operand = self.event_operand(event, Attempt::Record)?;
        self.check_device(event.device().label(), || Attempt::Record)?;
        self.run_now(Attempt::Record, [operand], |queue, stream| {
            // SAFETY: the event is live, and held until the mark is reached.
            unsafe { queue.record(event.raw(), stream) }
        })?;
        event.set_recorded();
        Ok(())
    }

    /// Makes what is enqueued from here on wait for the event's latest record.
    ///
    /// Where work runs inline, on the host backend, this call itself waits, and for as long as it takes: an event of
    /// another process that may die is better waited for by [`Event::wait`] first, with a deadline.
    ///
    /// # Errors
    /// [`Error::WrongBackend`], [`Error::Capturing`]; [`Error::Failed`].
    #[doc(alias = "cuStreamWaitEvent")]
    pub fn await_event(&self, event: &Event) -> Result<()> {
        let operand = self.event_operand(event, Attempt::AwaitEvent)?;
        self.run_now(Attempt::AwaitEvent, [operand], |queue, stream| {
            // SAFETY: the event is live, and held until the wait is over.
            unsafe { queue.await_event(stream, event.raw()) }
        })
    }

    fn check_device(&self, found: DeviceLabel, attempt: impl FnOnce() -> Attempt) -> Result<()> {
        let expected = self.device().label();
        if found == expected {
            Ok(())
        } else {
            Err(Error::WrongDevice { attempt: attempt(), expected, found })
        }
    }

    fn event_operand(&self, event: &Event, attempt: Attempt) -> Result<Operand> {
        if event.backend() != self.device().backend() {
            return Err(Error::WrongBackend { attempt });
        }
        Ok(Arc::<EventCore>::clone(event.core()))
    }

    /// Waits until all that is enqueued has run, and lets go of what it used.
    ///
    /// # Errors
    /// [`Error::TimedOut`], [`Error::Capturing`]; [`Error::Failed`] when the work failed.
    #[doc(alias = "cuStreamSynchronize")]
    pub fn synchronize(&self, deadline: Deadline) -> Result<()> {
        let attempt = Attempt::Synchronize;
        let backend = self.device().backend();
        backend.check_fork(|| Attempt::Synchronize)?;
        // Not under the lock: other threads may enqueue meanwhile, or wait with a deadline of their own.
        let mut waiting = {
            let elsewhere = self.captured_elsewhere().is_ok_and(|capture| capture.is_some());
            let mut state = self.core.state();
            if elsewhere || state.capture.is_some() {
                return Err(Error::Capturing { attempt });
            }
            Waiting { core: &self.core, in_flight: std::mem::take(&mut state.in_flight) }
        };
        // SAFETY: the stream is live because `self` holds it.
        match unsafe { backend.queue().wait_stream(self.core.raw, deadline) } {
            Ok(true) => {
                waiting.in_flight.clear();
                Ok(())
            }
            Ok(false) => Err(Error::TimedOut { attempt }),
            Err(cause) => Err(backend.refused(self.device().id(), attempt, cause)),
        }
    }

    /// Copies `source` in, and waits until it is there. Memory of the host is written by the caller when the stream is idle:
    /// what others enqueue meanwhile may find it half done.
    ///
    /// # Errors
    /// As [`Stream::copy`] and [`Stream::synchronize`].
    pub fn write(&self, to: &Span, source: &[u8]) -> Result<()> {
        let attempt = || Attempt::Copy { len: source.len() };
        if to.len() != source.len() {
            return Err(Error::LengthsDiffer { from: source.len(), to: to.len() });
        }
        to.check(self.device(), Rights::ReadWrite, attempt)?;
        if self.core.inline {
            let from = Address::of_host(source.as_ptr());
            return self.run_now(attempt(), [], |queue, stream| {
                // SAFETY: `to` was checked above; `source` is borrowed until the copy, which runs inline, is over.
                unsafe { queue.copy(stream, to.at(), from, to.len()) }
            });
        }
        if let Some(bytes) = to.host_bytes(true) {
            self.settle(attempt, to.len())?;
            return bytes.write_at(0, source).map_err(|cause| self.stage_error(to.len(), cause));
        }
        self.staged(attempt, to.len(), |stage, bytes, offset, len| {
            bytes.write_at(0, &source[offset..offset + len]).map_err(|cause| self.stage_error(len, cause))?;
            self.transfer(&to.part(offset, len)?, &stage.part(0, len)?, Recording::Refused)?;
            self.synchronize(Deadline::NEVER)
        })
    }

    /// Copies out into `target`, and waits until it is there; memory of the host as [`write`](Self::write) does.
    ///
    /// # Errors
    /// As [`Stream::copy`] and [`Stream::synchronize`].
    pub fn read(&self, from: &Span, target: &mut [u8]) -> Result<()> {
        let attempt = || Attempt::Copy { len: from.len() };
        if target.len() != from.len() {
            return Err(Error::LengthsDiffer { from: from.len(), to: target.len() });
        }
        from.check(self.device(), Rights::Read, attempt)?;
        if self.core.inline {
            let to = Address::of_host(target.as_mut_ptr());
            return self.run_now(attempt(), [], |queue, stream| {
                // SAFETY: `from` was checked above; `target` is borrowed until the copy, which runs inline, is over.
                unsafe { queue.copy(stream, to, from.at(), from.len()) }
            });
        }
        if let Some(bytes) = from.host_bytes(false) {
            self.settle(attempt, from.len())?;
            return bytes.read_at(0, target).map_err(|cause| self.stage_error(from.len(), cause));
        }
        self.staged(attempt, from.len(), |stage, bytes, offset, len| {
            self.transfer(&stage.part(0, len)?, &from.part(offset, len)?, Recording::Refused)?;
            self.synchronize(Deadline::NEVER)?;
            bytes.read_at(0, &mut target[offset..offset + len]).map_err(|cause| self.stage_error(len, cause))
        })
    }

    /// Waits until what is enqueued has run, if there is anything to copy then.
    fn settle(&self, attempt: impl Fn() -> Attempt, len: usize) -> Result<()> {
        self.device().backend().check_fork(&attempt)?;
        if self.is_capturing() {
            return Err(Error::Capturing { attempt: attempt() });
        }
        if len == 0 { Ok(()) } else { self.synchronize(Deadline::NEVER) }
    }

    /// Walks over `len` bytes in steps that fit a pinned buffer. The buffer is an operand like any other, so even if
    /// waiting fails, a late copy meets memory that is still there.
    fn staged(
        &self,
        attempt: impl Fn() -> Attempt,
        len: usize,
        mut step: impl FnMut(&Span, &SharedSlice<'_>, usize, usize) -> Result<()>,
    ) -> Result<()> {
        self.device().backend().check_fork(&attempt)?;
        if self.is_capturing() {
            return Err(Error::Capturing { attempt: attempt() });
        }
        if len == 0 {
            return Ok(());
        }
        // Taken while it is used, so that two threads never share it.
        let kept = self.core.state().stage.take().filter(|stage| stage.len() >= len.min(STAGE_LEN));
        let stage = kept.map_or_else(|| PinnedBuffer::create(self.device(), len.min(STAGE_LEN)), Ok)?;
        let bytes = stage.bytes()?;
        let all = stage.all();
        let mut offsets = (0..len).step_by(STAGE_LEN);
        offsets.try_for_each(|offset| step(&all, &bytes, offset, STAGE_LEN.min(len - offset)))?;
        self.core.state().stage = Some(stage);
        Ok(())
    }

    fn stage_error(&self, len: usize, cause: wholemem_os::Error) -> Error {
        self.device().backend().refused(self.device().id(), Attempt::Copy { len }, cause.into())
    }

    /// Enqueues work; during a capture, records or refuses it. Operands are asked for only where work may run later than
    /// this call: in a recording, and on streams that do not run inline.
    fn enqueue(
        &self,
        attempt: Attempt,
        recording: Recording,
        operands: impl IntoIterator<Item = Operand>,
        work: impl FnOnce(&dyn RawQueue, RawStream) -> Result<(), Cause>,
    ) -> Result<()> {
        let device = self.device();
        device.backend().check_fork(|| attempt.clone())?;
        let queue = device.backend().queue();
        // One lock from the look at the capture to the hold of the operands: another thread may begin or end a capture
        // at any moment, and work must not be recorded without what it uses.
        let mut state = self.core.state();
        let elsewhere = self
            .captured_elsewhere()
            .map_err(|cause| device.backend().refused(device.id(), attempt.clone(), cause))?;
        if (state.capture.is_some() || elsewhere.is_some()) && recording == Recording::Refused {
            return Err(Error::Capturing { attempt });
        }
        let answer = work(queue, self.core.raw);
        // Held also when it was refused: a driver may answer with the failure of earlier work, and enqueue all the same.
        match (&mut state.capture, elsewhere) {
            (Some(captured), _) => captured.extend(operands),
            (None, _) if self.core.inline => {}
            (None, Some(capture)) => {
                let recorded = Recorded::new(device.backend(), operands);
                // SAFETY: who captures the stream does not end that while another thread enqueues. What is kept is handed on
                // when it is dropped, by no call of the driver.
                if let Err(cause) = unsafe { queue.keep(capture, Box::new(recorded)) } {
                    tracing::warn!(%cause, "somebody's graph holds nothing; keeping what it uses for ever");
                }
            }
            (None, None) => {
                let is_borrowed = matches!(self.core.owner, StreamOwner::Borrowed);
                state.in_flight.hold(device, self.core.raw, operands, is_borrowed);
            }
        }
        answer.map_err(|cause| device.backend().refused(device.id(), attempt, cause))
    }

    /// Enqueues work that cannot be recorded.
    pub(super) fn run_now(
        &self,
        attempt: Attempt,
        operands: impl IntoIterator<Item = Operand>,
        work: impl FnOnce(&dyn RawQueue, RawStream) -> Result<(), Cause>,
    ) -> Result<()> {
        self.enqueue(attempt, Recording::Refused, operands, work)
    }
}

/// What was enqueued before a wait, while the wait lasts. What is left of it then goes back.
struct Waiting<'a> {
    core: &'a StreamCore,
    in_flight: InFlight,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let in_flight = std::mem::take(&mut self.in_flight);
        self.core.state().in_flight.prepend(in_flight);
    }
}

/// What becomes of work during a capture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Recording {
    Allowed,
    Refused,
}

fn hold(span: &Span) -> Operand {
    Arc::<dyn Addressable>::clone(span.memory())
}
