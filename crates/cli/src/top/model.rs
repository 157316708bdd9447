//! What `wholemem top` shows, computed from samples of a store without a terminal.

use std::time::{Duration, Instant, SystemTime};

use anyhow::Result;
use serde::Serialize;
use wholemem_store::{Client, RequestStatistics, Statistics, Status};

use crate::store::pattern;
use crate::store::summary::{ObjectSummary, Summarizer};

/// The state of a store at one moment.
#[derive(Debug, Clone)]
pub(super) struct Sample {
    pub(super) at: Instant,
    pub(super) statistics: Statistics,
    /// The objects of the store, the longest first; a pack is one.
    pub(super) objects: Vec<ObjectSummary>,
}

impl Sample {
    pub(super) fn take(client: &Client) -> Result<Self> {
        let (at, statistics) = (Instant::now(), client.statistics()?);
        let mut entries = client.list("")?;
        pattern::fold_packs(&mut entries);
        let mut entries = pattern::sorted(entries);
        entries.sort_by_key(|entry| std::cmp::Reverse(entry.len));
        let objects = Summarizer::new(client)?.with_readers(&entries)?;
        Ok(Self { at, statistics, objects })
    }
}

/// The requests of one kind between two samples.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct RequestRate {
    pub(super) kind: String,
    /// All requests since the server started.
    pub(super) total: u64,
    pub(super) per_second: f64,
    pub(super) refused_per_second: f64,
    /// The mean time of the requests between the samples in microseconds; `None` if there were none.
    pub(super) mean_us: Option<f64>,
    /// A time that 99 of 100 of them did not exceed, in microseconds: the bound of a bucket of the histogram. `None` if there were
    /// no requests, or if the time is longer than the last bound.
    pub(super) p99_us: Option<f64>,
}

/// What is shown: the state of a store, and the rates of its requests.
#[derive(Debug, Clone, Serialize)]
pub(super) struct TopView {
    pub(super) socket: String,
    pub(super) pid: u32,
    pub(super) uptime_seconds: u64,
    pub(super) status: Status,
    pub(super) arena_bytes: u64,
    pub(super) preallocated_bytes: u64,
    pub(super) sealed_bytes_per_second: f64,
    pub(super) events_per_second: f64,
    pub(super) requests: Vec<RequestRate>,
    pub(super) objects: Vec<ObjectSummary>,
}

impl TopView {
    /// Computes the view from the current sample and the one before. If another server has started in between, the rates are those
    /// of its time.
    pub(super) fn new(socket: &str, before: Option<&Sample>, current: &Sample) -> Self {
        let Sample { statistics, objects, .. } = current;
        let started = SystemTime::UNIX_EPOCH + Duration::from_millis(statistics.started);
        let uptime = started.elapsed().unwrap_or_default();
        let before = before.filter(|before| before.statistics.started == statistics.started);
        let seconds = before.map_or(uptime, |before| current.at.duration_since(before.at)).as_secs_f64();
        let rate = |count: u64| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
        let value = |name: &str| statistics.value(name).unwrap_or_default();
        let increase = |name: &str| {
            let earlier = before.and_then(|before| before.statistics.value(name)).unwrap_or_default();
            value(name).saturating_sub(earlier)
        };
        let mut requests: Vec<_> = statistics
            .requests
            .iter()
            .map(|now| {
                let earlier = before.map(|before| &before.statistics.requests);
                let earlier = earlier.and_then(|all| all.iter().find(|requests| requests.kind == now.kind));
                request_rate(earlier, now, rate)
            })
            .collect();
        requests.sort_by(|a, b| b.per_second.total_cmp(&a.per_second).then(b.total.cmp(&a.total)));
        Self {
            socket: socket.to_owned(),
            pid: statistics.server,
            uptime_seconds: uptime.as_secs(),
            status: statistics.status,
            arena_bytes: value("arena_bytes"),
            preallocated_bytes: value("preallocated_bytes"),
            sealed_bytes_per_second: rate(increase("bytes_sealed")),
            events_per_second: rate(increase("events")),
            requests,
            objects: objects.clone(),
        }
    }
}

fn request_rate(
    before: Option<&RequestStatistics>,
    now: &RequestStatistics,
    rate: impl Fn(u64) -> f64,
) -> RequestRate {
    let none = [];
    let earlier = before.map_or(&none[..], |before| &before.buckets);
    let (count_before, refused, nanoseconds) =
        before.map_or((0, 0, 0), |before| (before.count, before.refused, before.nanoseconds));
    let count = now.count.saturating_sub(count_before);
    let taken = now.nanoseconds.saturating_sub(nanoseconds);
    let buckets: Vec<_> = now
        .buckets
        .iter()
        .enumerate()
        .map(|(at, bucket)| bucket.saturating_sub(earlier.get(at).copied().unwrap_or_default()))
        .collect();
    RequestRate {
        kind: now.kind.clone(),
        total: now.count,
        per_second: rate(count),
        refused_per_second: rate(now.refused.saturating_sub(refused)),
        mean_us: (count > 0).then(|| taken as f64 / count as f64 / 1e3),
        p99_us: percentile_99(&buckets).map(|bound| bound.as_secs_f64() * 1e6),
    }
}

/// Returns the bound of the first bucket up to which there are 99 of 100 requests.
fn percentile_99(buckets: &[u64]) -> Option<Duration> {
    let total: u64 = buckets.iter().sum();
    let wanted = total - total / 100;
    let mut below = 0;
    let reached = buckets.iter().position(|count| {
        below += count;
        below >= wanted
    });
    reached.filter(|_| total > 0).and_then(RequestStatistics::bound)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_99th_percentile_is_the_bound_of_its_bucket() {
        let bound = |buckets: &[u64]| percentile_99(buckets).map(|bound| bound.as_micros());
        assert_eq!(bound(&[0, 98, 1, 0, 1]), Some(16));
        assert_eq!(bound(&[0, 97, 1, 0, 2]), Some(256));
        assert_eq!(bound(&[5]), Some(1));
        assert_eq!((bound(&[]), bound(&[0, 0])), (None, None));
        let mut late = vec![0; 14];
        late[13] = 1;
        assert_eq!(bound(&late), None);
    }
}
