//! Accepts connections from other processes, and authenticates them as ranks of the group.
//!
//! A connection belongs to a pending peer until the peer has proved that it knows the secret. Pending peers are
//! bounded: at most 64 at a time, one second and 256 bytes each, and none of their descriptors is installed in this
//! process. If the limit is reached, one of them is evicted: first those of another user, then those that have sent
//! no claim, then the oldest. A rank that was evicted connects again. Its handshake takes two round trips, so a flood
//! of connections keeps it out only if it replaces all pending peers in that time.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use wholemem_os::packet::PacketListener;
use wholemem_os::robust::LivenessLock;
use wholemem_os::{Deadline, PacketSocket};

use super::{JoinedPeer, liveness_fds};
use crate::id::{GroupKey, random};
use crate::rank::Tree;
use crate::wire::frame::{self, FrameKind};
use crate::wire::handshake::{AdmissionReply, Challenge, Claim, HandshakeMessage, MAX_LEN, Role, Transcript};
use crate::{Rank, Result};

/// The maximum number of pending peers: connected processes that are not authenticated.
const MAX_PENDING: usize = 64;

/// The time in which a connected peer must complete the handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(1);

/// The maximum number of bytes that a peer may send before it is authenticated.
const MAX_RECEIVED: usize = 256;

/// The listening socket of a rank, and the connected peers whose handshakes are not complete.
#[derive(Debug)]
pub(crate) struct Acceptor {
    listener: PacketListener,
    tree: Tree,
    /// True if every other rank may join, and not only the children of this rank in the tree.
    accepts_any: bool,
    key: GroupKey,
    /// If the group has no secret: the only user whose connections are accepted.
    only_user: Option<u32>,
    our_user: u32,
    pending: Vec<PendingPeer>,
}

/// A connected peer whose handshake is not complete.
#[derive(Debug)]
struct PendingPeer {
    socket: PacketSocket,
    since: Instant,
    user: u32,
    /// The number of bytes received from this peer.
    received: usize,
    state: PeerState,
}

/// The progress of the handshake with a connected peer.
#[derive(Debug, Clone, Copy)]
enum PeerState {
    Connected,
    Challenged(Transcript),
    /// The peer is authenticated as this rank, and has not sent its greeting (the last message of the handshake) yet.
    Admitted(Rank),
}

/// The result of reading the messages of a peer whose handshake is not complete.
enum PeerOutcome {
    Pending(PeerState),
    Joined(Rank, Vec<OwnedFd>),
    Close,
}

impl Acceptor {
    pub(crate) fn new(listener: PacketListener, tree: Tree, key: GroupKey, has_secret: bool) -> Self {
        let our_user = rustix::process::geteuid().as_raw();
        let only_user = (!has_secret).then_some(our_user);
        Self { listener, tree, accepts_any: false, key, only_user, our_user, pending: Vec::new() }
    }

    /// Accepts every other rank of the group, and not only the children of this rank in the tree.
    pub(crate) fn of_any_rank(self) -> Self {
        Self { accepts_any: true, ..self }
    }

    /// Returns the listening socket and the sockets of all pending peers, which the caller polls for reading.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        std::iter::once(self.listener.as_fd()).chain(self.pending.iter().map(|peer| peer.socket.as_fd()))
    }

    /// Accepts connections, reads the handshake messages of pending peers, and returns the peers that have joined.
    ///
    /// `admit` is called with the rank of an authenticated peer before the admission is sent, and returns whether it
    /// may join.
    pub(crate) fn serve(
        &mut self,
        liveness: &LivenessLock,
        mut admit: impl FnMut(Rank) -> bool,
    ) -> Vec<JoinedPeer> {
        let mut joined = Vec::new();
        self.read_all(liveness, &mut admit, &mut joined);
        loop {
            // `accept` fails if the descriptor table is full; the connections then wait in the backlog of the socket.
            let Ok(Some(socket)) = self.listener.accept() else { break };
            self.add(socket);
            // The new connection is read at once: a rank has usually sent its claim by now, so it is not evicted as a
            // peer without a claim.
            self.read_all(liveness, &mut admit, &mut joined);
        }
        joined
    }

    fn add(&mut self, socket: PacketSocket) {
        // If the kernel does not report which user has connected, the connection is closed.
        let Ok(user) = socket.peer_uid() else { return };
        if self.only_user.is_some_and(|only| only != user) {
            return;
        }
        let unauthenticated = self.pending.iter().filter(|peer| peer.is_unauthenticated()).count();
        if unauthenticated >= MAX_PENDING {
            let eviction_key = |peer: &PendingPeer| {
                let silent = matches!(peer.state, PeerState::Connected);
                (peer.user != self.our_user, silent, std::cmp::Reverse(peer.since))
            };
            let evictable = self.pending.iter().enumerate().filter(|(_, peer)| peer.is_unauthenticated());
            if let Some((index, _)) = evictable.max_by_key(|(_, peer)| eviction_key(peer)) {
                self.pending.swap_remove(index);
            }
        }
        self.pending.push(PendingPeer {
            socket,
            since: Instant::now(),
            user,
            received: 0,
            state: PeerState::Connected,
        });
    }

    fn read_all(
        &mut self,
        liveness: &LivenessLock,
        admit: &mut impl FnMut(Rank) -> bool,
        joined: &mut Vec<JoinedPeer>,
    ) {
        let mut index = 0;
        while index < self.pending.len() {
            // A rank that joined in this call is refused here, because the caller has not added it to its neighbours
            // yet.
            let mut admit = |rank| joined.iter().all(|joined| joined.rank != rank) && admit(rank);
            match self.read(index, liveness, &mut admit) {
                PeerOutcome::Pending(state) => {
                    self.pending[index].state = state;
                    index += 1;
                }
                PeerOutcome::Joined(rank, fds) => {
                    let peer = self.pending.swap_remove(index);
                    joined.push(JoinedPeer { rank, socket: peer.socket, fds });
                }
                PeerOutcome::Close => drop(self.pending.swap_remove(index)),
            }
        }
    }

    /// Reads all available messages of a pending peer, and replies to them.
    fn read(
        &mut self,
        index: usize,
        liveness: &LivenessLock,
        admit: &mut impl FnMut(Rank) -> bool,
    ) -> PeerOutcome {
        loop {
            let peer = &mut self.pending[index];
            if peer.is_unauthenticated() && peer.since.elapsed() > HANDSHAKE_TIMEOUT {
                return PeerOutcome::Close;
            }
            let mut buffer = [0; MAX_LEN];
            let received = match peer.state {
                // `recv` passes no control buffer, so the kernel installs no descriptors that an unauthenticated peer
                // sends.
                PeerState::Connected | PeerState::Challenged(_) => {
                    peer.socket.recv(&mut buffer, Deadline::NOW).map(|len| (len, Vec::new()))
                }
                PeerState::Admitted(_) => peer.socket.recv_with_fds(&mut buffer, 2, Deadline::NOW),
            };
            let (len, fds) = match received {
                Ok(received) => received,
                Err(wholemem_os::Error::TimedOut) => return PeerOutcome::Pending(peer.state),
                Err(_) => return PeerOutcome::Close,
            };
            peer.received += len;
            if peer.received > MAX_RECEIVED {
                return PeerOutcome::Close;
            }
            match self.reply(index, &buffer[..len], fds, liveness, admit) {
                PeerOutcome::Pending(state) => self.pending[index].state = state,
                next => return next,
            }
        }
    }

    fn reply(
        &self,
        index: usize,
        bytes: &[u8],
        fds: Vec<OwnedFd>,
        liveness: &LivenessLock,
        admit: &mut impl FnMut(Rank) -> bool,
    ) -> PeerOutcome {
        let peer = &self.pending[index];
        match (peer.state, HandshakeMessage::decode(bytes)) {
            (PeerState::Connected, Ok(HandshakeMessage::Claim(claim))) => match self.challenge(claim) {
                Ok((transcript, challenge)) if peer.send(&challenge, &[]) => {
                    PeerOutcome::Pending(PeerState::Challenged(transcript))
                }
                _ => PeerOutcome::Close,
            },
            (PeerState::Challenged(transcript), Ok(HandshakeMessage::Response(proof))) => {
                let rank = transcript.claim.rank;
                if !transcript.verify(&self.key, Role::Child, proof)
                    || transcript.claim.size != self.tree.size
                    || !self.may_join(rank)
                {
                    return PeerOutcome::Close;
                }
                // Two processes with the secret claim the same rank: the first that is authenticated gets the rank.
                if self.pending.iter().any(|other| other.is_admitted_as(rank)) || !admit(rank) {
                    peer.send(&HandshakeMessage::Admission(AdmissionReply::RankTaken), &[]);
                    return PeerOutcome::Close;
                }
                let Ok(own) = liveness_fds(liveness) else { return PeerOutcome::Close };
                let own: Vec<_> = own.iter().map(|fd| fd.as_fd()).collect();
                if !peer.send(&HandshakeMessage::Admission(AdmissionReply::Admitted), &own) {
                    return PeerOutcome::Close;
                }
                PeerOutcome::Pending(PeerState::Admitted(rank))
            }
            (PeerState::Admitted(rank), _) => match frame::decode(bytes) {
                Ok((header, _))
                    if header.kind == FrameKind::Greeting && header.src == rank && fds.len() == 2 =>
                {
                    PeerOutcome::Joined(rank, fds)
                }
                _ => PeerOutcome::Close,
            },
            _ => PeerOutcome::Close,
        }
    }

    /// Returns true if a peer is admitted and has not completed its handshake.
    pub(crate) fn has_admitted(&self) -> bool {
        self.pending.iter().any(|peer| !peer.is_unauthenticated())
    }

    fn may_join(&self, rank: Rank) -> bool {
        if self.accepts_any {
            rank.0 < self.tree.size && rank != self.tree.rank
        } else {
            self.tree.children().any(|child| child == rank)
        }
    }

    fn challenge(&self, claim: Claim) -> Result<(Transcript, HandshakeMessage)> {
        let transcript = Transcript {
            claim,
            parent: self.tree.rank,
            parent_size: self.tree.size,
            parent_nonce: random()?,
        };
        let challenge = Challenge {
            parent: self.tree.rank,
            size: self.tree.size,
            nonce: transcript.parent_nonce,
            proof: transcript.proof(&self.key, Role::Parent),
        };
        Ok((transcript, HandshakeMessage::Challenge(challenge)))
    }
}

impl PendingPeer {
    fn is_unauthenticated(&self) -> bool {
        !matches!(self.state, PeerState::Admitted(_))
    }

    fn is_admitted_as(&self, rank: Rank) -> bool {
        matches!(self.state, PeerState::Admitted(welcomed) if welcomed == rank)
    }

    /// Sends a handshake message to the peer without waiting. Returns false if the socket is full or closed.
    fn send(&self, hello: &HandshakeMessage, fds: &[BorrowedFd<'_>]) -> bool {
        self.socket.send(&hello.encode(), fds, Deadline::NOW).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handshake::Connector;
    use crate::{Error, UniqueId};

    #[test]
    fn a_rank_that_joins_in_a_call_is_taken_within_that_call() {
        let id = UniqueId::create().unwrap();
        let liveness = LivenessLock::create().unwrap();
        let listener = PacketListener::bind(&id.address(Rank(0))).unwrap();
        let mut acceptor = Acceptor::new(listener, Tree::new(Rank(0), 3), id.key(), id.has_secret());
        let connector =
            || Connector::new(id.address(Rank(0)), Rank(0), Tree::new(Rank(1), 3), id.key(), id.has_secret());
        let (mut first, mut second) = (connector(), connector());
        let admit_all = |_| true;

        // Both connectors claim rank 1 and are challenged. The first connector responds and is admitted.
        assert!(first.step(&liveness).unwrap().is_none() && second.step(&liveness).unwrap().is_none());
        assert!(acceptor.serve(&liveness, admit_all).is_empty());
        assert!(first.step(&liveness).unwrap().is_none());
        assert!(acceptor.serve(&liveness, admit_all).is_empty());
        // The greeting of the first connector and the response of the second are read in the same call of `serve`.
        assert!(first.step(&liveness).unwrap().is_some());
        assert!(second.step(&liveness).unwrap().is_none());
        let joined = acceptor.serve(&liveness, admit_all);
        assert_eq!(joined.iter().map(|joined| joined.rank).collect::<Vec<_>>(), [Rank(1)]);
        assert_eq!(second.step(&liveness).map(drop), Err(Error::RankTaken { rank: Rank(1) }));
    }
}
