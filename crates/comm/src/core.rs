//! What the callers and the progress thread of one communicator share.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use rustix::event::EventfdFlags;
use wholemem_os::robust::LivenessLock;
use wholemem_os::{Error as OsError, ForkEpoch, PacketSocket};

use crate::fault::Fault;
use crate::links::{Left, Link, Next, Packet, Paths};
use crate::machine::group_state::GroupState;
use crate::rank::Tree;
use crate::wire::frame::{Header, Kind, MAX_PAYLOAD, What, encode_fault};
use crate::{Error, Rank, Result, UniqueId};

mod watchers;

pub(crate) use watchers::Notify;

/// A message as it was sent, put together from its frames.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) what: What,
    pub(crate) bytes: Vec<u8>,
}

/// A descriptor on its way to all ranks: whose it is, which of that rank's it is, and itself.
#[derive(Debug, Clone)]
pub(crate) struct Tagged {
    pub(crate) src: Rank,
    pub(crate) index: u32,
    pub(crate) fd: Arc<OwnedFd>,
}

/// How far a group has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Phase {
    Joining,
    Up,
    Failed(Error),
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) phase: Phase,
    pub(crate) group: GroupState,
    pub(crate) inbox: HashMap<(u64, Kind, Rank), Message>,
    /// Descriptors that have come, by operation and by the neighbour they came from.
    pub(crate) fds: HashMap<(u64, Rank), Vec<Tagged>>,
    /// Whether descriptors were lost here since the last operation that passes them began.
    pub(crate) fds_lost: bool,
    /// The number of the last operation that was begun here.
    pub(crate) begun: u64,
    /// The number of the last operation that was finished here.
    pub(crate) finished: u64,
    /// The communicator is being dropped.
    pub(crate) stop: bool,
}

#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) tree: Tree,
    pub(crate) id: UniqueId,
    pub(crate) heart: LivenessLock,
    pub(crate) epoch: ForkEpoch,
    /// Wakes the progress thread.
    pub(crate) wake: OwnedFd,
    /// To the neighbours in the tree.
    pub(crate) links: Mutex<BTreeMap<Rank, Arc<Link>>>,
    /// To the others.
    paths: Mutex<Paths>,
    pub(crate) state: Mutex<State>,
    pub(crate) changed: Condvar,
    /// The neighbours whose threads have stood still for some time.
    still: Mutex<BTreeSet<Rank>>,
    watchers: Mutex<watchers::Watchers>,
}

impl Core {
    pub(crate) fn create(id: UniqueId, tree: Tree) -> Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake =
            rustix::event::eventfd(0, flags).map_err(|errno| OsError::Call { call: "eventfd2", errno })?;
        Ok(Self {
            tree,
            id,
            heart: LivenessLock::create()?,
            epoch: ForkEpoch::current()?,
            wake,
            links: Mutex::default(),
            paths: Mutex::new(Paths::new(tree.rank)),
            state: Mutex::new(State {
                phase: Phase::Joining,
                group: GroupState::new(tree),
                inbox: HashMap::new(),
                fds: HashMap::new(),
                fds_lost: false,
                begun: 0,
                finished: 0,
                stop: false,
            }),
            changed: Condvar::new(),
            still: Mutex::default(),
            watchers: Mutex::default(),
        })
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn links(&self) -> MutexGuard<'_, BTreeMap<Rank, Arc<Link>>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn paths(&self) -> MutexGuard<'_, Paths> {
        self.paths.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn still(&self) -> MutexGuard<'_, BTreeSet<Rank>> {
        self.still.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the parent's thread runs; rank 0 has nobody above it who could stand still.
    pub(crate) fn parent_runs(&self) -> bool {
        self.tree.parent().is_none_or(|parent| !self.still().contains(&parent))
    }

    pub(crate) fn link(&self, peer: Rank) -> Option<Arc<Link>> {
        self.links().get(&peer).cloned()
    }

    /// Makes the progress thread look at everything.
    pub(crate) fn wake(&self) {
        // Full means that it is awake already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Sends a message to a neighbour, now or later.
    pub(crate) fn post(&self, to: Rank, header: Header, payload: &[u8]) {
        self.post_packets(to, header.frames(payload).into_iter().map(Packet::from));
    }

    pub(crate) fn post_packets(&self, to: Rank, packets: impl IntoIterator<Item = Packet>) {
        // No link: the peer has died or left, and the state of the group says so.
        if let Some(link) = self.link(to)
            && link.post(packets) != Left::Nothing
        {
            self.wake();
        }
    }

    /// Sends a message to any rank: a short one along the tree, a long one on a link of its own.
    pub(crate) fn post_far(&self, header: Header, payload: &[u8]) {
        let to = header.dst;
        let Some(hop) = self.tree.hop_towards(to) else { return };
        if hop == to || payload.len() <= MAX_PAYLOAD {
            return self.post(hop, header, payload);
        }
        let packets = header.frames(payload).into_iter().map(Packet::from).collect();
        let next = self.paths().send(to, packets, PacketSocket::pair);
        self.follow(to, next);
    }

    /// Does what is next on the path to a rank, and says which link is to be read from now on, if one is.
    pub(crate) fn follow(&self, to: Rank, next: Vec<Next>) -> Option<Arc<Link>> {
        let hop = self.tree.hop_towards(to)?;
        let say = |kind| self.post(hop, Header::new(kind, What::Nothing, self.tree.rank, to, 0), &[]);
        let mut opened = None;
        for next in next {
            match next {
                Next::Flush => self.wake(),
                Next::AlongTree(packets) => self.post_packets(hop, packets),
                Next::Offer(fd) => {
                    let header = Header::new(Kind::Offer, What::Nothing, self.tree.rank, to, 0);
                    self.post_packets(hop, [Packet::offer(header, Some(fd))]);
                }
                Next::Accept => say(Kind::Accepted),
                Next::Decline => say(Kind::Declined),
                Next::Read(link) => opened = Some(link),
            }
        }
        opened
    }

    /// Who is to be named when these do not answer: a neighbour that stands still, instead of those behind it.
    pub(crate) fn blamed(&self, missing: impl IntoIterator<Item = Rank>) -> Vec<Rank> {
        let still = self.still();
        let named = |rank| self.tree.hop_towards(rank).filter(|hop| still.contains(hop)).unwrap_or(rank);
        let all: BTreeSet<_> = missing.into_iter().map(named).collect();
        all.into_iter().collect()
    }

    /// Takes in that the group has fallen, and tells the others.
    pub(crate) fn fall(&self, fault: Fault, from: Option<Rank>) {
        let (told, is_first) = {
            let mut state = self.state();
            let is_first = state.group.fault().is_none();
            let told = state.group.fall(fault.clone(), from);
            self.changed.notify_all();
            (told, is_first)
        };
        for link in told.into_iter().filter_map(|neighbour| self.link(neighbour)) {
            let header = Header::new(Kind::Fall, What::Nothing, self.tree.rank, link.peer, 0);
            for frame in header.frames(&encode_fault(Some(&fault))) {
                // Before all that waits, which is of no use to anybody any more.
                if link.post_urgent(Packet::from(frame)) != Left::Nothing {
                    self.wake();
                }
            }
        }
        if is_first {
            self.notify(&fault.error());
        }
    }

    /// Takes in that another rank has left after operation `after`, and tells the others.
    pub(crate) fn leave(&self, rank: Rank, after: u64, from: Option<Rank>) {
        let (told, is_news) = {
            let mut state = self.state();
            let is_news = !state.group.has_left(rank);
            let told = state.group.leave(rank, after, from);
            self.changed.notify_all();
            (told, is_news)
        };
        for neighbour in told {
            self.post(neighbour, Header::new(Kind::Left, What::Nothing, rank, neighbour, after), &[]);
        }
        if is_news {
            self.notify(&Error::PeerLeft { rank });
        }
    }
}

#[cfg(test)]
mod tests {
    use wholemem_os::Deadline;
    use wholemem_os::packet::MAX_PACKET;

    use super::*;
    use crate::wire::frame;

    #[test]
    fn the_word_of_a_fall_overtakes_what_waits() {
        let core = Core::create(UniqueId::create_private().unwrap(), Tree::new(Rank(0), 2)).unwrap();
        let (here, there) = PacketSocket::pair().unwrap();
        core.links().insert(Rank(1), Arc::new(Link::new(Rank(1), here)));
        let header = Header::new(Kind::Direct, What::AllToAll, Rank(0), Rank(1), 1);
        core.post(Rank(1), header, &vec![0; 16 << 20]);
        core.fall(Fault::Aborted(Rank(0)), None);
        let mut buffer = vec![0; MAX_PACKET];
        // What the socket had taken already comes first.
        let first = (0..).find(|_| {
            let len = there.recv(&mut buffer, Deadline::NOW).unwrap();
            core.link(Rank(1)).unwrap().flush();
            frame::decode(&buffer[..len]).unwrap().0.kind == Kind::Fall
        });
        let all = header.frames(&vec![0; 16 << 20]).len();
        assert!(first.is_some_and(|first| first < all / 2), "after {first:?} of {all} frames");
    }
}
