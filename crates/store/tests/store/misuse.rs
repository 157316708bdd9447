//! Tests of programs with invalid requests, forks, drops in any order, and abandoned drafts.

use std::io::{Read, Write};
use std::sync::mpsc::channel;
use std::time::Duration;

use wholemem_hal::{Backend, BackendKind};
use wholemem_os::Deadline;
use wholemem_store::{Client, Error, Pack};
use wholemem_testkit::{Ranks, in_forked_child, test_name};

use crate::test_store::TestStore;

const LARGE: usize = 2 << 20;

fn code<T: std::fmt::Debug>(outcome: Result<T, Error>) -> &'static str {
    outcome.unwrap_err().code()
}

/// Waits until the server has the given number of connected clients.
fn wait_for_clients(client: &Client, count: u64) {
    let deadline = Deadline::after(Duration::from_secs(60));
    while client.status().unwrap().clients != count {
        assert!(!deadline.has_passed(), "{:?}", client.status());
    }
}

#[test]
fn a_dropped_watch_is_removed_although_its_process_lives() {
    let store = TestStore::start();
    let client = store.client();
    let watches: Vec<_> = (0..20).map(|_| client.watch("").unwrap()).collect();
    wait_for_clients(&client, 21);
    drop(watches);
    wait_for_clients(&client, 1);
}

#[test]
fn clients_drafts_and_objects_are_dropped_in_any_order() {
    let store = TestStore::start();
    let observer = store.client();
    let before = {
        observer.put("small", b"x").unwrap();
        observer.status().unwrap()
    };
    for order in 0..4 {
        let client = store.client();
        client.put("large", &vec![1; LARGE]).unwrap();
        let (small, large) = (client.get("small").unwrap(), client.get("large").unwrap());
        let pack = {
            client.create_pack(&Pack::new("p").add("p/a", LARGE)).unwrap().seal().unwrap();
            client.get_pack("p").unwrap()
        };
        let draft = client.create("draft", LARGE).unwrap();
        let watch = client.watch("").unwrap();
        for name in ["large", "p"] {
            client.delete(client.stat(name).unwrap().id).unwrap();
        }
        match order {
            0 => drop((client, watch, draft, pack, large, small)),
            1 => drop((small, large, pack, draft, watch, client)),
            2 => drop((pack, client, small, watch, large, draft)),
            _ => drop((draft, large, client, small, pack, watch)),
        }
        wait_for_clients(&observer, 1);
        assert_eq!(observer.status().unwrap(), before, "order {order}");
    }
}

#[test]
fn a_forked_child_cannot_use_or_release_resources_of_its_parent() {
    // The test forks in a separate process, because other tests run threads in this process.
    Ranks::of(1).run(test_name!(), |_| {
        let store = TestStore::start();
        let client = store.client();
        client.put("name", b"value").unwrap();
        let object = client.get("name").unwrap();
        let draft = client.create("draft", LARGE).unwrap();
        draft.bytes().unwrap().unwrap().fill(3).unwrap();
        let mut watch = client.watch("").unwrap();
        let id = object.id();
        let mut parts = Some((client, object, draft, watch));
        in_forked_child(|| {
            let (client, object, draft, mut watch) = parts.take().unwrap();
            assert_eq!(code(client.get("name")), "forked");
            assert_eq!(code(client.get_within("name", Deadline::NOW)), "forked");
            assert_eq!(code(client.put("name", b"child")), "forked");
            assert_eq!(code(client.create("other", LARGE)), "forked");
            assert_eq!(code(client.delete(id)), "forked");
            assert_eq!(code(client.list("")), "forked");
            assert_eq!(code(client.stat("name")), "forked");
            assert_eq!(code(client.status()), "forked");
            assert_eq!(code(client.watch("")), "forked");
            assert_eq!(code(watch.next(Deadline::NOW)), "forked");
            assert_eq!(draft.seal().unwrap_err().error.code(), "forked");
            client.trim();
            drop((object, watch, client));
        });
        let (client, object, draft);
        (client, object, draft, watch) = parts.take().unwrap();
        client.delete(id).unwrap();
        assert_eq!(client.status().unwrap().retired, 1, "the parent still holds the object");
        assert_eq!(object.to_vec().unwrap(), b"value");
        draft.seal().unwrap();
        assert_eq!(client.get("draft").unwrap().to_vec().unwrap(), vec![3; LARGE]);
        let timeout = Deadline::after(Duration::from_secs(60));
        let names: Vec<_> = (0..2).map(|_| watch.next(timeout).unwrap().name).collect();
        assert_eq!(names, ["name", "draft"]);
    });
}

#[test]
fn a_fork_waits_until_the_server_has_a_descriptor_for_its_child() {
    Ranks::of(2).run(test_name!(), |rank| {
        if rank.id() == 1 {
            let socket = String::from_utf8(rank.recv(0).0).unwrap();
            let connections: Vec<_> =
                std::iter::from_fn(|| Client::connect(&socket).ok()).take(100).collect();
            assert!(connections.len() < 100, "64 descriptors do not hold 100 clients");
            rank.send(0, b"full", &[]);
            assert_eq!(rank.recv(0).0, b"forks");
            // Gives the server time to refuse the connection that the fork needs. If the fork takes longer, the test passes
            // without testing anything.
            std::thread::sleep(Duration::from_millis(200));
            return drop(connections);
        }
        let store = TestStore::start_limited(64);
        let client = store.client();
        client.put("small", b"value").unwrap();
        let object = client.get("small").unwrap();
        rank.send(1, store.socket().to_str().unwrap().as_bytes(), &[]);
        assert_eq!(rank.recv(1).0, b"full");
        rank.send(1, b"forks", &[]);
        let bytes = object.bytes().unwrap();
        in_forked_child(|| {
            let mut read = [0; 5];
            bytes.read_at(0, &mut read).unwrap();
            assert_eq!(&read, b"value");
        });
    });
}

#[test]
fn a_child_forked_during_a_put_does_not_prevent_sealing() {
    Ranks::of(1).run(test_name!(), |_| {
        let store = TestStore::start();
        let (client, bytes) = (store.client(), vec![1; 100 << 20]);
        std::thread::scope(|scope| {
            let put = scope.spawn(|| client.put("large", &bytes));
            let mut ends = Vec::new();
            while !put.is_finished() {
                let (mut read, write) = std::io::pipe().unwrap();
                let wait = move || drop(read.read(&mut [0]));
                scope.spawn(|| in_forked_child(wait));
                ends.push(write);
                std::thread::sleep(Duration::from_millis(3));
            }
            // `put` must have sealed the object although the forked children, which exit only below, still run.
            let put = put.join();
            ends.iter_mut().for_each(|end| end.write_all(b"x").unwrap());
            put.unwrap().unwrap();
        });
    });
}

#[test]
fn a_child_can_write_a_shared_draft_and_delays_its_seal() {
    Ranks::of(1).run(test_name!(), |_| {
        let store = TestStore::start();
        let client = store.client();
        let draft = client.create("draft", LARGE).unwrap();
        let bytes = draft.bytes().unwrap().unwrap();
        in_forked_child(|| bytes.fill(3).unwrap());
        draft.seal().unwrap();
        assert_eq!(client.get("draft").unwrap().to_vec().unwrap(), vec![3; LARGE]);
    });
}

#[test]
fn a_draft_that_a_child_can_write_is_sealed_after_the_child_exits() {
    Ranks::of(1).run(test_name!(), |_| {
        let store = TestStore::start();
        let client = store.client();
        let draft = client.create("draft", LARGE).unwrap();
        let mut pack = client.create_pack(&Pack::new("pack").add("pack/a", LARGE).add("pack/b", 3)).unwrap();
        draft.bytes().unwrap().unwrap().fill(3).unwrap();
        pack.write_at(0, 0, &[4; LARGE]).unwrap();
        drop(pack.span(0).unwrap());
        let (mut ready, sender) = std::io::pipe().unwrap();
        let (receiver, end) = std::io::pipe().unwrap();
        std::thread::scope(|scope| {
            let (mut sender, mut receiver) = (sender, receiver);
            let child = scope.spawn(move || {
                in_forked_child(|| {
                    sender.write_all(b"x").unwrap();
                    drop(receiver.read(&mut [0]));
                });
            });
            ready.read_exact(&mut [0]).unwrap();
            let unsealed = draft.seal().unwrap_err();
            assert_eq!(unsealed.error.code(), "still-mapped");
            let mut draft = unsealed.draft.expect("the draft is returned");
            draft.write_at(1, &[5]).unwrap();
            let unsealed = pack.seal().unwrap_err();
            assert_eq!(unsealed.error.code(), "still-mapped");
            let mut pack = unsealed.draft.expect("the draft is returned");
            pack.write_at(1, 0, b"end").unwrap();
            (&end).write_all(b"x").unwrap();
            child.join().unwrap();
            draft.seal().unwrap();
            pack.seal().unwrap();
        });
        assert_eq!(client.get("draft").unwrap().to_vec().unwrap()[..4], [3, 5, 3, 3]);
        assert_eq!(client.get("pack/a").unwrap().to_vec().unwrap(), vec![4; LARGE]);
        assert_eq!(client.get("pack/b").unwrap().to_vec().unwrap(), b"end");
        assert_eq!(client.status().unwrap().unsealed, 0);
    });
}

#[test]
fn an_object_on_a_hidden_device_can_be_listed() {
    let store = TestStore::start();
    let devices = Backend::open(BackendKind::Host).unwrap();
    let creator = Client::connect_with(store.socket(), Some(devices.clone())).unwrap();
    let sealed = creator.create_on(&devices.device(0).unwrap(), "far", 10).unwrap().seal().unwrap();
    let without_devices = store.client();
    assert_eq!(code(without_devices.get("far")), "device-hidden");
    let entry = without_devices.stat("far").unwrap();
    assert_eq!((entry.id, entry.len, entry.is_cpu, entry.version), (sealed.id, 10, false, 1));
    without_devices.delete(entry.id).unwrap();
    assert_eq!(code(without_devices.stat("far")), "no-such-name");
}

#[test]
fn invalid_names_are_refused_by_every_call() {
    let store = TestStore::start();
    let client = store.client();
    let id = client.put("name", b"x").unwrap().id;
    // One name is longer than the maximum length of a name, and the other is longer than any message.
    for name in ["x".repeat(201), "x".repeat(9 << 20)] {
        assert_eq!(code(client.get(&name)), "name-too-long");
        assert_eq!(code(client.get_within(&name, Deadline::NEVER)), "name-too-long");
        assert_eq!(code(client.stat(&name)), "name-too-long");
        assert_eq!(code(client.put(&name, b"x")), "name-too-long");
        assert_eq!(code(client.put(&name, &vec![0; LARGE])), "name-too-long");
        assert_eq!(code(client.publish(&name, id)), "name-too-long");
        assert_eq!(code(client.watch(&name)), "name-too-long");
        assert_eq!(code(client.get_pack(&name)), "name-too-long");
        for len in [1, LARGE] {
            assert_eq!(code(client.create_pack(&Pack::new("p").add(&name, len))), "name-too-long");
            assert_eq!(code(client.create_pack(&Pack::new(&name).add("a", len))), "name-too-long");
        }
        assert_eq!(client.list(&name).unwrap(), []);
    }
    assert_eq!(code(client.publish("", id)), "empty-name");
    let with_meta = |len| client.create_with_meta("name", &vec![0; len], 1);
    assert_eq!(code(with_meta(217)), "meta-too-long");
    assert_eq!(client.get("name").unwrap().id(), id, "the connection still works");
}

#[test]
fn invalid_packs_are_refused_before_anything_is_written() {
    let store = TestStore::start();
    let client = store.client();
    for len in [1, LARGE] {
        let twice = client.create_pack(&Pack::new("p").add("a", len).add("b", 1).add("a", len));
        assert_eq!(
            twice.unwrap_err().to_string(),
            "the request to the store violates the protocol: two objects of a pack are named `a`"
        );
        let itself = client.create_pack(&Pack::new("p").add("p", len));
        assert_eq!(code(itself), "malformed");
    }
    let mut many = Pack::new("p");
    for number in 0..20_000 {
        many = many.add(&format!("{number:0200}"), 1);
    }
    let refused = client.create_pack(&many).unwrap_err().to_string();
    assert_eq!(refused, "a pack of 20000 objects is too large: the limit is 16384");
    let endless = Pack::new("p").add("a", usize::MAX).add("b", usize::MAX);
    assert_eq!(code(client.create_pack(&endless)), "malformed");
    // A pack may contain any number of objects without a name.
    let nameless = client.create_pack(&Pack::new("p").add("", 1).add("", 1)).unwrap();
    nameless.seal().unwrap();
    assert_eq!(client.status().unwrap().objects, 3);
}

#[test]
fn a_deadline_holds_even_if_the_server_does_not_answer() {
    Ranks::of(1).run(test_name!(), |_| {
        let store = TestStore::start();
        let (client, waiting) = (store.client(), store.client());
        store.freeze();
        let (ended, first) = channel();
        std::thread::scope(|scope| {
            let late = ended.clone();
            scope.spawn(move || {
                assert_eq!(code(waiting.get("nothing")), "no-such-name");
                late.send("without a deadline").unwrap();
            });
            scope.spawn(move || {
                let short = Deadline::after(Duration::from_millis(50));
                assert_eq!(code(client.get_within("nothing", short)), "timed-out");
                ended.send("with a deadline").unwrap();
            });
            assert_eq!(first.recv().unwrap(), "with a deadline");
            store.thaw();
            assert_eq!(first.recv().unwrap(), "without a deadline");
        });
    });
}
