//! The layout of the index (the table of a store's objects): the positions of its sections, its header, and the words of its
//! slots.

use wholemem_os::Size;

use crate::cells::{Cells, FencePoint};
use crate::convert::{low_u32, to_usize};
use crate::id::{AllocationId, MAX_SLOTS, ObjectId, SlotState, SlotWord};

use super::record::RECORD_CELLS;

/// The first eight bytes of an index (the table of a store's objects): `wmindex1`.
const MAGIC: u64 = u64::from_le_bytes(*b"wmindex1");

/// The version of the index layout, which changes if the meaning of any cell changes.
pub(crate) const LAYOUT: u64 = 3;

const HEADER_CELLS: usize = 64;
const ALLOCATION_CELLS: usize = 4;

/// Positions of the fields in the header of the index, as cell numbers.
const AT_MAGIC: usize = 0;
const AT_LAYOUT: usize = 1;
const AT_RECORD_CELLS: usize = 2;
const AT_SLOTS: usize = 3;
const AT_ALLOCATIONS: usize = 4;
const AT_EPOCH: usize = 5;
const AT_USED_SLOTS: usize = 6;
const AT_SUPERSEDED: usize = 7;
const AT_FREED_ALLOCATIONS: usize = 8;
const AT_QUOTA: usize = 9;

/// The error of a store's index that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IndexError {
    /// The memory does not begin with the magic number of a store's index.
    #[error("the memory does not contain the index of a store")]
    NotAnIndex,
    /// The index of the store has the layout of another version of this library.
    #[error("the index of the store has layout version {found}; this library supports version {known}")]
    UnknownLayout {
        /// The layout version of the index.
        found: u64,
        /// The layout version that this library supports.
        known: u64,
    },
    /// The memory is too short for the numbers in the header of the index, or these numbers are invalid.
    #[error(
        "the index of the store is damaged: its header has {slots} slots and {allocations} allocations, which is invalid for an index of {size}",
        size = Size(*len)
    )]
    Damaged {
        /// The number of object slots according to the header of the index.
        slots: u64,
        /// The number of allocation slots according to the header of the index.
        allocations: u64,
        /// The length of the index memory, in bytes.
        len: usize,
    },
}

/// The capacity of an index: its numbers of slots for objects and for allocations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Geometry {
    pub(crate) slots: usize,
    pub(crate) allocations: usize,
}

impl Geometry {
    /// Returns the number of buckets in the hash table of names. At least half of the buckets are empty.
    pub(super) fn buckets(self) -> usize {
        (2 * self.slots).next_power_of_two()
    }

    fn words(self) -> usize {
        HEADER_CELLS
    }

    pub(super) fn first_bucket(self) -> usize {
        self.words() + self.slots
    }

    fn first_allocation(self) -> usize {
        self.first_bucket() + self.buckets()
    }

    pub(super) fn first_record(self) -> usize {
        self.first_allocation() + self.allocations * ALLOCATION_CELLS
    }

    pub(crate) fn cells(self) -> usize {
        self.first_record() + self.slots * RECORD_CELLS
    }

    /// Returns the length of the index file in bytes, a multiple of the largest page size (64 KiB).
    pub(crate) fn len(self) -> usize {
        (self.cells() * size_of::<u64>()).next_multiple_of(64 << 10)
    }
}

/// The record of an allocation (memory that holds objects) in the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AllocationRecord {
    pub(crate) len: u64,
    /// The place of the allocation: 0 is the host, `n + 1` is device `n` of the server.
    pub(crate) place: u32,
    /// True if the allocation is an arena, which many small objects share.
    pub(crate) is_arena: bool,
}

/// The location of an object's bytes: an allocation, and the range of the bytes in the allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ObjectLocation {
    pub(crate) allocation: AllocationId,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// The index of a store (the table of all objects), stored in a sequence of cells. The server writes the index; clients only read
/// it.
#[derive(Debug, Clone)]
pub(crate) struct ObjectIndex<C> {
    pub(super) cells: C,
    geometry: Geometry,
}

impl<C: Cells> ObjectIndex<C> {
    /// Formats zeroed cells as an empty index. The magic number is stored last, so that an incomplete index is rejected.
    pub(crate) fn format(cells: C, geometry: Geometry) -> Self {
        assert!(
            cells.count() >= geometry.cells() && geometry.slots <= MAX_SLOTS,
            "the cells are too few for the index"
        );
        cells.store(AT_LAYOUT, LAYOUT);
        cells.store(AT_RECORD_CELLS, RECORD_CELLS as u64);
        cells.store(AT_SLOTS, geometry.slots as u64);
        cells.store(AT_ALLOCATIONS, geometry.allocations as u64);
        cells.store_release(AT_MAGIC, MAGIC);
        Self { cells, geometry }
    }

    /// Opens an index in cells that were formatted before.
    pub(crate) fn open(cells: C) -> Result<Self, IndexError> {
        if cells.count() < HEADER_CELLS || cells.load_acquire(AT_MAGIC) != MAGIC {
            return Err(IndexError::NotAnIndex);
        }
        let layout = (cells.load(AT_LAYOUT), cells.load(AT_RECORD_CELLS));
        if layout != (LAYOUT, RECORD_CELLS as u64) {
            return Err(IndexError::UnknownLayout { found: layout.0, known: LAYOUT });
        }
        let (slots, allocations) = (cells.load(AT_SLOTS), cells.load(AT_ALLOCATIONS));
        let within = |count: u64| Some(to_usize(count)).filter(|count| (1..=MAX_SLOTS).contains(count));
        let geometry = within(slots).zip(within(allocations));
        let geometry = geometry.map(|(slots, allocations)| Geometry { slots, allocations });
        match geometry.filter(|geometry| geometry.cells() <= cells.count()) {
            Some(geometry) => Ok(Self { cells, geometry }),
            None => {
                let len = cells.count() * size_of::<u64>();
                Err(IndexError::Damaged { slots, allocations, len })
            }
        }
    }

    pub(crate) fn cells(&self) -> &C {
        &self.cells
    }

    pub(crate) fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Returns the number of servers that have written this index so far.
    pub(crate) fn epoch(&self) -> u64 {
        self.cells.load(AT_EPOCH)
    }

    /// Counts a new server that has taken over the index, and returns the new number of servers.
    pub(crate) fn begin_epoch(&self) -> u64 {
        let epoch = self.epoch() + 1;
        self.cells.store(AT_EPOCH, epoch);
        epoch
    }

    /// Marks the index as superseded: no process writes it from now on, so its names may be out of date.
    pub(crate) fn supersede(&self) {
        self.cells.store_release(AT_SUPERSEDED, 1);
    }

    /// Returns true if the index is superseded: no process writes it any more.
    pub(crate) fn is_superseded(&self) -> bool {
        self.cells.load_acquire(AT_SUPERSEDED) != 0
    }

    /// Returns the quota of host memory in bytes, which the first server of a store sets and its successors use.
    pub(crate) fn quota(&self) -> u64 {
        self.cells.load(AT_QUOTA)
    }

    /// Sets the quota of host memory in the index. Only the first server of a store calls this function.
    pub(crate) fn set_quota(&self, quota: u64) {
        self.cells.store(AT_QUOTA, quota);
    }

    /// Returns the number of allocations that were freed so far. If the number changes, clients check whether allocations that
    /// they have mapped were freed.
    pub(crate) fn freed_allocations(&self) -> u64 {
        self.cells.load(AT_FREED_ALLOCATIONS)
    }

    /// Returns the number of index slots up to the last one that was ever used. All later slots are unused.
    pub(crate) fn used_slots(&self) -> usize {
        to_usize(self.cells.load_acquire(AT_USED_SLOTS)).min(self.geometry.slots)
    }

    /// Returns the position of the cell that holds the word of an object's slot: its generation and state.
    pub(crate) fn word_cell(&self, slot: usize) -> usize {
        self.geometry.words() + slot
    }

    pub(crate) fn word(&self, slot: usize) -> SlotWord {
        SlotWord::decode(self.cells.load_acquire(self.word_cell(slot)))
    }

    /// Returns the state of an object; `None` if the slot of its id is free, holds a later object or does not exist.
    pub(crate) fn state(&self, id: ObjectId) -> Option<SlotState> {
        let word = (id.slot() < self.geometry.slots).then(|| self.word(id.slot()))?;
        (word.generation == id.generation() && word.state != SlotState::Free).then_some(word.state)
    }

    /// Commits a change of an object's state by one release store. A reader that sees the new state also sees all earlier stores.
    pub(crate) fn commit(&self, id: ObjectId, state: SlotState) {
        // A free slot already has the generation of its next object.
        let generation = id.generation() + u64::from(state == SlotState::Free);
        let used = (id.slot() + 1) as u64;
        if self.cells.load(AT_USED_SLOTS) < used {
            // The number of used slots is stored before the word of the slot, so that a reader that scans the used slots never
            // misses one.
            self.cells.store_release(AT_USED_SLOTS, used);
        }
        self.cells.store_release(self.word_cell(id.slot()), SlotWord { generation, state }.encode());
        if state == SlotState::Deleted {
            self.cells.fence(FencePoint::Retire);
        }
    }

    fn allocation_cell(&self, slot: usize) -> usize {
        self.geometry.first_allocation() + slot * ALLOCATION_CELLS
    }

    /// Returns the word of an allocation's slot: its generation and state.
    pub(crate) fn allocation_word(&self, slot: usize) -> SlotWord {
        SlotWord::decode(self.cells.load_acquire(self.allocation_cell(slot)))
    }

    /// Returns the record of an allocation; `None` if the allocation was freed.
    pub(crate) fn allocation(&self, id: AllocationId) -> Option<AllocationRecord> {
        let live = SlotWord { generation: id.generation(), state: SlotState::Sealed };
        if id.slot() >= self.geometry.allocations || self.allocation_word(id.slot()) != live {
            return None;
        }
        let at = self.allocation_cell(id.slot());
        let (len, kind) = (self.cells.load(at + 1), self.cells.load(at + 2));
        self.cells.fence(FencePoint::Record);
        if self.allocation_word(id.slot()) != live {
            return None;
        }
        let place = low_u32(kind);
        Some(AllocationRecord { len, place, is_arena: kind >> 32 == 1 })
    }

    /// Writes the record of an allocation to the index and commits it.
    pub(crate) fn add_allocation(&self, id: AllocationId, record: &AllocationRecord) {
        let at = self.allocation_cell(id.slot());
        self.cells.fence(FencePoint::Record);
        self.cells.store(at + 1, record.len);
        self.cells.store(at + 2, u64::from(record.place) | u64::from(record.is_arena) << 32);
        let word = SlotWord { generation: id.generation(), state: SlotState::Sealed };
        self.cells.store_release(at, word.encode());
    }

    /// Removes the record of an allocation from the index.
    pub(crate) fn remove_allocation(&self, id: AllocationId) {
        let word = SlotWord { generation: id.generation() + 1, state: SlotState::Free };
        self.cells.store_release(self.allocation_cell(id.slot()), word.encode());
        // If the server dies before it increments the number of freed allocations, clients keep their map of this allocation
        // until another allocation is freed.
        self.cells.store(AT_FREED_ALLOCATIONS, self.freed_allocations() + 1);
    }

    /// Iterates over the records of all allocations in the index.
    pub(crate) fn allocations(&self) -> impl Iterator<Item = (AllocationId, AllocationRecord)> {
        (0..self.geometry.allocations).filter_map(|slot| {
            let word = self.allocation_word(slot);
            let id = AllocationId::new(slot, word.generation);
            (word.state == SlotState::Sealed).then(|| Some((id, self.allocation(id)?))).flatten()
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::cells::recorded::RecordedCells;

    pub(crate) const SMALL: Geometry = Geometry { slots: 8, allocations: 4 };

    pub(crate) fn small() -> ObjectIndex<RecordedCells> {
        ObjectIndex::format(RecordedCells::new(SMALL.cells()), SMALL)
    }

    #[test]
    fn a_formatted_index_can_be_opened() {
        let made = small();
        made.set_quota(7);
        let found = ObjectIndex::open(made.cells().clone()).unwrap();
        assert_eq!((found.geometry(), found.quota()), (SMALL, 7));
        assert_eq!((made.begin_epoch(), made.begin_epoch(), found.epoch()), (1, 2, 2));
    }

    #[test]
    fn open_rejects_foreign_memory_another_layout_and_a_short_index() {
        let refused = |cells: RecordedCells| ObjectIndex::open(cells).unwrap_err();
        assert_eq!(refused(RecordedCells::new(10)), IndexError::NotAnIndex);
        assert_eq!(refused(RecordedCells::new(1000)), IndexError::NotAnIndex);
        let newer = small();
        newer.cells().store(AT_LAYOUT, 4);
        let unknown = IndexError::UnknownLayout { found: 4, known: 3 };
        assert_eq!(refused(newer.cells().clone()), unknown);
        assert_eq!(
            unknown.to_string(),
            "the index of the store has layout version 4; this library supports version 3"
        );
        for slots in [0, 9, u64::MAX] {
            let damaged = small();
            damaged.cells().store(AT_SLOTS, slots);
            let len = SMALL.cells() * 8;
            let expected = IndexError::Damaged { slots, allocations: 4, len };
            assert_eq!(refused(damaged.cells().clone()), expected);
        }
    }

    #[test]
    fn an_index_without_its_magic_number_is_rejected() {
        let cells = RecordedCells::new(SMALL.cells());
        let before = cells.snapshot();
        ObjectIndex::format(cells.clone(), SMALL);
        let prefixes = crate::cells::recorded::Prefixes { before, ..cells.take() };
        for count in 0..prefixes.stores.len() {
            assert_eq!(ObjectIndex::open(prefixes.replay(count)).unwrap_err(), IndexError::NotAnIndex);
        }
    }

    #[test]
    fn all_maps_of_a_superseded_index_see_that_it_is() {
        let index = small();
        let mapped = ObjectIndex::open(index.cells().clone()).unwrap();
        assert!(!mapped.is_superseded());
        index.supersede();
        assert!(mapped.is_superseded());
    }

    #[test]
    fn an_id_is_valid_for_one_generation_only() {
        let index = small();
        let id = ObjectId::new(3, 0);
        assert_eq!((index.state(id), index.used_slots()), (None, 0));
        index.commit(id, SlotState::Created);
        assert_eq!((index.state(id), index.used_slots()), (Some(SlotState::Created), 4));
        index.commit(id, SlotState::Sealed);
        index.commit(id, SlotState::Deleted);
        assert_eq!(index.state(id), Some(SlotState::Deleted));
        index.commit(id, SlotState::Free);
        assert_eq!(index.state(id), None);
        assert_eq!(index.word(3), SlotWord { generation: 1, state: SlotState::Free });
        assert_eq!(index.state(ObjectId::new(MAX_SLOTS - 1, 0)), None);
    }

    #[test]
    fn an_allocation_exists_until_it_is_removed() {
        let index = small();
        let id = AllocationId::new(2, 0);
        let record = AllocationRecord { len: 1 << 40, place: 3, is_arena: true };
        assert_eq!(index.allocation(id), None);
        index.add_allocation(id, &record);
        assert_eq!(index.allocation(id), Some(record));
        assert_eq!(index.allocations().collect::<Vec<_>>(), [(id, record)]);
        assert_eq!(index.freed_allocations(), 0);
        index.remove_allocation(id);
        assert_eq!(
            (index.allocation(id), index.allocations().count(), index.freed_allocations()),
            (None, 0, 1)
        );
        assert_eq!(index.allocation(AllocationId::new(4, 0)), None);
    }
}
