//! A connection between two authenticated ranks, with the packets that wait to be sent on it.
//!
//! No call waits. What the socket does not take at once is queued, and the progress thread sends it when the socket is ready. One
//! batch of descriptors is in flight at a time, since the kernel counts them against the user's limit. Acknowledgements of batches
//! are sent before queued packets, so that two ranks which send each other many batches do not deadlock. So is the message that the
//! group has failed.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use wholemem_os::{Deadline, Error as OsError, PacketSocket};

use crate::Rank;
use crate::wire::frame::Header;

/// One frame, with the descriptors it carries.
#[derive(Debug, Clone)]
pub(crate) struct Packet {
    pub(crate) bytes: Vec<u8>,
    pub(crate) fds: Vec<Arc<OwnedFd>>,
}

impl Packet {
    /// The offer of a link, with the descriptor of its end, or without it if that was lost.
    pub(crate) fn offer(header: Header, end: Option<OwnedFd>) -> Self {
        let header = Header { fds: u16::from(end.is_some()), ..header };
        let fds = end.into_iter().map(Arc::new).collect();
        Self { bytes: header.encode(&[]), fds }
    }
}

impl From<Vec<u8>> for Packet {
    fn from(bytes: Vec<u8>) -> Self {
        Self { bytes, fds: Vec::new() }
    }
}

/// A connection to one rank.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) peer: Rank,
    pub(crate) socket: PacketSocket,
    outbox: Mutex<Outbox>,
}

#[derive(Debug, Default)]
struct Outbox {
    urgent: VecDeque<Packet>,
    ordinary: VecDeque<Packet>,
    /// Whether a batch of descriptors is in flight.
    in_flight: bool,
    closed: bool,
}

/// What remains to be sent after an attempt to send all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Left {
    Nothing,
    /// The socket is full: `poll` reports when it is not.
    Full,
    /// A batch of descriptors waits for the acknowledgement of the one before it.
    Untaken,
    /// The kernel refuses more descriptors in flight for now, and does not report when it accepts more.
    Refused,
}

impl Link {
    pub(crate) fn new(peer: Rank, socket: PacketSocket) -> Self {
        Self { peer, socket, outbox: Mutex::default() }
    }

    fn outbox(&self) -> MutexGuard<'_, Outbox> {
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends packets in their order, now or later.
    pub(crate) fn post(&self, packets: impl IntoIterator<Item = Packet>) -> Left {
        let mut outbox = self.outbox();
        outbox.ordinary.extend(packets);
        outbox.flush(&self.socket)
    }

    /// Sends a packet before all that wait.
    pub(crate) fn post_urgent(&self, packet: Packet) -> Left {
        let mut outbox = self.outbox();
        outbox.urgent.push_back(packet);
        outbox.flush(&self.socket)
    }

    /// The peer has taken the batch in flight.
    pub(crate) fn taken(&self) -> Left {
        let mut outbox = self.outbox();
        outbox.in_flight = false;
        outbox.flush(&self.socket)
    }

    pub(crate) fn flush(&self) -> Left {
        self.outbox().flush(&self.socket)
    }
}

impl Outbox {
    fn flush(&mut self, socket: &PacketSocket) -> Left {
        loop {
            let (queue, ordinary) =
                if self.urgent.is_empty() { (&mut self.ordinary, true) } else { (&mut self.urgent, false) };
            let Some(packet) = queue.front() else { return Left::Nothing };
            if self.closed {
                queue.clear();
                continue;
            }
            let batch = !packet.fds.is_empty();
            if batch && self.in_flight {
                return Left::Untaken;
            }
            let fds: Vec<_> = packet.fds.iter().map(|fd| fd.as_fd()).collect();
            match socket.send(&packet.bytes, &fds, Deadline::NOW) {
                Ok(()) => {
                    self.in_flight |= batch && ordinary;
                    queue.pop_front();
                }
                Err(OsError::TimedOut) => return Left::Full,
                Err(OsError::Call { errno: wholemem_os::Errno::TOOMANYREFS, .. }) => return Left::Refused,
                // The other end is closed. Whether the peer is dead, its liveness page shows.
                Err(_) => self.closed = true,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Link, PacketSocket) {
        let (here, there) = PacketSocket::pair().unwrap();
        (Link::new(Rank(1), here), there)
    }

    fn batch(name: &str) -> Packet {
        let fd = Arc::new(std::fs::File::open("/dev/null").unwrap().into());
        Packet { bytes: name.as_bytes().to_vec(), fds: vec![fd] }
    }

    fn next(socket: &PacketSocket) -> Option<String> {
        let mut buffer = [0; 64];
        let (len, _) = socket.recv_with_fds(&mut buffer, 4, Deadline::NOW).ok()?;
        Some(String::from_utf8_lossy(&buffer[..len]).into_owned())
    }

    #[test]
    fn what_a_full_socket_does_not_take_is_sent_later_in_order() {
        let (link, there) = pair();
        let packets = (0..100u8).map(|n| Packet::from(vec![n; 60_000]));
        assert_eq!(link.post(packets), Left::Full);
        let mut buffer = vec![0; 65_536];
        for n in 0..100 {
            assert_eq!(there.recv(&mut buffer, Deadline::NOW), Ok(60_000));
            assert_eq!(buffer[0], n);
            link.flush();
        }
        assert_eq!(link.flush(), Left::Nothing);
    }

    #[test]
    fn one_batch_of_descriptors_is_in_flight_and_acknowledgements_overtake() {
        let (link, there) = pair();
        assert_eq!(link.post([batch("one"), batch("two"), Packet::from(b"three".to_vec())]), Left::Untaken);
        assert_eq!(next(&there).as_deref(), Some("one"));
        assert_eq!(next(&there), None);
        assert_eq!(link.post_urgent(Packet::from(b"taken".to_vec())), Left::Untaken);
        assert_eq!(next(&there).as_deref(), Some("taken"));
        assert_eq!(link.taken(), Left::Nothing);
        assert_eq!(next(&there).as_deref(), Some("two"));
        assert_eq!(next(&there).as_deref(), Some("three"));
    }

    #[test]
    fn a_link_whose_peer_has_closed_it_drops_queued_packets() {
        let (link, there) = pair();
        drop(there);
        assert_eq!(link.post([Packet::from(vec![1]), Packet::from(vec![2])]), Left::Nothing);
    }
}
