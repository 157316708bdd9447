//! What memory to create.

use super::{DeviceId, HandleKind};

/// What memory to create.
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
    /// Where it lives.
    pub device: DeviceId,
    /// How long it is: whole granules.
    pub len: usize,
    /// How it will be shared.
    pub handle: HandleKind,
    /// Whether a network card will read and write it directly.
    pub rdma: bool,
    /// The NUMA node whose host memory to use, instead of the device's own memory. On the host backend, instead of
    /// the node that the device stands for.
    pub node: Option<u32>,
}
