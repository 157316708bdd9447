//! The server killed after every store: each prefix is recovered, and is the world before the operation or after it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::*;
use crate::cells::Cells;
use crate::cells::recorded::{Prefixes, RecordedCells};
use crate::id::{AllocationId, ClientId, ObjectId, State};
use crate::index::{Geometry, Index, Region};
use crate::protocol::frame::Payload;
use crate::protocol::{Answer, Ask, Label, Member, PROTOCOL, Refusal, Request, Status};

const GEOMETRY: Geometry = Geometry { slots: 24, allocations: 6 };
const TERMS: Terms = Terms { quota: 1 << 20, granule: 4 << 10, small: 16 << 10, arena: 64 << 10 };
const USER: u32 = 1000;

fn settings() -> Settings {
    Settings { host: TERMS, device: TERMS, devices: vec![[1; 16]], user: 0 }
}

/// The pins there are, and what was written to arenas.
#[derive(Debug, Clone, Default)]
struct Yard {
    pins: BTreeSet<ObjectId>,
    bytes: BTreeMap<(AllocationId, u64), Vec<u8>>,
}

impl Premises for Yard {
    fn write(&mut self, allocation: AllocationId, offset: u64, bytes: &[u8]) -> bool {
        self.bytes.insert((allocation, offset), bytes.to_vec());
        true
    }

    fn is_pinned(&self, object: ObjectId) -> bool {
        self.pins.contains(&object)
    }
}

/// Everything that must be as it was before an operation, or as it is after it.
#[derive(Debug, PartialEq, Eq)]
struct View {
    objects: Vec<(ObjectId, State, String, u64, Region, u64)>,
    names: BTreeMap<String, ObjectId>,
    found: BTreeMap<String, Option<ObjectId>>,
    used: (u64, u64),
    free_slots: usize,
    unused: Vec<AllocationId>,
}

fn view<C: Cells>(server: &Server<C>) -> View {
    let index = server.index();
    let mut objects: Vec<_> = index
        .objects()
        .map(|(id, state, record)| {
            // A version counts when its object is sealed.
            let version = if state == State::Sealed { record.version } else { 0 };
            (id, state, record.name, version, record.region, record.len)
        })
        .collect();
    objects.sort();
    let find = |name: &String| {
        let mut candidates = index.candidates(name);
        let named = |id: &ObjectId| index.read(*id).is_some_and(|(_, record)| record.name == *name);
        let found = candidates.find(|found| named(&found.id));
        (name.clone(), found.map(|found| found.id))
    };
    let is_used = |id: &AllocationId| objects.iter().any(|object| object.4.allocation == *id);
    let record = |id: AllocationId| Some((id, server.ledger.record(id)?));
    let allocations: Vec<_> = server.ledger.allocations().filter_map(record).collect();
    // An arena that is empty is there for the next object, and says nothing about the last operation.
    let counted = |place| {
        let counted = allocations.iter().filter(|(id, record)| record.place == place && is_used(id));
        counted.map(|(_, record)| record.len).sum()
    };
    View {
        found: server.names.keys().map(find).collect(),
        names: server.names.clone(),
        used: (counted(0), counted(1)),
        free_slots: server.slots.left(),
        unused: allocations
            .iter()
            .filter(|(id, record)| !record.is_arena && !is_used(id))
            .map(|(id, _)| *id)
            .collect(),
        objects,
    }
}

fn now() -> Now {
    Now { elapsed: Duration::from_secs(1), unix: 7 }
}

/// A server whose every store is looked at, with its surroundings.
struct World {
    cells: RecordedCells,
    server: Server<RecordedCells>,
    yard: Yard,
    parked: BTreeSet<AllocationId>,
    clients: BTreeMap<ClientId, u32>,
    requests: u64,
    prefixes: usize,
    writable: bool,
}

impl World {
    fn new() -> Self {
        let cells = RecordedCells::new(GEOMETRY.cells());
        let index = Index::format(cells.clone(), GEOMETRY);
        let mut yard = Yard::default();
        let (server, outputs) = Server::recover(index, settings(), &Survivors::default(), now(), &mut yard);
        assert!(outputs.is_empty());
        cells.take();
        let (parked, clients) = (BTreeSet::new(), BTreeMap::new());
        Self { cells, server, yard, parked, clients, requests: 0, prefixes: 0, writable: false }
    }

    fn survivors(&self) -> Survivors {
        Survivors { allocations: self.parked.clone(), clients: self.clients.clone() }
    }

    fn recover(&self, cells: RecordedCells) -> (Server<RecordedCells>, Vec<Output>) {
        let index = Index::open(cells).expect("an index");
        Server::recover(index, settings(), &self.survivors(), now(), &mut self.yard.clone())
    }

    /// One step, after which every prefix of its stores is recovered.
    fn step(&mut self, input: Input) -> Vec<Output> {
        let before = self.cells.snapshot();
        let outputs = self.server.step(now(), input, &mut self.yard);
        let prefixes = Prefixes { before, ..self.cells.take() };
        let count = prefixes.stores.len();
        let first = view(&self.recover(prefixes.replay(0)).0);
        let last = view(&self.recover(prefixes.replay(count)).0);
        let mut is_done = first == last;
        for stores in 0..=count {
            let cells = prefixes.replay(stores);
            let begin = cells.snapshot();
            let recovered = view(&self.recover(cells.clone()).0);
            is_done |= recovered == last;
            let expected = if is_done { &last } else { &first };
            assert_eq!(&recovered, expected, "after {stores} of {count} stores");
            self.prefixes += 1;
            // And a server that is killed while it recovers.
            let recovery = Prefixes { before: begin, ..cells.take() };
            for stores in (0..recovery.stores.len()).step_by(7) {
                assert_eq!(&view(&self.recover(recovery.replay(stores)).0), expected);
            }
        }
        self.cells.take();
        outputs
    }

    /// A step and all that follows from it, until somebody is answered.
    fn run(&mut self, input: Input) -> Vec<Answer> {
        let mut answers = Vec::new();
        let mut outputs = self.step(input);
        while !outputs.is_empty() {
            let output = outputs.remove(0);
            let follows = match output {
                Output::Say { response, .. } => {
                    answers.push(response.answer);
                    None
                }
                Output::Make { allocation, .. } => {
                    assert!(self.parked.insert(allocation), "memory is made once");
                    Some(Input::Made { allocation, outcome: Ok(()) })
                }
                Output::CloseForWriting { allocation } => {
                    let outcome = if self.writable { Err(Refusal::StillMapped) } else { Ok(()) };
                    Some(Input::Closed { allocation, outcome })
                }
                Output::Release { allocation } => {
                    assert!(self.parked.remove(&allocation), "memory is released once");
                    None
                }
                Output::Welcome { .. } | Output::Dismiss { .. } => None,
            };
            if let Some(input) = follows {
                outputs.extend(self.step(input));
            }
        }
        self.check();
        answers
    }

    /// A server that recovers now is the server that is.
    fn check(&self) {
        let (recovered, outputs) =
            self.recover(Prefixes { before: self.cells.snapshot(), stores: vec![] }.replay(0));
        assert_eq!(view(&recovered), view(&self.server));
        let releases = outputs.iter().any(|output| matches!(output, Output::Release { .. }));
        assert!(!releases, "nothing was left behind: {outputs:?}");
        let known: BTreeSet<_> = self.server.ledger.allocations().collect();
        assert_eq!(known, self.parked);
    }

    fn join(&mut self, client: u64) -> ClientId {
        let client = ClientId(client);
        self.clients.insert(client, USER);
        self.run(Input::Joined { client, user: USER });
        self.ask(client, Ask::Hello { protocol: PROTOCOL }, &[]);
        client
    }

    fn ask(&mut self, client: ClientId, ask: Ask, payload: &[u8]) -> Vec<Answer> {
        self.requests += 1;
        let request = Request { id: self.requests, again: false, ask };
        self.run(Input::Asked { client, request, payload: payload.to_vec().into() })
    }

    fn one(&mut self, client: ClientId, ask: Ask, payload: &[u8]) -> Answer {
        let mut answers = self.ask(client, ask, payload);
        assert_eq!(answers.len(), 1, "{answers:?}");
        answers.remove(0)
    }

    fn create(&mut self, client: ClientId, name: &str, len: u64) -> (u64, Answer) {
        let ask = create(name, len, &[], 0);
        let is_small = len < TERMS.small;
        let payload = vec![7; if is_small { usize::try_from(len).unwrap() } else { 0 }];
        let answer = self.one(client, ask, &payload);
        (self.requests, answer)
    }

    fn status(&mut self, client: ClientId) -> Status {
        match self.one(client, Ask::Status, &[]) {
            Answer::Status(status) => status,
            other => panic!("{other:?}"),
        }
    }
}

fn label(name: &str) -> Label {
    Label { name: name.to_owned(), meta: b"meta".to_vec() }
}

fn create(name: &str, len: u64, members: &[(&str, u64)], place: u32) -> Ask {
    let members = members.iter().map(|(name, len)| Member { label: label(name), len: *len }).collect();
    Ask::Create { label: label(name), len, members, place }
}

fn sealed(answer: &Answer) -> ObjectId {
    match answer {
        Answer::Sealed { object, .. } => *object,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_small_object_is_there_at_once_and_gone_at_once() {
    let mut world = World::new();
    let client = world.join(1);
    let (_, answer) = world.create(client, "small", 100);
    let object = sealed(&answer);
    assert_eq!(answer, Answer::Sealed { object, version: 1 });
    assert_eq!(
        world.one(client, Ask::Find { name: "small".to_owned(), wait: 0 }, &[]),
        Answer::Found { object }
    );
    assert_eq!(world.yard.bytes.values().collect::<Vec<_>>(), [&vec![7; 100]]);
    assert_eq!(world.one(client, Ask::Delete { object }, &[]), Answer::Done);
    let gone = Answer::Refused(Refusal::NoSuchObject { object });
    assert_eq!(world.one(client, Ask::Delete { object }, &[]), gone);
    assert!(world.prefixes >= 30, "{} prefixes", world.prefixes);
}

#[test]
fn a_large_object_is_there_when_it_is_sealed_and_its_memory_goes_with_it() {
    let mut world = World::new();
    let client = world.join(1);
    let (create, answer) = world.create(client, "large", 100 << 10);
    let Answer::Created { object, memory } = answer else { panic!("{answer:?}") };
    assert_eq!((memory.offset, memory.allocation_len), (0, 100 << 10));
    let refused = Answer::Refused(Refusal::NoSuchName { name: "large".to_owned() });
    assert_eq!(world.one(client, Ask::Find { name: "large".to_owned(), wait: 0 }, &[]), refused);
    world.writable = true;
    assert_eq!(world.one(client, Ask::Seal { create }, &[]), Answer::Refused(Refusal::StillMapped));
    world.writable = false;
    assert_eq!(world.one(client, Ask::Seal { create }, &[]), Answer::Sealed { object, version: 1 });
    assert_eq!(world.one(client, Ask::Seal { create }, &[]), Answer::Sealed { object, version: 1 });
    assert_eq!(world.status(client).host.used, 100 << 10);
    world.one(client, Ask::Delete { object }, &[]);
    assert_eq!((world.status(client).host.used, world.parked.len()), (0, 0));
}

#[test]
fn a_version_replaces_the_one_before_it_and_readers_keep_theirs() {
    let mut world = World::new();
    let client = world.join(1);
    let first = sealed(&world.create(client, "name", 100).1);
    world.yard.pins.insert(first);
    let (_, answer) = world.create(client, "name", 200);
    let second = sealed(&answer);
    assert_eq!(answer, Answer::Sealed { object: second, version: 2 });
    let found = world.one(client, Ask::Find { name: "name".to_owned(), wait: 0 }, &[]);
    assert_eq!(found, Answer::Found { object: second });
    assert_eq!(world.status(client).retired, 1);
    world.yard.pins.clear();
    // A kick has no answer.
    assert_eq!(world.ask(client, Ask::Kick { object: first }, &[]), []);
    assert_eq!(world.status(client).retired, 0);
}

#[test]
fn a_pack_comes_and_goes_as_one() {
    let mut world = World::new();
    let client = world.join(1);
    let members = [("p/a", 5000), ("p/b", 0), ("p/c", 20_000)];
    let answer = world.one(client, create("p", 0, &members, 0), &[]);
    let Answer::Created { object, memory } = answer else { panic!("{answer:?}") };
    let request = world.requests;
    assert_eq!(memory.allocation_len, 28 << 10);
    assert_eq!(sealed(&world.one(client, Ask::Seal { create: request }, &[])), object);
    let status = world.status(client);
    assert_eq!((status.objects, status.host.used), (4, 28 << 10));
    // A member whose name is taken by another goes alone.
    sealed(&world.create(client, "p/a", 10).1);
    assert_eq!(world.status(client).objects, 4);
    world.one(client, Ask::Delete { object }, &[]);
    let status = world.status(client);
    assert_eq!((status.objects, status.host.used), (1, 64 << 10), "the arena of the small one is left");
}

#[test]
fn a_pinned_member_holds_the_memory_of_its_pack() {
    let mut world = World::new();
    let client = world.join(1);
    let answer = world.one(client, create("p", 0, &[("p/a", 5000), ("p/b", 20_000)], 0), &[]);
    let Answer::Created { object, .. } = answer else { panic!("{answer:?}") };
    let request = world.requests;
    world.one(client, Ask::Seal { create: request }, &[]);
    let Answer::Found { object: member } =
        world.one(client, Ask::Find { name: "p/b".to_owned(), wait: 0 }, &[])
    else {
        panic!("a member")
    };
    world.yard.pins.insert(member);
    world.one(client, Ask::Delete { object }, &[]);
    let status = world.status(client);
    assert_eq!((status.objects, status.retired, status.host.used), (0, 2, 28 << 10));
    world.yard.pins.clear();
    world.run(Input::Tick);
    assert_eq!(world.status(client).host.used, 0);
}

#[test]
fn one_more_name_keeps_the_bytes_when_the_first_has_gone() {
    let mut world = World::new();
    let client = world.join(1);
    let (create, _) = world.create(client, "first", 20 << 10);
    let object = sealed(&world.one(client, Ask::Seal { create }, &[]));
    let alias = sealed(&world.one(client, Ask::Publish { label: label("second"), object }, &[]));
    world.one(client, Ask::Delete { object }, &[]);
    assert_eq!(world.status(client).host.used, 20 << 10);
    world.one(client, Ask::Delete { object: alias }, &[]);
    assert_eq!(world.status(client).host.used, 0);
}

#[test]
fn a_dead_client_takes_along_what_it_had_not_sealed() {
    let mut world = World::new();
    let (first, second) = (world.join(1), world.join(2));
    world.create(first, "unsealed", 100 << 10);
    sealed(&world.create(first, "sealed", 100).1);
    let device = world.one(first, create("gpu", 100, &[], 1), &[]);
    assert!(matches!(device, Answer::Created { .. }), "{device:?}");
    world.clients.remove(&first);
    world.run(Input::Left { client: first });
    let status = world.status(second);
    assert_eq!((status.objects, status.unsealed, status.clients), (1, 0, 1));
    assert_eq!((status.host.used, status.device.used), (64 << 10, 64 << 10), "an arena each");
}

#[test]
fn only_its_owner_deletes_an_object() {
    let mut world = World::new();
    let (owner, root) = (world.join(1), ClientId(9));
    let object = sealed(&world.create(owner, "mine", 100).1);
    let other = ClientId(8);
    for (client, user) in [(other, 1001), (root, 0)] {
        world.clients.insert(client, user);
        world.run(Input::Joined { client, user });
        world.ask(client, Ask::Hello { protocol: PROTOCOL }, &[]);
    }
    let refused = Answer::Refused(Refusal::NotYours { object, owner: USER });
    assert_eq!(world.one(other, Ask::Delete { object }, &[]), refused);
    assert_eq!(world.one(root, Ask::Delete { object }, &[]), Answer::Done);
}

#[test]
fn what_cannot_be_is_refused_and_changes_nothing() {
    let mut world = World::new();
    let client = world.join(1);
    let before = world.status(client);
    let long = "x".repeat(201);
    let nobody = ObjectId::new(3, 3);
    for (ask, payload, code) in [
        (create(&long, 1, &[], 0), 1, "name-too-long"),
        (create("a", 1 << 40, &[], 0), 0, "over-quota"),
        (create("a", 10, &[], 0), 9, "malformed"),
        (create("a", 1 << 16, &[], 0), 9, "malformed"),
        (create("a", 10, &[], 2), 0, "no-such-device"),
        (create("a", 0, &[("b", u64::MAX), ("c", 2)], 0), 0, "malformed"),
        (create("a", 0, &[("b", 1), ("b", 1)], 0), 0, "malformed"),
        (create("a", 0, &[("", 1); 24], 0), 0, "index-full"),
        (Ask::Seal { create: 1 }, 0, "nothing-to-seal"),
        (Ask::Fetch { object: nobody }, 0, "no-such-object"),
        (Ask::Publish { label: label("a"), object: nobody }, 0, "no-such-object"),
        (Ask::Hello { protocol: 9 }, 0, "other-protocol"),
    ] {
        match world.one(client, ask, &vec![0; payload]) {
            Answer::Refused(refusal) => assert_eq!(refusal.code(), code),
            other => panic!("{other:?} instead of {code}"),
        }
    }
    assert_eq!(world.status(client), before);
}

#[test]
fn a_question_for_a_name_is_answered_when_it_comes_or_when_its_time_is_over() {
    let mut world = World::new();
    let client = world.join(1);
    assert_eq!(world.ask(client, Ask::Find { name: "later".to_owned(), wait: 500 }, &[]), []);
    assert_eq!(world.ask(client, Ask::Find { name: "never".to_owned(), wait: 900 }, &[]), []);
    assert_eq!(world.server.wake_at(), Some(Duration::from_millis(1500)));
    let answers = world.ask(client, create("later", 0, &[], 0), &[]);
    let [Answer::Found { object }, Answer::Sealed { object: made, .. }] = answers[..] else {
        panic!("{answers:?}")
    };
    assert_eq!(object, made);
    let late = Now { elapsed: Duration::from_secs(2), unix: 0 };
    let outputs = world.server.step(late, Input::Tick, &mut world.yard);
    assert!(matches!(
        &outputs[..],
        [Output::Say { response, .. }] if response.answer == Answer::Refused(Refusal::NoSuchName { name: "never".to_owned() })
    ));
}

#[test]
fn who_watches_is_told_of_names_that_begin_so() {
    let mut world = World::new();
    let (client, watcher) = (world.join(1), world.join(2));
    world.one(watcher, Ask::Watch { prefix: "a/".to_owned() }, &[]);
    let events = |answers: Vec<Answer>| {
        let names = answers.into_iter().filter_map(|answer| match answer {
            Answer::Event(event) => Some(format!("{} {:?}", event.name, event.what)),
            _ => None,
        });
        names.collect::<Vec<_>>()
    };
    let made = world.ask(client, create("a/x", 0, &[], 0), &[]);
    assert_eq!(events(made), ["a/x Published { version: 1 }"]);
    let made = world.ask(client, create("b/x", 0, &[], 0), &[]);
    assert_eq!(events(made), Vec::<String>::new());
    let made = world.ask(client, create("a/x", 0, &[], 0), &[]);
    assert_eq!(events(made), ["a/x Published { version: 2 }", "a/x Deleted"]);
}

#[test]
fn a_request_that_comes_again_is_answered_as_before() {
    let mut world = World::new();
    let client = world.join(1);
    let small = world.create(client, "small", 10);
    let large = world.create(client, "large", 30 << 10);
    let object = sealed(&small.1);
    let alias = world.one(client, Ask::Publish { label: label("alias"), object }, &[]);
    let (publish, before) = (world.requests, view(&world.server));
    let (mut server, outputs) =
        world.recover(Prefixes { before: world.cells.snapshot(), stores: vec![] }.replay(0));
    assert!(matches!(&outputs[..], [Output::Say { response, .. }] if response.answer == Answer::Restarted));
    let asks = [
        (small.0, create("small", 10, &[], 0), 10, small.1),
        (large.0, create("large", 30 << 10, &[], 0), 0, large.1),
        (publish, Ask::Publish { label: label("alias"), object }, 0, alias),
        (99, Ask::Delete { object: ObjectId::new(20, 0) }, 0, Answer::Done),
    ];
    for (id, ask, payload, expected) in asks {
        let request = Request { id, again: true, ask };
        let input = Input::Asked { client, request, payload: vec![7; payload].into() };
        let outputs = server.step(now(), input, &mut world.yard);
        let [Output::Say { response, .. }] = &outputs[..] else { panic!("{outputs:?}") };
        assert_eq!(response.answer, expected);
    }
    assert_eq!(view(&server), before);
}

#[test]
fn memory_that_cannot_be_made_is_an_answer_and_no_loss() {
    let mut world = World::new();
    let client = world.join(1);
    let request = Request { id: 50, again: false, ask: create("large", 30 << 10, &[], 0) };
    let outputs = world.step(Input::Asked { client, request, payload: Payload::default() });
    let [Output::Make { allocation, len, place: 0 }] = outputs[..] else { panic!("{outputs:?}") };
    assert_eq!(len, 32 << 10);
    let outputs = world.step(Input::Made { allocation, outcome: Err("no room".to_owned()) });
    let [Output::Release { .. }, Output::Say { response, .. }] = &outputs[..] else { panic!("{outputs:?}") };
    let refusal = Refusal::NoMemory { len: 32 << 10, reason: "no room".to_owned() };
    assert_eq!(response.answer, Answer::Refused(refusal));
    assert_eq!(world.status(client).host.used, 0);
}

#[test]
fn what_is_given_up_while_it_is_being_sealed_is_not_sealed_and_said_so() {
    let mut world = World::new();
    let client = world.join(1);
    let (create, _) = world.create(client, "large", 30 << 10);
    let request = Request { id: 50, again: false, ask: Ask::Seal { create } };
    let outputs = world.step(Input::Asked { client, request, payload: Payload::default() });
    let [Output::CloseForWriting { allocation }] = outputs[..] else { panic!("{outputs:?}") };
    assert_eq!(world.one(client, Ask::Abandon { create }, &[]), Answer::Done);
    let outputs = world.step(Input::Closed { allocation, outcome: Ok(()) });
    let [Output::Say { response, .. }] = &outputs[..] else { panic!("{outputs:?}") };
    assert_eq!((response.id, &response.answer), (50, &Answer::Refused(Refusal::NothingToSeal)));
    assert_eq!(world.status(client).host.used, 0);
}

#[test]
fn a_client_that_does_not_greet_is_let_go() {
    let mut world = World::new();
    let client = ClientId(4);
    world.step(Input::Joined { client, user: 1 });
    let request = Request { id: 1, again: false, ask: Ask::Status };
    let outputs = world.step(Input::Asked { client, request, payload: Payload::default() });
    assert_eq!(outputs, [Output::Dismiss { client }]);
}

/// Whatever clients do, in whatever order: every prefix of every step recovers.
#[test]
fn random_operations_recover_after_every_store() {
    let rounds = if wholemem_testkit::exhaustive() { 4000 } else { 150 };
    let mut dice = wholemem_testkit::seed();
    let mut roll = |below: u64| {
        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (dice >> 33) % below
    };
    let mut world = World::new();
    let mut next = 3;
    let mut clients = vec![world.join(1), world.join(2)];
    let mut unsealed: Vec<(ClientId, u64)> = Vec::new();
    for _ in 0..rounds {
        let client = clients[usize::try_from(roll(2)).unwrap()];
        let name = format!("n{}", roll(4));
        let sealed: Vec<_> =
            world.server.index().objects().filter(|object| object.1 == State::Sealed).collect();
        let object =
            (!sealed.is_empty()).then(|| sealed[usize::try_from(roll(sealed.len() as u64)).unwrap()].0);
        match (roll(10), object) {
            (0..=2, _) => drop(world.create(client, &name, roll(16 << 10))),
            (3, _) => {
                let (create, answer) = world.create(client, &name, (16 << 10) + roll(200 << 10));
                if matches!(answer, Answer::Created { .. }) {
                    unsealed.push((client, create));
                }
            }
            (4, _) => {
                let members = [("m0", roll(9000)), (&name[..], roll(9000)), ("m2", 10_000)];
                let answer =
                    world.one(client, create("pack", 0, &members, u32::try_from(roll(2)).unwrap()), &[]);
                if matches!(answer, Answer::Created { .. }) {
                    unsealed.push((client, world.requests));
                }
            }
            (5, _) if !unsealed.is_empty() => {
                let (client, create) = unsealed.remove(0);
                if clients.contains(&client) {
                    world.ask(client, Ask::Seal { create }, &[]);
                }
            }
            (6, Some(object)) => drop(world.ask(client, Ask::Delete { object }, &[])),
            (7, Some(object)) => drop(world.ask(client, Ask::Publish { label: label(&name), object }, &[])),
            (8, Some(object)) => {
                world.yard.pins.insert(object);
            }
            (8, None) | (9, _) if roll(3) == 0 => {
                let gone = clients.remove(0);
                world.clients.remove(&gone);
                world.yard.pins.clear();
                world.run(Input::Left { client: gone });
                clients.push(world.join(next));
                next += 1;
            }
            _ => {
                world.yard.pins.clear();
                world.run(Input::Tick);
            }
        }
    }
    let prefixes = world.prefixes;
    wholemem_testkit::report(&format!("{rounds} operations, {prefixes} prefixes recovered"));
    assert!(prefixes > rounds);
}
