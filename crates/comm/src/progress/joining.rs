//! What the progress thread does while a group comes together: it accepts children, connects to the parent, and follows the
//! [`JoinProtocol`](crate::machine::join) machine.
//!
//! If a neighbour dies meanwhile, this rank tries to take its place, by listening at an address that follows from the id and
//! the dead rank. Only one process can listen there, so one neighbour takes the place, and the others connect to it. If that one
//! dies too, the address is free again as soon as the kernel has closed its socket. A forked child that keeps the socket open
//! delays that: then the survivors wait until their timeout has passed.

use std::collections::BTreeSet;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use wholemem_os::packet::PacketListener;
use wholemem_os::robust::LivenessProbe;
use wholemem_os::{PacketSocket, PidFd};

use super::{Peer, Progress, Reading};
use crate::core::{Core, Phase};
use crate::fault::Fault;
use crate::handshake::{Acceptor, Connector, Joined, is_refusal};
use crate::links::Link;
use crate::machine::join::{Input, Output};
use crate::machine::stall_detector::StallDetector;
use crate::rank::Tree;
use crate::wire::frame::{Header, Kind, What, encode_fault, encode_news};
use crate::{Error, Rank};

/// How often to test whether ranks that had joined a dead rank still listen.
const PROBE_EVERY: Duration = Duration::from_millis(100);

/// The connections of a rank that is joining, on both sides.
#[derive(Debug)]
pub(super) struct Joining {
    /// Where children are accepted: at this rank's own address, and at those of ranks whose place it has taken.
    acceptors: Vec<Acceptor>,
    /// To the parent, and to a rank that may have taken its place.
    connectors: Vec<Connector>,
    /// The place that `connectors` are for, and the one above it.
    seeks: Option<(Rank, Rank)>,
    /// The places of this rank in the tree: its own, and those of ranks that died.
    places: BTreeSet<Rank>,
    /// When ranks were last probed.
    probed: Instant,
}

impl Joining {
    pub(super) fn new(rank: Rank, acceptor: Option<Acceptor>) -> Self {
        let acceptors = acceptor.into_iter().collect();
        Self {
            acceptors,
            connectors: Vec::new(),
            seeks: None,
            places: BTreeSet::from([rank]),
            probed: Instant::now(),
        }
    }

    /// Everything to be polled for reading.
    pub(super) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.acceptors.iter().flat_map(Acceptor::fds).chain(self.connectors.iter().filter_map(Connector::fd))
    }

    /// When to try again, if nothing can be read.
    pub(super) fn again(&self) -> Option<Duration> {
        self.connectors.iter().filter_map(Connector::again).min()
    }

    pub(super) fn has_place(&self, rank: Rank) -> bool {
        self.places.contains(&rank)
    }

    /// Nothing is accepted any more, and nothing is connected to.
    fn end(&mut self) {
        self.acceptors.clear();
        self.connectors.clear();
    }

    /// Connects to the rank above that this rank has to join now.
    fn seek(&mut self, core: &Core, seeks: Option<(Rank, Rank)>) {
        if self.seeks == seeks {
            return;
        }
        self.seeks = seeks;
        self.connectors.clear();
        let Some((place, above)) = seeks else { return };
        let (id, tree) = (&core.id, Tree { rank: place, ..core.tree });
        for address in [id.address(above), id.stand_in_address(above)] {
            let connector = Connector::new(address, above, tree, id.key(), id.has_secret());
            self.connectors.push(if place == core.tree.rank { connector } else { connector.for_dead_rank() });
        }
    }

    /// This rank has found a parent. If that dies at once, the rank seeks the same place again.
    fn connected(&mut self) {
        self.connectors.clear();
        self.seeks = None;
    }
}

impl Progress {
    /// Goes on with the joining, on both sides.
    pub(super) fn join(&mut self) {
        let Some(protocol) = &self.protocol else { return };
        self.joining.seek(&self.core, protocol.seeks());
        for index in 0..self.joining.connectors.len() {
            match self.joining.connectors[index].step(&self.core.heart) {
                Ok(None) => {}
                Ok(Some(joined)) => {
                    if self.meet(joined) {
                        self.joining.connected();
                        self.protocol(Input::ParentProved);
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
        let (own, peers, heart) = (self.core.tree.rank, &self.peers, &self.core.heart);
        let mut joined = Vec::new();
        for acceptor in &mut self.joining.acceptors {
            joined.extend(acceptor.serve(heart, |rank| {
                let is_free = rank != own && !peers.contains_key(&rank);
                if let Some(protocol) = self.protocol.as_mut().filter(|_| is_free) {
                    protocol.step(self.began.elapsed(), Input::ChildAdmitted(rank));
                    heart.set_status(protocol.record());
                }
                is_free
            }));
        }
        for joined in joined {
            let rank = joined.rank;
            if self.meet(joined) {
                self.protocol(Input::ChildProved(rank));
            }
        }
    }

    /// Adds a rank whose handshake is complete to the neighbours.
    pub(super) fn meet(&mut self, joined: Joined) -> bool {
        let Joined { rank, socket, fds } = joined;
        let mut fds = fds.into_iter();
        let (Some(pulse), Some(process)) = (fds.next(), fds.next()) else { return false };
        let (Ok(pulse), Ok(process)) = (LivenessProbe::import(pulse), PidFd::adopt(process)) else {
            tracing::warn!(%rank, "a rank proved itself, but what it sent of itself cannot be used");
            return false;
        };
        let link = Arc::new(Link::new(rank, socket));
        self.core.links().insert(rank, Arc::clone(&link));
        self.readings.insert(rank, Reading::new(link));
        let stall = StallDetector::new(pulse.heartbeats());
        self.peers.insert(rank, Peer { pulse, process, stall });
        true
    }

    pub(super) fn protocol(&mut self, input: Input) {
        let Some(protocol) = &mut self.protocol else { return };
        let outputs = protocol.step(self.began.elapsed(), input);
        // Before any neighbour is told: if this rank dies meanwhile, they know what the others may have heard.
        self.core.heart.set_status(protocol.record());
        let place = protocol.place();
        if outputs.iter().any(|output| matches!(output, Output::End(_))) {
            // Before the decision is sent: this rank may die while it sends it, and a child before it reads it. Neither
            // leaves the file of its socket.
            self.joining.end();
            for child in self.peers.keys().filter(|rank| Some(**rank) != place.parent()) {
                self.core.id.address(*child).remove();
            }
        }
        for output in outputs {
            match output {
                Output::Up(news) => {
                    if let Some(parent) = place.parent() {
                        let header = Header::new(Kind::News, What::Nothing, place.rank, parent, 0);
                        self.core.post(parent, header, &encode_news(&news));
                    }
                }
                Output::Down(child, decision) => {
                    // To the child, this rank is the one whose place it has.
                    let parent = Tree { rank: child, ..place }.parent().expect("rank 0 is the child of none");
                    let header = Header::new(Kind::Decision, What::Nothing, parent, child, 0);
                    self.core.post(child, header, &encode_fault(decision.err().as_ref()));
                }
                Output::End(Ok(())) => {
                    (self.protocol, self.whole) = (None, None);
                    self.enter(Phase::Up);
                    return;
                }
                Output::End(Err(fault)) => {
                    if let Fault::Missing(missing) = &fault {
                        missing.iter().for_each(|rank| self.core.id.address(*rank).remove_stale());
                    }
                    self.fail(fault.error_within(self.timeout, true));
                    return;
                }
            }
        }
    }

    /// Takes the places of dead neighbours that no other rank has taken.
    pub(super) fn take_vacant_places(&mut self) {
        let vacant = self.protocol.as_ref().map(|protocol| protocol.vacant()).unwrap_or_default();
        for place in vacant {
            let id = &self.core.id;
            // It is refused if another neighbour of the dead rank has taken the place: then this rank joins that one, or
            // that one joins this rank. The file of one that has died since is replaced.
            let Ok(listener) = PacketListener::bind(&id.stand_in_address(place)) else { continue };
            let tree = Tree { rank: place, ..self.core.tree };
            self.joining.acceptors.push(Acceptor::new(listener, tree, id.key(), id.has_secret()));
            self.joining.places.insert(place);
            self.protocol(Input::TookPlace(place));
        }
    }

    /// Tests whether ranks still listen that had joined a rank which died, and have not joined its successor.
    ///
    /// Every rank listens at its own address until it has learnt the decision.
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
                self.core.id.stand_in_address(dead).remove_stale();
            }
        }
        (self.protocol, self.whole) = (None, None);
        self.enter(Phase::Failed(error));
    }

    fn enter(&self, phase: Phase) {
        let mut state = self.core.state();
        if state.phase == Phase::Joining {
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
    fn a_rank_whose_parent_dies_at_once_connects_to_the_same_place_again() {
        let core = Core::create(UniqueId::create_private().unwrap(), Tree::new(Rank(1), 3)).unwrap();
        let mut joining = Joining::new(Rank(1), None);
        let seeks = Some((Rank(1), Rank(0)));
        for _ in 0..2 {
            joining.seek(&core, seeks);
            assert_eq!(joining.connectors.len(), 2, "to rank 0, and to a rank that has taken its place");
            // Before `seek` is called again, the parent is found, and found dead.
            joining.connected();
            assert_eq!(joining.connectors.len(), 0);
        }
    }
}
