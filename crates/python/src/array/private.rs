//! Arrays of a store's objects in copy-on-write maps, for frameworks that may write what they must not.
//!
//! An object in host memory is mapped read-only, so that a write through a pointer to it ends the process. DLPack hands out
//! such a pointer. Before version 1 it cannot say that the memory is read-only, and torch ignores the flag that says so
//! since; nothing in the call tells torch from a framework that honours the flag. So every export maps the object once more:
//! writes stay in that map, of which no other array knows.

use std::sync::Arc;

use wholemem_os::PrivateMap;
use wholemem_store::{Object, PackObject};

use super::view::{Owner, View};
use crate::error::Raised;

/// A map, and the object whose bytes it shows.
#[derive(Debug)]
struct Private {
    // Pages that were not written are the object's: they are unmapped before it is let go.
    _map: Arc<PrivateMap>,
    _object: Owner,
}

/// The object that an array lies in, if it was got from a store.
fn object_of(view: &View) -> Option<&Object> {
    let owner = &view.owner;
    owner.downcast_ref::<Object>().or_else(|| owner.downcast_ref::<PackObject>().map(PackObject::whole))
}

/// The same elements in a copy-on-write map of their own. `None` of what is no array of an object in host memory: only
/// those have a file behind them.
pub(super) fn mapped_private(view: &View) -> Result<Option<View>, Raised> {
    let (before, behind) = view.layout.extent()?;
    let Some(object) = object_of(view).filter(|object| object.is_cpu() && before + behind > 0) else {
        return Ok(None);
    };
    let begin = object.span()?.address();
    let first = view.address.checked_sub(before as u64).and_then(|first| first.checked_sub(begin));
    let Some(offset) = first.and_then(|offset| usize::try_from(offset).ok()) else {
        unreachable!("an array at {:#x} lies before its object at {begin:#x}", view.address);
    };
    let map = object.map_private(offset, before + behind)?;
    let address = map.address().as_ptr().expose_provenance() as u64 + before as u64;
    let owner = Arc::new(Private { _map: map, _object: Arc::clone(&view.owner) });
    Ok(Some(View { address, owner, ..view.clone() }))
}
