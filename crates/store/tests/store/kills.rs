//! A server or a client killed at any system call of an operation: what was sealed is there, and nothing else is.
//!
//! A second process walks the victim from call to call. A seeded sample of calls is tried always, all of them with
//! `WHOLEMEM_EXHAUSTIVE=1`.

use std::time::Duration;

use wholemem_hal::{Backend, Device, HostConfig, Rights};
use wholemem_os::{Deadline, PidFd};
use wholemem_store::{Client, Pack, Status};
use wholemem_testkit::stepper::{self, TraceAction};
use wholemem_testkit::{Rank, Ranks, Stepper, test_name};

use crate::served::Served;

const LARGE: usize = 1 << 20;

/// How many calls of each operation are tried in an ordinary run.
const SAMPLE: usize = 4;

/// No operation makes more calls than this.
const MOST_CALLS: u64 = 400;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Small,
    Large,
    Replace,
    Pack,
    Publish,
    Adopt,
    Delete,
}

const OPERATIONS: [Operation; 7] = [
    Operation::Small,
    Operation::Large,
    Operation::Replace,
    Operation::Pack,
    Operation::Publish,
    Operation::Adopt,
    Operation::Delete,
];

fn host() -> Device {
    Backend::host(HostConfig::default()).unwrap().device(0).unwrap()
}

/// What is there before an operation.
fn prepare(client: &Client) {
    client.put("small", &[1; 100]).unwrap();
    client.put("large", &vec![2; LARGE]).unwrap();
}

fn operate(operation: Operation, client: &Client) {
    match operation {
        Operation::Small => drop(client.put("new", &[3; 5000]).unwrap()),
        Operation::Large => drop(client.put("new", &vec![3; LARGE]).unwrap()),
        Operation::Replace => drop(client.put("large", &vec![3; LARGE]).unwrap()),
        Operation::Pack => {
            let pack = Pack::new("new").add("new/a", LARGE).add("new/b", 10);
            let mut draft = client.create_pack(&pack).unwrap();
            draft.write_at(0, 0, &vec![3; LARGE]).unwrap();
            draft.seal().unwrap();
        }
        Operation::Publish => drop(client.publish("new", client.stat("large").unwrap().id).unwrap()),
        Operation::Adopt => {
            let memory = host().allocate(LARGE).unwrap();
            memory.map(Rights::ReadWrite).unwrap().bytes().unwrap().write_at(0, &vec![3; LARGE]).unwrap();
            client.adopt("new", b"", &memory, 4096..LARGE).unwrap();
        }
        Operation::Delete => client.delete(client.stat("large").unwrap().id).unwrap(),
    }
}

/// What an observer sees: the names with their lengths and first bytes, and how full the store is.
#[derive(Debug, PartialEq, Eq)]
struct Sight {
    objects: Vec<(String, usize, Option<u8>)>,
    used: (u64, u64),
    unsealed: u64,
    retired: u64,
}

fn look(client: &Client) -> Sight {
    let objects = client.list("").unwrap().into_iter().map(|entry| {
        let object = client.get(&entry.name).unwrap();
        let bytes = object.to_vec().unwrap();
        assert!(bytes.iter().all(|byte| *byte == bytes[0]) || entry.name == "new", "{}", entry.name);
        (entry.name, entry.len, bytes.first().copied())
    });
    let objects = objects.collect();
    let Status { host, device, unsealed, retired, .. } = client.status().unwrap();
    Sight { objects, used: (host.used, device.used), unsealed, retired }
}

/// Undoes what operations do.
fn tidy(client: &Client) {
    for entry in client.list("").unwrap() {
        if entry.pack.is_none_or(|first| first == entry.id) {
            client.delete(entry.id).unwrap();
        }
    }
}

fn sample(dice: &mut u64, calls: u64) -> Vec<u64> {
    if wholemem_testkit::exhaustive() {
        return (1..=calls).collect();
    }
    let roll = |_| {
        *dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        1 + (*dice >> 33) % calls
    };
    (0..SAMPLE).map(roll).collect()
}

const STEPPER: usize = 1;

fn stepper_of_servers(rank: &Rank) {
    loop {
        let (order, _) = rank.recv(0);
        let order = String::from_utf8(order).unwrap();
        let Some((pid, nth)) = order.split_once(' ') else { return };
        let stepper = Stepper::attach(pid.parse().unwrap());
        rank.send(0, b"attached", &[]);
        let walk = stepper.trace_without_marks(nth.parse().unwrap());
        rank.send(0, format!("{} {}", walk.calls, walk.killed_at.is_some()).as_bytes(), &[]);
    }
}

/// Runs an operation while the server is killed at its nth call, and says how many calls there were.
fn walk_server(rank: &Rank, served: &Served, client: &Client, operation: Operation, nth: u64) -> u64 {
    let server = served.process("server");
    rank.send(STEPPER, format!("{server} {nth}").as_bytes(), &[]);
    assert_eq!(rank.recv(STEPPER).0, b"attached");
    operate(operation, client);
    if let Ok(process) = PidFd::open(server) {
        process.kill().unwrap();
    }
    let (said, _) = rank.recv(STEPPER);
    served.wait_for_another("server", server);
    String::from_utf8(said).unwrap().split_once(' ').unwrap().0.parse().unwrap()
}

#[test]
fn a_server_killed_at_any_call_of_an_operation_finishes_it_after_its_restart() {
    Ranks::of(2).timeout(Duration::from_secs(3000)).run(test_name!(), |rank| {
        if rank.id() == STEPPER {
            return stepper_of_servers(rank);
        }
        let served = Served::start();
        let (client, observer) = (served.client(), served.client());
        let mut dice = wholemem_testkit::seed();
        for operation in OPERATIONS {
            // What it does when nobody is killed.
            prepare(&client);
            operate(operation, &client);
            let expected = look(&observer);
            tidy(&client);
            prepare(&client);
            let calls = walk_server(rank, &served, &client, operation, MOST_CALLS);
            assert!((4..MOST_CALLS).contains(&calls), "{operation:?} takes {calls} calls");
            tidy(&client);
            let tried = sample(&mut dice, calls);
            wholemem_testkit::report(&format!("{operation:?}: {calls} calls, killed at {}", tried.len()));
            for nth in tried {
                prepare(&client);
                walk_server(rank, &served, &client, operation, nth);
                assert_eq!(look(&observer), expected, "{operation:?} killed at call {nth}");
                assert_eq!(
                    look(&served.client()),
                    expected,
                    "{operation:?} killed at call {nth}, a new client"
                );
                tidy(&client);
            }
        }
        rank.send(STEPPER, b"end", &[]);
    });
}

/// One client, in a process of its own, that is killed at the nth call of an operation; or whose calls are counted.
fn walk_client(test: &str, served: &Served, operation: Operation, nth: Option<u64>) -> u64 {
    let at = OPERATIONS.iter().position(|known| *known == operation).unwrap();
    let outcome = served.socket().with_extension("outcome");
    let nth = nth.map_or_else(|| "count".to_owned(), |nth| nth.to_string());
    let parameter = format!("{at} {nth} {} {}", served.socket().display(), outcome.display());
    Ranks::of(2).killed(0).parameter(parameter).run(test, client_body);
    std::fs::read_to_string(&outcome).unwrap().parse().unwrap()
}

fn client_body(rank: &Rank) {
    let parameter = rank.parameter();
    let fields: Vec<_> = parameter.split(' ').collect();
    let [operation, nth, socket, outcome] = fields[..] else { panic!("four fields") };
    let nth: Option<u64> = nth.parse().ok();
    if rank.id() == STEPPER {
        assert_eq!(rank.recv(0).0, b"ready");
        let stepper = Stepper::attach(rank.pid(0));
        rank.send(0, b"go", &[]);
        let walk = stepper.trace(nth.or(Some(u64::MAX)), TraceAction::Kill);
        std::fs::write(outcome, walk.calls.to_string()).unwrap();
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
fn a_client_killed_at_any_call_of_an_operation_leaves_nothing_half_done() {
    if Ranks::is_rank() {
        return Ranks::of(2).run(test_name!(), client_body);
    }
    let served = Served::start();
    let observer = served.client();
    let mut dice = wholemem_testkit::seed();
    for operation in OPERATIONS {
        prepare(&observer);
        // What was deleted before goes in several steps.
        served.settled(&observer);
        let before = look(&observer);
        let calls = walk_client(test_name!(), &served, operation, None);
        // The server learns of the death a moment later, and lets what the client held go in several steps.
        let settled = |is_expected: &dyn Fn(&Sight) -> bool| {
            let deadline = Deadline::after(Duration::from_secs(60));
            while observer.status().unwrap().clients > 1 {
                assert!(!deadline.has_passed(), "the dead client is still there");
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
        assert_eq!((after.unsealed, after.retired), (0, 0), "{operation:?} holds nothing when it is over");
        tidy(&observer);
        let tried = sample(&mut dice, calls);
        wholemem_testkit::report(&format!("{operation:?}: {calls} calls, killed at {}", tried.len()));
        for nth in tried {
            prepare(&observer);
            walk_client(test_name!(), &served, operation, Some(nth));
            let is_whole = |now: &Sight| *now == before || *now == after;
            let now = settled(&is_whole);
            assert!(
                is_whole(&now),
                "{operation:?} killed at call {nth}: {now:?}, and not {before:?} or {after:?}"
            );
            tidy(&observer);
        }
    }
}
