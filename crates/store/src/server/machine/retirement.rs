//! Deletes objects: a deleted object cannot be found any more, is retained while a client has it pinned, and is freed afterwards.

use std::time::Duration;

use super::interface::ServerMemory;
use super::objects::ObjectTable;
use super::pin_scan::{FREE_WORK, PinScan};
use crate::cells::Cells;
use crate::id::{ObjectId, SlotState};
use crate::protocol::NamedVersion;

/// The deleted objects that are not freed yet, and the scan for their pins.
#[derive(Debug)]
pub(super) struct Retirement {
    scan: PinScan,
}

impl Retirement {
    /// Creates an empty set of deleted objects, for an index with `slots` slots.
    pub(super) fn new(slots: usize) -> Self {
        Self { scan: PinScan::new(slots) }
    }

    /// Returns the number of objects that are deleted but not freed yet.
    pub(super) fn count(&self) -> usize {
        self.scan.count()
    }

    /// Returns true if the clients' pins are being scanned for pins of deleted objects.
    pub(super) fn is_active(&self) -> bool {
        self.scan.is_active()
    }

    /// Returns the number of completed scan passes over all pins.
    pub(super) fn passes(&self) -> u64 {
        self.scan.passes()
    }

    /// Returns the number of completed scan passes after which every deleted object that is waiting for a scan now has been
    /// checked.
    pub(super) fn passes_to_come(&self) -> u64 {
        self.scan.passes_to_come()
    }

    pub(super) fn wake_at(&self) -> Option<Duration> {
        self.scan.wake_at()
    }

    /// Marks an object as deleted and, if it is the first object of a pack, all objects of the pack. The mark of the first object
    /// commits the deletion. The record of another object of a pack is retained as long as the pack.
    /// Returns the deleted objects that were sealed and have names.
    pub(super) fn retire<C: Cells>(
        &mut self,
        object: ObjectId,
        objects: &mut ObjectTable<C>,
    ) -> Vec<NamedVersion> {
        let pack: Vec<_> = objects.pack(object).collect();
        let mut named = Vec::with_capacity(pack.len());
        for id in pack {
            let Some((state, record)) = objects.mark_deleted(id) else { continue };
            if !objects.is_in_sealed_pack(id, &record) {
                self.scan.add(id);
            }
            if state == SlotState::Sealed && !record.name.is_empty() {
                named.push(NamedVersion { name: record.name, object: id, version: record.version });
            }
        }
        self.search(object, objects);
        named
    }

    /// Adds an object that the index marks as deleted, and schedules a scan for its pins.
    pub(super) fn recover(&mut self, id: ObjectId, first: ObjectId) {
        self.scan.add(id);
        self.scan.search(first);
    }

    /// Schedules a scan for the pins of an object and of its whole pack: a pin of the first object retains all others, and a pin
    /// of another object retains the first. Does nothing if the first object is not marked as deleted: a scan pass that began
    /// before the mark must not free it.
    pub(super) fn search<C: Cells>(&mut self, id: ObjectId, objects: &ObjectTable<C>) {
        let first = objects.read(id).and_then(|(_, record)| record.pack).unwrap_or(id);
        if self.scan.contains(first) {
            self.scan.search(first);
        }
    }

    /// Schedules a scan for other pins of a deleted object, after a client has released a pin of the object.
    pub(super) fn pin_released<C: Cells>(&mut self, object: ObjectId, objects: &ObjectTable<C>) {
        if self.scan.contains(object) {
            self.search(object, objects);
        }
    }

    /// Repeats the scan for the pins of some deleted objects after an interval.
    pub(super) fn recheck<C: Cells>(&mut self, now: Duration, objects: &ObjectTable<C>) {
        for id in self.scan.due(now) {
            self.search(id, objects);
        }
    }

    /// Reads pins as far as `work` allows. Returns true when a scan pass is complete; [`Self::take_unpinned`] then returns the
    /// objects that the pass has checked.
    pub(super) fn read_pins<C: Cells>(
        &mut self,
        server_memory: &impl ServerMemory,
        objects: &ObjectTable<C>,
        work: &mut usize,
    ) -> bool {
        self.scan.read(server_memory, |first| objects.pack_len(first), work)
    }

    /// Returns the unpinned objects of the next pack or single object that a complete scan pass has checked, in the order in
    /// which they are freed: the first object of a pack last. `is_held` returns true if a pack is retained for another reason.
    /// Returns `None` after the last pack, or when `work` is used up.
    pub(super) fn take_unpinned<C: Cells>(
        &mut self,
        objects: &ObjectTable<C>,
        is_held: impl Fn(ObjectId) -> bool,
        work: &mut usize,
    ) -> Option<Vec<ObjectId>> {
        if *work == 0 {
            return None;
        }
        let first = self.scan.take_checked()?;
        let mut unpinned = Vec::new();
        if !self.scan.is_pinned(first) && !is_held(first) {
            let is_free = |id: &ObjectId| self.scan.contains(*id) && !self.scan.is_pinned(*id);
            unpinned.extend(objects.pack(first).filter(is_free));
            unpinned.reverse();
        }
        *work = work.saturating_sub((1 + unpinned.len()) * FREE_WORK);
        Some(unpinned)
    }

    /// Removes an object that is freed from the set of deleted objects.
    pub(super) fn remove(&mut self, id: ObjectId) {
        self.scan.remove(id);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Input;
    use super::super::objects::Creator;
    use super::super::pin_scan::STEP_WORK;
    use super::super::plan::CreatePlan;
    use super::super::simulation::{GEOMETRY, Simulation, TestMemory, create, label, sealed};
    use super::*;
    use crate::cells::recorded::RecordedCells;
    use crate::id::{AllocationId, ClientId};
    use crate::index::{ObjectIndex, Region};
    use crate::protocol::{Answer, Refusal, RequestKind};
    use crate::server::Server;

    /// Runs one scan pass over these pins, and returns the objects that the pass finds unpinned.
    fn pass(
        retirement: &mut Retirement,
        objects: &ObjectTable<RecordedCells>,
        pins: &TestMemory,
        is_held: impl Fn(ObjectId) -> bool,
    ) -> Vec<ObjectId> {
        let mut work = STEP_WORK;
        assert!(retirement.read_pins(pins, objects, &mut work), "few pins fit one step");
        let next = || retirement.take_unpinned(objects, &is_held, &mut work);
        std::iter::from_fn(next).flatten().collect()
    }

    #[test]
    fn the_objects_of_a_pack_are_freed_when_none_is_pinned_and_the_first_last() {
        let mut objects =
            ObjectTable::new(ObjectIndex::format(RecordedCells::new(GEOMETRY.cells()), GEOMETRY));
        let mut retirement = Retirement::new(GEOMETRY.slots);
        let kind = create("p", 0, &[("p/a", 10), ("p/b", 20)], 0);
        let creator = Creator { client: ClientId(1), owner: 7, request: 1, created: 0 };
        let region = Region { allocation: AllocationId::new(0, 0), offset: 0, len: 4096 };
        let first = objects.insert(creator, &CreatePlan::new(&kind).unwrap(), region, SlotState::Created);
        let pack: Vec<_> = objects.pack(first).collect();
        retirement.pin_released(first, &objects);
        assert!(!retirement.is_active(), "the object is not deleted");
        let deleted = retirement.retire(first, &mut objects);
        assert_eq!((retirement.count(), deleted), (3, vec![]), "a draft has no events");
        let mut pins = TestMemory::default();
        pins.pins.insert(pack[1]);
        let unpinned = pass(&mut retirement, &objects, &pins, |_| false);
        assert_eq!(unpinned, [pack[2], first], "a pinned object is retained");
        pins.pins.insert(first);
        retirement.pin_released(pack[1], &objects);
        assert_eq!(
            pass(&mut retirement, &objects, &pins, |_| false),
            [],
            "the first object retains all others"
        );
        pins.pins.clear();
        retirement.pin_released(first, &objects);
        assert_eq!(
            pass(&mut retirement, &objects, &pins, |id| id == first),
            [],
            "retained for another reason"
        );
        retirement.pin_released(first, &objects);
        assert_eq!(pass(&mut retirement, &objects, &pins, |_| false), [pack[2], pack[1], first]);
        pack.iter().for_each(|id| retirement.remove(*id));
        assert_eq!((retirement.count(), retirement.passes()), (0, 4));
    }

    /// Creates a simulation with a sealed pack that has three members besides its first object.
    fn packed() -> (Simulation, ClientId, ObjectId) {
        let mut sim = Simulation::new();
        let client = sim.join(1);
        let members = [("p/a", 5000), ("p/b", 6000), ("p/c", 20_000)];
        sim.request_one(client, create("p", 0, &members, 0), &[]);
        let created = sim.requests;
        let first = sealed(&sim.request_one(client, RequestKind::Seal { create: created }, &[]));
        (sim, client, first)
    }

    #[test]
    fn all_pins_are_read_once_for_a_pack() {
        let (mut sim, client, first) = packed();
        let before = sim.memory.scans.get();
        sim.request_one(client, RequestKind::Delete { object: first }, &[]);
        assert_eq!(sim.memory.scans.get() - before, 1);
    }

    fn names<C: Cells>(server: &Server<C>) -> Vec<String> {
        let mut names: Vec<_> = server.index().objects().map(|(_, _, record)| record.name).collect();
        names.sort();
        names
    }

    /// Returns the object whose record in the index has this name.
    fn names_of<C: Cells>(server: &Server<C>, name: &str) -> ObjectId {
        server.index().objects().find(|(_, _, record)| record.name == name).unwrap().0
    }

    #[test]
    fn a_released_pin_starts_no_scan_if_nothing_is_deleted() {
        let (mut sim, client, first) = packed();
        let before = sim.memory.scans.get();
        for object in [first, ObjectId::new(20, 7)] {
            assert_eq!(sim.request(client, RequestKind::PinReleased { object }, &[]), []);
        }
        assert_eq!(sim.memory.scans.get(), before);
    }

    #[test]
    fn a_draft_belongs_to_its_connection_even_if_request_ids_repeat() {
        let (mut sim, _, first) = packed();
        let client = sim.join(2);
        let (created, answer) = sim.create(client, "draft", 100_000);
        assert!(matches!(answer, Answer::Created { .. }), "{answer:?}");
        // The client sends another request with the id of the request that created the draft.
        let kind = RequestKind::Publish { label: label("other"), object: first, part: None };
        let request = crate::protocol::Request { id: created, resends: 0, kind };
        let answers = sim.run(Input::Request { client, request, payload: Vec::new().into(), charge: None });
        let refused = Refusal::malformed("a request has an id that was used before");
        assert_eq!(answers, [Answer::Refused(refused)]);
        sim.clients.remove(&client);
        sim.run(Input::Left { client });
        assert_eq!(names(&sim.server), ["p", "p/a", "p/b", "p/c"]);
    }

    #[test]
    fn pins_of_undeleted_objects_are_not_scanned_for() {
        let (mut sim, client, _) = packed();
        let (created, answer) = sim.create(client, "single", 10);
        let object = sealed(&answer);
        let member = names_of(&sim.server, "p/b");
        let before = sim.memory.scans.get();
        // Neither request may start a scan pass: the pass could free an object that is marked as deleted only after the pass
        // began.
        sim.request_one(client, RequestKind::Abandon { create: created }, &[]);
        sim.request_one(client, RequestKind::Delete { object: member }, &[]);
        assert_eq!(sim.memory.scans.get(), before);
        sim.request_one(client, RequestKind::Delete { object }, &[]);
        assert_eq!(sim.memory.scans.get(), before + 1);
    }

    #[test]
    fn a_member_of_an_unsealed_pack_cannot_be_deleted_separately() {
        let mut sim = Simulation::new();
        let (writer, root) = (sim.join(1), sim.join_as(3, 0));
        let answer = sim.request_one(writer, create("p", 0, &[("p/a", 40_000), ("p/b", 40_000)], 0), &[]);
        let Answer::Created { object: first, .. } = answer else { panic!("{answer:?}") };
        let object = names_of(&sim.server, "p/b");
        let refused = Answer::Refused(Refusal::NotSealed { object });
        assert_eq!(sim.request_one(root, RequestKind::Delete { object }, &[]), refused);
        assert_eq!(sim.request_one(root, RequestKind::Delete { object: first }, &[]), Answer::Done);
        assert_eq!(names(&sim.server), Vec::<String>::new());
    }

    #[test]
    fn the_servers_user_deletes_drafts_and_others_do_not() {
        let mut sim = Simulation::new();
        let (writer, other, root) = (sim.join(1), sim.join(2), sim.join_as(3, 0));
        let (created, answer) = sim.create(writer, "draft", 100_000);
        let Answer::Created { object, .. } = answer else { panic!("{answer:?}") };
        assert_eq!(
            sim.request_one(other, RequestKind::Delete { object }, &[]),
            Answer::Refused(Refusal::NotSealed { object })
        );
        assert_eq!(sim.request_one(root, RequestKind::Delete { object }, &[]), Answer::Done);
        assert_eq!((sim.status(root).unsealed, sim.status(root).host.used), (0, 0));
        let refused = Answer::Refused(Refusal::NothingToSeal);
        assert_eq!(sim.request_one(writer, RequestKind::Seal { create: created }, &[]), refused);
    }

    #[test]
    fn the_region_of_a_deleted_draft_is_not_reused_while_its_writer_is_connected() {
        let mut sim = Simulation::new();
        let (writer, root) = (sim.join(1), sim.join_as(3, 0));
        let answer = sim.request_one(writer, create("draft", 1000, &[], 1), &[]);
        let Answer::Created { object, .. } = answer else { panic!("{answer:?}") };
        assert_eq!(sim.request_one(root, RequestKind::Delete { object }, &[]), Answer::Done);
        assert_eq!(sim.status(root).retired, 1);
        sim.clients.remove(&writer);
        sim.run(Input::Left { client: writer });
        assert_eq!(sim.status(root).retired, 0);
    }

    #[test]
    fn a_deleted_pack_with_a_pin_is_retained_as_a_whole() {
        let (mut sim, client, first) = packed();
        sim.memory.pins.insert(first);
        sim.request_one(client, RequestKind::Delete { object: first }, &[]);
        assert_eq!(names(&sim.server), ["p", "p/a", "p/b", "p/c"]);
        assert_eq!(sim.status(client).retired, 4);
        sim.memory.pins.clear();
        assert_eq!(sim.request(client, RequestKind::PinReleased { object: first }, &[]), []);
        assert_eq!(names(&sim.server), Vec::<String>::new());
        assert_eq!((sim.status(client).retired, sim.status(client).host.used), (0, 0));
    }

    #[test]
    fn a_replaced_member_stays_part_of_its_pack() {
        let (mut sim, client, first) = packed();
        let other = sealed(&sim.create(client, "p/b", 10).1);
        assert_eq!(names(&sim.server), ["p", "p/a", "p/b", "p/b", "p/c"]);
        let status = sim.status(client);
        assert_eq!((status.objects, status.retired), (4, 0), "the member is not being retired");
        sim.request_one(client, RequestKind::Delete { object: first }, &[]);
        assert_eq!(names(&sim.server), ["p/b"]);
        assert_eq!(
            sim.request_one(client, RequestKind::Find { name: "p/b".to_owned(), wait: 0 }, &[]),
            Answer::Found { object: other }
        );
    }
}
