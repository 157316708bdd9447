//! Requests that are answered later: for a name that no object has yet, and for room where the quota is full.
//!
//! Requests for room are answered in the order in which they came, and a request is not answered while one before it needs
//! the room, so that small objects do not delay large ones for ever. No memory is reserved for the client that is answered: when it
//! creates its object, another client may have taken the room.
//!
//! No step looks at all requests that wait: they are found by name, by deadline and by client, and each step answers a
//! bounded number of those that are due.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::ledger::{HOST, Ledger};
use super::outputs::Outputs;
use super::sessions::Sessions;
use crate::id::{ClientId, ObjectId};
use crate::protocol::{Answer, Refusal};
use crate::server::budget::{Amount, Charge};

/// How many requests one step answers, of each kind.
const ANSWERED_AT_ONCE: usize = 4;

/// What a request that waits takes, besides its name: its place in each table.
const COST: u64 = 512;

/// What is waited for.
#[derive(Debug, PartialEq, Eq)]
enum What {
    Name(String),
    Room { len: u64, place: u32 },
}

#[derive(Debug)]
struct Waiter {
    what: What,
    client: ClientId,
    user: u32,
    request: u64,
    until: Duration,
    _charge: Charge,
}

/// A request that may wait, and for how many milliseconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct TimedRequest {
    pub(super) client: ClientId,
    pub(super) request: u64,
    pub(super) wait: u64,
}

/// Numbers of requests, by user.
type ByUser = BTreeMap<u32, BTreeSet<u64>>;

/// All requests that wait, each by a number that grows.
#[derive(Debug, Default)]
pub(super) struct WaitingRequests {
    waiters: BTreeMap<u64, Waiter>,
    last: u64,
    deadlines: BTreeSet<(Duration, u64)>,
    names: BTreeMap<String, ByUser>,
    /// For room on the host, and on devices.
    rooms: [BTreeSet<u64>; 2],
    clients: BTreeMap<ClientId, BTreeSet<u64>>,
    /// Requests of a user whose name has an object now.
    found: VecDeque<(BTreeSet<u64>, ObjectId)>,
    /// How many of them this step has answered.
    answered: usize,
    /// Whether the last step told as many of room as it may, and did not look at the next.
    has_more_room: bool,
    /// What that and the steps before it have promised, of each kind of memory.
    promised: [u64; 2],
    /// Requests of clients that have left, to be removed.
    abandoned: Vec<BTreeSet<u64>>,
}

impl WaitingRequests {
    fn room_queue(place: u32) -> usize {
        usize::from(place != HOST)
    }

    fn add(&mut self, waiter: Waiter) {
        self.last += 1;
        let number = self.last;
        self.deadlines.insert((waiter.until, number));
        self.clients.entry(waiter.client).or_default().insert(number);
        match &waiter.what {
            What::Name(name) => {
                let by_user = self.names.entry(name.clone()).or_default();
                by_user.entry(waiter.user).or_default().insert(number);
            }
            What::Room { place, .. } => drop(self.rooms[Self::room_queue(*place)].insert(number)),
        }
        self.waiters.insert(number, waiter);
    }

    fn remove(&mut self, number: u64) -> Option<Waiter> {
        let waiter = self.waiters.remove(&number)?;
        self.deadlines.remove(&(waiter.until, number));
        if let Some(of_client) = self.clients.get_mut(&waiter.client) {
            of_client.remove(&number);
            if of_client.is_empty() {
                self.clients.remove(&waiter.client);
            }
        }
        match &waiter.what {
            What::Room { place, .. } => drop(self.rooms[Self::room_queue(*place)].remove(&number)),
            What::Name(name) => {
                // One that is told already has left the table of names.
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

    /// When a request has waited long enough, or there is work for the next step.
    pub(super) fn wake_at(&self) -> Option<Duration> {
        let first = self.deadlines.first().map(|(until, _)| *until);
        let has_work = !self.found.is_empty() || !self.abandoned.is_empty() || self.has_more_room;
        if has_work { Some(Duration::ZERO) } else { first }
    }

    /// The next request whose name has an object now. Users take turns.
    fn next_found(&mut self) -> Option<(Waiter, ObjectId)> {
        loop {
            let (mut numbers, object) = self.found.pop_front()?;
            let number = numbers.pop_first();
            if !numbers.is_empty() {
                self.found.push_back((numbers, object));
            }
            // It may have been given up meanwhile.
            if let Some(waiter) = number.and_then(|number| self.remove(number)) {
                return Some((waiter, object));
            }
        }
    }

    /// Removes some requests of clients that have left.
    fn trim(&mut self) {
        for _ in 0..ANSWERED_AT_ONCE {
            let Some(numbers) = self.abandoned.last_mut() else { return };
            match numbers.pop_first() {
                Some(number) => drop(self.remove(number)),
                None => drop(self.abandoned.pop()),
            }
        }
    }

    /// The next request whose time is over.
    fn next_expired(&mut self, now: Duration) -> Option<Waiter> {
        let (until, number) = self.deadlines.first().copied()?;
        if until > now {
            return None;
        }
        self.remove(number)
    }

    /// Has a request wait for a name. Returns the outcome if the request does not wait.
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
        self.wait(request, What::Name(name), now, sessions)
    }

    /// Has a request wait for room for an object. Returns the outcome if the request does not wait.
    pub(super) fn wait_for_room(
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
        // What exceeds the quota by itself never fits.
        if !ledger.could_hold(place, len) {
            return Some(Err(ledger.over_quota(place, len)));
        }
        // Requests that came before were told of all room there is.
        let is_first = self.rooms[Self::room_queue(place)].is_empty();
        match ledger.room_for(place, len, 0).filter(|_| is_first) {
            Some(_) => Some(Ok(Answer::Done)),
            None if request.wait == 0 => Some(Err(ledger.over_quota(place, len))),
            None => self.wait(request, What::Room { len, place }, now, sessions),
        }
    }

    fn wait(
        &mut self,
        TimedRequest { client, request, wait }: TimedRequest,
        what: What,
        now: Duration,
        sessions: &Sessions,
    ) -> Option<Result<Answer, Refusal>> {
        let user = sessions.user(client)?;
        let name = if let What::Name(name) = &what { name.len() as u64 } else { 0 };
        match sessions.charge(client, Amount::bytes(COST + 2 * name)) {
            Ok(charge) => {
                let until = now.saturating_add(Duration::from_millis(wait));
                self.add(Waiter { what, client, user, request, until, _charge: charge });
                None
            }
            Err(refusal) => Some(Err(refusal)),
        }
    }

    /// Answers requests that have what they waited for, and those whose time is over: a bounded number of each.
    pub(super) fn answer_due(
        &mut self,
        now: Duration,
        ledger: &Ledger,
        sessions: &Sessions,
        outputs: &mut Outputs,
    ) {
        self.answer_found(sessions, outputs);
        self.answered = 0;
        self.answer_rooms(ledger, sessions, outputs);
        for _ in 0..ANSWERED_AT_ONCE {
            let Some(waiter) = self.next_expired(now) else { break };
            let refusal = match waiter.what {
                What::Name(name) => Refusal::NoSuchName { name },
                What::Room { len, place } => ledger.over_quota(place, len),
            };
            outputs.answer(sessions, waiter.client, waiter.request, Err(refusal));
        }
        self.trim();
    }

    fn answer_rooms(&mut self, ledger: &Ledger, sessions: &Sessions, outputs: &mut Outputs) {
        if !std::mem::take(&mut self.has_more_room) {
            self.promised = [0; 2];
        }
        for queue in [0, 1] {
            let mut promised = self.promised[queue];
            for told in 0.. {
                if told == ANSWERED_AT_ONCE {
                    // The next step goes on with the others.
                    self.has_more_room = !self.rooms[queue].is_empty();
                    self.promised[queue] = promised;
                    break;
                }
                let Some(number) = self.rooms[queue].first().copied() else { break };
                let what = self.waiters.get(&number).map(|waiter| &waiter.what);
                let Some(What::Room { len, place }) = what else { break };
                match ledger.room_for(*place, *len, promised) {
                    Some(needed) => promised += needed,
                    None => break,
                }
                let Some(waiter) = self.remove(number) else { break };
                outputs.answer(sessions, waiter.client, waiter.request, Ok(Answer::Done));
            }
        }
    }

    /// A name has an object now: requests that waited for it are answered, by this step or those that follow.
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
            // As many as one step may at once, before the client that has published the name has its own answer.
            self.answer_found(sessions, outputs);
        }
    }

    /// Answers requests whose name has an object now, as many as one step may.
    fn answer_found(&mut self, sessions: &Sessions, outputs: &mut Outputs) {
        while self.answered < ANSWERED_AT_ONCE
            && let Some((waiter, object)) = self.next_found()
        {
            self.answered += 1;
            outputs.answer(sessions, waiter.client, waiter.request, Ok(Answer::Found { object }));
        }
    }

    /// Removes the requests of a client that has left: their memory is freed by the steps that follow.
    pub(super) fn forget(&mut self, client: ClientId) {
        self.abandoned.extend(self.clients.remove(&client));
    }
}

fn remove_number(by_user: &mut ByUser, user: u32, number: u64) {
    if let Some(numbers) = by_user.get_mut(&user) {
        numbers.remove(&number);
        if numbers.is_empty() {
            by_user.remove(&user);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::simulation::{Simulation, TERMS, create, sealed};
    use super::super::slots::Slots;
    use super::super::{Input, Now, Output};
    use super::*;
    use crate::protocol::RequestKind;
    use crate::server::budget::tests::ample;

    const HALF: u64 = TERMS.quota / 2;

    #[test]
    fn requests_wait_by_name_and_deadline_and_are_forgotten_with_their_client() {
        let (mut sessions, mut waiting, mut outputs) =
            (Sessions::new(0), WaitingRequests::default(), Outputs::default());
        let clients = [1, 2].map(ClientId);
        clients.iter().for_each(|client| sessions.join(*client, ample().open(7)));
        let ledger = Ledger::new(TERMS, TERMS, 0, Slots::used_up_to(8, 0));
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

    fn room(len: u64, wait: u64) -> RequestKind {
        RequestKind::AwaitSpace { len, place: HOST, wait }
    }

    fn over_quota(wanted: u64, used: u64) -> Answer {
        Answer::Refused(Refusal::OverQuota { wanted, used, quota: TERMS.quota })
    }

    /// A simulation with a sealed object of half the quota.
    fn half_full() -> (Simulation, ClientId, ObjectId) {
        let mut sim = Simulation::new();
        let client = sim.join(1);
        let (made, _) = sim.create(client, "half", HALF);
        let object = sealed(&sim.one(client, RequestKind::Seal { create: made }, &[]));
        (sim, client, object)
    }

    #[test]
    fn room_that_is_there_is_told_at_once_and_what_never_fits_is_refused_at_once() {
        let (mut sim, client, _) = half_full();
        assert_eq!(sim.one(client, room(HALF, 0), &[]), Answer::Done);
        assert_eq!(sim.one(client, room(HALF + 1, 0), &[]), over_quota(HALF + 1, HALF));
        let never = TERMS.quota + 1;
        assert_eq!(sim.one(client, room(never, 1000), &[]), over_quota(never, HALF));
        let device = RequestKind::AwaitSpace { len: 1, place: 9, wait: 1000 };
        let refused = Answer::Refused(Refusal::NoSuchDevice { device: 8 });
        assert_eq!(sim.one(client, device, &[]), refused);
    }

    #[test]
    fn a_request_for_room_is_answered_when_an_object_is_freed() {
        let (mut sim, client, object) = half_full();
        let other = sim.join(2);
        assert_eq!(sim.ask(other, room(TERMS.quota, 60_000), &[]), []);
        assert_eq!(sim.one(client, create("more", TERMS.quota, &[], 0), &[]), over_quota(TERMS.quota, HALF));
        // Pinned, it keeps its memory.
        sim.memory.pins.insert(object);
        assert_eq!(sim.ask(client, RequestKind::Delete { object }, &[]), [Answer::Done]);
        sim.memory.pins.clear();
        assert_eq!(sim.ask(client, RequestKind::PinReleased { object }, &[]), [Answer::Done]);
        let (_, answer) = sim.create(other, "more", TERMS.quota);
        assert!(matches!(answer, Answer::Created { .. }), "{answer:?}");
    }

    #[test]
    fn a_request_for_room_is_not_answered_while_an_earlier_one_needs_the_room() {
        let (mut sim, client, object) = half_full();
        let [large, small, late] = [2, 3, 4].map(|client| sim.join(client));
        assert_eq!(sim.ask(large, room(HALF + 1, 60_000), &[]), []);
        assert_eq!(sim.ask(small, room(HALF / 4, 60_000), &[]), [], "there is room, but not for both");
        assert_eq!(sim.ask(late, room(HALF, 60_000), &[]), []);
        // Three quarters and a granule fit, and not half of it besides.
        let mut answers = sim.ask(client, RequestKind::Delete { object }, &[]);
        assert_eq!(answers.len(), 3, "{answers:?}");
        answers.retain(|answer| *answer == Answer::Done);
        assert_eq!(answers.len(), 3);
        sim.clients.remove(&late);
        sim.run(Input::Left { client: late });
    }

    #[test]
    fn a_request_for_room_that_times_out_is_told_what_is_in_use() {
        let (mut sim, client, _) = half_full();
        assert_eq!(sim.ask(client, room(TERMS.quota, 500), &[]), []);
        assert_eq!(sim.server.wake_at(), Some(Duration::from_millis(1500)));
        let late = Now { elapsed: Duration::from_secs(2), unix: 0 };
        let outputs = sim.server.step(late, Input::Tick, &mut sim.memory);
        let refused = over_quota(TERMS.quota, HALF);
        let said = |output: &Output| matches!(output, Output::Respond { response, .. } if response.answer == refused);
        assert!(outputs.iter().any(said), "{outputs:?}");
    }

    #[test]
    fn a_small_object_waits_for_its_part_of_an_arena() {
        let mut sim = Simulation::new();
        let client = sim.join(1);
        sealed(&sim.create(client, "small", 100).1);
        // An arena has room left where the quota has none.
        let rest = TERMS.quota - TERMS.arena;
        sim.create(client, "rest", rest);
        assert_eq!(sim.one(client, room(100, 0), &[]), Answer::Done);
        assert_eq!(sim.one(client, room(TERMS.small, 0), &[]), over_quota(TERMS.small, TERMS.quota));
    }

    fn find(name: &str) -> RequestKind {
        RequestKind::Find { name: name.to_owned(), wait: 60_000 }
    }

    /// Publishes a name that so many requests of a user wait for, and one of another user: to which clients each step
    /// answers, beginning with the one that publishes.
    fn answers_by_step(requests: usize) -> Vec<Vec<ClientId>> {
        let mut sim = Simulation::new();
        let (publisher, other, own) = (sim.join(1), sim.join_as(2, 7), sim.join_as(3, 8));
        // From now on there is an arena.
        sim.create(publisher, "first", 0);
        for client in std::iter::repeat_n(other, requests).chain([own]) {
            let input = asked(&mut sim.requests, client, find("x"));
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
        let input = asked(&mut sim.requests, publisher, create("x", 0, &[], 0));
        let mut answers = vec![found(sim.server.step(now(1), input, &mut sim.memory))];
        while sim.server.wake_at() == Some(Duration::ZERO) {
            answers.push(found(sim.server.step(now(1), Input::Tick, &mut sim.memory)));
        }
        answers
    }

    fn now(seconds: u64) -> Now {
        Now { elapsed: Duration::from_secs(seconds), unix: 0 }
    }

    fn asked(requests: &mut u64, client: ClientId, kind: RequestKind) -> Input<'static> {
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
        assert!(many[0].contains(&ClientId(3)), "users take turns: {:?}", many[0]);
    }

    #[test]
    fn all_for_whom_there_is_room_are_told_a_few_at_a_step() {
        const WAITING: usize = 2 * ANSWERED_AT_ONCE + 3;
        let mut sim = Simulation::new();
        let (owner, other) = (sim.join(1), sim.join(2));
        let (full, _) = sim.create(owner, "all", TERMS.quota);
        for _ in 0..WAITING {
            let kind = RequestKind::AwaitSpace { len: TERMS.small, place: 0, wait: 60_000 };
            let input = asked(&mut sim.requests, other, kind);
            assert_eq!(sim.server.step(now(1), input, &mut sim.memory), []);
        }
        let input = asked(&mut sim.requests, owner, RequestKind::Abandon { create: full });
        let mut outputs = sim.server.step(now(1), input, &mut sim.memory);
        let mut told = Vec::new();
        loop {
            let done =
                |output: &&Output| matches!(output, Output::Respond { client, .. } if *client == other);
            told.push(outputs.iter().filter(done).count());
            if sim.server.wake_at() != Some(Duration::ZERO) {
                break;
            }
            outputs = sim.server.step(now(1), Input::Tick, &mut sim.memory);
        }
        assert!(told.iter().all(|told| *told <= ANSWERED_AT_ONCE), "{told:?}");
        assert_eq!(told.iter().sum::<usize>(), WAITING, "{told:?}");
    }

    #[test]
    fn requests_of_a_client_that_left_are_removed_a_bounded_number_at_a_time() {
        let mut sim = Simulation::new();
        let client = sim.join(1);
        for number in 0..1000 {
            let input = asked(&mut sim.requests, client, find(&format!("name {number}")));
            assert_eq!(sim.server.step(now(1), input, &mut sim.memory), []);
        }
        let before = sim.budget.held();
        assert!(before.bytes >= 1000 * COST);
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
        assert_eq!(sim.budget.held().bytes, 0, "their memory is given back");
    }

    #[test]
    fn requests_that_wait_are_limited_by_what_their_user_may_hold() {
        let mut sim = Simulation::new();
        let client = sim.join(1);
        let refused = (0..100_000).find_map(|number| {
            let input = asked(&mut sim.requests, client, find(&format!("name {number}")));
            sim.server.step(now(1), input, &mut sim.memory).pop()
        });
        let Some(Output::Respond { response, .. }) = refused else { panic!("{refused:?}") };
        let Answer::Refused(Refusal::ClientLimit { user, what, .. }) = response.answer else {
            panic!("{:?}", response.answer)
        };
        assert_eq!((user, what.as_str()), (super::super::simulation::USER, "bytes"));
    }
}
