//! The verbs of work on the host: streams hand their work to a schedule, or record it.

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
use crate::{Args, Capability, Cause, DeviceId, HostFunction, KernelImage, LaunchShape};

/// Streams, events, graphs and kernels of the host.
#[derive(Debug)]
pub struct HostQueue {
    schedule: Box<dyn Schedule>,
    streams: Table<HostStream>,
    events: Table<EventEntry>,
    graphs: Table<Vec<Work>>,
    modules: Table<KernelImage>,
}

#[derive(Debug)]
struct EventEntry {
    event: Arc<HostEvent>,
    kind: EventKind,
}

/// A stream. Its handle is its address, as a function's is that of its entry in the image: work is enqueued often, and needs
/// no lock or table to find them.
#[derive(Debug)]
struct HostStream {
    /// Unlike its address never used again: a stream that is given up may have work left.
    id: StreamId,
    /// What is recorded, while it is being captured.
    captured: Mutex<Option<Vec<Work>>>,
}

impl HostStream {
    /// The stream of a handle.
    ///
    /// # Safety
    /// The handle is of a stream of this backend, which lives for all of `'a`.
    unsafe fn of<'a>(stream: RawStream) -> &'a Self {
        // SAFETY: by the caller's word; `create_stream` made the handle of its address, and the table keeps it there.
        unsafe { &*pointer(stream.handle) }
    }
}

/// What an image has for a name.
type Entry = (&'static str, HostFunction);

impl HostQueue {
    /// Work runs where it is enqueued.
    #[must_use]
    pub fn inline() -> Self {
        Self::new(Box::new(Inline))
    }

    /// Work runs when `schedule` says.
    #[must_use]
    pub fn new(schedule: Box<dyn Schedule>) -> Self {
        Self {
            schedule,
            streams: Table::default(),
            events: Table::default(),
            graphs: Table::default(),
            modules: Table::default(),
        }
    }

    /// Hands work to the schedule, or records it while the stream is being captured.
    ///
    /// # Safety
    /// As [`Schedule::submit`]; what is recorded stays accessible as long as its graph is launched.
    unsafe fn submit(&self, stream: RawStream, work: Work<&Args>) {
        // SAFETY: the module's contract: handles are live.
        let stream = unsafe { HostStream::of(stream) };
        match &mut *lock(&stream.captured) {
            Some(recorded) => recorded.push(work.keep()),
            // SAFETY: passed on from the caller.
            None => unsafe { self.schedule.submit(stream.id, work) },
        }
    }

    /// Runs work until `done`, or until the deadline.
    fn drive(&self, deadline: Deadline, mut done: impl FnMut() -> bool) -> bool {
        loop {
            if done() {
                return true;
            }
            if !self.schedule.advance() {
                // All that is left waits for another thread or process.
                if deadline.has_passed() {
                    return false;
                }
                std::thread::yield_now();
            }
        }
    }
}

// SAFETY: the schedule keeps the order; an event is reached by the work submitted behind all that came before it; an
// idle stream has no work left.
unsafe impl RawQueue for HostQueue {
    fn runs_inline(&self) -> bool {
        self.schedule.runs_inline()
    }

    unsafe fn create_stream(&self, device: DeviceId) -> Result<RawStream, Cause> {
        let stream = self.streams.insert_numbered(|id| HostStream { id, captured: Mutex::new(None) });
        Ok(RawStream { device, handle: number(Arc::as_ptr(&stream)) })
    }

    unsafe fn destroy_stream(&self, stream: RawStream) -> Result<(), Cause> {
        // SAFETY: the module's contract: handles are live.
        let id = unsafe { HostStream::of(stream) }.id;
        self.streams.remove(id);
        Ok(())
    }

    unsafe fn wait_stream(&self, stream: RawStream, deadline: Deadline) -> Result<bool, Cause> {
        // SAFETY: the module's contract: handles are live.
        let stream = unsafe { HostStream::of(stream) };
        Ok(self.drive(deadline, || self.schedule.is_idle(stream.id)))
    }

    unsafe fn create_event(&self, device: DeviceId, kind: EventKind) -> Result<RawEvent, Cause> {
        let event = match kind {
            EventKind::Order | EventKind::Timed => HostEvent::private(),
            EventKind::Shared => HostEvent::shared()?,
        };
        Ok(RawEvent { device, handle: self.events.insert(EventEntry { event: Arc::new(event), kind }) })
    }

    unsafe fn destroy_event(&self, event: RawEvent) -> Result<(), Cause> {
        self.events.remove(event.handle);
        Ok(())
    }

    unsafe fn record(&self, event: RawEvent, stream: RawStream) -> Result<(), Cause> {
        let event = Arc::clone(&self.events.get(event.handle).event);
        let ticket = event.next_ticket();
        // SAFETY: a record touches no memory but the event, which it holds.
        unsafe { self.submit(stream, Work::Record { event: Arc::clone(&event), ticket }) };
        event.ask(ticket);
        Ok(())
    }

    unsafe fn await_event(&self, stream: RawStream, event: RawEvent) -> Result<(), Cause> {
        let event = Arc::clone(&self.events.get(event.handle).event);
        let ticket = event.asked();
        // SAFETY: a wait touches no memory but the event, which it holds.
        unsafe { self.submit(stream, Work::Wait { event, ticket }) };
        Ok(())
    }

    unsafe fn is_done(&self, event: RawEvent) -> Result<bool, Cause> {
        let entry = self.events.get(event.handle);
        let done = entry.event.has_reached(entry.event.asked());
        if !done {
            // Asking again and again has to end some time, also where nobody waits.
            self.schedule.advance();
        }
        Ok(done)
    }

    unsafe fn wait_event(&self, event: RawEvent, deadline: Deadline) -> Result<bool, Cause> {
        let event = Arc::clone(&self.events.get(event.handle).event);
        let ticket = event.asked();
        if self.schedule.runs_inline() {
            // Only another process can be what is waited for.
            return Ok(event.wait(ticket, deadline)?);
        }
        Ok(self.drive(deadline, || event.has_reached(ticket)))
    }

    unsafe fn elapsed(&self, start: RawEvent, end: RawEvent) -> Result<Duration, Cause> {
        let (start, end) = (self.events.get(start.handle), self.events.get(end.handle));
        if [&start, &end].iter().any(|entry| entry.kind != EventKind::Timed) {
            let reason = "only timed events keep their time";
            return Err(Cause::Unsupported { capability: Capability::Timing, reason });
        }
        Ok(end.event.moment().saturating_sub(start.event.moment()))
    }

    unsafe fn export_event(&self, event: RawEvent) -> Result<EventHandle, Cause> {
        let reason = "only shared events can go to another process";
        let handle = self.events.get(event.handle).event.export()?;
        handle.map(EventHandle::Fd).ok_or(Cause::Unsupported { capability: Capability::SharedEvent, reason })
    }

    unsafe fn import_event(&self, device: DeviceId, handle: EventHandle) -> Result<RawEvent, Cause> {
        let EventHandle::Fd(fd) = handle else {
            let reason = "host events travel as file descriptors";
            return Err(Cause::Unsupported { capability: Capability::SharedEvent, reason });
        };
        let event = Arc::new(HostEvent::import(fd)?);
        Ok(RawEvent { device, handle: self.events.insert(EventEntry { event, kind: EventKind::Shared }) })
    }

    unsafe fn copy(&self, stream: RawStream, to: Address, from: Address, len: usize) -> Result<(), Cause> {
        // SAFETY: the module's contract: accessible, and kept until it has run.
        unsafe { self.submit(stream, Work::Copy { to, from, len }) };
        Ok(())
    }

    unsafe fn fill(&self, stream: RawStream, to: Address, value: u8, len: usize) -> Result<(), Cause> {
        // SAFETY: the module's contract: accessible, and kept until it has run.
        unsafe { self.submit(stream, Work::Fill { to, value, len }) };
        Ok(())
    }

    unsafe fn begin_capture(&self, stream: RawStream) -> Result<(), Cause> {
        // SAFETY: the module's contract: handles are live.
        let stream = unsafe { HostStream::of(stream) };
        *lock(&stream.captured) = Some(Vec::new());
        Ok(())
    }

    unsafe fn end_capture(&self, stream: RawStream) -> Result<RawGraph, Cause> {
        // SAFETY: the module's contract: handles are live.
        let recorded = lock(&unsafe { HostStream::of(stream) }.captured).take();
        let recorded = recorded.expect("the module's contract: the stream is being captured");
        Ok(RawGraph { device: stream.device, handle: self.graphs.insert(recorded) })
    }

    unsafe fn launch_graph(&self, graph: RawGraph, stream: RawStream) -> Result<(), Cause> {
        let works = self.graphs.get(graph.handle);
        // SAFETY: the module's contract: what the graph touches is accessible, and kept until it has run.
        unsafe { self.submit(stream, Work::Graph(works)) };
        Ok(())
    }

    unsafe fn destroy_graph(&self, graph: RawGraph) -> Result<(), Cause> {
        self.graphs.remove(graph.handle);
        Ok(())
    }

    unsafe fn load_module(&self, device: DeviceId, image: &KernelImage) -> Result<RawModule, Cause> {
        Ok(RawModule { device, handle: self.modules.insert(*image) })
    }

    unsafe fn unload_module(&self, module: RawModule) -> Result<(), Cause> {
        self.modules.remove(module.handle);
        Ok(())
    }

    unsafe fn function(&self, module: RawModule, name: &str) -> Result<Option<RawFunction>, Cause> {
        let host: &'static [Entry] = self.modules.get(module.handle).host;
        let entry = host.iter().find(|(known, _)| *known == name);
        Ok(entry.map(|entry| RawFunction { device: module.device, handle: number(entry) }))
    }

    unsafe fn occupancy(&self, _function: RawFunction, _block: u32, _shared_len: u32) -> Result<u32, Cause> {
        // A host kernel is called once for its whole grid: its blocks never run side by side.
        Ok(1)
    }

    unsafe fn launch(
        &self,
        stream: RawStream,
        function: RawFunction,
        shape: &LaunchShape,
        args: &Args,
    ) -> Result<(), Cause> {
        // SAFETY: the module's contract: `function` made the handle, of an entry that is never freed.
        let (_, function) = unsafe { *pointer::<Entry>(function.handle) };
        // SAFETY: the module's contract: the arguments fit, and what they name is kept until it has run.
        unsafe { self.submit(stream, Work::Call { function, shape: *shape, args }) };
        Ok(())
    }
}

/// An address as a handle.
fn number<T>(at: *const T) -> u64 {
    to_u64(at.expose_provenance())
}

/// The address that a handle was made of.
fn pointer<T>(handle: u64) -> *const T {
    std::ptr::with_exposed_provenance(to_usize(handle))
}

/// Live things by number. Numbers are never used twice.
struct Table<T> {
    next: AtomicU64,
    entries: Mutex<HashMap<u64, Arc<T>>>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { next: AtomicU64::new(1), entries: Mutex::default() }
    }
}

impl<T> fmt::Debug for Table<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Table({} live)", lock(&self.entries).len())
    }
}

impl<T> Table<T> {
    fn insert(&self, entry: T) -> u64 {
        let mut number = 0;
        self.insert_numbered(|id| {
            number = id;
            entry
        });
        number
    }

    /// Keeps what is made with the number that it is kept by.
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
    // Nothing panics while one of these is held but a host kernel, under a capture list that is whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks at records when they are submitted, and runs them.
    #[derive(Debug)]
    struct Watch;

    // SAFETY: work runs where it is submitted, and nothing but records is.
    unsafe impl Schedule for Watch {
        fn runs_inline(&self) -> bool {
            true
        }

        unsafe fn submit(&self, _stream: StreamId, work: Work<&Args>) {
            let Work::Record { event, ticket } = &work else { panic!("a record: {work:?}") };
            assert!(event.asked() < *ticket, "a process that dies here leaves nobody waiting");
            // SAFETY: a record touches no memory but the event.
            unsafe { work.run() };
            assert!(event.has_reached(*ticket));
        }

        fn is_idle(&self, _stream: StreamId) -> bool {
            true
        }

        fn advance(&self) -> bool {
            false
        }
    }

    #[test]
    fn a_record_is_asked_for_when_it_was_submitted_and_not_before() {
        let queue = HostQueue::new(Box::new(Watch));
        // SAFETY: the call takes no handle, and the test does not fork.
        let stream = unsafe { queue.create_stream(DeviceId(0)) }.unwrap();
        // SAFETY: the call takes no handle, and the test does not fork.
        let event = unsafe { queue.create_event(DeviceId(0), EventKind::Shared) }.unwrap();
        for ticket in 1..4 {
            // SAFETY: the event and the stream are live, since neither is destroyed, and the test does not fork.
            unsafe { queue.record(event, stream) }.unwrap();
            assert_eq!(queue.events.get(event.handle).event.asked(), ticket);
        }
    }
}
