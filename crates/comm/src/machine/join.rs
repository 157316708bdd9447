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
//! A rank that sends a decision publishes that it does ([`Stage::Decided`]) before it sends it. So if it dies, each of its
//! children knows whether any other may have left already, and then does not wait for it.
//!
//! **Deaths of successors.** The rank that takes a place may die too, and so may the next. So each rank publishes a
//! [`JoinRecord`], which its neighbours read after its death: up to which place above it all ranks are dead, so that a child climbs as
//! far, and which ranks had joined. The caller tests whether those that have not joined again still listen at their address
//! ([`JoinProtocol::unaccounted`]). If one does not, it has died ([`Input::Gone`]), also if no survivor was ever connected with it.
//!
//! **Limit.** If a rank dies together with all its neighbours but those at one place below it, and the rank in that place has not
//! seen it die, the ranks below take it that the decision was made without them: they return after half a second, and ranks that start
//! later wait until their timeout has passed.

use std::collections::BTreeSet;
use std::time::Duration;

use super::give_up_on_joining_at;
use crate::Rank;
use crate::fault::Fault;
use crate::rank::Tree;
use crate::wire::frame::News;

mod record;

pub(crate) use record::{JoinRecord, Stage};

/// For how long no process may listen at the place above until a rank that had joined there takes it that the decision was made
/// without it. If the rank above has died instead, one of its neighbours listens there much earlier.
const REFUSED_FOR: Duration = Duration::from_millis(500);

/// What happens to a rank while its group comes together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Input {
    /// The parent has proved itself, and this rank to it.
    ParentProved,
    /// A child has proved itself, and is about to be told so.
    ChildAdmitted(Rank),
    /// A child has proved itself, and this rank to it.
    ChildProved(Rank),
    /// A child tells of ranks below it.
    News(News),
    /// The rank in this place next to this one has died after it proved itself, and has left this record.
    Died(Rank, JoinRecord),
    /// One of the ranks that are [unaccounted](JoinProtocol::unaccounted) for does not listen any more.
    Gone(Rank),
    /// This rank has taken the place of a rank that died.
    TookPlace(Rank),
    /// Neither the parent of the place that this rank has taken nor a stand-in for it accepts connections.
    Refused,
    /// One of them does, or may.
    Reached,
    /// The parent has decided.
    Decision(Result<(), Fault>),
    /// Time has passed.
    Tick,
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
    own: Rank,
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
    /// Ranks that this rank has admitted, or that had joined according to the records of dead ranks.
    seen: BTreeSet<Rank>,
    /// Since when no process has listened at the place above.
    refused_since: Option<Duration>,
    ended: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Parent {
    /// Rank 0 has none.
    None,
    Awaited,
    Proved,
    /// It died undecided, as have the ranks in all places above it up to `top`. The last of them had come so far.
    Dead {
        stage: Stage,
        top: Rank,
    },
    /// The parent of the place that this rank has taken: the dead rank had joined it.
    Rejoined,
}

impl JoinProtocol {
    pub(crate) fn new(tree: Tree, timeout: Duration) -> Self {
        Self {
            own: tree.rank,
            tree,
            timeout,
            give_up_on_word: give_up_on_joining_at(timeout),
            parent: if tree.is_root() { Parent::None } else { Parent::Awaited },
            children: BTreeSet::new(),
            places: BTreeSet::from([tree.rank]),
            joined: BTreeSet::from([tree.rank]),
            died: BTreeSet::new(),
            seen: BTreeSet::new(),
            refused_since: None,
            ended: false,
        }
    }

    /// When a `Tick` is due at the latest.
    pub(crate) fn next_tick(&self) -> Duration {
        if self.parent == Parent::Proved { self.give_up_on_word } else { self.timeout }
    }

    /// The [record](JoinRecord) that this rank is to publish.
    pub(crate) fn record(&self) -> u64 {
        let (stage, top) = match self.parent {
            Parent::Dead { stage, top } => (stage, top),
            Parent::Proved | Parent::Rejoined => (Stage::Joined, self.tree.rank),
            Parent::None | Parent::Awaited => (Stage::Alone, self.tree.rank),
        };
        let stage = if self.ended { Stage::Decided } else { stage };
        let is_seen =
            |rank| self.joined.contains(&rank) || self.died.contains(&rank) || self.seen.contains(&rank);
        let (own, top) = (Tree { rank: self.own, ..self.tree }, Tree { rank: top, ..self.tree });
        JoinRecord::encode(stage, own, top, is_seen)
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
            Parent::Awaited | Parent::Dead { .. } | Parent::Rejoined => {
                Some((self.tree.rank, self.tree.parent()?))
            }
        }
    }

    /// The places of dead ranks next to this one that this rank is to take, if no other has.
    pub(crate) fn vacant(&self) -> Vec<Rank> {
        if self.ended {
            return Vec::new();
        }
        let above = self.tree.parent().filter(|_| matches!(self.parent, Parent::Dead { .. }));
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

    /// Ranks that had joined before a rank died, and neither have joined again nor are known to be dead, as far as this rank knows.
    pub(crate) fn unaccounted(&self) -> impl Iterator<Item = Rank> {
        let is_known = |rank: &Rank| self.joined.contains(rank) || self.died.contains(rank);
        self.seen.iter().copied().filter(move |rank| !self.ended && !is_known(rank))
    }

    pub(crate) fn step(&mut self, now: Duration, input: Input) -> Vec<Output> {
        let mut outputs = Vec::new();
        if self.ended {
            return outputs;
        }
        let news = match input {
            Input::ParentProved => {
                (self.parent, self.refused_since) = (Parent::Proved, None);
                let (joined, died) = (self.joined.iter().copied(), self.died.iter().copied());
                News { joined: joined.collect(), died: died.collect() }
            }
            Input::ChildAdmitted(child) => {
                // From now on it may take the place of this rank, so it is published first.
                self.seen.insert(child);
                return outputs;
            }
            Input::ChildProved(child) => {
                self.children.insert(child);
                self.note(News { joined: vec![child], died: vec![] })
            }
            Input::News(news) => self.note(news),
            Input::Died(place, record) => {
                self.seen.extend(record.seen);
                let mut died = vec![place, record.rank];
                if Some(place) == self.tree.parent() {
                    if record.stage == Stage::Decided {
                        self.died.insert(place);
                        self.end(Err(Fault::Lost(place)), &mut outputs);
                        return outputs;
                    }
                    died.extend(self.path(place, record.top));
                    (self.parent, self.refused_since) =
                        (Parent::Dead { stage: record.stage, top: record.top }, None);
                } else {
                    self.children.remove(&place);
                }
                self.note(News { joined: vec![], died })
            }
            Input::Gone(rank) => self.note(News { joined: vec![], died: vec![rank] }),
            Input::TookPlace(place) => {
                self.take_place(place);
                News::default()
            }
            Input::Refused if self.parent == Parent::Rejoined => {
                let since = *self.refused_since.get_or_insert(now);
                if now.saturating_sub(since) >= REFUSED_FOR {
                    // The parent of the dead rank was there, and is not any more: it has decided, and the dead rank has
                    // not passed it on.
                    self.end(Err(Fault::Lost(self.tree.rank)), &mut outputs);
                    return outputs;
                }
                News::default()
            }
            Input::Reached => {
                self.refused_since = None;
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

    /// The places from one up to another above it, both among them.
    fn path(&self, from: Rank, to: Rank) -> impl Iterator<Item = Rank> {
        let tree = self.tree;
        let above = move |rank: &Rank| Tree { rank: *rank, ..tree }.parent().filter(|_| *rank != to);
        std::iter::successors(Some(from), above)
    }

    fn take_place(&mut self, place: Rank) {
        self.places.insert(place);
        let Parent::Dead { stage, top } = self.parent else { return };
        if self.tree.parent() == Some(place) {
            self.tree.rank = place;
            self.parent = match stage {
                _ if self.tree.is_root() => Parent::None,
                _ if place != top => Parent::Dead { stage, top },
                Stage::Joined => Parent::Rejoined,
                Stage::Alone | Stage::Decided => Parent::Awaited,
            };
        }
    }

    /// Takes in what is new, and returns what of it was. A rank counts as joined if it is below this one, as dead wherever it is.
    fn note(&mut self, mut news: News) -> News {
        let tree = self.tree;
        news.joined.retain(|rank| tree.is_below(*rank) && self.joined.insert(*rank));
        news.died.retain(|rank| rank.0 < tree.size && self.died.insert(*rank));
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
            Parent::Awaited | Parent::Dead { .. } | Parent::Rejoined if now >= self.timeout => {
                Some(verdict(self.tree.parent().into_iter().chain(self.missing()).collect()))
            }
            Parent::Awaited | Parent::Dead { .. } | Parent::Rejoined => None,
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
mod tests;
