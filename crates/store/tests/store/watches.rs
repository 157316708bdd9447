//! Tests of watches: the events of replaced and deleted objects and of packs, and watches that are resumed.

use std::time::Duration;

use wholemem_os::Deadline;
use wholemem_store::{Client, Error, EventKind, Pack, Watch};

use crate::test_store::TestStore;

/// The name, the number of objects and the kind of an event.
type Seen = (String, u64, EventKind);

fn next(watch: &mut Watch) -> Seen {
    let event = watch.next(Deadline::after(Duration::from_secs(60))).unwrap();
    (event.name, event.objects, event.kind)
}

fn seen(name: &str, objects: u64, kind: EventKind) -> Seen {
    (name.to_owned(), objects, kind)
}

fn put_pack(client: &Client, members: &[&str]) {
    let pack = members.iter().fold(Pack::new("model"), |pack, name| pack.add(name, 1));
    client.create_pack(&pack).unwrap().seal().unwrap();
}

fn delete(client: &Client, name: &str) {
    client.delete(client.stat(name).unwrap().id).unwrap();
}

#[test]
fn a_replaced_object_is_one_event_with_both_versions_and_a_deletion_has_its_version() {
    let store = TestStore::start();
    let client = store.client();
    let mut watch = client.watch("a").unwrap();
    for value in [b"1", b"2", b"3"] {
        client.put("a", value).unwrap();
    }
    delete(&client, "a");
    client.put("a", b"4").unwrap();
    let kinds = [
        EventKind::Published { version: 1 },
        EventKind::Replaced { version: 2, previous: 1 },
        EventKind::Replaced { version: 3, previous: 2 },
        EventKind::Deleted { version: 3 },
        EventKind::Published { version: 1 },
    ];
    for kind in kinds {
        assert_eq!(next(&mut watch), seen("a", 1, kind));
    }
    assert!(matches!(watch.next(Deadline::NOW), Err(Error::TimedOut)));
}

#[test]
fn a_pack_is_one_event_for_watchers_of_any_of_its_old_and_new_names() {
    let store = TestStore::start();
    let client = store.client();
    let mut watches = ["", "model", "model/b", "model/c"].map(|prefix| client.watch(prefix).unwrap());
    put_pack(&client, &["model/a", "model/b"]);
    put_pack(&client, &["model/a", "model/c"]);
    delete(&client, "model");
    client.put("model/b", b"alone").unwrap();
    let first = seen("model", 3, EventKind::Published { version: 1 });
    let second = seen("model", 3, EventKind::Replaced { version: 2, previous: 1 });
    let third = seen("model", 3, EventKind::Deleted { version: 2 });
    let alone = seen("model/b", 1, EventKind::Published { version: 1 });
    let all = [first.clone(), second.clone(), third.clone(), alone.clone()];
    let of_b = [first, second.clone(), alone];
    let of_c = [second, third];
    let expected = [&all[..], &all, &of_b, &of_c];
    for (watch, expected) in watches.iter_mut().zip(expected) {
        let events: Vec<_> = expected.iter().map(|_| next(watch)).collect();
        assert_eq!(events, expected);
        assert!(matches!(watch.next(Deadline::NOW), Err(Error::TimedOut)));
    }
}

#[test]
fn a_pack_of_many_objects_is_one_event() {
    const COUNT: usize = 10_000;
    let store = TestStore::start();
    let client = store.client();
    let mut watch = client.watch("model/layers.77").unwrap();
    let names: Vec<_> = (0..COUNT).map(|number| format!("model/layers.{number}.weight")).collect();
    put_pack(&client, &names.iter().map(String::as_str).collect::<Vec<_>>());
    let expected = seen("model", COUNT as u64 + 1, EventKind::Published { version: 1 });
    assert_eq!(next(&mut watch), expected);
}

#[test]
fn a_watch_is_resumed_behind_the_last_seen_revision() {
    let store = TestStore::start();
    let client = store.client();
    let mut watch = client.watch("a/").unwrap();
    client.put("a/1", b"x").unwrap();
    client.put("b/1", b"x").unwrap();
    client.put("a/2", b"x").unwrap();
    assert_eq!(next(&mut watch).0, "a/1");
    let revision = watch.revision();
    drop(watch);
    client.put("a/3", b"x").unwrap();
    let mut resumed = store.client().watch_after("a/", revision).unwrap();
    assert_eq!([next(&mut resumed).0, next(&mut resumed).0], ["a/2", "a/3"]);
    assert_eq!(resumed.revision(), revision + 3, "all events of the store are numbered");
    // The next server has no events of the previous one.
    store.kill("server");
    let mut late = client.watch_after("a/", revision).unwrap();
    let missed = late.next(Deadline::NOW).unwrap_err();
    assert!(matches!(&missed, Error::EventsMissed { prefix } if prefix == "a/"), "{missed}");
    assert!(late.revision() > resumed.revision(), "revisions grow with every server");
    client.put("a/4", b"x").unwrap();
    assert_eq!(next(&mut late).0, "a/4");
}

#[test]
fn a_polled_watch_reports_lost_events_first_and_has_the_revision_of_its_last_event() {
    let store = TestStore::start();
    let client = store.client();
    let mut watch = client.watch_after("a/", 0).unwrap();
    client.put("a/1", b"x").unwrap();
    let missed = watch.try_next().unwrap_err();
    assert!(matches!(&missed, Error::EventsMissed { prefix } if prefix == "a/"), "{missed}");
    let event = loop {
        if let Some(event) = watch.try_next().unwrap() {
            break event;
        }
    };
    assert_eq!((event.name.as_str(), event.revision), ("a/1", watch.revision()));
    client.put("a/2", b"x").unwrap();
    let mut resumed = client.watch_after("a/", watch.revision()).unwrap();
    assert_eq!(next(&mut resumed).0, "a/2");
}
