//! The table of all objects of a store: the index, its free slots, the names, the members of packs, and the number of objects.
//!
//! ```text
//!   names    "p" -> 3.0   "p/a" -> 4.0   "p/b" -> 5.0     the current object of each name
//!   members  3.0 -> {4.0, 5.0}                            the other objects of each pack, by its first
//!   index    words and records in shared memory; everything else here is derived from it
//! ```
//!
//! Every change of an object's state goes through this table, so that names, members and counts agree with the index. It does not
//! decide whether a change is allowed, and it does not manage memory.

use std::collections::{BTreeMap, BTreeSet};

use super::plan::CreatePlan;
use super::slots::Slots;
use crate::cells::Cells;
use crate::id::{ClientId, ObjectId, SlotState};
use crate::index::{ObjectIndex, ObjectRecord, Region};
use crate::protocol::{Label, Refusal};

/// The number of objects in each of the states that a `Status` request reports.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct ObjectCounts {
    pub(super) sealed: u64,
    pub(super) created: u64,
}

impl ObjectCounts {
    fn of(&mut self, state: SlotState) -> Option<&mut u64> {
        match state {
            SlotState::Sealed => Some(&mut self.sealed),
            SlotState::Created => Some(&mut self.created),
            SlotState::Free | SlotState::Deleted => None,
        }
    }
}

/// The number of changes of objects since the server started.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct ObjectTotals {
    pub(super) sealed: u64,
    /// The length of all sealed objects; a pack has one length.
    pub(super) sealed_bytes: u64,
    pub(super) deleted: u64,
    pub(super) freed: u64,
}

/// The creator of an object: client, user, request and time. They are the same for all objects of a pack (objects in one memory).
#[derive(Debug, Clone, Copy)]
pub(super) struct Creator {
    pub(super) client: ClientId,
    /// The user who owns the object.
    pub(super) owner: u32,
    pub(super) request: u64,
    /// The time at which the object was created, in milliseconds since the Unix epoch.
    pub(super) created: u64,
}

/// An object that has just been assigned its name, and the object that had the name before.
#[derive(Debug)]
pub(super) struct NamedObject {
    pub(super) record: ObjectRecord,
    /// The object that had the same name before.
    pub(super) replaced: Option<ObjectId>,
}

/// The table of all objects of a store.
#[derive(Debug)]
pub(super) struct ObjectTable<C> {
    index: ObjectIndex<C>,
    slots: Slots,
    /// The object that each name currently refers to.
    names: BTreeMap<String, ObjectId>,
    /// The other objects of each pack (objects in one memory), by the first object of the pack.
    members: BTreeMap<ObjectId, BTreeSet<ObjectId>>,
    counts: ObjectCounts,
    totals: ObjectTotals,
}

impl<C: Cells> ObjectTable<C> {
    /// Creates a table over an index. Objects of an existing index are added by [`Self::recover_object`],
    /// [`Self::recover_free_slot`] and [`Self::recover_names`].
    pub(super) fn new(index: ObjectIndex<C>) -> Self {
        let slots = Slots::used_up_to(index.geometry().slots, index.used_slots());
        let (names, members) = (BTreeMap::new(), BTreeMap::new());
        let (counts, totals) = (ObjectCounts::default(), ObjectTotals::default());
        Self { index, slots, names, members, counts, totals }
    }

    pub(super) fn index(&self) -> &ObjectIndex<C> {
        &self.index
    }

    pub(super) fn counts(&self) -> ObjectCounts {
        self.counts
    }

    /// Returns the number of changes of objects since the server started.
    pub(super) fn totals(&self) -> ObjectTotals {
        self.totals
    }

    /// Adds the length of an object or a pack, by its first object, to the length of all sealed objects.
    pub(super) fn count_sealed(&mut self, first: ObjectId) {
        self.totals.sealed_bytes += self.index.object_len(first).unwrap_or_default();
    }

    /// Returns the state and the index record of an object; `None` if the object does not exist.
    pub(super) fn read(&self, id: ObjectId) -> Option<(SlotState, ObjectRecord)> {
        self.index.read(id)
    }

    pub(super) fn state(&self, id: ObjectId) -> Option<SlotState> {
        self.index.state(id)
    }

    /// Returns the object that a name currently refers to.
    pub(super) fn find(&self, name: &str) -> Option<ObjectId> {
        self.names.get(name).copied()
    }

    /// Returns the user who owns the object that a name currently refers to.
    pub(super) fn owner_of_name(&self, name: &str) -> Option<u32> {
        self.find(name).and_then(|id| self.index.owner(id))
    }

    /// Returns the version that the next object with this name gets.
    pub(super) fn next_version(&self, name: &str) -> u64 {
        let current = self.find(name).and_then(|current| self.index.read(current));
        1 + current.map_or(0, |(_, record)| record.version)
    }

    /// Returns an object, followed by the other objects of its pack if the object is the first of a pack.
    pub(super) fn pack(&self, first: ObjectId) -> impl Iterator<Item = ObjectId> {
        [first].into_iter().chain(self.members.get(&first).into_iter().flatten().copied())
    }

    /// Returns true if an object is the first of a pack that still has other objects.
    pub(super) fn has_members(&self, first: ObjectId) -> bool {
        self.members.get(&first).is_some_and(|members| !members.is_empty())
    }

    /// Returns the number of objects that [`Self::pack`] returns.
    pub(super) fn pack_len(&self, first: ObjectId) -> usize {
        1 + self.members.get(&first).map_or(0, BTreeSet::len)
    }

    /// Returns true if an object belongs to a pack whose first object is another, sealed object. The record of such an object is
    /// retained as long as the pack, because the record holds the location of the bytes.
    pub(super) fn is_in_sealed_pack(&self, id: ObjectId, record: &ObjectRecord) -> bool {
        let first = record.pack.filter(|first| *first != id);
        first.is_some_and(|first| self.index.state(first) == Some(SlotState::Sealed))
    }

    /// Returns a refusal if the index has fewer than `count` free slots.
    pub(super) fn check_slots(&self, count: usize) -> Result<(), Refusal> {
        if self.slots.free_count() < count { Err(self.full()) } else { Ok(()) }
    }

    fn full(&self) -> Refusal {
        Refusal::IndexFull { slots: self.index.geometry().slots }
    }

    /// Adds a sealed object over a range of an existing memory region to the index. [`Self::assign_name`] assigns the object's
    /// name.
    pub(super) fn insert_sealed(
        &mut self,
        creator: Creator,
        label: Label,
        region: Region,
        (offset, len): (u64, u64),
    ) -> Result<(ObjectId, u64), Refusal> {
        let (slot, generation) = self.slots.allocate().ok_or_else(|| self.full())?;
        let object = ObjectId::new(slot, generation);
        let version = self.next_version(&label.name);
        let record = ObjectRecord {
            version,
            name: label.name,
            meta: label.meta,
            region,
            offset: region.offset + offset,
            len,
            created: creator.created,
            owner: creator.owner,
            client: creator.client,
            request: creator.request,
            pack: None,
        };
        self.index.write_record(object, &record);
        self.commit(object, SlotState::Sealed);
        Ok((object, version))
    }

    /// Adds an object or a pack in the given state to the index, and returns its first object. The first object is committed
    /// last: its commit decides whether the pack exists.
    ///
    /// # Panics
    /// If the index has too few free slots. The caller has to call [`Self::check_slots`] before.
    pub(super) fn insert(
        &mut self,
        creator: Creator,
        plan: &CreatePlan<'_>,
        region: Region,
        state: SlotState,
    ) -> ObjectId {
        let mut take = || {
            let (slot, generation) = self.slots.allocate().expect("the caller has checked the free slots");
            ObjectId::new(slot, generation)
        };
        let first = take();
        let mut others: Vec<_> = plan.members.iter().map(|_| take()).collect();
        // Readers of the index order the objects of a pack that have the same offset by slot. An empty object has the offset of
        // the object that follows, so the slots must be in order.
        others.sort_unstable_by_key(|id| id.slot());
        let record = |label: &Label, offset: u64, len: u64| ObjectRecord {
            name: label.name.clone(),
            meta: label.meta.clone(),
            region,
            offset: region.offset + offset,
            len,
            version: if state == SlotState::Sealed { self.next_version(&label.name) } else { 0 },
            created: creator.created,
            owner: creator.owner,
            client: creator.client,
            request: creator.request,
            pack: (!others.is_empty()).then_some(first),
        };
        let laid_out = plan.members.iter().zip(&plan.offsets);
        let records: Vec<_> =
            laid_out.map(|(member, offset)| record(&member.label, *offset, member.len)).collect();
        let whole = record(plan.label, 0, plan.len);
        for (id, record) in others.iter().zip(records) {
            self.index.write_record(*id, &record);
            self.commit(*id, SlotState::Created);
        }
        self.index.write_record(first, &whole);
        self.commit(first, state);
        if !others.is_empty() {
            self.members.insert(first, others.into_iter().collect());
        }
        first
    }

    /// Changes the state of an object with a single store to the index, which commits the change.
    fn commit(&mut self, id: ObjectId, state: SlotState) {
        if let Some(count) = self.index.state(id).and_then(|before| self.counts.of(before)) {
            *count -= 1;
        }
        if let Some(count) = self.counts.of(state) {
            *count += 1;
        }
        match state {
            SlotState::Sealed => self.totals.sealed += 1,
            SlotState::Deleted => self.totals.deleted += 1,
            SlotState::Free => self.totals.freed += 1,
            SlotState::Created => {}
        }
        self.index.commit(id, state);
    }

    /// Sets the versions of all objects of a draft (an unsealed object or pack), and seals the first object. `names` are the
    /// objects with their names. Returns the version of the first object.
    pub(super) fn seal(&mut self, first: ObjectId, names: &[(ObjectId, String)]) -> u64 {
        let mut version = 0;
        for (id, name) in names {
            let next = self.next_version(name);
            self.index.set_version(*id, next);
            version = if *id == first { next } else { version };
        }
        self.commit(first, SlotState::Sealed);
        version
    }

    /// Seals the other objects of a pack whose first object is already sealed. Returns all objects of the pack.
    pub(super) fn seal_members(&mut self, first: ObjectId) -> Vec<ObjectId> {
        let pack: Vec<_> = self.pack(first).collect();
        for other in pack.iter().filter(|id| **id != first) {
            self.commit(*other, SlotState::Sealed);
        }
        pack
    }

    /// Makes the name in the record of a sealed object refer to this object; returns `None` if the record has no name.
    pub(super) fn assign_name(&mut self, id: ObjectId) -> Option<NamedObject> {
        let (_, record) = self.index.read(id).filter(|(_, record)| !record.name.is_empty())?;
        let replaced = self.names.insert(record.name.clone(), id);
        self.index.set_name(&record.name, replaced, id);
        Some(NamedObject { record, replaced })
    }

    /// Removes the name of an object and marks the object as deleted. Returns the object's previous state, and its record.
    pub(super) fn mark_deleted(&mut self, id: ObjectId) -> Option<(SlotState, ObjectRecord)> {
        let (state, record) = self.index.read(id)?;
        if state != SlotState::Deleted {
            if self.find(&record.name) == Some(id) {
                self.names.remove(&record.name);
                self.index.remove_name(&record.name, id);
            }
            self.commit(id, SlotState::Deleted);
        }
        Some((state, record))
    }

    #[cfg(test)]
    pub(super) fn names(&self) -> &BTreeMap<String, ObjectId> {
        &self.names
    }

    #[cfg(test)]
    pub(super) fn free_slots(&self) -> usize {
        self.slots.free_count()
    }

    /// Frees the index slot of a deleted object. Returns the object's record.
    pub(super) fn free(&mut self, id: ObjectId) -> Option<ObjectRecord> {
        self.members.remove(&id);
        let (_, record) = self.index.read(id)?;
        if let Some(others) = record.pack.and_then(|first| self.members.get_mut(&first)) {
            others.remove(&id);
        }
        self.commit(id, SlotState::Free);
        self.slots.free(id.slot(), id.generation() + 1);
        Some(record)
    }
}

/// Functions for the [`recovery`](super::recovery) of the table of objects from an index.
impl<C: Cells> ObjectTable<C> {
    /// Adds an index slot that is marked as free to the free slots of the table.
    pub(super) fn recover_free_slot(&mut self, slot: usize, generation: u64) {
        self.slots.free(slot, generation);
    }

    /// Adds an object that the index lists to the table, and changes the object's state in the index if it differs from `state`.
    pub(super) fn recover_object(&mut self, id: ObjectId, state: SlotState, record: &ObjectRecord) {
        if self.index.state(id) != Some(state) {
            self.index.commit(id, state);
        }
        if let Some(first) = record.pack.filter(|first| *first != id) {
            self.members.entry(first).or_default().insert(id);
        }
    }

    /// Frees the index slot of an object that cannot be recovered.
    pub(super) fn recover_lost(&mut self, id: ObjectId) {
        self.index.commit(id, SlotState::Free);
        self.slots.free(id.slot(), id.generation() + 1);
    }

    /// Counts the objects of the index, and assigns each name to its newest object. Returns the objects that newer objects have
    /// replaced.
    pub(super) fn recover_names(&mut self) -> Vec<ObjectId> {
        self.counts = ObjectCounts::default();
        for slot in 0..self.index.used_slots() {
            if let Some(count) = self.counts.of(self.index.word(slot).state) {
                *count += 1;
            }
        }
        let mut replaced = Vec::new();
        let mut newest: BTreeMap<String, (u64, ObjectId)> = BTreeMap::new();
        let sealed = self.index.objects().filter(|(_, state, _)| *state == SlotState::Sealed);
        for (id, _, record) in sealed.filter(|(_, _, record)| !record.name.is_empty()) {
            let entry = newest.entry(record.name).or_insert((record.version, id));
            if *entry != (record.version, id) {
                let older = (*entry).min((record.version, id));
                *entry = (*entry).max((record.version, id));
                replaced.push(older.1);
            }
        }
        self.index.clear_names();
        for (name, (_, id)) in newest {
            self.index.set_name(&name, None, id);
            self.names.insert(name, id);
        }
        replaced
    }
}

#[cfg(test)]
mod tests {
    use super::super::simulation::{GEOMETRY, create, label};
    use super::*;
    use crate::cells::recorded::RecordedCells;
    use crate::id::AllocationId;

    const CREATOR: Creator = Creator { client: ClientId(1), owner: 7, request: 3, created: 11 };

    fn region() -> Region {
        Region { allocation: AllocationId::new(0, 0), offset: 0, len: 1 << 16 }
    }

    fn table() -> ObjectTable<RecordedCells> {
        ObjectTable::new(ObjectIndex::format(RecordedCells::new(GEOMETRY.cells()), GEOMETRY))
    }

    /// Adds a sealed pack of three objects to the table, with their names.
    fn sealed_pack(table: &mut ObjectTable<RecordedCells>) -> ObjectId {
        let kind = create("p", 0, &[("p/a", 10), ("p/b", 20)], 0);
        let first = table.insert(CREATOR, &CreatePlan::new(&kind).unwrap(), region(), SlotState::Created);
        assert_eq!(table.counts(), ObjectCounts { sealed: 0, created: 3 });
        let name = |id| (id, table.read(id).unwrap().1.name);
        let names: Vec<_> = table.pack(first).map(name).collect();
        assert_eq!(table.seal(first, &names), 1);
        for id in table.seal_members(first) {
            assert_eq!(table.assign_name(id).unwrap().replaced, None);
        }
        first
    }

    #[test]
    fn a_sealed_pack_is_found_by_all_its_names() {
        let mut table = table();
        let first = sealed_pack(&mut table);
        assert_eq!((table.counts(), table.pack_len(first)), (ObjectCounts { sealed: 3, created: 0 }, 3));
        assert_eq!(table.find("p"), Some(first));
        let member = table.find("p/b").unwrap();
        let (state, record) = table.read(member).unwrap();
        assert_eq!((state, record.pack, record.owner), (SlotState::Sealed, Some(first), 7));
        assert!(table.is_in_sealed_pack(member, &record) && table.has_members(first));
        assert_eq!((table.owner_of_name("p/b"), table.owner_of_name("p/c")), (Some(7), None));
    }

    #[test]
    fn the_next_object_of_a_name_replaces_the_previous_one() {
        let mut table = table();
        let first = sealed_pack(&mut table);
        let (other, version) = table.insert_sealed(CREATOR, label("p"), region(), (5, 6)).unwrap();
        assert_eq!((version, table.find("p")), (2, Some(first)), "the name is assigned by a separate store");
        assert_eq!(table.assign_name(other).unwrap().replaced, Some(first));
        assert_eq!((table.find("p"), table.next_version("p")), (Some(other), 3));
        let (_, record) = table.read(other).unwrap();
        assert_eq!((record.offset, record.len, record.created), (5, 6, 11));
    }

    #[test]
    fn deleting_removes_the_name_and_freeing_the_slot() {
        let mut table = table();
        let first = sealed_pack(&mut table);
        let pack: Vec<_> = table.pack(first).collect();
        for id in &pack {
            assert_eq!(table.mark_deleted(*id).unwrap().0, SlotState::Sealed);
        }
        assert_eq!(table.mark_deleted(first).unwrap().0, SlotState::Deleted);
        assert_eq!((table.find("p"), table.counts()), (None, ObjectCounts::default()));
        for id in pack.iter().rev() {
            assert_eq!(table.free(*id).unwrap().request, 3);
        }
        assert_eq!((table.state(first), table.read(first), table.has_members(first)), (None, None, false));
        assert!(table.free(first).is_none());
        table.check_slots(GEOMETRY.slots).unwrap();
        assert_eq!(table.check_slots(GEOMETRY.slots + 1), Err(Refusal::IndexFull { slots: GEOMETRY.slots }));
    }

    #[test]
    fn a_table_is_recovered_from_its_index() {
        let mut table = table();
        let first = sealed_pack(&mut table);
        let (other, _) = table.insert_sealed(CREATOR, label("p"), region(), (0, 1)).unwrap();
        // The simulated server died after it added the other object, and before it assigned the name to this object.
        let mut recovered = ObjectTable::new(table.index().clone());
        for (id, state, record) in table.index().objects() {
            recovered.recover_object(id, state, &record);
        }
        assert_eq!(recovered.recover_names(), [first]);
        assert_eq!(
            (recovered.find("p"), recovered.counts()),
            (Some(other), ObjectCounts { sealed: 4, created: 0 })
        );
        assert_eq!(recovered.pack(first).collect::<Vec<_>>(), table.pack(first).collect::<Vec<_>>());
    }
}
