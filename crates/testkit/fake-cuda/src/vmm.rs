//! Virtual memory management: allocations are memfds, addresses are reserved with `PROT_NONE` and mapped over.
//!
//! What memory is, where, and how it may be shared stands in the memfd's name, so that it travels with the descriptor.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::{c_int, c_ulonglong, c_void};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};

use crate::bindings::*;
use crate::calls::{Answer, api, ensure, get, put};
use crate::devices::{self, TOTAL};
use crate::ranges::{self, Kind, Range};

/// The granule of all memory.
pub(crate) const GRANULE: usize = 2 << 20;

/// What the name of every allocation's memfd begins with.
const NAME: &str = "wholemem-fake-cuda";

const FABRIC: u32 = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC.0;
const FD: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// The most devices whose memory is counted.
const MOST_DEVICES: usize = 64;

/// Bytes in use on each device.
static USED: [AtomicUsize; MOST_DEVICES] = [const { AtomicUsize::new(0) }; MOST_DEVICES];

pub(crate) fn used_by(device: usize) -> usize {
    USED[device].load(Ordering::Relaxed)
}

pub(crate) fn used_by_all() -> u64 {
    USED.iter().map(|used| used.load(Ordering::Relaxed) as u64).sum()
}

/// Where memory is, and how it may be shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct About {
    pub(crate) location: u32,
    pub(crate) id: c_int,
    pub(crate) handles: u32,
    pub(crate) rdma: u8,
}

impl About {
    /// Memory of a device that is shared by none of the newer handles.
    pub(crate) fn plain(device: CUdevice) -> Self {
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

    /// What a descriptor's link says, if it is memory of ours.
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

/// Physical memory, in use until the last handle and the last map of it are gone.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) fd: OwnedFd,
    pub(crate) len: usize,
    about: About,
}

impl Memory {
    fn own(fd: OwnedFd, len: usize, about: About) -> Self {
        if let Some(device) = about.device() {
            USED[device].fetch_add(len, Ordering::Relaxed);
        }
        Self { fd, len, about }
    }

    pub(crate) fn create(len: usize, about: About) -> Result<Self, CUresult> {
        let fits = about.device().is_none_or(|device| len <= TOTAL - used_by(device));
        ensure(fits, CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        let os = |_| CUresult::CUDA_ERROR_OPERATING_SYSTEM;
        let fd = rustix::fs::memfd_create(about.name(), MemfdFlags::CLOEXEC).map_err(os)?;
        rustix::fs::ftruncate(&fd, len as u64).map_err(os)?;
        Ok(Self::own(fd, len, about))
    }

    /// The device it is on; none for memory of the host.
    pub(crate) fn device(&self) -> Option<CUdevice> {
        self.about.device().map(|device| device as CUdevice)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(device) = self.about.device() {
            USED[device].fetch_sub(self.len, Ordering::Relaxed);
        }
    }
}

/// Allocations and reservations of this process.
#[derive(Debug, Default)]
struct State {
    last_handle: u64,
    handles: BTreeMap<u64, Arc<Memory>>,
    /// Those of them that came from a descriptor.
    imported: BTreeSet<u64>,
    /// Memory by its file, so that what is imported where it was made is counted once.
    files: HashMap<(u64, u64), Weak<Memory>>,
    reservations: BTreeMap<u64, usize>,
}

fn state() -> MutexGuard<'static, State> {
    static STATE: LazyLock<Mutex<State>> = LazyLock::new(Mutex::default);
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn hand_out(&mut self, memory: Arc<Memory>) -> u64 {
        self.last_handle += 1;
        self.handles.insert(self.last_handle, memory);
        self.last_handle
    }

    fn get(&self, handle: u64) -> Result<&Arc<Memory>, CUresult> {
        self.handles.get(&handle).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
    }

    fn is_reserved(&self, at: u64, len: usize) -> bool {
        let holder = self.reservations.range(..=at).next_back();
        holder.is_some_and(|(start, size)| at + len as u64 <= start + *size as u64)
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

fn file(fd: BorrowedFd<'_>) -> Result<((u64, u64), usize), CUresult> {
    let stat = rustix::fs::fstat(fd).map_err(|_| CUresult::CUDA_ERROR_INVALID_VALUE)?;
    Ok(((stat.st_dev, stat.st_ino), stat.st_size as usize))
}

fn import(fd: RawFd) -> Result<u64, CUresult> {
    let link = std::fs::read_link(format!("/proc/self/fd/{fd}"));
    let link = link.map_err(|_| CUresult::CUDA_ERROR_INVALID_VALUE)?;
    let about = link.to_str().and_then(About::parse).filter(|about| about.handles & FD.0 != 0);
    let about = about.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    // SAFETY: the descriptor was open a moment ago, and is the caller's until it returns.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let (file, len) = file(fd)?;
    let mut state = state();
    let memory = match state.files.get(&file).and_then(Weak::upgrade) {
        Some(memory) => memory,
        None => {
            let fd = fd.try_clone_to_owned().map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)?;
            let memory = Arc::new(Memory::own(fd, len, about));
            state.files.insert(file, Arc::downgrade(&memory));
            memory
        }
    };
    let handle = state.hand_out(memory);
    state.imported.insert(handle);
    Ok(handle)
}

/// Reserves addresses at a multiple of `align`, at `wanted` if they are free.
fn reserve(len: usize, align: usize, wanted: u64) -> Result<u64, CUresult> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    if wanted != 0 {
        let fixed = flags | MapFlags::FIXED_NOREPLACE;
        // SAFETY: nothing that is mapped is replaced.
        let at = unsafe { rustix::mm::mmap_anonymous(pointer(wanted), len, ProtFlags::empty(), fixed) };
        if let Ok(at) = at {
            return Ok(at.expose_provenance() as u64);
        }
    }
    let out_of_memory = |_| CUresult::CUDA_ERROR_OUT_OF_MEMORY;
    let longer = len.checked_add(align).ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
    // SAFETY: the kernel chooses a place where nothing is.
    let start = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), longer, ProtFlags::empty(), flags) };
    let start = start.map_err(out_of_memory)?.expose_provenance();
    let at = start.next_multiple_of(align);
    for (from, to) in [(start, at), (at + len, start + longer)] {
        if from < to {
            // SAFETY: what was just mapped, before and behind the aligned part, and known to nobody.
            unsafe { rustix::mm::munmap(pointer(from as u64), to - from) }.map_err(out_of_memory)?;
        }
    }
    Ok(at as u64)
}

/// Empties a mapped place: its addresses stay reserved.
fn empty(at: u64, len: usize) -> Answer {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
    // SAFETY: the range is a map of ours, inside a reservation, and its user gave it up.
    unsafe { rustix::mm::mmap_anonymous(pointer(at), len, ProtFlags::empty(), flags) }
        .map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)?;
    Ok(())
}

fn protect(at: u64, len: usize, highest: u32) -> Answer {
    let flags = match highest {
        0 => MprotectFlags::empty(),
        1 => MprotectFlags::READ,
        _ => MprotectFlags::READ | MprotectFlags::WRITE,
    };
    // SAFETY: the range is a map of ours; who has no right to it has no business there.
    unsafe { rustix::mm::mprotect(pointer(at), len, flags) }
        .map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)
}

/// The first addresses of the maps that make up exactly this range.
fn maps_in(ranges: &ranges::Ranges, at: u64, len: usize) -> Result<Vec<u64>, CUresult> {
    let (mut next, end, mut found) = (at, at + len as u64, Vec::new());
    while next < end {
        let range = ranges.get(&next).filter(|range| matches!(range.kind, Kind::Map { .. }));
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
        About::of(&get(prop)?)?;
        put(granule, GRANULE)
    }

    Init fn cuMemCreate(
        handle: *mut CUmemGenericAllocationHandle_v1, len: usize, prop: *const CUmemAllocationProp_v1,
        flags: c_ulonglong,
    ) {
        let about = About::of(&get(prop)?)?;
        let whole = len > 0 && len.is_multiple_of(GRANULE);
        ensure(flags == 0 && whole, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        // There is no IMEX service.
        ensure(about.handles & FABRIC == 0, CUresult::CUDA_ERROR_NOT_PERMITTED)?;
        let memory = Arc::new(Memory::create(len, about)?);
        let (file, _) = file(memory.fd.as_fd())?;
        let mut state = state();
        state.files.retain(|_, memory| memory.strong_count() > 0);
        state.files.insert(file, Arc::downgrade(&memory));
        put(handle, state.hand_out(memory))
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
        let whole = len > 0 && len.is_multiple_of(GRANULE);
        ensure(flags == 0 && whole && align.is_power_of_two(), CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let given = reserve(len, align, wanted)?;
        state().reservations.insert(given, len);
        put(at, given)
    }

    Init fn cuMemAddressFree(at: CUdeviceptr_v2, len: usize) {
        let mut state = state();
        let is_whole = state.reservations.get(&at) == Some(&len);
        ensure(is_whole, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        ensure(!ranges::overlap(&ranges::all(), at, len), CUresult::CUDA_ERROR_INVALID_VALUE)?;
        state.reservations.remove(&at);
        // SAFETY: a reservation of ours with nothing mapped in it.
        unsafe { rustix::mm::munmap(pointer(at), len) }.map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)
    }

    Init fn cuMemMap(
        at: CUdeviceptr_v2, len: usize, offset: usize, handle: CUmemGenericAllocationHandle_v1,
        flags: c_ulonglong,
    ) {
        let state = state();
        let memory = Arc::clone(state.get(handle)?);
        let whole = flags == 0 && offset == 0 && len == memory.len;
        ensure(whole && state.is_reserved(at, len), CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let mut ranges = ranges::all();
        ensure(!ranges::overlap(&ranges, at, len), CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let (none, how) = (ProtFlags::empty(), MapFlags::SHARED | MapFlags::FIXED);
        // SAFETY: an empty place of a reservation of ours.
        unsafe { rustix::mm::mmap(pointer(at), len, none, how, &memory.fd, 0) }
            .map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)?;
        ranges.insert(at, Range { len, kind: Kind::Map { memory, rights: BTreeMap::new() } });
        Ok(())
    }

    Init fn cuMemUnmap(at: CUdeviceptr_v2, len: usize) {
        let mut ranges = ranges::all();
        for start in maps_in(&ranges, at, len)? {
            if let Some(range) = ranges.remove(&start) {
                empty(start, range.len)?;
            }
        }
        Ok(())
    }

    Init fn cuMemSetAccess(at: CUdeviceptr_v2, len: usize, wanted: *const CUmemAccessDesc_v1, count: usize) {
        let mut ranges = ranges::all();
        let found = maps_in(&ranges, at, len)?;
        ensure(count > 0, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let wanted = (0..count).map(|index| get(wanted.wrapping_add(index)));
        let wanted = wanted.collect::<Result<Vec<_>, _>>()?;
        for grant in &wanted {
            devices::check(grant.location.id)?;
            let known = matches!(grant.flags.0, 0 | 1 | 3);
            ensure(known, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        }
        for start in found {
            let Some(Range { len, kind: Kind::Map { rights, .. } }) = ranges.get_mut(&start) else { continue };
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
        let agreed = kind == FD && memory.about.handles & kind.0 != 0;
        // What was handed to this process is not handed on.
        let own = !state().imported.contains(&handle);
        ensure(agreed && own, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let fd = memory.fd.try_clone().map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)?;
        put(target.cast::<RawFd>(), fd.as_raw_fd())?;
        // It is the caller's now.
        let _ = fd.into_raw_fd();
        Ok(())
    }

    Init fn cuMemImportFromShareableHandle(
        handle: *mut CUmemGenericAllocationHandle_v1, source: *mut c_void, kind: CUmemAllocationHandleType,
    ) {
        match kind {
            FD => put(handle, import(source.addr() as RawFd)?),
            // No other machine's memory can be reached.
            _ => Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
        }
    }

    Init fn cuMemGetAllocationPropertiesFromHandle(
        prop: *mut CUmemAllocationProp_v1, handle: CUmemGenericAllocationHandle_v1,
    ) {
        let About { location, id, handles, rdma } = state().get(handle)?.about;
        put(prop, CUmemAllocationProp_st {
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
        let Some((_, Range { kind: Kind::Map { memory, .. }, .. })) = ranges::holding(&ranges, at.addr() as u64)
        else {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        let memory = Arc::clone(memory);
        drop(ranges);
        put(handle, state().hand_out(memory))
    }

    Context fn cuMemGetHandleForAddressRange(
        target: *mut c_void, at: CUdeviceptr, len: usize, _kind: CUmemRangeHandleType, _flags: c_ulonglong,
    ) {
        let ranges = ranges::all();
        let Some(Range { kind: Kind::Map { memory, .. }, .. }) = ranges.get(&at).filter(|range| range.len == len)
        else {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        let fd = memory.fd.try_clone().map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)?;
        put(target.cast::<RawFd>(), fd.as_raw_fd())?;
        // It is the caller's now.
        let _ = fd.into_raw_fd();
        Ok(())
    }
}

/// Maps memory at an address that the kernel chooses, to be read and written.
pub(crate) fn map_anywhere(fd: &OwnedFd, len: usize) -> Result<u64, CUresult> {
    let rights = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the kernel chooses a place where nothing is.
    unsafe { rustix::mm::mmap(ptr::null_mut(), len, rights, MapFlags::SHARED, fd, 0) }
        .map(|at| at.expose_provenance() as u64)
        .map_err(|_| CUresult::CUDA_ERROR_OUT_OF_MEMORY)
}

/// Unmaps what [`map_anywhere`] mapped.
pub(crate) fn unmap(at: u64, len: usize) -> Answer {
    // SAFETY: a map of ours that its user gave up.
    unsafe { rustix::mm::munmap(pointer(at), len) }.map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)
}

/// Opens a descriptor of another process.
pub(crate) fn descriptor_of(process: u32, fd: RawFd) -> Result<OwnedFd, CUresult> {
    let path = format!("/proc/{process}/fd/{fd}");
    let opened = std::fs::OpenOptions::new().read(true).write(true).open(path);
    let opened = opened.map_err(|_| CUresult::CUDA_ERROR_INVALID_VALUE)?;
    Ok(opened.into())
}
