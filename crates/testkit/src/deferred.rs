//! Host streams that run their work late: only when somebody waits or asks, and between streams in a seeded order.
//!
//! On the inline host backend a program without a single wait works. Here it reads old bytes, which is what it would
//! do on a GPU. What is promised is what [`Schedule`] promises: each stream in order, events obeyed, nothing more.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use wholemem_hal::host::{HostMemory, HostQueue, Schedule, StreamId, Work};
use wholemem_hal::{Args, Backend, HostConfig, Result};

/// A schedule that runs nothing before it must.
#[derive(Debug)]
pub struct Deferred {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    streams: BTreeMap<StreamId, VecDeque<Work>>,
    seed: u64,
}

impl Deferred {
    /// A schedule that chooses between streams by `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { state: Mutex::new(State { streams: BTreeMap::new(), seed }) }
    }

    /// The host's memory with deferred streams.
    ///
    /// # Errors
    /// As [`Backend::host`].
    pub fn backend(config: HostConfig, seed: u64) -> Result<Backend> {
        let queue = HostQueue::new(Box::new(Self::new(seed)));
        Backend::from_raw(Arc::new(HostMemory::open(config)?), Arc::new(queue))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Runs the first work of a stream, if it is ready.
    fn run_first(&mut self, stream: StreamId) -> bool {
        let Some(queue) = self.streams.get_mut(&stream) else { return false };
        if !queue.front().is_some_and(Work::is_ready) {
            return false;
        }
        let Some(work) = queue.pop_front() else { return false };
        // Before it runs: a kernel may panic, and has run then.
        if queue.is_empty() {
            self.streams.remove(&stream);
        }
        // SAFETY: whoever submitted it keeps what it touches until it has run, and it runs here, once, in order: the
        // lock is held.
        unsafe { work.run() };
        true
    }

    /// Runs the first work of a stream that the seed chooses, or of the next one that is ready.
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

// SAFETY: each stream is a queue whose first work is taken under a lock and only when it is ready; an idle stream has
// no queue.
unsafe impl Schedule for Deferred {
    fn runs_inline(&self) -> bool {
        false
    }

    unsafe fn submit(&self, stream: StreamId, work: Work<&Args>) {
        // Another process cannot make us run anything by waiting, so a record it may wait for is run to at once.
        let others_wait = matches!(&work, Work::Record { event, .. } if event.is_shared());
        let mut state = self.state();
        state.streams.entry(stream).or_default().push_back(work.into_owned());
        // So is what that record waits for, on other streams.
        while others_wait
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
