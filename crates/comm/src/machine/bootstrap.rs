//! How a group comes together: ranks join their parents, the joined are counted upwards, the decision comes down.
//!
//! ```text
//!   joined {5, 6}, died {7}          go, or the fault
//!          ^                                |
//!          |           rank 1               v
//!        to rank 0     /    \           to the children
//! ```
//!
//! Who has nobody above it is a head: rank 0, and for as long as it lasts a rank whose parent has not appeared or
//! has died. A head decides when every rank below it is accounted for, or when its timeout has passed. What is below
//! a dead rank and has not joined never will, and is not waited for.

use std::collections::BTreeSet;
use std::time::Duration;

use super::{Fault, give_up_on_joining_at};
use crate::Rank;
use crate::rank::Tree;

/// What happens to a rank while its group comes together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Input {
    /// The parent has proved itself, and this rank to it.
    ParentProved,
    /// A child has proved itself, and this rank to it.
    ChildProved(Rank),
    /// A child tells of ranks below it.
    News(News),
    /// A neighbour has died after it proved itself.
    Died(Rank),
    /// The parent has decided.
    Decision(Result<(), Fault>),
    /// Time has passed.
    Tick,
}

/// Ranks that have joined, and ranks that have died since.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct News {
    pub(crate) joined: Vec<Rank>,
    pub(crate) died: Vec<Rank>,
}

/// What a rank has to do about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Output {
    /// Tell the parent.
    Up(News),
    /// Tell a child.
    Down(Rank, Result<(), Fault>),
    /// The group stands, or never will.
    End(Result<(), Fault>),
}

#[derive(Debug)]
pub(crate) struct Bootstrap {
    tree: Tree,
    timeout: Duration,
    give_up_on_word: Duration,
    parent: Parent,
    children: BTreeSet<Rank>,
    /// Joined, this rank among them; all are below this rank.
    joined: BTreeSet<Rank>,
    died: BTreeSet<Rank>,
    ended: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Parent {
    /// Rank 0 has none.
    None,
    Awaited,
    Proved,
    Dead,
}

impl Bootstrap {
    pub(crate) fn new(tree: Tree, timeout: Duration) -> Self {
        Self {
            tree,
            timeout,
            give_up_on_word: give_up_on_joining_at(timeout),
            parent: if tree.is_root() { Parent::None } else { Parent::Awaited },
            children: BTreeSet::new(),
            joined: BTreeSet::from([tree.rank]),
            died: BTreeSet::new(),
            ended: false,
        }
    }

    /// When a `Tick` is due at the latest.
    pub(crate) fn next_tick(&self) -> Duration {
        if self.parent == Parent::Proved { self.give_up_on_word } else { self.timeout }
    }

    pub(crate) fn step(&mut self, now: Duration, input: Input) -> Vec<Output> {
        let mut outputs = Vec::new();
        if self.ended {
            return outputs;
        }
        let news = match input {
            Input::ParentProved => {
                self.parent = Parent::Proved;
                let (joined, died) = (self.joined.iter().copied(), self.died.iter().copied());
                News { joined: joined.collect(), died: died.collect() }
            }
            Input::ChildProved(child) => {
                self.children.insert(child);
                self.note(News { joined: vec![child], died: vec![] })
            }
            Input::News(news) => self.note(news),
            Input::Died(rank) if Some(rank) == self.tree.parent() => {
                self.parent = Parent::Dead;
                self.died.insert(rank);
                News::default()
            }
            Input::Died(rank) => self.note(News { joined: vec![], died: vec![rank] }),
            Input::Decision(decision) => {
                self.end(decision, &mut outputs);
                return outputs;
            }
            Input::Tick => News::default(),
        };
        if self.parent == Parent::Proved && news != News::default() {
            outputs.push(Output::Up(news));
        }
        if let Some(decision) = self.decision(now) {
            self.end(decision, &mut outputs);
        }
        outputs
    }

    /// Takes in what is new, and says what of it was.
    fn note(&mut self, mut news: News) -> News {
        let tree = self.tree;
        news.joined.retain(|rank| tree.is_below(*rank) && self.joined.insert(*rank));
        news.died.retain(|rank| tree.is_below(*rank) && self.died.insert(*rank));
        news
    }

    fn decision(&self, now: Duration) -> Option<Result<(), Fault>> {
        let verdict = |missing: Vec<Rank>| match self.died.first() {
            Some(rank) => Err(Fault::Lost(*rank)),
            None if missing.is_empty() => Ok(()),
            None => Err(Fault::Missing(missing)),
        };
        match self.parent {
            Parent::Proved if now >= self.give_up_on_word => {
                Some(verdict(self.tree.parent().into_iter().collect()))
            }
            Parent::Proved => None,
            Parent::Awaited if now >= self.timeout => {
                Some(verdict(self.tree.parent().into_iter().chain(self.missing()).collect()))
            }
            Parent::Awaited => None,
            Parent::None | Parent::Dead => {
                let due = now >= self.timeout;
                // Cheap first: most steps are of a group that is far from complete.
                if !due && self.died.is_empty() && self.joined.len() < self.tree.count_below() {
                    return None;
                }
                let missing = self.missing();
                (due || missing.is_empty()).then(|| verdict(missing))
            }
        }
    }

    /// Ranks below this one that have neither joined nor died, and could still join.
    fn missing(&self) -> Vec<Rank> {
        let mut missing = Vec::new();
        let mut left = vec![self.tree.rank];
        while let Some(rank) = left.pop() {
            if self.died.contains(&rank) {
                continue;
            }
            if !self.joined.contains(&rank) {
                missing.push(rank);
            }
            left.extend(Tree { rank, ..self.tree }.children());
        }
        missing.sort_unstable();
        missing
    }

    fn end(&mut self, decision: Result<(), Fault>, outputs: &mut Vec<Output>) {
        self.ended = true;
        let living = self.children.iter().filter(|child| !self.died.contains(child));
        outputs.extend(living.map(|child| Output::Down(*child, decision.clone())));
        outputs.push(Output::End(decision));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(4);

    fn bootstrap(rank: u32, size: u32) -> Bootstrap {
        Bootstrap::new(Tree::new(Rank(rank), size), TIMEOUT)
    }

    #[test]
    fn a_group_of_one_stands_at_once() {
        assert_eq!(bootstrap(0, 1).step(Duration::ZERO, Input::Tick), [Output::End(Ok(()))]);
    }

    #[test]
    fn rank_0_lets_all_go_when_the_last_has_joined() {
        let mut root = bootstrap(0, 3);
        assert_eq!(root.step(Duration::ZERO, Input::ChildProved(Rank(2))), []);
        assert_eq!(
            root.step(Duration::ZERO, Input::ChildProved(Rank(1))),
            [Output::Down(Rank(1), Ok(())), Output::Down(Rank(2), Ok(())), Output::End(Ok(()))]
        );
    }

    #[test]
    fn what_joined_before_the_parent_appeared_is_told_to_it() {
        let mut inner = bootstrap(1, 8);
        assert_eq!(inner.step(Duration::ZERO, Input::ChildProved(Rank(5))), []);
        let joined = |ranks: &[u32]| News { joined: ranks.iter().copied().map(Rank).collect(), died: vec![] };
        assert_eq!(inner.step(Duration::ZERO, Input::ParentProved), [Output::Up(joined(&[1, 5]))]);
        assert_eq!(inner.step(Duration::ZERO, Input::ChildProved(Rank(7))), [Output::Up(joined(&[7]))]);
        // A child that tells of ranks which are none of its own is not believed.
        assert_eq!(inner.step(Duration::ZERO, Input::News(joined(&[2, 7]))), []);
    }

    #[test]
    fn a_death_is_told_when_all_others_have_joined() {
        let mut root = bootstrap(0, 3);
        assert_eq!(root.step(Duration::ZERO, Input::ChildProved(Rank(1))), []);
        assert_eq!(root.step(Duration::ZERO, Input::Died(Rank(1))), []);
        let fault = Err(Fault::Lost(Rank(1)));
        assert_eq!(
            root.step(Duration::ZERO, Input::ChildProved(Rank(2))),
            [Output::Down(Rank(2), fault.clone()), Output::End(fault)]
        );
    }

    #[test]
    fn who_is_below_a_dead_rank_is_not_waited_for() {
        let mut root = bootstrap(0, 6);
        for child in 1..=4 {
            assert_eq!(root.step(Duration::ZERO, Input::ChildProved(Rank(child))), []);
        }
        let outputs = root.step(Duration::ZERO, Input::Died(Rank(1)));
        assert_eq!(outputs.last(), Some(&Output::End(Err(Fault::Lost(Rank(1))))));
    }

    #[test]
    fn heads_name_the_missing_when_their_timeout_has_passed_and_not_before() {
        let mut root = bootstrap(0, 4);
        root.step(Duration::ZERO, Input::ChildProved(Rank(2)));
        let fault = Err(Fault::Missing(vec![Rank(1), Rank(3)]));
        let before = TIMEOUT - Duration::from_nanos(1);
        assert_eq!((root.next_tick(), root.step(before, Input::Tick)), (TIMEOUT, vec![]));
        assert_eq!(
            root.step(TIMEOUT, Input::Tick),
            [Output::Down(Rank(2), fault.clone()), Output::End(fault)]
        );
        let mut orphan = bootstrap(1, 6);
        let fault = Err(Fault::Missing(vec![Rank(0), Rank(5)]));
        assert_eq!((orphan.next_tick(), orphan.step(before, Input::Tick)), (TIMEOUT, vec![]));
        assert_eq!(orphan.step(TIMEOUT, Input::Tick), [Output::End(fault)]);
    }
}
