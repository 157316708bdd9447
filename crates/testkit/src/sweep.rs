//! A path walked again and again, failing at each of its calls in turn, until no call is left to fail.
//!
//! After each walk the error must be exactly the injected one, the backend must have nothing left to give back, and
//! the process must hold what it held before. Run it in a process of its own ([`crate::ranks`]).

use std::time::Duration;

use wholemem_hal::{Backend, BackendError, DriverCode, Error, Result};
use wholemem_os as os;

use crate::census::Census;
use crate::driver::{self, FakeDriver};
use crate::fault::{Fault, INJECTED};

/// Raw calls whose failure nobody is told of: those that give back, and those by which a stream learns that work is
/// over. They are tried again.
const SILENT_VERBS: [&str; 9] = [
    "release",
    "free",
    "unmap",
    "unpin",
    "destroy_stream",
    "destroy_event",
    "destroy_graph",
    "unload_module",
    // Of the events behind work in flight.
    "is_done",
];

/// The same of the events behind work in flight, which streams that run late make for themselves.
const SILENT_FENCES: [&str; 2] = ["create_event", "record"];

/// System calls that give back. `mmap` is among them because that is how a place is emptied.
const SILENT_CALLS: [&str; 2] = ["munmap", "mmap"];

/// Functions of the driver whose failure nobody is told of: those that give back, those by which a stream learns that
/// work is over, and those that make a context current for one of these.
const SILENT_FUNCTIONS: [&str; 17] = [
    "cuMemRelease",
    "cuMemAddressFree",
    "cuMemUnmap",
    "cuMemFreeHost",
    "cuMemHostUnregister",
    "cuMemFree",
    "cuIpcCloseMemHandle",
    "cuStreamDestroy",
    "cuEventDestroy",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuModuleUnload",
    "cuEventQuery",
    "cuEventCreate",
    "cuEventRecord",
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
];

/// How many walks in a row make no nth call before a path is taken to have no more. Streams run late, so that the number
/// of calls differs a little from walk to walk.
const SHORT_WALKS: u64 = 8;

/// Fails each call that `path` makes to the fake driver of this process, and returns how many there are.
///
/// # Panics
/// When a walk ends in anything but the injected error, or leaves something behind.
pub fn driver_calls(backend: &Backend, driver: &FakeDriver, path: impl Fn(&Backend) -> Result<()>) -> u64 {
    // Walked twice before counting: the first walk sets up what stays for the life of the process.
    for _ in 0..2 {
        assert_eq!(path(backend), Ok(()), "the path works when nothing fails");
        wait_until_drained(backend, "after no call failed");
    }
    let (before, held) = (Census::take(), driver.holdings());
    let (mut longest, mut nth) = (0, 0);
    while nth < longest + SHORT_WALKS {
        nth += 1;
        driver.arm(nth);
        let result = path(backend);
        let fired = driver.fired();
        driver.arm(0);
        let when = format!("after call {nth} ({fired:?}) failed");
        wait_until_drained(backend, &when);
        assert_eq!(driver.holdings(), held, "{when}, ending in {result:?}");
        Census::take().assert_same_as(&before, &when);
        let Some(call) = fired else {
            assert_eq!(result, Ok(()), "no call failed, but the path did");
            continue;
        };
        longest = nth;
        match &result {
            Ok(()) => assert!(SILENT_FUNCTIONS.contains(&call), "{when}, and nobody was told"),
            Err(Error::Failed { cause, .. }) => {
                assert_eq!(
                    cause,
                    &BackendError::Driver { call, code: DriverCode(driver::INJECTED) },
                    "{when}"
                );
            }
            Err(other) => panic!("{when}, and the path ended in {other:?}"),
        }
    }
    longest
}

/// How long late work may take. Far above what any takes: what is not given back by then never is.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits for late work, and for what it still uses to be given back.
fn wait_until_drained(backend: &Backend, when: &str) {
    let deadline = os::Deadline::after(PATIENCE);
    while backend.collect() > 0 {
        assert!(!deadline.has_passed(), "{when}, and something was never given back");
        std::thread::yield_now();
    }
}

/// Fails each raw call that `path` makes, and returns how many there are.
///
/// # Panics
/// When a walk ends in anything but the injected error, or leaves something behind.
pub fn raw_calls(
    backend: &Backend,
    fault: &Fault,
    inline: bool,
    path: impl Fn(&Backend) -> Result<()>,
) -> u64 {
    let silent = |verb: &str| SILENT_VERBS.contains(&verb) || !inline && SILENT_FENCES.contains(&verb);
    sweep(|nth| {
        fault.arm(nth);
        let result = path(backend);
        let fired = fault.fired();
        fault.arm(0);
        assert_eq!(drained(backend), 0, "raw call {nth} ({fired:?}) left something to give back");
        (result, fired, fired.is_some_and(silent))
    })
}

/// Fails each system call that `open` and `path` make, and returns how many there are.
///
/// # Panics
/// When a walk ends in anything but the injected error, or leaves something behind.
pub fn system_calls(open: impl Fn() -> Result<Backend>, path: impl Fn(&Backend) -> Result<()>) -> u64 {
    sweep(|nth| {
        let armed = os::fault::arm(nth, INJECTED);
        let opened = open();
        let result = opened.as_ref().map_err(Clone::clone).and_then(&path);
        let fired = armed.fired();
        drop(armed);
        if let Ok(backend) = &opened {
            assert_eq!(drained(backend), 0, "system call {nth} ({fired:?}) left something to give back");
        }
        (result, fired, fired.is_some_and(|call| SILENT_CALLS.contains(&call)))
    })
}

fn sweep(mut walk: impl FnMut(u64) -> (Result<()>, Option<&'static str>, bool)) -> u64 {
    // Walked once before counting: the first walk sets up what stays for the life of the process.
    let (result, fired, _) = walk(u64::MAX);
    assert_eq!((result, fired), (Ok(()), None), "the path works when nothing fails");
    let before = Census::take();
    for nth in 1.. {
        let (result, fired, silent) = walk(nth);
        Census::take().assert_same_as(&before, &format!("after call {nth} ({fired:?}) failed"));
        match (fired, result) {
            (None, result) => {
                assert_eq!(result, Ok(()), "no call failed, but the path did");
                return nth - 1;
            }
            (Some(_), Ok(())) if silent => {}
            (Some(call), result) => {
                let Err(Error::Failed { cause, .. }) = &result else {
                    panic!("call {nth} (`{call}`) failed, and the path ended in {result:?}");
                };
                assert_eq!(cause, &BackendError::Os(os::Error::Call { call, errno: INJECTED }), "call {nth}");
            }
        }
    }
    unreachable!("a path ends")
}

/// What is left after work that runs late has had its chance.
fn drained(backend: &Backend) -> usize {
    let mut left = backend.collect();
    // Each look lets a deferred stream run one piece; what is refused for good never goes down.
    for _ in 0..10_000 {
        if left == 0 {
            break;
        }
        left = backend.collect();
    }
    left
}
