//! The work of the progress thread while a group is being formed: it accepts children, connects to the parent, and runs
//! the [`JoinProtocol`](crate::machine::join) state machine.
//!
//! If a neighbour dies meanwhile, this rank tries to take its position: it listens at an address that is derived from
//! the id and the dead rank. Only one process can listen there, so one neighbour becomes the successor, and the
//! others connect to it. If the successor dies too, the address is free again as soon as the kernel has closed its
//! socket. A forked child that holds the socket open delays that: then the survivors wait until their timeout
//! expires.

use std::collections::BTreeSet;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use wholemem_os::packet::PacketListener;
use wholemem_os::robust::LivenessProbe;
use wholemem_os::{PacketSocket, PidFd};

use super::{LinkReader, Neighbour, ProgressThread};
use crate::core::{GroupPhase, RankCore};
use crate::fault::GroupFault;
use crate::handshake::{Acceptor, Connector, JoinedPeer, is_refusal};
use crate::links::RankLink;
use crate::machine::join::{Input, Output};
use crate::machine::stall_detector::StallDetector;
use crate::operation::Operation;
use crate::rank::Tree;
use crate::wire::frame::{FrameHeader, FrameKind, encode_fault, encode_join_update};
use crate::{Error, Rank};

/// The interval at which a rank checks whether ranks that had joined a dead rank still listen.
const PROBE_EVERY: Duration = Duration::from_millis(100);

/// The connections of a joining rank to its parent and its children.
#[derive(Debug)]
pub(super) struct Joining {
    /// Listeners for children: at this rank's own address, and at the addresses for the positions that it has taken
    /// from dead ranks.
    acceptors: Vec<Acceptor>,
    /// Connection attempts to the parent, and to a possible successor of a dead parent.
    connectors: Vec<Connector>,
    /// The position of the tree in which `connectors` join a parent, and the position of that parent.
    target: Option<(Rank, Rank)>,
    /// The positions of this rank in the tree: its own, and those of dead ranks that it has taken.
    positions: BTreeSet<Rank>,
    /// The time of the last check whether ranks that had joined a dead rank still listen.
    probed: Instant,
}

impl Joining {
    pub(super) fn new(rank: Rank, acceptor: Option<Acceptor>) -> Self {
        let acceptors = acceptor.into_iter().collect();
        Self {
            acceptors,
            connectors: Vec::new(),
            target: None,
            positions: BTreeSet::from([rank]),
            probed: Instant::now(),
        }
    }

    /// Returns the sockets of all listeners and connection attempts, which the caller polls for reading.
    pub(super) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.acceptors.iter().flat_map(Acceptor::fds).chain(self.connectors.iter().filter_map(Connector::fd))
    }

    /// Returns the time until the next attempt to connect to the parent.
    pub(super) fn retry_in(&self) -> Option<Duration> {
        self.connectors.iter().filter_map(Connector::retry_in).min()
    }

    pub(super) fn has_position(&self, rank: Rank) -> bool {
        self.positions.contains(&rank)
    }

    /// Stops accepting children and connecting to a parent.
    fn end(&mut self) {
        self.acceptors.clear();
        self.connectors.clear();
    }

    /// Starts connecting to the target parent, if the target has changed.
    fn connect_to(&mut self, core: &RankCore, target: Option<(Rank, Rank)>) {
        if self.target == target {
            return;
        }
        self.target = target;
        self.connectors.clear();
        let Some((position, above)) = target else { return };
        let (id, tree) = (&core.id, core.tree.position(position));
        for address in [id.address(above), id.successor_address(above)] {
            let connector = Connector::new(address, above, tree, id.key(), id.has_secret());
            self.connectors.push(if position == core.tree.rank {
                connector
            } else {
                connector.for_dead_rank()
            });
        }
    }

    /// Resets the target after this rank has joined a parent. If the parent dies at once, the rank connects to the same
    /// target again.
    fn connected(&mut self) {
        self.connectors.clear();
        self.target = None;
    }
}

impl ProgressThread {
    /// Advances the handshakes with the parent and the children.
    pub(super) fn join(&mut self) {
        let Some(protocol) = &self.protocol else { return };
        self.joining.connect_to(&self.core, protocol.target());
        for index in 0..self.joining.connectors.len() {
            match self.joining.connectors[index].step(&self.core.liveness) {
                Ok(None) => {}
                Ok(Some(joined)) => {
                    if self.add_peer(joined) {
                        self.joining.connected();
                        self.protocol(Input::ParentJoined);
                        break;
                    }
                }
                Err(error) => return self.fail(error),
            }
        }
        let connectors = &self.joining.connectors;
        if !connectors.is_empty() {
            let is_refused = connectors.iter().all(Connector::is_refused);
            self.protocol(if is_refused { Input::Refused } else { Input::Reached });
        }
        let (own, peers, liveness) = (self.core.tree.rank, &self.peers, &self.core.liveness);
        let mut joined = Vec::new();
        for acceptor in &mut self.joining.acceptors {
            joined.extend(acceptor.serve(liveness, |rank| {
                let is_free = rank != own && !peers.contains_key(&rank);
                if let Some(protocol) = self.protocol.as_mut().filter(|_| is_free) {
                    protocol.step(self.began.elapsed(), Input::ChildAdmitted(rank));
                    liveness.set_status(protocol.record());
                }
                is_free
            }));
        }
        for joined in joined {
            let rank = joined.rank;
            if self.add_peer(joined) {
                self.protocol(Input::ChildJoined(rank));
            }
        }
    }

    /// Adds a rank whose handshake is complete to the neighbours. Returns false if its descriptors are unusable.
    pub(super) fn add_peer(&mut self, joined: JoinedPeer) -> bool {
        let JoinedPeer { rank, socket, fds } = joined;
        let mut fds = fds.into_iter();
        let (Some(probe), Some(process)) = (fds.next(), fds.next()) else { return false };
        let (Ok(probe), Ok(process)) = (LivenessProbe::import(probe), PidFd::adopt(process)) else {
            tracing::warn!(%rank, "an authenticated rank sent unusable descriptors");
            return false;
        };
        let link = Arc::new(RankLink::new(rank, socket));
        self.core.links().insert(rank, Arc::clone(&link));
        self.readers.insert(rank, LinkReader::new(link));
        let stall = StallDetector::new(probe.heartbeats());
        self.peers.insert(rank, Neighbour { probe, process, stall });
        true
    }

    pub(super) fn protocol(&mut self, input: Input) {
        let Some(protocol) = &mut self.protocol else { return };
        let outputs = protocol.step(self.began.elapsed(), input);
        // The join record is published before any neighbour is informed: if this rank dies meanwhile, each neighbour
        // knows what the others may have received.
        self.core.liveness.set_status(protocol.record());
        let position = protocol.position();
        if outputs.iter().any(|output| matches!(output, Output::End(_))) {
            // Socket files are removed before the decision is sent, so that no file is left if this rank dies while it
            // sends the decision, or a child dies before it reads the decision.
            self.joining.end();
            for child in self.peers.keys().filter(|rank| Some(**rank) != position.parent()) {
                self.core.id.address(*child).remove();
            }
        }
        for output in outputs {
            match output {
                Output::Up(update) => {
                    if let Some(parent) = position.parent() {
                        let header = FrameHeader::new(
                            FrameKind::JoinUpdate,
                            Operation::None,
                            position.rank,
                            parent,
                            0,
                        );
                        self.core.post(parent, header, &encode_join_update(&update));
                    }
                }
                Output::Down(child, decision) => {
                    // The message has the rank that the child expects as its parent: the dead rank, if this rank has
                    // taken that rank's position.
                    let parent = Tree { rank: child, ..position }.parent().expect("a child is not rank 0");
                    let header = FrameHeader::new(FrameKind::JoinDecision, Operation::None, parent, child, 0);
                    self.core.post(child, header, &encode_fault(decision.err().as_ref()));
                }
                Output::End(Ok(())) => {
                    (self.protocol, self.split_from) = (None, None);
                    self.enter(GroupPhase::Ready);
                    return;
                }
                Output::End(Err(fault)) => {
                    if let GroupFault::Missing(missing) = &fault {
                        missing.iter().for_each(|rank| self.core.id.address(*rank).remove_stale());
                    }
                    self.fail(fault.error_within(None, self.timeout, true));
                    return;
                }
            }
        }
    }

    /// Takes the positions in the tree of dead neighbours that no other rank has taken.
    pub(super) fn take_vacant_positions(&mut self) {
        let vacant = self.protocol.as_ref().map(|protocol| protocol.vacant_positions()).unwrap_or_default();
        for position in vacant {
            let id = &self.core.id;
            // Binding fails if another neighbour of the dead rank has taken the position: one of the two then joins the
            // other. The socket file of a successor that has died is replaced.
            let Ok(listener) = PacketListener::bind(&id.successor_address(position)) else { continue };
            let tree = self.core.tree.position(position);
            self.joining.acceptors.push(Acceptor::new(listener, tree, id.key(), id.has_secret()));
            self.joining.positions.insert(position);
            self.protocol(Input::PositionTaken(position));
        }
    }

    /// Checks whether ranks that had joined a dead rank, and have not joined its successor, still listen.
    ///
    /// Every rank listens at its own address until it has received the decision.
    pub(super) fn probe_unaccounted(&mut self) {
        if self.joining.probed.elapsed() < PROBE_EVERY {
            return;
        }
        self.joining.probed = Instant::now();
        let unaccounted: Vec<_> = self.protocol.iter().flat_map(|protocol| protocol.unaccounted()).collect();
        for rank in unaccounted {
            let address = self.core.id.address(rank);
            if PacketSocket::connect(&address).is_err_and(|error| is_refusal(&error)) {
                address.remove_stale();
                self.protocol(Input::Gone(rank));
            }
        }
    }

    pub(super) fn fail(&mut self, error: Error) {
        self.joining.end();
        if let Some(protocol) = &self.protocol {
            for dead in protocol.died() {
                self.core.id.address(dead).remove_stale();
                self.core.id.successor_address(dead).remove_stale();
            }
        }
        (self.protocol, self.split_from) = (None, None);
        self.enter(GroupPhase::Failed(error));
    }

    fn enter(&self, phase: GroupPhase) {
        let mut state = self.core.state();
        if state.phase == GroupPhase::Joining {
            state.phase = phase;
            self.core.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::UniqueId;

    #[test]
    fn a_rank_whose_parent_dies_at_once_connects_to_the_same_target_again() {
        let core = RankCore::create(UniqueId::create_private().unwrap(), Tree::new(Rank(1), 3)).unwrap();
        let mut joining = Joining::new(Rank(1), None);
        let target = Some((Rank(1), Rank(0)));
        for _ in 0..2 {
            joining.connect_to(&core, target);
            assert_eq!(joining.connectors.len(), 2, "to rank 0, and to its successor");
            // This rank joins the parent, which dies before `connect_to` is called again.
            joining.connected();
            assert_eq!(joining.connectors.len(), 0);
        }
    }
}
