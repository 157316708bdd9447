//! The parent's side of joining: who knocks is a stranger until it has proved that it knows the secret.
//!
//! What strangers can take is bounded: at most 64 of them are in the room, each for at most a second and 256 bytes, and
//! no descriptor they send is ever installed here. When the room is full, the one who goes is of another user before
//! ours, silent before one who has made a claim, and the oldest. A rank that was turned out knocks again; its whole
//! handshake takes two round trips, so that a flood would have to turn the room over in that time to keep it out.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use wholemem_os::packet::PacketListener;
use wholemem_os::robust::Heart;
use wholemem_os::{Deadline, PacketSocket, PidFd};

use crate::id::{Key, random};
use crate::rank::Tree;
use crate::wire::frame::{self, Kind};
use crate::wire::hello::{Challenge, Claim, Hello, LONGEST, Role, Transcript, Verdict};
use crate::{Rank, Result};

/// How many may be in the room.
const ROOM: usize = 64;

/// How long each may stay.
const STAY: Duration = Duration::from_secs(1);

/// How much each may say.
const WORDS: usize = 256;

/// A rank that has joined: its connection, and the descriptors of its greeting.
#[derive(Debug)]
pub(crate) struct Joined {
    pub(crate) rank: Rank,
    pub(crate) socket: PacketSocket,
    pub(crate) fds: Vec<OwnedFd>,
}

#[derive(Debug)]
pub(crate) struct Door {
    listener: PacketListener,
    tree: Tree,
    key: Key,
    /// Where there is no secret, the only user who is believed.
    only_user: Option<u32>,
    our_user: u32,
    visitors: Vec<Visitor>,
}

#[derive(Debug)]
struct Visitor {
    socket: PacketSocket,
    since: Instant,
    user: u32,
    said: usize,
    stage: Stage,
}

#[derive(Debug, Clone, Copy)]
enum Stage {
    Silent,
    Challenged(Transcript),
    /// Proved, and about to greet.
    Welcomed(Rank),
}

/// What becomes of a visitor after it has spoken.
enum Next {
    Stays(Stage),
    Joins(Rank, Vec<OwnedFd>),
    Goes,
}

impl Door {
    pub(crate) fn new(listener: PacketListener, tree: Tree, key: Key, has_secret: bool) -> Self {
        let our_user = rustix::process::geteuid().as_raw();
        let only_user = (!has_secret).then_some(our_user);
        Self { listener, tree, key, only_user, our_user, visitors: Vec::new() }
    }

    /// Everything to be polled for reading.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        std::iter::once(self.listener.as_fd())
            .chain(self.visitors.iter().map(|visitor| visitor.socket.as_fd()))
    }

    /// Lets in who knocks, and hears who has something to say.
    ///
    /// `admit` is called with a rank that has proved itself before it is told so, and returns whether it may join.
    pub(crate) fn serve(&mut self, heart: &Heart, mut admit: impl FnMut(Rank) -> bool) -> Vec<Joined> {
        let mut joined = Vec::new();
        self.listen(heart, &mut admit, &mut joined);
        loop {
            // A descriptor table that is full leaves them waiting outside.
            let Ok(Some(socket)) = self.listener.accept() else { break };
            self.let_in(socket);
            // At once: a rank has sent its claim before we could look, and is then no longer among the silent.
            self.listen(heart, &mut admit, &mut joined);
        }
        joined
    }

    fn let_in(&mut self, socket: PacketSocket) {
        let user = socket.peer_uid().unwrap_or(u32::MAX);
        if self.only_user.is_some_and(|only| only != user) {
            return;
        }
        let strangers = self.visitors.iter().filter(|visitor| visitor.is_stranger()).count();
        if strangers >= ROOM {
            let rude = |visitor: &Visitor| {
                let silent = matches!(visitor.stage, Stage::Silent);
                (visitor.user != self.our_user, silent, std::cmp::Reverse(visitor.since))
            };
            let strangers = self.visitors.iter().enumerate().filter(|(_, visitor)| visitor.is_stranger());
            if let Some((index, _)) = strangers.max_by_key(|(_, visitor)| rude(visitor)) {
                self.visitors.swap_remove(index);
            }
        }
        self.visitors.push(Visitor { socket, since: Instant::now(), user, said: 0, stage: Stage::Silent });
    }

    fn listen(&mut self, heart: &Heart, admit: &mut impl FnMut(Rank) -> bool, joined: &mut Vec<Joined>) {
        let mut index = 0;
        while index < self.visitors.len() {
            // Those who joined in this very round are taken too, though nobody else knows of them yet.
            let mut admit = |rank| joined.iter().all(|joined| joined.rank != rank) && admit(rank);
            match self.hear(index, heart, &mut admit) {
                Next::Stays(stage) => {
                    self.visitors[index].stage = stage;
                    index += 1;
                }
                Next::Joins(rank, fds) => {
                    let visitor = self.visitors.swap_remove(index);
                    joined.push(Joined { rank, socket: visitor.socket, fds });
                }
                Next::Goes => drop(self.visitors.swap_remove(index)),
            }
        }
    }

    /// Hears all that one visitor has to say.
    fn hear(&mut self, index: usize, heart: &Heart, admit: &mut impl FnMut(Rank) -> bool) -> Next {
        loop {
            let visitor = &mut self.visitors[index];
            if visitor.is_stranger() && visitor.since.elapsed() > STAY {
                return Next::Goes;
            }
            let mut buffer = [0; LONGEST];
            let received = match visitor.stage {
                // Without room for descriptors, the kernel installs none, whatever a stranger sends.
                Stage::Silent | Stage::Challenged(_) => {
                    visitor.socket.recv(&mut buffer, Deadline::NOW).map(|len| (len, Vec::new()))
                }
                Stage::Welcomed(_) => visitor.socket.recv_with_fds(&mut buffer, 2, Deadline::NOW),
            };
            let (len, fds) = match received {
                Ok(received) => received,
                Err(wholemem_os::Error::TimedOut) => return Next::Stays(visitor.stage),
                Err(_) => return Next::Goes,
            };
            visitor.said += len;
            if visitor.said > WORDS {
                return Next::Goes;
            }
            match self.answer(index, &buffer[..len], fds, heart, admit) {
                Next::Stays(stage) => self.visitors[index].stage = stage,
                next => return next,
            }
        }
    }

    fn answer(
        &self,
        index: usize,
        bytes: &[u8],
        fds: Vec<OwnedFd>,
        heart: &Heart,
        admit: &mut impl FnMut(Rank) -> bool,
    ) -> Next {
        let visitor = &self.visitors[index];
        match (visitor.stage, Hello::decode(bytes)) {
            (Stage::Silent, Ok(Hello::Claim(claim))) => match self.challenge(claim) {
                Ok((transcript, challenge)) if visitor.say(&challenge, &[]) => {
                    Next::Stays(Stage::Challenged(transcript))
                }
                _ => Next::Goes,
            },
            (Stage::Challenged(transcript), Ok(Hello::Answer(proof))) => {
                let rank = transcript.claim.rank;
                if !transcript.verify(&self.key, Role::Child, proof)
                    || transcript.claim.size != self.tree.size
                    || !self.tree.children().any(|child| child == rank)
                {
                    return Next::Goes;
                }
                // Somebody else, as far as both know the secret: the first to prove itself is the one.
                if self.visitors.iter().any(|other| other.is_welcomed_as(rank)) || !admit(rank) {
                    visitor.say(&Hello::Verdict(Verdict::RankTaken), &[]);
                    return Next::Goes;
                }
                let Ok(own) = own_fds(heart) else { return Next::Goes };
                let own: Vec<_> = own.iter().map(|fd| fd.as_fd()).collect();
                if !visitor.say(&Hello::Verdict(Verdict::Welcome), &own) {
                    return Next::Goes;
                }
                Next::Stays(Stage::Welcomed(rank))
            }
            (Stage::Welcomed(rank), _) => match frame::decode(bytes) {
                Ok((header, _)) if header.kind == Kind::Greeting && header.src == rank && fds.len() == 2 => {
                    Next::Joins(rank, fds)
                }
                _ => Next::Goes,
            },
            _ => Next::Goes,
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

impl Visitor {
    fn is_stranger(&self) -> bool {
        !matches!(self.stage, Stage::Welcomed(_))
    }

    fn is_welcomed_as(&self, rank: Rank) -> bool {
        matches!(self.stage, Stage::Welcomed(welcomed) if welcomed == rank)
    }

    /// A visitor who does not read what it is told is not waited for.
    fn say(&self, hello: &Hello, fds: &[BorrowedFd<'_>]) -> bool {
        self.socket.send(&hello.encode(), fds, Deadline::NOW).is_ok()
    }
}

/// What a rank shows of itself to those it trusts: its pulse, and its process.
pub(crate) fn own_fds(heart: &Heart) -> Result<[OwnedFd; 2]> {
    Ok([heart.pulse_fd()?, PidFd::of_self()?.into()])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::knock::Knock;
    use crate::{Error, UniqueId};

    #[test]
    fn a_rank_that_joins_in_a_round_is_taken_in_that_round() {
        let id = UniqueId::create().unwrap();
        let heart = Heart::create().unwrap();
        let listener = PacketListener::bind(&id.address(Rank(0))).unwrap();
        let mut door = Door::new(listener, Tree::new(Rank(0), 3), id.key(), id.has_secret());
        let knock =
            || Knock::new(id.address(Rank(0)), Rank(0), Tree::new(Rank(1), 3), id.key(), id.has_secret());
        let (mut first, mut second) = (knock(), knock());
        let anybody = |_| true;

        // Both claim and are challenged; the first answers and is welcomed.
        assert!(first.step(&heart).unwrap().is_none() && second.step(&heart).unwrap().is_none());
        assert!(door.serve(&heart, anybody).is_empty());
        assert!(first.step(&heart).unwrap().is_none());
        assert!(door.serve(&heart, anybody).is_empty());
        // The first's greeting and the second's answer wait at the door together.
        assert!(first.step(&heart).unwrap().is_some());
        assert!(second.step(&heart).unwrap().is_none());
        let joined = door.serve(&heart, anybody);
        assert_eq!(joined.iter().map(|joined| joined.rank).collect::<Vec<_>>(), [Rank(1)]);
        assert_eq!(second.step(&heart).map(drop), Err(Error::RankTaken { rank: Rank(1) }));
    }
}
