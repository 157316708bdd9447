//! Whether the group still stands, and who is to be told when it falls.
//!
//! The first fault a rank hears of is the one it keeps and passes on, once, to every neighbour but the one it came
//! from; so a fault crosses the tree in as many hops as the tree is deep, and then is silent. Ranks that leave are
//! another matter: what they had finished before stays valid, so that their leaving is noted with the number of
//! their last operation, and only later operations fail of it.

use std::collections::BTreeMap;

use super::Fault;
use crate::rank::Tree;
use crate::{Error, Rank};

#[derive(Debug)]
pub(crate) struct Standing {
    tree: Tree,
    fault: Option<Fault>,
    /// Who has left, and the last operation each has finished.
    left: BTreeMap<Rank, u64>,
    /// Whether this rank has.
    is_closed: bool,
}

impl Standing {
    pub(crate) fn new(tree: Tree) -> Self {
        Self { tree, fault: None, left: BTreeMap::new(), is_closed: false }
    }

    /// Takes in a fault, and says who is to be told of it.
    pub(crate) fn fall(&mut self, fault: Fault, from: Option<Rank>) -> Vec<Rank> {
        if self.fault.is_some() {
            return Vec::new();
        }
        self.fault = Some(fault);
        self.others(from)
    }

    /// Takes in that a rank has left, and says who is to be told of it.
    pub(crate) fn leave(&mut self, rank: Rank, after: u64, from: Option<Rank>) -> Vec<Rank> {
        if self.left.contains_key(&rank) {
            return Vec::new();
        }
        self.left.insert(rank, after);
        self.others(from)
    }

    /// Takes in that this rank leaves, and says whether that is news.
    pub(crate) fn close(&mut self) -> bool {
        !std::mem::replace(&mut self.is_closed, true)
    }

    /// What is to be told to who wants to hear of it late.
    pub(crate) fn news(&self) -> impl Iterator<Item = Error> {
        let fault = self.fault.as_ref().map(Fault::error);
        let closed = self.is_closed.then_some(Error::Closed);
        fault.into_iter().chain(closed).chain(self.left.keys().map(|rank| Error::PeerLeft { rank: *rank }))
    }

    pub(crate) fn has_left(&self, rank: Rank) -> bool {
        self.left.contains_key(&rank)
    }

    pub(crate) fn fault(&self) -> Option<&Fault> {
        self.fault.as_ref()
    }

    /// What keeps operation `op` from finishing, if anything does.
    pub(crate) fn check(&self, op: u64) -> Result<(), Error> {
        if let Some(fault) = &self.fault {
            return Err(fault.error());
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

    #[test]
    fn the_first_fault_is_kept_and_passed_on_once() {
        let mut standing = Standing::new(Tree::new(Rank(1), 8));
        assert_eq!(standing.check(1), Ok(()));
        assert_eq!(standing.fall(Fault::Lost(Rank(6)), Some(Rank(6))), [Rank(0), Rank(5), Rank(7)]);
        assert_eq!(standing.fall(Fault::Aborted(Rank(0)), Some(Rank(0))), []);
        assert_eq!(standing.check(1), Err(Error::PeerLost { rank: Rank(6) }));
    }

    #[test]
    fn a_rank_that_left_fails_later_operations_only() {
        let mut standing = Standing::new(Tree::new(Rank(0), 3));
        assert_eq!(standing.leave(Rank(2), 7, Some(Rank(2))), [Rank(1)]);
        assert_eq!(standing.leave(Rank(2), 7, Some(Rank(1))), []);
        assert_eq!(standing.check(7), Ok(()));
        assert_eq!(standing.check(8), Err(Error::PeerLeft { rank: Rank(2) }));
        assert_eq!(standing.fall(Fault::Lost(Rank(1)), None), [Rank(1)], "who left is not told");
    }
}
