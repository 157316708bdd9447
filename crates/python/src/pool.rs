//! Memory for `torch.cuda.MemPool`: two functions that torch calls, whose memory can be shared and so be published.
//!
//! torch asks for large pieces and divides them among its tensors. Each is an allocation of its own, mapped where torch
//! is told that it lies. The pieces are known here by their addresses, each with what was published of it, so that a
//! second tensor of a piece is one more part of what the store has already.
//!
//! What it keeps true: nothing here waits for a store or for Python, since torch calls with its own lock held; memory is
//! unmapped after the work that torch had enqueued on it.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use wholemem_hal::{Allocation, Backend, BackendKind, Device, Mapping, Rights, Stream};
use wholemem_os::Deadline;
use wholemem_store::{Client, ObjectId};

/// A piece of memory that torch has.
#[derive(Debug)]
struct Piece {
    mapping: Mapping,
    allocation: Allocation,
    /// The stores that hold it, each with the object that was made of it last.
    published: Vec<(Client, ObjectId)>,
}

/// All pieces, by their first address.
fn pieces() -> MutexGuard<'static, BTreeMap<u64, Piece>> {
    static PIECES: Mutex<BTreeMap<u64, Piece>> = Mutex::new(BTreeMap::new());
    PIECES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn device(number: c_int) -> wholemem_hal::Result<Device> {
    // One for all pieces: torch makes many.
    static CUDA: OnceLock<Backend> = OnceLock::new();
    let backend = match CUDA.get() {
        Some(backend) => backend,
        None => {
            let opened = Backend::open(BackendKind::Cuda)?;
            CUDA.get_or_init(|| opened)
        }
    };
    // A negative number is none of a device, and neither is this one.
    backend.device(u32::try_from(number).unwrap_or(u32::MAX))
}

fn make(len: usize, number: c_int) -> wholemem_hal::Result<u64> {
    let device = device(number)?;
    let granule = device.granularity()?.minimum.len();
    let allocation = device.allocate(len.max(1).next_multiple_of(granule))?;
    let mapping = allocation.map(Rights::ReadWrite)?;
    let address = mapping.address();
    pieces().insert(address, Piece { mapping, allocation, published: Vec::new() });
    Ok(address)
}

/// Makes memory on a GPU, as `CUDAPluggableAllocator` asks for it; null where there is none.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn wholemem_torch_alloc(
    len: isize,
    device: c_int,
    _stream: *mut c_void,
) -> *mut c_void {
    // torch says that there is no memory; nobody would hear more of it.
    let made = usize::try_from(len).ok().and_then(|len| make(len, device).ok());
    let address = made.and_then(|address| usize::try_from(address).ok()).unwrap_or(0);
    std::ptr::with_exposed_provenance_mut(address)
}

/// Gives memory back that [`wholemem_torch_alloc`] made, behind what torch has enqueued on the stream it was used on.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn wholemem_torch_free(
    at: *mut c_void,
    _len: isize,
    number: c_int,
    stream: *mut c_void,
) {
    let Some(piece) = pieces().remove(&(at.addr() as u64)) else { return };
    let finished = device(number).and_then(|device| {
        // SAFETY: torch names the stream that it has used the memory on, which it keeps.
        let stream = unsafe { Stream::from_foreign(&device, stream.addr() as u64) };
        stream.synchronize(Deadline::NEVER)
    });
    if finished.is_err() {
        // Its work is not known to be over: better that it stays than that a kernel finds nothing.
        std::mem::forget(piece);
    }
}

/// Memory of a piece: where the piece begins, and what it is.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) base: u64,
    pub(crate) allocation: Allocation,
}

/// The piece that some bytes lie in, if torch has got it here.
pub(crate) fn find(address: u64, len: usize) -> Option<Found> {
    let pieces = pieces();
    let (base, piece) = pieces.range(..=address).next_back()?;
    let end = address.checked_add(len as u64)?;
    let found = Found { base: *base, allocation: piece.allocation.clone() };
    (end <= base + piece.mapping.len() as u64).then_some(found)
}

/// What was published last of a piece in a store.
pub(crate) fn published(base: u64, client: &Client) -> Option<ObjectId> {
    let pieces = pieces();
    let known = pieces.get(&base)?.published.iter().find(|(known, _)| known == client)?;
    Some(known.1)
}

/// Something was published of a piece.
pub(crate) fn note(base: u64, client: &Client, object: ObjectId) {
    let mut pieces = pieces();
    let Some(piece) = pieces.get_mut(&base) else { return };
    match piece.published.iter_mut().find(|(known, _)| known == client) {
        Some(known) => known.1 = object,
        None => piece.published.push((client.clone(), object)),
    }
}
