//! The protocols between ranks as state machines, `step(now, input) -> outputs`: they do no I/O, and time is an argument.
//!
//! | machine | what it decides |
//! |---|---|
//! | [`join`] | when the group is complete, or why it never will be |
//! | [`converge`] | every collective: votes go up the tree, the decision comes down |
//! | [`stall_detector`] | whether a neighbour runs |
//! | [`group_state`] | whether the group has failed, and which neighbours to inform |
//!
//! A rank gives up when its timeout has passed and never before; whatever the others do, it waits at most a second
//! longer, for the word of a rank that knows who is missing. `now` counts from the call they serve. The
//! seeded simulator in `simulator` delays, stops and kills ranks, and prints the seed of a run that fails.

pub(crate) mod converge;
pub(crate) mod group_state;
pub(crate) mod join;
#[cfg(test)]
mod simulator;
pub(crate) mod stall_detector;

use std::time::Duration;

use crate::rank::Tree;

/// When a rank that nobody above can inform gives up on the others: rank 0 when the timeout has passed, a rank whose
/// parent does not run later, the deeper the later. So the word of a rank above, if it comes, is there first.
pub(crate) fn give_up_at(tree: Tree, timeout: Duration) -> Duration {
    let levels = tree.height() + 1;
    timeout.saturating_add(margin(timeout) * tree.depth() / levels)
}

/// When a rank gives up on the word of the rank that decides, which itself has waited for the whole timeout.
pub(crate) fn give_up_on_word_at(timeout: Duration) -> Duration {
    timeout.saturating_add(margin(timeout))
}

/// When a rank that has joined its parent gives up on the decision whether the group is complete. It is earlier than in
/// an operation: a rank that gives up on its part of a group informs ranks that wait for it in their next operation.
pub(crate) fn give_up_on_joining_at(timeout: Duration) -> Duration {
    timeout.saturating_add(margin(timeout) / 2)
}

/// The time after a timeout in which ranks give up one after the other and inform each other.
pub(crate) fn margin(timeout: Duration) -> Duration {
    const LONGEST: Duration = Duration::from_secs(1);
    (timeout / 4).min(LONGEST)
}

/// When a rank that waits for a child gives up on it, where nobody reports who is missing: the deepest first, and
/// all of them before anybody gives up on a parent. So the first to give up is a neighbour of the one at fault.
pub(crate) fn give_up_on_child_at(tree: Tree, timeout: Duration) -> Duration {
    let (half, levels) = (margin(timeout) / 2, tree.height() + 1);
    timeout.saturating_add(half - half * (tree.depth() + 1) / levels)
}

/// When a rank that waits for its parent gives up on it: the highest first, for the same reason.
pub(crate) fn give_up_on_parent_at(tree: Tree, timeout: Duration) -> Duration {
    let (half, levels) = (margin(timeout) / 2, tree.height() + 1);
    timeout.saturating_add(half + half * tree.depth() / levels)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Rank;

    #[test]
    fn no_rank_gives_up_before_its_timeout_and_those_above_are_first() {
        let timeout = Duration::from_secs(2);
        let line = [0, 1, 5, 21, 85].map(|rank| give_up_at(Tree::new(Rank(rank), 100), timeout));
        assert_eq!(line[0], timeout);
        assert!(line.is_sorted_by(|above, below| above < below), "{line:?}");
        assert!(line[4] < give_up_on_word_at(timeout) && timeout < give_up_on_joining_at(timeout));
        assert_eq!(give_up_at(Tree::new(Rank(0), 1), Duration::ZERO), Duration::ZERO);
        assert_eq!(give_up_on_word_at(Duration::MAX), Duration::MAX);
    }

    #[test]
    fn the_first_to_give_up_is_a_neighbour_of_the_one_at_fault() {
        let timeout = Duration::from_secs(2);
        let line = [0, 1, 5, 21, 85].map(|rank| Tree::new(Rank(rank), 100));
        let on_child = line.map(|tree| give_up_on_child_at(tree, timeout));
        let on_parent = line.map(|tree| give_up_on_parent_at(tree, timeout));
        assert!(on_child.is_sorted_by(|above, below| above > below), "{on_child:?}");
        assert!(on_parent.is_sorted_by(|above, below| above < below), "{on_parent:?}");
        assert!(on_child[4] >= timeout && on_child[0] < on_parent[0]);
        assert!(on_parent[4] < give_up_on_word_at(timeout));
    }
}
