//! Descriptions of objects, and lists of them.

use std::ffi::c_char;

use wholemem_store::Entry;

use super::array::ArrayLayout;
use super::client::wm_store_t;
use crate::argument::{self, Output, Plain, flag, invalid};
use crate::call::call;
use crate::dtype::wm_dtype_t;
use crate::handle::handle_type;
use crate::status::wm_status_t;

/// The size of the name of an object, with its NUL.
pub const WM_STORE_NAME_SIZE: usize = 208;
/// The maximum length of the metadata of an object.
pub const WM_STORE_META_SIZE: usize = 216;
/// The maximum number of dimensions of an array that `wm_store_entry_t` describes.
pub const WM_STORE_MAX_DIMENSIONS: usize = 32;

/// The description of an object, or of an object of a pack.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct wm_store_entry_t {
    /// The size of this structure in bytes, which the caller sets.
    pub struct_size: usize,
    /// The id of the object.
    pub id: u64,
    /// The length of the object in bytes.
    pub len: u64,
    /// The version of the object; 0 for an object of `wm_store_object_member`.
    pub version: u64,
    /// The time at which the object was created, in milliseconds since the Unix epoch; 0 for an object of `wm_store_object_member`.
    pub created_ms: u64,
    /// The id of the pack that contains the object, which may be this object; 0 outside a pack.
    pub pack: u64,
    /// The offset of the object in its pack in bytes, for an object of `wm_store_object_member`; otherwise 0.
    pub offset: u64,
    /// The user id of the creator; `UINT32_MAX` for an object of `wm_store_object_member`.
    pub owner: u32,
    /// 1 if the object is in host memory, 0 if it is in device memory.
    pub is_host: u32,
    /// 1 if the metadata describes an array of the length of the object, otherwise 0.
    pub is_array: u32,
    /// The element type of the array.
    pub dtype: wm_dtype_t,
    /// The number of dimensions of the array.
    pub dimensions: u32,
    /// 1 if the first dimension of the array is the fastest, 0 if the last one is.
    pub is_columns_first: u32,
    /// The lengths of the dimensions of the array.
    pub shape: [u64; WM_STORE_MAX_DIMENSIONS],
    /// The length of the metadata.
    pub meta_len: u64,
    /// The metadata.
    pub meta: [u8; WM_STORE_META_SIZE],
    /// The name of the object; empty if it has none.
    pub name: [c_char; WM_STORE_NAME_SIZE],
}

// SAFETY: all fields are integers and arrays of integers, and every bit pattern of those is valid.
unsafe impl Plain for wm_store_entry_t {
    const FIRST_LEN: usize = 768;
}

/// A list of descriptions of objects.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct wm_store_list_t {
    /// The number of the handle; 0 is no handle.
    pub value: u64,
}

handle_type!(wm_store_list_t, Vec<Entry>, StoreList);

impl wm_store_entry_t {
    /// Describes an object with a length, name and metadata; the other fields are those of an object of a pack.
    pub(super) fn new(id: u64, len: usize, name: &str, meta: &[u8]) -> Self {
        let mut entry = Self {
            struct_size: size_of::<Self>(),
            id,
            len: len as u64,
            version: 0,
            created_ms: 0,
            pack: 0,
            offset: 0,
            owner: u32::MAX,
            is_host: 1,
            is_array: 0,
            dtype: 0,
            dimensions: 0,
            is_columns_first: 0,
            shape: [0; WM_STORE_MAX_DIMENSIONS],
            meta_len: meta.len() as u64,
            meta: [0; WM_STORE_META_SIZE],
            name: [0; WM_STORE_NAME_SIZE],
        };
        entry.meta.iter_mut().zip(meta).for_each(|(to, from)| *to = *from);
        argument::copy_text(name, &mut entry.name);
        if let Some(layout) = ArrayLayout::of_metadata(meta, entry.len)
            && let Some(shape) = entry.shape.get_mut(..layout.shape.len())
        {
            shape.copy_from_slice(&layout.shape);
            entry.is_array = 1;
            entry.dtype = layout.dtype.code();
            entry.dimensions = u32::try_from(layout.shape.len())
                .unwrap_or_else(|_| unreachable!("an array of the structure has fewer dimensions"));
            entry.is_columns_first = u32::from(layout.is_columns_first);
        }
        entry
    }
}

impl From<&Entry> for wm_store_entry_t {
    fn from(entry: &Entry) -> Self {
        Self {
            version: entry.version,
            created_ms: entry.created,
            pack: entry.pack.map_or(0, |pack| pack.as_u64()),
            owner: entry.owner,
            is_host: u32::from(entry.is_cpu),
            ..Self::new(entry.id.as_u64(), entry.len, &entry.name, &entry.meta)
        }
    }
}

/// Writes the description of the object that has a name to `entry`, whose `struct_size` the caller has set. The object is not held.
///
/// Returns `WM_ERROR_STORE_NO_SUCH_NAME` if no object has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_store_stat(
    store: wm_store_t,
    name: *const c_char,
    entry: *mut wm_store_entry_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or points to a structure with the size in its first field, as the header requires.
        let output = unsafe { Output::versioned(entry, "entry") }?;
        let state = store.get()?;
        // SAFETY: the pointer is null or a text that ends with a NUL, as the header requires.
        let name = unsafe { argument::text(name, "name") }?;
        let found = state.run(|| state.client().stat(name))?;
        output.write_versioned((&found).into());
        Ok(())
    })
}

/// Lists the objects whose names begin with `prefix`, sorted by name. Sends no request.
///
/// `drafts` is 1 to list the objects that are not sealed yet, of all clients; otherwise 0. `prefix` may be null, for all names. The
/// caller frees the list with `wm_store_list_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_store_list(
    store: wm_store_t,
    prefix: *const c_char,
    drafts: u32,
    list: *mut wm_store_list_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(list, "list") }?;
        let state = store.get()?;
        let prefix = match prefix.is_null() {
            true => "",
            // SAFETY: the pointer is a text that ends with a NUL, as the header requires.
            false => unsafe { argument::text(prefix, "prefix") }?,
        };
        let entries = match flag(drafts, "drafts")? {
            true => state.client().drafts(prefix)?,
            false => state.client().list(prefix)?,
        };
        output.write(wm_store_list_t::create(entries)?);
        Ok(())
    })
}

/// Returns the number of objects in a list.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_store_list_count(list: wm_store_list_t, count: *mut u64) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(count, "count") }?;
        output.write(list.get()?.len() as u64);
        Ok(())
    })
}

/// Writes the description of the object with an index in a list to `entry`, whose `struct_size` the caller has set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_store_list_entry(
    list: wm_store_list_t,
    index: u64,
    entry: *mut wm_store_entry_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or points to a structure with the size in its first field, as the header requires.
        let output = unsafe { Output::versioned(entry, "entry") }?;
        let entries = list.get()?;
        let count = entries.len();
        let found = usize::try_from(index).ok().and_then(|index| entries.get(index));
        let found =
            found.ok_or_else(|| invalid(format!("`index` is {index}, but the list has {count} entries")))?;
        output.write_versioned(found.into());
        Ok(())
    })
}

/// Frees a list.
#[unsafe(no_mangle)]
pub extern "C" fn wm_store_list_destroy(list: wm_store_list_t) -> wm_status_t {
    call(|| Ok(list.free()?))
}
