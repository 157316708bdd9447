//! Test infrastructure of wholemem: conformance suites, backends with injected faults, and test ranks as processes.
//!
//! | module | contents |
//! |---|---|
//! | [`mod@conformance`] | one suite for all backends: required behaviour and required errors |
//! | [`corpus`] | replays the corpus of a fuzz target, with seeded random mutations |
//! | [`fault`] | wraps any backend and fails its nth call |
//! | [`deferred`] | host streams that run work later, interleaved in a seeded order |
//! | [`cuda`] | the real GPU, or a visible skip; installs the fake driver; kernels for tests |
//! | [`driver`] | controls the fake driver of this process: fails a call, counts its resources |
//! | [`sweep`] | runs a path once per call, with that call failing |
//! | [`ranks`] | runs a test as several processes, with a watchdog |
//! | [`cluster`] | runs a test as ranks on several nodes, which are network namespaces, with a watchdog |
//! | [`forked`] | runs part of a test in a forked child |
//! | [`stepper`] | traces the system calls of a process, and kills or stops it at the nth |
//! | [`memory_group`] | a cgroup with a memory limit, or the reason why it cannot be created |
//! | [`no_syscalls`] | checks that code makes no system call |
//! | [`census`] | lists the file descriptors and mappings of this process |
//!
//! No module sleeps to enforce an order or asserts an upper time limit.

use std::hash::{BuildHasher, Hasher};
use std::io::Write;

pub mod census;
pub mod cluster;
pub mod conformance;
pub mod corpus;
pub mod cuda;
pub mod deferred;
pub mod driver;
pub mod fault;
pub mod forked;
pub mod memory_group;
pub mod no_syscalls;
pub mod ranks;
pub mod stepper;
pub mod sweep;

pub use census::Census;
pub use cluster::{Cluster, ClusterRank};
pub use cuda::FakeCuda;
pub use deferred::Deferred;
pub use driver::FakeDriver;
pub use fault::Fault;
pub use forked::in_forked_child;
pub use memory_group::MemoryGroup;
pub use no_syscalls::without_system_calls;
pub use ranks::{Rank, Ranks};
pub use stepper::Stepper;

/// Returns true if `WHOLEMEM_EXHAUSTIVE` is set: tests then run complete sweeps instead of samples.
#[must_use]
pub fn exhaustive() -> bool {
    std::env::var_os("WHOLEMEM_EXHAUSTIVE").is_some_and(|value| value != "0")
}

/// Returns a random seed for this test run, and prints it, so that a failure can be repeated with `WHOLEMEM_SEED`.
///
/// # Panics
/// If `WHOLEMEM_SEED` is set but is not a number.
#[must_use]
pub fn seed() -> u64 {
    let fresh = || std::hash::RandomState::new().build_hasher().finish();
    let given = std::env::var("WHOLEMEM_SEED").ok();
    let seed = given.map_or_else(fresh, |text| text.parse().expect("`WHOLEMEM_SEED` is a number"));
    report(&format!("seed {seed} (repeat with WHOLEMEM_SEED={seed})"));
    seed
}

/// Reports that a test was skipped, and why. The message is written directly to the standard error, because the test
/// program does not show the captured output of passing tests.
pub fn skipped(reason: &str) {
    let thread = std::thread::current();
    let line = format!("SKIPPED {}: {reason}\n", thread.name().unwrap_or("a test"));
    // The message is written with one call, because other tests print concurrently. An error of the write is ignored,
    // because it cannot be reported anywhere else.
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Reports that a test was skipped because this machine does not allow something that it needs.
///
/// # Panics
/// If `CI` is `true`: where all tests must run, a skipped test is a failure.
pub fn skipped_unless_ci(reason: &str) {
    let is_ci = std::env::var("CI").is_ok_and(|value| value == "true");
    assert!(!is_ci, "cannot run this test, and `CI` is `true`: {reason}");
    skipped(reason);
}

/// Prints a message that belongs to the result of a test.
#[expect(clippy::print_stderr, reason = "messages of a test belong on its standard error")]
pub fn report(text: &str) {
    eprintln!("{text}");
}

/// Compiles and runs the examples of the README as doctests of this crate, which depends on all libraries.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
