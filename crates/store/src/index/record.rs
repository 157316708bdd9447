//! The records of objects: written while their slot is free, and never changed while it is not.

use crate::cells::{Cells, Fence};
use crate::convert::{low_u32, to_usize};
use crate::id::{AllocationId, ClientId, ObjectId, State, Word};

use super::layout::{Index, Location};

/// The longest name, in bytes.
pub(crate) const MAX_NAME: usize = 200;

/// The longest description that an object carries for its users, in bytes.
pub(crate) const MAX_META: usize = 216;

const CELL: usize = size_of::<u64>();
const AT_NAME: usize = 12;
const AT_META: usize = AT_NAME + MAX_NAME / CELL;

/// Cells of one record.
pub(super) const RECORD_CELLS: usize = AT_META + MAX_META / CELL;

const AT_ID: usize = 0;
const AT_ALLOCATION: usize = 1;
const AT_REGION: usize = 2;
const AT_REGION_LEN: usize = 3;
const AT_OFFSET: usize = 4;
const AT_LEN: usize = 5;
const AT_VERSION: usize = 6;
const AT_CREATED: usize = 7;
const AT_OWNER: usize = 8;
const AT_CLIENT: usize = 9;
const AT_REQUEST: usize = 10;
const AT_PACK: usize = 11;

/// A range of an allocation that is handed out and taken back as one. The objects of a pack lie in one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Region {
    pub(crate) allocation: AllocationId,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// What the index knows of an object, besides its state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    /// Empty for an object that is known by its id alone.
    pub(crate) name: String,
    /// What its users say of it.
    pub(crate) meta: Vec<u8>,
    pub(crate) region: Region,
    /// Where it begins, counted in the allocation.
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// Which object of its name it is; given when it is sealed, and zero before.
    pub(crate) version: u64,
    /// When it was made, in milliseconds of the Unix epoch.
    pub(crate) created: u64,
    /// The user who may delete it.
    pub(crate) owner: u32,
    /// Who made it, by which request, and which part of that: how a request that comes again is known.
    pub(crate) client: ClientId,
    pub(crate) request: u64,
    /// The first object of the pack it belongs to, which may be itself.
    pub(crate) pack: Option<ObjectId>,
}

impl<C: Cells> Index<C> {
    fn record_cell(&self, slot: usize) -> usize {
        self.geometry().first_record() + slot * RECORD_CELLS
    }

    /// Writes the record of an object whose slot is free. Nobody reads it before a commit.
    pub(crate) fn fill(&self, id: ObjectId, record: &Record) {
        debug_assert!(record.name.len() <= MAX_NAME && record.meta.len() <= MAX_META);
        let at = self.record_cell(id.slot());
        let store = |cell: usize, value: u64| self.cells().store(at + cell, value);
        // Whoever reads these cells, and the word after them, finds that the word is no longer what it was.
        self.cells().fence(Fence::Record);
        store(AT_ID, id.as_u64());
        store(AT_ALLOCATION, record.region.allocation.as_u64());
        store(AT_REGION, record.region.offset);
        store(AT_REGION_LEN, record.region.len);
        store(AT_OFFSET, record.offset);
        store(AT_LEN, record.len);
        store(AT_VERSION, record.version);
        store(AT_CREATED, record.created);
        let (name, meta) = (record.name.len() as u64, record.meta.len() as u64);
        store(AT_OWNER, u64::from(record.owner) | name << 32 | meta << 48);
        store(AT_CLIENT, record.client.0);
        store(AT_REQUEST, record.request);
        store(AT_PACK, record.pack.map_or(0, ObjectId::as_u64));
        for (first, bytes) in [(AT_NAME, record.name.as_bytes()), (AT_META, &record.meta)] {
            for (cell, chunk) in bytes.chunks(CELL).enumerate() {
                store(first + cell, number(chunk));
            }
        }
    }

    /// Gives an object that is about to be sealed its version. It is written once more if the server dies in between.
    pub(crate) fn set_version(&self, id: ObjectId, version: u64) {
        self.cells().store(self.record_cell(id.slot()) + AT_VERSION, version);
    }

    /// An object and its state, if there is one with this id. Not pinned: it may be gone by now.
    pub(crate) fn read(&self, id: ObjectId) -> Option<(State, Record)> {
        let mut state = self.state(id)?;
        loop {
            let record = self.record(id);
            self.cells().fence(Fence::Record);
            let now = self.state(id)?;
            if now == state {
                return Some((state, record?));
            }
            // The same object, a step on in its life: there are no more than three.
            state = now;
        }
    }

    /// The objects that are there now, in no order.
    pub(crate) fn objects(&self) -> impl Iterator<Item = (ObjectId, State, Record)> {
        (0..self.used_slots()).filter_map(|slot| {
            let Word { generation, state } = self.word(slot);
            if state == State::Free {
                return None;
            }
            let id = ObjectId::new(slot, generation);
            self.read(id).map(|(state, record)| (id, state, record))
        })
    }

    /// The record in a slot. Of an object that is neither pinned nor looked at again afterwards it may be any bytes.
    fn record(&self, id: ObjectId) -> Option<Record> {
        let at = self.record_cell(id.slot());
        let load = |cell: usize| self.cells().load(at + cell);
        let owner = load(AT_OWNER);
        let (name, meta) = lengths(owner);
        Some(Record {
            name: String::from_utf8(self.text(at + AT_NAME, name)).ok()?,
            meta: self.text(at + AT_META, meta),
            region: Region {
                allocation: AllocationId::from_u64(load(AT_ALLOCATION))?,
                offset: load(AT_REGION),
                len: load(AT_REGION_LEN),
            },
            offset: load(AT_OFFSET),
            len: load(AT_LEN),
            version: load(AT_VERSION),
            created: load(AT_CREATED),
            owner: low_u32(owner),
            client: ClientId(load(AT_CLIENT)),
            request: load(AT_REQUEST),
            pack: ObjectId::from_u64(load(AT_PACK)),
        })
    }

    /// So many bytes, from a cell on.
    fn text(&self, first: usize, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len.next_multiple_of(CELL));
        for cell in 0..len.div_ceil(CELL) {
            bytes.extend(self.cells().load(first + cell).to_le_bytes());
        }
        bytes.truncate(len);
        bytes
    }

    /// What the users of a pinned object are told of it.
    pub(crate) fn meta(&self, id: ObjectId) -> Vec<u8> {
        let at = self.record_cell(id.slot());
        let (_, len) = lengths(self.cells().load(at + AT_OWNER));
        self.text(at + AT_META, len)
    }

    /// The first object of the pack that a pinned object belongs to.
    pub(crate) fn pack(&self, id: ObjectId) -> Option<ObjectId> {
        ObjectId::from_u64(self.cells().load(self.record_cell(id.slot()) + AT_PACK))
    }

    /// Where a pinned object lies.
    pub(crate) fn location(&self, id: ObjectId) -> Option<Location> {
        let at = self.record_cell(id.slot());
        let allocation = AllocationId::from_u64(self.cells().load(at + AT_ALLOCATION))?;
        let (offset, len) = (self.cells().load(at + AT_OFFSET), self.cells().load(at + AT_LEN));
        Some(Location { allocation, offset, len })
    }

    /// Who made an object, as the server's own records say.
    pub(crate) fn owner(&self, id: ObjectId) -> Option<u32> {
        self.state(id)?;
        Some(low_u32(self.cells().load(self.record_cell(id.slot()) + AT_OWNER)))
    }

    /// Whether a pinned object has this name.
    pub(crate) fn is_named(&self, id: ObjectId, name: &str) -> bool {
        let at = self.record_cell(id.slot());
        let (len, _) = lengths(self.cells().load(at + AT_OWNER));
        len == name.len()
            && name
                .as_bytes()
                .chunks(CELL)
                .enumerate()
                .all(|(cell, chunk)| self.cells().load(at + AT_NAME + cell) == number(chunk))
    }
}

/// How long name and description are; never longer than there is room.
fn lengths(owner: u64) -> (usize, usize) {
    let part = |shift: u32, most: usize| to_usize(owner >> shift & 0xffff).min(most);
    (part(32, MAX_NAME), part(48, MAX_META))
}

/// Up to eight bytes as a cell, the rest of it zero.
fn number(chunk: &[u8]) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|n| chunk.get(n).copied().unwrap_or(0)))
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::super::layout::tests::small;
    use super::*;
    use crate::cells::recorded::RecordedCells;

    pub(crate) fn record(name: &str) -> Record {
        let region = Region { allocation: AllocationId::new(1, 2), offset: 4096, len: 8192 };
        Record {
            name: name.to_owned(),
            meta: b"f32".to_vec(),
            region,
            offset: 4160,
            len: 100,
            version: 3,
            created: 1_700_000_000_000,
            owner: 1000,
            client: ClientId(5),
            request: 6,
            pack: None,
        }
    }

    #[test]
    fn a_record_fills_whole_lines_of_the_processor() {
        assert_eq!(RECORD_CELLS, 64);
    }

    proptest! {
        #[test]
        fn a_record_is_read_as_it_was_written(
            name in proptest::collection::vec(any::<char>(), 0..50).prop_map(String::from_iter),
            meta in proptest::collection::vec(any::<u8>(), 0..=MAX_META),
            numbers: [u64; 6],
            owner: u32,
            pack in proptest::option::of(0_usize..8),
        ) {
            let index = small();
            let id = ObjectId::new(5, 9);
            let [offset, len, version, created, client, request] = numbers;
            let pack = pack.map(|slot| ObjectId::new(slot, 7));
            let written =
                Record { name, meta, offset, len, version, created, owner, client: ClientId(client), request, pack, ..record("") };
            // What was there before shines through nowhere.
            index.fill(id, &record(&"x".repeat(MAX_NAME)));
            index.fill(id, &written);
            index.commit(id, State::Created);
            prop_assert_eq!(index.read(id), Some((State::Created, written.clone())));
            let allocation = written.region.allocation;
            prop_assert_eq!(index.location(id), Some(Location { allocation, offset, len }));
            prop_assert_eq!((index.meta(id), index.pack(id)), (written.meta.clone(), written.pack));
            prop_assert!(index.is_named(id, &written.name));
            let longer = format!("{}x", written.name);
            prop_assert!(!index.is_named(id, &longer));
        }

        #[test]
        fn a_record_of_any_cells_is_read_without_harm(cells: [u64; 64]) {
            let index = small();
            let id = ObjectId::new(7, 1);
            for (cell, value) in cells.iter().enumerate() {
                index.cells().store(index.record_cell(7) + cell, *value);
            }
            index.commit(id, State::Sealed);
            if let Some((_, record)) = index.read(id) {
                prop_assert!(record.name.len() <= MAX_NAME && record.meta.len() <= MAX_META);
            }
            let _ = (index.location(id), index.is_named(id, "name"), index.pack(id));
            prop_assert!(index.meta(id).len() <= MAX_META);
        }
    }

    #[test]
    fn objects_are_those_that_were_committed() {
        let index = small();
        let ids = [ObjectId::new(0, 0), ObjectId::new(4, 0), ObjectId::new(2, 0)];
        for (id, name) in ids.iter().zip(["a", "b", "c"]) {
            index.fill(*id, &record(name));
        }
        index.commit(ids[0], State::Sealed);
        index.commit(ids[1], State::Created);
        let found: Vec<_> = index.objects().map(|(id, state, record)| (id, state, record.name)).collect();
        let expected = [(ids[0], State::Sealed, "a".to_owned()), (ids[1], State::Created, "b".to_owned())];
        assert_eq!(found, expected);
        assert_eq!(index.read(ObjectId::new(0, 1)), None);
    }

    /// Cells whose server deletes an object while its record is being read.
    #[derive(Debug)]
    struct Deleting {
        cells: RecordedCells,
        word_at: usize,
        word: u64,
    }

    impl Cells for Deleting {
        fn count(&self) -> usize {
            self.cells.count()
        }
        fn load(&self, at: usize) -> u64 {
            self.cells.load(at)
        }
        fn load_acquire(&self, at: usize) -> u64 {
            self.cells.load(at)
        }
        fn store(&self, at: usize, value: u64) {
            self.cells.store(at, value);
        }
        fn store_release(&self, at: usize, value: u64) {
            self.cells.store(at, value);
        }
        fn fence(&self, _: Fence) {
            self.cells.store(self.word_at, self.word);
        }
    }

    #[test]
    fn an_object_that_is_deleted_while_it_is_read_is_read_all_the_same() {
        let index = small();
        let id = ObjectId::new(3, 1);
        index.fill(id, &record("name"));
        index.commit(id, State::Sealed);
        let during = |generation: u64, state: State| {
            let word = Word { generation, state }.encode();
            let cells = RecordedCells::from_cells(index.cells().snapshot());
            let cells = Deleting { cells, word_at: index.word_cell(3), word };
            Index::open(cells).unwrap().read(id)
        };
        assert_eq!(during(1, State::Deleted), Some((State::Deleted, record("name"))));
        assert_eq!(during(2, State::Free), None);
        assert_eq!(during(2, State::Created), None);
    }
}
