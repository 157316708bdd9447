//! Publishes arrays on a GPU to a store without a copy: the object is the array's memory, which is held until the object is
//! freed.
//!
//! The caller may drop the array. Its framework would then reuse the memory, so the array is held here while the object
//! exists. For memory that this package did not allocate, the driver returns the allocation at an address, if it is
//! shareable.

use std::ops::Range;
use std::sync::{Mutex, OnceLock, PoisonError};

use wholemem_hal::{Allocation, Segment};
use wholemem_os::ForkEpoch;
use wholemem_os::width::to_usize;
use wholemem_store::{Client, Error, ObjectId, Refusal, Sealed};

use super::description;
use crate::array::{FrameworkStream, View};
use crate::error::Exception;
use crate::pool;
use crate::stream::finish;

/// An array whose memory was published as an object of a store.
#[derive(Debug)]
struct Shared {
    client: Client,
    object: ObjectId,
    _view: View,
}

static SHARED: Mutex<Vec<Shared>> = Mutex::new(Vec::new());

/// The hint for an array whose memory cannot be published without a copy.
const HINT: &str = "create the tensor in `wholemem.torch.pool.mem_pool()`, or use `put`, which copies";

/// Publishes a GPU array under a name in a store without a copy, and returns the version of the object under its name.
pub(super) fn share(client: &Client, name: &str, view: &View) -> Result<u64, Exception> {
    collect();
    let epoch = ForkEpoch::current()?;
    let unsupported = |message: String| Exception::new("Unsupported", message).hint(HINT);
    if !view.dl_device.is_cuda() || view.layout.count() == 0 {
        return Err(unsupported(format!("an array on {} cannot be shared without a copy", view.dl_device)));
    }
    view.check_contiguous("the array")?;
    let (address, len, meta) = (view.address, view.layout.len(), description::describe(&view.layout));
    let device = view.dl_device.device()?;
    // The array was imported for the default stream, whose work must have run before the array is published.
    finish(&FrameworkStream::default_of(&device).stream())?;
    let within = |base: u64| {
        let offset = to_usize(address - base);
        offset..offset.saturating_add(len)
    };
    let sealed = match pool::find(address, len) {
        Some(segment) => share_segment(client, name, &meta, &segment, within(segment.base))?,
        None => {
            let unknown = |error| {
                unsupported(format!("the memory of the array was not allocated to be shared: {error}"))
            };
            let segments = Allocation::adopt(&device, address, len).map_err(unknown)?;
            match &segments[..] {
                [Segment { address: base, allocation }] => {
                    client.adopt(name, &meta, allocation, within(*base))?
                }
                segments => {
                    let count = segments.len();
                    return Err(unsupported(format!("the array covers {count} allocations instead of one")));
                }
            }
        }
    };
    SHARING_PROCESS.get_or_init(|| epoch);
    let shared = Shared { client: client.clone(), object: sealed.id, _view: view.clone() };
    SHARED.lock().unwrap_or_else(PoisonError::into_inner).push(shared);
    Ok(sealed.version)
}

/// Publishes a range of a memory segment of torch's pool. If the store already has the segment, the object is a part of it.
fn share_segment(
    client: &Client,
    name: &str,
    meta: &[u8],
    segment: &pool::SegmentLocation,
    range: Range<usize>,
) -> Result<Sealed, Exception> {
    let part = pool::published_object(segment.base, client)
        .map(|object| client.publish_range(name, meta, object, range.clone()));
    let sealed = match part {
        Some(Err(Error::Refused(Refusal::NoSuchObject { .. }))) | None => {
            client.adopt(name, meta, &segment.allocation, range)?
        }
        Some(sealed) => sealed?,
    };
    pool::record_published(segment.base, client, sealed.id);
    Ok(sealed)
}

/// The process that published arrays without a copy: a forked child must not release arrays of its parent.
static SHARING_PROCESS: OnceLock<ForkEpoch> = OnceLock::new();

/// Releases published arrays whose objects were freed, and returns the number of arrays that are still held.
pub(super) fn collect() -> usize {
    // A forked child is detected before the mutex is locked: in a child, a thread that was not forked may hold the mutex.
    if SHARING_PROCESS.get().is_some_and(|epoch| !epoch.is_current()) {
        return 0;
    }
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    let (gone, left) = std::mem::take(&mut *shared)
        .into_iter()
        .partition::<Vec<_>, _>(|shared| shared.client.is_freed(shared.object));
    *shared = left;
    let count = shared.len();
    drop(shared);
    // The arrays are dropped after the lock is released, because dropping a framework's array may run arbitrary code.
    drop(gone);
    count
}
