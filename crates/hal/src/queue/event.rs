//! Events: points in a stream that other streams, the CPU and other processes can wait for.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use wholemem_os::Deadline;

use crate::backend::{OwnedResource, Teardown};
use crate::raw::{EventHandle, EventKind, RawEvent};
use crate::{Attempt, Backend, Device, DeviceId, Error, Result};

/// A point in a stream, after it was [recorded](crate::Stream::record). Recording again moves the event.
///
/// ```
/// use wholemem_hal::{Backend, Event, EventKind, HostConfig};
/// use wholemem_os::Deadline;
///
/// let device = Backend::host(HostConfig::default())?.device(0)?;
/// let (first, second) = (device.stream()?, device.stream()?);
/// let event = Event::create(&device, EventKind::Order)?;
///
/// first.record(&event)?;
/// second.await_event(&event)?; // later work on `second` runs after the work before the event
/// event.wait(Deadline::NEVER)?;
/// # Ok::<(), wholemem_hal::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Event {
    core: Arc<EventCore>,
}

#[derive(Debug)]
pub(crate) struct EventCore {
    owned: OwnedResource,
    device: DeviceId,
    raw: RawEvent,
    is_recorded: AtomicBool,
}

impl Event {
    /// Creates an event of the given kind on a device.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device lacks this kind of event; [`Error::Failed`].
    pub fn create(device: &Device, kind: EventKind) -> Result<Self> {
        let attempt = || Attempt::CreateEvent { device: device.label() };
        let backend = device.backend();
        backend.check_fork(attempt)?;
        // SAFETY: the device exists, and the process is not a forked child.
        let raw = unsafe { backend.queue().create_event(device.id(), kind) }
            .map_err(|cause| backend.to_error(device.id(), attempt(), cause))?;
        Ok(Self::own(device, raw))
    }

    /// Opens an event of another process. The call consumes the handle.
    ///
    /// # Errors
    /// [`Error::Failed`] if the handle is invalid.
    pub fn import(device: &Device, handle: EventHandle) -> Result<Self> {
        let attempt = || Attempt::ImportEvent { device: device.label() };
        let backend = device.backend();
        backend.check_fork(attempt)?;
        // SAFETY: the device exists, the process is not a forked child, and `import_event` accepts invalid handles.
        let raw = unsafe { backend.queue().import_event(device.id(), handle) }
            .map_err(|cause| backend.to_error(device.id(), attempt(), cause))?;
        Ok(Self::own(device, raw))
    }

    fn own(device: &Device, raw: RawEvent) -> Self {
        let owned = OwnedResource::new(device.backend(), Teardown::DestroyEvent(raw));
        Self {
            core: Arc::new(EventCore {
                owned,
                device: device.id(),
                raw,
                is_recorded: AtomicBool::new(false),
            }),
        }
    }

    /// Creates a handle with which another process opens a [shared](EventKind::Shared) event.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for an event of another kind; [`Error::Failed`].
    pub fn export(&self) -> Result<EventHandle> {
        let backend = self.backend();
        backend.check_fork(|| Attempt::ShareEvent)?;
        // SAFETY: the event is live, since `self` holds it.
        unsafe { backend.queue().export_event(self.core.raw) }
            .map_err(|cause| backend.to_error(self.core.device, Attempt::ShareEvent, cause))
    }

    /// Returns whether the event has completed. An event that was never recorded counts as completed.
    ///
    /// # Errors
    /// [`Error::Failed`] if the work before it failed.
    pub fn is_done(&self) -> Result<bool> {
        let backend = self.backend();
        backend.check_fork(|| Attempt::AwaitEvent)?;
        // SAFETY: the event is live, since `self` holds it.
        unsafe { backend.queue().is_done(self.core.raw) }
            .map_err(|cause| backend.to_error(self.core.device, Attempt::AwaitEvent, cause))
    }

    /// Blocks the calling thread until the event completes.
    ///
    /// # Errors
    /// [`Error::TimedOut`]; [`Error::Failed`] if the work before it failed.
    pub fn wait(&self, deadline: Deadline) -> Result<()> {
        let backend = self.backend();
        backend.check_fork(|| Attempt::AwaitEvent)?;
        // SAFETY: the event is live, since `self` holds it.
        let done = unsafe { backend.queue().wait_event(self.core.raw, deadline) }
            .map_err(|cause| backend.to_error(self.core.device, Attempt::AwaitEvent, cause))?;
        if done { Ok(()) } else { Err(Error::TimedOut { attempt: Attempt::AwaitEvent }) }
    }

    /// Returns the time from the event `self` to the event `end`, which must both be [timed](EventKind::Timed) and
    /// complete; zero if `end` completed first.
    ///
    /// # Errors
    /// [`Error::WrongBackend`]; [`Error::NotReached`]; [`Error::Unsupported`] for events of another kind;
    /// [`Error::Failed`].
    pub fn elapsed(&self, end: &Event) -> Result<Duration> {
        let backend = self.backend();
        backend.check_fork(|| Attempt::Measure)?;
        if end.backend() != backend {
            return Err(Error::WrongBackend { attempt: Attempt::Measure });
        }
        for event in [self, end] {
            if !event.core.is_recorded.load(Ordering::Acquire) || !event.is_done()? {
                return Err(Error::NotReached { attempt: Attempt::Measure });
            }
        }
        // SAFETY: both events are live because they are borrowed.
        unsafe { backend.queue().elapsed(self.core.raw, end.core.raw) }
            .map_err(|cause| backend.to_error(self.core.device, Attempt::Measure, cause))
    }

    /// Returns the device of the event; only streams of this device can record it.
    #[must_use]
    pub fn device(&self) -> Device {
        Device::new(self.backend().clone(), self.core.device)
    }

    pub(crate) fn backend(&self) -> &Backend {
        self.core.owned.backend()
    }

    /// Marks the event as recorded.
    pub(super) fn set_recorded(&self) {
        self.core.is_recorded.store(true, Ordering::Release);
    }

    pub(crate) fn raw(&self) -> RawEvent {
        self.core.raw
    }

    pub(crate) fn core(&self) -> &Arc<EventCore> {
        &self.core
    }
}
