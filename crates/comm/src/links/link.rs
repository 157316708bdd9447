//! A connection between two authenticated ranks, with its queue of packets to send.
//!
//! No call waits. Packets that the socket does not accept at once are queued, and the progress thread sends them when
//! the socket is ready. One batch of descriptors is in flight at a time, since the kernel counts them against the
//! user's limit. Acknowledgements of batches are sent before queued packets, so that two ranks that send each other
//! many batches do not deadlock. So are messages that the group has failed.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use wholemem_os::{Deadline, Error as OsError, PacketSocket};

use crate::Rank;
use crate::links::StreamSocket;
use crate::wire::frame::FrameHeader;

/// One frame (a packet between ranks), with the file descriptors that it carries.
#[derive(Debug, Clone)]
pub(crate) struct FramePacket {
    pub(crate) bytes: Vec<u8>,
    pub(crate) fds: Vec<Arc<OwnedFd>>,
}

impl FramePacket {
    /// Creates a packet that offers a direct link to another rank, with one end of a socket pair, or without it if the
    /// descriptor was lost.
    pub(crate) fn offer(header: FrameHeader, end: Option<OwnedFd>) -> Self {
        let header = FrameHeader { fds: u16::from(end.is_some()), ..header };
        let fds = end.into_iter().map(Arc::new).collect();
        Self { bytes: header.encode(&[]), fds }
    }
}

impl From<Vec<u8>> for FramePacket {
    fn from(bytes: Vec<u8>) -> Self {
        Self { bytes, fds: Vec::new() }
    }
}

/// A connection to one authenticated rank.
#[derive(Debug)]
pub(crate) struct RankLink {
    pub(crate) peer: Rank,
    pub(crate) socket: LinkSocket,
    send_queue: Mutex<SendQueue>,
}

/// The socket of a link: a packet socket to a rank of this node, or a TCP connection to a rank of another node.
#[derive(Debug)]
pub(crate) enum LinkSocket {
    Packet(PacketSocket),
    Stream(Box<StreamSocket>),
}

impl From<PacketSocket> for LinkSocket {
    fn from(socket: PacketSocket) -> Self {
        Self::Packet(socket)
    }
}

impl AsFd for LinkSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Packet(socket) => socket.as_fd(),
            Self::Stream(socket) => socket.stream().as_fd(),
        }
    }
}

impl LinkSocket {
    /// Sends a packet without waiting.
    ///
    /// # Errors
    /// [`OsError::TimedOut`] if the socket is full.
    fn send(&self, packet: &FramePacket) -> wholemem_os::Result<()> {
        match self {
            Self::Packet(socket) => {
                let fds: Vec<_> = packet.fds.iter().map(|fd| fd.as_fd()).collect();
                socket.send(&packet.bytes, &fds, Deadline::NOW)
            }
            // Operations with descriptors are refused over several nodes, so the packet has none.
            Self::Stream(socket) => socket.send(&packet.bytes),
        }
    }

    /// Sends the rest of a packet that the socket has accepted in part.
    fn flush(&self) -> wholemem_os::Result<()> {
        match self {
            Self::Packet(_) => Ok(()),
            Self::Stream(socket) => socket.flush(),
        }
    }

    /// Receives a packet without waiting, with at most `max_fds` descriptors.
    ///
    /// # Errors
    /// [`OsError::TimedOut`] if there is none.
    pub(crate) fn recv_with_fds(
        &self,
        buffer: &mut [u8],
        max_fds: usize,
    ) -> wholemem_os::Result<(usize, Vec<OwnedFd>)> {
        match self {
            Self::Packet(socket) => socket.recv_with_fds(buffer, max_fds, Deadline::NOW),
            Self::Stream(socket) => socket.recv(buffer).map(|len| (len, Vec::new())),
        }
    }

    #[cfg(test)]
    pub(crate) fn recv(&self, buffer: &mut [u8], _: Deadline) -> wholemem_os::Result<usize> {
        self.recv_with_fds(buffer, 0).map(|(len, _)| len)
    }

    /// Returns the TCP connection of a link between nodes.
    pub(crate) fn stream(&self) -> Option<&StreamSocket> {
        match self {
            Self::Packet(_) => None,
            Self::Stream(socket) => Some(socket),
        }
    }
}

/// The queues of packets to send to one rank.
#[derive(Debug, Default)]
struct SendQueue {
    urgent: VecDeque<FramePacket>,
    ordinary: VecDeque<FramePacket>,
    /// True while a batch of file descriptors is in flight and not acknowledged.
    in_flight: bool,
    closed: bool,
}

/// The result of an attempt to send all queued packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SendStatus {
    Done,
    /// The socket is full: `poll` reports when the socket is writable again.
    SocketFull,
    /// A batch of file descriptors is queued until the peer acknowledges the previous batch.
    AwaitingAck,
    /// The kernel refuses more descriptors in flight for now (`ETOOMANYREFS`), and does not report when it accepts
    /// more.
    Refused,
}

impl RankLink {
    pub(crate) fn new(peer: Rank, socket: impl Into<LinkSocket>) -> Self {
        Self { peer, socket: socket.into(), send_queue: Mutex::default() }
    }

    fn send_queue(&self) -> MutexGuard<'_, SendQueue> {
        self.send_queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends packets in order, and queues those that the socket does not accept.
    pub(crate) fn post(&self, packets: impl IntoIterator<Item = FramePacket>) -> SendStatus {
        let mut send_queue = self.send_queue();
        send_queue.ordinary.extend(packets);
        send_queue.flush(&self.socket)
    }

    /// Sends a packet before all queued packets.
    pub(crate) fn post_urgent(&self, packet: FramePacket) -> SendStatus {
        let mut send_queue = self.send_queue();
        send_queue.urgent.push_back(packet);
        send_queue.flush(&self.socket)
    }

    /// Handles the peer's acknowledgement of the batch of file descriptors in flight, and sends queued packets.
    pub(crate) fn batch_acknowledged(&self) -> SendStatus {
        let mut send_queue = self.send_queue();
        send_queue.in_flight = false;
        send_queue.flush(&self.socket)
    }

    /// Sends as many queued packets as the socket accepts.
    pub(crate) fn flush(&self) -> SendStatus {
        self.send_queue().flush(&self.socket)
    }
}

impl SendQueue {
    fn flush(&mut self, socket: &LinkSocket) -> SendStatus {
        match socket.flush() {
            Ok(()) => {}
            Err(OsError::TimedOut) => return SendStatus::SocketFull,
            Err(_) => self.closed = true,
        }
        loop {
            let (queue, ordinary) =
                if self.urgent.is_empty() { (&mut self.ordinary, true) } else { (&mut self.urgent, false) };
            let Some(packet) = queue.front() else {
                let is_sent = self.closed || socket.flush() != Err(OsError::TimedOut);
                return if is_sent { SendStatus::Done } else { SendStatus::SocketFull };
            };
            if self.closed {
                queue.clear();
                continue;
            }
            let batch = !packet.fds.is_empty();
            if batch && self.in_flight {
                return SendStatus::AwaitingAck;
            }
            match socket.send(packet) {
                Ok(()) => {
                    self.in_flight |= batch && ordinary;
                    queue.pop_front();
                }
                Err(OsError::TimedOut) => return SendStatus::SocketFull,
                Err(OsError::Call { errno: wholemem_os::Errno::TOOMANYREFS, .. }) => {
                    return SendStatus::Refused;
                }
                // The peer has closed the connection, so queued packets are dropped. The peer's liveness page shows
                // whether it died.
                Err(_) => self.closed = true,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (RankLink, PacketSocket) {
        let (here, there) = PacketSocket::pair().unwrap();
        (RankLink::new(Rank(1), here), there)
    }

    fn batch(name: &str) -> FramePacket {
        let fd = Arc::new(std::fs::File::open("/dev/null").unwrap().into());
        FramePacket { bytes: name.as_bytes().to_vec(), fds: vec![fd] }
    }

    fn next(socket: &PacketSocket) -> Option<String> {
        let mut buffer = [0; 64];
        let (len, _) = socket.recv_with_fds(&mut buffer, 4, Deadline::NOW).ok()?;
        Some(String::from_utf8_lossy(&buffer[..len]).into_owned())
    }

    #[test]
    fn packets_that_a_full_socket_refuses_are_sent_later_in_order() {
        let (link, there) = pair();
        let packets = (0..100u8).map(|n| FramePacket::from(vec![n; 60_000]));
        assert_eq!(link.post(packets), SendStatus::SocketFull);
        let mut buffer = vec![0; 65_536];
        for n in 0..100 {
            assert_eq!(there.recv(&mut buffer, Deadline::NOW), Ok(60_000));
            assert_eq!(buffer[0], n);
            link.flush();
        }
        assert_eq!(link.flush(), SendStatus::Done);
    }

    #[test]
    fn one_batch_is_in_flight_and_acknowledgements_are_sent_first() {
        let (link, there) = pair();
        assert_eq!(
            link.post([batch("one"), batch("two"), FramePacket::from(b"three".to_vec())]),
            SendStatus::AwaitingAck
        );
        assert_eq!(next(&there).as_deref(), Some("one"));
        assert_eq!(next(&there), None);
        assert_eq!(link.post_urgent(FramePacket::from(b"taken".to_vec())), SendStatus::AwaitingAck);
        assert_eq!(next(&there).as_deref(), Some("taken"));
        assert_eq!(link.batch_acknowledged(), SendStatus::Done);
        assert_eq!(next(&there).as_deref(), Some("two"));
        assert_eq!(next(&there).as_deref(), Some("three"));
    }

    #[test]
    fn a_closed_link_drops_queued_packets() {
        let (link, there) = pair();
        drop(there);
        assert_eq!(link.post([FramePacket::from(vec![1]), FramePacket::from(vec![2])]), SendStatus::Done);
    }
}
