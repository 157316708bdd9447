//! Backends and devices.

use std::ffi::c_char;

use wholemem_hal::{Backend, BackendKind, Device, HostConfig};

use crate::argument::{self, Output, Plain, invalid};
use crate::call::call;
use crate::failure::Result;
use crate::handle::handle_type;
use crate::status::wm_status_t;

/// The kind of a backend: one of `WM_BACKEND_AUTO`, `WM_BACKEND_HOST` and `WM_BACKEND_CUDA`.
pub type wm_backend_kind_t = u32;
/// CUDA if it works on this machine, otherwise the host backend.
pub const WM_BACKEND_AUTO: wm_backend_kind_t = 0;
/// Linux shared memory: devices are NUMA nodes.
pub const WM_BACKEND_HOST: wm_backend_kind_t = 1;
/// GPUs.
pub const WM_BACKEND_CUDA: wm_backend_kind_t = 2;

/// The size of the name of a device, with its NUL.
pub const WM_DEVICE_NAME_SIZE: usize = 128;

/// The maximum number of virtual devices. Each takes memory of the process.
const MAX_VIRTUAL_DEVICES: u32 = 1024;

/// An open backend. Devices of two open backends cannot be mixed.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct wm_backend_t {
    /// The number of the handle; 0 is no handle.
    pub value: u64,
}

/// A device of a backend: a GPU or a NUMA node.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct wm_device_t {
    /// The number of the handle; 0 is no handle.
    pub value: u64,
}

handle_type!(wm_backend_t, Backend, Backend);
handle_type!(wm_device_t, Device, Device);

/// Properties of a device.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct wm_device_info_t {
    /// The size of this structure in bytes, which the caller sets.
    pub struct_size: usize,
    /// The kind of the device's backend: `WM_BACKEND_HOST` or `WM_BACKEND_CUDA`.
    pub backend: wm_backend_kind_t,
    /// The number of the device on its backend.
    pub number: u32,
    /// The total memory of the device in bytes.
    pub memory_len: u64,
    /// The compute capability of a GPU times ten (90 for 9.0); 0 for other devices.
    pub compute: u32,
    /// The NUMA node of the host that is nearest to the device; -1 if it is not known.
    pub numa_node: i32,
    /// An identifier of the device that is the same in every process.
    pub uuid: [u8; 16],
    /// The name of the device, which is cut off if it is longer.
    pub name: [c_char; WM_DEVICE_NAME_SIZE],
}

// SAFETY: all fields are integers and arrays of integers, and every bit pattern of those is valid.
unsafe impl Plain for wm_device_info_t {
    const FIRST_LEN: usize = 176;
}

/// Opens a backend.
///
/// `virtual_devices` is 0, or the number of devices that the host backend shall have instead of one for each NUMA node: several ranks
/// in one process, and tests, can so have a device each. It is at most 1024, and must be 0 for other backends.
///
/// Returns `WM_ERROR_UNAVAILABLE` if the backend does not work on this machine. The caller frees the handle with `wm_backend_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_backend_open(
    kind: wm_backend_kind_t,
    virtual_devices: u32,
    backend: *mut wm_backend_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(backend, "backend") }?;
        output.write(wm_backend_t::create(open_backend(kind, virtual_devices)?)?);
        Ok(())
    })
}

fn open_backend(kind: wm_backend_kind_t, virtual_devices: u32) -> Result<Backend> {
    if virtual_devices > MAX_VIRTUAL_DEVICES {
        return Err(invalid(format!(
            "`virtual_devices` is {virtual_devices}, more than {MAX_VIRTUAL_DEVICES}"
        )));
    }
    let opened = match (kind, virtual_devices) {
        (WM_BACKEND_HOST, 1..) => Backend::host(HostConfig::virtual_devices(virtual_devices as usize)),
        (WM_BACKEND_AUTO | WM_BACKEND_CUDA, 1..) => {
            return Err(invalid("`virtual_devices` must be 0, except for `WM_BACKEND_HOST`"));
        }
        (WM_BACKEND_AUTO, 0) => Backend::auto(),
        (WM_BACKEND_HOST, 0) => Backend::open(BackendKind::Host),
        (WM_BACKEND_CUDA, 0) => Backend::open(BackendKind::Cuda),
        _ => return Err(invalid(format!("there is no kind of backend {kind}"))),
    };
    Ok(opened?)
}

/// Frees the handle of a backend. Its devices stay valid.
#[unsafe(no_mangle)]
pub extern "C" fn wm_backend_destroy(backend: wm_backend_t) -> wm_status_t {
    call(|| Ok(backend.free()?))
}

/// Returns the number of devices of a backend.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_backend_device_count(backend: wm_backend_t, count: *mut u32) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(count, "count") }?;
        output.write(device_count(&*backend.get()?));
        Ok(())
    })
}

/// Returns the number of devices of a backend.
pub(crate) fn device_count(backend: &Backend) -> u32 {
    u32::try_from(backend.devices().len())
        .unwrap_or_else(|_| unreachable!("the number of devices is a `u32`"))
}

/// Returns the device with a number on a backend.
///
/// Returns `WM_ERROR_NO_SUCH_DEVICE` if there is no such device. The caller frees the handle with `wm_device_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_device_open(
    backend: wm_backend_t,
    number: u32,
    device: *mut wm_device_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(device, "device") }?;
        output.write(wm_device_t::create(backend.get()?.device(number)?)?);
        Ok(())
    })
}

/// Frees the handle of a device. Objects that use the device keep it open.
#[unsafe(no_mangle)]
pub extern "C" fn wm_device_destroy(device: wm_device_t) -> wm_status_t {
    call(|| Ok(device.free()?))
}

/// Writes the properties of a device to `info`, whose `struct_size` the caller has set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_device_info(device: wm_device_t, info: *mut wm_device_info_t) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or points to a structure with the size in its first field, as the header requires.
        let output = unsafe { Output::versioned(info, "info") }?;
        let device = device.get()?;
        let known = device.info();
        let mut name = [0; WM_DEVICE_NAME_SIZE];
        argument::copy_text(&known.name, &mut name);
        output.write_versioned(wm_device_info_t {
            struct_size: size_of::<wm_device_info_t>(),
            backend: kind_of(&device)?,
            number: known.id.0,
            memory_len: known.memory_len as u64,
            compute: known.compute,
            numa_node: known.numa_node.and_then(|node| i32::try_from(node).ok()).unwrap_or(-1),
            uuid: known.uuid,
            name,
        });
        Ok(())
    })
}

fn kind_of(device: &Device) -> Result<wm_backend_kind_t> {
    match device.backend().kind() {
        BackendKind::Host => Ok(WM_BACKEND_HOST),
        BackendKind::Cuda => Ok(WM_BACKEND_CUDA),
        other => Err(invalid(format!("the backend {other} has no number in this version of the interface"))),
    }
}

/// Returns the number of bytes that can currently be allocated on a device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_device_available(device: wm_device_t, len: *mut u64) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(len, "len") }?;
        output.write(device.get()?.available()? as u64);
        Ok(())
    })
}
