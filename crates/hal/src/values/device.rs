//! Device values: backend kind, number, label, and the properties that are known without a call to the device.

use std::fmt;
use std::str::FromStr;

/// The kind of a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BackendKind {
    /// The backend for Linux shared memory.
    Host,
    /// The backend for NVIDIA GPUs, with CUDA's virtual memory management.
    Cuda,
}

impl BackendKind {
    /// All backend kinds, in the order in which [`Backend::auto`](crate::Backend::auto) tries them.
    pub const ALL: [Self; 2] = [Self::Cuda, Self::Host];
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Host => "host",
            Self::Cuda => "cuda",
        })
    }
}

impl FromStr for BackendKind {
    type Err = ();

    fn from_str(name: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|kind| kind.to_string() == name).ok_or(())
    }
}

/// The number of a device on its backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId(pub u32);

impl From<u32> for DeviceId {
    fn from(id: u32) -> Self {
        Self(id)
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// A device by backend and number, as error messages name it: `host:0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceLabel {
    /// The backend of the device.
    pub backend: BackendKind,
    /// The number of the device on that backend.
    pub id: DeviceId,
}

impl fmt::Display for DeviceLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.backend, self.id)
    }
}

/// Properties of a device that are known without a call to the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The number of the device on its backend.
    pub id: DeviceId,
    /// The name of the device, from the driver or from the host configuration.
    pub name: String,
    /// The total memory of the device in bytes.
    pub memory_len: usize,
    /// An identifier of the device that is the same in every process, whatever number the device has there.
    pub uuid: [u8; 16],
    /// The compute capability of a GPU times ten (90 for 9.0); zero for other devices.
    #[doc(alias = "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR")]
    pub compute: u32,
    /// The NUMA node of the host that is nearest to the device, or on which the device is; `None` if it is not known.
    #[doc(alias = "CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID")]
    pub numa_node: Option<u32>,
}
