//! Watches: events of objects whose names begin with a prefix.

use std::ffi::c_char;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};

use wholemem_os::ForkEpoch;
use wholemem_os::interrupt::interruptible;
use wholemem_store::{Client, Error, EventKind, Watch};

use super::client::wm_store_t;
use super::entry::WM_STORE_NAME_SIZE;
use crate::argument::{self, Output, Plain, invalid};
use crate::call::call;
use crate::failure::{Failure, Result};
use crate::handle::handle_type;
use crate::status::{WM_ERROR_BUSY, WM_ERROR_FORKED, wm_status_t};

/// The kind of an event of a store: one of the constants `WM_STORE_EVENT_...`. Later versions may have others.
pub type wm_store_event_kind_t = u32;
/// An object was sealed, and has the name now. No object had the name before.
pub const WM_STORE_EVENT_PUBLISHED: wm_store_event_kind_t = 1;
/// The object that had the name was deleted.
pub const WM_STORE_EVENT_DELETED: wm_store_event_kind_t = 2;
/// An object was sealed, and has the name now. The object that had the name before is deleted.
pub const WM_STORE_EVENT_REPLACED: wm_store_event_kind_t = 3;

/// A subscription to the events of names that begin with a prefix.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct wm_store_watch_t {
    /// The number of the handle; 0 is no handle.
    pub value: u64,
}

/// A change of the object that has a watched name. All objects of a pack change in one event.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct wm_store_event_t {
    /// The size of this structure in bytes, which the caller sets.
    pub struct_size: usize,
    /// The number of the event in its store, which is larger than that of every earlier event.
    pub revision: u64,
    /// The id of the object; for a pack, that of its first object.
    pub id: u64,
    /// The version of the object that was published or deleted.
    pub version: u64,
    /// The version of the object that was replaced; otherwise 0.
    pub previous: u64,
    /// The number of changed objects: 1, or for a pack one more than the objects that it contains.
    pub objects: u64,
    /// What happened.
    pub kind: wm_store_event_kind_t,
    /// Zero.
    pub reserved: u32,
    /// The name of the object; for a pack, that of the pack.
    pub name: [c_char; WM_STORE_NAME_SIZE],
}

// SAFETY: all fields are integers and arrays of integers, and every bit pattern of those is valid.
unsafe impl Plain for wm_store_event_t {
    const FIRST_LEN: usize = 264;
}

/// A watch, in which one thread at a time waits.
#[derive(Debug)]
pub(crate) struct WatchObject {
    watch: Mutex<Watch>,
    /// True after the handle was freed: a thread that waits for an event ends its wait.
    is_freed: Arc<AtomicBool>,
    epoch: ForkEpoch,
}

handle_type!(wm_store_watch_t, WatchObject, StoreWatch);

impl WatchObject {
    /// Locks the watch for a call of this thread.
    fn lock(&self) -> Result<MutexGuard<'_, Watch>> {
        // A child is detected before the lock is tried: in a child, a thread that was not forked may hold it.
        if !self.epoch.is_current() {
            return Err(Failure::new(WM_ERROR_FORKED, "a watch cannot be used in a forked child"));
        }
        match self.watch.try_lock() {
            Ok(watch) => Ok(watch),
            Err(TryLockError::Poisoned(watch)) => Ok(watch.into_inner()),
            Err(TryLockError::WouldBlock) => {
                let busy =
                    Failure::new(WM_ERROR_BUSY, "another thread waits for the next event of this watch");
                Err(busy.hint("threads that wait at the same time need one watch each"))
            }
        }
    }
}

/// Creates a watch of the names that begin with `prefix`, or of all names if it is null.
///
/// # Safety
/// The pointers are null or valid, and `prefix` is a text that ends with a NUL.
unsafe fn create(
    store: wm_store_t,
    prefix: *const c_char,
    watch: *mut wm_store_watch_t,
    open: impl FnOnce(&Client, &str) -> Result<Watch, Error>,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the caller guarantees.
        let output = unsafe { Output::new(watch, "watch") }?;
        let state = store.get()?;
        let prefix = match prefix.is_null() {
            true => "",
            // SAFETY: the pointer is a text that ends with a NUL, as the caller guarantees.
            false => unsafe { argument::text(prefix, "prefix") }?,
        };
        let watch = Mutex::new(state.run(|| open(state.client(), prefix))?);
        let object = WatchObject { watch, is_freed: Arc::default(), epoch: ForkEpoch::current()? };
        output.write(wm_store_watch_t::create(object)?);
        Ok(())
    })
}

/// Subscribes to the events of objects whose names begin with `prefix`, which may be null for all names. The caller frees the watch
/// with `wm_store_watch_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_store_watch(
    store: wm_store_t,
    prefix: *const c_char,
    watch: *mut wm_store_watch_t,
) -> wm_status_t {
    // SAFETY: the pointers are null or valid, and `prefix` is a text, as the header requires.
    unsafe { create(store, prefix, watch, Client::watch) }
}

/// Subscribes as `wm_store_watch`, and first returns the events after the one with this `revision`, such as the last one that an earlier
/// watch returned. If the store does not have all of them any more, the first call of `wm_store_watch_next` returns
/// `WM_ERROR_STORE_EVENTS_MISSED`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_store_watch_after(
    store: wm_store_t,
    prefix: *const c_char,
    revision: u64,
    watch: *mut wm_store_watch_t,
) -> wm_status_t {
    // SAFETY: the pointers are null or valid, and `prefix` is a text, as the header requires.
    unsafe { create(store, prefix, watch, |client, prefix| client.watch_after(prefix, revision)) }
}

/// Waits for the next event of a watch, and writes it to `event`, whose `struct_size` the caller has set.
///
/// Returns `WM_ERROR_STORE_TIMED_OUT` if there is no event before the timeout; `WM_ERROR_STORE_EVENTS_MISSED` once after the server was
/// replaced: events may be lost, and later ones are delivered; `WM_ERROR_INTERRUPTED` if another thread frees the watch;
/// `WM_ERROR_BUSY` if another thread waits; `WM_ERROR_STORE_DISCONNECTED` if the store has ended, or if the caller has not read
/// events for too long.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_store_watch_next(
    watch: wm_store_watch_t,
    timeout_ns: u64,
    event: *mut wm_store_event_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or points to a structure with the size in its first field, as the header requires.
        let output = unsafe { Output::versioned(event, "event") }?;
        let object = watch.get()?;
        let mut watch = object.lock()?;
        let (is_freed, deadline) = (Arc::clone(&object.is_freed), argument::deadline(timeout_ns));
        let next = interruptible(move || is_freed.load(Ordering::Relaxed), || watch.next(deadline));
        let next = next.map_err(|error| match error {
            Error::Interrupted => Failure::new(Error::Interrupted.number(), "the watch was freed"),
            error => error.into(),
        })?;
        let (kind, version, previous) = match next.kind {
            EventKind::Published { version } => (WM_STORE_EVENT_PUBLISHED, version, 0),
            EventKind::Replaced { version, previous } => (WM_STORE_EVENT_REPLACED, version, previous),
            EventKind::Deleted { version } => (WM_STORE_EVENT_DELETED, version, 0),
            _ => return Err(invalid("this version of the interface has no number for the kind of an event")),
        };
        let mut name = [0; WM_STORE_NAME_SIZE];
        argument::copy_text(&next.name, &mut name);
        let struct_size = size_of::<wm_store_event_t>();
        output.write_versioned(wm_store_event_t {
            struct_size,
            revision: next.revision,
            id: next.object.as_u64(),
            version,
            previous,
            objects: next.objects,
            kind,
            reserved: 0,
            name,
        });
        Ok(())
    })
}

/// Frees a watch. A call of another thread that waits for its next event returns `WM_ERROR_INTERRUPTED`.
#[unsafe(no_mangle)]
pub extern "C" fn wm_store_watch_destroy(watch: wm_store_watch_t) -> wm_status_t {
    call(|| {
        let is_freed = Arc::clone(&watch.get()?.is_freed);
        watch.free()?;
        is_freed.store(true, Ordering::Relaxed);
        Ok(())
    })
}
