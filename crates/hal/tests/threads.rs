//! One stream in the hands of several threads, and of a child forked while one of them is inside it.

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
/// So many that two steps of a thread which another comes between are met.
const ROUNDS: usize = 30_000;

fn devices() -> [Device; 2] {
    let inline = Backend::host(HostConfig::default()).unwrap();
    let late = Deferred::backend(HostConfig::default(), seed()).unwrap();
    [inline, late].map(|backend| backend.device(0).unwrap())
}

/// Runs `body` again and again while another thread captures and launches, `ROUNDS` times.
fn during_captures(device: &Device, mut body: impl FnMut(&Stream)) {
    let stream = device.stream().unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..ROUNDS {
                let graph = stream.capture(|_| Ok(())).unwrap();
                graph.launch(&stream).unwrap();
            }
            over.store(true, Ordering::Relaxed);
        });
        while !over.load(Ordering::Relaxed) {
            body(&stream);
        }
    });
    stream.synchronize(Deadline::NEVER).unwrap();
}

#[test]
fn a_read_is_done_or_refused_but_never_recorded_into_another_threads_graph() {
    for device in devices() {
        let map = device.allocate(LEN).unwrap().map(Rights::ReadWrite).unwrap();
        map.bytes().unwrap().fill(7).unwrap();
        let span = map.span(0, 8).unwrap();
        let capturing = Err(Error::Capturing { attempt: Attempt::Copy { len: 8 } });
        during_captures(&device, |stream| {
            let mut seen = [0; 8];
            match stream.read(&span, &mut seen) {
                Ok(()) => assert_eq!(seen, [7; 8], "a read that was not done says so"),
                // The copy was done, and the wait for it fell into a capture.
                Err(Error::Capturing { attempt: Attempt::Synchronize }) => {}
                refused => assert_eq!(refused, capturing),
            }
        });
    }
}

#[test]
fn whatever_is_recorded_keeps_what_it_uses() {
    // Broken, this is a store into memory that is gone, so it gets a process of its own to die in.
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
fn a_thread_that_waits_for_ever_keeps_no_other_from_its_deadline_or_from_enqueuing() {
    Ranks::of(1).run(test_name!(), |_| {
        let device = Deferred::backend(HostConfig::default(), seed()).unwrap().device(0).unwrap();
        let map = device.allocate(LEN).unwrap().map(Rights::ReadWrite).unwrap();
        let (reached, ticket, event) = reached_when_told(&device);
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
            reached.reach(ticket, Duration::ZERO);
            assert_eq!(waiter.join().unwrap(), Ok(()));
        });
    });
}

/// An event that is reached when the test says so, and its ticket.
fn reached_when_told(device: &Device) -> (HostEvent, u64, Event) {
    let reached = HostEvent::shared().unwrap();
    let ticket = reached.next_ticket();
    reached.ask(ticket);
    let handle = reached.export().unwrap().unwrap();
    (reached, ticket, Event::import(device, EventHandle::Fd(handle)).unwrap())
}

/// Where a shared event counts those who wait for it.
const WAITERS_OFFSET: usize = 36;

#[test]
fn a_child_forked_while_a_thread_is_inside_a_stream_is_refused_and_does_not_hang() {
    Ranks::of(1).run(test_name!(), |_| {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let map = device.allocate(LEN).unwrap().map(Rights::ReadWrite).unwrap();
        let (span, stream) = (map.span(0, 8).unwrap(), device.stream().unwrap());
        let (empty, order) =
            (stream.capture(|_| Ok(())).unwrap(), Event::create(&device, EventKind::Order).unwrap());
        let (reached, ticket, event) = reached_when_told(&device);
        let words = Memfd::import(reached.export().unwrap().unwrap(), vm::page_size()).unwrap();
        let words = SharedMap::create(&words, vm::Protection::Read).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| stream.await_event(&event).unwrap());
            // The stream's lock is held from here on.
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
            reached.reach(ticket, Duration::ZERO);
        });
    });
}
