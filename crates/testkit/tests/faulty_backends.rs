//! Tests of the test kit: deferred backends and backends with injected faults behave as documented, and leaks are
//! detected.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::panic::{AssertUnwindSafe, catch_unwind};

use wholemem_hal::host::{HostEvent, HostMemory, HostQueue};
use wholemem_hal::{
    Attempt, Backend, BackendError, Error, Event, EventHandle, EventKind, HostConfig, Result, Rights,
};
use wholemem_os::Deadline;
use wholemem_testkit::{Census, Deferred, Fault, Ranks, sweep, test_name};

#[test]
fn deferred_work_does_not_run_before_a_wait() {
    let device = Deferred::backend(HostConfig::default(), 1).unwrap().device(0).unwrap();
    let map = device.allocate(64 << 10).unwrap().map(Rights::ReadWrite).unwrap();
    let now = || {
        let mut seen = [0];
        map.bytes().unwrap().read_at(0, &mut seen).unwrap();
        seen[0]
    };
    let stream = device.stream().unwrap();
    stream.fill(&map.all(), 7).unwrap();
    assert_eq!(now(), 0, "a reader that does not wait reads the old bytes");
    stream.synchronize(Deadline::NEVER).unwrap();
    assert_eq!(now(), 7);
}

/// Copies a byte that another stream writes, with or without an event that orders the two streams.
fn copied(seed: u64, ordered: bool) -> u8 {
    let device = Deferred::backend(HostConfig::default(), seed).unwrap().device(0).unwrap();
    let map = device.allocate(64 << 10).unwrap().map(Rights::ReadWrite).unwrap();
    let (from, to) = (map.span(0, 1).unwrap(), map.span(1, 1).unwrap());
    let (writer, copier) = (device.stream().unwrap(), device.stream().unwrap());
    let event = Event::create(&device, EventKind::Order).unwrap();
    writer.fill(&from, 7).unwrap();
    writer.record(&event).unwrap();
    if ordered {
        copier.await_event(&event).unwrap();
    }
    copier.copy(&to, &from).unwrap();
    copier.synchronize(Deadline::NEVER).unwrap();
    let mut seen = [0];
    copier.read(&to, &mut seen).unwrap();
    seen[0]
}

#[test]
fn a_missing_wait_between_two_deferred_streams_is_detected() {
    assert!(
        (0..64).all(|seed| copied(seed, true) == 7),
        "with the wait, every interleaving copies the right byte"
    );
    assert!(
        (0..64).any(|seed| copied(seed, false) == 0),
        "without the wait, some interleaving copies the old byte"
    );
}

#[test]
fn a_record_of_a_shared_event_runs_at_once_with_all_work_before_it() {
    for seed in 0..16 {
        let device = Deferred::backend(HostConfig::default(), seed).unwrap().device(0).unwrap();
        let map = device.allocate(64 << 10).unwrap().map(Rights::ReadWrite).unwrap();
        let (first, second) = (device.stream().unwrap(), device.stream().unwrap());
        let (order, shared) =
            [EventKind::Order, EventKind::Shared].map(|kind| Event::create(&device, kind).unwrap()).into();
        first.fill(&map.all(), 7).unwrap();
        first.record(&order).unwrap();
        second.await_event(&order).unwrap();
        second.record(&shared).unwrap();
        // The event is checked through an imported handle, as another process would do: this does not make the deferred
        // schedule run work.
        let EventHandle::Fd(handle) = shared.export().unwrap() else { panic!("not a descriptor") };
        let there = HostEvent::import(handle).unwrap();
        assert_eq!(there.wait(there.latest(), Deadline::NOW), Ok(true), "seed {seed}");
        let mut seen = [0];
        map.bytes().unwrap().read_at(0, &mut seen).unwrap();
        assert_eq!(seen, [7]);
    }
}

fn leaky(backend: &Backend) -> Result<()> {
    let device = backend.device(0)?;
    std::mem::forget(device.allocate(64 << 10)?);
    device.allocate(64 << 10)?;
    Ok(())
}

#[test]
fn a_sweep_detects_a_leak() {
    Ranks::of(1).run(test_name!(), |_| {
        let memory = HostMemory::open(HostConfig::default()).unwrap();
        let (backend, fault) = Fault::over(memory, HostQueue::inline()).unwrap();
        let sweep = || sweep::raw_calls(&backend, &fault, true, leaky);
        let panic = catch_unwind(AssertUnwindSafe(sweep)).expect_err("the sweep misses the leak");
        let message = panic.downcast_ref::<String>().expect("the panic has no message");
        assert!(message.contains("added") && message.contains("memfd:wholemem"), "{message}");
    });
}

/// Returns the panic message of a fault sweep of `path`, which must fail.
fn sweep_failure(path: impl Fn(&Backend) -> Result<()>) -> String {
    let queue = HostQueue::new(Box::new(Deferred::new(1)));
    let (backend, fault) = Fault::over(HostMemory::open(HostConfig::default()).unwrap(), queue).unwrap();
    let sweep = || sweep::raw_calls(&backend, &fault, false, &path);
    *catch_unwind(AssertUnwindSafe(sweep))
        .expect_err("the sweep succeeds")
        .downcast()
        .expect("the panic has no message")
}

#[test]
fn a_sweep_fails_every_call_of_a_path_once() {
    Ranks::of(1).run(test_name!(), |_| {
        let memory = HostMemory::open(HostConfig::default()).unwrap();
        let (backend, fault) = Fault::over(memory, HostQueue::inline()).unwrap();
        let path = |backend: &Backend| backend.device(0)?.allocate(64 << 10)?.map(Rights::Read).map(drop);
        // The path makes nine raw calls: granularity, create; granularity, reserve; map, set_access; unmap, free,
        // release.
        assert_eq!(sweep::raw_calls(&backend, &fault, true, path), 9);
    });
}

#[test]
fn a_sweep_detects_a_hidden_or_changed_error() {
    Ranks::of(1).run(test_name!(), |_| {
        let hides = sweep_failure(|backend| {
            let _hidden = backend.device(0)?.allocate(64 << 10);
            Ok(())
        });
        assert!(hides.contains("call 1 (`granularity`) failed, and the path ended in Ok(())"), "{hides}");

        let refused = |cause| Error::Failed { attempt: Attempt::Inspect, cause };
        let changes = sweep_failure(|backend| {
            let created = backend.device(0)?.allocate(64 << 10).map(drop);
            created.map_err(|_| refused(BackendError::OutOfMemory { available: 0 }))
        });
        assert!(changes.contains("call 1") && changes.contains("OutOfMemory"), "{changes}");
    });
}

#[test]
fn a_sweep_detects_unfinished_work() {
    Ranks::of(1).run(test_name!(), |_| {
        let never = HostEvent::shared().unwrap();
        never.set_latest(never.next_ticket());
        let message = sweep_failure(|backend| {
            let device = backend.device(0)?;
            let handle = never.export().unwrap().unwrap();
            device.stream()?.await_event(&Event::import(&device, EventHandle::Fd(handle))?)
        });
        assert!(message.contains("left an unreleased resource"), "{message}");
    });
}

#[test]
fn a_census_lists_descriptors_and_mappings() {
    Ranks::of(1).run(test_name!(), |_| {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let before = Census::take();
        let map = device.allocate(64 << 10).unwrap().map(Rights::Read).unwrap();
        let during = Census::take();
        assert_eq!(during.fds.len(), before.fds.len() + 1);
        assert!(
            during
                .maps
                .keys()
                .any(|(rights, backing, _)| rights == "r--s" && backing.contains("memfd:wholemem"))
        );
        drop(map);
        Census::take().assert_same_as(&before, "after the mapping was dropped");
    });
}
