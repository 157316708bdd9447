//! Devices as values: the kind of backend, number, label, and what is known without a call to the device.

use std::fmt;
use std::str::FromStr;

/// Which machinery moves the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BackendKind {
    /// Linux shared memory.
    Host,
    /// CUDA's virtual memory.
    Cuda,
}

impl BackendKind {
    /// Every backend there is, best first: the order in which [`Backend::auto`](crate::Backend::auto) looks for one.
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

/// A device by backend and number, as errors name it: `host:0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceLabel {
    /// Its backend.
    pub backend: BackendKind,
    /// Its number there.
    pub id: DeviceId,
}

impl fmt::Display for DeviceLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.backend, self.id)
    }
}

/// What is known of a device without trying anything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its number.
    pub id: DeviceId,
    /// What its maker, or its configuration, calls it.
    pub name: String,
    /// How much memory it has.
    pub memory_len: usize,
    /// The same in every process that sees this device, whatever number it has there.
    pub uuid: [u8; 16],
    /// What a GPU can compute, 90 for 9.0; zero for other devices.
    #[doc(alias = "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR")]
    pub compute: u32,
}
