//! The result codes of the CUDA driver. Codes without a name are allowed, since a driver may be newer than the headers this crate
//! was built with.

use std::fmt;

use crate::bindings::{CUresult, RESULT_NAMES};

/// A result code of the CUDA driver. Every number is valid; codes in the headers that this crate was built with have names.
///
/// ```
/// use wholemem_hal::DriverCode;
///
/// assert_eq!(DriverCode(2).to_string(), "CUDA_ERROR_OUT_OF_MEMORY (2)");
/// assert_eq!(DriverCode(987).to_string(), "an unknown result code, 987");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[doc(alias = "CUresult")]
pub struct DriverCode(pub u32);

impl DriverCode {
    /// Returns the name of the result code in NVIDIA's headers, if it has one.
    #[must_use]
    pub fn name(self) -> Option<&'static str> {
        RESULT_NAMES.iter().find(|(code, _)| *code == self.0).map(|(_, name)| *name)
    }

    /// Returns a hint for the user about the result code, if there is a known remedy.
    pub(crate) fn hint(self) -> Option<&'static str> {
        Some(match CUresult(self.0) {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => "`nvidia-smi` lists the processes that use GPU memory",
            CUresult::CUDA_ERROR_NO_DEVICE | CUresult::CUDA_ERROR_INVALID_DEVICE => {
                "`CUDA_VISIBLE_DEVICES` may hide the GPU from this process"
            }
            CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
                "the kernel is newer than the driver; install driver 550 or newer"
            }
            CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU => "the GPU is older than compute capability 7.0",
            CUresult::CUDA_ERROR_NOT_PERMITTED => {
                "fabric handles need the IMEX service and its channel in `/dev/nvidia-caps-imex-channels`"
            }
            CUresult::CUDA_ERROR_MPS_CONNECTION_FAILED | CUresult::CUDA_ERROR_MPS_SERVER_NOT_READY => {
                "the MPS server named by `CUDA_MPS_PIPE_DIRECTORY` does not respond"
            }
            CUresult::CUDA_ERROR_NOT_INITIALIZED => {
                "CUDA cannot be used in a forked child; start a new process"
            }
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS | CUresult::CUDA_ERROR_LAUNCH_FAILED => {
                "a kernel failed and made its context unusable; start a new process"
            }
            _ => return None,
        })
    }
}

impl fmt::Display for DriverCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} ({})", self.0),
            None => write!(f, "an unknown result code, {}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_result_codes_have_names_and_unknown_ones_are_numbers() {
        assert_eq!(DriverCode(0).name(), Some("CUDA_SUCCESS"));
        assert_eq!(DriverCode(999).to_string(), "CUDA_ERROR_UNKNOWN (999)");
        assert_eq!(DriverCode(987).name(), None);
        assert_eq!(DriverCode(u32::MAX).to_string(), "an unknown result code, 4294967295");
    }
}
