//! The fake GPU: a thread that runs the work of all streams. Each stream runs in order, asynchronously to the calls
//! that enqueue work.
//!
//! One thread is enough because no operation blocks: work that is not ready is checked again later.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

use crate::bindings::*;
use crate::calls::{self, ensure};
use crate::modules::Kernel;
use crate::streams::CapturedWork;
use crate::{config, events};

/// The interval at which the fake GPU checks work that is not ready. Another process may make the work ready.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// An operation that is enqueued on a stream of the fake driver.
#[derive(Debug, Clone)]
pub(crate) enum Op {
    Copy { to: u64, from: u64, len: usize },
    Fill { to: u64, value: u8, len: usize },
    Run(Kernel),
    Record { event: events::FakeEvent, ticket: u64 },
    Await { event: events::FakeEvent, ticket: u64 },
}

impl Op {
    fn is_ready(&mut self) -> bool {
        match self {
            Self::Await { event, ticket } => event.completed() >= *ticket,
            Self::Run(kernel) => kernel.is_ready(),
            _ => true,
        }
    }

    fn run(self) {
        let pointer = |at: u64| std::ptr::with_exposed_provenance_mut::<u8>(at as usize);
        match self {
            // SAFETY: both ranges were checked when the copy was enqueued, and the program under test keeps them mapped
            // until the copy has run.
            Self::Copy { to, from, len } => unsafe { std::ptr::copy(pointer(from), pointer(to), len) },
            // SAFETY: the range was checked when the fill was enqueued, and the program under test keeps it mapped
            // until the fill has run.
            Self::Fill { to, value, len } => unsafe { pointer(to).write_bytes(value, len) },
            Self::Run(kernel) => kernel.run(),
            Self::Record { event, ticket } => event.complete(ticket),
            Self::Await { .. } => {}
        }
    }
}

/// The queue of operations of a stream.
#[derive(Debug, Default)]
pub(crate) struct StreamQueue {
    pub(crate) device: CUdevice,
    ops: VecDeque<Op>,
    enqueued: u64,
    done: u64,
    /// The work captured so far, if the stream is being captured.
    pub(crate) capture: Option<CapturedWork>,
    /// True after the stream's handle was destroyed. The queue is removed when its enqueued work has run.
    is_destroyed: bool,
}

impl StreamQueue {
    /// Enqueues an operation on the stream, or captures the operation if the stream is being captured.
    pub(crate) fn push(&mut self, op: Op) {
        match &mut self.capture {
            Some(captured) => captured.ops.push(op),
            None => {
                self.ops.push_back(op);
                self.enqueued += 1;
            }
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.done == self.enqueued
    }
}

/// The queues of all streams by handle. The default stream of device `n` has the number `n + 1`.
#[derive(Debug, Default)]
pub(crate) struct StreamQueues {
    pub(crate) streams: BTreeMap<u64, StreamQueue>,
    last: u64,
    /// The stream whose operation ran last.
    last_served: u64,
}

/// The lower bound of the handles of created streams. Smaller numbers are those of default streams.
const FIRST_HANDLE: u64 = 0x1000;

static WAKE: Condvar = Condvar::new();

pub(crate) fn queues() -> MutexGuard<'static, StreamQueues> {
    static QUEUES: LazyLock<Mutex<StreamQueues>> = LazyLock::new(|| {
        let default = |device: usize| {
            (device as u64 + 1, StreamQueue { device: device as i32, ..StreamQueue::default() })
        };
        let streams = (0..config::get().devices).map(default).collect();
        Mutex::new(StreamQueues { streams, last: FIRST_HANDLE, last_served: 0 })
    });
    QUEUES.lock().unwrap_or_else(PoisonError::into_inner)
}

impl StreamQueues {
    pub(crate) fn create(&mut self, device: CUdevice) -> u64 {
        self.last += 0x10;
        self.streams.insert(self.last, StreamQueue { device, ..StreamQueue::default() });
        self.last
    }

    /// Returns the number of the stream that `handle` refers to. A null handle is the default stream of the current
    /// device.
    pub(crate) fn number(&self, handle: CUstream) -> Result<u64, CUresult> {
        let number = match handle.addr() as u64 {
            0 => calls::current()? as u64 + 1,
            number if number < FIRST_HANDLE => return Err(CUresult::CUDA_ERROR_INVALID_HANDLE),
            number => number,
        };
        let known = self.streams.get(&number).is_some_and(|queue| !queue.is_destroyed);
        ensure(known, CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        Ok(number)
    }

    /// Returns the queue of the stream that `handle` refers to. A null handle is the default stream of the current
    /// device.
    pub(crate) fn get(&mut self, handle: CUstream) -> Result<&mut StreamQueue, CUresult> {
        let number = self.number(handle)?;
        self.streams.get_mut(&number).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
    }

    pub(crate) fn destroy(&mut self, handle: CUstream) -> Result<(), CUresult> {
        ensure(!handle.is_null(), CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        let number = self.number(handle)?;
        if let Some(queue) = self.streams.get_mut(&number) {
            (queue.is_destroyed, queue.capture) = (true, None);
            if queue.is_idle() {
                self.streams.remove(&number);
            }
        }
        Ok(())
    }

    /// Removes and returns the next operation that is ready to run. Streams are served round-robin.
    fn next_ready(&mut self) -> Option<(u64, Op)> {
        let served = self.last_served;
        let after_served = |number: &u64| *number <= served;
        let mut waiting: Vec<u64> = self
            .streams
            .iter()
            .filter(|(_, queue)| !queue.ops.is_empty())
            .map(|(number, _)| *number)
            .collect();
        waiting.sort_by_key(after_served);
        for number in waiting {
            let Some(queue) = self.streams.get_mut(&number) else { continue };
            if queue.ops.front_mut().is_some_and(Op::is_ready) {
                self.last_served = number;
                return queue.ops.pop_front().map(|op| (number, op));
            }
        }
        None
    }

    fn done(&mut self, number: u64) {
        if let Some(queue) = self.streams.get_mut(&number) {
            queue.done += 1;
            if queue.is_destroyed && queue.is_idle() {
                self.streams.remove(&number);
            }
        }
    }

    fn is_busy(&self) -> bool {
        self.streams.values().any(|queue| !queue.ops.is_empty())
    }
}

/// Starts the fake GPU's thread, if it is not running.
pub(crate) fn start() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        let thread = std::thread::Builder::new().name("fake-gpu".to_owned()).stack_size(256 << 10);
        let started = thread.spawn(run_streams);
        assert!(started.is_ok(), "cannot start a thread");
    });
}

fn run_streams() {
    let mut queues = queues();
    loop {
        if let Some((number, op)) = queues.next_ready() {
            drop(queues);
            op.run();
            queues = self::queues();
            queues.done(number);
            WAKE.notify_all();
        } else if queues.is_busy() {
            queues = WAKE.wait_timeout(queues, POLL_INTERVAL).unwrap_or_else(PoisonError::into_inner).0;
        } else {
            queues = WAKE.wait(queues).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Wakes the fake GPU's thread after work was enqueued.
pub(crate) fn wake() {
    WAKE.notify_all();
}

/// Waits until the fake GPU has run an operation, but at most for the poll interval.
pub(crate) fn wait_briefly(queues: MutexGuard<'static, StreamQueues>) -> MutexGuard<'static, StreamQueues> {
    WAKE.wait_timeout(queues, POLL_INTERVAL).unwrap_or_else(PoisonError::into_inner).0
}

/// Waits until all work that is enqueued on a stream at the time of the call has run.
pub(crate) fn wait_for(mut queues: MutexGuard<'static, StreamQueues>, number: u64) {
    let goal = queues.streams.get(&number).map_or(0, |queue| queue.enqueued);
    while queues.streams.get(&number).is_some_and(|queue| queue.done < goal) {
        queues = wait_briefly(queues);
    }
}

/// Waits until all work that is enqueued on any stream at the time of the call has run.
pub(crate) fn wait_for_all() {
    let goals: Vec<_> = queues().streams.iter().map(|(number, queue)| (*number, queue.enqueued)).collect();
    let mut queues = queues();
    for (number, goal) in goals {
        while queues.streams.get(&number).is_some_and(|queue| queue.done < goal) {
            queues = wait_briefly(queues);
        }
    }
}

/// Returns the number of streams, without the default streams.
pub(crate) fn stream_count() -> u64 {
    let queues = queues();
    queues.streams.iter().filter(|(number, queue)| **number >= FIRST_HANDLE && !queue.is_destroyed).count()
        as u64
}

pub(crate) fn capture_count() -> u64 {
    queues().streams.values().filter(|queue| queue.capture.is_some()).count() as u64
}
