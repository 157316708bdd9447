//! The raw calls of GPU memory: created, exported, imported, mapped and touched, with nothing around them.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use super::Gpus;
use super::bindings::*;
use super::code::implausible;
use super::driver::Driver;
use crate::{Capability, Cause, DeviceId};

const FD: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// The driver, a device of it, and what it takes to touch memory there: a stream and two bytes of pinned memory.
#[derive(Debug)]
pub(crate) struct RawCuda {
    gpus: &'static Gpus,
    device: DeviceId,
    stream: CUstream,
    stage: *mut u8,
}

/// An allocation that is released when this is dropped.
#[derive(Debug)]
pub(crate) struct RawMade {
    driver: &'static Driver,
    handle: u64,
}

/// A map that is removed, with its addresses, when this is dropped.
#[derive(Debug)]
pub(crate) struct RawMap {
    driver: &'static Driver,
    at: u64,
    len: usize,
    mapped: bool,
}

impl RawCuda {
    pub(crate) fn open(device: DeviceId) -> Result<Self, Cause> {
        let reason = "the driver was there a moment ago";
        let gone = Cause::Unsupported { capability: Capability::Create, reason };
        let gpus = Gpus::of_process().map_err(|_| gone)?;
        let _current = gpus.enter(device)?;
        let (mut stream, mut stage) = (std::ptr::null_mut(), std::ptr::null_mut());
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING.0;
        // SAFETY: `stream` is writable.
        unsafe { (gpus.driver().cuStreamCreate)(&raw mut stream, flags) }.ok("cuStreamCreate")?;
        // SAFETY: `stage` is writable.
        unsafe { (gpus.driver().cuMemHostAlloc)(&raw mut stage, 2, CU_MEMHOSTALLOC_PORTABLE) }
            .ok("cuMemHostAlloc")?;
        Ok(Self { gpus, device, stream, stage: stage.cast() })
    }

    pub(crate) fn create(&self, len: usize) -> Result<RawMade, Cause> {
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
        // SAFETY: `handle` is writable and `prop` is a description.
        unsafe { (driver.cuMemCreate)(&raw mut handle, len, &raw const prop, 0) }.ok("cuMemCreate")?;
        Ok(RawMade { driver, handle })
    }

    pub(crate) fn export(&self, made: &RawMade) -> Result<OwnedFd, Cause> {
        let mut fd: RawFd = -1;
        // SAFETY: the allocation is live, and the target is a descriptor's place.
        unsafe {
            (self.gpus.driver().cuMemExportToShareableHandle)((&raw mut fd).cast(), made.handle, FD, 0)
        }
        .ok("cuMemExportToShareableHandle")?;
        // SAFETY: the driver made this descriptor for us, and nobody else knows it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    pub(crate) fn import(&self, fd: &OwnedFd) -> Result<RawMade, Cause> {
        let (driver, mut handle) = (self.gpus.driver(), 0);
        let source = std::ptr::without_provenance_mut(fd.as_raw_fd().unsigned_abs() as usize);
        // SAFETY: `handle` is writable; the driver refuses what is not its own.
        unsafe { (driver.cuMemImportFromShareableHandle)(&raw mut handle, source, FD) }
            .ok("cuMemImportFromShareableHandle")?;
        Ok(RawMade { driver, handle })
    }

    pub(crate) fn map(&self, made: &RawMade, len: usize) -> Result<RawMap, Cause> {
        let (driver, mut at) = (self.gpus.driver(), 0);
        // SAFETY: `at` is writable.
        unsafe { (driver.cuMemAddressReserve)(&raw mut at, len, 0, 0, 0) }.ok("cuMemAddressReserve")?;
        let mut map = RawMap { driver, at, len, mapped: false };
        // SAFETY: reserved in the lines above; the allocation is live.
        unsafe { (driver.cuMemMap)(at, len, 0, made.handle, 0) }.ok("cuMemMap")?;
        map.mapped = true;
        let access = CUmemAccessDesc_v1 {
            location: CUmemLocation {
                type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
                id: self.gpus.ordinal(self.device),
            },
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: mapped in the lines above; there is one description.
        unsafe { (driver.cuMemSetAccess)(at, len, &raw const access, 1) }.ok("cuMemSetAccess")?;
        Ok(map)
    }

    pub(crate) fn ends(&self, map: &RawMap) -> Result<[u8; 2], Cause> {
        self.copy([(self.stage_at(0), map.at), (self.stage_at(1), map.last())])?;
        // SAFETY: two bytes of ours, which no copy is writing any more.
        Ok(unsafe { self.stage.cast::<[u8; 2]>().read_volatile() })
    }

    pub(crate) fn set_ends(&self, map: &RawMap, ends: [u8; 2]) -> Result<(), Cause> {
        // SAFETY: two bytes of ours, which no copy is reading.
        unsafe { self.stage.cast::<[u8; 2]>().write_volatile(ends) };
        self.copy([(map.at, self.stage_at(0)), (map.last(), self.stage_at(1))])
    }

    fn stage_at(&self, index: u64) -> u64 {
        self.stage.expose_provenance() as u64 + index
    }

    /// Copies two bytes, and waits.
    fn copy(&self, pairs: [(u64, u64); 2]) -> Result<(), Cause> {
        let _current = self.gpus.enter(self.device)?;
        for (to, from) in pairs {
            // SAFETY: the ends of a live map, and bytes of ours.
            unsafe { (self.gpus.driver().cuMemcpyAsync)(to, from, 1, self.stream) }.ok("cuMemcpyAsync")?;
        }
        // SAFETY: the stream is ours.
        unsafe { (self.gpus.driver().cuStreamSynchronize)(self.stream) }.ok("cuStreamSynchronize")
    }

    /// The time of one copy on the device's own clock, at its best of several.
    pub(crate) fn best_copy(
        &self,
        to: u64,
        from: u64,
        len: usize,
        times: u32,
    ) -> Result<std::time::Duration, Cause> {
        let driver = self.gpus.driver();
        let _current = self.gpus.enter(self.device)?;
        let mut events = [std::ptr::null_mut(); 2];
        for event in &mut events {
            // SAFETY: `event` is writable.
            unsafe { (driver.cuEventCreate)(event, CUevent_flags::CU_EVENT_DEFAULT.0) }
                .ok("cuEventCreate")?;
        }
        let [start, end] = events;
        let mut best = f32::INFINITY;
        for _ in 0..times {
            // SAFETY: the event and the stream are ours and live.
            unsafe { (driver.cuEventRecord)(start, self.stream) }.ok("cuEventRecord")?;
            // SAFETY: the caller's spans hold both ranges, which are mapped and `len` bytes long; the stream is ours and live.
            unsafe { (driver.cuMemcpyAsync)(to, from, len, self.stream) }.ok("cuMemcpyAsync")?;
            // SAFETY: the event and the stream are ours and live.
            unsafe { (driver.cuEventRecord)(end, self.stream) }.ok("cuEventRecord")?;
            // SAFETY: the stream is ours and live.
            unsafe { (driver.cuStreamSynchronize)(self.stream) }.ok("cuStreamSynchronize")?;
            let mut milliseconds = 0.0;
            // SAFETY: both events were reached.
            unsafe { (driver.cuEventElapsedTime)(&raw mut milliseconds, start, end) }
                .ok("cuEventElapsedTime")?;
            best = best.min(milliseconds);
        }
        for event in events {
            // SAFETY: made above, and used no more.
            unsafe { (driver.cuEventDestroy)(event) }.ok("cuEventDestroy")?;
        }
        std::time::Duration::try_from_secs_f32(best / 1e3).map_err(|_| implausible("cuEventElapsedTime"))
    }
}

impl RawMap {
    fn last(&self) -> u64 {
        self.at + self.len as u64 - 1
    }
}

// Nothing is left to do if the driver refuses to take something back.
impl Drop for RawCuda {
    fn drop(&mut self) {
        let Ok(_current) = self.gpus.enter(self.device) else { return };
        // SAFETY: ours, and used no more.
        let _ = unsafe { (self.gpus.driver().cuStreamDestroy)(self.stream) };
        // SAFETY: ours, and used no more.
        let _ = unsafe { (self.gpus.driver().cuMemFreeHost)(self.stage.cast()) };
    }
}

impl Drop for RawMade {
    fn drop(&mut self) {
        // SAFETY: live, and given up once.
        let _ = unsafe { (self.driver.cuMemRelease)(self.handle) };
    }
}

impl Drop for RawMap {
    fn drop(&mut self) {
        if self.mapped {
            // SAFETY: mapped in one piece, and used no more.
            let _ = unsafe { (self.driver.cuMemUnmap)(self.at, self.len) };
        }
        // SAFETY: reserved in one piece, and nothing is mapped in it any more.
        let _ = unsafe { (self.driver.cuMemAddressFree)(self.at, self.len) };
    }
}
