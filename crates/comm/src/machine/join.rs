//! How a group comes together: ranks join their parents, the joined are counted upwards, the decision comes down.
//!
//! ```text
//!   joined {5, 6}, died {7}          go, or the fault
//!          ^                                |
//!          |           rank 1               v
//!        to rank 0     /    \           to the children
//! ```
//!
//! The rank in the place of rank 0 decides, when every rank is accounted for or its timeout has passed. A rank whose parent
//! has not appeared decides for those below it when its timeout has passed.
//!
//! **Deaths.** If a rank dies before it has passed a decision on, one of its neighbours takes its place in the tree: it accepts
//! the dead rank's children, and if it is one of them itself, it joins the dead rank's parent. So all survivors stay
//! connected, and learn of the death together, when the last of them has joined.
//!
//! ```text
//!            0                     (0) 1                 rank 0 dies; rank 1, which had joined it, takes its place,
//!         /  |  \         =>          / \                and is joined there by rank 2, which had joined rank 0 too,
//!        1   2   3                   2   3               and by rank 3, which comes later
//! ```
//!
//! A rank that has passed a decision on shows so ([`Stage::Decided`]) before it does. So if it dies, each of its children knows
//! whether any other may have left already, and then does not wait for it.

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
    /// A neighbour has died after it proved itself, and had come so far.
    Died(Rank, Stage),
    /// This rank has taken the place of a rank that died.
    TookPlace(Rank),
    /// Neither the parent of the place that this rank has taken nor a stand-in for it accepts connections.
    Refused,
    /// The parent has decided.
    Decision(Result<(), Fault>),
    /// Time has passed.
    Tick,
}

/// How far a rank has come, as its neighbours still see after its death.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum Stage {
    /// It has not joined a parent.
    Alone = 0,
    /// It has joined its parent.
    Joined = 1,
    /// It knows the decision, and may have told it to some of its neighbours.
    Decided = 2,
}

impl Stage {
    /// The stage that a neighbour has shown. An unknown number is a neighbour of another version, which shows none.
    pub(crate) fn decode(number: u64) -> Self {
        match number {
            0 => Self::Alone,
            1 => Self::Joined,
            _ => Self::Decided,
        }
    }
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
pub(crate) struct JoinProtocol {
    /// The highest place of this rank: its own, or that of a rank that died.
    tree: Tree,
    timeout: Duration,
    give_up_on_word: Duration,
    parent: Parent,
    /// Those connected with this rank.
    children: BTreeSet<Rank>,
    /// The places of this rank: its own, and those of ranks that died.
    places: BTreeSet<Rank>,
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
    /// It died undecided, and had come so far.
    Dead(Stage),
    /// The parent of the place that this rank has taken: the dead rank had joined it.
    Rejoined,
}

impl JoinProtocol {
    pub(crate) fn new(tree: Tree, timeout: Duration) -> Self {
        Self {
            tree,
            timeout,
            give_up_on_word: give_up_on_joining_at(timeout),
            parent: if tree.is_root() { Parent::None } else { Parent::Awaited },
            children: BTreeSet::new(),
            places: BTreeSet::from([tree.rank]),
            joined: BTreeSet::from([tree.rank]),
            died: BTreeSet::new(),
            ended: false,
        }
    }

    /// When a `Tick` is due at the latest.
    pub(crate) fn next_tick(&self) -> Duration {
        if self.parent == Parent::Proved { self.give_up_on_word } else { self.timeout }
    }

    /// How far this rank has come.
    pub(crate) fn stage(&self) -> Stage {
        match self.parent {
            _ if self.ended => Stage::Decided,
            Parent::Proved => Stage::Joined,
            _ => Stage::Alone,
        }
    }

    /// The highest place of this rank in the tree.
    pub(crate) fn place(&self) -> Tree {
        self.tree
    }

    /// The place in which this rank is to join the rank above it, and the place of that one, if it has yet to.
    pub(crate) fn seeks(&self) -> Option<(Rank, Rank)> {
        match self.parent {
            _ if self.ended => None,
            Parent::None | Parent::Proved => None,
            Parent::Awaited | Parent::Dead(_) | Parent::Rejoined => {
                Some((self.tree.rank, self.tree.parent()?))
            }
        }
    }

    /// The places of dead ranks next to this one that this rank is to take, if no other has.
    pub(crate) fn vacant(&self) -> Vec<Rank> {
        if self.ended {
            return Vec::new();
        }
        let above = self.tree.parent().filter(|_| matches!(self.parent, Parent::Dead(_)));
        let is_below = |dead: &Rank| {
            let above = Tree { rank: *dead, ..self.tree }.parent();
            above.is_some_and(|above| self.places.contains(&above))
                && !self.children.contains(dead)
                && !self.places.contains(dead)
        };
        above.into_iter().chain(self.died.iter().copied().filter(is_below)).collect()
    }

    /// The ranks known to have died.
    pub(crate) fn died(&self) -> impl Iterator<Item = Rank> {
        self.died.iter().copied()
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
            Input::Died(rank, stage) if Some(rank) == self.tree.parent() => {
                self.parent = Parent::Dead(stage);
                self.died.insert(rank);
                if stage == Stage::Decided {
                    self.end(Err(Fault::Lost(rank)), &mut outputs);
                    return outputs;
                }
                News::default()
            }
            Input::Died(rank, _) => {
                self.children.remove(&rank);
                self.note(News { joined: vec![], died: vec![rank] })
            }
            Input::TookPlace(place) => {
                self.take_place(place);
                News::default()
            }
            Input::Refused if self.parent == Parent::Rejoined => {
                // The parent of the dead rank was there, and is not any more: it has decided, and the dead rank has not
                // passed it on.
                self.end(Err(Fault::Lost(self.tree.rank)), &mut outputs);
                return outputs;
            }
            Input::Decision(decision) => {
                self.end(decision, &mut outputs);
                return outputs;
            }
            Input::Refused | Input::Tick => News::default(),
        };
        if self.parent == Parent::Proved && news != News::default() {
            outputs.push(Output::Up(news));
        }
        if let Some(decision) = self.decision(now) {
            self.end(decision, &mut outputs);
        }
        outputs
    }

    fn take_place(&mut self, place: Rank) {
        self.places.insert(place);
        let Parent::Dead(stage) = self.parent else { return };
        if self.tree.parent() == Some(place) {
            self.tree.rank = place;
            self.parent = match stage {
                _ if self.tree.is_root() => Parent::None,
                Stage::Joined => Parent::Rejoined,
                Stage::Alone | Stage::Decided => Parent::Awaited,
            };
        }
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
            Parent::Awaited | Parent::Dead(_) | Parent::Rejoined if now >= self.timeout => {
                Some(verdict(self.tree.parent().into_iter().chain(self.missing()).collect()))
            }
            Parent::Awaited | Parent::Dead(_) | Parent::Rejoined => None,
            Parent::None => {
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

    /// Ranks below this one that have neither joined nor died.
    fn missing(&self) -> Vec<Rank> {
        let mut missing = Vec::new();
        let mut left = vec![self.tree.rank];
        while let Some(rank) = left.pop() {
            if !self.died.contains(&rank) && !self.joined.contains(&rank) {
                missing.push(rank);
            }
            left.extend(Tree { rank, ..self.tree }.children());
        }
        missing.sort_unstable();
        missing
    }

    fn end(&mut self, decision: Result<(), Fault>, outputs: &mut Vec<Output>) {
        self.ended = true;
        outputs.extend(self.children.iter().map(|child| Output::Down(*child, decision.clone())));
        outputs.push(Output::End(decision));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(4);

    fn joining(rank: u32, size: u32) -> JoinProtocol {
        JoinProtocol::new(Tree::new(Rank(rank), size), TIMEOUT)
    }

    fn joined(ranks: &[u32]) -> News {
        News { joined: ranks.iter().copied().map(Rank).collect(), died: vec![] }
    }

    #[test]
    fn a_group_of_one_stands_at_once() {
        assert_eq!(joining(0, 1).step(Duration::ZERO, Input::Tick), [Output::End(Ok(()))]);
    }

    #[test]
    fn rank_0_lets_all_go_when_the_last_has_joined() {
        let mut root = joining(0, 3);
        assert_eq!(root.step(Duration::ZERO, Input::ChildProved(Rank(2))), []);
        assert_eq!(
            root.step(Duration::ZERO, Input::ChildProved(Rank(1))),
            [Output::Down(Rank(1), Ok(())), Output::Down(Rank(2), Ok(())), Output::End(Ok(()))]
        );
        assert_eq!(root.stage(), Stage::Decided);
    }

    #[test]
    fn what_joined_before_the_parent_appeared_is_told_to_it() {
        let mut inner = joining(1, 8);
        assert_eq!(inner.step(Duration::ZERO, Input::ChildProved(Rank(5))), []);
        assert_eq!(inner.stage(), Stage::Alone);
        assert_eq!(inner.step(Duration::ZERO, Input::ParentProved), [Output::Up(joined(&[1, 5]))]);
        assert_eq!(inner.stage(), Stage::Joined);
        assert_eq!(inner.step(Duration::ZERO, Input::ChildProved(Rank(7))), [Output::Up(joined(&[7]))]);
        // A child that tells of ranks which are none of its own is not believed.
        assert_eq!(inner.step(Duration::ZERO, Input::News(joined(&[2, 7]))), []);
    }

    #[test]
    fn a_death_is_told_when_all_others_have_joined() {
        let mut root = joining(0, 6);
        for child in [1, 2, 3] {
            assert_eq!(root.step(Duration::ZERO, Input::ChildProved(Rank(child))), []);
        }
        assert_eq!(root.step(Duration::ZERO, Input::Died(Rank(1), Stage::Joined)), []);
        // Rank 5, which is to join rank 1, joins rank 0 in its place.
        assert_eq!(root.vacant(), [Rank(1)]);
        assert_eq!(root.step(Duration::ZERO, Input::TookPlace(Rank(1))), []);
        assert_eq!(root.vacant(), []);
        assert_eq!(root.step(Duration::ZERO, Input::ChildProved(Rank(5))), []);
        let fault = Err(Fault::Lost(Rank(1)));
        let told = [2, 3, 4, 5].map(|child| Output::Down(Rank(child), fault.clone()));
        let outputs = root.step(Duration::ZERO, Input::ChildProved(Rank(4)));
        assert_eq!(outputs, [&told[..], &[Output::End(fault)]].concat());
    }

    #[test]
    fn a_child_takes_the_place_of_rank_0_and_waits_for_the_others() {
        let mut heir = joining(1, 4);
        heir.step(Duration::ZERO, Input::ParentProved);
        assert_eq!((heir.seeks(), heir.vacant()), (None, vec![]));
        assert_eq!(heir.step(Duration::ZERO, Input::Died(Rank(0), Stage::Alone)), []);
        assert_eq!((heir.seeks(), heir.vacant()), (Some((Rank(1), Rank(0))), vec![Rank(0)]));
        assert_eq!(heir.step(Duration::ZERO, Input::TookPlace(Rank(0))), []);
        assert_eq!((heir.seeks(), heir.vacant(), heir.stage()), (None, vec![], Stage::Alone));
        assert_eq!(heir.step(Duration::ZERO, Input::ChildProved(Rank(3))), []);
        let fault = Err(Fault::Lost(Rank(0)));
        assert_eq!(
            heir.step(Duration::ZERO, Input::ChildProved(Rank(2))),
            [Output::Down(Rank(2), fault.clone()), Output::Down(Rank(3), fault.clone()), Output::End(fault)]
        );
    }

    #[test]
    fn a_child_in_the_place_of_its_parent_joins_the_parent_of_that() {
        let mut heir = joining(5, 8);
        heir.step(Duration::ZERO, Input::ParentProved);
        heir.step(Duration::ZERO, Input::Died(Rank(1), Stage::Joined));
        heir.step(Duration::ZERO, Input::TookPlace(Rank(1)));
        assert_eq!(heir.seeks(), Some((Rank(1), Rank(0))));
        let news = News { joined: vec![Rank(5)], died: vec![Rank(1)] };
        assert_eq!(heir.step(Duration::ZERO, Input::ParentProved), [Output::Up(news)]);
        assert_eq!(heir.step(Duration::ZERO, Input::ChildProved(Rank(7))), [Output::Up(joined(&[7]))]);

        let mut late = joining(5, 8);
        late.step(Duration::ZERO, Input::Died(Rank(1), Stage::Joined));
        assert_eq!(
            late.step(Duration::ZERO, Input::Refused),
            [],
            "a rank in the place of rank 1 may accept it yet"
        );
        late.step(Duration::ZERO, Input::TookPlace(Rank(1)));
        let lost = Err(Fault::Lost(Rank(1)));
        assert_eq!(late.step(Duration::ZERO, Input::Refused), [Output::End(lost)]);
    }

    #[test]
    fn a_parent_that_had_decided_is_lost_at_once() {
        let mut orphan = joining(2, 4);
        orphan.step(Duration::ZERO, Input::ParentProved);
        let lost = Err(Fault::Lost(Rank(0)));
        assert_eq!(
            orphan.step(Duration::ZERO, Input::Died(Rank(0), Stage::Decided)),
            [Output::End(lost)],
            "another child may have left already"
        );
    }

    #[test]
    fn heads_name_the_missing_when_their_timeout_has_passed_and_not_before() {
        let mut root = joining(0, 4);
        root.step(Duration::ZERO, Input::ChildProved(Rank(2)));
        let fault = Err(Fault::Missing(vec![Rank(1), Rank(3)]));
        let before = TIMEOUT - Duration::from_nanos(1);
        assert_eq!((root.next_tick(), root.step(before, Input::Tick)), (TIMEOUT, vec![]));
        assert_eq!(
            root.step(TIMEOUT, Input::Tick),
            [Output::Down(Rank(2), fault.clone()), Output::End(fault)]
        );
        let mut orphan = joining(1, 6);
        let fault = Err(Fault::Missing(vec![Rank(0), Rank(5)]));
        assert_eq!((orphan.next_tick(), orphan.step(before, Input::Tick)), (TIMEOUT, vec![]));
        assert_eq!(orphan.step(TIMEOUT, Input::Tick), [Output::End(fault)]);
    }
}
