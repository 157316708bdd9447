//! The driver's answers as results.

use super::bindings::CUresult;
use crate::{Cause, DriverCode};

impl Cause {
    /// The cause in one line with what to do about it, for where there is no error to ask for its hint.
    pub(super) fn explained(&self) -> String {
        let hint = match self {
            Self::Driver { code, .. } => code.hint(),
            _ => None,
        };
        hint.map_or_else(|| self.to_string(), |hint| format!("{self}: {hint}"))
    }
}

impl CUresult {
    /// An error naming the call, unless it succeeded.
    pub(super) fn ok(self, call: &'static str) -> Result<(), Cause> {
        match self {
            Self::CUDA_SUCCESS => Ok(()),
            CUresult(code) => Err(Cause::Driver { call, code: DriverCode(code) }),
        }
    }

    /// Whether what was asked about is over: `NOT_READY` is no error.
    pub(super) fn is_over(self, call: &'static str) -> Result<bool, Cause> {
        match self {
            Self::CUDA_ERROR_NOT_READY => Ok(false),
            answer => answer.ok(call).map(|()| true),
        }
    }
}

/// An argument that the driver's type for it cannot hold, answered as the driver answers bad values.
pub(super) fn invalid_value(call: &'static str) -> Cause {
    Cause::Driver { call, code: DriverCode(CUresult::CUDA_ERROR_INVALID_VALUE.0) }
}

/// A call that succeeded with a result that its documentation excludes, such as a negative count.
pub(super) fn implausible(call: &'static str) -> Cause {
    Cause::Driver { call, code: DriverCode(CUresult::CUDA_ERROR_UNKNOWN.0) }
}

/// Gives something back in the middle of a call, where nobody is left who could try again later: asks twice, and then
/// leaks it.
pub(super) fn give_back(call: &'static str, give: impl Fn() -> CUresult) {
    if give() != CUresult::CUDA_SUCCESS
        && let Err(cause) = give().ok(call)
    {
        tracing::warn!(%cause, "leaking what the driver refused twice to take back");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_of_success_is_no_error() {
        assert_eq!(CUresult(0).ok("cuInit"), Ok(()));
        let refused = Cause::Driver { call: "cuInit", code: DriverCode(987) };
        assert_eq!(CUresult(987).ok("cuInit"), Err(refused.clone()));
        assert_eq!(CUresult::CUDA_ERROR_NOT_READY.is_over("cuEventQuery"), Ok(false));
        assert_eq!(CUresult(987).is_over("cuInit"), Err(refused));
    }
}
