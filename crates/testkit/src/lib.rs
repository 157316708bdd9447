//! What wholemem's tests are made of: conformance suites, backends that misbehave on purpose, and ranks as processes.
//!
//! | room | what it holds |
//! |---|---|
//! | [`mod@conformance`] | one suite for all backends: what each must do, and what each must refuse |
//! | [`corpus`] | the corpora of fuzz targets, played and changed by a seeded dice |
//! | [`fault`] | any backend, with its nth call failing |
//! | [`deferred`] | host streams that run their work late, and in an order nobody should rely on |
//! | [`cuda`] | the real GPU, or a visible skip; the fake driver in its place; kernels for tests |
//! | [`driver`] | the fake driver of this process: failing a call of it, and asking what it holds |
//! | [`sweep`] | a path walked again and again, failing at each of its calls in turn |
//! | [`ranks`] | a test that runs as several processes, under a watchdog, leaving nothing behind |
//! | [`forked`] | a test that goes on in a forked child |
//! | [`stepper`] | a process walked from system call to system call, and killed or frozen at the nth |
//! | [`memory_group`] | a control group with a memory limit, real, or the reason why there is none |
//! | [`silent`] | code that is to make no system call |
//! | [`census`] | what this process holds of the kernel: file descriptors and maps |
//!
//! Nothing here sleeps to get an order, and nothing asserts an upper time.

use std::hash::{BuildHasher, Hasher};
use std::io::Write;

pub mod census;
pub mod conformance;
pub mod corpus;
pub mod cuda;
pub mod deferred;
pub mod driver;
pub mod fault;
pub mod forked;
pub mod memory_group;
pub mod ranks;
pub mod silent;
pub mod stepper;
pub mod sweep;

pub use census::Census;
pub use cuda::FakeCuda;
pub use deferred::Deferred;
pub use driver::FakeDriver;
pub use fault::Fault;
pub use forked::in_forked_child;
pub use memory_group::MemoryGroup;
pub use ranks::{Rank, Ranks};
pub use silent::without_system_calls;
pub use stepper::Stepper;

/// Whether the whole sweeps are asked for, instead of samples.
#[must_use]
pub fn exhaustive() -> bool {
    std::env::var_os("WHOLEMEM_EXHAUSTIVE").is_some_and(|value| value != "0")
}

/// A seed for this run, printed so that a failure can be repeated with `WHOLEMEM_SEED`.
///
/// # Panics
/// When `WHOLEMEM_SEED` is set and is no number.
#[must_use]
pub fn seed() -> u64 {
    let fresh = || std::hash::RandomState::new().build_hasher().finish();
    let given = std::env::var("WHOLEMEM_SEED").ok();
    let seed = given.map_or_else(fresh, |text| text.parse().expect("`WHOLEMEM_SEED` is a number"));
    report(&format!("seed {seed} (repeat with WHOLEMEM_SEED={seed})"));
    seed
}

/// Says that a test did not run here, and why, past the test program's capture: the test passes, and what a passing
/// test prints is not shown.
pub fn skipped(reason: &str) {
    let thread = std::thread::current();
    let line = format!("SKIPPED {}: {reason}\n", thread.name().unwrap_or("a test"));
    // In one piece, since other tests print meanwhile. Nothing is left to do if nobody hears it.
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Says something that belongs to the outcome of a test.
#[expect(clippy::print_stderr, reason = "what a test has to say belongs on its standard error")]
pub fn report(text: &str) {
    eprintln!("{text}");
}

/// The examples in the README, compiled and run with the others: here, where every library can be named.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
