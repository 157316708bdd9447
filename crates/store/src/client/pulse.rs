//! Whether the store is still there: looked at now and then, and remembered once it is not.
//!
//! An index gives its names for ever, also when nobody serves it any more. Who ends a store says so in the index; who is
//! killed does not. But when the last of keeper and server is gone, the kernel closes their end of the connection, and
//! not before: a server that is replaced by its keeper is not noticed. So whoever reads the index looks at the
//! connection, if nobody has for [a while](WHILE), by a clock that is read without a system call.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use rustix::time::{ClockId, clock_gettime};

use crate::{Error, Result};

/// For how many milliseconds one look is good enough.
const WHILE: i64 = 100;

#[derive(Debug, Default)]
pub(super) struct Pulse {
    is_lost: AtomicBool,
    /// When the connection was last looked at, in milliseconds.
    looked_at: AtomicI64,
}

impl Pulse {
    /// Whether anybody has found out that the store is gone.
    #[inline]
    pub(super) fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Relaxed)
    }

    /// The same, finding out by a look at the connection if the last one is too long ago.
    #[inline]
    pub(super) fn feel(&self, is_closed: impl FnOnce() -> bool) -> bool {
        let now = clock_gettime(ClockId::MonotonicCoarse);
        let now = now.tv_sec.wrapping_mul(1000).wrapping_add(now.tv_nsec / 1_000_000);
        if now.wrapping_sub(self.looked_at.load(Ordering::Relaxed)) >= WHILE {
            self.looked_at.store(now, Ordering::Relaxed);
            if is_closed() {
                self.is_lost.store(true, Ordering::Relaxed);
            }
        }
        self.is_lost()
    }

    /// Remembers what came of a question that was asked on the connection.
    pub(super) fn learn<T>(&self, outcome: Result<T>) -> Result<T> {
        if matches!(outcome, Err(Error::Disconnected)) {
            self.is_lost.store(true, Ordering::Relaxed);
        }
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_is_looked_at_first_and_then_not_for_a_while() {
        let pulse = Pulse::default();
        assert!(!pulse.feel(|| false));
        // Some time in the future was the last look.
        pulse.looked_at.store(i64::MAX / 2, Ordering::Relaxed);
        assert!(!pulse.feel(|| panic!("not looked at")));
        pulse.looked_at.store(0, Ordering::Relaxed);
        assert!(pulse.feel(|| true) && pulse.is_lost());
    }

    #[test]
    fn what_is_lost_stays_lost_and_other_errors_are_no_loss() {
        let pulse = Pulse::default();
        assert!(matches!(pulse.learn::<()>(Err(Error::TimedOut)), Err(Error::TimedOut)));
        assert!(!pulse.is_lost());
        assert!(matches!(pulse.learn::<()>(Err(Error::Disconnected)), Err(Error::Disconnected)));
        assert!(pulse.learn(Ok(())).is_ok() && pulse.feel(|| false));
    }
}
