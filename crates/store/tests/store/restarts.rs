//! Servers and keepers that are killed: nothing sealed is lost, and readers notice nothing.

use std::process::{Command, Stdio};
use std::time::Duration;

use wholemem_os::interrupt::interruptible;
use wholemem_os::packet::{Address, PacketListener};
use wholemem_os::pidfd::Signal;
use wholemem_os::{Deadline, PacketSocket, PidFd};
use wholemem_store::{Client, Error};

use crate::served::Served;

#[test]
fn a_killed_server_loses_nothing_and_cached_objects_are_got_meanwhile() {
    let served = Served::start();
    let client = served.client();
    let large = vec![7; 2 << 20];
    client.put("small", b"hello").unwrap();
    client.put("large", &large).unwrap();
    let held = client.get("small").unwrap();
    let draft = client.create("unsealed", 2 << 20).unwrap();
    draft.bytes().unwrap().unwrap().fill(9).unwrap();
    let before = client.status().unwrap();
    served.kill("server");
    // Without a server, and then with the next one.
    assert_eq!(client.get("small").unwrap().to_vec().unwrap(), b"hello");
    draft.seal().unwrap();
    assert_eq!(client.get("unsealed").unwrap().to_vec().unwrap(), vec![9; 2 << 20]);
    let other = served.client();
    assert_eq!(other.get("large").unwrap().to_vec().unwrap(), large);
    assert_eq!(held.to_vec().unwrap(), b"hello");
    let after = client.status().unwrap();
    assert_eq!((after.objects, after.unsealed, after.epoch), (before.objects + 1, 0, before.epoch + 1));
    assert_eq!(after.host, before.host);
}

#[test]
fn a_killed_keeper_is_replaced_and_then_the_server_may_die_too() {
    let served = Served::start();
    let client = served.client();
    client.put("name", b"value").unwrap();
    for _ in 0..3 {
        served.kill("keeper");
        client.put("more", b"something").unwrap();
        served.kill("server");
        assert_eq!(served.client().get("name").unwrap().to_vec().unwrap(), b"value");
        assert_eq!(client.get("more").unwrap().to_vec().unwrap(), b"something");
    }
}

#[test]
fn a_store_that_has_ended_has_no_names_any_more_and_what_is_held_stays() {
    let process = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
    let mut served = Served::start_for(&process);
    let client = served.client();
    client.put("name", b"value").unwrap();
    let held = client.get("name").unwrap();
    served.stop(process);
    // Without this, the index would give the name for ever.
    assert!(matches!(client.get("name"), Err(Error::Disconnected)));
    assert!(matches!(client.get_by_id(held.id()), Err(Error::Disconnected)));
    assert!(matches!(client.list(""), Err(Error::Disconnected)));
    assert!(matches!(client.create("new", 3), Err(Error::Disconnected)));
    assert_eq!(held.to_vec().unwrap(), b"value");
}

#[test]
fn who_watches_hears_that_events_were_missed_once_and_then_all_that_happens() {
    let served = Served::start();
    let client = served.client();
    let mut watch = client.watch("seen").unwrap();
    let patience = Deadline::after(Duration::from_secs(60));
    client.put("seen 1", b"before").unwrap();
    served.kill("server");
    // Answered by the next server, which does not know of the watch.
    client.put("seen 2", b"between").unwrap();
    assert_eq!(watch.next(patience).unwrap().name, "seen 1");
    let missed = watch.next(patience).unwrap_err();
    assert!(matches!(&missed, Error::EventsMissed { prefix } if prefix == "seen"), "{missed}");
    client.put("seen 3", b"after").unwrap();
    assert_eq!(watch.next(patience).unwrap().name, "seen 3");
    // Whoever is interrupted before the next server knows is told the next time.
    served.kill("server");
    client.put("seen 4", b"between").unwrap();
    served.freeze();
    let interrupted = interruptible(|| true, || watch.next(patience));
    assert!(matches!(interrupted, Err(Error::Interrupted)), "{interrupted:?}");
    served.thaw();
    assert!(matches!(watch.next(patience), Err(Error::EventsMissed { .. })));
    client.put("seen 5", b"after").unwrap();
    assert_eq!(watch.next(patience).unwrap().name, "seen 5");
}

#[test]
fn a_store_that_ends_leaves_the_socket_of_another_store_at_its_path() {
    for is_replaced in [false, true] {
        let mut process = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let served = Served::start_for(&process);
        if is_replaced {
            let server = served.process("server");
            served.kill("keeper");
            served.wait_until_protected(server);
        }
        let keeper = PidFd::open(served.process("keeper")).unwrap();
        std::fs::remove_file(served.socket()).unwrap();
        let address = Address::Path(served.socket());
        let _other = PacketListener::bind(&address).unwrap();
        process.kill().unwrap();
        process.wait().unwrap();
        assert_eq!(keeper.wait_exit(Deadline::after(Duration::from_secs(60))), Ok(true));
        assert!(PacketSocket::connect(&address).is_ok(), "replaced keeper: {is_replaced}");
    }
}

#[test]
fn a_store_that_was_killed_is_noticed_by_who_only_reads_and_by_every_call_from_then_on() {
    type Call = fn(&Client) -> Result<(), Error>;
    let readers: [Call; 4] = [
        |client| client.get("name").map(drop),
        |client| client.stat("name").map(drop),
        |client| client.list("").map(drop),
        |client| client.create("new", 3).map(drop),
    ];
    let served = Served::start();
    served.client().put("name", b"value").unwrap();
    let clients = readers.map(|reader| (reader, served.client()));
    let held = clients.each_ref().map(|(_, client)| client.get("name").unwrap());
    served.signal(Signal::KILL);
    let patience = Deadline::after(Duration::from_secs(60));
    for (reader, client) in &clients {
        // Nobody else tells this client.
        while reader(client).map_err(|error| assert!(matches!(error, Error::Disconnected), "{error}")).is_ok()
        {
            assert!(!patience.has_passed(), "the store is gone, and this client does not notice");
        }
        let others: [Call; 5] = [
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
fn what_one_call_has_found_out_the_next_ones_know() {
    let served = Served::start();
    let client = served.client();
    client.put("name", b"value").unwrap();
    drop(client.get("name").unwrap());
    served.signal(Signal::KILL);
    assert!(matches!(client.status(), Err(Error::Disconnected)));
    assert!(matches!(client.get("name"), Err(Error::Disconnected)));
    assert!(matches!(client.clone().stat("name"), Err(Error::Disconnected)));
}

#[test]
fn a_store_ends_with_its_process_though_its_keeper_is_killed_at_the_same_time() {
    let process = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
    let mut served = Served::start_for(&process);
    let server = PidFd::open(served.process("server")).unwrap();
    // The process is gone and forgotten when the server starts another keeper.
    server.signal(Signal::STOP).unwrap();
    served.kill_with(process);
    server.signal(Signal::CONT).unwrap();
    let patience = Deadline::after(Duration::from_secs(60));
    assert_eq!(server.wait_exit(patience), Ok(true));
    // The keeper goes after it, and takes the socket along.
    while served.socket().exists() {
        assert!(!patience.has_passed(), "the keeper is still there");
        std::thread::yield_now();
    }
}
