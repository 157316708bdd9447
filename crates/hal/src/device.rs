//! Devices: where memory lives and work runs.

use std::fmt;
use std::str::FromStr;

use crate::backend::Backend;
use crate::capability::prove_peer;
use crate::{
    Allocation, AllocationSpec, Attempt, Capability, Error, Granularity, HandleKind, Proof, Result, Rights,
    Stream,
};

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
    /// Every backend there is, best first: the order in which [`Backend::auto`] looks for one.
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

/// One device of a backend.
///
/// ```
/// use wholemem_hal::{Backend, HostConfig};
///
/// let backend = Backend::host(HostConfig::virtual_devices(4))?;
/// let device = backend.device(3)?;
/// assert_eq!(device.label().to_string(), "host:3");
/// # Ok::<(), wholemem_hal::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Device {
    backend: Backend,
    id: DeviceId,
}

impl Device {
    pub(crate) fn new(backend: Backend, id: DeviceId) -> Self {
        Self { backend, id }
    }

    /// The backend it belongs to.
    #[must_use]
    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    /// Its number.
    #[must_use]
    pub fn id(&self) -> DeviceId {
        self.id
    }

    /// Its name in errors.
    #[must_use]
    pub fn label(&self) -> DeviceLabel {
        DeviceLabel { backend: self.backend.kind(), id: self.id }
    }

    /// What is known of it.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.backend.devices()[self.id.0 as usize]
    }

    /// The granules of its plain memory.
    ///
    /// # Errors
    /// [`Error::Failed`] when the backend cannot tell.
    pub fn granularity(&self) -> Result<Granularity> {
        self.backend.granularity(&AllocationSpec::new(self, 1))
    }

    /// How much of its memory nobody has taken. It changes with every other user of the device.
    ///
    /// # Errors
    /// [`Error::Failed`] when the backend cannot tell.
    pub fn available(&self) -> Result<usize> {
        self.backend.check_fork(|| Attempt::Inspect)?;
        // SAFETY: the device exists, and this is no forked child.
        unsafe { self.backend.memory().available(self.id) }
            .map_err(|cause| self.backend.refused(self.id, Attempt::Inspect, cause))
    }

    /// The handle that reaches farthest of those that work here, each tried, and what came of trying the farther ones.
    ///
    /// ```
    /// use wholemem_hal::{AllocationSpec, Allocation, Backend, HandleKind, HostConfig};
    ///
    /// let device = Backend::host(HostConfig::default())?.device(0)?;
    /// let (handle, refused) = device.farthest_handle();
    /// assert_eq!((handle, refused.len()), (HandleKind::Fd, 1)); // no fabric here, and the reason is kept
    /// let spec = AllocationSpec { handle, ..AllocationSpec::new(&device, 1 << 20) };
    /// let memory = Allocation::create(device.backend(), &spec)?;
    /// # Ok::<(), wholemem_hal::Error>(())
    /// ```
    #[must_use]
    pub fn farthest_handle(&self) -> (HandleKind, Vec<Proof>) {
        let kinds = [(HandleKind::Fabric, Capability::Fabric), (HandleKind::Fd, Capability::ShareFd)];
        let mut refused = Vec::new();
        for (kind, capability) in kinds {
            let proof = self.prove(capability);
            if proof.outcome.is_ok() {
                return (kind, refused);
            }
            refused.push(proof);
        }
        // What is left where allocations cannot be shared at all: buffers of the older kind.
        (HandleKind::CudaIpc, refused)
    }

    /// Creates `len` bytes of memory here, to be shared as a file descriptor.
    ///
    /// # Errors
    /// As [`Allocation::create`].
    pub fn allocate(&self, len: usize) -> Result<Allocation> {
        Allocation::create(&self.backend, &AllocationSpec::new(self, len))
    }

    /// Creates a stream that runs work here.
    ///
    /// # Errors
    /// As [`Stream::create`].
    pub fn stream(&self) -> Result<Stream> {
        Stream::create(self)
    }

    /// Finds out whether a capability works here, by doing it; asked again, remembers. What failed is tried again.
    ///
    /// ```
    /// use wholemem_hal::{Backend, Capability, HostConfig};
    ///
    /// let device = Backend::host(HostConfig::default())?.device(0)?;
    /// assert_eq!(device.prove(Capability::ShareFd).outcome, Ok(()));
    /// let why_not = device.prove(Capability::Fabric).outcome.unwrap_err();
    /// assert_eq!(why_not.to_string(), "host:0 has no fabric: host memory travels as a file descriptor");
    /// # Ok::<(), wholemem_hal::Error>(())
    /// ```
    #[must_use]
    pub fn prove(&self, capability: Capability) -> Proof {
        self.backend.proof(self, capability)
    }

    /// Finds out whether work of this device reaches memory of `peer`, by doing it.
    ///
    /// # Errors
    /// [`Error::WrongBackend`]; why it does not.
    pub fn reaches(&self, peer: &Device) -> Result<()> {
        if self.backend != peer.backend {
            return Err(Error::WrongBackend {
                attempt: Attempt::Grant { device: self.id, rights: Rights::ReadWrite },
            });
        }
        prove_peer(self, peer)
    }

    pub(crate) fn unsupported(&self, capability: Capability, reason: &'static str) -> Error {
        Error::Unsupported { capability, device: self.label(), reason }
    }
}
