//! A world of simulated ranks: seeded, with its own time, where ranks are late, stopped and killed.
//!
//! Messages between two ranks keep their order and take a random time. A killed rank says nothing more, and its
//! neighbours are told of the death a little later, as the pulse would tell them. A stopped rank takes in nothing.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

use super::bootstrap::{self, Bootstrap};
use super::converge::{self, Converge};
use super::standing::Standing;
use super::{Fault, give_up_on_joining_at, give_up_on_word_at};
use crate::Rank;
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
    Boot(Option<Rank>, bootstrap::Input),
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
    boot: Bootstrap,
    converge: Converge,
    standing: Standing,
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
    /// Links on which both have proved themselves.
    proved: BTreeSet<(Rank, Rank)>,
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
                boot: Bootstrap::new(tree, TIMEOUT),
                converge: Converge::new(tree, TIMEOUT, 1u32.to_le_bytes().to_vec(), count),
                standing: Standing::new(tree),
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
            proved: BTreeSet::new(),
            collective,
        };
        for rank in (0..size).map(Rank) {
            let at = world.dice.micros(LATEST);
            world.push(at, rank, What::Start);
        }
        world
    }

    fn push(&mut self, at: Duration, rank: Rank, what: What) {
        self.order += 1;
        self.events.push(Reverse(Event { at, order: self.order, rank, what }));
    }

    fn send(&mut self, now: Duration, from: Rank, to: Rank, what: What) {
        let delay = self.dice.micros(SLOWEST);
        let lane = self.lanes.entry((from, to)).or_default();
        *lane = (*lane).max(now + delay);
        let at = *lane;
        self.push(at, to, what);
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
            What::Boot(from, input) => self.boot(now, rank, from, input),
            What::Vote(input) => self.vote(now, rank, input),
            What::Fall(fault, from) => self.fall(now, rank, fault, from),
        }
    }

    fn start(&mut self, now: Duration, rank: Rank) {
        self.member(rank).started = Some(now);
        if self.collective {
            let outputs = self.member(rank).converge.start();
            self.converged(now, rank, outputs);
        } else if let Some(parent) = self.tree(rank).parent() {
            // The knock at the parent's door; the answer is the parent's proof.
            self.send(now, rank, parent, What::Boot(Some(rank), bootstrap::Input::ChildProved(rank)));
        }
        self.push(now, rank, What::Tick);
    }

    fn kill(&mut self, now: Duration, rank: Rank) {
        self.member(rank).alive = false;
        for neighbour in self.tree(rank).neighbours().collect::<Vec<_>>() {
            let after = self.dice.micros(20_000);
            if self.collective {
                // Behind what the dead rank had sent, as a link is read to its end before its peer is given up.
                let lane = self.lanes.get(&(rank, neighbour)).copied().unwrap_or_default();
                let at = (now + after).max(lane);
                self.push(at, neighbour, What::Fall(Fault::Lost(rank), None));
            } else if self.proved.contains(&(neighbour.min(rank), neighbour.max(rank))) {
                let lane = self.lanes.get(&(rank, neighbour)).copied().unwrap_or_default();
                let at = (now + after).max(lane);
                self.push(at, neighbour, What::Boot(None, bootstrap::Input::Died(rank)));
            }
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
            let outputs = member.boot.step(since, bootstrap::Input::Tick);
            let next = started + member.boot.next_tick().max(since + Duration::from_micros(1));
            self.booted(now, rank, outputs);
            self.push(next, rank, What::Tick);
        }
    }

    fn boot(&mut self, now: Duration, rank: Rank, from: Option<Rank>, input: bootstrap::Input) {
        let ended = self.members[rank.index()].outcome.is_some();
        if let (Some(from), bootstrap::Input::ChildProved(_)) = (from, &input) {
            if ended || !self.members[from.index()].alive {
                return;
            }
            self.proved.insert((rank.min(from), rank.max(from)));
            self.send(now, rank, from, What::Boot(None, bootstrap::Input::ParentProved));
        }
        let member = self.member(rank);
        let since = now - member.started.expect("it has begun");
        let outputs = member.boot.step(since, input);
        self.booted(now, rank, outputs);
    }

    fn booted(&mut self, now: Duration, rank: Rank, outputs: Vec<bootstrap::Output>) {
        for output in outputs {
            match output {
                bootstrap::Output::Up(news) => {
                    let parent = self.tree(rank).parent().expect("rank 0 has nobody to tell");
                    self.send(now, rank, parent, What::Boot(None, bootstrap::Input::News(news)));
                }
                bootstrap::Output::Down(child, decision) => {
                    self.send(now, rank, child, What::Boot(None, bootstrap::Input::Decision(decision)));
                }
                bootstrap::Output::End(decision) => {
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
        for neighbour in member.standing.fall(fault.clone(), from) {
            self.send(now, rank, neighbour, What::Fall(fault.clone(), Some(rank)));
        }
        let member = self.member(rank);
        let kept = member.standing.fault().expect("just told").clone();
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
                first_to_miss = first_to_miss.into_iter().chain([(*at, waited, rank)]).min();
            }
        }
        if let Some((_, waited, rank)) = first_to_miss {
            assert!(waited >= TIMEOUT, "rank {rank} gave up after {waited:?}");
        }
    }

    fn survivors(&self) -> impl Iterator<Item = (Rank, &Result<Vec<u8>, Fault>)> {
        let living = self.members.iter().enumerate().filter(|(_, member)| member.alive && !member.stopped);
        living
            .filter_map(|(rank, member)| Some((Rank(u32::try_from(rank).ok()?), &member.outcome.as_ref()?.1)))
    }
}

/// Runs `case` with many seeds, and prints the one that fails.
fn for_seeds(cases: u64, case: impl Fn(u64) + std::panic::RefUnwindSafe) {
    let fresh = || std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0);
    let given = std::env::var("WHOLEMEM_SEED").ok().and_then(|text| text.parse().ok());
    let many = if std::env::var_os("WHOLEMEM_EXHAUSTIVE").is_some() { 20 } else { 1 };
    let (first, cases) = given.map_or_else(|| (fresh(), cases * many), |seed| (seed, 1));
    for seed in (0..cases).map(|n| first.wrapping_add(n)) {
        if let Err(panic) = std::panic::catch_unwind(|| case(seed)) {
            eprintln!("failed with seed {seed} (repeat with WHOLEMEM_SEED={seed})");
            std::panic::resume_unwind(panic);
        }
    }
}

fn some_size(dice: &mut Dice) -> u32 {
    let most = [3, 8, 40, 200, 1000][usize::try_from(dice.below(5)).expect("small")];
    2 + u32::try_from(dice.below(most - 1)).expect("small")
}

#[test]
fn a_group_of_any_size_comes_together() {
    for_seeds(60, |seed| {
        let size = some_size(&mut Dice(seed ^ 1));
        let mut world = World::new(seed, size, false);
        world.run();
        world.assert_nobody_hangs();
        assert!(world.survivors().all(|(_, outcome)| outcome.is_ok()), "{size} ranks");
        assert_eq!(world.survivors().count(), size as usize);
    });
}

#[test]
fn a_death_while_a_group_comes_together_is_told_to_all_or_the_dead_rank_is_missed() {
    for_seeds(120, |seed| {
        let mut dice = Dice(seed ^ 2);
        let size = some_size(&mut dice);
        let victim = Rank(u32::try_from(dice.below(size.into())).expect("a rank"));
        let mut world = World::new(seed, size, false);
        let at = dice.micros(LATEST + 50_000);
        world.push(at, victim, What::Kill);
        world.run();
        world.assert_nobody_hangs();
        for (rank, outcome) in world.survivors() {
            match outcome {
                // It had let the group go before it died, and who has gone sees the death in the next operation.
                Ok(_) => assert!(world.members.iter().all(|member| member.started.is_some())),
                Err(Fault::Lost(lost)) => assert_eq!(*lost, victim, "to {rank}"),
                Err(Fault::Missing(missing)) => {
                    assert!(missing.contains(&victim), "{missing:?} lacks {victim}, to {rank} of {size}");
                }
                Err(other) => panic!("{other:?} to {rank}"),
            }
        }
    });
}

#[test]
fn a_rank_that_never_comes_is_named_to_all() {
    for_seeds(60, |seed| {
        let mut dice = Dice(seed ^ 3);
        let size = some_size(&mut dice);
        let victim = Rank(u32::try_from(dice.below(size.into())).expect("a rank"));
        let mut world = World::new(seed, size, false);
        world.member(victim).stopped = true;
        world.run();
        world.assert_nobody_hangs();
        for (rank, outcome) in world.survivors() {
            let Err(Fault::Missing(missing)) = outcome else { panic!("{outcome:?} to {rank}") };
            assert!(missing.contains(&victim), "{missing:?} lacks {victim}, to {rank} of {size}");
        }
    });
}

#[test]
fn a_collective_of_any_size_counts_every_vote_once() {
    for_seeds(60, |seed| {
        let size = some_size(&mut Dice(seed ^ 4));
        let mut world = World::new(seed, size, true);
        world.run();
        world.assert_nobody_hangs();
        assert!(world.survivors().all(|(_, outcome)| *outcome == Ok(size.to_le_bytes().to_vec())));
    });
}

#[test]
fn a_death_in_a_collective_reaches_every_survivor() {
    for_seeds(120, |seed| {
        let mut dice = Dice(seed ^ 5);
        let size = some_size(&mut dice);
        let victim = Rank(u32::try_from(dice.below(size.into())).expect("a rank"));
        let mut world = World::new(seed, size, true);
        let at = dice.micros(LATEST + 50_000);
        world.push(at, victim, What::Kill);
        world.run();
        world.assert_nobody_hangs();
        for (rank, _) in world.survivors() {
            let standing = &world.members[rank.index()].standing;
            assert_eq!(standing.fault(), Some(&Fault::Lost(victim)), "at {rank} of {size}");
        }
    });
}

#[test]
fn a_stopped_rank_in_a_collective_is_named_to_all() {
    for_seeds(120, |seed| {
        let mut dice = Dice(seed ^ 6);
        let size = some_size(&mut dice);
        let victim = Rank(u32::try_from(dice.below(size.into())).expect("a rank"));
        let mut world = World::new(seed, size, true);
        let at = dice.micros(LATEST);
        world.push(at, victim, What::Stop);
        world.run();
        world.assert_nobody_hangs();
        for (rank, outcome) in world.survivors() {
            match outcome {
                Ok(_) => {}
                Err(Fault::Missing(missing)) => assert!(missing.contains(&victim), "{missing:?} at {rank}"),
                Err(other) => panic!("{other:?} at {rank} of {size}"),
            }
        }
    });
}

#[test]
fn ten_thousand_ranks_come_together() {
    for_seeds(1, |seed| {
        let mut world = World::new(seed, 10_000, false);
        world.run();
        world.assert_nobody_hangs();
        assert_eq!(world.survivors().filter(|(_, outcome)| outcome.is_ok()).count(), 10_000);
    });
}

#[test]
fn there_is_time_to_hear_from_above() {
    let late = Duration::from_micros(LATEST + 10 * SLOWEST);
    assert!(give_up_on_joining_at(TIMEOUT) - TIMEOUT > late);
    assert!(give_up_on_word_at(TIMEOUT) - TIMEOUT > late);
}
