//! Connections to a store, and requests that need no further object.

use std::ffi::{c_char, c_void};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use wholemem_os::interrupt::interruptible;
use wholemem_os::{Deadline, SharedSlice};
use wholemem_store::{Client, Error, ObjectId, Refusal, Sealed};

use super::array::ArrayLayout;
use crate::argument::{self, Output, Plain, flag, invalid};
use crate::call::call;
use crate::device::{wm_backend_t, wm_device_t};
use crate::dtype::{dtype_of, wm_dtype_t};
use crate::failure::Result;
use crate::handle::handle_type;
use crate::status::wm_status_t;

/// A connection to a store: a server of named objects in shared memory, which `wholemem serve` runs.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct wm_store_t {
    /// The number of the handle; 0 is no handle.
    pub value: u64,
}

/// Options of connections to a store.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct wm_store_options_t {
    /// The size of this structure in bytes, which the caller sets.
    pub struct_size: usize,
    /// The time for which each call waits for the server. 0 is 60 seconds.
    pub timeout_ns: u64,
    /// The backend for objects in device memory. A zero handle is CUDA, which is opened for the first such object.
    pub backend: wm_backend_t,
}

// SAFETY: all fields are integers, and every bit pattern of those is valid.
unsafe impl Plain for wm_store_options_t {
    const FIRST_LEN: usize = 24;
}

/// Options of an object to be created.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct wm_store_object_options_t {
    /// The size of this structure in bytes, which the caller sets.
    pub struct_size: usize,
    /// The metadata of the object: up to 216 bytes, which the store does not interpret. Must be null if `is_array` is 1.
    pub meta: *const c_void,
    /// The length of `meta`.
    pub meta_len: usize,
    /// 1 if the object is an array of `shape` and `dtype`, which are then its metadata, as Python writes and reads them; otherwise 0.
    pub is_array: u32,
    /// The element type of the array.
    pub dtype: wm_dtype_t,
    /// The lengths of the dimensions of the array. The last dimension is the fastest.
    pub shape: *const u64,
    /// The number of dimensions of the array.
    pub dimensions: u32,
    /// Zero.
    pub reserved: u32,
    /// The device whose memory the object is in. A zero handle is host memory.
    pub device: wm_device_t,
    /// The time for which the call waits for free memory if the quota is reached. 0 does not wait.
    pub space_timeout_ns: u64,
}

// SAFETY: all fields are integers and raw pointers, and every bit pattern of those is valid.
unsafe impl Plain for wm_store_object_options_t {
    const FIRST_LEN: usize = 64;
}

/// The result of sealing an object.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct wm_store_sealed_t {
    /// The id of the object, which is never used for another object of the store.
    pub id: u64,
    /// The version of the object: one more than that of the object that had the same name before.
    pub version: u64,
}

/// The state of a store.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct wm_store_status_t {
    /// The size of this structure in bytes, which the caller sets.
    pub struct_size: usize,
    /// The number of sealed objects.
    pub objects: u64,
    /// The number of objects that are not sealed yet.
    pub unsealed: u64,
    /// The number of deleted objects that clients still hold.
    pub retired: u64,
    /// The number of connected clients.
    pub clients: u64,
    /// The host memory that the store uses, in bytes.
    pub host_used: u64,
    /// The host memory that the store may use, in bytes.
    pub host_quota: u64,
    /// The device memory that the store uses, in bytes, over all devices.
    pub device_used: u64,
    /// The device memory that the store may use, in bytes.
    pub device_quota: u64,
    /// The number of servers that were started for this store.
    pub servers: u64,
}

// SAFETY: all fields are integers, and every bit pattern of those is valid.
unsafe impl Plain for wm_store_status_t {
    const FIRST_LEN: usize = 80;
}

/// A connection, and the time for which its calls wait.
#[derive(Debug)]
pub(crate) struct StoreState {
    client: Client,
    timeout: Option<Duration>,
}

handle_type!(wm_store_t, Arc<StoreState>, StoreClient);

/// The options of an object, checked.
#[derive(Debug, Default)]
pub(super) struct ObjectOptions {
    pub(super) meta: Vec<u8>,
    pub(super) device: Option<wholemem_hal::Device>,
    pub(super) space_timeout: Duration,
}

impl StoreState {
    /// Returns the client, for calls with a deadline of their own.
    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    /// Returns a client whose calls wait for free memory as the options say.
    pub(super) fn client_for(&self, options: &ObjectOptions) -> Client {
        self.client.waiting_for_space(options.space_timeout)
    }

    /// Runs a call that waits for the server, until the timeout of this connection.
    pub(super) fn run<T, E: Into<Error>>(&self, work: impl FnOnce() -> Result<T, E>) -> Result<T> {
        self.run_for(Duration::ZERO, work)
    }

    /// Runs a call that waits for free memory and then for the server.
    pub(super) fn run_for<T, E: Into<Error>>(
        &self,
        space_timeout: Duration,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<T> {
        within(self.timeout.map(|timeout| timeout.saturating_add(space_timeout)), work)
    }
}

/// Runs a call that waits for a server. The waits end at the timeout.
fn within<T, E: Into<Error>>(timeout: Option<Duration>, work: impl FnOnce() -> Result<T, E>) -> Result<T> {
    let outcome = match timeout {
        None => work(),
        Some(timeout) => {
            let deadline = Deadline::after(timeout);
            interruptible(move || deadline.has_passed(), work)
        }
    };
    outcome.map_err(|error| match error.into() {
        Error::Interrupted => Error::TimedOut.into(),
        error => error.into(),
    })
}

/// Connects to the store that is served at a socket.
///
/// `socket` is the path of the socket. Null is the path in `WHOLEMEM_SOCKET`, or else the default of this user, as for
/// `wholemem serve`. `options` may be null.
///
/// Returns `WM_ERROR_STORE_NOT_SERVED` if no server listens at the socket. The caller frees the handle with `wm_store_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_store_connect(
    socket: *const c_char,
    options: *const wm_store_options_t,
    store: *mut wm_store_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(store, "store") }?;
        let given: Option<PathBuf> = match socket.is_null() {
            true => None,
            // SAFETY: the pointer is a text that ends with a NUL, as the header requires.
            false => Some(unsafe { argument::path(socket, "socket") }?),
        };
        // SAFETY: the pointer is null or points to a structure with the size in its first field, as the header requires.
        let (timeout, devices) = match unsafe { argument::options(options, "options") }? {
            Some(wm_store_options_t { timeout_ns, backend, .. }) => {
                let devices = (backend.value != 0).then(|| backend.get()).transpose()?;
                (timeout_of(timeout_ns), devices.map(|backend| (*backend).clone()))
            }
            None => (None, None),
        };
        let path = wholemem_store::socket(given.as_deref())?;
        let client = within(timeout, || Client::connect_with(path, devices))?;
        output.write(wm_store_t::create(Arc::new(StoreState { client, timeout }))?);
        Ok(())
    })
}

/// Returns the time for which calls wait; `None` for the default of the client.
fn timeout_of(timeout_ns: u64) -> Option<Duration> {
    (timeout_ns != 0).then(|| argument::duration(timeout_ns))
}

/// Frees the handle of a connection, which is closed when its drafts and objects are freed too.
#[unsafe(no_mangle)]
pub extern "C" fn wm_store_destroy(store: wm_store_t) -> wm_status_t {
    call(|| Ok(store.free()?))
}

/// Copies bytes to the store as an object with a name, and seals it. If another object has the name, it is replaced; processes that
/// hold it keep it. An object with an empty name is found by its id only.
///
/// `options` and `sealed` may be null. For an object in device memory, create a draft.
///
/// Returns `WM_ERROR_STORE_OVER_QUOTA` if the store has no memory, and `WM_ERROR_STORE_NAME_TAKEN` if an object of another user has the
/// name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_store_put(
    store: wm_store_t,
    name: *const c_char,
    bytes: *const c_void,
    len: usize,
    options: *const wm_store_object_options_t,
    sealed: *mut wm_store_sealed_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { sealed_output(sealed) }?;
        let state = store.get()?;
        // SAFETY: the pointer is null or a text that ends with a NUL, as the header requires.
        let name = unsafe { argument::text(name, "name") }?;
        // SAFETY: the pointer is null or points to `len` bytes, as the header requires.
        let bytes: &[u8] = unsafe { argument::slice(bytes.cast(), len, "bytes") }?;
        // SAFETY: the pointer is null or points to a structure with the size in its first field, as the header requires.
        let options = unsafe { object_options(options, len) }?;
        if options.device.is_some() {
            return Err(invalid(
                "`options->device` must be zero: an object on a device is created as a draft",
            ));
        }
        let client = state.client_for(&options);
        let result = state.run_for(options.space_timeout, || {
            if options.meta.is_empty() {
                return client.put(name, bytes);
            }
            let mut draft = client.create_with_meta(name, &options.meta, len)?;
            draft.copy_at(0, SharedSlice::from(bytes))?;
            Ok(draft.seal()?)
        })?;
        write_sealed(output, result);
        Ok(())
    })
}

/// Checks the pointer to the result of a seal, which may be null.
///
/// # Safety
/// As the header requires: the pointer is null or valid.
pub(super) unsafe fn sealed_output<'a>(
    sealed: *mut wm_store_sealed_t,
) -> Result<Option<Output<'a, wm_store_sealed_t>>> {
    // SAFETY: the caller guarantees that the pointer is valid if it is not null.
    (!sealed.is_null()).then(|| unsafe { Output::new(sealed, "sealed") }).transpose()
}

pub(super) fn write_sealed(output: Option<Output<'_, wm_store_sealed_t>>, sealed: Sealed) {
    if let Some(output) = output {
        output.write(wm_store_sealed_t { id: sealed.id.as_u64(), version: sealed.version });
    }
}

/// Reads and checks the options of an object of `len` bytes.
///
/// # Safety
/// As the header requires: the pointer is null or points to a structure with the size in its first field.
pub(super) unsafe fn object_options(
    options: *const wm_store_object_options_t,
    len: usize,
) -> Result<ObjectOptions> {
    // SAFETY: the caller guarantees what the header requires.
    let Some(options) = unsafe { argument::options(options, "options") }? else {
        return Ok(ObjectOptions::default());
    };
    if options.reserved != 0 {
        return Err(invalid("`options->reserved` must be 0"));
    }
    // SAFETY: the options have as many bytes of metadata as they say, as the header requires.
    let mut meta = unsafe { argument::slice(options.meta.cast::<u8>(), options.meta_len, "meta") }?.to_vec();
    if flag(options.is_array, "is_array")? {
        if !meta.is_empty() {
            return Err(invalid("`options->meta` must be null if `is_array` is 1"));
        }
        // SAFETY: the options have as many dimensions as they say, as the header requires.
        let shape = unsafe { argument::slice(options.shape, options.dimensions as usize, "shape") }?;
        let dtype = dtype_of(options.dtype)?;
        let layout = ArrayLayout { dtype, shape: shape.to_vec(), is_columns_first: false };
        if layout.len() != Some(len as u64) {
            let name = dtype.info().name;
            return Err(invalid(format!("an array of {name} with the shape {shape:?} has not {len} bytes")));
        }
        meta = ArrayLayout::describe(dtype, shape)?;
    }
    let device = match options.device.value {
        0 => None,
        _ => Some((*options.device.get()?).clone()),
    };
    Ok(ObjectOptions { meta, device, space_timeout: argument::duration(options.space_timeout_ns) })
}

/// Returns the object id with a number.
pub(super) fn id_of(number: u64) -> Result<ObjectId> {
    ObjectId::from_u64(number).ok_or_else(|| invalid(format!("{number} is not the id of an object")))
}

/// Gives another name to a sealed object, or to a range of its bytes, without a copy. If another object has the name, it is replaced.
///
/// `offset` and `len` are the range; both are 0 for the whole object. `meta` is the metadata of the object under that name, and has
/// `meta_len` bytes. `sealed` may be null.
///
/// Returns `WM_ERROR_STORE_NO_SUCH_OBJECT` if the object was deleted.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_store_publish(
    store: wm_store_t,
    name: *const c_char,
    id: u64,
    offset: u64,
    len: u64,
    meta: *const c_void,
    meta_len: usize,
    sealed: *mut wm_store_sealed_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { sealed_output(sealed) }?;
        let state = store.get()?;
        // SAFETY: the pointer is null or a text that ends with a NUL, as the header requires.
        let name = unsafe { argument::text(name, "name") }?;
        // SAFETY: the pointer is null or points to `meta_len` bytes, as the header requires.
        let meta = unsafe { argument::slice(meta.cast::<u8>(), meta_len, "meta") }?;
        let id = id_of(id)?;
        let (offset, len) = (argument::size(offset, "offset")?, argument::size(len, "len")?);
        let end = offset.checked_add(len).ok_or_else(|| invalid("the range exceeds the address space"))?;
        let result = state.run(|| match end {
            0 => state.client.publish_with_meta(name, meta, id),
            _ if name.is_empty() => Err(Error::EmptyName),
            _ => state.client.publish_range(name, meta, id, offset..end),
        })?;
        write_sealed(output, result);
        Ok(())
    })
}

/// Deletes the object with an id. Its name is removed at once; processes that hold the object keep it. Deleting the first object of a
/// pack deletes the whole pack.
///
/// Returns `WM_ERROR_STORE_NO_SUCH_OBJECT`; `WM_ERROR_STORE_NOT_YOURS` if another user created the object.
#[unsafe(no_mangle)]
pub extern "C" fn wm_store_delete(store: wm_store_t, id: u64) -> wm_status_t {
    call(|| {
        let state = store.get()?;
        let id = id_of(id)?;
        state.run(|| state.client.delete(id))
    })
}

/// Deletes the object that has a name, as `wm_store_delete`.
///
/// Returns `WM_ERROR_STORE_NO_SUCH_NAME` if no object has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_store_delete_name(store: wm_store_t, name: *const c_char) -> wm_status_t {
    call(|| {
        let state = store.get()?;
        // SAFETY: the pointer is null or a text that ends with a NUL, as the header requires.
        let name = unsafe { argument::text(name, "name") }?;
        state.run(|| {
            let id = state.client.stat(name)?.id;
            state.client.delete(id).map_err(|error| match error {
                // Another process deleted the object after its name was looked up.
                Error::Refused(Refusal::NoSuchObject { .. }) => {
                    Refusal::NoSuchName { name: name.to_owned() }.into()
                }
                error => error,
            })
        })
    })
}

/// Writes the state of the store to `status`, whose `struct_size` the caller has set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_store_status(store: wm_store_t, status: *mut wm_store_status_t) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or points to a structure with the size in its first field, as the header requires.
        let output = unsafe { Output::versioned(status, "status") }?;
        let state = store.get()?;
        let of = state.run(|| state.client.status())?;
        output.write_versioned(wm_store_status_t {
            struct_size: size_of::<wm_store_status_t>(),
            objects: of.objects,
            unsealed: of.unsealed,
            retired: of.retired,
            clients: of.clients,
            host_used: of.host.used,
            host_quota: of.host.quota,
            device_used: of.device.used,
            device_quota: of.device.quota,
            servers: of.epoch,
        });
        Ok(())
    })
}

/// Unmaps the memory of objects that were freed. The other calls do this too; a process that makes none for a long time may call this
/// function.
#[unsafe(no_mangle)]
pub extern "C" fn wm_store_trim(store: wm_store_t) -> wm_status_t {
    call(|| {
        store.get()?.client.trim();
        Ok(())
    })
}
