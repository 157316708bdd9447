//! Tests that fail each call of one rank, one after the other: all ranks get the error of that rank, nothing leaks, and the
//! group remains usable.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::time::Duration;

use wholemem::{
    Bootstrap, Communicator, Error, Kind, MemorySpec, Rank, Result, SymmetricMemory, SymmetricSpec,
    WholeMemory,
};
use wholemem_comm::UniqueId;
use wholemem_hal::host::{HostMemory, HostQueue};
use wholemem_hal::{Backend, HostConfig, Rights};
use wholemem_os::Deadline;
use wholemem_testkit::{Census, Fault, Ranks, test_name};

/// The rank whose calls to its backend fail.
const FAULTY: Rank = Rank(1);

/// Backend calls that release resources. Their failure is not reported, because they are retried.
const RELEASING: [&str; 5] = ["release", "free", "unmap", "unpin", "destroy_stream"];

fn faulty(devices: usize) -> (Backend, Fault) {
    let memory = HostMemory::open(HostConfig::virtual_devices(devices)).unwrap();
    Fault::over(memory, HostQueue::inline()).unwrap()
}

fn specs() -> [MemorySpec; 4] {
    let spec = MemorySpec::new(300_000, 1);
    [
        spec.clone(),
        MemorySpec { kind: Kind::Chunked, ..spec.clone() },
        MemorySpec { equal_addresses: true, ..spec.clone() },
        MemorySpec { rows_of_each: Some(vec![100_000, 0, 200_000]), kind: Kind::Chunked, ..spec },
    ]
}

/// Checks the result of creating memory, given the name of the backend call that failed, if one did.
fn check(outcome: &Result<()>, fired: Option<&str>, may_fail: impl Fn(Rank) -> bool) {
    match (outcome, fired) {
        (Ok(()), None) => {}
        (Ok(()), Some(call)) => {
            assert!(
                RELEASING.contains(&call) || is_retried(call),
                "`{call}` failed, and no error was returned"
            )
        }
        (Err(Error::OnRank { rank, code: 100, reason: message, .. }), Some(call)) => {
            assert!(may_fail(*rank), "{rank} did not fail: {message}");
            assert!(message.contains(&format!("`{call}`")), "{message} does not mention `{call}`");
        }
        (outcome, fired) => panic!("{fired:?} failed, and the result is {outcome:?}"),
    }
}

/// Returns true for calls that try to reserve addresses. If they fail, the range counts as occupied, and another range is
/// tried.
fn is_retried(call: &str) -> bool {
    ["reserve", "granularity"].contains(&call)
}

/// Creates the group of three processes, each of which has one rank.
fn join(rank: &wholemem_testkit::Rank, backend: &Backend) -> Communicator {
    let id = if rank.id() == 0 {
        let id = UniqueId::create().unwrap();
        (1..3).for_each(|peer| rank.send(peer, id.to_string().as_bytes(), &[]));
        id
    } else {
        String::from_utf8(rank.recv(0).0).unwrap().parse().unwrap()
    };
    let own = Rank(u32::try_from(rank.id()).unwrap());
    let comm = Bootstrap::create(&id, own, 3, Deadline::after(Duration::from_secs(120))).unwrap();
    Communicator::create(comm, &backend.device(0).unwrap()).unwrap()
}

#[test]
fn a_failing_call_of_one_process_fails_the_registration_of_all_ranks() {
    Ranks::of(3).run(test_name!(), |rank| {
        let (backend, fault) = faulty(1);
        let group = join(rank, &backend);
        let comm = group.bootstrap();
        let symmetric = SymmetricMemory::create(&group, &SymmetricSpec::default()).unwrap();
        let memory = group.device().allocate(256 << 10).unwrap().map(Rights::ReadWrite).unwrap();
        // The parts are not at equal distances, so the window has a table.
        let span = memory.span(100 * (1 + rank.id() * rank.id()), 5000).unwrap();
        let register = |nth| {
            fault.arm(nth);
            let outcome = symmetric.window_register_span(&span).map(drop);
            let fired = fault.fired();
            fault.arm(0);
            // The ranks tell each other which windows they have dropped.
            drop(symmetric.mem_alloc(1).unwrap());
            assert_eq!(backend.collect(), 0, "after call {nth} ({fired:?})");
            (outcome, fired)
        };
        register(0).0.unwrap();
        comm.barrier().unwrap();
        let before = Census::take();
        for nth in 1..200 {
            let (outcome, fired) = register(if group.rank() == FAULTY { nth } else { 0 });
            let fired = comm.broadcast(FAULTY, fired.unwrap_or_default().as_bytes()).unwrap();
            let fired = String::from_utf8(fired).unwrap();
            let fired = (!fired.is_empty()).then_some(fired.as_str());
            check(&outcome, fired, |rank| rank == FAULTY);
            Census::take().assert_same_as(&before, &format!("after call {nth} ({fired:?})"));
            comm.barrier().unwrap();
            if fired.is_none() {
                assert!(nth > 8, "a registration makes only {nth} calls");
                break;
            }
        }
        rank.barrier();
    });
}

#[test]
fn a_failing_call_of_one_process_fails_all_ranks_with_the_same_error() {
    Ranks::of(3).run(test_name!(), |rank| {
        let (backend, fault) = faulty(1);
        let group = join(rank, &backend);
        let (comm, own) = (group.bootstrap(), group.rank());
        for spec in specs() {
            // Memory is created once before the census, because the first creation allocates resources that live as long as the
            // process.
            drop(WholeMemory::create(&group, &spec).unwrap());
            comm.barrier().unwrap();
            let before = Census::take();
            for nth in 1..200 {
                fault.arm(if own == FAULTY { nth } else { 0 });
                let outcome = WholeMemory::create(&group, &spec).map(drop);
                let fired = fault.fired();
                fault.arm(0);
                assert_eq!(backend.collect(), 0, "after call {nth} ({fired:?})");
                let fired = comm.broadcast(FAULTY, fired.unwrap_or_default().as_bytes()).unwrap();
                let fired = String::from_utf8(fired).unwrap();
                let fired = (!fired.is_empty()).then_some(fired.as_str());
                check(&outcome, fired, |rank| rank == FAULTY);
                let outcomes = comm.all_gather(format!("{outcome:?}").as_bytes()).unwrap();
                assert!(
                    outcomes.iter().all(|other| *other == outcomes[0]),
                    "the errors of ranks differ: {outcomes:?}"
                );
                Census::take().assert_same_as(&before, &format!("after call {nth} ({fired:?}) of {spec:?}"));
                if fired.is_none() {
                    assert!(nth > 8, "a creation makes only {nth} calls");
                    break;
                }
            }
        }
        // No rank may leave the group while another rank takes its census of resources, which would change.
        rank.barrier();
    });
}

#[test]
fn a_failing_call_fails_all_ranks_of_one_process() {
    Ranks::of(1).run(test_name!(), |_| {
        let (backend, fault) = faulty(3);
        let devices: Vec<_> = (0..3).map(|id| backend.device(id).unwrap()).collect();
        let groups = Communicator::local(&devices).unwrap();
        for spec in specs() {
            drop(Communicator::on_each(&groups, |group| WholeMemory::create(group, &spec)).unwrap());
            let before = Census::take();
            for nth in 1..500 {
                fault.arm(nth);
                let outcomes =
                    Communicator::on_each(&groups, |group| Ok(WholeMemory::create(group, &spec).map(drop)))
                        .unwrap();
                let fired = fault.fired();
                fault.arm(0);
                // Ranks run concurrently, so the failed call may be that of any rank, which the error names.
                outcomes.iter().for_each(|outcome| check(outcome, fired, |_| true));
                assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]), "{outcomes:?}");
                assert_eq!(backend.collect(), 0, "after call {nth} ({fired:?})");
                // Only descriptors, and mappings of memory files, are compared, because threads start and end in every round.
                assert_eq!(Census::take().fds, before.fds, "after call {nth} ({fired:?})");
                let memory = |census: &Census| {
                    let maps = census.maps.iter().filter(|((_, backing, _), _)| backing.contains("memfd"));
                    maps.map(|(map, count)| (map.clone(), *count)).collect::<Vec<_>>()
                };
                assert_eq!(memory(&Census::take()), memory(&before), "after call {nth} ({fired:?})");
                if fired.is_none() {
                    assert!(nth > 20, "a creation makes only {nth} calls");
                    break;
                }
            }
            Communicator::on_each(&groups, |group| Ok(group.bootstrap().barrier()?)).unwrap();
        }
    });
}
