//! Gathers file descriptors: every rank receives duplicates of the descriptors of all ranks.
//!
//! ```text
//!   1. an all_gather of the number of descriptors of each rank
//!   2. up the tree: each rank sends the descriptors of all ranks below it, in batches that are acknowledged one by
//!   one
//!   3. down the tree: each rank sends to each child the descriptors that are not from ranks below that child
//!   4. an agree on whether all ranks have received all descriptors
//! ```
//!
//! If a rank cannot receive a descriptor because its descriptor table is full, it informs its neighbours, which then
//! expect no more. In step 4 all ranks learn which rank it was. The descriptors received so far are closed, and the
//! group remains usable.

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, PoisonError};

use wholemem_os::packet::MAX_FDS;

use super::OperationGuard;
use super::collective::{VoteResult, WAIT_SLICE};
use crate::core::TaggedFd;
use crate::fault::GroupFault;
use crate::links::FramePacket;
use crate::machine::{give_up_on_child_at, give_up_on_parent_at};
use crate::operation::Operation;
use crate::wire::frame::{FrameHeader, FrameKind};
use crate::{Bootstrap, Error, Rank, Result};

impl Bootstrap {
    /// Returns duplicates of the file descriptors of all ranks on all ranks, ordered by rank. Each rank may pass any
    /// number of descriptors, and the descriptors that it passes stay open.
    ///
    /// # Errors
    /// [`Error::Descriptors`] if a rank could not receive all of them: then no rank gets any, and the group stays
    /// usable. [`Error::AcrossNodes`] if the ranks are on several nodes. The errors of a failed group.
    pub fn all_gather_fds(&self, fds: &[BorrowedFd<'_>]) -> Result<Vec<Vec<OwnedFd>>> {
        self.require_one_node("pass file descriptors")?;
        let guard = self.begin(Operation::AllGatherFds)?;
        let passed = guard.exchange_fds(fds)?;
        guard.next_operation();
        let vote = match &passed {
            // If descriptors were lost on another rank, this rank votes in favour: the rank that lost them votes
            // against.
            Ok(_) | Err(FdLoss::Elsewhere) => Ok(()),
            Err(FdLoss::Here(reason)) => Err(*reason),
        };
        match (guard.agree(vote)?, passed) {
            (VoteResult::Refused { rank, reason }, _) => Err(Error::Descriptors { rank, reason }),
            (VoteResult::Agreed, Ok(passed)) => self.owned_fds(passed),
            (VoteResult::Agreed, Err(_)) => {
                let reason = "descriptors were lost, but no rank reported it".to_owned();
                Err(Error::Descriptors { rank: self.rank(), reason })
            }
        }
    }

    /// Converts shared file descriptors to owned ones. A descriptor that is still queued for a neighbour is duplicated.
    fn owned_fds(&self, passed: Vec<Vec<Arc<OwnedFd>>>) -> Result<Vec<Vec<OwnedFd>>> {
        let own = |fd: Arc<OwnedFd>| {
            Arc::try_unwrap(fd).or_else(|fd| {
                let copy = wholemem_os::memfd::share_fd(std::os::fd::AsFd::as_fd(&*fd));
                copy.map_err(Error::from)
            })
        };
        passed.into_iter().map(|fds| fds.into_iter().map(own).collect()).collect()
    }
}

/// The place where file descriptors were lost: on this rank, with the reason, or on another rank.
#[derive(Debug, Clone, Copy)]
enum FdLoss {
    Here(&'static str),
    Elsewhere,
}

const TABLE_FULL: FdLoss = FdLoss::Here("the limit on open files is too low for all descriptors");

impl OperationGuard<'_> {
    fn exchange_fds(&self, fds: &[BorrowedFd<'_>]) -> Result<Result<Vec<Vec<Arc<OwnedFd>>>, FdLoss>> {
        let core = &self.bootstrap.core;
        let tree = &core.tree;
        let mut gathered = Vec::new();
        let mut lost = None;
        // Reset `fds_lost`, which an earlier failed operation may have left set. No rank sends descriptors before all
        // ranks have entered this operation.
        core.state().fds_lost = false;
        for (index, fd) in (0..).zip(fds) {
            match wholemem_os::memfd::share_fd(*fd) {
                Ok(fd) => gathered.push(TaggedFd { src: tree.rank, index, fd: Arc::new(fd) }),
                Err(_) => lost = Some(TABLE_FULL),
            }
        }
        if lost.is_some() {
            gathered.clear();
        }
        let count = u32::try_from(gathered.len()).expect("a process has fewer than 2^32 descriptors");
        let counts = self.all_gather(&count.to_le_bytes())?;
        let decode = |(rank, count): (Rank, &Vec<u8>)| match count[..].try_into().map(u32::from_le_bytes) {
            Ok(count) => Ok(count as usize),
            Err(_) => Err(Error::Protocol { rank, what: "its count of descriptors is malformed" }),
        };
        let counts: Vec<usize> = (0..).map(Rank).zip(&counts).map(decode).collect::<Result<_>>()?;
        self.next_operation();
        let op = core.state().begun;
        let below = |child: Rank| -> usize {
            let child = tree.at(child);
            (0..tree.size)
                .map(Rank)
                .filter(|rank| child.is_below(*rank))
                .map(|rank| counts[rank.index()])
                .sum()
        };
        // Gather descriptors up the tree of ranks. Once a descriptor is lost, this rank waits for no more, and closes
        // those that arrive later.
        for child in tree.children() {
            if lost.is_none() {
                match self.receive(op, child, below(child))? {
                    Ok(fds) => gathered.extend(fds),
                    Err(reason) => lost = Some(reason),
                }
            }
        }
        if let Some(parent) = tree.parent() {
            self.send(op, parent, lost, gathered.iter());
            let rest = counts.iter().sum::<usize>() - below(tree.rank);
            if lost.is_none() {
                match self.receive(op, parent, rest)? {
                    Ok(fds) => gathered.extend(fds),
                    Err(reason) => lost = Some(reason),
                }
            }
        }
        // Send the gathered descriptors down the tree of ranks.
        for child in tree.children() {
            let under = tree.at(child);
            self.send(op, child, lost, gathered.iter().filter(|tagged| !under.is_below(tagged.src)));
        }
        self.finish(op);
        if let Some(reason) = lost {
            return Ok(Err(reason));
        }
        let mut ranks: Vec<BTreeMap<u32, Arc<OwnedFd>>> = counts.iter().map(|_| BTreeMap::new()).collect();
        for TaggedFd { src, index, fd } in gathered {
            if let Some(rank) = ranks.get_mut(src.index()) {
                rank.insert(index, fd);
            }
        }
        if ranks.iter().zip(&counts).any(|(fds, count)| fds.len() != *count) {
            return Ok(Err(FdLoss::Here("received other descriptors than were announced")));
        }
        Ok(Ok(ranks.into_iter().map(|fds| fds.into_values().collect()).collect()))
    }

    /// Sends file descriptors to a neighbour, or, if some were lost, the message that they were lost.
    fn send<'t>(&self, op: u64, to: Rank, lost: Option<FdLoss>, fds: impl Iterator<Item = &'t TaggedFd>) {
        let core = &self.bootstrap.core;
        let header = FrameHeader::new(FrameKind::Fds, self.operation, core.tree.rank, to, op);
        if lost.is_some() {
            return core.post(to, FrameHeader { kind: FrameKind::FdsLost, ..header }, &[]);
        }
        let fds: Vec<_> = fds.collect();
        let packets = fds.chunks(MAX_FDS).flat_map(|batch| {
            let tags =
                batch.iter().flat_map(|tagged| [tagged.src.0, tagged.index]).flat_map(u32::to_le_bytes);
            let header = FrameHeader { fds: u16::try_from(batch.len()).expect("MAX_FDS at most"), ..header };
            let fds: Vec<_> = batch.iter().map(|tagged| Arc::clone(&tagged.fd)).collect();
            let frames = header.frames(&tags.collect::<Vec<_>>());
            frames.into_iter().map(move |bytes| FramePacket { bytes, fds: fds.clone() })
        });
        core.post_packets(to, packets.collect::<Vec<_>>());
    }

    /// Waits for `count` file descriptors from a neighbour, or for its message that some were lost.
    fn receive(&self, op: u64, from: Rank, count: usize) -> Result<Result<Vec<TaggedFd>, FdLoss>> {
        let core = &self.bootstrap.core;
        let give_up =
            if core.tree.parent() == Some(from) { give_up_on_parent_at } else { give_up_on_child_at };
        let give_up = give_up(&core.tree, self.bootstrap.timeout);
        loop {
            let mut state = self.agreed_state(op)?;
            if state.inbox.remove(&(op, FrameKind::FdsLost, from)).is_some() {
                return Ok(Err(FdLoss::Elsewhere));
            }
            if std::mem::take(&mut state.fds_lost) {
                return Ok(Err(TABLE_FULL));
            }
            if count == 0 || state.fds.get(&(op, from)).is_some_and(|fds| fds.len() >= count) {
                return Ok(Ok(state.fds.remove(&(op, from)).unwrap_or_default()));
            }
            if state.group.check(op).is_err() {
                drop(state);
                return Err(self.failure(op));
            }
            let left = give_up.saturating_sub(self.began.elapsed());
            if left.is_zero() {
                drop(state);
                core.fail_group(GroupFault::Missing(vec![from]), None);
                return Err(self.failure(op));
            }
            let waited = core.changed.wait_timeout(state, left.min(WAIT_SLICE));
            drop(waited.unwrap_or_else(PoisonError::into_inner).0);
            self.abort_if_interrupted();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::Barrier;

    use wholemem_os::Memfd;

    use super::*;

    #[test]
    fn no_other_operation_begins_between_the_steps_of_one() {
        let ranks = Bootstrap::local(2).unwrap();
        let memory = Memfd::create("test", 4096).unwrap();
        for _ in 0..200 {
            let (before, under_way) = (ranks[0].core.state().begun, Barrier::new(2));
            std::thread::scope(|scope| {
                let first = scope.spawn(|| ranks[0].all_gather_fds(&[memory.as_fd()]).map(drop));
                // Another thread of rank 0 retries a barrier until the barrier can begin.
                scope.spawn(|| {
                    while ranks[0].core.state().begun == before {
                        std::thread::yield_now();
                    }
                    under_way.wait();
                    let mut attempts = std::iter::repeat_with(|| ranks[0].barrier());
                    let outcome = attempts.find(|outcome| *outcome != Err(Error::Busy));
                    assert_eq!(outcome, Some(Ok(())));
                });
                scope.spawn(|| {
                    under_way.wait();
                    assert_eq!(ranks[1].all_gather_fds(&[memory.as_fd()]).map(drop), Ok(()));
                    assert_eq!(ranks[1].barrier(), Ok(()));
                });
                assert_eq!(first.join().unwrap(), Ok(()));
            });
        }
    }
}
