//! Tests in which a rank is killed or stopped at any system call of an operation: no rank hangs, the errors of all
//! survivors contain that rank, and no files or descriptors are left.
//!
//! Each case is a group of three processes, and a fourth process that steps one of them through the operation and
//! kills it at the nth system call. A seeded sample of cases runs always, all of them with `WHOLEMEM_EXHAUSTIVE=1`.

use std::os::fd::AsFd;
use std::sync::PoisonError;
use std::time::Duration;

use wholemem_comm::{Bootstrap, Error, Rank, UniqueId};
use wholemem_os::{Deadline, Memfd};
use wholemem_testkit::stepper::TraceAction;
use wholemem_testkit::{Census, Ranks, Stepper, stepper, test_name};

const SIZE: u32 = 3;
const STEPPER: usize = 3;

/// The timeout for joining, which expires if a rank was killed before it was authenticated.
const TIMEOUT: Duration = Duration::from_secs(2);

/// The number of test cases of an operation that run concurrently.
const CONCURRENT_CASES: usize = 4;

/// The number of system calls at which a victim is killed in an ordinary test run, for each operation and each victim.
const SAMPLE: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Create,
    Split,
    AllGather,
    AllGatherFds,
    AllToAll,
}

const OPERATIONS: [Operation; 5] =
    [Operation::Create, Operation::Split, Operation::AllGather, Operation::AllGatherFds, Operation::AllToAll];

/// One test case: the operation, the rank that is killed or stopped, the number of the system call at which this
/// happens, and the file for the outcome.
#[derive(Debug)]
struct Case {
    operation: Operation,
    victim: u32,
    nth: Option<u64>,
    fate: TraceAction,
    id: String,
    outcome: String,
}

impl Case {
    fn encode(&self) -> String {
        let nth = self.nth.map_or_else(|| "count".to_owned(), |nth| nth.to_string());
        let operation = OPERATIONS.iter().position(|operation| *operation == self.operation).expect("known");
        format!("{operation} {} {nth} {:?} {} {}", self.victim, self.fate, self.id, self.outcome)
    }

    fn decode(text: &str) -> Self {
        let mut fields = text.split(' ');
        let mut next = || fields.next().expect("six fields").to_owned();
        Self {
            operation: OPERATIONS[next().parse::<usize>().expect("a number")],
            victim: next().parse().expect("a rank"),
            nth: next().parse().ok(),
            fate: if next() == "Freeze" { TraceAction::Freeze } else { TraceAction::Kill },
            id: next(),
            outcome: next(),
        }
    }
}

fn create(case: &Case, rank: u32) -> Result<Bootstrap, Error> {
    let id: UniqueId = case.id.parse()?;
    let mut comm = Bootstrap::create(&id, Rank(rank), SIZE, Deadline::after(TIMEOUT))?;
    // A death is reported at once, so the timeout may be long. If a rank is stopped, the other ranks wait for the whole
    // timeout.
    comm.set_timeout(if case.fate == TraceAction::Freeze { TIMEOUT } else { Duration::from_secs(60) });
    Ok(comm)
}

/// Runs the operation under test. The communicator is only borrowed, because it must live until the stepper has stopped
/// counting system calls.
fn operate(operation: Operation, comm: &Bootstrap) -> Result<(), Error> {
    match operation {
        Operation::Create => Ok(()),
        Operation::Split => comm.split(Some(0), SIZE - comm.rank().0).map(drop),
        Operation::AllGather => comm.all_gather(&[7; 100_000]).map(drop),
        // The parts are so long that two children of rank 0 open a direct link to each other.
        Operation::AllToAll => comm.all_to_all(&[7; 300_000]).map(drop),
        Operation::AllGatherFds => {
            let own = [Memfd::create("test", 4096)?, Memfd::create("test", 4096)?];
            let fds: Vec<_> = own.iter().map(AsFd::as_fd).collect();
            comm.all_gather_fds(&fds).map(drop)
        }
    }
}

fn victim(rank: &wholemem_testkit::Rank, case: &Case) {
    stepper::allow();
    let early = (case.operation != Operation::Create).then(|| create(case, case.victim).expect("a group"));
    rank.send(STEPPER, b"ready", &[]);
    assert_eq!(rank.recv(STEPPER).0, b"go");
    stepper::mark();
    let late = early.is_none().then(|| create(case, case.victim));
    if let Some(comm) = &early {
        let _ = operate(case.operation, comm);
    }
    stepper::mark();
    if case.nth.is_some() {
        rank.wait_to_be_killed();
    }
    if let Some(comm) = early.or_else(|| late.and_then(Result::ok)) {
        let _ = comm.barrier();
    }
}

fn survivor(harness: &wholemem_testkit::Rank, case: &Case, rank: u32) {
    // Creates a first group before the census, because a process starts some threads and allocates some memory only
    // once.
    drop(Bootstrap::local(2).expect("a group"));
    let before = Census::take();
    if case.operation == Operation::Create {
        // A survivor starts to join at the same time as the victim: if the victim began much later, the survivors would
        // have given up.
        assert_eq!(harness.recv(STEPPER).0, b"go");
    }
    if case.fate == TraceAction::Freeze && case.nth.is_some() {
        outlast(harness, case, rank);
        return Census::take().assert_same_as(&before, "after both groups");
    }
    let lost = Error::PeerLost { rank: Rank(case.victim) };
    let outcome = create(case, rank).and_then(|comm| {
        let first = operate(case.operation, &comm);
        if case.nth.is_none() {
            return first.and_then(|()| comm.barrier());
        }
        if let Err(error) = first {
            assert_eq!(error, lost, "the operation itself");
        }
        assert_eq!(comm.barrier().as_ref(), Err(&lost), "the next operation");
        assert_eq!(comm.check().as_ref(), Err(&lost), "permanently");
        Err(lost.clone())
    });
    match (case.nth, outcome) {
        (None, outcome) => assert_eq!(outcome, Ok(())),
        (Some(_), Err(Error::Timeout { missing, .. })) if case.operation == Operation::Create => {
            assert!(missing.contains(&Rank(case.victim)), "{missing:?} does not name {}", case.victim);
        }
        (Some(_), outcome) => assert_eq!(outcome, Err(lost)),
    }
    Census::take().assert_same_as(&before, "after the group");
}

/// Checks which errors a survivor gets if a rank is stopped, and that the survivors can form a new group.
fn outlast(harness: &wholemem_testkit::Rank, case: &Case, rank: u32) {
    let named = |error: &Error| match error {
        Error::Timeout { missing, .. } | Error::Poisoned { missing } => missing.contains(&Rank(case.victim)),
        _ => false,
    };
    let outcome = create(case, rank).and_then(|comm| {
        if let Err(error) = operate(case.operation, &comm) {
            assert!(named(&error), "{error} in the operation does not name {}", case.victim);
        }
        comm.barrier()
    });
    let error = outcome.expect_err("a rank is stopped");
    assert!(named(&error), "{error} does not name {}", case.victim);
    let other = (0..SIZE).find(|other| *other != rank && *other != case.victim).expect("three ranks");
    // Both survivors derive the id of the new group from the id of the first group, in the same way.
    let digits: String = case.id[4..20].chars().rev().collect();
    let id = format!("{}{digits}{}", &case.id[..4], &case.id[20..]).parse().expect("an id");
    let deadline = Deadline::after(Duration::from_secs(60));
    let again = Bootstrap::create(&id, Rank(u32::from(rank > other)), 2, deadline).expect("a new group");
    assert_eq!(again.all_gather(b"on").expect("it works"), [b"on", b"on"]);
    drop(again);
    harness.send(STEPPER, b"done", &[]);
}

fn body(rank: &wholemem_testkit::Rank) {
    let case = Case::decode(&rank.parameter());
    let me = u32::try_from(rank.id()).expect("small");
    if rank.id() == STEPPER {
        let victim = usize::try_from(case.victim).expect("small");
        assert_eq!(rank.recv(victim).0, b"ready");
        let stepper = Stepper::attach(rank.pid(victim));
        for member in 0..STEPPER {
            if member == victim || case.operation == Operation::Create {
                rank.send(member, b"go", &[]);
            }
        }
        let walk = stepper.trace(case.nth, case.fate);
        if case.fate == TraceAction::Freeze && case.nth.is_some() {
            for survivor in (0..STEPPER).filter(|member| *member != victim) {
                assert_eq!(rank.recv(survivor).0, b"done");
            }
            stepper.end();
        }
        std::fs::write(&case.outcome, walk.calls.to_string()).expect("the outcome is written");
    } else if me == case.victim {
        victim(rank, &case);
    } else {
        survivor(rank, &case, me);
    }
}

/// Runs one test case, and returns the number of system calls that the victim made in the operation.
fn run(test: &str, operation: Operation, victim: u32, nth: Option<u64>, fate: TraceAction) -> u64 {
    let folder = tempfile::tempdir_in("/tmp").expect("a directory");
    let folder = folder.path();
    let id = UniqueId::create_in(&folder.join("s")).expect("an id").to_string();
    let outcome = folder.join("outcome").to_str().expect("text").to_owned();
    let case = Case { operation, victim, nth, fate, id, outcome };
    let mut ranks = Ranks::of(4).parameter(case.encode());
    if nth.is_some() {
        ranks = ranks.killed(usize::try_from(victim).expect("small"));
    }
    let failure = std::panic::catch_unwind(|| ranks.run(test, body));
    if let Err(panic) = failure {
        wholemem_testkit::report(&format!("case: {operation:?}, rank {victim}, {fate:?} at call {nth:?}"));
        std::panic::resume_unwind(panic);
    }
    if fate == TraceAction::Freeze {
        // The stopped rank is killed at the end of the test case, and no process is left to remove its socket file.
        return 0;
    }
    let left: Vec<_> = std::fs::read_dir(folder.join("s")).expect("the directory").collect();
    assert!(left.is_empty(), "{operation:?} {victim} {nth:?} left {left:?}");
    std::fs::read_to_string(&case.outcome).expect("the outcome").parse().expect("a number")
}

fn sweep(test: &str, operation: Operation, fate: TraceAction) {
    if std::env::var_os("WHOLEMEM_TEST").is_some() {
        // This process was started as a rank of a test case, so it runs only the body of the case.
        return Ranks::of(4).run(test, body);
    }
    let mut random = wholemem_testkit::seed();
    for victim in 0..SIZE {
        let calls = run(test, operation, victim, None, TraceAction::Kill);
        assert!(calls > 10, "an operation of {calls} calls");
        let all: Vec<u64> = if wholemem_testkit::exhaustive() {
            (1..=calls + 2).collect()
        } else {
            let next = |_| {
                random =
                    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                1 + (random >> 33) % calls
            };
            (0..if fate == TraceAction::Kill { SAMPLE } else { 1 }).map(next).collect()
        };
        let tried = all.len();
        wholemem_testkit::report(&format!(
            "{operation:?}, rank {victim}: {calls} calls, {fate:?} at {tried} of them"
        ));
        // A test case mostly waits for a timeout, so several cases run concurrently.
        let cases = std::sync::Mutex::new(all.into_iter());
        std::thread::scope(|scope| {
            for _ in 0..CONCURRENT_CASES {
                scope.spawn(|| {
                    let next = || cases.lock().unwrap_or_else(PoisonError::into_inner).next();
                    while let Some(nth) = next() {
                        run(test, operation, victim, Some(nth), fate);
                    }
                });
            }
        });
    }
}

#[test]
fn a_rank_killed_while_joining_is_reported_to_all() {
    sweep(test_name!(), Operation::Create, TraceAction::Kill);
}

#[test]
fn a_rank_killed_in_split_is_reported_to_all() {
    sweep(test_name!(), Operation::Split, TraceAction::Kill);
}

#[test]
fn a_rank_killed_in_all_gather_is_reported_to_all() {
    sweep(test_name!(), Operation::AllGather, TraceAction::Kill);
}

#[test]
fn a_rank_killed_in_all_gather_fds_is_reported_to_all() {
    sweep(test_name!(), Operation::AllGatherFds, TraceAction::Kill);
}

#[test]
fn a_rank_killed_in_all_to_all_is_reported_to_all() {
    sweep(test_name!(), Operation::AllToAll, TraceAction::Kill);
}

#[test]
fn a_rank_stopped_while_joining_is_reported_missing_to_all() {
    sweep(test_name!(), Operation::Create, TraceAction::Freeze);
}

#[test]
fn a_rank_stopped_in_split_is_reported_missing_to_all() {
    sweep(test_name!(), Operation::Split, TraceAction::Freeze);
}

#[test]
fn a_rank_stopped_in_all_to_all_is_reported_missing_to_all() {
    sweep(test_name!(), Operation::AllToAll, TraceAction::Freeze);
}

#[test]
fn a_rank_stopped_in_all_gather_is_reported_missing_to_all() {
    sweep(test_name!(), Operation::AllGather, TraceAction::Freeze);
}

#[test]
fn a_rank_stopped_in_all_gather_fds_is_reported_missing_to_all() {
    sweep(test_name!(), Operation::AllGatherFds, TraceAction::Freeze);
}
