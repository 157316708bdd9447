//! Tests that host kernels which panic on deferred streams count as run, and that other work keeps its memory.

#![allow(unsafe_code, reason = "a kernel launch is unsafe")]

use std::panic::{AssertUnwindSafe, catch_unwind};

use wholemem_hal::{Args, HostConfig, KernelImage, LaunchShape, Module, Rights};
use wholemem_os::Deadline;
use wholemem_testkit::{Deferred, Ranks, test_name};

unsafe fn panicking_kernel(_: &LaunchShape, _: &Args) {
    std::panic::panic_any("intended by the test");
}

const BAD: KernelImage = KernelImage { ptx: None, host: &[("bad", panicking_kernel)] };

/// Returns whether `run` panics.
fn panics<T>(run: impl FnOnce() -> T) -> bool {
    catch_unwind(AssertUnwindSafe(run)).is_err()
}

#[test]
fn a_deferred_kernel_that_panics_counts_as_run() {
    let device = Deferred::backend(HostConfig::default(), 1).unwrap().device(0).unwrap();
    let stream = device.stream().unwrap();
    // SAFETY: the kernel `bad` has no parameters and accesses no memory.
    let bad = unsafe { Module::load(&device, &BAD) }.unwrap().function("bad").unwrap();
    // SAFETY: the kernel `bad` takes no arguments and accesses no memory before it panics.
    unsafe { stream.launch(&bad, &LaunchShape::linear(1, 1), &Args::new(), &[]) }.unwrap();
    assert!(panics(|| stream.synchronize(Deadline::NEVER)));
    assert_eq!(stream.synchronize(Deadline::NEVER), Ok(()));
}

#[test]
fn a_kernel_that_panics_during_a_drop_does_not_release_memory_of_other_work() {
    // A failure of this test would be a store to unmapped memory, so the test runs in a separate process.
    Ranks::of(1).run(test_name!(), |_| {
        for seed in 0..16 {
            let backend = Deferred::backend(HostConfig::default(), seed).unwrap();
            let device = backend.device(0).unwrap();
            let panicking = device.stream().unwrap();
            // SAFETY: the kernel `bad` has no parameters and accesses no memory.
            let bad = unsafe { Module::load(&device, &BAD) }.unwrap().function("bad").unwrap();
            for _ in 0..8 {
                let stream = device.stream().unwrap();
                let map = device.allocate(64 << 10).unwrap().map(Rights::ReadWrite).unwrap();
                (0..8).for_each(|value| stream.fill(&map.all(), value).unwrap());
            }
            // SAFETY: the kernel `bad` takes no arguments and accesses no memory before it panics.
            unsafe { panicking.launch(&bad, &LaunchShape::linear(1, 1), &Args::new(), &[]) }.unwrap();
            let outcomes: Vec<_> = (0..200).map(|_| panics(|| backend.collect())).collect();
            assert_eq!(outcomes.iter().filter(|&&panicked| panicked).count(), 1, "seed {seed}");
            assert_eq!(panicking.synchronize(Deadline::NEVER), Ok(()));
        }
    });
}
