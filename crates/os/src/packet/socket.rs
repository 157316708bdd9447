//! One end of a packet socket connection (`SOCK_SEQPACKET`), which carries packets and file descriptors.

use std::ffi::c_int;
use std::io::{IoSlice, IoSliceMut};
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::FdFlags;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, sockopt,
};

use crate::call::{call, call_libc};
use crate::{Deadline, Errno, Error, PidFd, Result};

/// The maximum length of a packet in bytes. The default buffer of a socket holds three packets of this length, and
/// refuses one of 256 KiB.
pub const MAX_PACKET: usize = 68 << 10;

/// The maximum number of file descriptors in one packet. The kernel's limit is 253.
pub const MAX_FDS: usize = 64;

/// The size of the control message buffer for a packet with the maximum number of file descriptors. Because of
/// alignment it is slightly larger than necessary.
const CONTROL_SPACE: usize = rustix::cmsg_space!(ScmRights(MAX_FDS));

/// One end of a `SOCK_SEQPACKET` connection: packets have boundaries and can carry file descriptors.
///
/// Threads may share it: every packet is sent and received atomically.
///
/// ```
/// use wholemem_os::{Deadline, Error, PacketSocket};
///
/// let (here, there) = PacketSocket::pair()?;
/// here.send(b"one", &[], Deadline::NEVER)?;
/// here.send(b"three", &[], Deadline::NEVER)?;
///
/// let mut buffer = [0; 16];
/// assert_eq!(there.recv(&mut buffer, Deadline::NEVER)?, 3);
/// assert_eq!(there.recv(&mut buffer, Deadline::NEVER)?, 5);
/// assert_eq!(there.recv(&mut buffer, Deadline::NOW), Err(Error::TimedOut));
/// # Ok::<(), Error>(())
/// ```
#[doc(alias = "SOCK_SEQPACKET")]
#[derive(Debug)]
pub struct PacketSocket(OwnedFd);

/// A received packet with its file descriptors, which are closed on drop.
pub(super) struct ReceivedPacket {
    pub(super) len: usize,
    pub(super) fds: Vec<OwnedFd>,
    /// True if file descriptors of the packet were lost, because there were more than `max_fds` or than this process
    /// may open.
    pub(super) lost: bool,
    pub(super) max_fds: usize,
}

impl PacketSocket {
    /// Creates a connected pair of packet sockets.
    #[doc(alias = "socketpair")]
    pub fn pair() -> Result<(Self, Self)> {
        let (a, b) = call("socketpair", || {
            let flags = SocketFlags::CLOEXEC;
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        })?;
        Ok((Self(a), Self(b)))
    }

    /// Converts a received descriptor to a packet socket, after checking that it refers to one, and sets
    /// close-on-exec.
    #[doc(alias = "SO_TYPE")]
    pub fn adopt(fd: OwnedFd) -> Result<Self> {
        const WRONG: Error = Error::WrongDescriptor { expected: "a packet socket" };
        let kind = match call("getsockopt", || sockopt::socket_type(&fd)) {
            Err(Error::Call { errno: Errno::NOTSOCK, .. }) => return Err(WRONG),
            answer => answer?,
        };
        let family = call("getsockopt", || sockopt::socket_domain(&fd))?;
        if (kind, family) != (SocketType::SEQPACKET, AddressFamily::UNIX) {
            return Err(WRONG);
        }
        call("fcntl", || rustix::io::fcntl_setfd(&fd, FdFlags::CLOEXEC))?;
        Ok(Self(fd))
    }

    /// Wraps the descriptor of a packet socket that this module created.
    pub(super) fn from_kernel(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Sends one packet of 1 to [`MAX_PACKET`] bytes with at most [`MAX_FDS`] file descriptors, which stay open in
    /// this process.
    ///
    /// Unread packets are buffered in the socket; the send waits if about 200 KiB are buffered.
    #[doc(alias = "SCM_RIGHTS")]
    #[doc(alias = "sendmsg")]
    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>], deadline: Deadline) -> Result<()> {
        self.send_parts(&[IoSlice::new(bytes)], fds, deadline)
    }

    /// Sends a packet like [`PacketSocket::send`], from several byte slices.
    pub fn send_parts(
        &self,
        parts: &[IoSlice<'_>],
        fds: &[BorrowedFd<'_>],
        deadline: Deadline,
    ) -> Result<()> {
        let too_many = Error::TooManyFds { count: fds.len(), limit: MAX_FDS };
        match (parts.iter().map(|part| part.len()).sum(), fds.len()) {
            (0, _) => return Err(Error::EmptyPacket),
            (len, _) if len > MAX_PACKET => return Err(Error::PacketTooLong { len, limit: MAX_PACKET }),
            (_, count) if count > MAX_FDS => return Err(too_many),
            _ => {}
        }
        let mut space = [MaybeUninit::uninit(); CONTROL_SPACE];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(too_many);
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        self.attempt(PollFlags::OUT, deadline, || {
            match call("sendmsg", || rustix::net::sendmsg(&self.0, parts, &mut control, flags)) {
                Err(Error::Call { errno: Errno::PIPE | Errno::CONNRESET, .. }) => Err(Error::Closed),
                sent => sent.map(drop),
            }
        })
    }

    /// Receives one packet that carries no file descriptors, and returns its length.
    ///
    /// Descriptors that the peer sends nevertheless are never installed in this process and are an error, so an
    /// untrusted peer cannot fill the descriptor table.
    #[doc(alias = "recvmsg")]
    pub fn recv(&self, buffer: &mut [u8], deadline: Deadline) -> Result<usize> {
        self.receive(buffer, 0, deadline)?.whole().map(|(len, _)| len)
    }

    /// Receives one packet with at most `max_fds` file descriptors, and returns its length and the descriptors.
    ///
    /// If the packet has more descriptors than `max_fds`, or than this process may open, it is an error, and those
    /// that arrived are closed. No packet carries more than [`MAX_FDS`].
    #[doc(alias = "SCM_RIGHTS")]
    #[doc(alias = "MSG_CMSG_CLOEXEC")]
    pub fn recv_with_fds(
        &self,
        buffer: &mut [u8],
        max_fds: usize,
        deadline: Deadline,
    ) -> Result<(usize, Vec<OwnedFd>)> {
        self.receive(buffer, max_fds.min(MAX_FDS), deadline)?.whole()
    }

    /// Returns a pidfd of the peer process: the one that connected, listened or called [`pair`](Self::pair), which is
    /// not necessarily the process that holds the socket now.
    ///
    /// Kernels before 6.5 return only its process id; if the peer has exited and its id was reused, the pidfd refers
    /// to another process.
    #[doc(alias = "SO_PEERPIDFD")]
    #[doc(alias = "SO_PEERCRED")]
    pub fn peer_pidfd(&self) -> Result<PidFd> {
        match self.option::<1>(libc::SO_PEERPIDFD) {
            // SAFETY: `getsockopt` has just created `fd`, and no other code owns it.
            Ok([fd]) => Ok(PidFd::from_kernel(unsafe { OwnedFd::from_raw_fd(fd) })),
            Err(Error::Call { errno: Errno::NOPROTOOPT, .. }) => self.peer_pidfd_by_pid(),
            Err(error) => Err(error),
        }
    }

    /// Returns the user id that the peer process had when the connection was established, or the kernel's overflow id
    /// if the user is not mapped in this user namespace.
    #[doc(alias = "SO_PEERCRED")]
    pub fn peer_uid(&self) -> Result<u32> {
        let [_pid, uid, _gid] = self.option::<3>(libc::SO_PEERCRED)?;
        Ok(uid.cast_unsigned())
    }

    /// Returns whether the peer has closed the connection. Packets that the peer sent before may still be readable.
    ///
    /// # Errors
    /// The error of `poll`.
    pub fn is_closed(&self) -> Result<bool> {
        let mut watched = [PollFd::new(&self.0, PollFlags::empty())];
        let now = Deadline::NOW.timeout();
        call("poll", || poll(&mut watched, now.as_ref()))?;
        Ok(watched[0].revents().contains(PollFlags::HUP))
    }

    /// Shuts down the sending half of the connection: the peer reads the packets sent before, and then the end of the
    /// connection. This end still detects that the peer closes the connection.
    #[doc(alias = "SHUT_WR")]
    pub fn shut_down_sending(&self) -> Result<()> {
        call("shutdown", || rustix::net::shutdown(&self.0, rustix::net::Shutdown::Write))
    }

    /// Limits the number of bytes that the kernel buffers until the peer receives them. The kernel buffers up to
    /// twice as many, including its own overhead, and refuses longer packets.
    #[doc(alias = "SO_SNDBUF")]
    pub fn limit_unreceived(&self, bytes: usize) -> Result<()> {
        call("setsockopt", || sockopt::set_socket_send_buffer_size(&self.0, bytes))
    }

    fn peer_pidfd_by_pid(&self) -> Result<PidFd> {
        // rustix's `UCred` is not used, since its process id must not be zero: the kernel returns zero for a process
        // outside of this PID namespace.
        let [pid, _uid, _gid] = self.option::<3>(libc::SO_PEERCRED)?;
        PidFd::open(pid.cast_unsigned())
    }

    /// Reads a socket option that consists of `N` ints.
    fn option<const N: usize>(&self, name: c_int) -> Result<[c_int; N]> {
        let mut value = [0; N];
        let mut len = libc::socklen_t::try_from(size_of::<[c_int; N]>()).expect("a few ints");
        let expected = len;
        call_libc("getsockopt", || {
            let (to, fd) = (value.as_mut_ptr().cast(), self.0.as_raw_fd());
            // SAFETY: `to` points to `len` writable bytes, the ints in `value`, for which every bit pattern is valid.
            let code = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, name, to, &raw mut len) };
            code.into()
        })?;
        if len == expected { Ok(value) } else { Err(Error::Call { call: "getsockopt", errno: Errno::INVAL }) }
    }

    pub(super) fn receive(
        &self,
        buffer: &mut [u8],
        max_fds: usize,
        deadline: Deadline,
    ) -> Result<ReceivedPacket> {
        self.attempt(PollFlags::IN, deadline, || self.receive_now(buffer, max_fds))
    }

    fn receive_now(&self, buffer: &mut [u8], max_fds: usize) -> Result<ReceivedPacket> {
        let size = buffer.len();
        let mut space = [MaybeUninit::uninit(); CONTROL_SPACE];
        // Without a control message buffer, `recvmsg` installs no file descriptors in this process.
        let used = if max_fds == 0 { 0 } else { rustix::cmsg_space!(ScmRights(max_fds)) };
        let mut control = RecvAncillaryBuffer::new(&mut space[..used]);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC | RecvFlags::TRUNC;
        let message = call("recvmsg", || {
            rustix::net::recvmsg(&self.0, &mut [IoSliceMut::new(buffer)], &mut control, flags)
        })?;
        let fds: Vec<OwnedFd> = control
            .drain()
            .filter_map(|part| if let RecvAncillaryMessage::ScmRights(fds) = part { Some(fds) } else { None })
            .flatten()
            .collect();
        // Because of its alignment, the control message buffer can hold a few file descriptors more than `max_fds`.
        let lost = message.flags.contains(ReturnFlags::CTRUNC) || fds.len() > max_fds;
        match message.bytes {
            0 => Err(Error::Closed),
            len if len > size => Err(Error::PacketTruncated { len, capacity: size }),
            len => Ok(ReceivedPacket { len, fds, lost, max_fds }),
        }
    }

    /// Repeats a non-blocking call on the socket until it succeeds or fails, and polls the socket between the
    /// attempts.
    fn attempt<T>(
        &self,
        readiness: PollFlags,
        deadline: Deadline,
        mut once: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        loop {
            match once() {
                // If the peer closed the socket with unread packets, `recvmsg` fails once with ECONNRESET, before it
                // returns the packets that the peer sent and then the end of the connection.
                Err(Error::Call { errno: Errno::INTR | Errno::CONNRESET, .. }) => {}
                Err(Error::Call { errno: Errno::AGAIN, .. }) => self.wait(readiness, deadline)?,
                outcome => return outcome,
            }
        }
    }

    fn wait(&self, readiness: PollFlags, deadline: Deadline) -> Result<()> {
        if deadline.has_passed() {
            return Err(Error::TimedOut);
        }
        let timeout = deadline.timeout();
        let mut watched = [PollFd::new(&self.0, readiness)];
        match call("poll", || poll(&mut watched, timeout.as_ref())) {
            Err(Error::Call { errno: Errno::INTR, .. }) => Ok(()),
            woken => woken.map(drop),
        }
    }
}

impl ReceivedPacket {
    fn whole(self) -> Result<(usize, Vec<OwnedFd>)> {
        if self.lost { Err(Error::FdsTruncated { capacity: self.max_fds }) } else { Ok((self.len, self.fds)) }
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<PacketSocket> for OwnedFd {
    fn from(socket: PacketSocket) -> Self {
        socket.0
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use rustix::net::{Shutdown, SocketAddrUnix};
    use rustix::pipe::{PipeFlags, pipe_with};
    use rustix::process::{Resource, getrlimit, setrlimit};

    use super::*;
    use crate::fork::child;

    /// Returns a deadline that passes only if a test hangs.
    fn test_deadline() -> Deadline {
        Deadline::after(Duration::from_secs(60))
    }

    fn pair() -> (PacketSocket, PacketSocket) {
        PacketSocket::pair().expect("two sockets")
    }

    /// Creates a pipe. Its reading end shows when the last copy of its writing end is closed.
    fn pipe() -> (OwnedFd, OwnedFd) {
        pipe_with(PipeFlags::CLOEXEC).expect("a pipe")
    }

    /// Returns whether the writing end of a pipe is closed. The function waits for that, since a child that another
    /// test forks may briefly hold a copy.
    fn is_closed(reader: &OwnedFd) -> bool {
        let mut watched = [PollFd::new(reader, PollFlags::IN)];
        let timeout = test_deadline().timeout();
        poll(&mut watched, timeout.as_ref()).expect("poll") == 1
            && watched[0].revents().contains(PollFlags::HUP)
    }

    #[test]
    fn packets_keep_their_boundaries_up_to_the_maximum_length() {
        let (a, b) = pair();
        for len in [1, 2, 4095, MAX_PACKET] {
            let sent: Vec<u8> = (0..=u8::MAX).cycle().take(len).collect();
            a.send(&sent, &[], test_deadline()).expect("send");
            let mut buffer = vec![0; MAX_PACKET];
            assert_eq!(b.recv(&mut buffer, test_deadline()), Ok(len));
            assert_eq!(&buffer[..len], sent);
        }
    }

    #[test]
    fn an_invalid_packet_is_refused_before_any_system_call() {
        let (a, b) = pair();
        let fds = [a.as_fd(); MAX_FDS + 1];
        let long = vec![0; MAX_PACKET + 1];
        assert_eq!(a.send(&[], &[], test_deadline()), Err(Error::EmptyPacket));
        let error = Error::PacketTooLong { len: MAX_PACKET + 1, limit: MAX_PACKET };
        assert_eq!(a.send(&long, &[], test_deadline()), Err(error));
        let error = Error::TooManyFds { count: MAX_FDS + 1, limit: MAX_FDS };
        assert_eq!(a.send(b"x", &fds, test_deadline()), Err(error));
        assert_eq!(b.recv(&mut [0; 8], Deadline::NOW), Err(Error::TimedOut));
    }

    #[test]
    fn receiving_a_packet_longer_than_the_buffer_reports_its_length() {
        let (a, b) = pair();
        a.send(&[7; 1000], &[], test_deadline()).expect("send");
        let error = Error::PacketTruncated { len: 1000, capacity: 10 };
        assert_eq!(b.recv(&mut [0; 10], test_deadline()), Err(error));
        a.send(&[7; 3], &[], test_deadline()).expect("send");
        assert_eq!(b.recv(&mut [], test_deadline()), Err(Error::PacketTruncated { len: 3, capacity: 0 }));
    }

    #[test]
    fn a_packet_with_the_maximum_of_descriptors_arrives_in_order_and_close_on_exec() {
        let (a, b) = pair();
        let (reader, writer) = pipe();
        let sent: Vec<BorrowedFd<'_>> =
            (0..MAX_FDS).map(|n| if n == 3 { writer.as_fd() } else { reader.as_fd() }).collect();
        a.send(b"fds", &sent, test_deadline()).expect("send");
        let (len, fds) = b.recv_with_fds(&mut [0; 8], MAX_FDS, test_deadline()).expect("receive");
        assert_eq!((len, fds.len()), (3, MAX_FDS));
        for (fd, original) in fds.iter().zip(&sent) {
            assert_eq!(rustix::io::fcntl_getfd(fd), Ok(FdFlags::CLOEXEC));
            assert_eq!(rustix::fs::fcntl_getfl(fd), rustix::fs::fcntl_getfl(original));
        }
    }

    #[test]
    fn more_descriptors_than_expected_are_an_error_and_all_are_closed() {
        // The control message buffer for one descriptor has alignment space for three more descriptors, which must
        // not be accepted.
        for (capacity, count) in [(0, 1), (0, 64), (1, 2), (1, 4), (1, 5), (2, 3), (63, 64)] {
            let (a, b) = pair();
            let (reader, writer) = pipe();
            a.send(b"x", &vec![writer.as_fd(); count], test_deadline()).expect("send");
            drop(writer);
            let received = b.recv_with_fds(&mut [0; 8], capacity, test_deadline()).map(|(len, _)| len);
            assert_eq!(received, Err(Error::FdsTruncated { capacity }), "{count} sent, {capacity} expected");
            assert!(is_closed(&reader), "{count} sent, {capacity} expected");
        }
    }

    #[test]
    fn recv_refuses_descriptors() {
        let (a, b) = pair();
        let (reader, writer) = pipe();
        a.send(b"x", &[writer.as_fd()], test_deadline()).expect("send");
        drop(writer);
        assert_eq!(b.recv(&mut [0; 8], test_deadline()), Err(Error::FdsTruncated { capacity: 0 }));
        assert!(is_closed(&reader));
    }

    #[test]
    fn descriptors_of_a_packet_that_is_too_long_are_closed() {
        let (a, b) = pair();
        let (reader, writer) = pipe();
        a.send(b"long", &[writer.as_fd()], test_deadline()).expect("send");
        drop(writer);
        let error = Error::PacketTruncated { len: 4, capacity: 2 };
        assert_eq!(b.recv_with_fds(&mut [0; 2], 1, test_deadline()).map(drop), Err(error));
        assert!(is_closed(&reader));
    }

    #[test]
    fn descriptors_above_the_process_limit_are_an_error_and_all_are_closed() {
        let (a, b) = pair();
        let (_reader, writer) = pipe();
        a.send(b"x", &[writer.as_fd(); 3], test_deadline()).expect("send");
        // The test lowers the limit on open files in a child process, since the limit applies to a whole process.
        let status = child::fork(|| {
            let free = || rustix::io::dup(&writer).map(|fd| fd.as_raw_fd());
            let Ok(lowest) = free() else { return 1 };
            let mut limit = getrlimit(Resource::Nofile);
            limit.current = u64::try_from(lowest + 1).ok();
            if setrlimit(Resource::Nofile, limit).is_err() {
                return 2;
            }
            let received = b.recv_with_fds(&mut [0; 8], 3, Deadline::NOW).map(drop);
            match (received == Err(Error::FdsTruncated { capacity: 3 }), free() == Ok(lowest)) {
                (true, true) => 0,
                (false, _) => 3,
                (true, false) => 4,
            }
        })
        .wait();
        assert_eq!(status, child::ExitStatus::Exited(0));
    }

    #[test]
    fn receiving_from_an_empty_and_sending_to_a_full_socket_time_out() {
        let (a, b) = pair();
        let soon = || Deadline::after(Duration::from_millis(1));
        assert_eq!(b.recv(&mut [0; 8], Deadline::NOW), Err(Error::TimedOut));
        assert_eq!(b.recv(&mut [0; 8], soon()), Err(Error::TimedOut));
        let full = std::iter::repeat_with(|| a.send(&[0; 4096], &[], Deadline::NOW)).find(Result::is_err);
        assert_eq!(full, Some(Err(Error::TimedOut)));
        assert_eq!(a.send(&[0; 4096], &[], soon()), Err(Error::TimedOut));
    }

    #[test]
    fn a_send_to_a_full_socket_resumes_when_it_is_drained() {
        let (a, b) = pair();
        const COUNT: usize = 300;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for n in 0..COUNT {
                    a.send(&vec![0; 4096 + n], &[], test_deadline()).expect("send");
                }
            });
            let mut buffer = vec![0; MAX_PACKET];
            for n in 0..COUNT {
                assert_eq!(b.recv(&mut buffer, test_deadline()), Ok(4096 + n));
            }
        });
    }

    #[test]
    fn a_closed_connection_is_closed_in_both_directions() {
        let (a, b) = pair();
        // `shutdown` is called instead of dropping `b`, because a child that another test forks may hold a copy of
        // the descriptor.
        assert_eq!(a.is_closed(), Ok(false));
        rustix::net::shutdown(&b, Shutdown::Both).expect("shutdown");
        assert_eq!(a.is_closed(), Ok(true));
        assert_eq!(a.recv(&mut [0; 8], test_deadline()), Err(Error::Closed));
        assert_eq!(a.send(b"x", &[], test_deadline()), Err(Error::Closed));
    }

    #[test]
    fn packets_sent_before_the_peer_closed_without_reading_still_arrive() {
        let (a, b) = pair();
        a.send(b"never read", &[], test_deadline()).expect("send");
        b.send(b"last words", &[], test_deadline()).expect("send");
        drop(b);
        let mut watched = [PollFd::new(&a, PollFlags::empty())];
        let timeout = test_deadline().timeout();
        assert_eq!(poll(&mut watched, timeout.as_ref()), Ok(1), "the peer has closed");
        let mut buffer = [0; 16];
        assert_eq!(a.recv(&mut buffer, test_deadline()), Ok(10));
        assert_eq!(&buffer[..10], b"last words");
        assert_eq!(a.recv(&mut buffer, test_deadline()), Err(Error::Closed));
    }

    #[test]
    fn adopt_accepts_packet_sockets_only() {
        let wrong = || Some(Error::WrongDescriptor { expected: "a packet socket" });
        let stream = |family, kind| rustix::net::socket(family, kind, None).expect("a socket");
        assert_eq!(PacketSocket::adopt(pipe().0).err(), wrong());
        assert_eq!(PacketSocket::adopt(stream(AddressFamily::UNIX, SocketType::STREAM)).err(), wrong());
        assert_eq!(PacketSocket::adopt(stream(AddressFamily::UNIX, SocketType::DGRAM)).err(), wrong());
        assert_eq!(PacketSocket::adopt(stream(AddressFamily::INET, SocketType::STREAM)).err(), wrong());

        let (a, b) = pair();
        let fd = OwnedFd::from(a);
        rustix::io::fcntl_setfd(&fd, FdFlags::empty()).expect("fcntl");
        let a = PacketSocket::adopt(fd).expect("a packet socket");
        assert_eq!(rustix::io::fcntl_getfd(&a), Ok(FdFlags::CLOEXEC));
        a.send(b"x", &[], test_deadline()).expect("send");
        assert_eq!(b.recv(&mut [0; 8], test_deadline()), Ok(1));
    }

    /// Returns the id of the process that a pidfd refers to, from `/proc/self/fdinfo`.
    fn pid_of(pidfd: &PidFd) -> String {
        let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_fd().as_raw_fd()));
        let info = info.expect("fdinfo");
        info.lines().find_map(|line| line.strip_prefix("Pid:\t")).expect("a pidfd").to_owned()
    }

    #[test]
    fn the_peer_is_identified_by_pidfd_and_by_process_id() {
        let (a, _b) = pair();
        let own = std::process::id().to_string();
        assert_eq!(pid_of(&a.peer_pidfd().expect("peer")), own);
        assert_eq!(pid_of(&a.peer_pidfd_by_pid().expect("peer")), own);
    }

    #[test]
    fn the_peer_of_an_accepted_connection_is_the_connecting_process() {
        let socket = || {
            let flags = SocketFlags::CLOEXEC;
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        };
        let name = format!("wholemem-os-peer-{}", std::process::id());
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).expect("a name");
        let listener = socket().expect("a socket");
        rustix::net::bind(&listener, &address).expect("bind");
        rustix::net::listen(&listener, 1).expect("listen");
        let child = child::fork(|| {
            let Ok(socket) = socket() else { return 1 };
            if rustix::net::connect(&socket, &address).is_err() {
                return 2;
            }
            child::sleep()
        });
        let accepted = rustix::net::accept_with(&listener, SocketFlags::CLOEXEC).expect("accept");
        let peer = PacketSocket::adopt(accepted).expect("adopt").peer_pidfd().expect("peer");
        assert_eq!(pid_of(&peer), child.id().to_string());
    }

    #[cfg(feature = "test-hooks")]
    #[test]
    fn if_any_call_fails_its_error_is_returned_and_nothing_stays_open() {
        for nth in 1.. {
            let (reader, writer) = pipe();
            let armed = crate::fault::arm(nth, Errno::NOMEM);
            let outcome = (|| {
                let (a, b) = PacketSocket::pair()?;
                let b = PacketSocket::adopt(b.into())?;
                a.send(b"x", &[writer.as_fd()], Deadline::NOW)?;
                b.recv_with_fds(&mut [0; 8], 1, Deadline::NOW)?;
                a.peer_pidfd().map(drop)
            })();
            let fired = armed.fired();
            drop(armed);
            drop(writer);
            assert!(is_closed(&reader));
            let Some(call) = fired else {
                assert_eq!((outcome, nth > 7), (Ok(()), true));
                break;
            };
            assert_eq!(outcome, Err(Error::Call { call, errno: Errno::NOMEM }));
        }
    }
}
