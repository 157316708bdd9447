//! The connections of a running group to other nodes: heartbeats, the failure on a node that does not answer, and reports
//! of ranks whose leader has died.
//!
//! If the leader of a node dies, its ranks have no connection to other nodes. The first two of them then connect to the
//! root (or, if the root has died, to the leaders of the other nodes), authenticate themselves, and report the death. So
//! it is known even if the connections of the dead leader stay open, such as in a forked child.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::PollFd;

use super::assemble::{Assembled, MessageReader, Received, post};
use super::node_link::{NodeContext, NodeLink};
use super::{LinkReader, Neighbour, ProgressThread};
use crate::Rank;
use crate::core::RankCore;
use crate::fault::GroupFault;
use crate::handshake::{AttemptOutcome, NodeAcceptor, NodeAttempt, NodePeer};
use crate::links::{LinkSocket, RankLink};
use crate::machine::link_monitor::LinkFailure;
use crate::machine::stall_detector::StallDetector;
use crate::topology::Topology;
use crate::wire::frame::{FrameKind, JoinUpdate};
use crate::wire::nodes::{AssemblyReply, NodeReport, decode_report, encode_reply, encode_report};
use crate::wire::session::Purpose;

/// The number of ranks of a node that report the death of their leader.
const REPORTERS: usize = 2;

/// The time between two attempts to report a death.
const RETRY: Duration = Duration::from_millis(20);

/// The connections of this rank to other nodes.
#[derive(Debug)]
pub(super) struct NodeState {
    context: NodeContext,
    links: BTreeMap<Rank, NodeLink>,
    acceptor: Option<NodeAcceptor>,
    /// Authenticated connections of ranks that report a death.
    reporters: Vec<Reporter>,
    /// Reports of this rank that are not sent yet.
    reports: Vec<OutgoingReport>,
}

#[derive(Debug)]
struct Reporter {
    link: Arc<RankLink>,
    messages: MessageReader,
    since: Instant,
}

#[derive(Debug)]
struct OutgoingReport {
    address: SocketAddr,
    dead: Rank,
    since: Instant,
    retry_at: Instant,
    attempt: Option<NodeAttempt>,
    /// The connection on which the report was sent, until the receiver closes it.
    sent: Option<Arc<RankLink>>,
}

fn milliseconds(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX)
}

/// Returns the fault that the node of a rank does not answer.
fn silent(topology: &Topology, rank: Rank, silence: Duration) -> GroupFault {
    let node = topology.node_of(rank);
    let ranks = topology.map().map_or_else(|| vec![rank], |map| map.nodes()[node as usize].ranks.clone());
    GroupFault::NodeSilent { node, ranks, milliseconds: milliseconds(silence) }
}

impl NodeState {
    pub(super) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let sent = self.reports.iter().filter_map(|report| report.sent.as_ref());
        let links = self.reporters.iter().map(|reporter| &reporter.link).chain(sent);
        self.acceptor.iter().flat_map(NodeAcceptor::fds).chain(links.map(|link| link.socket.as_fd()))
    }

    pub(super) fn polls(&self) -> impl Iterator<Item = PollFd<'_>> {
        let attempts = self.reports.iter().filter_map(|report| report.attempt.as_ref());
        self.links.values().filter_map(NodeLink::poll_probe).chain(attempts.map(NodeAttempt::poll))
    }

    pub(super) fn tick_within(&self) -> Option<Duration> {
        let retry =
            self.reports.iter().map(|report| report.retry_at.saturating_duration_since(Instant::now()));
        self.links.values().map(NodeLink::tick_within).chain(retry).min()
    }

    /// Returns true if a report of this rank is not sent, or a report of another rank is not answered.
    pub(super) fn has_reports(&self) -> bool {
        !self.reports.is_empty() || !self.reporters.is_empty()
    }

    pub(super) fn ranks(&self) -> impl Iterator<Item = Rank> {
        self.links.keys().copied()
    }

    pub(super) fn is_connected(&self, rank: Rank) -> bool {
        self.links.contains_key(&rank)
    }

    pub(super) fn heard(&mut self, rank: Rank) {
        if let Some(node) = self.links.get_mut(&rank) {
            node.heard();
        }
    }

    /// Begins to report the death of the leader of this node, if this rank is one of the first of its ranks.
    fn report_leader(&mut self, topology: &Topology, dead: Rank) {
        let Some(map) = topology.map() else { return };
        let here = &map.nodes()[topology.node_of(topology.rank) as usize];
        let mut others = here.ranks.iter().filter(|rank| **rank != here.leader);
        if dead != here.leader || !others.by_ref().take(REPORTERS).any(|rank| *rank == topology.rank) {
            return;
        }
        let is_root = map.nodes()[0].leader == dead;
        let receivers = if is_root { &map.nodes()[1..] } else { &map.nodes()[..1] };
        let now = Instant::now();
        self.reports.extend(receivers.iter().map(|node| OutgoingReport {
            address: node.address,
            dead,
            since: now,
            retry_at: now,
            attempt: None,
            sent: None,
        }));
    }

    fn step_reports(&mut self) {
        let context = &self.context;
        self.reports.retain_mut(|report| report.step(context) && report.since.elapsed() < context.silence);
    }

    /// Accepts connections of ranks that report a death, and returns the faults that they report.
    fn step_reporters(&mut self, core: &RankCore) -> Vec<GroupFault> {
        let own = self.context.rank;
        for NodePeer { rank, socket } in self.acceptor.iter_mut().flat_map(NodeAcceptor::serve) {
            let link = Arc::new(RankLink::new(rank, LinkSocket::Stream(Box::new(socket))));
            self.reporters.push(Reporter { link, messages: MessageReader::default(), since: Instant::now() });
        }
        let (silence, mut faults) = (self.context.silence, Vec::new());
        self.reporters.retain_mut(|reporter| {
            reporter.link.flush();
            match reporter.messages.read(&reporter.link, || {}) {
                Received::Message(header, bytes) if header.kind == FrameKind::NodeReport => {
                    let Ok(NodeReport { update, .. }) = decode_report(&bytes) else { return false };
                    // A leader that joins after the decision has missed it, because its connection was interrupted.
                    let known = |rank: &Rank| rank.0 < core.tree.size;
                    let fault = match update.died.into_iter().filter(known).min() {
                        Some(rank) => GroupFault::Lost(rank),
                        None => silent(&core.tree, reporter.link.peer, silence),
                    };
                    let reply = encode_reply(&AssemblyReply::Failed(fault.clone()));
                    post(&reporter.link, own, FrameKind::NodeDecision, &reply);
                    if let Some(stream) = reporter.link.socket.stream() {
                        stream.shut_down_sending();
                    }
                    faults.push(fault);
                    true
                }
                Received::Message(..) | Received::Nothing => reporter.since.elapsed() < silence,
                Received::Closed => false,
            }
        });
        faults
    }
}

impl OutgoingReport {
    /// Advances the report. Returns false when it is done.
    fn step(&mut self, context: &NodeContext) -> bool {
        if let Some(link) = &self.sent {
            link.flush();
            let Some(stream) = link.socket.stream() else { return false };
            let mut buffer = vec![0; wholemem_os::packet::MAX_PACKET];
            return loop {
                match stream.recv(&mut buffer) {
                    Ok(_) => {}
                    Err(error) => break error == wholemem_os::Error::TimedOut,
                }
            };
        }
        let Some(attempt) = &mut self.attempt else {
            if Instant::now() >= self.retry_at {
                self.retry_at = Instant::now() + RETRY;
                let hello = (Purpose::Report, context.rank, context.size);
                self.attempt =
                    NodeAttempt::begin(self.address, hello, context.silence).ok().and_then(Result::ok);
            }
            return true;
        };
        match attempt.step(&context.key, context.silence) {
            AttemptOutcome::Pending => {}
            AttemptOutcome::Authenticated(peer) => {
                let NodePeer { rank, socket } = *peer;
                let link = Arc::new(RankLink::new(rank, LinkSocket::Stream(Box::new(socket))));
                let update = JoinUpdate { joined: Vec::new(), died: vec![self.dead] };
                let report = encode_report(&NodeReport { address: self.address, update });
                post(&link, context.rank, FrameKind::NodeReport, &report);
                self.sent = Some(link);
            }
            AttemptOutcome::Refused | AttemptOutcome::Failed | AttemptOutcome::OtherSize(..) => {
                self.attempt = None
            }
        }
        true
    }
}

impl ProgressThread {
    /// Creates the progress thread of a group of several nodes, whose ranks have all joined.
    pub(crate) fn over_nodes(core: Arc<RankCore>, assembled: Assembled) -> Self {
        let mut progress = Self::new(core, Duration::ZERO, None, None);
        progress.protocol = None;
        let Assembled { topology, context, local, remote, acceptor } = assembled;
        for peer in local {
            let stall = StallDetector::new(peer.probe.heartbeats());
            progress.add_link(peer.rank, peer.link);
            progress.peers.insert(peer.rank, Neighbour { probe: peer.probe, process: peer.process, stall });
        }
        let mut links: BTreeMap<Rank, NodeLink> = BTreeMap::new();
        for node in remote {
            // Of two connections of one rank, the one that has not ended is used.
            if links.get(&node.rank).is_none_or(NodeLink::is_closed) {
                progress.add_link(node.rank, Arc::clone(&node.link));
                links.insert(node.rank, node);
            }
        }
        progress.core.set_parts(&[]);
        progress.nodes =
            Some(NodeState { context, links, acceptor, reporters: Vec::new(), reports: Vec::new() });
        // A rank that died after it had reported, and before the decision, is not connected.
        let is_connected = |rank: &Rank| progress.readers.contains_key(rank);
        if let Some(lost) = topology.neighbours().find(|rank| !is_connected(rank)) {
            progress.core.fail_group(GroupFault::Lost(lost), None);
        }
        progress
    }

    fn add_link(&mut self, rank: Rank, link: Arc<RankLink>) {
        self.core.links().insert(rank, Arc::clone(&link));
        self.readers.insert(rank, LinkReader::new(link));
    }

    /// Returns true if a rank is a neighbour on another node.
    pub(super) fn is_remote(&self, rank: Rank) -> bool {
        self.nodes.is_some() && !self.core.tree.is_here(rank)
    }

    /// Advances the connections to other nodes.
    pub(super) fn step_nodes(&mut self) {
        let Some(nodes) = &mut self.nodes else { return };
        nodes.step_reports();
        let mut faults = nodes.step_reporters(&self.core);
        let mut ended = Vec::new();
        for (rank, node) in &mut nodes.links {
            let is_over = {
                let state = self.core.state();
                state.group.fault().is_some() || state.group.has_left(*rank)
            };
            let mut failure = None;
            if self.readers.get(rank).is_none_or(|reader| reader.ended) && !node.is_closed() {
                if is_over {
                    ended.push(*rank);
                    continue;
                }
                failure = node.closed(&nodes.context);
            }
            match failure.or_else(|| node.step(&nodes.context)) {
                None => continue,
                Some(LinkFailure::Lost { .. }) => faults.push(GroupFault::Lost(*rank)),
                Some(LinkFailure::Silent) => {
                    faults.push(silent(&self.core.tree, *rank, nodes.context.silence));
                }
            }
            ended.push(*rank);
        }
        for rank in ended {
            nodes.links.remove(&rank);
        }
        for fault in faults {
            self.core.fail_group(fault, None);
        }
    }

    /// Handles the death of a rank of this node: if it is the leader, other nodes are informed.
    pub(super) fn report_death(&mut self, dead: Rank) {
        if let Some(nodes) = &mut self.nodes {
            self.core.remove_stale_sockets();
            nodes.report_leader(&self.core.tree, dead);
        }
    }

    /// Ends the group if a rank of this node to which this rank is connected is stopped. Other nodes give up a stopped
    /// leader in the same time.
    pub(super) fn give_up_stalled(&self) {
        let Some(nodes) = &self.nodes else { return };
        let silence = nodes.context.silence;
        let ranks: Vec<_> = self
            .peers
            .iter()
            .filter(|(_, peer)| peer.stall.is_stalled_for(silence))
            .map(|(rank, _)| *rank)
            .collect();
        if !ranks.is_empty() {
            let (node, milliseconds) = (self.core.tree.node_of(self.core.tree.rank), milliseconds(silence));
            self.core.fail_group(GroupFault::NodeSilent { node, ranks, milliseconds }, None);
        }
    }
}
