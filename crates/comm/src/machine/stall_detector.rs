//! Detects that a neighbour does not run: the counter in its liveness page stands still while this rank runs.

use std::time::Duration;

/// A rank whose counter stands still for this long does not run.
const STALLED_AFTER: Duration = Duration::from_millis(300);

/// The most time that counts between two observations. If more has passed, this rank did not run itself, perhaps because the
/// whole machine was suspended, and cannot tell whether the neighbour ran.
const MAX_INTERVAL: Duration = Duration::from_millis(60);

/// For how long a neighbour has been observed not to run.
#[derive(Debug)]
pub(crate) struct StallDetector {
    beats: u64,
    seen: Duration,
}

impl StallDetector {
    pub(crate) fn new(beats: u64) -> Self {
        Self { beats, seen: Duration::ZERO }
    }

    /// Observes the counter, `passed` after it was last observed.
    pub(crate) fn observe(&mut self, beats: u64, passed: Duration) {
        if beats == self.beats {
            self.seen = self.seen.saturating_add(passed.min(MAX_INTERVAL));
        } else {
            *self = Self::new(beats);
        }
    }

    pub(crate) fn is_stalled(&self) -> bool {
        self.seen > STALLED_AFTER
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOK: Duration = Duration::from_millis(10);

    #[test]
    fn a_rank_whose_counter_stands_still_is_stalled_until_it_counts_again() {
        let mut stall = StallDetector::new(7);
        for _ in 0..30 {
            stall.observe(7, LOOK);
            assert!(!stall.is_stalled());
        }
        stall.observe(7, LOOK);
        assert!(stall.is_stalled());
        stall.observe(8, LOOK);
        assert!(!stall.is_stalled());
    }

    #[test]
    fn time_in_which_this_rank_did_not_run_does_not_count() {
        let mut stall = StallDetector::new(7);
        // The machine was suspended, and this rank is the first that runs again.
        stall.observe(7, Duration::from_secs(5));
        assert!(!stall.is_stalled());
        stall.observe(8, LOOK);
        stall.observe(8, LOOK);
        assert!(!stall.is_stalled());
        // A rank that always observes late detects it in the end.
        for _ in 0..6 {
            stall.observe(8, Duration::from_secs(1));
        }
        assert!(stall.is_stalled());
    }
}
