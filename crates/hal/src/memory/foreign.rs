//! Memory that something else in this process made: arrays of a framework, for one. Streams work on it where it is.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use super::{Addressable, Span};
use crate::raw::Address;
use crate::{Backend, Device, DeviceId, Rights};

struct Foreign {
    backend: Backend,
    device: DeviceId,
    rights: Rights,
    /// Lets go of the memory when it is dropped.
    _owner: Arc<dyn Any + Send + Sync>,
}

impl fmt::Debug for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, rights, .. } = self;
        f.debug_struct("Foreign").field("device", device).field("rights", rights).finish_non_exhaustive()
    }
}

impl Addressable for Foreign {
    fn backend(&self) -> &Backend {
        &self.backend
    }

    fn rights_of(&self, device: DeviceId) -> Rights {
        if device == self.device { self.rights } else { Rights::None }
    }
}

impl Span {
    /// Memory that something else in this process made, as work of `device` reaches it. The `owner` is kept until the last
    /// work that uses the memory has run, and is dropped by whichever thread comes across that.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use wholemem_hal::{Backend, HostConfig, Rights, Span};
    ///
    /// let device = Backend::host(HostConfig::default())?.device(0)?;
    /// let numbers: Arc<Vec<u8>> = Arc::new(vec![1, 2, 3]);
    /// let address = numbers.as_ptr().expose_provenance() as u64;
    ///
    /// // SAFETY: the vector has three bytes, which nobody writes, and stays as long as its owner.
    /// let span = unsafe { Span::foreign(&device, address, 3, Rights::Read, numbers) };
    /// let mut seen = [0; 3];
    /// device.stream()?.read(&span, &mut seen)?;
    /// assert_eq!(seen, [1, 2, 3]);
    /// # Ok::<(), wholemem_hal::Error>(())
    /// ```
    ///
    /// # Safety
    /// While `owner` lives, the device reaches `len` bytes at `address` with `rights`, and no `&` or `&mut` to them is
    /// used by others while work of a stream does.
    #[must_use]
    pub unsafe fn foreign(
        device: &Device,
        address: u64,
        len: usize,
        rights: Rights,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Span {
        let (backend, device) = (device.backend().clone(), device.id());
        Span::new(Arc::new(Foreign { backend, device, rights, _owner: owner }), Address(address), len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Attempt, Error, HostConfig};

    #[test]
    fn foreign_memory_is_used_by_its_device_within_its_rights() {
        let backend = Backend::host(HostConfig::virtual_devices(2)).unwrap();
        let (device, other) = (backend.device(0).unwrap(), backend.device(1).unwrap());
        let bytes: Arc<[u8]> = Arc::from([7; 16]);
        let address = bytes.as_ptr().expose_provenance() as u64;
        let owner: Arc<dyn Any + Send + Sync> = Arc::new(Arc::clone(&bytes));
        // SAFETY: the bytes stay as long as their owner, and are read only.
        let span = unsafe { Span::foreign(&device, address, 16, Rights::Read, owner) };

        let mut seen = [0; 4];
        device.stream().unwrap().read(&span.part(12, 4).unwrap(), &mut seen).unwrap();
        assert_eq!(seen, [7; 4]);
        let attempt = || Attempt::Fill { len: 16 };
        let denied = |who, granted, needed| Err(Error::Denied { attempt: attempt(), who, granted, needed });
        let filled = device.stream().unwrap().fill(&span, 0);
        assert_eq!(filled, denied(device.label(), Rights::Read, Rights::ReadWrite));
        let checked = span.check(&other, Rights::Read, attempt);
        assert_eq!(checked, denied(other.label(), Rights::None, Rights::Read));

        assert_eq!(Arc::strong_count(&bytes), 2);
        drop(span);
        assert_eq!(Arc::strong_count(&bytes), 1, "the owner goes with the last use");
    }
}
