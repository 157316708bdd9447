//! Decides when free heap memory is returned to the kernel: when clients hold much less than before.

use std::time::{Duration, Instant};

/// Memory is returned when the amount that clients hold has decreased by this.
const FALL: u64 = 1 << 20;

/// The minimum interval between two returns of heap memory.
const INTERVAL: Duration = Duration::from_secs(1);

/// The maximum that clients have held since memory was last returned.
#[derive(Debug)]
pub(super) struct HeapTrim {
    peak: u64,
    trimmed: Instant,
}

impl HeapTrim {
    pub(super) fn new(now: Instant) -> Self {
        Self { peak: 0, trimmed: now }
    }

    fn has_fallen(&self, held: u64) -> bool {
        held.saturating_add(FALL) <= self.peak
    }

    fn left(&self, now: Instant) -> Duration {
        INTERVAL.saturating_sub(now.saturating_duration_since(self.trimmed))
    }

    /// How long to wait before memory is returned; `None` if there is none to return.
    pub(super) fn timeout(&self, held: u64, now: Instant) -> Option<Duration> {
        self.has_fallen(held).then(|| self.left(now))
    }

    /// Records the bytes that clients hold. Returns whether memory has to be returned now.
    pub(super) fn update(&mut self, held: u64, now: Instant) -> bool {
        self.peak = self.peak.max(held);
        let is_due = self.has_fallen(held) && self.left(now).is_zero();
        if is_due {
            (self.peak, self.trimmed) = (held, now);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_returned_after_a_decrease_at_most_once_per_interval() {
        let start = Instant::now();
        let mut trim = HeapTrim::new(start);
        assert!(!trim.update(5 * FALL, start));
        assert!(!trim.update(4 * FALL + 1, start + INTERVAL), "the amount has not decreased enough");
        assert_eq!(trim.timeout(4 * FALL + 1, start), None);
        assert_eq!(trim.timeout(4 * FALL, start), Some(INTERVAL));
        assert!(!trim.update(4 * FALL, start + INTERVAL / 2));
        assert!(trim.update(4 * FALL, start + INTERVAL));
        assert!(!trim.update(4 * FALL, start + 3 * INTERVAL), "the peak starts again at the current amount");
        assert!(trim.update(3 * FALL, start + 3 * INTERVAL));
    }
}
