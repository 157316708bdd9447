//! Fault sweeps: run a code path once for each call that it makes, with that call failing, until no call is left.
//!
//! After each run the error must be exactly the injected one, the backend must have no unreleased resources, and the
//! process must hold the same kernel resources as before. Run it in a separate process ([`crate::ranks`]).

use std::time::Duration;

use wholemem_hal::{Backend, BackendError, DriverCode, Error, Result};
use wholemem_os as os;

use crate::census::Census;
use crate::driver::{self, FakeDriver};
use crate::fault::{Fault, INJECTED};

/// Raw backend calls that are retried after a failure, so that the failure is not returned to the caller: calls that release
/// resources, and queries for finished work.
const RETRIED_RAW_CALLS: [&str; 9] = [
    "release",
    "free",
    "unmap",
    "unpin",
    "destroy_stream",
    "destroy_event",
    "destroy_graph",
    "unload_module",
    // Queries whether an event after work in flight has completed.
    "is_done",
];

/// Raw calls that create and record the events after work in flight, which deferred streams need. Their failure is not
/// returned to the caller either.
const RETRIED_FENCE_CALLS: [&str; 2] = ["create_event", "record"];

/// System calls that release resources, whose failure is not returned to the caller. `mmap` is one of them, because it
/// can replace a mapping to unmap it.
const RETRIED_SYSTEM_CALLS: [&str; 2] = ["munmap", "mmap"];

/// CUDA driver functions whose failure is not returned to the caller: they release resources, query for finished work,
/// or make a context current for that.
const RETRIED_DRIVER_CALLS: [&str; 17] = [
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

/// The number of consecutive runs without an nth call after which a sweep ends. Work is asynchronous, so the number of
/// calls differs slightly between runs.
const MAX_SHORT_RUNS: u64 = 8;

/// Runs `path` once for each call that it makes to the fake CUDA driver, with that call failing, and returns the number
/// of calls.
///
/// # Panics
/// If a run ends in anything but the injected error, or leaks a resource.
pub fn driver_calls(backend: &Backend, driver: &FakeDriver, path: impl Fn(&Backend) -> Result<()>) -> u64 {
    // The path runs twice before the resources are first counted: the first run initializes state that lives until the
    // process exits.
    for _ in 0..2 {
        assert_eq!(path(backend), Ok(()), "the path must succeed without faults");
        wait_until_drained(backend, "after no call failed");
    }
    let (before, held) = (Census::take(), driver.resources());
    let (mut longest, mut nth) = (0, 0);
    while nth < longest + MAX_SHORT_RUNS {
        nth += 1;
        driver.arm(nth);
        let result = path(backend);
        let fired = driver.fired();
        driver.arm(0);
        let when = format!("after call {nth} ({fired:?}) failed");
        wait_until_drained(backend, &when);
        assert_eq!(driver.resources(), held, "{when}, ending in {result:?}");
        Census::take().assert_same_as(&before, &when);
        let Some(call) = fired else {
            assert_eq!(result, Ok(()), "no call failed, but the path did");
            continue;
        };
        longest = nth;
        match &result {
            Ok(()) => assert!(RETRIED_DRIVER_CALLS.contains(&call), "{when}, and the path returned no error"),
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

/// The time limit for asynchronous work. It is far above the time that any work takes.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(60);

/// Waits until asynchronous work has run and its operands are released.
fn wait_until_drained(backend: &Backend, when: &str) {
    let deadline = os::Deadline::after(DRAIN_TIMEOUT);
    while backend.collect() > 0 {
        assert!(!deadline.has_passed(), "{when}, and a resource was never released");
        std::thread::yield_now();
    }
}

/// Runs `path` once for each raw call that it makes to the backend, with that call failing, and returns the number of
/// calls.
///
/// # Panics
/// If a run ends in anything but the injected error, or leaks a resource.
pub fn raw_calls(
    backend: &Backend,
    fault: &Fault,
    inline: bool,
    path: impl Fn(&Backend) -> Result<()>,
) -> u64 {
    let is_retried =
        |call: &str| RETRIED_RAW_CALLS.contains(&call) || !inline && RETRIED_FENCE_CALLS.contains(&call);
    sweep(|nth| {
        fault.arm(nth);
        let result = path(backend);
        let fired = fault.fired();
        fault.arm(0);
        assert_eq!(unreleased(backend), 0, "raw call {nth} ({fired:?}) left an unreleased resource");
        (result, fired, fired.is_some_and(is_retried))
    })
}

/// Runs `open` and `path` once for each system call that they make, with that call failing, and returns the number of
/// calls.
///
/// # Panics
/// If a run ends in anything but the injected error, or leaks a resource.
pub fn system_calls(open: impl Fn() -> Result<Backend>, path: impl Fn(&Backend) -> Result<()>) -> u64 {
    sweep(|nth| {
        let armed = os::fault::arm(nth, INJECTED);
        let opened = open();
        let result = opened.as_ref().map_err(Clone::clone).and_then(&path);
        let fired = armed.fired();
        drop(armed);
        if let Ok(backend) = &opened {
            assert_eq!(unreleased(backend), 0, "system call {nth} ({fired:?}) left an unreleased resource");
        }
        (result, fired, fired.is_some_and(|call| RETRIED_SYSTEM_CALLS.contains(&call)))
    })
}

fn sweep(mut run: impl FnMut(u64) -> (Result<()>, Option<&'static str>, bool)) -> u64 {
    // The path runs once before the resources are first counted: this run initializes state that lives until the
    // process exits.
    let (result, fired, _) = run(u64::MAX);
    assert_eq!((result, fired), (Ok(()), None), "the path must succeed without faults");
    let before = Census::take();
    for nth in 1.. {
        let (result, fired, is_retried) = run(nth);
        Census::take().assert_same_as(&before, &format!("after call {nth} ({fired:?}) failed"));
        match (fired, result) {
            (None, result) => {
                assert_eq!(result, Ok(()), "no call failed, but the path did");
                return nth - 1;
            }
            (Some(_), Ok(())) if is_retried => {}
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

/// Returns the number of unreleased resources, after deferred work had the chance to run.
fn unreleased(backend: &Backend) -> usize {
    let mut left = backend.collect();
    // Each call of `collect` lets a deferred stream run one operation. The number of calls is limited, because a
    // resource whose release always fails is never released.
    for _ in 0..10_000 {
        if left == 0 {
            break;
        }
        left = backend.collect();
    }
    left
}
