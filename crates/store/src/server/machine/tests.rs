//! Tests of whole operations of the state machine, in which the server is killed after every store to the index.

use std::time::Duration;

use super::simulation::*;
use super::*;
use crate::cells::recorded::Prefixes;
use crate::id::{ClientId, ObjectId, SlotState};
use crate::protocol::frame::Payload;
use crate::protocol::{Answer, ByteRange, PROTOCOL, Refusal, Request, RequestKind};

#[test]
fn a_small_object_exists_at_once_and_is_deleted_at_once() {
    let mut sim = Simulation::new();
    let client = sim.join(1);
    let (_, answer) = sim.create(client, "small", 100);
    let object = sealed(&answer);
    assert_eq!(answer, Answer::Sealed { object, version: 1 });
    assert_eq!(
        sim.request_one(client, RequestKind::Find { name: "small".to_owned(), wait: 0 }, &[]),
        Answer::Found { object }
    );
    assert_eq!(sim.memory.bytes.values().collect::<Vec<_>>(), [&vec![7; 100]]);
    assert_eq!(sim.request_one(client, RequestKind::Delete { object }, &[]), Answer::Done);
    let no_object = Answer::Refused(Refusal::NoSuchObject { object });
    assert_eq!(sim.request_one(client, RequestKind::Delete { object }, &[]), no_object);
    assert!(sim.prefixes >= 30, "{} prefixes", sim.prefixes);
}

#[test]
fn a_large_object_exists_once_sealed_and_is_freed_with_its_memory() {
    let mut sim = Simulation::new();
    let client = sim.join(1);
    let (create, answer) = sim.create(client, "large", 100 << 10);
    let Answer::Created { object, memory } = answer else { panic!("{answer:?}") };
    assert_eq!((memory.offset, memory.allocation_len), (0, 100 << 10));
    let refused = Answer::Refused(Refusal::NoSuchName { name: "large".to_owned() });
    assert_eq!(
        sim.request_one(client, RequestKind::Find { name: "large".to_owned(), wait: 0 }, &[]),
        refused
    );
    sim.writable = true;
    assert_eq!(
        sim.request_one(client, RequestKind::Seal { create }, &[]),
        Answer::Refused(Refusal::StillMapped)
    );
    sim.writable = false;
    assert_eq!(
        sim.request_one(client, RequestKind::Seal { create }, &[]),
        Answer::Sealed { object, version: 1 }
    );
    assert_eq!(
        sim.request_one(client, RequestKind::Seal { create }, &[]),
        Answer::Sealed { object, version: 1 }
    );
    assert_eq!(sim.status(client).host.used, 100 << 10);
    sim.request_one(client, RequestKind::Delete { object }, &[]);
    assert_eq!((sim.status(client).host.used, sim.parked.len()), (0, 0));
}

#[test]
fn a_version_replaces_the_previous_one_and_readers_keep_theirs() {
    let mut sim = Simulation::new();
    let client = sim.join(1);
    let first = sealed(&sim.create(client, "name", 100).1);
    sim.memory.pins.insert(first);
    let (_, answer) = sim.create(client, "name", 200);
    let second = sealed(&answer);
    assert_eq!(answer, Answer::Sealed { object: second, version: 2 });
    let found = sim.request_one(client, RequestKind::Find { name: "name".to_owned(), wait: 0 }, &[]);
    assert_eq!(found, Answer::Found { object: second });
    assert_eq!(sim.status(client).retired, 1);
    sim.memory.pins.clear();
    // A request that notifies the server of a released pin has no answer.
    assert_eq!(sim.request(client, RequestKind::PinReleased { object: first }, &[]), []);
    assert_eq!(sim.status(client).retired, 0);
}

#[test]
fn a_pack_is_sealed_and_deleted_as_a_whole() {
    let mut sim = Simulation::new();
    let client = sim.join(1);
    let members = [("p/a", 5000), ("p/b", 0), ("p/c", 20_000)];
    let answer = sim.request_one(client, create("p", 0, &members, 0), &[]);
    let Answer::Created { object, memory } = answer else { panic!("{answer:?}") };
    let request = sim.requests;
    assert_eq!(memory.allocation_len, 28 << 10);
    assert_eq!(sealed(&sim.request_one(client, RequestKind::Seal { create: request }, &[])), object);
    let status = sim.status(client);
    assert_eq!((status.objects, status.host.used), (4, 28 << 10));
    // A member of a pack whose name is assigned to another object is deleted without the pack.
    sealed(&sim.create(client, "p/a", 10).1);
    assert_eq!(sim.status(client).objects, 4);
    sim.request_one(client, RequestKind::Delete { object }, &[]);
    let status = sim.status(client);
    assert_eq!((status.objects, status.host.used), (1, 64 << 10), "the arena of the small object is left");
}

#[test]
fn a_pinned_member_retains_the_memory_of_its_pack() {
    let mut sim = Simulation::new();
    let client = sim.join(1);
    let answer = sim.request_one(client, create("p", 0, &[("p/a", 5000), ("p/b", 20_000)], 0), &[]);
    let Answer::Created { object, .. } = answer else { panic!("{answer:?}") };
    let request = sim.requests;
    sim.request_one(client, RequestKind::Seal { create: request }, &[]);
    let Answer::Found { object: member } =
        sim.request_one(client, RequestKind::Find { name: "p/b".to_owned(), wait: 0 }, &[])
    else {
        panic!("the object is not a member")
    };
    sim.memory.pins.insert(member);
    sim.request_one(client, RequestKind::Delete { object }, &[]);
    let status = sim.status(client);
    assert_eq!((status.objects, status.retired, status.host.used), (0, 2, 28 << 10));
    sim.memory.pins.clear();
    sim.advance(Duration::from_secs(1));
    assert_eq!(sim.status(client).host.used, 0);
}

#[test]
fn another_name_retains_the_bytes_after_the_first_is_deleted() {
    let mut sim = Simulation::new();
    let client = sim.join(1);
    let (create, _) = sim.create(client, "first", 20 << 10);
    let object = sealed(&sim.request_one(client, RequestKind::Seal { create }, &[]));
    let alias = sealed(&sim.request_one(
        client,
        RequestKind::Publish { label: label("second"), object, part: None },
        &[],
    ));
    sim.request_one(client, RequestKind::Delete { object }, &[]);
    assert_eq!(sim.status(client).host.used, 20 << 10);
    sim.request_one(client, RequestKind::Delete { object: alias }, &[]);
    assert_eq!(sim.status(client).host.used, 0);
}

#[test]
fn drafts_of_a_dead_client_are_deleted() {
    let mut sim = Simulation::new();
    let (first, second) = (sim.join(1), sim.join(2));
    sim.create(first, "unsealed", 100 << 10);
    sealed(&sim.create(first, "sealed", 100).1);
    let device = sim.request_one(first, create("gpu", 100, &[], 1), &[]);
    assert!(matches!(device, Answer::Created { .. }), "{device:?}");
    sim.clients.remove(&first);
    sim.run(Input::Left { client: first });
    let status = sim.status(second);
    assert_eq!((status.objects, status.unsealed, status.clients), (1, 0, 1));
    assert_eq!((status.host.used, status.device.used), (64 << 10, 64 << 10), "one arena each");
}

#[test]
fn only_its_owner_deletes_an_object() {
    let mut sim = Simulation::new();
    let (owner, root) = (sim.join(1), ClientId(9));
    let object = sealed(&sim.create(owner, "mine", 100).1);
    let other = ClientId(8);
    for (client, user) in [(other, 1001), (root, 0)] {
        sim.clients.insert(client, user);
        let account = sim.budget.open(user);
        sim.run(Input::Joined { client, account });
        sim.request(client, RequestKind::Hello { protocol: PROTOCOL }, &[]);
    }
    let refused = Answer::Refused(Refusal::NotYours { object, owner: USER });
    assert_eq!(sim.request_one(other, RequestKind::Delete { object }, &[]), refused);
    assert_eq!(sim.request_one(root, RequestKind::Delete { object }, &[]), Answer::Done);
}

#[test]
fn only_its_owner_assigns_a_name_to_another_object() {
    let mut sim = Simulation::new();
    let owner = sim.join(1);
    let owned = sealed(&sim.create(owner, "mine", 100).1);
    let other = ClientId(8);
    sim.clients.insert(other, 1001);
    let account = sim.budget.open(1001);
    sim.run(Input::Joined { client: other, account });
    sim.request(other, RequestKind::Hello { protocol: PROTOCOL }, &[]);
    let before = sim.status(owner);
    let name_taken = |name: &str| Answer::Refused(Refusal::NameTaken { name: name.to_owned(), owner: USER });
    assert_eq!(sim.create(other, "mine", 200).1, name_taken("mine"));
    assert_eq!(sim.create(other, "mine", 100 << 10).1, name_taken("mine"));
    let pack = create("pack", 0, &[("a", 5000), ("mine", 100 << 10)], 0);
    assert_eq!(sim.request_one(other, pack, &[]), name_taken("mine"));
    assert_eq!(
        sim.request_one(other, RequestKind::Publish { label: label("mine"), object: owned, part: None }, &[]),
        name_taken("mine")
    );
    // Another user takes the name while the next object with this name is being written.
    let (create, _) = sim.create(other, "late", 100 << 10);
    sealed(&sim.create(owner, "late", 10).1);
    assert_eq!(sim.request_one(other, RequestKind::Seal { create }, &[]), name_taken("late"));
    sim.request_one(other, RequestKind::Abandon { create }, &[]);
    let after = sim.status(owner);
    assert_eq!((after.objects, after.host), (before.objects + 1, before.host));
    let find = RequestKind::Find { name: "mine".to_owned(), wait: 0 };
    assert_eq!(sim.request_one(other, find, &[]), Answer::Found { object: owned });
    // A client of the server's user may take any name, and a client of any user may take a free name.
    let root = ClientId(9);
    sim.clients.insert(root, 0);
    let account = sim.budget.open(0);
    sim.run(Input::Joined { client: root, account });
    sim.request(root, RequestKind::Hello { protocol: PROTOCOL }, &[]);
    let roots = sealed(&sim.create(root, "mine", 10).1);
    assert_eq!(
        sim.create(owner, "mine", 10).1,
        Answer::Refused(Refusal::NameTaken { name: "mine".to_owned(), owner: 0 })
    );
    sim.request_one(root, RequestKind::Delete { object: roots }, &[]);
    sealed(&sim.create(other, "mine", 10).1);
}

#[test]
fn invalid_requests_are_refused_and_change_nothing() {
    let mut sim = Simulation::new();
    let client = sim.join(1);
    let before = sim.status(client);
    let long = "x".repeat(201);
    let unknown = ObjectId::new(3, 3);
    for (kind, payload, code) in [
        (create(&long, 1, &[], 0), 1, "name-too-long"),
        (create("a", 1 << 40, &[], 0), 0, "over-quota"),
        (create("a", 10, &[], 0), 9, "malformed"),
        (create("a", 1 << 16, &[], 0), 9, "malformed"),
        (create("a", 10, &[], 2), 0, "no-such-device"),
        (create("a", 0, &[("b", u64::MAX), ("c", 2)], 0), 0, "malformed"),
        (create("a", 0, &[("b", 1), ("b", 1)], 0), 0, "malformed"),
        (create("a", 0, &[("", 1); 24], 0), 0, "index-full"),
        (RequestKind::Seal { create: 1 }, 0, "nothing-to-seal"),
        (RequestKind::Fetch { object: unknown }, 0, "no-such-object"),
        (RequestKind::Publish { label: label("a"), object: unknown, part: None }, 0, "no-such-object"),
        (RequestKind::Find { name: long.clone(), wait: u64::MAX }, 0, "name-too-long"),
        (RequestKind::Watch { prefix: long.clone() }, 0, "name-too-long"),
        (RequestKind::Hello { protocol: 9 }, 0, "other-protocol"),
    ] {
        match sim.request_one(client, kind, &vec![0; payload]) {
            Answer::Refused(refusal) => assert_eq!(refusal.code(), code),
            other => panic!("{other:?} instead of {code}"),
        }
    }
    assert_eq!(sim.status(client), before);
}

#[test]
fn a_request_for_a_name_is_answered_when_the_name_exists_or_on_timeout() {
    let mut sim = Simulation::new();
    let client = sim.join(1);
    assert_eq!(sim.request(client, RequestKind::Find { name: "later".to_owned(), wait: 500 }, &[]), []);
    assert_eq!(sim.request(client, RequestKind::Find { name: "never".to_owned(), wait: 900 }, &[]), []);
    assert_eq!(sim.server.wake_at(), Some(Duration::from_millis(1500)));
    let answers = sim.request(client, create("later", 0, &[], 0), &[]);
    let [Answer::Found { object }, Answer::Sealed { object: created, .. }] = answers[..] else {
        panic!("{answers:?}")
    };
    assert_eq!(object, created);
    let late = StepTime { elapsed: Duration::from_secs(2), unix: 0 };
    let outputs = sim.server.step(late, Input::Tick, &mut sim.memory);
    assert!(matches!(
        &outputs[..],
        [Output::Respond { response, .. }] if response.answer == Answer::Refused(Refusal::NoSuchName { name: "never".to_owned() })
    ));
}

#[test]
fn a_watcher_is_notified_of_names_with_its_prefix() {
    let mut sim = Simulation::new();
    let (client, watcher) = (sim.join(1), sim.join(2));
    sim.request_one(watcher, RequestKind::Watch { prefix: "a/".to_owned() }, &[]);
    let events = |answers: Vec<Answer>| {
        let names = answers.into_iter().filter_map(|answer| match answer {
            Answer::Event(event) => Some(format!("{} {:?}", event.name, event.kind)),
            _ => None,
        });
        names.collect::<Vec<_>>()
    };
    let created = sim.request(client, create("a/x", 0, &[], 0), &[]);
    assert_eq!(events(created), ["a/x Published { version: 1 }"]);
    let created = sim.request(client, create("b/x", 0, &[], 0), &[]);
    assert_eq!(events(created), Vec::<String>::new());
    let created = sim.request(client, create("a/x", 0, &[], 0), &[]);
    assert_eq!(events(created), ["a/x Replaced { version: 2, previous: 1 }"]);
}

#[test]
fn a_request_that_is_sent_again_gets_the_same_answer() {
    let mut sim = Simulation::new();
    let client = sim.join(1);
    let small = sim.create(client, "small", 10);
    let large = sim.create(client, "large", 30 << 10);
    let object = sealed(&small.1);
    let alias =
        sim.request_one(client, RequestKind::Publish { label: label("alias"), object, part: None }, &[]);
    let (publish, before) = (sim.requests, snapshot(&sim.server));
    let (mut server, outputs) =
        sim.recover(Prefixes { before: sim.cells.snapshot(), stores: vec![] }.replay(0));
    assert!(
        matches!(&outputs[..], [Output::Respond { response, .. }] if response.answer == Answer::Restarted)
    );
    let requests = [
        (small.0, create("small", 10, &[], 0), 10, small.1),
        (large.0, create("large", 30 << 10, &[], 0), 0, large.1),
        (publish, RequestKind::Publish { label: label("alias"), object, part: None }, 0, alias),
        (99, RequestKind::Delete { object: ObjectId::new(20, 0) }, 0, Answer::Done),
    ];
    for (id, kind, payload, expected) in requests {
        let request = Request { id, resends: 1, kind };
        let input = Input::Request { client, request, payload: vec![7; payload].into(), charge: None };
        let outputs = server.step(now(), input, &mut sim.memory);
        let [Output::Respond { response, .. }] = &outputs[..] else { panic!("{outputs:?}") };
        assert_eq!(response.answer, expected);
    }
    assert_eq!(snapshot(&server), before);
}

#[test]
fn a_request_during_which_two_servers_died_is_refused_unless_completed() {
    let mut sim = Simulation::new();
    let client = sim.join(1);
    let small = sim.create(client, "small", 10);
    let large = sim.create(client, "large", 30 << 10);
    let object = sealed(&small.1);
    let (mut server, _) = sim.recover(Prefixes { before: sim.cells.snapshot(), stores: vec![] }.replay(0));
    let mut send = |id, resends, kind, payload: usize| {
        let request = Request { id, resends, kind };
        let input = Input::Request { client, request, payload: vec![7; payload].into(), charge: None };
        let outputs = server.step(now(), input, &mut sim.memory);
        let [.., Output::Respond { response, .. }] = &outputs[..] else { panic!("{outputs:?}") };
        response.answer.clone()
    };
    let refused = |servers| Answer::Refused(Refusal::ServersDied { servers });
    let more = || create("more", 30 << 10, &[], 0);
    assert_eq!(send(small.0, 2, create("small", 10, &[], 0), 10), small.1, "it was completed before");
    assert_eq!(send(large.0, 3, create("large", 30 << 10, &[], 0), 0), large.1, "it was completed before");
    assert_eq!(send(90, 2, more(), 0), refused(2));
    assert_eq!(send(91, 255, more(), 0), refused(255));
    assert_eq!(send(92, 2, RequestKind::Seal { create: large.0 }, 0), refused(2));
    // Requests that need no new memory, or that wait for other clients, are not refused although servers died while processing
    // them.
    assert!(
        matches!(send(97, 2, create("fits", 10, &[], 0), 10), Answer::Sealed { .. }),
        "it fits the arena"
    );
    assert!(matches!(send(93, 2, RequestKind::Fetch { object }, 0), Answer::Fetched { .. }));
    assert!(matches!(
        send(94, 9, RequestKind::Find { name: "small".to_owned(), wait: 0 }, 0),
        Answer::Found { .. }
    ));
    assert_eq!(send(95, 9, RequestKind::Delete { object }, 0), Answer::Done);
}

#[test]
fn a_request_that_one_server_receives_twice_is_processed_once() {
    let mut sim = Simulation::new();
    let (client, other) = (sim.join(1), sim.join(2));
    let snapshot = Prefixes { before: sim.cells.snapshot(), stores: vec![] };
    let (mut server, _) = sim.recover(snapshot.replay(0));
    let mut send = |client, id, resends, kind, payload: Vec<u8>| {
        let request = Request { id, resends, kind };
        let input = Input::Request { client, request, payload: payload.into(), charge: None };
        server.step(now(), input, &mut sim.memory)
    };
    // The client sends the request before it has noticed that the server was replaced, and again afterwards.
    let outputs = send(client, 50, 0, create("late", 1 << 40, &[], 0), vec![]);
    assert!(matches!(outputs[..], [Output::Respond { .. }]), "{outputs:?}");
    let outputs = send(client, 50, 1, create("late", 30 << 10, &[], 0), vec![]);
    assert_eq!(outputs, [], "a refused request is not processed again although there is space now");
    // A request that the previous server had received is processed, even if it arrives after a later one.
    let outputs = send(client, 49, 1, RequestKind::Status, vec![]);
    assert!(matches!(outputs[..], [Output::Respond { .. }]), "{outputs:?}");
    // Requests of other clients with the same id are not affected.
    let outputs = send(other, 50, 1, RequestKind::Status, vec![]);
    assert!(matches!(outputs[..], [Output::Respond { .. }]), "{outputs:?}");
}

#[test]
fn a_failed_allocation_is_answered_and_loses_nothing() {
    let mut sim = Simulation::new();
    let client = sim.join(1);
    let request = Request { id: 50, resends: 0, kind: create("large", 30 << 10, &[], 0) };
    let outputs = sim.step(Input::Request { client, request, payload: Payload::default(), charge: None });
    let [Output::Allocate { allocation, len, place: 0, .. }] = outputs[..] else { panic!("{outputs:?}") };
    assert_eq!(len, 32 << 10);
    let outputs = sim.step(Input::Allocated { allocation, outcome: Err("no memory left".to_owned()) });
    let [Output::Release { .. }, Output::Respond { response, .. }] = &outputs[..] else {
        panic!("{outputs:?}")
    };
    let refusal = Refusal::NoMemory { len: 32 << 10, reason: "no memory left".to_owned() };
    assert_eq!(response.answer, Answer::Refused(refusal));
    assert_eq!(sim.status(client).host.used, 0);
}

#[test]
fn a_draft_that_is_abandoned_during_its_seal_is_not_sealed() {
    let mut sim = Simulation::new();
    let client = sim.join(1);
    let (create, _) = sim.create(client, "large", 30 << 10);
    let request = Request { id: 50, resends: 0, kind: RequestKind::Seal { create } };
    let outputs = sim.step(Input::Request { client, request, payload: Payload::default(), charge: None });
    let [Output::CloseForWriting { allocation, at_once: false, .. }] = outputs[..] else {
        panic!("{outputs:?}")
    };
    assert_eq!(sim.request_one(client, RequestKind::Abandon { create }, &[]), Answer::Done);
    let outputs = sim.step(Input::ClosedForWriting { allocation, outcome: Ok(()) });
    let [Output::Respond { response, .. }] = &outputs[..] else { panic!("{outputs:?}") };
    assert_eq!((response.id, &response.answer), (50, &Answer::Refused(Refusal::NothingToSeal)));
    assert_eq!(sim.status(client).host.used, 0);
}

#[test]
fn two_requests_to_seal_a_draft_are_both_answered() {
    let mut sim = Simulation::new();
    let client = sim.join(1);
    let (create, _) = sim.create(client, "large", 30 << 10);
    let mut closing = Vec::new();
    for id in [50, 51] {
        let request = Request { id, resends: 0, kind: RequestKind::Seal { create } };
        closing.extend(sim.step(Input::Request {
            client,
            request,
            payload: Payload::default(),
            charge: None,
        }));
    }
    let [Output::CloseForWriting { allocation, .. }] = closing[..] else { panic!("{closing:?}") };
    let outputs = sim.step(Input::ClosedForWriting { allocation, outcome: Ok(()) });
    let answered = outputs.iter().filter_map(|output| match output {
        Output::Respond { response, .. } => Some((response.id, sealed(&response.answer))),
        _ => None,
    });
    let answered: Vec<_> = answered.collect();
    assert_eq!(answered, [(50, answered[0].1), (51, answered[0].1)]);
}

#[test]
fn a_client_that_does_not_send_a_hello_is_disconnected() {
    let mut sim = Simulation::new();
    let client = ClientId(4);
    let account = sim.budget.open(1);
    sim.step(Input::Joined { client, account });
    let request = Request { id: 1, resends: 0, kind: RequestKind::Status };
    let outputs = sim.step(Input::Request { client, request, payload: Payload::default(), charge: None });
    assert_eq!(outputs, [Output::Disconnect { client }]);
}

/// Checks that every prefix of the stores of every step recovers, for random operations in a random order.
#[test]
fn random_operations_recover_after_every_store() {
    let rounds = if wholemem_testkit::exhaustive() { 4000 } else { 150 };
    let mut random = wholemem_testkit::seed();
    let mut below = |limit: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % limit
    };
    let mut sim = Simulation::with_prealloc_limit(POLICY.quota / 4);
    let mut next = 3;
    let mut clients = vec![sim.join(1), sim.join(2)];
    let trusted = sim.join_as(100, settings(0).user);
    let mut unsealed: Vec<(ClientId, u64)> = Vec::new();
    for _ in 0..rounds {
        let client = clients[usize::try_from(below(2)).unwrap()];
        let name = format!("n{}", below(4));
        let sealed: Vec<_> =
            sim.server.index().objects().filter(|object| object.1 == SlotState::Sealed).collect();
        let object =
            (!sealed.is_empty()).then(|| sealed[usize::try_from(below(sealed.len() as u64)).unwrap()].0);
        match (below(11), object) {
            (0..=2, _) => drop(sim.create(client, &name, below(16 << 10))),
            (3, _) => {
                let (create, answer) = sim.create(client, &name, (1 + below(4)) * (48 << 10));
                if matches!(answer, Answer::Created { .. }) {
                    unsealed.push((client, create));
                }
            }
            (4, _) => {
                let members = [("m0", below(9000)), (&name[..], below(9000)), ("m2", 10_000)];
                let answer = sim.request_one(
                    client,
                    create("pack", 0, &members, u32::try_from(below(2)).unwrap()),
                    &[],
                );
                if matches!(answer, Answer::Created { .. }) {
                    unsealed.push((client, sim.requests));
                }
            }
            (5, _) if !unsealed.is_empty() => {
                let (client, create) = unsealed.remove(0);
                if clients.contains(&client) {
                    sim.request(client, RequestKind::Seal { create }, &[]);
                }
            }
            (6, Some(object)) => drop(sim.request(client, RequestKind::Delete { object }, &[])),
            (7, Some(object)) => {
                let part = (below(2) == 0).then_some(ByteRange { offset: 0, len: 1 });
                drop(sim.request(client, RequestKind::Publish { label: label(&name), object, part }, &[]));
            }
            (10, _) => {
                let (place, len) = (u32::try_from(below(2)).unwrap(), (1 + below(20)) * (4 << 10));
                let part = ByteRange { offset: below(len), len: 1 };
                drop(sim.request(trusted, RequestKind::Adopt { label: label(&name), place, len, part }, &[]));
            }
            (8, Some(object)) => {
                sim.memory.pins.insert(object);
            }
            (8, None) | (9, _) if below(3) == 0 => {
                let departed = clients.remove(0);
                sim.clients.remove(&departed);
                sim.memory.pins.clear();
                sim.run(Input::Left { client: departed });
                clients.push(sim.join(next));
                next += 1;
            }
            _ => {
                sim.memory.pins.clear();
                // After this time, deleted objects are scanned for pins again, and preallocated memory may be released.
                sim.advance(Duration::from_millis([1000, 1010, 20_000][usize::try_from(below(3)).unwrap()]));
            }
        }
    }
    let prefixes = sim.prefixes;
    wholemem_testkit::report(&format!("{rounds} operations, {prefixes} prefixes recovered"));
    assert!(prefixes > rounds);
}
