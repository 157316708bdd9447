//! Memory that other code in this process allocated, such as tensors of a framework, and that streams use without a copy.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use super::{Addressable, Span};
use crate::raw::Address;
use crate::{Backend, Device, DeviceId, Rights};

struct ForeignMemory {
    backend: Backend,
    device: DeviceId,
    rights: Rights,
    /// The owner of the memory: dropping it frees the memory.
    _owner: Arc<dyn Any + Send + Sync>,
}

impl fmt::Debug for ForeignMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, rights, .. } = self;
        f.debug_struct("ForeignMemory")
            .field("device", device)
            .field("rights", rights)
            .finish_non_exhaustive()
    }
}

impl Addressable for ForeignMemory {
    fn backend(&self) -> &Backend {
        &self.backend
    }

    fn rights_of(&self, device: DeviceId) -> Rights {
        if device == self.device { self.rights } else { Rights::None }
    }
}

impl Span {
    /// Creates a span of memory that other code in this process allocated and that `device` can access. The span holds `owner`
    /// until the last work that uses the memory has run; any thread may then drop it.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use wholemem_hal::{Backend, HostConfig, Rights, Span};
    ///
    /// let device = Backend::host(HostConfig::default())?.device(0)?;
    /// let numbers: Arc<Vec<u8>> = Arc::new(vec![1, 2, 3]);
    /// let address = numbers.as_ptr().expose_provenance() as u64;
    ///
    /// // SAFETY: the vector has three bytes, which are not written, and lives as long as its owner.
    /// let span = unsafe { Span::foreign(&device, address, 3, Rights::Read, numbers) };
    /// let mut seen = [0; 3];
    /// device.stream()?.read(&span, &mut seen)?;
    /// assert_eq!(seen, [1, 2, 3]);
    /// # Ok::<(), wholemem_hal::Error>(())
    /// ```
    ///
    /// # Safety
    /// While `owner` lives, the device can access `len` bytes at `address` with `rights`. While work of a stream accesses them,
    /// no other code uses a `&` or `&mut` to them.
    #[must_use]
    pub unsafe fn foreign(
        device: &Device,
        address: u64,
        len: usize,
        rights: Rights,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Span {
        let (backend, device) = (device.backend().clone(), device.id());
        Span::new(Arc::new(ForeignMemory { backend, device, rights, _owner: owner }), Address(address), len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Attempt, Error, HostConfig};

    #[test]
    fn foreign_memory_is_limited_to_its_device_and_its_rights() {
        let backend = Backend::host(HostConfig::virtual_devices(2)).unwrap();
        let (device, other) = (backend.device(0).unwrap(), backend.device(1).unwrap());
        let bytes: Arc<[u8]> = Arc::from([7; 16]);
        let address = bytes.as_ptr().expose_provenance() as u64;
        let owner: Arc<dyn Any + Send + Sync> = Arc::new(Arc::clone(&bytes));
        // SAFETY: the bytes live as long as their owner and are only read.
        let span = unsafe { Span::foreign(&device, address, 16, Rights::Read, owner) };

        let mut seen = [0; 4];
        device.stream().unwrap().read(&span.part(12, 4).unwrap(), &mut seen).unwrap();
        assert_eq!(seen, [7; 4]);
        let attempt = || Attempt::Fill { len: 16 };
        let denied =
            |device, granted, needed| Err(Error::Denied { attempt: attempt(), device, granted, needed });
        let filled = device.stream().unwrap().fill(&span, 0);
        assert_eq!(filled, denied(device.label(), Rights::Read, Rights::ReadWrite));
        let checked = span.check(&other, Rights::Read, attempt);
        assert_eq!(checked, denied(other.label(), Rights::None, Rights::Read));

        assert_eq!(Arc::strong_count(&bytes), 2);
        drop(span);
        assert_eq!(Arc::strong_count(&bytes), 1, "the owner is dropped with the last span");
    }
}
