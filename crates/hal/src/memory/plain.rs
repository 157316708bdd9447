//! Device memory of the driver's older kind: what `cudaMalloc` makes, and its handles for other processes.

use std::sync::Arc;

use super::{Addressable, Span};
use crate::backend::{Owned, Teardown};
use crate::raw::Address;
use crate::{Attempt, Backend, Capability, Device, DeviceId, Error, Result, Rights, ShareHandle};

/// A buffer of the driver's older allocator, made here or opened from another process's handle.
///
/// It exists for memory whose making is not ours: tensors that a framework got from `cudaMalloc`. New memory is better
/// made as an [`Allocation`](crate::Allocation). The maker must outlive its users: unlike a file descriptor, the handle
/// keeps nothing alive.
#[derive(Debug, Clone)]
#[doc(alias = "cudaIpcMemHandle_t")]
pub struct PlainBuffer {
    core: Arc<PlainCore>,
}

#[derive(Debug)]
struct PlainCore {
    owned: Owned,
    device: DeviceId,
    at: Address,
    len: usize,
}

impl Addressable for PlainCore {
    fn backend(&self) -> &Backend {
        self.owned.backend()
    }

    fn rights_of(&self, device: DeviceId) -> Rights {
        if device == self.device { Rights::ReadWrite } else { Rights::None }
    }
}

impl PlainBuffer {
    /// Creates a buffer of `len` bytes.
    ///
    /// # Errors
    /// [`Error::ZeroLength`]; [`Error::Unsupported`] where there is no such memory; [`Error::Failed`].
    pub fn create(device: &Device, len: usize) -> Result<Self> {
        let attempt = || Attempt::CreatePlain { len, device: device.label() };
        let backend = device.backend();
        backend.check_fork(attempt)?;
        if len == 0 {
            return Err(Error::ZeroLength { attempt: attempt() });
        }
        // SAFETY: the length is not zero, and this is no forked child.
        let at = unsafe { backend.memory().create_plain(device.id(), len) }
            .map_err(|cause| backend.refused(device.id(), attempt(), cause))?;
        let owned = Owned::new(backend, Teardown::FreePlain { device: device.id(), at });
        Ok(Self { core: Arc::new(PlainCore { owned, device: device.id(), at, len }) })
    }

    /// Opens `len` bytes of another process's buffer, from where the handle says that they begin.
    ///
    /// # Errors
    /// [`Error::ZeroLength`]; [`Error::OutOfRange`] when the buffer is shorter than promised; [`Error::Unsupported`] for
    /// other handles; [`Error::Failed`].
    pub fn import(device: &Device, handle: &ShareHandle, len: usize) -> Result<Self> {
        let attempt = || Attempt::ImportPlain { len, device: device.label() };
        let backend = device.backend();
        backend.check_fork(attempt)?;
        if len == 0 {
            return Err(Error::ZeroLength { attempt: attempt() });
        }
        let ShareHandle::CudaIpc { offset, .. } = *handle else {
            return Err(device.unsupported(Capability::CudaIpc, "such a buffer has a handle of its own kind"));
        };
        let refused = |cause| backend.refused(device.id(), attempt(), cause);
        // SAFETY: this is no forked child; the handle may be anything.
        let base = unsafe { backend.memory().open_plain(device.id(), handle) }.map_err(refused)?;
        let owned = Owned::new(backend, Teardown::ClosePlain { device: device.id(), at: base });
        // SAFETY: this is no forked child, and `base` was opened a moment ago and is open as long as `owned` is not
        // dropped.
        let (_, size) = unsafe { backend.memory().address_range(base) }.map_err(refused)?;
        if offset.checked_add(len).is_none_or(|end| end > size) {
            return Err(Error::OutOfRange { offset, len, size });
        }
        Ok(Self { core: Arc::new(PlainCore { owned, device: device.id(), at: base.after(offset), len }) })
    }

    /// A handle for another process, which is good for as long as the buffer lives here.
    ///
    /// # Errors
    /// [`Error::Failed`]: a buffer that was itself opened from a handle has none.
    pub fn export(&self) -> Result<ShareHandle> {
        // SAFETY: the buffer is live because `self` holds it.
        unsafe { Self::export_foreign(&self.device(), self.core.at.0) }
    }

    /// A handle of memory that somebody else in this process made with the driver's older allocator, beginning at
    /// `address`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where there is no such memory; [`Error::Failed`] for an address that is none.
    ///
    /// # Safety
    /// Whoever made the memory keeps it for as long as other processes use it.
    pub unsafe fn export_foreign(device: &Device, address: u64) -> Result<ShareHandle> {
        let backend = device.backend();
        backend.check_fork(|| Attempt::ExportPlain)?;
        // SAFETY: this is no forked child; the address may be anything.
        unsafe { backend.memory().export_plain(device.id(), Address(address)) }
            .map_err(|cause| backend.refused(device.id(), Attempt::ExportPlain, cause))
    }

    /// Where it begins, as its device sees it.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.core.at.0
    }

    /// Its length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a buffer is never empty")]
    pub fn len(&self) -> usize {
        self.core.len
    }

    /// The device it is on.
    #[must_use]
    pub fn device(&self) -> Device {
        Device::new(self.core.backend().clone(), self.core.device)
    }

    /// All of it, for a stream to work on.
    #[must_use]
    pub fn all(&self) -> Span {
        let memory: Arc<dyn Addressable> = Arc::<PlainCore>::clone(&self.core);
        Span::new(memory, self.core.at, self.core.len)
    }
}
