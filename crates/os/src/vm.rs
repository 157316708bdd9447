//! Virtual memory: reserved address ranges, and memory files mapped at chosen addresses in them.
//!
//! ```text
//!            reserve                    map_at                     unmap_at                   release
//!  ......... -------> [ no access    ] -------> [ na | file | na ] -------> [ no access    ] -------> .........
//! ```
//!
//! The functions `reserve`, `map_at`, `protect`, `unmap_at` and `release` are the host implementation of the memory
//! operations of wholemem, one system call each. They are `unsafe`, since they change what is mapped at addresses to
//! which pointers may exist. [`SharedMap`] is the safe form for one whole file at an address that the kernel chooses.
//!
//! Guarantees: addresses inside a reservation are never free for another `mmap` of this process; unmapping replaces
//! the pages in one system call, without a gap.

use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags};

use crate::call::{call, call_libc};
use crate::{Errno, Error, Result, SharedSlice, access_fault};

/// The access rights of a range of addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Protection {
    /// No access: every load or store raises `SIGSEGV`.
    None,
    /// Loads are allowed, stores are not.
    Read,
    /// Loads and stores are allowed.
    ReadWrite,
}

impl Protection {
    fn map_flags(self) -> ProtFlags {
        match self {
            Self::None => ProtFlags::empty(),
            Self::Read => ProtFlags::READ,
            Self::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        }
    }

    fn protect_flags(self) -> MprotectFlags {
        match self {
            Self::None => MprotectFlags::empty(),
            Self::Read => MprotectFlags::READ,
            Self::ReadWrite => MprotectFlags::READ | MprotectFlags::WRITE,
        }
    }
}

/// Returns the size of a memory page in bytes. The functions of this module work on whole pages.
#[must_use]
pub fn page_size() -> usize {
    rustix::param::page_size()
}

const RESERVED: MapFlags = MapFlags::PRIVATE.union(MapFlags::NORESERVE);

/// Reserves `len` bytes of addresses at a multiple of `align`, without memory and without access. If `wanted` is
/// given, the range begins exactly there.
///
/// # Errors
/// `mmap` with `ENOMEM` if no such range is free, `EEXIST` if `wanted` is in use; [`Error::ZeroLength`].
pub fn reserve(len: usize, align: usize, wanted: Option<NonNull<u8>>) -> Result<NonNull<u8>> {
    debug_assert!(align.is_power_of_two());
    if len == 0 {
        return Err(Error::ZeroLength);
    }
    if let Some(wanted) = wanted {
        // SAFETY: MAP_FIXED_NOREPLACE never replaces an existing mapping.
        let at = unsafe { map_nothing(wanted.as_ptr(), len, MapFlags::FIXED_NOREPLACE) }?;
        if at == wanted {
            return Ok(at);
        }
        // A kernel that does not know MAP_FIXED_NOREPLACE treats the address as a hint.
        // SAFETY: the range was reserved above, and no other code has its address.
        unsafe { release(at, len) }?;
        return Err(Error::Call { call: "mmap", errno: Errno::EXIST });
    }
    if align <= page_size() {
        // SAFETY: without a fixed address the kernel picks a free range, so no mapping is replaced.
        return unsafe { map_nothing(ptr::null_mut(), len, MapFlags::empty()) };
    }
    reserve_aligned(len, align)
}

/// Reserves `align` bytes of addresses more than requested and unmaps both ends, so that the remaining range begins
/// at a multiple of `align`.
fn reserve_aligned(len: usize, align: usize) -> Result<NonNull<u8>> {
    // The length is rounded up to whole pages: the kernel rounds up a length, but not the address passed to `munmap`.
    let len = len.checked_next_multiple_of(page_size());
    let padded = len.and_then(|len| len.checked_add(align));
    let (Some(len), Some(padded)) = (len, padded) else {
        return Err(Error::Call { call: "mmap", errno: Errno::NOMEM });
    };
    // SAFETY: without a fixed address the kernel picks a free range, so no mapping is replaced.
    let start = unsafe { map_nothing(ptr::null_mut(), padded, MapFlags::empty()) }?;
    let head = start.addr().get().next_multiple_of(align) - start.addr().get();
    let tail = align - head;
    let trim = |offset: usize, len: usize| {
        if len == 0 {
            return Ok(());
        }
        // SAFETY: `offset` is within the `padded` bytes mapped above.
        let part = unsafe { start.add(offset) };
        // SAFETY: `part` belongs to the range reserved above, and no other code has its address.
        unsafe { release(part, len) }
    };
    // If unmapping one end fails, the remaining range is unmapped too: all of it, or all but the tail if that is
    // unmapped already.
    trim(head + len, tail).inspect_err(|_| drop(trim(0, padded)))?;
    trim(0, head).inspect_err(|_| drop(trim(0, head + len)))?;
    // SAFETY: `head` is less than `align`, so it is within the reserved range.
    Ok(unsafe { start.add(head) })
}

/// Maps `len` bytes of addresses without memory and without access.
///
/// # Safety
/// With `MapFlags::FIXED`, the caller must own the range, and no code may use it.
unsafe fn map_nothing(at: *mut u8, len: usize, fixed: MapFlags) -> Result<NonNull<u8>> {
    let at = call("mmap", || {
        // SAFETY: with `MapFlags::FIXED` the caller owns the range at `at`; otherwise no mapping is replaced.
        unsafe { rustix::mm::mmap_anonymous(at.cast(), len, ProtFlags::empty(), RESERVED | fixed) }
    })?;
    not_null(at)
}

fn not_null(at: *mut c_void) -> Result<NonNull<u8>> {
    NonNull::new(at.cast()).ok_or(Error::Call { call: "mmap", errno: Errno::FAULT })
}

/// Maps the first `len` bytes of a file, shared, at address `at`, and replaces any mapping there.
///
/// # Errors
/// `mmap` with `EACCES` if the descriptor does not allow the protection, `ENOMEM` if this process has too many
/// mappings.
///
/// # Safety
/// The range is part of a reservation of the caller, no code uses what is mapped there now, and the file is sealed
/// against shrinking.
pub unsafe fn map_at(
    at: NonNull<u8>,
    len: usize,
    file: BorrowedFd<'_>,
    protection: Protection,
) -> Result<()> {
    call("mmap", || {
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: the caller of `map_at` guarantees that the range is part of its reservation, and that no code uses
        // what is mapped there.
        unsafe { rustix::mm::mmap(at.as_ptr().cast(), len, protection.map_flags(), flags, file, 0) }
    })?;
    Ok(())
}

/// Unmaps the memory in an address range, and leaves the addresses reserved.
///
/// # Errors
/// `mmap` with `ENOMEM` if this process has too many mappings; the range is then unchanged.
///
/// # Safety
/// The range is part of a reservation of the caller, and no code uses what is mapped there.
pub unsafe fn unmap_at(at: NonNull<u8>, len: usize) -> Result<()> {
    // SAFETY: the caller of `unmap_at` guarantees that the range is part of its reservation, and that no code uses
    // what is mapped there.
    unsafe { map_nothing(at.as_ptr(), len, MapFlags::FIXED) }.map(drop)
}

/// Changes the access rights of an address range.
///
/// # Errors
/// `mprotect` with `EACCES` if the file was opened with fewer rights, `ENOMEM` if this process has too many mappings.
///
/// # Safety
/// The caller owns the range, and no code relies on rights that are removed.
pub unsafe fn protect(at: NonNull<u8>, len: usize, protection: Protection) -> Result<()> {
    call("mprotect", || {
        // SAFETY: the caller of `protect` guarantees that it owns the range, and that no code relies on rights that
        // are removed.
        unsafe { rustix::mm::mprotect(at.as_ptr().cast(), len, protection.protect_flags()) }
    })
}

/// Removes all access to an address range permanently: every later access raises `SIGSEGV`. If the range was
/// [named](crate::access_fault), the fault is reported with that reason.
///
/// # Errors
/// As [`protect`].
///
/// # Safety
/// The caller owns the range. Code that still uses it is stopped by the signal.
pub unsafe fn revoke(at: NonNull<u8>, len: usize) -> Result<()> {
    // SAFETY: the caller of `revoke` owns the range, and intends that further accesses raise a signal.
    unsafe { protect(at, len, Protection::None) }?;
    access_fault::mark_revoked(at, len);
    Ok(())
}

/// Enters all pages of a mapped memory file into the page table at once, about twenty times faster than by page
/// faults.
///
/// Pages are entered as by a load, which the kernel does in batches, and with all rights of the mapping. Pages that
/// the file does not have yet are allocated one by one.
///
/// # Errors
/// `madvise` with `EINVAL` before Linux 5.14, `ENOMEM` if a part is not mapped, `EFAULT` if a page cannot be
/// allocated.
///
/// # Safety
/// The range is a readable mapping of the caller.
pub unsafe fn populate(at: NonNull<u8>, len: usize) -> Result<()> {
    // SAFETY: populating the range changes no byte and removes no access right.
    call("madvise", || unsafe { rustix::mm::madvise(at.as_ptr().cast(), len, Advice::LinuxPopulateRead) })
}

/// The size of a large page (transparent huge page), which one entry of the second-lowest page table level maps.
pub const LARGE_PAGE: usize = 2 << 20;

/// Collapses the pages of a mapped range into large ones, which need fewer TLB entries. The mapping must begin at a
/// multiple of [`LARGE_PAGE`]; a remainder at the end is left unchanged.
///
/// The kernel copies every page, once for all processes that map the memory. The call takes about as long as
/// [`populate`], and populates the range too.
///
/// # Errors
/// `madvise` with `EINVAL` before Linux 6.1, for memory that cannot have large pages, and for pages that are not
/// allocated yet; `ENOMEM`, `EAGAIN` if no large page is free.
///
/// # Safety
/// The range is a mapping of the caller.
#[doc(alias = "MADV_COLLAPSE")]
pub unsafe fn enlarge_pages(at: NonNull<u8>, len: usize) -> Result<()> {
    let whole = len / LARGE_PAGE * LARGE_PAGE;
    if whole == 0 {
        return Ok(());
    }
    call_libc("madvise", || {
        // SAFETY: collapsing the pages changes no byte and removes no access right.
        unsafe { libc::madvise(at.as_ptr().cast(), whole, libc::MADV_COLLAPSE) }.into()
    })?;
    Ok(())
}

/// Sets whether children that are forked later inherit a mapping. In a child that does not inherit it, its addresses
/// are unmapped, and the child cannot prevent the file from being sealed against writing.
///
/// # Errors
/// `madvise` with `ENOMEM` if a part is not mapped.
///
/// # Safety
/// The range is a mapping of the caller, and no child uses it if it is not inherited.
#[doc(alias = "MADV_DONTFORK")]
pub unsafe fn set_inherited(at: NonNull<u8>, len: usize, is_inherited: bool) -> Result<()> {
    let advice = if is_inherited { Advice::LinuxDoFork } else { Advice::LinuxDontFork };
    // SAFETY: the advice applies to children only and changes nothing in this process.
    call("madvise", || unsafe { rustix::mm::madvise(at.as_ptr().cast(), len, advice) })
}

/// Returns whether the byte at an address is writable. The check overwrites the byte: the kernel writes a random one
/// there (`getrandom`). At an address that is not writable, the system call fails, whereas a write by this process
/// would raise SIGSEGV.
///
/// # Safety
/// The byte may be overwritten, or no memory is mapped there.
#[must_use]
pub unsafe fn try_store(at: NonNull<u8>) -> bool {
    // SAFETY: `getrandom` returns `EFAULT` if the address is not writable, and the caller allows the byte to be
    // overwritten.
    unsafe { libc::getrandom(at.as_ptr().cast(), 1, libc::GRND_NONBLOCK) == 1 }
}

/// Unmaps a range of addresses, with everything mapped in it, and frees the addresses.
///
/// # Errors
/// `munmap` with `ENOMEM` if this process has too many mappings to split one.
///
/// # Safety
/// The caller owns the range, and no code uses it afterwards.
pub unsafe fn release(at: NonNull<u8>, len: usize) -> Result<()> {
    // SAFETY: the caller of `release` owns the range and does not use it any more.
    call("munmap", || unsafe { rustix::mm::munmap(at.as_ptr().cast(), len) })
}

/// A mapping of one whole memory file at an address that the kernel chooses. It is unmapped on drop.
#[derive(Debug)]
pub struct SharedMap {
    at: NonNull<u8>,
    len: usize,
    protection: Protection,
}

// SAFETY: a `SharedMap` is accessed through `SharedSlice` only, which allows concurrent writers.
unsafe impl Send for SharedMap {}
// SAFETY: a `&SharedMap` is accessed through `SharedSlice` only, which allows concurrent writers.
unsafe impl Sync for SharedMap {}

impl SharedMap {
    /// Maps the first `len` bytes of a file, which need not be sealed against resizing yet: callers in this crate
    /// seal it before they return.
    pub(crate) fn map_file(file: BorrowedFd<'_>, len: usize, protection: Protection) -> Result<Self> {
        let at = call("mmap", || {
            let flags = protection.map_flags();
            // SAFETY: without a fixed address the kernel picks a free range, so no mapping is replaced.
            unsafe { rustix::mm::mmap(ptr::null_mut(), len, flags, MapFlags::SHARED, file, 0) }
        })?;
        Ok(Self { at: not_null(at)?, len, protection })
    }

    /// Returns the first address of the mapping.
    #[must_use]
    pub fn address(&self) -> NonNull<u8> {
        self.at
    }

    /// Enters all pages of the mapping into the page table at once, instead of by one page fault for each page.
    ///
    /// # Errors
    /// As [`populate`].
    pub fn populate(&self) -> Result<()> {
        // SAFETY: the range is this mapping; if it cannot be read, the kernel returns an error.
        unsafe { populate(self.at, self.len) }
    }

    /// Returns whether the kernel would allow this process to make the mapping writable. Tests use it to check that
    /// memory shared for reading cannot be written.
    #[must_use]
    pub fn could_be_written(&self) -> bool {
        // SAFETY: the range is this mapping, and access rights are only added.
        let could = unsafe { protect(self.at, self.len, Protection::ReadWrite) }.is_ok();
        // SAFETY: the call restores the previous rights, before any code could use the added ones.
        could && unsafe { protect(self.at, self.len, self.protection) }.is_ok()
    }

    /// Returns a view of the bytes of the mapping, which is empty if the mapping allows no access.
    #[must_use]
    pub fn bytes(&self) -> SharedSlice<'_> {
        let len = if self.protection == Protection::None { 0 } else { self.len };
        // SAFETY: the range is mapped with the rights of `self.protection` while `self` is borrowed, the file is
        // sealed against shrinking, and no reference to its bytes is created.
        unsafe { SharedSlice::new(self.at, len, self.protection == Protection::ReadWrite) }
    }
}

impl Drop for SharedMap {
    fn drop(&mut self) {
        // A failed unmapping is tried a second time, since its only cause, too many mappings, may be temporary.
        // SAFETY: this `SharedMap` owns the range, and no borrow of it is left.
        let release = || unsafe { release(self.at, self.len) };
        if let Err(error) = release().or_else(|_| release()) {
            tracing::warn!(%error, len = self.len, "cannot unmap memory, leaking the mapping");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::Memfd;

    /// Returns the value of a mapping's field in `/proc/self/smaps`.
    fn smaps_field(map: &SharedMap, field: &str) -> String {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let start = format!("{:x}-", map.address().addr());
        let ours = smaps.lines().skip_while(|line| !line.starts_with(&start));
        ours.skip(1).find_map(|line| line.strip_prefix(field)).unwrap().trim().to_owned()
    }

    #[test]
    fn a_populated_mapping_is_resident() {
        let memory = Memfd::create("test", 1 << 20).unwrap();
        let map = SharedMap::create(&memory, Protection::ReadWrite).unwrap();
        map.populate().unwrap();
        assert_eq!(smaps_field(&map, "Rss:"), "1024 kB");
    }

    #[test]
    fn children_inherit_a_mapping_unless_inheritance_is_disabled() {
        let memory = Memfd::create("test", 1 << 20).unwrap();
        let map = SharedMap::create(&memory, Protection::ReadWrite).unwrap();
        let at = map.address();
        for is_inherited in [false, true] {
            // SAFETY: the mapping belongs to this test, and no child uses it.
            unsafe { set_inherited(at, 1 << 20, is_inherited) }.unwrap();
            let flags = smaps_field(&map, "VmFlags:");
            assert_eq!(flags.split(' ').any(|flag| flag == "dc"), !is_inherited, "{flags}");
        }
    }

    #[test]
    fn an_aligned_reservation_begins_at_a_multiple_of_the_alignment() {
        for align in [page_size(), 64 << 10, 2 << 20, 1 << 30] {
            let at = reserve(3 * page_size(), align, None).unwrap();
            assert_eq!(at.addr().get() % align, 0);
            // SAFETY: the range was reserved above and is unused.
            unsafe { release(at, 3 * page_size()) }.unwrap();
        }
    }

    #[test]
    fn a_wanted_address_is_reserved_or_refused_and_never_replaced() {
        let at = reserve(4 * page_size(), page_size(), None).unwrap();
        let taken = reserve(page_size(), page_size(), Some(at));
        assert_eq!(taken, Err(Error::Call { call: "mmap", errno: Errno::EXIST }));
        // SAFETY: the range was reserved above and is unused.
        unsafe { release(at, 4 * page_size()) }.unwrap();
        // Another thread may reserve the range between the two calls, so a refusal is correct as well.
        match reserve(4 * page_size(), page_size(), Some(at)) {
            Ok(again) => {
                assert_eq!(again, at);
                // SAFETY: the range was reserved above and is unused.
                unsafe { release(again, 4 * page_size()) }.unwrap();
            }
            Err(error) => assert_eq!(error, Error::Call { call: "mmap", errno: Errno::EXIST }),
        }
    }

    #[test]
    fn a_reservation_of_zero_or_too_many_bytes_is_refused() {
        assert_eq!(reserve(0, 4096, None), Err(Error::ZeroLength));
        let too_much = reserve(1 << 62, 4096, None);
        assert_eq!(too_much, Err(Error::Call { call: "mmap", errno: Errno::NOMEM }));
        let overflow = reserve(usize::MAX - 4096, 2 << 20, None);
        assert_eq!(overflow, Err(Error::Call { call: "mmap", errno: Errno::NOMEM }));
    }

    #[test]
    fn a_length_is_rounded_up_to_whole_pages_for_every_alignment() {
        for align in [page_size(), 2 << 20] {
            let at = reserve(100, align, None).unwrap();
            // SAFETY: the range was reserved above and is unused.
            unsafe { release(at, 100) }.unwrap();
        }
    }

    #[test]
    fn two_mappings_of_one_file_have_the_same_bytes() {
        let memory = Memfd::create("test", 2 * page_size()).unwrap();
        let writer = SharedMap::create(&memory, Protection::ReadWrite).unwrap();
        let reader = SharedMap::create(&memory, Protection::Read).unwrap();
        writer.bytes().write_at(page_size() - 2, b"across").unwrap();
        let mut seen = [0; 6];
        reader.bytes().read_at(page_size() - 2, &mut seen).unwrap();
        assert_eq!(&seen, b"across");
        assert_eq!(reader.bytes().write_at(0, b"x"), Err(Error::ReadOnly));
        // SAFETY: the test does not use the byte at this address again.
        assert!(!unsafe { try_store(reader.address()) });
        // SAFETY: the test does not use the byte at this address again.
        assert!(unsafe { try_store(writer.address()) });
    }

    #[test]
    fn a_read_only_file_cannot_be_mapped_writable() {
        let memory = Memfd::create("test", page_size()).unwrap();
        let received = Memfd::import(memory.read_only_fd().unwrap(), page_size()).unwrap();
        assert_eq!(SharedMap::create(&received, Protection::ReadWrite).unwrap_err(), Error::ReadOnly);
        assert!(!SharedMap::create(&received, Protection::Read).unwrap().could_be_written());
        assert!(SharedMap::create(&memory, Protection::Read).unwrap().could_be_written());
    }

    #[test]
    fn a_mapping_without_access_has_no_bytes() {
        let memory = Memfd::create("test", page_size()).unwrap();
        assert!(SharedMap::create(&memory, Protection::None).unwrap().bytes().is_empty());
    }

    #[test]
    fn collapsing_pages_preserves_their_bytes() {
        let len = 2 * LARGE_PAGE + page_size();
        let memory = Memfd::create("test", len).unwrap();
        let at = reserve(len, LARGE_PAGE, None).unwrap();
        // SAFETY: the range is this test's reservation, which is unused, and a `Memfd` cannot shrink.
        unsafe { map_at(at, len, memory.as_fd(), Protection::ReadWrite) }.unwrap();
        // SAFETY: the range is mapped readable and writable until it is released below.
        let bytes = unsafe { SharedSlice::new(at, len, true) };
        bytes.write_at(LARGE_PAGE - 2, b"over").unwrap();
        bytes.write_at(len - 1, b"x").unwrap();
        // SAFETY: the range is the mapping of this test, until it is released below.
        match unsafe { enlarge_pages(at, len) } {
            Ok(()) => assert!(crate::numa::node_of_page(at).unwrap().is_some(), "the range is populated too"),
            // Collapsing fails on older kernels, and if no large page is free.
            Err(Error::Call { call, errno }) => {
                assert_eq!(call, "madvise");
                assert!([Errno::INVAL, Errno::AGAIN, Errno::NOMEM].contains(&errno), "{errno}");
            }
            Err(other) => panic!("{other}"),
        }
        let mut seen = [0; 4];
        bytes.read_at(LARGE_PAGE - 2, &mut seen).unwrap();
        assert_eq!(&seen, b"over");
        // SAFETY: the range is shorter than a large page, so the call does nothing.
        assert_eq!(unsafe { enlarge_pages(at, LARGE_PAGE - 1) }, Ok(()));
        // SAFETY: the range is unused from here on.
        unsafe { release(at, len) }.unwrap();
    }

    #[test]
    fn an_address_range_can_be_mapped_and_unmapped_repeatedly() {
        let page = page_size();
        let memory = Memfd::create("test", page).unwrap();
        let at = reserve(2 * page, page, None).unwrap();
        // SAFETY: the address is that of the second page of the reservation above.
        let target = unsafe { at.add(page) };
        for round in 0..3_u8 {
            // SAFETY: `target` belongs to this test and is unused.
            unsafe { map_at(target, page, memory.as_fd(), Protection::None) }.unwrap();
            // SAFETY: `target` was mapped above, and no reference to its bytes exists.
            unsafe { protect(target, page, Protection::ReadWrite) }.unwrap();
            assert_eq!(crate::numa::node_of_page(target), Ok(None), "no page is entered yet");
            // SAFETY: `target` is mapped with both rights, so it can be read.
            unsafe { populate(target, page) }.unwrap();
            assert!(
                crate::numa::node_of_page(target).unwrap().is_some(),
                "the page is entered without an access"
            );
            // SAFETY: `target` is mapped readable and writable until `unmap_at` below.
            let bytes = unsafe { SharedSlice::new(target, page, true) };
            let mut seen = [0];
            bytes.read_at(0, &mut seen).unwrap();
            assert_eq!(seen, [round], "the file retains its byte while it is not mapped");
            bytes.write_at(0, &[round + 1]).unwrap();
            // SAFETY: `target` is unused from here on.
            unsafe { unmap_at(target, page) }.unwrap();
            let taken = reserve(page, page, Some(target));
            let exists = Err(Error::Call { call: "mmap", errno: Errno::EXIST });
            assert_eq!(taken, exists, "an unmapped part of a reservation stays reserved");
        }
        // SAFETY: the reservation is unused from here on.
        unsafe { release(at, 2 * page) }.unwrap();
    }
}
