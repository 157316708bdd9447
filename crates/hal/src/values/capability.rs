//! Names of device capabilities that not every device has.

use std::fmt;

/// A device capability that not every device has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Capability {
    /// Memory can be created, mapped, written and read.
    Create,
    /// Memory can be shared with another process as a file descriptor.
    ShareFd,
    /// Memory can be exported as a read-only file descriptor.
    ShareReadOnly,
    /// A mapping of memory for a device can be read-only.
    ReadOnlyMap,
    /// New memory of the device is zeroed.
    ZeroedMemory,
    /// The caller can choose the address of a reservation, so that several processes map memory at the same address.
    FixedAddress,
    /// Page table entries can be created before the first access.
    Populate,
    /// Memory can be bound to a NUMA node of the host.
    HostNuma,
    /// A process can wait for an event of another process.
    SharedEvent,
    /// The time between two events can be measured.
    Timing,
    /// Work can be captured once and launched many times.
    Graph,
    /// Kernels can be loaded and launched.
    Kernels,
    /// One store can write to several devices (NVLink multicast).
    Multicast,
    /// The allocation that contains an address can be looked up (`cuMemRetainAllocationHandle`).
    Retain,
    /// Memory can be shared between nodes of one NVLink fabric.
    Fabric,
    /// Memory can be shared with another process as a CUDA IPC handle.
    CudaIpc,
    /// A mapped range can be exported to a network card as a dma-buf.
    DmaBuf,
    /// Memory can be created for GPUDirect RDMA by network cards.
    Rdma,
}

impl Capability {
    /// All capabilities; the ones that every device needs come first.
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

    /// Returns the name of the capability in machine-readable output.
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
