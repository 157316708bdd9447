//! Tests that kill a rank at the nth system call while it creates or registers memory: the other ranks get an error and leak
//! nothing.
//!
//! Three processes are ranks, and a fourth process traces one of them and kills it at its nth call. Usual runs test a random sample
//! of calls; `WHOLEMEM_EXHAUSTIVE=1` tests all of them.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::any::Any;
use std::time::Duration;

use wholemem::{
    Bootstrap, Communicator, Error, Kind, MemorySpec, Rank, SymmetricMemory, SymmetricSpec, WholeMemory,
};
use wholemem_comm::{Error as CommError, UniqueId};
use wholemem_hal::{Backend, HostConfig, Rights};
use wholemem_os::Deadline;
use wholemem_testkit::stepper::TraceAction;
use wholemem_testkit::{Census, Ranks, Stepper, exhaustive, report, seed, stepper, test_name};

const SIZE: u32 = 3;
const STEPPER: usize = 3;

/// The number of system calls at which each victim is killed in a usual test run.
const SAMPLE: usize = 4;

fn join(id: &str, rank: u32) -> Communicator {
    let id: UniqueId = id.parse().unwrap();
    let comm = Bootstrap::create(&id, Rank(rank), SIZE, Deadline::after(Duration::from_secs(120))).unwrap();
    let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
    Communicator::create(comm, &device).unwrap()
}

fn spec() -> MemorySpec {
    MemorySpec { kind: Kind::Chunked, ..MemorySpec::new(300_000, 1) }
}

/// A collective call during which a rank is killed. It is prepared before, and the result keeps its memory.
type Call = fn(&Communicator) -> Box<dyn FnOnce() -> Result<Box<dyn Any>, Error> + '_>;

fn create(group: &Communicator) -> Box<dyn FnOnce() -> Result<Box<dyn Any>, Error> + '_> {
    Box::new(|| Ok(Box::new(WholeMemory::create(group, &spec())?)))
}

fn register(group: &Communicator) -> Box<dyn FnOnce() -> Result<Box<dyn Any>, Error> + '_> {
    let symmetric = SymmetricMemory::create(group, &SymmetricSpec::default()).unwrap();
    let memory = group.device().allocate(256 << 10).unwrap().map(Rights::ReadWrite).unwrap();
    Box::new(move || Ok(Box::new((symmetric.window_register_span(&memory.span(100, 5000)?)?, symmetric))))
}

/// The test body of each process. The test parameter contains the rank to kill, the number of the system call, the id of the
/// group, and the path of the file for the number of system calls.
fn body(rank: &wholemem_testkit::Rank, call: Call) {
    let parameter = rank.parameter();
    let fields: Vec<_> = parameter.split(' ').collect();
    let (victim, nth, id, outcome) =
        (fields[0].parse::<usize>().unwrap(), fields[1].parse::<u64>().ok(), fields[2], fields[3]);
    if rank.id() == STEPPER {
        assert_eq!(rank.recv(victim).0, b"ready");
        let tracer = Stepper::attach(rank.pid(victim));
        rank.send(victim, b"go", &[]);
        let trace = tracer.trace(nth, TraceAction::Kill);
        std::fs::write(outcome, trace.calls.to_string()).unwrap();
        return;
    }
    let own = u32::try_from(rank.id()).unwrap();
    let before = Census::take();
    let group = join(id, own);
    let prepared = call(&group);
    if rank.id() == victim {
        stepper::allow();
        rank.send(STEPPER, b"ready", &[]);
        assert_eq!(rank.recv(STEPPER).0, b"go");
        stepper::mark();
        let made = prepared();
        stepper::mark();
        if nth.is_some() {
            rank.wait_to_be_killed();
        }
        made.unwrap();
        return group.bootstrap().barrier().unwrap();
    }
    let lost = Error::Comm(CommError::PeerLost { rank: Rank(u32::try_from(victim).unwrap()) });
    match prepared() {
        // The call may succeed here, if the victim was killed after its last message of the call.
        Ok(made) => drop(made),
        Err(error) => assert!(nth.is_some() && error == lost, "{error}"),
    }
    let after = group.bootstrap().barrier().map_err(Error::from);
    assert_eq!(after, if nth.is_some() { Err(lost) } else { Ok(()) });
    drop(group);
    let after = Census::take();
    assert_eq!(after.fds, before.fds, "file descriptors must not leak");
    assert!(!after.maps.keys().any(|(_, backing, _)| backing.contains("memfd")), "{:?}", after.maps);
}

/// Runs one test case, and returns the number of system calls that the victim made during the call.
fn run(test: &str, call: Call, victim: u32, nth: Option<u64>) -> u64 {
    let folder = tempfile::tempdir().unwrap();
    let outcome = folder.path().join("calls");
    let id = UniqueId::create().unwrap();
    let nth_text = nth.map_or_else(|| "count".to_owned(), |nth| nth.to_string());
    let mut ranks = Ranks::of(4).parameter(format!("{victim} {nth_text} {id} {}", outcome.to_str().unwrap()));
    if nth.is_some() {
        ranks = ranks.killed(victim as usize);
    }
    ranks.run(test, |rank| body(rank, call));
    std::fs::read_to_string(outcome).unwrap().parse().unwrap()
}

/// Kills each rank at a sample of the system calls that it makes during a collective call.
fn kill_ranks_during(test: &str, call: Call) {
    if Ranks::is_rank() {
        return Ranks::of(4).run(test, |rank| body(rank, call));
    }
    let mut random = seed();
    for victim in 0..SIZE {
        let calls = run(test, call, victim, None);
        assert!(calls > 10, "the call makes only {calls} system calls");
        let all: Vec<u64> = if exhaustive() {
            (1..=calls + 2).collect()
        } else {
            let next = |_| {
                random =
                    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                1 + (random >> 33) % calls
            };
            (0..SAMPLE).map(next).collect()
        };
        report(&format!("rank {victim}: {calls} calls, killed at {all:?}"));
        for nth in all {
            run(test, call, victim, Some(nth));
        }
    }
}

#[test]
fn a_rank_killed_while_memory_is_created_is_reported_to_all_ranks() {
    kill_ranks_during(test_name!(), create);
}

#[test]
fn a_rank_killed_while_memory_is_registered_is_reported_to_all_ranks() {
    kill_ranks_during(test_name!(), register);
}
