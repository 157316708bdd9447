//! The memory of a store: the ledger of allocations, and preallocated memory.
//!
//! An allocation is added to the index when its memory is ready, and removed from it before its memory is released. So the index
//! never lists memory that the keeper does not hold.

use std::time::Duration;

use super::interface::{Output, Requester, ServerSettings};
use super::ledger::{HOST, Ledger};
use super::outputs::Outputs;
use super::prealloc::Prealloc;
use super::slots::Slots;
use crate::cells::Cells;
use crate::id::{AllocationId, SlotState};
use crate::index::{AllocationRecord, ObjectIndex, Region};
use crate::protocol::Refusal;

/// The memory of a store: the ledger of its allocations, and preallocated memory.
#[derive(Debug)]
pub(super) struct MemoryPool {
    ledger: Ledger,
    prealloc: Prealloc,
}

impl MemoryPool {
    /// Creates the memory pool of an index. The allocations of an existing index are added by [`Self::recover`].
    pub(super) fn new<C: Cells>(settings: &ServerSettings, index: &ObjectIndex<C>) -> Self {
        let slots = Slots::used_up_to(index.geometry().allocations, used_slots(index));
        let devices = u32::try_from(settings.devices.len()).expect("a machine has fewer than 2^32 devices");
        let ledger = Ledger::new(settings.host, settings.device, devices, slots);
        Self { ledger, prealloc: Prealloc::new(settings.prealloc_limit) }
    }

    /// Returns the ledger of allocations, for queries.
    pub(super) fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Returns the length of the memory that is preallocated or being preallocated.
    pub(super) fn prealloc_bytes(&self) -> u64 {
        self.prealloc.held()
    }

    /// Returns the time at which preallocated memory has to be allocated or released next.
    pub(super) fn wake_at(&self) -> Option<Duration> {
        self.prealloc.wake_at()
    }

    /// Starts to allocate memory for `len` bytes, either for one object or as an arena.
    pub(super) fn allocate(
        &mut self,
        place: u32,
        len: u64,
        is_arena: bool,
        requester: Requester,
        outputs: &mut Outputs,
    ) -> Result<AllocationId, Refusal> {
        self.free_slots(outputs);
        let allocation = self.ledger.open(place, len, is_arena)?;
        self.allocate_again(allocation, requester, outputs);
        Ok(allocation)
    }

    /// Starts a second attempt to allocate memory, after the first has failed.
    pub(super) fn allocate_again(
        &self,
        allocation: AllocationId,
        requester: Requester,
        outputs: &mut Outputs,
    ) {
        if let Some(AllocationRecord { len, place, .. }) = self.ledger.record(allocation) {
            outputs.push(Output::Allocate { allocation, len, place, requester });
        }
    }

    /// Starts to import the whole length of memory that was sent with a request.
    pub(super) fn import(
        &mut self,
        place: u32,
        len: u64,
        requester: Requester,
        outputs: &mut Outputs,
    ) -> Result<AllocationId, Refusal> {
        self.free_slots(outputs);
        let allocation = self.ledger.open_exact(place, len)?;
        outputs.push(Output::Import { allocation, len, place, requester });
        Ok(allocation)
    }

    /// Releases preallocated memory and its index slots, if the index has no slot left for another allocation.
    fn free_slots(&mut self, outputs: &mut Outputs) {
        if !self.ledger.has_slots() {
            self.prealloc.release_slots(&mut self.ledger, outputs);
        }
    }

    /// Takes preallocated memory for an object of this length. Returns the allocation, and whether the memory is ready. From now
    /// on, the memory counts as used.
    pub(super) fn take_preallocated(
        &mut self,
        place: u32,
        len: u64,
        now: Duration,
    ) -> Option<(AllocationId, bool)> {
        if place != HOST {
            return None;
        }
        let len = self.ledger.rounded(place, len)?;
        let (id, is_ready) = self.prealloc.take(len, now)?;
        self.ledger.enter_reserved(id, place, len);
        Some((id, is_ready))
    }

    /// Records that preallocated memory is ready or has failed. Returns false if the allocation belongs to a request instead.
    pub(super) fn preallocated(
        &mut self,
        id: AllocationId,
        is_ready: bool,
        now: Duration,
        outputs: &mut Outputs,
    ) -> bool {
        self.prealloc.allocated(id, is_ready, &mut self.ledger, now, outputs)
    }

    /// Returns true if a failed allocation of host memory should be tried again: either it failed as a preallocation, which may
    /// use less memory than a request, or preallocated memory is returned to the kernel now.
    pub(super) fn may_retry(&mut self, allocation: AllocationId, outputs: &mut Outputs) -> bool {
        self.prealloc.end_early_take(allocation) || self.prealloc.reclaim(&mut self.ledger, outputs)
    }

    /// Adds an allocation whose memory is ready to the index, so that objects may be placed in the memory.
    pub(super) fn ready<C: Cells>(&mut self, allocation: AllocationId, index: &ObjectIndex<C>) {
        self.prealloc.end_early_take(allocation);
        if let Some(record) = self.ledger.record(allocation) {
            index.add_allocation(allocation, &record);
            self.ledger.ready(allocation);
        }
    }

    /// Removes and releases an allocation whose memory could not be allocated.
    pub(super) fn failed(&mut self, allocation: AllocationId, outputs: &mut Outputs) {
        self.prealloc.end_early_take(allocation);
        self.ledger.close(allocation);
        outputs.push(Output::Release { allocation });
    }

    /// Releases an allocation that contains no object, unless it is the only empty arena of its place (the host or a device).
    pub(super) fn release_if_idle<C: Cells>(
        &mut self,
        allocation: AllocationId,
        index: &ObjectIndex<C>,
        outputs: &mut Outputs,
    ) {
        if self.ledger.is_idle(allocation) {
            self.release(allocation, index, outputs);
        }
    }

    fn release<C: Cells>(&mut self, allocation: AllocationId, index: &ObjectIndex<C>, outputs: &mut Outputs) {
        index.remove_allocation(allocation);
        self.ledger.close(allocation);
        outputs.push(Output::Release { allocation });
    }

    /// Allocates a region of `len` bytes in an arena; returns `None` if no arena has space.
    pub(super) fn carve(&mut self, place: u32, len: u64) -> Option<Region> {
        self.ledger.carve(place, len)
    }

    /// Frees a region of an arena that was allocated but is not used.
    pub(super) fn free_region(&mut self, region: Region) {
        self.ledger.free_region(region);
    }

    /// Adds a number of objects to a memory region.
    pub(super) fn add_objects(&mut self, region: Region, objects: usize) {
        for _ in 0..objects {
            self.ledger.add_object(region, false);
        }
    }

    /// Removes an object from a memory region. If the region's allocation is not needed any more, releases it, and schedules the
    /// preallocation of memory of the same length.
    pub(super) fn remove_object<C: Cells>(
        &mut self,
        region: Region,
        index: &ObjectIndex<C>,
        now: Duration,
        outputs: &mut Outputs,
    ) {
        let Some(allocation) = self.ledger.remove_object(region) else { return };
        let freed = self.ledger.record(allocation).filter(|record| !record.is_arena);
        self.release(allocation, index, outputs);
        if let Some(freed) = freed.filter(|freed| freed.place == HOST) {
            self.prealloc.expect_replacement(freed.len, now);
        }
    }

    /// Schedules the preallocation of memory, after an object with its own allocation of the same length was sealed.
    pub(super) fn expect_next(&mut self, allocation: AllocationId, now: Duration) {
        if let Some(record) = self.ledger.record(allocation).filter(|record| record.place == HOST) {
            self.prealloc.expect_next(record.len, now);
        }
    }

    /// Starts preallocations that are due, and releases preallocated memory that is not needed any more.
    pub(super) fn update(&mut self, now: Duration, outputs: &mut Outputs) {
        self.prealloc.update(&mut self.ledger, now, outputs);
    }

    /// Restores the ledger (the accounting of allocated memory) from the index after a restart of the server. Allocations
    /// whose memory no longer exists are removed from the index.
    pub(super) fn recover<C: Cells>(
        &mut self,
        index: &ObjectIndex<C>,
        exists: impl Fn(AllocationId) -> bool,
    ) {
        for (id, record) in index.allocations().collect::<Vec<_>>() {
            if exists(id) {
                self.ledger.recover(id, record);
            } else {
                tracing::error!(%id, len = record.len, "memory that the index lists is lost");
                index.remove_allocation(id);
            }
        }
        for slot in 0..used_slots(index) {
            let word = index.allocation_word(slot);
            if word.state == SlotState::Free {
                self.ledger.recover_slot(slot, word.generation);
            }
        }
    }

    /// Adds an object that the index lists to its memory region. Returns false if the region overlaps another region or exceeds
    /// its allocation.
    pub(super) fn recover_region(&mut self, region: Region) -> bool {
        self.ledger.add_object(region, true)
    }

    #[cfg(test)]
    pub(super) fn prealloc(&mut self) -> &mut Prealloc {
        &mut self.prealloc
    }

    #[cfg(test)]
    pub(super) fn preallocated_ids(&self) -> impl Iterator<Item = AllocationId> {
        self.prealloc.ids()
    }
}

/// Returns the number of allocation slots that an index has ever used. The slots from this number on are unused.
fn used_slots<C: Cells>(index: &ObjectIndex<C>) -> usize {
    let used = |slot: &usize| index.allocation_word(*slot).encode() != 0;
    (0..index.geometry().allocations).rfind(used).map_or(0, |last| last + 1)
}

#[cfg(test)]
mod tests {
    use super::super::simulation::{GEOMETRY, POLICY, settings};
    use super::*;
    use crate::cells::recorded::RecordedCells;

    const NOW: Duration = Duration::from_secs(1);
    const LATER: Duration = Duration::from_secs(2);
    const USER: Requester = Requester::User(7);
    const LEN: u64 = POLICY.small;

    fn pool() -> (MemoryPool, ObjectIndex<RecordedCells>, Outputs) {
        let index = ObjectIndex::format(RecordedCells::new(GEOMETRY.cells()), GEOMETRY);
        (MemoryPool::new(&settings(POLICY.quota), &index), index, Outputs::default())
    }

    /// Allocates memory for one object, adds the object, and returns its memory region.
    fn filled(pool: &mut MemoryPool, index: &ObjectIndex<RecordedCells>, outputs: &mut Outputs) -> Region {
        let id = pool.allocate(HOST, LEN, false, USER, outputs).unwrap();
        pool.ready(id, index);
        let region = pool.ledger().whole(id).unwrap();
        pool.add_objects(region, 1);
        outputs.take();
        region
    }

    #[test]
    fn the_index_lists_memory_from_ready_until_its_last_object_is_freed() {
        let (mut pool, index, mut outputs) = pool();
        let id = pool.allocate(HOST, LEN, false, USER, &mut outputs).unwrap();
        let expected = Output::Allocate { allocation: id, len: LEN, place: HOST, requester: USER };
        assert_eq!((outputs.take(), index.allocation(id)), (vec![expected], None));
        pool.ready(id, &index);
        assert_eq!(index.allocation(id).unwrap().len, LEN);
        let region = pool.ledger().whole(id).unwrap();
        pool.add_objects(region, 2);
        pool.remove_object(region, &index, NOW, &mut outputs);
        assert_eq!(outputs.take(), []);
        pool.remove_object(region, &index, NOW, &mut outputs);
        assert_eq!(outputs.take(), [Output::Release { allocation: id }]);
        assert_eq!((index.allocation(id), pool.ledger().usage().0.used), (None, 0));
    }

    #[test]
    fn freed_memory_is_preallocated_again_for_the_next_object() {
        let (mut pool, index, mut outputs) = pool();
        let region = filled(&mut pool, &index, &mut outputs);
        pool.remove_object(region, &index, NOW, &mut outputs);
        outputs.take();
        pool.update(LATER, &mut outputs);
        let [Output::Allocate { allocation, requester: Requester::Server, .. }] = outputs.take()[..] else {
            panic!("one block of the same length")
        };
        assert!(pool.preallocated(allocation, true, LATER, &mut outputs));
        assert_eq!(pool.ledger().usage().0.used, 0, "preallocated memory is not in use");
        assert_eq!(pool.take_preallocated(1, LEN, LATER), None, "device memory is not preallocated");
        assert_eq!(pool.take_preallocated(HOST, LEN, LATER), Some((allocation, true)));
        assert_eq!(pool.ledger().usage().0.used, LEN);
        assert!(
            !pool.preallocated(allocation, true, LATER, &mut outputs),
            "the memory belongs to a request now"
        );
    }

    #[test]
    fn a_failed_allocation_is_retried_only_if_memory_was_preallocated() {
        let (mut pool, index, mut outputs) = pool();
        let region = filled(&mut pool, &index, &mut outputs);
        let id = pool.allocate(HOST, LEN, false, USER, &mut outputs).unwrap();
        assert!(!pool.may_retry(id, &mut outputs));
        pool.expect_next(region.allocation, NOW);
        pool.update(LATER, &mut outputs);
        outputs.take();
        let blocks: Vec<_> = pool.preallocated_ids().collect();
        for block in &blocks {
            assert!(pool.preallocated(*block, true, LATER, &mut outputs));
        }
        assert!(pool.may_retry(id, &mut outputs));
        let reclaimed: Vec<_> = blocks.iter().map(|id| Output::Reclaim { allocation: *id }).collect();
        assert_eq!((outputs.take(), blocks.len()), (reclaimed, 2));
        pool.failed(id, &mut outputs);
        assert_eq!(outputs.take(), [Output::Release { allocation: id }]);
        assert_eq!(pool.ledger().usage().0.used, LEN, "the existing object");
    }

    #[test]
    fn allocations_whose_memory_is_lost_are_removed_from_the_index() {
        let (mut pool, index, mut outputs) = pool();
        let [retained, lost] = [(); 2].map(|()| filled(&mut pool, &index, &mut outputs));
        let mut recovered = MemoryPool::new(&settings(0), &index);
        recovered.recover(&index, |id| id == retained.allocation);
        assert_eq!(recovered.ledger().allocations().collect::<Vec<_>>(), [retained.allocation]);
        assert_eq!((index.allocation(lost.allocation), recovered.ledger().usage().0.used), (None, LEN));
        assert!(recovered.recover_region(retained) && !recovered.recover_region(lost));
    }
}
