//! The state of a rank that the threads of its callers share with its progress thread.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use rustix::event::EventfdFlags;
use wholemem_os::packet::Address;
use wholemem_os::robust::LivenessLock;
use wholemem_os::{Error as OsError, ForkEpoch, PacketSocket};

use crate::fault::{Disagreement, GroupFault};
use crate::links::{FramePacket, PathAction, Paths, RankLink, SendStatus};
use crate::machine::group_state::GroupState;
use crate::operation::Operation;
use crate::topology::Topology;
use crate::wire::frame::{FrameHeader, FrameKind, MAX_PAYLOAD, encode_fault};
use crate::{Error, Rank, Result, UniqueId};

mod watchers;

pub(crate) use watchers::FailureCallback;

/// A complete message from another rank, assembled from its frames.
#[derive(Debug)]
pub(crate) struct GroupMessage {
    pub(crate) operation: Operation,
    pub(crate) bytes: Vec<u8>,
}

/// A file descriptor that is sent to all ranks, with the rank that passed it and its index among the descriptors of
/// that rank.
#[derive(Debug, Clone)]
pub(crate) struct TaggedFd {
    pub(crate) src: Rank,
    pub(crate) index: u32,
    pub(crate) fd: Arc<OwnedFd>,
}

/// The phase of a group: its ranks are joining, the group is ready, or joining has failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum GroupPhase {
    Joining,
    Ready,
    Failed(Error),
}

/// The part of a rank's shared state that a mutex protects.
#[derive(Debug)]
pub(crate) struct RankState {
    pub(crate) phase: GroupPhase,
    pub(crate) group: GroupState,
    pub(crate) inbox: HashMap<(u64, FrameKind, Rank), GroupMessage>,
    /// Received file descriptors, by operation number and by the neighbour that sent them.
    pub(crate) fds: HashMap<(u64, Rank), Vec<TaggedFd>>,
    /// True if file descriptors were lost on receipt since the last operation that exchanges descriptors began.
    pub(crate) fds_lost: bool,
    /// The number of the last operation that began on this rank.
    pub(crate) begun: u64,
    /// The number of the last operation that finished on this rank.
    pub(crate) finished: u64,
    /// True if the progress thread must end.
    pub(crate) stop: bool,
}

impl RankState {
    /// Returns a disagreement if a message of operation number `op` is from a rank that made another call than `own`,
    /// the call of this rank. If there are several such ranks, the disagreement is with the lowest.
    ///
    /// Every rank that has made a call sends a message: in `all_to_all` to every rank, otherwise to its parent as soon as
    /// all ranks below it have voted. So if the calls of two ranks differ, and every rank makes a call, then at least one
    /// rank receives a message of another call: the parent at the lowest connection of the tree whose two ends differ,
    /// or a rank that gets a part of an `all_to_all`.
    pub(crate) fn find_disagreement(&self, rank: Rank, op: u64, own: Operation) -> Option<Disagreement> {
        let differing =
            self.inbox.iter().filter(|((of, _, _), message)| *of == op && message.operation != own);
        let ((_, _, other), message) = differing.min_by_key(|((_, _, from), _)| *from)?;
        Disagreement::new(op, (rank, own), (*other, message.operation))
    }
}

/// The state of a rank that the threads of its callers share with its progress thread.
#[derive(Debug)]
pub(crate) struct RankCore {
    pub(crate) tree: Topology,
    pub(crate) id: UniqueId,
    pub(crate) liveness: LivenessLock,
    pub(crate) epoch: ForkEpoch,
    /// The eventfd that wakes the progress thread.
    pub(crate) wake: OwnedFd,
    /// Links to the neighbours in the tree.
    pub(crate) links: Mutex<BTreeMap<Rank, Arc<RankLink>>>,
    /// Direct links to ranks that are not neighbours in the tree.
    paths: Mutex<Paths>,
    pub(crate) state: Mutex<RankState>,
    pub(crate) changed: Condvar,
    /// Neighbours whose progress thread is stalled.
    stalled: Mutex<BTreeSet<Rank>>,
    watchers: Mutex<watchers::Watchers>,
    /// The socket files that ranks of this node may have left behind when they died: of this group, and of the groups
    /// into which it is being split. Empty if the group is on one node, where neighbours remove each other's files.
    socket_files: Mutex<Vec<Address>>,
}

impl RankCore {
    pub(crate) fn create(id: UniqueId, tree: impl Into<Topology>) -> Result<Self> {
        Self::with_liveness(id, tree.into(), LivenessLock::create()?)
    }

    pub(crate) fn with_liveness(id: UniqueId, tree: Topology, liveness: LivenessLock) -> Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake =
            rustix::event::eventfd(0, flags).map_err(|errno| OsError::Call { call: "eventfd2", errno })?;
        Ok(Self {
            id,
            liveness,
            epoch: ForkEpoch::current()?,
            wake,
            links: Mutex::default(),
            paths: Mutex::new(Paths::new(tree.rank)),
            state: Mutex::new(RankState {
                phase: GroupPhase::Joining,
                group: GroupState::new(tree.clone()),
                inbox: HashMap::new(),
                fds: HashMap::new(),
                fds_lost: false,
                begun: 0,
                finished: 0,
                stop: false,
            }),
            changed: Condvar::new(),
            stalled: Mutex::default(),
            watchers: Mutex::default(),
            socket_files: Mutex::default(),
            tree,
        })
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, RankState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn socket_files(&self) -> MutexGuard<'_, Vec<Address>> {
        self.socket_files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the groups into which this group of several nodes is being split, for [`remove_stale_sockets`].
    ///
    /// [`remove_stale_sockets`]: Self::remove_stale_sockets
    pub(crate) fn set_parts(&self, parts: &[UniqueId]) {
        let ids = std::iter::once(&self.id).chain(parts);
        *self.socket_files() = ids.flat_map(|id| [id.leader_address(), id.address(Rank(0))]).collect();
    }

    /// Removes the socket files that dead ranks of this node have left behind.
    pub(crate) fn remove_stale_sockets(&self) {
        self.socket_files().iter().for_each(Address::remove_stale);
    }

    pub(crate) fn links(&self) -> MutexGuard<'_, BTreeMap<Rank, Arc<RankLink>>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn paths(&self) -> MutexGuard<'_, Paths> {
        self.paths.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn stalled(&self) -> MutexGuard<'_, BTreeSet<Rank>> {
        self.stalled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if the parent's progress thread is not stalled. On rank 0, which has no parent, the result is true.
    pub(crate) fn parent_runs(&self) -> bool {
        self.tree.parent().is_none_or(|parent| !self.stalled().contains(&parent))
    }

    pub(crate) fn link(&self, peer: Rank) -> Option<Arc<RankLink>> {
        self.links().get(&peer).cloned()
    }

    /// Wakes the progress thread.
    pub(crate) fn wake(&self) {
        // A failed write means that the eventfd's counter is full, so the progress thread is awake already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Sends a message to a neighbour, or queues it if the socket is full.
    pub(crate) fn post(&self, to: Rank, header: FrameHeader, payload: &[u8]) {
        self.post_packets(to, header.frames(payload).into_iter().map(FramePacket::from));
    }

    pub(crate) fn post_packets(&self, to: Rank, packets: impl IntoIterator<Item = FramePacket>) {
        // If there is no link to a rank, the rank has died or left, which the state of the group records.
        if let Some(link) = self.link(to)
            && link.post(packets) != SendStatus::Done
        {
            self.wake();
        }
    }

    /// Sends a message to any rank: short messages along the tree, long ones on a direct link.
    pub(crate) fn post_to_any(&self, header: FrameHeader, payload: &[u8]) {
        let to = header.dst;
        let Some(hop) = self.tree.hop_towards(to) else { return };
        // A direct link is a pair of Unix sockets, so there is none between nodes.
        if hop == to || payload.len() <= MAX_PAYLOAD || !self.tree.is_here(to) {
            return self.post(hop, header, payload);
        }
        let packets = header.frames(payload).into_iter().map(FramePacket::from).collect();
        let next = self.paths().send(to, packets, PacketSocket::pair);
        self.apply_path_actions(to, next);
    }

    /// Performs the actions that `Paths` returned for the messages to rank `to`. Returns the link to read from now on,
    /// if a direct link was opened.
    pub(crate) fn apply_path_actions(&self, to: Rank, next: Vec<PathAction>) -> Option<Arc<RankLink>> {
        let hop = self.tree.hop_towards(to)?;
        let post_empty =
            |kind| self.post(hop, FrameHeader::new(kind, Operation::None, self.tree.rank, to, 0), &[]);
        let mut opened = None;
        for next in next {
            match next {
                PathAction::Flush => self.wake(),
                PathAction::AlongTree(packets) => self.post_packets(hop, packets),
                PathAction::Offer(fd) => {
                    let header =
                        FrameHeader::new(FrameKind::LinkOffer, Operation::None, self.tree.rank, to, 0);
                    self.post_packets(hop, [FramePacket::offer(header, Some(fd))]);
                }
                PathAction::Accept => post_empty(FrameKind::LinkAccepted),
                PathAction::Decline => post_empty(FrameKind::LinkDeclined),
                PathAction::Read(link) => opened = Some(link),
            }
        }
        opened
    }

    /// Returns the ranks to report as missing, given the ranks that have not answered: a stalled neighbour replaces the
    /// ranks that are reached through it.
    pub(crate) fn ranks_to_report(&self, missing: impl IntoIterator<Item = Rank>) -> Vec<Rank> {
        let stalled = self.stalled();
        let named = |rank| self.tree.hop_towards(rank).filter(|hop| stalled.contains(hop)).unwrap_or(rank);
        let all: BTreeSet<_> = missing.into_iter().map(named).collect();
        all.into_iter().collect()
    }

    /// Records that the group has failed, and informs the neighbours other than `from`.
    pub(crate) fn fail_group(&self, fault: GroupFault, from: Option<Rank>) {
        let (to_inform, first_error) = {
            let mut state = self.state();
            let is_first = state.group.fault().is_none();
            let to_inform = state.group.fail(fault.clone(), from);
            self.changed.notify_all();
            (to_inform, state.group.error().filter(|_| is_first))
        };
        for link in to_inform.into_iter().filter_map(|neighbour| self.link(neighbour)) {
            let header =
                FrameHeader::new(FrameKind::GroupFailed, Operation::None, self.tree.rank, link.peer, 0);
            for frame in header.frames(&encode_fault(Some(&fault))) {
                // The failure is sent before all queued packets, which are useless once the group has failed.
                if link.post_urgent(FramePacket::from(frame)) != SendStatus::Done {
                    self.wake();
                }
            }
        }
        if let Some(error) = first_error {
            self.notify(&error);
        }
    }

    /// Records that another rank has left the group after operation `after`, and informs the neighbours other than
    /// `from`.
    pub(crate) fn on_rank_left(&self, rank: Rank, after: u64, from: Option<Rank>) {
        let (to_inform, is_new) = {
            let mut state = self.state();
            let is_new = !state.group.has_left(rank);
            let to_inform = state.group.leave(rank, after, from);
            self.changed.notify_all();
            (to_inform, is_new)
        };
        for neighbour in to_inform {
            self.post(
                neighbour,
                FrameHeader::new(FrameKind::RankLeft, Operation::None, rank, neighbour, after),
                &[],
            );
        }
        if is_new {
            self.notify(&Error::PeerLeft { rank });
        }
    }
}

#[cfg(test)]
mod tests {
    use wholemem_os::Deadline;
    use wholemem_os::packet::MAX_PACKET;

    use super::*;
    use crate::rank::Tree;
    use crate::wire::frame;

    #[test]
    fn a_disagreement_is_with_the_lowest_rank_that_made_another_call_in_the_same_operation() {
        let core = RankCore::create(UniqueId::create_private().unwrap(), Tree::new(Rank(0), 5)).unwrap();
        let mut state = core.state();
        let own = Operation::AllToAll { part_len: 8 };
        let mut receive = |op, kind, rank, operation| {
            state.inbox.insert((op, kind, Rank(rank)), GroupMessage { operation, bytes: Vec::new() });
            state.find_disagreement(Rank(0), 7, own)
        };
        assert_eq!(receive(7, FrameKind::Direct, 1, own), None);
        assert_eq!(receive(8, FrameKind::Vote, 2, Operation::Barrier), None, "a later operation");
        let with = |rank, operation| Disagreement::new(7, (Rank(0), own), (Rank(rank), operation));
        let (other_len, vote) = (Operation::AllToAll { part_len: 9 }, Operation::Agree);
        assert_eq!(receive(7, FrameKind::Direct, 4, other_len), with(4, other_len));
        assert_eq!(receive(7, FrameKind::MissingReport, 3, vote), with(3, vote));
        assert_eq!(receive(7, FrameKind::Direct, 4, own), with(3, vote));
    }

    #[test]
    fn a_group_failure_is_sent_before_queued_packets() {
        let core = RankCore::create(UniqueId::create_private().unwrap(), Tree::new(Rank(0), 2)).unwrap();
        let (here, there) = PacketSocket::pair().unwrap();
        core.links().insert(Rank(1), Arc::new(RankLink::new(Rank(1), here)));
        let header = FrameHeader::new(FrameKind::Direct, Operation::AllToAllV, Rank(0), Rank(1), 1);
        core.post(Rank(1), header, &vec![0; 16 << 20]);
        core.fail_group(GroupFault::Aborted(Rank(0)), None);
        let mut buffer = vec![0; MAX_PACKET];
        // Packets that the socket accepted before the failure arrive first.
        let first = (0..).find(|_| {
            let len = there.recv(&mut buffer, Deadline::NOW).unwrap();
            core.link(Rank(1)).unwrap().flush();
            frame::decode(&buffer[..len]).unwrap().0.kind == FrameKind::GroupFailed
        });
        let all = header.frames(&vec![0; 16 << 20]).len();
        assert!(first.is_some_and(|first| first < all / 2), "after {first:?} of {all} frames");
    }
}
