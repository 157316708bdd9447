//! The thread that does the work of all streams: each in order, and none before the call that enqueued it has returned
//! to its caller's sight.
//!
//! One thread is enough because nothing in it waits: work that is not ready yet is looked at again later.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

use crate::bindings::*;
use crate::calls::{self, ensure};
use crate::modules::Kernel;
use crate::streams::Recording;
use crate::{config, events};

/// How long until work that was not ready is looked at again: another process may make it ready.
const REST: Duration = Duration::from_micros(50);

/// A piece of work.
#[derive(Debug, Clone)]
pub(crate) enum Op {
    Copy { to: u64, from: u64, len: usize },
    Fill { to: u64, value: u8, len: usize },
    Run(Kernel),
    Record { event: events::State, turn: u64 },
    Await { event: events::State, turn: u64 },
}

impl Op {
    fn is_ready(&mut self) -> bool {
        match self {
            Self::Await { event, turn } => event.passed() >= *turn,
            Self::Run(kernel) => kernel.is_ready(),
            _ => true,
        }
    }

    fn run(self) {
        let pointer = |at: u64| std::ptr::with_exposed_provenance_mut::<u8>(at as usize);
        match self {
            // SAFETY: the ranges were checked when this was enqueued, and whoever did so keeps them until it has run.
            Self::Copy { to, from, len } => unsafe { std::ptr::copy(pointer(from), pointer(to), len) },
            // SAFETY: the range was checked when this was enqueued, and the code that enqueued it keeps it until it
            // has run.
            Self::Fill { to, value, len } => unsafe { pointer(to).write_bytes(value, len) },
            Self::Run(kernel) => kernel.run(),
            Self::Record { event, turn } => event.pass(turn),
            Self::Await { .. } => {}
        }
    }
}

/// One stream.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    pub(crate) device: CUdevice,
    ops: VecDeque<Op>,
    enqueued: u64,
    done: u64,
    /// What was recorded, while it is being captured.
    pub(crate) capture: Option<Recording>,
    /// Nobody can name it any more; it goes when its work is done.
    is_orphan: bool,
}

impl Queue {
    /// Enqueues work, or records it.
    pub(crate) fn push(&mut self, op: Op) {
        match &mut self.capture {
            Some(recorded) => recorded.ops.push(op),
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

/// All streams by their handles. The default stream of device n is stream n + 1.
#[derive(Debug, Default)]
pub(crate) struct Queues {
    pub(crate) streams: BTreeMap<u64, Queue>,
    last: u64,
    /// The stream that was served last.
    served: u64,
}

/// Handles from here on are not default streams.
const FIRST_HANDLE: u64 = 0x1000;

static WAKE: Condvar = Condvar::new();

pub(crate) fn queues() -> MutexGuard<'static, Queues> {
    static QUEUES: LazyLock<Mutex<Queues>> = LazyLock::new(|| {
        let default =
            |device: usize| (device as u64 + 1, Queue { device: device as i32, ..Queue::default() });
        let streams = (0..config::get().devices).map(default).collect();
        Mutex::new(Queues { streams, last: FIRST_HANDLE, served: 0 })
    });
    QUEUES.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Queues {
    pub(crate) fn create(&mut self, device: CUdevice) -> u64 {
        self.last += 0x10;
        self.streams.insert(self.last, Queue { device, ..Queue::default() });
        self.last
    }

    /// The number of the stream that a handle names for this thread.
    pub(crate) fn number(&self, handle: CUstream) -> Result<u64, CUresult> {
        let number = match handle.addr() as u64 {
            0 => calls::current()? as u64 + 1,
            number if number < FIRST_HANDLE => return Err(CUresult::CUDA_ERROR_INVALID_HANDLE),
            number => number,
        };
        let known = self.streams.get(&number).is_some_and(|queue| !queue.is_orphan);
        ensure(known, CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        Ok(number)
    }

    /// The stream that a handle names for this thread.
    pub(crate) fn get(&mut self, handle: CUstream) -> Result<&mut Queue, CUresult> {
        let number = self.number(handle)?;
        self.streams.get_mut(&number).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
    }

    pub(crate) fn destroy(&mut self, handle: CUstream) -> Result<(), CUresult> {
        ensure(!handle.is_null(), CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        let number = self.number(handle)?;
        if let Some(queue) = self.streams.get_mut(&number) {
            (queue.is_orphan, queue.capture) = (true, None);
            if queue.is_idle() {
                self.streams.remove(&number);
            }
        }
        Ok(())
    }

    /// Takes the next piece of work that is ready, of the stream after the one served last where that has some.
    fn take(&mut self) -> Option<(u64, Op)> {
        let served = self.served;
        let turn = |number: &u64| *number <= served;
        let mut waiting: Vec<u64> = self
            .streams
            .iter()
            .filter(|(_, queue)| !queue.ops.is_empty())
            .map(|(number, _)| *number)
            .collect();
        waiting.sort_by_key(turn);
        for number in waiting {
            let Some(queue) = self.streams.get_mut(&number) else { continue };
            if queue.ops.front_mut().is_some_and(Op::is_ready) {
                self.served = number;
                return queue.ops.pop_front().map(|op| (number, op));
            }
        }
        None
    }

    fn done(&mut self, number: u64) {
        if let Some(queue) = self.streams.get_mut(&number) {
            queue.done += 1;
            if queue.is_orphan && queue.is_idle() {
                self.streams.remove(&number);
            }
        }
    }

    fn is_busy(&self) -> bool {
        self.streams.values().any(|queue| !queue.ops.is_empty())
    }
}

/// Starts the thread, once.
pub(crate) fn start() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        let thread = std::thread::Builder::new().name("fake-gpu".to_owned()).stack_size(256 << 10);
        let started = thread.spawn(work);
        assert!(started.is_ok(), "a thread can be had");
    });
}

fn work() {
    let mut queues = queues();
    loop {
        if let Some((number, op)) = queues.take() {
            drop(queues);
            op.run();
            queues = self::queues();
            queues.done(number);
            WAKE.notify_all();
        } else if queues.is_busy() {
            queues = WAKE.wait_timeout(queues, REST).unwrap_or_else(PoisonError::into_inner).0;
        } else {
            queues = WAKE.wait(queues).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Tells the thread that there is work.
pub(crate) fn wake() {
    WAKE.notify_all();
}

/// Waits until something has been done, or for a while.
pub(crate) fn rest(queues: MutexGuard<'static, Queues>) -> MutexGuard<'static, Queues> {
    WAKE.wait_timeout(queues, REST).unwrap_or_else(PoisonError::into_inner).0
}

/// Waits until a stream has done what is on it now.
pub(crate) fn wait_for(mut queues: MutexGuard<'static, Queues>, number: u64) {
    let goal = queues.streams.get(&number).map_or(0, |queue| queue.enqueued);
    while queues.streams.get(&number).is_some_and(|queue| queue.done < goal) {
        queues = rest(queues);
    }
}

/// Waits until all streams have done what is on them now.
pub(crate) fn wait_for_all() {
    let goals: Vec<_> = queues().streams.iter().map(|(number, queue)| (*number, queue.enqueued)).collect();
    let mut queues = queues();
    for (number, goal) in goals {
        while queues.streams.get(&number).is_some_and(|queue| queue.done < goal) {
            queues = rest(queues);
        }
    }
}

/// How many streams there are beside the default ones.
pub(crate) fn stream_count() -> u64 {
    let queues = queues();
    queues.streams.iter().filter(|(number, queue)| **number >= FIRST_HANDLE && !queue.is_orphan).count()
        as u64
}

pub(crate) fn capture_count() -> u64 {
    queues().streams.values().filter(|queue| queue.capture.is_some()).count() as u64
}
