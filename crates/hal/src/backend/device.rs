//! A device of an open backend.
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

    /// The backend of the device.
    #[must_use]
    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    /// The device number.
    #[must_use]
    pub fn id(&self) -> DeviceId {
        self.id
    }

    /// The name of the device in error messages.
    #[must_use]
    pub fn label(&self) -> DeviceLabel {
        DeviceLabel { backend: self.backend.kind(), id: self.id }
    }

    /// The properties of the device that were read when the backend was opened.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.backend.devices()[self.id.0 as usize]
    }

    /// The granularity of memory that [`Device::allocate`] creates.
    ///
    /// # Errors
    /// [`Error::Failed`] if the backend cannot report it.
    pub fn granularity(&self) -> Result<Granularity> {
        self.backend.granularity(&AllocationSpec::new(self, 1))
    }

    /// The free memory of the device in bytes. Other processes that use the device change it.
    ///
    /// # Errors
    /// [`Error::Failed`] if the backend cannot report it.
    pub fn available(&self) -> Result<usize> {
        self.backend.check_fork(|| Attempt::Inspect)?;
        // SAFETY: the device exists, and the process is not a forked child.
        unsafe { self.backend.memory().available(self.id) }
            .map_err(|cause| self.backend.to_error(self.id, Attempt::Inspect, cause))
    }

    pub(crate) fn unsupported(&self, capability: Capability, reason: &'static str) -> Error {
        Error::Unsupported { capability, device: self.label(), reason }
    }
}

impl AllocationSpec {
    /// Describes memory of the device that is shared as a file descriptor.
    #[must_use]
    pub fn new(device: &Device, len: usize) -> Self {
        Self { device: device.id(), len, handle: HandleKind::Fd, rdma: false, node: None }
    }
}
