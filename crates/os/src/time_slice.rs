//! How long a thread runs before others that wait for its core get a turn.
//!
//! Linux gives a thread that is always busy a slice of several milliseconds, and from 6.6 on does not interrupt it before its
//! slice is used, also not for a thread that has just been woken. A busy server that shares a core with its clients then delays
//! each answer by a slice. With a [short slice](request) the kernel switches earlier where a thread is woken; between wake-ups
//! it looks only at its ticks, every few milliseconds. So a thread that is busy for longer gives its core up now and then, and
//! has short slices while it does ([`Yielder`]). A thread that mostly sleeps keeps the kernel's own slices: with short ones it
//! would be interrupted by the client that it has just answered, before it is ready for the next request.
//!
//! ```
//! use std::time::Duration;
//!
//! // A hint: kernels before 6.12 do not know it.
//! wholemem_os::time_slice::request(Duration::from_micros(100));
//! ```

use std::thread;
use std::time::{Duration, Instant};

/// `struct sched_attr` of `sched_setattr(2)`, as it was first defined: kernels take every length that they know.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    /// Of an ordinary thread, the slice in nanoseconds; zero stands for the kernel's own choice.
    runtime: u64,
    deadline: u64,
    period: u64,
}

// A struct of 48 bytes is at most as long as a number of 32 bits can say.
#[expect(clippy::cast_possible_truncation, reason = "48 bytes")]
const SIZE: u32 = size_of::<Attributes>() as u32;

/// The policy of ordinary threads, `SCHED_OTHER`.
const ORDINARY: u32 = 0;

/// Asks for slices of this length for the calling thread and the threads that it starts. Kernels limit it to between 0.1 and
/// 100 ms; zero asks for the kernel's own choice.
///
/// It is a hint. Where the kernel refuses it, or the thread is of another policy than the ordinary one, nothing changes.
#[doc(alias = "sched_setattr")]
pub fn request(slice: Duration) {
    let Some(current) = attributes().filter(|current| current.policy == ORDINARY) else { return };
    // Saturating: the kernel limits what it is asked for.
    let wanted = Attributes { runtime: u64::try_from(slice.as_nanos()).unwrap_or(u64::MAX), ..current };
    // SAFETY: the kernel reads `size` bytes at the address, which are those of `wanted`.
    let refused = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const wanted, 0) };
    if refused != 0 {
        tracing::debug!(?slice, "the kernel does not take a time slice");
    }
}

/// How long a busy thread runs before it gives its core up.
const RUN: Duration = Duration::from_micros(100);

/// The most that is, where the core is given to threads that do not give it back soon.
const LONGEST_RUN: Duration = Duration::from_millis(16);

/// A wait that takes longer was more than a look: other threads had the core.
const SLEPT: Duration = Duration::from_micros(20);

/// Threads that have the core for longer use it themselves, and do not wait for an answer.
const BRIEF: Duration = Duration::from_millis(1);

/// The slices of a thread while it is busy.
const BUSY_SLICE: Duration = Duration::from_micros(100);

/// A wait that takes longer ends a time in which the thread is busy. It is long, since the next burst of a load that comes and goes
/// would find the long slices, and delay other threads until the thread gives its core up.
const REST: Duration = Duration::from_secs(1);

/// Gives the core of a busy thread to others that wait for it, and has it scheduled in short slices as long as it is busy.
///
/// Clients that wait for an answer need the core for microseconds. A thread that computes takes it until the next tick of the
/// kernel: where one does, the core is given up less and less often, so that the busy thread keeps its share.
///
/// ```
/// use wholemem_os::time_slice::Yielder;
///
/// let mut yielder = Yielder::new();
/// let (send, events) = std::sync::mpsc::channel();
/// send.send("an event")?;
/// assert_eq!(yielder.wait(|| events.recv())?, "an event");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Yielder {
    since: Instant,
    run: Duration,
    /// Whether short slices were asked for.
    is_busy: bool,
}

impl Yielder {
    /// A thread that runs from now on.
    #[must_use]
    pub fn new() -> Self {
        Self { since: Instant::now(), run: RUN, is_busy: false }
    }

    /// Calls a function that waits for events, such as `poll`. If this thread has run for long enough, it gives its core up
    /// before that.
    #[doc(alias = "sched_yield")]
    pub fn wait<T>(&mut self, wait: impl FnOnce() -> T) -> T {
        if self.since.elapsed() >= self.run {
            self.set_busy(true);
            let given_up = Instant::now();
            thread::yield_now();
            self.come_back(given_up.elapsed());
        }
        let start = Instant::now();
        let outcome = wait();
        let waited = start.elapsed();
        if waited >= SLEPT {
            self.since = Instant::now();
        }
        if waited >= REST {
            self.set_busy(false);
        }
        outcome
    }

    fn set_busy(&mut self, is_busy: bool) {
        if std::mem::replace(&mut self.is_busy, is_busy) != is_busy {
            request(if is_busy { BUSY_SLICE } else { Duration::ZERO });
        }
    }

    /// Decides how long to run before the next pause, after one of this length.
    fn come_back(&mut self, pause: Duration) {
        self.run = if pause < BRIEF { RUN } else { LONGEST_RUN.min(2 * self.run) };
        self.since = Instant::now();
    }
}

/// The thread has the kernel's own slices again.
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

/// The attributes of the calling thread. `None` where the kernel does not tell.
fn attributes() -> Option<Attributes> {
    let mut current = Attributes::default();
    // SAFETY: the kernel writes at most `SIZE` bytes at the address, which `current` has.
    let refused = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut current, SIZE, 0) };
    (refused == 0).then_some(current)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_that_was_asked_for_is_the_threads_own_and_changes_nothing_else() {
        let thread = thread::spawn(|| {
            let before = attributes();
            request(Duration::from_micros(200));
            (before, attributes())
        });
        let (Some(before), Some(after)) = thread.join().expect("a thread that does not panic") else {
            return;
        };
        // Kernels that do not know it leave it as it was.
        let is_taken = after.runtime == 200_000;
        assert!(is_taken || after.runtime == before.runtime, "{before:?}, {after:?}");
        assert_eq!(Attributes { runtime: before.runtime, ..after }, before);
    }

    #[test]
    fn slices_are_short_while_a_thread_is_busy_and_only_then() {
        let thread = thread::spawn(|| {
            let mut yielder = Yielder::new();
            let mut slice_after = |wait: Duration| {
                // On a busy core a pause is long, and the next run is longer.
                yielder.since = Instant::now() - LONGEST_RUN;
                yielder.wait(|| thread::sleep(wait));
                (yielder.is_busy, attributes().map(|attributes| attributes.runtime))
            };
            (slice_after(Duration::ZERO), slice_after(REST), slice_after(Duration::ZERO))
        });
        let (busy, rested, busy_again) = thread.join().expect("a thread that does not panic");
        assert_eq!((busy.0, rested.0, busy_again.0), (true, false, true));
        assert_eq!(busy.1, busy_again.1);
        // Kernels that know slices tell the one that was asked for, or their own.
        if busy.1.is_some_and(|slice| slice != 0) {
            assert_eq!(busy.1, Some(100_000));
            assert_ne!(rested.1, busy.1);
        }
    }

    #[test]
    fn a_core_that_does_not_come_back_soon_is_given_up_less_often() {
        let mut yielder = Yielder::new();
        let mut runs = Vec::new();
        for pause in [4, 4, 4, 4, 4, 4, 4, 4, 4, 0] {
            yielder.come_back(Duration::from_millis(pause));
            runs.push(yielder.run);
        }
        let doubled = (1..8).map(|times| RUN * (1 << times));
        let expected: Vec<_> = doubled.chain([LONGEST_RUN, LONGEST_RUN, RUN]).collect();
        assert_eq!(runs, expected);
    }
}
