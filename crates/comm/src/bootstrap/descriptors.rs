//! Gathers file descriptors: every rank receives those of every rank.
//!
//! ```text
//!   1. an all_gather of the number of descriptors of each rank
//!   2. up the tree: each rank sends those of all ranks below it, in batches that are acknowledged one by one
//!   3. down the tree: each rank sends each child those that did not come from it
//!   4. an agree on whether all ranks have received all
//! ```
//!
//! If a rank cannot receive a descriptor because its table is full, it informs its neighbours, which then wait for no more. In
//! step 4, all ranks learn which rank it was. The descriptors that have arrived are closed, and the group remains usable.

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, PoisonError};

use wholemem_os::packet::MAX_FDS;

use super::Turn;
use super::collective::{GLANCE, Verdict};
use crate::core::Tagged;
use crate::fault::Fault;
use crate::links::Packet;
use crate::machine::{give_up_on_child_at, give_up_on_parent_at};
use crate::wire::frame::{Header, Kind, What};
use crate::{Bootstrap, Error, Rank, Result};

impl Bootstrap {
    /// Gives all ranks the descriptors of all ranks, in the order of their ranks. They may be of different numbers, or
    /// none. Those given stay open here, and come back as duplicates.
    ///
    /// # Errors
    /// [`Error::Descriptors`] when a rank could not take them all: then nobody gets any, and the group still stands.
    /// Those of a group that has fallen.
    pub fn all_gather_fds(&self, fds: &[BorrowedFd<'_>]) -> Result<Vec<Vec<OwnedFd>>> {
        let turn = self.begin()?;
        let passed = turn.pass_fds(fds)?;
        turn.next();
        let vote = match &passed {
            // Whoever it was says so itself.
            Ok(_) | Err(Lost::Elsewhere) => Ok(()),
            Err(Lost::Here(why)) => Err(*why),
        };
        match (turn.agree(vote)?, passed) {
            (Verdict::Refused { rank, why }, _) => Err(Error::Descriptors { rank, why }),
            (Verdict::Agreed, Ok(passed)) => self.own(passed),
            (Verdict::Agreed, Err(_)) => {
                let why = "descriptors were lost, and no rank says that it was there".to_owned();
                Err(Error::Descriptors { rank: self.rank(), why })
            }
        }
    }

    /// Makes the descriptors the caller's: those still queued for a neighbour are duplicated.
    fn own(&self, passed: Vec<Vec<Arc<OwnedFd>>>) -> Result<Vec<Vec<OwnedFd>>> {
        let own = |fd: Arc<OwnedFd>| {
            Arc::try_unwrap(fd).or_else(|fd| {
                let copy = wholemem_os::memfd::share_fd(std::os::fd::AsFd::as_fd(&*fd));
                copy.map_err(Error::from)
            })
        };
        passed.into_iter().map(|fds| fds.into_iter().map(own).collect()).collect()
    }
}

/// Why this rank has not got them all.
#[derive(Debug, Clone, Copy)]
enum Lost {
    Here(&'static str),
    Elsewhere,
}

const TABLE_FULL: Lost = Lost::Here("the limit on open files is too low for all descriptors");

impl Turn<'_> {
    fn pass_fds(&self, fds: &[BorrowedFd<'_>]) -> Result<Result<Vec<Vec<Arc<OwnedFd>>>, Lost>> {
        let core = &self.bootstrap.core;
        let tree = core.tree;
        let mut kept = Vec::new();
        let mut lost = None;
        // Of an operation that failed before this one: nobody sends of this one until all are in it.
        core.state().fds_lost = false;
        for (index, fd) in (0..).zip(fds) {
            match wholemem_os::memfd::share_fd(*fd) {
                Ok(fd) => kept.push(Tagged { src: tree.rank, index, fd: Arc::new(fd) }),
                Err(_) => lost = Some(TABLE_FULL),
            }
        }
        if lost.is_some() {
            kept.clear();
        }
        let count = u32::try_from(kept.len()).expect("a process has fewer than 2^32 descriptors");
        let counts = self.all_gather(What::AllGatherFds, &count.to_le_bytes())?;
        let decode = |(rank, count): (Rank, &Vec<u8>)| match count[..].try_into().map(u32::from_le_bytes) {
            Ok(count) => Ok(count as usize),
            Err(_) => Err(Error::Protocol { rank, what: "its count of descriptors is malformed" }),
        };
        let counts: Vec<usize> = (0..).map(Rank).zip(&counts).map(decode).collect::<Result<_>>()?;
        self.next();
        let op = core.state().begun;
        let below = |child: Rank| -> usize {
            let child = crate::rank::Tree { rank: child, ..tree };
            (0..tree.size)
                .map(Rank)
                .filter(|rank| child.is_below(*rank))
                .map(|rank| counts[rank.index()])
                .sum()
        };
        // Upwards. Once some are lost there is nothing to wait for: what comes late is closed.
        for child in tree.children() {
            if lost.is_none() {
                match self.receive(op, child, below(child))? {
                    Ok(fds) => kept.extend(fds),
                    Err(why) => lost = Some(why),
                }
            }
        }
        if let Some(parent) = tree.parent() {
            self.send(op, parent, lost, kept.iter());
            let rest = counts.iter().sum::<usize>() - below(tree.rank);
            if lost.is_none() {
                match self.receive(op, parent, rest)? {
                    Ok(fds) => kept.extend(fds),
                    Err(why) => lost = Some(why),
                }
            }
        }
        // Downwards.
        for child in tree.children() {
            let under = crate::rank::Tree { rank: child, ..tree };
            self.send(op, child, lost, kept.iter().filter(|tagged| !under.is_below(tagged.src)));
        }
        self.finish(op);
        if let Some(why) = lost {
            return Ok(Err(why));
        }
        let mut ranks: Vec<BTreeMap<u32, Arc<OwnedFd>>> = counts.iter().map(|_| BTreeMap::new()).collect();
        for Tagged { src, index, fd } in kept {
            if let Some(rank) = ranks.get_mut(src.index()) {
                rank.insert(index, fd);
            }
        }
        if ranks.iter().zip(&counts).any(|(fds, count)| fds.len() != *count) {
            return Ok(Err(Lost::Here("descriptors came that are not those announced")));
        }
        Ok(Ok(ranks.into_iter().map(|fds| fds.into_values().collect()).collect()))
    }

    /// Sends descriptors to a neighbour, or that some were lost.
    fn send<'t>(&self, op: u64, to: Rank, lost: Option<Lost>, fds: impl Iterator<Item = &'t Tagged>) {
        let core = &self.bootstrap.core;
        let header = Header::new(Kind::Fds, What::AllGatherFds, core.tree.rank, to, op);
        if lost.is_some() {
            return core.post(to, Header { kind: Kind::FdsLost, ..header }, &[]);
        }
        let fds: Vec<_> = fds.collect();
        let packets = fds.chunks(MAX_FDS).flat_map(|batch| {
            let tags =
                batch.iter().flat_map(|tagged| [tagged.src.0, tagged.index]).flat_map(u32::to_le_bytes);
            let header = Header { fds: u16::try_from(batch.len()).expect("MAX_FDS at most"), ..header };
            let fds: Vec<_> = batch.iter().map(|tagged| Arc::clone(&tagged.fd)).collect();
            let frames = header.frames(&tags.collect::<Vec<_>>());
            frames.into_iter().map(move |bytes| Packet { bytes, fds: fds.clone() })
        });
        core.post_packets(to, packets.collect::<Vec<_>>());
    }

    /// Waits for `count` descriptors of a neighbour, or for the word that some were lost.
    fn receive(&self, op: u64, from: Rank, count: usize) -> Result<Result<Vec<Tagged>, Lost>> {
        let core = &self.bootstrap.core;
        let give_up =
            if core.tree.parent() == Some(from) { give_up_on_parent_at } else { give_up_on_child_at };
        let give_up = give_up(core.tree, self.bootstrap.timeout);
        let mut state = core.state();
        loop {
            if state.inbox.remove(&(op, Kind::FdsLost, from)).is_some() {
                return Ok(Err(Lost::Elsewhere));
            }
            if std::mem::take(&mut state.fds_lost) {
                return Ok(Err(TABLE_FULL));
            }
            if count == 0 || state.fds.get(&(op, from)).is_some_and(|fds| fds.len() >= count) {
                return Ok(Ok(state.fds.remove(&(op, from)).unwrap_or_default()));
            }
            if state.group.check(op).is_err() {
                drop(state);
                return Err(self.fallen(op));
            }
            let left = give_up.saturating_sub(self.began.elapsed());
            if left.is_zero() {
                drop(state);
                core.fall(Fault::Missing(vec![from]), None);
                return Err(self.fallen(op));
            }
            let waited = core.changed.wait_timeout(state, left.min(GLANCE));
            drop(waited.unwrap_or_else(PoisonError::into_inner).0);
            self.abort_if_interrupted();
            state = core.state();
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
    fn no_other_operation_comes_between_the_steps_of_one() {
        let ranks = Bootstrap::local(2).unwrap();
        let memory = Memfd::create("test", 4096).unwrap();
        for _ in 0..200 {
            let (before, under_way) = (ranks[0].core.state().begun, Barrier::new(2));
            std::thread::scope(|scope| {
                let first = scope.spawn(|| ranks[0].all_gather_fds(&[memory.as_fd()]).map(drop));
                // Another thread of rank 0, which asks until it is let in.
                scope.spawn(|| {
                    while ranks[0].core.state().begun == before {
                        std::thread::yield_now();
                    }
                    under_way.wait();
                    let mut asked = std::iter::repeat_with(|| ranks[0].barrier());
                    let outcome = asked.find(|outcome| *outcome != Err(Error::Busy));
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
