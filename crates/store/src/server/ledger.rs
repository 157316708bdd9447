//! The books of memory: which allocations there are, which regions of them are taken, and what may still be.

use std::collections::BTreeMap;

use wholemem_hal::Suballocator;

use super::slots::Slots;
use crate::id::AllocationId;
use crate::index::{AllocationRecord, Region};
use crate::protocol::{Refusal, Usage};

/// Regions of an arena begin at a multiple of this.
const ALIGN: usize = 256;

/// The host. Other places are devices.
pub(super) const HOST: u32 = 0;

/// How a kind of memory is handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Terms {
    /// What may be taken, in bytes.
    pub(crate) quota: u64,
    /// Allocations are multiples of this.
    pub(crate) granule: u64,
    /// Allocations for one object are multiples of this where the quota allows it: large pages are so much faster to make
    /// and to map that the rest of the last one is a small price.
    pub(crate) page: u64,
    /// Anything shorter shares an arena.
    pub(crate) small: u64,
    /// How long an arena is.
    pub(crate) arena: u64,
}

/// What is taken of one kind of memory.
#[derive(Debug)]
struct Kind {
    terms: Terms,
    used: u64,
}

#[derive(Debug)]
struct Entry {
    record: AllocationRecord,
    /// How many objects each region has, by its offset.
    regions: BTreeMap<u64, usize>,
    /// Which parts of an arena are free.
    arena: Option<Suballocator>,
    /// Whether it can be used yet: its memory is there, and written down.
    is_ready: bool,
}

/// All memory of a store.
#[derive(Debug)]
pub(super) struct Ledger {
    host: Kind,
    device: Kind,
    devices: u32,
    entries: BTreeMap<AllocationId, Entry>,
    slots: Slots,
}

impl Ledger {
    pub(super) fn new(host: Terms, device: Terms, devices: u32, slots: Slots) -> Self {
        let kind = |terms| Kind { terms, used: 0 };
        Self { host: kind(host), device: kind(device), devices, entries: BTreeMap::new(), slots }
    }

    pub(super) fn terms(&self, place: u32) -> Terms {
        if place == HOST { self.host.terms } else { self.device.terms }
    }

    fn kind(&mut self, place: u32) -> &mut Kind {
        if place == HOST { &mut self.host } else { &mut self.device }
    }

    /// What is taken of the host's memory, and of the devices'.
    pub(super) fn usage(&self) -> (Usage, Usage) {
        let usage = |kind: &Kind| Usage { used: kind.used, quota: kind.terms.quota };
        (usage(&self.host), usage(&self.device))
    }

    pub(super) fn check_place(&self, place: u32) -> Result<(), Refusal> {
        if place <= self.devices { Ok(()) } else { Err(Refusal::NoSuchDevice { device: place - 1 }) }
    }

    /// Takes memory for `len` bytes out of the quota: an allocation that will hold them alone, or an arena. It is not
    /// ready before [`Ledger::ready`].
    pub(super) fn open(&mut self, place: u32, len: u64, is_arena: bool) -> Result<AllocationId, Refusal> {
        let kind = self.kind(place);
        let Terms { quota, granule, page, arena, .. } = kind.terms;
        let used = kind.used;
        let refused = Refusal::OverQuota { wanted: len, used, quota };
        let left = quota.saturating_sub(used);
        let rounded = |step: u64| len.max(1).checked_next_multiple_of(step).filter(|len| *len <= left);
        let Some(least) = rounded(granule) else { return Err(refused) };
        // The last arena is what the quota leaves, and so are the last pages.
        let len = match is_arena {
            true => least.max(arena.min(left / granule * granule)),
            false => rounded(page).unwrap_or(least),
        };
        self.take(AllocationRecord { len, place, is_arena })
    }

    /// Takes memory that is there out of the quota: an allocation of its own, as long as it is.
    pub(super) fn open_as_it_is(&mut self, place: u32, len: u64) -> Result<AllocationId, Refusal> {
        let kind = self.kind(place);
        if len == 0 || !len.is_multiple_of(kind.terms.granule) {
            return Err(Refusal::malformed("memory is whole granules, and not empty"));
        }
        if len > kind.terms.quota.saturating_sub(kind.used) {
            return Err(self.over_quota(place, len));
        }
        self.take(AllocationRecord { len, place, is_arena: false })
    }

    fn take(&mut self, record: AllocationRecord) -> Result<AllocationId, Refusal> {
        let full = Refusal::IndexFull { slots: self.slots.count() };
        let (slot, generation) = self.slots.take().ok_or(full)?;
        self.kind(record.place).used += record.len;
        let id = AllocationId::new(slot, generation);
        self.enter(id, record);
        Ok(id)
    }

    /// Whether an object of this length could be held if nothing else were.
    pub(super) fn could_hold(&self, place: u32, len: u64) -> bool {
        self.least(place, len).is_some_and(|len| len <= self.terms(place).quota)
    }

    /// That there is no room for an object of this length.
    pub(super) fn over_quota(&self, place: u32, len: u64) -> Refusal {
        let kind = if place == HOST { &self.host } else { &self.device };
        Refusal::OverQuota { wanted: len, used: kind.used, quota: kind.terms.quota }
    }

    /// How much of the quota an object of this length would need, if there is room for it besides what was promised: nothing
    /// where it fits an arena that is there.
    pub(super) fn room_for(&mut self, place: u32, len: u64, promised: u64) -> Option<u64> {
        if len < self.terms(place).small
            && let Some(region) = self.carve(place, len)
        {
            self.give_up(region);
            return Some(0);
        }
        let kind = self.kind(place);
        let left = kind.terms.quota.saturating_sub(kind.used).saturating_sub(promised);
        self.least(place, len).filter(|needed| *needed <= left)
    }

    /// How long an allocation is that holds so many bytes alone, where there is room.
    pub(super) fn rounded(&self, place: u32, len: u64) -> Option<u64> {
        len.max(1).checked_next_multiple_of(self.terms(place).page)
    }

    /// The least that holds so many bytes.
    fn least(&self, place: u32, len: u64) -> Option<u64> {
        len.max(1).checked_next_multiple_of(self.terms(place).granule)
    }

    /// Whether the index has room for more memory.
    pub(super) fn has_slots(&self) -> bool {
        self.slots.left() > 0
    }

    /// An id for memory that is made before anybody wants it.
    pub(super) fn number(&mut self) -> Option<AllocationId> {
        self.slots.take().map(|(slot, generation)| AllocationId::new(slot, generation))
    }

    /// Memory that was made before anybody wanted it is let go.
    pub(super) fn return_number(&mut self, id: AllocationId) {
        self.slots.give_back(id.slot(), id.generation() + 1);
    }

    /// Memory that was made before anybody wanted it is wanted now, and taken out of the quota.
    pub(super) fn enter_ahead(&mut self, id: AllocationId, place: u32, len: u64) {
        self.kind(place).used += len;
        self.enter(id, AllocationRecord { len, place, is_arena: false });
    }

    fn enter(&mut self, id: AllocationId, record: AllocationRecord) {
        let whole = usize::try_from(record.len).unwrap_or(0);
        let arena = record.is_arena.then(|| Suballocator::new(whole));
        self.entries.insert(id, Entry { record, regions: BTreeMap::new(), arena, is_ready: false });
    }

    /// An allocation found in the index after a restart.
    pub(super) fn recover(&mut self, id: AllocationId, record: AllocationRecord) {
        self.kind(record.place).used += record.len;
        self.enter(id, record);
        self.ready(id);
    }

    /// A slot found free in the index after a restart.
    pub(super) fn recover_slot(&mut self, slot: usize, generation: u64) {
        self.slots.give_back(slot, generation);
    }

    pub(super) fn record(&self, id: AllocationId) -> Option<AllocationRecord> {
        self.entries.get(&id).map(|entry| entry.record)
    }

    pub(super) fn ready(&mut self, id: AllocationId) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.is_ready = true;
        }
    }

    /// A free region of an arena, if one has room.
    pub(super) fn carve(&mut self, place: u32, len: u64) -> Option<Region> {
        let wanted = usize::try_from(len.max(1)).ok()?;
        let ready =
            self.entries.iter_mut().filter(|(_, entry)| entry.is_ready && entry.record.place == place);
        let (allocation, offset) = ready
            .filter_map(|(id, entry)| {
                let offset = entry.arena.as_mut()?.allocate(wanted, ALIGN).ok()?;
                Some((*id, offset as u64))
            })
            .next()?;
        Some(Region { allocation, offset, len: len.max(1) })
    }

    /// All of an allocation, as the one region it has.
    pub(super) fn whole(&self, allocation: AllocationId) -> Option<Region> {
        let len = self.record(allocation)?.len;
        Some(Region { allocation, offset: 0, len })
    }

    /// One more object lies in a region. For one that was found after a restart, `false` if it cannot be: it overlaps
    /// another, or lies outside.
    pub(super) fn hold(&mut self, region: Region, is_recovered: bool) -> bool {
        let Some(entry) = self.entries.get_mut(&region.allocation) else { return false };
        if let Some(objects) = entry.regions.get_mut(&region.offset) {
            *objects += 1;
            return true;
        }
        let fits = region.offset.checked_add(region.len).is_some_and(|end| end <= entry.record.len);
        if is_recovered && let Some(arena) = &mut entry.arena {
            let range = usize::try_from(region.offset).ok().zip(usize::try_from(region.len).ok());
            if range.is_none_or(|(offset, len)| arena.reserve_at(offset, len).is_err()) {
                return false;
            }
        }
        if fits {
            entry.regions.insert(region.offset, 1);
        }
        fits
    }

    /// One object less lies in a region. The allocation, if it is of no more use.
    pub(super) fn let_go(&mut self, region: Region) -> Option<AllocationId> {
        let entry = self.entries.get_mut(&region.allocation)?;
        let objects = entry.regions.get_mut(&region.offset)?;
        *objects -= 1;
        if *objects > 0 {
            return None;
        }
        entry.regions.remove(&region.offset);
        self.give_up(region);
        self.is_idle(region.allocation).then_some(region.allocation)
    }

    /// A region that was carved is not used after all.
    pub(super) fn give_up(&mut self, region: Region) {
        let arena = self.entries.get_mut(&region.allocation).and_then(|entry| entry.arena.as_mut());
        if let (Some(arena), Ok(offset)) = (arena, usize::try_from(region.offset)) {
            // It was handed out, so it can be taken back.
            let _ = arena.free(offset);
        }
    }

    /// Whether an allocation is of no more use: nothing is in it, and it is not the only empty arena of its place.
    pub(super) fn is_idle(&self, id: AllocationId) -> bool {
        let Some(entry) = self.entries.get(&id) else { return false };
        let is_empty = |entry: &Entry| entry.is_ready && entry.regions.is_empty();
        let is_spare = |(other, spare): (&AllocationId, &Entry)| {
            *other != id
                && spare.record.is_arena
                && spare.record.place == entry.record.place
                && is_empty(spare)
        };
        is_empty(entry) && (!entry.record.is_arena || self.entries.iter().any(is_spare))
    }

    /// An allocation is no more.
    pub(super) fn close(&mut self, id: AllocationId) {
        if let Some(entry) = self.entries.remove(&id) {
            self.kind(entry.record.place).used -= entry.record.len;
            self.slots.give_back(id.slot(), id.generation() + 1);
        }
    }

    /// All allocations, ready or not.
    pub(super) fn allocations(&self) -> impl Iterator<Item = AllocationId> {
        self.entries.keys().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERMS: Terms =
        Terms { quota: 100 << 10, granule: 4 << 10, page: 4 << 10, small: 8 << 10, arena: 32 << 10 };

    fn ledger() -> Ledger {
        Ledger::new(TERMS, TERMS, 1, Slots::used_up_to(8, 0))
    }

    #[test]
    fn memory_is_taken_in_granules_until_the_quota_is_full() {
        let mut ledger = ledger();
        let first = ledger.open(HOST, 90_000, false).unwrap();
        assert_eq!(ledger.usage().0.used, 88 << 10);
        let refused = ledger.open(HOST, 13 << 10, false).unwrap_err();
        assert_eq!(refused, Refusal::OverQuota { wanted: 13 << 10, used: 88 << 10, quota: 100 << 10 });
        ledger.open(1, 90_000, false).expect("a device has a quota of its own");
        assert_eq!(ledger.check_place(2), Err(Refusal::NoSuchDevice { device: 1 }));
        ledger.close(first);
        assert_eq!(ledger.usage().0.used, 0);
        let again = ledger.open(HOST, u64::MAX, false).unwrap_err();
        assert_eq!(again, Refusal::OverQuota { wanted: u64::MAX, used: 0, quota: 100 << 10 });
    }

    #[test]
    fn an_index_without_room_for_memory_is_not_taken_for_a_full_quota() {
        let mut ledger = Ledger::new(TERMS, TERMS, 0, Slots::used_up_to(2, 0));
        let mut open = || ledger.open(HOST, 1, false).map(drop);
        assert_eq!([open(), open()], [Ok(()), Ok(())]);
        assert_eq!(
            open(),
            Err(Refusal::IndexFull { slots: 2 }),
            "waiting for room would be told that there is some"
        );
        assert_eq!(ledger.usage().0.used, 8 << 10);
    }

    #[test]
    fn memory_of_one_object_is_whole_pages_until_the_quota_has_no_room_for_them() {
        let mut ledger = Ledger::new(Terms { page: 32 << 10, ..TERMS }, TERMS, 0, Slots::used_up_to(8, 0));
        let mut open = |len| ledger.open(HOST, len, false).map(|id| ledger.record(id).unwrap().len);
        assert_eq!([open(9 << 10), open(40 << 10)], [Ok(32 << 10), Ok(64 << 10)]);
        assert_eq!(open(4 << 10), Ok(4 << 10), "all that is left");
        assert!(open(1).is_err());
    }

    #[test]
    fn the_last_arena_is_what_the_quota_leaves() {
        let mut ledger = ledger();
        let lens = (0..4).map(|_| ledger.open(HOST, 5000, true).map(|id| ledger.record(id).unwrap().len));
        let lens: Vec<_> = lens.collect();
        assert_eq!(lens[..3], [Ok(32 << 10), Ok(32 << 10), Ok(32 << 10)]);
        assert!(lens[3].is_err(), "4 KiB are left, and 8 are needed");
        assert_eq!(ledger.open(HOST, 4000, true).map(|id| ledger.record(id).unwrap().len), Ok(4 << 10));
    }

    #[test]
    fn a_region_is_free_again_when_its_last_object_has_gone() {
        let mut ledger = ledger();
        let arena = ledger.open(HOST, 1, true).unwrap();
        assert_eq!(ledger.carve(HOST, 100), None, "it is not there yet");
        ledger.ready(arena);
        let region = ledger.carve(HOST, 100).unwrap();
        assert!(ledger.hold(region, false) && ledger.hold(region, false));
        assert_eq!((ledger.let_go(region), ledger.let_go(region)), (None, None));
        assert_eq!(ledger.carve(HOST, 100), Some(region));
        ledger.give_up(region);
        // One empty arena is kept, and no second.
        let second = ledger.open(HOST, 1, true).unwrap();
        ledger.ready(second);
        assert!(ledger.is_idle(arena));
        ledger.close(second);
        assert!(!ledger.is_idle(arena));
    }

    #[test]
    fn an_allocation_of_its_own_goes_with_its_last_object() {
        let mut ledger = ledger();
        let id = ledger.open(HOST, 9000, false).unwrap();
        ledger.ready(id);
        let whole = ledger.whole(id).unwrap();
        assert_eq!(whole.len, 12 << 10);
        assert!(ledger.hold(whole, false));
        assert_eq!(ledger.let_go(whole), Some(id));
    }

    #[test]
    fn what_is_found_after_a_restart_must_lie_inside_and_apart() {
        let mut ledger = ledger();
        let id = AllocationId::new(0, 0);
        ledger.recover(id, AllocationRecord { len: 32 << 10, place: HOST, is_arena: true });
        let region = |offset, len| Region { allocation: id, offset, len };
        assert!(ledger.hold(region(0, 300), true));
        assert!(ledger.hold(region(0, 300), true), "another object of the same region");
        assert!(!ledger.hold(region(256, 300), true));
        assert!(!ledger.hold(region(32 << 10, 1), true));
        assert!(!ledger.hold(Region { allocation: AllocationId::new(1, 0), ..region(0, 1) }, true));
        assert_eq!(ledger.carve(HOST, 300).unwrap().offset, 512);
        assert_eq!(ledger.usage().0.used, 32 << 10);
    }
}
