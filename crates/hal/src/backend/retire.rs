//! Deferred teardown: memory is never unmapped while work uses it, and a teardown that the driver refuses is retried.
//!
//! Dropping a handle runs its [`Teardown`]. If the driver refuses it, or a dropped stream still has unfinished work, it becomes
//! [`Retired`] and is retried at the next drop or by [`Backend::collect`]. Each teardown holds the resources that must outlive
//! it, so retries keep the order. If a driver never recovers, the teardown stays in the list: the resource is leaked, and
//! counted.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use super::{Backend, DrainingStream};
use crate::raw::{Address, RawAllocation, RawEvent, RawGraph, RawModule, RawStream};
use crate::{BackendError, DeviceId};

/// A reference that only keeps a value alive: an operand of enqueued work, or a resource that a teardown needs.
pub(crate) type Operand = Arc<dyn KeepAlive>;

/// A value that can be kept alive behind `Arc<dyn KeepAlive>`.
pub(crate) trait KeepAlive: fmt::Debug + Send + Sync {}

impl<T: fmt::Debug + Send + Sync> KeepAlive for T {}

/// A resource of a backend, such as memory or a stream, that is torn down on drop.
#[derive(Debug)]
pub(crate) struct OwnedResource {
    backend: Backend,
    /// The call that releases the resource; `None` after an explicit teardown.
    teardown: Option<Teardown>,
}

impl OwnedResource {
    pub(crate) fn new(backend: &Backend, teardown: Teardown) -> Self {
        Self { backend: backend.clone(), teardown: Some(teardown) }
    }

    pub(crate) fn backend(&self) -> &Backend {
        &self.backend
    }

    /// Tears the resource down now and returns the result. If the driver refuses the teardown, it is also retried later.
    pub(crate) fn tear_down(mut self) -> Result<(), BackendError> {
        let teardown = self.teardown.take().expect("only this method and `drop` take it, and each runs once");
        self.backend.tear_down(teardown)
    }
}

impl Drop for OwnedResource {
    fn drop(&mut self) {
        if let Some(teardown) = self.teardown.take() {
            // A refused teardown has been logged and will be retried, and `drop` cannot return the error.
            let _ = self.backend.tear_down(teardown);
        }
    }
}

/// A call that releases one resource of a backend.
#[derive(Debug)]
pub(crate) enum Teardown {
    Release(RawAllocation),
    Free { at: Address, len: usize },
    Unmap { at: Address, len: usize, _place: Operand },
    Unpin { at: Address, len: usize },
    CudaFree { device: DeviceId, at: Address },
    CloseCudaIpc { device: DeviceId, at: Address },
    Unregister { at: HostAddress, len: usize, _map: Operand },
    DestroyStream(RawStream),
    DestroyEvent(RawEvent),
    DestroyGraph(RawGraph),
    UnloadModule(RawModule),
}

/// A host address that a teardown passes to the backend.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostAddress(pub(crate) NonNull<u8>);

// SAFETY: `HostAddress` is only an address; the bytes are accessed by the driver and by shared views, which allow concurrent
// access.
unsafe impl Send for HostAddress {}
// SAFETY: a `&HostAddress` exposes only the address, not the bytes.
unsafe impl Sync for HostAddress {}

impl Teardown {
    /// Makes the call that releases the resource.
    ///
    /// A teardown is created with the resource it releases, is dropped once it succeeds, and no other code releases the resource:
    /// so each resource is released once. The caller checks that the process is not a forked child.
    pub(crate) fn run(&self, backend: &Backend) -> Result<(), BackendError> {
        let (memory, queue) = (backend.memory(), backend.queue());
        match *self {
            // SAFETY: only this teardown releases the allocation; mappings hold their allocation, so none is left; the process is
            // not a forked child.
            Self::Release(allocation) => unsafe { memory.release(allocation) },
            // SAFETY: only this teardown frees the range; mappings hold their reservation, so none is left in the range; the
            // process is not a forked child.
            Self::Free { at, len } => unsafe { memory.free(at, len) },
            // SAFETY: the range was mapped by one call, and only this teardown unmaps it; streams hold the mappings they use
            // until the work has finished; the process is not a forked child.
            Self::Unmap { at, len, .. } => unsafe { memory.unmap(at, len) },
            // SAFETY: the range was pinned by one call, and only this teardown unpins it; streams hold the buffers they use until
            // the work has finished; the process is not a forked child.
            Self::Unpin { at, len } => unsafe { memory.unpin(at, len) },
            // SAFETY: the buffer was created on the device, and only this teardown frees it; streams hold the buffers they use
            // until the work has finished; the process is not a forked child.
            Self::CudaFree { device, at } => unsafe { memory.cuda_free(device, at) },
            // SAFETY: the buffer was opened on the device, and only this teardown closes it; streams hold the buffers they use
            // until the work has finished; the process is not a forked child.
            Self::CloseCudaIpc { device, at } => unsafe { memory.close_cuda_ipc(device, at) },
            // SAFETY: the range was registered by one call, only this teardown unregisters it, and `_map` keeps it mapped until
            // then; streams hold the registrations they use until the work has finished; the process is not a forked child.
            Self::Unregister { at, len, .. } => unsafe { memory.unregister(at.0, len) },
            // SAFETY: the stream is live, and only this teardown destroys it; its work still runs to completion; the process is
            // not a forked child.
            Self::DestroyStream(stream) => unsafe { queue.destroy_stream(stream) },
            // SAFETY: the event is live, and only this teardown destroys it; streams hold the events they wait for until the work
            // has finished; the process is not a forked child.
            Self::DestroyEvent(event) => unsafe { queue.destroy_event(event) },
            // SAFETY: the graph is live, and only this teardown destroys it; a stream holds a launched graph until it has
            // finished; the process is not a forked child.
            Self::DestroyGraph(graph) => unsafe { queue.destroy_graph(graph) },
            // SAFETY: the module is live, and only this teardown unloads it; a stream holds a launched function's module until it
            // has finished; the process is not a forked child.
            Self::UnloadModule(module) => unsafe { queue.unload_module(module) },
        }
    }
}

/// A resource that could not be released when its owner was dropped, and whose release is retried later.
#[derive(Debug)]
pub(crate) enum Retired {
    /// A teardown (the release of a resource) that the driver refused.
    Refused(Teardown),
    /// A dropped stream whose work may still be running, or whose completion cannot be queried.
    Draining(DrainingStream),
    /// The operands of a destroyed graph of another library. The graph was destroyed on a thread that must not call the driver.
    CapturedOperands(Vec<Operand>),
}

impl Retired {
    /// Retries the release of the resource. Returns the resource if the release has to be retried again.
    pub(crate) fn retry(self, backend: &Backend) -> Option<Self> {
        match self {
            Self::Refused(teardown) => teardown.run(backend).err().map(|_| Self::Refused(teardown)),
            Self::CapturedOperands(operands) => {
                drop(operands);
                None
            }
            Self::Draining(mut drain) => (!drain.has_finished()).then_some(Self::Draining(drain)),
        }
    }
}
