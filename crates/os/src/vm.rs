//! Addresses: ranges reserved without memory behind them, and memory files mapped at chosen places in them.
//!
//! ```text
//!            reserve                    map_at                     unmap_at                   release
//!  ......... -------> [ no access    ] -------> [ na | file | na ] -------> [ no access    ] -------> .........
//! ```
//!
//! The five functions are the host's share of the seven verbs of wholemem, one call each, and `unsafe`: they move
//! the ground under pointers, and only the layer above knows who holds any. [`SharedMap`] is the safe form for the
//! plain case, one whole file at an address of the kernel's choice.
//!
//! What is kept true: a place inside a reservation is never free for another `mmap` of this process to take; going
//! from mapped to unmapped replaces the pages in one step instead of leaving a gap.

use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags};

use crate::call::{call, call_libc};
use crate::{Errno, Error, Result, SharedSlice, access_fault};

/// What the processor may do with a range of addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Protection {
    /// Any access is a `SIGSEGV`.
    None,
    /// Loads only.
    Read,
    /// Loads and stores.
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

/// The size of a page, the unit of every address and length here.
#[must_use]
pub fn page_size() -> usize {
    rustix::param::page_size()
}

const RESERVED: MapFlags = MapFlags::PRIVATE.union(MapFlags::NORESERVE);

/// Reserves `len` bytes of addresses at a multiple of `align`, with no memory behind them and no access; at `wanted`
/// exactly, where that is given.
///
/// # Errors
/// `mmap` with `ENOMEM` when no such range is free, `EEXIST` when `wanted` is taken; [`Error::ZeroLength`].
pub fn reserve(len: usize, align: usize, wanted: Option<NonNull<u8>>) -> Result<NonNull<u8>> {
    debug_assert!(align.is_power_of_two());
    if len == 0 {
        return Err(Error::ZeroLength);
    }
    if let Some(wanted) = wanted {
        // SAFETY: MAP_FIXED_NOREPLACE never touches what is mapped already.
        let at = unsafe { map_nothing(wanted.as_ptr(), len, MapFlags::FIXED_NOREPLACE) }?;
        if at == wanted {
            return Ok(at);
        }
        // A kernel that does not know the flag takes the address as a hint.
        // SAFETY: the range was made in the line above and nobody has seen it.
        unsafe { release(at, len) }?;
        return Err(Error::Call { call: "mmap", errno: Errno::EXIST });
    }
    if align <= page_size() {
        // SAFETY: without a fixed address the kernel picks a free range.
        return unsafe { map_nothing(ptr::null_mut(), len, MapFlags::empty()) };
    }
    reserve_aligned(len, align)
}

/// Reserves more than asked and gives back both ends, so that what is left begins at a multiple of `align`.
fn reserve_aligned(len: usize, align: usize) -> Result<NonNull<u8>> {
    // The kernel rounds lengths up, but not the address where an end is given back.
    let len = len.checked_next_multiple_of(page_size());
    let padded = len.and_then(|len| len.checked_add(align));
    let (Some(len), Some(padded)) = (len, padded) else {
        return Err(Error::Call { call: "mmap", errno: Errno::NOMEM });
    };
    // SAFETY: without a fixed address the kernel picks a free range.
    let start = unsafe { map_nothing(ptr::null_mut(), padded, MapFlags::empty()) }?;
    let head = start.addr().get().next_multiple_of(align) - start.addr().get();
    let tail = align - head;
    let trim = |offset: usize, len: usize| {
        if len == 0 {
            return Ok(());
        }
        // SAFETY: the offset lies within the `padded` bytes mapped above.
        let part = unsafe { start.add(offset) };
        // SAFETY: the part belongs to the range made above, and nobody has seen it yet.
        unsafe { release(part, len) }
    };
    // On failure the rest goes back too: first all of it, and once the tail is gone all but the tail.
    trim(head + len, tail).inspect_err(|_| drop(trim(0, padded)))?;
    trim(0, head).inspect_err(|_| drop(trim(0, head + len)))?;
    // SAFETY: `head` is below `align`, so it lies within the range.
    Ok(unsafe { start.add(head) })
}

/// # Safety
/// With `MapFlags::FIXED`, the range must be the caller's and unused.
unsafe fn map_nothing(at: *mut u8, len: usize, fixed: MapFlags) -> Result<NonNull<u8>> {
    let at = call("mmap", || {
        // SAFETY: the caller owns the range where it is fixed; otherwise nothing is replaced.
        unsafe { rustix::mm::mmap_anonymous(at.cast(), len, ProtFlags::empty(), RESERVED | fixed) }
    })?;
    not_null(at)
}

fn not_null(at: *mut c_void) -> Result<NonNull<u8>> {
    NonNull::new(at.cast()).ok_or(Error::Call { call: "mmap", errno: Errno::FAULT })
}

/// Maps the first `len` bytes of a file at `at`, shared, over whatever is there.
///
/// # Errors
/// `mmap` with `EACCES` when the descriptor does not allow the protection, `ENOMEM` when this process has too many
/// maps.
///
/// # Safety
/// The range is part of a reservation of the caller's, nobody uses what is there now, and the file is sealed
/// against shrinking.
pub unsafe fn map_at(
    at: NonNull<u8>,
    len: usize,
    file: BorrowedFd<'_>,
    protection: Protection,
) -> Result<()> {
    call("mmap", || {
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: the caller gave the range up for replacement.
        unsafe { rustix::mm::mmap(at.as_ptr().cast(), len, protection.map_flags(), flags, file, 0) }
    })?;
    Ok(())
}

/// Takes the memory away from a range again, leaving it reserved.
///
/// # Errors
/// `mmap` with `ENOMEM` when this process has too many maps; the range is as it was then.
///
/// # Safety
/// The range is part of a reservation of the caller's, and nobody uses what is there.
pub unsafe fn unmap_at(at: NonNull<u8>, len: usize) -> Result<()> {
    // SAFETY: the caller owns the range and nobody uses it.
    unsafe { map_nothing(at.as_ptr(), len, MapFlags::FIXED) }.map(drop)
}

/// Changes what the processor may do with a range.
///
/// # Errors
/// `mprotect` with `EACCES` when the file was opened for less, `ENOMEM` when this process has too many maps.
///
/// # Safety
/// The range is the caller's, and nobody relies on the rights that go.
pub unsafe fn protect(at: NonNull<u8>, len: usize, protection: Protection) -> Result<()> {
    call("mprotect", || {
        // SAFETY: the caller owns the range.
        unsafe { rustix::mm::mprotect(at.as_ptr().cast(), len, protection.protect_flags()) }
    })
}

/// Takes all access to a range away for good: any access is a `SIGSEGV` from now on, and is reported as such where the range
/// was [named](crate::access_fault).
///
/// # Errors
/// As [`protect`].
///
/// # Safety
/// The range is the caller's. What still uses it is meant to be stopped.
pub unsafe fn revoke(at: NonNull<u8>, len: usize) -> Result<()> {
    // SAFETY: the caller owns the range, and wants those stopped who rely on their rights.
    unsafe { protect(at, len, Protection::None) }?;
    access_fault::mark_revoked(at, len);
    Ok(())
}

/// Enters all pages of a mapped memory file into the page table at once, some twenty times faster than touching each.
///
/// Pages are entered as by a load, which the kernel does in groups, and with all rights of the map: only of a file that is
/// not in memory yet they are made one by one.
///
/// # Errors
/// `madvise` with `EINVAL` before Linux 5.14, `ENOMEM` where something is not mapped, `EFAULT` where a page cannot be
/// had.
///
/// # Safety
/// The range is a map of the caller's that can be read.
pub unsafe fn populate(at: NonNull<u8>, len: usize) -> Result<()> {
    // SAFETY: populating changes no byte and takes no right away.
    call("madvise", || unsafe { rustix::mm::madvise(at.as_ptr().cast(), len, Advice::LinuxPopulateRead) })
}

/// The length of a large page: what one entry of the page table above the last holds.
pub const LARGE_PAGE: usize = 2 << 20;

/// Has the kernel put the pages of a mapped range together to large ones, so that it takes few entries of the processor's
/// translation buffer. It is for maps that begin at a multiple of [`LARGE_PAGE`]; what is left at the end stays as it is.
///
/// Copies every page, once for all who map the memory; takes about as long as [`populate`], and populates too.
///
/// # Errors
/// `madvise` with `EINVAL` before Linux 6.1, for memory that cannot have large pages, and for pages that are not there
/// yet; `ENOMEM`, `EAGAIN` where no large page is free.
///
/// # Safety
/// The range is a map of the caller's.
#[doc(alias = "MADV_COLLAPSE")]
pub unsafe fn enlarge_pages(at: NonNull<u8>, len: usize) -> Result<()> {
    let whole = len / LARGE_PAGE * LARGE_PAGE;
    if whole == 0 {
        return Ok(());
    }
    call_libc("madvise", || {
        // SAFETY: it changes no byte and takes no right away.
        unsafe { libc::madvise(at.as_ptr().cast(), whole, libc::MADV_COLLAPSE) }.into()
    })?;
    Ok(())
}

/// Says whether children that are forked from now on have a mapped range as well. Otherwise there is nothing at its
/// addresses in them, and no map of theirs to keep its memory from being closed for writing.
///
/// # Errors
/// `madvise` with `ENOMEM` where something is not mapped.
///
/// # Safety
/// The range is a map of the caller's, of which no child uses what it is not to have.
#[doc(alias = "MADV_DONTFORK")]
pub unsafe fn set_inherited(at: NonNull<u8>, len: usize, is_inherited: bool) -> Result<()> {
    let advice = if is_inherited { Advice::LinuxDoFork } else { Advice::LinuxDontFork };
    // SAFETY: in this process it changes nothing.
    call("madvise", || unsafe { rustix::mm::madvise(at.as_ptr().cast(), len, advice) })
}

/// Has the kernel store one byte of its choice, and says whether it could: a look at a page's rights that costs no
/// signal.
///
/// # Safety
/// The byte is the caller's to lose, or nothing is mapped there at all.
#[must_use]
pub unsafe fn try_store(at: NonNull<u8>) -> bool {
    // SAFETY: the kernel checks the address itself and answers `EFAULT`; the byte is the caller's to lose.
    unsafe { libc::getrandom(at.as_ptr().cast(), 1, libc::GRND_NONBLOCK) == 1 }
}

/// Gives a range of addresses back to the process, with whatever is mapped in it.
///
/// # Errors
/// `munmap` with `ENOMEM` when this process has too many maps to split one.
///
/// # Safety
/// The range is the caller's, and nobody uses it afterwards.
pub unsafe fn release(at: NonNull<u8>, len: usize) -> Result<()> {
    // SAFETY: the caller owns the range and gives it up.
    call("munmap", || unsafe { rustix::mm::munmap(at.as_ptr().cast(), len) })
}

/// One whole memory file, mapped at an address that the kernel chooses, until it is dropped.
#[derive(Debug)]
pub struct SharedMap {
    at: NonNull<u8>,
    len: usize,
    protection: Protection,
}

// SAFETY: the map is reached through `SharedSlice` only, whose accesses are made for memory that others write.
unsafe impl Send for SharedMap {}
// SAFETY: a shared reference reaches the map through `SharedSlice` only, whose accesses allow concurrent writers.
unsafe impl Sync for SharedMap {}

impl SharedMap {
    /// Maps the first `len` bytes of a file that may not be sealed yet: for this crate, which knows when it is.
    pub(crate) fn over(file: BorrowedFd<'_>, len: usize, protection: Protection) -> Result<Self> {
        let at = call("mmap", || {
            let flags = protection.map_flags();
            // SAFETY: without a fixed address the kernel picks a free range.
            unsafe { rustix::mm::mmap(ptr::null_mut(), len, flags, MapFlags::SHARED, file, 0) }
        })?;
        Ok(Self { at: not_null(at)?, len, protection })
    }

    /// Where it begins.
    #[must_use]
    pub fn address(&self) -> NonNull<u8> {
        self.at
    }

    /// Enters all its pages into the page table at once, instead of one by one as they are touched.
    ///
    /// # Errors
    /// As [`populate`].
    pub fn populate(&self) -> Result<()> {
        // SAFETY: the range is our map; the kernel refuses where it cannot be read.
        unsafe { populate(self.at, self.len) }
    }

    /// Whether the kernel would let this process write through the map, if it asked for that: for who hands memory out for
    /// reading and wants to know that it is.
    #[must_use]
    pub fn could_be_written(&self) -> bool {
        // SAFETY: the range is our map, and rights only grow.
        let could = unsafe { protect(self.at, self.len, Protection::ReadWrite) }.is_ok();
        // SAFETY: these are the rights it had before, which nobody has been told are more.
        could && unsafe { protect(self.at, self.len, self.protection) }.is_ok()
    }

    /// The bytes, as shared bytes are to be reached. A map without access has none.
    #[must_use]
    pub fn bytes(&self) -> SharedSlice<'_> {
        let len = if self.protection == Protection::None { 0 } else { self.len };
        // SAFETY: the range is mapped with these rights for as long as `self` lives, it is backed by a file sealed
        // against shrinking, and no reference to its bytes is ever made.
        unsafe { SharedSlice::new(self.at, len, self.protection == Protection::ReadWrite) }
    }
}

impl Drop for SharedMap {
    fn drop(&mut self) {
        // A second try: the one reason to fail, too many maps, passes.
        // SAFETY: the range is ours and its borrowers are gone.
        let release = || unsafe { release(self.at, self.len) };
        if let Err(error) = release().or_else(|_| release()) {
            tracing::warn!(%error, len = self.len, "leaking a map that could not be removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::Memfd;

    /// What the kernel says of a map.
    fn told(map: &SharedMap, what: &str) -> String {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let start = format!("{:x}-", map.address().addr());
        let ours = smaps.lines().skip_while(|line| !line.starts_with(&start));
        ours.skip(1).find_map(|line| line.strip_prefix(what)).unwrap().trim().to_owned()
    }

    #[test]
    fn a_map_that_is_populated_has_its_pages() {
        let memory = Memfd::create("test", 1 << 20).unwrap();
        let map = SharedMap::create(&memory, Protection::ReadWrite).unwrap();
        map.populate().unwrap();
        assert_eq!(told(&map, "Rss:"), "1024 kB");
    }

    #[test]
    fn a_map_is_inherited_unless_it_is_said_not_to_be() {
        let memory = Memfd::create("test", 1 << 20).unwrap();
        let map = SharedMap::create(&memory, Protection::ReadWrite).unwrap();
        let at = map.address();
        for is_inherited in [false, true] {
            // SAFETY: the map is this test's, and no child uses it.
            unsafe { set_inherited(at, 1 << 20, is_inherited) }.unwrap();
            let flags = told(&map, "VmFlags:");
            assert_eq!(flags.split(' ').any(|flag| flag == "dc"), !is_inherited, "{flags}");
        }
    }

    #[test]
    fn an_aligned_reservation_begins_at_a_multiple() {
        for align in [page_size(), 64 << 10, 2 << 20, 1 << 30] {
            let at = reserve(3 * page_size(), align, None).unwrap();
            assert_eq!(at.addr().get() % align, 0);
            // SAFETY: reserved above, used by nobody.
            unsafe { release(at, 3 * page_size()) }.unwrap();
        }
    }

    #[test]
    fn a_wanted_address_is_given_or_refused_but_never_replaced() {
        let at = reserve(4 * page_size(), page_size(), None).unwrap();
        let taken = reserve(page_size(), page_size(), Some(at));
        assert_eq!(taken, Err(Error::Call { call: "mmap", errno: Errno::EXIST }));
        // SAFETY: reserved above, used by nobody.
        unsafe { release(at, 4 * page_size()) }.unwrap();
        // Another thread may take the range between the two calls; then the refusal is the right answer.
        match reserve(4 * page_size(), page_size(), Some(at)) {
            Ok(again) => {
                assert_eq!(again, at);
                // SAFETY: reserved above, used by nobody.
                unsafe { release(again, 4 * page_size()) }.unwrap();
            }
            Err(error) => assert_eq!(error, Error::Call { call: "mmap", errno: Errno::EXIST }),
        }
    }

    #[test]
    fn nothing_can_be_reserved_that_has_no_length_or_no_room() {
        assert_eq!(reserve(0, 4096, None), Err(Error::ZeroLength));
        let too_much = reserve(1 << 62, 4096, None);
        assert_eq!(too_much, Err(Error::Call { call: "mmap", errno: Errno::NOMEM }));
        let overflow = reserve(usize::MAX - 4096, 2 << 20, None);
        assert_eq!(overflow, Err(Error::Call { call: "mmap", errno: Errno::NOMEM }));
    }

    #[test]
    fn a_length_that_is_no_whole_page_is_rounded_up_however_it_is_aligned() {
        for align in [page_size(), 2 << 20] {
            let at = reserve(100, align, None).unwrap();
            // SAFETY: reserved above, used by nobody.
            unsafe { release(at, 100) }.unwrap();
        }
    }

    #[test]
    fn two_maps_of_one_file_show_the_same_bytes() {
        let memory = Memfd::create("test", 2 * page_size()).unwrap();
        let writer = SharedMap::create(&memory, Protection::ReadWrite).unwrap();
        let reader = SharedMap::create(&memory, Protection::Read).unwrap();
        writer.bytes().write_at(page_size() - 2, b"across").unwrap();
        let mut seen = [0; 6];
        reader.bytes().read_at(page_size() - 2, &mut seen).unwrap();
        assert_eq!(&seen, b"across");
        assert_eq!(reader.bytes().write_at(0, b"x"), Err(Error::ReadOnly));
        // SAFETY: nobody needs these bytes.
        assert!(!unsafe { try_store(reader.address()) });
        // SAFETY: nobody needs these bytes.
        assert!(unsafe { try_store(writer.address()) });
    }

    #[test]
    fn a_read_only_file_has_no_writable_map() {
        let memory = Memfd::create("test", page_size()).unwrap();
        let received = Memfd::import(memory.read_only_fd().unwrap(), page_size()).unwrap();
        assert_eq!(SharedMap::create(&received, Protection::ReadWrite).unwrap_err(), Error::ReadOnly);
        assert!(!SharedMap::create(&received, Protection::Read).unwrap().could_be_written());
        assert!(SharedMap::create(&memory, Protection::Read).unwrap().could_be_written());
    }

    #[test]
    fn a_map_without_access_has_no_bytes() {
        let memory = Memfd::create("test", page_size()).unwrap();
        assert!(SharedMap::create(&memory, Protection::None).unwrap().bytes().is_empty());
    }

    #[test]
    fn large_pages_hold_the_same_bytes() {
        let len = 2 * LARGE_PAGE + page_size();
        let memory = Memfd::create("test", len).unwrap();
        let at = reserve(len, LARGE_PAGE, None).unwrap();
        // SAFETY: the range is this test's reservation, which nothing uses, and a `Memfd` cannot shrink.
        unsafe { map_at(at, len, memory.as_fd(), Protection::ReadWrite) }.unwrap();
        // SAFETY: mapped with both rights until the release below.
        let bytes = unsafe { SharedSlice::new(at, len, true) };
        bytes.write_at(LARGE_PAGE - 2, b"over").unwrap();
        bytes.write_at(len - 1, b"x").unwrap();
        // SAFETY: the range is this test's map, and stays one until the release below.
        match unsafe { enlarge_pages(at, len) } {
            Ok(()) => assert!(crate::numa::node_of_page(at).unwrap().is_some(), "populated too"),
            // An older kernel, or no large page to be had now.
            Err(Error::Call { call, errno }) => {
                assert_eq!(call, "madvise");
                assert!([Errno::INVAL, Errno::AGAIN, Errno::NOMEM].contains(&errno), "{errno}");
            }
            Err(other) => panic!("{other}"),
        }
        let mut seen = [0; 4];
        bytes.read_at(LARGE_PAGE - 2, &mut seen).unwrap();
        assert_eq!(&seen, b"over");
        // SAFETY: what is shorter has none, whatever it is.
        assert_eq!(unsafe { enlarge_pages(at, LARGE_PAGE - 1) }, Ok(()));
        // SAFETY: nothing uses it any more.
        unsafe { release(at, len) }.unwrap();
    }

    #[test]
    fn a_mapped_place_can_be_emptied_and_mapped_again() {
        let page = page_size();
        let memory = Memfd::create("test", page).unwrap();
        let at = reserve(2 * page, page, None).unwrap();
        // SAFETY: the second page of the reservation above.
        let place = unsafe { at.add(page) };
        for round in 0..3_u8 {
            // SAFETY: `place` is ours and unused.
            unsafe { map_at(place, page, memory.as_fd(), Protection::None) }.unwrap();
            // SAFETY: `place` was mapped by this test a moment ago, and no reference to its bytes exists.
            unsafe { protect(place, page, Protection::ReadWrite) }.unwrap();
            assert_eq!(crate::numa::node_of_page(place), Ok(None), "no page is entered yet");
            // SAFETY: `place` is mapped with both rights, so it can be read.
            unsafe { populate(place, page) }.unwrap();
            assert!(crate::numa::node_of_page(place).unwrap().is_some(), "the page is entered, untouched");
            // SAFETY: mapped with both rights until `unmap_at` below.
            let bytes = unsafe { SharedSlice::new(place, page, true) };
            let mut seen = [0];
            bytes.read_at(0, &mut seen).unwrap();
            assert_eq!(seen, [round], "the file kept its byte while it was not mapped");
            bytes.write_at(0, &[round + 1]).unwrap();
            // SAFETY: nothing uses the place any more.
            unsafe { unmap_at(place, page) }.unwrap();
            let taken = reserve(page, page, Some(place));
            let exists = Err(Error::Call { call: "mmap", errno: Errno::EXIST });
            assert_eq!(taken, exists, "an emptied place is never free for others");
        }
        // SAFETY: nothing uses the reservation any more.
        unsafe { release(at, 2 * page) }.unwrap();
    }
}
