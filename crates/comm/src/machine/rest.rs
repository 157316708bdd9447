//! Whether a neighbour runs: its beats go on, as far as this rank was there to see it.

use std::time::Duration;

/// A rank whose beats stand still for this long does not run.
const STILL: Duration = Duration::from_millis(300);

/// The most that counts from one look to the next. Who has not looked for longer did not run itself, perhaps because the whole
/// machine stood still, and cannot tell that of others.
const GLANCE: Duration = Duration::from_millis(60);

/// For how long a neighbour has been seen to stand still.
#[derive(Debug)]
pub(crate) struct Rest {
    beats: u64,
    seen: Duration,
}

impl Rest {
    pub(crate) fn new(beats: u64) -> Self {
        Self { beats, seen: Duration::ZERO }
    }

    /// Takes in what its beats are now, so long after they were looked at before.
    pub(crate) fn look(&mut self, beats: u64, passed: Duration) {
        if beats == self.beats {
            self.seen = self.seen.saturating_add(passed.min(GLANCE));
        } else {
            *self = Self::new(beats);
        }
    }

    pub(crate) fn is_still(&self) -> bool {
        self.seen > STILL
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOK: Duration = Duration::from_millis(10);

    #[test]
    fn who_does_not_beat_for_long_stands_still_until_it_beats_again() {
        let mut rest = Rest::new(7);
        for _ in 0..30 {
            rest.look(7, LOOK);
            assert!(!rest.is_still());
        }
        rest.look(7, LOOK);
        assert!(rest.is_still());
        rest.look(8, LOOK);
        assert!(!rest.is_still());
    }

    #[test]
    fn time_in_which_nobody_looked_is_not_held_against_others() {
        let mut rest = Rest::new(7);
        // The machine stands still, and this rank is the first to go on.
        rest.look(7, Duration::from_secs(5));
        assert!(!rest.is_still());
        rest.look(8, LOOK);
        rest.look(8, LOOK);
        assert!(!rest.is_still());
        // A rank that is always late still tells in the end.
        for _ in 0..6 {
            rest.look(8, Duration::from_secs(1));
        }
        assert!(rest.is_still());
    }
}
