//! Page-locked host memory that devices copy from and to at full speed.

use std::ptr::NonNull;
use std::sync::Arc;

use wholemem_os::SharedSlice;

use super::span::host_pointer_within;
use super::{Addressable, Span};
use crate::backend::{OwnedResource, Teardown};
use crate::raw::Address;
use crate::{Attempt, Backend, Device, DeviceId, Error, Result, Rights};

/// Page-locked host memory of this process that devices access directly, as a source or destination of fast copies.
///
/// ```
/// use wholemem_hal::{Backend, HostConfig, PinnedBuffer, Rights};
/// use wholemem_os::Deadline;
///
/// let device = Backend::host(HostConfig::default())?.device(0)?;
/// let map = device.allocate(1 << 20)?.map(Rights::ReadWrite)?;
/// let buffer = PinnedBuffer::create(&device, 4096)?;
///
/// buffer.bytes()?.fill(7)?;
/// let stream = device.stream()?;
/// stream.copy(&map.span(0, 4096)?, &buffer.all())?;
/// stream.synchronize(Deadline::NEVER)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
#[doc(alias = "cuMemHostAlloc")]
pub struct PinnedBuffer {
    core: Arc<PinnedCore>,
}

#[derive(Debug)]
struct PinnedCore {
    owned: OwnedResource,
    device: DeviceId,
    at: Address,
    pointer: NonNull<u8>,
    len: usize,
}

// SAFETY: the bytes of the buffer are accessed only through `SharedSlice` and by streams.
unsafe impl Send for PinnedCore {}
// SAFETY: a `&PinnedCore` gives access to the bytes only through `SharedSlice` and streams, which allow concurrent
// writers.
unsafe impl Sync for PinnedCore {}

impl Addressable for PinnedCore {
    fn backend(&self) -> &Backend {
        self.owned.backend()
    }

    fn rights_of(&self, _device: DeviceId) -> Rights {
        Rights::ReadWrite
    }

    fn host_pointer(&self, at: Address, len: usize) -> Option<NonNull<u8>> {
        host_pointer_within((self.at, self.pointer), self.len, at, len)
    }
}

impl PinnedBuffer {
    /// Creates a zeroed pinned buffer of `len` bytes.
    ///
    /// # Errors
    /// [`Error::ZeroLength`]; [`Error::Failed`] if there is not enough memory.
    pub fn create(device: &Device, len: usize) -> Result<Self> {
        let attempt = || Attempt::Pin { len };
        let backend = device.backend();
        backend.check_fork(attempt)?;
        if len == 0 {
            return Err(Error::ZeroLength { attempt: attempt() });
        }
        let to_error = |cause| backend.to_error(device.id(), attempt(), cause);
        // SAFETY: the length is not zero, and the process is not a forked child.
        let at = unsafe { backend.memory().pin(device.id(), len) }.map_err(to_error)?;
        let owned = OwnedResource::new(backend, Teardown::Unpin { at, len });
        let Some(pointer) = backend.memory().host_pointer(at).map_err(to_error)? else {
            return Err(Error::NotHostVisible { device: device.label() });
        };
        Ok(Self { core: Arc::new(PinnedCore { owned, device: device.id(), at, pointer, len }) })
    }

    /// Returns the length of the pinned buffer in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a buffer is never empty")]
    pub fn len(&self) -> usize {
        self.core.len
    }

    /// Returns a view of the buffer's bytes that allows concurrent writes by devices.
    ///
    /// # Errors
    /// [`Error::Forked`].
    #[inline]
    pub fn bytes(&self) -> Result<SharedSlice<'_>> {
        self.core.backend().check_fork(|| Attempt::Access { len: self.core.len })?;
        // SAFETY: the buffer lives as long as `self` is borrowed, cannot shrink, and is accessed only through views.
        Ok(unsafe { SharedSlice::new(self.core.pointer, self.core.len, true) })
    }

    /// Returns a span of the whole pinned buffer, for use on a stream.
    #[must_use]
    pub fn all(&self) -> Span {
        let memory: Arc<dyn Addressable> = Arc::<PinnedCore>::clone(&self.core);
        Span::new(memory, self.core.at, self.core.len)
    }

    /// Returns the device for which the buffer is pinned.
    #[must_use]
    pub fn device(&self) -> Device {
        Device::new(self.core.backend().clone(), self.core.device)
    }
}
