//! How objects go: no longer found, kept while somebody has them pinned, and then free.

use std::collections::BTreeSet;

use super::pin_scan::{WORK_OF_A_STEP, WORK_OF_FREEING};
use super::server::{Output, Server, ServerMemory};
use crate::cells::Cells;
use crate::id::{AllocationId, ClientId, ObjectId, State};
use crate::index::Record;
use crate::protocol::{Answer, EventKind, Refusal};

impl<C: Cells> Server<C> {
    pub(super) fn delete(
        &mut self,
        client: ClientId,
        object: ObjectId,
        again: bool,
    ) -> Result<Answer, Refusal> {
        let user = self.clients.get(&client).map(|client| client.account.uid());
        let is_servers_own = user == Some(self.settings.user);
        let record = match self.index.read(object) {
            Some((State::Sealed, record)) => record,
            // A draft of a pack goes as a whole: its writer seals all of it or nothing.
            Some((State::Created, record))
                if is_servers_own && record.pack.is_none_or(|first| first == object) =>
            {
                record
            }
            Some((State::Created, _)) => return Err(Refusal::NotSealed { object }),
            // Said again after a restart, and done before it.
            _ if again => return Ok(Answer::Done),
            _ => return Err(Refusal::NoSuchObject { object }),
        };
        if user != Some(record.owner) && !is_servers_own {
            return Err(Refusal::NotYours { object, owner: record.owner });
        }
        self.retire(object);
        Ok(Answer::Done)
    }

    pub(super) fn abandon(&mut self, client: ClientId, create: u64) -> Result<Answer, Refusal> {
        if let Some(object) = self.made.get(client, create) {
            // The client says that it does not write it any more, also where it was deleted by another.
            self.finish_draft(client, object);
            match self.index.state(object) {
                Some(State::Created) => self.retire(object),
                _ => self.look_for(object),
            }
        }
        Ok(Answer::Done)
    }

    /// A draft is sealed, given up or free: its writer holds it no longer.
    pub(super) fn finish_draft(&mut self, client: ClientId, object: ObjectId) {
        if let Some(client) = self.clients.get_mut(&client) {
            client.drafts.remove(&object);
        }
    }

    /// Marks an object as deleted, and if it is the first of a pack, all of the pack: they are freed when nobody has them
    /// pinned. The mark on the first is the store that counts. The record of one object of a pack stays as long as the pack does, of
    /// whose bytes it says where they are.
    pub(super) fn retire(&mut self, object: ObjectId) {
        let pack = self.pack(object);
        for id in pack.iter().copied() {
            let Some((state, record)) = self.index.read(id) else { continue };
            if state != State::Deleted {
                if self.names.get(&record.name) == Some(&id) {
                    self.names.remove(&record.name);
                    self.index.forget(&record.name, id);
                }
                self.commit(id, State::Deleted);
            }
            if !self.is_of_a_pack_that_stays(id, &record) {
                self.scan.add(id);
            }
            if state == State::Sealed && !record.name.is_empty() {
                self.tell(&record.name, id, EventKind::Deleted);
            }
        }
        self.look_for(object);
    }

    pub(super) fn is_of_a_pack_that_stays(&self, id: ObjectId, record: &Record) -> bool {
        let first = record.pack.filter(|first| *first != id);
        first.is_some_and(|first| self.index.state(first) == Some(State::Sealed))
    }

    /// Has the pins of an object looked for, and if it is of a pack, those of all of the pack: a pin of the first holds all
    /// others, and a pin of another holds the first. Does nothing if the first is not marked as deleted: a pass that began
    /// before the mark must not free it.
    pub(super) fn look_for(&mut self, id: ObjectId) {
        let first = self.index.read(id).and_then(|(_, record)| record.pack).unwrap_or(id);
        if self.scan.contains(first) {
            self.scan.look_for(first);
        }
    }

    /// A pin of an object was let go.
    pub(super) fn kicked(&mut self, object: ObjectId) {
        if self.scan.contains(object) {
            self.look_for(object);
        }
    }

    /// A page of pins is gone that had this in it.
    pub(super) fn kicked_by_pin(&mut self, pin: u64) {
        if let Some(object) = ObjectId::from_u64(pin) {
            self.kicked(object);
        }
    }

    /// Reads some pins, and frees what turns out to be pinned by nobody.
    pub(super) fn scan_pins(&mut self, server_memory: &impl ServerMemory) {
        for id in self.scan.due(self.now.elapsed) {
            self.look_for(id);
        }
        let mut work = WORK_OF_A_STEP;
        while work > 0 && self.scan.is_active() {
            let size = |first| 1 + self.members.get(&first).map_or(0, BTreeSet::len);
            if !self.scan.read(server_memory, size, &mut work) {
                return;
            }
            self.free_checked(&mut work);
        }
    }

    /// Frees what a pass has looked for and not found.
    fn free_checked(&mut self, work: &mut usize) {
        while *work > 0
            && let Some(first) = self.scan.take_checked()
        {
            let ids = [first].into_iter().chain(self.members.get(&first).into_iter().flatten().copied());
            let is_held = self.scan.is_pinned(first) || self.is_being_written(first);
            let is_free = |id: &ObjectId| self.scan.contains(*id) && !self.scan.is_pinned(*id);
            let unpinned = ids.filter(|id| !is_held && is_free(id));
            let mut unpinned: Vec<_> = unpinned.collect();
            // The first of a pack goes last.
            unpinned.reverse();
            *work = work.saturating_sub((1 + unpinned.len()) * WORK_OF_FREEING);
            for id in unpinned {
                if self.members.get(&id).is_none_or(BTreeSet::is_empty) {
                    self.free(id);
                }
            }
        }
    }

    /// Whether a deleted object is a draft in memory that others use as well, and its writer is still there: what was
    /// put in its place would be written over. Memory of its own is not used again.
    fn is_being_written(&self, first: ObjectId) -> bool {
        let Some((_, record)) = self.index.read(first) else { return false };
        let drafts = self.clients.get(&record.client).map(|client| &client.drafts);
        let is_draft = drafts.is_some_and(|drafts| drafts.contains(&first));
        is_draft && self.ledger.record(record.region.allocation).is_some_and(|memory| memory.is_arena)
    }

    /// Gives the memory of an object back, then its slot, then the allocation where that was the last of it.
    fn free(&mut self, id: ObjectId) {
        self.scan.remove(id);
        self.members.remove(&id);
        let Some((_, record)) = self.index.read(id) else { return };
        if let Some(others) = record.pack.and_then(|first| self.members.get_mut(&first)) {
            others.remove(&id);
        }
        self.made.remove(record.client, record.request, id);
        self.finish_draft(record.client, id);
        let idle = self.ledger.let_go(record.region);
        self.commit(id, State::Free);
        self.slots.give_back(id.slot(), id.generation() + 1);
        if let Some(allocation) = idle {
            let gone = self.ledger.record(allocation).filter(|record| !record.is_arena);
            self.close_allocation(allocation);
            if let Some(gone) = gone {
                self.prealloc_replacement(gone.place, gone.len);
            }
        }
    }

    pub(super) fn close_allocation(&mut self, allocation: AllocationId) {
        self.index.remove_allocation(allocation);
        self.ledger.close(allocation);
        self.outputs.push(Output::Release { allocation });
    }
}

#[cfg(test)]
mod tests {
    use super::super::Input;
    use super::super::simulation::{Simulation, create, label, sealed};
    use super::*;
    use crate::protocol::Ask;

    /// A sim with a sealed pack of three.
    fn packed() -> (Simulation, ClientId, ObjectId) {
        let mut sim = Simulation::new();
        let client = sim.join(1);
        let members = [("p/a", 5000), ("p/b", 6000), ("p/c", 20_000)];
        sim.one(client, create("p", 0, &members, 0), &[]);
        let made = sim.requests;
        let first = sealed(&sim.one(client, Ask::Seal { create: made }, &[]));
        (sim, client, first)
    }

    #[test]
    fn all_pins_are_looked_at_once_for_a_pack() {
        let (mut sim, client, first) = packed();
        let before = sim.memory.looks.get();
        sim.one(client, Ask::Delete { object: first }, &[]);
        assert_eq!(sim.memory.looks.get() - before, 1);
    }

    fn names<C: Cells>(server: &Server<C>) -> Vec<String> {
        let mut names: Vec<_> = server.index.objects().map(|(_, _, record)| record.name).collect();
        names.sort();
        names
    }

    /// The object that has a name in its record.
    fn names_of<C: Cells>(server: &Server<C>, name: &str) -> ObjectId {
        server.index.objects().find(|(_, _, record)| record.name == name).unwrap().0
    }

    #[test]
    fn a_kick_costs_nothing_where_nothing_is_deleted() {
        let (mut sim, client, first) = packed();
        let before = sim.memory.looks.get();
        for object in [first, ObjectId::new(20, 7)] {
            assert_eq!(sim.ask(client, Ask::Kick { object }, &[]), []);
        }
        assert_eq!(sim.memory.looks.get(), before);
    }

    #[test]
    fn a_draft_belongs_to_its_connection_whatever_ids_its_requests_use() {
        let (mut sim, _, first) = packed();
        let client = sim.join(2);
        let (made, answer) = sim.create(client, "draft", 100_000);
        assert!(matches!(answer, Answer::Created { .. }), "{answer:?}");
        // Another request with the same id.
        let ask = Ask::Publish { label: label("other"), object: first, part: None };
        let request = crate::protocol::Request { id: made, again: 0, ask };
        let answers = sim.run(Input::Asked { client, request, payload: Vec::new().into(), charge: None });
        let refused = Refusal::malformed("a request has an id that was used before");
        assert_eq!(answers, [Answer::Refused(refused)]);
        sim.clients.remove(&client);
        sim.run(Input::Left { client });
        assert_eq!(names(&sim.server), ["p", "p/a", "p/b", "p/c"]);
    }

    #[test]
    fn pins_of_what_is_not_deleted_are_not_looked_for() {
        let (mut sim, client, _) = packed();
        let (made, answer) = sim.create(client, "single", 10);
        let object = sealed(&answer);
        let member = names_of(&sim.server, "p/b");
        let before = sim.memory.looks.get();
        // A pass that began now could free the objects if they were deleted before its end.
        sim.one(client, Ask::Abandon { create: made }, &[]);
        sim.one(client, Ask::Delete { object: member }, &[]);
        assert_eq!(sim.memory.looks.get(), before);
        sim.one(client, Ask::Delete { object }, &[]);
        assert_eq!(sim.memory.looks.get(), before + 1);
    }

    #[test]
    fn an_object_of_a_draft_of_a_pack_is_not_deleted_by_itself() {
        let mut sim = Simulation::new();
        let (writer, root) = (sim.join(1), sim.join_as(3, 0));
        let answer = sim.one(writer, create("p", 0, &[("p/a", 40_000), ("p/b", 40_000)], 0), &[]);
        let Answer::Created { object: first, .. } = answer else { panic!("{answer:?}") };
        let object = names_of(&sim.server, "p/b");
        let refused = Answer::Refused(Refusal::NotSealed { object });
        assert_eq!(sim.one(root, Ask::Delete { object }, &[]), refused);
        assert_eq!(sim.one(root, Ask::Delete { object: first }, &[]), Answer::Done);
        assert_eq!(names(&sim.server), Vec::<String>::new());
    }

    #[test]
    fn the_servers_user_deletes_drafts_and_others_do_not() {
        let mut sim = Simulation::new();
        let (writer, other, root) = (sim.join(1), sim.join(2), sim.join_as(3, 0));
        let (made, answer) = sim.create(writer, "draft", 100_000);
        let Answer::Created { object, .. } = answer else { panic!("{answer:?}") };
        assert_eq!(
            sim.one(other, Ask::Delete { object }, &[]),
            Answer::Refused(Refusal::NotSealed { object })
        );
        assert_eq!(sim.one(root, Ask::Delete { object }, &[]), Answer::Done);
        assert_eq!((sim.status(root).unsealed, sim.status(root).host.used), (0, 0));
        let refused = Answer::Refused(Refusal::NothingToSeal);
        assert_eq!(sim.one(writer, Ask::Seal { create: made }, &[]), refused);
    }

    #[test]
    fn the_place_of_a_deleted_draft_in_an_arena_is_not_used_again_while_its_writer_is_there() {
        let mut sim = Simulation::new();
        let (writer, root) = (sim.join(1), sim.join_as(3, 0));
        let answer = sim.one(writer, create("draft", 1000, &[], 1), &[]);
        let Answer::Created { object, .. } = answer else { panic!("{answer:?}") };
        assert_eq!(sim.one(root, Ask::Delete { object }, &[]), Answer::Done);
        assert_eq!(sim.status(root).retired, 1);
        sim.clients.remove(&writer);
        sim.run(Input::Left { client: writer });
        assert_eq!(sim.status(root).retired, 0);
    }

    #[test]
    fn who_has_pinned_a_pack_finds_all_of_it_though_it_is_deleted() {
        let (mut sim, client, first) = packed();
        sim.memory.pins.insert(first);
        sim.one(client, Ask::Delete { object: first }, &[]);
        assert_eq!(names(&sim.server), ["p", "p/a", "p/b", "p/c"]);
        assert_eq!(sim.status(client).retired, 4);
        sim.memory.pins.clear();
        assert_eq!(sim.ask(client, Ask::Kick { object: first }, &[]), []);
        assert_eq!(names(&sim.server), Vec::<String>::new());
        assert_eq!((sim.status(client).retired, sim.status(client).host.used), (0, 0));
    }

    #[test]
    fn an_object_whose_name_another_has_taken_stays_a_part_of_its_pack() {
        let (mut sim, client, first) = packed();
        let other = sealed(&sim.create(client, "p/b", 10).1);
        assert_eq!(names(&sim.server), ["p", "p/a", "p/b", "p/b", "p/c"]);
        let status = sim.status(client);
        assert_eq!((status.objects, status.retired), (4, 0), "nobody waits for it to go");
        sim.one(client, Ask::Delete { object: first }, &[]);
        assert_eq!(names(&sim.server), ["p/b"]);
        assert_eq!(
            sim.one(client, Ask::Find { name: "p/b".to_owned(), wait: 0 }, &[]),
            Answer::Found { object: other }
        );
    }
}
