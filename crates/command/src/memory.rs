//! Checks of the available memory, and detection of out-of-memory errors.

use std::fmt;

use anyhow::{Context, Result};
use wholemem_hal::{BackendError, Device};
use wholemem_os::Errno;

use crate::size::RoundedSize;

/// Less memory is available than the command would fill. Filling it could invoke the kernel's OOM killer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryShortage {
    /// The number of bytes that the command would fill.
    pub wanted: usize,
    /// The number of bytes of memory that are available.
    pub available: usize,
}

impl std::error::Error for MemoryShortage {}

impl fmt::Display for MemoryShortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (wanted, available) = (RoundedSize(self.wanted), RoundedSize(self.available));
        write!(f, "cannot fill {wanted} of memory: {available} are available")
    }
}

/// The minimum length for which the available memory is checked. For shorter lengths, the check would take longer than the
/// allocation and disturb measurements.
const MIN_CHECKED_LEN: usize = 64 << 20;

/// Returns an error unless `len` bytes of a device's memory are available.
///
/// # Errors
/// [`MemoryShortage`] if they are not, or the error of the query.
pub fn ensure_available(device: &Device, len: usize) -> Result<()> {
    if len < MIN_CHECKED_LEN {
        return Ok(());
    }
    let available = device.available()?;
    if len > available { Err(MemoryShortage { wanted: len, available }.into()) } else { Ok(()) }
}

/// Returns true if an error was caused by a lack of memory.
pub fn is_out_of_memory(error: &anyhow::Error) -> bool {
    let is_lack = |errno: Errno| [Errno::NOMEM, Errno::NOSPC].contains(&errno);
    error.chain().any(|error| {
        if let Some(cause) = error.downcast_ref::<BackendError>() {
            return match cause {
                BackendError::OutOfMemory { .. } => true,
                BackendError::Driver { code, .. } => code.name() == Some("CUDA_ERROR_OUT_OF_MEMORY"),
                BackendError::Os(wholemem_os::Error::Call { call: "fallocate", errno }) => is_lack(*errno),
                _ => false,
            };
        }
        let raw = error.downcast_ref::<std::io::Error>().and_then(Errno::from_io_error);
        error.is::<MemoryShortage>() || raw.is_some_and(is_lack)
    })
}

/// Rounds `len` up to a multiple of the device's granule, the unit in which memory is allocated.
///
/// # Errors
/// The backend's error, or an overflow of the address space.
pub fn whole_granules(device: &Device, len: usize) -> Result<usize> {
    let granule = device.granularity()?.minimum;
    granule.round_up(len).with_context(|| format!("{} exceed the address space", RoundedSize(len)))
}

#[cfg(test)]
mod tests {
    use wholemem_hal::{Attempt, Backend, Error, HostConfig};

    use super::*;

    #[test]
    fn a_length_above_the_available_memory_is_an_out_of_memory_error() {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        ensure_available(&device, 1).unwrap();
        let error = ensure_available(&device, usize::MAX).unwrap_err();
        assert_eq!(error.downcast_ref::<MemoryShortage>().unwrap().wanted, usize::MAX);
        assert!(is_out_of_memory(&error));
        let shortage = MemoryShortage { wanted: 3 << 30, available: 1 << 20 };
        assert_eq!(shortage.to_string(), "cannot fill 3 GiB of memory: 1 MiB are available");
    }

    #[test]
    fn out_of_memory_errors_of_all_layers_are_recognized() {
        let failed =
            |cause| anyhow::Error::from(Error::Failed { attempt: Attempt::Inspect, cause }).context("alloc");
        let call = |call, errno| BackendError::Os(wholemem_os::Error::Call { call, errno });
        assert!(is_out_of_memory(&failed(BackendError::OutOfMemory { available: 0 })));
        assert!(is_out_of_memory(&failed(call("fallocate", Errno::NOSPC))));
        assert!(!is_out_of_memory(&failed(call("fallocate", Errno::PERM))));
        assert!(
            !is_out_of_memory(&failed(call("mmap", Errno::NOMEM))),
            "ENOMEM of mmap means too many mappings"
        );
        assert!(is_out_of_memory(&std::io::Error::from(Errno::NOSPC).into()));
        assert!(!is_out_of_memory(&std::io::Error::from(Errno::MFILE).into()));
    }
}
