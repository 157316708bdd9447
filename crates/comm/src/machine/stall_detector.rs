//! Detects a stalled neighbour, whose heartbeat counter does not change while this rank runs.

use std::time::Duration;

/// The time without a change of its heartbeat counter after which a rank is considered stalled.
const STALLED_AFTER: Duration = Duration::from_millis(300);

/// The maximum time between two observations that counts towards a stall. If more time has passed, this rank did not
/// run itself, for example because the whole machine was suspended, and it is unknown whether the neighbour ran.
const MAX_INTERVAL: Duration = Duration::from_millis(60);

/// Measures for how long the heartbeat counter of a neighbour has not changed.
#[derive(Debug)]
pub(crate) struct StallDetector {
    heartbeats: u64,
    stalled_for: Duration,
}

impl StallDetector {
    pub(crate) fn new(heartbeats: u64) -> Self {
        Self { heartbeats, stalled_for: Duration::ZERO }
    }

    /// Records the neighbour's heartbeat counter. `passed` is the time since the previous observation.
    pub(crate) fn observe(&mut self, heartbeats: u64, passed: Duration) {
        if heartbeats == self.heartbeats {
            self.stalled_for = self.stalled_for.saturating_add(passed.min(MAX_INTERVAL));
        } else {
            *self = Self::new(heartbeats);
        }
    }

    pub(crate) fn is_stalled(&self) -> bool {
        self.is_stalled_for(STALLED_AFTER)
    }

    /// Returns true if the heartbeat counter has not changed for longer than `limit`.
    pub(crate) fn is_stalled_for(&self, limit: Duration) -> bool {
        self.stalled_for > limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_millis(10);

    #[test]
    fn a_rank_is_stalled_until_its_heartbeat_counter_changes_again() {
        let mut stall = StallDetector::new(7);
        for _ in 0..30 {
            stall.observe(7, INTERVAL);
            assert!(!stall.is_stalled());
        }
        stall.observe(7, INTERVAL);
        assert!(stall.is_stalled());
        stall.observe(8, INTERVAL);
        assert!(!stall.is_stalled());
    }

    #[test]
    fn time_in_which_this_rank_did_not_run_does_not_count() {
        let mut stall = StallDetector::new(7);
        // The machine was suspended, and this rank runs again before its neighbour.
        stall.observe(7, Duration::from_secs(5));
        assert!(!stall.is_stalled());
        stall.observe(8, INTERVAL);
        stall.observe(8, INTERVAL);
        assert!(!stall.is_stalled());
        // A rank whose observations are always late also detects the stall eventually.
        for _ in 0..6 {
            stall.observe(8, Duration::from_secs(1));
        }
        assert!(stall.is_stalled());
    }
}
