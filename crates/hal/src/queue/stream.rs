//! Streams: queues of work that a device runs in order.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use wholemem_os::{Deadline, SharedSlice};

use super::event::EventCore;
use super::{Event, Function, LaunchCheck};
use crate::backend::{CapturedOperands, DrainingStream, InFlight, Operand, OwnedResource, Teardown};
use crate::memory::Addressable;
use crate::raw::{Address, RawQueue, RawStream};
use crate::{
    Args, Attempt, BackendError, Device, DeviceLabel, Error, LaunchShape, PinnedBuffer, Result, Rights, Span,
};

/// The length of the pinned staging buffer for copies between a device and pageable host memory.
const STAGE_LEN: usize = 4 << 20;

/// A queue of work on a device. Work runs in the order in which it is enqueued, and the stream keeps its operands alive until it
/// has run.
///
/// On the host backend, work has run when the enqueuing call returns. Do not rely on that: on a GPU, and on the test kit's
/// deferred backend, the same program runs it later. Use [`Stream::synchronize`] or an [`Event`] to wait for it.
///
/// Clones refer to the same stream.
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
    /// True if work on the stream has run when the enqueuing call returns.
    inline: bool,
    state: Mutex<StreamState>,
    pub(super) owner: StreamOwner,
}

/// The code that destroys a stream: this crate or other code in the process.
#[derive(Debug)]
pub(super) enum StreamOwner {
    /// This crate destroys the stream when its last handle is dropped.
    OwnedResource(OwnedResource),
    /// Other code in the process destroys the stream, at any time while no work is being enqueued.
    Borrowed,
    /// Other code in the process destroys the stream, but not before this handle is dropped.
    BorrowedStatic,
}

#[derive(Debug, Default)]
pub(super) struct StreamState {
    in_flight: InFlight,
    /// The operands of the work in the current capture, if there is one.
    pub(super) capture: Option<Vec<Operand>>,
    /// The checks of the current capture.
    pub(super) checks: Vec<Arc<dyn LaunchCheck>>,
    /// The staging buffer of the last copy between a device and pageable host memory, for reuse.
    stage: Option<PinnedBuffer>,
}

impl StreamCore {
    #[inline]
    pub(super) fn state(&self) -> MutexGuard<'_, StreamState> {
        // Only a host kernel can panic while the stream is locked, before or after the lists of operands are changed, so they are
        // consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Compares streams, which are equal if they are clones of each other.
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
            StreamOwner::OwnedResource(owned) => Some(owned),
            StreamOwner::Borrowed | StreamOwner::BorrowedStatic => None,
        };
        let drain = DrainingStream { device: self.device.clone(), raw: self.raw, in_flight, _owned: owned };
        self.device.backend().drain(drain);
    }
}

impl Device {
    /// Creates a stream on this device.
    ///
    /// # Errors
    /// As [`Stream::create`].
    pub fn stream(&self) -> Result<Stream> {
        Stream::create(self)
    }
}

impl Stream {
    /// Creates a stream on a device.
    ///
    /// # Errors
    /// [`Error::Failed`].
    pub fn create(device: &Device) -> Result<Self> {
        let attempt = || Attempt::CreateStream { device: device.label() };
        let backend = device.backend();
        backend.check_fork(attempt)?;
        // SAFETY: the device exists, and the process is not a forked child.
        let raw = unsafe { backend.queue().create_stream(device.id()) }
            .map_err(|cause| backend.to_error(device.id(), attempt(), cause))?;
        let owned = OwnedResource::new(backend, Teardown::DestroyStream(raw));
        Ok(Self::new(device, raw, StreamOwner::OwnedResource(owned)))
    }

    /// Wraps a stream that other code in this process created, given the driver's handle; zero is the device's default stream.
    /// Dropping the wrapper releases the operands of its work but does not destroy the stream.
    ///
    /// If the owner captures the stream, work enqueued through this value is captured, and the owner's graph keeps the operands
    /// alive.
    ///
    /// # Safety
    /// The handle is a stream of this device, and the stream exists at least while work is enqueued through this value.
    #[must_use]
    #[doc(alias = "cudaStream_t")]
    pub unsafe fn from_foreign(device: &Device, handle: u64) -> Self {
        Self::new(device, RawStream { device: device.id(), handle }, StreamOwner::Borrowed)
    }

    /// Wraps a stream that other code in this process created, like [`from_foreign`](Self::from_foreign), if the stream outlives
    /// the wrapper and its clones. Its work costs no more than work on a stream that this crate created.
    ///
    /// # Safety
    /// The handle is a stream of this device. The stream exists until the last clone of this value is dropped and the work
    /// enqueued through it has run.
    #[must_use]
    pub unsafe fn from_foreign_static(device: &Device, handle: u64) -> Self {
        Self::new(device, RawStream { device: device.id(), handle }, StreamOwner::BorrowedStatic)
    }

    fn new(device: &Device, raw: RawStream, owner: StreamOwner) -> Self {
        let inline = device.backend().queue().runs_inline();
        let core = StreamCore { device: device.clone(), raw, inline, state: Mutex::default(), owner };
        Self { core: Arc::new(core) }
    }

    /// Returns the device of the stream.
    #[must_use]
    #[inline]
    pub fn device(&self) -> &Device {
        &self.core.device
    }

    /// Returns the driver's handle of the stream, for other code in this process.
    #[must_use]
    pub fn handle(&self) -> u64 {
        self.core.raw.handle
    }

    /// Returns whether work on the stream has run when the enqueuing call returns, unless it is being captured.
    #[must_use]
    #[inline]
    pub fn runs_inline(&self) -> bool {
        self.core.inline
    }

    /// Runs the closure `work` in stream order on the calling thread and returns `true`, if the stream [runs work
    /// inline](Self::runs_inline) and is not being captured. Otherwise does nothing and returns `false`.
    ///
    /// `work` must not use the stream, which is locked meanwhile; the same holds for host kernels.
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
        // The stream is locked while `work` runs, so that threads that share the stream run one after the other, and no capture
        // can begin.
        let state = self.core.state();
        let now = state.capture.is_none();
        if now {
            work();
        }
        Ok(now)
    }

    /// Enqueues a copy of the span `from` to the span `to`, which must have the same length and not overlap.
    ///
    /// For copies from host memory to host memory, GPU drivers block the caller until earlier work has run, and with it other
    /// threads of the process. Copy such bytes on the CPU after [`synchronize`](Self::synchronize) instead.
    ///
    /// # Errors
    /// [`Error::LengthsDiffer`], [`Error::ZeroLength`], [`Error::Overlap`], [`Error::Denied`], [`Error::WrongBackend`];
    /// [`Error::Failed`].
    #[doc(alias = "cuMemcpyAsync")]
    pub fn copy(&self, to: &Span, from: &Span) -> Result<()> {
        self.transfer(to, from, DuringCapture::Allowed)
    }

    fn transfer(&self, to: &Span, from: &Span, during_capture: DuringCapture) -> Result<()> {
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
        self.enqueue(attempt(), during_capture, [hold(to), hold(from)], |queue, stream| {
            // SAFETY: both spans were checked above, and the stream holds their memory until the copy has run.
            unsafe { queue.copy(stream, to.at(), from.at(), from.len()) }
        })
    }

    /// Enqueues work that sets every byte of the span `to` to `value`.
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
        self.enqueue(attempt(), DuringCapture::Allowed, [hold(to)], |queue, stream| {
            // SAFETY: the span was checked above, and the stream holds its memory until the fill has run.
            unsafe { queue.fill(stream, to.at(), value, to.len()) }
        })
    }

    /// Enqueues work that sets every byte of the span `to` to `value`, without checking the granted rights.
    ///
    /// # Safety
    /// Either the driver refuses an access without rights, or writing the memory is acceptable.
    pub(crate) unsafe fn fill_unchecked(&self, to: &Span, value: u8) -> Result<()> {
        self.enqueue(Attempt::Fill { len: to.len() }, DuringCapture::Allowed, [hold(to)], |queue, stream| {
            // SAFETY: the memory of the span is mapped, and the stream holds it; the caller guarantees that the driver refuses
            // the access, or that writing the memory is acceptable.
            unsafe { queue.fill(stream, to.at(), value, to.len()) }
        })
    }

    /// Launches a kernel on the stream. `operands` is the memory that the kernel accesses, except memory that the caller keeps
    /// alive otherwise.
    ///
    /// # Errors
    /// [`Error::WrongBackend`]; [`Error::Failed`].
    ///
    /// # Safety
    /// The arguments match the parameters of the kernel. The device can access all memory that the kernel accesses; the memory is
    /// in `operands` or outlives the work. The kernel respects the granted rights. If the launch is
    /// [programmatic](LaunchShape::programmatic), the kernel itself waits for the preceding work of the stream.
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
        let has_foreign_operand =
            operands.clone().any(|span| span.memory().backend() != self.device().backend());
        if function.device().backend() != self.device().backend() || has_foreign_operand {
            return Err(Error::WrongBackend { attempt: attempt() });
        }
        self.check_device(function.device().label(), attempt)?;
        let held = operands.map(hold).chain(std::iter::once_with(|| function.operand()));
        self.enqueue(attempt(), DuringCapture::Allowed, held, |queue, stream| {
            // SAFETY: the stream holds the function until the work has run; the caller guarantees the arguments and the memory.
            unsafe { queue.launch(stream, function.raw(), shape, args) }
        })
    }

    /// Records the event after all work that is enqueued on the stream so far.
    ///
    /// # Errors
    /// [`Error::WrongBackend`], [`Error::Capturing`]; [`Error::Failed`].
    #[doc(alias = "cuEventRecord")]
    pub fn record(&self, event: &Event) -> Result<()> {
        let operand = self.event_operand(event, Attempt::Record)?;
        self.check_device(event.device().label(), || Attempt::Record)?;
        self.run_now(Attempt::Record, [operand], |queue, stream| {
            // SAFETY: the event is live, and the stream holds it until the record completes.
            unsafe { queue.record(event.raw(), stream) }
        })?;
        event.set_recorded();
        Ok(())
    }

    /// Makes work that is enqueued on the stream later wait for the latest record of the event.
    ///
    /// On the host backend, where work runs inline, this call blocks without a limit. If another process that may die records the
    /// event, call [`Event::wait`] with a deadline first.
    ///
    /// # Errors
    /// [`Error::WrongBackend`], [`Error::Capturing`]; [`Error::Failed`].
    #[doc(alias = "cuStreamWaitEvent")]
    pub fn await_event(&self, event: &Event) -> Result<()> {
        let operand = self.event_operand(event, Attempt::AwaitEvent)?;
        self.run_now(Attempt::AwaitEvent, [operand], |queue, stream| {
            // SAFETY: the event is live, and the stream holds it until the wait has ended.
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

    /// Waits until all work that is enqueued on the stream has run, and releases its operands.
    ///
    /// # Errors
    /// [`Error::TimedOut`], [`Error::Capturing`]; [`Error::Failed`] if the work failed.
    #[doc(alias = "cuStreamSynchronize")]
    pub fn synchronize(&self, deadline: Deadline) -> Result<()> {
        let attempt = Attempt::Synchronize;
        let backend = self.device().backend();
        backend.check_fork(|| Attempt::Synchronize)?;
        // The stream is not locked during the wait, since other threads may enqueue work meanwhile, or wait with their own
        // deadlines.
        let mut waiting = {
            let elsewhere = self.captured_elsewhere().is_ok_and(|capture| capture.is_some());
            let mut state = self.core.state();
            if elsewhere || state.capture.is_some() {
                return Err(Error::Capturing { attempt });
            }
            TakenOperands { core: &self.core, in_flight: std::mem::take(&mut state.in_flight) }
        };
        // SAFETY: the stream is live, since `self` holds it.
        match unsafe { backend.queue().wait_stream(self.core.raw, deadline) } {
            Ok(true) => {
                waiting.in_flight.clear();
                Ok(())
            }
            Ok(false) => Err(Error::TimedOut { attempt }),
            Err(cause) => Err(backend.to_error(self.device().id(), attempt, cause)),
        }
    }

    /// Copies the bytes of `source` to the span `to` and waits until the copy is complete. If `to` is host memory, the calling
    /// thread writes it while the stream is idle; work that other threads enqueue meanwhile may see partial data.
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
                // SAFETY: `to` was checked above; `source` is borrowed until the copy, which runs inline, has ended.
                unsafe { queue.copy(stream, to.at(), from, to.len()) }
            });
        }
        if let Some(bytes) = to.host_bytes(true) {
            self.synchronize_before_copy(attempt, to.len())?;
            return bytes.write_at(0, source).map_err(|cause| self.copy_error(to.len(), cause));
        }
        self.staged(attempt, to.len(), |stage, bytes, offset, len| {
            bytes.write_at(0, &source[offset..offset + len]).map_err(|cause| self.copy_error(len, cause))?;
            self.transfer(&to.part(offset, len)?, &stage.part(0, len)?, DuringCapture::Refused)?;
            self.synchronize(Deadline::NEVER)
        })
    }

    /// Copies the span `from` to the bytes of `target` and waits until the copy is complete. Host memory is read by the calling
    /// thread, as in [`write`](Self::write).
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
                // SAFETY: `from` was checked above; `target` is borrowed until the copy, which runs inline, has ended.
                unsafe { queue.copy(stream, to, from.at(), from.len()) }
            });
        }
        if let Some(bytes) = from.host_bytes(false) {
            self.synchronize_before_copy(attempt, from.len())?;
            return bytes.read_at(0, target).map_err(|cause| self.copy_error(from.len(), cause));
        }
        self.staged(attempt, from.len(), |stage, bytes, offset, len| {
            self.transfer(&stage.part(0, len)?, &from.part(offset, len)?, DuringCapture::Refused)?;
            self.synchronize(Deadline::NEVER)?;
            bytes.read_at(0, &mut target[offset..offset + len]).map_err(|cause| self.copy_error(len, cause))
        })
    }

    /// Waits until all work that is enqueued on the stream has run, unless `len` is zero.
    fn synchronize_before_copy(&self, attempt: impl Fn() -> Attempt, len: usize) -> Result<()> {
        self.device().backend().check_fork(&attempt)?;
        if self.is_capturing() {
            return Err(Error::Capturing { attempt: attempt() });
        }
        if len == 0 { Ok(()) } else { self.synchronize(Deadline::NEVER) }
    }

    /// Copies `len` bytes in chunks that fit a pinned staging buffer. The stream holds the buffer as an operand, so if a wait
    /// fails, a copy that runs later still finds valid memory.
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
        // The staging buffer is taken from the stream while it is in use, so that two threads never share it.
        let reused = self.core.state().stage.take().filter(|stage| stage.len() >= len.min(STAGE_LEN));
        let stage = reused.map_or_else(|| PinnedBuffer::create(self.device(), len.min(STAGE_LEN)), Ok)?;
        let bytes = stage.bytes()?;
        let all = stage.all();
        let mut offsets = (0..len).step_by(STAGE_LEN);
        offsets.try_for_each(|offset| step(&all, &bytes, offset, STAGE_LEN.min(len - offset)))?;
        self.core.state().stage = Some(stage);
        Ok(())
    }

    fn copy_error(&self, len: usize, cause: wholemem_os::Error) -> Error {
        self.device().backend().to_error(self.device().id(), Attempt::Copy { len }, cause.into())
    }

    /// Enqueues work on the stream; during a capture, the work is captured or refused. `operands` is only evaluated if the work
    /// may run after this call returns: in a capture, and on streams that do not run inline.
    fn enqueue(
        &self,
        attempt: Attempt,
        during_capture: DuringCapture,
        operands: impl IntoIterator<Item = Operand>,
        work: impl FnOnce(&dyn RawQueue, RawStream) -> Result<(), BackendError>,
    ) -> Result<()> {
        let device = self.device();
        device.backend().check_fork(|| attempt.clone())?;
        let queue = device.backend().queue();
        // The stream is locked from the check of the capture until the operands are stored, since another thread may begin or end
        // a capture at any time, and work must not be captured without its operands.
        let mut state = self.core.state();
        let elsewhere = self
            .captured_elsewhere()
            .map_err(|cause| device.backend().to_error(device.id(), attempt.clone(), cause))?;
        if (state.capture.is_some() || elsewhere.is_some()) && during_capture == DuringCapture::Refused {
            return Err(Error::Capturing { attempt });
        }
        let answer = work(queue, self.core.raw);
        // The operands are held even after an error, since a driver may return the error of earlier work and still enqueue this
        // work.
        match (&mut state.capture, elsewhere) {
            (Some(captured), _) => captured.extend(operands),
            (None, _) if self.core.inline => {}
            (None, Some(capture)) => {
                let captured = CapturedOperands::new(device.backend(), operands);
                // SAFETY: the code that captures the stream does not end the capture while another thread enqueues. Dropping
                // `captured` calls no function of the driver.
                if let Err(cause) = unsafe { queue.attach_user_object(capture, Box::new(captured)) } {
                    tracing::warn!(%cause, "cannot attach operands to a foreign graph; leaking them");
                }
            }
            (None, None) => {
                let is_borrowed = matches!(self.core.owner, StreamOwner::Borrowed);
                state.in_flight.hold(device, self.core.raw, operands, is_borrowed);
            }
        }
        answer.map_err(|cause| device.backend().to_error(device.id(), attempt, cause))
    }

    /// Enqueues work that cannot be captured: during a capture of the stream, the call fails.
    pub(super) fn run_now(
        &self,
        attempt: Attempt,
        operands: impl IntoIterator<Item = Operand>,
        work: impl FnOnce(&dyn RawQueue, RawStream) -> Result<(), BackendError>,
    ) -> Result<()> {
        self.enqueue(attempt, DuringCapture::Refused, operands, work)
    }
}

/// The operands of work that was enqueued before a wait for the stream, during the wait. Dropping this value returns the operands
/// of unfinished work to the stream.
struct TakenOperands<'a> {
    core: &'a StreamCore,
    in_flight: InFlight,
}

impl Drop for TakenOperands<'_> {
    fn drop(&mut self) {
        let in_flight = std::mem::take(&mut self.in_flight);
        self.core.state().in_flight.prepend(in_flight);
    }
}

/// Says whether an operation may be captured, or is refused during a capture of its stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DuringCapture {
    Allowed,
    Refused,
}

fn hold(span: &Span) -> Operand {
    Arc::<dyn Addressable>::clone(span.memory())
}
