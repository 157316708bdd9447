//! The properties of memory to create.

use super::{DeviceId, HandleKind};

/// The properties of memory to create.
///
/// ```
/// use wholemem_hal::{Allocation, AllocationSpec, Backend, HostConfig};
///
/// let device = Backend::host(HostConfig::default())?.device(0)?;
/// let spec = AllocationSpec { node: Some(0), ..AllocationSpec::new(&device, 1 << 20) };
/// let memory = Allocation::create(device.backend(), &spec)?;
/// assert_eq!(memory.len(), 1 << 20);
/// # Ok::<(), wholemem_hal::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[doc(alias = "CUmemAllocationProp")]
pub struct AllocationSpec {
    /// The device on which to create the memory.
    pub device: DeviceId,
    /// The length of the memory in bytes, a multiple of the granule.
    pub len: usize,
    /// The kind of handle that will share the memory.
    pub handle: HandleKind,
    /// True if network cards will access the memory directly (GPUDirect RDMA).
    pub rdma: bool,
    /// A NUMA node whose host memory is used instead of the device's memory. On the host backend, this node overrides
    /// that of the device.
    pub node: Option<u32>,
}
