//! Room in memory: how much a command may take, and whether a failure was for lack of it.

use std::fmt;

use anyhow::{Context, Result};
use wholemem_hal::{BackendError, Device};
use wholemem_os::Errno;

use crate::size::Rough;

/// There is less memory than would be filled. Filling it all the same would have some process killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shortage {
    /// The bytes that were to be filled.
    pub wanted: usize,
    /// The bytes that are available.
    pub available: usize,
}

impl std::error::Error for Shortage {}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (wanted, available) = (Rough(self.wanted), Rough(self.available));
        write!(f, "cannot fill {wanted} of memory: {available} are available")
    }
}

/// Below this, a look would cost more than the memory, and disturb what is measured.
const WORTH_A_LOOK: usize = 64 << 20;

/// Looks that `len` bytes of a device can be filled now.
///
/// # Errors
/// [`Shortage`], or why that cannot be known.
pub fn ensure_room(device: &Device, len: usize) -> Result<()> {
    if len < WORTH_A_LOOK {
        return Ok(());
    }
    let available = device.available()?;
    if len > available { Err(Shortage { wanted: len, available }.into()) } else { Ok(()) }
}

/// Whether this went wrong for lack of memory.
pub fn is_shortage(error: &anyhow::Error) -> bool {
    let said = |errno: Errno| [Errno::NOMEM, Errno::NOSPC].contains(&errno);
    error.chain().any(|error| {
        if let Some(cause) = error.downcast_ref::<BackendError>() {
            return match cause {
                BackendError::OutOfMemory { .. } => true,
                BackendError::Driver { code, .. } => code.name() == Some("CUDA_ERROR_OUT_OF_MEMORY"),
                BackendError::Os(wholemem_os::Error::Call { call: "fallocate", errno }) => said(*errno),
                _ => false,
            };
        }
        let raw = error.downcast_ref::<std::io::Error>().and_then(Errno::from_io_error);
        error.is::<Shortage>() || raw.is_some_and(said)
    })
}

/// The whole granules of a device's memory that hold `len` bytes.
///
/// # Errors
/// What the backend said; that there are not so many addresses.
pub fn whole_granules(device: &Device, len: usize) -> Result<usize> {
    let granule = device.granularity()?.minimum;
    granule.round_up(len).with_context(|| format!("{} are more than there are addresses", Rough(len)))
}

#[cfg(test)]
mod tests {
    use wholemem_hal::{Attempt, Backend, Error, HostConfig};

    use super::*;

    #[test]
    fn more_than_there_is_is_refused_and_known_as_a_shortage() {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        ensure_room(&device, 1).unwrap();
        let error = ensure_room(&device, usize::MAX).unwrap_err();
        assert_eq!(error.downcast_ref::<Shortage>().unwrap().wanted, usize::MAX);
        assert!(is_shortage(&error));
        let shortage = Shortage { wanted: 3 << 30, available: 1 << 20 };
        assert_eq!(shortage.to_string(), "cannot fill 3 GiB of memory: 1 MiB are available");
    }

    #[test]
    fn a_shortage_is_known_wherever_it_shows() {
        let failed =
            |cause| anyhow::Error::from(Error::Failed { attempt: Attempt::Inspect, cause }).context("alloc");
        let call = |call, errno| BackendError::Os(wholemem_os::Error::Call { call, errno });
        assert!(is_shortage(&failed(BackendError::OutOfMemory { available: 0 })));
        assert!(is_shortage(&failed(call("fallocate", Errno::NOSPC))));
        assert!(!is_shortage(&failed(call("fallocate", Errno::PERM))));
        assert!(!is_shortage(&failed(call("mmap", Errno::NOMEM))), "too many maps");
        assert!(is_shortage(&std::io::Error::from(Errno::NOSPC).into()));
        assert!(!is_shortage(&std::io::Error::from(Errno::MFILE).into()));
    }
}
