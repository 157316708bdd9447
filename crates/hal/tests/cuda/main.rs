//! Tests of the CUDA backend: on a real GPU if there is one, and on the fake driver everywhere.

#![allow(unsafe_code, reason = "a kernel launch is unsafe")]
#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

mod broken_drivers;
mod failing;
mod fake;
mod gpu;

use wholemem_testkit::{conformance, cuda};

conformance!(suite, cuda::backend);
