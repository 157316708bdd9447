//! Clients in other places: in namespaces of their own, stopped, and with more pins than there are.

use std::time::Duration;

use wholemem_os::pidfd::Signal;
use wholemem_os::{Deadline, PidFd};
use wholemem_store::{Client, Error};
use wholemem_testkit::{Rank, Ranks, skipped, test_name};

use crate::served::Served;

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
    assert_eq!((status.unsealed, status.retired), (1, 1), "both are held inside");
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
fn a_client_in_namespaces_of_its_own_is_served_and_its_death_is_noticed() {
    if !Ranks::can_use_namespaces() {
        return skipped("no namespaces can be made here");
    }
    if Ranks::is_rank() {
        return Ranks::of(2).run(test_name!(), body);
    }
    let served = Served::start();
    served.client().put("from outside", b"hello").unwrap();
    let socket = served.socket().to_str().unwrap().to_owned();
    Ranks::of(2).in_own_namespaces(0).killed(0).parameter(socket).run(test_name!(), body);
}

#[test]
fn a_stopped_client_holds_what_it_pinned_and_nobody_waits_for_it() {
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
        let served = Served::start();
        let client = served.client();
        let ids = ["held", "seen"].map(|name| client.put(name, &vec![1; 2 << 20]).unwrap().id);
        rank.send(1, served.socket().to_str().unwrap().as_bytes(), &[]);
        assert_eq!(rank.recv(1).0, b"ready");
        let other = PidFd::open(rank.pid(1)).unwrap();
        other.signal(Signal::STOP).unwrap();
        for id in ids {
            client.delete(id).unwrap();
        }
        // More events than wait for anybody.
        for round in 0..6000 {
            client.put(&format!("name {}", round % 10), b"x").unwrap();
        }
        assert_eq!(client.status().unwrap().retired, 1, "what it pinned, and nothing else");
        other.signal(Signal::CONT).unwrap();
        rank.send(1, b"go on", &[]);
        assert!(other.wait_exit(Deadline::after(Duration::from_secs(60))).unwrap());
        let deadline = Deadline::after(Duration::from_secs(60));
        while client.status().unwrap().retired > 0 {
            assert!(!deadline.has_passed(), "nothing is held by the dead");
        }
    });
}

#[test]
fn pins_end_somewhere_and_are_used_again() {
    let served = Served::start();
    let client = served.client();
    client.put("name", b"x").unwrap();
    let mut held: Vec<_> = (0..8190).map(|_| client.get("name").unwrap()).collect();
    assert!(matches!(client.get("name"), Err(Error::TooManyPins { limit: 8190 })));
    held.pop();
    held.push(client.get("name").unwrap());
    drop(held);
    assert_eq!(client.get("name").unwrap().to_vec().unwrap(), b"x");
}

#[test]
fn descriptors_that_run_out_are_an_answer_and_no_loss() {
    let served = Served::start_limited(64);
    let client = served.client();
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
    assert!(!refused.to_string().contains(" 0 B "), "it says how much was needed: {refused}");
    // Who comes now is told so, and does not wait.
    for _ in 0..3 {
        assert_eq!(Client::connect(served.socket()).unwrap_err().code(), "no-descriptors");
    }
    assert!(ids.len() > 20, "{} objects", ids.len());
    assert_eq!(client.get("kept").unwrap().to_vec().unwrap(), vec![1; 1 << 20]);
    for id in ids {
        client.delete(id).unwrap();
    }
    client.put("again", &vec![3; 1 << 20]).unwrap();
    assert_eq!(client.get("again").unwrap().to_vec().unwrap(), vec![3; 1 << 20]);
    served.kill("server");
    assert_eq!(served.client().get("kept").unwrap().to_vec().unwrap(), vec![1; 1 << 20]);
}
