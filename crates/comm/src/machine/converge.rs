//! The state machine of every collective: merges votes up the tree of ranks (a convergecast), and sends the decision
//! down the tree.
//!
//! ```text
//!   vote = merge(own vote, votes of the children)      decision = the merged vote of rank 0
//!          ^                                                     |
//!          |                                                     v
//!       parent                                               children
//! ```
//!
//! A waiting rank regularly reports to its parent which ranks are missing below it. So when the timeout of rank 0
//! expires, it can name the missing ranks, and not only the children through which their votes were expected; it
//! sends them to all other ranks. A rank whose parent is stalled names the parent.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{give_up_at, give_up_on_decision_at};
use crate::Rank;
use crate::topology::Topology;

/// The shortest and the longest interval between a waiting rank's reports to its parent of which ranks are missing
/// below it.
const REPORT: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Input {
    Vote {
        child: Rank,
        vote: Vec<u8>,
    },
    Report {
        child: Rank,
        missing: Vec<Rank>,
    },
    Decision(Vec<u8>),
    /// Time has passed. `parent_runs` is false if the parent's progress thread is stalled.
    Tick {
        parent_runs: bool,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Output {
    /// Send a vote to the parent.
    Up(Vec<u8>),
    /// Report missing ranks to the parent.
    Report(Vec<Rank>),
    /// Send the decision to every child.
    Down(Vec<u8>),
    Done(Vec<u8>),
    /// The operation has failed: inform all ranks of the group which ranks are missing.
    Failed(Vec<Rank>),
}

/// A function that merges this rank's own vote with the votes of its children, which are given by rank.
pub(crate) type Merge = fn(own: Vec<u8>, children: &BTreeMap<Rank, Vec<u8>>) -> Vec<u8>;

/// The state of one collective operation on one rank.
#[derive(Debug)]
pub(crate) struct Converge {
    tree: Topology,
    give_up: Duration,
    give_up_on_decision: Duration,
    report_every: Duration,
    next_report: Duration,
    merge: Merge,
    own: Option<Vec<u8>>,
    votes: BTreeMap<Rank, Vec<u8>>,
    reports: BTreeMap<Rank, Vec<Rank>>,
    ended: bool,
}

impl Converge {
    pub(crate) fn new(tree: impl Into<Topology>, timeout: Duration, own: Vec<u8>, merge: Merge) -> Self {
        let tree = tree.into();
        let report_every = (timeout / 8).clamp(REPORT.0, REPORT.1);
        Self {
            give_up: give_up_at(&tree, timeout),
            tree,
            give_up_on_decision: give_up_on_decision_at(timeout),
            report_every,
            next_report: report_every,
            merge,
            own: Some(own),
            votes: BTreeMap::new(),
            reports: BTreeMap::new(),
            ended: false,
        }
    }

    /// Returns the outputs at the start of the operation: a rank without children sends its vote, and in a group of one
    /// rank the operation is done.
    pub(crate) fn start(&mut self) -> Vec<Output> {
        self.advance()
    }

    /// Returns the time at which this state machine needs the next `Tick` input.
    pub(crate) fn next_tick(&self, now: Duration) -> Duration {
        let next = if now < self.give_up { self.give_up } else { self.give_up_on_decision };
        if self.tree.is_root() { next } else { next.min(self.next_report) }
    }

    pub(crate) fn step(&mut self, now: Duration, input: Input) -> Vec<Output> {
        if self.ended {
            return Vec::new();
        }
        match input {
            Input::Vote { child, vote } => {
                // A later vote of the same child is ignored: only the first one counts.
                if self.tree.children().any(|known| known == child) {
                    self.votes.entry(child).or_insert(vote);
                }
                self.advance()
            }
            Input::Report { child, missing } => {
                self.reports.insert(child, missing);
                Vec::new()
            }
            Input::Decision(decision) => self.end(decision),
            Input::Tick { parent_runs } => self.tick(now, parent_runs),
        }
    }

    fn advance(&mut self) -> Vec<Output> {
        if self.votes.len() < self.tree.children().count() {
            return Vec::new();
        }
        let Some(own) = self.own.take() else { return Vec::new() };
        let merged = (self.merge)(own, &self.votes);
        if self.tree.is_root() { self.end(merged) } else { vec![Output::Up(merged)] }
    }

    fn tick(&mut self, now: Duration, parent_runs: bool) -> Vec<Output> {
        let missing = self.missing();
        let over = now >= self.give_up_on_decision;
        let head = self.tree.is_root() || !parent_runs;
        if over || head && now >= self.give_up {
            self.ended = true;
            let parent = self.tree.parent().filter(|_| !parent_runs || missing.is_empty());
            return vec![Output::Failed(parent.into_iter().chain(missing).collect())];
        }
        if now < self.next_report || self.tree.is_root() {
            return Vec::new();
        }
        self.next_report = now + self.report_every;
        if missing.is_empty() { Vec::new() } else { vec![Output::Report(missing)] }
    }

    fn missing(&self) -> Vec<Rank> {
        let silent = self.tree.children().filter(|child| !self.votes.contains_key(child));
        let below = |child: Rank| self.reports.get(&child).cloned().unwrap_or_else(|| vec![child]);
        let mut missing: Vec<_> = silent.flat_map(below).collect();
        missing.sort_unstable();
        missing
    }

    fn end(&mut self, decision: Vec<u8>) -> Vec<Output> {
        self.ended = true;
        let down = self.tree.children().next().map(|_| Output::Down(decision.clone()));
        down.into_iter().chain([Output::Done(decision)]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rank::Tree;

    const TIMEOUT: Duration = Duration::from_secs(4);
    const RUNS: Input = Input::Tick { parent_runs: true };
    const STALLED: Input = Input::Tick { parent_runs: false };

    fn sum(own: Vec<u8>, children: &BTreeMap<Rank, Vec<u8>>) -> Vec<u8> {
        vec![own[0] + children.values().map(|vote| vote[0]).sum::<u8>()]
    }

    fn converge(rank: u32, size: u32) -> Converge {
        Converge::new(Tree::new(Rank(rank), size), TIMEOUT, vec![1], sum)
    }

    fn vote(child: u32, vote: u8) -> Input {
        Input::Vote { child: Rank(child), vote: vec![vote] }
    }

    #[test]
    fn votes_are_merged_up_the_tree_and_the_decision_is_sent_down() {
        assert_eq!(converge(0, 1).start(), [Output::Done(vec![1])]);
        assert_eq!(converge(2, 3).start(), [Output::Up(vec![1])]);
        let mut root = converge(0, 3);
        assert_eq!(root.start(), []);
        assert_eq!(root.step(Duration::ZERO, vote(2, 5)), []);
        assert_eq!(root.step(Duration::ZERO, vote(2, 9)), [], "a second vote is ignored");
        assert_eq!(
            root.step(Duration::ZERO, vote(7, 9)),
            [],
            "the vote of a rank that is not a child is ignored"
        );
        assert_eq!(root.step(Duration::ZERO, vote(1, 1)), [Output::Down(vec![7]), Output::Done(vec![7])]);
    }

    #[test]
    fn rank_0_names_the_ranks_that_its_children_report_missing() {
        let mut root = converge(0, 8);
        root.start();
        for child in [2, 3] {
            root.step(Duration::ZERO, vote(child, 1));
        }
        let missing = vec![Rank(6), Rank(7)];
        root.step(Duration::ZERO, Input::Report { child: Rank(1), missing });
        let before = TIMEOUT - Duration::from_nanos(1);
        assert_eq!(root.step(before, RUNS), [], "the timeout has not expired");
        assert_eq!(root.next_tick(before), TIMEOUT);
        assert_eq!(root.step(TIMEOUT, RUNS), [Output::Failed(vec![Rank(4), Rank(6), Rank(7)])]);
    }

    #[test]
    fn a_waiting_rank_reports_which_ranks_are_missing_below_it() {
        let mut inner = converge(1, 8);
        inner.start();
        inner.step(Duration::ZERO, vote(5, 1));
        let at = inner.next_tick(Duration::ZERO);
        assert_eq!(inner.step(at, RUNS), [Output::Report(vec![Rank(6), Rank(7)])]);
        assert!(inner.next_tick(at) > at);
    }

    #[test]
    fn a_rank_whose_parent_is_stalled_names_the_parent() {
        let mut leaf = converge(2, 3);
        leaf.start();
        let give_up = give_up_at(&leaf.tree, TIMEOUT);
        assert_eq!(leaf.step(give_up, RUNS), [], "the parent may still send the decision");
        assert_eq!(leaf.step(give_up, STALLED), [Output::Failed(vec![Rank(0)])]);
        let mut leaf = converge(2, 3);
        leaf.start();
        assert_eq!(leaf.step(give_up_on_decision_at(TIMEOUT), RUNS), [Output::Failed(vec![Rank(0)])]);
    }
}
