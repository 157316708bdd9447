//! Whose turn it is on a lane: of the threads of a rank that call at once, eagerly or by a graph, one goes on.
//!
//! The word lies beside the lane's counters, so that a recorded call finds it as any other does.

use std::sync::atomic::{AtomicU32, Ordering};

use wholemem_os::{Deadline, futex};

/// Nobody's.
const FREE: u32 = 0;
/// Somebody's.
const TAKEN: u32 = 1;
/// Somebody's, and others sleep until it is free.
const AWAITED: u32 = 2;

/// A turn, which ends when this is dropped.
#[derive(Debug)]
pub(super) struct Turn<'a>(&'a AtomicU32);

impl<'a> Turn<'a> {
    /// Waits for a turn.
    pub(super) fn take(word: &'a AtomicU32) -> Self {
        if word.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_err() {
            wait(word);
        }
        Self(word)
    }
}

#[cold]
fn wait(word: &AtomicU32) {
    while word.swap(AWAITED, Ordering::Acquire) != FREE {
        // The call whose turn it is has a deadline. This fails only where the memory is gone, and with it the lane.
        let _ = futex::wait(word, AWAITED, Deadline::NEVER);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if self.0.swap(FREE, Ordering::Release) == AWAITED {
            // As above.
            let _ = futex::wake(self.0, 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn of_many_threads_one_has_its_turn() {
        const THREADS: u64 = 4;
        const TURNS: u64 = if cfg!(miri) { 10 } else { 5000 };
        let (word, count) = (AtomicU32::new(FREE), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    for turn in 0..TURNS {
                        let _turn = Turn::take(&word);
                        let seen = count.load(Ordering::Relaxed);
                        if turn % 64 == 0 {
                            // Somebody else wants it meanwhile, as a rule.
                            std::thread::yield_now();
                        }
                        count.store(seen + 1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!((count.into_inner(), word.into_inner()), (THREADS * TURNS, FREE));
    }
}
