//! Accounts for the memory of a store: the allocations, the regions of them that are in use, and the usage of the quota.
//!
//! No operation except [`Ledger::allocations`] reads more than one allocation: the arena for a small object is looked up in the
//! [`Arenas`] of its place, which are updated with every change. So the cost is O(log n), independent of other allocations and
//! objects.

use std::collections::BTreeMap;

use wholemem_hal::{Granule, Suballocator};

use super::arenas::Arenas;
use super::slots::Slots;
use crate::convert::to_usize;
use crate::id::AllocationId;
use crate::index::{AllocationRecord, Region};
use crate::protocol::{Refusal, Usage};

/// The alignment in bytes of memory regions in an arena. The lengths of regions are multiples of it.
const ALIGN: usize = 256;

/// The place number of host memory. All other places are devices.
pub(crate) const HOST: u32 = 0;

/// The quota and the sizes of allocations for one kind of memory (host or device).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AllocationPolicy {
    /// The quota: the maximum number of bytes of this kind of memory that may be in use.
    pub(crate) quota: u64,
    /// The granule in bytes. The lengths of all allocations are multiples of the granule.
    pub(crate) granule: u64,
    /// The page length in bytes. The length of an allocation for one object is a multiple of the page length if the quota allows
    /// it: large pages are allocated and mapped much faster, which is worth the unused rest of the last page.
    pub(crate) page: u64,
    /// The length in bytes below which objects share an arena.
    pub(crate) small: u64,
    /// The length in bytes of an arena, which is memory that small objects share.
    pub(crate) arena: u64,
}

/// The policy and the usage of one kind of memory (host or device).
#[derive(Debug)]
struct KindUsage {
    policy: AllocationPolicy,
    used: u64,
}

#[derive(Debug)]
struct AllocationEntry {
    record: AllocationRecord,
    /// The number of objects in each memory region of the allocation, by the region's offset.
    regions: BTreeMap<u64, usize>,
    /// The free ranges of the allocation, if it is an arena.
    arena: Option<Suballocator>,
    /// True if the memory is allocated and listed in the index.
    is_ready: bool,
}

/// The account of all memory of a store: allocations, regions and quotas.
#[derive(Debug)]
pub(super) struct Ledger {
    host: KindUsage,
    device: KindUsage,
    devices: u32,
    entries: BTreeMap<AllocationId, AllocationEntry>,
    /// The arenas whose memory is ready, by place (the host or a device).
    arenas: BTreeMap<u32, Arenas>,
    /// The length of all arenas.
    arena_bytes: u64,
    align: Granule,
    slots: Slots,
}

impl Ledger {
    pub(super) fn new(host: AllocationPolicy, device: AllocationPolicy, devices: u32, slots: Slots) -> Self {
        let kind = |policy| KindUsage { policy, used: 0 };
        let align = Granule::new(ALIGN).expect("the alignment is a power of two");
        let (entries, arenas) = (BTreeMap::new(), BTreeMap::new());
        Self {
            host: kind(host),
            device: kind(device),
            devices,
            entries,
            arenas,
            arena_bytes: 0,
            align,
            slots,
        }
    }

    pub(super) fn policy(&self, place: u32) -> AllocationPolicy {
        if place == HOST { self.host.policy } else { self.device.policy }
    }

    fn kind(&mut self, place: u32) -> &mut KindUsage {
        if place == HOST { &mut self.host } else { &mut self.device }
    }

    /// Returns the usage and the quota of host memory and of device memory.
    pub(super) fn usage(&self) -> (Usage, Usage) {
        let usage = |kind: &KindUsage| Usage { used: kind.used, quota: kind.policy.quota };
        (usage(&self.host), usage(&self.device))
    }

    /// Returns the number of allocations.
    pub(super) fn count(&self) -> usize {
        self.entries.len()
    }

    /// Returns the length of all arenas.
    pub(super) fn arena_bytes(&self) -> u64 {
        self.arena_bytes
    }

    pub(super) fn check_place(&self, place: u32) -> Result<(), Refusal> {
        if place <= self.devices { Ok(()) } else { Err(Refusal::NoSuchDevice { device: place - 1 }) }
    }

    /// Adds an allocation for `len` bytes to the ledger: for one object, or an arena. The allocation cannot be used before
    /// [`Ledger::ready`].
    pub(super) fn open(&mut self, place: u32, len: u64, is_arena: bool) -> Result<AllocationId, Refusal> {
        let kind = self.kind(place);
        let AllocationPolicy { quota, granule, page, arena, .. } = kind.policy;
        let used = kind.used;
        let refused = Refusal::OverQuota { wanted: len, used, quota };
        let left = quota.saturating_sub(used);
        let rounded = |step: u64| len.max(1).checked_next_multiple_of(step).filter(|len| *len <= left);
        let Some(min_len) = rounded(granule) else { return Err(refused) };
        // If little of the quota is left, the allocation is shorter than an arena, or is not rounded up to whole pages.
        let len = match is_arena {
            true => min_len.max(arena.min(left / granule * granule)),
            false => rounded(page).unwrap_or(min_len),
        };
        self.take(AllocationRecord { len, place, is_arena })
    }

    /// Adds an allocation for existing memory of exactly `len` bytes to the ledger.
    pub(super) fn open_exact(&mut self, place: u32, len: u64) -> Result<AllocationId, Refusal> {
        let kind = self.kind(place);
        if len == 0 || !len.is_multiple_of(kind.policy.granule) {
            return Err(Refusal::malformed(
                "the length of memory must be a positive multiple of the granule",
            ));
        }
        if len > kind.policy.quota.saturating_sub(kind.used) {
            return Err(self.over_quota(place, len));
        }
        self.take(AllocationRecord { len, place, is_arena: false })
    }

    fn take(&mut self, record: AllocationRecord) -> Result<AllocationId, Refusal> {
        let full = Refusal::IndexFull { slots: self.slots.count() };
        let (slot, generation) = self.slots.allocate().ok_or(full)?;
        self.kind(record.place).used += record.len;
        let id = AllocationId::new(slot, generation);
        self.enter(id, record);
        Ok(id)
    }

    /// Returns true if an object of this length would fit the quota if there were no other objects.
    pub(super) fn fits_quota(&self, place: u32, len: u64) -> bool {
        self.min_len(place, len).is_some_and(|len| len <= self.policy(place).quota)
    }

    /// Returns the refusal of an object of this length that exceeds the quota.
    pub(super) fn over_quota(&self, place: u32, len: u64) -> Refusal {
        let kind = if place == HOST { &self.host } else { &self.device };
        Refusal::OverQuota { wanted: len, used: kind.used, quota: kind.policy.quota }
    }

    /// Returns how many bytes of the quota an object of this length needs; zero if the object fits an existing arena. Returns
    /// `None` if the object does not fit in addition to the `promised` bytes.
    pub(super) fn space_for(&self, place: u32, len: u64, promised: u64) -> Option<u64> {
        if len < self.policy(place).small && self.find_arena(place, len).is_some() {
            return Some(0);
        }
        let kind = if place == HOST { &self.host } else { &self.device };
        let left = kind.policy.quota.saturating_sub(kind.used).saturating_sub(promised);
        self.min_len(place, len).filter(|needed| *needed <= left)
    }

    /// Returns the length of an allocation for `len` bytes, rounded up to whole pages.
    pub(super) fn rounded(&self, place: u32, len: u64) -> Option<u64> {
        len.max(1).checked_next_multiple_of(self.policy(place).page)
    }

    /// Returns the minimum length of an allocation for `len` bytes, rounded up to whole granules.
    fn min_len(&self, place: u32, len: u64) -> Option<u64> {
        len.max(1).checked_next_multiple_of(self.policy(place).granule)
    }

    /// Returns true if the index has a free slot for another allocation.
    pub(super) fn has_slots(&self) -> bool {
        self.slots.free_count() > 0
    }

    /// Reserves an id for preallocated memory, which does not count as used.
    pub(super) fn reserve_id(&mut self) -> Option<AllocationId> {
        self.slots.allocate().map(|(slot, generation)| AllocationId::new(slot, generation))
    }

    /// Frees the id of preallocated memory that is released unused.
    pub(super) fn return_id(&mut self, id: AllocationId) {
        self.slots.free(id.slot(), id.generation() + 1);
    }

    /// Adds preallocated memory that a request has taken to the ledger. From now on, the memory counts as used.
    pub(super) fn enter_reserved(&mut self, id: AllocationId, place: u32, len: u64) {
        self.kind(place).used += len;
        self.enter(id, AllocationRecord { len, place, is_arena: false });
    }

    fn enter(&mut self, id: AllocationId, record: AllocationRecord) {
        self.arena_bytes += if record.is_arena { record.len } else { 0 };
        let arena = record.is_arena.then(|| Suballocator::with_granule(to_usize(record.len), self.align));
        self.entries.insert(id, AllocationEntry { record, regions: BTreeMap::new(), arena, is_ready: false });
    }

    /// Adds an allocation that the index lists to the ledger, after a restart of the server.
    pub(super) fn recover(&mut self, id: AllocationId, record: AllocationRecord) {
        self.kind(record.place).used += record.len;
        self.enter(id, record);
        self.ready(id);
    }

    /// Adds an allocation slot that the index marks as free, after a restart of the server.
    pub(super) fn recover_slot(&mut self, slot: usize, generation: u64) {
        self.slots.free(slot, generation);
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

    /// Updates the table of arenas with the free ranges of an arena. Must be called after each change of the arena.
    fn index_arena(&mut self, id: AllocationId) {
        let Some(entry) = self.entries.get(&id) else { return };
        if let (Some(arena), true) = (&entry.arena, entry.is_ready) {
            let slots = self.slots.count();
            let arenas = self.arenas.entry(entry.record.place).or_insert_with(|| Arenas::new(slots));
            arenas.set(id, arena.largest_free(), entry.regions.is_empty());
        }
    }

    /// Returns the arena with the lowest slot that has space for a region of `len` bytes.
    fn find_arena(&self, place: u32, len: u64) -> Option<AllocationId> {
        let wanted = self.align.round_up(to_usize(len.max(1)))?;
        self.arenas.get(&place)?.first_with(wanted)
    }

    /// Allocates a region of `len` bytes in an arena; returns `None` if no arena has space.
    pub(super) fn carve(&mut self, place: u32, len: u64) -> Option<Region> {
        let allocation = self.find_arena(place, len)?;
        let arena = self.entries.get_mut(&allocation).and_then(|entry| entry.arena.as_mut())?;
        let offset = arena.allocate(to_usize(len.max(1)), ALIGN);
        let offset = offset.expect("an arena is found only if it has space") as u64;
        self.index_arena(allocation);
        Some(Region { allocation, offset, len: len.max(1) })
    }

    /// Returns the memory region that covers a whole allocation.
    pub(super) fn whole(&self, allocation: AllocationId) -> Option<Region> {
        let len = self.record(allocation)?.len;
        Some(Region { allocation, offset: 0, len })
    }

    /// Adds an object to a memory region. After a restart, returns false if the region overlaps another region or exceeds its
    /// allocation.
    pub(super) fn add_object(&mut self, region: Region, is_recovered: bool) -> bool {
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

    /// Removes an object from a memory region. Returns the region's allocation if it can be released.
    pub(super) fn remove_object(&mut self, region: Region) -> Option<AllocationId> {
        let entry = self.entries.get_mut(&region.allocation)?;
        let objects = entry.regions.get_mut(&region.offset)?;
        *objects -= 1;
        if *objects > 0 {
            return None;
        }
        entry.regions.remove(&region.offset);
        self.free_region(region);
        self.is_idle(region.allocation).then_some(region.allocation)
    }

    /// Frees a memory region of an arena.
    pub(super) fn free_region(&mut self, region: Region) {
        let arena = self.entries.get_mut(&region.allocation).and_then(|entry| entry.arena.as_mut());
        if let Some(arena) = arena {
            arena.free(to_usize(region.offset)).expect("the region was carved from this arena");
        }
        self.index_arena(region.allocation);
    }

    /// Returns true if an allocation can be released: it contains no object, and is not the only empty arena of its place (the
    /// host or a device).
    pub(super) fn is_idle(&self, id: AllocationId) -> bool {
        let Some(entry) = self.entries.get(&id) else { return false };
        let empty_arenas = || self.arenas.get(&entry.record.place).map_or(0, Arenas::empty_count);
        // If this allocation is an empty arena, the count includes it.
        entry.is_ready && entry.regions.is_empty() && (!entry.record.is_arena || empty_arenas() > 1)
    }

    /// Removes an allocation from the ledger.
    pub(super) fn close(&mut self, id: AllocationId) {
        if let Some(entry) = self.entries.remove(&id) {
            self.kind(entry.record.place).used -= entry.record.len;
            self.arena_bytes -= if entry.record.is_arena { entry.record.len } else { 0 };
            if let (true, Some(arenas)) = (entry.record.is_arena, self.arenas.get_mut(&entry.record.place)) {
                arenas.remove(id);
            }
            self.slots.free(id.slot(), id.generation() + 1);
        }
    }

    /// Iterates over all allocations of the ledger, whether their memory is ready or not.
    pub(super) fn allocations(&self) -> impl Iterator<Item = AllocationId> {
        self.entries.keys().copied()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const POLICY: AllocationPolicy = AllocationPolicy {
        quota: 100 << 10,
        granule: 4 << 10,
        page: 4 << 10,
        small: 8 << 10,
        arena: 32 << 10,
    };

    fn ledger() -> Ledger {
        Ledger::new(POLICY, POLICY, 1, Slots::used_up_to(8, 0))
    }

    #[test]
    fn allocations_are_whole_granules_within_the_quota() {
        let mut ledger = ledger();
        let first = ledger.open(HOST, 90_000, false).unwrap();
        assert_eq!(ledger.usage().0.used, 88 << 10);
        let refused = ledger.open(HOST, 13 << 10, false).unwrap_err();
        assert_eq!(refused, Refusal::OverQuota { wanted: 13 << 10, used: 88 << 10, quota: 100 << 10 });
        ledger.open(1, 90_000, false).expect("device memory has a separate quota");
        assert_eq!(ledger.check_place(2), Err(Refusal::NoSuchDevice { device: 1 }));
        ledger.close(first);
        assert_eq!(ledger.usage().0.used, 0);
        let refused = ledger.open(HOST, u64::MAX, false).unwrap_err();
        assert_eq!(refused, Refusal::OverQuota { wanted: u64::MAX, used: 0, quota: 100 << 10 });
    }

    #[test]
    fn a_full_index_is_not_reported_as_a_full_quota() {
        let mut ledger = Ledger::new(POLICY, POLICY, 0, Slots::used_up_to(2, 0));
        let mut open = || ledger.open(HOST, 1, false).map(drop);
        assert_eq!([open(), open()], [Ok(()), Ok(())]);
        assert_eq!(open(), Err(Refusal::IndexFull { slots: 2 }), "a wait for space would succeed at once");
        assert_eq!(ledger.usage().0.used, 8 << 10);
    }

    #[test]
    fn allocations_for_one_object_are_whole_pages_while_the_quota_allows() {
        let mut ledger =
            Ledger::new(AllocationPolicy { page: 32 << 10, ..POLICY }, POLICY, 0, Slots::used_up_to(8, 0));
        let mut open = |len| ledger.open(HOST, len, false).map(|id| ledger.record(id).unwrap().len);
        assert_eq!([open(9 << 10), open(40 << 10)], [Ok(32 << 10), Ok(64 << 10)]);
        assert_eq!(open(4 << 10), Ok(4 << 10), "all of the remaining quota");
        assert!(open(1).is_err());
    }

    #[test]
    fn the_last_arena_has_the_length_of_the_remaining_quota() {
        let mut ledger = ledger();
        let lens = (0..4).map(|_| ledger.open(HOST, 5000, true).map(|id| ledger.record(id).unwrap().len));
        let lens: Vec<_> = lens.collect();
        assert_eq!(lens[..3], [Ok(32 << 10), Ok(32 << 10), Ok(32 << 10)]);
        assert!(lens[3].is_err(), "4 KiB are left, 8 KiB are needed");
        assert_eq!(ledger.open(HOST, 4000, true).map(|id| ledger.record(id).unwrap().len), Ok(4 << 10));
    }

    #[test]
    fn a_region_is_freed_with_its_last_object() {
        let mut ledger = ledger();
        let arena = ledger.open(HOST, 1, true).unwrap();
        assert_eq!(ledger.carve(HOST, 100), None, "the arena is not ready");
        ledger.ready(arena);
        let region = ledger.carve(HOST, 100).unwrap();
        assert!(ledger.add_object(region, false) && ledger.add_object(region, false));
        assert_eq!((ledger.remove_object(region), ledger.remove_object(region)), (None, None));
        assert_eq!(ledger.carve(HOST, 100), Some(region));
        ledger.free_region(region);
        // One empty arena is kept for later objects, so the first arena is released only if there is a second empty arena.
        let second = ledger.open(HOST, 1, true).unwrap();
        ledger.ready(second);
        assert!(ledger.is_idle(arena));
        ledger.close(second);
        assert!(!ledger.is_idle(arena));
    }

    #[test]
    fn an_allocation_for_one_object_is_released_with_its_last_object() {
        let mut ledger = ledger();
        let id = ledger.open(HOST, 9000, false).unwrap();
        ledger.ready(id);
        let whole = ledger.whole(id).unwrap();
        assert_eq!(whole.len, 12 << 10);
        assert!(ledger.add_object(whole, false));
        assert_eq!(ledger.remove_object(whole), Some(id));
    }

    #[test]
    fn recovered_regions_must_be_within_their_allocation_and_disjoint() {
        let mut ledger = ledger();
        let id = AllocationId::new(0, 0);
        ledger.recover(id, AllocationRecord { len: 32 << 10, place: HOST, is_arena: true });
        let region = |offset, len| Region { allocation: id, offset, len };
        assert!(ledger.add_object(region(0, 300), true));
        assert!(ledger.add_object(region(0, 300), true), "another object of the same region");
        assert!(!ledger.add_object(region(256, 300), true));
        assert!(!ledger.add_object(region(32 << 10, 1), true));
        assert!(!ledger.add_object(Region { allocation: AllocationId::new(1, 0), ..region(0, 1) }, true));
        assert_eq!(ledger.carve(HOST, 300).unwrap().offset, 512);
        assert_eq!(ledger.usage().0.used, 32 << 10);
    }

    /// Creates a ledger with `others` allocations for one large object each, as many full arenas, and one more arena with space.
    fn crowded(others: usize) -> Ledger {
        let quota = 1 << 40;
        let mut ledger =
            Ledger::new(AllocationPolicy { quota, ..POLICY }, POLICY, 1, Slots::used_up_to(4096, 0));
        for is_arena in [false, true].into_iter().cycle().take(2 * others) {
            let id = ledger.open(HOST, 1, is_arena).unwrap();
            ledger.ready(id);
            let region = if is_arena { ledger.carve(HOST, POLICY.arena) } else { ledger.whole(id) };
            assert!(ledger.add_object(region.unwrap(), false));
        }
        let id = ledger.open(HOST, 1, true).unwrap();
        ledger.ready(id);
        ledger
    }

    #[test]
    fn the_cost_of_a_small_object_is_independent_of_other_allocations() {
        let work = [10, 1000].map(|others| {
            let mut ledger = crowded(others);
            ledger.arenas[&HOST].visited.set(0);
            let region = ledger.carve(HOST, 100).unwrap();
            assert!(ledger.add_object(region, false));
            assert_eq!(ledger.space_for(HOST, 100, 0), Some(0));
            assert_eq!(ledger.remove_object(region), None, "the only empty arena is retained");
            ledger.arenas[&HOST].visited.get()
        });
        // The work is two lookups and three updates, each of at most the twelve levels of a tree over 4,096 slots.
        assert!(work.iter().all(|levels| *levels <= 5 * 12), "{work:?}");
    }

    /// A naive reference implementation of `carve`, which tries all arenas in the order of their slots.
    fn carve_naively(ledger: &Ledger, place: u32, len: u64) -> Option<Region> {
        let mut arenas: Vec<_> = ledger.entries.iter().filter(|(_, entry)| entry.is_ready).collect();
        arenas.retain(|(_, entry)| entry.record.place == place);
        arenas.sort_by_key(|(id, _)| id.slot());
        arenas.into_iter().find_map(|(id, entry)| {
            let offset = entry.arena.clone()?.allocate(usize::try_from(len.max(1)).unwrap(), ALIGN).ok()?;
            Some(Region { allocation: *id, offset: offset as u64, len: len.max(1) })
        })
    }

    /// A naive reference implementation of `is_idle`, which checks all allocations.
    fn is_idle_naively(ledger: &Ledger, id: AllocationId) -> bool {
        let entry = &ledger.entries[&id];
        let is_empty = |entry: &AllocationEntry| entry.is_ready && entry.regions.is_empty();
        let is_spare = |(other, spare): (&AllocationId, &AllocationEntry)| {
            let is_arena_here = spare.record.is_arena && spare.record.place == entry.record.place;
            *other != id && is_arena_here && is_empty(spare)
        };
        is_empty(entry) && (!entry.record.is_arena || ledger.entries.iter().any(is_spare))
    }

    #[derive(Debug, Clone)]
    enum LedgerOp {
        Open { place: u32, is_arena: bool },
        Ready(prop::sample::Index),
        Carve { place: u32, len: u64, is_held: bool },
        LetGo(prop::sample::Index),
        Recover { place: u32, is_arena: bool, offset: u64, len: u64 },
    }

    fn step() -> impl Strategy<Value = LedgerOp> {
        let place = || HOST..=1;
        prop_oneof![
            2 => (place(), any::<bool>()).prop_map(|(place, is_arena)| LedgerOp::Open { place, is_arena }),
            2 => any::<prop::sample::Index>().prop_map(LedgerOp::Ready),
            8 => (place(), 0..(33_u64 << 10), any::<bool>())
                .prop_map(|(place, len, is_held)| LedgerOp::Carve { place, len, is_held }),
            6 => any::<prop::sample::Index>().prop_map(LedgerOp::LetGo),
            1 => (place(), any::<bool>(), 0..(40_u64 << 10), 1..(20_u64 << 10))
                .prop_map(|(place, is_arena, offset, len)| LedgerOp::Recover { place, is_arena, offset, len }),
        ]
    }

    proptest! {
        #[test]
        fn arena_lookups_agree_with_a_scan_of_all_allocations(
            steps in prop::collection::vec(step(), 0..120)
        ) {
            let quota = 1 << 40;
            let policy = AllocationPolicy { quota, ..POLICY };
            let mut ledger = Ledger::new(policy, policy, 1, Slots::used_up_to(8, 0));
            let mut held = Vec::new();
            for step in steps {
                match step {
                    LedgerOp::Open { place, is_arena } => drop(ledger.open(place, 1, is_arena)),
                    LedgerOp::Ready(index) if !ledger.entries.is_empty() => {
                        let ids: Vec<_> = ledger.allocations().collect();
                        ledger.ready(*index.get(&ids));
                    }
                    LedgerOp::Carve { place, len, is_held } => {
                        let expected = carve_naively(&ledger, place, len);
                        prop_assert_eq!(ledger.find_arena(place, len), expected.map(|region| region.allocation));
                        let carved = ledger.carve(place, len);
                        prop_assert_eq!(carved, expected);
                        match carved {
                            Some(region) if is_held => {
                                prop_assert!(ledger.add_object(region, false));
                                held.push(region);
                            }
                            Some(region) => ledger.free_region(region),
                            None => {}
                        }
                    }
                    LedgerOp::LetGo(index) if !held.is_empty() => {
                        if let Some(idle) = ledger.remove_object(held.swap_remove(index.index(held.len()))) {
                            ledger.close(idle);
                        }
                    }
                    LedgerOp::Recover { place, is_arena, offset, len } => {
                        let Some(id) = ledger.reserve_id() else { continue };
                        ledger.recover(id, AllocationRecord { len: 32 << 10, place, is_arena });
                        let region = Region { allocation: id, offset: offset / 256 * 256, len };
                        if ledger.add_object(region, true) {
                            held.push(region);
                        }
                    }
                    LedgerOp::Ready(_) | LedgerOp::LetGo(_) => {}
                }
                for id in ledger.allocations() {
                    prop_assert_eq!(ledger.is_idle(id), is_idle_naively(&ledger, id), "{}", id);
                }
            }
        }
    }
}
