//! The backends that misbehave on purpose do, and what watches over leaks sees them.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::panic::{AssertUnwindSafe, catch_unwind};

use wholemem_hal::host::{HostEvent, HostMemory, HostQueue};
use wholemem_hal::{
    Attempt, Backend, BackendError, Error, Event, EventHandle, EventKind, HostConfig, Result, Rights,
};
use wholemem_os::Deadline;
use wholemem_testkit::{Census, Deferred, Fault, Ranks, sweep, test_name};

#[test]
fn work_on_a_late_stream_is_not_done_until_somebody_waits() {
    let device = Deferred::backend(HostConfig::default(), 1).unwrap().device(0).unwrap();
    let map = device.allocate(64 << 10).unwrap().map(Rights::ReadWrite).unwrap();
    let now = || {
        let mut seen = [0];
        map.bytes().unwrap().read_at(0, &mut seen).unwrap();
        seen[0]
    };
    let stream = device.stream().unwrap();
    stream.fill(&map.all(), 7).unwrap();
    assert_eq!(now(), 0, "a reader that does not wait sees the old bytes");
    stream.synchronize(Deadline::NEVER).unwrap();
    assert_eq!(now(), 7);
}

/// Copies what another stream writes, with or without the event that orders the two.
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
fn a_missing_wait_between_two_late_streams_is_found() {
    assert!((0..64).all(|seed| copied(seed, true) == 7), "with the wait, every order gives the right bytes");
    assert!((0..64).any(|seed| copied(seed, false) == 0), "without it, some order does not");
}

#[test]
fn a_record_that_another_process_may_wait_for_is_reached_with_all_that_comes_before_it() {
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
        // As the other process sees it: nothing it does makes this one run anything.
        let EventHandle::Fd(handle) = shared.export().unwrap() else { panic!("a descriptor") };
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
fn a_path_that_leaks_is_found_by_a_sweep() {
    Ranks::of(1).run(test_name!(), |_| {
        let memory = HostMemory::open(HostConfig::default()).unwrap();
        let (backend, fault) = Fault::over(memory, HostQueue::inline()).unwrap();
        let sweep = || sweep::raw_calls(&backend, &fault, true, leaky);
        let panic = catch_unwind(AssertUnwindSafe(sweep)).expect_err("the leak is found");
        let words = panic.downcast_ref::<String>().expect("it is found with words");
        assert!(words.contains("came") && words.contains("memfd:wholemem"), "{words}");
    });
}

/// What a sweep of the path says when it fails.
fn complaint(path: impl Fn(&Backend) -> Result<()>) -> String {
    let queue = HostQueue::new(Box::new(Deferred::new(1)));
    let (backend, fault) = Fault::over(HostMemory::open(HostConfig::default()).unwrap(), queue).unwrap();
    let sweep = || sweep::raw_calls(&backend, &fault, false, &path);
    *catch_unwind(AssertUnwindSafe(sweep)).expect_err("the sweep fails").downcast().expect("with words")
}

#[test]
fn a_sweep_fails_every_call_of_a_path_once() {
    Ranks::of(1).run(test_name!(), |_| {
        let memory = HostMemory::open(HostConfig::default()).unwrap();
        let (backend, fault) = Fault::over(memory, HostQueue::inline()).unwrap();
        let path = |backend: &Backend| backend.device(0)?.allocate(64 << 10)?.map(Rights::Read).map(drop);
        // Granule, create; granule, reserve; map, set access; unmap, free, release.
        assert_eq!(sweep::raw_calls(&backend, &fault, true, path), 9);
    });
}

#[test]
fn a_path_that_hides_or_changes_its_error_is_found_by_a_sweep() {
    Ranks::of(1).run(test_name!(), |_| {
        let hides = complaint(|backend| {
            let _hidden = backend.device(0)?.allocate(64 << 10);
            Ok(())
        });
        assert!(hides.contains("call 1 (`granularity`) failed, and the path ended in Ok(())"), "{hides}");

        let refused = |cause| Error::Failed { attempt: Attempt::Inspect, cause };
        let changes = complaint(|backend| {
            let made = backend.device(0)?.allocate(64 << 10).map(drop);
            made.map_err(|_| refused(BackendError::OutOfMemory { available: 0 }))
        });
        assert!(changes.contains("call 1") && changes.contains("OutOfMemory"), "{changes}");
    });
}

#[test]
fn a_path_that_leaves_unfinished_work_is_found_by_a_sweep() {
    Ranks::of(1).run(test_name!(), |_| {
        let never = HostEvent::shared().unwrap();
        never.set_latest(never.next_ticket());
        let words = complaint(|backend| {
            let device = backend.device(0)?;
            let handle = never.export().unwrap().unwrap();
            device.stream()?.await_event(&Event::import(&device, EventHandle::Fd(handle))?)
        });
        assert!(words.contains("left something to give back"), "{words}");
    });
}

#[test]
fn a_census_sees_descriptors_and_maps_that_come_and_go() {
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
        Census::take().assert_same_as(&before, "after all was dropped");
    });
}
