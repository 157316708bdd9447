//! Passes the log events that `WHOLEMEM_LOG` selects to Python's `logging`.
//!
//! ```text
//!   any thread ── event ──> queue ──> the delivery thread, or a call that returns to Python ──> wholemem._logging.deliver
//! ```
//!
//! A thread that emits an event may hold the GIL, or locks that a thread with the GIL waits for. So it only appends to a queue, whose
//! lock is held for no other call. A thread takes records from the queue only while it holds the GIL. Without the variable there is
//! no subscriber, no queue and no thread.

use std::collections::VecDeque;
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;

use pyo3::prelude::*;
use wholemem_os::ForkEpoch;
use wholemem_os::log::{LogFilter, LogRecord, LogSubscriber};

use crate::error::{Exception, IntoPyResult};

/// The maximum number of records that wait for the GIL. If Python holds it for longer, further records are counted and dropped.
const CAPACITY: usize = 10_000;

/// True if the queue has records. It is separate from the queue, so that calls load only one word.
static PENDING: AtomicBool = AtomicBool::new(false);

static LOG: OnceLock<PythonLog> = OnceLock::new();

/// The log of a process whose environment selects log events.
#[derive(Debug)]
struct PythonLog {
    queue: Arc<LogQueue>,
    /// The function of the package that passes records to `logging`.
    deliver: Py<PyAny>,
    /// The thread that delivers records while no call returns to Python; `None` after the end of the interpreter has begun.
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The records that have not been delivered to Python.
#[derive(Debug)]
struct LogQueue {
    /// The process that created the queue. A forked child has no delivery thread, and another thread may have held the lock.
    epoch: ForkEpoch,
    state: Mutex<QueueState>,
    changed: Condvar,
    /// True while a thread delivers records, so that they arrive in their order.
    delivering: AtomicBool,
}

#[derive(Debug, Default)]
struct QueueState {
    records: VecDeque<LogRecord>,
    /// The number of records that were dropped because the queue was full.
    dropped: u64,
    /// True after the end of the interpreter has begun: the delivery thread ends.
    stopped: bool,
}

impl LogQueue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        // Every change under this lock is a single operation, so the queue is consistent after a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, record: LogRecord) {
        if !self.epoch.is_current() {
            return;
        }
        let mut state = self.lock();
        if state.records.len() < CAPACITY {
            state.records.push_back(record);
        } else {
            state.dropped += 1;
        }
        PENDING.store(true, Ordering::Relaxed);
        self.changed.notify_one();
    }

    fn take(&self) -> (VecDeque<LogRecord>, u64) {
        let mut state = self.lock();
        PENDING.store(false, Ordering::Relaxed);
        (mem::take(&mut state.records), mem::take(&mut state.dropped))
    }

    /// Waits until there are records that no thread delivers. Returns false if the delivery thread must end.
    fn wait(&self) -> bool {
        let mut state = self.lock();
        while !state.stopped && (state.records.is_empty() || self.delivering.load(Ordering::Relaxed)) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        !state.stopped
    }

    /// Ends a delivery, and wakes the delivery thread if it waits for that.
    fn end_delivery(&self) {
        let _state = self.lock();
        self.delivering.store(false, Ordering::Release);
        self.changed.notify_one();
    }
}

impl PythonLog {
    /// Passes the waiting records to `logging`, and returns their number. Returns 0 at once if another thread does so, or this thread in
    /// an outer call. Records that arrive meanwhile are left to the delivery thread, so that a call returns although other threads, or
    /// the handlers, emit events.
    ///
    /// # Errors
    /// The exception that a handler of the program raised, such as that of a signal.
    fn deliver(&self, py: Python<'_>) -> PyResult<usize> {
        let mut count = 0;
        if PENDING.load(Ordering::Relaxed) && !self.queue.delivering.swap(true, Ordering::Acquire) {
            let (records, dropped) = self.queue.take();
            let rows: Vec<_> = records
                .into_iter()
                .map(|record| (logger_name(record.target), record.level.as_str(), record.message))
                .collect();
            count = rows.len();
            let outcome = self.deliver.call1(py, (rows, dropped));
            self.queue.end_delivery();
            outcome?;
        }
        Ok(count)
    }
}

/// Returns the name of the Python logger for a target: `wholemem.hal.cuda` for `wholemem_hal::cuda`.
fn logger_name(target: &str) -> String {
    let path = target.strip_prefix("wholemem_").map(|path| format!("wholemem.{path}"));
    path.unwrap_or_else(|| target.to_owned()).replace("::", ".")
}

/// Passes the waiting records to `logging`, if there are any. Calls that release the GIL call this when they have it again.
///
/// # Errors
/// The exception that a handler of the program raised.
#[inline]
pub(crate) fn deliver_pending(py: Python<'_>) -> PyResult<()> {
    if PENDING.load(Ordering::Relaxed) { deliver_now(py) } else { Ok(()) }
}

#[cold]
fn deliver_now(py: Python<'_>) -> PyResult<()> {
    match LOG.get().filter(|log| log.queue.epoch.is_current()) {
        Some(log) => log.deliver(py).map(drop),
        None => Ok(()),
    }
}

/// Passes log events to ``wholemem._logging`` from now on, if the environment selects any.
///
/// Returns:
///     The name of the most verbose level that is selected, or ``None`` if nothing is logged.
///
/// Raises:
///     wholemem.errors.BadEnvironment: ``WHOLEMEM_LOG`` is invalid.
#[pyfunction]
pub(crate) fn start_logging(py: Python<'_>) -> PyResult<Option<String>> {
    let filter = LogFilter::from_env();
    let Some(filter) =
        filter.map_err(|error| Exception::new("BadEnvironment", error.to_string())).into_py()?
    else {
        return Ok(None);
    };
    let level = filter.max_level().to_string();
    if LOG.get().is_some() {
        return Ok(Some(level));
    }
    let epoch = ForkEpoch::current().into_py()?;
    let (state, changed) = (Mutex::default(), Condvar::new());
    let queue = Arc::new(LogQueue { epoch, state, changed, delivering: AtomicBool::new(false) });
    let deliver = py.import("wholemem._logging")?.getattr("deliver")?.unbind();
    let log = LOG.get_or_init(|| PythonLog { queue: Arc::clone(&queue), deliver, thread: Mutex::default() });
    // The interpreter may have imported the package twice; only one of the imports has created this queue.
    if !Arc::ptr_eq(&log.queue, &queue) {
        return Ok(Some(level));
    }
    let thread = std::thread::Builder::new().name("wholemem-log".to_owned()).spawn(|| {
        while let Some(log) = LOG.get().filter(|log| log.queue.wait()) {
            let delivered = Python::try_attach(|py| {
                if let Err(error) = log.deliver(py) {
                    error.write_unraisable(py, None);
                }
            });
            if delivered.is_none() {
                // The thread cannot attach to the interpreter, which is ending without having called `stop_logging`.
                return;
            }
        }
    })?;
    *log.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
    let sink = Arc::clone(&queue);
    LogSubscriber::new(filter, move |record| sink.push(record)).install();
    Ok(Some(level))
}

/// Delivers all log records, and ends the thread that delivers them. The package registers it with ``atexit``, because a
/// thread must not wait for the GIL when the interpreter ends. Records that handlers emit meanwhile are delivered too, except if
/// their number does not end: after 10,000 records, the rest is dropped.
#[pyfunction]
pub(crate) fn stop_logging(py: Python<'_>) -> PyResult<()> {
    let Some(log) = LOG.get().filter(|log| log.queue.epoch.is_current()) else { return Ok(()) };
    log.queue.lock().stopped = true;
    log.queue.changed.notify_all();
    let thread = log.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
    py.detach(|| thread.map(JoinHandle::join));
    let mut delivered = 0;
    while delivered < CAPACITY {
        match log.deliver(py)? {
            0 => break,
            count => delivered += count,
        }
    }
    Ok(())
}
