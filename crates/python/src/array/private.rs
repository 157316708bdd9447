//! Exports read-only arrays of the store as copy-on-write maps, because some frameworks ignore the read-only flag.
//!
//! An object in host memory is mapped read-only, so a write through a pointer ends the process. DLPack exports such a
//! pointer. Before version 1 it has no read-only flag, and torch ignores the flag; an export cannot detect which framework
//! consumes it. So every export maps the object again, copy-on-write: writes are visible only in that map.

use std::sync::Arc;

use wholemem_os::PrivateMap;
use wholemem_store::{Object, PackObject};

use super::view::{Owner, View};
use crate::error::Exception;

/// A copy-on-write map of an object of the store, and the object whose pages the map shows.
#[derive(Debug)]
struct CopyOnWriteMap {
    // Unwritten pages of the map belong to the object, so the field `_map` is dropped before `_object`.
    _map: Arc<PrivateMap>,
    _object: Owner,
}

/// Returns the stored object that contains an array, if the array comes from a store.
fn object_of(view: &View) -> Option<&Object> {
    let owner = &view.owner;
    owner.downcast_ref::<Object>().or_else(|| owner.downcast_ref::<PackObject>().map(PackObject::whole))
}

/// Maps the elements of an array again, copy-on-write. Returns `None` if the array is not part of a stored object in host memory:
/// only such objects have a file descriptor to map.
pub(super) fn map_copy_on_write(view: &View) -> Result<Option<View>, Exception> {
    let (before, behind) = view.layout.extent()?;
    let Some(object) = object_of(view).filter(|object| object.is_cpu() && before + behind > 0) else {
        return Ok(None);
    };
    let begin = object.span()?.address();
    let first = view.address.checked_sub(before as u64).and_then(|first| first.checked_sub(begin));
    let Some(offset) = first.and_then(|offset| usize::try_from(offset).ok()) else {
        unreachable!("the array at {:#x} begins before its object at {begin:#x}", view.address);
    };
    let map = object.map_private(offset, before + behind)?;
    let address = map.address().as_ptr().expose_provenance() as u64 + before as u64;
    let owner = Arc::new(CopyOnWriteMap { _map: map, _object: Arc::clone(&view.owner) });
    Ok(Some(View { address, owner, ..view.clone() }))
}
