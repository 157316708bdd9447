//! A device of an open backend (CUDA or host).
//!
//! Methods that create memory and streams and that test capabilities are defined in the modules of those types.

use super::Backend;
use crate::{
    AllocationSpec, Attempt, Capability, DeviceId, DeviceInfo, DeviceLabel, Error, Granularity, HandleKind,
    Result,
};

/// A device of a backend, on which memory is allocated and work runs.
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

    /// Returns the backend of the device.
    #[must_use]
    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    /// Returns the number of the device on its backend.
    #[must_use]
    pub fn id(&self) -> DeviceId {
        self.id
    }

    /// Returns the name of the device in error messages, such as `host:0`.
    #[must_use]
    pub fn label(&self) -> DeviceLabel {
        DeviceLabel { backend: self.backend.kind(), id: self.id }
    }

    /// Returns the properties of the device, which were read when the backend was opened.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.backend.devices()[self.id.0 as usize]
    }

    /// Returns the granularity of memory that [`Device::allocate`] creates.
    ///
    /// # Errors
    /// [`Error::Failed`] if the backend cannot report it.
    pub fn granularity(&self) -> Result<Granularity> {
        self.backend.granularity(&AllocationSpec::new(self, 1))
    }

    /// Returns the free memory of the device in bytes. It changes when any process allocates or frees memory of the
    /// device.
    ///
    /// # Errors
    /// [`Error::Failed`] if the backend cannot report it.
    pub fn available(&self) -> Result<usize> {
        self.backend.check_fork(|| Attempt::Inspect)?;
        // SAFETY: the device exists on this backend, and the process is not a forked child.
        unsafe { self.backend.memory().available(self.id) }
            .map_err(|cause| self.backend.to_error(self.id, Attempt::Inspect, cause))
    }

    pub(crate) fn unsupported(&self, capability: Capability, reason: &'static str) -> Error {
        Error::Unsupported { capability, device: self.label(), reason }
    }
}

impl AllocationSpec {
    /// Describes `len` bytes of memory on `device` that are shared as a file descriptor.
    #[must_use]
    pub fn new(device: &Device, len: usize) -> Self {
        Self { device: device.id(), len, handle: HandleKind::Fd, rdma: false, node: None }
    }
}
