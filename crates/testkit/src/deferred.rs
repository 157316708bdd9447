//! A schedule for the work of host streams: work runs only when a thread waits or queries, and streams are interleaved
//! in a seeded order.
//!
//! On the inline host backend, a program that lacks a wait still works. On this backend it reads old bytes, as it would
//! on a GPU. The only guarantees are those of [`Schedule`]: each stream runs in order, and waits for events are
//! respected.

#![allow(unsafe_code, reason = "a backend is implemented by unsafe functions")]

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use wholemem_hal::host::{HostMemory, HostQueue, Schedule, StreamId, Work};
use wholemem_hal::{Args, Backend, HostConfig, Result};

/// A schedule that runs the work of host streams as late as possible.
#[derive(Debug)]
pub struct Deferred {
    state: Mutex<DeferredState>,
}

#[derive(Debug)]
struct DeferredState {
    streams: BTreeMap<StreamId, VecDeque<Work>>,
    seed: u64,
}

impl Deferred {
    /// Creates a schedule that chooses the next stream at random, with seed `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { state: Mutex::new(DeferredState { streams: BTreeMap::new(), seed }) }
    }

    /// Opens the host backend with streams that run their work as late as possible.
    ///
    /// # Errors
    /// As [`Backend::host`].
    pub fn backend(config: HostConfig, seed: u64) -> Result<Backend> {
        let queue = HostQueue::new(Box::new(Self::new(seed)));
        Backend::from_raw(Arc::new(HostMemory::open(config)?), Arc::new(queue))
    }

    fn state(&self) -> MutexGuard<'_, DeferredState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DeferredState {
    /// Runs the first operation of a stream, if the operation is ready. Returns true if it has run.
    fn run_first(&mut self, stream: StreamId) -> bool {
        let Some(queue) = self.streams.get_mut(&stream) else { return false };
        if !queue.front().is_some_and(Work::is_ready) {
            return false;
        }
        let Some(work) = queue.pop_front() else { return false };
        // An idle stream is removed before its last operation runs: if a kernel panics, the operation counts as run.
        if queue.is_empty() {
            self.streams.remove(&stream);
        }
        // SAFETY: the submitter keeps the operands of `work` alive until it has run. It was removed from its queue and
        // the lock is held, so it runs once and in order.
        unsafe { work.run() };
        true
    }

    /// Runs the first operation of the stream that the random generator chooses, or of the next stream whose first
    /// operation is ready. Returns true if one has run.
    fn advance(&mut self) -> bool {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mut streams: Vec<_> = self.streams.keys().copied().collect();
        if !streams.is_empty() {
            let first = usize::try_from(self.seed >> 33).expect("31 bits") % streams.len();
            streams.rotate_left(first);
        }
        streams.into_iter().any(|stream| self.run_first(stream))
    }
}

// SAFETY: each stream has a queue, from which the first operation is taken under a lock, and only if it is ready. A
// stream without a queue is idle.
unsafe impl Schedule for Deferred {
    fn runs_inline(&self) -> bool {
        false
    }

    unsafe fn submit(&self, stream: StreamId, work: Work<&Args>) {
        // A wait in another process cannot make this schedule run work. So a record of an event that processes share
        // runs at once, with all work before it.
        let is_shared_record = matches!(&work, Work::Record { event, .. } if event.is_shared());
        let mut state = self.state();
        state.streams.entry(stream).or_default().push_back(work.into_owned());
        // The loop also runs work on other streams that the record of the shared event depends on.
        while is_shared_record
            && state.streams.contains_key(&stream)
            && (state.run_first(stream) || state.advance())
        {}
    }

    fn is_idle(&self, stream: StreamId) -> bool {
        !self.state().streams.contains_key(&stream)
    }

    fn advance(&self) -> bool {
        self.state().advance()
    }
}
