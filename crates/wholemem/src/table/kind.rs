//! `Kind`, the way in which ranks address a shared memory, and `Location`, the memory in which its bytes are stored.

use std::fmt;

use wholemem_hal::Device;

use crate::Communicator;

/// The way in which ranks address the rows of a shared memory: in one range of addresses or in several.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// The memory has one range of addresses for all rows, so the address of a row is computed by a multiplication.
    #[doc(alias = "WmmpMalloc")]
    Continuous,
    /// The memory has one range of addresses for each rank, so the rank of a row is looked up first. A rank's rows need not end
    /// at a granule.
    #[doc(alias = "WcmmpMalloc")]
    Chunked,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Continuous => "continuous",
            Self::Chunked => "chunked",
        })
    }
}

/// The memory in which the bytes of a shared memory are stored: of devices or of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Location {
    /// The bytes are stored in the memory of each rank's device.
    Device,
    /// The bytes are stored in host memory, which the devices access too: those of a rank on the NUMA node of its GPU, if the
    /// kernel permits it.
    Host,
}

impl Location {
    /// Returns the device on which a rank allocates memory of this location.
    pub(crate) fn device(self, comm: &Communicator) -> &Device {
        match self {
            Self::Device => comm.device(),
            Self::Host => comm.host_device(),
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Device => "device",
            Self::Host => "host",
        })
    }
}
