//! Memory files (memfd): anonymous memory behind a file descriptor, which cannot be resized, and which other users can
//! access only through a descriptor that is passed to them.
//!
//! All host memory of wholemem is a [`Memfd`]. For memory created here and for memory received from a peer:
//!
//! - The length never changes: the file has `F_SEAL_SHRINK` and `F_SEAL_GROW`, so no other process can cause a
//!   `SIGBUS` here with `ftruncate`.
//! - A read-only descriptor stays read-only: the file has mode 0600 before one is passed on, so that another user
//!   cannot reopen it for writing through `/proc/self/fd` (the kernel's default mode 0777 allows that).
//! - Its descriptors are close-on-exec.
//!
//! For memory created here: its pages are allocated at creation, and it cannot be made executable if the kernel
//! supports sealing that.
//!
//! A memory file is not protected against processes of the same user, which can change the mode, and its bytes are
//! readable by every holder of a descriptor. Creation does not check whether enough memory is available: if it is
//! not, the kernel may kill a process instead of returning an error, so a caller that creates large files checks
//! [`meminfo`](crate::meminfo) first.
//!
//! ```
//! use wholemem_os::{Error, Memfd};
//!
//! let memory = Memfd::create("weights", 1 << 20)?;
//! let sent = memory.read_only_fd()?; // pass this descriptor to a reader
//!
//! let received = Memfd::import(sent, 1 << 20)?;
//! assert!(!received.is_writable());
//!
//! let wrong = Memfd::import(memory.read_only_fd()?, 2 << 20).unwrap_err();
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

/// Two seals of a memory file: with either of them no writable mapping can be created, regardless of the descriptor's
/// access mode.
const WRITE_SEALS: SealFlags = SealFlags::WRITE.union(SealFlags::FUTURE_WRITE);

/// The file system type of hugetlbfs, as returned by `fstatfs`.
const HUGE_PAGES: rustix::fs::FsWord = libc::HUGETLBFS_MAGIC as rustix::fs::FsWord;

/// The number of bytes that each `fallocate` allocates after a call for the whole file was interrupted: the kernel
/// rolls an interrupted call back.
const STEP_AFTER_INTERRUPT: usize = 16 << 20;

/// A memory file (memfd) of known length that is sealed against resizing.
#[derive(Debug)]
#[doc(alias = "memfd_create")]
pub struct Memfd {
    fd: OwnedFd,
    len: usize,
    writable: bool,
}

impl Memfd {
    /// Creates a memory file of `len` zeroed bytes, whose pages are allocated now. `name` is shown in
    /// `/proc/<pid>/maps` and `/proc/<pid>/fd`.
    ///
    /// # Errors
    /// [`Error::ZeroLength`], or the failed call: `memfd_create` with `EINVAL` for a name that is longer than 249
    /// bytes or contains a zero byte, `fallocate` with `ENOSPC` or `ENOMEM` if the kernel has no memory.
    pub fn create(name: &str, len: usize) -> Result<Self> {
        Self::create_near(name, len, None)
    }

    /// Creates a memory file like [`Memfd::create`], with its pages on NUMA node `node`, if one is given.
    ///
    /// # Errors
    /// As [`Memfd::create`]; `mbind` with `EINVAL` if the node does not exist.
    pub fn create_near(name: &str, len: usize, node: Option<u32>) -> Result<Self> {
        if len == 0 {
            return Err(Error::ZeroLength);
        }
        let fd = create_empty(name)?;
        if let Some(node) = node {
            bind_to_node(&fd, len, node)?;
        }
        fill(&fd, len)?;
        Self::finish(fd, len)
    }

    /// Creates a memory file like [`Memfd::create`], with large pages (transparent huge pages) as far as the kernel
    /// has any, and small pages for the rest. Creating, mapping and freeing large pages is much faster. All pages are
    /// zeroed at creation, not at the first access.
    ///
    /// # Errors
    /// As [`Memfd::create`].
    pub fn create_large(name: &str, len: usize) -> Result<Self> {
        if len == 0 {
            return Err(Error::ZeroLength);
        }
        let fd = create_empty(name)?;
        call("ftruncate", || rustix::fs::ftruncate(&fd, len as u64))?;
        // `fill` allocates small pages for the parts of the file that have no large pages.
        let is_filled = large::fill(fd.as_fd(), len).is_ok() && len.is_multiple_of(vm::LARGE_PAGE);
        fill(&fd, len)?;
        if !is_filled {
            // Populating zeroes the allocated pages. An error is ignored: the pages are then zeroed at the first
            // access.
            let _ = map_without_inheritance(fd.as_fd(), len, Protection::Read)?.populate();
        }
        Self::finish(fd, len)
    }

    /// Creates a memory file of `len` zeroed bytes whose pages are allocated at the first access, for large tables of
    /// which little is used. If no memory is available for a page, the kernel kills the accessing process.
    ///
    /// # Errors
    /// As [`Memfd::create`], except for `fallocate`.
    pub fn create_sparse(name: &str, len: usize) -> Result<Self> {
        if len == 0 {
            return Err(Error::ZeroLength);
        }
        let fd = create_empty(name)?;
        call("ftruncate", || rustix::fs::ftruncate(&fd, len as u64))?;
        Self::finish(fd, len)
    }

    /// Creates a memory file of `len` zeroed bytes: the pages of the first `filled` bytes are allocated now, and the
    /// others at the first access.
    ///
    /// # Errors
    /// As [`Memfd::create`]; [`Error::OutOfRange`] if `filled` exceeds `len`.
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

    /// Imports a memory file that was created elsewhere, after checking that the descriptor refers to a memory file,
    /// that the file cannot be resized any more, and that it is exactly `len` bytes long.
    ///
    /// # Errors
    /// [`Error::NotAMemfd`], [`Error::Unsealed`], [`Error::WrongLength`], [`Error::ZeroLength`]. The descriptor is
    /// closed on error.
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
        // The length is read after the seals were checked, since the length of a file without these seals could
        // change again.
        let actual = len_of(fd.as_fd())?;
        if actual != len {
            return Err(Error::WrongLength { expected: len, actual });
        }
        // The peer that sent the file may punch holes into it. In hugetlbfs a later access to a hole raises `SIGBUS`
        // if no huge page is free.
        if call("fstatfs", || rustix::fs::fstatfs(&fd))?.f_type == HUGE_PAGES {
            return Err(Error::NotAMemfd { found: FileKind::HugePages });
        }
        let flags = call("fcntl", || rustix::fs::fcntl_getfl(&fd))?;
        let writable = flags.contains(OFlags::RDWR) && !seals.intersects(WRITE_SEALS);
        Ok(Self { fd, len, writable })
    }

    /// Returns the length of the memory file in bytes. It is never zero and never changes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a memory file is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the memory file can be mapped writable through this descriptor.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Duplicates the descriptor of the memory file, with the same access mode.
    ///
    /// # Errors
    /// `fcntl` with `EMFILE` if this process has no descriptor left.
    pub fn share_fd(&self) -> Result<OwnedFd> {
        share_fd(self.fd.as_fd())
    }

    /// Opens a read-only descriptor of the memory file, which a process of another user cannot reopen for writing.
    ///
    /// # Errors
    /// `open` with `EMFILE` if this process has no descriptor left, or `ENOENT` if `/proc` is not mounted; `fchmod`
    /// with `EPERM` if the file belongs to another user and others may access it.
    pub fn read_only_fd(&self) -> Result<OwnedFd> {
        read_only_fd(self.fd.as_fd())
    }

    /// Returns the descriptor of the memory file.
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

/// Duplicates a file descriptor: the new one refers to the same open file, with the same access mode.
///
/// # Errors
/// `fcntl` with `EMFILE` if this process has no descriptor left.
pub fn share_fd(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    call("fcntl", || rustix::io::fcntl_dupfd_cloexec(fd, 3))
}

/// Opens a read-only descriptor of a memory file. See [`Memfd::read_only_fd`].
///
/// # Errors
/// As [`Memfd::read_only_fd`].
pub fn read_only_fd(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    // A memory file that other code created may still have the kernel's default mode, 0777.
    let mode = Mode::from_raw_mode(call("fstat", || rustix::fs::fstat(fd))?.st_mode);
    if mode.intersects(Mode::RWXG | Mode::RWXO) {
        call("fchmod", || rustix::fs::fchmod(fd, Mode::RUSR | Mode::WUSR))?;
    }
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    call("open", || rustix::fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()))
}

impl SharedMap {
    /// Maps the whole of the memory file `memory`.
    ///
    /// # Errors
    /// [`Error::ReadOnly`] if the file was received read-only; `mmap` with `ENOMEM` if this process has too many
    /// mappings.
    pub fn create(memory: &Memfd, protection: Protection) -> Result<Self> {
        if protection == Protection::ReadWrite && !memory.is_writable() {
            return Err(Error::ReadOnly);
        }
        Self::map_file(memory.as_fd(), memory.len(), protection)
    }
}

/// Maps a memory file so that forked children do not inherit the mapping, if the kernel has `MADV_DONTFORK`: an
/// inherited writable mapping would make `F_SEAL_WRITE` fail.
fn map_without_inheritance(fd: BorrowedFd<'_>, len: usize, protection: Protection) -> Result<SharedMap> {
    without_forks(|| {
        let map = SharedMap::map_file(fd, len, protection)?;
        // An error is ignored: on kernels without `MADV_DONTFORK`, sealing the file fails until a child that is
        // forked meanwhile exits.
        // SAFETY: the mapping was created in the line above, and no child uses it.
        let _ = unsafe { vm::set_inherited(map.address(), len, false) };
        Ok(map)
    })?
}

/// Seals a memory file against writing, permanently and for every descriptor.
///
/// # Errors
/// `fcntl` with `EBUSY` while a writable shared mapping, or one that could be made writable, exists in any process;
/// `EPERM` if the descriptor is read-only.
#[doc(alias = "F_SEAL_WRITE")]
pub fn seal_writes(fd: BorrowedFd<'_>) -> Result<()> {
    call("fcntl", || rustix::fs::fcntl_add_seals(fd, SealFlags::WRITE))
}

/// Frees the pages of a memory file at once, even if other processes have it open or mapped. Its bytes then read as
/// zero.
///
/// # Errors
/// `fallocate` with `EPERM` if the file is sealed against writing, `EBADF` if the descriptor is read-only.
pub fn discard(fd: BorrowedFd<'_>) -> Result<()> {
    let len = len_of(fd)? as u64;
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    call("fallocate", || rustix::fs::fallocate(fd, flags, 0, len))
}

/// Returns whether a memory file is sealed against writing.
///
/// # Errors
/// `fcntl` with `EINVAL` if the descriptor is not a memory file.
pub fn is_write_sealed(fd: BorrowedFd<'_>) -> Result<bool> {
    Ok(call("fcntl", || rustix::fs::fcntl_get_seals(fd))?.contains(SealFlags::WRITE))
}

/// Identifies a file by its device and inode. Two different files that are open at the same time have different
/// identities.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileIdentity {
    device: u64,
    inode: u64,
}

/// Returns the identity (device and inode) of the file that a descriptor refers to.
///
/// # Errors
/// The error of `fstat`.
pub fn identity(fd: BorrowedFd<'_>) -> Result<FileIdentity> {
    let stat = call("fstat", || rustix::fs::fstat(fd))?;
    Ok(FileIdentity { device: stat.st_dev, inode: stat.st_ino })
}

/// Returns the current length of a file in bytes. The length of a memory file that is sealed against resizing never
/// changes.
///
/// # Errors
/// The error of `fstat`; `EOVERFLOW` for a negative length.
pub fn len_of(fd: BorrowedFd<'_>) -> Result<usize> {
    let len = call("fstat", || rustix::fs::fstat(fd))?.st_size;
    usize::try_from(len).map_err(|_| Error::Call { call: "fstat", errno: Errno::OVERFLOW })
}

fn create_empty(name: &str) -> Result<OwnedFd> {
    // Linux before 6.3 refuses the flag `MFD_NOEXEC_SEAL`. The refusal is remembered, so that later calls do not pass
    // the flag.
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

/// Binds a memory file to a NUMA node. The policy of a shared mapping of the file belongs to the file and applies to
/// pages that are allocated later, so this function is called before `fill`.
fn bind_to_node(fd: &OwnedFd, len: usize, node: u32) -> Result<()> {
    call("ftruncate", || rustix::fs::ftruncate(fd, len as u64))?;
    let map = SharedMap::map_file(fd.as_fd(), len, Protection::None)?;
    // SAFETY: the range is `map`, which was created in the line above and which no other code uses.
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
