//! Detects the end of a store by checking a client's connection from time to time.
//!
//! An index can be read even if no process writes it any more. A store that ends normally marks its index; one that is killed
//! does not. But when the keeper and the server are both gone, the kernel closes the connection (it stays open while the keeper
//! replaces the server). So readers of the index check the connection every [`CHECK_INTERVAL_MS`], by a clock that is read
//! without a system call.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use rustix::time::{ClockId, clock_gettime};

use crate::{Error, Result};

/// The minimum interval between two checks of the connection to a store, in milliseconds.
const CHECK_INTERVAL_MS: i64 = 100;

#[derive(Debug, Default)]
pub(super) struct ConnectionProbe {
    is_lost: AtomicBool,
    /// The time of the last check of the connection to the store, in milliseconds.
    checked_at: AtomicI64,
}

impl ConnectionProbe {
    /// Returns true if an earlier call has found that the store has ended.
    #[inline]
    pub(super) fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Relaxed)
    }

    /// Returns true if the store has ended. Checks the connection if the last check was at least 100 ms ago.
    #[inline]
    pub(super) fn check(&self, is_closed: impl FnOnce() -> bool) -> bool {
        let now = clock_gettime(ClockId::MonotonicCoarse);
        let now = now.tv_sec.wrapping_mul(1000).wrapping_add(now.tv_nsec / 1_000_000);
        if now.wrapping_sub(self.checked_at.load(Ordering::Relaxed)) >= CHECK_INTERVAL_MS {
            self.checked_at.store(now, Ordering::Relaxed);
            if is_closed() {
                self.is_lost.store(true, Ordering::Relaxed);
            }
        }
        self.is_lost()
    }

    /// Returns the outcome of a request, and records that the connection is lost if the error is [`Error::Disconnected`].
    pub(super) fn observe<T>(&self, outcome: Result<T>) -> Result<T> {
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
    fn a_connection_is_checked_once_per_interval() {
        let probe = ConnectionProbe::default();
        assert!(!probe.check(|| false));
        // The time of the last check is in the future, so the connection is not checked.
        probe.checked_at.store(i64::MAX / 2, Ordering::Relaxed);
        assert!(!probe.check(|| panic!("the connection must not be checked")));
        probe.checked_at.store(0, Ordering::Relaxed);
        assert!(probe.check(|| true) && probe.is_lost());
    }

    #[test]
    fn a_lost_connection_stays_lost_and_other_errors_do_not_count() {
        let probe = ConnectionProbe::default();
        assert!(matches!(probe.observe::<()>(Err(Error::TimedOut)), Err(Error::TimedOut)));
        assert!(!probe.is_lost());
        assert!(matches!(probe.observe::<()>(Err(Error::Disconnected)), Err(Error::Disconnected)));
        assert!(probe.observe(Ok(())).is_ok() && probe.check(|| false));
    }
}
