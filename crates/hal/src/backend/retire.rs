//! Giving back, now or later: nothing is ever unmapped under running work, and nothing refused is forgotten.
//!
//! Dropping a handle runs its [`Teardown`]. If the driver refuses, or a dropped stream still has work to do, it becomes
//! [`Retired`] and is tried again with the next drop, or by [`Backend::collect`]. Each teardown holds what must outlive
//! it, so the order is right even when the first try was not the last. What never becomes possible, because a driver
//! is beyond repair, stays retired: leaked, and counted.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use super::{Backend, Drain};
use crate::raw::{Address, RawAllocation, RawEvent, RawGraph, RawModule, RawStream};
use crate::{Cause, DeviceId};

/// Something that is kept alive and never used: an operand of enqueued work, or what a teardown needs.
pub(crate) type Operand = Arc<dyn Held>;

/// A value that can be kept alive.
pub(crate) trait Held: fmt::Debug + Send + Sync {}

impl<T: fmt::Debug + Send + Sync> Held for T {}

/// Something that is given back when this is dropped.
#[derive(Debug)]
pub(crate) struct Owned {
    backend: Backend,
    /// `None` once it was given back with an answer.
    teardown: Option<Teardown>,
}

impl Owned {
    pub(crate) fn new(backend: &Backend, teardown: Teardown) -> Self {
        Self { backend: backend.clone(), teardown: Some(teardown) }
    }

    pub(crate) fn backend(&self) -> &Backend {
        &self.backend
    }

    /// Gives it back now, and says what came of it. Refused, it is tried again later all the same.
    pub(crate) fn give_back(mut self) -> Result<(), Cause> {
        let teardown = self.teardown.take().expect("taken here and by `drop` alone, which run once");
        self.backend.give_back(teardown)
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        if let Some(teardown) = self.teardown.take() {
            // A refusal was logged and is tried again; there is nobody here to tell.
            let _ = self.backend.give_back(teardown);
        }
    }
}

/// One call that gives something back.
#[derive(Debug)]
pub(crate) enum Teardown {
    Release(RawAllocation),
    Free { at: Address, len: usize },
    Unmap { at: Address, len: usize, _place: Operand },
    Unpin { at: Address, len: usize },
    FreePlain { device: DeviceId, at: Address },
    ClosePlain { device: DeviceId, at: Address },
    Unregister { at: HostAddress, len: usize, _map: Operand },
    DestroyStream(RawStream),
    DestroyEvent(RawEvent),
    DestroyGraph(RawGraph),
    UnloadModule(RawModule),
}

/// An address of this process, for the teardown.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostAddress(pub(crate) NonNull<u8>);

// SAFETY: an address; what is there is reached by the driver, and by views that allow others to.
unsafe impl Send for HostAddress {}
// SAFETY: a shared reference gives the address only, and no access to the bytes at it.
unsafe impl Sync for HostAddress {}

impl Teardown {
    /// Makes the call.
    ///
    /// A teardown is made with the handle or range that it gives back, it is dropped once it has succeeded, and no
    /// other code gives the same back: so each is given back once. The caller checks that this is no forked child.
    pub(crate) fn run(&self, backend: &Backend) -> Result<(), Cause> {
        let (memory, queue) = (backend.memory(), backend.queue());
        match *self {
            // SAFETY: only this teardown releases the allocation; its maps hold it, so none is left; no forked child.
            Self::Release(allocation) => unsafe { memory.release(allocation) },
            // SAFETY: only this teardown frees the range; maps hold their reservation, so none is left in it; no forked
            // child.
            Self::Free { at, len } => unsafe { memory.free(at, len) },
            // SAFETY: the range was mapped in one piece, and only this teardown unmaps it; streams hold the maps they use
            // until the work is done; no forked child.
            Self::Unmap { at, len, .. } => unsafe { memory.unmap(at, len) },
            // SAFETY: the range was pinned in one piece, and only this teardown unpins it; streams hold the buffers they
            // use until the work is done; no forked child.
            Self::Unpin { at, len } => unsafe { memory.unpin(at, len) },
            // SAFETY: the buffer was created on the device, and only this teardown frees it; streams hold the buffers they
            // use until the work is done; no forked child.
            Self::FreePlain { device, at } => unsafe { memory.free_plain(device, at) },
            // SAFETY: the buffer was opened on the device, and only this teardown closes it; streams hold the buffers they
            // use until the work is done; no forked child.
            Self::ClosePlain { device, at } => unsafe { memory.close_plain(device, at) },
            // SAFETY: the range was registered in one piece, only this teardown unregisters it, and `_map` keeps it mapped
            // until then; streams hold the registrations they use until the work is done; no forked child.
            Self::Unregister { at, len, .. } => unsafe { memory.unregister(at.0, len) },
            // SAFETY: the stream is live, and only this teardown destroys it; work on it runs to its end; no forked child.
            Self::DestroyStream(stream) => unsafe { queue.destroy_stream(stream) },
            // SAFETY: the event is live, and only this teardown destroys it; streams hold the events they wait for until
            // the work is done; no forked child.
            Self::DestroyEvent(event) => unsafe { queue.destroy_event(event) },
            // SAFETY: the graph is live, and only this teardown destroys it; a stream holds a launched graph until it is
            // done; no forked child.
            Self::DestroyGraph(graph) => unsafe { queue.destroy_graph(graph) },
            // SAFETY: the module is live, and only this teardown unloads it; a stream holds a launched function's module
            // until it is done; no forked child.
            Self::UnloadModule(module) => unsafe { queue.unload_module(module) },
        }
    }
}

/// Something that could not be given back when its owner went.
#[derive(Debug)]
pub(crate) enum Retired {
    /// The driver said no.
    Refused(Teardown),
    /// Its work may still be running, or cannot be known to be over.
    Draining(Drain),
    /// Somebody else's graph used it, and has gone, in a thread that may give nothing back.
    Recorded(Vec<Operand>),
}

impl Retired {
    /// Tries again; `Some` is what has to wait longer.
    pub(crate) fn retry(self, backend: &Backend) -> Option<Self> {
        match self {
            Self::Refused(teardown) => teardown.run(backend).err().map(|_| Self::Refused(teardown)),
            Self::Recorded(operands) => {
                drop(operands);
                None
            }
            Self::Draining(mut drain) => (!drain.is_over()).then_some(Self::Draining(drain)),
        }
    }
}
