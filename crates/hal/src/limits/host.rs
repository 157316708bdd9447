//! Baseline system calls for host memory in benchmarks: create, send, map and access a memory file.

use std::ffi::c_void;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, MemfdFlags, Mode, SealFlags};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

use crate::Span;

/// Creates a memory file with the same calls as the host backend.
///
/// # Errors
/// Returns the kernel's error.
pub fn create(len: usize) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::NOEXEC_SEAL;
    let fd = match rustix::fs::memfd_create("wholemem", flags) {
        Err(rustix::io::Errno::INVAL) => {
            rustix::fs::memfd_create("wholemem", flags.difference(MemfdFlags::NOEXEC_SEAL))?
        }
        fd => fd?,
    };
    rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, len as u64)?;
    rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(fd)
}

/// Duplicates the descriptor of a memory file for another process.
///
/// # Errors
/// Returns the kernel's error.
pub fn export(file: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(file, 3)?)
}

/// Makes the system calls with which the host backend checks a received descriptor, and ignores their results.
///
/// # Errors
/// Returns the kernel's error.
pub fn inspect(file: BorrowedFd<'_>) -> io::Result<()> {
    rustix::fs::fcntl_get_seals(file)?;
    rustix::fs::fstat(file)?;
    rustix::fs::fstatfs(file)?;
    rustix::fs::fcntl_getfl(file)?;
    Ok(())
}

/// A mapping of a memory file with read and write access.
#[derive(Debug)]
pub struct HostMap {
    at: *mut c_void,
    len: usize,
}

impl HostMap {
    /// Reserves addresses, maps the memory file there and sets the access rights, with three system calls.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn create(file: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        let (none, reserve) = (ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: without a fixed address the kernel picks a free range, so no mapping is replaced.
        let at = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len, none, reserve) }?;
        let map = Self { at, len };
        // SAFETY: the range was reserved above, and no other code uses it.
        unsafe { rustix::mm::mmap(at, len, none, MapFlags::SHARED | MapFlags::FIXED, file, 0) }?;
        // SAFETY: no other code uses the range before this function returns it.
        unsafe { rustix::mm::mprotect(at, len, MprotectFlags::READ | MprotectFlags::WRITE) }?;
        Ok(map)
    }

    /// Reads the first and the last byte of the mapping.
    #[must_use]
    pub fn ends(&self) -> [u8; 2] {
        let first = self.at.cast::<u8>();
        // SAFETY: the mapping has `len` bytes and is not empty: the kernel refuses an empty one.
        let last = unsafe { first.add(self.len - 1) };
        // SAFETY: `first` is the first byte of the mapping, which is readable while `self` lives.
        let first = unsafe { first.read_volatile() };
        // SAFETY: `last` is the last byte of the mapping, which is readable while `self` lives.
        [first, unsafe { last.read_volatile() }]
    }

    /// Writes the first and the last byte of the mapping.
    pub fn set_ends(&self, [first, last]: [u8; 2]) {
        let at = self.at.cast::<u8>();
        // SAFETY: the mapping has `len` bytes, of which there is at least one.
        let end = unsafe { at.add(self.len - 1) };
        // SAFETY: `at` is the first byte of the mapping, which is writable while `self` lives.
        unsafe { at.write_volatile(first) };
        // SAFETY: `end` is the last byte of the mapping, which is writable while `self` lives.
        unsafe { end.write_volatile(last) };
    }
}

impl Drop for HostMap {
    fn drop(&mut self) {
        // SAFETY: this `HostMap` owns the range; an error of the kernel cannot be handled in a destructor.
        let _ = unsafe { rustix::mm::munmap(self.at, self.len) };
    }
}

/// Sends bytes and a file descriptor in one packet.
///
/// # Errors
/// Returns the kernel's error.
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8], file: BorrowedFd<'_>) -> io::Result<()> {
    let files = [file];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&files));
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives a packet that should carry a file descriptor.
///
/// # Errors
/// Returns the kernel's error; [`io::ErrorKind::UnexpectedEof`] at the end of the connection.
pub fn recv(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags)?;
    if received.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let file = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    Ok((received.bytes, file))
}

/// Returns the shortest time of several `memcpy` calls between two spans; `None` if the CPU cannot address them.
pub(super) fn best_copy(to: &Span, from: &Span, times: u32) -> Option<Duration> {
    let (target, source) = (to.at().to_host()?, from.at().to_host()?);
    let copy = || {
        let start = Instant::now();
        // SAFETY: the spans hold their mapped memory, and the caller has checked that they are equally long and do
        // not overlap. The benchmark guarantees that no other code writes them meanwhile.
        unsafe { source.copy_to_nonoverlapping(target, to.len()) };
        start.elapsed()
    };
    (0..times).map(|_| copy()).min()
}

/// Creates and maps a memory file, as the baseline of allocation benchmarks.
///
/// # Errors
/// Returns the kernel's error.
pub fn create_and_map(len: usize) -> io::Result<(OwnedFd, HostMap)> {
    let file = create(len)?;
    let map = HostMap::create(file.as_fd(), len)?;
    Ok((file, map))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_memory_file_is_created_sent_received_and_mapped() {
        let (here, there) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        let (file, map) = create_and_map(8192).unwrap();
        assert_eq!(map.ends(), [0, 0]);
        map.set_ends([3, 4]);
        send(here.as_fd(), b"x", export(file.as_fd()).unwrap().as_fd()).unwrap();
        let (len, received) = recv(there.as_fd(), &mut [0; 8]).unwrap();
        let received = received.unwrap();
        inspect(received.as_fd()).unwrap();
        assert_eq!((len, HostMap::create(received.as_fd(), 8192).unwrap().ends()), (1, [3, 4]));
        drop(here);
        assert_eq!(recv(there.as_fd(), &mut [0; 8]).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
