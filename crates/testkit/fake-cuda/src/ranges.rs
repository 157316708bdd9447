//! The address ranges that the fake CUDA driver knows, and the devices' access rights to them.

use std::collections::BTreeMap;
use std::ffi::c_char;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::bindings::*;
use crate::calls::{CallResult, ensure};
use crate::vmm::FakeMemory;

/// An address range that the fake driver knows: its length and the kind of its memory.
#[derive(Debug)]
pub(crate) struct AddressRange {
    pub(crate) len: usize,
    pub(crate) kind: RangeKind,
    /// The id of the memory, which no other range of this process gets.
    pub(crate) id: u64,
}

impl AddressRange {
    pub(crate) fn new(len: usize, kind: RangeKind) -> Self {
        static CREATED: AtomicU64 = AtomicU64::new(0);
        Self { len, kind, id: CREATED.fetch_add(1, Ordering::Relaxed) + 1 }
    }
}

#[derive(Debug)]
pub(crate) enum RangeKind {
    /// A mapped allocation, with the access rights of each device.
    Map { memory: Arc<FakeMemory>, rights: BTreeMap<CUdevice, CUmemAccess_flags> },
    /// A buffer from `cuMemAlloc`.
    Malloc { memory: FakeMemory },
    /// A buffer that was opened from a CUDA IPC handle, once or several times.
    Opened { token: [c_char; 64], count: usize },
    /// Host memory from `cuMemHostAlloc`.
    Pinned,
    /// Host memory that was registered with the driver.
    Registered { read_only: bool },
}

impl RangeKind {
    /// Returns the device that owns the memory, or `None` for host memory.
    pub(crate) fn device(&self) -> Option<CUdevice> {
        match self {
            Self::Map { memory, .. } => memory.device(),
            Self::Malloc { memory } => memory.device(),
            _ => None,
        }
    }

    fn rights(&self, device: CUdevice) -> CUmemAccess_flags {
        match self {
            Self::Map { rights, .. } => {
                rights.get(&device).copied().unwrap_or(CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE)
            }
            Self::Registered { read_only: true } => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ,
            _ => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        }
    }
}

/// All known address ranges by start address.
pub(crate) type Ranges = BTreeMap<u64, AddressRange>;

pub(crate) fn all() -> MutexGuard<'static, Ranges> {
    static RANGES: Mutex<Ranges> = Mutex::new(BTreeMap::new());
    RANGES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the start and the description of the address range that contains an address.
pub(crate) fn containing(ranges: &Ranges, at: u64) -> Option<(u64, &AddressRange)> {
    let (&start, range) = ranges.range(..=at).next_back()?;
    (at - start < range.len as u64).then_some((start, range))
}

/// Returns true if `len` bytes from address `at` overlap a known address range.
pub(crate) fn overlap(ranges: &Ranges, at: u64, len: usize) -> bool {
    let last = ranges.range(..at.saturating_add(len as u64)).next_back();
    last.is_some_and(|(start, range)| start + range.len as u64 > at)
}

/// Returns an error unless a device has the needed access rights to all `len` bytes from address `at`.
pub(crate) fn check(device: CUdevice, at: u64, len: usize, needed: CUmemAccess_flags) -> CallResult {
    let ranges = all();
    let (mut next, end) = (at, at.checked_add(len as u64).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?);
    while next < end {
        let (start, range) = containing(&ranges, next).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let granted = range.kind.rights(device);
        ensure(granted.0 & needed.0 == needed.0, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        next = start + range.len as u64;
    }
    Ok(())
}

/// The numbers of known address ranges of each kind.
#[derive(Debug, Default)]
pub(crate) struct RangeCounts {
    pub(crate) maps: u64,
    pub(crate) buffers: u64,
    pub(crate) host: u64,
}

pub(crate) fn count() -> RangeCounts {
    let mut count = RangeCounts::default();
    for range in all().values() {
        let opened = match range.kind {
            RangeKind::Opened { count, .. } => count as u64,
            _ => 1,
        };
        *match range.kind {
            RangeKind::Map { .. } => &mut count.maps,
            RangeKind::Malloc { .. } | RangeKind::Opened { .. } => &mut count.buffers,
            RangeKind::Pinned | RangeKind::Registered { .. } => &mut count.host,
        } += opened;
    }
    count
}
