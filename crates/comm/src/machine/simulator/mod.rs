//! A world of simulated ranks: seeded, with its own time, where ranks are late, stopped and killed.
//!
//! Messages between two ranks keep their order and take a random time. A killed rank says nothing more, and its
//! neighbours are told of the death a little later, as the pulse would tell them. A stopped rank takes in nothing.
//! An address is listened at by one rank at a time: its own, or one that has taken the place of a dead rank.

mod tests;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

use super::converge::{self, Converge};
use super::give_up_on_word_at;
use super::group_state::GroupState;
use super::join::{self, JoinProtocol, JoinRecord};
use crate::Rank;
use crate::fault::Fault;
use crate::rank::Tree;

/// SplitMix64: small, seeded, and good enough to choose delays.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.roll() % bound
    }

    fn micros(&mut self, most: u64) -> Duration {
        Duration::from_micros(self.below(most))
    }
}

const TIMEOUT: Duration = Duration::from_secs(8);

/// How late the last rank may begin.
const LATEST: u64 = 200_000;

/// How long a message takes at most, in microseconds: a busy machine's scheduling.
const SLOWEST: u64 = 2_000;

#[derive(Debug, Clone, PartialEq, Eq)]
enum What {
    Start,
    Kill,
    Stop,
    Tick,
    /// A rank tries to connect to the one above it.
    Connect,
    /// A rank (the second) connects here, in a place (the first).
    Arrive(Rank, Rank),
    /// A rank tries to take the places of dead neighbours.
    TakePlaces,
    /// A rank tests whether others that had joined still listen.
    Probe,
    /// The first message of a link comes with the rank it is from, and the place in which the receiver has connected.
    Join(Option<(Rank, Rank)>, join::Input),
    Vote(converge::Input),
    Fall(Fault, Option<Rank>),
}

#[derive(Debug)]
struct Event {
    at: Duration,
    order: u64,
    rank: Rank,
    what: What,
}

impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}
impl Eq for Event {}
impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Event {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

/// One simulated rank.
struct Member {
    started: Option<Duration>,
    alive: bool,
    stopped: bool,
    joining: JoinProtocol,
    /// The rank that this one has joined.
    above: Option<Rank>,
    /// The ranks that have joined this one, by their places.
    below: BTreeMap<Rank, Rank>,
    is_connecting: bool,
    is_taking_places: bool,
    is_probing: bool,
    converge: Converge,
    group: GroupState,
    outcome: Option<(Duration, Result<Vec<u8>, Fault>)>,
}

struct World {
    dice: Dice,
    size: u32,
    events: BinaryHeap<Reverse<Event>>,
    order: u64,
    /// When the last message from one rank to another arrives: they do not overtake.
    lanes: BTreeMap<(Rank, Rank), Duration>,
    members: Vec<Member>,
    /// Which rank has last taken the place of a dead one.
    places: BTreeMap<Rank, Rank>,
    /// A rank that is killed after it has sent so many messages.
    fuse: Option<(Rank, u64)>,
    /// The places whose successors are killed, and how many more of them.
    doomed: (Vec<Rank>, u32),
    last_death: Duration,
    collective: bool,
}

fn count(own: Vec<u8>, children: &BTreeMap<Rank, Vec<u8>>) -> Vec<u8> {
    let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("a count"));
    let sum = number(&own) + children.values().map(|vote| number(vote)).sum::<u32>();
    sum.to_le_bytes().to_vec()
}

impl World {
    fn new(seed: u64, size: u32, collective: bool) -> Self {
        let member = |rank| {
            let tree = Tree::new(Rank(rank), size);
            Member {
                started: None,
                alive: true,
                stopped: false,
                joining: JoinProtocol::new(tree, TIMEOUT),
                above: None,
                below: BTreeMap::new(),
                is_connecting: false,
                is_taking_places: false,
                is_probing: false,
                converge: Converge::new(tree, TIMEOUT, 1u32.to_le_bytes().to_vec(), count),
                group: GroupState::new(tree),
                outcome: None,
            }
        };
        let mut world = Self {
            dice: Dice(seed),
            size,
            events: BinaryHeap::new(),
            order: 0,
            lanes: BTreeMap::new(),
            members: (0..size).map(member).collect(),
            places: BTreeMap::new(),
            fuse: None,
            doomed: (Vec::new(), 0),
            last_death: Duration::ZERO,
            collective,
        };
        for rank in (0..size).map(Rank) {
            let at = world.dice.micros(LATEST);
            world.push(at, rank, What::Start);
        }
        world
    }

    /// Lets a rank begin at another time.
    fn delay(&mut self, rank: Rank, until: Duration) {
        self.events.retain(|Reverse(event)| event.rank != rank);
        self.push(until, rank, What::Start);
    }

    fn push(&mut self, at: Duration, rank: Rank, what: What) {
        self.order += 1;
        self.events.push(Reverse(Event { at, order: self.order, rank, what }));
    }

    fn send(&mut self, now: Duration, from: Rank, to: Rank, what: What) {
        if !self.members[from.index()].alive {
            return;
        }
        let delay = self.dice.micros(SLOWEST);
        let lane = self.lanes.entry((from, to)).or_default();
        *lane = (*lane).max(now + delay);
        let at = *lane;
        self.push(at, to, what);
        if let Some((rank, left)) = &mut self.fuse
            && *rank == from
        {
            *left -= 1;
            if *left == 0 {
                self.fuse = None;
                self.kill(now, from);
            }
        }
    }

    fn member(&mut self, rank: Rank) -> &mut Member {
        &mut self.members[rank.index()]
    }

    fn tree(&self, rank: Rank) -> Tree {
        Tree::new(rank, self.size)
    }

    /// Runs until nothing happens any more.
    fn run(&mut self) {
        while let Some(Reverse(event)) = self.events.pop() {
            let member = &self.members[event.rank.index()];
            if !member.alive || member.stopped && event.what != What::Kill {
                if let (false, What::Arrive(_, child)) = (member.alive, event.what) {
                    self.connect_again(event.at, child);
                }
                continue;
            }
            self.happen(event.at, event.rank, event.what);
        }
    }

    fn happen(&mut self, now: Duration, rank: Rank, what: What) {
        match what {
            What::Start => self.start(now, rank),
            What::Stop => self.member(rank).stopped = true,
            What::Kill => self.kill(now, rank),
            What::Tick => self.tick(now, rank),
            // A rank that has not begun reads nothing: whoever is there waits for it, and tries again.
            what if self.members[rank.index()].started.is_none() => {
                let again = now + Duration::from_millis(1) + self.dice.micros(1000);
                self.push(again, rank, what);
            }
            What::Connect => self.connect(now, rank),
            What::Arrive(place, child) => self.arrive(now, rank, place, child),
            What::TakePlaces => self.take_places(now, rank),
            What::Probe => self.probe(now, rank),
            What::Join(link, input) => self.step_join(now, rank, link, input),
            What::Vote(input) => self.vote(now, rank, input),
            What::Fall(fault, from) => self.fall(now, rank, fault, from),
        }
    }

    fn start(&mut self, now: Duration, rank: Rank) {
        self.member(rank).started = Some(now);
        if self.collective {
            let outputs = self.member(rank).converge.start();
            self.converged(now, rank, outputs);
        }
        self.push(now, rank, What::Tick);
    }

    fn kill(&mut self, now: Duration, rank: Rank) {
        self.member(rank).alive = false;
        self.last_death = now;
        if self.collective {
            for neighbour in self.tree(rank).neighbours().collect::<Vec<_>>() {
                self.notice_death(now, rank, neighbour, What::Fall(Fault::Lost(rank), None));
            }
            return;
        }
        let record = self.members[rank.index()].joining.record();
        let died = |place: Tree| {
            let record = JoinRecord::decode(record, place).expect("a rank has published it");
            What::Join(None, join::Input::Died(place.rank, record))
        };
        for (place, child) in self.members[rank.index()].below.clone() {
            let dead = self.tree(place).parent().expect("it is below one");
            let died = died(self.tree(dead));
            self.notice_death(now, rank, child, died);
        }
        for above in (0..self.size).map(Rank) {
            let below = &self.members[above.index()].below;
            let place = below.iter().find(|(_, child)| **child == rank).map(|(place, _)| *place);
            if let Some(place) = place {
                let died = died(self.tree(place));
                self.notice_death(now, rank, above, died);
            }
        }
    }

    /// Behind what the dead rank had sent, as a link is read to its end before its peer is given up.
    fn notice_death(&mut self, now: Duration, dead: Rank, by: Rank, what: What) {
        let after = self.dice.micros(20_000);
        let lane = self.lanes.get(&(dead, by)).copied().unwrap_or_default();
        let at = (now + after).max(lane);
        self.push(at, by, what);
    }

    /// The rank that listens at the address of a place, or at that of its stand-in.
    fn listener(&self, place: Rank) -> Option<Rank> {
        let listens = |rank: &Rank| {
            let member = &self.members[rank.index()];
            member.alive && member.started.is_some() && member.outcome.is_none()
        };
        Some(place).filter(listens).or_else(|| self.places.get(&place).copied().filter(listens))
    }

    fn connect(&mut self, now: Duration, rank: Rank) {
        let member = self.member(rank);
        let seeks = member.joining.seeks().filter(|_| member.outcome.is_none());
        let Some((place, above)) = seeks else {
            member.is_connecting = false;
            return;
        };
        match self.listener(above) {
            Some(listener) => {
                self.step_join(now, rank, None, join::Input::Reached);
                self.send(now, rank, listener, What::Arrive(place, rank));
            }
            None => {
                self.step_join(now, rank, None, join::Input::Refused);
                self.connect_again(now, rank);
            }
        }
    }

    fn connect_again(&mut self, now: Duration, rank: Rank) {
        let pause = Duration::from_millis(1) + self.dice.micros(64_000);
        self.push(now + pause, rank, What::Connect);
    }

    fn arrive(&mut self, now: Duration, rank: Rank, place: Rank, child: Rank) {
        if !self.members[child.index()].alive {
            return;
        }
        let member = self.member(rank);
        if member.outcome.is_some() || member.below.contains_key(&place) {
            return self.connect_again(now, child);
        }
        member.below.insert(place, child);
        self.step_join(now, rank, None, join::Input::ChildAdmitted(place));
        self.send(now, rank, child, What::Join(Some((rank, place)), join::Input::ParentProved));
        self.step_join(now, rank, None, join::Input::ChildProved(place));
    }

    fn take_places(&mut self, now: Duration, rank: Rank) {
        self.member(rank).is_taking_places = false;
        for place in self.members[rank.index()].joining.vacant() {
            if self.listener(place).is_none() {
                self.places.insert(place, rank);
                self.step_join(now, rank, None, join::Input::TookPlace(place));
                self.doom(now, rank, place);
            }
        }
        self.go_on(now, rank);
    }

    /// Chooses when a rank is killed that has taken one of the doomed places: at once, soon, late, or after some messages.
    fn doom(&mut self, now: Duration, rank: Rank, place: Rank) {
        if self.doomed.1 == 0 || !self.doomed.0.contains(&place) {
            return;
        }
        self.doomed.1 -= 1;
        let at = match self.dice.below(5) {
            0 => now,
            1 => now + self.dice.micros(5_000),
            2 => now + self.dice.micros(100_000),
            3 => now + self.dice.micros(4_000_000),
            _ => {
                self.fuse = Some((rank, 1 + self.dice.below(6)));
                return;
            }
        };
        self.push(at, rank, What::Kill);
    }

    fn probe(&mut self, now: Duration, rank: Rank) {
        self.member(rank).is_probing = false;
        for other in self.members[rank.index()].joining.unaccounted().collect::<Vec<_>>() {
            let member = &self.members[other.index()];
            if !member.alive || member.outcome.is_some() {
                self.step_join(now, rank, None, join::Input::Gone(other));
            }
        }
        self.go_on(now, rank);
    }

    /// Connects upwards, takes places and probes others, if the rank has to.
    fn go_on(&mut self, now: Duration, rank: Rank) {
        let wait = self.dice.micros(10_000);
        let member = self.member(rank);
        if member.joining.seeks().is_some() && !std::mem::replace(&mut member.is_connecting, true) {
            self.push(now, rank, What::Connect);
        }
        let member = self.member(rank);
        if !member.joining.vacant().is_empty() && !std::mem::replace(&mut member.is_taking_places, true) {
            self.push(now + wait, rank, What::TakePlaces);
        }
        let member = self.member(rank);
        if member.joining.unaccounted().next().is_some() && !std::mem::replace(&mut member.is_probing, true) {
            self.push(now + Duration::from_millis(100), rank, What::Probe);
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
            self.converged(now, rank, outputs);
            self.push(next, rank, What::Tick);
        } else {
            let next = started + member.joining.next_tick().max(since + Duration::from_micros(1));
            self.step_join(now, rank, None, join::Input::Tick);
            self.push(next, rank, What::Tick);
        }
    }

    fn step_join(&mut self, now: Duration, rank: Rank, link: Option<(Rank, Rank)>, input: join::Input) {
        let member = self.member(rank);
        match &input {
            join::Input::ParentProved => {
                let seeks = member.joining.seeks().map(|(place, _)| place);
                member.is_connecting = false;
                let Some((above, _)) = link.filter(|(_, place)| seeks == Some(*place)) else {
                    // It has taken the place of a dead rank meanwhile, and given the connection up.
                    return self.go_on(now, rank);
                };
                member.above = Some(above);
            }
            join::Input::Died(dead, _) => {
                member.below.remove(dead);
                member.above.take_if(|_| member.joining.place().parent() == Some(*dead));
            }
            _ => {}
        }
        let since = now - member.started.expect("it has begun");
        let outputs = member.joining.step(since, input);
        self.on_join_outputs(now, rank, outputs);
        self.go_on(now, rank);
    }

    fn on_join_outputs(&mut self, now: Duration, rank: Rank, outputs: Vec<join::Output>) {
        for output in outputs {
            match output {
                join::Output::Up(news) => {
                    let above = self.members[rank.index()].above.expect("it has joined one");
                    self.send(now, rank, above, What::Join(None, join::Input::News(news)));
                }
                join::Output::Down(child, decision) => {
                    let child = self.members[rank.index()].below[&child];
                    self.send(now, rank, child, What::Join(None, join::Input::Decision(decision)));
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
        let since = now - member.started.expect("it has begun");
        let outputs = member.converge.step(since, input);
        self.converged(now, rank, outputs);
    }

    fn converged(&mut self, now: Duration, rank: Rank, outputs: Vec<converge::Output>) {
        let tree = self.tree(rank);
        for output in outputs {
            match output {
                converge::Output::Up(vote) => {
                    let parent = tree.parent().expect("rank 0 decides");
                    self.send(now, rank, parent, What::Vote(converge::Input::Vote { child: rank, vote }));
                }
                converge::Output::Report(missing) => {
                    let parent = tree.parent().expect("rank 0 decides");
                    let report = converge::Input::Report { child: rank, missing };
                    self.send(now, rank, parent, What::Vote(report));
                }
                converge::Output::Down(decision) => {
                    for child in tree.children().collect::<Vec<_>>() {
                        self.send(now, rank, child, What::Vote(converge::Input::Decision(decision.clone())));
                    }
                }
                converge::Output::Done(decision) => {
                    self.member(rank).outcome.get_or_insert((now, Ok(decision)));
                }
                converge::Output::Failed(missing) => self.fall(now, rank, Fault::Missing(missing), None),
            }
        }
    }

    fn fall(&mut self, now: Duration, rank: Rank, fault: Fault, from: Option<Rank>) {
        let member = self.member(rank);
        for neighbour in member.group.fall(fault.clone(), from) {
            self.send(now, rank, neighbour, What::Fall(fault.clone(), Some(rank)));
        }
        let member = self.member(rank);
        let kept = member.group.fault().expect("just told").clone();
        member.outcome.get_or_insert((now, Err(kept)));
    }

    /// Every rank that lives and runs ends, at most a second after its timeout. The first to miss a rank has waited for
    /// its whole timeout.
    fn assert_nobody_hangs(&self) {
        let mut first_to_miss = None;
        for (rank, member) in self.members.iter().enumerate().filter(|(_, m)| m.alive && !m.stopped) {
            let (at, outcome) = member.outcome.as_ref().unwrap_or_else(|| panic!("rank {rank} hangs"));
            let waited = *at - member.started.expect("everybody begins");
            assert!(waited <= give_up_on_word_at(TIMEOUT), "rank {rank} waited {waited:?}");
            if matches!(outcome, Err(Fault::Missing(_))) {
                // A message may take no time: of those that end at the same moment, one decided.
                first_to_miss = first_to_miss.into_iter().chain([(*at, Reverse(waited), rank)]).min();
            }
        }
        if let Some((_, Reverse(waited), rank)) = first_to_miss {
            assert!(waited >= TIMEOUT, "rank {rank} gave up after {waited:?}");
        }
    }

    /// All ranks that live and run learn the outcome within a second of each other, or of the last death.
    fn assert_learnt_together(&self) {
        let living = self.members.iter().filter(|member| member.alive && !member.stopped);
        let times: Vec<_> = living.map(|member| member.outcome.as_ref().expect("no rank hangs").0).collect();
        let (first, last) = (times.iter().min().expect("some live"), times.iter().max().expect("some live"));
        let since = (*first).max(self.last_death);
        assert!(
            last.saturating_sub(since) < Duration::from_secs(1),
            "the first at {first:?}, the last at {last:?}"
        );
    }

    fn survivors(&self) -> impl Iterator<Item = (Rank, &Result<Vec<u8>, Fault>)> {
        let living = self.members.iter().enumerate().filter(|(_, member)| member.alive && !member.stopped);
        living
            .filter_map(|(rank, member)| Some((Rank(u32::try_from(rank).ok()?), &member.outcome.as_ref()?.1)))
    }
}
