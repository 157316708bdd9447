//! Runs a test as ranks on several nodes. A node is a set of Linux namespaces of this machine.
//!
//! ```text
//!   the test ── switch (PID 1, its own network) ── br0 ─┬─ p0 ══ eth0  n0: 10.77.0.1, fd77::1 ── ranks 0, 1
//!                                                       └─ p1 ══ eth0  n1: 10.77.0.2, fd77::2 ── ranks 2, 3
//! ```
//!
//! Each node has its own network interfaces, hostname (`n0`, `n1`, ...), process ids, System V IPC, `/proc`, `/sys`,
//! `/dev/shm`, `/tmp` and `/etc/hosts` (with all nodes). All nodes have the same files otherwise. They are made as root,
//! or without root in a user namespace in which this user is root. Where the machine allows neither,
//! [`ClusterSpec::start`] reports the test as skipped, which `CI=true` turns into a failure.
//!
//! The test starts the ranks, exchanges messages with them, and meanwhile kills ranks, stops nodes and cuts links. A
//! watchdog ends a test that hangs. All processes, interfaces and namespaces are gone when the [`Cluster`] is dropped, or
//! when the test is killed.
//!
//! ```no_run
//! use wholemem_testkit::{Cluster, test_name};
//!
//! // A test function. The test binary runs it again in each rank, which runs only the closure.
//! let Some(mut cluster) = Cluster::of(&[2, 2]).start(test_name!(), |rank| {
//!     rank.send(b"ready");
//!     if rank.node() == 1 {
//!         rank.wait_to_be_killed();
//!     }
//!     assert_eq!(rank.recv(), b"end");
//! }) else {
//!     return;
//! };
//! cluster.recv_from_all(b"ready");
//! cluster.cut_between(0, 1);
//! cluster.kill_node(1);
//! (0..2).for_each(|rank| cluster.send(rank, b"end"));
//! cluster.finish();
//! ```

mod message;
mod network;
mod node;
mod process;
mod rank;
mod spec;

use std::net::{Ipv4Addr, Ipv6Addr};
use std::process::Child;

use wholemem_os::pidfd::Signal;
use wholemem_os::{Deadline, PacketSocket};

use self::message::Request;
use self::network::Network;
use self::process::NodeSocket;
use crate::ranks::DONE;

pub use self::network::{INTERFACE, LinkCounters};
pub use self::process::{NodeCommand, NodeOutput, NodeProcess};
pub use self::rank::ClusterRank;
pub use self::spec::ClusterSpec;

/// The nodes and ranks of a running test, as the test sees them.
#[derive(Debug)]
pub struct Cluster {
    // The order of the fields is that of their drop; see `Drop`.
    ranks: Vec<RunningRank>,
    ranks_per_node: Vec<usize>,
    nodes: Vec<NodeSocket>,
    network: Option<Network>,
    /// The process that holds the namespaces of the switch, outside of them.
    switch: Child,
    deadline: Deadline,
}

#[derive(Debug)]
struct RunningRank {
    process: NodeProcess,
    socket: PacketSocket,
    is_killed: bool,
}

impl Cluster {
    /// Configures a test with a number of ranks on each node.
    ///
    /// # Panics
    /// If there are more than 200 nodes.
    pub fn of(ranks_per_node: &[usize]) -> ClusterSpec {
        ClusterSpec::new(ranks_per_node)
    }

    fn network(&self) -> &Network {
        self.network.as_ref().expect("the network exists until the drop")
    }

    /// Returns the number of nodes.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn count(&self) -> usize {
        self.ranks.len()
    }

    /// Returns the numbers of the ranks on a node.
    #[must_use]
    pub fn ranks_of(&self, node: usize) -> std::ops::Range<usize> {
        let first = self.ranks_per_node[..node].iter().sum();
        first..first + self.ranks_per_node[node]
    }

    /// Returns the node of a rank.
    #[must_use]
    pub fn node_of(&self, rank: usize) -> usize {
        rank::node_of(&self.ranks_per_node, rank)
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

    /// Configures a further process in a node.
    pub fn command(&self, node: usize, program: impl AsRef<std::ffi::OsStr>) -> NodeCommand<'_> {
        NodeCommand::new(&self.nodes[node], program)
    }

    /// Sends a message to a rank, which receives it with [`ClusterRank::recv`].
    ///
    /// # Panics
    /// If it cannot be sent.
    pub fn send(&self, rank: usize, message: &[u8]) {
        if let Err(error) = self.ranks[rank].socket.send(message, &[], self.deadline) {
            self.fail(&format!("cannot send to rank {rank}: {error}"));
        }
    }

    /// Receives a message that a rank has sent with [`ClusterRank::send`].
    ///
    /// # Panics
    /// If the rank has ended, or sends nothing before the timeout.
    #[must_use]
    pub fn recv(&self, rank: usize) -> Vec<u8> {
        match rank::recv(&self.ranks[rank].socket, self.deadline) {
            Ok(message) if message != DONE => message,
            Ok(_) => self.fail(&format!("rank {rank} ended without the expected message")),
            Err(error) => self.fail(&format!("cannot receive from rank {rank}: {error}")),
        }
    }

    /// Receives one message from each rank, and checks that it is `message`.
    ///
    /// # Panics
    /// As [`recv`](Self::recv); if a message differs.
    pub fn recv_from_all(&self, message: &[u8]) {
        for rank in 0..self.count() {
            assert_eq!(
                self.recv(rank).escape_ascii().to_string(),
                message.escape_ascii().to_string(),
                "rank {rank}"
            );
        }
    }

    /// Kills a rank with `SIGKILL` and waits until it is dead.
    ///
    /// # Panics
    /// If it cannot be killed.
    pub fn kill(&mut self, rank: usize) {
        let rank = &mut self.ranks[rank];
        rank.is_killed = true;
        rank.process.kill();
    }

    /// Kills all processes of a node with `SIGKILL` and waits until they are dead. The links of the node remain.
    ///
    /// # Panics
    /// If they cannot be killed.
    pub fn kill_node(&mut self, node: usize) {
        self.signal_node(node, Signal::KILL);
        for rank in self.ranks_of(node) {
            self.ranks[rank].is_killed = true;
            self.ranks[rank].process.wait();
        }
    }

    /// Stops all processes of a node with `SIGSTOP`, and waits until they are stopped.
    ///
    /// # Panics
    /// If they cannot be stopped.
    pub fn stop_node(&self, node: usize) {
        self.signal_node(node, Signal::STOP);
    }

    /// Continues all processes of a stopped node.
    ///
    /// # Panics
    /// If they cannot be signalled.
    pub fn continue_node(&self, node: usize) {
        self.signal_node(node, Signal::CONT);
    }

    /// Sends a signal to a rank, for example `SIGSTOP` or `SIGCONT`.
    ///
    /// # Panics
    /// If the rank has exited.
    pub fn signal(&self, rank: usize, signal: Signal) {
        self.ranks[rank].process.signal(signal);
    }

    fn signal_node(&self, node: usize, signal: Signal) {
        let request = Request::SignalAll(signal.as_raw());
        self.nodes[node].request(&request, &[]).expect("cannot signal the processes of a node");
    }

    /// Drops all packets from a node to another, silently. The other direction is not changed.
    ///
    /// # Panics
    /// If the kernel refuses.
    pub fn cut(&self, from: usize, to: usize) {
        self.network().cut(from, to);
    }

    /// Ends the effect of [`cut`](Self::cut). Nothing happens if the direction is not cut.
    ///
    /// # Panics
    /// If the kernel refuses.
    pub fn heal(&self, from: usize, to: usize) {
        self.network().heal(from, to);
    }

    /// Drops all packets between two nodes, in both directions.
    ///
    /// # Panics
    /// If the kernel refuses.
    pub fn cut_between(&self, a: usize, b: usize) {
        self.cut(a, b);
        self.cut(b, a);
    }

    /// Ends the effect of [`cut_between`](Self::cut_between).
    ///
    /// # Panics
    /// If the kernel refuses.
    pub fn heal_between(&self, a: usize, b: usize) {
        self.heal(a, b);
        self.heal(b, a);
    }

    /// Drops all packets between a node and every other node, in both directions.
    ///
    /// # Panics
    /// If the kernel refuses.
    pub fn isolate(&self, node: usize) {
        (0..self.nodes()).filter(|other| *other != node).for_each(|other| self.cut_between(node, other));
    }

    /// Heals all links of a node.
    ///
    /// # Panics
    /// If the kernel refuses.
    pub fn rejoin(&self, node: usize) {
        (0..self.nodes()).filter(|other| *other != node).for_each(|other| self.heal_between(node, other));
    }

    /// Limits the rate of a node's link in both directions (a token bucket filter), or removes the limit.
    ///
    /// # Panics
    /// If the kernel refuses.
    pub fn shape(&self, node: usize, bits_per_second: Option<u64>) {
        self.network().shape(node, &self.nodes[node], bits_per_second);
    }

    /// Returns the numbers of bytes that crossed a node's link so far. Packets that a cut drops count as sent.
    ///
    /// # Panics
    /// If they cannot be read.
    #[must_use]
    pub fn counters(&self, node: usize) -> LinkCounters {
        self.network().counters(node)
    }

    /// Waits until all ranks have ended.
    ///
    /// # Panics
    /// If a rank fails, ends without running the test, or does not end before the timeout; the message has the output of
    /// all ranks.
    pub fn finish(mut self) {
        for rank in 0..self.count() {
            let running = &mut self.ranks[rank];
            let status = running.process.wait_until(self.deadline);
            let is_killed = running.is_killed;
            let Some(status) = status else {
                self.fail(&format!("the watchdog ended the test: rank {rank} did not finish"))
            };
            if is_killed {
                continue;
            }
            if !status.success() {
                self.fail(&format!("rank {rank} failed: {status}"));
            }
            // Messages that the test has not received are before the last one.
            let mut messages =
                std::iter::from_fn(|| rank::recv(&self.ranks[rank].socket, Deadline::NOW).ok());
            if !messages.any(|message| message == DONE) {
                self.fail(&format!("rank {rank} ended without running the test"));
            }
        }
    }

    /// Ends the test with the output of all ranks.
    fn fail(&self, message: &str) -> ! {
        let outputs = self.ranks.iter().enumerate().map(|(rank, running)| {
            let (stdout, stderr) = (running.process.stdout(), running.process.stderr());
            format!("--- rank {rank}\n{stdout}{stderr}")
        });
        panic!("{message}\n{}", outputs.collect::<String>());
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // When the socket to the switch is closed, its first process exits. The kernel then kills all other processes in
        // its PID namespace, to which the nodes belong, before `unshare` sees its exit.
        drop(self.network.take());
        // An error cannot be reported here, and the kernel ends the switch in any case.
        let _ = self.switch.wait();
    }
}
