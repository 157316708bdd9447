//! The raw operations on memory: create, reserve, map, set access, export and import, unmap, release.

use std::fmt;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use wholemem_os::PrivateMap;
use wholemem_os::width::{to_u64, to_usize};

use crate::{
    AllocationSpec, BackendError, BackendKind, Capability, DeviceId, DeviceInfo, Grant, Granularity,
    HandleKind, Rights, ShareHandle,
};

const NO_CUDA_MALLOC: BackendError = BackendError::Unsupported {
    capability: Capability::CudaIpc,
    reason: "this backend shares memory only as allocations",
};

/// An address in the address space of a backend's devices. On the host it is the value of a CPU pointer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address(pub u64);

impl Address {
    /// Returns the address of host memory for a pointer. [`Self::to_host`] converts it back to a pointer.
    #[must_use]
    pub fn of_host<T>(at: *const T) -> Self {
        Self(to_u64(at.expose_provenance()))
    }

    /// Returns the CPU's pointer for a host address; `None` for null.
    #[must_use]
    pub fn to_host(self) -> Option<NonNull<u8>> {
        NonNull::new(std::ptr::with_exposed_provenance_mut(to_usize(self.0)))
    }

    /// Returns the address `offset` bytes after this address.
    #[must_use]
    pub fn after(self, offset: usize) -> Self {
        Self(self.0 + to_u64(offset))
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A backend's own handle of physical memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RawAllocation(pub u64);

/// Memory that was imported from a handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImportedAllocation {
    /// The backend's own handle of the imported memory.
    pub raw: RawAllocation,
    /// The highest access rights that the imported handle grants.
    pub rights: Rights,
}

/// The properties that a backend reports for an allocation.
#[derive(Debug, Clone, PartialEq, Eq)]
#[doc(alias = "cuMemGetAllocationPropertiesFromHandle")]
pub struct AllocationProperties {
    /// The length of the allocation in bytes, if the backend can report it.
    pub len: Option<usize>,
    /// The device of the allocation, if the backend can report it.
    pub device: Option<DeviceId>,
    /// The kinds of handle as which the allocation can be exported.
    pub handles: Vec<HandleKind>,
}

/// A fact about a backend, such as a version, for diagnostics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackendFact {
    /// The name of the fact about the backend.
    pub name: &'static str,
    /// True if the fact about the backend holds.
    pub holds: bool,
    /// Details of the fact about the backend, such as a version.
    pub detail: String,
}

/// The raw operations on memory, which a backend implements without checks. The [module](super) states the contract of every `#
/// Safety` section.
///
/// # Safety
/// Safe code relies on the implementation: a successful `map` makes the range valid memory until `unmap`, `import` never returns
/// memory that can shrink, and `host_pointer` is correct.
pub unsafe trait RawMemory: fmt::Debug + Send + Sync {
    /// Returns the kind of the backend.
    fn kind(&self) -> BackendKind;

    /// Returns the properties of the backend's devices; device `n` has index `n`.
    fn devices(&self) -> &[DeviceInfo];

    /// Returns additional facts about the backend, for diagnostics.
    fn facts(&self) -> Vec<BackendFact> {
        Vec::new()
    }

    /// Returns the granularity of memory that is created with `spec`, whose length is ignored.
    ///
    /// # Errors
    /// Returns the driver's error.
    #[doc(alias = "cuMemGetAllocationGranularity")]
    fn granularity(&self, spec: &AllocationSpec) -> Result<Granularity, BackendError>;

    /// Returns the free memory of a device in bytes.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    #[doc(alias = "cuMemGetInfo")]
    unsafe fn available(&self, device: DeviceId) -> Result<usize, BackendError>;

    /// Creates the physical memory that `spec` describes.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    #[doc(alias = "cuMemCreate")]
    unsafe fn create(&self, spec: &AllocationSpec) -> Result<RawAllocation, BackendError>;

    /// Releases this process's reference to physical memory.
    ///
    /// # Errors
    /// Returns the driver's error; the reference still exists.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    #[doc(alias = "cuMemRelease")]
    unsafe fn release(&self, allocation: RawAllocation) -> Result<(), BackendError>;

    /// Reserves `len` bytes of addresses at a multiple of `align`, or of the backend's own alignment if `align` is `None`. If
    /// `wanted` is given, the range begins exactly there.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    #[doc(alias = "cuMemAddressReserve")]
    unsafe fn reserve(
        &self,
        len: usize,
        align: Option<usize>,
        wanted: Option<Address>,
    ) -> Result<Address, BackendError>;

    /// Frees reserved addresses, in which nothing is mapped.
    ///
    /// # Errors
    /// Returns the driver's error; the addresses are still reserved.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    #[doc(alias = "cuMemAddressFree")]
    unsafe fn free(&self, at: Address, len: usize) -> Result<(), BackendError>;

    /// Maps a whole allocation at reserved addresses, without access rights.
    ///
    /// # Errors
    /// Returns the driver's error; nothing is mapped.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    #[doc(alias = "cuMemMap")]
    unsafe fn map(&self, at: Address, len: usize, allocation: RawAllocation) -> Result<(), BackendError>;

    /// Sets the access rights of devices to a mapped range.
    ///
    /// # Errors
    /// Returns the driver's error; the rights are unchanged.
    ///
    /// # Safety
    /// The contract of the [module](super) holds; no right that is in use is revoked.
    #[doc(alias = "cuMemSetAccess")]
    unsafe fn set_access(&self, at: Address, len: usize, grants: &[Grant]) -> Result<(), BackendError>;

    /// Unmaps a mapped allocation; its addresses stay reserved.
    ///
    /// # Errors
    /// Returns the driver's error; the range is still mapped.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    #[doc(alias = "cuMemUnmap")]
    unsafe fn unmap(&self, at: Address, len: usize) -> Result<(), BackendError>;

    /// Creates a handle with which another process imports an allocation.
    ///
    /// # Errors
    /// Returns the driver's error; [`BackendError::Unsupported`] for a kind or a right that the backend lacks.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    #[doc(alias = "cuMemExportToShareableHandle")]
    unsafe fn export(
        &self,
        allocation: RawAllocation,
        kind: HandleKind,
        rights: Rights,
    ) -> Result<ShareHandle, BackendError>;

    /// Returns whether creating the first file descriptor of an allocation is so slow that the descriptor should be cached.
    fn caches_exports(&self) -> bool {
        false
    }

    /// Imports memory from a handle of another process. The call consumes the handle.
    ///
    /// # Errors
    /// Returns the error of an invalid handle, or the driver's error.
    ///
    /// # Safety
    /// The contract of the [module](super) holds, except that the handle need not be valid.
    #[doc(alias = "cuMemImportFromShareableHandle")]
    unsafe fn import(
        &self,
        device: DeviceId,
        handle: ShareHandle,
        len: usize,
    ) -> Result<ImportedAllocation, BackendError>;

    /// Returns a new reference to the allocation mapped at an address.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] if the backend does not track addresses.
    ///
    /// # Safety
    /// The contract of the [module](super) holds, except that the address need not be valid.
    #[doc(alias = "cuMemRetainAllocationHandle")]
    unsafe fn retain(&self, _at: Address) -> Result<RawAllocation, BackendError> {
        let reason = "this backend cannot find the allocation behind an address";
        Err(BackendError::Unsupported { capability: Capability::Retain, reason })
    }

    /// Returns the start and the length of the memory that contains an address.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] if the backend does not track addresses.
    ///
    /// # Safety
    /// The contract of the [module](super) holds, except that the address need not be valid.
    #[doc(alias = "cuMemGetAddressRange")]
    unsafe fn address_range(&self, _at: Address) -> Result<(Address, usize), BackendError> {
        let reason = "this backend cannot find the bounds of memory it did not create";
        Err(BackendError::Unsupported { capability: Capability::Retain, reason })
    }

    /// Returns the device that owns the memory at an address, or for which that memory is pinned; `None` if the backend does not
    /// know the address.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] if the backend does not track addresses; the driver's error.
    ///
    /// # Safety
    /// The contract of the [module](super) holds, except that the address need not be valid.
    #[doc(alias = "cuPointerGetAttribute")]
    unsafe fn device_at(&self, _at: Address) -> Result<Option<DeviceId>, BackendError> {
        let reason = "this backend does not track addresses";
        Err(BackendError::Unsupported { capability: Capability::Retain, reason })
    }

    /// Returns an id of the memory at an address that no other memory of this process ever gets, so that a caller notices if the
    /// address was freed and used again; `None` if the backend does not know the address, or has no ids of such memory.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] if the backend does not track addresses; the driver's error.
    ///
    /// # Safety
    /// The contract of the [module](super) holds, except that the address need not be valid.
    #[doc(alias = "CU_POINTER_ATTRIBUTE_BUFFER_ID")]
    unsafe fn memory_id(&self, _at: Address) -> Result<Option<u64>, BackendError> {
        let reason = "this backend does not track addresses";
        Err(BackendError::Unsupported { capability: Capability::Retain, reason })
    }

    /// Returns the properties of an allocation.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    #[doc(alias = "cuMemGetAllocationPropertiesFromHandle")]
    unsafe fn properties(&self, allocation: RawAllocation) -> Result<AllocationProperties, BackendError>;

    /// Exports a mapped range as a dma-buf for network cards.
    ///
    /// # Errors
    /// Returns the driver's error; [`BackendError::Unsupported`] if the backend has no dma-buf.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    #[doc(alias = "cuMemGetHandleForAddressRange")]
    unsafe fn dma_buf(&self, _at: Address, _len: usize) -> Result<OwnedFd, BackendError> {
        let reason = "host memory has no dma-buf; network cards register its pages directly";
        Err(BackendError::Unsupported { capability: Capability::DmaBuf, reason })
    }

    /// Creates the CPU's page table entries of a mapped range. Does nothing if memory of the backend causes no page faults.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    unsafe fn populate(&self, _at: Address, _len: usize, _rights: Rights) -> Result<(), BackendError> {
        Ok(())
    }

    /// Collapses the pages of a mapped range into huge pages. Does nothing if the pages are large already.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    unsafe fn enlarge_pages(&self, _at: Address, _len: usize) -> Result<(), BackendError> {
        Ok(())
    }

    /// Sets whether forked children inherit a mapped range. Does nothing if children never inherit memory of the backend.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    unsafe fn set_inherited(
        &self,
        _at: Address,
        _len: usize,
        _is_inherited: bool,
    ) -> Result<(), BackendError> {
        Ok(())
    }

    /// Creates page-locked host memory that devices copy from and to at full speed.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The contract of the [module](super) holds; the length need not be a multiple of the granule.
    #[doc(alias = "cuMemHostAlloc")]
    unsafe fn pin(&self, device: DeviceId, len: usize) -> Result<Address, BackendError>;

    /// Frees memory from [`Self::pin`].
    ///
    /// # Errors
    /// Returns the driver's error; the memory still exists.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    #[doc(alias = "cuMemFreeHost")]
    unsafe fn unpin(&self, at: Address, len: usize) -> Result<(), BackendError>;

    /// Registers host memory that is already mapped with the devices, and returns its device address.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The contract of the [module](super) holds; the range stays mapped with these rights until it is unregistered.
    #[doc(alias = "cuMemHostRegister")]
    unsafe fn register(
        &self,
        at: NonNull<u8>,
        _len: usize,
        _rights: Rights,
    ) -> Result<Address, BackendError> {
        Ok(Address::of_host(at.as_ptr()))
    }

    /// Unregisters host memory from the devices.
    ///
    /// # Errors
    /// Returns the driver's error; the memory is still registered.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    #[doc(alias = "cuMemHostUnregister")]
    unsafe fn unregister(&self, _at: NonNull<u8>, _len: usize) -> Result<(), BackendError> {
        Ok(())
    }

    /// Allocates memory with `cuMemAlloc`, which is shared as a CUDA IPC handle.
    ///
    /// # Errors
    /// Returns the driver's error; [`BackendError::Unsupported`] if the backend has no such memory.
    ///
    /// # Safety
    /// The contract of the [module](super) holds; the length need not be a multiple of the granule.
    #[doc(alias = "cuMemAlloc")]
    unsafe fn cuda_malloc(&self, _device: DeviceId, _len: usize) -> Result<Address, BackendError> {
        Err(NO_CUDA_MALLOC)
    }

    /// Frees memory from [`Self::cuda_malloc`]. Some drivers block in this call until running kernels end.
    ///
    /// # Errors
    /// Returns the driver's error; the memory still exists.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    #[doc(alias = "cuMemFree")]
    unsafe fn cuda_free(&self, _device: DeviceId, _at: Address) -> Result<(), BackendError> {
        Err(NO_CUDA_MALLOC)
    }

    /// Creates a CUDA IPC handle from any address in memory from `cuMemAlloc`.
    ///
    /// # Errors
    /// Returns the driver's error; [`BackendError::Unsupported`] if the backend has no such memory.
    ///
    /// # Safety
    /// The contract of the [module](super) holds, except that the address need not be valid.
    #[doc(alias = "cuIpcGetMemHandle")]
    unsafe fn export_cuda_ipc(&self, _device: DeviceId, _at: Address) -> Result<ShareHandle, BackendError> {
        Err(NO_CUDA_MALLOC)
    }

    /// Maps the whole buffer that a CUDA IPC handle of another process refers to, and returns its address.
    ///
    /// # Errors
    /// Returns the driver's error; [`BackendError::Unsupported`] if the backend has no such memory.
    ///
    /// # Safety
    /// The contract of the [module](super) holds, except that the handle need not be valid.
    #[doc(alias = "cuIpcOpenMemHandle")]
    unsafe fn open_cuda_ipc(
        &self,
        _device: DeviceId,
        _handle: &ShareHandle,
    ) -> Result<Address, BackendError> {
        Err(NO_CUDA_MALLOC)
    }

    /// Unmaps a buffer from [`Self::open_cuda_ipc`].
    ///
    /// # Errors
    /// Returns the driver's error; the buffer is still mapped.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    #[doc(alias = "cuIpcCloseMemHandle")]
    unsafe fn close_cuda_ipc(&self, _device: DeviceId, _at: Address) -> Result<(), BackendError> {
        Err(NO_CUDA_MALLOC)
    }

    /// Creates a multicast object, which is mapped like an allocation. A store to the object writes to the memory that is bound
    /// to it on every device.
    ///
    /// # Errors
    /// Returns the driver's error; [`BackendError::Unsupported`] if the backend has no multicast.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    #[doc(alias = "cuMulticastCreate")]
    #[doc(alias = "cuMulticastAddDevice")]
    unsafe fn create_multicast(
        &self,
        _devices: &[DeviceId],
        _len: usize,
    ) -> Result<RawAllocation, BackendError> {
        let reason = "only GPUs that are connected by an NVSwitch support multicast";
        Err(BackendError::Unsupported { capability: Capability::Multicast, reason })
    }

    /// Binds an allocation to a multicast object, for the device of the allocation.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The contract of the [module](super) holds; both have the length `len`.
    #[doc(alias = "cuMulticastBindMem")]
    unsafe fn bind_multicast(
        &self,
        _multicast: RawAllocation,
        _allocation: RawAllocation,
        _len: usize,
    ) -> Result<(), BackendError> {
        let reason = "only GPUs that are connected by an NVSwitch support multicast";
        Err(BackendError::Unsupported { capability: Capability::Multicast, reason })
    }

    /// Maps part of an allocation copy-on-write for the CPU; `None` if the CPU cannot address such memory.
    ///
    /// # Errors
    /// Returns the kernel's error; nothing is mapped.
    ///
    /// # Safety
    /// The contract of the [module](super) holds, except that a forked child may call this too.
    unsafe fn map_private(
        &self,
        _allocation: RawAllocation,
        _offset: usize,
        _len: usize,
    ) -> Result<Option<PrivateMap>, BackendError> {
        Ok(None)
    }

    /// Revokes the CPU's access to a mapped range in this process. Does nothing if the CPU cannot access the range.
    ///
    /// # Errors
    /// Returns the kernel's error.
    ///
    /// # Safety
    /// The range is mapped, and a fault on a later access is intended. A forked child may call this too.
    unsafe fn revoke(&self, _at: Address, _len: usize) -> Result<(), BackendError> {
        Ok(())
    }

    /// Returns the CPU's pointer for a device address; `None` if the CPU cannot address the memory.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn host_pointer(&self, at: Address) -> Result<Option<NonNull<u8>>, BackendError>;
}
