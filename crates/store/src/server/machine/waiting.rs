//! Requests that are answered later: requests for a name that no object has yet, and requests for free space while the quota is
//! reached.
//!
//! Requests for space are answered in order, and a request is not answered while an earlier one needs the space, so that small
//! objects do not starve large ones. Space is not reserved for the client that is answered: when it creates its object, another
//! client may have used the space.
//!
//! No step scans all waiting requests: they are indexed by name, by deadline and by client, and each step answers a bounded
//! number of those that are due.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::ledger::{HOST, Ledger};
use super::outputs::Outputs;
use super::sessions::Sessions;
use crate::id::{ClientId, ObjectId};
use crate::protocol::{Answer, Refusal};
use crate::server::budget::{Amount, Charge};

/// The number of waiting requests of each kind that one step of the state machine answers.
const ANSWERED_AT_ONCE: usize = 4;

/// The number of bytes that a waiting request uses besides its name: its entry in each table.
const WAITER_COST: u64 = 512;

/// The condition that a waiting request waits for: a name, or free space.
#[derive(Debug, PartialEq, Eq)]
enum WaitCondition {
    Name(String),
    Space { len: u64, place: u32 },
}

#[derive(Debug)]
struct WaitingRequest {
    condition: WaitCondition,
    client: ClientId,
    user: u32,
    request: u64,
    until: Duration,
    _charge: Charge,
}

/// A client's request that may wait, and its timeout in milliseconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct TimedRequest {
    pub(super) client: ClientId,
    pub(super) request: u64,
    pub(super) wait: u64,
}

/// The sequence numbers of waiting requests, by the user of their client.
type NumbersByUser = BTreeMap<u32, BTreeSet<u64>>;

/// All waiting requests, by a sequence number that grows with each request.
#[derive(Debug, Default)]
pub(super) struct WaitingRequests {
    waiters: BTreeMap<u64, WaitingRequest>,
    last: u64,
    deadlines: BTreeSet<(Duration, u64)>,
    names: BTreeMap<String, NumbersByUser>,
    /// The sequence numbers of the requests that wait for space on the host, and of those that wait for space on devices.
    space_queues: [BTreeSet<u64>; 2],
    clients: BTreeMap<ClientId, BTreeSet<u64>>,
    /// Requests that wait for a name that has an object now: an entry for each name and user.
    found: VecDeque<(BTreeSet<u64>, ObjectId)>,
    /// The number of requests for names that this step of the state machine has answered.
    answered: usize,
    /// For host and for devices, true if the last step answered the maximum number of requests for space and left others.
    has_more_space: [bool; 2],
    /// The bytes of host and device memory for which requests for space were answered in the last step, and in the steps before
    /// it that also left requests.
    promised: [u64; 2],
    /// The sequence numbers of waiting requests of departed clients, which are removed a few at a time.
    abandoned: Vec<BTreeSet<u64>>,
}

impl WaitingRequests {
    fn space_queue(place: u32) -> usize {
        usize::from(place != HOST)
    }

    fn add(&mut self, waiter: WaitingRequest) {
        self.last += 1;
        let number = self.last;
        self.deadlines.insert((waiter.until, number));
        self.clients.entry(waiter.client).or_default().insert(number);
        match &waiter.condition {
            WaitCondition::Name(name) => {
                let by_user = self.names.entry(name.clone()).or_default();
                by_user.entry(waiter.user).or_default().insert(number);
            }
            WaitCondition::Space { place, .. } => {
                self.space_queues[Self::space_queue(*place)].insert(number);
            }
        }
        self.waiters.insert(number, waiter);
    }

    fn remove(&mut self, number: u64) -> Option<WaitingRequest> {
        let waiter = self.waiters.remove(&number)?;
        self.deadlines.remove(&(waiter.until, number));
        if let Some(of_client) = self.clients.get_mut(&waiter.client) {
            of_client.remove(&number);
            if of_client.is_empty() {
                self.clients.remove(&waiter.client);
            }
        }
        match &waiter.condition {
            WaitCondition::Space { place, .. } => {
                self.space_queues[Self::space_queue(*place)].remove(&number);
            }
            WaitCondition::Name(name) => {
                // If the name has an object now and the request is about to be answered, the table of names does not contain the
                // request any more.
                if let Some(by_user) = self.names.get_mut(name) {
                    remove_number(by_user, waiter.user, number);
                    if by_user.is_empty() {
                        self.names.remove(name);
                    }
                }
            }
        }
        Some(waiter)
    }

    /// Returns the time at which the next waiting request times out; zero if there is work for the next step.
    pub(super) fn wake_at(&self) -> Option<Duration> {
        let first = self.deadlines.first().map(|(until, _)| *until);
        let has_work =
            !self.found.is_empty() || !self.abandoned.is_empty() || self.has_more_space != [false; 2];
        if has_work { Some(Duration::ZERO) } else { first }
    }

    /// Removes and returns the next request for a name that has an object now. Users are served round-robin.
    fn next_found(&mut self) -> Option<(WaitingRequest, ObjectId)> {
        loop {
            let (mut numbers, object) = self.found.pop_front()?;
            let number = numbers.pop_first();
            if !numbers.is_empty() {
                self.found.push_back((numbers, object));
            }
            // The request may have timed out before it was answered.
            if let Some(waiter) = number.and_then(|number| self.remove(number)) {
                return Some((waiter, object));
            }
        }
    }

    /// Removes some waiting requests of departed clients.
    fn trim(&mut self) {
        for _ in 0..ANSWERED_AT_ONCE {
            let Some(numbers) = self.abandoned.last_mut() else { return };
            match numbers.pop_first() {
                Some(number) => drop(self.remove(number)),
                None => drop(self.abandoned.pop()),
            }
        }
    }

    /// Removes and returns the next waiting request that has timed out.
    fn next_expired(&mut self, now: Duration) -> Option<WaitingRequest> {
        let (until, number) = self.deadlines.first().copied()?;
        if until > now {
            return None;
        }
        self.remove(number)
    }

    /// Makes a request wait until an object has this name. Returns the outcome if the request does not wait.
    pub(super) fn wait_for_name(
        &mut self,
        request: TimedRequest,
        name: String,
        now: Duration,
        sessions: &Sessions,
    ) -> Option<Result<Answer, Refusal>> {
        if request.wait == 0 {
            return Some(Err(Refusal::NoSuchName { name }));
        }
        self.wait(request, WaitCondition::Name(name), now, sessions)
    }

    /// Makes a request wait until an object of this length has space. Returns the outcome if the request does not wait.
    pub(super) fn wait_for_space(
        &mut self,
        request: TimedRequest,
        place: u32,
        len: u64,
        now: Duration,
        ledger: &Ledger,
        sessions: &Sessions,
    ) -> Option<Result<Answer, Refusal>> {
        if let Err(refusal) = ledger.check_place(place) {
            return Some(Err(refusal));
        }
        // An object that exceeds the quota never fits, so a request for its space does not wait.
        if !ledger.fits_quota(place, len) {
            return Some(Err(ledger.over_quota(place, len)));
        }
        // A request for space is not answered before earlier requests that wait for space.
        let is_first = self.space_queues[Self::space_queue(place)].is_empty();
        match ledger.space_for(place, len, 0).filter(|_| is_first) {
            Some(_) => Some(Ok(Answer::Done)),
            None if request.wait == 0 => Some(Err(ledger.over_quota(place, len))),
            None => self.wait(request, WaitCondition::Space { len, place }, now, sessions),
        }
    }

    fn wait(
        &mut self,
        TimedRequest { client, request, wait }: TimedRequest,
        condition: WaitCondition,
        now: Duration,
        sessions: &Sessions,
    ) -> Option<Result<Answer, Refusal>> {
        let user = sessions.user(client)?;
        let name = if let WaitCondition::Name(name) = &condition { name.len() as u64 } else { 0 };
        match sessions.charge(client, Amount::bytes(WAITER_COST + 2 * name)) {
            Ok(charge) => {
                let until = now.saturating_add(Duration::from_millis(wait));
                self.add(WaitingRequest { condition, client, user, request, until, _charge: charge });
                None
            }
            Err(refusal) => Some(Err(refusal)),
        }
    }

    /// Answers waiting requests whose condition holds or that have timed out, a bounded number of each.
    pub(super) fn answer_due(
        &mut self,
        now: Duration,
        ledger: &Ledger,
        sessions: &Sessions,
        outputs: &mut Outputs,
    ) {
        self.answer_found(sessions, outputs);
        self.answered = 0;
        self.answer_space(ledger, sessions, outputs);
        for _ in 0..ANSWERED_AT_ONCE {
            let Some(waiter) = self.next_expired(now) else { break };
            let refusal = match waiter.condition {
                WaitCondition::Name(name) => Refusal::NoSuchName { name },
                WaitCondition::Space { len, place } => ledger.over_quota(place, len),
            };
            outputs.answer(sessions, waiter.client, waiter.request, Err(refusal));
        }
        self.trim();
    }

    fn answer_space(&mut self, ledger: &Ledger, sessions: &Sessions, outputs: &mut Outputs) {
        for queue in [0, 1] {
            if !std::mem::take(&mut self.has_more_space[queue]) {
                self.promised[queue] = 0;
            }
            let mut promised = self.promised[queue];
            for answered in 0.. {
                if answered == ANSWERED_AT_ONCE {
                    // One step of the state machine answers at most `ANSWERED_AT_ONCE` requests for each kind of memory; the next
                    // step answers the rest.
                    self.has_more_space[queue] = !self.space_queues[queue].is_empty();
                    self.promised[queue] = promised;
                    break;
                }
                let Some(number) = self.space_queues[queue].first().copied() else { break };
                let condition = self.waiters.get(&number).map(|waiter| &waiter.condition);
                let Some(WaitCondition::Space { len, place }) = condition else { break };
                match ledger.space_for(*place, *len, promised) {
                    Some(needed) => promised += needed,
                    None => break,
                }
                let Some(waiter) = self.remove(number) else { break };
                outputs.answer(sessions, waiter.client, waiter.request, Ok(Answer::Done));
            }
        }
    }

    /// Answers requests that wait for a name that an object has now, in this step or the following ones.
    pub(super) fn name_found(
        &mut self,
        name: &str,
        object: ObjectId,
        sessions: &Sessions,
        outputs: &mut Outputs,
    ) {
        if let Some(waiters) = self.names.remove(name) {
            let found = waiters.into_values().map(|numbers| (numbers, object));
            self.found.extend(found);
            // As many requests as one step may answer are answered before the client that has published the name.
            self.answer_found(sessions, outputs);
        }
    }

    /// Answers requests for names that an object has now, as many as one step may answer.
    fn answer_found(&mut self, sessions: &Sessions, outputs: &mut Outputs) {
        while self.answered < ANSWERED_AT_ONCE
            && let Some((waiter, object)) = self.next_found()
        {
            self.answered += 1;
            outputs.answer(sessions, waiter.client, waiter.request, Ok(Answer::Found { object }));
        }
    }

    /// Removes the waiting requests of a client that has left. The following steps free the memory of the requests.
    pub(super) fn forget(&mut self, client: ClientId) {
        self.abandoned.extend(self.clients.remove(&client));
    }
}

fn remove_number(by_user: &mut NumbersByUser, user: u32, number: u64) {
    if let Some(numbers) = by_user.get_mut(&user) {
        numbers.remove(&number);
        if numbers.is_empty() {
            by_user.remove(&user);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::simulation::{POLICY, Simulation, create, sealed};
    use super::super::slots::Slots;
    use super::super::{Input, Output, StepTime};
    use super::*;
    use crate::protocol::RequestKind;
    use crate::server::budget::tests::unlimited;

    const HALF: u64 = POLICY.quota / 2;

    #[test]
    fn requests_wait_by_name_and_deadline_and_are_removed_with_their_client() {
        let (mut sessions, mut waiting, mut outputs) =
            (Sessions::new(0), WaitingRequests::default(), Outputs::default());
        let clients = [1, 2].map(ClientId);
        clients.iter().for_each(|client| sessions.join(*client, unlimited().open(7)));
        let ledger = Ledger::new(POLICY, POLICY, 0, Slots::used_up_to(8, 0));
        let at = Duration::from_millis;
        let wait = |client, request, wait| TimedRequest { client, request, wait };
        let [one, two] = clients;
        let name = || "name".to_owned();
        let refused = Some(Err(Refusal::NoSuchName { name: name() }));
        assert_eq!(waiting.wait_for_name(wait(one, 1, 0), name(), at(0), &sessions), refused);
        for (client, request, millis) in [(one, 2, 30), (one, 3, 10), (two, 4, 20)] {
            assert_eq!(waiting.wait_for_name(wait(client, request, millis), name(), at(5), &sessions), None);
        }
        assert_eq!(waiting.wake_at(), Some(at(15)));
        waiting.answer_due(at(15), &ledger, &sessions, &mut outputs);
        waiting.forget(two);
        waiting.answer_due(at(16), &ledger, &sessions, &mut outputs);
        let object = ObjectId::new(1, 1);
        waiting.name_found("name", object, &sessions, &mut outputs);
        let answers = outputs.take().into_iter().map(|output| match output {
            Output::Respond { client, response, .. } => (client, response.id, response.answer),
            other => panic!("{other:?}"),
        });
        let late = Answer::Refused(Refusal::NoSuchName { name: name() });
        assert_eq!(answers.collect::<Vec<_>>(), [(one, 3, late), (one, 2, Answer::Found { object })]);
        assert_eq!((waiting.waiters.len(), waiting.wake_at()), (0, None));
    }

    fn await_space(len: u64, wait: u64) -> RequestKind {
        RequestKind::AwaitSpace { len, place: HOST, wait }
    }

    fn over_quota(wanted: u64, used: u64) -> Answer {
        Answer::Refused(Refusal::OverQuota { wanted, used, quota: POLICY.quota })
    }

    /// Creates a simulation with a sealed object whose length is half of the quota.
    fn half_full() -> (Simulation, ClientId, ObjectId) {
        let mut sim = Simulation::new();
        let client = sim.join(1);
        let (created, _) = sim.create(client, "half", HALF);
        let object = sealed(&sim.request_one(client, RequestKind::Seal { create: created }, &[]));
        (sim, client, object)
    }

    #[test]
    fn a_request_for_space_that_fits_or_never_fits_is_answered_at_once() {
        let (mut sim, client, _) = half_full();
        assert_eq!(sim.request_one(client, await_space(HALF, 0), &[]), Answer::Done);
        assert_eq!(sim.request_one(client, await_space(HALF + 1, 0), &[]), over_quota(HALF + 1, HALF));
        let never = POLICY.quota + 1;
        assert_eq!(sim.request_one(client, await_space(never, 1000), &[]), over_quota(never, HALF));
        let device = RequestKind::AwaitSpace { len: 1, place: 9, wait: 1000 };
        let refused = Answer::Refused(Refusal::NoSuchDevice { device: 8 });
        assert_eq!(sim.request_one(client, device, &[]), refused);
    }

    #[test]
    fn a_request_for_space_is_answered_when_an_object_is_freed() {
        let (mut sim, client, object) = half_full();
        let other = sim.join(2);
        assert_eq!(sim.request(other, await_space(POLICY.quota, 60_000), &[]), []);
        assert_eq!(
            sim.request_one(client, create("more", POLICY.quota, &[], 0), &[]),
            over_quota(POLICY.quota, HALF)
        );
        // A deleted object that is pinned still uses its memory.
        sim.memory.pins.insert(object);
        assert_eq!(sim.request(client, RequestKind::Delete { object }, &[]), [Answer::Done]);
        sim.memory.pins.clear();
        assert_eq!(sim.request(client, RequestKind::PinReleased { object }, &[]), [Answer::Done]);
        let (_, answer) = sim.create(other, "more", POLICY.quota);
        assert!(matches!(answer, Answer::Created { .. }), "{answer:?}");
    }

    #[test]
    fn a_request_for_space_is_not_answered_while_an_earlier_one_needs_it() {
        let (mut sim, client, object) = half_full();
        let [large, small, late] = [2, 3, 4].map(|client| sim.join(client));
        assert_eq!(sim.request(large, await_space(HALF + 1, 60_000), &[]), []);
        assert_eq!(
            sim.request(small, await_space(HALF / 4, 60_000), &[]),
            [],
            "there is space, but not for both"
        );
        assert_eq!(sim.request(late, await_space(HALF, 60_000), &[]), []);
        // The first two requests fit: five eighths of the quota and a granule. Another half of the quota does not fit as well.
        let mut answers = sim.request(client, RequestKind::Delete { object }, &[]);
        assert_eq!(answers.len(), 3, "{answers:?}");
        answers.retain(|answer| *answer == Answer::Done);
        assert_eq!(answers.len(), 3);
        sim.clients.remove(&late);
        sim.run(Input::Left { client: late });
    }

    #[test]
    fn a_request_for_space_that_times_out_reports_the_usage() {
        let (mut sim, client, _) = half_full();
        assert_eq!(sim.request(client, await_space(POLICY.quota, 500), &[]), []);
        assert_eq!(sim.server.wake_at(), Some(Duration::from_millis(1500)));
        let late = StepTime { elapsed: Duration::from_secs(2), unix: 0 };
        let outputs = sim.server.step(late, Input::Tick, &mut sim.memory);
        let refused = over_quota(POLICY.quota, HALF);
        let is_refusal = |output: &Output| matches!(output, Output::Respond { response, .. } if response.answer == refused);
        assert!(outputs.iter().any(is_refusal), "{outputs:?}");
    }

    #[test]
    fn a_small_object_waits_for_space_in_an_arena() {
        let mut sim = Simulation::new();
        let client = sim.join(1);
        sealed(&sim.create(client, "small", 100).1);
        // The arena has space although the quota is used up.
        let remaining = POLICY.quota - POLICY.arena;
        sim.create(client, "rest", remaining);
        assert_eq!(sim.request_one(client, await_space(100, 0), &[]), Answer::Done);
        assert_eq!(
            sim.request_one(client, await_space(POLICY.small, 0), &[]),
            over_quota(POLICY.small, POLICY.quota)
        );
    }

    fn find(name: &str) -> RequestKind {
        RequestKind::Find { name: name.to_owned(), wait: 60_000 }
    }

    /// Publishes a name for which `requests` requests of one user and one request of another user wait. Returns the clients that
    /// each step answers, starting with the step that publishes the name.
    fn answers_by_step(requests: usize) -> Vec<Vec<ClientId>> {
        let mut sim = Simulation::new();
        let (publisher, other, own) = (sim.join(1), sim.join_as(2, 7), sim.join_as(3, 8));
        // The arena is created in advance, so that the published object does not wait for one.
        sim.create(publisher, "first", 0);
        for client in std::iter::repeat_n(other, requests).chain([own]) {
            let input = input(&mut sim.requests, client, find("x"));
            assert_eq!(sim.server.step(now(1), input, &mut sim.memory), []);
        }
        let found = |outputs: Vec<Output>| {
            let clients = outputs.into_iter().filter_map(|output| match output {
                Output::Respond { client, response, .. } => {
                    matches!(response.answer, Answer::Found { .. }).then_some(client)
                }
                _ => None,
            });
            clients.collect::<Vec<_>>()
        };
        let input = input(&mut sim.requests, publisher, create("x", 0, &[], 0));
        let mut answers = vec![found(sim.server.step(now(1), input, &mut sim.memory))];
        while sim.server.wake_at() == Some(Duration::ZERO) {
            answers.push(found(sim.server.step(now(1), Input::Tick, &mut sim.memory)));
        }
        answers
    }

    fn now(seconds: u64) -> StepTime {
        StepTime { elapsed: Duration::from_secs(seconds), unix: 0 }
    }

    fn input(requests: &mut u64, client: ClientId, kind: RequestKind) -> Input<'static> {
        *requests += 1;
        let request = crate::protocol::Request { id: *requests, resends: 0, kind };
        Input::Request { client, request, payload: Vec::new().into(), charge: None }
    }

    #[test]
    fn a_step_answers_a_bounded_number_of_requests_that_wait_for_one_name() {
        assert_eq!(answers_by_step(ANSWERED_AT_ONCE - 1).len(), 1);
        let many = answers_by_step(1000);
        assert_eq!(many.iter().map(Vec::len).sum::<usize>(), 1001);
        assert!(many.iter().all(|answers| answers.len() <= ANSWERED_AT_ONCE), "{many:?}");
        assert!(many[0].contains(&ClientId(3)), "users are served round-robin: {:?}", many[0]);
    }

    #[test]
    fn all_requests_for_space_that_fit_are_answered_a_few_per_step() {
        const WAITING: usize = 2 * ANSWERED_AT_ONCE + 3;
        let mut sim = Simulation::new();
        let (owner, other) = (sim.join(1), sim.join(2));
        let (full, _) = sim.create(owner, "all", POLICY.quota);
        for _ in 0..WAITING {
            let kind = RequestKind::AwaitSpace { len: POLICY.small, place: 0, wait: 60_000 };
            let input = input(&mut sim.requests, other, kind);
            assert_eq!(sim.server.step(now(1), input, &mut sim.memory), []);
        }
        let input = input(&mut sim.requests, owner, RequestKind::Abandon { create: full });
        let mut outputs = sim.server.step(now(1), input, &mut sim.memory);
        let mut answered = Vec::new();
        loop {
            let done =
                |output: &&Output| matches!(output, Output::Respond { client, .. } if *client == other);
            answered.push(outputs.iter().filter(done).count());
            if sim.server.wake_at() != Some(Duration::ZERO) {
                break;
            }
            outputs = sim.server.step(now(1), Input::Tick, &mut sim.memory);
        }
        assert!(answered.iter().all(|answered| *answered <= ANSWERED_AT_ONCE), "{answered:?}");
        assert_eq!(answered.iter().sum::<usize>(), WAITING, "{answered:?}");
    }

    #[test]
    fn requests_for_host_memory_are_answered_although_those_for_devices_are_all_answered_first() {
        let (mut sessions, mut waiting, mut outputs) =
            (Sessions::new(0), WaitingRequests::default(), Outputs::default());
        let client = ClientId(1);
        sessions.join(client, unlimited().open(7));
        let ledger = Ledger::new(POLICY, POLICY, 1, Slots::used_up_to(8, 0));
        let host = [HOST; 2 * ANSWERED_AT_ONCE + 1];
        for (request, place) in host.into_iter().chain([1; ANSWERED_AT_ONCE]).enumerate() {
            let timed = TimedRequest { client, request: request as u64, wait: 60_000 };
            let condition = WaitCondition::Space { len: POLICY.small, place };
            assert_eq!(waiting.wait(timed, condition, Duration::ZERO, &sessions), None);
        }
        let mut left = Vec::new();
        loop {
            waiting.answer_due(Duration::ZERO, &ledger, &sessions, &mut outputs);
            left.push(waiting.waiters.len());
            if waiting.wake_at() != Some(Duration::ZERO) {
                break;
            }
        }
        assert_eq!(left, [ANSWERED_AT_ONCE + 1, 1, 0]);
    }

    #[test]
    fn requests_of_a_departed_client_are_removed_in_bounded_slices() {
        let mut sim = Simulation::new();
        let client = sim.join(1);
        for number in 0..1000 {
            let input = input(&mut sim.requests, client, find(&format!("name {number}")));
            assert_eq!(sim.server.step(now(1), input, &mut sim.memory), []);
        }
        let before = sim.budget.held();
        assert!(before.bytes >= 1000 * WAITER_COST);
        sim.clients.remove(&client);
        sim.server.step(now(1), Input::Left { client }, &mut sim.memory);
        let mut steps = 0;
        while sim.server.wake_at() == Some(Duration::ZERO) {
            let left = sim.server.state.waiting.waiters.len();
            sim.server.step(now(1), Input::Tick, &mut sim.memory);
            assert!(left - sim.server.state.waiting.waiters.len() <= ANSWERED_AT_ONCE);
            steps += 1;
        }
        assert_eq!((steps, sim.server.state.waiting.waiters.len()), (1000 / ANSWERED_AT_ONCE, 0));
        assert_eq!(sim.budget.held().bytes, 0, "their charges are released");
    }

    #[test]
    fn waiting_requests_are_limited_by_the_budget_of_their_user() {
        let mut sim = Simulation::new();
        let client = sim.join(1);
        let refused = (0..100_000).find_map(|number| {
            let input = input(&mut sim.requests, client, find(&format!("name {number}")));
            sim.server.step(now(1), input, &mut sim.memory).pop()
        });
        let Some(Output::Respond { response, .. }) = refused else { panic!("{refused:?}") };
        let Answer::Refused(Refusal::ClientLimit { user, what, .. }) = response.answer else {
            panic!("{:?}", response.answer)
        };
        assert_eq!((user, what.as_str()), (super::super::simulation::USER, "bytes"));
    }
}
