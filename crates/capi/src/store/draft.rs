//! Drafts: objects and packs that are written in place and then sealed.

use std::cell::UnsafeCell;
use std::ffi::{c_char, c_void};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use wholemem_hal::Span;
use wholemem_os::{ForkEpoch, SharedSlice};
use wholemem_store::{Draft, Error, Pack, PackDraft, SealError, Sealed};

use super::client::{
    StoreState, object_options, sealed_output, wm_store_object_options_t, wm_store_sealed_t, wm_store_t,
    write_sealed,
};
use crate::argument::{self, Output, invalid};
use crate::call::call;
use crate::failure::{Failure, Result};
use crate::handle::handle_type;
use crate::status::{
    WM_ERROR_FORKED, WM_ERROR_STORE_NOTHING_TO_SEAL, WM_ERROR_STORE_OUT_OF_RANGE, wm_status_t,
};

/// An object or a pack of a store that is being written.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct wm_store_draft_t {
    /// The number of the handle; 0 is no handle.
    pub value: u64,
}

/// The specification of a pack: several objects in one memory, which are created and sealed together, and each found by its name.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct wm_store_pack_t {
    /// The number of the handle; 0 is no handle.
    pub value: u64,
}

/// The specification of a pack, to which objects are added.
#[derive(Debug)]
pub(crate) struct PackSpec {
    state: Mutex<(Pack, Vec<usize>)>,
    space_timeout: Duration,
    epoch: ForkEpoch,
}

/// A draft, and the bytes of a small one.
#[derive(Debug)]
pub(crate) struct DraftObject {
    state: Mutex<DraftState>,
    store: Arc<StoreState>,
    epoch: ForkEpoch,
}

#[derive(Debug)]
enum Target {
    One(Draft),
    Pack(PackDraft),
}

#[derive(Debug)]
struct DraftState {
    /// The draft; `None` after it was sealed, or lost by a seal that failed.
    target: Option<Target>,
    members: Vec<Member>,
    space_timeout: Duration,
}

/// An object of a draft: the only one, or one of a pack.
#[derive(Debug)]
struct Member {
    len: usize,
    /// The bytes of a small object in host memory, which are sent with the request that seals the draft.
    bytes: Option<Box<[SharedWord]>>,
}

/// Bytes that C writes at any time.
#[derive(Debug)]
#[repr(transparent)]
struct SharedWord(UnsafeCell<u64>);

// SAFETY: the library accesses the bytes only through `SharedSlice`, which is for bytes that other threads write at the same time.
unsafe impl Sync for SharedWord {}

handle_type!(wm_store_draft_t, DraftObject, StoreDraft);
handle_type!(wm_store_pack_t, PackSpec, StorePack);

impl Target {
    /// Returns the memory of an object of the draft; `None` if its bytes are sent with the request that seals it.
    fn span(&self, member: usize) -> Result<Option<Span>> {
        Ok(match self {
            Self::One(draft) => draft.span()?,
            Self::Pack(pack) => pack.span(member)?,
        })
    }

    fn copy_at(&mut self, member: usize, offset: usize, source: SharedSlice<'_>) -> Result<()> {
        match self {
            Self::One(draft) => draft.copy_at(offset, source)?,
            Self::Pack(pack) => pack.copy_at(member, offset, source)?,
        }
        Ok(())
    }

    /// Seals the draft. If it fails and the draft can be sealed again, the draft is returned with the error.
    fn seal(self) -> Result<Sealed, (Error, Option<Box<Self>>)> {
        match self {
            Self::One(draft) => draft.seal().map_err(|SealError { error, draft, .. }| {
                (error, draft.map(|draft| Box::new(Self::One(*draft))))
            }),
            Self::Pack(pack) => pack.seal().map_err(|SealError { error, draft, .. }| {
                (error, draft.map(|draft| Box::new(Self::Pack(*draft))))
            }),
        }
    }
}

impl Member {
    /// Creates an object of a draft, with bytes of its own if it is small.
    fn new(target: &Target, number: usize, len: usize) -> Result<Self> {
        let is_small = target.span(number)?.is_none();
        let words = || (0..len.div_ceil(size_of::<u64>())).map(|_| SharedWord(UnsafeCell::new(0))).collect();
        Ok(Self { len, bytes: is_small.then(words) })
    }

    /// Returns the bytes of a small object; `None` if the object is in memory of the store.
    fn bytes(&self) -> Option<SharedSlice<'_>> {
        self.bytes.as_deref().map(|words| {
            // SAFETY: the words are borrowed for the lifetime of the result and have at least `len` bytes. They are in cells, so
            // they may be written.
            unsafe { SharedSlice::new(NonNull::from(words).cast(), self.len, true) }
        })
    }
}

impl DraftObject {
    fn create(
        store: &Arc<StoreState>,
        target: Target,
        lens: &[usize],
        space_timeout: Duration,
    ) -> Result<wm_store_draft_t> {
        let members = lens.iter().enumerate().map(|(number, len)| Member::new(&target, number, *len));
        let members = members.collect::<Result<_>>()?;
        let state = Mutex::new(DraftState { target: Some(target), members, space_timeout });
        let object = Self { state, store: Arc::clone(store), epoch: ForkEpoch::current()? };
        Ok(wm_store_draft_t::create(object)?)
    }

    fn lock(&self) -> Result<MutexGuard<'_, DraftState>> {
        lock(&self.state, &self.epoch)
    }
}

impl DraftState {
    fn target(&mut self) -> Result<&mut Target> {
        self.target.as_mut().ok_or_else(sealed_already)
    }

    fn member(&self, number: u32) -> Result<(usize, &Member)> {
        let index = number as usize;
        let member = self.members.get(index).map(|member| (index, member));
        let count = self.members.len();
        member.ok_or_else(|| invalid(format!("`member` is {number}, but the draft has {count} objects")))
    }
}

/// Locks the state of an object for a call of this thread.
fn lock<'a, T>(state: &'a Mutex<T>, epoch: &ForkEpoch) -> Result<MutexGuard<'a, T>> {
    // A child is detected before the lock is taken: in a child, a thread that was not forked may hold it.
    if !epoch.is_current() {
        return Err(Failure::new(WM_ERROR_FORKED, "a draft cannot be used in a forked child"));
    }
    // A call that panicked leaves the state as it was, or without a draft.
    Ok(state.lock().unwrap_or_else(PoisonError::into_inner))
}

fn sealed_already() -> Failure {
    Failure::new(WM_ERROR_STORE_NOTHING_TO_SEAL, "the draft was sealed, or was lost by a seal that failed")
}

/// Creates an object of `len` bytes that the caller writes and then seals. Until then only this process can access it.
///
/// `options` may be null. An object with an empty name is found by its id only. Returns the errors of `wm_store_put`, and
/// `WM_ERROR_STORE_DEVICE_HIDDEN` if the server does not have the device. The caller frees the draft with `wm_store_draft_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_store_draft_create(
    store: wm_store_t,
    name: *const c_char,
    len: u64,
    options: *const wm_store_object_options_t,
    draft: *mut wm_store_draft_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(draft, "draft") }?;
        let state = store.get()?;
        // SAFETY: the pointer is null or a text that ends with a NUL, as the header requires.
        let name = unsafe { argument::text(name, "name") }?;
        let len = argument::size(len, "len")?;
        // SAFETY: the pointer is null or points to a structure with the size in its first field, as the header requires.
        let options = unsafe { object_options(options, len) }?;
        let client = state.client_for(&options);
        let created = state.run_for(options.space_timeout, || match &options.device {
            Some(device) => client.create_on_with_meta(device, name, &options.meta, len),
            None => client.create_with_meta(name, &options.meta, len),
        })?;
        output.write(DraftObject::create(&state, Target::One(created), &[len], options.space_timeout)?);
        Ok(())
    })
}

/// Creates the specification of a pack with a name, which has no objects yet. `options` may be null; `is_array` must be 0.
///
/// Python and the program name the objects of a pack `PACK/OBJECT`. The caller frees the specification with `wm_store_pack_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_store_pack_create(
    name: *const c_char,
    options: *const wm_store_object_options_t,
    pack: *mut wm_store_pack_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(pack, "pack") }?;
        // SAFETY: the pointer is null or a text that ends with a NUL, as the header requires.
        let name = unsafe { argument::text(name, "name") }?;
        // SAFETY: the pointer is null or points to a structure with the size in its first field, as the header requires.
        let is_array =
            unsafe { argument::options(options, "options") }?.is_some_and(|given| given.is_array != 0);
        if is_array {
            return Err(invalid("`options->is_array` must be 0 for a pack"));
        }
        // SAFETY: the pointer is null or points to a structure with the size in its first field, as the header requires.
        let options = unsafe { object_options(options, 0) }?;
        let spec = Pack::new(name).with_meta(&options.meta);
        let spec = match &options.device {
            Some(device) => spec.on(device),
            None => spec,
        };
        let (state, epoch) = (Mutex::new((spec, Vec::new())), ForkEpoch::current()?);
        output.write(wm_store_pack_t::create(PackSpec {
            state,
            space_timeout: options.space_timeout,
            epoch,
        })?);
        Ok(())
    })
}

/// Adds an object of `len` bytes to the specification of a pack. The objects are numbered from 0 in the order of these calls.
///
/// `options` may be null; of its fields, only those of the metadata and of the array apply, and `device` must be zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_store_pack_add(
    pack: wm_store_pack_t,
    name: *const c_char,
    len: u64,
    options: *const wm_store_object_options_t,
) -> wm_status_t {
    call(|| {
        let object = pack.get()?;
        // SAFETY: the pointer is null or a text that ends with a NUL, as the header requires.
        let name = unsafe { argument::text(name, "name") }?;
        let len = argument::size(len, "len")?;
        // SAFETY: the pointer is null or points to a structure with the size in its first field, as the header requires.
        let options = unsafe { object_options(options, len) }?;
        if options.device.is_some() {
            return Err(invalid("`options->device` must be zero: all objects of a pack are on its device"));
        }
        let mut state = lock(&object.state, &object.epoch)?;
        state.0 = state.0.clone().add_with_meta(name, &options.meta, len);
        state.1.push(len);
        Ok(())
    })
}

/// Frees the specification of a pack. Drafts that were created from it stay valid.
#[unsafe(no_mangle)]
pub extern "C" fn wm_store_pack_destroy(pack: wm_store_pack_t) -> wm_status_t {
    call(|| Ok(pack.free()?))
}

/// Creates the objects of a pack, which the caller writes and then seals together.
///
/// Returns the errors of `wm_store_draft_create`; `WM_ERROR_STORE_TOO_MANY_MEMBERS`. The caller frees the draft with
/// `wm_store_draft_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_store_draft_create_pack(
    store: wm_store_t,
    pack: wm_store_pack_t,
    draft: *mut wm_store_draft_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(draft, "draft") }?;
        let (store, object) = (store.get()?, pack.get()?);
        let (spec, lens) = lock(&object.state, &object.epoch)?.clone();
        let client = store.client().waiting_for_space(object.space_timeout);
        let created = store.run_for(object.space_timeout, || client.create_pack(&spec))?;
        output.write(DraftObject::create(&store, Target::Pack(created), &lens, object.space_timeout)?);
        Ok(())
    })
}

/// Copies bytes to a draft in host memory, at an offset in bytes. `member` is the number of the object in a pack, otherwise 0.
///
/// Returns `WM_ERROR_STORE_OUT_OF_RANGE` if the bytes exceed the object, and `WM_ERROR_STORE_ON_DEVICE` for an object in device memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_store_draft_write(
    draft: wm_store_draft_t,
    member: u32,
    offset: u64,
    bytes: *const c_void,
    len: usize,
) -> wm_status_t {
    call(|| {
        let object = draft.get()?;
        // SAFETY: the pointer is null or points to `len` bytes, as the header requires.
        let source: &[u8] = unsafe { argument::slice(bytes.cast(), len, "bytes") }?;
        let offset = argument::size(offset, "offset")?;
        let mut state = object.lock()?;
        let (number, known) = state.member(member)?;
        let size = known.len;
        if offset.checked_add(len).is_none_or(|end| end > size) {
            let message = format!("cannot write {len} bytes at offset {offset}: the object has {size} bytes");
            return Err(Failure::new(WM_ERROR_STORE_OUT_OF_RANGE, message));
        }
        if let Some(bytes) = known.bytes() {
            // The bytes are not sent any more if the draft was sealed.
            return match &state.target {
                Some(_) => Ok(bytes.write_at(offset, source)?),
                None => Err(sealed_already()),
            };
        }
        state.target()?.copy_at(number, offset, source.into())
    })
}

/// Returns the address and the length of the memory of a draft, for writing. `member` is the number of the object in a pack, otherwise
/// 0. The address is valid until the draft is sealed or freed.
///
/// `address` is an address of the device if the draft is in device memory. Work on streams that writes it must have run before the draft
/// is sealed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_store_draft_data(
    draft: wm_store_draft_t,
    member: u32,
    address: *mut *mut c_void,
    len: *mut u64,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let address = unsafe { Output::new(address, "address") }?;
        // SAFETY: the pointer is null or valid, as the header requires.
        let len = unsafe { Output::new(len, "len") }?;
        let object = draft.get()?;
        let mut state = object.lock()?;
        state.target()?;
        let (number, known) = state.member(member)?;
        let size = known.len;
        let at = match known.bytes() {
            Some(bytes) => bytes.as_ptr().as_ptr().cast(),
            None => {
                let span = state.target()?.span(number)?;
                argument::pointer(span.map_or(0, |span| span.address()))
            }
        };
        address.write(at);
        len.write(size as u64);
        Ok(())
    })
}

/// Seals a draft: its objects become immutable, and all clients find them by name. If another object has a name, it is replaced.
///
/// Host memory of 1 MiB and more is unmapped by this call. `sealed` may be null; for a pack it gets the id of the pack. The handle stays
/// valid, but all that it can be used for is `wm_store_draft_destroy`.
///
/// Returns `WM_ERROR_STORE_STILL_MAPPED` if a forked child has mapped the memory; then the draft can be sealed later. Returns
/// `WM_ERROR_STORE_NOTHING_TO_SEAL` if the draft was sealed already, or if an earlier seal failed for another reason.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_store_draft_seal(
    draft: wm_store_draft_t,
    sealed: *mut wm_store_sealed_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { sealed_output(sealed) }?;
        let object = draft.get()?;
        let mut guard = object.lock()?;
        let state = &mut *guard;
        let mut target = state.target.take().ok_or_else(sealed_already)?;
        let mut copied = Ok(());
        for (number, member) in state.members.iter().enumerate() {
            if let Some(bytes) = member.bytes() {
                copied = copied.and_then(|()| target.copy_at(number, 0, bytes));
            }
        }
        if let Err(failure) = copied {
            state.target = Some(target);
            return Err(failure);
        }
        let mut returned = None;
        let outcome = object.store.run_for(state.space_timeout, || {
            target.seal().map_err(|(error, target)| {
                returned = target.map(|target| *target);
                error
            })
        });
        state.target = returned;
        write_sealed(output, outcome?);
        Ok(())
    })
}

/// Frees the handle of a draft. A draft that was not sealed is abandoned: the object does not exist.
#[unsafe(no_mangle)]
pub extern "C" fn wm_store_draft_destroy(draft: wm_store_draft_t) -> wm_status_t {
    call(|| Ok(draft.free()?))
}
