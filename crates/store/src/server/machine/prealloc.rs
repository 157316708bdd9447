//! Memory made ahead: zeroed, kept by the keeper, and nobody's yet, so that the next large object need not wait for it.
//!
//! The memory of a sealed object can never be written again. When the object goes, so does its memory, and fresh memory of
//! the same length is made while there is time: whoever replaces an object by its next version finds it ready. Of short
//! lengths some are made as soon as one was asked for.
//!
//! What it keeps true: what is taken and what was made ahead are within the quota together, and what was made ahead is
//! within its own part of it; what nobody has asked for in a while is given back; where memory cannot be made for a request,
//! what was made ahead is given back first. The index does not know of it, so a server that takes over lets it go.

use std::collections::BTreeSet;
use std::time::Duration;

use super::ledger::HOST;
use super::server::{Output, Requester, Server};
use crate::cells::Cells;
use crate::id::AllocationId;
use crate::protocol::Refusal;

/// How long after something has happened memory is made: whoever did it mostly goes on at once, and would have to share the
/// machine.
const REST: Duration = Duration::from_millis(5);

/// How long memory waits to be asked for.
const KEPT: Duration = Duration::from_secs(10);

/// Memory up to this length is made ahead also before any of it went.
const SHORT: u64 = 16 << 20;

/// How many pieces of one short length are made ahead.
const OF_ONE_LENGTH: usize = 2;

/// How many pieces there are at most, and how many lengths are remembered: all work of a step on them is bounded by it.
const MOST_PIECES: usize = 16;

#[derive(Debug)]
struct Piece {
    id: AllocationId,
    len: u64,
    is_ready: bool,
    since: Duration,
}

/// What is to be made when there is time.
#[derive(Debug)]
struct Wish {
    len: u64,
    /// How many of this length there are to be.
    count: usize,
    at: Duration,
}

/// What was made ahead in host memory, or is being made, oldest first.
#[derive(Debug)]
pub(super) struct Prealloc {
    pieces: Vec<Piece>,
    /// The lengths that were wished last, oldest first, at most [`MOST_PIECES`]: more could not be made.
    wishes: Vec<Wish>,
    /// Pieces that requests have taken before they were ready. Less memory may be taken ahead than for requests: those that
    /// cannot be made as the former are tried as the latter.
    taken_early: BTreeSet<AllocationId>,
    /// How many bytes it may be.
    limit: u64,
}

impl Prealloc {
    pub(super) fn new(limit: u64) -> Self {
        Self { pieces: Vec::new(), wishes: Vec::new(), taken_early: BTreeSet::new(), limit }
    }

    /// How many bytes there are.
    pub(super) fn held(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.len).sum()
    }

    /// A piece of this length, and whether it is ready: one that is, if there is any.
    fn take(&mut self, len: u64) -> Option<(AllocationId, bool)> {
        let fits = |piece: &Piece| piece.len == len;
        let ready = self.pieces.iter().position(|piece| fits(piece) && piece.is_ready);
        let at = ready.or_else(|| self.pieces.iter().position(fits))?;
        let piece = self.pieces.remove(at);
        if !piece.is_ready {
            self.taken_early.insert(piece.id);
        }
        Some((piece.id, piece.is_ready))
    }

    /// Memory that a request has taken early is there, or was given up.
    pub(super) fn no_longer_ahead(&mut self, id: AllocationId) -> bool {
        self.taken_early.remove(&id)
    }

    /// Takes out the oldest pieces that are ready, until no more bytes than this are left.
    fn shrink(&mut self, room: u64) -> Vec<AllocationId> {
        let mut held = self.held();
        let mut too_many = |piece: &mut Piece| {
            let goes = piece.is_ready && held > room;
            held -= if goes { piece.len } else { 0 };
            goes
        };
        self.pieces.extract_if(.., &mut too_many).map(|piece| piece.id).collect()
    }

    /// Takes out what has waited too long.
    fn expire(&mut self, now: Duration) -> Vec<AllocationId> {
        let late = |piece: &mut Piece| piece.is_ready && now.saturating_sub(piece.since) >= KEPT;
        self.pieces.extract_if(.., late).map(|piece| piece.id).collect()
    }

    /// When the next piece is to be made, or will have waited too long.
    pub(super) fn wake_at(&self) -> Option<Duration> {
        let late = self.pieces.iter().filter(|piece| piece.is_ready).map(|piece| piece.since + KEPT);
        late.chain(self.wishes.iter().map(|wish| wish.at)).min()
    }

    #[cfg(test)]
    pub(super) fn ids(&self) -> impl Iterator<Item = AllocationId> {
        self.pieces.iter().map(|piece| piece.id)
    }
}

impl<C: Cells> Server<C> {
    /// Memory of a length that was made ahead, or is being made, and whether it is ready. It is taken out of the quota
    /// from now on.
    pub(super) fn take_ahead(&mut self, place: u32, len: u64) -> Option<(AllocationId, bool)> {
        if place != HOST {
            return None;
        }
        let len = self.ledger.rounded(place, len)?;
        let (id, is_ready) = self.prealloc.take(len)?;
        self.ledger.enter_ahead(id, place, len);
        Some((id, is_ready))
    }

    /// Takes memory out of the quota. What was made ahead gives up the slots it has, where there is no other.
    pub(super) fn open_allocation(
        &mut self,
        place: u32,
        len: u64,
        is_arena: bool,
    ) -> Result<AllocationId, Refusal> {
        self.make_slots();
        self.ledger.open(place, len, is_arena)
    }

    /// Takes memory out of the quota that is there already, and as long as it is.
    pub(super) fn open_as_it_is(&mut self, place: u32, len: u64) -> Result<AllocationId, Refusal> {
        self.make_slots();
        self.ledger.open_as_it_is(place, len)
    }

    fn make_slots(&mut self) {
        if !self.ledger.has_slots() {
            let all = self.prealloc.shrink(0);
            self.release_ahead(all);
        }
    }

    /// Whether memory that could not be made for a request may be had now: it was being made ahead, and is tried as what
    /// it is, or something that was made ahead is given back for it.
    pub(super) fn may_retry(&mut self, allocation: AllocationId) -> bool {
        if self.prealloc.no_longer_ahead(allocation) {
            return true;
        }
        let ready = self.prealloc.shrink(0);
        let has_room = !ready.is_empty();
        for allocation in ready {
            self.ledger.return_number(allocation);
            self.outputs.push(Output::Reclaim { allocation });
        }
        has_room
    }

    /// An object in memory of its own of this length has been sealed: others may follow.
    pub(super) fn prealloc_next(&mut self, place: u32, len: u64) {
        if place == HOST && len <= SHORT {
            self.wish(len, OF_ONE_LENGTH);
        }
    }

    /// Memory of this length has gone with its object: another may take that object's place.
    pub(super) fn prealloc_replacement(&mut self, place: u32, len: u64) {
        if place == HOST {
            self.wish(len, 1);
        }
    }

    fn wish(&mut self, len: u64, count: usize) {
        if len > self.prealloc.limit {
            return;
        }
        let wishes = &mut self.prealloc.wishes;
        let known = wishes.iter().position(|wish| wish.len == len).map(|at| wishes.remove(at));
        let count = known.map_or(count, |known| known.count.max(count));
        if wishes.len() == MOST_PIECES {
            wishes.remove(0);
        }
        wishes.push(Wish { len, count, at: self.now.elapsed + REST });
    }

    /// Makes what is to be made by now.
    fn grant_wishes(&mut self) {
        let now = self.now.elapsed;
        for wish in self.prealloc.wishes.extract_if(.., |wish| wish.at <= now).collect::<Vec<_>>() {
            for _ in 0..wish.count {
                self.make_ahead(wish.len, wish.count);
            }
        }
    }

    fn make_ahead(&mut self, len: u64, count: usize) {
        let of_length = self.prealloc.pieces.iter().filter(|piece| piece.len == len).count();
        let used = self.ledger.usage().0;
        if of_length >= count || len > self.prealloc.limit.min(used.quota.saturating_sub(used.used)) {
            return;
        }
        // Older lengths make room for this one.
        let room = self.prealloc_room().saturating_sub(len);
        let crowded = self.prealloc.shrink(room);
        self.release_ahead(crowded);
        if self.prealloc.held() > room || self.prealloc.pieces.len() >= MOST_PIECES {
            return;
        }
        if let Some(id) = self.ledger.number() {
            self.prealloc.pieces.push(Piece { id, len, is_ready: false, since: self.now.elapsed });
            let requester = Requester::Server;
            self.outputs.push(Output::Make { allocation: id, len, place: HOST, requester });
        }
    }

    /// What the prealloc may hold now.
    fn prealloc_room(&self) -> u64 {
        let used = self.ledger.usage().0;
        self.prealloc.limit.min(used.quota.saturating_sub(used.used))
    }

    /// Something that was to be made ahead is there, or cannot be: whether it was such a thing.
    pub(super) fn made_ahead(&mut self, id: AllocationId, is_there: bool) -> bool {
        let now = self.now.elapsed;
        let Some(at) = self.prealloc.pieces.iter().position(|piece| piece.id == id) else { return false };
        if is_there {
            self.prealloc.pieces[at].is_ready = true;
            self.prealloc.pieces[at].since = now;
            self.trim_prealloc();
        } else {
            self.prealloc.pieces.remove(at);
            self.release_ahead(vec![id]);
        }
        true
    }

    /// Lets go what there is no room for any more, and what nobody has asked for in a while.
    pub(super) fn trim_prealloc(&mut self) {
        self.grant_wishes();
        if self.prealloc.pieces.is_empty() {
            return;
        }
        let room = self.prealloc_room();
        let mut gone = self.prealloc.expire(self.now.elapsed);
        gone.extend(self.prealloc.shrink(room));
        self.release_ahead(gone);
    }

    fn release_ahead(&mut self, ids: Vec<AllocationId>) {
        for allocation in ids {
            self.ledger.return_number(allocation);
            self.outputs.push(Output::Release { allocation });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::server::{Input, Now};
    use super::super::simulation::{GEOMETRY, Simulation, TERMS, USER, create, sealed};
    use super::*;
    use crate::protocol::{Answer, Ask};

    fn prealloc(lens: &[(u64, bool)]) -> Prealloc {
        let piece = |(slot, (len, is_ready)): (usize, &(u64, bool))| Piece {
            id: AllocationId::new(slot, 0),
            len: *len,
            is_ready: *is_ready,
            since: Duration::from_secs(slot as u64),
        };
        let pieces = lens.iter().enumerate().map(piece).collect();
        Prealloc { pieces, ..Prealloc::new(100) }
    }

    #[test]
    fn a_piece_that_is_ready_is_taken_before_one_that_is_being_made() {
        let mut prealloc = prealloc(&[(8, false), (4, true), (8, true)]);
        assert_eq!(prealloc.take(8), Some((AllocationId::new(2, 0), true)));
        assert_eq!(prealloc.take(8), Some((AllocationId::new(0, 0), false)));
        assert_eq!((prealloc.take(8), prealloc.held()), (None, 4));
    }

    #[test]
    fn the_oldest_that_are_ready_make_room() {
        let mut prealloc = prealloc(&[(8, false), (4, true), (8, true), (2, true)]);
        assert_eq!(prealloc.shrink(12), [AllocationId::new(1, 0), AllocationId::new(2, 0)]);
        assert_eq!((prealloc.held(), prealloc.shrink(12)), (10, vec![]));
        assert_eq!(prealloc.shrink(0), [AllocationId::new(3, 0)]);
    }

    #[test]
    fn what_has_waited_long_goes_and_what_is_being_made_does_not() {
        let mut prealloc = prealloc(&[(8, false), (4, true), (8, true)]);
        let first = Duration::from_secs(1) + KEPT;
        assert_eq!(prealloc.wake_at(), Some(first));
        assert_eq!(prealloc.expire(first - Duration::from_nanos(1)), []);
        assert_eq!(prealloc.expire(first), [AllocationId::new(1, 0)]);
        assert_eq!(prealloc.wake_at(), Some(first + Duration::from_secs(1)));
    }

    const LEN: u64 = 100 << 10;

    fn put(sim: &mut Simulation, client: crate::id::ClientId, name: &str, len: u64) -> crate::ObjectId {
        let (made, answer) = sim.create(client, name, len);
        assert!(matches!(answer, Answer::Created { .. }), "{answer:?}");
        sealed(&sim.one(client, Ask::Seal { create: made }, &[]))
    }

    #[test]
    fn memory_is_made_ahead_after_an_object_and_used_by_the_next_of_its_length() {
        let mut sim = Simulation::with_ahead(4 * LEN);
        let client = sim.join(1);
        put(&mut sim, client, "first", LEN);
        assert_eq!(sim.server.prealloc.held(), 0, "not while its writer may go on");
        sim.rest(REST);
        let ready: Vec<_> = sim.server.prealloc.ids().collect();
        assert_eq!((ready.len(), sim.server.prealloc.held()), (2, 2 * LEN));
        assert_eq!(sim.status(client).host.used, LEN, "what is made ahead is not taken");
        let Answer::Created { memory, .. } = sim.create(client, "second", LEN).1 else { panic!("created") };
        assert_eq!(memory.allocation, ready[0]);
        assert_eq!((sim.status(client).host.used, sim.server.prealloc.held()), (2 * LEN, LEN));
    }

    #[test]
    fn memory_of_any_length_is_made_again_when_it_goes() {
        let mut sim = Simulation::with_ahead(TERMS.quota);
        let client = sim.join(1);
        let object = put(&mut sim, client, "object", LEN);
        sim.server.prealloc.wishes.clear();
        sim.one(client, Ask::Delete { object }, &[]);
        sim.rest(REST);
        assert_eq!((sim.server.prealloc.held(), sim.status(client).host.used), (LEN, 0));
    }

    #[test]
    fn what_was_made_ahead_never_stands_in_the_way() {
        let mut sim = Simulation::with_ahead(TERMS.quota);
        let client = sim.join(1);
        let object = put(&mut sim, client, "object", LEN);
        sim.one(client, Ask::Delete { object }, &[]);
        sim.rest(REST);
        assert!(sim.server.prealloc.held() > 0);
        put(&mut sim, client, "all", TERMS.quota);
        assert_eq!((sim.server.prealloc.held(), sim.parked.len()), (0, 1));
    }

    #[test]
    fn what_was_made_ahead_takes_no_slot_that_is_needed() {
        let mut sim = Simulation::with_ahead(TERMS.quota / 2);
        let client = sim.join(1);
        let slots = GEOMETRY.allocations as u64;
        for number in 0..slots {
            // Each of another length, so that none is made of what was made ahead.
            put(&mut sim, client, &format!("object {number}"), LEN / 2 + number * TERMS.granule);
            sim.rest(REST);
        }
        assert_eq!(sim.status(client).objects, slots);
    }

    #[test]
    fn what_nobody_asks_for_is_given_back() {
        let mut sim = Simulation::with_ahead(4 * LEN);
        let client = sim.join(1);
        put(&mut sim, client, "object", LEN);
        sim.rest(REST);
        let wake = sim.server.wake_at().expect("something to look at");
        let outputs = sim.server.step(Now { elapsed: wake, unix: 0 }, Input::Tick, &mut sim.memory);
        assert!(matches!(outputs[..], [Output::Release { .. }, Output::Release { .. }]), "{outputs:?}");
        assert_eq!((sim.server.prealloc.held(), sim.server.wake_at()), (0, None));
    }

    #[test]
    fn memory_that_is_being_made_ahead_is_waited_for() {
        let mut sim = Simulation::with_ahead(4 * LEN);
        let client = sim.join(1);
        put(&mut sim, client, "object", LEN);
        sim.rest(REST);
        sim.server.prealloc.pieces.truncate(1);
        let id = sim.server.prealloc.ids().next().expect("one");
        sim.server.prealloc.pieces[0].is_ready = false;
        let request = crate::protocol::Request { id: 99, again: 0, ask: create("next", LEN, &[], 0) };
        let input = Input::Asked { client, request, payload: Vec::new().into(), charge: None };
        let outputs = sim.server.step(Now { elapsed: Duration::ZERO, unix: 0 }, input, &mut sim.memory);
        assert_eq!(outputs, [Output::Promote { allocation: id, user: USER }], "it is no longer made last");
        let made = Input::Made { allocation: id, outcome: Ok(()) };
        let outputs = sim.server.step(Now { elapsed: Duration::ZERO, unix: 0 }, made, &mut sim.memory);
        assert!(matches!(outputs[..], [Output::Say { .. }]), "{outputs:?}");
    }

    #[test]
    fn no_more_lengths_are_remembered_than_pieces_can_be_made() {
        let mut sim = Simulation::with_ahead(TERMS.quota);
        for pages in 1..=100 {
            sim.server.prealloc_replacement(HOST, pages * TERMS.page);
        }
        let lens: Vec<_> = sim.server.prealloc.wishes.iter().map(|wish| wish.len / TERMS.page).collect();
        assert_eq!(lens, (85..=100).collect::<Vec<_>>(), "the last ones");
        // One that is wished again is among the last.
        sim.server.prealloc_replacement(HOST, 85 * TERMS.page);
        sim.server.prealloc_replacement(HOST, TERMS.page);
        let lens: Vec<_> = sim.server.prealloc.wishes.iter().map(|wish| wish.len / TERMS.page).collect();
        assert_eq!(lens, (87..=100).chain([85, 1]).collect::<Vec<_>>());
    }

    fn step(sim: &mut Simulation, input: Input<'_>) -> Vec<Output> {
        sim.server.step(Now { elapsed: Duration::from_secs(1), unix: 0 }, input, &mut sim.memory)
    }

    fn ask(sim: &mut Simulation, client: crate::id::ClientId, len: u64) -> Vec<Output> {
        let request = crate::protocol::Request { id: 99, again: 0, ask: create("next", len, &[], 0) };
        step(sim, Input::Asked { client, request, payload: Vec::new().into(), charge: None })
    }

    fn is_refused(output: &Output) -> bool {
        let Output::Say { response, .. } = output else { return false };
        matches!(&response.answer, Answer::Refused(Refusal::NoMemory { reason, .. }) if reason == "none left")
    }

    #[test]
    fn what_was_made_ahead_is_given_back_before_a_request_is_refused() {
        let mut sim = Simulation::with_ahead(4 * LEN);
        let client = sim.join(1);
        put(&mut sim, client, "object", LEN);
        sim.rest(REST);
        let ready: Vec<_> = sim.server.prealloc.ids().collect();
        let outputs = ask(&mut sim, client, 2 * LEN);
        let [Output::Make { allocation, .. }] = outputs[..] else { panic!("{outputs:?}") };
        let fail = || Input::Made { allocation, outcome: Err("none left".to_owned()) };
        let reclaim = |at: usize| Output::Reclaim { allocation: ready[at] };
        let requester = Requester::User(USER);
        let len = sim.server.ledger.record(allocation).unwrap().len;
        let again = Output::Make { allocation, len, place: HOST, requester };
        assert_eq!(step(&mut sim, fail()), [reclaim(0), reclaim(1), again]);
        let outputs = step(&mut sim, fail());
        assert!(matches!(&outputs[..], [Output::Release { .. }, said] if is_refused(said)), "{outputs:?}");
        assert_eq!(sim.server.ledger.usage().0.used, LEN);
    }

    #[test]
    fn memory_that_cannot_be_made_ahead_is_tried_as_that_of_the_request_that_waits_for_it() {
        let mut sim = Simulation::with_ahead(4 * LEN);
        let client = sim.join(1);
        put(&mut sim, client, "object", LEN);
        sim.rest(REST);
        sim.server.prealloc.pieces.truncate(1);
        sim.server.prealloc.pieces[0].is_ready = false;
        let outputs = ask(&mut sim, client, LEN);
        let [Output::Promote { allocation, .. }] = outputs[..] else { panic!("{outputs:?}") };
        let fail = || Input::Made { allocation, outcome: Err("none left".to_owned()) };
        let outputs = step(&mut sim, fail());
        assert!(
            matches!(outputs[..], [Output::Make { requester: Requester::User(USER), .. }]),
            "{outputs:?}"
        );
        let outputs = step(&mut sim, fail());
        assert!(matches!(&outputs[..], [Output::Release { .. }, said] if is_refused(said)), "{outputs:?}");
    }
}
