//! The assembly protocol: how the ranks of several nodes join a group.
//!
//! ```text
//!   rank --- Unix socket ---> leader of its node --- TCP ---> root: the leader of node 0 (rank 0)
//!        joined                          joined {2, 3}, died {}
//!        <--- complete, with the map of nodes, or the fault ---
//! ```
//!
//! Two ranks are on the same node if one can pass the other a descriptor: a rank connects to the leader of its node by a
//! Unix socket, and both pass the descriptors of their liveness pages. The first rank of a node that binds the leader's
//! address is its leader; on the node of rank 0 it is rank 0. The root decides when every rank has joined or died, or
//! when its timeout expires. So each rank sends one message, each leader a few, and the root one for each node.
//!
//! **Deaths.** If a leader dies, another rank of its node binds the leader's address, and reports the ranks of the node
//! again, with the death. If no rank of the node is left, the root gives the ranks of the node up after the time in
//! which a silent node is given up. If the root dies, all ranks that had joined get an error that names it. A connection
//! between nodes that is interrupted is made again, as long as the decision has not arrived.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use super::give_up_on_joining_at;
use crate::Rank;
use crate::fault::GroupFault;
use crate::topology::{NodeMap, NodeRanks};
use crate::wire::frame::JoinUpdate;

/// The shortest time between two reports of a leader.
const REPORT_INTERVAL: Duration = Duration::from_millis(2);

/// The number of a connection between the root and another node.
pub(crate) type LinkNumber = u64;

/// If no process listens at the address of the root for this long, a leader that replaces a dead one assumes that the
/// decision was made without it.
const MAX_REFUSED: Duration = Duration::from_millis(500);

/// The decision of the root: the ranks of all nodes, or the reason why joining failed.
pub(crate) type Decision = Result<Vec<NodeRanks>, GroupFault>;

/// An event at a rank that leads its node while the group is being formed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LeaderInput {
    /// A rank of this node has joined.
    Joined(Rank),
    /// A rank of this node has died after it joined this or another leader.
    Died(Rank),
    /// A rank of this node has given up, or the root has refused it, because another process has joined as this rank before.
    Left(Rank),
    /// The connection to the root is established.
    Connected,
    /// The connection to the root has ended.
    Disconnected,
    /// The process of the root has ended.
    RootLost,
    /// No process listens at the address of the root.
    RootRefuses,
    Decision(Decision),
    Tick,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LeaderOutput {
    /// Report to the root which ranks have joined or died. The first report on a connection contains all ranks.
    Report(JoinUpdate),
    /// Inform the ranks of this node; joining has ended.
    End(Decision),
}

/// The state of a leader of a node other than that of the root.
#[derive(Debug)]
pub(crate) struct LeaderAssembly {
    root: Rank,
    give_up: Duration,
    joined: BTreeSet<Rank>,
    died: BTreeSet<Rank>,
    is_connected: bool,
    unreported: JoinUpdate,
    next_report: Duration,
    /// True if a previous leader of this node was connected to the root.
    root_was_reached: bool,
    refused_since: Option<Duration>,
    ended: bool,
}

impl LeaderAssembly {
    pub(crate) fn new(rank: Rank, root: Rank, timeout: Duration) -> Self {
        Self {
            root,
            give_up: give_up_on_joining_at(timeout),
            joined: BTreeSet::from([rank]),
            died: BTreeSet::new(),
            is_connected: false,
            unreported: JoinUpdate::default(),
            next_report: Duration::ZERO,
            root_was_reached: false,
            refused_since: None,
            ended: false,
        }
    }

    /// Creates the state of a leader that replaces a dead one, which was connected to the root.
    pub(crate) fn after_connected_leader(self) -> Self {
        Self { root_was_reached: true, ..self }
    }

    /// Returns the fault of a group whose root has left or died.
    fn lost(&self) -> GroupFault {
        GroupFault::Lost(self.died.first().copied().unwrap_or(self.root))
    }

    pub(crate) fn step(&mut self, now: Duration, input: LeaderInput) -> Vec<LeaderOutput> {
        if self.ended {
            return Vec::new();
        }
        match input {
            LeaderInput::Joined(rank) => {
                if self.joined.insert(rank) {
                    self.unreported.joined.push(rank);
                }
            }
            LeaderInput::Died(rank) => {
                self.joined.remove(&rank);
                if self.died.insert(rank) {
                    self.unreported.died.push(rank);
                }
            }
            LeaderInput::Left(rank) => {
                self.joined.remove(&rank);
            }
            LeaderInput::Connected => {
                self.refused_since = None;
                self.is_connected = true;
                self.unreported = JoinUpdate {
                    joined: self.joined.iter().copied().collect(),
                    died: self.died.iter().copied().collect(),
                };
                self.next_report = now;
            }
            LeaderInput::Disconnected => self.is_connected = false,
            // If a previous leader of this node has died, the root may have left the group that failed thereby.
            LeaderInput::RootLost => return self.end(Err(self.lost())),
            LeaderInput::RootRefuses => {
                let since = *self.refused_since.get_or_insert(now);
                if self.root_was_reached && now.saturating_sub(since) >= MAX_REFUSED {
                    return self.end(Err(self.lost()));
                }
            }
            LeaderInput::Decision(decision) => return self.end(decision),
            LeaderInput::Tick => {}
        }
        if now >= self.give_up {
            let fault = self.died.first().map(|rank| GroupFault::Lost(*rank));
            return self.end(Err(fault.unwrap_or_else(|| GroupFault::Missing(vec![self.root]))));
        }
        if self.is_connected && now >= self.next_report && self.unreported != JoinUpdate::default() {
            self.next_report = now + REPORT_INTERVAL;
            return vec![LeaderOutput::Report(std::mem::take(&mut self.unreported))];
        }
        Vec::new()
    }

    fn end(&mut self, decision: Decision) -> Vec<LeaderOutput> {
        self.ended = true;
        vec![LeaderOutput::End(decision)]
    }
}

/// An event at the root while the group is being formed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RootInput {
    /// A rank of this node has joined.
    Joined(Rank),
    /// A rank of this node has died, or a leader has reported the death.
    Died(Rank),
    /// The process of the leader at the other end of a connection has ended.
    LeaderDied(LinkNumber, Rank),
    /// A rank of this node has given up.
    Left(Rank),
    /// The leader of another node reports which ranks of its node have joined or died.
    Report {
        link: LinkNumber,
        leader: Rank,
        address: SocketAddr,
        update: JoinUpdate,
    },
    /// The connection to the leader of another node has ended.
    Disconnected(LinkNumber),
    Tick,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RootOutput {
    /// Another process has joined as this rank before: inform the leader that reported it.
    Taken(LinkNumber, Rank),
    /// Inform all ranks; joining has ended.
    End(Decision),
}

/// The state of the leader of node 0, which decides when the group is complete.
#[derive(Debug)]
pub(crate) struct RootAssembly {
    rank: Rank,
    address: SocketAddr,
    size: u32,
    timeout: Duration,
    silence: Duration,
    here: BTreeSet<Rank>,
    others: BTreeMap<LinkNumber, NodeRanks>,
    died: BTreeSet<Rank>,
    /// The ranks whose leader has no connection any more, with the time from which they are not waited for if a rank has
    /// died.
    orphans: BTreeMap<Rank, Duration>,
    /// The connections of leaders that were refused, because another process has joined as the same rank before.
    refused: BTreeSet<LinkNumber>,
    ended: bool,
}

impl RootAssembly {
    pub(crate) fn new(
        rank: Rank,
        size: u32,
        address: SocketAddr,
        timeout: Duration,
        silence: Duration,
    ) -> Self {
        Self {
            rank,
            address,
            size,
            timeout,
            silence,
            here: BTreeSet::from([rank]),
            others: BTreeMap::new(),
            died: BTreeSet::new(),
            orphans: BTreeMap::new(),
            refused: BTreeSet::new(),
            ended: false,
        }
    }

    pub(crate) fn step(&mut self, now: Duration, input: RootInput) -> Vec<RootOutput> {
        let mut outputs = Vec::new();
        if self.ended {
            return outputs;
        }
        match input {
            RootInput::Joined(rank) => {
                self.here.insert(rank);
                self.orphans.remove(&rank);
            }
            RootInput::Died(rank) => self.on_death(rank),
            // A leader that was refused is not the process that has joined as its rank.
            RootInput::LeaderDied(link, rank) if !self.refused.contains(&link) => self.on_death(rank),
            RootInput::LeaderDied(..) => {}
            RootInput::Left(rank) => {
                self.here.remove(&rank);
            }
            RootInput::Report { link, leader, address, update } => {
                self.on_report(link, leader, address, update, &mut outputs);
            }
            RootInput::Disconnected(link) => {
                if let Some(node) = self.others.remove(&link) {
                    let until = now + self.silence;
                    let living = node.ranks.into_iter().filter(|rank| !self.died.contains(rank));
                    self.orphans.extend(living.map(|rank| (rank, until)));
                }
            }
            RootInput::Tick => {}
        }
        if let Some(decision) = self.decision(now) {
            self.ended = true;
            outputs.push(RootOutput::End(decision));
        }
        outputs
    }

    fn on_death(&mut self, rank: Rank) {
        if rank.0 < self.size && rank != self.rank {
            self.died.insert(rank);
            self.here.remove(&rank);
            self.orphans.remove(&rank);
            self.others.values_mut().for_each(|node| node.ranks.retain(|other| *other != rank));
        }
    }

    fn on_report(
        &mut self,
        link: LinkNumber,
        leader: Rank,
        address: SocketAddr,
        update: JoinUpdate,
        outputs: &mut Vec<RootOutput>,
    ) {
        // Connections are numbered in their order. A report on an interrupted one may arrive late: the leader has reported all
        // ranks again on the new connection.
        let is_newer = |(other, node): (&LinkNumber, &NodeRanks)| {
            *other > link && (node.leader, node.address) == (leader, address)
        };
        if self.others.iter().any(is_newer) {
            return;
        }
        // The leader of a node may have changed before the end of the connection to the previous leader is known.
        let is_stale = |node: &NodeRanks| {
            (node.leader, node.address) == (leader, address) || update.died.contains(&node.leader)
        };
        let stale: Vec<_> = self
            .others
            .iter()
            .filter(|(other, node)| **other != link && is_stale(node))
            .map(|(link, _)| *link)
            .collect();
        for other in stale {
            if let Some(node) = self.others.remove(&other) {
                self.orphans.extend(node.ranks.into_iter().map(|rank| (rank, Duration::MAX)));
            }
        }
        let mut new = NodeRanks { leader, address, ranks: Vec::new() };
        if let Some(node) = self.others.remove(&link) {
            new = node;
        }
        for rank in update.joined {
            let is_taken = rank.0 >= self.size
                || self.here.contains(&rank)
                || self.others.values().any(|node| node.ranks.contains(&rank));
            if is_taken {
                if rank == leader {
                    self.refused.insert(link);
                }
                outputs.push(RootOutput::Taken(link, rank));
            } else if !self.died.contains(&rank) && !new.ranks.contains(&rank) {
                self.orphans.remove(&rank);
                new.ranks.push(rank);
            }
        }
        new.ranks.sort_unstable();
        if new.ranks.contains(&leader) {
            self.others.insert(link, new);
        }
        update.died.into_iter().for_each(|rank| self.on_death(rank));
    }

    fn decision(&self, now: Duration) -> Option<Decision> {
        let joined = self.here.len() + self.others.values().map(|node| node.ranks.len()).sum::<usize>();
        let gone = self.orphans.values().filter(|until| now >= **until).count();
        let waits =
            joined + self.died.len() + if self.died.is_empty() { 0 } else { gone } < self.size as usize;
        if waits && now < self.timeout {
            return None;
        }
        if let Some(rank) = self.died.first() {
            return Some(Err(GroupFault::Lost(*rank)));
        }
        if waits {
            return Some(Err(GroupFault::Missing(self.missing())));
        }
        let here = NodeRanks {
            leader: self.rank,
            address: self.address,
            ranks: self.here.iter().copied().collect(),
        };
        let mut others: Vec<_> = self.others.values().cloned().collect();
        others.sort_by_key(|node| node.ranks[0]);
        Some(Ok(std::iter::once(here).chain(others).collect()))
    }

    fn missing(&self) -> Vec<Rank> {
        let joined = |rank: &Rank| {
            self.here.contains(rank) || self.others.values().any(|node| node.ranks.contains(rank))
        };
        (0..self.size).map(Rank).filter(|rank| !joined(rank)).collect()
    }
}

/// Returns the map of a complete group.
pub(crate) fn node_map(nodes: Vec<NodeRanks>, size: u32) -> Option<NodeMap> {
    NodeMap::new(nodes, size)
}

#[cfg(test)]
mod tests;
