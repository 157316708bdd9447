//! Counts the requests that the server answers, by kind, and how long the answers took.
//!
//! The time of a request begins when it was received completely, and ends when its answer is sent or queued. For a request that
//! waits for a name or for space, it includes the time that the client asked to wait.

use std::collections::BTreeMap;
use std::time::Instant;

use crate::id::ClientId;
use crate::protocol::{Answer, Request, RequestStatistics, Response};

/// The maximum number of unanswered requests whose times are measured.
const MAX_PENDING: usize = 64 << 10;

#[derive(Debug, Clone, Copy)]
struct StartedRequest {
    kind: &'static str,
    since: Instant,
}

/// The statistics of answered requests, and the times at which unanswered ones were received.
#[derive(Debug, Default)]
pub(super) struct RequestTimes {
    kinds: BTreeMap<&'static str, RequestStatistics>,
    /// The request that is being processed. Most requests are answered before the next one is received, and never enter `pending`.
    current: Option<((ClientId, u64), StartedRequest)>,
    pending: BTreeMap<(ClientId, u64), StartedRequest>,
}

impl RequestTimes {
    /// Records that a client's request was received.
    pub(super) fn begin(&mut self, client: ClientId, request: &Request) {
        if let Some((key, started)) = self.current.take()
            && self.pending.len() < MAX_PENDING
        {
            self.pending.insert(key, started);
        }
        if request.kind.is_answered() {
            let started = StartedRequest { kind: request.kind.name(), since: Instant::now() };
            self.current = Some(((client, request.id), started));
        }
    }

    /// Records that a response is sent to a client.
    pub(super) fn end(&mut self, client: ClientId, response: &Response) {
        let key = (client, response.id);
        let current = self.current.take_if(|(current, _)| *current == key).map(|(_, started)| started);
        if let Some(StartedRequest { kind, since }) = current.or_else(|| self.pending.remove(&key)) {
            let is_refused = matches!(response.answer, Answer::Refused(_));
            self.kinds.entry(kind).or_default().count(since.elapsed(), is_refused);
        }
    }

    /// Removes the unanswered requests of a client whose connection ends.
    pub(super) fn forget(&mut self, client: ClientId) {
        self.current.take_if(|((current, _), _)| *current == client);
        let all = (client, 0)..=(client, u64::MAX);
        let ids: Vec<_> = self.pending.range(all).map(|(key, _)| *key).collect();
        for key in ids {
            self.pending.remove(&key);
        }
    }

    /// Returns the statistics of all kinds of requests that were answered.
    pub(super) fn report(&self) -> Vec<RequestStatistics> {
        let named = |(kind, counted): (&&'static str, &RequestStatistics)| RequestStatistics {
            kind: (*kind).to_owned(),
            ..counted.clone()
        };
        self.kinds.iter().map(named).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Refusal;
    use crate::protocol::RequestKind;

    fn begin(times: &mut RequestTimes, client: u64, id: u64, kind: RequestKind) {
        times.begin(ClientId(client), &Request { id, resends: 0, kind });
    }

    fn end(times: &mut RequestTimes, client: u64, id: u64, answer: Answer) {
        times.end(ClientId(client), &Response { id, answer });
    }

    #[test]
    fn each_answered_request_is_counted_once_by_its_kind() {
        let mut times = RequestTimes::default();
        let find = || RequestKind::Find { name: "x".to_owned(), wait: 0 };
        begin(&mut times, 1, 1, find());
        begin(&mut times, 2, 1, RequestKind::Status);
        begin(&mut times, 2, 2, RequestKind::Goodbye);
        end(&mut times, 2, 2, Answer::Done);
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
    fn requests_of_a_client_that_has_left_are_not_counted() {
        let mut times = RequestTimes::default();
        for (client, id) in [(1, 1), (1, 2), (2, 1), (1, 3)] {
            begin(&mut times, client, id, RequestKind::Status);
        }
        times.forget(ClientId(1));
        for (client, id) in [(1, 1), (1, 2), (1, 3), (2, 1)] {
            end(&mut times, client, id, Answer::Done);
        }
        assert_eq!(times.report()[0].count, 1);
        assert!(times.pending.is_empty() && times.current.is_none());
    }
}
