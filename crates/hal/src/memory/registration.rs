//! Host memory that is also mapped for a device, so that both access it without a copy.

use std::ptr::NonNull;
use std::sync::Arc;

use super::span::host_pointer_within;
use super::{Addressable, Mapping, Span};
use crate::backend::{HostAddress, OwnedResource, Teardown};
use crate::raw::Address;
use crate::{Attempt, Backend, Device, DeviceId, Result, Rights};

/// A [`Mapping`] of host memory that is registered with the devices of another backend.
///
/// Host tables on a GPU machine use this: sealed memory files that are mapped once and registered with the driver.
///
/// ```
/// use wholemem_hal::{Backend, HostConfig, Registration, Rights};
///
/// let host = Backend::host(HostConfig::default())?.device(0)?;
/// let map = host.allocate(1 << 20)?.map(Rights::ReadWrite)?;
///
/// let device = Backend::auto()?.device(0)?; // a GPU, if the machine has one
/// let registered = Registration::create(&device, &map)?;
/// device.stream()?.write(&registered.all().part(0, 5)?, b"hello")?;
/// let mut seen = [0; 5];
/// map.bytes()?.read_at(0, &mut seen)?;
/// assert_eq!(&seen, b"hello");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
#[doc(alias = "cuMemHostRegister")]
pub struct Registration {
    core: Arc<RegistrationCore>,
}

#[derive(Debug)]
struct RegistrationCore {
    /// The registration of the memory. Its teardown holds the mapping, because registered memory must stay mapped.
    owned: OwnedResource,
    place: HostAddress,
    at: Address,
    len: usize,
    rights: Rights,
}

impl Addressable for RegistrationCore {
    fn backend(&self) -> &Backend {
        self.owned.backend()
    }

    fn rights_of(&self, _device: DeviceId) -> Rights {
        self.rights
    }

    fn host_pointer(&self, at: Address, len: usize) -> Option<NonNull<u8>> {
        host_pointer_within((self.at, self.place.0), self.len, at, len)
    }
}

impl Registration {
    /// Registers all of the mapping `map` with the backend of `device`, with the access rights that the mapping has
    /// now.
    ///
    /// # Errors
    /// [`Error::NotHostVisible`](crate::Error::NotHostVisible) for a mapping of device memory;
    /// [`Error::Denied`](crate::Error::Denied) for a mapping without rights; [`Error::Failed`](crate::Error::Failed).
    pub fn create(device: &Device, map: &Mapping) -> Result<Self> {
        let len = map.len();
        let attempt = || Attempt::Register { len };
        let backend = device.backend();
        backend.check_fork(attempt)?;
        let bytes = map.bytes()?;
        let rights = if bytes.is_writable() { Rights::ReadWrite } else { Rights::Read };
        let place = HostAddress(bytes.as_ptr());
        // SAFETY: the registration holds the mapping, so that the memory stays mapped, and rights only grow.
        let at = unsafe { backend.memory().register(place.0, len, rights) }
            .map_err(|cause| backend.to_error(device.id(), attempt(), cause))?;
        let owned = OwnedResource::new(backend, Teardown::Unregister { at: place, len, _map: map.operand() });
        Ok(Self { core: Arc::new(RegistrationCore { owned, place, at, len, rights }) })
    }

    /// Returns the device address of the first byte of the registered memory.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.core.at.0
    }

    /// Returns a span of all registered memory, for use on a stream.
    #[must_use]
    pub fn all(&self) -> Span {
        let memory: Arc<dyn Addressable> = Arc::<RegistrationCore>::clone(&self.core);
        Span::new(memory, self.core.at, self.core.len)
    }
}
