//! The join protocol: ranks join their parents in the tree of ranks, joined ranks are reported up the tree, and the
//! decision is sent down.
//!
//! ```text
//!   joined {5, 6}, died {7}          complete, or the fault
//!          ^                                |
//!          |           rank 1               v
//!        to rank 0     /    \           to the children
//! ```
//!
//! The rank in the position of rank 0 decides when every rank has joined or died, or when its timeout expires. A rank
//! whose parent has not appeared decides for the ranks of its subtree when its timeout expires.
//!
//! **Deaths.** If a rank dies before it has forwarded a decision, one of its neighbours takes its position in the
//! tree: it accepts the dead rank's children, and if it is one of them itself, it joins the dead rank's parent. So
//! all survivors stay connected, and learn of the death together, when the last of them has joined.
//!
//! ```text
//!            0                     (0) 1                 rank 0 dies; rank 1, which had joined it, takes its position;
//!         /  |  \         =>          / \                rank 2, which had joined rank 0 too, joins rank 1,
//!        1   2   3                   2   3               and so does rank 3, which starts later
//! ```
//!
//! Before a rank sends a decision, it publishes that it does ([`JoinStage::Decided`]). So if it dies, each of its
//! children knows whether another child may have left already, and then does not wait for it.
//!
//! **Deaths of successors.** The rank that takes a position may die too, and so may the next one. So each rank
//! publishes a [`JoinRecord`], which its neighbours read after its death. It contains up to which position above it
//! all ranks are dead, so that a child takes positions up to there, and which ranks had joined. The caller checks
//! whether ranks that have not joined again still listen at their address ([`JoinProtocol::unaccounted`]). If one
//! does not, it has died ([`Input::Gone`]), even if no survivor was ever connected to it.
//!
//! **Limit.** If a rank dies together with all its neighbours except those at one position below it, and the rank in
//! that position has not detected the death, the ranks below assume that the decision was made without them: they
//! return after half a second, and ranks that start later wait until their timeout expires.

use std::collections::BTreeSet;
use std::time::Duration;

use super::give_up_on_joining_at;
use crate::Rank;
use crate::fault::GroupFault;
use crate::rank::Tree;
use crate::wire::frame::JoinUpdate;

mod record;

pub(crate) use record::{JoinRecord, JoinStage};

/// If no process listens at the parent's address for this long, a rank that had joined there assumes that the decision
/// was made without it. If the parent has died instead, one of the parent's neighbours listens there much earlier.
const MAX_REFUSED: Duration = Duration::from_millis(500);

/// An event at a rank while its group is being formed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Input {
    /// The parent and this rank have authenticated each other.
    ParentJoined,
    /// A child rank is authenticated, and its admission is about to be sent.
    ChildAdmitted(Rank),
    /// A child rank and this rank have authenticated each other.
    ChildJoined(Rank),
    /// A child rank reports which ranks of its subtree have joined or died.
    Update(JoinUpdate),
    /// The neighbour in this position of the tree died after it was authenticated, and left this record of its state.
    Died(Rank, JoinRecord),
    /// A rank that had joined a dead rank and has not joined again ([unaccounted](JoinProtocol::unaccounted) for) no
    /// longer listens, so it has died too.
    Gone(Rank),
    /// This rank has taken the position of a dead rank in the tree.
    PositionTaken(Rank),
    /// Neither the parent nor a successor of the parent accepts connections from this rank.
    Refused,
    /// The parent or its successor accepts connections, or may do so.
    Reached,
    /// The parent has sent the decision whether the group is complete.
    Decision(Result<(), GroupFault>),
    /// Time has passed.
    Tick,
}

/// An action that a rank has to perform while its group is being formed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Output {
    /// Send the parent the ranks that have joined or died.
    Up(JoinUpdate),
    /// Send a child rank the decision whether the group is complete or has failed.
    Down(Rank, Result<(), GroupFault>),
    /// Joining has ended: the group is complete, or it has failed.
    End(Result<(), GroupFault>),
}

/// The state of the join protocol on one rank.
#[derive(Debug)]
pub(crate) struct JoinProtocol {
    own: Rank,
    /// The highest position of this rank in the tree: its own, or that of a dead rank.
    tree: Tree,
    timeout: Duration,
    give_up_on_decision: Duration,
    parent: ParentState,
    /// The child ranks that are connected to this rank.
    children: BTreeSet<Rank>,
    /// The positions of this rank in the tree: its own, and those of dead ranks that it has taken.
    positions: BTreeSet<Rank>,
    /// The ranks in the subtree of this rank that have joined, including this rank.
    joined: BTreeSet<Rank>,
    died: BTreeSet<Rank>,
    /// Ranks that this rank has admitted, or that had joined according to the records of dead ranks.
    seen: BTreeSet<Rank>,
    /// The time since which no process has listened at the parent's address.
    refused_since: Option<Duration>,
    ended: bool,
}

/// The state of a rank's connection to its parent while the group is being formed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ParentState {
    /// Rank 0 has no parent.
    None,
    Awaited,
    Joined,
    /// The parent died without a decision, and so did the ranks in all positions above the parent up to `top`. `stage`
    /// is the join stage of the rank at `top`.
    Dead {
        stage: JoinStage,
        top: Rank,
    },
    /// This rank has taken the position of a dead rank, and is joining the parent that the dead rank had joined.
    Rejoining,
}

impl JoinProtocol {
    pub(crate) fn new(tree: Tree, timeout: Duration) -> Self {
        Self {
            own: tree.rank,
            tree,
            timeout,
            give_up_on_decision: give_up_on_joining_at(timeout),
            parent: if tree.is_root() { ParentState::None } else { ParentState::Awaited },
            children: BTreeSet::new(),
            positions: BTreeSet::from([tree.rank]),
            joined: BTreeSet::from([tree.rank]),
            died: BTreeSet::new(),
            seen: BTreeSet::new(),
            refused_since: None,
            ended: false,
        }
    }

    /// Returns the time at which the join protocol needs the next `Tick` input.
    pub(crate) fn next_tick(&self) -> Duration {
        if self.parent == ParentState::Joined { self.give_up_on_decision } else { self.timeout }
    }

    /// Returns the encoded [join record](JoinRecord) that this rank must publish for the time after its death.
    pub(crate) fn record(&self) -> u64 {
        let (stage, top) = match self.parent {
            ParentState::Dead { stage, top } => (stage, top),
            ParentState::Joined | ParentState::Rejoining => (JoinStage::Joined, self.tree.rank),
            ParentState::None | ParentState::Awaited => (JoinStage::Alone, self.tree.rank),
        };
        let stage = if self.ended { JoinStage::Decided } else { stage };
        let is_seen =
            |rank| self.joined.contains(&rank) || self.died.contains(&rank) || self.seen.contains(&rank);
        let (own, top) = (Tree { rank: self.own, ..self.tree }, Tree { rank: top, ..self.tree });
        JoinRecord::encode(stage, own, top, is_seen)
    }

    /// Returns the highest position of this rank in the tree.
    pub(crate) fn position(&self) -> Tree {
        self.tree
    }

    /// Returns the position in which this rank must join a parent, and the position of that parent, or `None` if no
    /// connection to a parent is needed.
    pub(crate) fn target(&self) -> Option<(Rank, Rank)> {
        match self.parent {
            _ if self.ended => None,
            ParentState::None | ParentState::Joined => None,
            ParentState::Awaited | ParentState::Dead { .. } | ParentState::Rejoining => {
                Some((self.tree.rank, self.tree.parent()?))
            }
        }
    }

    /// Returns the positions of dead neighbours in the tree. This rank must take those that no other rank has taken.
    pub(crate) fn vacant_positions(&self) -> Vec<Rank> {
        if self.ended {
            return Vec::new();
        }
        let above = self.tree.parent().filter(|_| matches!(self.parent, ParentState::Dead { .. }));
        let is_below = |dead: &Rank| {
            let above = Tree { rank: *dead, ..self.tree }.parent();
            above.is_some_and(|above| self.positions.contains(&above))
                && !self.children.contains(dead)
                && !self.positions.contains(dead)
        };
        above.into_iter().chain(self.died.iter().copied().filter(is_below)).collect()
    }

    /// Returns the ranks that are known to have died.
    pub(crate) fn died(&self) -> impl Iterator<Item = Rank> {
        self.died.iter().copied()
    }

    /// Returns the ranks that had joined a rank that died since, have not joined again, and are not known to be dead.
    pub(crate) fn unaccounted(&self) -> impl Iterator<Item = Rank> {
        let is_known = |rank: &Rank| self.joined.contains(rank) || self.died.contains(rank);
        self.seen.iter().copied().filter(move |rank| !self.ended && !is_known(rank))
    }

    pub(crate) fn step(&mut self, now: Duration, input: Input) -> Vec<Output> {
        let mut outputs = Vec::new();
        if self.ended {
            return outputs;
        }
        let update = match input {
            Input::ParentJoined => {
                (self.parent, self.refused_since) = (ParentState::Joined, None);
                let (joined, died) = (self.joined.iter().copied(), self.died.iter().copied());
                JoinUpdate { joined: joined.collect(), died: died.collect() }
            }
            Input::ChildAdmitted(child) => {
                // The admitted child is published before the admission is sent, because the child may take the position
                // of this rank from then on.
                self.seen.insert(child);
                return outputs;
            }
            Input::ChildJoined(child) => {
                self.children.insert(child);
                self.record_update(JoinUpdate { joined: vec![child], died: vec![] })
            }
            Input::Update(update) => self.record_update(update),
            Input::Died(position, record) => {
                self.seen.extend(record.seen);
                let mut died = vec![position, record.rank];
                if Some(position) == self.tree.parent() {
                    if record.stage == JoinStage::Decided {
                        self.died.insert(position);
                        self.end(Err(GroupFault::Lost(position)), &mut outputs);
                        return outputs;
                    }
                    died.extend(self.path(position, record.top));
                    (self.parent, self.refused_since) =
                        (ParentState::Dead { stage: record.stage, top: record.top }, None);
                } else {
                    self.children.remove(&position);
                }
                self.record_update(JoinUpdate { joined: vec![], died })
            }
            Input::Gone(rank) => self.record_update(JoinUpdate { joined: vec![], died: vec![rank] }),
            Input::PositionTaken(position) => {
                self.take_position(position);
                JoinUpdate::default()
            }
            Input::Refused if self.parent == ParentState::Rejoining => {
                let since = *self.refused_since.get_or_insert(now);
                if now.saturating_sub(since) >= MAX_REFUSED {
                    // The parent of the dead rank was reachable before and no longer is: it has made the decision, and
                    // the dead rank has not forwarded the decision.
                    self.end(Err(GroupFault::Lost(self.tree.rank)), &mut outputs);
                    return outputs;
                }
                JoinUpdate::default()
            }
            Input::Reached => {
                self.refused_since = None;
                return outputs;
            }
            Input::Decision(decision) => {
                self.end(decision, &mut outputs);
                return outputs;
            }
            Input::Refused | Input::Tick => JoinUpdate::default(),
        };
        if self.parent == ParentState::Joined && update != JoinUpdate::default() {
            outputs.push(Output::Up(update));
        }
        if let Some(decision) = self.decision(now) {
            self.end(decision, &mut outputs);
        }
        outputs
    }

    /// Returns the positions in the tree from `from` up to `to`, including both.
    fn path(&self, from: Rank, to: Rank) -> impl Iterator<Item = Rank> {
        let tree = self.tree;
        let above = move |rank: &Rank| Tree { rank: *rank, ..tree }.parent().filter(|_| *rank != to);
        std::iter::successors(Some(from), above)
    }

    fn take_position(&mut self, position: Rank) {
        self.positions.insert(position);
        let ParentState::Dead { stage, top } = self.parent else { return };
        if self.tree.parent() == Some(position) {
            self.tree.rank = position;
            self.parent = match stage {
                _ if self.tree.is_root() => ParentState::None,
                _ if position != top => ParentState::Dead { stage, top },
                JoinStage::Joined => ParentState::Rejoining,
                JoinStage::Alone | JoinStage::Decided => ParentState::Awaited,
            };
        }
    }

    /// Records which ranks have joined or died, and returns those that were not known before. Joined ranks count if
    /// they are in the subtree of this rank, dead ranks always.
    fn record_update(&mut self, mut update: JoinUpdate) -> JoinUpdate {
        let tree = self.tree;
        update.joined.retain(|rank| tree.is_below(*rank) && self.joined.insert(*rank));
        update.died.retain(|rank| rank.0 < tree.size && self.died.insert(*rank));
        update
    }

    fn decision(&self, now: Duration) -> Option<Result<(), GroupFault>> {
        let outcome = |missing: Vec<Rank>| match self.died.first() {
            Some(rank) => Err(GroupFault::Lost(*rank)),
            None if missing.is_empty() => Ok(()),
            None => Err(GroupFault::Missing(missing)),
        };
        match self.parent {
            ParentState::Joined if now >= self.give_up_on_decision => {
                Some(outcome(self.tree.parent().into_iter().collect()))
            }
            ParentState::Joined => None,
            ParentState::Awaited | ParentState::Dead { .. } | ParentState::Rejoining
                if now >= self.timeout =>
            {
                Some(outcome(self.tree.parent().into_iter().chain(self.missing()).collect()))
            }
            ParentState::Awaited | ParentState::Dead { .. } | ParentState::Rejoining => None,
            ParentState::None => {
                let due = now >= self.timeout;
                // In most steps the group is far from complete: this cheap check then avoids computing the missing ranks.
                if !due && self.died.is_empty() && self.joined.len() < self.tree.count_below() {
                    return None;
                }
                let missing = self.missing();
                (due || missing.is_empty()).then(|| outcome(missing))
            }
        }
    }

    /// Returns the ranks in the subtree of this rank (its descendants in the tree of ranks) that have neither joined
    /// nor died.
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

    fn end(&mut self, decision: Result<(), GroupFault>, outputs: &mut Vec<Output>) {
        self.ended = true;
        outputs.extend(self.children.iter().map(|child| Output::Down(*child, decision.clone())));
        outputs.push(Output::End(decision));
    }
}

#[cfg(test)]
mod tests;
