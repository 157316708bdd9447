//! The connections between a leader and the ranks of its node, while the group is being formed.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use wholemem_os::packet::MAX_PACKET;
use wholemem_os::robust::{LivenessLock, LivenessProbe, LockState};
use wholemem_os::{Deadline, Error as OsError, PidFd};

use super::wait_for;
use crate::Rank;
use crate::handshake::{Acceptor, JoinedPeer};
use crate::links::{FramePacket, RankLink};
use crate::operation::Operation;
use crate::wire::Malformed;
use crate::wire::frame::{self, FrameHeader, FrameKind};

/// The status in the liveness page of a leader that may have sent the decision to ranks of its node.
pub(super) const DECIDED: u64 = 1;

/// The status in the liveness page of a leader that is connected to the root.
pub(super) const CONNECTED: u64 = 2;

/// The longest wait for a rank that is admitted to complete its handshake.
const SETTLE: Duration = Duration::from_millis(200);

/// An authenticated rank of this node, with the handles that detect its death.
#[derive(Debug)]
pub(crate) struct LocalPeer {
    pub(crate) rank: Rank,
    pub(crate) link: Arc<RankLink>,
    pub(crate) probe: LivenessProbe,
    pub(crate) process: PidFd,
    messages: MessageReader,
}

/// What was read from a link.
pub(crate) enum Received {
    Message(FrameHeader, Vec<u8>),
    Nothing,
    Closed,
}

/// Assembles the messages of a link from their frames.
#[derive(Debug, Default)]
pub(crate) struct MessageReader {
    partial: Vec<u8>,
}

impl MessageReader {
    /// Reads the next complete message that is not a heartbeat. `on_frame` is called for every frame.
    pub(crate) fn read(&mut self, link: &RankLink, mut on_frame: impl FnMut()) -> Received {
        let mut buffer = vec![0; MAX_PACKET];
        loop {
            let len = match link.socket.recv_with_fds(&mut buffer, 0) {
                Ok((len, _)) => len,
                Err(OsError::TimedOut) => return Received::Nothing,
                Err(_) => return Received::Closed,
            };
            on_frame();
            match self.push(&buffer[..len]) {
                Ok(Some((header, bytes))) => return Received::Message(header, bytes),
                Ok(None) => {}
                Err(Malformed(violation)) => {
                    tracing::warn!(rank = %link.peer, violation, "a rank violated the protocol");
                    return Received::Closed;
                }
            }
        }
    }

    fn push(&mut self, bytes: &[u8]) -> Result<Option<(FrameHeader, Vec<u8>)>, Malformed> {
        let (header, payload) = frame::decode(bytes)?;
        if header.kind == FrameKind::Heartbeat {
            return Ok(None);
        }
        if header.offset != self.partial.len() as u64 {
            return Err(Malformed("a frame does not continue the previous one"));
        }
        self.partial.extend_from_slice(payload);
        let is_whole = self.partial.len() as u64 == header.total;
        Ok(is_whole.then(|| (header, std::mem::take(&mut self.partial))))
    }
}

impl LocalPeer {
    /// Wraps a rank whose handshake is complete. Returns `None` if its descriptors are unusable.
    pub(super) fn new(JoinedPeer { rank, socket, fds }: JoinedPeer) -> Option<Self> {
        let mut fds = fds.into_iter();
        let (probe, process) = (fds.next()?, fds.next()?);
        let (Ok(probe), Ok(process)) = (LivenessProbe::import(probe), PidFd::adopt(process)) else {
            tracing::warn!(%rank, "an authenticated rank sent unusable descriptors");
            return None;
        };
        let (link, messages) = (Arc::new(RankLink::new(rank, socket)), MessageReader::default());
        Some(Self { rank, link, probe, process, messages })
    }

    pub(super) fn fds(&self) -> [BorrowedFd<'_>; 2] {
        [self.link.socket.as_fd(), self.process.as_fd()]
    }

    pub(super) fn has_exited(&self) -> bool {
        self.probe.state() != LockState::Alive || self.process.has_exited() == Ok(true)
    }

    /// Returns true if the rank died. A rank that has ended joining and exited then has not.
    pub(super) fn has_died(&self) -> bool {
        self.probe.state() == LockState::Died
    }

    pub(super) fn read(&mut self) -> Received {
        self.messages.read(&self.link, || {})
    }
}

/// Sends a message to the rank at the other end of a link.
pub(crate) fn post(link: &RankLink, own: Rank, kind: FrameKind, payload: &[u8]) {
    let header = FrameHeader::new(kind, Operation::None, own, link.peer, 0);
    link.post(header.frames(payload).into_iter().map(FramePacket::from));
}

/// The ranks of this node that have joined this rank, the leader.
#[derive(Debug)]
pub(super) struct Members {
    acceptor: Acceptor,
    pub(super) peers: BTreeMap<Rank, LocalPeer>,
}

/// A change of the ranks of this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MemberEvent {
    Joined(Rank),
    Died(Rank),
    /// The rank has given up joining, and its process lives.
    Left(Rank),
}

impl Members {
    pub(super) fn new(acceptor: Acceptor) -> Self {
        Self { acceptor: acceptor.of_any_rank(), peers: BTreeMap::new() }
    }

    pub(super) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.acceptor.fds().chain(self.peers.values().flat_map(LocalPeer::fds))
    }

    /// Completes the handshakes of ranks that are admitted, and wait for the decision like the others.
    pub(super) fn settle(&mut self, liveness: &LivenessLock) {
        let deadline = Deadline::after(SETTLE);
        self.step(liveness);
        while self.acceptor.has_admitted() && !deadline.has_passed() {
            let read = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
            wait_for(&mut self.acceptor.fds().map(read).collect::<Vec<_>>(), SETTLE);
            self.step(liveness);
        }
    }

    /// Admits ranks of this node, reads their reports, and detects their deaths.
    pub(super) fn step(&mut self, liveness: &LivenessLock) -> Vec<MemberEvent> {
        let mut events = Vec::new();
        let Self { acceptor, peers } = self;
        for joined in acceptor.serve(liveness, |rank| !peers.contains_key(&rank)) {
            let rank = joined.rank;
            if let Some(peer) = LocalPeer::new(joined) {
                peers.insert(rank, peer);
                events.push(MemberEvent::Joined(rank));
            }
        }
        let mut gone = Vec::new();
        for peer in peers.values_mut() {
            let has_exited = peer.has_exited();
            match peer.read() {
                Received::Message(header, bytes) if header.kind == FrameKind::JoinUpdate => {
                    let died =
                        frame::decode_join_update(&bytes).map(|update| update.died).unwrap_or_default();
                    events.extend(died.into_iter().map(MemberEvent::Died));
                }
                Received::Message(..) => {}
                Received::Closed => gone.push(peer.rank),
                Received::Nothing if has_exited => gone.push(peer.rank),
                Received::Nothing => {}
            }
            peer.link.flush();
        }
        for rank in gone {
            let has_died = peers.remove(&rank).is_some_and(|peer| peer.has_died());
            events.push(if has_died { MemberEvent::Died(rank) } else { MemberEvent::Left(rank) });
        }
        events
    }
}
