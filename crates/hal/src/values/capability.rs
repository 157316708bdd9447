//! Names of what not every device can do.

use std::fmt;

/// Something that not every device can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Capability {
    /// Memory can be created, mapped, written and read.
    Create,
    /// Memory goes to another process as a file descriptor.
    ShareFd,
    /// A file descriptor can be handed out that allows reading only.
    ShareReadOnly,
    /// A map can refuse writes.
    ReadOnlyMap,
    /// New memory holds no bytes of earlier owners.
    ZeroedMemory,
    /// Addresses can be chosen, so that several processes have the same memory at the same place.
    FixedAddress,
    /// Pages can be entered ahead of their first touch.
    Populate,
    /// Memory can be tied to a NUMA node of the host.
    HostNuma,
    /// An event of one process can be waited for in another.
    SharedEvent,
    /// The time between two events can be measured.
    Timing,
    /// Work can be captured once and launched many times.
    Graph,
    /// Kernels can be loaded and launched.
    Kernels,
    /// Several devices can be written through one address.
    Multicast,
    /// The allocation behind a foreign address can be found.
    Retain,
    /// Memory goes between machines of one NVLink fabric.
    Fabric,
    /// Memory goes to another process through CUDA's older handles.
    CudaIpc,
    /// A mapped range can be handed to a network card.
    DmaBuf,
    /// Memory can be created for network cards to read and write.
    Rdma,
}

impl Capability {
    /// Every capability there is, the plainest first.
    pub const ALL: [Self; 18] = [
        Self::Create,
        Self::ShareFd,
        Self::ShareReadOnly,
        Self::ReadOnlyMap,
        Self::ZeroedMemory,
        Self::FixedAddress,
        Self::Populate,
        Self::HostNuma,
        Self::SharedEvent,
        Self::Timing,
        Self::Graph,
        Self::Kernels,
        Self::Multicast,
        Self::Retain,
        Self::Fabric,
        Self::CudaIpc,
        Self::DmaBuf,
        Self::Rdma,
    ];

    /// Its name for programs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::ShareFd => "share-fd",
            Self::ShareReadOnly => "share-read-only",
            Self::ReadOnlyMap => "read-only-map",
            Self::ZeroedMemory => "zeroed-memory",
            Self::FixedAddress => "fixed-address",
            Self::Populate => "populate",
            Self::HostNuma => "host-numa",
            Self::SharedEvent => "shared-event",
            Self::Timing => "timing",
            Self::Graph => "graph",
            Self::Kernels => "kernels",
            Self::Multicast => "multicast",
            Self::Retain => "retain",
            Self::Fabric => "fabric",
            Self::CudaIpc => "cuda-ipc",
            Self::DmaBuf => "dma-buf",
            Self::Rdma => "rdma",
        }
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
