//! Accounts for memory: which allocations there are, which regions of them are in use, and how much of the quota is left.
//!
//! No operation reads more than one allocation, except [`Ledger::allocations`]: the arena for a small object is looked
//! up in the [`Arenas`] of its place, which every change of an arena updates. So the cost is O(log n), however many other
//! allocations and objects there are.

use std::collections::BTreeMap;

use wholemem_hal::{Granule, Suballocator};

use super::arenas::Arenas;
use super::slots::Slots;
use crate::convert::to_usize;
use crate::id::AllocationId;
use crate::index::{AllocationRecord, Region};
use crate::protocol::{Refusal, Usage};

/// Regions of an arena begin at a multiple of this, and take up whole multiples of it.
const ALIGN: usize = 256;

/// The host. Other places are devices.
pub(crate) const HOST: u32 = 0;

/// The limits and sizes with which a kind of memory is allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Terms {
    /// How many bytes may be in use.
    pub(crate) quota: u64,
    /// Allocations are multiples of this.
    pub(crate) granule: u64,
    /// Allocations for one object are multiples of this where the quota allows it: large pages are so much faster to allocate
    /// and to map that it is worth the unused rest of the last one.
    pub(crate) page: u64,
    /// Anything shorter shares an arena.
    pub(crate) small: u64,
    /// How long an arena is.
    pub(crate) arena: u64,
}

/// How much of one kind of memory is in use.
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
    /// Whether it can be used: its memory is allocated, and listed in the index.
    is_ready: bool,
}

/// All memory of a store.
#[derive(Debug)]
pub(super) struct Ledger {
    host: Kind,
    device: Kind,
    devices: u32,
    entries: BTreeMap<AllocationId, Entry>,
    /// The arenas that are ready, by their place.
    arenas: BTreeMap<u32, Arenas>,
    align: Granule,
    slots: Slots,
}

impl Ledger {
    pub(super) fn new(host: Terms, device: Terms, devices: u32, slots: Slots) -> Self {
        let kind = |terms| Kind { terms, used: 0 };
        let align = Granule::new(ALIGN).expect("the alignment is a power of two");
        let (entries, arenas) = (BTreeMap::new(), BTreeMap::new());
        Self { host: kind(host), device: kind(device), devices, entries, arenas, align, slots }
    }

    pub(super) fn terms(&self, place: u32) -> Terms {
        if place == HOST { self.host.terms } else { self.device.terms }
    }

    fn kind(&mut self, place: u32) -> &mut Kind {
        if place == HOST { &mut self.host } else { &mut self.device }
    }

    /// How much host memory and how much device memory is in use.
    pub(super) fn usage(&self) -> (Usage, Usage) {
        let usage = |kind: &Kind| Usage { used: kind.used, quota: kind.terms.quota };
        (usage(&self.host), usage(&self.device))
    }

    pub(super) fn check_place(&self, place: u32) -> Result<(), Refusal> {
        if place <= self.devices { Ok(()) } else { Err(Refusal::NoSuchDevice { device: place - 1 }) }
    }

    /// Enters an allocation for `len` bytes: for one object alone, or an arena. It cannot be used before [`Ledger::ready`].
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

    /// Enters an allocation for memory that exists, at its own length.
    pub(super) fn open_exact(&mut self, place: u32, len: u64) -> Result<AllocationId, Refusal> {
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

    /// Whether an object of this length fits the quota if there is no other.
    pub(super) fn could_hold(&self, place: u32, len: u64) -> bool {
        self.least(place, len).is_some_and(|len| len <= self.terms(place).quota)
    }

    /// The refusal of an object of this length because the quota is full.
    pub(super) fn over_quota(&self, place: u32, len: u64) -> Refusal {
        let kind = if place == HOST { &self.host } else { &self.device };
        Refusal::OverQuota { wanted: len, used: kind.used, quota: kind.terms.quota }
    }

    /// How much of the quota an object of this length would need, if there is room for it besides what was promised: zero if
    /// it fits an arena that exists.
    pub(super) fn room_for(&self, place: u32, len: u64, promised: u64) -> Option<u64> {
        if len < self.terms(place).small && self.find_arena(place, len).is_some() {
            return Some(0);
        }
        let kind = if place == HOST { &self.host } else { &self.device };
        let left = kind.terms.quota.saturating_sub(kind.used).saturating_sub(promised);
        self.least(place, len).filter(|needed| *needed <= left)
    }

    /// The length of an allocation for so many bytes, if the quota has room for whole pages.
    pub(super) fn rounded(&self, place: u32, len: u64) -> Option<u64> {
        len.max(1).checked_next_multiple_of(self.terms(place).page)
    }

    /// The shortest allocation that holds so many bytes.
    fn least(&self, place: u32, len: u64) -> Option<u64> {
        len.max(1).checked_next_multiple_of(self.terms(place).granule)
    }

    /// Whether the index has a slot for another allocation.
    pub(super) fn has_slots(&self) -> bool {
        self.slots.left() > 0
    }

    /// An id for memory that is preallocated. It does not count as used.
    pub(super) fn reserve_id(&mut self) -> Option<AllocationId> {
        self.slots.take().map(|(slot, generation)| AllocationId::new(slot, generation))
    }

    /// Returns the id of preallocated memory that is released.
    pub(super) fn return_id(&mut self, id: AllocationId) {
        self.slots.give_back(id.slot(), id.generation() + 1);
    }

    /// Enters preallocated memory that a request has taken. From now on it counts as used.
    pub(super) fn enter_reserved(&mut self, id: AllocationId, place: u32, len: u64) {
        self.kind(place).used += len;
        self.enter(id, AllocationRecord { len, place, is_arena: false });
    }

    fn enter(&mut self, id: AllocationId, record: AllocationRecord) {
        let arena = record.is_arena.then(|| Suballocator::with_granule(to_usize(record.len), self.align));
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
        self.index_arena(id);
    }

    /// Brings the index of arenas up to date with an allocation. To be called after each change of an arena.
    fn index_arena(&mut self, id: AllocationId) {
        let Some(entry) = self.entries.get(&id) else { return };
        if let (Some(arena), true) = (&entry.arena, entry.is_ready) {
            let slots = self.slots.count();
            let arenas = self.arenas.entry(entry.record.place).or_insert_with(|| Arenas::new(slots));
            arenas.set(id, arena.largest_free(), entry.regions.is_empty());
        }
    }

    /// The first arena that has room for a region, by its slot.
    fn find_arena(&self, place: u32, len: u64) -> Option<AllocationId> {
        let wanted = self.align.round_up(to_usize(len.max(1)))?;
        self.arenas.get(&place)?.first_with(wanted)
    }

    /// A free region of an arena, if one has room.
    pub(super) fn carve(&mut self, place: u32, len: u64) -> Option<Region> {
        let allocation = self.find_arena(place, len)?;
        let arena = self.entries.get_mut(&allocation).and_then(|entry| entry.arena.as_mut())?;
        let offset = arena.allocate(to_usize(len.max(1)), ALIGN);
        let offset = offset.expect("an arena is found only if it has room") as u64;
        self.index_arena(allocation);
        Some(Region { allocation, offset, len: len.max(1) })
    }

    /// The region that is all of an allocation.
    pub(super) fn whole(&self, allocation: AllocationId) -> Option<Region> {
        let len = self.record(allocation)?.len;
        Some(Region { allocation, offset: 0, len })
    }

    /// One more object lies in a region. Returns `false` for a region that was found after a restart and overlaps another
    /// one, or lies outside its allocation.
    pub(super) fn hold(&mut self, region: Region, is_recovered: bool) -> bool {
        let Some(entry) = self.entries.get_mut(&region.allocation) else { return false };
        if let Some(objects) = entry.regions.get_mut(&region.offset) {
            *objects += 1;
            return true;
        }
        let fits = region.offset.checked_add(region.len).is_some_and(|end| end <= entry.record.len);
        if is_recovered
            && let Some(arena) = &mut entry.arena
            && arena.reserve_at(to_usize(region.offset), to_usize(region.len)).is_err()
        {
            return false;
        }
        if fits {
            entry.regions.insert(region.offset, 1);
        }
        self.index_arena(region.allocation);
        fits
    }

    /// One object less lies in a region. Returns the allocation if it is of no more use.
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

    /// Frees a region that was carved.
    pub(super) fn give_up(&mut self, region: Region) {
        let arena = self.entries.get_mut(&region.allocation).and_then(|entry| entry.arena.as_mut());
        if let Some(arena) = arena {
            arena.free(to_usize(region.offset)).expect("the region was carved from this arena");
        }
        self.index_arena(region.allocation);
    }

    /// Whether an allocation is of no more use: nothing is in it, and it is not the only empty arena of its place.
    pub(super) fn is_idle(&self, id: AllocationId) -> bool {
        let Some(entry) = self.entries.get(&id) else { return false };
        let empty_arenas = || self.arenas.get(&entry.record.place).map_or(0, Arenas::empty_count);
        // An arena that is empty is one of those that are counted.
        entry.is_ready && entry.regions.is_empty() && (!entry.record.is_arena || empty_arenas() > 1)
    }

    /// Removes an allocation.
    pub(super) fn close(&mut self, id: AllocationId) {
        if let Some(entry) = self.entries.remove(&id) {
            self.kind(entry.record.place).used -= entry.record.len;
            if let (true, Some(arenas)) = (entry.record.is_arena, self.arenas.get_mut(&entry.record.place)) {
                arenas.remove(id);
            }
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
    use proptest::prelude::*;

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
    fn regions_that_are_found_after_a_restart_must_lie_inside_and_apart() {
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

    /// A ledger with this many allocations of one large object each, as many full arenas behind them, and one arena with
    /// room.
    fn crowded(others: usize) -> Ledger {
        let quota = 1 << 40;
        let mut ledger = Ledger::new(Terms { quota, ..TERMS }, TERMS, 1, Slots::used_up_to(4096, 0));
        for is_arena in [false, true].into_iter().cycle().take(2 * others) {
            let id = ledger.open(HOST, 1, is_arena).unwrap();
            ledger.ready(id);
            let region = if is_arena { ledger.carve(HOST, TERMS.arena) } else { ledger.whole(id) };
            assert!(ledger.hold(region.unwrap(), false));
        }
        let id = ledger.open(HOST, 1, true).unwrap();
        ledger.ready(id);
        ledger
    }

    #[test]
    fn the_work_of_a_small_object_does_not_grow_with_other_allocations() {
        let work = [10, 1000].map(|others| {
            let mut ledger = crowded(others);
            ledger.arenas[&HOST].visited.set(0);
            let region = ledger.carve(HOST, 100).unwrap();
            assert!(ledger.hold(region, false));
            assert_eq!(ledger.room_for(HOST, 100, 0), Some(0));
            assert_eq!(ledger.let_go(region), None, "the only empty arena is kept");
            ledger.arenas[&HOST].visited.get()
        });
        // Two lookups and three updates, each of the twelve levels of a tree of 4,096 slots at most.
        assert!(work.iter().all(|levels| *levels <= 5 * 12), "{work:?}");
    }

    /// What `carve` is to return, by trying all arenas in the order of their slots.
    fn carve_naively(ledger: &Ledger, place: u32, len: u64) -> Option<Region> {
        let mut arenas: Vec<_> = ledger.entries.iter().filter(|(_, entry)| entry.is_ready).collect();
        arenas.retain(|(_, entry)| entry.record.place == place);
        arenas.sort_by_key(|(id, _)| id.slot());
        arenas.into_iter().find_map(|(id, entry)| {
            let offset = entry.arena.clone()?.allocate(usize::try_from(len.max(1)).unwrap(), ALIGN).ok()?;
            Some(Region { allocation: *id, offset: offset as u64, len: len.max(1) })
        })
    }

    /// What `is_idle` is to return, by looking at all allocations.
    fn is_idle_naively(ledger: &Ledger, id: AllocationId) -> bool {
        let entry = &ledger.entries[&id];
        let is_empty = |entry: &Entry| entry.is_ready && entry.regions.is_empty();
        let is_spare = |(other, spare): (&AllocationId, &Entry)| {
            let is_arena_here = spare.record.is_arena && spare.record.place == entry.record.place;
            *other != id && is_arena_here && is_empty(spare)
        };
        is_empty(entry) && (!entry.record.is_arena || ledger.entries.iter().any(is_spare))
    }

    #[derive(Debug, Clone)]
    enum Step {
        Open { place: u32, is_arena: bool },
        Ready(prop::sample::Index),
        Carve { place: u32, len: u64, is_held: bool },
        LetGo(prop::sample::Index),
        Recover { place: u32, is_arena: bool, offset: u64, len: u64 },
    }

    fn step() -> impl Strategy<Value = Step> {
        let place = || HOST..=1;
        prop_oneof![
            2 => (place(), any::<bool>()).prop_map(|(place, is_arena)| Step::Open { place, is_arena }),
            2 => any::<prop::sample::Index>().prop_map(Step::Ready),
            8 => (place(), 0..(33_u64 << 10), any::<bool>())
                .prop_map(|(place, len, is_held)| Step::Carve { place, len, is_held }),
            6 => any::<prop::sample::Index>().prop_map(Step::LetGo),
            1 => (place(), any::<bool>(), 0..(40_u64 << 10), 1..(20_u64 << 10))
                .prop_map(|(place, is_arena, offset, len)| Step::Recover { place, is_arena, offset, len }),
        ]
    }

    proptest! {
        #[test]
        fn arenas_are_found_and_closed_as_by_a_walk_over_all_allocations(
            steps in prop::collection::vec(step(), 0..120)
        ) {
            let quota = 1 << 40;
            let terms = Terms { quota, ..TERMS };
            let mut ledger = Ledger::new(terms, terms, 1, Slots::used_up_to(8, 0));
            let mut held = Vec::new();
            for step in steps {
                match step {
                    Step::Open { place, is_arena } => drop(ledger.open(place, 1, is_arena)),
                    Step::Ready(index) if !ledger.entries.is_empty() => {
                        let ids: Vec<_> = ledger.allocations().collect();
                        ledger.ready(*index.get(&ids));
                    }
                    Step::Carve { place, len, is_held } => {
                        let expected = carve_naively(&ledger, place, len);
                        prop_assert_eq!(ledger.find_arena(place, len), expected.map(|region| region.allocation));
                        let carved = ledger.carve(place, len);
                        prop_assert_eq!(carved, expected);
                        match carved {
                            Some(region) if is_held => {
                                prop_assert!(ledger.hold(region, false));
                                held.push(region);
                            }
                            Some(region) => ledger.give_up(region),
                            None => {}
                        }
                    }
                    Step::LetGo(index) if !held.is_empty() => {
                        if let Some(idle) = ledger.let_go(held.swap_remove(index.index(held.len()))) {
                            ledger.close(idle);
                        }
                    }
                    Step::Recover { place, is_arena, offset, len } => {
                        let Some(id) = ledger.reserve_id() else { continue };
                        ledger.recover(id, AllocationRecord { len: 32 << 10, place, is_arena });
                        let region = Region { allocation: id, offset: offset / 256 * 256, len };
                        if ledger.hold(region, true) {
                            held.push(region);
                        }
                    }
                    Step::Ready(_) | Step::LetGo(_) => {}
                }
                for id in ledger.allocations() {
                    prop_assert_eq!(ledger.is_idle(id), is_idle_naively(&ledger, id), "{}", id);
                }
            }
        }
    }
}
