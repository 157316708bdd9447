//! Host kernels that panic on streams that run late: they have run, and the work of others keeps its memory.

#![allow(unsafe_code, reason = "a kernel launch is unsafe")]

use std::panic::{AssertUnwindSafe, catch_unwind};

use wholemem_hal::{Args, HostConfig, KernelImage, LaunchShape, Module, Rights};
use wholemem_os::Deadline;
use wholemem_testkit::{Deferred, Ranks, test_name};

unsafe fn bad(_: &LaunchShape, _: &Args) {
    std::panic::panic_any("as asked");
}

const BAD: KernelImage = KernelImage { ptx: None, host: &[("bad", bad)] };

/// Whether it panicked.
fn panics<T>(run: impl FnOnce() -> T) -> bool {
    catch_unwind(AssertUnwindSafe(run)).is_err()
}

#[test]
fn a_kernel_that_panics_late_has_run() {
    let device = Deferred::backend(HostConfig::default(), 1).unwrap().device(0).unwrap();
    let stream = device.stream().unwrap();
    // SAFETY: the kernel takes nothing and touches nothing.
    let bad = unsafe { Module::load(&device, &BAD) }.unwrap().function("bad").unwrap();
    // SAFETY: the kernel takes no arguments and touches nothing before it panics.
    unsafe { stream.launch(&bad, &LaunchShape::line(1, 1), &Args::new(), &[]) }.unwrap();
    assert!(panics(|| stream.synchronize(Deadline::NEVER)));
    assert_eq!(stream.synchronize(Deadline::NEVER), Ok(()));
}

#[test]
fn a_kernel_that_panics_during_a_drop_takes_no_memory_from_the_work_of_others() {
    // Broken, this is a store into memory that is gone, so it gets a process of its own to die in.
    Ranks::of(1).run(test_name!(), |_| {
        for seed in 0..16 {
            let backend = Deferred::backend(HostConfig::default(), seed).unwrap();
            let device = backend.device(0).unwrap();
            let bomb = device.stream().unwrap();
            // SAFETY: the kernel takes nothing and touches nothing.
            let bad = unsafe { Module::load(&device, &BAD) }.unwrap().function("bad").unwrap();
            for _ in 0..8 {
                let stream = device.stream().unwrap();
                let map = device.allocate(64 << 10).unwrap().map(Rights::ReadWrite).unwrap();
                (0..8).for_each(|value| stream.fill(&map.all(), value).unwrap());
            }
            // SAFETY: the kernel takes no arguments and touches nothing before it panics.
            unsafe { bomb.launch(&bad, &LaunchShape::line(1, 1), &Args::new(), &[]) }.unwrap();
            let looks: Vec<_> = (0..200).map(|_| panics(|| backend.collect())).collect();
            assert_eq!(looks.iter().filter(|&&panicked| panicked).count(), 1, "seed {seed}");
            assert_eq!(bomb.synchronize(Deadline::NEVER), Ok(()));
        }
    });
}
