//! One stream in the hands of several threads.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::sync::atomic::{AtomicBool, Ordering};

use wholemem_hal::{Attempt, Backend, Device, Error, HostConfig, Rights, Stream};
use wholemem_os::Deadline;
use wholemem_testkit::{Deferred, Ranks, seed, test_name};

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
