//! A device of an open backend: where memory is and work runs.
//!
//! The methods that create memory and streams, and those that try capabilities, are in the modules of what they create
//! and try.

use super::Backend;
use crate::{
    AllocationSpec, Attempt, Capability, DeviceId, DeviceInfo, DeviceLabel, Error, Granularity, HandleKind,
    Result,
};

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

    /// The number of bytes of its memory that are free. Other processes that use the device change it.
    ///
    /// # Errors
    /// [`Error::Failed`] when the backend cannot tell.
    pub fn available(&self) -> Result<usize> {
        self.backend.check_fork(|| Attempt::Inspect)?;
        // SAFETY: the device exists, and this is no forked child.
        unsafe { self.backend.memory().available(self.id) }
            .map_err(|cause| self.backend.refused(self.id, Attempt::Inspect, cause))
    }

    pub(crate) fn unsupported(&self, capability: Capability, reason: &'static str) -> Error {
        Error::Unsupported { capability, device: self.label(), reason }
    }
}

impl AllocationSpec {
    /// Plain memory of a device, shared as a file descriptor.
    #[must_use]
    pub fn new(device: &Device, len: usize) -> Self {
        Self { device: device.id(), len, handle: HandleKind::Fd, rdma: false, node: None }
    }
}
