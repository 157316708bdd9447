//! Kills a server or a client at any system call of an operation. Afterwards, all sealed objects exist, and no others.
//!
//! A second process steps the victim from call to call. A seeded sample of the calls is tried in every run, all of them with
//! `WHOLEMEM_EXHAUSTIVE=1`.

use std::time::Duration;

use wholemem_hal::{Backend, Device, HostConfig, Rights};
use wholemem_os::{Deadline, PidFd};
use wholemem_store::{Client, Pack, Status};
use wholemem_testkit::stepper::{self, TraceAction};
use wholemem_testkit::{Rank, Ranks, Stepper, test_name};

use crate::test_store::TestStore;

const LARGE: usize = 1 << 20;

/// The number of system calls of each operation at which an ordinary test run kills the process.
const SAMPLE: usize = 4;

/// The maximum number of system calls of one operation.
const MAX_CALLS: u64 = 400;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StoreOperation {
    Small,
    Large,
    Replace,
    Pack,
    Publish,
    Adopt,
    Delete,
}

const OPERATIONS: [StoreOperation; 7] = [
    StoreOperation::Small,
    StoreOperation::Large,
    StoreOperation::Replace,
    StoreOperation::Pack,
    StoreOperation::Publish,
    StoreOperation::Adopt,
    StoreOperation::Delete,
];

fn host() -> Device {
    Backend::host(HostConfig::default()).unwrap().device(0).unwrap()
}

/// Creates the objects that exist before each tested operation.
fn prepare(client: &Client) {
    client.put("small", &[1; 100]).unwrap();
    client.put("large", &vec![2; LARGE]).unwrap();
}

fn operate(operation: StoreOperation, client: &Client) {
    match operation {
        StoreOperation::Small => drop(client.put("new", &[3; 5000]).unwrap()),
        StoreOperation::Large => drop(client.put("new", &vec![3; LARGE]).unwrap()),
        StoreOperation::Replace => drop(client.put("large", &vec![3; LARGE]).unwrap()),
        StoreOperation::Pack => {
            let pack = Pack::new("new").add("new/a", LARGE).add("new/b", 10);
            let mut draft = client.create_pack(&pack).unwrap();
            draft.write_at(0, 0, &vec![3; LARGE]).unwrap();
            draft.seal().unwrap();
        }
        StoreOperation::Publish => drop(client.publish("new", client.stat("large").unwrap().id).unwrap()),
        StoreOperation::Adopt => {
            let memory = host().allocate(LARGE).unwrap();
            memory.map(Rights::ReadWrite).unwrap().bytes().unwrap().write_at(0, &vec![3; LARGE]).unwrap();
            client.adopt("new", b"", &memory, 4096..LARGE).unwrap();
        }
        StoreOperation::Delete => client.delete(client.stat("large").unwrap().id).unwrap(),
    }
}

/// The state of a store that a client observes: the names, lengths and first bytes of its objects, and its memory usage.
#[derive(Debug, PartialEq, Eq)]
struct StoreView {
    objects: Vec<(String, usize, Option<u8>)>,
    used: (u64, u64),
    unsealed: u64,
    retired: u64,
}

fn look(client: &Client) -> StoreView {
    let objects = client.list("").unwrap().into_iter().map(|entry| {
        let object = client.get(&entry.name).unwrap();
        let bytes = object.to_vec().unwrap();
        assert!(bytes.iter().all(|byte| *byte == bytes[0]) || entry.name == "new", "{}", entry.name);
        (entry.name, entry.len, bytes.first().copied())
    });
    let objects = objects.collect();
    let Status { host, device, unsealed, retired, .. } = client.status().unwrap();
    StoreView { objects, used: (host.used, device.used), unsealed, retired }
}

/// Deletes all objects of the store.
fn delete_all(client: &Client) {
    for entry in client.list("").unwrap() {
        if entry.pack.is_none_or(|first| first == entry.id) {
            client.delete(entry.id).unwrap();
        }
    }
}

fn sample(random: &mut u64, calls: u64) -> Vec<u64> {
    if wholemem_testkit::exhaustive() {
        return (1..=calls).collect();
    }
    let next = |_| {
        *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        1 + (*random >> 33) % calls
    };
    (0..SAMPLE).map(next).collect()
}

const STEPPER: usize = 1;

fn server_stepper(rank: &Rank) {
    loop {
        let (order, _) = rank.recv(0);
        let order = String::from_utf8(order).unwrap();
        let Some((pid, nth)) = order.split_once(' ') else { return };
        let stepper = Stepper::attach(pid.parse().unwrap());
        rank.send(0, b"attached", &[]);
        let run = stepper.trace_without_marks(nth.parse().unwrap());
        rank.send(0, format!("{} {}", run.calls, run.killed_at.is_some()).as_bytes(), &[]);
    }
}

/// Runs an operation while the server is killed at its nth system call. Returns the number of the server's system calls.
fn step_server(rank: &Rank, store: &TestStore, client: &Client, operation: StoreOperation, nth: u64) -> u64 {
    let server = store.process("server");
    rank.send(STEPPER, format!("{server} {nth}").as_bytes(), &[]);
    assert_eq!(rank.recv(STEPPER).0, b"attached");
    operate(operation, client);
    if let Ok(process) = PidFd::open(server) {
        process.kill().unwrap();
    }
    let (answer, _) = rank.recv(STEPPER);
    store.wait_for_another("server", server);
    String::from_utf8(answer).unwrap().split_once(' ').unwrap().0.parse().unwrap()
}

#[test]
fn an_operation_completes_when_its_server_is_killed_at_any_call() {
    Ranks::of(2).timeout(Duration::from_secs(3000)).run(test_name!(), |rank| {
        if rank.id() == STEPPER {
            return server_stepper(rank);
        }
        let store = TestStore::start();
        let (client, observer) = (store.client(), store.client());
        let mut random = wholemem_testkit::seed();
        for operation in OPERATIONS {
            // The expected state of the store after the operation, without a kill.
            prepare(&client);
            operate(operation, &client);
            let expected = look(&observer);
            delete_all(&client);
            prepare(&client);
            let calls = step_server(rank, &store, &client, operation, MAX_CALLS);
            assert!((4..MAX_CALLS).contains(&calls), "{operation:?} takes {calls} calls");
            delete_all(&client);
            let tried = sample(&mut random, calls);
            wholemem_testkit::report(&format!("{operation:?}: {calls} calls, killed at {}", tried.len()));
            for nth in tried {
                prepare(&client);
                step_server(rank, &store, &client, operation, nth);
                assert_eq!(look(&observer), expected, "{operation:?} killed at call {nth}");
                assert_eq!(
                    look(&store.client()),
                    expected,
                    "{operation:?} killed at call {nth}, a new client"
                );
                delete_all(&client);
            }
        }
        rank.send(STEPPER, b"end", &[]);
    });
}

/// Runs an operation in a separate client process, which is killed at its nth system call. Returns the number of the client's
/// system calls.
fn step_client(test: &str, store: &TestStore, operation: StoreOperation, nth: Option<u64>) -> u64 {
    let at = OPERATIONS.iter().position(|known| *known == operation).unwrap();
    let outcome = store.socket().with_extension("outcome");
    let nth = nth.map_or_else(|| "count".to_owned(), |nth| nth.to_string());
    let parameter = format!("{at} {nth} {} {}", store.socket().display(), outcome.display());
    Ranks::of(2).killed(0).parameter(parameter).run(test, client_body);
    std::fs::read_to_string(&outcome).unwrap().parse().unwrap()
}

fn client_body(rank: &Rank) {
    let parameter = rank.parameter();
    let fields: Vec<_> = parameter.split(' ').collect();
    let [operation, nth, socket, outcome] = fields[..] else { panic!("expected four fields") };
    let nth: Option<u64> = nth.parse().ok();
    if rank.id() == STEPPER {
        assert_eq!(rank.recv(0).0, b"ready");
        let stepper = Stepper::attach(rank.pid(0));
        rank.send(0, b"go", &[]);
        let run = stepper.trace(nth.or(Some(u64::MAX)), TraceAction::Kill);
        std::fs::write(outcome, run.calls.to_string()).unwrap();
        return;
    }
    stepper::allow();
    let client = Client::connect(socket).unwrap();
    rank.send(STEPPER, b"ready", &[]);
    assert_eq!(rank.recv(STEPPER).0, b"go");
    stepper::mark();
    operate(OPERATIONS[operation.parse::<usize>().unwrap()], &client);
    stepper::mark();
    rank.wait_to_be_killed();
}

#[test]
fn an_operation_is_complete_or_undone_when_its_client_is_killed_at_any_call() {
    if Ranks::is_rank() {
        return Ranks::of(2).run(test_name!(), client_body);
    }
    let store = TestStore::start();
    let observer = store.client();
    let mut random = wholemem_testkit::seed();
    for operation in OPERATIONS {
        prepare(&observer);
        // Waits until the server has freed the objects that were deleted before, which takes several steps.
        store.settled(&observer);
        let before = look(&observer);
        let calls = step_client(test_name!(), &store, operation, None);
        // The server notices the death of the client a moment later, and frees the client's resources in several steps.
        let settled = |is_expected: &dyn Fn(&StoreView) -> bool| {
            let deadline = Deadline::after(Duration::from_secs(60));
            while observer.status().unwrap().clients > 1 {
                assert!(!deadline.has_passed(), "the dead client has not been removed");
            }
            let deadline = Deadline::after(Duration::from_secs(10));
            loop {
                let now = look(&observer);
                if is_expected(&now) || deadline.has_passed() {
                    return now;
                }
            }
        };
        let after = settled(&|now| now.unsealed == 0 && now.retired == 0);
        assert_eq!(
            (after.unsealed, after.retired),
            (0, 0),
            "{operation:?} leaves no draft and no deleted object"
        );
        delete_all(&observer);
        let tried = sample(&mut random, calls);
        wholemem_testkit::report(&format!("{operation:?}: {calls} calls, killed at {}", tried.len()));
        for nth in tried {
            prepare(&observer);
            step_client(test_name!(), &store, operation, Some(nth));
            let is_whole = |now: &StoreView| *now == before || *now == after;
            let now = settled(&is_whole);
            assert!(
                is_whole(&now),
                "{operation:?} killed at call {nth}: {now:?}, and not {before:?} or {after:?}"
            );
            delete_all(&observer);
        }
    }
}
