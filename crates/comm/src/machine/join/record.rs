//! The join record: the state of joining that a rank publishes in its liveness page, and that its neighbours read after
//! its death.
//!
//! ```text
//!   bit 0     2      6         26        46     63
//!       | stage | climbed | below top | below own | rank + 1 |
//! ```
//!
//! A dead rank cannot forward what it knows, and the neighbour that takes its position must know which ranks to wait
//! for. The record contains the ranks that had joined at the two levels below the highest position of the rank, and
//! below its own position. For a group of up to 21 ranks these are all ranks.

use std::collections::BTreeSet;

use crate::Rank;
use crate::rank::Tree;
use crate::wire::Malformed;

/// The progress of a rank in joining its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JoinStage {
    /// The rank has not joined a parent.
    Alone,
    /// The rank has joined its parent.
    Joined,
    /// The rank knows the decision whether the group is complete, and may have sent it to some of its neighbours.
    Decided,
}

/// The state of joining that a rank publishes for its neighbours to read after its death.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct JoinRecord {
    /// The progress of the rank in joining, or, if it has taken the position of a dead rank, the progress of that dead
    /// rank.
    pub(crate) stage: JoinStage,
    /// The rank that published this record. It may have taken the positions of other ranks.
    pub(crate) rank: Rank,
    /// The highest position in the tree that the rank has taken or knows to be that of a dead rank. All positions
    /// between this one and the rank's own are also taken or those of dead ranks.
    pub(crate) top: Rank,
    /// The ranks that had joined when the record was published, whether they are dead or alive.
    pub(crate) seen: BTreeSet<Rank>,
}

const BELOW_BITS: u32 = 20;
const CLIMBED_AT: u32 = 2;
const TOP_AT: u32 = 6;
const OWN_AT: u32 = TOP_AT + BELOW_BITS;
const RANK_AT: u32 = OWN_AT + BELOW_BITS;

impl JoinRecord {
    /// Encodes the join record of a rank whose own position is `own`. `is_seen` returns true for ranks that had joined,
    /// and is called for the ranks in the two levels below `top` and `own`.
    pub(crate) fn encode(stage: JoinStage, own: Tree, top: Tree, is_seen: impl Fn(Rank) -> bool) -> u64 {
        let below = |tree: Tree| {
            let bit = |(n, rank): (usize, Rank)| u64::from(is_seen(rank)) << n;
            two_levels_below(tree).enumerate().map(bit).sum::<u64>()
        };
        let stage = match stage {
            JoinStage::Alone => 0,
            JoinStage::Joined => 1,
            JoinStage::Decided => 2,
        };
        let below_top = below(top);
        let below_own = if own == top { below_top } else { below(own) };
        stage
            | u64::from(own.depth() - top.depth()) << CLIMBED_AT
            | below_top << TOP_AT
            | below_own << OWN_AT
            | (u64::from(own.rank.0) + 1) << RANK_AT
    }

    /// Decodes the join record that the neighbour in `position` has published.
    pub(crate) fn decode(number: u64, position: Tree) -> Result<Self, Malformed> {
        let field = |at: u32, bits: u32| number >> at & ((1 << bits) - 1);
        let stage = match field(0, CLIMBED_AT) {
            0 => JoinStage::Alone,
            1 => JoinStage::Joined,
            2 => JoinStage::Decided,
            _ => return Err(Malformed("a join record has an unknown stage")),
        };
        let rank = (number >> RANK_AT).checked_sub(1).and_then(|rank| u32::try_from(rank).ok());
        let Some(rank) = rank.filter(|rank| *rank < position.size).map(Rank) else {
            return Err(Malformed("a join record has an invalid rank"));
        };
        let own = Tree { rank, ..position };
        let mut top = own;
        for _ in 0..field(CLIMBED_AT, TOP_AT - CLIMBED_AT) {
            top.rank = top.parent().ok_or(Malformed("a join record has a position above rank 0"))?;
        }
        if !top.is_below(position.rank) {
            return Err(Malformed("a join record is from another part of the tree"));
        }
        let mut seen = BTreeSet::new();
        for (tree, at) in [(top, TOP_AT), (own, OWN_AT)] {
            let below = field(at, BELOW_BITS);
            seen.extend(
                two_levels_below(tree).enumerate().filter(|(n, _)| below >> n & 1 == 1).map(|(_, rank)| rank),
            );
            let known = two_levels_below(tree).count();
            if below >> known != 0 {
                return Err(Malformed("a join record contains a rank that is not in the group"));
            }
        }
        Ok(Self { stage, rank, top: top.rank, seen })
    }
}

/// Returns the children and grandchildren of a position in the tree, in ascending order: at most 20 ranks.
fn two_levels_below(tree: Tree) -> impl Iterator<Item = Rank> {
    tree.children().chain(tree.children().flat_map(move |rank| Tree { rank, ..tree }.children()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn encode(record: &JoinRecord, size: u32) -> u64 {
        let (own, top) = (Tree::new(record.rank, size), Tree::new(record.top, size));
        JoinRecord::encode(record.stage, own, top, |rank| record.seen.contains(&rank))
    }

    #[test]
    fn a_record_of_a_group_of_21_contains_all_ranks_that_joined() {
        let seen = (0..21).map(Rank).filter(|rank| rank.0 != 0 && rank.0 != 7).collect();
        let record = JoinRecord { stage: JoinStage::Joined, rank: Rank(7), top: Rank(0), seen };
        assert_eq!(JoinRecord::decode(encode(&record, 21), Tree::new(Rank(1), 21)), Ok(record));
    }

    #[test]
    fn an_invalid_record_is_refused() {
        let of =
            |record: u64, position: u32| JoinRecord::decode(record, Tree::new(Rank(position), 30)).map(drop);
        let record =
            JoinRecord { stage: JoinStage::Alone, rank: Rank(5), top: Rank(1), seen: BTreeSet::new() };
        let number = encode(&record, 30);
        assert_eq!(of(number, 5), Ok(()));
        for (number, position, rule) in [
            (0, 5, "a join record has an invalid rank"),
            (31 << RANK_AT, 5, "a join record has an invalid rank"),
            (number | 3, 5, "a join record has an unknown stage"),
            (number | 3 << CLIMBED_AT, 5, "a join record has a position above rank 0"),
            (number, 2, "a join record is from another part of the tree"),
            (number | 1 << (OWN_AT + 19), 5, "a join record contains a rank that is not in the group"),
        ] {
            assert_eq!(of(number, position), Err(Malformed(rule)), "{number:#x}");
        }
    }

    proptest! {
        #[test]
        fn a_decoded_record_encodes_to_an_equal_record(number: u64, rank in 0u64..40, position in 0u32..30) {
            let number = number & ((1 << RANK_AT) - 1) | rank << RANK_AT;
            if let Ok(record) = JoinRecord::decode(number, Tree::new(Rank(position), 30)) {
                let again = encode(&record, 30);
                prop_assert_eq!(JoinRecord::decode(again, Tree::new(Rank(position), 30)), Ok(record));
            }
        }
    }
}
