//! The raw stream operations on the host: streams submit their work to a schedule, or capture it.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use wholemem_os::Deadline;
use wholemem_os::width::{to_u64, to_usize};

use super::schedule::Inline;
use super::{HostEvent, Schedule, StreamId, Work};
use crate::raw::{
    Address, EventHandle, EventKind, RawEvent, RawFunction, RawGraph, RawModule, RawQueue, RawStream,
};
use crate::{Args, BackendError, Capability, DeviceId, HostFunction, KernelImage, LaunchShape};

/// Streams, events, graphs and kernels of the host, as an implementation of `RawQueue`.
#[derive(Debug)]
pub struct HostQueue {
    schedule: Box<dyn Schedule>,
    streams: HandleTable<HostStream>,
    events: HandleTable<EventEntry>,
    graphs: HandleTable<Vec<Work>>,
    modules: HandleTable<KernelImage>,
}

#[derive(Debug)]
struct EventEntry {
    event: Arc<HostEvent>,
    kind: EventKind,
}

/// A stream of the host backend. Its handle is its address, and the handle of a kernel is the address of its entry in the kernel
/// image, so that enqueuing needs no lock and no table lookup.
#[derive(Debug)]
struct HostStream {
    /// The id of the stream. Unlike the stream's address, it is never reused, since a destroyed stream may have unfinished work.
    id: StreamId,
    /// The captured work of the stream, during a capture.
    captured: Mutex<Option<Vec<Work>>>,
}

impl HostStream {
    /// Returns the stream that a raw handle refers to.
    ///
    /// # Safety
    /// The handle refers to a stream of this backend that lives for `'a`.
    unsafe fn of<'a>(stream: RawStream) -> &'a Self {
        // SAFETY: the caller guarantees a live handle, which `create_stream` made from the stream's address; the table keeps the
        // stream there.
        unsafe { &*pointer(stream.handle) }
    }
}

/// A kernel of a kernel image, with its name.
type NamedFunction = (&'static str, HostFunction);

impl HostQueue {
    /// Creates a queue whose streams run work inline, inside the enqueuing call.
    #[must_use]
    pub fn inline() -> Self {
        Self::new(Box::new(Inline))
    }

    /// Creates a queue whose streams run work when the given schedule decides.
    #[must_use]
    pub fn new(schedule: Box<dyn Schedule>) -> Self {
        Self {
            schedule,
            streams: HandleTable::default(),
            events: HandleTable::default(),
            graphs: HandleTable::default(),
            modules: HandleTable::default(),
        }
    }

    /// Adds work to the graph if the stream is being captured; otherwise submits the work to the schedule.
    ///
    /// # Safety
    /// As [`Schedule::submit`]; the operands of captured work stay accessible while its graph may be launched.
    unsafe fn submit(&self, stream: RawStream, work: Work<&Args>) {
        // SAFETY: the caller of `submit` guarantees the contract of the module `raw`: the handle refers to a live
        // stream.
        let stream = unsafe { HostStream::of(stream) };
        match &mut *lock(&stream.captured) {
            Some(captured) => captured.push(work.into_owned()),
            // SAFETY: the caller of this function guarantees the requirements of `Schedule::submit`.
            None => unsafe { self.schedule.submit(stream.id, work) },
        }
    }

    /// Runs submitted work until `done` returns `true`. Returns `false` if the deadline passes first.
    fn drive(&self, deadline: Deadline, mut done: impl FnMut() -> bool) -> bool {
        loop {
            if done() {
                return true;
            }
            if !self.schedule.advance() {
                // No operation is ready, since all remaining work waits for another thread or process.
                if deadline.has_passed() {
                    return false;
                }
                std::thread::yield_now();
            }
        }
    }
}

// SAFETY: the schedule preserves the order of each stream; the record of an event runs after all work submitted before it; an
// idle stream has no work left.
unsafe impl RawQueue for HostQueue {
    fn runs_inline(&self) -> bool {
        self.schedule.runs_inline()
    }

    unsafe fn create_stream(&self, device: DeviceId) -> Result<RawStream, BackendError> {
        let stream = self.streams.insert_numbered(|id| HostStream { id, captured: Mutex::new(None) });
        Ok(RawStream { device, handle: number(Arc::as_ptr(&stream)) })
    }

    unsafe fn destroy_stream(&self, stream: RawStream) -> Result<(), BackendError> {
        // SAFETY: the caller of `destroy_stream` guarantees the contract of the module `raw`: the handle refers to a
        // live stream.
        let id = unsafe { HostStream::of(stream) }.id;
        self.streams.remove(id);
        Ok(())
    }

    unsafe fn wait_stream(&self, stream: RawStream, deadline: Deadline) -> Result<bool, BackendError> {
        // SAFETY: the caller of `wait_stream` guarantees the contract of the module `raw`: the handle refers to a
        // live stream.
        let stream = unsafe { HostStream::of(stream) };
        Ok(self.drive(deadline, || self.schedule.is_idle(stream.id)))
    }

    unsafe fn create_event(&self, device: DeviceId, kind: EventKind) -> Result<RawEvent, BackendError> {
        let event = match kind {
            EventKind::Order | EventKind::Timed => HostEvent::private(),
            EventKind::Shared => HostEvent::shared()?,
        };
        Ok(RawEvent { device, handle: self.events.insert(EventEntry { event: Arc::new(event), kind }) })
    }

    unsafe fn destroy_event(&self, event: RawEvent) -> Result<(), BackendError> {
        self.events.remove(event.handle);
        Ok(())
    }

    unsafe fn record(&self, event: RawEvent, stream: RawStream) -> Result<(), BackendError> {
        let event = Arc::clone(&self.events.get(event.handle).event);
        let ticket = event.next_ticket();
        // SAFETY: a record accesses only the event, to which it owns a reference.
        unsafe { self.submit(stream, Work::Record { event: Arc::clone(&event), ticket }) };
        event.set_latest(ticket);
        Ok(())
    }

    unsafe fn await_event(&self, stream: RawStream, event: RawEvent) -> Result<(), BackendError> {
        let event = Arc::clone(&self.events.get(event.handle).event);
        let ticket = event.latest();
        // SAFETY: a wait accesses only the event, to which it owns a reference.
        unsafe { self.submit(stream, Work::Wait { event, ticket }) };
        Ok(())
    }

    unsafe fn is_done(&self, event: RawEvent) -> Result<bool, BackendError> {
        let entry = self.events.get(event.handle);
        let done = entry.event.is_complete(entry.event.latest());
        if !done {
            // The schedule is advanced, so that a caller that polls the event makes progress.
            self.schedule.advance();
        }
        Ok(done)
    }

    unsafe fn wait_event(&self, event: RawEvent, deadline: Deadline) -> Result<bool, BackendError> {
        let event = Arc::clone(&self.events.get(event.handle).event);
        let ticket = event.latest();
        if self.schedule.runs_inline() {
            // With an inline schedule, the only event records that can be pending are those of another process.
            return Ok(event.wait(ticket, deadline)?);
        }
        Ok(self.drive(deadline, || event.is_complete(ticket)))
    }

    unsafe fn elapsed(&self, start: RawEvent, end: RawEvent) -> Result<Duration, BackendError> {
        let (start, end) = (self.events.get(start.handle), self.events.get(end.handle));
        if [&start, &end].iter().any(|entry| entry.kind != EventKind::Timed) {
            let reason = "only timed events record a time";
            return Err(BackendError::Unsupported { capability: Capability::Timing, reason });
        }
        Ok(end.event.completed_at().saturating_sub(start.event.completed_at()))
    }

    unsafe fn export_event(&self, event: RawEvent) -> Result<EventHandle, BackendError> {
        let reason = "only shared events can be exported";
        let handle = self.events.get(event.handle).event.export()?;
        handle
            .map(EventHandle::Fd)
            .ok_or(BackendError::Unsupported { capability: Capability::SharedEvent, reason })
    }

    unsafe fn import_event(&self, device: DeviceId, handle: EventHandle) -> Result<RawEvent, BackendError> {
        let EventHandle::Fd(fd) = handle else {
            let reason = "host events are shared as file descriptors";
            return Err(BackendError::Unsupported { capability: Capability::SharedEvent, reason });
        };
        let event = Arc::new(HostEvent::import(fd)?);
        Ok(RawEvent { device, handle: self.events.insert(EventEntry { event, kind: EventKind::Shared }) })
    }

    unsafe fn copy(
        &self,
        stream: RawStream,
        to: Address,
        from: Address,
        len: usize,
    ) -> Result<(), BackendError> {
        // SAFETY: the caller of `copy` guarantees the contract of the module `raw`: both ranges are accessible, and
        // held until the copy has run.
        unsafe { self.submit(stream, Work::Copy { to, from, len }) };
        Ok(())
    }

    unsafe fn fill(&self, stream: RawStream, to: Address, value: u8, len: usize) -> Result<(), BackendError> {
        // SAFETY: the caller of `fill` guarantees the contract of the module `raw`: the range is accessible, and
        // held until the fill has run.
        unsafe { self.submit(stream, Work::Fill { to, value, len }) };
        Ok(())
    }

    unsafe fn begin_capture(&self, stream: RawStream) -> Result<(), BackendError> {
        // SAFETY: the caller of `begin_capture` guarantees the contract of the module `raw`: the handle refers to a
        // live stream.
        let stream = unsafe { HostStream::of(stream) };
        *lock(&stream.captured) = Some(Vec::new());
        Ok(())
    }

    unsafe fn end_capture(&self, stream: RawStream) -> Result<RawGraph, BackendError> {
        // SAFETY: the caller of `end_capture` guarantees the contract of the module `raw`: the handle refers to a
        // live stream.
        let captured = lock(&unsafe { HostStream::of(stream) }.captured).take();
        let captured = captured.expect("the module's contract: the stream is being captured");
        Ok(RawGraph { device: stream.device, handle: self.graphs.insert(captured) })
    }

    unsafe fn launch_graph(&self, graph: RawGraph, stream: RawStream) -> Result<(), BackendError> {
        let works = self.graphs.get(graph.handle);
        // SAFETY: the caller of `launch_graph` guarantees the contract of the module `raw`: the operands of the
        // graph are accessible, and held until it has run.
        unsafe { self.submit(stream, Work::Graph(works)) };
        Ok(())
    }

    unsafe fn destroy_graph(&self, graph: RawGraph) -> Result<(), BackendError> {
        self.graphs.remove(graph.handle);
        Ok(())
    }

    unsafe fn load_module(&self, device: DeviceId, image: &KernelImage) -> Result<RawModule, BackendError> {
        Ok(RawModule { device, handle: self.modules.insert(*image) })
    }

    unsafe fn unload_module(&self, module: RawModule) -> Result<(), BackendError> {
        self.modules.remove(module.handle);
        Ok(())
    }

    unsafe fn function(&self, module: RawModule, name: &str) -> Result<Option<RawFunction>, BackendError> {
        let host: &'static [NamedFunction] = self.modules.get(module.handle).host;
        let entry = host.iter().find(|(known, _)| *known == name);
        Ok(entry.map(|entry| RawFunction { device: module.device, handle: number(entry) }))
    }

    unsafe fn occupancy(
        &self,
        _function: RawFunction,
        _block: u32,
        _shared_len: u32,
    ) -> Result<u32, BackendError> {
        // One block can be resident: a host kernel is one call for the whole grid, so its blocks never run concurrently.
        Ok(1)
    }

    unsafe fn launch(
        &self,
        stream: RawStream,
        function: RawFunction,
        shape: &LaunchShape,
        args: &Args,
    ) -> Result<(), BackendError> {
        // SAFETY: the caller of `launch` guarantees the contract of the module `raw`: the handle is from `function`:
        // the address of a static entry.
        let (_, function) = unsafe { *pointer::<NamedFunction>(function.handle) };
        // SAFETY: the caller of `launch` guarantees the contract of the module `raw`: the arguments match the
        // kernel, and the memory that it accesses is held until it has run.
        unsafe { self.submit(stream, Work::Call { function, shape: *shape, args }) };
        Ok(())
    }
}

/// Converts the address of a stream or of a kernel entry to a handle.
fn number<T>(at: *const T) -> u64 {
    to_u64(at.expose_provenance())
}

/// Converts a handle to the address from which it was made.
fn pointer<T>(handle: u64) -> *const T {
    std::ptr::with_exposed_provenance(to_usize(handle))
}

/// A table of live objects by id. Ids are never reused.
struct HandleTable<T> {
    next: AtomicU64,
    entries: Mutex<HashMap<u64, Arc<T>>>,
}

impl<T> Default for HandleTable<T> {
    fn default() -> Self {
        Self { next: AtomicU64::new(1), entries: Mutex::default() }
    }
}

impl<T> fmt::Debug for HandleTable<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HandleTable({} live)", lock(&self.entries).len())
    }
}

impl<T> HandleTable<T> {
    fn insert(&self, entry: T) -> u64 {
        let mut number = 0;
        self.insert_numbered(|id| {
            number = id;
            entry
        });
        number
    }

    /// Inserts the object that `make` creates from its id into the table.
    fn insert_numbered(&self, make: impl FnOnce(u64) -> T) -> Arc<T> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let entry = Arc::new(make(id));
        lock(&self.entries).insert(id, Arc::clone(&entry));
        entry
    }

    fn get(&self, id: u64) -> Arc<T> {
        Arc::clone(lock(&self.entries).get(&id).expect("the safe types use live handles only"))
    }

    fn remove(&self, id: u64) {
        lock(&self.entries).remove(&id);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Only a host kernel can panic while one of these locks is held, and the list of captured work is consistent then.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A schedule for a test that checks every submitted event record and runs it inline.
    #[derive(Debug)]
    struct RecordCheck;

    // SAFETY: work runs inside `submit`, and the test submits only event records.
    unsafe impl Schedule for RecordCheck {
        fn runs_inline(&self) -> bool {
            true
        }

        unsafe fn submit(&self, _stream: StreamId, work: Work<&Args>) {
            let Work::Record { event, ticket } = &work else { panic!("not a record: {work:?}") };
            assert!(event.latest() < *ticket, "a process that dies here must not leave a waiter");
            // SAFETY: an event record accesses only the event.
            unsafe { work.run() };
            assert!(event.is_complete(*ticket));
        }

        fn is_idle(&self, _stream: StreamId) -> bool {
            true
        }

        fn advance(&self) -> bool {
            false
        }
    }

    #[test]
    fn a_record_becomes_the_latest_only_after_it_was_submitted() {
        let queue = HostQueue::new(Box::new(RecordCheck));
        // SAFETY: `create_stream` takes no handle, and the test does not fork.
        let stream = unsafe { queue.create_stream(DeviceId(0)) }.unwrap();
        // SAFETY: `create_event` takes no handle, and the test does not fork.
        let event = unsafe { queue.create_event(DeviceId(0), EventKind::Shared) }.unwrap();
        for ticket in 1..4 {
            // SAFETY: the event and the stream are live, since neither is destroyed, and the test does not fork.
            unsafe { queue.record(event, stream) }.unwrap();
            assert_eq!(queue.events.get(event.handle).event.latest(), ticket);
        }
    }
}
