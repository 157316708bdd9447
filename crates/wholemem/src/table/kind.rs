//! `Kind`: how ranks address a memory. `Location`: where its bytes are stored.

use std::fmt;

use wholemem_hal::Device;

use crate::Communicator;

/// How ranks see a memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// One range of addresses: a row's address is a multiplication.
    #[doc(alias = "WmmpMalloc")]
    Continuous,
    /// An address for each rank: a row's rank is looked up first. Nothing has to lie on a granule.
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

/// Where the bytes of a memory are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Location {
    /// In the memory of each rank's device.
    Device,
    /// In the memory of the machine, which the devices reach too.
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
