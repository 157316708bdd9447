//! Connects to the parent in the tree of ranks, and retries until the parent is authenticated and has admitted this
//! rank.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use wholemem_os::packet::Address;
use wholemem_os::robust::LivenessLock;
use wholemem_os::{Deadline, Errno, Error as OsError, PacketSocket};

use super::{JoinedPeer, liveness_fds};
use crate::id::{GroupKey, random};
use crate::operation::Operation;
use crate::rank::Tree;
use crate::wire::frame::{FrameHeader, FrameKind};
use crate::wire::handshake::{AdmissionReply, Claim, HandshakeMessage, MAX_LEN, Role, Transcript};
use crate::{Error, Rank, Result};

/// The shortest and the longest delay before the next attempt to connect. The delay doubles with each attempt.
const RETRY_DELAY: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(64));

/// The attempts of a rank to connect to its parent at one address.
#[derive(Debug)]
pub(crate) struct Connector {
    address: Address,
    parent: Rank,
    tree: Tree,
    key: GroupKey,
    only_user: Option<u32>,
    /// True if any rank may be the parent: `parent` is the one that has proved that it knows the secret.
    any_parent: bool,
    /// True if this rank joins in the position of a dead rank, whose death the parent may not have detected yet.
    for_dead_rank: bool,
    delay: Duration,
    refused: bool,
    state: ConnectState,
}

/// The progress of the handshake with the parent.
#[derive(Debug)]
enum ConnectState {
    Waiting { retry_at: Instant },
    Claimed { socket: PacketSocket, claim: Claim },
    Responded { socket: PacketSocket },
}

/// Returns true if a connection attempt failed because no process listens at the address.
pub(crate) fn is_refusal(error: &OsError) -> bool {
    matches!(error, OsError::Call { call: "connect", errno: Errno::CONNREFUSED | Errno::NOENT })
}

impl Connector {
    pub(crate) fn new(address: Address, parent: Rank, tree: Tree, key: GroupKey, has_secret: bool) -> Self {
        let only_user = (!has_secret).then(|| rustix::process::geteuid().as_raw());
        let state = ConnectState::Waiting { retry_at: Instant::now() };
        let (for_dead_rank, refused) = (false, false);
        let any_parent = false;
        Self {
            address,
            parent,
            tree,
            key,
            only_user,
            any_parent,
            for_dead_rank,
            delay: RETRY_DELAY.0,
            refused,
            state,
        }
    }

    /// Makes this connector join any rank that listens at the address.
    pub(crate) fn with_any_parent(self) -> Self {
        Self { any_parent: true, ..self }
    }

    /// Makes this connector join in the position of a dead rank: it retries as long as the parent still has the dead
    /// rank as its child.
    pub(crate) fn for_dead_rank(self) -> Self {
        Self { for_dead_rank: true, ..self }
    }

    /// Returns true if no process listened at the address in the last connection attempt.
    pub(crate) fn is_refused(&self) -> bool {
        self.refused
    }

    /// Returns the connected socket, which the caller polls for reading, or `None` if there is no connection.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.state {
            ConnectState::Waiting { .. } => None,
            ConnectState::Claimed { socket, .. } | ConnectState::Responded { socket } => Some(socket.as_fd()),
        }
    }

    /// Returns the time until the next connection attempt, or `None` if there is a connection.
    pub(crate) fn retry_in(&self) -> Option<Duration> {
        match &self.state {
            ConnectState::Waiting { retry_at } => Some(retry_at.saturating_duration_since(Instant::now())),
            _ => None,
        }
    }

    /// Advances the handshake with the parent by one step. Returns `Some` when the parent has admitted this rank.
    ///
    /// # Errors
    /// If retrying is useless: the rank is taken, or the group has another size.
    pub(crate) fn step(&mut self, liveness: &LivenessLock) -> Result<Option<JoinedPeer>> {
        let state = std::mem::replace(&mut self.state, ConnectState::Waiting { retry_at: Instant::now() });
        match state {
            ConnectState::Waiting { retry_at } if retry_at > Instant::now() => {
                self.state = ConnectState::Waiting { retry_at }
            }
            ConnectState::Waiting { .. } => match self.claim() {
                Ok(state) => (self.state, self.refused) = (state, false),
                Err(Error::Os(error)) => {
                    self.refused = is_refusal(&error);
                    self.retry_later();
                }
                Err(error) => return Err(error),
            },
            ConnectState::Claimed { socket, claim } => {
                let mut buffer = [0; MAX_LEN];
                match socket.recv(&mut buffer, Deadline::NOW) {
                    Ok(len) => return self.respond(socket, claim, &buffer[..len]).map(|()| None),
                    Err(OsError::TimedOut) => self.state = ConnectState::Claimed { socket, claim },
                    Err(_) => self.retry_later(),
                }
            }
            ConnectState::Responded { socket } => return self.receive_admission(socket, liveness),
        }
        Ok(None)
    }

    fn retry_later(&mut self) {
        self.state = ConnectState::Waiting { retry_at: Instant::now() + self.delay };
        self.delay = (self.delay * 2).min(RETRY_DELAY.1);
    }

    fn claim(&self) -> Result<ConnectState> {
        let socket = PacketSocket::connect(&self.address)?;
        if self.only_user.is_some_and(|only| socket.peer_uid() != Ok(only)) {
            return Err(OsError::Closed.into());
        }
        let claim = Claim { rank: self.tree.rank, size: self.tree.size, nonce: random()? };
        socket.send(&HandshakeMessage::Claim(claim).encode(), &[], Deadline::NOW)?;
        Ok(ConnectState::Claimed { socket, claim })
    }

    fn respond(&mut self, socket: PacketSocket, claim: Claim, bytes: &[u8]) -> Result<()> {
        let Ok(HandshakeMessage::Challenge(challenge)) = HandshakeMessage::decode(bytes) else {
            self.retry_later();
            return Ok(());
        };
        let transcript = Transcript {
            claim,
            parent: challenge.parent,
            parent_size: challenge.size,
            parent_nonce: challenge.nonce,
        };
        // Another process than the parent listens at the address. The rank retries, since the parent may start later.
        let is_parent = self.any_parent || challenge.parent == self.parent;
        if !is_parent || !transcript.verify(&self.key, Role::Parent, challenge.proof) {
            self.retry_later();
            return Ok(());
        }
        self.parent = challenge.parent;
        if challenge.size != self.tree.size {
            return Err(Error::SizeDiffers {
                rank: self.tree.rank,
                parent: self.parent,
                here: self.tree.size,
                there: challenge.size,
            });
        }
        let proof = transcript.proof(&self.key, Role::Child);
        match socket.send(&HandshakeMessage::Response(proof).encode(), &[], Deadline::NOW) {
            Ok(()) => self.state = ConnectState::Responded { socket },
            Err(_) => self.retry_later(),
        }
        Ok(())
    }

    fn receive_admission(
        &mut self,
        socket: PacketSocket,
        liveness: &LivenessLock,
    ) -> Result<Option<JoinedPeer>> {
        let mut buffer = [0; MAX_LEN];
        let (len, fds) = match socket.recv_with_fds(&mut buffer, 2, Deadline::NOW) {
            Ok(received) => received,
            Err(OsError::TimedOut) => {
                self.state = ConnectState::Responded { socket };
                return Ok(None);
            }
            Err(_) => {
                self.retry_later();
                return Ok(None);
            }
        };
        match HandshakeMessage::decode(&buffer[..len]) {
            Ok(HandshakeMessage::Admission(AdmissionReply::RankTaken)) if !self.for_dead_rank => {
                Err(Error::RankTaken { rank: self.tree.rank })
            }
            Ok(HandshakeMessage::Admission(AdmissionReply::Admitted)) if fds.len() == 2 => {
                let own = liveness_fds(liveness)?;
                let own: Vec<_> = own.iter().map(|fd| fd.as_fd()).collect();
                let greeting =
                    FrameHeader::new(FrameKind::Greeting, Operation::None, self.tree.rank, self.parent, 0);
                let sent =
                    greeting.frames(&[]).iter().all(|frame| socket.send(frame, &own, Deadline::NOW).is_ok());
                if sent {
                    return Ok(Some(JoinedPeer { rank: self.parent, socket, fds }));
                }
                self.retry_later();
                Ok(None)
            }
            _ => {
                self.retry_later();
                Ok(None)
            }
        }
    }
}
