//! Wraps a backend and makes its nth raw call fail, to check that callers leak nothing and return exactly the injected
//! error.

#![allow(unsafe_code, reason = "a backend is implemented by unsafe functions")]

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use wholemem_hal::raw::{
    Address, AllocationProperties, BackendFact, EventHandle, EventKind, ImportedAllocation, RawAllocation,
    RawEvent, RawFunction, RawGraph, RawMemory, RawModule, RawQueue, RawStream,
};
use wholemem_hal::{
    AllocationSpec, Args, Backend, BackendError, BackendKind, DeviceId, DeviceInfo, Grant, Granularity,
    HandleKind, KernelImage, LaunchShape, Result, Rights, ShareHandle,
};
use wholemem_os::{Deadline, Errno, Error, PrivateMap};

/// The errno of an injected failure. No code treats this value specially, so it must be returned unchanged.
pub const INJECTED: Errno = Errno::NFILE;

/// Selects the raw call of a wrapped backend that fails. Clones control the same backend.
#[derive(Debug, Clone, Default)]
pub struct Fault {
    plan: Arc<Mutex<FaultPlan>>,
}

#[derive(Debug, Default)]
struct FaultPlan {
    calls_left: u64,
    fired: Option<&'static str>,
}

impl Fault {
    /// Creates a backend from raw implementations whose calls can be made to fail.
    ///
    /// # Errors
    /// As [`Backend::from_raw`].
    pub fn over(memory: impl RawMemory + 'static, queue: impl RawQueue + 'static) -> Result<(Backend, Self)> {
        let fault = Self::default();
        let memory = FaultMemory { inner: memory, fault: fault.clone() };
        let queue = FaultQueue { inner: queue, fault: fault.clone() };
        Ok((Backend::from_raw(Arc::new(memory), Arc::new(queue))?, fault))
    }

    /// Makes the `nth` raw call from now on (counted from 1) fail once. With zero, no call fails.
    pub fn arm(&self, nth: u64) {
        *self.plan() = FaultPlan { calls_left: nth, fired: None };
    }

    /// Returns the name of the raw call that was made to fail since the last call of `arm`.
    #[must_use]
    pub fn fired(&self) -> Option<&'static str> {
        self.plan().fired
    }

    fn plan(&self) -> MutexGuard<'_, FaultPlan> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count_call(&self, name: &'static str) -> Result<(), BackendError> {
        let mut plan = self.plan();
        match plan.calls_left {
            0 => Ok(()),
            1 => {
                *plan = FaultPlan { calls_left: 0, fired: Some(name) };
                Err(BackendError::Os(Error::Call { call: name, errno: INJECTED }))
            }
            more => {
                plan.calls_left = more - 1;
                Ok(())
            }
        }
    }
}

#[derive(Debug)]
struct FaultMemory<M> {
    inner: M,
    fault: Fault,
}

#[derive(Debug)]
struct FaultQueue<Q> {
    inner: Q,
    fault: Fault,
}

/// Defines methods that fail if they are the call selected to fail, and otherwise call the wrapped backend.
macro_rules! forward {
    ($(fn $name:ident(&self $(, $arg:ident: $type:ty)*) -> $result:ty;)*) => {$(
        unsafe fn $name(&self $(, $arg: $type)*) -> Result<$result, BackendError> {
            self.fault.count_call(stringify!($name))?;
            // SAFETY: the caller of this method guarantees the preconditions of the wrapped backend's method with the
            // same name.
            unsafe { self.inner.$name($($arg),*) }
        }
    )*};
}

// SAFETY: calls that do not fail are passed to `inner`, which keeps the contract of `RawMemory`; a call that fails has
// no effect.
unsafe impl<M: RawMemory> RawMemory for FaultMemory<M> {
    fn kind(&self) -> BackendKind {
        self.inner.kind()
    }

    fn devices(&self) -> &[DeviceInfo] {
        self.inner.devices()
    }

    fn facts(&self) -> Vec<BackendFact> {
        self.inner.facts()
    }

    fn granularity(&self, spec: &AllocationSpec) -> Result<Granularity, BackendError> {
        self.fault.count_call("granularity")?;
        self.inner.granularity(spec)
    }

    forward! {
        fn available(&self, device: DeviceId) -> usize;
        fn create(&self, spec: &AllocationSpec) -> RawAllocation;
        fn release(&self, allocation: RawAllocation) -> ();
        fn reserve(&self, len: usize, align: Option<usize>, wanted: Option<Address>) -> Address;
        fn free(&self, at: Address, len: usize) -> ();
        fn map(&self, at: Address, len: usize, allocation: RawAllocation) -> ();
        fn set_access(&self, at: Address, len: usize, grants: &[Grant]) -> ();
        fn unmap(&self, at: Address, len: usize) -> ();
        fn export(&self, allocation: RawAllocation, kind: HandleKind, rights: Rights) -> ShareHandle;
        fn import(&self, device: DeviceId, handle: ShareHandle, len: usize) -> ImportedAllocation;
        fn retain(&self, at: Address) -> RawAllocation;
        fn address_range(&self, at: Address) -> (Address, usize);
        fn device_at(&self, at: Address) -> Option<DeviceId>;
        fn memory_id(&self, at: Address) -> Option<u64>;
        fn properties(&self, allocation: RawAllocation) -> AllocationProperties;
        fn dma_buf(&self, at: Address, len: usize) -> OwnedFd;
        fn populate(&self, at: Address, len: usize, rights: Rights) -> ();
        fn enlarge_pages(&self, at: Address, len: usize) -> ();
        fn set_inherited(&self, at: Address, len: usize, is_inherited: bool) -> ();
        fn pin(&self, device: DeviceId, len: usize) -> Address;
        fn unpin(&self, at: Address, len: usize) -> ();
        fn register(&self, at: NonNull<u8>, len: usize, rights: Rights) -> Address;
        fn unregister(&self, at: NonNull<u8>, len: usize) -> ();
        fn cuda_malloc(&self, device: DeviceId, len: usize) -> Address;
        fn cuda_free(&self, device: DeviceId, at: Address) -> ();
        fn export_cuda_ipc(&self, device: DeviceId, at: Address) -> ShareHandle;
        fn open_cuda_ipc(&self, device: DeviceId, handle: &ShareHandle) -> Address;
        fn close_cuda_ipc(&self, device: DeviceId, at: Address) -> ();
        fn create_multicast(&self, devices: &[DeviceId], len: usize) -> RawAllocation;
        fn bind_multicast(&self, multicast: RawAllocation, allocation: RawAllocation, len: usize) -> ();
        fn revoke(&self, at: Address, len: usize) -> ();
        fn map_private(&self, allocation: RawAllocation, offset: usize, len: usize) -> Option<PrivateMap>;
    }

    fn caches_exports(&self) -> bool {
        self.inner.caches_exports()
    }

    fn host_pointer(&self, at: Address) -> Result<Option<NonNull<u8>>, BackendError> {
        self.fault.count_call("host_pointer")?;
        self.inner.host_pointer(at)
    }
}

// SAFETY: calls that do not fail are passed to `inner`, which keeps the contract of `RawQueue`; a call that fails has
// no effect, and `end_capture` undoes the effect that it had.
unsafe impl<Q: RawQueue> RawQueue for FaultQueue<Q> {
    fn runs_inline(&self) -> bool {
        self.inner.runs_inline()
    }

    forward! {
        fn create_stream(&self, device: DeviceId) -> RawStream;
        fn destroy_stream(&self, stream: RawStream) -> ();
        fn wait_stream(&self, stream: RawStream, deadline: Deadline) -> bool;
        fn create_event(&self, device: DeviceId, kind: EventKind) -> RawEvent;
        fn destroy_event(&self, event: RawEvent) -> ();
        fn record(&self, event: RawEvent, stream: RawStream) -> ();
        fn await_event(&self, stream: RawStream, event: RawEvent) -> ();
        fn is_done(&self, event: RawEvent) -> bool;
        fn wait_event(&self, event: RawEvent, deadline: Deadline) -> bool;
        fn elapsed(&self, start: RawEvent, end: RawEvent) -> Duration;
        fn export_event(&self, event: RawEvent) -> EventHandle;
        fn import_event(&self, device: DeviceId, handle: EventHandle) -> RawEvent;
        fn copy(&self, stream: RawStream, to: Address, from: Address, len: usize) -> ();
        fn fill(&self, stream: RawStream, to: Address, value: u8, len: usize) -> ();
        fn begin_capture(&self, stream: RawStream) -> ();
        fn launch_graph(&self, graph: RawGraph, stream: RawStream) -> ();
        fn destroy_graph(&self, graph: RawGraph) -> ();
        fn load_module(&self, device: DeviceId, image: &KernelImage) -> RawModule;
        fn unload_module(&self, module: RawModule) -> ();
        fn function(&self, module: RawModule, name: &str) -> Option<RawFunction>;
        fn occupancy(&self, function: RawFunction, block: u32, shared_len: u32) -> u32;
        fn launch(&self, stream: RawStream, function: RawFunction, shape: &LaunchShape, args: &Args) -> ();
    }

    unsafe fn end_capture(&self, stream: RawStream) -> Result<RawGraph, BackendError> {
        // A capture must end even if the call fails, so it is ended first, and its graph is destroyed afterwards.
        // SAFETY: the caller of this method guarantees the preconditions of `inner.end_capture` for `stream`.
        let graph = unsafe { self.inner.end_capture(stream) }?;
        if let Err(cause) = self.fault.count_call("end_capture") {
            // SAFETY: `graph` was created above, and no other code uses it.
            unsafe { self.inner.destroy_graph(graph) }?;
            return Err(cause);
        }
        Ok(graph)
    }
}
