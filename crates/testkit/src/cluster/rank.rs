//! [`ClusterRank`]: a rank of a test on several nodes, as the rank's own process sees it.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::AsFd;

use rustix::process::Signal;
use wholemem_os::packet::MAX_PACKET;
use wholemem_os::{Deadline, PacketSocket};

use super::network;
use crate::ranks::{DONE, PARAMETER, default_deadline};

pub(super) const RANK: &str = "WHOLEMEM_TEST_CLUSTER_RANK";
pub(super) const RANKS_PER_NODE: &str = "WHOLEMEM_TEST_CLUSTER_RANKS";

/// The number of a rank process in its test, its node, and its connection to the test.
#[derive(Debug)]
pub struct ClusterRank {
    rank: usize,
    ranks_per_node: Vec<usize>,
    test: PacketSocket,
}

impl ClusterRank {
    /// Connects a rank process to the test that started it.
    pub(super) fn join() -> Self {
        // The first process of the node is its parent, and is PID 1, whose death the kernel extends to the whole node.
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).expect("a signal");
        let variable = |name: &str| std::env::var(name).expect("set by the test");
        let number = |text: &str| text.parse().expect("a number");
        let stdin = io::stdin().as_fd().try_clone_to_owned().expect("cannot duplicate a descriptor");
        Self {
            rank: number(&variable(RANK)),
            ranks_per_node: variable(RANKS_PER_NODE).split(',').map(number).collect(),
            test: PacketSocket::adopt(stdin).expect("the socket of the test"),
        }
    }

    /// Tells the test that the body of this rank has ended.
    pub(super) fn finish(&self) {
        self.test.send(DONE, &[], default_deadline()).expect("the test is not alive");
    }

    /// Returns the number of this rank.
    #[must_use]
    pub fn id(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks in the test.
    #[must_use]
    pub fn count(&self) -> usize {
        self.ranks_per_node.iter().sum()
    }

    /// Returns the number of nodes in the test.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.ranks_per_node.len()
    }

    /// Returns the node of this rank.
    #[must_use]
    pub fn node(&self) -> usize {
        node_of(&self.ranks_per_node, self.rank)
    }

    /// Returns the number of this rank among the ranks of its node.
    #[must_use]
    pub fn local_rank(&self) -> usize {
        self.rank - self.ranks_per_node[..self.node()].iter().sum::<usize>()
    }

    /// Returns the number of ranks on a node.
    #[must_use]
    pub fn ranks_on(&self, node: usize) -> usize {
        self.ranks_per_node[node]
    }

    /// Returns the IPv4 address of a node.
    #[must_use]
    pub fn v4(&self, node: usize) -> Ipv4Addr {
        network::v4(node)
    }

    /// Returns the IPv6 address of a node.
    #[must_use]
    pub fn v6(&self, node: usize) -> Ipv6Addr {
        network::v6(node)
    }

    /// Returns the text that the test has set with [`parameter`](super::ClusterSpec::parameter).
    #[must_use]
    pub fn parameter(&self) -> String {
        std::env::var(PARAMETER).unwrap_or_default()
    }

    /// Sends a message to the test, which receives it with [`recv`](super::Cluster::recv).
    ///
    /// # Panics
    /// If it cannot be sent.
    pub fn send(&self, message: &[u8]) {
        self.test.send(message, &[], default_deadline()).expect("cannot send to the test");
    }

    /// Receives a message that the test has sent with [`send`](super::Cluster::send).
    ///
    /// # Panics
    /// If no message arrives before the timeout.
    #[must_use]
    pub fn recv(&self) -> Vec<u8> {
        recv(&self.test, default_deadline()).expect("cannot receive from the test")
    }

    /// Blocks until this rank is killed.
    ///
    /// # Panics
    /// If the timeout expires first.
    pub fn wait_to_be_killed(&self) -> ! {
        let message = recv(&self.test, default_deadline());
        panic!("rank {} was not killed: {message:?}", self.rank);
    }
}

/// Returns the node of a rank: ranks are numbered node by node.
pub(super) fn node_of(ranks_per_node: &[usize], rank: usize) -> usize {
    let mut end = 0;
    let node = ranks_per_node.iter().position(|ranks| {
        end += ranks;
        rank < end
    });
    node.expect("a rank of this test")
}

pub(super) fn recv(socket: &PacketSocket, deadline: Deadline) -> wholemem_os::Result<Vec<u8>> {
    let mut buffer = vec![0; MAX_PACKET];
    let len = socket.recv(&mut buffer, deadline)?;
    buffer.truncate(len);
    Ok(buffer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_numbered_node_by_node() {
        let nodes: Vec<_> = (0..4).map(|rank| node_of(&[1, 0, 3], rank)).collect();
        assert_eq!(nodes, [0, 2, 2, 2]);
    }
}
