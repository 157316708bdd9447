//! Sealed objects that are held by a handle, and read in place.

use std::ffi::{c_char, c_void};

use wholemem_store::{Object, PackMember, PackObject};

use super::client::{id_of, wm_store_t};
use super::entry::wm_store_entry_t;
use crate::argument::{self, Output, invalid};
use crate::call::call;
use crate::device::wm_device_t;
use crate::failure::Result;
use crate::handle::handle_type;
use crate::status::wm_status_t;

/// A sealed object of a store. Its bytes do not change, and stay mapped until the handle is freed, even if its name is removed or the
/// server ends.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct wm_store_object_t {
    /// The number of the handle; 0 is no handle.
    pub value: u64,
}

/// An object or a pack, which is held by one pin.
#[derive(Debug)]
pub(crate) enum HeldObject {
    One(Object),
    Pack(PackObject),
}

handle_type!(wm_store_object_t, HeldObject, StoreObject);

impl HeldObject {
    fn new(object: Object) -> Result<Self> {
        Ok(if object.is_pack() { Self::Pack(object.into_pack()?) } else { Self::One(object) })
    }

    fn whole(&self) -> &Object {
        match self {
            Self::One(object) => object,
            Self::Pack(pack) => pack.whole(),
        }
    }

    /// Returns the objects of a pack, with their names. An object that is no pack has none.
    fn members(&self) -> impl Iterator<Item = (&str, &PackMember)> {
        let pack = match self {
            Self::One(_) => None,
            Self::Pack(pack) => Some(pack),
        };
        pack.into_iter().flat_map(PackObject::members)
    }
}

/// Gets the object that has a name, without a copy. Waits up to the timeout for the object to exist; with a timeout of 0, it does not
/// wait. Getting an object again takes no system call.
///
/// Returns `WM_ERROR_STORE_NO_SUCH_NAME` if no object had the name before the timeout. The caller frees the object with
/// `wm_store_object_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_store_get(
    store: wm_store_t,
    name: *const c_char,
    timeout_ns: u64,
    object: *mut wm_store_object_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(object, "object") }?;
        let state = store.get()?;
        // SAFETY: the pointer is null or a text that ends with a NUL, as the header requires.
        let name = unsafe { argument::text(name, "name") }?;
        let found = match (timeout_ns, state.client().get_mapped(name)?) {
            (_, Some(mapped)) => mapped,
            (0, None) => state.run(|| state.client().get(name))?,
            (_, None) => state.client().get_within(name, argument::deadline(timeout_ns))?,
        };
        output.write(wm_store_object_t::create(HeldObject::new(found)?)?);
        Ok(())
    })
}

/// Gets the object with an id, without a copy.
///
/// Returns `WM_ERROR_STORE_NO_SUCH_OBJECT` if there is no sealed object with the id. The caller frees the object with
/// `wm_store_object_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_store_get_by_id(
    store: wm_store_t,
    id: u64,
    object: *mut wm_store_object_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(object, "object") }?;
        let state = store.get()?;
        let id = id_of(id)?;
        let found = state.run(|| state.client().get_by_id(id))?;
        output.write(wm_store_object_t::create(HeldObject::new(found)?)?);
        Ok(())
    })
}

/// Returns the address and the length of the bytes of an object. The address is valid until the handle of the object is freed.
///
/// The memory is read-only: host memory is mapped without write access, so that a write ends the program; a kernel must not write to
/// device memory. `address` is an address of the device if the object is in device memory. The bytes of an empty object must not be
/// read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_store_object_data(
    object: wm_store_object_t,
    address: *mut *const c_void,
    len: *mut u64,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let address = unsafe { Output::new(address, "address") }?;
        // SAFETY: the pointer is null or valid, as the header requires.
        let len = unsafe { Output::new(len, "len") }?;
        let held = object.get()?;
        let whole = held.whole();
        let at = match whole.is_cpu() {
            true => whole.bytes()?.as_ptr().as_ptr().cast_const().cast(),
            false => argument::pointer(whole.span()?.address()).cast_const(),
        };
        address.write(at);
        len.write(whole.len() as u64);
        Ok(())
    })
}

/// Writes the description of an object to `entry`, whose `struct_size` the caller has set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_store_object_entry(
    object: wm_store_object_t,
    entry: *mut wm_store_entry_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or points to a structure with the size in its first field, as the header requires.
        let output = unsafe { Output::versioned(entry, "entry") }?;
        let described = object.get()?.whole().entry()?;
        output.write_versioned((&described).into());
        Ok(())
    })
}

/// Returns a new handle of the device of an object's memory, which is a device of the host backend for host memory. The caller frees it
/// with `wm_device_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_store_object_device(
    object: wm_store_object_t,
    device: *mut wm_device_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(device, "device") }?;
        output.write(wm_device_t::create(object.get()?.whole().device())?);
        Ok(())
    })
}

/// Returns the number of objects of a pack; 0 for an object that is no pack.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_store_object_member_count(
    object: wm_store_object_t,
    count: *mut u64,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(count, "count") }?;
        output.write(object.get()?.members().count() as u64);
        Ok(())
    })
}

/// Writes the description of an object of a pack to `entry`, whose `struct_size` the caller has set. `index` counts the objects in the
/// order of their names. The object's bytes are `len` bytes at `offset` of the pack's bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_store_object_member(
    object: wm_store_object_t,
    index: u64,
    entry: *mut wm_store_entry_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or points to a structure with the size in its first field, as the header requires.
        let output = unsafe { Output::versioned(entry, "entry") }?;
        let held = object.get()?;
        let found = usize::try_from(index).ok().and_then(|index| held.members().nth(index));
        let count = held.members().count();
        let (name, member) =
            found.ok_or_else(|| invalid(format!("`index` is {index}, but the pack has {count} objects")))?;
        output.write_versioned(wm_store_entry_t {
            pack: held.whole().id().as_u64(),
            offset: member.offset as u64,
            is_host: u32::from(held.whole().is_cpu()),
            ..wm_store_entry_t::new(member.id.as_u64(), member.len, name, &member.meta)
        });
        Ok(())
    })
}

/// Frees the handle of an object. Its address must not be used any more.
#[unsafe(no_mangle)]
pub extern "C" fn wm_store_object_destroy(object: wm_store_object_t) -> wm_status_t {
    call(|| Ok(object.free()?))
}
