//! Buffers of the older kind with their handles for other processes, and memory of the host.
//!
//! A handle is a process and the number of its descriptor there, reached through `/proc`.

use std::ffi::{c_char, c_uint, c_void};
use std::os::fd::{AsRawFd, RawFd};
use std::ptr;

use rustix::mm::{MapFlags, ProtFlags};

use crate::bindings::*;
use crate::calls::{self, api, ensure, put};
use crate::ranges::{self, Kind, Range};
use crate::vmm::{self, About, Memory};
use crate::{devices, gpu};

const PAGE: usize = 4096;

/// What a handle's bytes begin with: what it is of.
pub(crate) const MEMORY: [u8; 8] = *b"fake-mem";

/// A descriptor of a process, as the bytes of a handle.
pub(crate) fn token(magic: [u8; 8], fd: RawFd, len: usize) -> [c_char; 64] {
    let mut bytes = [0; 64];
    bytes[..8].copy_from_slice(&magic);
    for (at, number) in [(8, u64::from(std::process::id())), (16, fd as u64), (24, len as u64)] {
        bytes[at..at + 8].copy_from_slice(&number.to_ne_bytes());
    }
    bytes.map(|byte| c_char::from_ne_bytes([byte]))
}

/// The descriptor that such bytes name, opened here, and its length. A process cannot open what it made itself.
pub(crate) fn open(magic: [u8; 8], token: [c_char; 64]) -> Result<(std::os::fd::OwnedFd, usize), CUresult> {
    let bytes = token.map(|byte| byte.to_ne_bytes()[0]);
    let number = |at: usize| u64::from_ne_bytes(std::array::from_fn(|index| bytes[at + index]));
    ensure(bytes[..8] == magic, CUresult::CUDA_ERROR_INVALID_VALUE)?;
    let (process, fd, len) = (number(8) as u32, number(16) as RawFd, number(24) as usize);
    ensure(process != std::process::id(), CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
    Ok((vmm::descriptor_of(process, fd)?, len))
}

api! {
    Context fn cuMemAlloc(at: *mut CUdeviceptr_v2, len: usize) {
        ensure(len > 0, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let device = calls::current()?;
        devices::check(device)?;
        let memory = Memory::create(len.next_multiple_of(PAGE), About::plain(device))?;
        let given = vmm::map_anywhere(&memory.fd, memory.len)?;
        ranges::all().insert(given, Range { len: memory.len, kind: Kind::Plain { memory } });
        put(at, given)
    }

    // A real driver waits here for all running work, and so do we.
    Context fn cuMemFree(at: CUdeviceptr_v2) {
        gpu::wait_for_all();
        let mut ranges = ranges::all();
        let is_plain = ranges.get(&at).is_some_and(|range| matches!(range.kind, Kind::Plain { .. }));
        ensure(is_plain, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        ranges.remove(&at).map_or(Ok(()), |range| vmm::unmap(at, range.len))
    }

    Context fn cuMemGetAddressRange(base: *mut CUdeviceptr_v2, len: *mut usize, at: CUdeviceptr_v2) {
        let ranges = ranges::all();
        let found = ranges::holding(&ranges, at).filter(|(_, range)| {
            matches!(range.kind, Kind::Map { .. } | Kind::Plain { .. } | Kind::Opened)
        });
        let (start, range) = found.ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?;
        put(base, start)?;
        put(len, range.len)
    }

    Context fn cuIpcGetMemHandle(handle: *mut CUipcMemHandle_v1, at: CUdeviceptr_v2) {
        let ranges = ranges::all();
        let Some((_, Range { len, kind: Kind::Plain { memory } })) = ranges::holding(&ranges, at) else {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        put(handle, CUipcMemHandle_st { reserved: token(MEMORY, memory.fd.as_raw_fd(), *len) })
    }

    Context fn cuIpcOpenMemHandle(at: *mut CUdeviceptr_v2, handle: CUipcMemHandle_v1, _flags: c_uint) {
        let (fd, len) = open(MEMORY, handle.reserved)?;
        let given = vmm::map_anywhere(&fd, len)?;
        ranges::all().insert(given, Range { len, kind: Kind::Opened });
        put(at, given)
    }

    Context fn cuIpcCloseMemHandle(at: CUdeviceptr_v2) {
        let mut ranges = ranges::all();
        let is_opened = ranges.get(&at).is_some_and(|range| matches!(range.kind, Kind::Opened));
        ensure(is_opened, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        ranges.remove(&at).map_or(Ok(()), |range| vmm::unmap(at, range.len))
    }

    Context fn cuMemHostAlloc(at: *mut *mut c_void, len: usize, _flags: c_uint) {
        ensure(len > 0, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let len = len.next_multiple_of(PAGE);
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses a place where nothing is.
        let given = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len, rights, MapFlags::PRIVATE) };
        let given = given.map_err(|_| CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        ranges::all().insert(given.expose_provenance() as u64, Range { len, kind: Kind::Pinned });
        put(at, given)
    }

    Context fn cuMemFreeHost(at: *mut c_void) {
        let at = at.addr() as u64;
        let mut ranges = ranges::all();
        let is_pinned = ranges.get(&at).is_some_and(|range| matches!(range.kind, Kind::Pinned));
        ensure(is_pinned, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        ranges.remove(&at).map_or(Ok(()), |range| vmm::unmap(at, range.len))
    }

    Context fn cuMemHostRegister(at: *mut c_void, len: usize, flags: c_uint) {
        let at = at.expose_provenance() as u64;
        ensure(at != 0 && len > 0, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let mut ranges = ranges::all();
        let taken = ranges::overlap(&ranges, at, len);
        ensure(!taken, CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)?;
        let read_only = flags & CU_MEMHOSTREGISTER_READ_ONLY != 0;
        ranges.insert(at, Range { len, kind: Kind::Registered { read_only } });
        Ok(())
    }

    // A real driver waits here for all running work, and so do we.
    Context fn cuMemHostUnregister(at: *mut c_void) {
        gpu::wait_for_all();
        let at = at.addr() as u64;
        let mut ranges = ranges::all();
        let known = ranges.get(&at).is_some_and(|range| matches!(range.kind, Kind::Registered { .. }));
        ensure(known, CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)?;
        ranges.remove(&at);
        Ok(())
    }

    Context fn cuMemHostGetDevicePointer(seen: *mut CUdeviceptr_v2, at: *mut c_void, _flags: c_uint) {
        let at = at.addr() as u64;
        let ranges = ranges::all();
        let known = ranges::holding(&ranges, at)
            .is_some_and(|(_, range)| matches!(range.kind, Kind::Pinned | Kind::Registered { .. }));
        ensure(known, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        put(seen, at)
    }

    Context fn cuPointerGetAttribute(data: *mut c_void, which: CUpointer_attribute, at: CUdeviceptr_v2) {
        let ranges = ranges::all();
        let (_, range) = ranges::holding(&ranges, at).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let is_host = matches!(range.kind, Kind::Pinned | Kind::Registered { .. });
        match which {
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_HOST_POINTER if is_host => put(data.cast::<u64>(), at),
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => {
                put(data.cast::<CUdevice>(), range.kind.device().unwrap_or(0))
            }
            _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
    }
}
