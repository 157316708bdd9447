//! The GPU in tests: the real one where there is one, the fake driver where there is none, and kernels for both.

use wholemem_hal::{Backend, BackendKind};

/// The kernels of `kernels/testing.cu`.
pub const TESTING_PTX: &str = include_str!("../../../kernels/ptx/testing.ptx");

/// The CUDA backend, or a visible skip. With `WHOLEMEM_REQUIRE_CUDA=1` a skip is a failure.
///
/// # Panics
/// When CUDA is required and is not there.
#[must_use]
pub fn backend() -> Option<Backend> {
    match Backend::open(BackendKind::Cuda) {
        Ok(backend) => Some(backend),
        Err(error) => {
            let required = std::env::var_os("WHOLEMEM_REQUIRE_CUDA").is_some_and(|value| value != "0");
            assert!(!required, "CUDA is required here: {error}");
            crate::skipped(&error.to_string());
            None
        }
    }
}
