//! How objects go: no longer found, kept while somebody has them pinned, and then free.

use std::collections::{BTreeMap, BTreeSet};

use super::machine::{Output, Premises, Server};
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
        premises: &mut impl Premises,
    ) -> Result<Answer, Refusal> {
        let record = match self.index.read(object) {
            Some((State::Sealed, record)) => record,
            Some((State::Created, _)) => return Err(Refusal::NotSealed { object }),
            // Said again after a restart, and done before it.
            _ if again => return Ok(Answer::Done),
            _ => return Err(Refusal::NoSuchObject { object }),
        };
        let user = self.clients.get(&client).map(|client| client.user);
        if user != Some(record.owner) && user != Some(self.settings.user) {
            return Err(Refusal::NotYours { object, owner: record.owner });
        }
        self.retire(object, premises);
        Ok(Answer::Done)
    }

    pub(super) fn abandon(
        &mut self,
        client: ClientId,
        create: u64,
        premises: &mut impl Premises,
    ) -> Result<Answer, Refusal> {
        if let Some(object) = self.made.get(&(client, create)).copied()
            && self.index.state(object) == Some(State::Created)
        {
            self.retire(object, premises);
        }
        Ok(Answer::Done)
    }

    /// Marks an object as deleted, and if it is the first of a pack, all of the pack; and frees what nobody holds. The
    /// mark on the first is the store that counts. The record of one object of a pack stays as long as the pack does, of
    /// whose bytes it says where they are.
    pub(super) fn retire(&mut self, object: ObjectId, premises: &mut impl Premises) {
        let pack = self.pack(object);
        for id in pack.iter().copied() {
            let Some((state, record)) = self.index.read(id) else { continue };
            if state != State::Deleted {
                if self.names.get(&record.name) == Some(&id) {
                    self.names.remove(&record.name);
                    self.index.forget(&record.name, id);
                }
                self.index.commit(id, State::Deleted);
            }
            if !self.is_of_a_pack_that_stays(id, &record) {
                self.retired.insert(id);
            }
            if state == State::Sealed && !record.name.is_empty() {
                self.tell(&record.name, id, EventKind::Deleted);
            }
        }
        self.free_unpinned(&pack, premises);
    }

    pub(super) fn is_of_a_pack_that_stays(&self, id: ObjectId, record: &Record) -> bool {
        let first = record.pack.filter(|first| *first != id);
        first.is_some_and(|first| self.index.state(first) == Some(State::Sealed))
    }

    /// Frees everything that is deleted and pinned by nobody.
    pub(super) fn sweep(&mut self, premises: &impl Premises) {
        self.swept = self.now.elapsed;
        let retired: Vec<_> = self.retired.iter().copied().collect();
        self.free_unpinned(&retired, premises);
    }

    /// Frees those of some objects that are deleted and pinned by nobody, and with the first object of a pack all others.
    /// Who has pinned the first finds all of them; and who has pinned another, the first.
    pub(super) fn free_unpinned(&mut self, ids: &[ObjectId], premises: &impl Premises) {
        let first_of =
            |id: &ObjectId| self.index.read(*id).and_then(|(_, record)| record.pack).unwrap_or(*id);
        let mut packs: BTreeMap<ObjectId, BTreeSet<ObjectId>> = BTreeMap::new();
        for id in ids {
            packs.entry(first_of(id)).or_default().extend(self.pack(*id));
        }
        let retired = packs.iter().flat_map(|(first, ids)| ids.iter().chain([first]));
        let retired = retired.copied().filter(|id| self.retired.contains(id)).collect();
        let pinned = premises.pinned(&retired);
        for (first, ids) in packs {
            if pinned.contains(&first) {
                continue;
            }
            for id in ids.iter().filter(|id| **id != first).chain([&first]) {
                let is_last = self.members.get(id).is_none_or(BTreeSet::is_empty);
                if retired.contains(id) && is_last && !pinned.contains(id) {
                    self.free(*id);
                }
            }
        }
    }

    /// Gives the memory of an object back, then its slot, then the allocation where that was the last of it.
    fn free(&mut self, id: ObjectId) {
        self.retired.remove(&id);
        self.members.remove(&id);
        let Some((_, record)) = self.index.read(id) else { return };
        if let Some(others) = record.pack.and_then(|first| self.members.get_mut(&first)) {
            others.remove(&id);
        }
        let key = (record.client, record.request);
        if self.made.get(&key) == Some(&id) {
            self.made.remove(&key);
        }
        let idle = self.ledger.let_go(record.region);
        self.index.commit(id, State::Free);
        self.slots.give_back(id.slot(), id.generation() + 1);
        if let Some(allocation) = idle {
            let gone = self.ledger.record(allocation).filter(|record| !record.is_arena);
            self.close_allocation(allocation);
            if let Some(gone) = gone {
                self.stock_for_gone(gone.place, gone.len);
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
    use super::super::world::{World, create, sealed};
    use super::*;
    use crate::protocol::Ask;

    /// A world with a sealed pack of three.
    fn packed() -> (World, ClientId, ObjectId) {
        let mut world = World::new();
        let client = world.join(1);
        let members = [("p/a", 5000), ("p/b", 6000), ("p/c", 20_000)];
        world.one(client, create("p", 0, &members, 0), &[]);
        let made = world.requests;
        let first = sealed(&world.one(client, Ask::Seal { create: made }, &[]));
        (world, client, first)
    }

    #[test]
    fn all_pins_are_looked_at_once_for_a_pack() {
        let (mut world, client, first) = packed();
        let before = world.yard.looks.get();
        world.one(client, Ask::Delete { object: first }, &[]);
        assert_eq!(world.yard.looks.get() - before, 1);
    }

    fn names<C: Cells>(server: &Server<C>) -> Vec<String> {
        let mut names: Vec<_> = server.index.objects().map(|(_, _, record)| record.name).collect();
        names.sort();
        names
    }

    #[test]
    fn who_has_pinned_a_pack_finds_all_of_it_though_it_is_deleted() {
        let (mut world, client, first) = packed();
        world.yard.pins.insert(first);
        world.one(client, Ask::Delete { object: first }, &[]);
        assert_eq!(names(&world.server), ["p", "p/a", "p/b", "p/c"]);
        assert_eq!(world.status(client).retired, 4);
        world.yard.pins.clear();
        assert_eq!(world.ask(client, Ask::Kick { object: first }, &[]), []);
        assert_eq!(names(&world.server), Vec::<String>::new());
        assert_eq!((world.status(client).retired, world.status(client).host.used), (0, 0));
    }

    #[test]
    fn an_object_whose_name_another_has_taken_stays_a_part_of_its_pack() {
        let (mut world, client, first) = packed();
        let other = sealed(&world.create(client, "p/b", 10).1);
        assert_eq!(names(&world.server), ["p", "p/a", "p/b", "p/b", "p/c"]);
        let status = world.status(client);
        assert_eq!((status.objects, status.retired), (4, 0), "nobody waits for it to go");
        world.one(client, Ask::Delete { object: first }, &[]);
        assert_eq!(names(&world.server), ["p/b"]);
        assert_eq!(
            world.one(client, Ask::Find { name: "p/b".to_owned(), wait: 0 }, &[]),
            Answer::Found { object: other }
        );
    }
}
