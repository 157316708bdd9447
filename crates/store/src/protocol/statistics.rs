//! The statistics that a server reports: its process, the status of the store, counters, and latencies of requests.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Status;

/// What a server has done since it started, and the current status of its store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Statistics {
    /// The status of the store.
    pub status: Status,
    /// The process id of the server, as the server itself sees it.
    pub server: u32,
    /// The time at which the server started, in milliseconds since the Unix epoch.
    pub started: u64,
    /// Counters and sizes by name. Servers of other versions may report further ones.
    pub values: Vec<NamedValue>,
    /// The requests by their kind; kinds that no client has sent are missing.
    pub requests: Vec<RequestStatistics>,
}

/// A counter or a size of a server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct NamedValue {
    /// The name of the value, such as `objects_sealed`.
    pub name: String,
    /// The value.
    pub value: u64,
}

/// The requests of one kind that a server has answered.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RequestStatistics {
    /// The kind of request, such as `create`.
    pub kind: String,
    /// The number of answered requests.
    pub count: u64,
    /// How many of them were refused.
    pub refused: u64,
    /// The sum of the times from a request's receipt to its answer, in nanoseconds.
    pub nanoseconds: u64,
    /// The number of requests that took at most [`RequestStatistics::bound`] of the bucket, and longer than the one before. The
    /// last bucket has no bound.
    pub buckets: Vec<u64>,
}

/// The number of latency buckets with a bound.
pub(crate) const BUCKETS: u32 = 13;

impl RequestStatistics {
    /// Returns the longest time that a bucket counts: 1 us for the first, and four times as long for each further one.
    #[must_use]
    pub fn bound(bucket: usize) -> Option<Duration> {
        let bucket = u32::try_from(bucket).ok().filter(|bucket| *bucket < BUCKETS)?;
        Some(Duration::from_nanos(1000 << (2 * bucket)))
    }

    /// Counts a request that was answered after `latency`.
    pub(crate) fn count(&mut self, latency: Duration, is_refused: bool) {
        self.count += 1;
        self.refused += u64::from(is_refused);
        let nanoseconds = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        self.nanoseconds = self.nanoseconds.saturating_add(nanoseconds);
        // The number of bits of the microseconds, rounded up, gives the power of four that bounds them.
        let bits = u64::BITS - nanoseconds.div_ceil(1000).saturating_sub(1).leading_zeros();
        let bucket = bits.div_ceil(2).min(BUCKETS);
        self.buckets.resize(BUCKETS as usize + 1, 0);
        self.buckets[bucket as usize] += 1;
    }
}

impl Statistics {
    pub(crate) fn new(
        status: Status,
        server: u32,
        started: u64,
        values: Vec<NamedValue>,
        requests: Vec<RequestStatistics>,
    ) -> Self {
        Self { status, server, started, values, requests }
    }

    /// Returns the value of a counter or size; `None` if the server does not report it.
    #[must_use]
    pub fn value(&self, name: &str) -> Option<u64> {
        self.values.iter().find(|value| value.name == name).map(|value| value.value)
    }
}

impl NamedValue {
    pub(crate) fn new(name: &str, value: u64) -> Self {
        Self { name: name.to_owned(), value }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_are_counted_in_the_first_bucket_that_bounds_them() {
        let mut requests = RequestStatistics::default();
        for micros in [0, 1, 2, 4, 5, 16_777_216, 16_777_217, 100_000_000] {
            requests.count(Duration::from_micros(micros), micros == 5);
        }
        assert_eq!((requests.count, requests.refused), (8, 1));
        let mut expected = vec![0; 14];
        (expected[0], expected[1], expected[2], expected[12], expected[13]) = (2, 2, 1, 1, 2);
        assert_eq!(requests.buckets, expected);
        assert_eq!(requests.nanoseconds, 133_554_445_000);
        assert_eq!(RequestStatistics::bound(12), Some(Duration::from_micros(16_777_216)));
        assert_eq!(RequestStatistics::bound(13), None);
    }

    #[test]
    fn the_bounds_of_the_buckets_are_exact() {
        for bucket in 0..BUCKETS as usize {
            let bound = RequestStatistics::bound(bucket).unwrap();
            let mut requests = RequestStatistics::default();
            requests.count(bound, false);
            requests.count(bound + Duration::from_nanos(1), false);
            assert_eq!(requests.buckets[bucket..bucket + 2], [1, 1]);
        }
    }
}
