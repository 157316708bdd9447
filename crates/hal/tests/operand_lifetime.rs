//! Tests of operand lifetimes: unfinished work keeps its memory mapped even if queries fail, and failed releases are
//! retried.

#![allow(unsafe_code, reason = "stores by address and kernel launches are unsafe")]
#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::ptr::NonNull;
use std::time::Duration;

use wholemem_hal::host::{HostEvent, HostMemory, HostQueue};
use wholemem_hal::raw::Address;
use wholemem_hal::{
    Args, Attempt, Backend, Device, Error, Event, EventHandle, HostConfig, KernelImage, LaunchShape, Module,
    Rights, Stream,
};
use wholemem_os::{Deadline, SharedSlice, vm};
use wholemem_testkit::{Census, Deferred, Fault, Ranks, in_forked_child, seed, test_name};

const LEN: usize = 64 << 10;

/// A deferred stream (one that runs work later) with a fill that waits for an event. Only the stream holds the memory
/// of the fill.
struct BlockedFill {
    device: Device,
    fault: Fault,
    stream: Stream,
    unblock: HostEvent,
    ticket: u64,
    at: NonNull<u8>,
}

impl BlockedFill {
    fn new() -> Self {
        let queue = HostQueue::new(Box::new(Deferred::new(seed())));
        let memory = HostMemory::open(HostConfig::default()).unwrap();
        let (backend, fault) = Fault::over(memory, queue).unwrap();
        let device = backend.device(0).unwrap();
        let (unblock, ticket, event) = manual_event(&device);
        let stream = device.stream().unwrap();
        stream.await_event(&event).unwrap();
        let map = device.allocate(LEN).unwrap().map(Rights::ReadWrite).unwrap();
        stream.fill(&map.all(), 1).unwrap();
        let at = map.bytes().unwrap().as_ptr();
        Self { device, fault, stream, unblock, ticket, at }
    }

    /// Returns whether the memory that the fill writes is still mapped.
    fn is_mapped(&self) -> bool {
        // SAFETY: the memory belongs to this test, or nothing is mapped there, since no other test runs in this
        // process.
        unsafe { vm::try_store(self.at) }
    }

    fn unblock(&self) {
        self.unblock.complete(self.ticket, Duration::ZERO);
    }

    /// Calls `run` repeatedly, each time with a later backend call failing, until the call named `call` has failed.
    fn fail_next(&self, call: &str, mut run: impl FnMut()) {
        for nth in 1..100 {
            self.fault.arm(nth);
            run();
            let fired = self.fault.fired();
            self.fault.arm(0);
            assert!(self.is_mapped(), "after call {nth}, {fired:?}, failed");
            if fired == Some(call) {
                return;
            }
        }
        panic!("`{call}` is not called");
    }
}

/// Creates an event that completes when the test calls `complete` with the returned ticket (the number of the event's
/// record).
fn manual_event(device: &Device) -> (HostEvent, u64, Event) {
    let event = HostEvent::shared().unwrap();
    let ticket = event.next_ticket();
    event.set_latest(ticket);
    let handle = event.export().unwrap().unwrap();
    (event, ticket, Event::import(device, EventHandle::Fd(handle)).unwrap())
}

/// Runs `body` in a separate process, so that no other test maps memory at the same address.
fn in_own_process(test: &str, body: impl FnOnce()) {
    Ranks::of(1).run(test, |_| body());
}

#[test]
fn run_inline_does_nothing_on_deferred_streams_and_in_forked_children() {
    let work = BlockedFill::new();
    let mut ran = false;
    assert_eq!(work.stream.run_inline("own", || ran = true), Ok(false));
    assert!(!ran, "earlier work has not run");
    work.unblock();
    work.stream.synchronize(Deadline::NEVER).unwrap();

    let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
    let stream = device.stream().unwrap();
    in_forked_child(|| {
        let mut ran = false;
        let forked = Error::Forked { attempt: Attempt::Launch { name: "own" } };
        assert_eq!(stream.run_inline("own", || ran = true), Err(forked));
        assert!(!ran, "the stream belongs to the parent");
    });
}

#[test]
fn a_wait_that_times_out_or_fails_releases_no_operands() {
    in_own_process(test_name!(), || {
        let work = BlockedFill::new();
        let timed_out = Error::TimedOut { attempt: Attempt::Synchronize };
        assert_eq!(work.stream.synchronize(Deadline::NOW), Err(timed_out));
        assert!(work.is_mapped());
        work.fail_next("wait_stream", || assert!(work.stream.synchronize(Deadline::NOW).is_err()));
        work.unblock();
        work.stream.synchronize(Deadline::NEVER).unwrap();
        assert!(!work.is_mapped(), "finished work releases its operands");
    });
}

#[test]
fn a_batch_is_held_if_its_event_cannot_be_queried() {
    in_own_process(test_name!(), || {
        let work = BlockedFill::new();
        let other = work.device.allocate(LEN).unwrap().map(Rights::ReadWrite).unwrap();
        // The stream gets several batches of work, each followed by an event; `hold` queries the oldest event.
        work.fail_next("is_done", || (0..100).for_each(|_| drop(work.stream.fill(&other.all(), 2))));
        work.unblock();
        work.stream.synchronize(Deadline::NEVER).unwrap();
        assert!(!work.is_mapped());
    });
}

#[test]
fn finished_batches_are_released_while_the_stream_is_in_use() {
    in_own_process(test_name!(), || {
        let work = BlockedFill::new();
        let other = work.device.allocate(LEN).unwrap().map(Rights::ReadWrite).unwrap();
        work.unblock();
        // No thread waits for the stream: enqueuing is enough, because each query of an event runs an operation of a
        // deferred stream.
        let rounds = (0..100_000).find(|_| {
            work.stream.fill(&other.all(), 2).unwrap();
            !work.is_mapped()
        });
        assert!(rounds.is_some(), "operands of finished work are never released");
    });
}

#[test]
fn a_dropped_stream_is_held_if_its_completion_cannot_be_queried() {
    in_own_process(test_name!(), || {
        // The calls that check whether a dropped stream has finished, each of which fails once.
        for (nth, call) in [(1, "create_event"), (2, "record"), (3, "is_done")] {
            let mut work = BlockedFill::new();
            let backend = work.device.backend().clone();
            let stream = std::mem::replace(&mut work.stream, work.device.stream().unwrap());
            work.fault.arm(nth);
            drop(stream);
            assert_eq!(work.fault.fired(), Some(call));
            work.fault.arm(0);
            assert!(work.is_mapped(), "after `{call}` failed");
            assert_eq!(backend.collect(), 1);
            assert!(work.is_mapped(), "the work has not finished");
            work.unblock();
            assert!((0..1000).any(|_| backend.collect() == 0));
            assert!(!work.is_mapped(), "finished work releases its operands");
        }
    });
}

#[test]
fn work_that_a_driver_refuses_holds_its_memory_until_the_stream_is_idle() {
    in_own_process(test_name!(), || {
        let mut work = BlockedFill::new();
        let map = work.device.allocate(LEN).unwrap().map(Rights::ReadWrite).unwrap();
        work.at = map.bytes().unwrap().as_ptr();
        work.fault.arm(1);
        work.stream.fill(&map.all(), 1).unwrap_err();
        assert_eq!(work.fault.fired(), Some("fill"));
        drop(map);
        assert!(work.is_mapped());
        work.unblock();
        work.stream.synchronize(Deadline::NEVER).unwrap();
        assert!(!work.is_mapped());
    });
}

#[test]
fn a_forked_child_runs_no_deferred_work_of_its_parent() {
    in_own_process(test_name!(), || {
        let backend = Deferred::backend(HostConfig::default(), seed()).unwrap();
        let device = backend.device(0).unwrap();
        let map = device.allocate(LEN).unwrap().map(Rights::ReadWrite).unwrap();
        let seen = || {
            let mut seen = [0];
            map.bytes().unwrap().read_at(0, &mut seen).unwrap();
            seen[0]
        };
        // The parent drops one stream with unfinished work before the fork, and the child drops its copies of the other
        // streams. The child must run none of this work.
        let (unblock, ticket, event) = manual_event(&device);
        let retired = device.stream().unwrap();
        retired.await_event(&event).unwrap();
        retired.fill(&map.all(), 1).unwrap();
        drop(retired);
        let mut dropped = [(); 8].map(|()| Some(device.stream().unwrap()));
        dropped.iter().flatten().for_each(|stream| stream.fill(&map.all(), 1).unwrap());
        unblock.complete(ticket, Duration::ZERO);
        in_forked_child(|| {
            dropped.iter_mut().for_each(|stream| drop(stream.take()));
            assert!((0..100).all(|_| backend.collect() == 0), "the child has nothing to release");
        });
        assert_eq!(seen(), 0, "the child shares the memory and did not write it");
        dropped.into_iter().flatten().for_each(|stream| stream.synchronize(Deadline::NEVER).unwrap());
        assert_eq!(seen(), 1);
    });
}

#[test]
fn a_repeatedly_failing_release_is_retried_until_it_succeeds() {
    in_own_process(test_name!(), || {
        let memory = HostMemory::open(HostConfig::default()).unwrap();
        let (backend, fault) = Fault::over(memory, HostQueue::inline()).unwrap();
        let device = backend.device(0).unwrap();
        let before = Census::take();
        let refused = device.allocate(LEN).unwrap();
        fault.arm(1);
        drop(refused);
        for _ in 0..3 {
            assert_eq!(fault.fired(), Some("release"));
            fault.arm(1);
            assert_eq!(backend.collect(), 1);
        }
        fault.arm(0);
        // The drop of another resource must also retry the release that failed.
        drop(device.allocate(LEN).unwrap());
        Census::take().assert_same_as(&before, "after the next drop");
        assert_eq!(backend.collect(), 0);
    });
}

/// A kernel of the host backend, which runs on the CPU: stores a byte. Its arguments are the address and the value of
/// the byte.
unsafe fn store(_: &LaunchShape, args: &Args) {
    let at = Address(args.read_u64(0).expect("an address")).to_host().expect("not null");
    let value = args.read_u32(1).expect("a number").to_le_bytes()[0];
    // SAFETY: the launch of the kernel passes the address of a mapped, writable byte.
    let byte = unsafe { SharedSlice::new(at, 1, true) };
    byte.write_at(0, &[value]).expect("one byte");
}

const STORE: KernelImage = KernelImage { ptx: None, host: &[("store", store)] };

#[test]
fn a_launched_kernel_holds_its_module_and_its_operands() {
    in_own_process(test_name!(), || {
        let mut work = BlockedFill::new();
        let map = work.device.allocate(LEN).unwrap().map(Rights::ReadWrite).unwrap();
        work.at = map.bytes().unwrap().as_ptr();
        // SAFETY: the launch below passes the parameters of `store`, the only function of the image.
        let store = unsafe { Module::load(&work.device, &STORE) }.unwrap().function("store").unwrap();
        let args = Args::new().u64(map.address()).u32(7);
        // SAFETY: the arguments are an address and a number, as `store` takes them, and the memory is an operand.
        unsafe { work.stream.launch(&store, &LaunchShape::linear(1, 1), &args, &[map.all()]) }.unwrap();
        let debug_contains = |text: &str| format!("{:?}", work.device.backend()).contains(text);
        drop((map, store));
        assert!(work.is_mapped());
        assert!(debug_contains("modules: HandleTable(1 live)"), "the kernel has not run");
        work.unblock();
        work.stream.synchronize(Deadline::NEVER).unwrap();
        assert!(!work.is_mapped());
        assert!(debug_contains("modules: HandleTable(0 live)"), "the kernel has run");
    });
}

#[test]
fn a_kernel_or_an_operand_of_another_backend_is_rejected() {
    let [ours, theirs] = [(); 2].map(|()| {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let map = device.allocate(LEN).unwrap().map(Rights::ReadWrite).unwrap();
        // SAFETY: the launch of `store` below is rejected, so the function does not run.
        let store = unsafe { Module::load(&device, &STORE) }.unwrap().function("store").unwrap();
        (device, store, map.all())
    });
    let (stream, shape) = (ours.0.stream().unwrap(), LaunchShape::linear(1, 1));
    let wrong = || Err(Error::WrongBackend { attempt: Attempt::Launch { name: "store" } });
    for (function, operand) in [(&theirs.1, &ours.2), (&ours.1, &theirs.2)] {
        // SAFETY: the launch is rejected; without arguments, the kernel would only panic.
        let launched =
            unsafe { stream.launch(function, &shape, &Args::new(), std::slice::from_ref(operand)) };
        assert_eq!(launched, wrong());
    }
}
