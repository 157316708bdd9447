//! Log events: passes the events that `WHOLEMEM_LOG` or the program selects to a function of the program, or to the standard error.
//!
//! ```text
//!   any thread ── event ──> queue ──> the thread `wm-log` ──> the function of the program
//! ```
//!
//! A thread that emits an event may hold locks of the library, so it only appends to a queue. One thread of the library takes records
//! from it, and calls the function without any lock, so that the function may call the library.

use std::collections::VecDeque;
use std::ffi::{CString, c_char, c_void};
use std::io::Write;
use std::mem;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};

use wholemem_os::ForkEpoch;
use wholemem_os::log::{LOG_VARIABLE, LogFilter, LogLevel, LogRecord, LogSubscriber};

use crate::argument::{self, Output, invalid};
use crate::call::call;
use crate::failure::{Failure, Result};
use crate::handle::handle_type;
use crate::status::{WM_ERROR_BUSY, WM_ERROR_ENVIRONMENT, WM_ERROR_UNAVAILABLE, wm_status_t};

/// The level of a log event: one of the constants `WM_LOG_...`.
pub type wm_log_level_t = u32;
/// An error that no call returns.
pub const WM_LOG_ERROR: wm_log_level_t = 1;
/// Something that may be a mistake.
pub const WM_LOG_WARN: wm_log_level_t = 2;
/// An important event.
pub const WM_LOG_INFO: wm_log_level_t = 3;
/// A decision of the library, such as the choice of an algorithm.
pub const WM_LOG_DEBUG: wm_log_level_t = 4;
/// Every event.
pub const WM_LOG_TRACE: wm_log_level_t = 5;

/// A function of the program that gets log events. `target` is the path of a module of the library, such as `wholemem_hal::cuda`; the
/// texts are valid until the function returns. It must not throw.
///
/// One thread of the library calls it, one event at a time and in their order, without locks: it may call the library.
pub type wm_log_callback_t = Option<
    unsafe extern "C" fn(
        data: *mut c_void,
        level: wm_log_level_t,
        target: *const c_char,
        message: *const c_char,
    ),
>;

/// A subscription to the log events of this process.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct wm_log_subscription_t {
    /// The number of the handle; 0 is no handle.
    pub value: u64,
}

/// The maximum number of records that wait for the function of the program. Further records are counted and dropped.
const CAPACITY: usize = 10_000;

/// The filter and the queue of this process, from its first subscription on.
static LOG: OnceLock<ProcessLog> = OnceLock::new();

/// Serializes the first subscriptions.
static FIRST: Mutex<()> = Mutex::new(());

#[derive(Debug)]
struct ProcessLog {
    filter: LogFilter,
    queue: Arc<LogQueue>,
}

/// The records that were not delivered yet.
#[derive(Debug)]
struct LogQueue {
    /// The process that created the queue. A forked child has no thread that delivers, and another thread may have held the lock.
    epoch: ForkEpoch,
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct QueueState {
    records: VecDeque<LogRecord>,
    /// The number of records that were dropped because the queue was full.
    dropped: u64,
    /// The number of the subscription; 0 if there is none, and events are not kept.
    subscription: u64,
    /// The number of the last subscription.
    last: u64,
}

/// A subscription: the thread that calls the function of the program.
#[derive(Debug)]
pub(crate) struct Subscription {
    queue: Arc<LogQueue>,
    thread: Option<JoinHandle<()>>,
}

handle_type!(wm_log_subscription_t, Subscription, LogSubscription);

/// The function of the program, and its data.
struct Callback {
    function: unsafe extern "C" fn(*mut c_void, wm_log_level_t, *const c_char, *const c_char),
    data: *mut c_void,
}

// SAFETY: the header requires that the function can be called by another thread with its data.
unsafe impl Send for Callback {}

impl Callback {
    fn deliver(&self, level: LogLevel, target: &str, message: &str) {
        let (target, message) = (c_text(target), c_text(message));
        // SAFETY: the function accepts its data and texts that end with a NUL, as the header requires.
        unsafe { (self.function)(self.data, number_of(level), target.as_ptr(), message.as_ptr()) };
    }
}

fn c_text(text: &str) -> CString {
    // Messages have no NUL: control characters are escaped.
    CString::new(text).unwrap_or_default()
}

fn number_of(level: LogLevel) -> wm_log_level_t {
    let levels =
        [LogLevel::OFF, LogLevel::ERROR, LogLevel::WARN, LogLevel::INFO, LogLevel::DEBUG, LogLevel::TRACE];
    (0..).zip(levels).find(|(_, known)| *known == level).map_or(WM_LOG_TRACE, |(number, _)| number)
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
        match state.records.len() {
            _ if state.subscription == 0 => return,
            CAPACITY.. => state.dropped += 1,
            _ => state.records.push_back(record),
        }
        self.changed.notify_all();
    }

    /// Waits for records of a subscription. Returns no records after the subscription has ended and all records were returned, or a
    /// later subscription has begun.
    fn take(&self, subscription: u64) -> (VecDeque<LogRecord>, u64) {
        let mut state = self.lock();
        while state.records.is_empty() && state.subscription == subscription {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if ![0, subscription].contains(&state.subscription) {
            // A later subscription gets the records.
            return (VecDeque::new(), 0);
        }
        (mem::take(&mut state.records), mem::take(&mut state.dropped))
    }

    /// Begins a subscription, and returns its number.
    fn begin(&self) -> Result<u64> {
        let mut state = self.lock();
        if state.subscription != 0 {
            return Err(Failure::new(WM_ERROR_BUSY, "the process has a subscription to log events"));
        }
        state.last += 1;
        state.subscription = state.last;
        Ok(state.subscription)
    }

    fn end(&self) {
        self.lock().subscription = 0;
        self.changed.notify_all();
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        // A forked child has no such thread.
        if !self.queue.epoch.is_current() {
            mem::forget(self.thread.take());
            return;
        }
        self.queue.end();
        let own = thread::current().id();
        if let Some(thread) = self.thread.take().filter(|thread| thread.thread().id() != own) {
            // A panic of the thread is a defect of the library, which the standard library has reported.
            let _ = thread.join();
        }
    }
}

/// Calls `deliver` for the records of a subscription until it ends.
fn run(queue: &LogQueue, subscription: u64, deliver: impl Fn(LogLevel, &str, &str)) {
    loop {
        let (records, dropped) = queue.take(subscription);
        if records.is_empty() {
            return;
        }
        for LogRecord { level, target, message, .. } in records {
            deliver(LogLevel::from_level(level), target, &message);
        }
        if dropped > 0 {
            deliver(LogLevel::WARN, "wholemem_capi::log", &format!("{dropped} log events were dropped"));
        }
    }
}

fn print(level: LogLevel, target: &str, message: &str) {
    let line = format!("{level} {target}: {message}\n");
    // If the standard error cannot be written, the error cannot be reported.
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Returns the log of this process. The first call installs the subscriber with the filter.
fn process_log(filter: LogFilter) -> Result<&'static ProcessLog> {
    let _first = FIRST.lock().unwrap_or_else(PoisonError::into_inner);
    let log = match LOG.get() {
        Some(log) => log,
        None => {
            let (state, changed) = (Mutex::default(), Condvar::new());
            let queue = Arc::new(LogQueue { epoch: ForkEpoch::current()?, state, changed });
            let sink = Arc::clone(&queue);
            if !LogSubscriber::new(filter.clone(), move |record| sink.push(record)).install() {
                return Err(Failure::new(
                    WM_ERROR_UNAVAILABLE,
                    "the process has another subscriber of log events",
                ));
            }
            LOG.get_or_init(|| ProcessLog { filter: filter.clone(), queue })
        }
    };
    if log.filter != filter {
        return Err(invalid("`filter` differs from that of the first subscription of this process"));
    }
    Ok(log)
}

/// Subscribes to the log events of this process.
///
/// `filter` selects events, as `WHOLEMEM_LOG` does: for example `warn,wholemem::collective=debug`. Null is the value of `WHOLEMEM_LOG`,
/// or `warn` if it is not set. `callback` gets the events, with `data`; if it is null, the events are printed to the standard error. A
/// process has at most one subscription at a time, and all of them have the filter of the first. Without one, nothing is logged.
///
/// Events are dropped, and counted, while more than 10,000 wait for the function. Forked children log nothing.
///
/// Returns `WM_ERROR_BUSY` if there is a subscription; `WM_ERROR_INVALID_ARGUMENT` for an invalid filter; `WM_ERROR_ENVIRONMENT` for
/// an invalid `WHOLEMEM_LOG`. The caller frees the subscription with `wm_log_subscription_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_log_subscribe(
    filter: *const c_char,
    callback: wm_log_callback_t,
    data: *mut c_void,
    subscription: *mut wm_log_subscription_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(subscription, "subscription") }?;
        let filter: LogFilter = match filter.is_null() {
            true => match LogFilter::from_env() {
                Ok(Some(filter)) => filter,
                Ok(None) => "warn".parse().map_err(|error| invalid(format!("{LOG_VARIABLE}: {error}")))?,
                Err(error) => return Err(Failure::new(WM_ERROR_ENVIRONMENT, error.to_string())),
            },
            false => {
                // SAFETY: the pointer is a text that ends with a NUL, as the header requires.
                let text = unsafe { argument::text(filter, "filter") }?;
                text.parse().map_err(|error| invalid(format!("`filter`: {error}")))?
            }
        };
        let queue = Arc::clone(&process_log(filter)?.queue);
        if !queue.epoch.is_current() {
            return Err(Failure::new(
                crate::status::WM_ERROR_FORKED,
                "a forked child cannot log: its parent has subscribed to log events",
            ));
        }
        let number = queue.begin()?;
        let of_thread = Arc::clone(&queue);
        let callback = callback.map(|function| Callback { function, data });
        let thread = thread::Builder::new().name("wm-log".to_owned()).spawn(move || match callback {
            Some(callback) => run(&of_thread, number, |level, target, message| {
                callback.deliver(level, target, message);
            }),
            None => run(&of_thread, number, print),
        });
        // Dropping the subscription ends it, if the thread could not be started or there is no free handle.
        let (thread, error) = match thread {
            Ok(thread) => (Some(thread), None),
            Err(error) => (None, Some(error)),
        };
        let subscription = Subscription { queue, thread };
        if let Some(error) = error {
            return Err(Failure::new(crate::status::WM_ERROR_OS, format!("cannot start a thread: {error}")));
        }
        output.write(wm_log_subscription_t::create(subscription)?);
        Ok(())
    })
}

/// Ends a subscription, after all events so far were passed to its function. After the call, the function is not called any more; if the
/// function itself makes this call, it gets the events that are left.
#[unsafe(no_mangle)]
pub extern "C" fn wm_log_subscription_destroy(subscription: wm_log_subscription_t) -> wm_status_t {
    call(|| Ok(subscription.free()?))
}
