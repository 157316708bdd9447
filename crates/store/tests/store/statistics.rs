//! Tests of the statistics of a server: the process, the counters, and the readers of objects.

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use wholemem_os::Deadline;
use wholemem_store::{Client, Error, Object, Pack, Statistics};

use crate::test_store::TestStore;

/// The length from which an object has memory of its own, and is sealed by a separate request.
const LARGE: usize = 1 << 20;

fn count_of(statistics: &Statistics, kind: &str) -> (u64, u64) {
    let found = statistics.requests.iter().find(|requests| requests.kind == kind);
    found.map_or((0, 0), |requests| (requests.count, requests.refused))
}

#[test]
fn statistics_name_the_process_of_the_current_server() {
    let store = TestStore::start();
    let client = store.client();
    let first = client.statistics().unwrap();
    assert_eq!(first.server, store.process("server"));
    assert_eq!((first.status.epoch, first.status.clients), (1, 1));
    store.kill("server");
    let second = client.statistics().unwrap();
    assert_eq!(second.server, store.process("server"));
    assert_eq!(second.status.epoch, 2);
    assert!(second.started >= first.started);
}

#[test]
fn readers_are_the_clients_that_hold_an_object() {
    let store = TestStore::start();
    let [writer, one, two] = [(); 3].map(|()| store.client());
    let ids = ["a", "b"].map(|name| writer.put(name, b"x").unwrap().id);
    let held = [one.get("a").unwrap(), one.get("a").unwrap(), two.get("a").unwrap(), two.get("b").unwrap()];
    assert_eq!(writer.readers(&ids).unwrap(), [2, 1]);
    drop(held);
    assert_eq!(writer.readers(&ids).unwrap(), [0, 0]);
    assert_eq!(writer.readers(&[]).unwrap(), Vec::<u32>::new());
    // More objects than one request may ask for.
    let many: Vec<_> = std::iter::repeat_n(ids[0], 3000).collect();
    let _held = two.get("a").unwrap();
    assert_eq!(writer.readers(&many).unwrap(), vec![1; 3000]);
}

/// What the statistics of a server must report after some operations.
#[derive(Debug, Default, PartialEq, Eq)]
struct Model {
    sealed: u64,
    bytes: u64,
    deleted: u64,
    events: u64,
    /// The number of answered and of refused requests by kind.
    requests: BTreeMap<&'static str, (u64, u64)>,
    /// The number of current objects, and the objects of each name: 1, or those of a pack.
    names: BTreeMap<String, u64>,
}

impl Model {
    fn request(&mut self, kind: &'static str, is_refused: bool) {
        let (count, refused) = self.requests.entry(kind).or_default();
        *count += 1;
        *refused += u64::from(is_refused);
    }

    fn put(&mut self, name: &str, len: u64, objects: u64) {
        self.sealed += objects;
        self.bytes += len;
        self.events += 1;
        self.deleted += self.names.insert(name.to_owned(), objects).unwrap_or(0);
    }
}

/// Runs one random operation on the store, and on the model.
fn operate(client: &Client, model: &mut Model, held: &mut Vec<Object>, kind: u8, number: u8, len: usize) {
    let name = format!("{}{}", if kind == 3 { "pack" } else { "name" }, number % 8);
    match kind {
        0..=2 => {
            client.put(&name, &vec![7; len]).unwrap();
            model.request("create", false);
            model.put(&name, len as u64, 1);
        }
        3 => {
            // The bytes of a small pack are sent with the request that creates it.
            let pack = Pack::new(&name).add(&format!("{name}/a"), 300).add(&format!("{name}/b"), 10);
            client.create_pack(&pack).unwrap().seal().unwrap();
            model.request("create", false);
            model.put(&name, 512 + 10, 3);
        }
        4 => match client.stat(&name) {
            Ok(entry) => {
                client.delete(entry.id).unwrap();
                model.request("delete", false);
                model.deleted += model.names.remove(&name).unwrap();
                model.events += 1;
            }
            Err(_) => {
                assert!(!model.names.contains_key(&name));
                model.request("find", true);
            }
        },
        5 => {
            // A name that is in the index is found without a request.
            let missing = client.get_within("missing", Deadline::NOW).map(drop);
            assert!(matches!(missing, Err(Error::Refused(_))), "{missing:?}");
            model.request("find", true);
        }
        6 => {
            held.extend(client.get(&name).ok().filter(|_| model.names.contains_key(&name)));
            if !model.names.contains_key(&name) {
                model.request("find", true);
            }
        }
        _ if number < 8 => {
            client.create(&name, LARGE).unwrap().seal().unwrap();
            model.request("create", false);
            model.request("seal", false);
            model.put(&name, LARGE as u64, 1);
        }
        _ => held.clear(),
    }
}

#[test]
fn counters_agree_with_a_model_after_ten_thousand_random_operations() {
    let store = TestStore::start();
    let client = store.client();
    let (mut model, mut held) = (Model::default(), Vec::new());
    let mut runner = TestRunner::default();
    for _ in 0..10_000 {
        let strategy = (0_u8..8, any::<u8>(), 0_usize..2000);
        let (kind, number, len) = strategy.new_tree(&mut runner).unwrap().current();
        operate(&client, &mut model, &mut held, kind, number, len);
    }
    held.clear();
    store.settled(&client);
    let statistics = client.statistics().unwrap();
    let value = |name: &str| statistics.value(name).unwrap();
    let current: u64 = model.names.values().sum();
    assert_eq!((value("objects_sealed"), value("bytes_sealed")), (model.sealed, model.bytes));
    assert_eq!((value("objects_deleted"), value("objects_freed")), (model.deleted, model.deleted));
    assert_eq!((statistics.status.objects, model.sealed - model.deleted), (current, current));
    assert_eq!(value("events"), model.events);
    // Other tests of this process fork meanwhile, and then each client connects once more for the child.
    assert!(value("clients_accepted") >= 1 && count_of(&statistics, "hello").0 >= 1);
    assert_eq!((value("clients_refused"), count_of(&statistics, "hello").1), (0, 0));
    for kind in ["create", "seal", "delete", "find"] {
        assert_eq!(count_of(&statistics, kind), model.requests[kind], "{kind}");
    }
    for requests in &statistics.requests {
        assert_eq!(requests.buckets.iter().sum::<u64>(), requests.count, "{}", requests.kind);
    }
    assert!(Duration::from_nanos(statistics.requests[0].nanoseconds) > Duration::ZERO);
}
