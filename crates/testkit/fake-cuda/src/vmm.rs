//! The fake driver's virtual memory management: allocations are memfds; addresses are reserved with `PROT_NONE`, and
//! mappings replace parts of the reservation.
//!
//! The location of memory and its handle types are encoded in the memfd's name, so that they are sent with the
//! descriptor.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::{c_int, c_ulonglong, c_void};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};

use crate::bindings::*;
use crate::calls::{CallResult, api, ensure, read_input, write_output};
use crate::devices::{self, TOTAL};
use crate::ranges::{self, AddressRange, RangeKind};

/// The allocation granularity of all memory of the fake driver: 2 MiB.
pub(crate) const GRANULE: usize = 2 << 20;

/// The prefix of the memfd names of all allocations.
const NAME: &str = "wholemem-fake-cuda";

const FABRIC: u32 = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC.0;
const FD: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// The maximum number of fake devices.
const MAX_DEVICES: usize = 64;

/// The number of allocated bytes on each device.
static USED: [AtomicUsize; MAX_DEVICES] = [const { AtomicUsize::new(0) }; MAX_DEVICES];

pub(crate) fn used_by(device: usize) -> usize {
    USED[device].load(Ordering::Relaxed)
}

pub(crate) fn used_by_all() -> u64 {
    USED.iter().map(|used| used.load(Ordering::Relaxed) as u64).sum()
}

/// The location of an allocation, and the types of handles by which it can be shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemoryInfo {
    pub(crate) location: u32,
    pub(crate) id: c_int,
    pub(crate) handles: u32,
    pub(crate) rdma: u8,
}

impl MemoryInfo {
    /// Describes device memory from `cuMemAlloc`, which has no shareable handle.
    pub(crate) fn for_malloc(device: CUdevice) -> Self {
        let location = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE.0;
        Self { location, id: device, handles: 0, rdma: 0 }
    }

    fn of(prop: &CUmemAllocationProp_v1) -> Result<Self, CUresult> {
        let (location, id) = (prop.location.type_, prop.location.id);
        ensure(
            prop.type_ == CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            CUresult::CUDA_ERROR_INVALID_VALUE,
        )?;
        match location {
            CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE => devices::check(id).map(drop)?,
            CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA => {
                ensure(id == 0, CUresult::CUDA_ERROR_INVALID_DEVICE)?;
            }
            _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
        let handles = prop.requestedHandleTypes.0;
        ensure(handles & !(FABRIC | FD.0) == 0, CUresult::CUDA_ERROR_NOT_SUPPORTED)?;
        Ok(Self { location: location.0, id, handles, rdma: prop.allocFlags.gpuDirectRDMACapable })
    }

    fn name(&self) -> String {
        let Self { location, id, handles, rdma } = self;
        format!("{NAME}:{location}:{id}:{handles}:{rdma}")
    }

    /// Parses the link target of a memfd in `/proc/self/fd`. Returns `None` if the memfd is not an allocation of this
    /// driver.
    fn parse(link: &str) -> Option<Self> {
        let fields = link.strip_prefix("/memfd:")?.strip_suffix(" (deleted)")?;
        let mut fields = fields.strip_prefix(NAME)?.strip_prefix(':')?.split(':');
        let mut next = || fields.next()?.parse::<u32>().ok();
        let (location, id, handles, rdma) = (next()?, next()?, next()?, next()?);
        Some(Self { location, id: id as c_int, handles, rdma: rdma as u8 })
    }

    fn device(&self) -> Option<usize> {
        let is_device = self.location == CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE.0;
        is_device.then_some(self.id as usize)
    }
}

/// Physical memory of a device or the host. It counts as used until its last handle is released and its last mapping is
/// removed.
#[derive(Debug)]
pub(crate) struct FakeMemory {
    pub(crate) fd: OwnedFd,
    pub(crate) len: usize,
    info: MemoryInfo,
}

impl FakeMemory {
    fn own(fd: OwnedFd, len: usize, info: MemoryInfo) -> Self {
        if let Some(device) = info.device() {
            USED[device].fetch_add(len, Ordering::Relaxed);
        }
        Self { fd, len, info }
    }

    pub(crate) fn create(len: usize, info: MemoryInfo) -> Result<Self, CUresult> {
        let fits = info.device().is_none_or(|device| len <= TOTAL - used_by(device));
        ensure(fits, CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        let os = |_| CUresult::CUDA_ERROR_OPERATING_SYSTEM;
        let fd = rustix::fs::memfd_create(info.name(), MemfdFlags::CLOEXEC).map_err(os)?;
        rustix::fs::ftruncate(&fd, len as u64).map_err(os)?;
        Ok(Self::own(fd, len, info))
    }

    /// Returns the device on which the memory is, or `None` for host memory.
    pub(crate) fn device(&self) -> Option<CUdevice> {
        self.info.device().map(|device| device as CUdevice)
    }
}

impl Drop for FakeMemory {
    fn drop(&mut self) {
        if let Some(device) = self.info.device() {
            USED[device].fetch_sub(self.len, Ordering::Relaxed);
        }
    }
}

/// The allocations and address reservations of this process.
#[derive(Debug, Default)]
struct VmmState {
    last_handle: u64,
    handles: BTreeMap<u64, Arc<FakeMemory>>,
    /// The allocation handles that were imported from a file descriptor.
    imported: BTreeSet<u64>,
    /// The allocations by device and inode of their files. Memory that the creating process imports again is counted
    /// once.
    files: HashMap<(u64, u64), Weak<FakeMemory>>,
    reservations: BTreeMap<u64, usize>,
}

fn state() -> MutexGuard<'static, VmmState> {
    static STATE: LazyLock<Mutex<VmmState>> = LazyLock::new(Mutex::default);
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl VmmState {
    fn new_handle(&mut self, memory: Arc<FakeMemory>) -> u64 {
        self.last_handle += 1;
        self.handles.insert(self.last_handle, memory);
        self.last_handle
    }

    fn get(&self, handle: u64) -> Result<&Arc<FakeMemory>, CUresult> {
        self.handles.get(&handle).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
    }

    fn is_reserved(&self, at: u64, len: usize) -> bool {
        let preceding = self.reservations.range(..=at).next_back();
        preceding.is_some_and(|(start, size)| at + len as u64 <= start + *size as u64)
    }
}

pub(crate) fn handle_count() -> u64 {
    state().handles.len() as u64
}

pub(crate) fn reservation_count() -> u64 {
    state().reservations.len() as u64
}

fn pointer(at: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(at as usize)
}

pub(crate) fn file(fd: BorrowedFd<'_>) -> Result<((u64, u64), usize), CUresult> {
    let stat = rustix::fs::fstat(fd).map_err(|_| CUresult::CUDA_ERROR_INVALID_VALUE)?;
    Ok(((stat.st_dev, stat.st_ino), stat.st_size as usize))
}

fn import(fd: RawFd) -> Result<u64, CUresult> {
    let link = std::fs::read_link(format!("/proc/self/fd/{fd}"));
    let link = link.map_err(|_| CUresult::CUDA_ERROR_INVALID_VALUE)?;
    let info = link.to_str().and_then(MemoryInfo::parse).filter(|info| info.handles & FD.0 != 0);
    let info = info.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    // SAFETY: `fd` is open, because its link was just read, and the caller keeps it open until this call returns.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let (file, len) = file(fd)?;
    let mut state = state();
    let memory = match state.files.get(&file).and_then(Weak::upgrade) {
        Some(memory) => memory,
        None => {
            let fd = fd.try_clone_to_owned().map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)?;
            let memory = Arc::new(FakeMemory::own(fd, len, info));
            state.files.insert(file, Arc::downgrade(&memory));
            memory
        }
    };
    let handle = state.new_handle(memory);
    state.imported.insert(handle);
    Ok(handle)
}

/// Reserves addresses: at `wanted` if that range is free, otherwise at a multiple of `align`.
fn reserve(len: usize, align: usize, wanted: u64) -> Result<u64, CUresult> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    if wanted != 0 {
        let fixed = flags | MapFlags::FIXED_NOREPLACE;
        // SAFETY: `FIXED_NOREPLACE` makes the call fail if the range overlaps a mapping, so no mapping is replaced.
        let at = unsafe { rustix::mm::mmap_anonymous(pointer(wanted), len, ProtFlags::empty(), fixed) };
        if let Ok(at) = at {
            return Ok(at.expose_provenance() as u64);
        }
    }
    let out_of_memory = |_| CUresult::CUDA_ERROR_OUT_OF_MEMORY;
    let longer = len.checked_add(align).ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
    // SAFETY: the address is null and `FIXED` is not set, so the kernel chooses a free range and replaces no mapping.
    let start = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), longer, ProtFlags::empty(), flags) };
    let start = start.map_err(out_of_memory)?.expose_provenance();
    let at = start.next_multiple_of(align);
    for (from, to) in [(start, at), (at + len, start + longer)] {
        if from < to {
            // SAFETY: the ranges before and after the aligned one were mapped above, and no other code uses them.
            unsafe { rustix::mm::munmap(pointer(from as u64), to - from) }.map_err(out_of_memory)?;
        }
    }
    Ok(at as u64)
}

/// Unmaps memory, and keeps its addresses reserved.
fn unmap_reserved(at: u64, len: usize) -> CallResult {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
    // SAFETY: the range is a mapping of this driver inside a reservation, and the program under test requested that it
    // is unmapped.
    unsafe { rustix::mm::mmap_anonymous(pointer(at), len, ProtFlags::empty(), flags) }
        .map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)?;
    Ok(())
}

fn protect(at: u64, len: usize, highest: u32) -> CallResult {
    let flags = match highest {
        0 => MprotectFlags::empty(),
        1 => MprotectFlags::READ,
        _ => MprotectFlags::READ | MprotectFlags::WRITE,
    };
    // SAFETY: the range is a mapping of this driver. If a program accesses it without the rights, the program under
    // test has a defect.
    unsafe { rustix::mm::mprotect(pointer(at), len, flags) }
        .map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)
}

/// Returns the start addresses of the mappings that together form exactly the given range, or an error if there are
/// none.
fn maps_in(ranges: &ranges::Ranges, at: u64, len: usize) -> Result<Vec<u64>, CUresult> {
    let (mut next, end, mut found) = (at, at + len as u64, Vec::new());
    while next < end {
        let range = ranges.get(&next).filter(|range| matches!(range.kind, RangeKind::Map { .. }));
        found.push(next);
        next += range.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?.len as u64;
    }
    ensure(next == end && !found.is_empty(), CUresult::CUDA_ERROR_INVALID_VALUE)?;
    Ok(found)
}

api! {
    Init fn cuMemGetAllocationGranularity(
        granule: *mut usize, prop: *const CUmemAllocationProp_v1, _which: CUmemAllocationGranularity_flags,
    ) {
        MemoryInfo::of(&read_input(prop)?)?;
        write_output(granule, GRANULE)
    }

    Init fn cuMemCreate(
        handle: *mut CUmemGenericAllocationHandle_v1, len: usize, prop: *const CUmemAllocationProp_v1,
        flags: c_ulonglong,
    ) {
        let info = MemoryInfo::of(&read_input(prop)?)?;
        let is_valid = len > 0 && len.is_multiple_of(GRANULE);
        ensure(flags == 0 && is_valid, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        // Fabric handles are refused, as on a machine without the IMEX service.
        ensure(info.handles & FABRIC == 0, CUresult::CUDA_ERROR_NOT_PERMITTED)?;
        let memory = Arc::new(FakeMemory::create(len, info)?);
        let (file, _) = file(memory.fd.as_fd())?;
        let mut state = state();
        state.files.retain(|_, memory| memory.strong_count() > 0);
        state.files.insert(file, Arc::downgrade(&memory));
        write_output(handle, state.new_handle(memory))
    }

    Init fn cuMemRelease(handle: CUmemGenericAllocationHandle_v1) {
        let mut state = state();
        state.imported.remove(&handle);
        let memory = state.handles.remove(&handle);
        drop(state);
        memory.map(drop).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
    }

    Init fn cuMemAddressReserve(
        at: *mut CUdeviceptr_v2, len: usize, align: usize, wanted: CUdeviceptr_v2, flags: c_ulonglong,
    ) {
        let align = align.max(GRANULE);
        let is_valid = len > 0 && len.is_multiple_of(GRANULE);
        ensure(flags == 0 && is_valid && align.is_power_of_two(), CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let reserved_at = reserve(len, align, wanted)?;
        state().reservations.insert(reserved_at, len);
        write_output(at, reserved_at)
    }

    Init fn cuMemAddressFree(at: CUdeviceptr_v2, len: usize) {
        let mut state = state();
        let is_whole = state.reservations.get(&at) == Some(&len);
        ensure(is_whole, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        ensure(!ranges::overlap(&ranges::all(), at, len), CUresult::CUDA_ERROR_INVALID_VALUE)?;
        state.reservations.remove(&at);
        // SAFETY: the range is a whole reservation of this driver, in which nothing is mapped.
        unsafe { rustix::mm::munmap(pointer(at), len) }.map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)
    }

    Init fn cuMemMap(
        at: CUdeviceptr_v2, len: usize, offset: usize, handle: CUmemGenericAllocationHandle_v1,
        flags: c_ulonglong,
    ) {
        let state = state();
        let memory = Arc::clone(state.get(handle)?);
        let is_valid = flags == 0 && offset == 0 && len == memory.len;
        ensure(is_valid && state.is_reserved(at, len), CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let mut ranges = ranges::all();
        ensure(!ranges::overlap(&ranges, at, len), CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let (none, how) = (ProtFlags::empty(), MapFlags::SHARED | MapFlags::FIXED);
        // SAFETY: the replaced range is an unmapped part of a reservation of this driver.
        unsafe { rustix::mm::mmap(pointer(at), len, none, how, &memory.fd, 0) }
            .map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)?;
        ranges.insert(at, AddressRange::new(len, RangeKind::Map { memory, rights: BTreeMap::new() }));
        Ok(())
    }

    Init fn cuMemUnmap(at: CUdeviceptr_v2, len: usize) {
        let mut ranges = ranges::all();
        for start in maps_in(&ranges, at, len)? {
            if let Some(range) = ranges.remove(&start) {
                unmap_reserved(start, range.len)?;
            }
        }
        Ok(())
    }

    Init fn cuMemSetAccess(at: CUdeviceptr_v2, len: usize, wanted: *const CUmemAccessDesc_v1, count: usize) {
        let mut ranges = ranges::all();
        let found = maps_in(&ranges, at, len)?;
        ensure(count > 0, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let wanted = (0..count).map(|index| read_input(wanted.wrapping_add(index)));
        let wanted = wanted.collect::<Result<Vec<_>, _>>()?;
        for grant in &wanted {
            devices::check(grant.location.id)?;
            let is_known = matches!(grant.flags.0, 0 | 1 | 3);
            ensure(is_known, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        }
        for start in found {
            let Some(AddressRange { len, kind: RangeKind::Map { rights, .. }, .. }) = ranges.get_mut(&start) else { continue };
            rights.extend(wanted.iter().map(|grant| (grant.location.id, grant.flags)));
            protect(start, *len, rights.values().map(|flags| flags.0).max().unwrap_or(0))?;
        }
        Ok(())
    }

    Init fn cuMemExportToShareableHandle(
        target: *mut c_void, handle: CUmemGenericAllocationHandle_v1, kind: CUmemAllocationHandleType,
        _flags: c_ulonglong,
    ) {
        let memory = Arc::clone(state().get(handle)?);
        let is_shareable = kind == FD && memory.info.handles & kind.0 != 0;
        // As in the real driver, memory that was imported cannot be exported again.
        let is_own = !state().imported.contains(&handle);
        ensure(is_shareable && is_own, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let fd = memory.fd.try_clone().map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)?;
        write_output(target.cast::<RawFd>(), fd.as_raw_fd())?;
        // The caller of the driver owns the exported descriptor from now on.
        let _ = fd.into_raw_fd();
        Ok(())
    }

    Init fn cuMemImportFromShareableHandle(
        handle: *mut CUmemGenericAllocationHandle_v1, source: *mut c_void, kind: CUmemAllocationHandleType,
    ) {
        match kind {
            FD => write_output(handle, import(source.addr() as RawFd)?),
            // Only file descriptors can be imported: memory of other nodes (fabric handles) is not accessible.
            _ => Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
        }
    }

    Init fn cuMemGetAllocationPropertiesFromHandle(
        prop: *mut CUmemAllocationProp_v1, handle: CUmemGenericAllocationHandle_v1,
    ) {
        let MemoryInfo { location, id, handles, rdma } = state().get(handle)?.info;
        write_output(prop, CUmemAllocationProp_st {
            type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: CUmemAllocationHandleType_enum(handles),
            location: CUmemLocation_st { type_: CUmemLocationType_enum(location), id },
            win32HandleMetaData: ptr::null_mut(),
            allocFlags: CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0, gpuDirectRDMACapable: rdma, usage: 0, reserved: [0; 4],
            },
        })
    }

    Init fn cuMemRetainAllocationHandle(handle: *mut CUmemGenericAllocationHandle_v1, at: *mut c_void) {
        let ranges = ranges::all();
        let Some((_, AddressRange { kind: RangeKind::Map { memory, .. }, .. })) = ranges::containing(&ranges, at.addr() as u64)
        else {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        let memory = Arc::clone(memory);
        drop(ranges);
        write_output(handle, state().new_handle(memory))
    }

    Context fn cuMemGetHandleForAddressRange(
        target: *mut c_void, at: CUdeviceptr, len: usize, _kind: CUmemRangeHandleType, _flags: c_ulonglong,
    ) {
        let ranges = ranges::all();
        let Some(AddressRange { kind: RangeKind::Map { memory, .. }, .. }) = ranges.get(&at).filter(|range| range.len == len)
        else {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        let fd = memory.fd.try_clone().map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)?;
        write_output(target.cast::<RawFd>(), fd.as_raw_fd())?;
        // The caller of the driver owns the exported descriptor from now on.
        let _ = fd.into_raw_fd();
        Ok(())
    }
}

/// Maps memory with read and write access at an address that the kernel chooses.
pub(crate) fn map_anywhere(fd: &OwnedFd, len: usize) -> Result<u64, CUresult> {
    let rights = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the address is null and `FIXED` is not set, so the kernel chooses a free range and replaces no mapping.
    unsafe { rustix::mm::mmap(ptr::null_mut(), len, rights, MapFlags::SHARED, fd, 0) }
        .map(|at| at.expose_provenance() as u64)
        .map_err(|_| CUresult::CUDA_ERROR_OUT_OF_MEMORY)
}

/// Unmaps memory that [`map_anywhere`] mapped.
pub(crate) fn unmap(at: u64, len: usize) -> CallResult {
    // SAFETY: the range is a mapping of this driver from `map_anywhere`, and its owner releases it.
    unsafe { rustix::mm::munmap(pointer(at), len) }.map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)
}

/// Opens a file descriptor of another process.
pub(crate) fn descriptor_of(process: u32, fd: RawFd) -> Result<OwnedFd, CUresult> {
    let path = format!("/proc/{process}/fd/{fd}");
    let opened = std::fs::OpenOptions::new().read(true).write(true).open(path);
    let opened = opened.map_err(|_| CUresult::CUDA_ERROR_INVALID_VALUE)?;
    Ok(opened.into())
}
