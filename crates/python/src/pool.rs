//! Implements an allocator for `torch.cuda.MemPool` whose memory can be shared and published to a store. torch calls its two
//! functions.
//!
//! torch requests large segments and divides them among tensors. Each segment is a separate allocation, mapped at the address
//! that torch receives. A table maps addresses to segments and to the object that was published from each, so that a second
//! tensor of a segment becomes another part of the memory that the store already has.
//!
//! torch calls these functions with its allocator lock held, so they wait neither for a store nor for Python. Memory is
//! unmapped after the work that torch enqueued on it.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use wholemem_hal::{Allocation, Backend, BackendKind, Device, Mapping, Rights, Stream};
use wholemem_os::Deadline;
use wholemem_store::{Client, ObjectId};

/// A segment of torch's memory pool: memory that torch allocates at once and divides among tensors.
#[derive(Debug)]
struct PoolSegment {
    mapping: Mapping,
    allocation: Allocation,
    /// For each store that holds the segment, the object that was published last from the segment.
    published: Vec<(Client, ObjectId)>,
}

/// Locks and returns all segments of torch's memory pool, by their first address.
fn segments() -> MutexGuard<'static, BTreeMap<u64, PoolSegment>> {
    static SEGMENTS: Mutex<BTreeMap<u64, PoolSegment>> = Mutex::new(BTreeMap::new());
    SEGMENTS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn device(number: c_int) -> wholemem_hal::Result<Device> {
    // All segments share one CUDA backend, because torch allocates many segments.
    static CUDA: OnceLock<Backend> = OnceLock::new();
    let backend = match CUDA.get() {
        Some(backend) => backend,
        None => {
            let opened = Backend::open(BackendKind::Cuda)?;
            CUDA.get_or_init(|| opened)
        }
    };
    // A negative device number becomes `u32::MAX`, a number that no device has.
    backend.device(u32::try_from(number).unwrap_or(u32::MAX))
}

fn allocate(len: usize, number: c_int) -> wholemem_hal::Result<u64> {
    let device = device(number)?;
    let granule = device.granularity()?.minimum.len();
    let allocation = device.allocate(len.max(1).next_multiple_of(granule))?;
    let mapping = allocation.map(Rights::ReadWrite)?;
    let address = mapping.address();
    segments().insert(address, PoolSegment { mapping, allocation, published: Vec::new() });
    Ok(address)
}

/// Allocates memory on a GPU for `CUDAPluggableAllocator`. Returns null on failure.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn wholemem_torch_alloc(
    len: isize,
    device: c_int,
    _stream: *mut c_void,
) -> *mut c_void {
    // If the address is null, torch raises `OutOfMemoryError`; the interface cannot report the cause.
    let allocated = usize::try_from(len).ok().and_then(|len| allocate(len, device).ok());
    let address = allocated.and_then(|address| usize::try_from(address).ok()).unwrap_or(0);
    std::ptr::with_exposed_provenance_mut(address)
}

/// Frees memory that [`wholemem_torch_alloc`] allocated, after the work on the stream that used the memory has run.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn wholemem_torch_free(
    at: *mut c_void,
    _len: isize,
    number: c_int,
    stream: *mut c_void,
) {
    let Some(segment) = segments().remove(&(at.addr() as u64)) else { return };
    let finished = device(number).and_then(|device| {
        // SAFETY: `stream` is the torch stream that used the memory, and torch never destroys its streams.
        let stream = unsafe { Stream::from_foreign(&device, stream.addr() as u64) };
        stream.synchronize(Deadline::NEVER)
    });
    if finished.is_err() {
        // After a failed wait, the work may still run, so the memory is leaked instead of unmapped under a kernel.
        std::mem::forget(segment);
    }
}

/// The first address and the allocation of a segment of torch's memory pool.
#[derive(Debug)]
pub(crate) struct SegmentLocation {
    pub(crate) base: u64,
    pub(crate) allocation: Allocation,
}

/// Returns the segment of torch's memory pool that contains a range of bytes, if there is one.
pub(crate) fn find(address: u64, len: usize) -> Option<SegmentLocation> {
    let segments = segments();
    let (base, segment) = segments.range(..=address).next_back()?;
    let end = address.checked_add(len as u64)?;
    let location = SegmentLocation { base: *base, allocation: segment.allocation.clone() };
    (end <= base + segment.mapping.len() as u64).then_some(location)
}

/// Returns the object of a store that was published last from a segment of torch's memory pool.
pub(crate) fn published_object(base: u64, client: &Client) -> Option<ObjectId> {
    let segments = segments();
    let entry = segments.get(&base)?.published.iter().find(|(store, _)| store == client)?;
    Some(entry.1)
}

/// Records the object that was published last from a segment of torch's memory pool.
pub(crate) fn record_published(base: u64, client: &Client, object: ObjectId) {
    let mut segments = segments();
    let Some(segment) = segments.get_mut(&base) else { return };
    match segment.published.iter_mut().find(|(store, _)| store == client) {
        Some(entry) => entry.1 = object,
        None => segment.published.push((client.clone(), object)),
    }
}
