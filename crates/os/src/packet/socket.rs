//! One end of a connection that carries packets, with their file descriptors, one at a time.

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

/// The longest packet, in bytes. A socket's default buffer takes three of them, and refuses 256 KiB.
pub const MAX_PACKET: usize = 68 << 10;

/// The most file descriptors in one packet. The kernel's own limit is 253.
pub const MAX_FDS: usize = 64;

/// Room for the control message of a full packet. It comes out a little larger than that, for alignment.
const CONTROL_SPACE: usize = rustix::cmsg_space!(ScmRights(MAX_FDS));

/// One end of a connection whose packets keep their boundaries and carry file descriptors.
///
/// Threads may share it: every packet is sent and received as one.
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

/// A packet as it came. Its descriptors close with it.
pub(super) struct Received {
    pub(super) len: usize,
    pub(super) fds: Vec<OwnedFd>,
    /// Whether descriptors of this packet did not fit the room, or this process's table.
    pub(super) lost: bool,
    pub(super) room: usize,
}

impl PacketSocket {
    /// Makes two ends of a new connection.
    #[doc(alias = "socketpair")]
    pub fn pair() -> Result<(Self, Self)> {
        let (a, b) = call("socketpair", || {
            let flags = SocketFlags::CLOEXEC;
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        })?;
        Ok((Self(a), Self(b)))
    }

    /// Takes a connected socket that came from elsewhere, after looking that it is one of packets, and marks it
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

    /// Takes a socket that this module has just made.
    pub(super) fn trust(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Sends one packet of 1 to [`MAX_PACKET`] bytes with at most [`MAX_FDS`] file descriptors, which stay open
    /// here too.
    ///
    /// With no reader, packets wait in the socket, and the send waits when about 200 KiB are there.
    #[doc(alias = "SCM_RIGHTS")]
    #[doc(alias = "sendmsg")]
    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>], deadline: Deadline) -> Result<()> {
        self.send_parts(&[IoSlice::new(bytes)], fds, deadline)
    }

    /// Like [`PacketSocket::send`], with a packet whose parts lie in several places.
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

    /// Receives one packet that carries no file descriptors, and says how long it is.
    ///
    /// Descriptors that come all the same are never installed in this process, and are an error: this is how to
    /// listen to a peer that is not to be trusted with the descriptor table.
    #[doc(alias = "recvmsg")]
    pub fn recv(&self, buffer: &mut [u8], deadline: Deadline) -> Result<usize> {
        self.receive(buffer, 0, deadline)?.whole().map(|(len, _)| len)
    }

    /// Receives one packet with at most `room` file descriptors, and says how long it is.
    ///
    /// More than `room` descriptors, or more than this process may open, are an error, and those that did arrive
    /// are closed. No packet carries more than [`MAX_FDS`].
    #[doc(alias = "SCM_RIGHTS")]
    #[doc(alias = "MSG_CMSG_CLOEXEC")]
    pub fn recv_with_fds(
        &self,
        buffer: &mut [u8],
        room: usize,
        deadline: Deadline,
    ) -> Result<(usize, Vec<OwnedFd>)> {
        self.receive(buffer, room.min(MAX_FDS), deadline)?.whole()
    }

    /// The process at the other end: the one that connected, listened or called [`pair`](Self::pair), which is
    /// not always the one that holds the socket now.
    ///
    /// Kernels before 6.5 know only its number, and there a peer that has already died may be confused with a
    /// newer process of that number.
    #[doc(alias = "SO_PEERPIDFD")]
    #[doc(alias = "SO_PEERCRED")]
    pub fn peer_pidfd(&self) -> Result<PidFd> {
        match self.option::<1>(libc::SO_PEERPIDFD) {
            // SAFETY: the kernel has just made this descriptor for us, and nobody else knows it.
            Ok([fd]) => Ok(PidFd::trust(unsafe { OwnedFd::from_raw_fd(fd) })),
            Err(Error::Call { errno: Errno::NOPROTOOPT, .. }) => self.peer_pidfd_by_number(),
            Err(error) => Err(error),
        }
    }

    /// The user at the other end, as it was when the connection was made; the kernel's overflow number when it is
    /// one that our user namespace does not know.
    #[doc(alias = "SO_PEERCRED")]
    pub fn peer_uid(&self) -> Result<u32> {
        let [_pid, uid, _gid] = self.option::<3>(libc::SO_PEERCRED)?;
        Ok(uid.cast_unsigned())
    }

    /// Whether nobody is at the other end any more. What was sent before may still be there to be read.
    ///
    /// # Errors
    /// What `poll` said.
    pub fn is_closed(&self) -> Result<bool> {
        let mut watched = [PollFd::new(&self.0, PollFlags::empty())];
        let now = Deadline::NOW.timeout();
        call("poll", || poll(&mut watched, now.as_ref()))?;
        Ok(watched[0].revents().contains(PollFlags::HUP))
    }

    /// Ends the sending half: the other end reads what was sent before, and then the end of the connection. That the other
    /// end has closed the connection is still noticed here.
    #[doc(alias = "SHUT_WR")]
    pub fn shut_down_sending(&self) -> Result<()> {
        call("shutdown", || rustix::net::shutdown(&self.0, rustix::net::Shutdown::Write))
    }

    /// Limits what the kernel holds of packets that the other end has not received yet. It holds up to twice as many bytes,
    /// its own books included, and refuses packets that are longer.
    #[doc(alias = "SO_SNDBUF")]
    pub fn limit_unreceived(&self, bytes: usize) -> Result<()> {
        call("setsockopt", || sockopt::set_socket_send_buffer_size(&self.0, bytes))
    }

    fn peer_pidfd_by_number(&self) -> Result<PidFd> {
        // rustix's `UCred` cannot be used: its process id must not be zero, and the kernel answers zero for a
        // process that our PID namespace cannot see.
        let [pid, _uid, _gid] = self.option::<3>(libc::SO_PEERCRED)?;
        PidFd::open(pid.cast_unsigned())
    }

    /// Reads a socket option that is made of `N` ints.
    fn option<const N: usize>(&self, name: c_int) -> Result<[c_int; N]> {
        let mut value = [0; N];
        let mut len = libc::socklen_t::try_from(size_of::<[c_int; N]>()).expect("a few ints");
        let expected = len;
        call_libc("getsockopt", || {
            let (to, fd) = (value.as_mut_ptr().cast(), self.0.as_raw_fd());
            // SAFETY: `to` points to `len` writable bytes, and every pattern of bits is an int.
            let code = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, name, to, &raw mut len) };
            code.into()
        })?;
        if len == expected { Ok(value) } else { Err(Error::Call { call: "getsockopt", errno: Errno::INVAL }) }
    }

    pub(super) fn receive(&self, buffer: &mut [u8], room: usize, deadline: Deadline) -> Result<Received> {
        self.attempt(PollFlags::IN, deadline, || self.receive_now(buffer, room))
    }

    fn receive_now(&self, buffer: &mut [u8], room: usize) -> Result<Received> {
        let size = buffer.len();
        let mut space = [MaybeUninit::uninit(); CONTROL_SPACE];
        // Without room there is no control buffer at all, and the kernel installs nothing.
        let used = if room == 0 { 0 } else { rustix::cmsg_space!(ScmRights(room)) };
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
        // The alignment slack of the control buffer can let a few descriptors more than `room` in.
        let lost = message.flags.contains(ReturnFlags::CTRUNC) || fds.len() > room;
        match message.bytes {
            0 => Err(Error::Closed),
            len if len > size => Err(Error::PacketTruncated { len, room: size }),
            len => Ok(Received { len, fds, lost, room }),
        }
    }

    /// Does what does not block, and waits between the attempts.
    fn attempt<T>(
        &self,
        readiness: PollFlags,
        deadline: Deadline,
        mut once: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        loop {
            match once() {
                // A receiver hears of a reset once, when the peer left packets of ours unread, and hears of it
                // before the packets that the peer sent. They are still there, and after them the end.
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

impl Received {
    fn whole(self) -> Result<(usize, Vec<OwnedFd>)> {
        if self.lost { Err(Error::FdsTruncated { room: self.room }) } else { Ok((self.len, self.fds)) }
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

    /// Long enough that only a hang reaches it.
    fn patience() -> Deadline {
        Deadline::after(Duration::from_secs(60))
    }

    fn pair() -> (PacketSocket, PacketSocket) {
        PacketSocket::pair().expect("two sockets")
    }

    /// A pipe whose reader tells when the last writer is closed.
    fn pipe() -> (OwnedFd, OwnedFd) {
        pipe_with(PipeFlags::CLOEXEC).expect("a pipe")
    }

    /// Waits, because a child that another test forks meanwhile keeps a copy for a moment.
    fn is_closed(reader: &OwnedFd) -> bool {
        let mut watched = [PollFd::new(reader, PollFlags::IN)];
        let timeout = patience().timeout();
        poll(&mut watched, timeout.as_ref()).expect("poll") == 1
            && watched[0].revents().contains(PollFlags::HUP)
    }

    #[test]
    fn packets_keep_their_boundaries_up_to_the_longest() {
        let (a, b) = pair();
        for len in [1, 2, 4095, MAX_PACKET] {
            let sent: Vec<u8> = (0..=u8::MAX).cycle().take(len).collect();
            a.send(&sent, &[], patience()).expect("send");
            let mut buffer = vec![0; MAX_PACKET];
            assert_eq!(b.recv(&mut buffer, patience()), Ok(len));
            assert_eq!(&buffer[..len], sent);
        }
    }

    #[test]
    fn what_cannot_be_sent_is_refused_before_any_call() {
        let (a, b) = pair();
        let fds = [a.as_fd(); MAX_FDS + 1];
        let long = vec![0; MAX_PACKET + 1];
        assert_eq!(a.send(&[], &[], patience()), Err(Error::EmptyPacket));
        let error = Error::PacketTooLong { len: MAX_PACKET + 1, limit: MAX_PACKET };
        assert_eq!(a.send(&long, &[], patience()), Err(error));
        let error = Error::TooManyFds { count: MAX_FDS + 1, limit: MAX_FDS };
        assert_eq!(a.send(b"x", &fds, patience()), Err(error));
        assert_eq!(b.recv(&mut [0; 8], Deadline::NOW), Err(Error::TimedOut));
    }

    #[test]
    fn a_packet_longer_than_the_buffer_tells_its_true_length() {
        let (a, b) = pair();
        a.send(&[7; 1000], &[], patience()).expect("send");
        let error = Error::PacketTruncated { len: 1000, room: 10 };
        assert_eq!(b.recv(&mut [0; 10], patience()), Err(error));
        a.send(&[7; 3], &[], patience()).expect("send");
        assert_eq!(b.recv(&mut [], patience()), Err(Error::PacketTruncated { len: 3, room: 0 }));
    }

    #[test]
    fn a_full_packet_of_descriptors_arrives_in_order_and_closes_on_exec() {
        let (a, b) = pair();
        let (reader, writer) = pipe();
        let sent: Vec<BorrowedFd<'_>> =
            (0..MAX_FDS).map(|n| if n == 3 { writer.as_fd() } else { reader.as_fd() }).collect();
        a.send(b"fds", &sent, patience()).expect("send");
        let (len, fds) = b.recv_with_fds(&mut [0; 8], MAX_FDS, patience()).expect("receive");
        assert_eq!((len, fds.len()), (3, MAX_FDS));
        for (fd, original) in fds.iter().zip(&sent) {
            assert_eq!(rustix::io::fcntl_getfd(fd), Ok(FdFlags::CLOEXEC));
            assert_eq!(rustix::fs::fcntl_getfl(fd), rustix::fs::fcntl_getfl(original));
        }
    }

    #[test]
    fn descriptors_beyond_the_room_are_an_error_and_all_are_closed() {
        // Room for one also has alignment slack for three more, which must not be let through.
        for (room, count) in [(0, 1), (0, 64), (1, 2), (1, 4), (1, 5), (2, 3), (63, 64)] {
            let (a, b) = pair();
            let (reader, writer) = pipe();
            a.send(b"x", &vec![writer.as_fd(); count], patience()).expect("send");
            drop(writer);
            let received = b.recv_with_fds(&mut [0; 8], room, patience()).map(|(len, _)| len);
            assert_eq!(received, Err(Error::FdsTruncated { room }), "{count} where {room} were expected");
            assert!(is_closed(&reader), "{count} where {room} were expected");
        }
    }

    #[test]
    fn recv_takes_no_descriptors() {
        let (a, b) = pair();
        let (reader, writer) = pipe();
        a.send(b"x", &[writer.as_fd()], patience()).expect("send");
        drop(writer);
        assert_eq!(b.recv(&mut [0; 8], patience()), Err(Error::FdsTruncated { room: 0 }));
        assert!(is_closed(&reader));
    }

    #[test]
    fn descriptors_of_a_packet_that_is_too_long_are_closed() {
        let (a, b) = pair();
        let (reader, writer) = pipe();
        a.send(b"long", &[writer.as_fd()], patience()).expect("send");
        drop(writer);
        let error = Error::PacketTruncated { len: 4, room: 2 };
        assert_eq!(b.recv_with_fds(&mut [0; 2], 1, patience()).map(drop), Err(error));
        assert!(is_closed(&reader));
    }

    #[test]
    fn descriptors_beyond_the_limit_of_the_process_are_an_error_and_those_that_came_are_closed() {
        let (a, b) = pair();
        let (_reader, writer) = pipe();
        a.send(b"x", &[writer.as_fd(); 3], patience()).expect("send");
        // The limit belongs to the whole process, so that a child has to lower it.
        let status = child::fork(|| {
            let free = || rustix::io::dup(&writer).map(|fd| fd.as_raw_fd());
            let Ok(lowest) = free() else { return 1 };
            let mut limit = getrlimit(Resource::Nofile);
            limit.current = u64::try_from(lowest + 1).ok();
            if setrlimit(Resource::Nofile, limit).is_err() {
                return 2;
            }
            let received = b.recv_with_fds(&mut [0; 8], 3, Deadline::NOW).map(drop);
            match (received == Err(Error::FdsTruncated { room: 3 }), free() == Ok(lowest)) {
                (true, true) => 0,
                (false, _) => 3,
                (true, false) => 4,
            }
        })
        .wait();
        assert_eq!(status, child::Status::Exited(0));
    }

    #[test]
    fn an_empty_socket_times_out_and_a_full_one_too() {
        let (a, b) = pair();
        let soon = || Deadline::after(Duration::from_millis(1));
        assert_eq!(b.recv(&mut [0; 8], Deadline::NOW), Err(Error::TimedOut));
        assert_eq!(b.recv(&mut [0; 8], soon()), Err(Error::TimedOut));
        let full = std::iter::repeat_with(|| a.send(&[0; 4096], &[], Deadline::NOW)).find(Result::is_err);
        assert_eq!(full, Some(Err(Error::TimedOut)));
        assert_eq!(a.send(&[0; 4096], &[], soon()), Err(Error::TimedOut));
    }

    #[test]
    fn a_send_into_a_full_socket_goes_on_when_it_is_drained() {
        let (a, b) = pair();
        const COUNT: usize = 300;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for n in 0..COUNT {
                    a.send(&vec![0; 4096 + n], &[], patience()).expect("send");
                }
            });
            let mut buffer = vec![0; MAX_PACKET];
            for n in 0..COUNT {
                assert_eq!(b.recv(&mut buffer, patience()), Ok(4096 + n));
            }
        });
    }

    #[test]
    fn a_closed_peer_is_closed_in_both_directions() {
        let (a, b) = pair();
        // A shutdown, because a child that another test forks may keep a copy of `b` open.
        assert_eq!(a.is_closed(), Ok(false));
        rustix::net::shutdown(&b, Shutdown::Both).expect("shutdown");
        assert_eq!(a.is_closed(), Ok(true));
        assert_eq!(a.recv(&mut [0; 8], patience()), Err(Error::Closed));
        assert_eq!(a.send(b"x", &[], patience()), Err(Error::Closed));
    }

    #[test]
    fn what_a_peer_sent_before_it_left_without_reading_still_arrives() {
        let (a, b) = pair();
        a.send(b"never read", &[], patience()).expect("send");
        b.send(b"last words", &[], patience()).expect("send");
        drop(b);
        let mut watched = [PollFd::new(&a, PollFlags::empty())];
        let timeout = patience().timeout();
        assert_eq!(poll(&mut watched, timeout.as_ref()), Ok(1), "the peer is gone");
        let mut buffer = [0; 16];
        assert_eq!(a.recv(&mut buffer, patience()), Ok(10));
        assert_eq!(&buffer[..10], b"last words");
        assert_eq!(a.recv(&mut buffer, patience()), Err(Error::Closed));
    }

    #[test]
    fn adopt_takes_packet_sockets_only() {
        let wrong = || Some(Error::WrongDescriptor { expected: "a packet socket" });
        let stream = |family, kind| rustix::net::socket(family, kind, None).expect("a socket");
        assert_eq!(PacketSocket::adopt(pipe().0).err(), wrong());
        assert_eq!(PacketSocket::adopt(stream(AddressFamily::UNIX, SocketType::STREAM)).err(), wrong());
        assert_eq!(PacketSocket::adopt(stream(AddressFamily::UNIX, SocketType::DGRAM)).err(), wrong());
        assert_eq!(PacketSocket::adopt(stream(AddressFamily::INET, SocketType::STREAM)).err(), wrong());

        let (a, b) = pair();
        let fd = OwnedFd::from(a);
        rustix::io::fcntl_setfd(&fd, FdFlags::empty()).expect("fcntl");
        let a = PacketSocket::adopt(fd).expect("it is one");
        assert_eq!(rustix::io::fcntl_getfd(&a), Ok(FdFlags::CLOEXEC));
        a.send(b"x", &[], patience()).expect("send");
        assert_eq!(b.recv(&mut [0; 8], patience()), Ok(1));
    }

    /// The process that a pidfd refers to, as the kernel shows it.
    fn pid_of(pidfd: &PidFd) -> String {
        let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_fd().as_raw_fd()));
        let info = info.expect("fdinfo");
        info.lines().find_map(|line| line.strip_prefix("Pid:\t")).expect("a pidfd").to_owned()
    }

    #[test]
    fn the_peer_is_known_by_descriptor_and_by_number() {
        let (a, _b) = pair();
        let own = std::process::id().to_string();
        assert_eq!(pid_of(&a.peer_pidfd().expect("peer")), own);
        assert_eq!(pid_of(&a.peer_pidfd_by_number().expect("peer")), own);
    }

    #[test]
    fn the_peer_of_an_accepted_connection_is_the_process_that_connected() {
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
    fn whichever_call_fails_its_error_comes_back_and_nothing_stays_open() {
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
