//! A queue of packets that the peer of a socket has not read yet, so that sends never block. The memory of the queue is charged
//! to the client.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use wholemem_os::{Deadline, Errno, Error, PacketSocket};

use crate::server::budget::{Amount, Charge};

/// A queued packet, its descriptors and, on the last packet of a message, the charge of the message.
type QueuedPacket = (Vec<u8>, Vec<Rc<OwnedFd>>, Option<Charge>);

/// The number of bytes that a queued packet uses besides its own bytes.
const PACKET_COST: u64 = 64;

/// Packets that wait to be sent through a socket, each with its descriptors.
#[derive(Debug, Default)]
pub(super) struct PacketQueue {
    queue: VecDeque<QueuedPacket>,
    len: usize,
}

/// The result of sending the packets of a queue.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum FlushResult {
    All,
    /// The socket's buffer is full: the peer has to read before more packets can be sent.
    Full,
    /// The peer has closed the socket, or sending has failed.
    Broken,
}

impl PacketQueue {
    /// Returns the number of bytes of all queued packets.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Returns the amount of memory and descriptors to charge for a queued message.
    pub(super) fn cost(packets: &[Vec<u8>], fds: &[Rc<OwnedFd>]) -> Amount {
        let bytes = packets.iter().map(|packet| packet.len() as u64 + PACKET_COST).sum();
        Amount { bytes, descriptors: fds.len() as u64 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Adds the packets of one message to the queue, with the message's descriptors on the last packet.
    pub(super) fn push(
        &mut self,
        packets: Vec<Vec<u8>>,
        mut fds: Vec<Rc<OwnedFd>>,
        mut charge: Option<Charge>,
    ) {
        let count = packets.len();
        for (index, packet) in packets.into_iter().enumerate() {
            let is_last = index + 1 == count;
            let fds = if is_last { std::mem::take(&mut fds) } else { Vec::new() };
            self.len += packet.len();
            self.queue.push_back((packet, fds, charge.take_if(|_| is_last)));
        }
    }

    /// Sends queued packets as far as the socket accepts them.
    pub(super) fn flush(&mut self, socket: &PacketSocket) -> FlushResult {
        while let Some((packet, fds, _)) = self.queue.front() {
            let borrowed: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
            match socket.send(packet, &borrowed, Deadline::NOW) {
                Ok(()) => {
                    self.len -= packet.len();
                    self.queue.pop_front();
                }
                // `TOOMANYREFS` means that too many descriptors of this user are in flight. Sending is tried again when some have
                // been received.
                Err(Error::TimedOut | Error::Call { errno: Errno::TOOMANYREFS | Errno::NOBUFS, .. }) => {
                    return FlushResult::Full;
                }
                Err(_) => return FlushResult::Broken,
            }
        }
        FlushResult::All
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::budget::tests::unlimited;

    #[test]
    fn packets_that_a_full_socket_rejects_are_queued_in_order() {
        let (local, peer) = PacketSocket::pair().unwrap();
        let (mut packet_queue, mut budget) = (PacketQueue::default(), unlimited());
        let account = budget.open(7);
        let zero = Rc::new(OwnedFd::from(std::fs::File::open("/dev/zero").unwrap()));
        for number in 0..20_u8 {
            let packets = vec![vec![number; 30_000], vec![number; 10]];
            let charge = account.charge(PacketQueue::cost(&packets, std::slice::from_ref(&zero))).unwrap();
            packet_queue.push(packets, vec![zero.clone()], Some(charge));
        }
        assert_eq!(packet_queue.len(), 20 * 30_010);
        assert_eq!(budget.held(), Amount { bytes: 20 * (30_010 + 2 * PACKET_COST), descriptors: 20 });
        assert_eq!(packet_queue.flush(&local), FlushResult::Full);
        let mut buffer = vec![0; 40_000];
        for number in 0..20_u8 {
            let (len, fds) = peer.recv_with_fds(&mut buffer, 1, Deadline::NEVER).unwrap();
            assert_eq!((len, fds.len(), buffer[0]), (30_000, 0, number));
            let (len, fds) = peer.recv_with_fds(&mut buffer, 1, Deadline::NEVER).unwrap();
            assert_eq!((len, fds.len(), buffer[0]), (10, 1, number));
            packet_queue.flush(&local);
        }
        assert_eq!((packet_queue.queue.len(), packet_queue.len(), budget.held()), (0, 0, Amount::default()));
        drop(peer);
        packet_queue.push(vec![vec![1]], vec![], None);
        assert_eq!(packet_queue.flush(&local), FlushResult::Broken);
    }
}
