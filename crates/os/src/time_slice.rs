//! The scheduler time slice of a thread: how long it runs before other threads get its core.
//!
//! Linux gives a busy thread a time slice of several milliseconds, and since 6.6 does not preempt it earlier, not
//! even for a thread that was just woken. If a busy server shares a core with its clients, each reply is then delayed
//! by a time slice. With a [short time slice](request) the kernel preempts earlier when a thread is woken; otherwise
//! it checks only at its ticks, every few milliseconds. So a thread that is busy for longer yields its core
//! regularly, and requests short time slices while it does ([`Yielder`]). A thread that mostly sleeps keeps the
//! default: with short time slices it would be preempted by the client that it has just answered, before it is ready
//! for the next request.
//!
//! ```
//! use std::time::Duration;
//!
//! // A hint: kernels before 6.12 ignore it.
//! wholemem_os::time_slice::request(Duration::from_micros(100));
//! ```

use std::thread;
use std::time::{Duration, Instant};

use crate::Deadline;

/// `struct sched_attr` of `sched_setattr(2)` in its first version, which newer kernels accept too.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct SchedAttributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    /// The time slice of an ordinary thread in nanoseconds; zero for the kernel's default.
    runtime: u64,
    deadline: u64,
    period: u64,
}

// The cast cannot truncate, since the struct has 48 bytes.
#[expect(clippy::cast_possible_truncation, reason = "48 bytes")]
const SIZE: u32 = size_of::<SchedAttributes>() as u32;

/// The scheduling policy of ordinary threads.
const SCHED_OTHER: u32 = 0;

/// Requests time slices of the given length for the calling thread and the threads that it starts. Kernels limit the
/// length to between 0.1 and 100 ms; zero requests the kernel's default.
///
/// This is a hint. If the kernel refuses it, or the thread has another scheduling policy than the ordinary one,
/// nothing changes.
#[doc(alias = "sched_setattr")]
pub fn request(slice: Duration) {
    let Some(current) = attributes().filter(|current| current.policy == SCHED_OTHER) else { return };
    // A length that does not fit is saturated, since the kernel limits the length anyway.
    let wanted = SchedAttributes { runtime: u64::try_from(slice.as_nanos()).unwrap_or(u64::MAX), ..current };
    // SAFETY: the kernel reads `wanted.size` bytes at the address, which is the size of `wanted`.
    let refused = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const wanted, 0) };
    if refused != 0 {
        tracing::debug!(?slice, "the kernel refused the time slice");
    }
}

/// The time for which a busy thread runs before it yields its core.
const RUN: Duration = Duration::from_micros(100);

/// The maximum time for which a busy thread runs before it yields its core. The time is doubled up to this maximum as
/// long as the other threads use the yielded core for a long time.
const MAX_RUN: Duration = Duration::from_millis(16);

/// The minimum length of a wait that counts as blocking: other threads had the core during the wait, so the thread does
/// not have to yield its core again soon.
const BLOCKED: Duration = Duration::from_micros(20);

/// The minimum duration of a `sched_yield` that counts as long: other threads computed on the core meanwhile, because a
/// thread that only waits for a reply uses the core for a shorter time.
const SHORT_PAUSE: Duration = Duration::from_millis(1);

/// The time slice that is requested for a thread while it is busy.
const BUSY_SLICE: Duration = Duration::from_micros(100);

/// The minimum length of a wait that ends the busy phase of a thread. It is long, because the next burst of an
/// intermittent load would otherwise start with long time slices, and delay other threads until the thread yields its
/// core.
const IDLE: Duration = Duration::from_secs(1);

/// Yields the core of a busy thread to other threads, and requests short time slices as long as it is busy.
///
/// Clients that wait for a reply need the core for microseconds. A thread that computes keeps it until the next tick
/// of the kernel: in that case the core is yielded less and less often, so that the busy thread keeps its share.
///
/// ```
/// use std::time::Duration;
/// use wholemem_os::Deadline;
/// use wholemem_os::time_slice::Yielder;
///
/// let mut yielder = Yielder::new();
/// let (send, events) = std::sync::mpsc::channel();
/// send.send("an event")?;
/// let event = yielder.wait(Deadline::NEVER, |left| events.recv_timeout(left.unwrap_or(Duration::MAX)))?;
/// assert_eq!(event, "an event");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Yielder {
    since: Instant,
    run: Duration,
    /// True if short time slices are requested for the thread, because it is busy.
    is_busy: bool,
}

impl Yielder {
    /// Creates a `Yielder` for a thread that starts running now.
    #[must_use]
    pub fn new() -> Self {
        Self { since: Instant::now(), run: RUN, is_busy: false }
    }

    /// Calls a function that waits for events, such as `poll`, with the time that is left until the deadline (`None`
    /// if there is no deadline). If this thread has run for long enough, it first yields its core. Other threads may
    /// use the core for milliseconds then, so the time left is computed after that.
    #[doc(alias = "sched_yield")]
    pub fn wait<T>(&mut self, deadline: Deadline, wait: impl FnOnce(Option<Duration>) -> T) -> T {
        self.wait_with(thread::yield_now, deadline, wait)
    }

    fn wait_with<T>(
        &mut self,
        yield_core: impl FnOnce(),
        deadline: Deadline,
        wait: impl FnOnce(Option<Duration>) -> T,
    ) -> T {
        if self.since.elapsed() >= self.run {
            self.set_busy(true);
            let start = Instant::now();
            yield_core();
            self.adapt_run(start.elapsed());
        }
        let start = Instant::now();
        let outcome = wait(deadline.remaining());
        let waited = start.elapsed();
        if waited >= BLOCKED {
            self.since = Instant::now();
        }
        if waited >= IDLE {
            self.set_busy(false);
        }
        outcome
    }

    fn set_busy(&mut self, is_busy: bool) {
        if std::mem::replace(&mut self.is_busy, is_busy) != is_busy {
            request(if is_busy { BUSY_SLICE } else { Duration::ZERO });
        }
    }

    /// Sets how long the thread runs before it yields its core again, after a yield that took `pause`.
    fn adapt_run(&mut self, pause: Duration) {
        self.run = if pause < SHORT_PAUSE { RUN } else { MAX_RUN.min(2 * self.run) };
        self.since = Instant::now();
    }
}

/// Restores the thread's default time slice when dropped.
impl Drop for Yielder {
    fn drop(&mut self) {
        self.set_busy(false);
    }
}

impl Default for Yielder {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns the scheduling attributes of the calling thread, or `None` if the kernel does not support `sched_getattr`.
fn attributes() -> Option<SchedAttributes> {
    let mut current = SchedAttributes::default();
    // SAFETY: the kernel writes at most `SIZE` bytes at the address, which is the size of `current`.
    let refused = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut current, SIZE, 0) };
    (refused == 0).then_some(current)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_requested_time_slice_applies_to_the_thread_and_changes_nothing_else() {
        let thread = thread::spawn(|| {
            let before = attributes();
            request(Duration::from_micros(200));
            (before, attributes())
        });
        let (Some(before), Some(after)) = thread.join().expect("no panic") else {
            return;
        };
        // Kernels that do not support time slices ignore the request.
        let is_set = after.runtime == 200_000;
        assert!(is_set || after.runtime == before.runtime, "{before:?}, {after:?}");
        assert_eq!(SchedAttributes { runtime: before.runtime, ..after }, before);
    }

    #[test]
    fn time_slices_are_short_only_while_a_thread_is_busy() {
        let thread = thread::spawn(|| {
            let mut yielder = Yielder::new();
            let mut slice_after = |wait: Duration| {
                // On a busy core a yield takes long, which makes the time until the next yield longer.
                yielder.since = Instant::now() - MAX_RUN;
                yielder.wait(Deadline::NEVER, |_| thread::sleep(wait));
                (yielder.is_busy, attributes().map(|attributes| attributes.runtime))
            };
            (slice_after(Duration::ZERO), slice_after(IDLE), slice_after(Duration::ZERO))
        });
        let (busy, rested, busy_again) = thread.join().expect("no panic");
        assert_eq!((busy.0, rested.0, busy_again.0), (true, false, true));
        assert_eq!(busy.1, busy_again.1);
        // Kernels that support time slices return the requested slice, or their default.
        if busy.1.is_some_and(|slice| slice != 0) {
            assert_eq!(busy.1, Some(100_000));
            assert_ne!(rested.1, busy.1);
        }
    }

    #[test]
    fn the_time_left_of_a_wait_is_computed_after_the_core_was_yielded() {
        let mut yielder = Yielder::new();
        yielder.since = Instant::now() - MAX_RUN;
        let deadline = Deadline::after(Duration::from_millis(2));
        let (mut has_yielded, wait) = (false, |left| left);
        let yield_core = || {
            has_yielded = true;
            while !deadline.has_passed() {
                thread::yield_now();
            }
        };
        assert_eq!(yielder.wait_with(yield_core, deadline, wait), Some(Duration::ZERO));
        assert!(has_yielded);
    }

    #[test]
    fn a_core_that_is_not_returned_soon_is_yielded_less_often() {
        let mut yielder = Yielder::new();
        let mut runs = Vec::new();
        for pause in [4, 4, 4, 4, 4, 4, 4, 4, 4, 0] {
            yielder.adapt_run(Duration::from_millis(pause));
            runs.push(yielder.run);
        }
        let doubled = (1..8).map(|times| RUN * (1 << times));
        let expected: Vec<_> = doubled.chain([MAX_RUN, MAX_RUN, RUN]).collect();
        assert_eq!(runs, expected);
    }
}
