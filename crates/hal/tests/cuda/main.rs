//! The CUDA backend: on the real GPU where there is one, and over a driver without one everywhere.

#![allow(unsafe_code, reason = "a kernel launch is unsafe")]
#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

mod failing;
mod fake;
mod gpu;
mod strange;

use wholemem_testkit::{conformance, cuda};

conformance!(suite, cuda::backend);
