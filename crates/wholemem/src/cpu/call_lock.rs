//! The call lock of a lane (a sequence of collective calls), which serializes the calls of all threads of one CPU rank, whether
//! eager or replayed from a graph.
//!
//! The lock is a control word of the lane, so that replayed calls find it too.

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU32, Ordering};

use wholemem_os::{Deadline, futex};

/// The state of the call lock if no thread holds it.
const FREE: u32 = 0;
/// The state of the call lock if a thread holds it and no thread waits.
const HELD: u32 = 1;
/// The state of the call lock if a thread holds it and other threads sleep until it is released.
const HELD_WITH_WAITERS: u32 = 2;

/// Holds the call lock of a lane. Dropping this value releases the lock.
#[derive(Debug)]
pub(super) struct CallLock<'a>(&'a AtomicU32);

impl<'a> CallLock<'a> {
    /// Acquires the call lock, after waiting until no other thread holds it.
    pub(super) fn acquire(word: &'a AtomicU32) -> Self {
        if word.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_err() {
            wait(word);
        }
        Self(word)
    }
}

#[cold]
fn wait(word: &AtomicU32) {
    while word.swap(HELD_WITH_WAITERS, Ordering::Acquire) != FREE {
        // No deadline is needed, because the collective call that holds the lock has one. The wait fails only if the lane's
        // memory is unmapped.
        let _ = futex::wait(word, HELD_WITH_WAITERS, Deadline::NEVER);
    }
}

impl Drop for CallLock<'_> {
    fn drop(&mut self) {
        if self.0.swap(FREE, Ordering::Release) == HELD_WITH_WAITERS {
            // The wake-up fails only if the memory of the lane is unmapped, and then no thread waits for the lock.
            let _ = futex::wake(self.0, 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn one_thread_at_a_time_holds_the_lock() {
        const THREADS: u64 = 4;
        const ROUNDS: u64 = if cfg!(miri) { 10 } else { 5000 };
        let (word, count) = (AtomicU32::new(FREE), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    for round in 0..ROUNDS {
                        let _lock = CallLock::acquire(&word);
                        let seen = count.load(Ordering::Relaxed);
                        if round % 64 == 0 {
                            // Usually another thread waits for the call lock when this thread yields.
                            std::thread::yield_now();
                        }
                        count.store(seen + 1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!((count.into_inner(), word.into_inner()), (THREADS * ROUNDS, FREE));
    }
}
