//! Copy-on-write maps: part of a memory file, whose writes stay in this process.
//!
//! Pages that were not written show the file's bytes, also what is written to the file later. So the map is only as stable as
//! the file: a caller that relies on the bytes has to keep the file's owner from replacing them while the map lives.
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

/// A writable map of part of a memory file, whose writes nothing else sees. It is unmapped when it is dropped.
#[derive(Debug)]
#[doc(alias = "MAP_PRIVATE")]
pub struct PrivateMap {
    /// Where the pages begin.
    at: NonNull<u8>,
    /// How many bytes of the first page lie before the part.
    before: usize,
    len: usize,
}

// SAFETY: the map is reached through `SharedSlice` or by its address, for which its users answer.
unsafe impl Send for PrivateMap {}
// SAFETY: `&PrivateMap` gives the address and a `SharedSlice`, both of which threads may share.
unsafe impl Sync for PrivateMap {}

impl PrivateMap {
    /// Maps `len` bytes of `memory` from `offset` on. The descriptor need not allow writing.
    ///
    /// # Errors
    /// [`Error::ZeroLength`]; [`Error::OutOfRange`]; `mmap` with `ENOMEM` when this process has too many maps, or where the
    /// kernel counts memory that could be written and has none left (`vm.overcommit_memory=2`).
    pub fn create(memory: &Memfd, offset: usize, len: usize) -> Result<Self> {
        // SAFETY: a `Memfd` is sealed against shrinking.
        unsafe { Self::of_file(memory.as_fd(), offset, len) }
    }

    /// The same of a file by its descriptor.
    ///
    /// # Errors
    /// As [`PrivateMap::create`]; what `fstat` said.
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
        let before = offset % page_size();
        let (first, mapped) = (offset - before, before + len);
        // Where the part begins at a large page of the file, so does the map: then it can use large pages too.
        let is_large = first.is_multiple_of(LARGE_PAGE) && mapped >= LARGE_PAGE;
        let place = if is_large { Some(vm::reserve(mapped, LARGE_PAGE, None)?) } else { None };
        let fixed = place.map_or(MapFlags::empty(), |_| MapFlags::FIXED);
        // Without a reservation of memory: most of what is mapped is never written.
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | fixed;
        let wanted = place.map_or(ptr::null_mut(), |place| place.as_ptr().cast());
        let outcome = call("mmap", || {
            let rights = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: the kernel picks a free range, or replaces the one reserved above, which nothing else knows of.
            unsafe { rustix::mm::mmap(wanted, mapped, rights, flags, file, first as u64) }
        });
        if let (Err(_), Some(place)) = (&outcome, place) {
            // SAFETY: reserved above, and nothing else knows of it.
            let _ = unsafe { vm::release(place, mapped) };
        }
        let at = NonNull::new(outcome?.cast()).ok_or(Error::Call { call: "mmap", errno: Errno::FAULT })?;
        Ok(Self { at, before, len })
    }

    /// Takes all access away, as in a forked child whose bytes nobody keeps: from now on any access is a `SIGSEGV`, through
    /// views that were made before too.
    ///
    /// # Errors
    /// `mprotect` with `ENOMEM`.
    pub fn revoke(&self) -> Result<()> {
        // SAFETY: the range is our map. What still uses it is meant to be stopped: the kernel ends the process.
        unsafe { vm::revoke(self.at, self.before + self.len) }
    }

    /// Where the part begins.
    #[must_use]
    pub fn address(&self) -> NonNull<u8> {
        // SAFETY: less than a page, and the map is longer.
        unsafe { self.at.add(self.before) }
    }

    /// The length of the part in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a map is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> SharedSlice<'_> {
        // SAFETY: mapped for reading and writing as long as `self` is borrowed; the file cannot shrink, and no reference to
        // the bytes is ever made.
        unsafe { SharedSlice::new(self.address(), self.len, true) }
    }
}

impl Drop for PrivateMap {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `of_file`, and its borrowers are gone.
        let release = || unsafe { vm::release(self.at, self.before + self.len) };
        // A second try: the one reason to fail, too many maps, passes.
        if let Err(error) = release().or_else(|_| release()) {
            tracing::warn!(%error, len = self.len, "leaking a map that could not be removed");
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
    fn writes_stay_in_the_map_that_was_written() {
        let (memory, shared) = filled(4 << 20);
        memfd::close_for_writing(memory.as_fd()).unwrap_err();
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
    fn a_file_that_is_closed_for_writing_can_be_mapped() {
        let (memory, shared) = filled(8192);
        drop(shared);
        memfd::close_for_writing(memory.as_fd()).unwrap();
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
    fn what_is_revoked_cannot_be_read() {
        let (memory, _) = filled(8192);
        let private = PrivateMap::create(&memory, 100, 200).unwrap();
        let child = child::fork(|| {
            if private.revoke().is_err() {
                return 1;
            }
            let _ = private.bytes().read_at(7, &mut [0]);
            2
        });
        assert_eq!(child.wait(), child::Status::Killed(libc::SIGSEGV));
    }

    #[test]
    fn what_the_file_does_not_have_is_refused() {
        let (memory, _) = filled(8192);
        let refused = |offset, len| PrivateMap::create(&memory, offset, len).unwrap_err();
        assert_eq!(refused(0, 0), Error::ZeroLength);
        assert_eq!(refused(8000, 193), Error::OutOfRange { offset: 8000, len: 193, size: 8192 });
        let (offset, len) = (1, usize::MAX);
        assert_eq!(refused(offset, len), Error::OutOfRange { offset, len, size: 8192 });
    }
}
