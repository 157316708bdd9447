//! Device memory from `cuMemAlloc` (`cudaMalloc`), and its CUDA IPC handles.

use std::sync::Arc;

use super::{Addressable, Span};
use crate::backend::{OwnedResource, Teardown};
use crate::raw::Address;
use crate::{Attempt, Backend, Capability, Device, DeviceId, Error, Result, Rights, ShareHandle};

/// A buffer of device memory from `cuMemAlloc`, created in this process or opened from a CUDA IPC handle of another
/// process.
///
/// It exists for memory that other code allocates, such as tensors in memory from `cudaMalloc`. Prefer an
/// [`Allocation`](crate::Allocation) for new memory. The exporting process must outlive all users: unlike a file
/// descriptor, a CUDA IPC handle does not keep the memory alive.
#[derive(Debug, Clone)]
#[doc(alias = "cudaIpcMemHandle_t")]
pub struct CudaMallocBuffer {
    core: Arc<CudaMallocCore>,
}

#[derive(Debug)]
struct CudaMallocCore {
    owned: OwnedResource,
    device: DeviceId,
    at: Address,
    len: usize,
}

impl Addressable for CudaMallocCore {
    fn backend(&self) -> &Backend {
        self.owned.backend()
    }

    fn rights_of(&self, device: DeviceId) -> Rights {
        if device == self.device { Rights::ReadWrite } else { Rights::None }
    }
}

impl Span {
    /// Creates a CUDA IPC handle of the `cudaMalloc` memory in which this span lies, with the span's offset in it. The handle is
    /// valid as long as the memory exists: keep this span until other processes no longer use the handle.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the backend has no such memory; [`Error::Failed`] if the span is other memory.
    #[doc(alias = "cudaIpcGetMemHandle")]
    pub fn export_cuda_ipc(&self, device: &Device) -> Result<ShareHandle> {
        // SAFETY: the span keeps its memory alive, and this method's documentation requires that it outlives all users.
        unsafe { CudaMallocBuffer::export_foreign(device, self.address()) }
    }
}

impl CudaMallocBuffer {
    /// Creates a buffer of `len` bytes with `cuMemAlloc`.
    ///
    /// # Errors
    /// [`Error::ZeroLength`]; [`Error::Unsupported`] if the backend has no such memory; [`Error::Failed`].
    pub fn create(device: &Device, len: usize) -> Result<Self> {
        let attempt = || Attempt::CudaMalloc { len, device: device.label() };
        let backend = device.backend();
        backend.check_fork(attempt)?;
        if len == 0 {
            return Err(Error::ZeroLength { attempt: attempt() });
        }
        // SAFETY: the length is not zero, and the process is not a forked child.
        let at = unsafe { backend.memory().cuda_malloc(device.id(), len) }
            .map_err(|cause| backend.to_error(device.id(), attempt(), cause))?;
        let owned = OwnedResource::new(backend, Teardown::CudaFree { device: device.id(), at });
        Ok(Self { core: Arc::new(CudaMallocCore { owned, device: device.id(), at, len }) })
    }

    /// Opens `len` bytes of another process's buffer, starting at the offset in its CUDA IPC handle.
    ///
    /// # Errors
    /// [`Error::ZeroLength`]; [`Error::OutOfRange`] if the buffer is shorter than `len`; [`Error::Unsupported`] for
    /// other kinds of handle; [`Error::Failed`].
    pub fn import(device: &Device, handle: &ShareHandle, len: usize) -> Result<Self> {
        let attempt = || Attempt::ImportCudaIpc { len, device: device.label() };
        let backend = device.backend();
        backend.check_fork(attempt)?;
        if len == 0 {
            return Err(Error::ZeroLength { attempt: attempt() });
        }
        let ShareHandle::CudaIpc { offset, .. } = *handle else {
            return Err(
                device.unsupported(Capability::CudaIpc, "only CUDA IPC handles refer to such a buffer")
            );
        };
        let to_error = |cause| backend.to_error(device.id(), attempt(), cause);
        // SAFETY: the process is not a forked child, and `open_cuda_ipc` accepts invalid handles.
        let base = unsafe { backend.memory().open_cuda_ipc(device.id(), handle) }.map_err(to_error)?;
        let owned = OwnedResource::new(backend, Teardown::CloseCudaIpc { device: device.id(), at: base });
        // SAFETY: the process is not a forked child; `base` was just opened and stays open until `owned` is dropped.
        let (_, size) = unsafe { backend.memory().address_range(base) }.map_err(to_error)?;
        if offset.checked_add(len).is_none_or(|end| end > size) {
            return Err(Error::OutOfRange { offset, len, size });
        }
        Ok(Self {
            core: Arc::new(CudaMallocCore { owned, device: device.id(), at: base.after(offset), len }),
        })
    }

    /// Creates a CUDA IPC handle of the buffer for another process. The handle is valid as long as this buffer
    /// exists.
    ///
    /// # Errors
    /// [`Error::Failed`], for example because a buffer that was opened from a handle cannot be exported.
    pub fn export(&self) -> Result<ShareHandle> {
        // SAFETY: the buffer is live, since `self` holds it; the documentation of this type requires that the buffer
        // outlives its users.
        unsafe { Self::export_foreign(&self.device(), self.core.at.0) }
    }

    /// Creates a CUDA IPC handle of memory from `cuMemAlloc` that other code in this process allocated at `address`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the backend has no such memory; [`Error::Failed`] if nothing is allocated at the
    /// address.
    ///
    /// # Safety
    /// The owner does not free the memory while other processes use it.
    pub unsafe fn export_foreign(device: &Device, address: u64) -> Result<ShareHandle> {
        let backend = device.backend();
        backend.check_fork(|| Attempt::ExportCudaIpc)?;
        // SAFETY: the process is not a forked child, and `export_cuda_ipc` accepts any address.
        unsafe { backend.memory().export_cuda_ipc(device.id(), Address(address)) }
            .map_err(|cause| backend.to_error(device.id(), Attempt::ExportCudaIpc, cause))
    }

    /// Returns the device address of the first byte of the buffer.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.core.at.0
    }

    /// Returns the length of the buffer in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a buffer is never empty")]
    pub fn len(&self) -> usize {
        self.core.len
    }

    /// Returns the device of the buffer.
    #[must_use]
    pub fn device(&self) -> Device {
        Device::new(self.core.backend().clone(), self.core.device)
    }

    /// Returns a span of the whole buffer, for use on a stream.
    #[must_use]
    pub fn all(&self) -> Span {
        let memory: Arc<dyn Addressable> = Arc::<CudaMallocCore>::clone(&self.core);
        Span::new(memory, self.core.at, self.core.len)
    }
}
