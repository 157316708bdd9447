//! A seeded simulator of a group of ranks, with simulated time. Ranks are delayed, stopped and killed.
//!
//! Messages between two ranks stay in order and take a random time. A killed rank sends no more messages, and its
//! neighbours detect the death a little later, as by its liveness page. A stopped rank processes no events. One rank
//! at a time listens at an address: the rank itself, or its successor.

mod nodes;
mod tests;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

use super::converge::{self, Converge};
use super::give_up_on_decision_at;
use super::group_state::GroupState;
use super::join::{self, JoinProtocol, JoinRecord};
use crate::Rank;
use crate::fault::GroupFault;
use crate::rank::Tree;

/// The SplitMix64 random number generator: small, seeded, and good enough to choose delays.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn micros(&mut self, most: u64) -> Duration {
        Duration::from_micros(self.below(most))
    }
}

const TIMEOUT: Duration = Duration::from_secs(8);

/// The maximum delay before a rank starts, in microseconds.
const MAX_START_DELAY: u64 = 200_000;

/// The maximum delay of a message on a busy machine, in microseconds.
const MAX_MESSAGE_DELAY: u64 = 2_000;

/// A simulated event at one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
enum SimulatedEvent {
    Start,
    Kill,
    Stop,
    Tick,
    /// The rank tries to connect to its parent.
    Connect,
    /// Another rank (the second field) connects to this rank as the child in a position of the tree (the first field).
    Arrive(Rank, Rank),
    /// The rank tries to take the positions of dead neighbours in the tree.
    TakePositions,
    /// The rank checks whether other ranks, which had joined a dead rank, still listen.
    Probe,
    /// An input of the join protocol arrives. The first message on a new connection also contains the rank that sent it
    /// and the position in which the receiver has connected.
    Join(Option<(Rank, Rank)>, join::Input),
    Vote(converge::Input),
    GroupFailed(GroupFault, Option<Rank>),
}

#[derive(Debug)]
struct ScheduledEvent {
    at: Duration,
    order: u64,
    rank: Rank,
    kind: SimulatedEvent,
}

impl PartialEq for ScheduledEvent {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}
impl Eq for ScheduledEvent {}
impl PartialOrd for ScheduledEvent {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for ScheduledEvent {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

/// One simulated rank.
struct SimulatedRank {
    started: Option<Duration>,
    alive: bool,
    stopped: bool,
    joining: JoinProtocol,
    /// The rank that this rank has joined.
    above: Option<Rank>,
    /// The ranks that have joined this rank, by their positions in the tree.
    below: BTreeMap<Rank, Rank>,
    is_connecting: bool,
    is_taking_positions: bool,
    is_probing: bool,
    converge: Converge,
    group: GroupState,
    outcome: Option<(Duration, Result<Vec<u8>, GroupFault>)>,
}

/// The simulated group.
struct Simulation {
    rng: Rng,
    size: u32,
    events: BinaryHeap<Reverse<ScheduledEvent>>,
    order: u64,
    /// The arrival time of the last message from one rank to another. A later message does not arrive before it.
    last_arrivals: BTreeMap<(Rank, Rank), Duration>,
    members: Vec<SimulatedRank>,
    /// For each position of a dead rank: the last rank that has taken it.
    positions: BTreeMap<Rank, Rank>,
    /// A rank that is killed, and the number of messages that it still sends before.
    kill_after_sends: Option<(Rank, u64)>,
    /// The positions whose successors are killed, and the number of successors that are still to be killed.
    successor_kills: (Vec<Rank>, u32),
    last_death: Duration,
    collective: bool,
}

fn count(own: Vec<u8>, children: &BTreeMap<Rank, Vec<u8>>) -> Vec<u8> {
    let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("a count"));
    let sum = number(&own) + children.values().map(|vote| number(vote)).sum::<u32>();
    sum.to_le_bytes().to_vec()
}

impl Simulation {
    fn new(seed: u64, size: u32, collective: bool) -> Self {
        let member = |rank| {
            let tree = Tree::new(Rank(rank), size);
            SimulatedRank {
                started: None,
                alive: true,
                stopped: false,
                joining: JoinProtocol::new(tree, TIMEOUT),
                above: None,
                below: BTreeMap::new(),
                is_connecting: false,
                is_taking_positions: false,
                is_probing: false,
                converge: Converge::new(tree, TIMEOUT, 1u32.to_le_bytes().to_vec(), count),
                group: GroupState::new(tree),
                outcome: None,
            }
        };
        let mut simulation = Self {
            rng: Rng(seed),
            size,
            events: BinaryHeap::new(),
            order: 0,
            last_arrivals: BTreeMap::new(),
            members: (0..size).map(member).collect(),
            positions: BTreeMap::new(),
            kill_after_sends: None,
            successor_kills: (Vec::new(), 0),
            last_death: Duration::ZERO,
            collective,
        };
        for rank in (0..size).map(Rank) {
            let at = simulation.rng.micros(MAX_START_DELAY);
            simulation.push(at, rank, SimulatedEvent::Start);
        }
        simulation
    }

    /// Makes a simulated rank start at time `until` instead of its random start time.
    fn delay(&mut self, rank: Rank, until: Duration) {
        self.events.retain(|Reverse(event)| event.rank != rank);
        self.push(until, rank, SimulatedEvent::Start);
    }

    fn push(&mut self, at: Duration, rank: Rank, kind: SimulatedEvent) {
        self.order += 1;
        self.events.push(Reverse(ScheduledEvent { at, order: self.order, rank, kind }));
    }

    fn send(&mut self, now: Duration, from: Rank, to: Rank, kind: SimulatedEvent) {
        if !self.members[from.index()].alive {
            return;
        }
        let delay = self.rng.micros(MAX_MESSAGE_DELAY);
        let last_arrival = self.last_arrivals.entry((from, to)).or_default();
        *last_arrival = (*last_arrival).max(now + delay);
        let at = *last_arrival;
        self.push(at, to, kind);
        if let Some((rank, left)) = &mut self.kill_after_sends
            && *rank == from
        {
            *left -= 1;
            if *left == 0 {
                self.kill_after_sends = None;
                self.kill(now, from);
            }
        }
    }

    fn member(&mut self, rank: Rank) -> &mut SimulatedRank {
        &mut self.members[rank.index()]
    }

    fn tree(&self, rank: Rank) -> Tree {
        Tree::new(rank, self.size)
    }

    /// Runs the simulation until no events are left.
    fn run(&mut self) {
        while let Some(Reverse(event)) = self.events.pop() {
            let member = &self.members[event.rank.index()];
            if !member.alive || member.stopped && event.kind != SimulatedEvent::Kill {
                if let (false, SimulatedEvent::Arrive(_, child)) = (member.alive, event.kind) {
                    self.connect_again(event.at, child);
                }
                continue;
            }
            self.handle(event.at, event.rank, event.kind);
        }
    }

    fn handle(&mut self, now: Duration, rank: Rank, kind: SimulatedEvent) {
        match kind {
            SimulatedEvent::Start => self.start(now, rank),
            SimulatedEvent::Stop => self.member(rank).stopped = true,
            SimulatedEvent::Kill => self.kill(now, rank),
            SimulatedEvent::Tick => self.tick(now, rank),
            // A rank that has not started reads no messages: the message is delivered again later.
            kind if self.members[rank.index()].started.is_none() => {
                let again = now + Duration::from_millis(1) + self.rng.micros(1000);
                self.push(again, rank, kind);
            }
            SimulatedEvent::Connect => self.connect(now, rank),
            SimulatedEvent::Arrive(position, child) => self.arrive(now, rank, position, child),
            SimulatedEvent::TakePositions => self.take_positions(now, rank),
            SimulatedEvent::Probe => self.probe(now, rank),
            SimulatedEvent::Join(link, input) => self.step_join(now, rank, link, input),
            SimulatedEvent::Vote(input) => self.vote(now, rank, input),
            SimulatedEvent::GroupFailed(fault, from) => self.fail_group(now, rank, fault, from),
        }
    }

    fn start(&mut self, now: Duration, rank: Rank) {
        self.member(rank).started = Some(now);
        if self.collective {
            let outputs = self.member(rank).converge.start();
            self.on_converge_outputs(now, rank, outputs);
        }
        self.push(now, rank, SimulatedEvent::Tick);
    }

    fn kill(&mut self, now: Duration, rank: Rank) {
        self.member(rank).alive = false;
        self.last_death = now;
        if self.collective {
            for neighbour in self.tree(rank).neighbours().collect::<Vec<_>>() {
                self.notice_death(
                    now,
                    rank,
                    neighbour,
                    SimulatedEvent::GroupFailed(GroupFault::Lost(rank), None),
                );
            }
            return;
        }
        let record = self.members[rank.index()].joining.record();
        let died = |position: Tree| {
            let record = JoinRecord::decode(record, position).expect("a valid record");
            SimulatedEvent::Join(None, join::Input::Died(position.rank, record))
        };
        for (position, child) in self.members[rank.index()].below.clone() {
            let dead = self.tree(position).parent().expect("a child has a parent");
            let died = died(self.tree(dead));
            self.notice_death(now, rank, child, died);
        }
        for above in (0..self.size).map(Rank) {
            let below = &self.members[above.index()].below;
            let position = below.iter().find(|(_, child)| **child == rank).map(|(position, _)| *position);
            if let Some(position) = position {
                let died = died(self.tree(position));
                self.notice_death(now, rank, above, died);
            }
        }
    }

    /// Schedules the detection of a death after all messages from the dead rank have arrived, because ranks read a link
    /// to its end before they handle the death.
    fn notice_death(&mut self, now: Duration, dead: Rank, by: Rank, kind: SimulatedEvent) {
        let after = self.rng.micros(20_000);
        let last_arrival = self.last_arrivals.get(&(dead, by)).copied().unwrap_or_default();
        let at = (now + after).max(last_arrival);
        self.push(at, by, kind);
    }

    /// Returns the rank that listens for the children of a position: the rank itself, or its successor.
    fn listener(&self, position: Rank) -> Option<Rank> {
        let listens = |rank: &Rank| {
            let member = &self.members[rank.index()];
            member.alive && member.started.is_some() && member.outcome.is_none()
        };
        Some(position).filter(listens).or_else(|| self.positions.get(&position).copied().filter(listens))
    }

    fn connect(&mut self, now: Duration, rank: Rank) {
        let member = self.member(rank);
        let target = member.joining.target().filter(|_| member.outcome.is_none());
        let Some((position, above)) = target else {
            member.is_connecting = false;
            return;
        };
        match self.listener(above) {
            Some(listener) => {
                self.step_join(now, rank, None, join::Input::Reached);
                self.send(now, rank, listener, SimulatedEvent::Arrive(position, rank));
            }
            None => {
                self.step_join(now, rank, None, join::Input::Refused);
                self.connect_again(now, rank);
            }
        }
    }

    fn connect_again(&mut self, now: Duration, rank: Rank) {
        let pause = Duration::from_millis(1) + self.rng.micros(64_000);
        self.push(now + pause, rank, SimulatedEvent::Connect);
    }

    fn arrive(&mut self, now: Duration, rank: Rank, position: Rank, child: Rank) {
        if !self.members[child.index()].alive {
            return;
        }
        let member = self.member(rank);
        if member.outcome.is_some() || member.below.contains_key(&position) {
            return self.connect_again(now, child);
        }
        member.below.insert(position, child);
        self.step_join(now, rank, None, join::Input::ChildAdmitted(position));
        self.send(now, rank, child, SimulatedEvent::Join(Some((rank, position)), join::Input::ParentJoined));
        self.step_join(now, rank, None, join::Input::ChildJoined(position));
    }

    fn take_positions(&mut self, now: Duration, rank: Rank) {
        self.member(rank).is_taking_positions = false;
        for position in self.members[rank.index()].joining.vacant_positions() {
            if self.listener(position).is_none() {
                self.positions.insert(position, rank);
                self.step_join(now, rank, None, join::Input::PositionTaken(position));
                self.schedule_successor_kill(now, rank, position);
            }
        }
        self.schedule_next(now, rank);
    }

    /// Chooses when a rank that has taken the position of a dead rank is killed: at once, soon, late, or after some
    /// messages. Does nothing if enough successors were killed, or if the test has not selected the position.
    fn schedule_successor_kill(&mut self, now: Duration, rank: Rank, position: Rank) {
        if self.successor_kills.1 == 0 || !self.successor_kills.0.contains(&position) {
            return;
        }
        self.successor_kills.1 -= 1;
        let at = match self.rng.below(5) {
            0 => now,
            1 => now + self.rng.micros(5_000),
            2 => now + self.rng.micros(100_000),
            3 => now + self.rng.micros(4_000_000),
            _ => {
                self.kill_after_sends = Some((rank, 1 + self.rng.below(6)));
                return;
            }
        };
        self.push(at, rank, SimulatedEvent::Kill);
    }

    fn probe(&mut self, now: Duration, rank: Rank) {
        self.member(rank).is_probing = false;
        for other in self.members[rank.index()].joining.unaccounted().collect::<Vec<_>>() {
            let member = &self.members[other.index()];
            if !member.alive || member.outcome.is_some() {
                self.step_join(now, rank, None, join::Input::Gone(other));
            }
        }
        self.schedule_next(now, rank);
    }

    /// Schedules the rank's next attempts to connect, to take positions and to probe other ranks, if any are needed.
    fn schedule_next(&mut self, now: Duration, rank: Rank) {
        let wait = self.rng.micros(10_000);
        let member = self.member(rank);
        if member.joining.target().is_some() && !std::mem::replace(&mut member.is_connecting, true) {
            self.push(now, rank, SimulatedEvent::Connect);
        }
        let member = self.member(rank);
        if !member.joining.vacant_positions().is_empty()
            && !std::mem::replace(&mut member.is_taking_positions, true)
        {
            self.push(now + wait, rank, SimulatedEvent::TakePositions);
        }
        let member = self.member(rank);
        if member.joining.unaccounted().next().is_some() && !std::mem::replace(&mut member.is_probing, true) {
            self.push(now + Duration::from_millis(100), rank, SimulatedEvent::Probe);
        }
    }

    fn tick(&mut self, now: Duration, rank: Rank) {
        let parent_runs = self.tree(rank).parent().is_none_or(|parent| !self.members[parent.index()].stopped);
        let collective = self.collective;
        let member = self.member(rank);
        let Some(started) = member.started else { return };
        if member.outcome.is_some() {
            return;
        }
        let since = now - started;
        if collective {
            let outputs = member.converge.step(since, converge::Input::Tick { parent_runs });
            let next = started + member.converge.next_tick(since).max(since + Duration::from_micros(1));
            self.on_converge_outputs(now, rank, outputs);
            self.push(next, rank, SimulatedEvent::Tick);
        } else {
            let next = started + member.joining.next_tick().max(since + Duration::from_micros(1));
            self.step_join(now, rank, None, join::Input::Tick);
            self.push(next, rank, SimulatedEvent::Tick);
        }
    }

    fn step_join(&mut self, now: Duration, rank: Rank, link: Option<(Rank, Rank)>, input: join::Input) {
        let member = self.member(rank);
        match &input {
            join::Input::ParentJoined => {
                let target = member.joining.target().map(|(position, _)| position);
                member.is_connecting = false;
                let Some((above, _)) = link.filter(|(_, position)| target == Some(*position)) else {
                    // While the connection was made, the rank took the position of a dead rank, so it has dropped the
                    // connection.
                    return self.schedule_next(now, rank);
                };
                member.above = Some(above);
            }
            join::Input::Died(dead, _) => {
                member.below.remove(dead);
                member.above.take_if(|_| member.joining.position().parent() == Some(*dead));
            }
            _ => {}
        }
        let since = now - member.started.expect("the rank has started");
        let outputs = member.joining.step(since, input);
        self.on_join_outputs(now, rank, outputs);
        self.schedule_next(now, rank);
    }

    fn on_join_outputs(&mut self, now: Duration, rank: Rank, outputs: Vec<join::Output>) {
        for output in outputs {
            match output {
                join::Output::Up(update) => {
                    let above = self.members[rank.index()].above.expect("the rank has joined a parent");
                    self.send(now, rank, above, SimulatedEvent::Join(None, join::Input::Update(update)));
                }
                join::Output::Down(child, decision) => {
                    let child = self.members[rank.index()].below[&child];
                    self.send(now, rank, child, SimulatedEvent::Join(None, join::Input::Decision(decision)));
                }
                join::Output::End(decision) => {
                    self.member(rank).outcome = Some((now, decision.map(|()| Vec::new())));
                }
            }
        }
    }

    fn vote(&mut self, now: Duration, rank: Rank, input: converge::Input) {
        let member = self.member(rank);
        if member.outcome.is_some() {
            return;
        }
        let since = now - member.started.expect("the rank has started");
        let outputs = member.converge.step(since, input);
        self.on_converge_outputs(now, rank, outputs);
    }

    fn on_converge_outputs(&mut self, now: Duration, rank: Rank, outputs: Vec<converge::Output>) {
        let tree = self.tree(rank);
        for output in outputs {
            match output {
                converge::Output::Up(vote) => {
                    let parent = tree.parent().expect("rank 0 decides");
                    self.send(
                        now,
                        rank,
                        parent,
                        SimulatedEvent::Vote(converge::Input::Vote { child: rank, vote }),
                    );
                }
                converge::Output::Report(missing) => {
                    let parent = tree.parent().expect("rank 0 decides");
                    let report = converge::Input::Report { child: rank, missing };
                    self.send(now, rank, parent, SimulatedEvent::Vote(report));
                }
                converge::Output::Down(decision) => {
                    for child in tree.children().collect::<Vec<_>>() {
                        self.send(
                            now,
                            rank,
                            child,
                            SimulatedEvent::Vote(converge::Input::Decision(decision.clone())),
                        );
                    }
                }
                converge::Output::Done(decision) => {
                    self.member(rank).outcome.get_or_insert((now, Ok(decision)));
                }
                converge::Output::Failed(missing) => {
                    self.fail_group(now, rank, GroupFault::Missing(missing), None)
                }
            }
        }
    }

    fn fail_group(&mut self, now: Duration, rank: Rank, fault: GroupFault, from: Option<Rank>) {
        let member = self.member(rank);
        for neighbour in member.group.fail(fault.clone(), from) {
            self.send(now, rank, neighbour, SimulatedEvent::GroupFailed(fault.clone(), Some(rank)));
        }
        let member = self.member(rank);
        let fault = member.group.fault().expect("just recorded").clone();
        member.outcome.get_or_insert((now, Err(fault)));
    }

    /// Asserts that every rank that is alive and running ends at most a second after its timeout, and that the first
    /// rank that reports a missing rank has waited for its whole timeout.
    fn assert_no_rank_hangs(&self) {
        let mut first_to_miss = None;
        for (rank, member) in self.members.iter().enumerate().filter(|(_, m)| m.alive && !m.stopped) {
            let (at, outcome) = member.outcome.as_ref().unwrap_or_else(|| panic!("rank {rank} hangs"));
            let waited = *at - member.started.expect("every rank starts");
            assert!(waited <= give_up_on_decision_at(TIMEOUT), "rank {rank} waited {waited:?}");
            if matches!(outcome, Err(GroupFault::Missing(_))) {
                // Several ranks may end at the same simulated time. Of these, the rank that waited longest made the
                // decision.
                first_to_miss = first_to_miss.into_iter().chain([(*at, Reverse(waited), rank)]).min();
            }
        }
        if let Some((_, Reverse(waited), rank)) = first_to_miss {
            assert!(waited >= TIMEOUT, "rank {rank} gave up after {waited:?}");
        }
    }

    /// Asserts that all ranks that are alive and running learn the outcome within a second of each other, or of the
    /// last death.
    fn assert_all_learn_together(&self) {
        let living = self.members.iter().filter(|member| member.alive && !member.stopped);
        let times: Vec<_> = living.map(|member| member.outcome.as_ref().expect("no rank hangs").0).collect();
        let (first, last) =
            (times.iter().min().expect("a survivor"), times.iter().max().expect("a survivor"));
        let since = (*first).max(self.last_death);
        assert!(
            last.saturating_sub(since) < Duration::from_secs(1),
            "the first at {first:?}, the last at {last:?}"
        );
    }

    fn survivors(&self) -> impl Iterator<Item = (Rank, &Result<Vec<u8>, GroupFault>)> {
        let living = self.members.iter().enumerate().filter(|(_, member)| member.alive && !member.stopped);
        living
            .filter_map(|(rank, member)| Some((Rank(u32::try_from(rank).ok()?), &member.outcome.as_ref()?.1)))
    }
}
