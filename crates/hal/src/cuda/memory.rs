//! The raw memory operations on GPUs, through the CUDA driver's virtual memory management.

use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::LazyLock;

use wholemem_os::width::to_usize;

use super::Gpus;
use super::bindings::*;
use super::code::{implausible, invalid_value, release_or_leak};
use super::driver::Driver;
use super::pinned_pool::PinnedPool;
use crate::raw::{Address, AllocationProperties, BackendFact, ImportedAllocation, RawAllocation, RawMemory};
use crate::{
    AllocationSpec, BackendError, BackendKind, Capability, DeviceId, DeviceInfo, Grant, Granularity, Granule,
    HandleKind, Rights, ShareHandle,
};

/// The device whose context is made current for driver calls that need any context.
const ANY: DeviceId = DeviceId(0);

/// The PTX version of this project's kernels.
const PTX: &str = "8.4";

/// GPU memory as an implementation of `RawMemory`.
#[derive(Debug)]
pub(crate) struct CudaMemory {
    gpus: &'static Gpus,
    pinned_pool: &'static PinnedPool,
}

impl CudaMemory {
    pub(super) fn new(gpus: &'static Gpus) -> Self {
        // The pool lives until the process exits, as do contexts and the memory pinned in them.
        static POOL: LazyLock<PinnedPool> = LazyLock::new(PinnedPool::default);
        Self { gpus, pinned_pool: &POOL }
    }

    /// Allocates `len` bytes of pinned host memory from the driver.
    fn alloc_pinned(&self, device: DeviceId, len: usize) -> Result<*mut u8, BackendError> {
        let _current = self.gpus.enter(device)?;
        let mut at = std::ptr::null_mut();
        let flags = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the driver call writes only `at`, which is writable.
        unsafe { (self.driver().cuMemHostAlloc)(&raw mut at, len, flags) }.ok("cuMemHostAlloc")?;
        Ok(at.cast())
    }

    fn driver(&self) -> &'static Driver {
        self.gpus.driver()
    }

    /// Converts the description of memory to create to that of the driver.
    fn prop(&self, spec: &AllocationSpec) -> Result<CUmemAllocationProp_v1, BackendError> {
        let (type_, id) = match spec.node {
            None => (CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, self.gpus.ordinal(spec.device)),
            Some(node) => {
                let node = c_int::try_from(node).map_err(|_| invalid_value("cuMemCreate"))?;
                (CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA, node)
            }
        };
        Ok(CUmemAllocationProp_v1 {
            type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: handle_type(spec.handle),
            location: CUmemLocation { type_, id },
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: u8::from(spec.rdma),
                usage: 0,
                reserved: [0; 4],
            },
        })
    }

    fn granule(
        &self,
        prop: &CUmemAllocationProp_v1,
        which: CUmemAllocationGranularity_flags,
    ) -> Result<Granule, BackendError> {
        let mut len = 0;
        // SAFETY: `len` is writable and `prop` is initialized.
        unsafe { (self.driver().cuMemGetAllocationGranularity)(&raw mut len, prop, which) }
            .ok("cuMemGetAllocationGranularity")?;
        Granule::new(len).map_err(|_| {
            let reason = "the driver's granularity is not a power of two";
            BackendError::Unsupported { capability: Capability::Create, reason }
        })
    }
}

/// Returns the driver's handle type; `NONE` for handles that do not refer to allocations.
fn handle_type(kind: HandleKind) -> CUmemAllocationHandleType {
    match kind {
        HandleKind::Fd => CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        HandleKind::Fabric => CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC,
        HandleKind::CudaIpc => CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
    }
}

/// Sets close-on-exec on a descriptor from the driver: otherwise programs that this process starts would inherit it.
fn close_on_exec(fd: OwnedFd) -> Result<OwnedFd, BackendError> {
    let failed = |errno| BackendError::Os(wholemem_os::Error::Call { call: "fcntl", errno });
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC).map_err(failed)?;
    Ok(fd)
}

fn ipc_unsupported() -> BackendError {
    let reason = "CUDA IPC handles refer to memory from `cudaMalloc`, not to allocations";
    BackendError::Unsupported { capability: Capability::CudaIpc, reason }
}

// SAFETY: each method makes the corresponding driver call; the driver maps whole allocations at reserved addresses
// and refuses handles that are not memory; driver memory never shrinks; host pointers come from the driver.
unsafe impl RawMemory for CudaMemory {
    fn kind(&self) -> BackendKind {
        BackendKind::Cuda
    }

    fn devices(&self) -> &[DeviceInfo] {
        self.gpus.infos()
    }

    fn facts(&self) -> Vec<BackendFact> {
        let shared = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MPS_ENABLED;
        let (mps, detail) = match self.gpus.attribute(ANY, shared) {
            Ok(0) => (false, "no MPS server is running: processes are time-sliced on the GPU".to_owned()),
            Ok(_) => (true, "an MPS server is running: processes share the GPU concurrently".to_owned()),
            Err(cause) => (false, cause.to_string()),
        };
        vec![
            BackendFact {
                name: "driver",
                holds: true,
                detail: format!("supports CUDA {}", self.driver().version_name()),
            },
            BackendFact { name: "ptx", holds: true, detail: PTX.to_owned() },
            BackendFact { name: "mps", holds: mps, detail },
        ]
    }

    fn granularity(&self, spec: &AllocationSpec) -> Result<Granularity, BackendError> {
        if spec.handle == HandleKind::CudaIpc {
            return Err(ipc_unsupported());
        }
        if spec.rdma {
            let which = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
            if self.gpus.attribute(spec.device, which)? == 0 {
                let reason = "the driver reports no GPUDirect RDMA support for such memory";
                return Err(BackendError::Unsupported { capability: Capability::Rdma, reason });
            }
        }
        let prop = self.prop(spec)?;
        Ok(Granularity {
            minimum: self
                .granule(&prop, CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM)?,
            recommended: self
                .granule(&prop, CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)?,
        })
    }

    unsafe fn available(&self, device: DeviceId) -> Result<usize, BackendError> {
        let _current = self.gpus.enter(device)?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: `free` and `total` are writable.
        unsafe { (self.driver().cuMemGetInfo)(&raw mut free, &raw mut total) }.ok("cuMemGetInfo")?;
        Ok(free)
    }

    unsafe fn create(&self, spec: &AllocationSpec) -> Result<RawAllocation, BackendError> {
        let (prop, mut handle) = (self.prop(spec)?, 0);
        // SAFETY: `handle` is writable and `prop` is initialized.
        unsafe { (self.driver().cuMemCreate)(&raw mut handle, spec.len, &raw const prop, 0) }
            .ok("cuMemCreate")?;
        Ok(RawAllocation(handle))
    }

    unsafe fn release(&self, allocation: RawAllocation) -> Result<(), BackendError> {
        // SAFETY: the caller of `release` guarantees the contract of the module `raw`: the allocation is live, and
        // this is its only release.
        unsafe { (self.driver().cuMemRelease)(allocation.0) }.ok("cuMemRelease")
    }

    unsafe fn reserve(
        &self,
        len: usize,
        align: Option<usize>,
        wanted: Option<Address>,
    ) -> Result<Address, BackendError> {
        let (mut at, hint) = (0, wanted.map_or(0, |wanted| wanted.0));
        // SAFETY: `at` is writable; if the wanted addresses are not free, the driver returns an error or other
        // addresses.
        unsafe { (self.driver().cuMemAddressReserve)(&raw mut at, len, align.unwrap_or(0), hint, 0) }
            .ok("cuMemAddressReserve")?;
        if hint != 0 && at != hint {
            // The driver treats the wanted address as a hint.
            // SAFETY: the range was reserved above, and no code uses it.
            release_or_leak("cuMemAddressFree", || unsafe { (self.driver().cuMemAddressFree)(at, len) });
            return Err(invalid_value("cuMemAddressReserve"));
        }
        Ok(Address(at))
    }

    unsafe fn free(&self, at: Address, len: usize) -> Result<(), BackendError> {
        // SAFETY: the caller of `free` guarantees the contract of the module `raw`: the range is one reservation in
        // which nothing is mapped, and this is its only release.
        unsafe { (self.driver().cuMemAddressFree)(at.0, len) }.ok("cuMemAddressFree")
    }

    unsafe fn map(&self, at: Address, len: usize, allocation: RawAllocation) -> Result<(), BackendError> {
        // SAFETY: the caller of `map` guarantees the contract of the module `raw`: the range is an unmapped part of
        // one reservation, and the allocation is live.
        unsafe { (self.driver().cuMemMap)(at.0, len, 0, allocation.0, 0) }.ok("cuMemMap")
    }

    unsafe fn set_access(&self, at: Address, len: usize, grants: &[Grant]) -> Result<(), BackendError> {
        let flags = |rights| match rights {
            Rights::None => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE,
            Rights::Read => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ,
            Rights::ReadWrite => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let describe = |grant: &Grant| CUmemAccessDesc_v1 {
            location: CUmemLocation {
                type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
                id: self.gpus.ordinal(grant.device),
            },
            flags: flags(grant.rights),
        };
        let descriptions: Vec<_> = grants.iter().map(describe).collect();
        // SAFETY: the caller of `set_access` guarantees the contract of the module `raw`: the range is mapped;
        // `descriptions` has the given length.
        unsafe { (self.driver().cuMemSetAccess)(at.0, len, descriptions.as_ptr(), descriptions.len()) }
            .ok("cuMemSetAccess")
    }

    unsafe fn unmap(&self, at: Address, len: usize) -> Result<(), BackendError> {
        // SAFETY: the caller of `unmap` guarantees the contract of the module `raw`: the range was mapped by one
        // call and is no longer used.
        unsafe { (self.driver().cuMemUnmap)(at.0, len) }.ok("cuMemUnmap")
    }

    unsafe fn export(
        &self,
        allocation: RawAllocation,
        kind: HandleKind,
        rights: Rights,
    ) -> Result<ShareHandle, BackendError> {
        if rights != Rights::ReadWrite {
            let reason =
                "the driver's handles carry no access rights; only the receiver's mapping can be read-only";
            return Err(BackendError::Unsupported { capability: Capability::ShareReadOnly, reason });
        }
        let export = |target: *mut c_void| {
            // SAFETY: the allocation is live, and `target` is large enough for this kind of handle.
            let code = unsafe {
                (self.driver().cuMemExportToShareableHandle)(target, allocation.0, handle_type(kind), 0)
            };
            if code == CUresult::CUDA_ERROR_INVALID_VALUE && kind == HandleKind::Fd {
                let reason = "the driver exports only memory that this process created as shareable";
                return Err(BackendError::Unsupported { capability: Capability::ShareFd, reason });
            }
            code.ok("cuMemExportToShareableHandle")
        };
        match kind {
            HandleKind::Fd => {
                let mut fd: RawFd = -1;
                export((&raw mut fd).cast())?;
                // SAFETY: the driver created `fd` for the caller, and no other code uses it.
                Ok(ShareHandle::Fd(close_on_exec(unsafe { OwnedFd::from_raw_fd(fd) })?))
            }
            HandleKind::Fabric => {
                let mut token = [0_u8; 64];
                export(token.as_mut_ptr().cast())?;
                Ok(ShareHandle::Fabric(token))
            }
            HandleKind::CudaIpc => Err(ipc_unsupported()),
        }
    }

    fn caches_exports(&self) -> bool {
        // The first export of an allocation takes most of a millisecond on an H200, as much as all other steps of sharing 16 GiB
        // together, so its descriptor is cached.
        true
    }

    unsafe fn import(
        &self,
        _device: DeviceId,
        handle: ShareHandle,
        _len: usize,
    ) -> Result<ImportedAllocation, BackendError> {
        let kind = handle_type(handle.kind());
        let import = |source: *mut c_void| {
            let mut raw = 0;
            // SAFETY: `raw` is writable; the driver validates `source` and refuses a foreign handle.
            unsafe { (self.driver().cuMemImportFromShareableHandle)(&raw mut raw, source, kind) }
                .ok("cuMemImportFromShareableHandle")?;
            Ok(ImportedAllocation { raw: RawAllocation(raw), rights: Rights::ReadWrite })
        };
        match handle {
            // The driver takes the number of the descriptor in place of a pointer.
            ShareHandle::Fd(fd) => {
                import(std::ptr::without_provenance_mut(fd.as_raw_fd().unsigned_abs() as usize))
            }
            ShareHandle::Fabric(mut token) => import(token.as_mut_ptr().cast()),
            ShareHandle::CudaIpc { .. } => Err(ipc_unsupported()),
        }
    }

    unsafe fn retain(&self, at: Address) -> Result<RawAllocation, BackendError> {
        let (mut handle, at) = (0, at.to_host().map_or(std::ptr::null_mut(), NonNull::as_ptr));
        // SAFETY: `handle` is writable; for an address without an allocation the driver returns an error.
        let code = unsafe { (self.driver().cuMemRetainAllocationHandle)(&raw mut handle, at.cast()) };
        if code == CUresult::CUDA_ERROR_INVALID_VALUE {
            let reason = "the memory is from `cudaMalloc`; \
                          in PyTorch set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`";
            return Err(BackendError::Unsupported { capability: Capability::ShareFd, reason });
        }
        code.ok("cuMemRetainAllocationHandle")?;
        Ok(RawAllocation(handle))
    }

    unsafe fn address_range(&self, at: Address) -> Result<(Address, usize), BackendError> {
        let _current = self.gpus.enter(ANY)?;
        let (mut base, mut len) = (0, 0);
        // SAFETY: `base` and `len` are writable; for an address without memory the driver returns an error.
        unsafe { (self.driver().cuMemGetAddressRange)(&raw mut base, &raw mut len, at.0) }
            .ok("cuMemGetAddressRange")?;
        Ok((Address(base), len))
    }

    unsafe fn device_at(&self, at: Address) -> Result<Option<DeviceId>, BackendError> {
        let _current = self.gpus.enter(ANY)?;
        let mut ordinal: c_int = -1;
        let which = CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
        // SAFETY: `ordinal` is writable and has the size of this attribute; for an address without memory the driver
        // returns an error.
        let code = unsafe { (self.driver().cuPointerGetAttribute)((&raw mut ordinal).cast(), which, at.0) };
        if code == CUresult::CUDA_ERROR_INVALID_VALUE {
            return Ok(None);
        }
        code.ok("cuPointerGetAttribute")?;
        Ok(self.gpus.device_of(ordinal))
    }

    unsafe fn memory_id(&self, at: Address) -> Result<Option<u64>, BackendError> {
        let mut id = 0_u64;
        let which = CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID;
        // Most callers have a current context, and entering one takes longer than this query.
        // SAFETY: `id` is writable and has the size of this attribute; for an address without memory the driver returns an error.
        let mut code = unsafe { (self.driver().cuPointerGetAttribute)((&raw mut id).cast(), which, at.0) };
        if code == CUresult::CUDA_ERROR_INVALID_CONTEXT {
            let _current = self.gpus.enter(ANY)?;
            // SAFETY: `id` is writable and has the size of this attribute; for an address without memory the driver returns an
            // error.
            code = unsafe { (self.driver().cuPointerGetAttribute)((&raw mut id).cast(), which, at.0) };
        }
        if code == CUresult::CUDA_ERROR_INVALID_VALUE {
            return Ok(None);
        }
        code.ok("cuPointerGetAttribute")?;
        // The driver numbers memory from 1, so an id of 0 means that there is none.
        Ok((id != 0).then_some(id))
    }

    unsafe fn properties(&self, allocation: RawAllocation) -> Result<AllocationProperties, BackendError> {
        let mut prop = MaybeUninit::<CUmemAllocationProp_v1>::zeroed();
        // SAFETY: `prop` is writable, and the allocation is live.
        unsafe { (self.driver().cuMemGetAllocationPropertiesFromHandle)(prop.as_mut_ptr(), allocation.0) }
            .ok("cuMemGetAllocationPropertiesFromHandle")?;
        // SAFETY: zeroed bytes are valid for every field of `prop`, and the driver has filled them in.
        let prop = unsafe { prop.assume_init() };
        let is_device = prop.location.type_ == CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        let device = is_device.then(|| self.gpus.device_of(prop.location.id)).flatten();
        let has = |kind: &HandleKind| prop.requestedHandleTypes.0 & handle_type(*kind).0 != 0;
        let handles = [HandleKind::Fd, HandleKind::Fabric].into_iter().filter(has).collect();
        Ok(AllocationProperties { len: None, device, handles })
    }

    unsafe fn dma_buf(&self, at: Address, len: usize) -> Result<OwnedFd, BackendError> {
        let Some(get) = self.driver().cuMemGetHandleForAddressRange else {
            let reason = "the driver has no `cuMemGetHandleForAddressRange`";
            return Err(BackendError::Unsupported { capability: Capability::DmaBuf, reason });
        };
        let _current = self.gpus.enter(ANY)?;
        let mut fd: RawFd = -1;
        let kind = CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        // SAFETY: the driver writes the new descriptor to the local `fd`, and the caller of `dma_buf` guarantees that the range
        // is mapped.
        unsafe { get((&raw mut fd).cast(), at.0, len, kind, 0) }.ok("cuMemGetHandleForAddressRange")?;
        // SAFETY: the driver created `fd` for the caller, and no other code uses it.
        close_on_exec(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    unsafe fn pin(&self, device: DeviceId, len: usize) -> Result<Address, BackendError> {
        let at = match self.pinned_pool.take(len).and_then(Address::to_host) {
            Some(at) => at.as_ptr(),
            None => self.alloc_pinned(device, PinnedPool::round_up(len))?,
        };
        // SAFETY: the buffer at `at` has at least `len` bytes, and no other code uses it.
        unsafe { at.write_bytes(0, len) };
        Ok(Address::of_host(at))
    }

    unsafe fn unpin(&self, at: Address, len: usize) -> Result<(), BackendError> {
        if self.pinned_pool.put(at, len) {
            return Ok(());
        }
        let _current = self.gpus.enter(ANY)?;
        let at = at.to_host().map_or(std::ptr::null_mut(), NonNull::as_ptr);
        // SAFETY: the buffer is from `pin`, and this is its only release.
        unsafe { (self.driver().cuMemFreeHost)(at.cast()) }.ok("cuMemFreeHost")
    }

    unsafe fn register(&self, at: NonNull<u8>, len: usize, rights: Rights) -> Result<Address, BackendError> {
        let _current = self.gpus.enter(ANY)?;
        let read_only = if rights == Rights::ReadWrite { 0 } else { CU_MEMHOSTREGISTER_READ_ONLY };
        let flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP | read_only;
        // SAFETY: the caller of `register` guarantees the contract of the module `raw`: the range stays mapped with
        // these rights until it is unregistered.
        unsafe { (self.driver().cuMemHostRegister)(at.as_ptr().cast(), len, flags) }
            .ok("cuMemHostRegister")?;
        let mut seen = 0;
        // SAFETY: `seen` is writable, and the range was registered above.
        let code = unsafe { (self.driver().cuMemHostGetDevicePointer)(&raw mut seen, at.as_ptr().cast(), 0) };
        if let Err(cause) = code.ok("cuMemHostGetDevicePointer") {
            // SAFETY: the range was registered above, and no device uses it yet.
            let unregister = || unsafe { (self.driver().cuMemHostUnregister)(at.as_ptr().cast()) };
            release_or_leak("cuMemHostUnregister", unregister);
            return Err(cause);
        }
        Ok(Address(seen))
    }

    unsafe fn unregister(&self, at: NonNull<u8>, _len: usize) -> Result<(), BackendError> {
        let _current = self.gpus.enter(ANY)?;
        // SAFETY: the caller of `unregister` guarantees the contract of the module `raw`: the range was registered,
        // and devices no longer use it.
        unsafe { (self.driver().cuMemHostUnregister)(at.as_ptr().cast()) }.ok("cuMemHostUnregister")
    }

    unsafe fn cuda_malloc(&self, device: DeviceId, len: usize) -> Result<Address, BackendError> {
        let _current = self.gpus.enter(device)?;
        let mut at = 0;
        // SAFETY: the driver call writes only `at`, which is writable.
        unsafe { (self.driver().cuMemAlloc)(&raw mut at, len) }.ok("cuMemAlloc")?;
        Ok(Address(at))
    }

    unsafe fn cuda_free(&self, device: DeviceId, at: Address) -> Result<(), BackendError> {
        let _current = self.gpus.enter(device)?;
        // SAFETY: the buffer is from `cuda_malloc`, and this is its only release.
        unsafe { (self.driver().cuMemFree)(at.0) }.ok("cuMemFree")
    }

    unsafe fn export_cuda_ipc(&self, device: DeviceId, at: Address) -> Result<ShareHandle, BackendError> {
        // SAFETY: `address_range` accepts any address, and refuses one without memory.
        let (base, _) = unsafe { self.address_range(at) }?;
        let _current = self.gpus.enter(device)?;
        let mut token = MaybeUninit::<CUipcMemHandle_v1>::zeroed();
        // SAFETY: `token` is writable; for memory without a CUDA IPC handle the driver returns an error.
        unsafe { (self.driver().cuIpcGetMemHandle)(token.as_mut_ptr(), base.0) }.ok("cuIpcGetMemHandle")?;
        // SAFETY: zeroed bytes are a valid token, and the driver has filled them in.
        let token = unsafe { token.assume_init() }.reserved.map(|byte| byte.to_ne_bytes()[0]);
        let offset = at.0.checked_sub(base.0).ok_or_else(|| implausible("cuMemGetAddressRange"))?;
        Ok(ShareHandle::CudaIpc { token, offset: to_usize(offset) })
    }

    unsafe fn open_cuda_ipc(&self, device: DeviceId, handle: &ShareHandle) -> Result<Address, BackendError> {
        let ShareHandle::CudaIpc { token, .. } = handle else { return Err(ipc_unsupported()) };
        let _current = self.gpus.enter(device)?;
        let token = CUipcMemHandle_v1 { reserved: token.map(|byte| c_char::from_ne_bytes([byte])) };
        let (mut at, flags) = (0, CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.0);
        // SAFETY: `at` is writable; for an invalid token the driver returns an error.
        unsafe { (self.driver().cuIpcOpenMemHandle)(&raw mut at, token, flags) }.ok("cuIpcOpenMemHandle")?;
        Ok(Address(at))
    }

    unsafe fn close_cuda_ipc(&self, device: DeviceId, at: Address) -> Result<(), BackendError> {
        let _current = self.gpus.enter(device)?;
        // SAFETY: the buffer was opened by `open_cuda_ipc`, and is no longer used.
        unsafe { (self.driver().cuIpcCloseMemHandle)(at.0) }.ok("cuIpcCloseMemHandle")
    }

    unsafe fn create_multicast(
        &self,
        devices: &[DeviceId],
        len: usize,
    ) -> Result<RawAllocation, BackendError> {
        let unsupported = |reason| BackendError::Unsupported { capability: Capability::Multicast, reason };
        let driver = self.driver();
        let (Some(create), Some(add)) = (driver.cuMulticastCreate, driver.cuMulticastAddDevice) else {
            return Err(unsupported("the driver has no `cuMulticastCreate`"));
        };
        for &device in devices {
            let which = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED;
            if self.gpus.attribute(device, which)? == 0 {
                return Err(unsupported("the driver reports no multicast support for this GPU"));
            }
        }
        let prop = CUmulticastObjectProp_v1 {
            numDevices: u32::try_from(devices.len()).expect("the driver counts GPUs in an `int`"),
            size: len,
            handleTypes: u64::from(handle_type(HandleKind::Fd).0),
            flags: 0,
        };
        let mut handle = 0;
        // SAFETY: `handle` is writable and `prop` is initialized.
        unsafe { create(&raw mut handle, &raw const prop) }.ok("cuMulticastCreate")?;
        for &device in devices {
            // SAFETY: the multicast object was created above for these devices.
            if let Err(cause) = unsafe { add(handle, self.gpus.ordinal(device)) }.ok("cuMulticastAddDevice") {
                // SAFETY: the multicast object was created above, and no code uses it.
                release_or_leak("cuMemRelease", || unsafe { (driver.cuMemRelease)(handle) });
                return Err(cause);
            }
        }
        Ok(RawAllocation(handle))
    }

    unsafe fn bind_multicast(
        &self,
        multicast: RawAllocation,
        allocation: RawAllocation,
        len: usize,
    ) -> Result<(), BackendError> {
        let Some(bind) = self.driver().cuMulticastBindMem else {
            let reason = "the driver has no `cuMulticastBindMem`";
            return Err(BackendError::Unsupported { capability: Capability::Multicast, reason });
        };
        // SAFETY: the caller of `bind_multicast` guarantees that the multicast object and the allocation are live
        // and have the length `len`.
        unsafe { bind(multicast.0, 0, allocation.0, 0, len, 0) }.ok("cuMulticastBindMem")
    }

    fn host_pointer(&self, at: Address) -> Result<Option<NonNull<u8>>, BackendError> {
        let _current = self.gpus.enter(ANY)?;
        let mut pointer: *mut u8 = std::ptr::null_mut();
        let which = CUpointer_attribute::CU_POINTER_ATTRIBUTE_HOST_POINTER;
        // SAFETY: `pointer` is writable and has the size of this attribute; for memory without a host pointer the
        // driver returns an error.
        let code = unsafe { (self.driver().cuPointerGetAttribute)((&raw mut pointer).cast(), which, at.0) };
        if code == CUresult::CUDA_ERROR_INVALID_VALUE {
            return Ok(None);
        }
        code.ok("cuPointerGetAttribute")?;
        Ok(NonNull::new(pointer))
    }
}
