//! Tests of objects that are created, found, held, replaced and deleted, by one process or several.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use wholemem_hal::{Backend, BackendKind};
use wholemem_os::Deadline;
use wholemem_os::interrupt::interruptible;
use wholemem_store::{Client, Error, EventKind, Mirror, Pack, Refusal};

use crate::test_store::{TestStore, wait_until_readable};

const LARGE: usize = 3 << 20;

fn refusal<T: std::fmt::Debug>(outcome: Result<T, Error>) -> Refusal {
    match outcome.unwrap_err() {
        Error::Refused(refusal) => refusal,
        error => panic!("{error}"),
    }
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| ((at * 31 + seed) % 251).to_le_bytes()[0]).collect()
}

#[test]
fn another_client_reads_objects_of_any_length_as_written() {
    let store = TestStore::start();
    let (creator, reader) = (store.client(), store.client());
    for len in [0, 1, 1000, 65_536, 300_000, (1 << 20) - 1, 1 << 20, LARGE + 5] {
        let name = format!("object-{len}");
        let sealed = creator.put(&name, &pattern(len, 3)).unwrap();
        assert_eq!(sealed.version, 1);
        let object = reader.get(&name).unwrap();
        assert_eq!(
            (object.id(), object.len(), object.is_cpu(), object.is_mutable()),
            (sealed.id, len, true, false)
        );
        assert_eq!(object.to_vec().unwrap(), pattern(len, 3));
        assert!(object.bytes().unwrap().write_at(0, &[]).is_err(), "the bytes are read-only");
    }
    let names: Vec<_> = reader.list("object-1").unwrap().into_iter().map(|entry| entry.name).collect();
    assert_eq!(names, ["object-1", "object-1000", "object-1048575", "object-1048576"]);
}

#[test]
fn a_replaced_object_stays_readable_and_is_freed_with_its_last_reader() {
    let store = TestStore::start();
    let (creator, reader) = (store.client(), store.client());
    for len in [1000, LARGE] {
        creator.put("name", &pattern(len, 1)).unwrap();
        let before = creator.status().unwrap();
        let old = reader.get("name").unwrap();
        assert_eq!(creator.put("name", &pattern(len, 2)).unwrap().version, 2);
        let new = reader.get("name").unwrap();
        assert_eq!((old.to_vec().unwrap(), new.to_vec().unwrap()), (pattern(len, 1), pattern(len, 2)));
        assert_eq!(creator.status().unwrap().retired, 1);
        drop((old, new));
        // The client that released the pin requests the status, because the server processes messages of one connection in order.
        let after = reader.status().unwrap();
        assert_eq!((after.retired, after.host), (0, before.host));
        creator.delete(creator.stat("name").unwrap().id).unwrap();
    }
    assert_eq!(refusal(reader.get("name")), Refusal::NoSuchName { name: "name".to_owned() });
}

#[test]
fn a_wait_for_a_name_ends_when_it_exists_or_at_the_deadline() {
    let store = TestStore::start();
    let client = store.client();
    let short = Deadline::after(Duration::from_millis(50));
    assert_eq!(refusal(client.get_within("late", short)).code(), "no-such-name");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| client.get_within("late", Deadline::after(Duration::from_secs(60))));
        store.client().put("late", b"here").unwrap();
        assert_eq!(waiting.join().unwrap().unwrap().to_vec().unwrap(), b"here");
    });
}

#[test]
fn an_interrupted_wait_leaves_the_connection_usable() {
    let store = TestStore::start();
    let client = store.client();
    let mut watch = client.watch("").unwrap();
    let interrupted = |outcome: Result<(), Error>| assert!(matches!(outcome, Err(Error::Interrupted)));
    interrupted(interruptible(|| true, || client.get_within("never", Deadline::NEVER).map(drop)));
    interrupted(interruptible(|| true, || watch.next(Deadline::NEVER).map(drop)));
    client.put("here", b"all the same").unwrap();
    assert_eq!(watch.next(Deadline::NEVER).unwrap().name, "here");
    assert_eq!(client.get("here").unwrap().to_vec().unwrap(), b"all the same");
}

#[test]
fn dropping_never_blocks_while_another_thread_waits_for_an_answer() {
    let store = TestStore::start();
    let client = store.client();
    let draft = client.create("given up", LARGE).unwrap();
    store.freeze();
    let dropped = Arc::new(AtomicBool::new(false));
    let (sender, receiver) = mpsc::channel();
    std::thread::scope(|scope| {
        let (client, seen) = (&client, Arc::clone(&dropped));
        let request_kind = move || {
            let _ = sender.send(());
            seen.load(Ordering::Relaxed)
        };
        let answer = scope.spawn(move || interruptible(request_kind, || client.status()));
        // Waits until the other thread waits for an answer, which does not arrive.
        receiver.recv().unwrap();
        drop(draft);
        dropped.store(true, Ordering::Relaxed);
        assert!(matches!(answer.join().unwrap(), Err(Error::Interrupted)));
    });
}

#[test]
fn an_object_with_mapped_memory_is_obtained_without_a_request() {
    let store = TestStore::start();
    let (creator, reader) = (store.client(), store.client());
    let mut draft = creator.create_with_meta("name", b"a meaning", LARGE).unwrap();
    draft.write_at(0, &pattern(LARGE, 3)).unwrap();
    let sealed = draft.seal().unwrap();
    assert!(reader.get_mapped("name").unwrap().is_none(), "not mapped yet");
    assert!(reader.get_mapped("another").unwrap().is_none());
    drop(reader.get("name").unwrap());
    store.freeze();
    let object = reader.get_mapped("name").unwrap().unwrap();
    assert_eq!((object.id(), object.meta(), object.is_pack()), (sealed.id, b"a meaning".to_vec(), false));
    assert_eq!(object.to_vec().unwrap(), pattern(LARGE, 3));
}

#[test]
fn a_wait_for_space_ends_when_space_is_freed_or_at_the_deadline() {
    const OBJECT_LEN: usize = 200 << 20;
    let store = TestStore::start();
    let client = store.client();
    let draft = client.create("first", OBJECT_LEN).unwrap();
    let over_quota = Refusal::OverQuota { wanted: 100 << 20, used: OBJECT_LEN as u64, quota: 256 << 20 };
    let short = client.waiting_for_space(Duration::from_millis(50));
    assert_eq!(refusal(client.create("second", 100 << 20)), over_quota);
    assert_eq!(refusal(short.create("second", 100 << 20)), over_quota);
    // An object that exceeds the whole quota must be refused even if the client waits for space without a deadline.
    let waiting = client.waiting_for_space(Duration::MAX);
    assert_eq!(refusal(waiting.create("never", 300 << 20)).code(), "over-quota");
    // Waits until the separate connection that waited for space is closed: it sends a goodbye, although its process continues.
    while client.status().unwrap().clients > 1 {
        std::thread::yield_now();
    }
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| waiting.create("second", 100 << 20));
        // Waits until the other thread waits for space on a separate connection. The shared connection is usable meanwhile.
        while client.status().unwrap().clients < 2 && !waiting.is_finished() {
            std::thread::yield_now();
        }
        drop(draft);
        waiting.join().unwrap().unwrap().seal().unwrap();
    });
    assert_eq!(client.get("second").unwrap().len(), 100 << 20);
}

/// Returns the number of bytes of objects that this process has mapped.
fn mapped_objects() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let objects = maps.lines().filter(|line| line.contains("wholemem-object"));
    let len = |line: &str| {
        let (start, end) = line.split_whitespace().next().unwrap().split_once('-').unwrap();
        usize::from_str_radix(end, 16).unwrap() - usize::from_str_radix(start, 16).unwrap()
    };
    objects.map(len).sum()
}

#[test]
fn maps_of_deleted_objects_are_released_by_the_next_call() {
    const NAME: &str = "maps_of_deleted_objects_are_released_by_the_next_call";
    // The test runs in a separate process, because other tests map objects too.
    if std::env::var_os("WHOLEMEM_STORE_TEST_ALONE").is_none() {
        let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
        alone.args(["--exact", &format!("objects::{NAME}"), "--nocapture"]);
        assert!(alone.env("WHOLEMEM_STORE_TEST_ALONE", "1").status().unwrap().success());
        return;
    }
    let store = TestStore::start();
    let (creator, reader) = (store.client(), store.client());
    creator.put("stays", b"small").unwrap();
    let arena = {
        reader.get("stays").unwrap();
        mapped_objects()
    };
    let calls: [fn(&Client); 4] = [
        |client| drop(client.get("stays").unwrap()),
        |client| drop(client.list("").unwrap()),
        |client| assert!(client.status().unwrap().clients > 0),
        Client::trim,
    ];
    for call in calls {
        let sealed = creator.put("large", &pattern(LARGE, 1)).unwrap();
        drop(reader.get("large").unwrap());
        assert!(mapped_objects() >= arena + LARGE, "cached for the next get");
        creator.delete(sealed.id).unwrap();
        call(&reader);
        assert_eq!(mapped_objects(), arena);
    }
    // The map of a deleted object is also released with its last pin, without another call.
    let sealed = creator.put("large", &pattern(LARGE, 1)).unwrap();
    let held = reader.get("large").unwrap();
    creator.delete(sealed.id).unwrap();
    assert_eq!(held.to_vec().unwrap(), pattern(LARGE, 1));
    drop(held);
    assert_eq!(mapped_objects(), arena);
}

#[test]
fn empty_objects_of_a_pack_keep_their_order() {
    let store = TestStore::start();
    let client = store.client();
    // The server reuses slots in the order in which they were freed, here the last slot first.
    let before: Vec<_> =
        (0..100).map(|number| client.put(&format!("before {number}"), b"").unwrap()).collect();
    before.iter().rev().for_each(|sealed| client.delete(sealed.id).unwrap());
    for len in [10, 2 << 20].repeat(20) {
        let pack = Pack::new("p").add("p/z", 0).add("p/y", len).add("p/c", 0).add("p/a", 0).add("p/b", len);
        client.create_pack(&pack).unwrap().seal().unwrap();
        let held = client.get_pack("p").unwrap();
        let mut names: Vec<_> = held.members().map(|(name, member)| (member.number, name)).collect();
        names.sort_unstable();
        assert_eq!(names, [(0, "p/z"), (1, "p/y"), (2, "p/c"), (3, "p/a"), (4, "p/b")]);
    }
}

#[test]
fn a_pack_is_one_map_with_many_names() {
    let store = TestStore::start();
    let (creator, reader) = (store.client(), store.client());
    for (name, len) in [("small", 100), ("large", 2 << 20)] {
        let mut pack = Pack::new(name).with_meta(b"a model");
        for member in 0..5 {
            pack = pack.add_with_meta(&format!("{name}/{member}"), &[member], len + usize::from(member));
        }
        let mut draft = creator.create_pack(&pack).unwrap();
        for member in 0..5 {
            draft.write_at(member, 0, &pattern(len + member, member)).unwrap();
        }
        let outside = draft.write_at(0, len, &[1]).unwrap_err();
        assert!(matches!(outside, Error::OutOfRange { .. }), "{outside}");
        let sealed = draft.seal().unwrap();
        let held = reader.get_pack(name).unwrap();
        assert_eq!(held.members().count(), 5);
        assert!(held.whole().is_pack() && !reader.get(&format!("{name}/0")).unwrap().is_pack());
        for member in 0..5 {
            let member_name = format!("{name}/{member}");
            let mut bytes = vec![0; len + member];
            held.bytes(&member_name).unwrap().read_at(0, &mut bytes).unwrap();
            assert_eq!(bytes, pattern(len + member, member));
            let alone = reader.get(&member_name).unwrap();
            assert_eq!(alone.to_vec().unwrap(), bytes);
            assert_eq!(alone.entry().unwrap().meta, [member.to_le_bytes()[0]]);
        }
        // One pin still holds all objects of the pack, although their names are deleted.
        creator.delete(sealed.id).unwrap();
        assert_eq!(refusal(reader.get(&format!("{name}/0"))).code(), "no-such-name");
        let mut bytes = vec![0; len + 4];
        held.bytes(&format!("{name}/4")).unwrap().read_at(0, &mut bytes).unwrap();
        assert_eq!(bytes, pattern(len + 4, 4));
        drop(held);
        assert_eq!(reader.status().unwrap().retired, 0);
    }
}

#[test]
fn dropping_a_draft_or_its_client_leaves_nothing_behind() {
    let store = TestStore::start();
    let client = store.client();
    let before = client.status().unwrap();
    drop(client.create("given up", LARGE).unwrap());
    assert_eq!(client.status().unwrap(), before);
    let other = store.client();
    let draft = other.create("given up", LARGE).unwrap();
    assert_eq!(client.status().unwrap().unsealed, 1);
    drop((draft, other));
    let deadline = Deadline::after(Duration::from_secs(60));
    while client.status().unwrap() != before {
        assert!(!deadline.has_passed(), "{:?}", client.status());
    }
}

#[test]
fn memory_that_is_still_mapped_for_writing_is_not_sealed() {
    let store = TestStore::start();
    let client = store.client();
    let draft = client.create("kept", LARGE).unwrap();
    let span = draft.span().unwrap();
    let unsealed = draft.seal().unwrap_err();
    assert!(matches!(unsealed.error, Error::Refused(Refusal::StillMapped)), "{unsealed}");
    assert_eq!(refusal(client.get("kept")).code(), "no-such-name");
    drop(span);
    let mut draft = unsealed.draft.expect("the draft is returned");
    draft.write_at(1, b"kept").unwrap();
    draft.seal().unwrap();
    assert_eq!(client.get("kept").unwrap().to_vec().unwrap()[..6], *b"\0kept\0");
}

#[test]
fn a_small_draft_that_exceeds_the_quota_can_be_sealed_later() {
    let store = TestStore::start();
    let client = store.client();
    let mut draft = client.create("small", 5).unwrap();
    draft.write_at(0, b"small").unwrap();
    let large = client.put("large", &vec![0; 256 << 20]).unwrap();
    let unsealed = draft.seal().unwrap_err();
    assert_eq!(unsealed.error.code(), "over-quota");
    client.delete(large.id).unwrap();
    unsealed.draft.expect("the draft is returned").seal().unwrap();
    assert_eq!(client.get("small").unwrap().to_vec().unwrap(), b"small");
}

#[test]
fn objects_beyond_the_quota_are_refused_and_existing_ones_remain() {
    let store = TestStore::start();
    let client = store.client();
    client.put("first", &pattern(LARGE, 1)).unwrap();
    let refused = refusal(client.create("too much", 300 << 20));
    let used = client.status().unwrap().host;
    assert_eq!(refused, Refusal::OverQuota { wanted: 300 << 20, used: used.used, quota: 256 << 20 });
    assert_eq!(refusal(client.create(&"x".repeat(201), 1)).code(), "name-too-long");
    assert_eq!(client.get("first").unwrap().to_vec().unwrap(), pattern(LARGE, 1));
    // The objects exceed the quota in total, but each is deleted before the next is created.
    for round in 0..4 {
        let draft = client.create("again", 100 << 20).unwrap();
        draft.bytes().unwrap().unwrap().write_at(0, &[round]).unwrap();
        let sealed = draft.seal().unwrap();
        client.delete(sealed.id).unwrap();
    }
    assert_eq!(client.status().unwrap().host, used);
}

#[test]
fn another_name_is_another_object_over_the_same_bytes() {
    let store = TestStore::start();
    let client = store.client();
    let first = client.put("first", &pattern(LARGE, 1)).unwrap();
    let second = client.publish_with_meta("second", b"the same", first.id).unwrap();
    client.delete(first.id).unwrap();
    let object = client.get("second").unwrap();
    assert_eq!((object.id(), object.to_vec().unwrap()), (second.id, pattern(LARGE, 1)));
    assert_eq!(object.meta(), b"the same");
    assert!(
        client.is_source_of(&object)
            && client.clone().is_source_of(&object)
            && !store.client().is_source_of(&object)
    );
}

#[test]
fn a_watcher_receives_events() {
    let store = TestStore::start();
    let client = store.client();
    let mut watch = client.watch("a/").unwrap();
    client.put("b/1", b"x").unwrap();
    let sealed = client.put("a/1", b"x").unwrap();
    client.delete(sealed.id).unwrap();
    let timeout = Deadline::after(Duration::from_secs(60));
    let events: Vec<_> =
        (0..2).map(|_| watch.next(timeout).unwrap()).map(|event| (event.name, event.kind)).collect();
    let kinds = [EventKind::Published { version: 1 }, EventKind::Deleted { version: 1 }];
    assert_eq!(events, kinds.map(|kind| ("a/1".to_owned(), kind)));
    assert!(matches!(watch.next(Deadline::NOW), Err(Error::TimedOut)));
}

#[test]
fn an_event_loop_polls_a_watch_and_receives_events_without_waiting() {
    let store = TestStore::start();
    let client = store.client();
    let mut watch = client.watch("a/").unwrap();
    assert!(matches!(watch.try_next(), Ok(None)) && watch.is_registered());
    for name in ["a/1", "b/1", "a/2"] {
        client.put(name, b"x").unwrap();
    }
    let mut names = Vec::new();
    while names.len() < 2 {
        wait_until_readable(&watch);
        while let Some(event) = watch.try_next().unwrap() {
            names.push(event.name);
        }
    }
    assert_eq!(names, ["a/1", "a/2"]);
}

#[test]
fn objects_on_a_device_are_written_by_streams_and_copied_to_the_host() {
    let store = TestStore::start();
    let devices = Backend::open(BackendKind::Host).unwrap();
    let device = devices.device(0).unwrap();
    let connect = || Client::connect_with(store.socket(), Some(devices.clone())).unwrap();
    let (creator, reader) = (connect(), connect());
    for (name, len) in [("small", 1000), ("large", 3 << 20)] {
        let draft = creator.create_on(&device, name, len).unwrap();
        assert!(draft.is_mutable() && !draft.is_empty());
        let mirror = Mirror::of_draft(&draft, false).unwrap();
        mirror.bytes().unwrap().write_at(0, &pattern(len, 5)).unwrap();
        mirror.write_back().unwrap();
        let stream = device.stream().unwrap();
        let sealed = draft.seal_after(&stream).unwrap().wait().unwrap();
        let object = reader.get(name).unwrap();
        assert_eq!(object.id(), sealed.id);
        let mut bytes = vec![0; len];
        Mirror::of_object(&object).unwrap().bytes().unwrap().read_at(0, &mut bytes).unwrap();
        assert_eq!(bytes, pattern(len, 5));
        creator.delete(sealed.id).unwrap();
    }
    let hidden = Client::connect(store.socket()).unwrap();
    creator.create_on(&device, "unseen", 10).unwrap().seal().unwrap();
    assert!(matches!(hidden.get("unseen"), Err(Error::DeviceHidden)));
}

#[test]
fn an_abandoned_mirror_does_not_change_its_draft() {
    let store = TestStore::start();
    let client = Client::connect(store.socket()).unwrap();
    let draft = client.create("kept", 3 << 20).unwrap();
    let mirror = Mirror::of_draft(&draft, false).unwrap();
    mirror.bytes().unwrap().write_at(0, &pattern(3 << 20, 5)).unwrap();
    mirror.abandon();
    // The draft is sealed while its mirror still exists: an abandoned mirror does not hold the draft's memory.
    draft.seal().unwrap();
    drop(mirror);
    assert_eq!(client.get("kept").unwrap().to_vec().unwrap(), vec![0; 3 << 20]);
}

#[test]
fn a_missing_server_and_a_second_server_are_reported() {
    let store = TestStore::start();
    let not_served = Client::connect(store.socket().with_extension("other")).unwrap_err();
    assert_eq!(not_served.code(), "not-served");
    let second = wholemem_store::Serve::at(store.socket());
    let launch = |_, _| -> std::io::Result<std::process::Child> { panic!("no process must be started") };
    let error = second.run(&launch, &mut || ()).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("another server is already listening on the socket `{}`", store.socket().display())
    );
}

#[test]
fn an_invalid_socket_path_is_reported_and_not_modified() {
    let folder = tempfile::tempdir_in("/tmp").unwrap();
    let launch = |_, _| -> std::io::Result<std::process::Child> { panic!("no process must be started") };
    let serve = |path: &std::path::Path| {
        let error = wholemem_store::Serve::at(path).run(&launch, &mut || ()).unwrap_err();
        (error.code(), error.to_string())
    };
    let file = folder.path().join("file");
    std::fs::write(&file, b"precious").unwrap();
    assert_eq!(
        serve(&file),
        (
            "not-a-socket",
            format!("cannot serve a store at `{}`: the file exists and is not a socket", file.display())
        )
    );
    assert_eq!(std::fs::read(&file).unwrap(), b"precious");
    for path in [folder.path().join("missing/socket"), folder.path().join("x".repeat(120))] {
        assert_eq!(serve(&path), ("socket", format!("cannot use the store's socket `{}`", path.display())));
    }
    let long = Client::connect(folder.path().join("x".repeat(120))).unwrap_err();
    assert_eq!(long.code(), "socket", "{long}");
}
