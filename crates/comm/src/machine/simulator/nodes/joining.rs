//! Simulated ranks on several nodes that join a group, while ranks are killed and connections between nodes are reset.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::super::Rng;
use super::super::tests::for_seeds;
use super::network::{Connection, Network, Occurrence};
use super::running::{SILENCE, TIMEOUT, layout};
use crate::Rank;
use crate::fault::GroupFault;
use crate::machine::assembly::{
    Decision, LeaderAssembly, LeaderInput, LeaderOutput, RootAssembly, RootInput, RootOutput,
};
use crate::machine::give_up_on_joining_at;
use crate::topology::NodeMap;
use crate::wire::frame::JoinUpdate;

const ROOT: Rank = Rank(0);
const MAX_START_DELAY: u64 = 200_000;

#[derive(Debug, Clone)]
enum Message {
    /// A rank joins the leader of its node, and passes the dead ranks that it knows.
    Join(Vec<Rank>),
    Report(JoinUpdate),
    Decision(Arc<Decision>),
}

#[derive(Debug, Clone)]
enum Event {
    Start,
    /// The rank looks for the leader of its node.
    Seek,
    /// The leader connects to the root.
    Connect,
    Tick,
    Died(Rank),
    /// The result of probing the rank at the other end of a connection: it has died.
    Lost(Connection),
    Kill,
    Reset,
}

enum Role {
    Waiting,
    Member(Rank),
    Leader { machine: LeaderAssembly, uplink: Option<Connection> },
    Root(RootAssembly),
}

struct Member {
    started: Option<Duration>,
    role: Role,
    /// The ranks of this node that have joined this rank.
    below: BTreeMap<Rank, Connection>,
    died: Vec<Rank>,
    outcome: Option<(Duration, Arc<Decision>)>,
    /// The ranks to which this rank is connected between nodes.
    uplinks: Vec<Connection>,
}

struct JoiningGroup {
    network: Network<Message, Event>,
    members: Vec<Member>,
    /// The rank that has bound the leader's address of each node.
    leaders: BTreeMap<usize, Rank>,
    resets: u32,
}

impl JoiningGroup {
    fn new(seed: u64, counts: &[u32]) -> Self {
        let (_, node_of) = layout(counts);
        let count = node_of.len();
        let mut network = Network::new(seed, node_of);
        let member = || Member {
            started: None,
            role: Role::Waiting,
            below: BTreeMap::new(),
            died: Vec::new(),
            outcome: None,
            uplinks: Vec::new(),
        };
        for rank in 0..count {
            let at = network.rng.micros(MAX_START_DELAY);
            network.at(at, Rank(u32::try_from(rank).expect("small")), Event::Start);
        }
        let members = std::iter::repeat_with(member).take(count).collect();
        Self { network, members, leaders: BTreeMap::new(), resets: 0 }
    }

    fn size(&self) -> u32 {
        u32::try_from(self.members.len()).expect("small")
    }

    fn member(&mut self, rank: Rank) -> &mut Member {
        &mut self.members[rank.index()]
    }

    fn listens(&self, rank: Rank) -> bool {
        let member = &self.members[rank.index()];
        member.started.is_some() && member.outcome.is_none() && !self.network.dead.contains(&rank)
    }

    fn run(&mut self) {
        while let Some((rank, occurrence)) = self.network.next() {
            let is_over = self.members[rank.index()].outcome.is_some();
            match occurrence {
                Occurrence::Event(Event::Kill) => self.kill(rank),
                Occurrence::Event(Event::Reset) => self.reset(),
                Occurrence::Message { connection, message: Message::Report(_) } if is_over => {
                    self.network.send(rank, connection, Message::Decision(Arc::new(Err(missed()))));
                }
                _ if is_over => {}
                Occurrence::Event(event) => self.on_event(rank, event),
                Occurrence::Message { connection, message } => self.on_message(rank, connection, message),
                Occurrence::Closed { connection, by_peer } => self.on_closed(rank, connection, by_peer),
            }
        }
    }

    fn on_event(&mut self, rank: Rank, event: Event) {
        let now = self.network.now;
        match event {
            Event::Start => {
                let size = self.size();
                let member = self.member(rank);
                member.started = Some(now);
                if rank == ROOT {
                    let address = ([127, 0, 0, 1], 1).into();
                    member.role = Role::Root(RootAssembly::new(ROOT, size, address, TIMEOUT, SILENCE));
                } else {
                    self.network.after(Duration::ZERO, rank, Event::Seek);
                }
                self.network.after(Duration::ZERO, rank, Event::Tick);
            }
            Event::Seek => self.seek(rank),
            Event::Connect => self.connect(rank),
            Event::Tick => {
                self.tick(rank);
                self.network.after(Duration::from_millis(5), rank, Event::Tick);
            }
            Event::Died(dead) => self.on_local_death(rank, dead),
            Event::Lost(connection) => {
                let peer = self.network.peer(connection, rank);
                match &self.members[rank.index()].role {
                    Role::Root(_) => self.step_root(RootInput::LeaderDied(connection as u64, peer)),
                    Role::Leader { .. } => self.step_leader(rank, LeaderInput::RootLost),
                    Role::Waiting | Role::Member(_) => {}
                }
            }
            Event::Kill | Event::Reset => unreachable!("handled by the caller"),
        }
    }

    fn seek(&mut self, rank: Rank) {
        let node = self.network.node(rank);
        let current = self.leaders.get(&node).copied().filter(|leader| self.listens(*leader));
        let root = Some(ROOT).filter(|_| node == self.network.node(ROOT) && self.listens(ROOT));
        match root.or(current) {
            Some(leader) => {
                let connection = self.network.connect(rank, leader);
                let died = self.members[rank.index()].died.clone();
                self.member(rank).role = Role::Member(leader);
                self.network.send(rank, connection, Message::Join(died));
            }
            None => {
                self.leaders.insert(node, rank);
                let mut machine = LeaderAssembly::new(rank, ROOT, TIMEOUT);
                for dead in self.members[rank.index()].died.clone() {
                    machine.step(Duration::ZERO, LeaderInput::Died(dead));
                }
                self.member(rank).role = Role::Leader { machine, uplink: None };
                self.network.after(Duration::ZERO, rank, Event::Connect);
            }
        }
    }

    /// Makes a leader connect to the root, or give its address up if the root is on its node.
    fn connect(&mut self, rank: Rank) {
        let Role::Leader { uplink: None, .. } = &self.members[rank.index()].role else { return };
        let root_listens = self.members[0].started.is_some() && !self.network.dead.contains(&ROOT);
        if !root_listens {
            let wait = Duration::from_millis(2) + self.network.rng.micros(60_000);
            return self.network.after(wait, rank, Event::Connect);
        }
        if self.network.node(rank) == self.network.node(ROOT) {
            self.leaders.remove(&self.network.node(rank));
            for connection in std::mem::take(&mut self.member(rank).below).into_values() {
                self.network.close(rank, connection);
            }
            return self.seek(rank);
        }
        let connection = self.network.connect(rank, ROOT);
        let member = self.member(rank);
        member.uplinks.push(connection);
        let Role::Leader { uplink, .. } = &mut member.role else { return };
        *uplink = Some(connection);
        self.step_leader(rank, LeaderInput::Connected);
    }

    fn tick(&mut self, rank: Rank) {
        let now = self.network.now;
        match &self.members[rank.index()].role {
            Role::Root(_) => self.step_root(RootInput::Tick),
            Role::Leader { .. } => self.step_leader(rank, LeaderInput::Tick),
            Role::Waiting | Role::Member(_) => {
                let member = self.member(rank);
                if now - member.started.expect("started") >= give_up_on_joining_at(TIMEOUT) {
                    let lost = member.died.first().map(|dead| GroupFault::Lost(*dead));
                    let fault = lost.unwrap_or_else(|| GroupFault::Missing(vec![ROOT]));
                    member.outcome = Some((now, Arc::new(Err(fault))));
                }
            }
        }
    }

    fn on_message(&mut self, rank: Rank, connection: Connection, message: Message) {
        let peer = self.network.peer(connection, rank);
        match message {
            Message::Join(died) => {
                if let Role::Member(_) | Role::Waiting = self.members[rank.index()].role {
                    // This rank has given its address up meanwhile, which closes connections that are not accepted.
                    return self.network.close(rank, connection);
                }
                self.member(rank).below.insert(peer, connection);
                for dead in died {
                    self.on_member(rank, dead, false);
                }
                self.on_member(rank, peer, true);
            }
            Message::Report(update) => {
                let port = u16::try_from(peer.0 + 1).expect("small");
                let (link, address) = (connection as u64, ([127, 0, 0, 1], port).into());
                if !self.members[rank.index()].uplinks.contains(&connection) {
                    self.member(rank).uplinks.push(connection);
                }
                self.step_root(RootInput::Report { link, leader: peer, address, update });
            }
            Message::Decision(decision) => match &self.members[rank.index()].role {
                Role::Leader { .. } => self.step_leader(rank, LeaderInput::Decision((*decision).clone())),
                Role::Member(leader) if *leader == peer => self.end(rank, decision),
                Role::Member(_) | Role::Waiting | Role::Root(_) => {}
            },
        }
    }

    /// Informs the state machine of a leader or of the root that a rank of its node has joined or died.
    fn on_member(&mut self, rank: Rank, other: Rank, joined: bool) {
        match (&self.members[rank.index()].role, joined) {
            (Role::Root(_), true) => self.step_root(RootInput::Joined(other)),
            (Role::Root(_), false) => self.step_root(RootInput::Died(other)),
            (Role::Leader { .. }, true) => self.step_leader(rank, LeaderInput::Joined(other)),
            (Role::Leader { .. }, false) => self.step_leader(rank, LeaderInput::Died(other)),
            (Role::Waiting | Role::Member(_), _) => {}
        }
    }

    fn on_closed(&mut self, rank: Rank, connection: Connection, _by_peer: bool) {
        let peer = self.network.peer(connection, rank);
        let is_dead = self.network.dead.contains(&peer);
        let member = &mut self.members[rank.index()];
        match &mut member.role {
            Role::Member(leader) if *leader == peer && !is_dead => {
                // The leader has given up its address, because the root is on this node.
                member.role = Role::Waiting;
                self.seek(rank);
            }
            Role::Root(_) if member.uplinks.contains(&connection) => {
                self.step_root(RootInput::Disconnected(connection as u64));
            }
            Role::Leader { uplink, .. } if *uplink == Some(connection) => {
                *uplink = None;
                self.step_leader(rank, LeaderInput::Disconnected);
                if !is_dead {
                    let wait = Duration::from_millis(2);
                    self.network.after(wait, rank, Event::Connect);
                }
            }
            _ => return,
        }
        if is_dead {
            let wait = 2 * self.network.delay(rank, peer);
            self.network.after(wait, rank, Event::Lost(connection));
        }
    }

    fn on_local_death(&mut self, rank: Rank, dead: Rank) {
        let node = self.network.node(dead);
        let member = self.member(rank);
        match member.role {
            Role::Member(leader) if leader == dead => {
                member.died.push(dead);
                let has_decided = self.members[dead.index()].outcome.is_some();
                if dead == ROOT || has_decided {
                    return self.end(rank, Arc::new(Err(GroupFault::Lost(dead))));
                }
                if self.leaders.get(&node) == Some(&dead) {
                    self.leaders.remove(&node);
                }
                self.member(rank).role = Role::Waiting;
                self.seek(rank);
            }
            Role::Member(_) | Role::Waiting => {}
            Role::Leader { .. } | Role::Root(_) => {
                if member.below.remove(&dead).is_some() {
                    self.on_member(rank, dead, false);
                }
            }
        }
    }

    fn step_root(&mut self, input: RootInput) {
        let now = self.network.now;
        let Member { role: Role::Root(machine), started, .. } = &mut self.members[0] else { return };
        let since = now - started.expect("started");
        for output in machine.step(since, input) {
            match output {
                RootOutput::Taken(link, rank) => panic!("rank {rank} is taken, says {link}"),
                RootOutput::End(decision) => self.end(ROOT, Arc::new(decision)),
            }
        }
    }

    fn step_leader(&mut self, rank: Rank, input: LeaderInput) {
        let now = self.network.now;
        let member = self.member(rank);
        let since = now - member.started.expect("started");
        let Role::Leader { machine, uplink } = &mut member.role else { return };
        let uplink = *uplink;
        for output in machine.step(since, input) {
            match output {
                LeaderOutput::Report(update) => {
                    self.network.send(rank, uplink.expect("connected"), Message::Report(update));
                }
                LeaderOutput::End(decision) => self.end(rank, Arc::new(decision)),
            }
        }
    }

    fn end(&mut self, rank: Rank, decision: Arc<Decision>) {
        let now = self.network.now;
        let member = self.member(rank);
        if member.outcome.is_some() {
            return;
        }
        member.outcome = Some((now, Arc::clone(&decision)));
        let below: Vec<_> = member.below.values().copied().collect();
        let others = if rank == ROOT { member.uplinks.clone() } else { Vec::new() };
        for connection in below.into_iter().chain(others) {
            self.network.send(rank, connection, Message::Decision(Arc::clone(&decision)));
        }
    }

    fn kill(&mut self, rank: Rank) {
        self.network.kill(rank);
        for other in (0..self.size()).map(Rank) {
            if other != rank && self.network.node(other) == self.network.node(rank) {
                let wait = Duration::from_millis(3) + self.network.rng.micros(20_000);
                self.network.after(wait, other, Event::Died(rank));
            }
        }
    }

    /// Resets the connections of all leaders to the root.
    fn reset(&mut self) {
        for connection in self.members[0].uplinks.clone() {
            self.network.reset(connection);
            self.resets += 1;
        }
    }

    fn outcomes(&self) -> Vec<(Rank, Duration, Arc<Decision>)> {
        let living = (0..self.size()).map(Rank).filter(|rank| !self.network.dead.contains(rank));
        let outcome = |rank: Rank| {
            let (at, decision) =
                self.members[rank.index()].outcome.clone().unwrap_or_else(|| panic!("rank {rank} hangs"));
            (rank, at, decision)
        };
        living.map(outcome).collect()
    }
}

/// The reply of a root that has decided to a leader that has missed the decision.
fn missed() -> GroupFault {
    GroupFault::NodeSilent { node: 1, ranks: vec![], milliseconds: 1000 }
}

fn some_counts(rng: &mut Rng) -> Vec<u32> {
    let nodes = 1 + rng.below(6);
    (0..nodes).map(|_| 1 + u32::try_from(rng.below(6)).expect("small")).collect()
}

fn assert_complete(group: &JoiningGroup, counts: &[u32]) {
    let mut last: Option<Arc<Decision>> = None;
    for (rank, _, decision) in group.outcomes() {
        // The ranks of a node share the decision of their leader in the simulation, which is checked once.
        if last.as_ref().is_some_and(|last| Arc::ptr_eq(last, &decision)) {
            continue;
        }
        let nodes = (*decision).clone().unwrap_or_else(|fault| panic!("{fault:?} at {rank}"));
        last = Some(decision);
        let mut sizes: Vec<_> = nodes.iter().map(|node| u32::try_from(node.ranks.len()).unwrap()).collect();
        let mut expected = counts.to_vec();
        sizes.sort_unstable();
        expected.sort_unstable();
        assert_eq!(sizes, expected, "at {rank}");
        assert!(NodeMap::new(nodes, group.size()).is_some());
    }
}

#[test]
fn ranks_of_any_number_of_nodes_join_also_when_connections_are_reset() {
    for_seeds(200, |seed| {
        let mut rng = Rng(seed ^ 0x6a6f);
        let counts = some_counts(&mut rng);
        let mut group = JoiningGroup::new(seed, &counts);
        for _ in 0..rng.below(4) {
            let at = rng.micros(MAX_START_DELAY);
            group.network.at(at, ROOT, Event::Reset);
        }
        group.run();
        let has_missed = |(_, _, decision): &(Rank, Duration, Arc<Decision>)| **decision == Err(missed());
        if !(group.resets > 0 && group.outcomes().iter().any(has_missed)) {
            return assert_complete(&group, &counts);
        }
        // A connection was reset while the decision was on its way: the ranks of its node learn that they have missed
        // it, and the others that the node does not answer.
        for outcome in group.outcomes() {
            assert!(has_missed(&outcome) || outcome.2.is_ok(), "{outcome:?}");
        }
    });
}

#[test]
fn deaths_of_ranks_and_leaders_while_joining_are_reported_to_all_that_joined() {
    for_seeds(200, |seed| {
        let mut rng = Rng(seed ^ 0x6465);
        let counts = some_counts(&mut rng);
        let mut group = JoiningGroup::new(seed, &counts);
        let mut killed = Vec::new();
        for rank in (0..group.size()).map(Rank) {
            if rng.below(4) == 0 {
                let at = rng.micros(MAX_START_DELAY + 20_000);
                group.network.at(at, rank, Event::Kill);
                killed.push(rank);
            }
        }
        group.run();
        let last_death = Duration::from_micros(MAX_START_DELAY + 20_000);
        for (rank, at, decision) in group.outcomes() {
            match (*decision).clone() {
                // The group was complete before the first death.
                Ok(_) => {}
                Err(GroupFault::Lost(lost)) => {
                    assert!(killed.contains(&lost), "{lost} at {rank}");
                    assert!(at < last_death + 2 * SILENCE + TIMEOUT, "at {at:?}");
                }
                // A rank that was killed before it joined, or that looked for rank 0 after the death of rank 0.
                Err(GroupFault::Missing(missing)) => {
                    assert!(missing.iter().any(|rank| killed.contains(rank)), "{missing:?} at {rank}");
                }
                Err(other) => panic!("{other:?} at {rank}"),
            }
        }
    });
}

#[test]
fn the_death_of_a_leader_is_reported_when_its_ranks_have_joined_again() {
    for_seeds(60, |seed| {
        let mut group = JoiningGroup::new(seed, &[2, 4, 1]);
        // Rank 6, the only one of node 2, starts late; a leader of node 1 is killed before, and then its successor.
        let (first, second) = (Duration::from_millis(400), Duration::from_millis(600));
        let leader_at = |group: &mut JoiningGroup, rank: Rank, at| group.network.at(at, rank, Event::Kill);
        let mut rng = Rng(seed);
        let victim = Rank(2 + u32::try_from(rng.below(4)).expect("small"));
        leader_at(&mut group, victim, first);
        if rng.below(2) == 0 {
            let other = Rank(2 + (victim.0 - 2 + 1) % 4);
            leader_at(&mut group, other, second);
        }
        group.network.at(Duration::ZERO, Rank(6), Event::Kill);
        group.run();
        for (rank, at, decision) in group.outcomes() {
            let Err(GroupFault::Lost(lost)) = &*decision else { panic!("{decision:?} at {rank}") };
            assert!(group.network.dead.contains(lost));
            assert!(at >= TIMEOUT, "rank 6 was awaited, and never joined");
        }
    });
}

#[test]
fn ten_thousand_ranks_on_three_hundred_nodes_join_with_few_messages() {
    for_seeds(1, |seed| {
        let counts = vec![32; 313];
        let mut group = JoiningGroup::new(seed, &counts);
        group.run();
        assert_complete(&group, &counts);
        let sent = &group.network.sent;
        let (total, most): (u64, _) = (sent.iter().sum(), sent.iter().max().copied().unwrap_or_default());
        let size = u64::from(group.size());
        wholemem_testkit::report(&format!(
            "{size} ranks on {} nodes: {}.{:02} messages for each rank, at most {most} from one (rank 0)",
            counts.len(),
            total / size,
            total % size * 100 / size
        ));
        // Each rank is informed once and joins once; each leader reports several times.
        assert!(total <= 4 * size, "{total} messages");
        assert!(most <= 32 + 313, "{most} messages from one rank");
    });
}
