//! Futexes: waiting in the kernel until a shared 32-bit word changes.
//!
//! The word may be in memory that several processes map at different addresses: the kernel identifies it by its page.
//! A signaller stores the new value and then wakes. A waiter passes the value that it last read, and the kernel puts
//! it to sleep only if the word still has that value, so no wakeup is lost.
//!
//! ```
//! use std::sync::atomic::{AtomicU32, Ordering};
//! use wholemem_os::{Deadline, futex};
//!
//! let word = AtomicU32::new(0);
//! std::thread::scope(|scope| {
//!     scope.spawn(|| {
//!         word.store(1, Ordering::Release);
//!         futex::wake_all(&word)
//!     });
//!     while word.load(Ordering::Acquire) == 0 {
//!         futex::wait(&word, 0, Deadline::NEVER)?;
//!     }
//!     Ok::<(), wholemem_os::Error>(())
//! })?;
//! # Ok::<(), wholemem_os::Error>(())
//! ```

use std::num::NonZeroU32;
use std::sync::atomic::AtomicU32;

use rustix::thread::futex::{self, Flags};

use crate::call::call;
use crate::{Deadline, Errno, Error, Result};

/// Sleeps while the futex `word` has the value `seen`. Returns when the thread is woken, when the word has another
/// value, or spuriously: the caller must read the word again.
///
/// # Errors
/// [`Error::TimedOut`] if the deadline passes first.
#[doc(alias = "FUTEX_WAIT_BITSET")]
pub fn wait(word: &AtomicU32, seen: u32, deadline: Deadline) -> Result<()> {
    // FUTEX_PRIVATE_FLAG is not set, since the word may be shared between processes. FUTEX_WAIT_BITSET takes an
    // absolute time.
    let timeout = deadline.absolute_time();
    let answer =
        call("futex", || futex::wait_bitset(word, Flags::empty(), seen, timeout.as_ref(), NonZeroU32::MAX));
    match answer {
        Ok(()) | Err(Error::Call { errno: Errno::AGAIN | Errno::INTR, .. }) => Ok(()),
        Err(Error::Call { errno: Errno::TIMEDOUT, .. }) => Err(Error::TimedOut),
        Err(error) => Err(error),
    }
}

/// Wakes at most `count` waiters of the futex `word`, and returns how many were woken.
///
/// # Errors
/// `futex` with `EFAULT` if the word's memory is not mapped.
#[doc(alias = "FUTEX_WAKE")]
pub fn wake(word: &AtomicU32, count: u32) -> Result<usize> {
    // The kernel interprets the number of waiters to wake as a signed integer.
    let count = count.min(i32::MAX.unsigned_abs());
    call("futex", || futex::wake(word, Flags::empty(), count))
}

/// Wakes every waiter of the futex `word`, and returns how many were woken.
///
/// # Errors
/// As [`wake`].
pub fn wake_all(word: &AtomicU32) -> Result<usize> {
    wake(word, u32::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;
    use std::time::Duration;

    use super::*;
    use crate::Memfd;
    use crate::vm::{Protection, SharedMap, page_size};

    #[test]
    fn wait_returns_at_once_if_the_word_has_changed() {
        assert_eq!(wait(&AtomicU32::new(1), 0, Deadline::NEVER), Ok(()));
    }

    #[test]
    fn a_passed_deadline_ends_the_wait() {
        assert_eq!(wait(&AtomicU32::new(0), 0, Deadline::NOW), Err(Error::TimedOut));
        let soon = Deadline::after(Duration::from_millis(1));
        let mut answer = Ok(());
        while answer.is_ok() {
            answer = wait(&AtomicU32::new(0), 0, soon);
        }
        assert_eq!(answer, Err(Error::TimedOut));
        assert!(soon.has_passed());
    }

    #[cfg(feature = "test-hooks")]
    #[test]
    fn an_interrupted_wait_returns_spuriously() {
        let armed = crate::fault::arm(1, Errno::INTR);
        assert_eq!(wait(&AtomicU32::new(0), 0, Deadline::NEVER), Ok(()));
        assert_eq!(armed.fired(), Some("futex"));
    }

    #[test]
    fn all_waiters_are_woken_at_once() {
        let word = AtomicU32::new(0);
        let deadline = Deadline::after(Duration::from_secs(60));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while word.load(Ordering::Acquire) == 0 && !deadline.has_passed() {
                        let _ = wait(&word, 0, deadline);
                    }
                });
            }
            // Waiters that are woken before the word changes wait again, so one of these calls wakes all three at
            // once.
            let all = std::iter::repeat_with(|| wake_all(&word))
                .find(|woken| *woken == Ok(3) || deadline.has_passed());
            word.store(1, Ordering::Release);
            wake_all(&word).unwrap();
            assert_eq!(all, Some(Ok(3)));
        });
    }

    #[test]
    fn a_waiter_is_woken_through_another_map_of_the_same_memory() {
        let memory = Memfd::create("test", page_size()).unwrap();
        let here = SharedMap::create(&memory, Protection::ReadWrite).unwrap();
        let there = SharedMap::create(&memory, Protection::ReadWrite).unwrap();
        assert_ne!(here.address(), there.address());
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let bytes = here.bytes();
                let word = bytes.atomic_u32(64).unwrap();
                while word.load(Ordering::Acquire) == 0 {
                    wait(word, 0, Deadline::NEVER).unwrap();
                }
            });
            let bytes = there.bytes();
            let word = bytes.atomic_u32(64).unwrap();
            // `wake_all` counts only waiters that are asleep, so this loop ends once the waiter is asleep.
            while wake_all(word).unwrap() == 0 {
                std::thread::yield_now();
            }
            word.store(1, Ordering::Release);
            wake_all(word).unwrap();
            waiter.join().unwrap();
        });
    }
}
