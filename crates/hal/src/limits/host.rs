//! The raw calls of host memory: a memory file created, sent, mapped and touched.

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

/// A memory file, created as this crate creates them.
///
/// # Errors
/// What the kernel said.
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

/// A descriptor for another process.
///
/// # Errors
/// What the kernel said.
pub fn export(file: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(file, 3)?)
}

/// The checks on a received descriptor, with their answers thrown away.
///
/// # Errors
/// What the kernel said.
pub fn inspect(file: BorrowedFd<'_>) -> io::Result<()> {
    rustix::fs::fcntl_get_seals(file)?;
    rustix::fs::fstat(file)?;
    rustix::fs::fstatfs(file)?;
    rustix::fs::fcntl_getfl(file)?;
    Ok(())
}

/// A file mapped for reading and writing into addresses reserved for it.
#[derive(Debug)]
pub struct RawMap {
    at: *mut c_void,
    len: usize,
}

impl RawMap {
    /// Reserves, maps and gives access: three calls.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn create(file: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        let (none, reserve) = (ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: without a fixed address the kernel picks a free range.
        let at = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len, none, reserve) }?;
        let map = Self { at, len };
        // SAFETY: the range was reserved in the lines above.
        unsafe { rustix::mm::mmap(at, len, none, MapFlags::SHARED | MapFlags::FIXED, file, 0) }?;
        // SAFETY: the range is this map's own, which no code uses before this function returns it.
        unsafe { rustix::mm::mprotect(at, len, MprotectFlags::READ | MprotectFlags::WRITE) }?;
        Ok(map)
    }

    /// The first byte and the last.
    #[must_use]
    pub fn ends(&self) -> [u8; 2] {
        let first = self.at.cast::<u8>();
        // SAFETY: the map is `len` bytes long, and not empty: an empty one cannot be made.
        let last = unsafe { first.add(self.len - 1) };
        // SAFETY: the map is readable as long as `self` lives.
        let first = unsafe { first.read_volatile() };
        // SAFETY: `last` is the last byte of the map, which is readable as long as `self` lives.
        [first, unsafe { last.read_volatile() }]
    }

    /// Sets the first byte and the last.
    pub fn set_ends(&self, [first, last]: [u8; 2]) {
        let at = self.at.cast::<u8>();
        // SAFETY: the map is `len` bytes long, and not empty.
        let end = unsafe { at.add(self.len - 1) };
        // SAFETY: the map is writable as long as `self` lives.
        unsafe { at.write_volatile(first) };
        // SAFETY: `end` is the last byte of the map, which is writable as long as `self` lives.
        unsafe { end.write_volatile(last) };
    }
}

impl Drop for RawMap {
    fn drop(&mut self) {
        // SAFETY: the range is this map's own; nothing is left to do if the kernel refuses.
        let _ = unsafe { rustix::mm::munmap(self.at, self.len) };
    }
}

/// Sends bytes and a descriptor in one packet.
///
/// # Errors
/// What the kernel said.
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8], file: BorrowedFd<'_>) -> io::Result<()> {
    let files = [file];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&files));
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Waits for a packet, which should carry a descriptor.
///
/// # Errors
/// What the kernel said; [`io::ErrorKind::UnexpectedEof`] at the end of the connection.
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

/// The shortest of several copies by the C library, which is what a program would use without us.
pub(super) fn best_copy(to: &Span, from: &Span, times: u32) -> Option<Duration> {
    let (target, source) = (to.at().to_host()?, from.at().to_host()?);
    let copy = || {
        let start = Instant::now();
        // SAFETY: the spans are mapped and held, as long as each other, and do not overlap: the caller checked. That
        // nobody writes them meanwhile is the benchmark's own business.
        unsafe { source.copy_to_nonoverlapping(target, to.len()) };
        start.elapsed()
    };
    (0..times).map(|_| copy()).min()
}

/// Creates memory and maps it: what a benchmark of allocation measures against.
///
/// # Errors
/// What the kernel said.
pub fn create_and_map(len: usize) -> io::Result<(OwnedFd, RawMap)> {
    let file = create(len)?;
    let map = RawMap::create(file.as_fd(), len)?;
    Ok((file, map))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_created_is_sent_mapped_and_touched() {
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
        assert_eq!((len, RawMap::create(received.as_fd(), 8192).unwrap().ends()), (1, [3, 4]));
        drop(here);
        assert_eq!(recv(there.as_fd(), &mut [0; 8]).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
