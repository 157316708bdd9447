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
use crate::vm::{self, Protection, SharedMap};
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

impl SharedMap {
    /// Maps all of `memory`.
    ///
    /// # Errors
    /// [`Error::ReadOnly`] when the file was received read-only; `mmap` with `ENOMEM` when this process has too many
    /// maps.
    pub fn create(memory: &Memfd, protection: Protection) -> Result<Self> {
        if protection == Protection::ReadWrite && !memory.is_writable() {
            return Err(Error::ReadOnly);
        }
        Self::over(memory.as_fd(), memory.len(), protection)
    }
}

/// Maps a file so that no child has the map, which would keep the file from being closed for writing.
fn map_hidden(fd: BorrowedFd<'_>, len: usize, protection: Protection) -> Result<SharedMap> {
    without_forks(|| {
        let map = SharedMap::over(fd, len, protection)?;
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

/// Gives the pages of a memory file back to the kernel now, also if other processes have the file open or mapped. Its bytes are zero from then on.
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
/// What `fstat` said; `EOVERFLOW` for a length that no file has.
pub fn len_of(fd: BorrowedFd<'_>) -> Result<usize> {
    let len = call("fstat", || rustix::fs::fstat(fd))?.st_size;
    usize::try_from(len).map_err(|_| Error::Call { call: "fstat", errno: Errno::OVERFLOW })
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
    let map = SharedMap::over(fd.as_fd(), len, Protection::None)?;
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
mod tests;
