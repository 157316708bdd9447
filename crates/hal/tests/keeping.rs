//! What unfinished work uses stays, whatever goes wrong while one looks whether it is over; what is refused comes later.

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

/// A stream that stands still until it is told to go on, with a fill behind that whose memory nobody else holds.
struct Work {
    device: Device,
    fault: Fault,
    stream: Stream,
    go: HostEvent,
    ticket: u64,
    at: NonNull<u8>,
}

impl Work {
    fn new() -> Self {
        let queue = HostQueue::new(Box::new(Deferred::new(seed())));
        let memory = HostMemory::open(HostConfig::default()).unwrap();
        let (backend, fault) = Fault::over(memory, queue).unwrap();
        let device = backend.device(0).unwrap();
        let (go, ticket, event) = reached_when_told(&device);
        let stream = device.stream().unwrap();
        stream.await_event(&event).unwrap();
        let map = device.allocate(LEN).unwrap().map(Rights::ReadWrite).unwrap();
        stream.fill(&map.all(), 1).unwrap();
        let at = map.bytes().unwrap().as_ptr();
        Self { device, fault, stream, go, ticket, at }
    }

    /// Whether the memory of the fill is still mapped.
    fn is_kept(&self) -> bool {
        // SAFETY: the memory is this test's, or nothing is mapped there: the process does nothing else.
        unsafe { vm::try_store(self.at) }
    }

    fn go(&self) {
        self.go.reach(self.ticket, Duration::ZERO);
    }

    /// Makes the next raw call of this name fail, whatever else is called before.
    fn fail_next(&self, verb: &str, mut run: impl FnMut()) {
        for nth in 1..100 {
            self.fault.arm(nth);
            run();
            let fired = self.fault.fired();
            self.fault.arm(0);
            assert!(self.is_kept(), "after call {nth}, {fired:?}, failed");
            if fired == Some(verb) {
                return;
            }
        }
        panic!("`{verb}` is not called");
    }
}

/// An event that is reached when the test says so, and its ticket.
fn reached_when_told(device: &Device) -> (HostEvent, u64, Event) {
    let reached = HostEvent::shared().unwrap();
    let ticket = reached.next_ticket();
    reached.ask(ticket);
    let handle = reached.export().unwrap().unwrap();
    (reached, ticket, Event::import(device, EventHandle::Fd(handle)).unwrap())
}

/// In a process of its own, so that nobody else maps anything where the memory was.
fn alone(test: &str, body: impl FnOnce()) {
    Ranks::of(1).run(test, |_| body());
}

#[test]
fn work_of_ones_own_never_runs_before_its_turn() {
    let work = Work::new();
    let mut ran = false;
    assert_eq!(work.stream.run_inline("own", || ran = true), Ok(false));
    assert!(!ran, "what was enqueued before it has not run");
    work.go();
    work.stream.synchronize(Deadline::NEVER).unwrap();

    let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
    let stream = device.stream().unwrap();
    in_forked_child(|| {
        let mut ran = false;
        let forked = Error::Forked { attempt: Attempt::Launch { name: "own" } };
        assert_eq!(stream.run_inline("own", || ran = true), Err(forked));
        assert!(!ran, "the stream is the parent's");
    });
}

#[test]
fn a_wait_that_times_out_or_fails_lets_go_of_nothing() {
    alone(test_name!(), || {
        let work = Work::new();
        let timed_out = Error::TimedOut { attempt: Attempt::Synchronize };
        assert_eq!(work.stream.synchronize(Deadline::NOW), Err(timed_out));
        assert!(work.is_kept());
        work.fail_next("wait_stream", || assert!(work.stream.synchronize(Deadline::NOW).is_err()));
        work.go();
        work.stream.synchronize(Deadline::NEVER).unwrap();
        assert!(!work.is_kept(), "what the work used goes with it");
    });
}

#[test]
fn a_batch_whose_end_cannot_be_told_is_kept() {
    alone(test_name!(), || {
        let work = Work::new();
        let other = work.device.allocate(LEN).unwrap().map(Rights::ReadWrite).unwrap();
        // More than one batch, each with its event, and looks at the oldest.
        work.fail_next("is_done", || (0..100).for_each(|_| drop(work.stream.fill(&other.all(), 2))));
        work.go();
        work.stream.synchronize(Deadline::NEVER).unwrap();
        assert!(!work.is_kept());
    });
}

#[test]
fn batches_are_let_go_of_while_the_stream_goes_on() {
    alone(test_name!(), || {
        let work = Work::new();
        let other = work.device.allocate(LEN).unwrap().map(Rights::ReadWrite).unwrap();
        work.go();
        // Nobody waits: enqueuing more is enough, since each look lets a late stream do a piece of its work.
        let rounds = (0..100_000).find(|_| {
            work.stream.fill(&other.all(), 2).unwrap();
            !work.is_kept()
        });
        assert!(rounds.is_some(), "memory is held for as long as the stream lives");
    });
}

#[test]
fn a_dropped_stream_whose_end_cannot_be_told_is_kept() {
    alone(test_name!(), || {
        // What is called to find out whether a dropped stream is done, each failing in turn.
        for (nth, verb) in [(1, "create_event"), (2, "record"), (3, "is_done")] {
            let mut work = Work::new();
            let backend = work.device.backend().clone();
            let stream = std::mem::replace(&mut work.stream, work.device.stream().unwrap());
            work.fault.arm(nth);
            drop(stream);
            assert_eq!(work.fault.fired(), Some(verb));
            work.fault.arm(0);
            assert!(work.is_kept(), "after `{verb}` failed");
            assert_eq!(backend.collect(), 1);
            assert!(work.is_kept(), "the work is not done");
            work.go();
            assert!((0..1000).any(|_| backend.collect() == 0));
            assert!(!work.is_kept(), "what the work used goes with it");
        }
    });
}

#[test]
fn work_that_a_driver_refuses_keeps_its_memory_until_the_stream_is_idle() {
    alone(test_name!(), || {
        let mut work = Work::new();
        let map = work.device.allocate(LEN).unwrap().map(Rights::ReadWrite).unwrap();
        work.at = map.bytes().unwrap().as_ptr();
        work.fault.arm(1);
        work.stream.fill(&map.all(), 1).unwrap_err();
        assert_eq!(work.fault.fired(), Some("fill"));
        drop(map);
        assert!(work.is_kept());
        work.go();
        work.stream.synchronize(Deadline::NEVER).unwrap();
        assert!(!work.is_kept());
    });
}

#[test]
fn a_forked_child_runs_none_of_its_parents_late_work() {
    alone(test_name!(), || {
        let backend = Deferred::backend(HostConfig::default(), seed()).unwrap();
        let device = backend.device(0).unwrap();
        let map = device.allocate(LEN).unwrap().map(Rights::ReadWrite).unwrap();
        let seen = || {
            let mut seen = [0];
            map.bytes().unwrap().read_at(0, &mut seen).unwrap();
            seen[0]
        };
        // One stream is dropped in the parent with its work still to do, the others in the child.
        let (go, ticket, event) = reached_when_told(&device);
        let retired = device.stream().unwrap();
        retired.await_event(&event).unwrap();
        retired.fill(&map.all(), 1).unwrap();
        drop(retired);
        let mut dropped = [(); 8].map(|()| Some(device.stream().unwrap()));
        dropped.iter().flatten().for_each(|stream| stream.fill(&map.all(), 1).unwrap());
        go.reach(ticket, Duration::ZERO);
        in_forked_child(|| {
            dropped.iter_mut().for_each(|stream| drop(stream.take()));
            assert!((0..100).all(|_| backend.collect() == 0), "nothing is the child's to give back");
        });
        assert_eq!(seen(), 0, "the child shares the memory, and left it alone");
        dropped.into_iter().flatten().for_each(|stream| stream.synchronize(Deadline::NEVER).unwrap());
        assert_eq!(seen(), 1);
    });
}

#[test]
fn what_is_refused_again_and_again_is_given_back_in_the_end() {
    alone(test_name!(), || {
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
        // Dropping something else is enough.
        drop(device.allocate(LEN).unwrap());
        Census::take().assert_same_as(&before, "after the next drop");
        assert_eq!(backend.collect(), 0);
    });
}

/// Stores a number at an address: `(address, number)`.
unsafe fn store(_: &LaunchShape, args: &Args) {
    let at = Address(args.read_u64(0).expect("an address")).to_host().expect("not null");
    let value = args.read_u32(1).expect("a number").to_le_bytes()[0];
    // SAFETY: the launcher passed a mapped, writable byte.
    let byte = unsafe { SharedSlice::new(at, 1, true) };
    byte.write_at(0, &[value]).expect("one byte");
}

const STORE: KernelImage = KernelImage { ptx: None, host: &[("store", store)] };

#[test]
fn a_launched_kernel_keeps_its_module_and_its_operands() {
    alone(test_name!(), || {
        let mut work = Work::new();
        let map = work.device.allocate(LEN).unwrap().map(Rights::ReadWrite).unwrap();
        work.at = map.bytes().unwrap().as_ptr();
        // SAFETY: the one function is launched below with what it takes.
        let store = unsafe { Module::load(&work.device, &STORE) }.unwrap().function("store").unwrap();
        let args = Args::new().u64(map.address()).u32(7);
        // SAFETY: the arguments are an address and a number, and the memory is an operand.
        unsafe { work.stream.launch(&store, &LaunchShape::line(1, 1), &args, &[map.all()]) }.unwrap();
        let live = |what: &str| format!("{:?}", work.device.backend()).contains(what);
        drop((map, store));
        assert!(work.is_kept());
        assert!(live("modules: Table(1 live)"), "the kernel has not run");
        work.go();
        work.stream.synchronize(Deadline::NEVER).unwrap();
        assert!(!work.is_kept());
        assert!(live("modules: Table(0 live)"), "it has");
    });
}

#[test]
fn a_kernel_or_an_operand_of_another_backend_is_refused() {
    let [ours, theirs] = [(); 2].map(|()| {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let map = device.allocate(LEN).unwrap().map(Rights::ReadWrite).unwrap();
        // SAFETY: the one function is not launched.
        let store = unsafe { Module::load(&device, &STORE) }.unwrap().function("store").unwrap();
        (device, store, map.all())
    });
    let (stream, shape) = (ours.0.stream().unwrap(), LaunchShape::line(1, 1));
    let wrong = || Err(Error::WrongBackend { attempt: Attempt::Launch { name: "store" } });
    for (function, operand) in [(&theirs.1, &ours.2), (&ours.1, &theirs.2)] {
        // SAFETY: it is refused, and would do nothing without its arguments but panic.
        let launched =
            unsafe { stream.launch(function, &shape, &Args::new(), std::slice::from_ref(operand)) };
        assert_eq!(launched, wrong());
    }
}
