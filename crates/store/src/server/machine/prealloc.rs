//! Preallocated host memory: zeroed and parked with the keeper before a request asks for it, so that the next large object
//! need not wait for its allocation.
//!
//! The memory of a sealed object can never be written again. When the object is freed, so is its memory, and fresh memory
//! of the same length is allocated while the server is idle: a client that replaces an object by its next version finds
//! it ready. Of short lengths, some are preallocated as soon as one was asked for.
//!
//! Guarantees: memory in use and preallocated memory are within the quota together, and preallocated memory is within its
//! own part of the quota; what is not used for a while is released; where memory cannot be allocated for a request,
//! preallocated memory is released first. The index does not list preallocated memory, so a server that takes over
//! releases it.

use std::collections::BTreeSet;
use std::time::Duration;

use super::interface::{Output, Requester};
use super::ledger::{HOST, Ledger};
use super::outputs::Outputs;
use crate::id::AllocationId;

/// How long after an event memory is preallocated: the client that caused the event usually continues at once, and would have
/// to share the processor.
const REST: Duration = Duration::from_millis(5);

/// How long preallocated memory is kept.
const KEPT: Duration = Duration::from_secs(10);

/// Memory up to this length is preallocated also before any of it was freed.
const SHORT: u64 = 16 << 20;

/// How many pieces of one short length are preallocated.
const OF_ONE_LENGTH: usize = 2;

/// The most pieces there are, and the most lengths that are remembered. It bounds the work of a step.
const MOST_PIECES: usize = 16;

#[derive(Debug)]
struct Piece {
    id: AllocationId,
    len: u64,
    is_ready: bool,
    since: Duration,
}

/// A length that is to be preallocated.
#[derive(Debug)]
struct Wish {
    len: u64,
    /// How many pieces of this length there are to be.
    count: usize,
    at: Duration,
}

/// The pieces of host memory that are preallocated or being preallocated, oldest first.
#[derive(Debug)]
pub(super) struct Prealloc {
    pieces: Vec<Piece>,
    /// The lengths that were wished last, oldest first, at most [`MOST_PIECES`].
    wishes: Vec<Wish>,
    /// Pieces that requests have taken before they were ready. Preallocation may take less of the available memory than
    /// requests may: a piece that cannot be preallocated is tried again as memory of its request.
    taken_early: BTreeSet<AllocationId>,
    /// The most bytes there may be.
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

    /// When the next piece is to be allocated or released.
    pub(super) fn wake_at(&self) -> Option<Duration> {
        let late = self.pieces.iter().filter(|piece| piece.is_ready).map(|piece| piece.since + KEPT);
        late.chain(self.wishes.iter().map(|wish| wish.at)).min()
    }

    /// Removes a piece of this length, and returns whether it is ready: a ready one, if there is any.
    pub(super) fn take(&mut self, len: u64) -> Option<(AllocationId, bool)> {
        let fits = |piece: &Piece| piece.len == len;
        let ready = self.pieces.iter().position(|piece| fits(piece) && piece.is_ready);
        let at = ready.or_else(|| self.pieces.iter().position(fits))?;
        let piece = self.pieces.remove(at);
        if !piece.is_ready {
            self.taken_early.insert(piece.id);
        }
        Some((piece.id, piece.is_ready))
    }

    /// Memory that a request has taken early is ready, or could not be allocated as preallocated memory. Returns whether this
    /// was such memory.
    pub(super) fn no_longer_early(&mut self, id: AllocationId) -> bool {
        self.taken_early.remove(&id)
    }

    /// An object with an allocation of its own of this length was sealed: others may follow.
    pub(super) fn expect_next(&mut self, len: u64, now: Duration) {
        if len <= SHORT {
            self.wish(len, OF_ONE_LENGTH, now);
        }
    }

    /// Memory of this length was freed with its object: another object may replace that one.
    pub(super) fn expect_replacement(&mut self, len: u64, now: Duration) {
        self.wish(len, 1, now);
    }

    fn wish(&mut self, len: u64, count: usize, now: Duration) {
        if len > self.limit {
            return;
        }
        let wishes = &mut self.wishes;
        let known = wishes.iter().position(|wish| wish.len == len).map(|at| wishes.remove(at));
        let count = known.map_or(count, |known| known.count.max(count));
        if wishes.len() == MOST_PIECES {
            wishes.remove(0);
        }
        wishes.push(Wish { len, count, at: now + REST });
    }

    /// Begins to allocate what is due, and releases what exceeds the quota or was not used for a while.
    pub(super) fn update(&mut self, ledger: &mut Ledger, now: Duration, outputs: &mut Outputs) {
        for wish in self.wishes.extract_if(.., |wish| wish.at <= now).collect::<Vec<_>>() {
            for _ in 0..wish.count {
                self.allocate(wish.len, wish.count, ledger, now, outputs);
            }
        }
        if self.pieces.is_empty() {
            return;
        }
        let mut gone = self.expire(now);
        gone.extend(self.shrink(self.room(ledger)));
        release(gone, ledger, outputs);
    }

    fn allocate(
        &mut self,
        len: u64,
        count: usize,
        ledger: &mut Ledger,
        now: Duration,
        outputs: &mut Outputs,
    ) {
        let of_length = self.pieces.iter().filter(|piece| piece.len == len).count();
        if of_length >= count || len > self.room(ledger) {
            return;
        }
        // Older lengths make room for this one.
        let room = self.room(ledger).saturating_sub(len);
        release(self.shrink(room), ledger, outputs);
        if self.held() > room || self.pieces.len() >= MOST_PIECES {
            return;
        }
        if let Some(id) = ledger.reserve_id() {
            self.pieces.push(Piece { id, len, is_ready: false, since: now });
            let requester = Requester::Server;
            outputs.push(Output::Allocate { allocation: id, len, place: HOST, requester });
        }
    }

    /// The most bytes there may be now.
    fn room(&self, ledger: &Ledger) -> u64 {
        let host = ledger.usage().0;
        self.limit.min(host.quota.saturating_sub(host.used))
    }

    /// A piece is ready, or could not be allocated. Returns whether this was a piece.
    pub(super) fn allocated(
        &mut self,
        id: AllocationId,
        is_ready: bool,
        ledger: &mut Ledger,
        now: Duration,
        outputs: &mut Outputs,
    ) -> bool {
        let Some(at) = self.pieces.iter().position(|piece| piece.id == id) else { return false };
        if is_ready {
            self.pieces[at].is_ready = true;
            self.pieces[at].since = now;
            self.update(ledger, now, outputs);
        } else {
            self.pieces.remove(at);
            release(vec![id], ledger, outputs);
        }
        true
    }

    /// Releases all pieces that are ready: their slots of the index are needed.
    pub(super) fn release_slots(&mut self, ledger: &mut Ledger, outputs: &mut Outputs) {
        release(self.shrink(0), ledger, outputs);
    }

    /// Returns the pages of all pieces that are ready to the system, because memory could not be allocated for a request. Returns
    /// whether there were any.
    pub(super) fn reclaim(&mut self, ledger: &mut Ledger, outputs: &mut Outputs) -> bool {
        let ready = self.shrink(0);
        for allocation in &ready {
            ledger.return_id(*allocation);
            outputs.push(Output::Reclaim { allocation: *allocation });
        }
        !ready.is_empty()
    }

    /// Removes the oldest pieces that are ready, until no more bytes than this are left.
    fn shrink(&mut self, room: u64) -> Vec<AllocationId> {
        let mut held = self.held();
        let mut too_many = |piece: &mut Piece| {
            let goes = piece.is_ready && held > room;
            held -= if goes { piece.len } else { 0 };
            goes
        };
        self.pieces.extract_if(.., &mut too_many).map(|piece| piece.id).collect()
    }

    /// Removes the pieces that were not used for too long.
    fn expire(&mut self, now: Duration) -> Vec<AllocationId> {
        let late = |piece: &mut Piece| piece.is_ready && now.saturating_sub(piece.since) >= KEPT;
        self.pieces.extract_if(.., late).map(|piece| piece.id).collect()
    }

    #[cfg(test)]
    pub(super) fn ids(&self) -> impl Iterator<Item = AllocationId> {
        self.pieces.iter().map(|piece| piece.id)
    }
}

fn release(ids: Vec<AllocationId>, ledger: &mut Ledger, outputs: &mut Outputs) {
    for allocation in ids {
        ledger.return_id(allocation);
        outputs.push(Output::Release { allocation });
    }
}

#[cfg(test)]
mod tests {
    use super::super::simulation::{GEOMETRY, Simulation, TERMS, USER, create, sealed};
    use super::super::{Input, Now};
    use super::*;
    use crate::protocol::{Answer, Refusal, RequestKind};

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
    fn a_piece_that_is_not_used_for_long_is_released_and_one_that_is_being_allocated_is_not() {
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
        sealed(&sim.one(client, RequestKind::Seal { create: made }, &[]))
    }

    #[test]
    fn memory_is_preallocated_after_an_object_and_used_by_the_next_of_its_length() {
        let mut sim = Simulation::with_ahead(4 * LEN);
        let client = sim.join(1);
        put(&mut sim, client, "first", LEN);
        assert_eq!(sim.server.state.memory.prealloc().held(), 0, "not while its writer may go on");
        sim.rest(REST);
        let ready: Vec<_> = sim.server.state.memory.prealloc().ids().collect();
        assert_eq!((ready.len(), sim.server.state.memory.prealloc().held()), (2, 2 * LEN));
        assert_eq!(sim.status(client).host.used, LEN, "what is made ahead is not taken");
        let Answer::Created { memory, .. } = sim.create(client, "second", LEN).1 else { panic!("created") };
        assert_eq!(memory.allocation, ready[0]);
        assert_eq!((sim.status(client).host.used, sim.server.state.memory.prealloc().held()), (2 * LEN, LEN));
    }

    #[test]
    fn memory_of_any_length_is_preallocated_again_when_it_is_freed() {
        let mut sim = Simulation::with_ahead(TERMS.quota);
        let client = sim.join(1);
        let object = put(&mut sim, client, "object", LEN);
        sim.server.state.memory.prealloc().wishes.clear();
        sim.one(client, RequestKind::Delete { object }, &[]);
        sim.rest(REST);
        assert_eq!((sim.server.state.memory.prealloc().held(), sim.status(client).host.used), (LEN, 0));
    }

    #[test]
    fn preallocated_memory_never_takes_room_that_a_request_needs() {
        let mut sim = Simulation::with_ahead(TERMS.quota);
        let client = sim.join(1);
        let object = put(&mut sim, client, "object", LEN);
        sim.one(client, RequestKind::Delete { object }, &[]);
        sim.rest(REST);
        assert!(sim.server.state.memory.prealloc().held() > 0);
        put(&mut sim, client, "all", TERMS.quota);
        assert_eq!((sim.server.state.memory.prealloc().held(), sim.parked.len()), (0, 1));
    }

    #[test]
    fn preallocated_memory_takes_no_slot_that_a_request_needs() {
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
    fn preallocated_memory_that_is_not_used_is_released() {
        let mut sim = Simulation::with_ahead(4 * LEN);
        let client = sim.join(1);
        put(&mut sim, client, "object", LEN);
        sim.rest(REST);
        let wake = sim.server.wake_at().expect("something to look at");
        let outputs = sim.server.step(Now { elapsed: wake, unix: 0 }, Input::Tick, &mut sim.memory);
        assert!(matches!(outputs[..], [Output::Release { .. }, Output::Release { .. }]), "{outputs:?}");
        assert_eq!((sim.server.state.memory.prealloc().held(), sim.server.wake_at()), (0, None));
    }

    #[test]
    fn a_request_waits_for_memory_that_is_being_preallocated() {
        let mut sim = Simulation::with_ahead(4 * LEN);
        let client = sim.join(1);
        put(&mut sim, client, "object", LEN);
        sim.rest(REST);
        sim.server.state.memory.prealloc().pieces.truncate(1);
        let id = sim.server.state.memory.prealloc().ids().next().expect("one");
        sim.server.state.memory.prealloc().pieces[0].is_ready = false;
        let request = crate::protocol::Request { id: 99, resends: 0, kind: create("next", LEN, &[], 0) };
        let input = Input::Request { client, request, payload: Vec::new().into(), charge: None };
        let outputs = sim.server.step(Now { elapsed: Duration::ZERO, unix: 0 }, input, &mut sim.memory);
        assert_eq!(outputs, [Output::Promote { allocation: id, user: USER }], "it is no longer made last");
        let made = Input::Allocated { allocation: id, outcome: Ok(()) };
        let outputs = sim.server.step(Now { elapsed: Duration::ZERO, unix: 0 }, made, &mut sim.memory);
        assert!(matches!(outputs[..], [Output::Respond { .. }]), "{outputs:?}");
    }

    #[test]
    fn no_more_lengths_are_remembered_than_pieces_can_be_made() {
        let mut sim = Simulation::with_ahead(TERMS.quota);
        for pages in 1..=100 {
            sim.server.state.memory.prealloc().expect_replacement(pages * TERMS.page, Duration::ZERO);
        }
        let lens: Vec<_> =
            sim.server.state.memory.prealloc().wishes.iter().map(|wish| wish.len / TERMS.page).collect();
        assert_eq!(lens, (85..=100).collect::<Vec<_>>(), "the last ones");
        // One that is wished again is among the last.
        sim.server.state.memory.prealloc().expect_replacement(85 * TERMS.page, Duration::ZERO);
        sim.server.state.memory.prealloc().expect_replacement(TERMS.page, Duration::ZERO);
        let lens: Vec<_> =
            sim.server.state.memory.prealloc().wishes.iter().map(|wish| wish.len / TERMS.page).collect();
        assert_eq!(lens, (87..=100).chain([85, 1]).collect::<Vec<_>>());
    }

    fn step(sim: &mut Simulation, input: Input<'_>) -> Vec<Output> {
        sim.server.step(Now { elapsed: Duration::from_secs(1), unix: 0 }, input, &mut sim.memory)
    }

    fn ask(sim: &mut Simulation, client: crate::id::ClientId, len: u64) -> Vec<Output> {
        let request = crate::protocol::Request { id: 99, resends: 0, kind: create("next", len, &[], 0) };
        step(sim, Input::Request { client, request, payload: Vec::new().into(), charge: None })
    }

    fn is_refused(output: &Output) -> bool {
        let Output::Respond { response, .. } = output else { return false };
        matches!(&response.answer, Answer::Refused(Refusal::NoMemory { reason, .. }) if reason == "none left")
    }

    #[test]
    fn preallocated_memory_is_reclaimed_before_a_request_is_refused() {
        let mut sim = Simulation::with_ahead(4 * LEN);
        let client = sim.join(1);
        put(&mut sim, client, "object", LEN);
        sim.rest(REST);
        let ready: Vec<_> = sim.server.state.memory.prealloc().ids().collect();
        let outputs = ask(&mut sim, client, 2 * LEN);
        let [Output::Allocate { allocation, .. }] = outputs[..] else { panic!("{outputs:?}") };
        let fail = || Input::Allocated { allocation, outcome: Err("none left".to_owned()) };
        let reclaim = |at: usize| Output::Reclaim { allocation: ready[at] };
        let requester = Requester::User(USER);
        let len = sim.server.state.memory.ledger().record(allocation).unwrap().len;
        let again = Output::Allocate { allocation, len, place: HOST, requester };
        assert_eq!(step(&mut sim, fail()), [reclaim(0), reclaim(1), again]);
        let outputs = step(&mut sim, fail());
        assert!(matches!(&outputs[..], [Output::Release { .. }, said] if is_refused(said)), "{outputs:?}");
        assert_eq!(sim.server.state.memory.ledger().usage().0.used, LEN);
    }

    #[test]
    fn memory_that_cannot_be_preallocated_is_tried_again_for_the_request_that_waits_for_it() {
        let mut sim = Simulation::with_ahead(4 * LEN);
        let client = sim.join(1);
        put(&mut sim, client, "object", LEN);
        sim.rest(REST);
        sim.server.state.memory.prealloc().pieces.truncate(1);
        sim.server.state.memory.prealloc().pieces[0].is_ready = false;
        let outputs = ask(&mut sim, client, LEN);
        let [Output::Promote { allocation, .. }] = outputs[..] else { panic!("{outputs:?}") };
        let fail = || Input::Allocated { allocation, outcome: Err("none left".to_owned()) };
        let outputs = step(&mut sim, fail());
        assert!(
            matches!(outputs[..], [Output::Allocate { requester: Requester::User(USER), .. }]),
            "{outputs:?}"
        );
        let outputs = step(&mut sim, fail());
        assert!(matches!(&outputs[..], [Output::Release { .. }, said] if is_refused(said)), "{outputs:?}");
    }
}
