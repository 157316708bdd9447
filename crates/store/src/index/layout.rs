//! Where everything lies in the index, its header, and the words of its slots.

use wholemem_os::Size;

use crate::cells::{Cells, Fence};
use crate::convert::{low_u32, to_usize};
use crate::id::{AllocationId, MOST_SLOTS, ObjectId, State, Word};

use super::record::RECORD_CELLS;

/// Says that this is an index: `wmindex1`, as its first eight bytes read.
const MAGIC: u64 = u64::from_le_bytes(*b"wmindex1");

/// Changes when the meaning of any cell does.
pub(crate) const LAYOUT: u64 = 3;

const HEADER_CELLS: usize = 64;
const ALLOCATION_CELLS: usize = 4;

/// Cells of the header.
const AT_MAGIC: usize = 0;
const AT_LAYOUT: usize = 1;
const AT_RECORD_CELLS: usize = 2;
const AT_SLOTS: usize = 3;
const AT_ALLOCATIONS: usize = 4;
const AT_EPOCH: usize = 5;
const AT_USED_SLOTS: usize = 6;
const AT_SUPERSEDED: usize = 7;
const AT_GONE: usize = 8;
const AT_QUOTA: usize = 9;

/// Why an index cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IndexError {
    /// It does not begin as one.
    #[error("the memory holds no index")]
    NotAnIndex,
    /// It was made by another version of this library.
    #[error("the index has layout {found}, and this version knows layout {known}")]
    UnknownLayout {
        /// Its layout.
        found: u64,
        /// Ours.
        known: u64,
    },
    /// It is shorter than its header says, or its header says what cannot be.
    #[error("the index is damaged: {slots} slots and {allocations} allocations do not fit {}", Size(*len))]
    Damaged {
        /// How many slots the header names.
        slots: u64,
        /// How many allocations the header names.
        allocations: u64,
        /// How long it is.
        len: usize,
    },
}

/// How many things an index has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Geometry {
    pub(crate) slots: usize,
    pub(crate) allocations: usize,
}

impl Geometry {
    /// Half of the buckets are empty at least.
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

    /// The length of a file that holds it: whole pages of the largest size there is.
    pub(crate) fn len(self) -> usize {
        (self.cells() * size_of::<u64>()).next_multiple_of(64 << 10)
    }
}

/// What a piece of memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AllocationRecord {
    pub(crate) len: u64,
    /// Where it is: 0 is the host, and `n + 1` the server's device `n`.
    pub(crate) place: u32,
    /// Whether many small objects share it.
    pub(crate) is_arena: bool,
}

/// Where the bytes of an object are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Location {
    pub(crate) allocation: AllocationId,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// An index over cells: all of it for the server, whose cells can be stored to, and the reading half for clients.
#[derive(Debug, Clone)]
pub(crate) struct Index<C> {
    pub(super) cells: C,
    geometry: Geometry,
}

impl<C: Cells> Index<C> {
    /// Makes an empty index of cells that are zero. The first cell is stored last.
    pub(crate) fn format(cells: C, geometry: Geometry) -> Self {
        assert!(cells.count() >= geometry.cells() && geometry.slots <= MOST_SLOTS, "room for the index");
        cells.store(AT_LAYOUT, LAYOUT);
        cells.store(AT_RECORD_CELLS, RECORD_CELLS as u64);
        cells.store(AT_SLOTS, geometry.slots as u64);
        cells.store(AT_ALLOCATIONS, geometry.allocations as u64);
        cells.store_release(AT_MAGIC, MAGIC);
        Self { cells, geometry }
    }

    /// Takes cells that hold an index already.
    pub(crate) fn open(cells: C) -> Result<Self, IndexError> {
        if cells.count() < HEADER_CELLS || cells.load_acquire(AT_MAGIC) != MAGIC {
            return Err(IndexError::NotAnIndex);
        }
        let layout = (cells.load(AT_LAYOUT), cells.load(AT_RECORD_CELLS));
        if layout != (LAYOUT, RECORD_CELLS as u64) {
            return Err(IndexError::UnknownLayout { found: layout.0, known: LAYOUT });
        }
        let (slots, allocations) = (cells.load(AT_SLOTS), cells.load(AT_ALLOCATIONS));
        let within = |count: u64| Some(to_usize(count)).filter(|count| (1..=MOST_SLOTS).contains(count));
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

    /// How many servers have written this index so far.
    pub(crate) fn epoch(&self) -> u64 {
        self.cells.load(AT_EPOCH)
    }

    /// A new server has taken the index over.
    pub(crate) fn begin_epoch(&self) -> u64 {
        let epoch = self.epoch() + 1;
        self.cells.store(AT_EPOCH, epoch);
        epoch
    }

    /// Says to whoever maps this index that nobody writes it any more: what it says of names may be old from here on.
    pub(crate) fn supersede(&self) {
        self.cells.store_release(AT_SUPERSEDED, 1);
    }

    /// Whether nobody writes this index any more.
    pub(crate) fn is_superseded(&self) -> bool {
        self.cells.load_acquire(AT_SUPERSEDED) != 0
    }

    /// How many bytes of host memory objects may take: what the first server found, for all that follow.
    pub(crate) fn quota(&self) -> u64 {
        self.cells.load(AT_QUOTA)
    }

    /// The first server says how many bytes of host memory objects may take.
    pub(crate) fn set_quota(&self, quota: u64) {
        self.cells.store(AT_QUOTA, quota);
    }

    /// How many allocations have gone so far: whoever has maps of some looks again when this changes.
    pub(crate) fn gone(&self) -> u64 {
        self.cells.load(AT_GONE)
    }

    /// Slots from here on were never used.
    pub(crate) fn used_slots(&self) -> usize {
        to_usize(self.cells.load_acquire(AT_USED_SLOTS)).min(self.geometry.slots)
    }

    /// The cell of a slot's word.
    pub(crate) fn word_cell(&self, slot: usize) -> usize {
        self.geometry.words() + slot
    }

    pub(crate) fn word(&self, slot: usize) -> Word {
        Word::decode(self.cells.load_acquire(self.word_cell(slot)))
    }

    /// The state of an object; `None` when its slot has gone on to another, or is none.
    pub(crate) fn state(&self, id: ObjectId) -> Option<State> {
        let word = (id.slot() < self.geometry.slots).then(|| self.word(id.slot()))?;
        (word.generation == id.generation() && word.state != State::Free).then_some(word.state)
    }

    /// The store that commits: an object enters a state, and what was stored before is seen by whoever sees that.
    pub(crate) fn commit(&self, id: ObjectId, state: State) {
        // Free is free for the next generation.
        let generation = id.generation() + u64::from(state == State::Free);
        let used = (id.slot() + 1) as u64;
        if self.cells.load(AT_USED_SLOTS) < used {
            // Before the word, so that whoever counts slots finds at least those that are used.
            self.cells.store_release(AT_USED_SLOTS, used);
        }
        self.cells.store_release(self.word_cell(id.slot()), Word { generation, state }.encode());
        if state == State::Deleted {
            self.cells.fence(Fence::Retire);
        }
    }

    fn allocation_cell(&self, slot: usize) -> usize {
        self.geometry.first_allocation() + slot * ALLOCATION_CELLS
    }

    /// The word of an allocation's slot.
    pub(crate) fn allocation_word(&self, slot: usize) -> Word {
        Word::decode(self.cells.load_acquire(self.allocation_cell(slot)))
    }

    /// What an allocation is; `None` when it is no more.
    pub(crate) fn allocation(&self, id: AllocationId) -> Option<AllocationRecord> {
        let live = Word { generation: id.generation(), state: State::Sealed };
        if id.slot() >= self.geometry.allocations || self.allocation_word(id.slot()) != live {
            return None;
        }
        let at = self.allocation_cell(id.slot());
        let (len, kind) = (self.cells.load(at + 1), self.cells.load(at + 2));
        self.cells.fence(Fence::Record);
        if self.allocation_word(id.slot()) != live {
            return None;
        }
        let place = low_u32(kind);
        Some(AllocationRecord { len, place, is_arena: kind >> 32 == 1 })
    }

    /// Writes an allocation down, and commits it.
    pub(crate) fn add_allocation(&self, id: AllocationId, record: &AllocationRecord) {
        let at = self.allocation_cell(id.slot());
        self.cells.fence(Fence::Record);
        self.cells.store(at + 1, record.len);
        self.cells.store(at + 2, u64::from(record.place) | u64::from(record.is_arena) << 32);
        let word = Word { generation: id.generation(), state: State::Sealed };
        self.cells.store_release(at, word.encode());
    }

    /// Strikes an allocation out.
    pub(crate) fn remove_allocation(&self, id: AllocationId) {
        let word = Word { generation: id.generation() + 1, state: State::Free };
        self.cells.store_release(self.allocation_cell(id.slot()), word.encode());
        // A server that dies in between leaves a map cached until the next allocation goes.
        self.cells.store(AT_GONE, self.gone() + 1);
    }

    /// All allocations there are.
    pub(crate) fn allocations(&self) -> impl Iterator<Item = (AllocationId, AllocationRecord)> {
        (0..self.geometry.allocations).filter_map(|slot| {
            let word = self.allocation_word(slot);
            let id = AllocationId::new(slot, word.generation);
            (word.state == State::Sealed).then(|| Some((id, self.allocation(id)?))).flatten()
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::cells::recorded::RecordedCells;

    pub(crate) const SMALL: Geometry = Geometry { slots: 8, allocations: 4 };

    pub(crate) fn small() -> Index<RecordedCells> {
        Index::format(RecordedCells::new(SMALL.cells()), SMALL)
    }

    #[test]
    fn an_index_is_found_again_as_it_was_made() {
        let made = small();
        made.set_quota(7);
        let found = Index::open(made.cells().clone()).unwrap();
        assert_eq!((found.geometry(), found.quota()), (SMALL, 7));
        assert_eq!((made.begin_epoch(), made.begin_epoch(), found.epoch()), (1, 2, 2));
    }

    #[test]
    fn what_is_no_index_or_of_another_layout_or_too_short_is_refused() {
        let refused = |cells: RecordedCells| Index::open(cells).unwrap_err();
        assert_eq!(refused(RecordedCells::new(10)), IndexError::NotAnIndex);
        assert_eq!(refused(RecordedCells::new(1000)), IndexError::NotAnIndex);
        let newer = small();
        newer.cells().store(AT_LAYOUT, 4);
        let unknown = IndexError::UnknownLayout { found: 4, known: 3 };
        assert_eq!(refused(newer.cells().clone()), unknown);
        assert_eq!(unknown.to_string(), "the index has layout 4, and this version knows layout 3");
        for slots in [0, 9, u64::MAX] {
            let damaged = small();
            damaged.cells().store(AT_SLOTS, slots);
            let len = SMALL.cells() * 8;
            let expected = IndexError::Damaged { slots, allocations: 4, len };
            assert_eq!(refused(damaged.cells().clone()), expected);
        }
    }

    #[test]
    fn an_index_that_was_not_finished_is_none() {
        let cells = RecordedCells::new(SMALL.cells());
        let before = cells.snapshot();
        Index::format(cells.clone(), SMALL);
        let prefixes = crate::cells::recorded::Prefixes { before, ..cells.take() };
        for count in 0..prefixes.stores.len() {
            assert_eq!(Index::open(prefixes.replay(count)).unwrap_err(), IndexError::NotAnIndex);
        }
    }

    #[test]
    fn an_index_that_is_superseded_says_so_to_everybody_who_maps_it() {
        let index = small();
        let mapped = Index::open(index.cells().clone()).unwrap();
        assert!(!mapped.is_superseded());
        index.supersede();
        assert!(mapped.is_superseded());
    }

    #[test]
    fn an_id_is_of_one_generation_only() {
        let index = small();
        let id = ObjectId::new(3, 0);
        assert_eq!((index.state(id), index.used_slots()), (None, 0));
        index.commit(id, State::Created);
        assert_eq!((index.state(id), index.used_slots()), (Some(State::Created), 4));
        index.commit(id, State::Sealed);
        index.commit(id, State::Deleted);
        assert_eq!(index.state(id), Some(State::Deleted));
        index.commit(id, State::Free);
        assert_eq!(index.state(id), None);
        assert_eq!(index.word(3), Word { generation: 1, state: State::Free });
        assert_eq!(index.state(ObjectId::new(MOST_SLOTS - 1, 0)), None);
    }

    #[test]
    fn an_allocation_is_there_until_it_is_struck_out() {
        let index = small();
        let id = AllocationId::new(2, 0);
        let record = AllocationRecord { len: 1 << 40, place: 3, is_arena: true };
        assert_eq!(index.allocation(id), None);
        index.add_allocation(id, &record);
        assert_eq!(index.allocation(id), Some(record));
        assert_eq!(index.allocations().collect::<Vec<_>>(), [(id, record)]);
        assert_eq!(index.gone(), 0);
        index.remove_allocation(id);
        assert_eq!((index.allocation(id), index.allocations().count(), index.gone()), (None, 0, 1));
        assert_eq!(index.allocation(AllocationId::new(4, 0)), None);
    }
}
