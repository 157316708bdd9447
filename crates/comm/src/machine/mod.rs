//! The protocols between ranks as state machines, `step(now, input) -> outputs`. They do no I/O, and time is an
//! argument.
//!
//! | machine | decides |
//! |---|---|
//! | [`join`] | when the group is complete, or why joining fails |
//! | [`assembly`] | the same for ranks on several nodes |
//! | [`link_monitor`] | whether a rank of another node runs, has died, or cannot be reached |
//! | [`converge`] | the result of every collective: votes are sent up the tree, the decision down |
//! | [`stall_detector`] | whether a neighbour runs |
//! | [`group_state`] | whether the group has failed, and which neighbours to inform |
//!
//! A rank never gives up before its timeout expires. It waits at most a second longer, for the decision of a rank
//! that knows which ranks are missing. `now` is the time since the call began. The seeded simulator in `simulator`
//! delays, stops and kills ranks, and prints the seed of a failed run.

pub(crate) mod assembly;
pub(crate) mod converge;
pub(crate) mod group_state;
pub(crate) mod join;
pub(crate) mod link_monitor;
#[cfg(test)]
mod simulator;
pub(crate) mod stall_detector;

use std::time::Duration;

use crate::topology::Topology;

/// Returns when a rank that cannot be informed by its parent gives up a collective: rank 0 when the timeout expires,
/// and a rank with a stalled parent later, increasing with its depth in the tree. So a decision from a higher rank, if
/// there is one, arrives earlier.
pub(crate) fn give_up_at(tree: &Topology, timeout: Duration) -> Duration {
    let levels = tree.height() + 1;
    timeout.saturating_add(margin(timeout) * tree.depth() / levels)
}

/// Returns when a rank gives up waiting for a decision from another rank, which itself waits for the whole timeout.
pub(crate) fn give_up_on_decision_at(timeout: Duration) -> Duration {
    timeout.saturating_add(margin(timeout))
}

/// Returns when a rank that has joined its parent gives up waiting for the join decision. This is earlier than in other
/// operations, because a rank that fails to join a split group informs ranks that wait for it in their next operation.
pub(crate) fn give_up_on_joining_at(timeout: Duration) -> Duration {
    timeout.saturating_add(margin(timeout) / 2)
}

/// Returns the time after a timeout in which ranks give up one after the other and inform each other of missing ranks.
pub(crate) fn margin(timeout: Duration) -> Duration {
    const MAX_MARGIN: Duration = Duration::from_secs(1);
    (timeout / 4).min(MAX_MARGIN)
}

/// Returns when a rank that waits for a child gives up, in operations without reports of missing ranks. The deepest
/// rank gives up first, and all ranks that wait for a child give up before any rank that waits for its parent. So the
/// first rank to give up is a neighbour of the missing rank.
pub(crate) fn give_up_on_child_at(tree: &Topology, timeout: Duration) -> Duration {
    let (half, levels) = (margin(timeout) / 2, tree.height() + 1);
    timeout.saturating_add(half - half * (tree.depth() + 1) / levels)
}

/// Returns when a rank that waits for its parent gives up. The highest rank gives up first, so that the first rank to
/// give up is a neighbour of the missing rank.
pub(crate) fn give_up_on_parent_at(tree: &Topology, timeout: Duration) -> Duration {
    let (half, levels) = (margin(timeout) / 2, tree.height() + 1);
    timeout.saturating_add(half + half * tree.depth() / levels)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Rank;
    use crate::rank::Tree;

    #[test]
    fn no_rank_gives_up_before_its_timeout_and_ranks_above_are_first() {
        let timeout = Duration::from_secs(2);
        let line = [0, 1, 5, 21, 85].map(|rank| give_up_at(&Tree::new(Rank(rank), 100).into(), timeout));
        assert_eq!(line[0], timeout);
        assert!(line.is_sorted_by(|above, below| above < below), "{line:?}");
        assert!(line[4] < give_up_on_decision_at(timeout) && timeout < give_up_on_joining_at(timeout));
        assert_eq!(give_up_at(&Tree::new(Rank(0), 1).into(), Duration::ZERO), Duration::ZERO);
        assert_eq!(give_up_on_decision_at(Duration::MAX), Duration::MAX);
    }

    #[test]
    fn the_first_rank_to_give_up_is_a_neighbour_of_the_rank_at_fault() {
        let timeout = Duration::from_secs(2);
        let line = [0, 1, 5, 21, 85].map(|rank| Tree::new(Rank(rank), 100));
        let on_child = line.map(|tree| give_up_on_child_at(&tree.into(), timeout));
        let on_parent = line.map(|tree| give_up_on_parent_at(&tree.into(), timeout));
        assert!(on_child.is_sorted_by(|above, below| above > below), "{on_child:?}");
        assert!(on_parent.is_sorted_by(|above, below| above < below), "{on_parent:?}");
        assert!(on_child[4] >= timeout && on_child[0] < on_parent[0]);
        assert!(on_parent[4] < give_up_on_decision_at(timeout));
    }
}
