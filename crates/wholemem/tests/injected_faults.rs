//! One rank's calls failing, one after the other: every rank gets its error, nothing is left, and the group still stands.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::time::Duration;

use wholemem::{Bootstrap, Communicator, Error, Kind, MemorySpec, Rank, Result, WholeMemory};
use wholemem_comm::UniqueId;
use wholemem_hal::host::{HostMemory, HostQueue};
use wholemem_hal::{Backend, HostConfig};
use wholemem_os::Deadline;
use wholemem_testkit::{Census, Fault, Ranks, test_name};

/// Who fails.
const WEAK: Rank = Rank(1);

/// Calls that give back: their failure is nobody's error, and they are tried again.
const SILENT: [&str; 5] = ["release", "free", "unmap", "unpin", "destroy_stream"];

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

/// Whether an outcome is what a failing call, or none, must come to.
fn check(outcome: &Result<()>, fired: Option<&str>, weak: impl Fn(Rank) -> bool) {
    match (outcome, fired) {
        (Ok(()), None) => {}
        (Ok(()), Some(verb)) => {
            assert!(SILENT.contains(&verb) || is_retried(verb), "`{verb}` failed, and nobody was told")
        }
        (Err(Error::OnRank { rank, code: 100, reason: why, .. }), Some(verb)) => {
            assert!(weak(*rank), "{rank} did not fail: {why}");
            assert!(why.contains(&format!("`{verb}`")), "{why} does not name `{verb}`");
        }
        (outcome, fired) => panic!("{fired:?} failed, and it came to {outcome:?}"),
    }
}

/// A place that is not free is one that could not be reserved, and another one is tried.
fn is_retried(verb: &str) -> bool {
    ["reserve", "granularity"].contains(&verb)
}

#[test]
fn a_failing_call_of_one_process_fails_all_alike() {
    Ranks::of(3).run(test_name!(), |rank| {
        let id = if rank.id() == 0 {
            let id = UniqueId::create().unwrap();
            (1..3).for_each(|peer| rank.send(peer, id.to_string().as_bytes(), &[]));
            id
        } else {
            String::from_utf8(rank.recv(0).0).unwrap().parse().unwrap()
        };
        let own = Rank(u32::try_from(rank.id()).unwrap());
        let comm = Bootstrap::create(&id, own, 3, Deadline::after(Duration::from_secs(120))).unwrap();
        let (backend, fault) = faulty(1);
        let group = Communicator::create(comm, &backend.device(0).unwrap()).unwrap();
        let comm = group.bootstrap();
        for spec in specs() {
            // Once before counting: the first one sets up what stays for the life of the process.
            drop(WholeMemory::create(&group, &spec).unwrap());
            comm.barrier().unwrap();
            let before = Census::take();
            for nth in 1..200 {
                fault.arm(if own == WEAK { nth } else { 0 });
                let outcome = WholeMemory::create(&group, &spec).map(drop);
                let fired = fault.fired();
                fault.arm(0);
                assert_eq!(backend.collect(), 0, "after call {nth} ({fired:?})");
                let fired = comm.broadcast(WEAK, fired.unwrap_or_default().as_bytes()).unwrap();
                let fired = String::from_utf8(fired).unwrap();
                let fired = (!fired.is_empty()).then_some(fired.as_str());
                check(&outcome, fired, |rank| rank == WEAK);
                let outcomes = comm.all_gather(format!("{outcome:?}").as_bytes()).unwrap();
                assert!(
                    outcomes.iter().all(|other| *other == outcomes[0]),
                    "all ranks have the same: {outcomes:?}"
                );
                Census::take().assert_same_as(&before, &format!("after call {nth} ({fired:?}) of {spec:?}"));
                if fired.is_none() {
                    assert!(nth > 8, "a creation makes {nth} calls");
                    break;
                }
            }
        }
        // Nobody leaves the group while others count.
        rank.barrier();
    });
}

#[test]
fn a_failing_call_of_one_device_fails_all_of_its_process() {
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
                // Ranks run side by side: whose call it was is told by the error.
                outcomes.iter().for_each(|outcome| check(outcome, fired, |_| true));
                assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]), "{outcomes:?}");
                assert_eq!(backend.collect(), 0, "after call {nth} ({fired:?})");
                // Threads come and go with every walk; descriptors and maps must not.
                assert_eq!(Census::take().fds, before.fds, "after call {nth} ({fired:?})");
                let memory = |census: &Census| {
                    let maps = census.maps.iter().filter(|((_, backing, _), _)| backing.contains("memfd"));
                    maps.map(|(map, count)| (map.clone(), *count)).collect::<Vec<_>>()
                };
                assert_eq!(memory(&Census::take()), memory(&before), "after call {nth} ({fired:?})");
                if fired.is_none() {
                    assert!(nth > 20, "a creation makes {nth} calls");
                    break;
                }
            }
            Communicator::on_each(&groups, |group| Ok(group.bootstrap().barrier()?)).unwrap();
        }
    });
}
