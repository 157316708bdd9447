//! Copy-on-write mappings of a part of a memory file (`MAP_PRIVATE`): writes stay in this process.
//!
//! Pages that this process has not written show the current bytes of the file, including later writes to the file. If
//! a caller relies on the bytes, it must ensure that the file is not written while the mapping exists.
//!
//! ```
//! use wholemem_os::vm::Protection;
//! use wholemem_os::{Memfd, PrivateMap, SharedMap};
//!
//! let memory = Memfd::create("example", 64 << 10)?;
//! let shared = SharedMap::create(&memory, Protection::ReadWrite)?;
//! shared.bytes().write_at(100, b"shared")?;
//!
//! let private = PrivateMap::create(&memory, 100, 6)?;
//! private.bytes().write_at(0, b"own")?;
//! let (mut here, mut there) = ([0; 6], [0; 6]);
//! private.bytes().read_at(0, &mut here)?;
//! shared.bytes().read_at(100, &mut there)?;
//! assert_eq!((&here, &there), (b"ownred", b"shared"));
//! # Ok::<(), wholemem_os::Error>(())
//! ```

use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull};

use rustix::mm::{MapFlags, ProtFlags};

use crate::call::call;
use crate::vm::{self, LARGE_PAGE, page_size};
use crate::{Errno, Error, Memfd, Result, SharedSlice, memfd};

/// A writable copy-on-write mapping of a part of a memory file. It is unmapped on drop.
#[derive(Debug)]
#[doc(alias = "MAP_PRIVATE")]
pub struct PrivateMap {
    /// The address of the first mapped page.
    at: NonNull<u8>,
    /// The offset in the first mapped page at which the part of the file begins.
    page_offset: usize,
    len: usize,
}

// SAFETY: the mapping is accessed through `SharedSlice`, which allows concurrent writers, or by its address in
// `unsafe` code of the user.
unsafe impl Send for PrivateMap {}
// SAFETY: a `&PrivateMap` provides only the address and a `SharedSlice`, and threads may share both.
unsafe impl Sync for PrivateMap {}

impl PrivateMap {
    /// Maps `len` bytes of `memory` from `offset` on, copy-on-write. The descriptor of the memory file may be
    /// read-only.
    ///
    /// # Errors
    /// [`Error::ZeroLength`]; [`Error::OutOfRange`]; `mmap` with `ENOMEM` if this process has too many mappings, or
    /// if the kernel accounts for writable private memory and has none left (`vm.overcommit_memory=2`).
    pub fn create(memory: &Memfd, offset: usize, len: usize) -> Result<Self> {
        // SAFETY: a `Memfd` is sealed against shrinking, as `of_file` requires.
        unsafe { Self::of_file(memory.as_fd(), offset, len) }
    }

    /// Maps `len` bytes of the file that a descriptor refers to from `offset` on, copy-on-write.
    ///
    /// # Errors
    /// As [`PrivateMap::create`]; the error of `fstat`.
    ///
    /// # Safety
    /// The file is sealed against shrinking.
    pub unsafe fn of_file(file: BorrowedFd<'_>, offset: usize, len: usize) -> Result<Self> {
        if len == 0 {
            return Err(Error::ZeroLength);
        }
        let size = memfd::len_of(file)?;
        if offset.checked_add(len).is_none_or(|end| end > size) {
            return Err(Error::OutOfRange { offset, len, size });
        }
        let page_offset = offset % page_size();
        let (first, mapped) = (offset - page_offset, page_offset + len);
        // If the part begins at a large page of the file, its address is a multiple of the large page size too, so
        // that the mapping can use large pages.
        let is_large = first.is_multiple_of(LARGE_PAGE) && mapped >= LARGE_PAGE;
        let reserved = if is_large { Some(vm::reserve(mapped, LARGE_PAGE, None)?) } else { None };
        let fixed = reserved.map_or(MapFlags::empty(), |_| MapFlags::FIXED);
        // MAP_NORESERVE is set, since most pages of the mapping are never written.
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | fixed;
        let wanted = reserved.map_or(ptr::null_mut(), |at| at.as_ptr().cast());
        let outcome = call("mmap", || {
            let rights = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: the kernel picks a free range, or replaces the range that was reserved above and that no other
            // code uses.
            unsafe { rustix::mm::mmap(wanted, mapped, rights, flags, file, first as u64) }
        });
        if let (Err(_), Some(reserved)) = (&outcome, reserved) {
            // SAFETY: the range was reserved above, and no other code uses it.
            let _ = unsafe { vm::release(reserved, mapped) };
        }
        let at = NonNull::new(outcome?.cast()).ok_or(Error::Call { call: "mmap", errno: Errno::FAULT })?;
        Ok(Self { at, page_offset, len })
    }

    /// Removes all access to the mapping, for example in a forked child that must not use the bytes: every later
    /// access raises `SIGSEGV`, also through existing views.
    ///
    /// # Errors
    /// `mprotect` with `ENOMEM`.
    pub fn revoke(&self) -> Result<()> {
        // SAFETY: the range is this mapping. Code that still uses it is stopped by `SIGSEGV`, as intended.
        unsafe { vm::revoke(self.at, self.page_offset + self.len) }
    }

    /// Returns the address of the first byte of the mapped part of the file.
    #[must_use]
    pub fn address(&self) -> NonNull<u8> {
        // SAFETY: the mapping is `page_offset + len` bytes long, so the address is within it.
        unsafe { self.at.add(self.page_offset) }
    }

    /// Returns the length of the mapped part of the file in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a map is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns a view of the bytes of the mapped part of the file.
    #[must_use]
    pub fn bytes(&self) -> SharedSlice<'_> {
        // SAFETY: the range is mapped readable and writable while `self` is borrowed; the file cannot shrink, and no
        // reference to the bytes is created.
        unsafe { SharedSlice::new(self.address(), self.len, true) }
    }
}

impl Drop for PrivateMap {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `of_file`, and no borrow of it is left.
        let release = || unsafe { vm::release(self.at, self.page_offset + self.len) };
        // A failed unmapping is tried a second time, since its only cause, too many mappings, may be temporary.
        if let Err(error) = release().or_else(|_| release()) {
            tracing::warn!(%error, len = self.len, "cannot unmap memory, leaking the mapping");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SharedMap;
    use crate::fork::child;
    use crate::vm::Protection;

    fn filled(len: usize) -> (Memfd, SharedMap) {
        let memory = Memfd::create("test", len).unwrap();
        let shared = SharedMap::create(&memory, Protection::ReadWrite).unwrap();
        let bytes: Vec<u8> = (0..len).map(|at| u8::try_from(at % 251).unwrap()).collect();
        shared.bytes().write_at(0, &bytes).unwrap();
        (memory, shared)
    }

    fn read(bytes: SharedSlice<'_>) -> Vec<u8> {
        let mut seen = vec![0; bytes.len()];
        bytes.read_at(0, &mut seen).unwrap();
        seen
    }

    #[test]
    fn writes_are_visible_in_the_written_mapping_only() {
        let (memory, shared) = filled(4 << 20);
        memfd::seal_writes(memory.as_fd()).unwrap_err();
        for (offset, len) in [(0, 4 << 20), (5000, 9000), (2 << 20, 2 << 20), ((4 << 20) - 1, 1)] {
            let before = read(shared.bytes().part(offset, len).unwrap());
            let [first, second] = [(); 2].map(|()| PrivateMap::create(&memory, offset, len).unwrap());
            assert_eq!((first.len(), read(first.bytes())), (len, before.clone()));
            first.bytes().write_at(len - 1, &[255]).unwrap();
            assert_eq!(read(first.bytes())[len - 1], 255);
            assert_eq!(read(second.bytes()), before);
            assert_eq!(read(shared.bytes().part(offset, len).unwrap()), before);
        }
    }

    #[test]
    fn a_write_sealed_file_can_be_mapped() {
        let (memory, shared) = filled(8192);
        drop(shared);
        memfd::seal_writes(memory.as_fd()).unwrap();
        let received = Memfd::import(memory.read_only_fd().unwrap(), 8192).unwrap();
        let private = PrivateMap::create(&received, 1, 8000).unwrap();
        private.bytes().write_at(0, &[9; 8000]).unwrap();
        assert_eq!(read(private.bytes()), [9; 8000]);
        let shared = SharedMap::create(&received, Protection::Read).unwrap();
        assert_eq!(read(shared.bytes().part(0, 2).unwrap()), [0, 1]);
    }

    #[test]
    fn large_parts_begin_at_large_pages() {
        let (memory, _) = filled(6 << 20);
        for (offset, len) in [(0, 6 << 20), (2 << 20, 2 << 20)] {
            let private = PrivateMap::create(&memory, offset, len).unwrap();
            assert_eq!(private.address().addr().get() % LARGE_PAGE, 0);
        }
    }

    #[test]
    fn reading_a_revoked_mapping_raises_sigsegv() {
        let (memory, _) = filled(8192);
        let private = PrivateMap::create(&memory, 100, 200).unwrap();
        let child = child::fork(|| {
            if private.revoke().is_err() {
                return 1;
            }
            let _ = private.bytes().read_at(7, &mut [0]);
            2
        });
        assert_eq!(child.wait(), child::ExitStatus::Killed(libc::SIGSEGV));
    }

    #[test]
    fn a_part_beyond_the_end_of_the_file_is_refused() {
        let (memory, _) = filled(8192);
        let refused = |offset, len| PrivateMap::create(&memory, offset, len).unwrap_err();
        assert_eq!(refused(0, 0), Error::ZeroLength);
        assert_eq!(refused(8000, 193), Error::OutOfRange { offset: 8000, len: 193, size: 8192 });
        let (offset, len) = (1, usize::MAX);
        assert_eq!(refused(offset, len), Error::OutOfRange { offset, len, size: 8192 });
    }
}
