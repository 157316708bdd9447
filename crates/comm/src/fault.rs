//! The reasons why a group fails, as ranks send them to each other, and their conversion to errors.

use std::time::Duration;

use crate::operation::Operation;
use crate::{Error, Rank};

/// The reason why a group failed: a lost, aborting, missing or violating rank, or two ranks that made different calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum GroupFault {
    Lost(Rank),
    Aborted(Rank),
    Missing(Vec<Rank>),
    /// The given rank violated the protocol.
    ProtocolViolation(Rank),
    RanksDisagree(Disagreement),
    /// The ranks of a node could not be reached for this time.
    NodeSilent {
        node: u32,
        ranks: Vec<Rank>,
        milliseconds: u32,
    },
}

/// A call that a rank makes: the operation, and the number of its first step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NumberedCall {
    pub(crate) op: u64,
    pub(crate) operation: Operation,
}

/// Two ranks that made different calls under the same operation number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Disagreement {
    op: u64,
    /// The calls of the two ranks, the lower rank first.
    calls: [(Rank, Operation); 2],
}

impl Disagreement {
    /// Creates a disagreement in operation number `op`; returns `None` if the ranks or the calls are equal.
    pub(crate) fn new(op: u64, one: (Rank, Operation), other: (Rank, Operation)) -> Option<Self> {
        let mut calls = [one, other];
        calls.sort_by_key(|(rank, _)| *rank);
        (one.0 != other.0 && one.1 != other.1).then_some(Self { op, calls })
    }

    /// Returns the number of the operation.
    pub(crate) fn op(&self) -> u64 {
        self.op
    }

    pub(crate) fn calls(&self) -> [(Rank, Operation); 2] {
        self.calls
    }

    /// Returns the error on a rank whose last call is `own`. The error contains a rank whose call differs from `own`.
    fn error(&self, own: Option<NumberedCall>) -> Error {
        let [lower, higher] = self.calls;
        let own = own.filter(|call| call.op == self.op).map(|call| call.operation);
        let (other, here) = match own {
            Some(own) if own == lower.1 => (higher, own.to_string()),
            Some(own) => (lower, own.to_string()),
            // This rank has not made the call, so both calls are those of other ranks.
            None => (lower, format!("nothing (rank {}: {})", higher.0, higher.1)),
        };
        Error::RanksDisagree { rank: other.0, here, there: other.1.to_string() }
    }
}

impl GroupFault {
    /// Returns the ranks that caused the failure of the group.
    pub(crate) fn ranks(&self) -> Vec<Rank> {
        match self {
            Self::Lost(rank) | Self::Aborted(rank) | Self::ProtocolViolation(rank) => vec![*rank],
            Self::Missing(ranks) | Self::NodeSilent { ranks, .. } => ranks.clone(),
            Self::RanksDisagree(disagreement) => disagreement.calls.map(|(rank, _)| rank).to_vec(),
        }
    }

    /// Returns the error on a rank whose last call is `own`, of every operation after the operation in which the group
    /// failed.
    pub(crate) fn error(&self, own: Option<NumberedCall>) -> Error {
        match self {
            Self::Lost(rank) => Error::PeerLost { rank: *rank },
            Self::Aborted(by) => Error::Aborted { by: *by },
            Self::Missing(missing) => Error::Poisoned { missing: missing.clone() },
            Self::ProtocolViolation(rank) => {
                Error::Protocol { rank: *rank, what: "another rank reported an invalid message from it" }
            }
            Self::RanksDisagree(disagreement) => disagreement.error(own),
            Self::NodeSilent { node, ranks, milliseconds } => Error::NodeTimeout {
                node: *node,
                ranks: ranks.clone(),
                timeout: Duration::from_millis(u64::from(*milliseconds)),
            },
        }
    }

    /// Returns the error on a rank whose last call is `own`, of the operation in which the group failed.
    pub(crate) fn error_within(&self, own: Option<NumberedCall>, timeout: Duration, joining: bool) -> Error {
        match self {
            Self::Missing(missing) => Error::Timeout { missing: missing.clone(), timeout, joining },
            other => other.error(own),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BARRIER: (Rank, Operation) = (Rank(4), Operation::Barrier);
    const AGREE: (Rank, Operation) = (Rank(2), Operation::Agree);

    fn disagree(rank: u32, here: &str, there: &str) -> Error {
        Error::RanksDisagree { rank: Rank(rank), here: here.to_owned(), there: there.to_owned() }
    }

    #[test]
    fn each_rank_is_told_a_rank_with_another_call_than_its_own() {
        let fault = GroupFault::RanksDisagree(Disagreement::new(7, BARRIER, AGREE).unwrap());
        let error = |operation| fault.error(Some(NumberedCall { op: 7, operation }));
        assert_eq!(error(Operation::Agree), disagree(4, "agree", "barrier"));
        assert_eq!(error(Operation::Barrier), disagree(2, "barrier", "agree"));
        assert_eq!(error(Operation::Split), disagree(2, "split", "agree"));
    }

    #[test]
    fn a_rank_that_has_not_made_the_call_is_told_both_calls() {
        let fault = GroupFault::RanksDisagree(Disagreement::new(7, BARRIER, AGREE).unwrap());
        let before = NumberedCall { op: 6, operation: Operation::Barrier };
        for own in [None, Some(before)] {
            assert_eq!(fault.error(own), disagree(2, "nothing (rank 4: barrier)", "agree"));
        }
    }

    #[test]
    fn equal_calls_and_one_rank_are_no_disagreement() {
        assert_eq!(Disagreement::new(7, BARRIER, (Rank(5), Operation::Barrier)), None);
        assert_eq!(Disagreement::new(7, BARRIER, (Rank(4), Operation::Agree)), None);
        assert_eq!(Disagreement::new(7, BARRIER, AGREE), Disagreement::new(7, AGREE, BARRIER));
    }
}
