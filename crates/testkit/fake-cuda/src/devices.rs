//! The fake driver's GPUs, their attributes and their contexts.

use std::ffi::{c_char, c_int, c_uint};
use std::ptr;

use crate::bindings::*;
use crate::calls::{self, api, ensure, read_input, write_output};
use crate::{config, gpu, vmm};

/// The total memory of each fake GPU in bytes.
pub(crate) const TOTAL: usize = 64 << 30;

/// The context handle of device 0. The handle of device `n` is this value plus `n`, and is not a valid pointer.
const FIRST_CONTEXT: usize = 0xC0DA_0000;

/// Returns the device number as an index, or an error if there is no such device.
pub(crate) fn check(device: CUdevice) -> Result<usize, CUresult> {
    let index = usize::try_from(device).ok().filter(|&index| index < config::get().devices);
    index.ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)
}

fn attribute(device: usize, which: CUdevice_attribute) -> Result<c_int, CUresult> {
    Ok(match which {
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID => {
            config::get().numa_nodes.get(device).copied().unwrap_or(0)
        }
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK => 1024,
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => 132,
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_WARP_SIZE => 32,
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => 9,
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING
        | CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        | CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        | CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        // As on an H200, the attribute says that fabric handles are supported, but `cuMemCreate` refuses to create one.
        | CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED => 1,
        CUdevice_attribute_enum(1..200) => 0,
        _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    })
}

api! {
    None fn cuInit(flags: c_uint) {
        ensure(flags == 0, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        ensure(config::get().devices > 0, CUresult::CUDA_ERROR_NO_DEVICE)?;
        calls::set_initialized();
        Ok(())
    }

    None fn cuDriverGetVersion(version: *mut c_int) {
        write_output(version, config::get().version)
    }

    Init fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) {
        check(ordinal)?;
        write_output(device, ordinal)
    }

    Init fn cuDeviceGetCount(count: *mut c_int) {
        write_output(count, config::get().devices as c_int)
    }

    Init fn cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice) {
        check(device)?;
        let text = b"Fake GPU\0";
        ensure(!name.is_null() && len as usize >= text.len(), CUresult::CUDA_ERROR_INVALID_VALUE)?;
        // SAFETY: the caller of `cuDeviceGetName` guarantees that `name` is writable for `len` bytes, and `len` was checked to be
        // at least the length of `text`.
        unsafe { ptr::copy_nonoverlapping(text.as_ptr().cast(), name, text.len()) };
        Ok(())
    }

    Init fn cuDeviceGetUuid(uuid: *mut CUuuid, device: CUdevice) {
        let index = check(device)?;
        write_output(uuid, CUuuid_st { bytes: [0x2A + index as c_char; 16] })
    }

    Init fn cuDeviceTotalMem(len: *mut usize, device: CUdevice) {
        check(device)?;
        write_output(len, TOTAL)
    }

    Init fn cuDeviceGetAttribute(value: *mut c_int, which: CUdevice_attribute, device: CUdevice) {
        let index = check(device)?;
        write_output(value, attribute(index, which)?)
    }

    Init fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) {
        let index = check(device)?;
        gpu::start();
        write_output(context, ptr::without_provenance_mut(FIRST_CONTEXT + index))
    }

    Init fn cuCtxPushCurrent(context: CUcontext) {
        let device = context.addr().checked_sub(FIRST_CONTEXT).map_or(-1, |index| index as CUdevice);
        check(device).map_err(|_| CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        calls::push(device);
        Ok(())
    }

    // `cuCtxPopCurrent` pops the context even if it fails, as a real driver does when it returns an error of earlier
    // work.
    InitUncounted fn cuCtxPopCurrent(context: *mut CUcontext) {
        let device = calls::pop()?;
        write_output(context, ptr::without_provenance_mut(FIRST_CONTEXT + device as usize))?;
        calls::count_call("cuCtxPopCurrent\0")
    }

    Context fn cuMemGetInfo(free: *mut usize, total: *mut usize) {
        let used = vmm::used_by(check(calls::current()?)?);
        write_output(free, TOTAL - used)?;
        write_output(total, TOTAL)
    }

    // `cuMulticastCreate` reports that multicast is not supported, as on a machine with a single GPU.
    Init fn cuMulticastCreate(_handle: *mut CUmemGenericAllocationHandle, properties: *const CUmulticastObjectProp) {
        read_input(properties)?;
        Err(CUresult::CUDA_ERROR_NOT_SUPPORTED)
    }

    Init fn cuMulticastAddDevice(_handle: CUmemGenericAllocationHandle, device: CUdevice) {
        check(device)?;
        Err(CUresult::CUDA_ERROR_INVALID_VALUE)
    }

    Init fn cuMulticastBindMem(
        _multicast: CUmemGenericAllocationHandle, _at: usize, _memory: CUmemGenericAllocationHandle,
        _offset: usize, _len: usize, _flags: std::ffi::c_ulonglong,
    ) {
        Err(CUresult::CUDA_ERROR_INVALID_VALUE)
    }
}
