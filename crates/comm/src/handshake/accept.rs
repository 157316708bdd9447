//! Accepts connections and authenticates ranks.
//!
//! A connection is that of a pending peer until the peer has proved that it knows the secret. Pending peers are bounded: at most
//! 64 at a time, one second and 256 bytes each, and none of their descriptors is installed in this process. If the limit is
//! reached, one of them is evicted: of another user before one of this user, one that has sent nothing before one that has sent a
//! claim, and of those the oldest. A rank that was evicted connects again. Its handshake takes two round trips, so a flood of
//! connections keeps it out only if it replaces all pending peers in that time.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use wholemem_os::packet::PacketListener;
use wholemem_os::robust::LivenessLock;
use wholemem_os::{Deadline, PacketSocket};

use super::{Joined, own_fds};
use crate::id::{Key, random};
use crate::rank::Tree;
use crate::wire::frame::{self, Kind};
use crate::wire::hello::{Challenge, Claim, Hello, LONGEST, Role, Transcript, Verdict};
use crate::{Rank, Result};

/// How many pending peers there may be.
const MAX_PENDING: usize = 64;

/// How long the handshake of a pending peer may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(1);

/// How many bytes a pending peer may send.
const MAX_RECEIVED: usize = 256;

/// The listening socket of a rank, and the peers that have connected to it and not joined yet.
#[derive(Debug)]
pub(crate) struct Acceptor {
    listener: PacketListener,
    tree: Tree,
    key: Key,
    /// The only user whose connections are accepted, if the group has no secret.
    only_user: Option<u32>,
    our_user: u32,
    pending: Vec<PendingPeer>,
}

/// A peer that has connected, and whose handshake is not complete.
#[derive(Debug)]
struct PendingPeer {
    socket: PacketSocket,
    since: Instant,
    user: u32,
    /// How many bytes it has sent.
    received: usize,
    stage: Stage,
}

#[derive(Debug, Clone, Copy)]
enum Stage {
    Silent,
    Challenged(Transcript),
    /// It has proved itself, and is to send its greeting.
    Welcomed(Rank),
}

/// What becomes of a pending peer.
enum Next {
    Stays(Stage),
    Joins(Rank, Vec<OwnedFd>),
    Closes,
}

impl Acceptor {
    pub(crate) fn new(listener: PacketListener, tree: Tree, key: Key, has_secret: bool) -> Self {
        let our_user = rustix::process::geteuid().as_raw();
        let only_user = (!has_secret).then_some(our_user);
        Self { listener, tree, key, only_user, our_user, pending: Vec::new() }
    }

    /// Everything to be polled for reading.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        std::iter::once(self.listener.as_fd()).chain(self.pending.iter().map(|peer| peer.socket.as_fd()))
    }

    /// Accepts connections, and reads what pending peers have sent.
    ///
    /// `admit` is called with a rank that has proved itself before it is told so, and returns whether it may join.
    pub(crate) fn serve(&mut self, heart: &LivenessLock, mut admit: impl FnMut(Rank) -> bool) -> Vec<Joined> {
        let mut joined = Vec::new();
        self.read_all(heart, &mut admit, &mut joined);
        loop {
            // If the descriptor table is full, connections wait in the backlog.
            let Ok(Some(socket)) = self.listener.accept() else { break };
            self.add(socket);
            // At once: a rank has sent its claim by now, so that it is not among those that have sent nothing.
            self.read_all(heart, &mut admit, &mut joined);
        }
        joined
    }

    fn add(&mut self, socket: PacketSocket) {
        // A connection whose user the kernel does not tell is closed.
        let Ok(user) = socket.peer_uid() else { return };
        if self.only_user.is_some_and(|only| only != user) {
            return;
        }
        let unauthenticated = self.pending.iter().filter(|peer| peer.is_unauthenticated()).count();
        if unauthenticated >= MAX_PENDING {
            let eviction_key = |peer: &PendingPeer| {
                let silent = matches!(peer.stage, Stage::Silent);
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
            stage: Stage::Silent,
        });
    }

    fn read_all(&mut self, heart: &LivenessLock, admit: &mut impl FnMut(Rank) -> bool, joined: &mut Vec<Joined>) {
        let mut index = 0;
        while index < self.pending.len() {
            // A rank that joined in this call is not among the peers of the caller yet.
            let mut admit = |rank| joined.iter().all(|joined| joined.rank != rank) && admit(rank);
            match self.read(index, heart, &mut admit) {
                Next::Stays(stage) => {
                    self.pending[index].stage = stage;
                    index += 1;
                }
                Next::Joins(rank, fds) => {
                    let peer = self.pending.swap_remove(index);
                    joined.push(Joined { rank, socket: peer.socket, fds });
                }
                Next::Closes => drop(self.pending.swap_remove(index)),
            }
        }
    }

    /// Reads all that a pending peer has sent, and answers it.
    fn read(&mut self, index: usize, heart: &LivenessLock, admit: &mut impl FnMut(Rank) -> bool) -> Next {
        loop {
            let peer = &mut self.pending[index];
            if peer.is_unauthenticated() && peer.since.elapsed() > HANDSHAKE_TIMEOUT {
                return Next::Closes;
            }
            let mut buffer = [0; LONGEST];
            let received = match peer.stage {
                // The buffer has no room for descriptors, so the kernel installs none, whatever the peer sends.
                Stage::Silent | Stage::Challenged(_) => {
                    peer.socket.recv(&mut buffer, Deadline::NOW).map(|len| (len, Vec::new()))
                }
                Stage::Welcomed(_) => peer.socket.recv_with_fds(&mut buffer, 2, Deadline::NOW),
            };
            let (len, fds) = match received {
                Ok(received) => received,
                Err(wholemem_os::Error::TimedOut) => return Next::Stays(peer.stage),
                Err(_) => return Next::Closes,
            };
            peer.received += len;
            if peer.received > MAX_RECEIVED {
                return Next::Closes;
            }
            match self.answer(index, &buffer[..len], fds, heart, admit) {
                Next::Stays(stage) => self.pending[index].stage = stage,
                next => return next,
            }
        }
    }

    fn answer(
        &self,
        index: usize,
        bytes: &[u8],
        fds: Vec<OwnedFd>,
        heart: &LivenessLock,
        admit: &mut impl FnMut(Rank) -> bool,
    ) -> Next {
        let peer = &self.pending[index];
        match (peer.stage, Hello::decode(bytes)) {
            (Stage::Silent, Ok(Hello::Claim(claim))) => match self.challenge(claim) {
                Ok((transcript, challenge)) if peer.send(&challenge, &[]) => {
                    Next::Stays(Stage::Challenged(transcript))
                }
                _ => Next::Closes,
            },
            (Stage::Challenged(transcript), Ok(Hello::Answer(proof))) => {
                let rank = transcript.claim.rank;
                if !transcript.verify(&self.key, Role::Child, proof)
                    || transcript.claim.size != self.tree.size
                    || !self.tree.children().any(|child| child == rank)
                {
                    return Next::Closes;
                }
                // Another process with the secret has the same rank: the first that proves itself has it.
                if self.pending.iter().any(|other| other.is_welcomed_as(rank)) || !admit(rank) {
                    peer.send(&Hello::Verdict(Verdict::RankTaken), &[]);
                    return Next::Closes;
                }
                let Ok(own) = own_fds(heart) else { return Next::Closes };
                let own: Vec<_> = own.iter().map(|fd| fd.as_fd()).collect();
                if !peer.send(&Hello::Verdict(Verdict::Welcome), &own) {
                    return Next::Closes;
                }
                Next::Stays(Stage::Welcomed(rank))
            }
            (Stage::Welcomed(rank), _) => match frame::decode(bytes) {
                Ok((header, _)) if header.kind == Kind::Greeting && header.src == rank && fds.len() == 2 => {
                    Next::Joins(rank, fds)
                }
                _ => Next::Closes,
            },
            _ => Next::Closes,
        }
    }

    fn challenge(&self, claim: Claim) -> Result<(Transcript, Hello)> {
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
        Ok((transcript, Hello::Challenge(challenge)))
    }
}

impl PendingPeer {
    fn is_unauthenticated(&self) -> bool {
        !matches!(self.stage, Stage::Welcomed(_))
    }

    fn is_welcomed_as(&self, rank: Rank) -> bool {
        matches!(self.stage, Stage::Welcomed(welcomed) if welcomed == rank)
    }

    /// Sends without waiting: returns false if the socket is full or closed.
    fn send(&self, hello: &Hello, fds: &[BorrowedFd<'_>]) -> bool {
        self.socket.send(&hello.encode(), fds, Deadline::NOW).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handshake::Connector;
    use crate::{Error, UniqueId};

    #[test]
    fn a_rank_that_joins_in_a_round_is_taken_in_that_round() {
        let id = UniqueId::create().unwrap();
        let heart = LivenessLock::create().unwrap();
        let listener = PacketListener::bind(&id.address(Rank(0))).unwrap();
        let mut acceptor = Acceptor::new(listener, Tree::new(Rank(0), 3), id.key(), id.has_secret());
        let connector =
            || Connector::new(id.address(Rank(0)), Rank(0), Tree::new(Rank(1), 3), id.key(), id.has_secret());
        let (mut first, mut second) = (connector(), connector());
        let anybody = |_| true;

        // Both claim and are challenged; the first answers and is welcomed.
        assert!(first.step(&heart).unwrap().is_none() && second.step(&heart).unwrap().is_none());
        assert!(acceptor.serve(&heart, anybody).is_empty());
        assert!(first.step(&heart).unwrap().is_none());
        assert!(acceptor.serve(&heart, anybody).is_empty());
        // The greeting of the first and the answer of the second wait together.
        assert!(first.step(&heart).unwrap().is_some());
        assert!(second.step(&heart).unwrap().is_none());
        let joined = acceptor.serve(&heart, anybody);
        assert_eq!(joined.iter().map(|joined| joined.rank).collect::<Vec<_>>(), [Rank(1)]);
        assert_eq!(second.step(&heart).map(drop), Err(Error::RankTaken { rank: Rank(1) }));
    }
}
