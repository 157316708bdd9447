//! Baseline driver calls for benchmarks: create, export, import, map and access GPU memory, and launch kernels, without checks.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use wholemem_os::width::to_usize;

use super::Gpus;
use super::bindings::*;
use super::code::implausible;
use super::driver::Driver;
use crate::raw::RawFunction;
use crate::{BackendError, Capability, DeviceId, LaunchShape};

const FD: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// A CUDA device for benchmarks, with a stream and two bytes of pinned memory through which memory is accessed.
#[derive(Debug)]
pub(crate) struct CudaCalls {
    gpus: &'static Gpus,
    device: DeviceId,
    stream: CUstream,
    stage: *mut u8,
}

/// An allocation of the CUDA driver that is released on drop.
#[derive(Debug)]
pub(crate) struct CudaHandle {
    driver: &'static Driver,
    handle: u64,
}

/// A mapping of GPU memory that is removed on drop, together with its addresses.
#[derive(Debug)]
pub(crate) struct CudaMap {
    driver: &'static Driver,
    at: u64,
    len: usize,
    mapped: bool,
}

impl CudaCalls {
    pub(crate) fn open(device: DeviceId) -> Result<Self, BackendError> {
        let reason = "the driver is no longer available";
        let unavailable = BackendError::Unsupported { capability: Capability::Create, reason };
        let gpus = Gpus::of_process().map_err(|_| unavailable)?;
        let _current = gpus.enter(device)?;
        let (mut stream, mut stage) = (std::ptr::null_mut(), std::ptr::null_mut());
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING.0;
        // SAFETY: the driver call writes only `stream`, which is writable.
        unsafe { (gpus.driver().cuStreamCreate)(&raw mut stream, flags) }.ok("cuStreamCreate")?;
        // SAFETY: the driver call writes only `stage`, which is writable.
        unsafe { (gpus.driver().cuMemHostAlloc)(&raw mut stage, 2, CU_MEMHOSTALLOC_PORTABLE) }
            .ok("cuMemHostAlloc")?;
        Ok(Self { gpus, device, stream, stage: stage.cast() })
    }

    pub(crate) fn create(&self, len: usize) -> Result<CudaHandle, BackendError> {
        let location = CUmemLocation {
            type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: self.gpus.ordinal(self.device),
        };
        let prop = CUmemAllocationProp_v1 {
            type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: FD,
            location,
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        };
        let (driver, mut handle) = (self.gpus.driver(), 0);
        // SAFETY: `handle` is writable and `prop` is initialized.
        unsafe { (driver.cuMemCreate)(&raw mut handle, len, &raw const prop, 0) }.ok("cuMemCreate")?;
        Ok(CudaHandle { driver, handle })
    }

    pub(crate) fn export(&self, allocation: &CudaHandle) -> Result<OwnedFd, BackendError> {
        let mut fd: RawFd = -1;
        // SAFETY: the allocation is live, and `fd` has room for a descriptor.
        unsafe {
            (self.gpus.driver().cuMemExportToShareableHandle)((&raw mut fd).cast(), allocation.handle, FD, 0)
        }
        .ok("cuMemExportToShareableHandle")?;
        // SAFETY: the driver created `fd` for the caller, and no other code uses it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    pub(crate) fn import(&self, fd: &OwnedFd) -> Result<CudaHandle, BackendError> {
        let (driver, mut handle) = (self.gpus.driver(), 0);
        let source = std::ptr::without_provenance_mut(fd.as_raw_fd().unsigned_abs() as usize);
        // SAFETY: `handle` is writable, and the driver refuses a descriptor that does not refer to memory.
        unsafe { (driver.cuMemImportFromShareableHandle)(&raw mut handle, source, FD) }
            .ok("cuMemImportFromShareableHandle")?;
        Ok(CudaHandle { driver, handle })
    }

    pub(crate) fn map(&self, allocation: &CudaHandle, len: usize) -> Result<CudaMap, BackendError> {
        let (driver, mut at) = (self.gpus.driver(), 0);
        // SAFETY: the driver call writes only `at`, which is writable.
        unsafe { (driver.cuMemAddressReserve)(&raw mut at, len, 0, 0, 0) }.ok("cuMemAddressReserve")?;
        let mut map = CudaMap { driver, at, len, mapped: false };
        // SAFETY: the range was reserved above, and the allocation is live.
        unsafe { (driver.cuMemMap)(at, len, 0, allocation.handle, 0) }.ok("cuMemMap")?;
        map.mapped = true;
        let access = CUmemAccessDesc_v1 {
            location: CUmemLocation {
                type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
                id: self.gpus.ordinal(self.device),
            },
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the range was mapped above, and `access` is one description.
        unsafe { (driver.cuMemSetAccess)(at, len, &raw const access, 1) }.ok("cuMemSetAccess")?;
        Ok(map)
    }

    pub(crate) fn ends(&self, map: &CudaMap) -> Result<[u8; 2], BackendError> {
        self.copy([(self.stage_at(0), map.at), (self.stage_at(1), map.last())])?;
        // SAFETY: `stage` has two bytes, and the copies that wrote them have finished.
        Ok(unsafe { self.stage.cast::<[u8; 2]>().read_volatile() })
    }

    pub(crate) fn set_ends(&self, map: &CudaMap, ends: [u8; 2]) -> Result<(), BackendError> {
        // SAFETY: `stage` has two bytes, and no copy reads them now.
        unsafe { self.stage.cast::<[u8; 2]>().write_volatile(ends) };
        self.copy([(map.at, self.stage_at(0)), (map.last(), self.stage_at(1))])
    }

    fn stage_at(&self, index: u64) -> u64 {
        self.stage.expose_provenance() as u64 + index
    }

    /// Copies two single bytes on the device, and waits for the copies.
    fn copy(&self, pairs: [(u64, u64); 2]) -> Result<(), BackendError> {
        let _current = self.gpus.enter(self.device)?;
        for (to, from) in pairs {
            // SAFETY: the addresses are those of the ends of a live mapping, and of the bytes of `stage`.
            unsafe { (self.gpus.driver().cuMemcpyAsync)(to, from, 1, self.stream) }.ok("cuMemcpyAsync")?;
        }
        // SAFETY: the stream is live, since `self` owns it.
        unsafe { (self.gpus.driver().cuStreamSynchronize)(self.stream) }.ok("cuStreamSynchronize")
    }

    /// Returns the shortest time of several copies, measured with events of the device.
    pub(crate) fn best_copy(
        &self,
        to: u64,
        from: u64,
        len: usize,
        times: u32,
    ) -> Result<std::time::Duration, BackendError> {
        let driver = self.gpus.driver();
        let _current = self.gpus.enter(self.device)?;
        let mut events = [std::ptr::null_mut(); 2];
        for event in &mut events {
            // SAFETY: the driver call writes only `event`, which is writable.
            unsafe { (driver.cuEventCreate)(event, CUevent_flags::CU_EVENT_DEFAULT.0) }
                .ok("cuEventCreate")?;
        }
        let [start, end] = events;
        let mut best = f32::INFINITY;
        for _ in 0..times {
            // SAFETY: `start` and the stream are live.
            unsafe { (driver.cuEventRecord)(start, self.stream) }.ok("cuEventRecord")?;
            // SAFETY: the caller's spans hold both ranges, which are mapped and have `len` bytes; the stream is live.
            unsafe { (driver.cuMemcpyAsync)(to, from, len, self.stream) }.ok("cuMemcpyAsync")?;
            // SAFETY: `end` and the stream are live.
            unsafe { (driver.cuEventRecord)(end, self.stream) }.ok("cuEventRecord")?;
            // SAFETY: the stream is live, since `self` owns it.
            unsafe { (driver.cuStreamSynchronize)(self.stream) }.ok("cuStreamSynchronize")?;
            let mut milliseconds = 0.0;
            // SAFETY: both events have completed, since the stream is idle.
            unsafe { (driver.cuEventElapsedTime)(&raw mut milliseconds, start, end) }
                .ok("cuEventElapsedTime")?;
            best = best.min(milliseconds);
        }
        for event in events {
            // SAFETY: the event was created above, and is no longer used.
            unsafe { (driver.cuEventDestroy)(event) }.ok("cuEventDestroy")?;
        }
        std::time::Duration::try_from_secs_f32(best / 1e3).map_err(|_| implausible("cuEventElapsedTime"))
    }
}

/// A launch of a kernel that accesses no memory and has one parameter.
#[derive(Debug)]
pub(crate) struct EmptyLaunch<'a> {
    pub(crate) stream: u64,
    pub(crate) function: RawFunction,
    pub(crate) shape: &'a LaunchShape,
    pub(crate) request: &'a [u8],
    /// True if the context is made current for each launch, false if it stays current.
    pub(crate) enters_each: bool,
}

/// Launches a kernel `count` times.
pub(crate) fn launch_empty(
    device: DeviceId,
    launch: &EmptyLaunch<'_>,
    count: u32,
) -> Result<(), BackendError> {
    let reason = "the driver is no longer available";
    let unavailable = BackendError::Unsupported { capability: Capability::Kernels, reason };
    let gpus = Gpus::of_process().map_err(|_| unavailable)?;
    let EmptyLaunch { shape, request, .. } = launch;
    let ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]) = (shape.grid, shape.block);
    let mut attribute = CUlaunchAttribute {
        id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: CUlaunchAttributeValue { pad: [0; 64] },
    };
    attribute.value.programmaticStreamSerializationAllowed = 1;
    let config = CUlaunchConfig {
        gridDimX: grid_x,
        gridDimY: grid_y,
        gridDimZ: grid_z,
        blockDimX: block_x,
        blockDimY: block_y,
        blockDimZ: block_z,
        sharedMemBytes: shape.shared_len,
        hStream: std::ptr::with_exposed_provenance_mut(to_usize(launch.stream)),
        attrs: &raw mut attribute,
        numAttrs: u32::from(shape.programmatic),
    };
    let function = std::ptr::with_exposed_provenance_mut(to_usize(launch.function.handle));
    let mut parameters = [request.as_ptr().cast_mut().cast()];
    let _current = if launch.enters_each { None } else { Some(gpus.enter(device)?) };
    for _ in 0..count {
        let _current = if launch.enters_each { Some(gpus.enter(device)?) } else { None };
        // SAFETY: the caller's function and stream are live, and of this device; the function has one parameter of the length of
        // `request`, which the driver copies; `config` has at most one attribute.
        unsafe {
            (gpus.driver().cuLaunchKernelEx)(
                &raw const config,
                function,
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
        .ok("cuLaunchKernelEx")?;
    }
    Ok(())
}

impl CudaMap {
    fn last(&self) -> u64 {
        self.at + self.len as u64 - 1
    }
}

// The destructors ignore errors of the driver: a benchmark does not retry a release.
impl Drop for CudaCalls {
    fn drop(&mut self) {
        let Ok(_current) = self.gpus.enter(self.device) else { return };
        // SAFETY: `CudaCalls` owns the stream, which is no longer used.
        let _ = unsafe { (self.gpus.driver().cuStreamDestroy)(self.stream) };
        // SAFETY: `CudaCalls` owns the buffer, which is no longer used.
        let _ = unsafe { (self.gpus.driver().cuMemFreeHost)(self.stage.cast()) };
    }
}

impl Drop for CudaHandle {
    fn drop(&mut self) {
        // SAFETY: the allocation is live, and this is its only release.
        let _ = unsafe { (self.driver.cuMemRelease)(self.handle) };
    }
}

impl Drop for CudaMap {
    fn drop(&mut self) {
        if self.mapped {
            // SAFETY: the range was mapped by one call, and is no longer used.
            let _ = unsafe { (self.driver.cuMemUnmap)(self.at, self.len) };
        }
        // SAFETY: the range was reserved by one call, and nothing is mapped in it any more.
        let _ = unsafe { (self.driver.cuMemAddressFree)(self.at, self.len) };
    }
}
