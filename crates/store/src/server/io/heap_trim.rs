//! Decides when the server returns free heap memory to the kernel: when its clients hold much less memory than before.

use std::time::{Duration, Instant};

/// The number of bytes by which the memory that clients hold must decrease before free heap memory is returned to the kernel.
const FALL: u64 = 1 << 20;

/// The minimum interval between two calls that return free heap memory to the kernel.
const INTERVAL: Duration = Duration::from_secs(1);

/// The peak of the memory that clients held since free heap memory was last returned to the kernel, and the time of that return.
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

    /// Returns how long to wait before free heap memory is returned to the kernel; `None` if there is none to return.
    pub(super) fn timeout(&self, held: u64, now: Instant) -> Option<Duration> {
        self.has_fallen(held).then(|| self.left(now))
    }

    /// Records how many bytes of server memory clients hold. Returns true if free heap memory has to be returned to the kernel
    /// now.
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
