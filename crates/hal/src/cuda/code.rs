//! What the driver answers: a number that may be newer than any list of ours.

use std::fmt;

use super::bindings::{CUresult, RESULT_NAMES};
use crate::Cause;

/// A result code of the CUDA driver. Any number is one; those that the pinned headers know have names.
///
/// ```
/// use wholemem_hal::DriverCode;
///
/// assert_eq!(DriverCode(2).to_string(), "CUDA_ERROR_OUT_OF_MEMORY (2)");
/// assert_eq!(DriverCode(987).to_string(), "a code of its own, 987");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[doc(alias = "CUresult")]
pub struct DriverCode(pub u32);

impl DriverCode {
    /// Its name in NVIDIA's headers, if it has one there.
    #[must_use]
    pub fn name(self) -> Option<&'static str> {
        RESULT_NAMES.iter().find(|(code, _)| *code == self.0).map(|(_, name)| *name)
    }

    /// What to do about it, where something can be done.
    pub(crate) fn hint(self) -> Option<&'static str> {
        Some(match CUresult(self.0) {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => "`nvidia-smi` shows who holds the GPU's memory",
            CUresult::CUDA_ERROR_NO_DEVICE | CUresult::CUDA_ERROR_INVALID_DEVICE => {
                "`CUDA_VISIBLE_DEVICES` may hide the GPU from this process"
            }
            CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
                "the kernel is newer than the driver; driver 550 or newer loads ours"
            }
            CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU => "the GPU is older than compute capability 7.0",
            CUresult::CUDA_ERROR_NOT_PERMITTED => {
                "fabric handles need the IMEX service and its channel in `/dev/nvidia-caps-imex-channels`"
            }
            CUresult::CUDA_ERROR_MPS_CONNECTION_FAILED | CUresult::CUDA_ERROR_MPS_SERVER_NOT_READY => {
                "the MPS server named by `CUDA_MPS_PIPE_DIRECTORY` does not answer"
            }
            CUresult::CUDA_ERROR_NOT_INITIALIZED => {
                "CUDA cannot be used in a forked child; start a new process"
            }
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS | CUresult::CUDA_ERROR_LAUNCH_FAILED => {
                "a kernel failed and took its context with it; start a new process"
            }
            _ => return None,
        })
    }
}

impl fmt::Display for DriverCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} ({})", self.0),
            None => write!(f, "a code of its own, {}", self.0),
        }
    }
}

impl Cause {
    /// The cause in one line with what to do about it, for where there is no error to ask for its hint.
    pub(super) fn explained(&self) -> String {
        match self {
            Self::Driver { code, .. } if code.hint().is_some() => {
                format!("{self}: {}", code.hint().unwrap_or_default())
            }
            cause => cause.to_string(),
        }
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
    fn known_codes_have_names_and_unknown_ones_are_numbers() {
        assert_eq!(DriverCode(0).name(), Some("CUDA_SUCCESS"));
        assert_eq!(DriverCode(999).to_string(), "CUDA_ERROR_UNKNOWN (999)");
        assert_eq!(DriverCode(987).name(), None);
        assert_eq!(DriverCode(u32::MAX).to_string(), "a code of its own, 4294967295");
    }

    #[test]
    fn an_answer_of_success_is_no_error() {
        assert_eq!(CUresult(0).ok("cuInit"), Ok(()));
        let refused = Cause::Driver { call: "cuInit", code: DriverCode(987) };
        assert_eq!(CUresult(987).ok("cuInit"), Err(refused.clone()));
        assert_eq!(CUresult::CUDA_ERROR_NOT_READY.is_over("cuEventQuery"), Ok(false));
        assert_eq!(CUresult(987).is_over("cuInit"), Err(refused));
    }
}
