//! Ranks, and the tree that connects the ranks of a group.
//!
//! ```text
//!                    0
//!        +-------+---+---+-------+
//!        1       2       3       4          four children each: a rank has at most five links,
//!     +-++-+  +-++-+  +-++-+  +-++-+        and ten thousand ranks are seven hops deep
//!     5 6 7 8 9 ...
//! ```

use std::fmt;

/// The maximum number of children of a rank in the tree.
const ARITY: u32 = 4;

/// The number of a member of a group: at least 0, and less than the group size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub u32);

impl Rank {
    /// Returns the rank as an index into a list that has one entry for each rank.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The position of one rank in the tree of its group's ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tree {
    pub(crate) rank: Rank,
    pub(crate) size: u32,
}

impl Tree {
    pub(crate) fn new(rank: Rank, size: u32) -> Self {
        debug_assert!(rank.0 < size);
        Self { rank, size }
    }

    pub(crate) fn is_root(self) -> bool {
        self.rank.0 == 0
    }

    pub(crate) fn parent(self) -> Option<Rank> {
        self.rank.0.checked_sub(1).map(|above| Rank(above / ARITY))
    }

    pub(crate) fn children(self) -> impl Iterator<Item = Rank> {
        let first = u64::from(self.rank.0) * u64::from(ARITY) + 1;
        (first..first + u64::from(ARITY))
            .filter_map(|child| u32::try_from(child).ok())
            .filter(move |child| *child < self.size)
            .map(Rank)
    }

    /// Returns the parent and the children of this rank: the ranks to which it is always connected.
    pub(crate) fn neighbours(self) -> impl Iterator<Item = Rank> {
        self.parent().into_iter().chain(self.children())
    }

    /// Returns the number of hops in the tree from this rank to rank 0.
    pub(crate) fn depth(self) -> u32 {
        std::iter::successors(Some(self), |at| at.parent().map(|rank| Self { rank, ..*at }))
            .skip(1)
            .fold(0, |depth, _| depth + 1)
    }

    /// Returns the number of hops in the tree from the deepest rank to rank 0.
    pub(crate) fn height(self) -> u32 {
        Self { rank: Rank(self.size - 1), ..self }.depth()
    }

    /// Returns the number of ranks in the subtree of this rank, including the rank itself.
    pub(crate) fn count_below(self) -> usize {
        let (mut first, mut last) = (u64::from(self.rank.0), u64::from(self.rank.0));
        let (mut count, size) = (0, u64::from(self.size));
        while first < size {
            count += last.min(size - 1) - first + 1;
            (first, last) = (first * u64::from(ARITY) + 1, last * u64::from(ARITY) + u64::from(ARITY));
        }
        usize::try_from(count).expect("a count of ranks is at most `size`, which is a u32")
    }

    /// Returns the child whose subtree contains `rank`, or `None` if `rank` is this rank or outside of its subtree.
    pub(crate) fn child_towards(self, rank: Rank) -> Option<Rank> {
        let mut at = Self { rank, ..self };
        while let Some(parent) = at.parent() {
            if parent == self.rank {
                return Some(at.rank);
            }
            at.rank = parent;
        }
        None
    }

    /// Returns the neighbour on the path in the tree to another rank.
    pub(crate) fn hop_towards(self, rank: Rank) -> Option<Rank> {
        self.child_towards(rank).or_else(|| self.parent())
    }

    /// Returns true if `rank` is in the subtree of this rank, or is this rank itself.
    pub(crate) fn is_below(self, rank: Rank) -> bool {
        rank == self.rank || self.child_towards(rank).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parents_and_children_agree() {
        for size in [1, 2, 3, 5, 6, 21, 22, 100, 1000] {
            for rank in (0..size).map(Rank) {
                let tree = Tree::new(rank, size);
                for child in tree.children() {
                    assert_eq!(Tree::new(child, size).parent(), Some(rank));
                    assert_eq!(Tree::new(child, size).depth(), tree.depth() + 1);
                }
                assert!(tree.neighbours().count() <= 5);
                assert!(tree.depth() <= tree.height());
            }
        }
    }

    #[test]
    fn every_rank_is_reached_by_hops_along_the_tree() {
        let size = 100;
        for from in (0..size).map(Rank) {
            for to in (0..size).map(Rank).filter(|to| *to != from) {
                let mut at = from;
                let mut hops = 0;
                while at != to {
                    at = Tree::new(at, size).hop_towards(to).expect("another rank");
                    hops += 1;
                }
                assert!(hops <= 2 * Tree::new(from, size).height());
            }
        }
    }

    #[test]
    fn the_height_of_the_tree_is_logarithmic() {
        assert_eq!(Tree::new(Rank(0), 1).height(), 0);
        assert_eq!(Tree::new(Rank(0), 5).height(), 1);
        assert_eq!(Tree::new(Rank(0), 1024).height(), 5);
        assert_eq!(Tree::new(Rank(0), 10_000).height(), 7);
    }

    #[test]
    fn a_subtree_contains_the_rank_itself_and_its_descendants() {
        let tree = Tree::new(Rank(1), 30);
        assert_eq!(tree.count_below(), 14);
        assert_eq!(Tree::new(Rank(0), 30).count_below(), 30);
        let below: Vec<_> = (0..30).filter(|rank| tree.is_below(Rank(*rank))).collect();
        assert_eq!(below, [1, 5, 6, 7, 8, 21, 22, 23, 24, 25, 26, 27, 28, 29]);
        assert_eq!(tree.child_towards(Rank(26)), Some(Rank(6)));
        assert_eq!(tree.child_towards(Rank(2)), None);
    }
}
