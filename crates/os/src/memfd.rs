//! Physical memory behind a file descriptor: created resident, private to its owner, and sealed against resizing.
//!
//! A [`Memfd`] is the only way memory enters wholemem on the host. What it keeps true of all of it, made here or
//! received from a peer:
//!
//! - its length never changes: it carries `F_SEAL_SHRINK` and `F_SEAL_GROW`, so no holder's `ftruncate` can become
//!   our `SIGBUS`;
//! - what it hands out for reading stays so: its mode is 0600 by then, so that another user cannot reopen it for
//!   writing through `/proc/self/fd` (the kernel's default, 0777, lets them);
//! - its descriptors close on exec.
//!
//! And of memory made here: its pages exist, since they are allocated at creation, and it cannot be made executable
//! where the kernel knows how to seal that.
//!
//! It will not protect memory from processes of the same user: they may undo the mode. Nor does it hide the bytes
//! from anybody who was given the descriptor. And it will not look whether there is enough memory: where there is
//! not, the kernel may kill rather than refuse, so that whoever creates much asks [`meminfo`](crate::meminfo) first.
//!
//! ```
//! use wholemem_os::{Error, Memfd};
//!
//! let made = Memfd::create("weights", 1 << 20)?;
//! let sent = made.read_only_fd()?; // hand this to a reader
//!
//! let received = Memfd::import(sent, 1 << 20)?;
//! assert!(!received.is_writable());
//!
//! let wrong = Memfd::import(made.read_only_fd()?, 2 << 20).unwrap_err();
//! assert_eq!(wrong, Error::WrongLength { expected: 2 << 20, actual: 1 << 20 });
//! # Ok::<(), Error>(())
//! ```

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FallocateFlags, FileType, MemfdFlags, Mode, OFlags, SealFlags};

use crate::call::call;
use crate::fork::without_forks;
use crate::vm::{self, Protection};
use crate::{Errno, Error, FileKind, Result, large, numa};

const SIZE_SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// With either of these no writable map can be made, whatever the descriptor was opened for.
const WRITE_SEALS: SealFlags = SealFlags::WRITE.union(SealFlags::FUTURE_WRITE);

/// The kernel's number for the file system of huge pages.
const HUGE_PAGES: rustix::fs::FsWord = libc::HUGETLBFS_MAGIC as rustix::fs::FsWord;

/// An interrupted `fallocate` undoes what it did, so after an interruption it goes on in steps of this length.
const STEP_AFTER_INTERRUPT: usize = 16 << 20;

/// A sealed memory file of known length.
#[derive(Debug)]
#[doc(alias = "memfd_create")]
pub struct Memfd {
    fd: OwnedFd,
    len: usize,
    writable: bool,
}

impl Memfd {
    /// Creates `len` bytes of zeroed, resident memory. `name` shows up in `/proc/<pid>/maps` and `/proc/<pid>/fd`.
    ///
    /// # Errors
    /// [`Error::ZeroLength`], or the call that failed: `memfd_create` with `EINVAL` for a name that is longer than 249
    /// bytes or has a zero in it, `fallocate` with `ENOSPC` or `ENOMEM` where the kernel refuses the memory.
    pub fn create(name: &str, len: usize) -> Result<Self> {
        Self::create_near(name, len, None)
    }

    /// Like [`Memfd::create`], with the pages on a NUMA node where one is given.
    ///
    /// # Errors
    /// As [`Memfd::create`]; `mbind` with `EINVAL` when the machine has no such node.
    pub fn create_near(name: &str, len: usize, node: Option<u32>) -> Result<Self> {
        if len == 0 {
            return Err(Error::ZeroLength);
        }
        let fd = create_empty(name)?;
        if let Some(node) = node {
            place(&fd, len, node)?;
        }
        fill(&fd, len)?;
        Self::finish(fd, len)
    }

    /// Like [`Memfd::create`], in large pages where the kernel has them to give, and small ones for the rest: much faster to
    /// make, to map and to give back. And all of it is zeroed already, which otherwise happens when a page is touched.
    ///
    /// # Errors
    /// As [`Memfd::create`].
    pub fn create_large(name: &str, len: usize) -> Result<Self> {
        if len == 0 {
            return Err(Error::ZeroLength);
        }
        let fd = create_empty(name)?;
        call("ftruncate", || rustix::fs::ftruncate(&fd, len as u64))?;
        // What cannot be had in large pages is had in small ones.
        let is_filled = large::fill(fd.as_fd(), len).is_ok() && len.is_multiple_of(vm::LARGE_PAGE);
        fill(&fd, len)?;
        if !is_filled {
            // A matter of speed alone.
            let _ = map_hidden(fd.as_fd(), len, Protection::Read)?.populate();
        }
        Self::finish(fd, len)
    }

    /// Creates `len` bytes of zeroed memory whose pages come as they are touched: for tables of a fixed size of which
    /// little is used. Where there is no memory for a page, the process that touches it is killed.
    ///
    /// # Errors
    /// As [`Memfd::create`], `fallocate` aside.
    pub fn create_sparse(name: &str, len: usize) -> Result<Self> {
        if len == 0 {
            return Err(Error::ZeroLength);
        }
        let fd = create_empty(name)?;
        call("ftruncate", || rustix::fs::ftruncate(&fd, len as u64))?;
        Self::finish(fd, len)
    }

    /// Creates `len` bytes of zeroed memory, of which the first `filled` are there and the others come as they are touched.
    ///
    /// # Errors
    /// As [`Memfd::create`]; [`Error::OutOfRange`] if `filled` is more than `len`.
    pub fn create_partly_filled(name: &str, len: usize, filled: usize) -> Result<Self> {
        if filled > len {
            return Err(Error::OutOfRange { offset: 0, len: filled, size: len });
        }
        let memory = Self::create_sparse(name, len)?;
        if filled > 0 {
            fill(&memory.fd, filled)?;
        }
        Ok(memory)
    }

    fn finish(fd: OwnedFd, len: usize) -> Result<Self> {
        call("fchmod", || rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR))?;
        call("fcntl", || rustix::fs::fcntl_add_seals(&fd, SIZE_SEALS))?;
        Ok(Self { fd, len, writable: true })
    }

    /// Takes over a memory file made elsewhere, after checking that it is one, that it can no longer be resized,
    /// and that it is exactly `len` bytes long.
    ///
    /// # Errors
    /// [`Error::NotAMemfd`], [`Error::Unsealed`], [`Error::WrongLength`], [`Error::ZeroLength`]. The descriptor is
    /// closed then.
    pub fn import(fd: OwnedFd, len: usize) -> Result<Self> {
        if len == 0 {
            return Err(Error::ZeroLength);
        }
        let seals = match call("fcntl", || rustix::fs::fcntl_get_seals(&fd)) {
            Err(Error::Call { errno: Errno::INVAL, .. }) => {
                return Err(Error::NotAMemfd { found: kind_of(fd.as_fd())? });
            }
            seals => seals?,
        };
        if !seals.contains(SIZE_SEALS) {
            return Err(Error::Unsealed { missing: missing_seals(seals) });
        }
        // Only now: without the seals the length could change after it was read.
        let actual = len_of(fd.as_fd())?;
        if actual != len {
            return Err(Error::WrongLength { expected: len, actual });
        }
        // Others may punch holes into pages that cannot be had again: with huge pages that is a `SIGBUS`, not a wait.
        if call("fstatfs", || rustix::fs::fstatfs(&fd))?.f_type == HUGE_PAGES {
            return Err(Error::NotAMemfd { found: FileKind::HugePages });
        }
        let flags = call("fcntl", || rustix::fs::fcntl_getfl(&fd))?;
        let writable = flags.contains(OFlags::RDWR) && !seals.intersects(WRITE_SEALS);
        Ok(Self { fd, len, writable })
    }

    /// The length in bytes: never zero, and never another.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a memory file is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether this descriptor allows writable maps.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// A second descriptor with the same rights.
    ///
    /// # Errors
    /// `fcntl` with `EMFILE` when this process has no descriptor left.
    pub fn share_fd(&self) -> Result<OwnedFd> {
        share_fd(self.fd.as_fd())
    }

    /// A descriptor through which nobody of another user can write, now or later.
    ///
    /// # Errors
    /// `open` with `EMFILE` when this process has no descriptor left, or `ENOENT` where `/proc` is not mounted;
    /// `fchmod` with `EPERM` for another user's memory that he left open to others.
    pub fn read_only_fd(&self) -> Result<OwnedFd> {
        read_only_fd(self.fd.as_fd())
    }

    /// The descriptor itself.
    #[must_use]
    pub fn into_fd(self) -> OwnedFd {
        self.fd
    }
}

impl AsFd for Memfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A second descriptor of the same open file, with the same rights.
///
/// # Errors
/// `fcntl` with `EMFILE` when this process has no descriptor left.
pub fn share_fd(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    call("fcntl", || rustix::io::fcntl_dupfd_cloexec(fd, 3))
}

/// Opens a memory file again, for reading alone. See [`Memfd::read_only_fd`].
///
/// # Errors
/// As [`Memfd::read_only_fd`].
pub fn read_only_fd(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    // Memory made elsewhere may still have the kernel's mode.
    let mode = Mode::from_raw_mode(call("fstat", || rustix::fs::fstat(fd))?.st_mode);
    if mode.intersects(Mode::RWXG | Mode::RWXO) {
        call("fchmod", || rustix::fs::fchmod(fd, Mode::RUSR | Mode::WUSR))?;
    }
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    call("open", || rustix::fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()))
}

/// Maps a file so that no child has the map, which would keep the file from being closed for writing.
fn map_hidden(fd: BorrowedFd<'_>, len: usize, protection: Protection) -> Result<vm::SharedMap> {
    without_forks(|| {
        let map = vm::SharedMap::over(fd, len, protection)?;
        // SAFETY: the map was made in the line above. Where the kernel cannot, a child that is forked meanwhile has to end first.
        let _ = unsafe { vm::set_inherited(map.address(), len, false) };
        Ok(map)
    })?
}

/// Sees to it that nobody can write a memory file any more, through whatever descriptor, now or later.
///
/// # Errors
/// `fcntl` with `EBUSY` while anybody has it mapped in a way that could be made writable, `EPERM` through a descriptor
/// for reading.
#[doc(alias = "F_SEAL_WRITE")]
pub fn close_for_writing(fd: BorrowedFd<'_>) -> Result<()> {
    call("fcntl", || rustix::fs::fcntl_add_seals(fd, SealFlags::WRITE))
}

/// Gives the pages of a memory file back to the kernel now, whoever has the file open or mapped. Its bytes are zero from then on.
///
/// # Errors
/// `fallocate` with `EPERM` where the file is closed for writing, `EBADF` through a descriptor for reading.
pub fn discard(fd: BorrowedFd<'_>) -> Result<()> {
    let len = len_of(fd)? as u64;
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    call("fallocate", || rustix::fs::fallocate(fd, flags, 0, len))
}

/// Whether nobody can write a memory file any more.
///
/// # Errors
/// `fcntl` with `EINVAL` of what is no memory file.
pub fn is_closed_for_writing(fd: BorrowedFd<'_>) -> Result<bool> {
    Ok(call("fcntl", || rustix::fs::fcntl_get_seals(fd))?.contains(SealFlags::WRITE))
}

/// Which file a descriptor is of, as the kernel numbers files: two that are open at the same time differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileIdentity {
    device: u64,
    inode: u64,
}

/// Which file a descriptor is of.
///
/// # Errors
/// What `fstat` said.
pub fn identity(fd: BorrowedFd<'_>) -> Result<FileIdentity> {
    let found = call("fstat", || rustix::fs::fstat(fd))?;
    Ok(FileIdentity { device: found.st_dev, inode: found.st_ino })
}

/// How long a file is now; for a sealed one, for ever.
///
/// # Errors
/// What `fstat` said.
pub fn len_of(fd: BorrowedFd<'_>) -> Result<usize> {
    let len = call("fstat", || rustix::fs::fstat(fd))?.st_size;
    Ok(usize::try_from(len).unwrap_or(0))
}

fn create_empty(name: &str) -> Result<OwnedFd> {
    // Linux before 6.3 refuses the flag; asking once is enough.
    static NOEXEC_REFUSED: AtomicBool = AtomicBool::new(false);
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let create = |flags| call("memfd_create", || rustix::fs::memfd_create(name, flags));
    if !NOEXEC_REFUSED.load(Ordering::Relaxed) {
        match create(flags | MemfdFlags::NOEXEC_SEAL) {
            Err(Error::Call { errno: Errno::INVAL, .. }) => {}
            answer => return answer,
        }
    }
    let fd = create(flags)?;
    NOEXEC_REFUSED.store(true, Ordering::Relaxed);
    Ok(fd)
}

/// Gives the file a home node. A policy set on a shared map of a memory file belongs to the file, and holds for
/// pages allocated later, so this comes before `fill`.
fn place(fd: &OwnedFd, len: usize, node: u32) -> Result<()> {
    call("ftruncate", || rustix::fs::ftruncate(fd, len as u64))?;
    let map = vm::SharedMap::over(fd.as_fd(), len, Protection::None)?;
    // SAFETY: the range is the map just made, which nothing else knows of.
    unsafe { numa::bind(map.address(), len, node) }
}

fn fill(fd: &OwnedFd, len: usize) -> Result<()> {
    let allocate = |offset: usize, len: usize| {
        call("fallocate", || rustix::fs::fallocate(fd, FallocateFlags::empty(), offset as u64, len as u64))
    };
    match allocate(0, len) {
        Err(Error::Call { errno: Errno::INTR, .. }) => {}
        answer => return answer,
    }
    for offset in (0..len).step_by(STEP_AFTER_INTERRUPT) {
        let step = STEP_AFTER_INTERRUPT.min(len - offset);
        loop {
            match allocate(offset, step) {
                Err(Error::Call { errno: Errno::INTR, .. }) => {}
                answer => break answer?,
            }
        }
    }
    Ok(())
}

fn missing_seals(seals: SealFlags) -> &'static str {
    match (seals.contains(SealFlags::SHRINK), seals.contains(SealFlags::GROW)) {
        (false, false) => "F_SEAL_SHRINK and F_SEAL_GROW",
        (false, true) => "F_SEAL_SHRINK",
        _ => "F_SEAL_GROW",
    }
}

fn kind_of(fd: BorrowedFd<'_>) -> Result<FileKind> {
    let mode = call("fstat", || rustix::fs::fstat(fd))?.st_mode;
    Ok(match FileType::from_raw_mode(mode) {
        FileType::Fifo => FileKind::Pipe,
        FileType::Socket => FileKind::Socket,
        FileType::RegularFile => FileKind::File,
        FileType::Directory => FileKind::Directory,
        FileType::CharacterDevice | FileType::BlockDevice => FileKind::Device,
        _ => FileKind::Other,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: usize = 64 << 10;

    fn unsealed(len: u64) -> OwnedFd {
        let fd =
            rustix::fs::memfd_create("unsealed", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, len).unwrap();
        fd
    }

    #[test]
    fn a_fresh_file_is_resident_private_and_cannot_be_resized() {
        let memory = Memfd::create("test", LEN).unwrap();
        let stat = rustix::fs::fstat(&memory).unwrap();
        assert_eq!(u64::try_from(stat.st_size), Ok(LEN as u64));
        assert!(u64::try_from(stat.st_blocks).unwrap() * 512 >= LEN as u64, "{} blocks", stat.st_blocks);
        assert_eq!(stat.st_mode & 0o777, 0o600);
        assert_eq!(rustix::fs::ftruncate(&memory, 0), Err(Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(&memory, 2 * LEN as u64), Err(Errno::PERM));
    }

    #[test]
    fn a_file_of_large_pages_is_as_any_other() {
        let lens = [LEN, vm::LARGE_PAGE, 3 * vm::LARGE_PAGE + LEN, 130 << 20];
        for len in lens {
            let memory = Memfd::create_large("test", len).unwrap();
            let stat = rustix::fs::fstat(&memory).unwrap();
            assert!(u64::try_from(stat.st_blocks).unwrap() * 512 >= len as u64, "{} blocks", stat.st_blocks);
            assert_eq!((usize::try_from(stat.st_size), stat.st_mode & 0o777), (Ok(len), 0o600));
            assert_eq!(rustix::fs::ftruncate(&memory, 0), Err(Errno::PERM));
            let map = map_hidden(memory.as_fd(), len, Protection::ReadWrite).unwrap();
            for offset in (0..len).step_by(vm::LARGE_PAGE / 2).chain([len - 1]) {
                let mut seen = [1];
                map.bytes().read_at(offset, &mut seen).unwrap();
                assert_eq!(seen, [0]);
                map.bytes().write_at(offset, &[7]).unwrap();
            }
            drop(map);
            close_for_writing(memory.as_fd()).unwrap();
        }
    }

    #[test]
    fn a_sparse_file_is_long_and_private_and_takes_no_memory() {
        let memory = Memfd::create_sparse("test", 1 << 40).unwrap();
        let stat = rustix::fs::fstat(&memory).unwrap();
        assert_eq!((stat.st_size, stat.st_blocks, stat.st_mode & 0o777), (1 << 40, 0, 0o600));
        let again = Memfd::import(memory.into_fd(), 1 << 40).unwrap();
        assert!(again.is_writable());
        assert_eq!(Memfd::create_sparse("test", 0).unwrap_err(), Error::ZeroLength);
    }

    #[test]
    fn a_file_closed_for_writing_is_written_by_nobody() {
        let memory = Memfd::create("test", LEN).unwrap();
        let reader = vm::SharedMap::over(memory.read_only_fd().unwrap().as_fd(), LEN, Protection::Read);
        let writer = map_hidden(memory.as_fd(), LEN, Protection::ReadWrite).unwrap();
        let busy = Error::Call { call: "fcntl", errno: Errno::BUSY };
        assert_eq!(close_for_writing(memory.as_fd()), Err(busy));
        assert_eq!(is_closed_for_writing(memory.as_fd()), Ok(false));
        drop(writer);
        assert_eq!(close_for_writing(memory.as_fd()), Ok(()), "readers do not matter: {reader:?}");
        assert_eq!(close_for_writing(memory.as_fd()), Ok(()), "nor does asking again");
        assert_eq!(is_closed_for_writing(memory.read_only_fd().unwrap().as_fd()), Ok(true));
        assert_eq!(rustix::io::write(&memory, b"x"), Err(Errno::PERM));
        assert!(!Memfd::import(memory.share_fd().unwrap(), LEN).unwrap().is_writable());
    }

    #[test]
    fn every_descriptor_closes_on_exec() {
        let memory = Memfd::create("test", LEN).unwrap();
        let others = [memory.share_fd().unwrap(), memory.read_only_fd().unwrap()];
        for fd in others.iter().map(AsFd::as_fd).chain([memory.as_fd()]) {
            assert_eq!(rustix::io::fcntl_getfd(fd), Ok(rustix::io::FdFlags::CLOEXEC));
        }
    }

    #[test]
    fn a_fresh_file_cannot_be_made_executable_where_the_kernel_can_seal_that() {
        let sealed = rustix::fs::memfd_create("test", MemfdFlags::NOEXEC_SEAL).is_ok();
        let memory = Memfd::create("test", LEN).unwrap();
        let executable = rustix::fs::fchmod(&memory, Mode::RWXU);
        assert_eq!(executable, if sealed { Err(Errno::PERM) } else { Ok(()) });
    }

    #[cfg(feature = "fault")]
    #[test]
    fn a_kernel_that_does_not_know_the_seal_against_execution_is_asked_without_it() {
        // In a child, since the answer is remembered.
        let child = crate::fork::child::fork(|| {
            let armed = crate::fault::arm(1, Errno::INVAL);
            let made = Memfd::create("test", LEN);
            let (refused, first) = (made.is_err(), armed.fired());
            drop(armed);
            u8::from(refused || first != Some("memfd_create") || Memfd::create("test", LEN).is_err())
        });
        assert_eq!(child.wait(), crate::fork::child::Status::Exited(0));
    }

    #[cfg(feature = "fault")]
    #[test]
    fn memory_whose_filling_is_interrupted_is_filled_in_steps_all_the_same() {
        for len in [LEN, STEP_AFTER_INTERRUPT, STEP_AFTER_INTERRUPT + LEN] {
            let armed = crate::fault::arm(2, Errno::INTR);
            let memory = Memfd::create("test", len).unwrap();
            assert_eq!(armed.fired(), Some("fallocate"));
            drop(armed);
            let stat = rustix::fs::fstat(&memory).unwrap();
            assert_eq!(usize::try_from(stat.st_size), Ok(len));
            assert!(usize::try_from(stat.st_blocks).unwrap() * 512 >= len, "{} blocks", stat.st_blocks);
        }
    }

    #[test]
    fn memory_sealed_against_writing_is_received_read_only() {
        for seal in [SealFlags::WRITE, SealFlags::FUTURE_WRITE] {
            let fd = unsealed(LEN as u64);
            rustix::fs::fcntl_add_seals(&fd, SIZE_SEALS | seal).unwrap();
            assert!(!Memfd::import(fd, LEN).unwrap().is_writable(), "{seal:?}");
        }
    }

    #[test]
    fn memory_received_with_the_kernels_mode_is_handed_on_with_ours() {
        let fd = unsealed(LEN as u64);
        rustix::fs::fcntl_add_seals(&fd, SIZE_SEALS).unwrap();
        let memory = Memfd::import(fd, LEN).unwrap();
        let sent = memory.read_only_fd().unwrap();
        assert_eq!(rustix::fs::fstat(&sent).unwrap().st_mode & 0o777, 0o600);
    }

    #[test]
    fn a_file_bound_to_a_node_is_as_long_and_sealed_as_any() {
        let memory = Memfd::create_near("test", LEN, Some(0)).unwrap();
        let again = Memfd::import(memory.share_fd().unwrap(), LEN).unwrap();
        assert!(again.is_writable());
    }

    #[cfg(feature = "fault")]
    #[test]
    fn memory_is_placed_before_it_is_filled_and_made_private_before_anybody_sees_it() {
        let calls = (1..).map_while(|nth| {
            let armed = crate::fault::arm(nth, Errno::NFILE);
            let _ = Memfd::create_near("test", LEN, Some(0));
            armed.fired()
        });
        let expected =
            ["memfd_create", "ftruncate", "mmap", "mbind", "munmap", "fallocate", "fchmod", "fcntl"];
        assert_eq!(calls.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_node_that_does_not_exist_is_refused() {
        let error = Memfd::create_near("test", LEN, Some(1000)).unwrap_err();
        assert_eq!(error, Error::Call { call: "mbind", errno: Errno::INVAL });
    }

    #[test]
    fn discarded_memory_is_free_at_once_and_zero() {
        let memory = Memfd::create("test", LEN).unwrap();
        let map = vm::SharedMap::create(&memory, Protection::ReadWrite).unwrap();
        map.bytes().write_at(0, b"x").unwrap();
        discard(memory.as_fd()).unwrap();
        assert_eq!(rustix::fs::fstat(&memory).unwrap().st_blocks, 0);
        let mut read = [1];
        map.bytes().read_at(0, &mut read).unwrap();
        assert_eq!((read, len_of(memory.as_fd())), ([0], Ok(LEN)));
        drop(map);
        close_for_writing(memory.as_fd()).unwrap();
        assert_eq!(discard(memory.as_fd()), Err(Error::Call { call: "fallocate", errno: Errno::PERM }));
    }

    #[test]
    fn zero_bytes_are_refused_on_both_sides() {
        assert_eq!(Memfd::create("test", 0).unwrap_err(), Error::ZeroLength);
        assert_eq!(Memfd::import(unsealed(0), 0).unwrap_err(), Error::ZeroLength);
    }

    #[test]
    fn import_names_what_a_foreign_fd_is() {
        let (pipe, _writer) = rustix::pipe::pipe().unwrap();
        assert_eq!(Memfd::import(pipe, LEN).unwrap_err(), Error::NotAMemfd { found: FileKind::Pipe });
        let null = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(
            Memfd::import(null.into(), LEN).unwrap_err(),
            Error::NotAMemfd { found: FileKind::Device }
        );
        let folder = std::fs::File::open("/proc/self").unwrap();
        assert_eq!(
            Memfd::import(folder.into(), LEN).unwrap_err(),
            Error::NotAMemfd { found: FileKind::Directory }
        );
    }

    #[test]
    fn import_refuses_huge_pages() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
        let fd = rustix::fs::memfd_create("huge", flags).unwrap();
        let len = 2 << 20;
        // The pages themselves need not be had for the file to have a length.
        rustix::fs::ftruncate(&fd, len as u64).unwrap();
        rustix::fs::fcntl_add_seals(&fd, SIZE_SEALS).unwrap();
        assert_eq!(Memfd::import(fd, len).unwrap_err(), Error::NotAMemfd { found: FileKind::HugePages });
    }

    #[test]
    fn import_names_the_seals_that_are_missing() {
        for (seals, missing) in [
            (SealFlags::empty(), "F_SEAL_SHRINK and F_SEAL_GROW"),
            (SealFlags::SHRINK, "F_SEAL_GROW"),
            (SealFlags::GROW, "F_SEAL_SHRINK"),
        ] {
            let fd = unsealed(LEN as u64);
            rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
            assert_eq!(Memfd::import(fd, LEN).unwrap_err(), Error::Unsealed { missing });
        }
    }

    #[test]
    fn import_refuses_another_length_than_promised() {
        for promised in [LEN - 4096, LEN + 4096] {
            let fd = Memfd::create("test", LEN).unwrap().into_fd();
            let expected = Error::WrongLength { expected: promised, actual: LEN };
            assert_eq!(Memfd::import(fd, promised).unwrap_err(), expected);
        }
    }

    #[test]
    fn a_read_only_descriptor_stays_read_only_when_it_is_shared_again() {
        let memory = Memfd::create("test", LEN).unwrap();
        let reader = Memfd::import(memory.read_only_fd().unwrap(), LEN).unwrap();
        let again = Memfd::import(reader.share_fd().unwrap(), LEN).unwrap();
        assert!(!reader.is_writable() && !again.is_writable());
        assert_eq!(rustix::io::write(&again, b"x"), Err(Errno::BADF));
    }
}
