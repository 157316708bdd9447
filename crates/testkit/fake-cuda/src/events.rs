//! Events: points in the work of a stream, for this process or for others.
//!
//! An event is two numbers, how often it was recorded and which record has passed. For other processes they lie in a
//! memfd.

use std::collections::BTreeMap;
use std::ffi::c_uint;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::fs::MemfdFlags;

use crate::bindings::*;
use crate::buffers::{open, token};
use crate::calls::{self, api, ensure, put};
use crate::gpu::{self, Op};
use crate::{streams, vmm};

/// What the bytes of an event's handle begin with.
const EVENT: [u8; 8] = *b"fake-evt";

const PAGE: usize = 4096;

/// How often an event was recorded, and the latest record that has passed.
#[derive(Debug, Default)]
#[repr(C)]
struct Turns {
    recorded: AtomicU64,
    passed: AtomicU64,
}

/// An event's numbers, in this process alone or in memory that it shares.
#[derive(Debug)]
enum Place {
    Here(Turns),
    Shared { at: NonNull<Turns>, fd: OwnedFd },
}

// SAFETY: what the pointer points to is atomic, and stays mapped as long as this lives.
unsafe impl Send for Place {}
// SAFETY: a shared reference reaches atomics only, which stay mapped as long as this lives.
unsafe impl Sync for Place {}

impl Place {
    fn shared(fd: OwnedFd) -> Result<Self, CUresult> {
        let at = vmm::map_anywhere(&fd, PAGE)?;
        let at = NonNull::new(ptr::with_exposed_provenance_mut(at as usize));
        Ok(Self::Shared { at: at.ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?, fd })
    }

    fn turns(&self) -> &Turns {
        match self {
            Self::Here(turns) => turns,
            // SAFETY: mapped as long as this lives, a page long, and zero when it was made, which is a value.
            Self::Shared { at, .. } => unsafe { at.as_ref() },
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Self::Shared { at, .. } = self {
            let unmapped = vmm::unmap(at.addr().get() as u64, PAGE);
            debug_assert!(unmapped.is_ok(), "a map of ours can be unmapped");
        }
    }
}

/// An event, as its handle and enqueued work hold it.
#[derive(Debug, Clone)]
pub(crate) struct State(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    device: CUdevice,
    is_timed: bool,
    place: Place,
    passed_at: Mutex<Option<Instant>>,
    /// Its latest record went into a capture: it marks no point in time.
    is_captured: AtomicBool,
}

impl State {
    fn new(device: CUdevice, is_timed: bool, place: Place) -> Self {
        let (passed_at, is_captured) = (Mutex::new(None), AtomicBool::new(false));
        Self(Arc::new(Inner { device, is_timed, place, passed_at, is_captured }))
    }

    pub(crate) fn passed(&self) -> u64 {
        self.0.place.turns().passed.load(Ordering::Acquire)
    }

    fn recorded(&self) -> u64 {
        self.0.place.turns().recorded.load(Ordering::Acquire)
    }

    fn is_over(&self) -> bool {
        self.passed() >= self.recorded()
    }

    fn passed_at(&self) -> MutexGuard<'_, Option<Instant>> {
        self.0.passed_at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn pass(&self, turn: u64) {
        *self.passed_at() = Some(Instant::now());
        self.0.place.turns().passed.fetch_max(turn, Ordering::Release);
    }

    fn refuse_captured(&self) -> calls::Answer {
        let captured = self.0.is_captured.load(Ordering::Relaxed);
        ensure(!captured, CUresult::CUDA_ERROR_CAPTURED_EVENT)
    }
}

fn events() -> MutexGuard<'static, BTreeMap<usize, State>> {
    static EVENTS: Mutex<BTreeMap<usize, State>> = Mutex::new(BTreeMap::new());
    EVENTS.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn count() -> u64 {
    events().len() as u64
}

fn hand_out(event: State) -> CUevent {
    static LAST: AtomicU64 = AtomicU64::new(0xE000);
    let number = LAST.fetch_add(0x10, Ordering::Relaxed) as usize;
    events().insert(number, event);
    ptr::without_provenance_mut(number)
}

fn find(handle: CUevent) -> Result<State, CUresult> {
    events().get(&handle.addr()).cloned().ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
}

api! {
    Context fn cuEventCreate(event: *mut CUevent, flags: c_uint) {
        let has = |flag: CUevent_flags| flags & flag.0 != 0;
        let is_timed = !has(CUevent_flags::CU_EVENT_DISABLE_TIMING);
        let place = if has(CUevent_flags::CU_EVENT_INTERPROCESS) {
            ensure(!is_timed, CUresult::CUDA_ERROR_INVALID_VALUE)?;
            let os = |_| CUresult::CUDA_ERROR_OPERATING_SYSTEM;
            let fd = rustix::fs::memfd_create("wholemem-fake-event", MemfdFlags::CLOEXEC).map_err(os)?;
            rustix::fs::ftruncate(&fd, PAGE as u64).map_err(os)?;
            Place::shared(fd)?
        } else {
            Place::Here(Turns::default())
        };
        put(event, hand_out(State::new(calls::current()?, is_timed, place)))
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
        let turn = event.0.place.turns().recorded.fetch_add(1, Ordering::AcqRel) + 1;
        streams::enqueue(stream, Op::Record { event, turn })
    }

    Context fn cuStreamWaitEvent(stream: CUstream, event: CUevent, _flags: c_uint) {
        let event = find(event)?;
        event.refuse_captured()?;
        let captured = gpu::queues().get(stream)?.capture.is_some();
        ensure(!captured, CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION)?;
        let turn = event.recorded();
        streams::enqueue(stream, Op::Await { event, turn })
    }

    Context fn cuEventQuery(event: CUevent) {
        let event = find(event)?;
        event.refuse_captured()?;
        ensure(event.is_over(), CUresult::CUDA_ERROR_NOT_READY)
    }

    Context fn cuEventSynchronize(event: CUevent) {
        let event = find(event)?;
        event.refuse_captured()?;
        let mut queues = gpu::queues();
        while !event.is_over() {
            queues = gpu::rest(queues);
        }
        Ok(())
    }

    Context fn cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent) {
        let (start, end) = (find(start)?, find(end)?);
        let usable = start.0.is_timed && end.0.is_timed && start.0.device == end.0.device;
        ensure(usable && start.recorded() * end.recorded() > 0, CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        ensure(start.is_over() && end.is_over(), CUresult::CUDA_ERROR_NOT_READY)?;
        let (Some(from), Some(to)) = (*start.passed_at(), *end.passed_at()) else {
            return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
        };
        put(milliseconds, to.saturating_duration_since(from).as_secs_f32() * 1e3)
    }

    Context fn cuIpcGetEventHandle(handle: *mut CUipcEventHandle_v1, event: CUevent) {
        let event = find(event)?;
        let Place::Shared { fd, .. } = &event.0.place else {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        put(handle, CUipcEventHandle_st { reserved: token(EVENT, fd.as_raw_fd(), PAGE) })
    }

    Context fn cuIpcOpenEventHandle(event: *mut CUevent, handle: CUipcEventHandle_v1) {
        let (fd, _) = open(EVENT, handle.reserved)?;
        put(event, hand_out(State::new(calls::current()?, false, Place::shared(fd)?)))
    }
}
