//! What waits to be sent to somebody who may not read it: a bounded queue, never a blocking send.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use wholemem_os::{Deadline, Errno, Error, PacketSocket};

/// Packets, each with the descriptors that go along.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    queue: VecDeque<(Vec<u8>, Vec<Rc<OwnedFd>>)>,
    len: usize,
    descriptors: usize,
}

/// How a flush ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Flushed {
    All,
    /// The other end has to read first.
    Full,
    /// The other end is gone, or cannot be sent to.
    Broken,
}

impl Outbox {
    /// How many bytes wait.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// How many descriptors wait.
    pub(super) fn descriptors(&self) -> usize {
        self.descriptors
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Adds the packets of one message, with descriptors on the last.
    pub(super) fn push(&mut self, packets: Vec<Vec<u8>>, mut fds: Vec<Rc<OwnedFd>>) {
        let count = packets.len();
        self.descriptors += fds.len();
        for (index, packet) in packets.into_iter().enumerate() {
            let fds = if index + 1 == count { std::mem::take(&mut fds) } else { Vec::new() };
            self.len += packet.len();
            self.queue.push_back((packet, fds));
        }
    }

    /// Sends what the socket takes now.
    pub(super) fn flush(&mut self, socket: &PacketSocket) -> Flushed {
        while let Some((packet, fds)) = self.queue.front() {
            let borrowed: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
            match socket.send(packet, &borrowed, Deadline::NOW) {
                Ok(()) => {
                    self.len -= packet.len();
                    self.descriptors -= fds.len();
                    self.queue.pop_front();
                }
                // Too many descriptors of this user are on their way: some will be taken.
                Err(Error::TimedOut | Error::Call { errno: Errno::TOOMANYREFS | Errno::NOBUFS, .. }) => {
                    return Flushed::Full;
                }
                Err(_) => return Flushed::Broken,
            }
        }
        Flushed::All
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_socket_does_not_take_waits_in_order() {
        let (here, there) = PacketSocket::pair().unwrap();
        let mut outbox = Outbox::default();
        let zero = Rc::new(OwnedFd::from(std::fs::File::open("/dev/zero").unwrap()));
        for number in 0..20_u8 {
            outbox.push(vec![vec![number; 30_000], vec![number; 10]], vec![zero.clone()]);
        }
        assert_eq!((outbox.len(), outbox.descriptors()), (20 * 30_010, 20));
        assert_eq!(outbox.flush(&here), Flushed::Full);
        let mut buffer = vec![0; 40_000];
        for number in 0..20_u8 {
            let (len, fds) = there.recv_with_fds(&mut buffer, 1, Deadline::NEVER).unwrap();
            assert_eq!((len, fds.len(), buffer[0]), (30_000, 0, number));
            let (len, fds) = there.recv_with_fds(&mut buffer, 1, Deadline::NEVER).unwrap();
            assert_eq!((len, fds.len(), buffer[0]), (10, 1, number));
            outbox.flush(&here);
        }
        assert_eq!((outbox.queue.len(), outbox.len(), outbox.descriptors()), (0, 0, 0));
        drop(there);
        outbox.push(vec![vec![1]], vec![]);
        assert_eq!(outbox.flush(&here), Flushed::Broken);
    }
}
