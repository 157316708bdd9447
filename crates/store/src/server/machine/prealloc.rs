//! Preallocated host memory: zeroed, and known to the keeper process, before a request needs it, so that the next large object
//! does not wait for an allocation.
//!
//! The memory of a sealed object can never be written again, so it is freed with its object. Fresh memory of the same length is
//! then allocated while the server is idle: a client that replaces an object by its next version finds it ready. Memory of a length
//! that was just sealed is preallocated too, since the next object often has the same length.
//!
//! Memory in use and preallocated memory are within the quota together, and preallocated memory has a limit of its own. Blocks
//! that are unused for some time are released. If memory cannot be allocated for a request, preallocated memory is released
//! first. The index does not list preallocated memory, so the next server releases it.

use std::collections::BTreeSet;
use std::time::Duration;

use super::interface::{Output, Requester};
use super::ledger::{HOST, Ledger};
use super::outputs::Outputs;
use crate::id::AllocationId;

/// The delay between the sealing or freeing of an object and the preallocation that it causes: the client usually continues at
/// once, and would have to share the CPU with the preallocation.
const IDLE_DELAY: Duration = Duration::from_millis(4);

/// How long the server retains an unused block of preallocated memory.
const MAX_IDLE: Duration = Duration::from_secs(10);

/// The length up to which [`BLOCKS_PER_LENGTH`] blocks are preallocated, and one block of longer memory.
const MAX_SHORT_LEN: u64 = 16 << 20;

/// The number of preallocated blocks of each length up to [`MAX_SHORT_LEN`].
const BLOCKS_PER_LENGTH: usize = 2;

/// The maximum number of preallocated blocks, and of lengths that are to be preallocated, which bounds the work of a step.
const MAX_BLOCKS: usize = 16;

#[derive(Debug)]
struct PreallocBlock {
    id: AllocationId,
    len: u64,
    is_ready: bool,
    since: Duration,
}

/// A length of memory that is to be preallocated, and the number of blocks.
#[derive(Debug)]
struct Demand {
    len: u64,
    /// The number of preallocated blocks of this length that should exist.
    count: usize,
    at: Duration,
}

/// The blocks of host memory that are preallocated or being preallocated, oldest first.
#[derive(Debug)]
pub(super) struct Prealloc {
    blocks: Vec<PreallocBlock>,
    /// The lengths that are to be preallocated, the least recently demanded first, at most [`MAX_BLOCKS`].
    demands: Vec<Demand>,
    /// Preallocated blocks that requests have taken before they were ready. If such a block cannot be allocated, the allocation
    /// is tried again for the request, because requests may use more of the available memory than preallocation.
    taken_early: BTreeSet<AllocationId>,
    /// The maximum number of bytes that may be preallocated.
    limit: u64,
}

impl Prealloc {
    pub(super) fn new(limit: u64) -> Self {
        Self { blocks: Vec::new(), demands: Vec::new(), taken_early: BTreeSet::new(), limit }
    }

    /// Returns the number of bytes that are preallocated or being preallocated.
    pub(super) fn held(&self) -> u64 {
        self.blocks.iter().map(|block| block.len).sum()
    }

    /// Returns the time at which the next block of memory is preallocated or released.
    pub(super) fn wake_at(&self) -> Option<Duration> {
        let late = self.blocks.iter().filter(|block| block.is_ready).map(|block| block.since + MAX_IDLE);
        late.chain(self.demands.iter().map(|demand| demand.at)).min()
    }

    /// Removes a preallocated block of this length, preferably a ready one. Returns the block, and whether it is ready. If there
    /// is none, the caller allocates memory of this length itself, in place of a preallocation that was not started yet.
    pub(super) fn take(&mut self, len: u64, now: Duration) -> Option<(AllocationId, bool)> {
        let fits = |block: &PreallocBlock| block.len == len;
        let ready = self.blocks.iter().position(|block| fits(block) && block.is_ready);
        let Some(at) = ready.or_else(|| self.blocks.iter().position(fits)) else {
            self.replace_demand(len, now);
            return None;
        };
        let block = self.blocks.remove(at);
        if !block.is_ready {
            self.taken_early.insert(block.id);
        }
        Some((block.id, block.is_ready))
    }

    /// Removes an allocation from the preallocated blocks that requests took before they were ready. Returns true if it was one
    /// of them.
    pub(super) fn end_early_take(&mut self, id: AllocationId) -> bool {
        self.taken_early.remove(&id)
    }

    /// Schedules the preallocation of memory of this length, after an object with its own allocation of this length was sealed:
    /// others may follow.
    pub(super) fn expect_next(&mut self, len: u64, now: Duration) {
        let count = if len <= MAX_SHORT_LEN { BLOCKS_PER_LENGTH } else { 1 };
        self.add_demand(len, count, now);
    }

    /// Schedules the preallocation of memory of this length, after memory of this length was freed with its object: another
    /// object may replace the freed one.
    pub(super) fn expect_replacement(&mut self, len: u64, now: Duration) {
        self.add_demand(len, 1, now);
    }

    /// Counts an allocation of a request as one of the blocks that are to be preallocated, and postpones the others: both would
    /// be allocated at the same time otherwise, and the request would have to wait for twice as long.
    fn replace_demand(&mut self, len: u64, now: Duration) {
        let Some(at) = self.demands.iter().position(|demand| demand.len == len) else { return };
        let Demand { count, .. } = self.demands.remove(at);
        if count > 1 {
            self.add_demand(len, count - 1, now);
        }
    }

    fn add_demand(&mut self, len: u64, count: usize, now: Duration) {
        if len > self.limit {
            return;
        }
        let demands = &mut self.demands;
        let earlier = demands.iter().position(|demand| demand.len == len).map(|at| demands.remove(at));
        let count = earlier.map_or(count, |earlier| earlier.count.max(count));
        if demands.len() == MAX_BLOCKS {
            demands.remove(0);
        }
        demands.push(Demand { len, count, at: now + IDLE_DELAY });
    }

    /// Starts preallocations that are due, and releases preallocated blocks that exceed the quota or are unused for too long.
    pub(super) fn update(&mut self, ledger: &mut Ledger, now: Duration, outputs: &mut Outputs) {
        for demand in self.demands.extract_if(.., |demand| demand.at <= now).collect::<Vec<_>>() {
            for _ in 0..demand.count {
                self.allocate(demand.len, demand.count, ledger, now, outputs);
            }
        }
        if self.blocks.is_empty() {
            return;
        }
        let mut released = self.expire(now);
        released.extend(self.shrink(self.current_limit(ledger)));
        release(released, ledger, outputs);
    }

    fn allocate(
        &mut self,
        len: u64,
        count: usize,
        ledger: &mut Ledger,
        now: Duration,
        outputs: &mut Outputs,
    ) {
        let of_length = self.blocks.iter().filter(|block| block.len == len).count();
        if of_length >= count || len > self.current_limit(ledger) {
            return;
        }
        // Blocks of lengths that were demanded earlier are released to make space for the new block.
        let limit = self.current_limit(ledger).saturating_sub(len);
        release(self.shrink(limit), ledger, outputs);
        if self.held() > limit || self.blocks.len() >= MAX_BLOCKS {
            return;
        }
        if let Some(id) = ledger.reserve_id() {
            self.blocks.push(PreallocBlock { id, len, is_ready: false, since: now });
            let requester = Requester::Server;
            outputs.push(Output::Allocate { allocation: id, len, place: HOST, requester });
        }
    }

    /// Returns the current limit of preallocated bytes, which depends on the free part of the quota.
    fn current_limit(&self, ledger: &Ledger) -> u64 {
        let host = ledger.usage().0;
        self.limit.min(host.quota.saturating_sub(host.used))
    }

    /// Records that a preallocated block is ready or could not be allocated. Returns false if the allocation is not a
    /// preallocated block.
    pub(super) fn allocated(
        &mut self,
        id: AllocationId,
        is_ready: bool,
        ledger: &mut Ledger,
        now: Duration,
        outputs: &mut Outputs,
    ) -> bool {
        let Some(at) = self.blocks.iter().position(|block| block.id == id) else { return false };
        if is_ready {
            self.blocks[at].is_ready = true;
            self.blocks[at].since = now;
            self.update(ledger, now, outputs);
        } else {
            self.blocks.remove(at);
            release(vec![id], ledger, outputs);
        }
        true
    }

    /// Releases all preallocated blocks that are ready, because their slots of the index are needed.
    pub(super) fn release_slots(&mut self, ledger: &mut Ledger, outputs: &mut Outputs) {
        release(self.shrink(0), ledger, outputs);
    }

    /// Returns the pages of all preallocated blocks that are ready to the kernel, because memory could not be allocated for a
    /// request. Returns true if there were any.
    pub(super) fn reclaim(&mut self, ledger: &mut Ledger, outputs: &mut Outputs) -> bool {
        let ready = self.shrink(0);
        for allocation in &ready {
            ledger.return_id(*allocation);
            outputs.push(Output::Reclaim { allocation: *allocation });
        }
        !ready.is_empty()
    }

    /// Removes the oldest preallocated blocks that are ready until at most `limit` bytes are left.
    fn shrink(&mut self, limit: u64) -> Vec<AllocationId> {
        let mut held = self.held();
        let mut exceeds = |block: &mut PreallocBlock| {
            let is_removed = block.is_ready && held > limit;
            held -= if is_removed { block.len } else { 0 };
            is_removed
        };
        self.blocks.extract_if(.., &mut exceeds).map(|block| block.id).collect()
    }

    /// Removes the preallocated blocks that were unused for too long.
    fn expire(&mut self, now: Duration) -> Vec<AllocationId> {
        let late = |block: &mut PreallocBlock| block.is_ready && now.saturating_sub(block.since) >= MAX_IDLE;
        self.blocks.extract_if(.., late).map(|block| block.id).collect()
    }

    #[cfg(test)]
    pub(super) fn ids(&self) -> impl Iterator<Item = AllocationId> {
        self.blocks.iter().map(|block| block.id)
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
    use super::super::simulation::{GEOMETRY, POLICY, Simulation, USER, create, sealed};
    use super::super::{Input, StepTime};
    use super::*;
    use crate::protocol::{Answer, Refusal, RequestKind};

    const NOW: Duration = Duration::from_secs(1);

    fn prealloc(lens: &[(u64, bool)]) -> Prealloc {
        let block = |(slot, (len, is_ready)): (usize, &(u64, bool))| PreallocBlock {
            id: AllocationId::new(slot, 0),
            len: *len,
            is_ready: *is_ready,
            since: Duration::from_secs(slot as u64),
        };
        let blocks = lens.iter().enumerate().map(block).collect();
        Prealloc { blocks, ..Prealloc::new(100) }
    }

    #[test]
    fn a_ready_block_is_taken_before_one_that_is_being_allocated() {
        let mut prealloc = prealloc(&[(8, false), (4, true), (8, true)]);
        assert_eq!(prealloc.take(8, NOW), Some((AllocationId::new(2, 0), true)));
        assert_eq!(prealloc.take(8, NOW), Some((AllocationId::new(0, 0), false)));
        assert_eq!((prealloc.take(8, NOW), prealloc.held()), (None, 4));
    }

    #[test]
    fn the_oldest_ready_blocks_are_released_first() {
        let mut prealloc = prealloc(&[(8, false), (4, true), (8, true), (2, true)]);
        assert_eq!(prealloc.shrink(12), [AllocationId::new(1, 0), AllocationId::new(2, 0)]);
        assert_eq!((prealloc.held(), prealloc.shrink(12)), (10, vec![]));
        assert_eq!(prealloc.shrink(0), [AllocationId::new(3, 0)]);
    }

    #[test]
    fn an_unused_ready_block_expires_and_one_being_allocated_does_not() {
        let mut prealloc = prealloc(&[(8, false), (4, true), (8, true)]);
        let first = Duration::from_secs(1) + MAX_IDLE;
        assert_eq!(prealloc.wake_at(), Some(first));
        assert_eq!(prealloc.expire(first - Duration::from_nanos(1)), []);
        assert_eq!(prealloc.expire(first), [AllocationId::new(1, 0)]);
        assert_eq!(prealloc.wake_at(), Some(first + Duration::from_secs(1)));
    }

    #[test]
    fn an_allocation_of_a_request_replaces_a_preallocation_that_was_not_started() {
        let mut prealloc = prealloc(&[]);
        prealloc.expect_replacement(8, NOW);
        prealloc.expect_next(4, NOW);
        let later = NOW + Duration::from_millis(1);
        assert_eq!((prealloc.take(8, later), prealloc.take(4, later)), (None, None));
        let demands: Vec<_> = prealloc.demands.iter().map(|demand| (demand.len, demand.count)).collect();
        assert_eq!((demands, prealloc.wake_at()), (vec![(4, 1)], Some(later + IDLE_DELAY)));
    }

    #[test]
    fn a_sealed_object_of_any_length_demands_the_next_of_its_length() {
        let mut prealloc = Prealloc::new(1 << 30);
        for len in [MAX_SHORT_LEN, MAX_SHORT_LEN + 1, (1 << 30) + 1] {
            prealloc.expect_next(len, NOW);
        }
        let demands: Vec<_> = prealloc.demands.iter().map(|demand| (demand.len, demand.count)).collect();
        assert_eq!(demands, [(MAX_SHORT_LEN, BLOCKS_PER_LENGTH), (MAX_SHORT_LEN + 1, 1)]);
    }

    const LEN: u64 = 100 << 10;

    fn put(sim: &mut Simulation, client: crate::id::ClientId, name: &str, len: u64) -> crate::ObjectId {
        let (created, answer) = sim.create(client, name, len);
        assert!(matches!(answer, Answer::Created { .. }), "{answer:?}");
        sealed(&sim.request_one(client, RequestKind::Seal { create: created }, &[]))
    }

    #[test]
    fn memory_is_preallocated_after_an_object_and_used_by_the_next_of_its_length() {
        let mut sim = Simulation::with_prealloc_limit(4 * LEN);
        let client = sim.join(1);
        put(&mut sim, client, "first", LEN);
        assert_eq!(sim.server.state.memory.prealloc().held(), 0, "not while the writer may continue");
        sim.advance(IDLE_DELAY);
        let ready: Vec<_> = sim.server.state.memory.prealloc().ids().collect();
        assert_eq!((ready.len(), sim.server.state.memory.prealloc().held()), (2, 2 * LEN));
        assert_eq!(sim.status(client).host.used, LEN, "preallocated memory is not in use");
        let Answer::Created { memory, .. } = sim.create(client, "second", LEN).1 else { panic!("created") };
        assert_eq!(memory.allocation, ready[0]);
        assert_eq!((sim.status(client).host.used, sim.server.state.memory.prealloc().held()), (2 * LEN, LEN));
    }

    #[test]
    fn memory_of_any_length_is_preallocated_again_when_it_is_freed() {
        let mut sim = Simulation::with_prealloc_limit(POLICY.quota);
        let client = sim.join(1);
        let object = put(&mut sim, client, "object", LEN);
        sim.server.state.memory.prealloc().demands.clear();
        sim.request_one(client, RequestKind::Delete { object }, &[]);
        sim.advance(IDLE_DELAY);
        assert_eq!((sim.server.state.memory.prealloc().held(), sim.status(client).host.used), (LEN, 0));
    }

    #[test]
    fn an_object_that_replaces_a_deleted_one_at_once_causes_one_allocation_only() {
        let mut sim = Simulation::with_prealloc_limit(POLICY.quota);
        let client = sim.join(1);
        let first = put(&mut sim, client, "first", LEN);
        sim.request_one(client, RequestKind::Delete { object: first }, &[]);
        for demand in &mut sim.server.state.memory.prealloc().demands {
            // The seal of the first object has demanded two blocks. Large objects cause no such demand.
            demand.count = 1;
        }
        sim.advance(IDLE_DELAY / 2);
        let before = sim.parked.len();
        let (_, answer) = sim.create(client, "second", LEN);
        assert!(matches!(answer, Answer::Created { .. }), "{answer:?}");
        sim.advance(IDLE_DELAY);
        assert_eq!((sim.parked.len() - before, sim.server.state.memory.prealloc().held()), (1, 0));
    }

    #[test]
    fn preallocated_memory_never_takes_space_that_a_request_needs() {
        let mut sim = Simulation::with_prealloc_limit(POLICY.quota);
        let client = sim.join(1);
        let object = put(&mut sim, client, "object", LEN);
        sim.request_one(client, RequestKind::Delete { object }, &[]);
        sim.advance(IDLE_DELAY);
        assert!(sim.server.state.memory.prealloc().held() > 0);
        put(&mut sim, client, "all", POLICY.quota);
        assert_eq!((sim.server.state.memory.prealloc().held(), sim.parked.len()), (0, 1));
    }

    #[test]
    fn preallocated_memory_takes_no_slot_that_a_request_needs() {
        let mut sim = Simulation::with_prealloc_limit(POLICY.quota / 2);
        let client = sim.join(1);
        let slots = GEOMETRY.allocations as u64;
        for number in 0..slots {
            // Each object has another length, so that none of them uses a preallocated block.
            put(&mut sim, client, &format!("object {number}"), LEN / 2 + number * POLICY.granule);
            sim.advance(IDLE_DELAY);
        }
        assert_eq!(sim.status(client).objects, slots);
    }

    #[test]
    fn preallocated_memory_that_is_not_used_is_released() {
        let mut sim = Simulation::with_prealloc_limit(4 * LEN);
        let client = sim.join(1);
        put(&mut sim, client, "object", LEN);
        sim.advance(IDLE_DELAY);
        let wake = sim.server.wake_at().expect("no block to expire");
        let outputs = sim.server.step(StepTime { elapsed: wake, unix: 0 }, Input::Tick, &mut sim.memory);
        assert!(matches!(outputs[..], [Output::Release { .. }, Output::Release { .. }]), "{outputs:?}");
        assert_eq!((sim.server.state.memory.prealloc().held(), sim.server.wake_at()), (0, None));
    }

    #[test]
    fn a_request_waits_for_memory_that_is_being_preallocated() {
        let mut sim = Simulation::with_prealloc_limit(4 * LEN);
        let client = sim.join(1);
        put(&mut sim, client, "object", LEN);
        sim.advance(IDLE_DELAY);
        sim.server.state.memory.prealloc().blocks.truncate(1);
        let id = sim.server.state.memory.prealloc().ids().next().expect("no block is being preallocated");
        sim.server.state.memory.prealloc().blocks[0].is_ready = false;
        let request = crate::protocol::Request { id: 99, resends: 0, kind: create("next", LEN, &[], 0) };
        let input = Input::Request { client, request, payload: Vec::new().into(), charge: None };
        let outputs = sim.server.step(StepTime { elapsed: Duration::ZERO, unix: 0 }, input, &mut sim.memory);
        assert_eq!(
            outputs,
            [Output::Promote { allocation: id, user: USER }],
            "it is allocated with the priority of the request"
        );
        let created = Input::Allocated { allocation: id, outcome: Ok(()) };
        let outputs =
            sim.server.step(StepTime { elapsed: Duration::ZERO, unix: 0 }, created, &mut sim.memory);
        assert!(matches!(outputs[..], [Output::Respond { .. }]), "{outputs:?}");
    }

    #[test]
    fn lengths_in_demand_are_limited_to_the_number_of_blocks() {
        let mut sim = Simulation::with_prealloc_limit(POLICY.quota);
        for pages in 1..=100 {
            sim.server.state.memory.prealloc().expect_replacement(pages * POLICY.page, Duration::ZERO);
        }
        let lens: Vec<_> = sim
            .server
            .state
            .memory
            .prealloc()
            .demands
            .iter()
            .map(|demand| demand.len / POLICY.page)
            .collect();
        assert_eq!(lens, (85..=100).collect::<Vec<_>>(), "the most recent lengths");
        // A length that is demanded again becomes the most recently demanded one.
        sim.server.state.memory.prealloc().expect_replacement(85 * POLICY.page, Duration::ZERO);
        sim.server.state.memory.prealloc().expect_replacement(POLICY.page, Duration::ZERO);
        let lens: Vec<_> = sim
            .server
            .state
            .memory
            .prealloc()
            .demands
            .iter()
            .map(|demand| demand.len / POLICY.page)
            .collect();
        assert_eq!(lens, (87..=100).chain([85, 1]).collect::<Vec<_>>());
    }

    fn step(sim: &mut Simulation, input: Input<'_>) -> Vec<Output> {
        sim.server.step(StepTime { elapsed: Duration::from_secs(1), unix: 0 }, input, &mut sim.memory)
    }

    fn request(sim: &mut Simulation, client: crate::id::ClientId, len: u64) -> Vec<Output> {
        let request = crate::protocol::Request { id: 99, resends: 0, kind: create("next", len, &[], 0) };
        step(sim, Input::Request { client, request, payload: Vec::new().into(), charge: None })
    }

    fn is_refused(output: &Output) -> bool {
        let Output::Respond { response, .. } = output else { return false };
        matches!(&response.answer, Answer::Refused(Refusal::NoMemory { reason, .. }) if reason == "none left")
    }

    #[test]
    fn preallocated_memory_is_reclaimed_before_a_request_is_refused() {
        let mut sim = Simulation::with_prealloc_limit(4 * LEN);
        let client = sim.join(1);
        put(&mut sim, client, "object", LEN);
        sim.advance(IDLE_DELAY);
        let ready: Vec<_> = sim.server.state.memory.prealloc().ids().collect();
        let outputs = request(&mut sim, client, 2 * LEN);
        let [Output::Allocate { allocation, .. }] = outputs[..] else { panic!("{outputs:?}") };
        let fail = || Input::Allocated { allocation, outcome: Err("none left".to_owned()) };
        let reclaim = |at: usize| Output::Reclaim { allocation: ready[at] };
        let requester = Requester::User(USER);
        let len = sim.server.state.memory.ledger().record(allocation).unwrap().len;
        let retried = Output::Allocate { allocation, len, place: HOST, requester };
        assert_eq!(step(&mut sim, fail()), [reclaim(0), reclaim(1), retried]);
        let outputs = step(&mut sim, fail());
        assert!(
            matches!(&outputs[..], [Output::Release { .. }, refused] if is_refused(refused)),
            "{outputs:?}"
        );
        assert_eq!(sim.server.state.memory.ledger().usage().0.used, LEN);
    }

    #[test]
    fn a_failed_preallocation_is_retried_for_the_waiting_request() {
        let mut sim = Simulation::with_prealloc_limit(4 * LEN);
        let client = sim.join(1);
        put(&mut sim, client, "object", LEN);
        sim.advance(IDLE_DELAY);
        sim.server.state.memory.prealloc().blocks.truncate(1);
        sim.server.state.memory.prealloc().blocks[0].is_ready = false;
        let outputs = request(&mut sim, client, LEN);
        let [Output::Promote { allocation, .. }] = outputs[..] else { panic!("{outputs:?}") };
        let fail = || Input::Allocated { allocation, outcome: Err("none left".to_owned()) };
        let outputs = step(&mut sim, fail());
        assert!(
            matches!(outputs[..], [Output::Allocate { requester: Requester::User(USER), .. }]),
            "{outputs:?}"
        );
        let outputs = step(&mut sim, fail());
        assert!(
            matches!(&outputs[..], [Output::Release { .. }, refused] if is_refused(refused)),
            "{outputs:?}"
        );
    }
}
