//! Every range of addresses that the driver knows, and who may do what there.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::bindings::*;
use crate::calls::{Answer, ensure};
use crate::vmm::Memory;

/// What lies at a range.
#[derive(Debug)]
pub(crate) struct Range {
    pub(crate) len: usize,
    pub(crate) kind: Kind,
}

#[derive(Debug)]
pub(crate) enum Kind {
    /// A mapped allocation, with the rights of each device.
    Map { memory: Arc<Memory>, rights: BTreeMap<CUdevice, CUmemAccess_flags> },
    /// A buffer of the older kind, made here.
    Plain { memory: Memory },
    /// A buffer of the older kind, opened from another process.
    Opened,
    /// Memory of the host that the driver made.
    Pinned,
    /// Memory of the host that was made known to the driver.
    Registered { read_only: bool },
}

impl Kind {
    /// The device whose memory it is, if it is a device's.
    pub(crate) fn device(&self) -> Option<CUdevice> {
        match self {
            Self::Map { memory, .. } => memory.device(),
            Self::Plain { memory } => memory.device(),
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

/// All ranges by their first address.
pub(crate) type Ranges = BTreeMap<u64, Range>;

pub(crate) fn all() -> MutexGuard<'static, Ranges> {
    static RANGES: Mutex<Ranges> = Mutex::new(BTreeMap::new());
    RANGES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The range that holds an address.
pub(crate) fn holding(ranges: &Ranges, at: u64) -> Option<(u64, &Range)> {
    let (&start, range) = ranges.range(..=at).next_back()?;
    (at - start < range.len as u64).then_some((start, range))
}

/// Whether any of these addresses is in a range.
pub(crate) fn overlap(ranges: &Ranges, at: u64, len: usize) -> bool {
    let last = ranges.range(..at.saturating_add(len as u64)).next_back();
    last.is_some_and(|(start, range)| start + range.len as u64 > at)
}

/// Refuses work of a device at addresses that it may not read, or not write.
pub(crate) fn check(device: CUdevice, at: u64, len: usize, needed: CUmemAccess_flags) -> Answer {
    let ranges = all();
    let (mut next, end) = (at, at.checked_add(len as u64).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?);
    while next < end {
        let (start, range) = holding(&ranges, next).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let granted = range.kind.rights(device);
        ensure(granted.0 & needed.0 == needed.0, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        next = start + range.len as u64;
    }
    Ok(())
}

/// How many ranges there are of each kind.
#[derive(Debug, Default)]
pub(crate) struct Count {
    pub(crate) maps: u64,
    pub(crate) buffers: u64,
    pub(crate) host: u64,
}

pub(crate) fn count() -> Count {
    let mut count = Count::default();
    for range in all().values() {
        *match range.kind {
            Kind::Map { .. } => &mut count.maps,
            Kind::Plain { .. } | Kind::Opened => &mut count.buffers,
            Kind::Pinned | Kind::Registered { .. } => &mut count.host,
        } += 1;
    }
    count
}
