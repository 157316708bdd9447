//! Tests of clients in other environments: in separate namespaces, stopped, with too many pins, and with too few descriptors.

use std::time::Duration;

use wholemem_os::pidfd::Signal;
use wholemem_os::{Deadline, PidFd};
use wholemem_store::{Client, Error};
use wholemem_testkit::{Rank, Ranks, skipped, test_name};

use crate::test_store::TestStore;

fn in_another_namespace(rank: &Rank) {
    let client = Client::connect(rank.parameter()).unwrap();
    assert_eq!(client.get("from outside").unwrap().to_vec().unwrap(), b"hello");
    client.put("from inside", &vec![5; 2 << 20]).unwrap();
    let _unsealed = client.create("unsealed", 2 << 20).unwrap();
    let _held = client.get("from outside").unwrap();
    rank.send(1, b"ready", &[]);
    rank.wait_to_be_killed();
}

fn body(rank: &Rank) {
    if rank.id() == 0 {
        return in_another_namespace(rank);
    }
    let client = Client::connect(rank.parameter()).unwrap();
    assert_eq!(rank.recv(0).0, b"ready");
    assert_eq!(client.get("from inside").unwrap().to_vec().unwrap(), vec![5; 2 << 20]);
    client.delete(client.stat("from outside").unwrap().id).unwrap();
    let status = client.status().unwrap();
    assert_eq!((status.unsealed, status.retired), (1, 1), "both are held by the client in the namespace");
    rank.kill(0);
    let deadline = Deadline::after(Duration::from_secs(60));
    loop {
        let status = client.status().unwrap();
        if (status.unsealed, status.retired) == (0, 0) {
            break;
        }
        assert!(!deadline.has_passed(), "{status:?}");
    }
}

#[test]
fn a_client_in_other_namespaces_is_served_and_its_death_is_noticed() {
    if !Ranks::can_use_namespaces() {
        return skipped("namespaces cannot be created here");
    }
    if Ranks::is_rank() {
        return Ranks::of(2).run(test_name!(), body);
    }
    let store = TestStore::start();
    store.client().put("from outside", b"hello").unwrap();
    let socket = store.socket().to_str().unwrap().to_owned();
    Ranks::of(2).in_own_namespaces(0).killed(0).parameter(socket).run(test_name!(), body);
}

#[test]
fn a_stopped_client_retains_its_pins_and_does_not_block_others() {
    Ranks::of(2).run(test_name!(), |rank| {
        if rank.id() == 1 {
            let socket = String::from_utf8(rank.recv(0).0).unwrap();
            let client = Client::connect(socket).unwrap();
            let _held = client.get("held").unwrap();
            drop(client.get("seen").unwrap());
            let _watch = client.watch("").unwrap();
            rank.send(0, b"ready", &[]);
            assert_eq!(rank.recv(0).0, b"go on");
            return;
        }
        let store = TestStore::start();
        let client = store.client();
        let ids = ["held", "seen"].map(|name| client.put(name, &vec![1; 2 << 20]).unwrap().id);
        rank.send(1, store.socket().to_str().unwrap().as_bytes(), &[]);
        assert_eq!(rank.recv(1).0, b"ready");
        let other = PidFd::open(rank.pid(1)).unwrap();
        other.signal(Signal::STOP).unwrap();
        for id in ids {
            client.delete(id).unwrap();
        }
        // The test publishes more events than the server's event log holds.
        for round in 0..6000 {
            client.put(&format!("name {}", round % 10), b"x").unwrap();
        }
        assert_eq!(client.status().unwrap().retired, 1, "the pinned object, and nothing else");
        other.signal(Signal::CONT).unwrap();
        rank.send(1, b"go on", &[]);
        assert!(other.wait_exit(Deadline::after(Duration::from_secs(60))).unwrap());
        let deadline = Deadline::after(Duration::from_secs(60));
        while client.status().unwrap().retired > 0 {
            assert!(!deadline.has_passed(), "the dead client still holds an object");
        }
    });
}

#[test]
fn the_number_of_pins_is_limited_and_pins_are_reused() {
    let store = TestStore::start();
    let client = store.client();
    client.put("name", b"x").unwrap();
    let mut held: Vec<_> = (0..8190).map(|_| client.get("name").unwrap()).collect();
    assert!(matches!(client.get("name"), Err(Error::TooManyPins { limit: 8190 })));
    held.pop();
    held.push(client.get("name").unwrap());
    drop(held);
    assert_eq!(client.get("name").unwrap().to_vec().unwrap(), b"x");
}

#[test]
fn running_out_of_descriptors_is_refused_and_loses_nothing() {
    let store = TestStore::start_limited(64);
    let client = store.client();
    client.put("kept", &vec![1; 1 << 20]).unwrap();
    let mut ids = Vec::new();
    let refused = loop {
        match client.put("", &vec![2; 1 << 20]) {
            Ok(sealed) => ids.push(sealed.id),
            Err(error) => break error,
        }
        assert!(ids.len() < 100, "64 descriptors do not hold 100 objects");
    };
    assert_eq!(refused.code(), "no-memory", "{refused}");
    assert!(!refused.to_string().contains(" 0 B "), "the refusal has the requested length: {refused}");
    // The server refuses a client that connects now with the reason, and the client does not wait.
    for _ in 0..3 {
        assert_eq!(Client::connect(store.socket()).unwrap_err().code(), "no-descriptors");
    }
    assert!(ids.len() > 20, "{} objects", ids.len());
    assert_eq!(client.get("kept").unwrap().to_vec().unwrap(), vec![1; 1 << 20]);
    for id in ids {
        client.delete(id).unwrap();
    }
    client.put("again", &vec![3; 1 << 20]).unwrap();
    assert_eq!(client.get("again").unwrap().to_vec().unwrap(), vec![3; 1 << 20]);
    store.kill("server");
    assert_eq!(store.client().get("kept").unwrap().to_vec().unwrap(), vec![1; 1 << 20]);
}
