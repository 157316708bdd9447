//! Host memory that devices copy from and to at full speed.

use std::ptr::NonNull;
use std::sync::Arc;

use wholemem_os::SharedSlice;

use super::span::within;
use super::{Addressable, Span};
use crate::backend::{Owned, Teardown};
use crate::raw::Address;
use crate::{Attempt, Backend, Device, DeviceId, Error, Result, Rights};

/// Host memory of this process that devices reach directly: the place to copy from and to without a detour.
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
    owned: Owned,
    device: DeviceId,
    at: Address,
    pointer: NonNull<u8>,
    len: usize,
}

// SAFETY: the bytes behind the pointer are reached through `SharedSlice` and by streams only.
unsafe impl Send for PinnedCore {}
// SAFETY: a shared reference reaches the bytes through `SharedSlice` and by streams only, which allow concurrent
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
        within((self.at, self.pointer), self.len, at, len)
    }
}

impl PinnedBuffer {
    /// Creates `len` bytes, zeroed.
    ///
    /// # Errors
    /// [`Error::ZeroLength`]; [`Error::Failed`] when there is not enough memory.
    pub fn create(device: &Device, len: usize) -> Result<Self> {
        let attempt = || Attempt::Pin { len };
        let backend = device.backend();
        backend.check_fork(attempt)?;
        if len == 0 {
            return Err(Error::ZeroLength { attempt: attempt() });
        }
        let refused = |cause| backend.refused(device.id(), attempt(), cause);
        // SAFETY: the length is not zero, and this is no forked child.
        let at = unsafe { backend.memory().pin(device.id(), len) }.map_err(refused)?;
        let owned = Owned::new(backend, Teardown::Unpin { at, len });
        let Some(pointer) = backend.memory().host_pointer(at).map_err(refused)? else {
            return Err(Error::NotHostVisible { device: device.label() });
        };
        Ok(Self { core: Arc::new(PinnedCore { owned, device: device.id(), at, pointer, len }) })
    }

    /// Its length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a buffer is never empty")]
    pub fn len(&self) -> usize {
        self.core.len
    }

    /// The bytes, as memory that a device may write meanwhile is to be reached.
    ///
    /// # Errors
    /// [`Error::Forked`].
    #[inline]
    pub fn bytes(&self) -> Result<SharedSlice<'_>> {
        self.core.backend().check_fork(|| Attempt::Access { len: self.core.len })?;
        // SAFETY: the buffer lives as long as `self` is borrowed, cannot shrink, and is reached by views alone.
        Ok(unsafe { SharedSlice::new(self.core.pointer, self.core.len, true) })
    }

    /// All of it, for a stream to work on.
    #[must_use]
    pub fn all(&self) -> Span {
        let memory: Arc<dyn Addressable> = Arc::<PinnedCore>::clone(&self.core);
        Span::new(memory, self.core.at, self.core.len)
    }

    /// The device it was made for.
    #[must_use]
    pub fn device(&self) -> Device {
        Device::new(self.core.backend().clone(), self.core.device)
    }
}
