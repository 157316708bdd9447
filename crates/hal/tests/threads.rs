//! Tests of one stream that several threads use, and of a child that is forked while a thread uses the stream.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use wholemem_hal::host::HostEvent;
use wholemem_hal::{
    Attempt, Backend, Device, Error, Event, EventHandle, EventKind, HostConfig, Rights, Stream,
};
use wholemem_os::{Deadline, Memfd, SharedMap, vm};
use wholemem_testkit::{Deferred, Ranks, in_forked_child, seed, test_name};

const LEN: usize = 64 << 10;
/// The number of rounds of a test: enough that a race between two steps of a call occurs.
const ROUNDS: usize = 30_000;

fn devices() -> [Device; 2] {
    let inline = Backend::host(HostConfig::default()).unwrap();
    let deferred = Deferred::backend(HostConfig::default(), seed()).unwrap();
    [inline, deferred].map(|backend| backend.device(0).unwrap())
}

/// Runs `body` repeatedly while another thread captures a graph on the stream and launches it, `ROUNDS` times.
fn during_captures(device: &Device, mut body: impl FnMut(&Stream)) {
    let stream = device.stream().unwrap();
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..ROUNDS {
                let graph = stream.capture(|_| Ok(())).unwrap();
                graph.launch(&stream).unwrap();
            }
            is_done.store(true, Ordering::Relaxed);
        });
        while !is_done.load(Ordering::Relaxed) {
            body(&stream);
        }
    });
    stream.synchronize(Deadline::NEVER).unwrap();
}

#[test]
fn a_read_runs_or_fails_but_is_never_captured_into_another_threads_graph() {
    for device in devices() {
        let map = device.allocate(LEN).unwrap().map(Rights::ReadWrite).unwrap();
        map.bytes().unwrap().fill(7).unwrap();
        let span = map.span(0, 8).unwrap();
        let capturing = Err(Error::Capturing { attempt: Attempt::Copy { len: 8 } });
        during_captures(&device, |stream| {
            let mut seen = [0; 8];
            match stream.read(&span, &mut seen) {
                Ok(()) => assert_eq!(seen, [7; 8], "a successful read has copied the bytes"),
                // The copy has run, and the wait for the copy overlapped a capture.
                Err(Error::Capturing { attempt: Attempt::Synchronize }) => {}
                refused => assert_eq!(refused, capturing),
            }
        });
    }
}

#[test]
fn captured_work_keeps_its_operands_alive() {
    // A failure of this test would be a store to unmapped memory, so the test runs in a separate process.
    Ranks::of(1).run(test_name!(), |_| {
        for device in devices() {
            let memory = device.allocate(LEN).unwrap();
            during_captures(&device, |stream| {
                let map = memory.map(Rights::ReadWrite).unwrap();
                stream.fill(&map.all(), 9).unwrap();
            });
        }
    });
}

#[test]
fn a_blocked_wait_does_not_block_other_threads_of_the_stream() {
    Ranks::of(1).run(test_name!(), |_| {
        let device = Deferred::backend(HostConfig::default(), seed()).unwrap().device(0).unwrap();
        let map = device.allocate(LEN).unwrap().map(Rights::ReadWrite).unwrap();
        let (host_event, ticket, event) = manual_event(&device);
        let stream = device.stream().unwrap();
        stream.await_event(&event).unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| stream.synchronize(Deadline::NEVER));
            for _ in 0..1000 {
                let timed_out = Error::TimedOut { attempt: Attempt::Synchronize };
                assert_eq!(stream.synchronize(Deadline::NOW), Err(timed_out));
                stream.fill(&map.all(), 1).unwrap();
                std::thread::yield_now();
            }
            host_event.complete(ticket, Duration::ZERO);
            assert_eq!(waiter.join().unwrap(), Ok(()));
        });
    });
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

/// The offset of the waiter count in the memory of a shared event.
const WAITERS_OFFSET: usize = 36;

#[test]
fn a_child_forked_while_the_stream_is_locked_gets_errors_and_does_not_hang() {
    Ranks::of(1).run(test_name!(), |_| {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let map = device.allocate(LEN).unwrap().map(Rights::ReadWrite).unwrap();
        let (span, stream) = (map.span(0, 8).unwrap(), device.stream().unwrap());
        let (empty, order) =
            (stream.capture(|_| Ok(())).unwrap(), Event::create(&device, EventKind::Order).unwrap());
        let (host_event, ticket, event) = manual_event(&device);
        let words = Memfd::import(host_event.export().unwrap().unwrap(), vm::page_size()).unwrap();
        let words = SharedMap::create(&words, vm::Protection::Read).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| stream.await_event(&event).unwrap());
            // Waits until a waiter is counted: the other thread then holds the stream's lock.
            while words.bytes().read_u32(WAITERS_OFFSET).unwrap().load_acquire() == 0 {
                std::thread::yield_now();
            }
            in_forked_child(|| {
                let forked = |attempt| Err::<(), _>(Error::Forked { attempt });
                let copy = || Attempt::Copy { len: 8 };
                assert_eq!(stream.read(&span, &mut [0; 8]), forked(copy()));
                assert_eq!(stream.write(&span, &[0; 8]), forked(copy()));
                assert_eq!(stream.copy(&span, &map.span(8, 8).unwrap()), forked(copy()));
                assert_eq!(stream.fill(&span, 1), forked(Attempt::Fill { len: 8 }));
                assert_eq!(stream.record(&order), forked(Attempt::Record));
                assert_eq!(stream.await_event(&order), forked(Attempt::AwaitEvent));
                assert_eq!(empty.launch(&stream), forked(Attempt::LaunchGraph));
                assert_eq!(stream.synchronize(Deadline::NEVER), forked(Attempt::Synchronize));
            });
            host_event.complete(ticket, Duration::ZERO);
        });
    });
}
