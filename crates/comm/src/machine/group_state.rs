//! The state of a group as one rank knows it: whether the group has failed, which ranks have left, and which neighbours
//! to inform.
//!
//! A rank stores the first fault that it learns of, and sends it once to every neighbour except the one that it came
//! from. So a fault reaches all ranks in at most twice as many hops as the tree is deep. A rank that leaves is not a
//! fault: the operations that it has finished stay valid, and only later operations fail.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::fault::{GroupFault, NumberedCall};
use crate::operation::Operation;
use crate::topology::Topology;
use crate::{Error, Rank};

/// The failure of a group and the ranks that have left the group, as known to one rank.
#[derive(Debug)]
pub(crate) struct GroupState {
    tree: Topology,
    fault: Option<GroupFault>,
    /// The last call of this rank, or the call with which it would have taken part in the operation in which ranks
    /// disagreed.
    call: Option<NumberedCall>,
    /// The ranks that have left the group, each with the number of the last operation that it has finished.
    left: BTreeMap<Rank, u64>,
    /// True if this rank has left the group.
    is_closed: bool,
}

impl GroupState {
    pub(crate) fn new(tree: impl Into<Topology>) -> Self {
        Self { tree: tree.into(), fault: None, call: None, left: BTreeMap::new(), is_closed: false }
    }

    /// Records the call that this rank makes as operation `op`.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub(crate) fn begin(&mut self, op: u64, operation: Operation) -> Result<(), Error> {
        // If other ranks have disagreed before this rank made its call, the first call of this rank is recorded for the
        // error. Later calls fail with the same error.
        let is_recorded = match &self.fault {
            None => true,
            Some(GroupFault::RanksDisagree(disagreement)) => {
                disagreement.op() == op && self.call.is_none_or(|call| call.op < op)
            }
            Some(_) => false,
        };
        if is_recorded {
            self.call = Some(NumberedCall { op, operation });
        }
        self.check(op)
    }

    /// Records the reason for the failure of the group, and returns the neighbours to inform.
    pub(crate) fn fail(&mut self, fault: GroupFault, from: Option<Rank>) -> Vec<Rank> {
        if self.fault.is_some() {
            return Vec::new();
        }
        self.fault = Some(fault);
        self.others(from)
    }

    /// Records that a rank has left the group, and returns the neighbours to inform.
    pub(crate) fn leave(&mut self, rank: Rank, after: u64, from: Option<Rank>) -> Vec<Rank> {
        if self.left.contains_key(&rank) {
            return Vec::new();
        }
        self.left.insert(rank, after);
        self.others(from)
    }

    /// Records that this rank leaves the group. Returns true on the first call.
    pub(crate) fn close(&mut self) -> bool {
        !std::mem::replace(&mut self.is_closed, true)
    }

    /// Returns the events that occurred before a failure callback was registered: the failure of the group, and ranks
    /// that left.
    pub(crate) fn past_events(&self) -> impl Iterator<Item = Error> {
        let closed = self.is_closed.then_some(Error::Closed);
        self.error()
            .into_iter()
            .chain(closed)
            .chain(self.left.keys().map(|rank| Error::PeerLeft { rank: *rank }))
    }

    pub(crate) fn has_left(&self, rank: Rank) -> bool {
        self.left.contains_key(&rank)
    }

    pub(crate) fn fault(&self) -> Option<&GroupFault> {
        self.fault.as_ref()
    }

    /// Returns the error of every operation after the one in which the group failed, if it has.
    pub(crate) fn error(&self) -> Option<Error> {
        self.fault.as_ref().map(|fault| fault.error(self.call))
    }

    /// Returns the error of operation `op`, which cannot finish. If the group failed in it because ranks were missing,
    /// the error is a timeout of the given length.
    pub(crate) fn error_within(&self, op: u64, timeout: Duration) -> Option<Error> {
        match &self.fault {
            Some(fault) => Some(fault.error_within(self.call, timeout, false)),
            None => self.check(op).err(),
        }
    }

    /// Returns an error if operation `op` cannot finish, because the group has failed or a rank has left too early.
    pub(crate) fn check(&self, op: u64) -> Result<(), Error> {
        if let Some(error) = self.error() {
            return Err(error);
        }
        if self.is_closed {
            return Err(Error::Closed);
        }
        match self.left.iter().find(|(_, after)| **after < op) {
            Some((rank, _)) => Err(Error::PeerLeft { rank: *rank }),
            None => Ok(()),
        }
    }

    fn others(&self, from: Option<Rank>) -> Vec<Rank> {
        self.tree.neighbours().filter(|rank| Some(*rank) != from && !self.left.contains_key(rank)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::Disagreement;
    use crate::rank::Tree;

    #[test]
    fn the_first_fault_is_stored_and_sent_once() {
        let mut group = GroupState::new(Tree::new(Rank(1), 8));
        assert_eq!(group.check(1), Ok(()));
        assert_eq!(group.fail(GroupFault::Lost(Rank(6)), Some(Rank(6))), [Rank(0), Rank(5), Rank(7)]);
        assert_eq!(group.fail(GroupFault::Aborted(Rank(0)), Some(Rank(0))), []);
        assert_eq!(group.check(1), Err(Error::PeerLost { rank: Rank(6) }));
    }

    #[test]
    fn operations_after_a_rank_left_fail() {
        let mut group = GroupState::new(Tree::new(Rank(0), 3));
        assert_eq!(group.leave(Rank(2), 7, Some(Rank(2))), [Rank(1)]);
        assert_eq!(group.leave(Rank(2), 7, Some(Rank(1))), []);
        assert_eq!(group.check(7), Ok(()));
        assert_eq!(group.check(8), Err(Error::PeerLeft { rank: Rank(2) }));
        assert_eq!(
            group.fail(GroupFault::Lost(Rank(1)), None),
            [Rank(1)],
            "a rank that left is not informed"
        );
    }

    #[test]
    fn every_operation_of_a_rank_that_disagrees_fails_with_the_error_of_its_first_call() {
        let calls = [(Rank(1), Operation::Barrier), (Rank(2), Operation::Agree)];
        let fault = || GroupFault::RanksDisagree(Disagreement::new(5, calls[0], calls[1]).unwrap());
        let error = |here: &str| Error::RanksDisagree {
            rank: Rank(1),
            here: here.to_owned(),
            there: "barrier".to_owned(),
        };
        // The rank is told before, or after it has made its call.
        for before in [false, true] {
            let mut group = GroupState::new(Tree::new(Rank(0), 3));
            assert_eq!(group.begin(4, Operation::Barrier), Ok(()));
            if before {
                group.fail(fault(), None);
                assert_eq!(group.check(5), Err(error("nothing (rank 2: agree)")));
                assert_eq!(group.begin(5, Operation::AllGather), Err(error("all_gather")));
            } else {
                assert_eq!(group.begin(5, Operation::AllGather), Ok(()));
                group.fail(fault(), None);
            }
            for op in [5, 6] {
                assert_eq!(group.begin(op, Operation::Split), Err(error("all_gather")));
            }
        }
    }
}
