//! Connects to the parent, and repeats it until the parent has proved itself and admitted this rank.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use wholemem_os::packet::Address;
use wholemem_os::robust::LivenessLock;
use wholemem_os::{Deadline, Errno, Error as OsError, PacketSocket};

use super::{Joined, own_fds};
use crate::id::{Key, random};
use crate::rank::Tree;
use crate::wire::frame::{Header, Kind, What};
use crate::wire::hello::{Claim, Hello, LONGEST, Role, Transcript, Verdict};
use crate::{Error, Rank, Result};

/// How long to wait before the next attempt: at first, and at most. It doubles each time.
const PAUSE: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(64));

/// An attempt to join the rank at one address.
#[derive(Debug)]
pub(crate) struct Connector {
    address: Address,
    parent: Rank,
    tree: Tree,
    key: Key,
    only_user: Option<u32>,
    /// The rank is one that died, which the parent may still have to notice.
    for_dead_rank: bool,
    pause: Duration,
    refused: bool,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Waiting { again: Instant },
    Claimed { socket: PacketSocket, claim: Claim },
    Answered { socket: PacketSocket },
}

/// Whether a connection failed because no process listens at the address.
pub(crate) fn is_refusal(error: &OsError) -> bool {
    matches!(error, OsError::Call { call: "connect", errno: Errno::CONNREFUSED | Errno::NOENT })
}

impl Connector {
    pub(crate) fn new(address: Address, parent: Rank, tree: Tree, key: Key, has_secret: bool) -> Self {
        let only_user = (!has_secret).then(|| rustix::process::geteuid().as_raw());
        let stage = Stage::Waiting { again: Instant::now() };
        let (for_dead_rank, refused) = (false, false);
        Self { address, parent, tree, key, only_user, for_dead_rank, pause: PAUSE.0, refused, stage }
    }

    /// The same for the place of a rank that died: as long as the parent has the dead one as its child, this is repeated.
    pub(crate) fn for_dead_rank(self) -> Self {
        Self { for_dead_rank: true, ..self }
    }

    /// Whether no process listened at the address when this last tried to connect.
    pub(crate) fn is_refused(&self) -> bool {
        self.refused
    }

    /// The socket to be polled for reading.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.stage {
            Stage::Waiting { .. } => None,
            Stage::Claimed { socket, .. } | Stage::Answered { socket } => Some(socket.as_fd()),
        }
    }

    /// How long until the next attempt, if there is no connection.
    pub(crate) fn again(&self) -> Option<Duration> {
        match &self.stage {
            Stage::Waiting { again } => Some(again.saturating_duration_since(Instant::now())),
            _ => None,
        }
    }

    /// Goes one step on. Returns `Some` when the parent has admitted this rank.
    ///
    /// # Errors
    /// If another attempt is of no use: the rank is taken, or the group has another size.
    pub(crate) fn step(&mut self, heart: &LivenessLock) -> Result<Option<Joined>> {
        let stage = std::mem::replace(&mut self.stage, Stage::Waiting { again: Instant::now() });
        match stage {
            Stage::Waiting { again } if again > Instant::now() => self.stage = Stage::Waiting { again },
            Stage::Waiting { .. } => match self.claim() {
                Ok(stage) => (self.stage, self.refused) = (stage, false),
                Err(Error::Os(error)) => {
                    self.refused = is_refusal(&error);
                    self.step_back();
                }
                Err(error) => return Err(error),
            },
            Stage::Claimed { socket, claim } => {
                let mut buffer = [0; LONGEST];
                match socket.recv(&mut buffer, Deadline::NOW) {
                    Ok(len) => return self.answer(socket, claim, &buffer[..len]).map(|()| None),
                    Err(OsError::TimedOut) => self.stage = Stage::Claimed { socket, claim },
                    Err(_) => self.step_back(),
                }
            }
            Stage::Answered { socket } => return self.greet(socket, heart),
        }
        Ok(None)
    }

    fn step_back(&mut self) {
        self.stage = Stage::Waiting { again: Instant::now() + self.pause };
        self.pause = (self.pause * 2).min(PAUSE.1);
    }

    fn claim(&self) -> Result<Stage> {
        let socket = PacketSocket::connect(&self.address)?;
        if self.only_user.is_some_and(|only| socket.peer_uid() != Ok(only)) {
            return Err(OsError::Closed.into());
        }
        let claim = Claim { rank: self.tree.rank, size: self.tree.size, nonce: random()? };
        socket.send(&Hello::Claim(claim).encode(), &[], Deadline::NOW)?;
        Ok(Stage::Claimed { socket, claim })
    }

    fn answer(&mut self, socket: PacketSocket, claim: Claim, bytes: &[u8]) -> Result<()> {
        let Ok(Hello::Challenge(challenge)) = Hello::decode(bytes) else {
            self.step_back();
            return Ok(());
        };
        let transcript = Transcript {
            claim,
            parent: challenge.parent,
            parent_size: challenge.size,
            parent_nonce: challenge.nonce,
        };
        // The process that listens here is not the parent, which may start yet.
        if challenge.parent != self.parent || !transcript.verify(&self.key, Role::Parent, challenge.proof) {
            self.step_back();
            return Ok(());
        }
        if challenge.size != self.tree.size {
            return Err(Error::SizeDiffers {
                rank: self.tree.rank,
                parent: self.parent,
                here: self.tree.size,
                there: challenge.size,
            });
        }
        let proof = transcript.proof(&self.key, Role::Child);
        match socket.send(&Hello::Answer(proof).encode(), &[], Deadline::NOW) {
            Ok(()) => self.stage = Stage::Answered { socket },
            Err(_) => self.step_back(),
        }
        Ok(())
    }

    fn greet(&mut self, socket: PacketSocket, heart: &LivenessLock) -> Result<Option<Joined>> {
        let mut buffer = [0; LONGEST];
        let (len, fds) = match socket.recv_with_fds(&mut buffer, 2, Deadline::NOW) {
            Ok(received) => received,
            Err(OsError::TimedOut) => {
                self.stage = Stage::Answered { socket };
                return Ok(None);
            }
            Err(_) => {
                self.step_back();
                return Ok(None);
            }
        };
        match Hello::decode(&buffer[..len]) {
            Ok(Hello::Verdict(Verdict::RankTaken)) if !self.for_dead_rank => {
                Err(Error::RankTaken { rank: self.tree.rank })
            }
            Ok(Hello::Verdict(Verdict::Welcome)) if fds.len() == 2 => {
                let own = own_fds(heart)?;
                let own: Vec<_> = own.iter().map(|fd| fd.as_fd()).collect();
                let greeting = Header::new(Kind::Greeting, What::Nothing, self.tree.rank, self.parent, 0);
                let sent =
                    greeting.frames(&[]).iter().all(|frame| socket.send(frame, &own, Deadline::NOW).is_ok());
                if sent {
                    return Ok(Some(Joined { rank: self.parent, socket, fds }));
                }
                self.step_back();
                Ok(None)
            }
            _ => {
                self.step_back();
                Ok(None)
            }
        }
    }
}
