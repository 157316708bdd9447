//! The fake driver's memory from `cuMemAlloc` with its IPC handles, and its pinned and registered host memory.
//!
//! An IPC handle contains a process id and a descriptor number, which is opened through `/proc`.

use std::ffi::{c_char, c_uint, c_void};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::ptr;

use rustix::mm::{MapFlags, ProtFlags};

use crate::bindings::*;
use crate::calls::{self, api, ensure, write_output};
use crate::ranges::{self, AddressRange, RangeKind};
use crate::vmm::{self, FakeMemory, MemoryInfo};
use crate::{devices, gpu};

const PAGE: usize = 4096;

/// The first bytes of every IPC handle for memory.
pub(crate) const MEMORY: [u8; 8] = *b"fake-mem";

/// Returns the bytes of an IPC handle that refers to the file descriptor `fd` of this process.
pub(crate) fn token(magic: [u8; 8], fd: BorrowedFd<'_>, len: usize) -> Result<[c_char; 64], CUresult> {
    let mut bytes = [0; 64];
    bytes[..8].copy_from_slice(&magic);
    let ((_, inode), _) = vmm::file(fd)?;
    let number = fd.as_raw_fd() as u64;
    for (at, number) in [(8, u64::from(std::process::id())), (16, number), (24, len as u64), (32, inode)] {
        bytes[at..at + 8].copy_from_slice(&number.to_ne_bytes());
    }
    Ok(bytes.map(|byte| c_char::from_ne_bytes([byte])))
}

/// Opens the file descriptor that an IPC handle refers to, and returns the descriptor and the length in the handle. As
/// in CUDA, a process cannot open its own handles.
pub(crate) fn open(magic: [u8; 8], token: [c_char; 64]) -> Result<(std::os::fd::OwnedFd, usize), CUresult> {
    let bytes = token.map(|byte| byte.to_ne_bytes()[0]);
    let number = |at: usize| u64::from_ne_bytes(std::array::from_fn(|index| bytes[at + index]));
    ensure(bytes[..8] == magic, CUresult::CUDA_ERROR_INVALID_VALUE)?;
    let (process, fd, len) = (number(8) as u32, number(16) as RawFd, number(24) as usize);
    ensure(process != std::process::id(), CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
    let opened = vmm::descriptor_of(process, fd)?;
    // The number of a closed descriptor is used again, and then refers to other memory.
    ensure(vmm::file(opened.as_fd())?.0.1 == number(32), CUresult::CUDA_ERROR_INVALID_VALUE)?;
    Ok((opened, len))
}

api! {
    Context fn cuMemAlloc(at: *mut CUdeviceptr_v2, len: usize) {
        ensure(len > 0, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let device = calls::current()?;
        devices::check(device)?;
        let memory = FakeMemory::create(len.next_multiple_of(PAGE), MemoryInfo::for_malloc(device))?;
        let mapped_at = vmm::map_anywhere(&memory.fd, memory.len)?;
        ranges::all().insert(mapped_at, AddressRange::new(memory.len, RangeKind::Malloc { memory }));
        write_output(at, mapped_at)
    }

    // `cuMemFree` waits for all running work, as in a real driver.
    Context fn cuMemFree(at: CUdeviceptr_v2) {
        gpu::wait_for_all();
        let mut ranges = ranges::all();
        let is_malloc = ranges.get(&at).is_some_and(|range| matches!(range.kind, RangeKind::Malloc { .. }));
        ensure(is_malloc, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        ranges.remove(&at).map_or(Ok(()), |range| vmm::unmap(at, range.len))
    }

    Context fn cuMemGetAddressRange(base: *mut CUdeviceptr_v2, len: *mut usize, at: CUdeviceptr_v2) {
        let ranges = ranges::all();
        let found = ranges::containing(&ranges, at).filter(|(_, range)| {
            matches!(range.kind, RangeKind::Map { .. } | RangeKind::Malloc { .. } | RangeKind::Opened { .. })
        });
        let (start, range) = found.ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?;
        write_output(base, start)?;
        write_output(len, range.len)
    }

    Context fn cuIpcGetMemHandle(handle: *mut CUipcMemHandle_v1, at: CUdeviceptr_v2) {
        let ranges = ranges::all();
        let Some((_, AddressRange { len, kind: RangeKind::Malloc { memory }, .. })) = ranges::containing(&ranges, at) else {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        write_output(handle, CUipcMemHandle_st { reserved: token(MEMORY, memory.fd.as_fd(), *len)? })
    }

    Context fn cuIpcOpenMemHandle(at: *mut CUdeviceptr_v2, handle: CUipcMemHandle_v1, _flags: c_uint) {
        let mut ranges = ranges::all();
        // As in CUDA, opening a handle again returns the same address, which is closed as often as it was opened.
        for (mapped_at, range) in ranges.iter_mut() {
            if let RangeKind::Opened { token, count } = &mut range.kind && *token == handle.reserved {
                *count += 1;
                return write_output(at, *mapped_at);
            }
        }
        let (fd, len) = open(MEMORY, handle.reserved)?;
        let mapped_at = vmm::map_anywhere(&fd, len)?;
        let kind = RangeKind::Opened { token: handle.reserved, count: 1 };
        ranges.insert(mapped_at, AddressRange::new(len, kind));
        write_output(at, mapped_at)
    }

    Context fn cuIpcCloseMemHandle(at: CUdeviceptr_v2) {
        let mut ranges = ranges::all();
        let Some(AddressRange { kind: RangeKind::Opened { count, .. }, .. }) = ranges.get_mut(&at) else {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        *count -= 1;
        if *count > 0 {
            return Ok(());
        }
        ranges.remove(&at).map_or(Ok(()), |range| vmm::unmap(at, range.len))
    }

    Context fn cuMemHostAlloc(at: *mut *mut c_void, len: usize, _flags: c_uint) {
        ensure(len > 0, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let len = len.next_multiple_of(PAGE);
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the address is null and `FIXED` is not set, so the kernel chooses a free range and replaces no
        // mapping.
        let mapped_at = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len, rights, MapFlags::PRIVATE) };
        let mapped_at = mapped_at.map_err(|_| CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        ranges::all().insert(mapped_at.expose_provenance() as u64, AddressRange::new(len, RangeKind::Pinned));
        write_output(at, mapped_at)
    }

    Context fn cuMemFreeHost(at: *mut c_void) {
        let at = at.addr() as u64;
        let mut ranges = ranges::all();
        let is_pinned = ranges.get(&at).is_some_and(|range| matches!(range.kind, RangeKind::Pinned));
        ensure(is_pinned, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        ranges.remove(&at).map_or(Ok(()), |range| vmm::unmap(at, range.len))
    }

    Context fn cuMemHostRegister(at: *mut c_void, len: usize, flags: c_uint) {
        let at = at.expose_provenance() as u64;
        ensure(at != 0 && len > 0, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let mut ranges = ranges::all();
        let overlaps = ranges::overlap(&ranges, at, len);
        ensure(!overlaps, CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)?;
        let read_only = flags & CU_MEMHOSTREGISTER_READ_ONLY != 0;
        ranges.insert(at, AddressRange::new(len, RangeKind::Registered { read_only }));
        Ok(())
    }

    // `cuMemHostUnregister` waits for all running work, as in a real driver.
    Context fn cuMemHostUnregister(at: *mut c_void) {
        gpu::wait_for_all();
        let at = at.addr() as u64;
        let mut ranges = ranges::all();
        let known = ranges.get(&at).is_some_and(|range| matches!(range.kind, RangeKind::Registered { .. }));
        ensure(known, CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)?;
        ranges.remove(&at);
        Ok(())
    }

    Context fn cuMemHostGetDevicePointer(seen: *mut CUdeviceptr_v2, at: *mut c_void, _flags: c_uint) {
        let at = at.addr() as u64;
        let ranges = ranges::all();
        let known = ranges::containing(&ranges, at)
            .is_some_and(|(_, range)| matches!(range.kind, RangeKind::Pinned | RangeKind::Registered { .. }));
        ensure(known, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        write_output(seen, at)
    }

    Context fn cuPointerGetAttribute(data: *mut c_void, which: CUpointer_attribute, at: CUdeviceptr_v2) {
        let ranges = ranges::all();
        let (_, range) = ranges::containing(&ranges, at).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let is_host = matches!(range.kind, RangeKind::Pinned | RangeKind::Registered { .. });
        match which {
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_HOST_POINTER if is_host => write_output(data.cast::<u64>(), at),
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID => write_output(data.cast::<u64>(), range.id),
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => {
                write_output(data.cast::<CUdevice>(), range.kind.device().unwrap_or(0))
            }
            _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
    }
}
