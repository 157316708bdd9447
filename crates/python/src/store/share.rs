//! Arrays of a GPU that become objects where they lie: nothing is copied, and the array is kept until the object has gone.
//!
//! Whoever made the array may drop it. Its framework would then use the memory for another, so that it is held here as long
//! as anybody has the object. What a framework has no name for is found by its address: the driver knows which allocation
//! lies there, if it was made to be shared.

use std::ops::Range;
use std::sync::{Mutex, OnceLock, PoisonError};

use wholemem_hal::{Allocation, Segment};
use wholemem_os::ForkEpoch;
use wholemem_os::width::to_usize;
use wholemem_store::{Client, Error, ObjectId, Refusal, Sealed};

use super::description;
use crate::array::{Turn, View};
use crate::error::Raised;
use crate::pool;
use crate::stream::finish;

/// An array that is an object of a store.
#[derive(Debug)]
struct Shared {
    client: Client,
    object: ObjectId,
    _view: View,
}

static SHARED: Mutex<Vec<Shared>> = Mutex::new(Vec::new());

/// What can be done about memory that is not shared as it is.
const HINT: &str = "make the tensor under `wholemem.torch.pool.mem_pool()`, or `put` it, which copies";

/// Makes a name mean an array where it lies, and says which version of the name it is.
pub(super) fn share(client: &Client, name: &str, view: &View) -> Result<u64, Raised> {
    collect();
    let epoch = ForkEpoch::current()?;
    let refused = |message: String| Raised::new("Unsupported", message).hint(HINT);
    if !view.place.is_cuda() || view.layout.count() == 0 {
        return Err(refused(format!("an array on {} cannot become an object where it lies", view.place)));
    }
    view.check_contiguous("the array")?;
    let (address, len, meta) = (view.address, view.layout.len(), description::describe(&view.layout));
    let device = view.place.device()?;
    // The array was asked for on the default stream.
    finish(&Turn::of_default(&device).stream())?;
    let within = |base: u64| {
        let offset = to_usize(address - base);
        offset..offset.saturating_add(len)
    };
    let sealed = match pool::find(address, len) {
        Some(found) => share_piece(client, name, &meta, &found, within(found.base))?,
        None => {
            let unknown =
                |error| refused(format!("the memory of the array was not made to be shared: {error}"));
            let segments = Allocation::adopt(&device, address, len).map_err(unknown)?;
            match &segments[..] {
                [Segment { address: base, allocation }] => {
                    client.adopt(name, &meta, allocation, within(*base))?
                }
                segments => {
                    let count = segments.len();
                    return Err(refused(format!(
                        "the array lies in {count} pieces of memory, and not in one"
                    )));
                }
            }
        }
    };
    OURS.get_or_init(|| epoch);
    let kept = Shared { client: client.clone(), object: sealed.id, _view: view.clone() };
    SHARED.lock().unwrap_or_else(PoisonError::into_inner).push(kept);
    Ok(sealed.version)
}

/// Publishes some of a piece of torch's memory: as a part of what the store has of it, if it has.
fn share_piece(
    client: &Client,
    name: &str,
    meta: &[u8],
    found: &pool::Found,
    range: Range<usize>,
) -> Result<Sealed, Raised> {
    let part = pool::published(found.base, client)
        .map(|object| client.publish_range(name, meta, object, range.clone()));
    let sealed = match part {
        Some(Err(Error::Refused(Refusal::NoSuchObject { .. }))) | None => {
            client.adopt(name, meta, &found.allocation, range)?
        }
        Some(sealed) => sealed?,
    };
    pool::note(found.base, client, sealed.id);
    Ok(sealed)
}

/// The process that shares: a forked child lets nothing go that is its parent's.
static OURS: OnceLock<ForkEpoch> = OnceLock::new();

/// Lets arrays go whose objects nobody has any more, and says how many are left.
pub(super) fn collect() -> usize {
    // Before the lock, which in a child may be held by a thread that is not there.
    if OURS.get().is_some_and(|epoch| !epoch.is_current()) {
        return 0;
    }
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    let (gone, left) = std::mem::take(&mut *shared)
        .into_iter()
        .partition::<Vec<_>, _>(|shared| shared.client.is_freed(shared.object));
    *shared = left;
    let count = shared.len();
    drop(shared);
    // A framework may do what it likes when its arrays go.
    drop(gone);
    count
}
