//! The fake driver's events: points in the work of a stream, usable in one process or in several.
//!
//! An event has two counters: the number of its records, and the latest completed record. Shared events keep them in a
//! memfd.

use std::collections::BTreeMap;
use std::ffi::c_uint;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::fs::MemfdFlags;

use crate::bindings::*;
use crate::buffers::{open, token};
use crate::calls::{self, api, ensure, write_output};
use crate::gpu::{self, Op};
use crate::{streams, vmm};

/// The first bytes of every IPC handle for an event.
const EVENT: [u8; 8] = *b"fake-evt";

const PAGE: usize = 4096;

/// The counters of an event: the number of its records, and the number of the latest completed record.
#[derive(Debug, Default)]
#[repr(C)]
struct EventCounters {
    recorded: AtomicU64,
    completed: AtomicU64,
}

/// The storage of an event's counters: memory of this process, or memory shared with other processes.
#[derive(Debug)]
enum CounterStorage {
    Private(EventCounters),
    Shared { at: NonNull<EventCounters>, fd: OwnedFd },
}

// SAFETY: `at` points to atomics in a page that stays mapped, in every thread, until this value is dropped.
unsafe impl Send for CounterStorage {}
// SAFETY: a shared reference gives access only to atomics, which stay mapped until this value is dropped.
unsafe impl Sync for CounterStorage {}

impl CounterStorage {
    fn shared(fd: OwnedFd) -> Result<Self, CUresult> {
        let at = vmm::map_anywhere(&fd, PAGE)?;
        let at = NonNull::new(ptr::with_exposed_provenance_mut(at as usize));
        Ok(Self::Shared { at: at.ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?, fd })
    }

    fn counters(&self) -> &EventCounters {
        match self {
            Self::Private(counters) => counters,
            // SAFETY: the page at `at` stays mapped until this value is dropped, and zeroed bytes are valid counters.
            Self::Shared { at, .. } => unsafe { at.as_ref() },
        }
    }
}

impl Drop for CounterStorage {
    fn drop(&mut self) {
        if let Self::Shared { at, .. } = self {
            let unmapped = vmm::unmap(at.addr().get() as u64, PAGE);
            debug_assert!(unmapped.is_ok(), "cannot unmap the counters");
        }
    }
}

/// An event of the fake driver. Its handle and enqueued work hold references to it.
#[derive(Debug, Clone)]
pub(crate) struct FakeEvent(Arc<EventInner>);

#[derive(Debug)]
struct EventInner {
    device: CUdevice,
    is_timed: bool,
    storage: CounterStorage,
    completed_at: Mutex<Option<Instant>>,
    /// True if the latest record of the event is part of a stream capture, so that it marks no point in time.
    is_captured: AtomicBool,
}

impl FakeEvent {
    fn new(device: CUdevice, is_timed: bool, storage: CounterStorage) -> Self {
        let (completed_at, is_captured) = (Mutex::new(None), AtomicBool::new(false));
        Self(Arc::new(EventInner { device, is_timed, storage, completed_at, is_captured }))
    }

    pub(crate) fn completed(&self) -> u64 {
        self.0.storage.counters().completed.load(Ordering::Acquire)
    }

    fn recorded(&self) -> u64 {
        self.0.storage.counters().recorded.load(Ordering::Acquire)
    }

    fn is_complete(&self) -> bool {
        self.completed() >= self.recorded()
    }

    fn completed_at(&self) -> MutexGuard<'_, Option<Instant>> {
        self.0.completed_at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn complete(&self, ticket: u64) {
        *self.completed_at() = Some(Instant::now());
        self.0.storage.counters().completed.fetch_max(ticket, Ordering::Release);
    }

    fn refuse_captured(&self) -> calls::CallResult {
        let captured = self.0.is_captured.load(Ordering::Relaxed);
        ensure(!captured, CUresult::CUDA_ERROR_CAPTURED_EVENT)
    }
}

fn events() -> MutexGuard<'static, BTreeMap<usize, FakeEvent>> {
    static EVENTS: Mutex<BTreeMap<usize, FakeEvent>> = Mutex::new(BTreeMap::new());
    EVENTS.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn count() -> u64 {
    events().len() as u64
}

fn register(event: FakeEvent) -> CUevent {
    static LAST: AtomicU64 = AtomicU64::new(0xE000);
    let number = LAST.fetch_add(0x10, Ordering::Relaxed) as usize;
    events().insert(number, event);
    ptr::without_provenance_mut(number)
}

fn find(handle: CUevent) -> Result<FakeEvent, CUresult> {
    events().get(&handle.addr()).cloned().ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
}

api! {
    Context fn cuEventCreate(event: *mut CUevent, flags: c_uint) {
        let has = |flag: CUevent_flags| flags & flag.0 != 0;
        let is_timed = !has(CUevent_flags::CU_EVENT_DISABLE_TIMING);
        let storage = if has(CUevent_flags::CU_EVENT_INTERPROCESS) {
            ensure(!is_timed, CUresult::CUDA_ERROR_INVALID_VALUE)?;
            let os = |_| CUresult::CUDA_ERROR_OPERATING_SYSTEM;
            let fd = rustix::fs::memfd_create("wholemem-fake-event", MemfdFlags::CLOEXEC).map_err(os)?;
            rustix::fs::ftruncate(&fd, PAGE as u64).map_err(os)?;
            CounterStorage::shared(fd)?
        } else {
            CounterStorage::Private(EventCounters::default())
        };
        write_output(event, register(FakeEvent::new(calls::current()?, is_timed, storage)))
    }

    Context fn cuEventDestroy(event: CUevent) {
        let gone = events().remove(&event.addr());
        gone.map(drop).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
    }

    Context fn cuEventRecord(event: CUevent, stream: CUstream) {
        let event = find(event)?;
        ensure(event.0.device == streams::device_of(stream)?, CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        let captured = gpu::queues().get(stream)?.capture.is_some();
        event.0.is_captured.store(captured, Ordering::Relaxed);
        if captured {
            return Ok(());
        }
        let ticket = event.0.storage.counters().recorded.fetch_add(1, Ordering::AcqRel) + 1;
        streams::enqueue(stream, Op::Record { event, ticket })
    }

    Context fn cuStreamWaitEvent(stream: CUstream, event: CUevent, _flags: c_uint) {
        let event = find(event)?;
        event.refuse_captured()?;
        let captured = gpu::queues().get(stream)?.capture.is_some();
        ensure(!captured, CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION)?;
        let ticket = event.recorded();
        streams::enqueue(stream, Op::Await { event, ticket })
    }

    Context fn cuEventQuery(event: CUevent) {
        let event = find(event)?;
        event.refuse_captured()?;
        ensure(event.is_complete(), CUresult::CUDA_ERROR_NOT_READY)
    }

    Context fn cuEventSynchronize(event: CUevent) {
        let event = find(event)?;
        event.refuse_captured()?;
        let mut queues = gpu::queues();
        while !event.is_complete() {
            queues = gpu::wait_briefly(queues);
        }
        Ok(())
    }

    Context fn cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent) {
        let (start, end) = (find(start)?, find(end)?);
        let usable = start.0.is_timed && end.0.is_timed && start.0.device == end.0.device;
        ensure(usable && start.recorded() * end.recorded() > 0, CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        ensure(start.is_complete() && end.is_complete(), CUresult::CUDA_ERROR_NOT_READY)?;
        let (Some(from), Some(to)) = (*start.completed_at(), *end.completed_at()) else {
            return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
        };
        write_output(milliseconds, to.saturating_duration_since(from).as_secs_f32() * 1e3)
    }

    Context fn cuIpcGetEventHandle(handle: *mut CUipcEventHandle_v1, event: CUevent) {
        let event = find(event)?;
        let CounterStorage::Shared { fd, .. } = &event.0.storage else {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        write_output(handle, CUipcEventHandle_st { reserved: token(EVENT, fd.as_fd(), PAGE)? })
    }

    Context fn cuIpcOpenEventHandle(event: *mut CUevent, handle: CUipcEventHandle_v1) {
        let (fd, _) = open(EVENT, handle.reserved)?;
        write_output(event, register(FakeEvent::new(calls::current()?, false, CounterStorage::shared(fd)?)))
    }
}
