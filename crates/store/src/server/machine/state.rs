//! The state of the store that requests change: the parts of the state machine that every operation uses, and the operations that
//! involve several of these parts.

use super::interface::{ServerMemory, ServerSettings, SharedAllocation, StepTime};
use super::memory_pool::MemoryPool;
use super::objects::{Creator, NamedObject, ObjectTable};
use super::outputs::Outputs;
use super::pin_scan::STEP_WORK;
use super::plan::CreatePlan;
use super::readers::ReaderCounts;
use super::request_history::RequestHistory;
use super::retirement::Retirement;
use super::sessions::Sessions;
use super::waiting::WaitingRequests;
use crate::cells::Cells;
use crate::id::{ClientId, ObjectId, SlotState};
use crate::index::{ObjectIndex, ObjectRecord, Region};
use crate::protocol::{
    Answer, ByteRange, Change, Label, MemoryRef, NamedValue, NamedVersion, Refusal, Status,
};

/// The objects, memory and clients of a store, and the outputs of the current step of the state machine.
#[derive(Debug)]
pub(super) struct StoreState<C> {
    pub(super) objects: ObjectTable<C>,
    pub(super) memory: MemoryPool,
    pub(super) sessions: Sessions,
    pub(super) history: RequestHistory,
    pub(super) retirement: Retirement,
    pub(super) waiting: WaitingRequests,
    pub(super) readers: ReaderCounts,
    pub(super) outputs: Outputs,
    pub(super) now: StepTime,
}

impl<C: Cells> StoreState<C> {
    /// Creates the state over an index, before the objects in the index are recovered.
    pub(super) fn new(index: ObjectIndex<C>, settings: &ServerSettings, now: StepTime) -> Self {
        let memory = MemoryPool::new(settings, &index);
        let retirement = Retirement::new(index.geometry().slots);
        Self {
            objects: ObjectTable::new(index),
            memory,
            sessions: Sessions::new(settings.user),
            history: RequestHistory::default(),
            retirement,
            waiting: WaitingRequests::default(),
            readers: ReaderCounts::default(),
            outputs: Outputs::default(),
            now,
        }
    }

    pub(super) fn answer(&mut self, client: ClientId, id: u64, outcome: Result<Answer, Refusal>) {
        self.outputs.answer(&self.sessions, client, id, outcome);
    }

    /// Answers a request that has created an object, either now or when the client sent the request before.
    pub(super) fn answer_created(&mut self, client: ClientId, id: u64, object: ObjectId) {
        match self.objects.read(object) {
            Some((SlotState::Created, record)) => match self.memory_of(&record) {
                Some(memory) => {
                    let share = SharedAllocation { allocation: memory.allocation, is_writable: true };
                    self.outputs.respond(client, id, Answer::Created { object, memory }, Some(share));
                }
                None => self.answer(client, id, Err(Refusal::NoSuchObject { object })),
            },
            Some((SlotState::Sealed, record)) => {
                self.answer(client, id, Ok(Answer::Sealed { object, version: record.version }));
            }
            _ => self.answer(client, id, Err(Refusal::NoSuchObject { object })),
        }
    }

    fn memory_of(&self, record: &ObjectRecord) -> Option<MemoryRef> {
        let allocation = record.region.allocation;
        let allocation_record = self.memory.ledger().record(allocation)?;
        Some(MemoryRef {
            allocation,
            allocation_len: allocation_record.len,
            place: allocation_record.place,
            offset: record.offset,
        })
    }

    /// Sends a client a descriptor of the memory that contains an object.
    pub(super) fn fetch(&mut self, client: ClientId, id: u64, object: ObjectId) {
        let Some((state, record)) = self.objects.read(object) else {
            return self.answer(client, id, Err(Refusal::NoSuchObject { object }));
        };
        let is_own = self.history.get(client, record.request) == Some(object);
        // Descriptors of deleted objects are sent as well, because a client may still use an object that it has pinned.
        let may = state == SlotState::Sealed || state == SlotState::Deleted || is_own;
        match self.memory_of(&record).filter(|_| may) {
            Some(memory) => {
                let share = SharedAllocation {
                    allocation: memory.allocation,
                    is_writable: state == SlotState::Created,
                };
                self.outputs.respond(client, id, Answer::Fetched { memory }, Some(share));
            }
            None => self.answer(client, id, Err(Refusal::NotSealed { object })),
        }
    }

    pub(super) fn status(&self) -> Status {
        let (host, device) = self.memory.ledger().usage();
        let counts = self.objects.counts();
        Status {
            objects: counts.sealed,
            unsealed: counts.created,
            retired: self.retirement.count() as u64,
            clients: self.sessions.count() as u64,
            host,
            device,
            epoch: self.objects.index().epoch(),
        }
    }

    /// Returns the counters and sizes that a server reports besides its status.
    pub(super) fn values(&self) -> Vec<NamedValue> {
        let totals = self.objects.totals();
        let values = [
            ("objects_sealed", totals.sealed),
            ("bytes_sealed", totals.sealed_bytes),
            ("objects_deleted", totals.deleted),
            ("objects_freed", totals.freed),
            ("allocations", self.memory.ledger().count() as u64),
            ("arena_bytes", self.memory.ledger().arena_bytes()),
            ("preallocated_bytes", self.memory.prealloc_bytes()),
        ];
        values.map(|(name, value)| NamedValue::new(name, value)).to_vec()
    }

    /// Checks that a client may assign a name to a new object, which deletes the object that has the name now.
    pub(super) fn check_owner(&self, client: ClientId, name: &str) -> Result<(), Refusal> {
        let Some(owner) = self.objects.owner_of_name(name) else { return Ok(()) };
        if self.sessions.user(client) == Some(owner) || self.sessions.is_trusted(client) {
            return Ok(());
        }
        Err(Refusal::NameTaken { name: name.to_owned(), owner })
    }

    fn creator(&self, client: ClientId, request: u64) -> Creator {
        let owner = self.sessions.user_or_server(client);
        Creator { client, owner, request, created: self.now.unix }
    }

    /// Adds an object or a pack, whose memory is `region`, to the index. The caller has checked that the index has enough free
    /// slots.
    pub(super) fn insert(
        &mut self,
        client: ClientId,
        request: u64,
        plan: &CreatePlan<'_>,
        region: Region,
        state: SlotState,
    ) -> ObjectId {
        let object = self.objects.insert(self.creator(client, request), plan, region, state);
        self.memory.add_objects(region, plan.count());
        self.history.insert(client, request, object);
        if state == SlotState::Created {
            self.sessions.add_draft(client, object);
        } else {
            self.publish(object);
        }
        object
    }

    /// Adds a sealed object with a name over a range of an existing memory region.
    pub(super) fn insert_part(
        &mut self,
        client: ClientId,
        request: u64,
        label: Label,
        region: Region,
        part: ByteRange,
    ) -> Result<Answer, Refusal> {
        let creator = self.creator(client, request);
        let (object, version) =
            self.objects.insert_sealed(creator, label, region, (part.offset, part.len))?;
        self.memory.add_objects(region, 1);
        self.history.insert(client, request, object);
        self.publish(object);
        Ok(Answer::Sealed { object, version })
    }

    /// Seals a draft (an unsealed object or pack): assigns the versions of its objects, and makes them visible with one
    /// committing store to the index. Refused if one of the names belongs to another user by now.
    pub(super) fn seal(&mut self, client: ClientId, first: ObjectId) -> Result<Answer, Refusal> {
        let name = |id: ObjectId| self.objects.read(id).expect("the objects of a draft have records").1.name;
        let names: Vec<_> = self.objects.pack(first).map(|id| (id, name(id))).collect();
        for (_, name) in &names {
            self.check_owner(client, name)?;
        }
        let version = self.objects.seal(first, &names);
        self.sessions.finish_draft(client, first);
        self.publish(first);
        Ok(Answer::Sealed { object: first, version })
    }

    /// Completes the sealing of a single object, or of a pack whose first object has been sealed: seals the other objects of the
    /// pack, assigns the names, and deletes the objects that had these names before.
    fn publish(&mut self, first: ObjectId) {
        let mut change = Change::default();
        self.objects.count_sealed(first);
        let all = self.objects.seal_members(first);
        change.published.reserve_exact(all.len());
        for id in &all {
            let Some(NamedObject { record, replaced }) = self.objects.assign_name(*id) else { continue };
            self.waiting.name_found(&record.name, *id, &self.sessions, &mut self.outputs);
            change.is_pack |= *id == first && all.len() > 1;
            let (name, version) = (record.name, record.version);
            change.published.push(NamedVersion { name, object: *id, version });
            if let Some(replaced) = replaced {
                let mut deleted = self.retirement.retire(replaced, &mut self.objects);
                if change.deleted.is_empty() {
                    change.deleted = deleted;
                } else {
                    change.deleted.append(&mut deleted);
                }
            }
        }
        self.outputs.notify(change);
    }

    /// Deletes an object on behalf of a client.
    pub(super) fn delete(
        &mut self,
        client: ClientId,
        object: ObjectId,
        is_repeated: bool,
    ) -> Result<Answer, Refusal> {
        let is_trusted = self.sessions.is_trusted(client);
        let record = match self.objects.read(object) {
            Some((SlotState::Sealed, record)) => record,
            // A pack that is a draft (not sealed) can only be deleted as a whole, because its writer seals all of its objects or
            // none.
            Some((SlotState::Created, record))
                if is_trusted && record.pack.is_none_or(|first| first == object) =>
            {
                record
            }
            Some((SlotState::Created, _)) => return Err(Refusal::NotSealed { object }),
            // The client has sent the request again after a restart: the previous server has deleted the object.
            _ if is_repeated => return Ok(Answer::Done),
            _ => return Err(Refusal::NoSuchObject { object }),
        };
        if self.sessions.user(client) != Some(record.owner) && !is_trusted {
            return Err(Refusal::NotYours { object, owner: record.owner });
        }
        self.retire(object);
        Ok(Answer::Done)
    }

    /// Deletes a draft that its client abandons. Does nothing if the object is already sealed.
    pub(super) fn abandon(&mut self, client: ClientId, create: u64) -> Result<Answer, Refusal> {
        if let Some(object) = self.history.get(client, create) {
            self.sessions.finish_draft(client, object);
            self.drop_draft(object);
        }
        Ok(Answer::Done)
    }

    /// Deletes a draft whose writer has abandoned it or has left. If another client has deleted the draft before, the draft may
    /// be freed now.
    pub(super) fn drop_draft(&mut self, object: ObjectId) {
        match self.objects.state(object) {
            Some(SlotState::Created) => self.retire(object),
            _ => self.retirement.search(object, &self.objects),
        }
    }

    pub(super) fn retire(&mut self, object: ObjectId) {
        let deleted = self.retirement.retire(object, &mut self.objects);
        let is_pack = deleted.len() > 1 && deleted[0].object == object;
        self.outputs.notify(Change { published: Vec::new(), deleted, is_pack });
    }

    /// Scans some pins of clients, and frees deleted objects that are not pinned.
    pub(super) fn scan_pins(&mut self, server_memory: &impl ServerMemory) {
        self.retirement.recheck(self.now.elapsed, &self.objects);
        let mut work = STEP_WORK;
        while work > 0 && self.retirement.is_active() {
            if !self.retirement.read_pins(server_memory, &self.objects, &mut work) {
                return;
            }
            while let Some(unpinned) = self.next_unpinned(&mut work) {
                for id in unpinned {
                    // The first object of a pack is retained while other objects of the pack are.
                    if !self.objects.has_members(id) {
                        self.free(id);
                    }
                }
            }
        }
    }

    /// Reads some pins of clients for requests that ask for the readers of objects.
    pub(super) fn count_readers(&mut self, server_memory: &impl ServerMemory) {
        self.readers.read(server_memory, &self.sessions, &mut self.outputs);
    }

    fn next_unpinned(&mut self, work: &mut usize) -> Option<Vec<ObjectId>> {
        let (objects, memory, sessions) = (&self.objects, &self.memory, &self.sessions);
        // A deleted draft in an arena is retained while its writer is connected, because the writer could overwrite the next
        // object in the same region. Memory with a single object is never reused.
        let is_being_written = |first: ObjectId| {
            let Some((_, record)) = objects.read(first) else { return false };
            let is_arena = || memory.ledger().record(record.region.allocation).is_some_and(|it| it.is_arena);
            sessions.is_draft(record.client, first) && is_arena()
        };
        self.retirement.take_unpinned(objects, is_being_written, work)
    }

    /// Frees a deleted object: its index slot, and its memory if no other object uses the memory.
    fn free(&mut self, id: ObjectId) {
        self.retirement.remove(id);
        let Some(record) = self.objects.free(id) else { return };
        self.history.remove(record.client, record.request, id);
        self.sessions.finish_draft(record.client, id);
        let index = self.objects.index();
        self.memory.remove_object(record.region, index, self.now.elapsed, &mut self.outputs);
    }
}

#[cfg(test)]
mod tests {
    use super::super::interface::{Output, Requester};
    use super::super::ledger::HOST;
    use super::super::simulation::{GEOMETRY, POLICY, TestMemory, create, label, now, settings};
    use super::super::waiting::TimedRequest;
    use super::*;
    use crate::cells::recorded::RecordedCells;
    use crate::server::budget::tests::unlimited;

    const OWNER: ClientId = ClientId(1);
    const OTHER: ClientId = ClientId(2);
    const TRUSTED: ClientId = ClientId(3);

    /// Creates a state with an arena and three clients: two of different users, and one of the server's user.
    fn state() -> StoreState<RecordedCells> {
        let index = ObjectIndex::format(RecordedCells::new(GEOMETRY.cells()), GEOMETRY);
        let settings = settings(0);
        let mut state = StoreState::new(index, &settings, now());
        for (client, user) in [(OWNER, 1001), (OTHER, 1002), (TRUSTED, settings.user)] {
            state.sessions.join(client, unlimited().open(user));
        }
        let StoreState { objects, memory, outputs, .. } = &mut state;
        let arena = memory.allocate(HOST, 1, true, Requester::Everyone, outputs).unwrap();
        memory.ready(arena, objects.index());
        state.outputs.take();
        state
    }

    /// Adds an object of 100 bytes that the client's request `request` has created.
    fn insert(
        state: &mut StoreState<RecordedCells>,
        client: ClientId,
        request: u64,
        slot_state: SlotState,
    ) -> ObjectId {
        let region = state.memory.carve(HOST, 100).unwrap();
        let kind = create("name", 100, &[], HOST);
        state.insert(client, request, &CreatePlan::new(&kind).unwrap(), region, slot_state)
    }

    fn named(object: ObjectId, version: u64) -> NamedVersion {
        NamedVersion { name: "name".to_owned(), object, version }
    }

    #[test]
    fn clients_that_wait_for_a_name_are_answered_before_its_events_and_the_old_object_is_deleted() {
        let mut state = state();
        let first = insert(&mut state, OWNER, 1, SlotState::Sealed);
        state.outputs.take();
        let second = insert(&mut state, OWNER, 2, SlotState::Sealed);
        let (published, deleted) = (vec![named(second, 2)], vec![named(first, 1)]);
        let change = Change { published, deleted, is_pack: false };
        assert_eq!(state.outputs.take(), [Output::Notify(change)]);
        assert_eq!((state.status().objects, state.status().retired), (1, 1));
        state.retire(second);
        state.outputs.take();
        let request = TimedRequest { client: OTHER, request: 8, wait: 100 };
        let StoreState { waiting, sessions, now, .. } = &mut state;
        assert_eq!(waiting.wait_for_name(request, "name".to_owned(), now.elapsed, sessions), None);
        let third = insert(&mut state, OWNER, 3, SlotState::Sealed);
        let outputs = state.outputs.take();
        let [Output::Respond { client: OTHER, response, .. }, Output::Notify(_)] = &outputs[..] else {
            panic!("{outputs:?}")
        };
        assert_eq!((response.id, &response.answer), (8, &Answer::Found { object: third }));
    }

    #[test]
    fn only_the_owner_and_the_servers_user_change_a_name_or_an_object() {
        let mut state = state();
        let object = insert(&mut state, OWNER, 1, SlotState::Sealed);
        let name_taken = Refusal::NameTaken { name: "name".to_owned(), owner: 1001 };
        assert_eq!(state.check_owner(OTHER, "name"), Err(name_taken));
        assert_eq!([OWNER, TRUSTED].map(|client| state.check_owner(client, "name")), [Ok(()), Ok(())]);
        assert_eq!(state.check_owner(OTHER, "another"), Ok(()));
        let refused = Refusal::NotYours { object, owner: 1001 };
        assert_eq!(state.delete(OTHER, object, false), Err(refused));
        assert_eq!(state.delete(TRUSTED, object, false), Ok(Answer::Done));
        assert_eq!(state.delete(OWNER, object, true), Ok(Answer::Done), "sent again after a restart");
        assert_eq!(state.delete(OWNER, object, false), Err(Refusal::NoSuchObject { object }));
    }

    #[test]
    fn an_abandoned_draft_is_freed_with_its_memory_and_its_history() {
        let mut state = state();
        let before = state.memory.ledger().space_for(HOST, POLICY.small, 0);
        let draft = insert(&mut state, OWNER, 1, SlotState::Created);
        assert_eq!(state.history.get(OWNER, 1), Some(draft));
        assert!(state.sessions.is_draft(OWNER, draft));
        assert_eq!(state.abandon(OWNER, 1), Ok(Answer::Done));
        state.scan_pins(&TestMemory::default());
        assert_eq!((state.objects.state(draft), state.history.get(OWNER, 1)), (None, None));
        assert_eq!(state.memory.ledger().space_for(HOST, POLICY.small, 0), before);
        assert_eq!(state.abandon(OWNER, 1), Ok(Answer::Done), "no draft is left to abandon");
    }

    #[test]
    fn a_named_range_of_an_object_retains_the_memory() {
        let mut state = state();
        let object = insert(&mut state, OWNER, 1, SlotState::Sealed);
        let region = state.objects.read(object).unwrap().1.region;
        let part = ByteRange { offset: 10, len: 5 };
        let answer = state.insert_part(OWNER, 2, label("part"), region, part).unwrap();
        let Answer::Sealed { object: alias, version: 1 } = answer else { panic!("{answer:?}") };
        state.retire(object);
        state.scan_pins(&TestMemory::default());
        assert_eq!(state.objects.state(object), None);
        let (_, record) = state.objects.read(alias).unwrap();
        assert_eq!((record.offset, record.len), (region.offset + 10, 5));
        assert_ne!(state.memory.carve(HOST, 100), Some(region), "the region is still in use");
    }
}
