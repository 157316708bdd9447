//! Conversion of the CUDA driver's result codes to `Result`.

use super::bindings::CUresult;
use crate::{BackendError, DriverCode};

impl BackendError {
    /// Returns the error and its hint in one line, for reasons that are plain text.
    pub(super) fn explained(&self) -> String {
        let hint = match self {
            Self::Driver { code, .. } => code.hint(),
            _ => None,
        };
        hint.map_or_else(|| self.to_string(), |hint| format!("{self}: {hint}"))
    }
}

impl CUresult {
    /// Returns an error that names the driver call, unless the result code is `CUDA_SUCCESS`.
    pub(super) fn ok(self, call: &'static str) -> Result<(), BackendError> {
        match self {
            Self::CUDA_SUCCESS => Ok(()),
            CUresult(code) => Err(BackendError::Driver { call, code: DriverCode(code) }),
        }
    }

    /// Returns whether the work that a driver call queried has finished; `NOT_READY` is `false`, not an error.
    pub(super) fn is_complete(self, call: &'static str) -> Result<bool, BackendError> {
        match self {
            Self::CUDA_ERROR_NOT_READY => Ok(false),
            code => code.ok(call).map(|()| true),
        }
    }
}

/// Returns the error for an argument that does not fit the type of the driver's parameter: the same as the driver's
/// own `INVALID_VALUE`.
pub(super) fn invalid_value(call: &'static str) -> BackendError {
    BackendError::Driver { call, code: DriverCode(CUresult::CUDA_ERROR_INVALID_VALUE.0) }
}

/// Returns the error for a driver call that succeeded with a result that its documentation excludes, such as a
/// negative count.
pub(super) fn implausible(call: &'static str) -> BackendError {
    BackendError::Driver { call, code: DriverCode(CUresult::CUDA_ERROR_UNKNOWN.0) }
}

/// Releases a resource of the driver in an error path that nothing can retry later: tries twice, then leaks the
/// resource.
pub(super) fn release_or_leak(call: &'static str, release: impl Fn() -> CUresult) {
    if release() != CUresult::CUDA_SUCCESS
        && let Err(cause) = release().ok(call)
    {
        tracing::warn!(%cause, "leaking a resource that the driver refused twice to release");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_success_and_not_ready_are_not_errors() {
        assert_eq!(CUresult(0).ok("cuInit"), Ok(()));
        let refused = BackendError::Driver { call: "cuInit", code: DriverCode(987) };
        assert_eq!(CUresult(987).ok("cuInit"), Err(refused.clone()));
        assert_eq!(CUresult::CUDA_ERROR_NOT_READY.is_complete("cuEventQuery"), Ok(false));
        assert_eq!(CUresult(987).is_complete("cuInit"), Err(refused));
    }
}
