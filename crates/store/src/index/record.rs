//! The records of objects in the index. A record is written while its slot is free; later, only the version is set, before the
//! object is sealed.

use crate::cells::{Cells, FencePoint};
use crate::convert::{low_u32, to_usize};
use crate::id::{AllocationId, ClientId, ObjectId, SlotState, SlotWord};

use super::layout::{ObjectIndex, ObjectLocation};

/// The maximum length of an object's name, in bytes.
pub(crate) const MAX_NAME: usize = 200;

/// The maximum length of the metadata that users attach to an object, in bytes.
pub(crate) const MAX_META: usize = 216;

const CELL: usize = size_of::<u64>();
const AT_NAME: usize = 12;
const AT_META: usize = AT_NAME + MAX_NAME / CELL;

/// The number of eight-byte cells of one object record in the index.
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

/// A range of an allocation that the server allocates and frees as a unit. The objects of a pack (several objects in one memory)
/// share one region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Region {
    pub(crate) allocation: AllocationId,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// The record of an object in the index: its name, metadata, location and origin, but not its state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ObjectRecord {
    /// The name of the object; empty if the object is only found by its id.
    pub(crate) name: String,
    /// The metadata that users attach to the object; the store does not interpret it.
    pub(crate) meta: Vec<u8>,
    pub(crate) region: Region,
    /// The offset of the object in its allocation, in bytes.
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// The version of the object, one more than that of the object that had the same name before; zero until the object is
    /// sealed.
    pub(crate) version: u64,
    /// The time at which the object was created, in milliseconds since the Unix epoch.
    pub(crate) created: u64,
    /// The user who created the object, and may delete it.
    pub(crate) owner: u32,
    /// The client whose request created the object. The server recognizes a repeated request by the client and the id of the
    /// request.
    pub(crate) client: ClientId,
    pub(crate) request: u64,
    /// The first object of the pack that contains this object, which may be this object itself; `None` outside a pack.
    pub(crate) pack: Option<ObjectId>,
}

impl<C: Cells> ObjectIndex<C> {
    fn record_cell(&self, slot: usize) -> usize {
        self.geometry().first_record() + slot * RECORD_CELLS
    }

    /// Writes the record of an object whose slot is free. Clients do not read the record before the object is committed.
    pub(crate) fn write_record(&self, id: ObjectId, record: &ObjectRecord) {
        debug_assert!(record.name.len() <= MAX_NAME && record.meta.len() <= MAX_META);
        let at = self.record_cell(id.slot());
        let store = |cell: usize, value: u64| self.cells().store(at + cell, value);
        // Seqlock: a reader that sees one of the following stores finds a changed word when it checks the slot's word afterwards.
        self.cells().fence(FencePoint::Record);
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

    /// Sets the version of an object that is about to be sealed. If the server dies before the seal, its successor sets the
    /// version again.
    pub(crate) fn set_version(&self, id: ObjectId, version: u64) {
        self.cells().store(self.record_cell(id.slot()) + AT_VERSION, version);
    }

    /// Reads the state and the record of an object; returns `None` if no object has this id. The object is not pinned and may be
    /// freed at any time.
    pub(crate) fn read(&self, id: ObjectId) -> Option<(SlotState, ObjectRecord)> {
        let mut state = self.state(id)?;
        loop {
            let record = self.record(id);
            self.cells().fence(FencePoint::Record);
            let now = self.state(id)?;
            if now == state {
                return Some((state, record?));
            }
            // The object has advanced to its next state, so its record is read again. An object has at most three states.
            state = now;
        }
    }

    /// Iterates over all objects of the index, in no particular order.
    pub(crate) fn objects(&self) -> impl Iterator<Item = (ObjectId, SlotState, ObjectRecord)> {
        (0..self.used_slots()).filter_map(|slot| {
            let SlotWord { generation, state } = self.word(slot);
            if state == SlotState::Free {
                return None;
            }
            let id = ObjectId::new(slot, generation);
            self.read(id).map(|(state, record)| (id, state, record))
        })
    }

    /// Reads the record of a slot. Unless the object is pinned or the slot's word is checked afterwards, the record may be torn
    /// (partly overwritten).
    fn record(&self, id: ObjectId) -> Option<ObjectRecord> {
        let at = self.record_cell(id.slot());
        let load = |cell: usize| self.cells().load(at + cell);
        let owner = load(AT_OWNER);
        let (name, meta) = lengths(owner);
        Some(ObjectRecord {
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

    /// Reads `len` bytes from consecutive cells of the index.
    fn text(&self, first: usize, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len.next_multiple_of(CELL));
        for cell in 0..len.div_ceil(CELL) {
            bytes.extend(self.cells().load(first + cell).to_le_bytes());
        }
        bytes.truncate(len);
        bytes
    }

    /// Returns the metadata of a pinned object.
    pub(crate) fn meta(&self, id: ObjectId) -> Vec<u8> {
        let at = self.record_cell(id.slot());
        let (_, len) = lengths(self.cells().load(at + AT_OWNER));
        self.text(at + AT_META, len)
    }

    /// Returns the first object of the pack that contains a pinned object; `None` outside a pack.
    pub(crate) fn pack(&self, id: ObjectId) -> Option<ObjectId> {
        ObjectId::from_u64(self.cells().load(self.record_cell(id.slot()) + AT_PACK))
    }

    /// Returns the location of a pinned object: its allocation, offset and length.
    pub(crate) fn location(&self, id: ObjectId) -> Option<ObjectLocation> {
        let at = self.record_cell(id.slot());
        let allocation = AllocationId::from_u64(self.cells().load(at + AT_ALLOCATION))?;
        let (offset, len) = (self.cells().load(at + AT_OFFSET), self.cells().load(at + AT_LEN));
        Some(ObjectLocation { allocation, offset, len })
    }

    /// Returns the user who created an object. Only the server, which writes the records, calls this function.
    pub(crate) fn owner(&self, id: ObjectId) -> Option<u32> {
        self.state(id)?;
        Some(low_u32(self.cells().load(self.record_cell(id.slot()) + AT_OWNER)))
    }

    /// Returns the length of an object. Only the server, which writes the records, calls this function.
    pub(crate) fn object_len(&self, id: ObjectId) -> Option<u64> {
        self.state(id)?;
        Some(self.cells().load(self.record_cell(id.slot()) + AT_LEN))
    }

    /// Returns true if a pinned object has the given name.
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

/// Decodes the lengths of an object's name and metadata, limited to the space of a record.
fn lengths(owner: u64) -> (usize, usize) {
    let part = |shift: u32, most: usize| to_usize(owner >> shift & 0xffff).min(most);
    (part(32, MAX_NAME), part(48, MAX_META))
}

/// Packs up to eight bytes into one cell of the index, padded with zeros.
fn number(chunk: &[u8]) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|n| chunk.get(n).copied().unwrap_or(0)))
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::super::layout::tests::small;
    use super::*;
    use crate::cells::recorded::RecordedCells;

    pub(crate) fn record(name: &str) -> ObjectRecord {
        let region = Region { allocation: AllocationId::new(1, 2), offset: 4096, len: 8192 };
        ObjectRecord {
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
    fn a_record_fills_whole_cache_lines() {
        assert_eq!(RECORD_CELLS, 64);
    }

    proptest! {
        #[test]
        fn a_record_reads_back_as_written(
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
                ObjectRecord { name, meta, offset, len, version, created, owner, client: ClientId(client), request, pack, ..record("") };
            // After the long record, a short record is written to the same slot: a reader must see no bytes of the long one.
            index.write_record(id, &record(&"x".repeat(MAX_NAME)));
            index.write_record(id, &written);
            index.commit(id, SlotState::Created);
            prop_assert_eq!(index.read(id), Some((SlotState::Created, written.clone())));
            let allocation = written.region.allocation;
            prop_assert_eq!(index.location(id), Some(ObjectLocation { allocation, offset, len }));
            prop_assert_eq!((index.meta(id), index.pack(id)), (written.meta.clone(), written.pack));
            prop_assert!(index.is_named(id, &written.name));
            let longer = format!("{}x", written.name);
            prop_assert!(!index.is_named(id, &longer));
        }

        #[test]
        fn reading_a_record_of_arbitrary_cells_never_panics(cells: [u64; 64]) {
            let index = small();
            let id = ObjectId::new(7, 1);
            for (cell, value) in cells.iter().enumerate() {
                index.cells().store(index.record_cell(7) + cell, *value);
            }
            index.commit(id, SlotState::Sealed);
            if let Some((_, record)) = index.read(id) {
                prop_assert!(record.name.len() <= MAX_NAME && record.meta.len() <= MAX_META);
            }
            let _ = (index.location(id), index.is_named(id, "name"), index.pack(id));
            prop_assert!(index.meta(id).len() <= MAX_META);
        }
    }

    #[test]
    fn objects_lists_committed_objects_only() {
        let index = small();
        let ids = [ObjectId::new(0, 0), ObjectId::new(4, 0), ObjectId::new(2, 0)];
        for (id, name) in ids.iter().zip(["a", "b", "c"]) {
            index.write_record(*id, &record(name));
        }
        index.commit(ids[0], SlotState::Sealed);
        index.commit(ids[1], SlotState::Created);
        let found: Vec<_> = index.objects().map(|(id, state, record)| (id, state, record.name)).collect();
        let expected =
            [(ids[0], SlotState::Sealed, "a".to_owned()), (ids[1], SlotState::Created, "b".to_owned())];
        assert_eq!(found, expected);
        assert_eq!(index.read(ObjectId::new(0, 1)), None);
    }

    /// Cells that simulate a server which deletes an object while a reader reads the object's record.
    #[derive(Debug)]
    struct DeletingCells {
        cells: RecordedCells,
        word_at: usize,
        word: u64,
    }

    impl Cells for DeletingCells {
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
        fn fence(&self, _: FencePoint) {
            self.cells.store(self.word_at, self.word);
        }
    }

    #[test]
    fn an_object_that_is_deleted_during_a_read_is_still_read() {
        let index = small();
        let id = ObjectId::new(3, 1);
        index.write_record(id, &record("name"));
        index.commit(id, SlotState::Sealed);
        let during = |generation: u64, state: SlotState| {
            let word = SlotWord { generation, state }.encode();
            let cells = RecordedCells::from_cells(index.cells().snapshot());
            let cells = DeletingCells { cells, word_at: index.word_cell(3), word };
            ObjectIndex::open(cells).unwrap().read(id)
        };
        assert_eq!(during(1, SlotState::Deleted), Some((SlotState::Deleted, record("name"))));
        assert_eq!(during(2, SlotState::Free), None);
        assert_eq!(during(2, SlotState::Created), None);
    }
}
