//! `Kind`: how ranks address a memory. `Location`: where its bytes are stored.

use std::fmt;

use wholemem_hal::Device;

use crate::Communicator;

/// How ranks address a memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// One range of addresses for all rows: the address of a row is computed by a multiplication.
    #[doc(alias = "WmmpMalloc")]
    Continuous,
    /// One range of addresses for each rank: the rank of a row is looked up first. A rank's rows need not end at a granule.
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

/// Where the bytes of a memory are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Location {
    /// In the memory of each rank's device.
    Device,
    /// In host memory, which the devices access too.
    Host,
}

impl Location {
    /// The device on which a rank allocates memory of this location.
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
