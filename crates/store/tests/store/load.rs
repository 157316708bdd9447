//! Tests of a store under load whose server and keeper are killed repeatedly: readers see no error, and the objects match a
//! model.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use wholemem_store::{Client, Error, Pack, Refusal};
use wholemem_testkit::{Ranks, test_name, without_system_calls};

use crate::test_store::TestStore;

/// Returns test bytes that encode the name and the version of an object.
fn content(name: &str, version: u64, len: usize) -> Vec<u8> {
    let mut bytes = format!("{name}:{version}:").into_bytes();
    let fill = bytes.iter().fold(0, |sum: u8, byte| sum.wrapping_mul(31).wrapping_add(*byte));
    bytes.resize(len.max(bytes.len()), fill);
    bytes
}

/// Checks that the bytes of an object are one whole version of its name, and returns the version.
fn check(name: &str, bytes: &[u8]) -> u64 {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(60)]).into_owned();
    let version = text.split(':').nth(1).and_then(|version| version.parse().ok());
    let version = version.unwrap_or_else(|| panic!("`{name}` holds {text:?}"));
    assert_eq!(bytes, content(name, version, bytes.len()), "`{name}` is one version");
    version
}

struct SeededRandom(u64);

impl SeededRandom {
    fn below(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below
    }
}

/// Runs a writer with names of its own until it is stopped, and returns a model of the objects that it has written.
fn write(
    client: &Client,
    writer: u64,
    seed: u64,
    stop: &AtomicBool,
    done: &AtomicU64,
) -> BTreeMap<String, u64> {
    let mut random = SeededRandom(seed);
    let mut model: BTreeMap<String, (u64, wholemem_store::ObjectId)> = BTreeMap::new();
    let mut version = 0;
    while !stop.load(Ordering::Relaxed) {
        let name = format!("w{writer}/{}", random.below(5));
        match (random.below(6), model.get(&name).copied()) {
            (0, Some((_, id))) => {
                client.delete(id).unwrap();
                model.remove(&name);
            }
            (1, Some((version, id))) => {
                // Publishes another name for the same bytes, and deletes it at once.
                let alias = client.publish(&format!("w{writer}/alias"), id).unwrap();
                let object = client.get_by_id(alias.id).unwrap();
                assert_eq!(check(&name, &object.to_vec().unwrap()), version);
                client.delete(alias.id).unwrap();
            }
            (2, _) => drop(retry_after_deaths(|| client.create(&format!("w{writer}/given up"), 2 << 20))),
            (kind, _) => {
                version += 1;
                let len = if kind == 3 {
                    (1 << 20) + 5000
                } else {
                    usize::try_from(random.below(200_000)).unwrap()
                };
                let content = content(&name, version, len);
                let sealed = retry_after_deaths(|| client.put(&name, &content));
                model.insert(name, (version, sealed.id));
            }
        }
        done.fetch_add(1, Ordering::Relaxed);
    }
    model.into_iter().map(|(name, (version, _))| (name, version)).collect()
}

/// Repeats a request as long as it is refused because two servers were killed during it.
fn retry_after_deaths<T>(mut request: impl FnMut() -> Result<T, Error>) -> T {
    loop {
        match request() {
            Err(Error::Refused(Refusal::ServersDied { .. })) => {}
            outcome => return outcome.unwrap(),
        }
    }
}

/// Runs a reader of all names until it is stopped. The reader checks that versions never decrease.
fn read(client: &Client, seed: u64, stop: &AtomicBool) -> u64 {
    let mut random = SeededRandom(seed);
    let mut newest: BTreeMap<String, u64> = BTreeMap::new();
    let mut reads = 0;
    while !stop.load(Ordering::Relaxed) {
        let name = format!("w{}/{}", random.below(2), random.below(5));
        match client.get(&name) {
            Ok(object) => {
                let version = check(&name, &object.to_vec().unwrap());
                let before = newest.insert(name.clone(), version).unwrap_or(0);
                assert!(version >= before, "`{name}` went from {before} to {version}");
                reads += 1;
            }
            Err(Error::Refused(Refusal::NoSuchName { .. })) => {}
            Err(error) => panic!("{error}"),
        }
    }
    reads
}

fn under_load(kills: u32, mut kill: impl FnMut(&TestStore, &mut SeededRandom)) {
    let seed = wholemem_testkit::seed();
    let store = TestStore::start();
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let models = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..2)
            .map(|writer| {
                let client = store.client();
                let (stop, done) = (&stop, &done);
                scope.spawn(move || write(&client, writer, seed ^ writer, stop, done))
            })
            .collect();
        let readers: Vec<_> = (2..4)
            .map(|reader| {
                let client = store.client();
                let stop = &stop;
                scope.spawn(move || read(&client, seed ^ reader, stop))
            })
            .collect();
        let mut random = SeededRandom(seed ^ 99);
        // The writer and reader threads are stopped even if the test fails.
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for _ in 0..kills {
                // Between two kills, the writers complete a random number of operations.
                let goal = done.load(Ordering::Relaxed) + 1 + random.below(20);
                while done.load(Ordering::Relaxed) < goal
                    && !writers.iter().all(|writer| writer.is_finished())
                {
                    std::thread::yield_now();
                }
                kill(&store, &mut random);
            }
        }));
        stop.store(true, Ordering::Relaxed);
        let models: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
        let reads: u64 = readers.into_iter().map(|reader| reader.join().unwrap()).sum();
        outcome.unwrap();
        let models: Vec<_> = models.into_iter().map(Result::unwrap).collect();
        wholemem_testkit::report(&format!(
            "{kills} kills, {} operations, {reads} reads",
            done.load(Ordering::Relaxed)
        ));
        models
    });
    let client = store.client();
    let expected: BTreeMap<_, _> = models.into_iter().flatten().collect();
    let found = client.list("").unwrap().into_iter().map(|entry| {
        let version = check(&entry.name, &client.get(&entry.name).unwrap().to_vec().unwrap());
        (entry.name, version)
    });
    assert_eq!(found.collect::<BTreeMap<_, _>>(), expected);
    let status = store.settled(&client);
    assert_eq!((status.unsealed, status.retired, status.objects), (0, 0, expected.len() as u64));
    for entry in client.list("").unwrap() {
        client.delete(entry.id).unwrap();
    }
    // The store retains one empty arena (memory for small objects).
    assert_eq!(client.status().unwrap().host.used, 16 << 20);
}

#[test]
fn kills_of_the_server_under_load_lose_nothing() {
    // Servers that fail early are replaced after a backoff, so that a hundred kills take a minute.
    under_load(if wholemem_testkit::exhaustive() { 100 } else { 20 }, |store, _| store.kill("server"));
}

#[test]
fn kills_of_server_or_keeper_under_load_lose_nothing() {
    under_load(if wholemem_testkit::exhaustive() { 200 } else { 20 }, |store, random| {
        if random.below(2) == 0 {
            return store.kill("server");
        }
        let server = store.process("server");
        store.kill("keeper");
        // Until the new keeper holds all descriptors, killing the server would end the store.
        store.wait_until_protected(server);
    });
}

#[test]
fn a_mapped_object_is_obtained_without_a_system_call_or_a_server() {
    Ranks::of(1).run(test_name!(), |_| {
        let store = TestStore::start();
        let client = store.client();
        for (name, len) in [("small", 100), ("large", 2 << 20)] {
            client.put(name, &vec![7; len]).unwrap();
        }
        // The first `get` of each object maps the memory, and touches the page of the pins that are used later.
        drop((client.get("small").unwrap(), client.get("large").unwrap()));
        store.freeze();
        // A `get` checks the connection every 100 ms. On a busy machine this may happen during one attempt, but not during all
        // attempts.
        let makes_no_call = (0..100).any(|_| {
            let threads = client.clone();
            without_system_calls(move || {
                for _ in 0..100 {
                    let (small, large) = (threads.get("small"), threads.get("large"));
                    assert_eq!((small.unwrap().len(), large.unwrap().len()), (100, 2 << 20));
                }
                std::mem::forget(threads);
            })
        });
        assert!(makes_no_call);
        // As a control, a missing name is requested from the server, which takes a system call.
        let threads = client.clone();
        assert!(!without_system_calls(move || drop(threads.get("nothing"))));
        std::mem::forget(client);
    });
}

#[test]
fn readers_find_whole_packs_while_writers_replace_them() {
    const MEMBERS: usize = 300;
    let store = TestStore::start();
    let (creator, reader) = (store.client(), store.client());
    let make = |version: u64| {
        let mut pack = Pack::new("pack");
        for member in 0..MEMBERS {
            pack = pack.add(&format!("pack/{member}"), 100);
        }
        let mut draft = creator.create_pack(&pack).unwrap();
        for member in 0..MEMBERS {
            draft.write_at(member, 0, &content("pack", version, 100)).unwrap();
        }
        draft.seal().unwrap();
    };
    make(0);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let mut reads = 0;
            while !stop.load(Ordering::Relaxed) {
                let pack = reader.get_pack("pack").unwrap();
                let versions = pack.members().map(|(name, _)| {
                    let mut bytes = vec![0; 100];
                    pack.bytes(name).unwrap().read_at(0, &mut bytes).unwrap();
                    check("pack", &bytes)
                });
                let versions: Vec<_> = versions.collect();
                assert_eq!(versions, vec![versions[0]; MEMBERS], "all members are of one version");
                reads += 1;
            }
            reads
        });
        (1..150).for_each(make);
        stop.store(true, Ordering::Relaxed);
        wholemem_testkit::report(&format!("{} packs read", reading.join().unwrap()));
    });
    assert_eq!(store.settled(&reader).retired, 0);
}
