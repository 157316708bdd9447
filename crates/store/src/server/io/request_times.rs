//! Counts the requests that the server answers, by kind, and how long the answers took.
//!
//! The time of a request begins before its last packet is read, and ends when its answer is sent or queued. For a request that
//! waits for a name or for space, it includes the time that the client asked to wait. A request that is answered before the event
//! loop reads the next one ends when the event loop has processed it: the event loop reads the clock between two requests anyway.

use std::collections::BTreeMap;
use std::time::Instant;

use crate::id::ClientId;
use crate::protocol::{Answer, Request, RequestKind, RequestStatistics, Response};

/// The maximum number of unanswered requests whose times are measured.
const MAX_PENDING: usize = 64 << 10;

#[derive(Debug, Clone, Copy)]
struct StartedRequest {
    /// The number of the kind of request.
    kind: usize,
    since: Instant,
}

/// The request that the event loop is processing.
#[derive(Debug)]
struct CurrentRequest {
    client: ClientId,
    id: u64,
    started: StartedRequest,
    /// Whether the request was refused, if it was answered.
    is_refused: Option<bool>,
}

/// The statistics of answered requests, and the times at which unanswered ones were received.
#[derive(Debug, Default)]
pub(super) struct RequestTimes {
    /// The statistics by the number of the kind of request.
    kinds: [RequestStatistics; RequestKind::NAMES.len()],
    /// Most requests are answered before the next one is received, and never enter `pending`.
    current: Option<CurrentRequest>,
    pending: BTreeMap<(ClientId, u64), StartedRequest>,
}

impl RequestTimes {
    /// Records that a client's request was received. The event loop began to read it at the time `since`.
    pub(super) fn begin(&mut self, client: ClientId, request: &Request, since: Instant) {
        if request.kind.is_answered() {
            let started = StartedRequest { kind: request.kind.number(), since };
            self.current = Some(CurrentRequest { client, id: request.id, started, is_refused: None });
        }
    }

    /// Records that a response is sent to a client.
    pub(super) fn end(&mut self, client: ClientId, response: &Response) {
        let is_refused = matches!(response.answer, Answer::Refused(_));
        match &mut self.current {
            Some(current) if (current.client, current.id) == (client, response.id) => {
                current.is_refused.get_or_insert(is_refused);
            }
            _ if self.pending.is_empty() => {}
            _ => {
                if let Some(started) = self.pending.remove(&(client, response.id)) {
                    self.count(started, Instant::now(), is_refused);
                }
            }
        }
    }

    /// Records that the event loop has processed the current request: counts it if it was answered, and otherwise waits for its
    /// answer.
    pub(super) fn processed(&mut self, now: Instant) {
        let Some(CurrentRequest { client, id, started, is_refused }) = self.current.take() else { return };
        match is_refused {
            Some(is_refused) => self.count(started, now, is_refused),
            None if self.pending.len() < MAX_PENDING => drop(self.pending.insert((client, id), started)),
            None => {}
        }
    }

    fn count(&mut self, started: StartedRequest, now: Instant, is_refused: bool) {
        self.kinds[started.kind].count(now.saturating_duration_since(started.since), is_refused);
    }

    /// Removes the unanswered requests of a client whose connection ends.
    pub(super) fn forget(&mut self, client: ClientId) {
        self.current.take_if(|current| current.client == client && current.is_refused.is_none());
        let all = (client, 0)..=(client, u64::MAX);
        let ids: Vec<_> = self.pending.range(all).map(|(key, _)| *key).collect();
        for key in ids {
            self.pending.remove(&key);
        }
    }

    /// Returns the statistics of all kinds of requests that were answered, by the names of the kinds.
    pub(super) fn report(&self) -> Vec<RequestStatistics> {
        let all = RequestKind::NAMES.iter().zip(&self.kinds).filter(|(_, counted)| counted.count > 0);
        let named = |(kind, counted): (&&str, &RequestStatistics)| RequestStatistics {
            kind: (*kind).to_owned(),
            ..counted.clone()
        };
        let mut report: Vec<_> = all.map(named).collect();
        report.sort_by(|one, other| one.kind.cmp(&other.kind));
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Refusal;

    fn begin(times: &mut RequestTimes, client: u64, id: u64, kind: RequestKind) {
        times.begin(ClientId(client), &Request { id, resends: 0, kind }, Instant::now());
    }

    fn end(times: &mut RequestTimes, client: u64, id: u64, answer: Answer) {
        times.end(ClientId(client), &Response { id, answer });
    }

    #[test]
    fn each_answered_request_is_counted_once_by_its_kind() {
        let mut times = RequestTimes::default();
        let find = || RequestKind::Find { name: "x".to_owned(), wait: 0 };
        begin(&mut times, 1, 1, find());
        times.processed(Instant::now());
        begin(&mut times, 2, 1, RequestKind::Status);
        end(&mut times, 2, 1, Answer::Done);
        end(&mut times, 2, 1, Answer::Refused(Refusal::NothingToSeal));
        times.processed(Instant::now());
        begin(&mut times, 2, 2, RequestKind::Goodbye);
        end(&mut times, 2, 2, Answer::Done);
        times.processed(Instant::now());
        end(&mut times, 2, 1, Answer::Done);
        end(&mut times, 1, 0, Answer::Restarted);
        end(&mut times, 1, 1, Answer::Refused(Refusal::NothingToSeal));
        end(&mut times, 1, 1, Answer::Done);
        let report = times.report();
        let counts: Vec<_> = report.iter().map(|it| (it.kind.as_str(), it.count, it.refused)).collect();
        assert_eq!(counts, [("find", 1, 1), ("status", 1, 0)]);
        assert_eq!(report[0].buckets.iter().sum::<u64>(), 1);
    }

    #[test]
    fn the_time_of_a_request_ends_when_it_was_processed() {
        let (mut times, since) = (RequestTimes::default(), Instant::now());
        times.begin(ClientId(1), &Request { id: 1, resends: 0, kind: RequestKind::Status }, since);
        end(&mut times, 1, 1, Answer::Done);
        assert!(times.report().is_empty());
        times.processed(since + std::time::Duration::from_micros(7));
        assert_eq!(times.report()[0].nanoseconds, 7000);
    }

    #[test]
    fn requests_of_a_client_that_has_left_are_not_counted() {
        let mut times = RequestTimes::default();
        for (client, id) in [(1, 1), (1, 2), (2, 1)] {
            begin(&mut times, client, id, RequestKind::Status);
            times.processed(Instant::now());
        }
        begin(&mut times, 1, 3, RequestKind::Status);
        times.forget(ClientId(1));
        times.processed(Instant::now());
        for (client, id) in [(1, 1), (1, 2), (1, 3), (2, 1)] {
            end(&mut times, client, id, Answer::Done);
        }
        assert_eq!(times.report()[0].count, 1);
        assert!(times.pending.is_empty() && times.current.is_none());
    }
}
