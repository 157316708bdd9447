//! Tests in which servers and keepers are killed: no sealed object is lost, and readers are not disturbed.

use std::process::{Command, Stdio};
use std::time::Duration;

use wholemem_os::interrupt::interruptible;
use wholemem_os::packet::{Address, PacketListener};
use wholemem_os::pidfd::Signal;
use wholemem_os::{Deadline, PacketSocket, PidFd};
use wholemem_store::{Client, Error};

use crate::test_store::{TestStore, wait_until_readable};

#[test]
fn a_killed_server_loses_nothing_and_mapped_objects_stay_available() {
    let store = TestStore::start();
    let client = store.client();
    let large = vec![7; 2 << 20];
    client.put("small", b"hello").unwrap();
    client.put("large", &large).unwrap();
    let held = client.get("small").unwrap();
    let draft = client.create("unsealed", 2 << 20).unwrap();
    draft.bytes().unwrap().unwrap().fill(9).unwrap();
    let before = client.status().unwrap();
    store.kill("server");
    // A mapped object is available while no server runs; the seal waits for the next server.
    assert_eq!(client.get("small").unwrap().to_vec().unwrap(), b"hello");
    draft.seal().unwrap();
    assert_eq!(client.get("unsealed").unwrap().to_vec().unwrap(), vec![9; 2 << 20]);
    let other = store.client();
    assert_eq!(other.get("large").unwrap().to_vec().unwrap(), large);
    assert_eq!(held.to_vec().unwrap(), b"hello");
    let after = client.status().unwrap();
    assert_eq!((after.objects, after.unsealed, after.epoch), (before.objects + 1, 0, before.epoch + 1));
    assert_eq!(after.host, before.host);
}

#[test]
fn a_killed_keeper_is_replaced_before_the_server_is_killed() {
    let store = TestStore::start();
    let client = store.client();
    client.put("name", b"value").unwrap();
    for _ in 0..3 {
        store.kill("keeper");
        client.put("more", b"something").unwrap();
        store.kill("server");
        assert_eq!(store.client().get("name").unwrap().to_vec().unwrap(), b"value");
        assert_eq!(client.get("more").unwrap().to_vec().unwrap(), b"something");
    }
}

#[test]
fn a_store_that_has_ended_finds_no_names_and_held_objects_stay_valid() {
    let process = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
    let mut store = TestStore::start_for(&process);
    let client = store.client();
    client.put("name", b"value").unwrap();
    let held = client.get("name").unwrap();
    store.stop(process);
    // The index still contains the name, but a client must notice that the store has ended.
    assert!(matches!(client.get("name"), Err(Error::Disconnected)));
    assert!(matches!(client.get_by_id(held.id()), Err(Error::Disconnected)));
    assert!(matches!(client.list(""), Err(Error::Disconnected)));
    assert!(matches!(client.create("new", 3), Err(Error::Disconnected)));
    assert_eq!(held.to_vec().unwrap(), b"value");
}

#[test]
fn a_watcher_gets_one_error_for_missed_events_and_then_all_later_events() {
    let store = TestStore::start();
    let client = store.client();
    let mut watch = client.watch("seen").unwrap();
    let timeout = Deadline::after(Duration::from_secs(60));
    client.put("seen 1", b"before").unwrap();
    store.kill("server");
    // The next server answers this put, and does not know the watch yet.
    client.put("seen 2", b"between").unwrap();
    assert_eq!(watch.next(timeout).unwrap().name, "seen 1");
    let missed = watch.next(timeout).unwrap_err();
    assert!(matches!(&missed, Error::EventsMissed { prefix } if prefix == "seen"), "{missed}");
    client.put("seen 3", b"after").unwrap();
    assert_eq!(watch.next(timeout).unwrap().name, "seen 3");
    // If a call of `next` is interrupted before the next server knows the watch, the following call returns the error.
    store.kill("server");
    client.put("seen 4", b"between").unwrap();
    store.freeze();
    let interrupted = interruptible(|| true, || watch.next(timeout));
    assert!(matches!(interrupted, Err(Error::Interrupted)), "{interrupted:?}");
    store.thaw();
    assert!(matches!(watch.next(timeout), Err(Error::EventsMissed { .. })));
    client.put("seen 5", b"after").unwrap();
    assert_eq!(watch.next(timeout).unwrap().name, "seen 5");
}

#[test]
fn a_polled_watch_shows_that_the_server_was_replaced_and_is_then_registered_again() {
    let store = TestStore::start();
    let client = store.client();
    let mut watch = client.watch("seen").unwrap();
    store.kill("server");
    client.put("seen 1", b"between").unwrap();
    while watch.is_registered() {
        wait_until_readable(&watch);
        assert!(matches!(watch.try_next(), Ok(None)));
    }
    assert!(matches!(watch.try_next(), Ok(None)), "only `next` registers the watch");
    let timeout = Deadline::after(Duration::from_secs(60));
    assert!(matches!(watch.next(timeout), Err(Error::EventsMissed { .. })) && watch.is_registered());
    client.put("seen 2", b"after").unwrap();
    wait_until_readable(&watch);
    assert_eq!(watch.try_next().unwrap().unwrap().name, "seen 2");
}

#[test]
fn a_store_that_ends_does_not_remove_the_socket_of_another_store() {
    for is_replaced in [false, true] {
        let mut process = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let store = TestStore::start_for(&process);
        if is_replaced {
            let server = store.process("server");
            store.kill("keeper");
            store.wait_until_protected(server);
        }
        let keeper = PidFd::open(store.process("keeper")).unwrap();
        std::fs::remove_file(store.socket()).unwrap();
        let address = Address::Path(store.socket());
        let _other = PacketListener::bind(&address).unwrap();
        process.kill().unwrap();
        process.wait().unwrap();
        assert_eq!(keeper.wait_exit(Deadline::after(Duration::from_secs(60))), Ok(true));
        assert!(PacketSocket::connect(&address).is_ok(), "replaced keeper: {is_replaced}");
    }
}

#[test]
fn a_killed_store_is_noticed_by_readers_and_by_every_later_call() {
    type ClientCall = fn(&Client) -> Result<(), Error>;
    let readers: [ClientCall; 4] = [
        |client| client.get("name").map(drop),
        |client| client.stat("name").map(drop),
        |client| client.list("").map(drop),
        |client| client.create("new", 3).map(drop),
    ];
    let store = TestStore::start();
    store.client().put("name", b"value").unwrap();
    let clients = readers.map(|reader| (reader, store.client()));
    let held = clients.each_ref().map(|(_, client)| client.get("name").unwrap());
    store.signal(Signal::KILL);
    let timeout = Deadline::after(Duration::from_secs(60));
    for (reader, client) in &clients {
        // Repeats the call until it fails: the client receives no message about the end of the store, and checks it at intervals.
        while reader(client).map_err(|error| assert!(matches!(error, Error::Disconnected), "{error}")).is_ok()
        {
            assert!(!timeout.has_passed(), "this client does not notice the end of the store");
        }
        let others: [ClientCall; 5] = [
            |client| client.put("name", b"other").map(drop),
            |client| client.watch("").map(drop),
            |client| client.status().map(drop),
            |client| client.get_mapped("name").map(drop),
            |client| client.create("large", 2 << 20).map(drop),
        ];
        for call in readers.into_iter().chain(others) {
            assert!(matches!(call(client), Err(Error::Disconnected)));
        }
    }
    assert!(held.iter().all(|object| object.to_vec().unwrap() == b"value"));
}

#[test]
fn a_lost_connection_is_reported_by_all_later_calls() {
    let store = TestStore::start();
    let client = store.client();
    client.put("name", b"value").unwrap();
    drop(client.get("name").unwrap());
    store.signal(Signal::KILL);
    assert!(matches!(client.status(), Err(Error::Disconnected)));
    assert!(matches!(client.get("name"), Err(Error::Disconnected)));
    assert!(matches!(client.clone().stat("name"), Err(Error::Disconnected)));
}

#[test]
fn a_store_ends_with_its_process_although_its_keeper_is_killed_too() {
    let process = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
    let mut store = TestStore::start_for(&process);
    let server = PidFd::open(store.process("server")).unwrap();
    // The process that the store was started for exits and is reaped before the server starts another keeper.
    server.signal(Signal::STOP).unwrap();
    store.kill_with(process);
    server.signal(Signal::CONT).unwrap();
    let timeout = Deadline::after(Duration::from_secs(60));
    assert_eq!(server.wait_exit(timeout), Ok(true));
    // Waits until the new keeper, which exits after the server, has removed the file of the socket.
    while store.socket().exists() {
        assert!(!timeout.has_passed(), "the keeper has not exited");
        std::thread::yield_now();
    }
}
