//! A simulated group on several nodes that performs one collective, and whose ranks, nodes and links fail.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::super::count;
use super::network::{Connection, Network, Occurrence};
use crate::Rank;
use crate::fault::GroupFault;
use crate::machine::converge::{self, Converge};
use crate::machine::group_state::GroupState;
use crate::machine::link_monitor::{self, LinkFailure, LinkMonitor, ProbeResult};
use crate::topology::{NodeMap, NodeRanks, Topology};

pub(super) const SILENCE: Duration = Duration::from_secs(1);
pub(super) const TIMEOUT: Duration = Duration::from_secs(8);

/// The interval at which the progress threads of leaders check their links.
const TICK: Duration = Duration::from_millis(20);

/// The time until the simulation stops sending heartbeats.
const END: Duration = Duration::from_secs(5);

#[derive(Debug, Clone)]
pub(super) enum Message {
    Heartbeat,
    Converge(converge::Input),
    Fault(GroupFault),
}

#[derive(Debug, Clone)]
pub(super) enum Event {
    Begin,
    Tick,
    CheckLinks,
    /// A rank of this node has died.
    Died(Rank),
    Probed(Rank, ProbeResult),
    /// A rank of another node reports that its leader has died.
    Reported(Rank),
    Kill,
    Stop,
    Continue,
    Cut(Vec<(usize, usize)>),
    Heal,
    Reset(usize),
    /// A message of an operation that the rank had not begun arrives again.
    Later(Connection, converge::Input),
}

struct Member {
    tree: Topology,
    group: GroupState,
    converge: Converge,
    began: Option<Duration>,
    monitors: BTreeMap<Rank, LinkMonitor>,
    /// The time for which the leader of this node has been stopped while this rank ran.
    leader_stopped: Duration,
    result: Option<Vec<u8>>,
    /// When this rank learnt of the fault of the group.
    failed: Option<Duration>,
}

pub(super) struct RunningGroup {
    pub(super) network: Network<Message, Event>,
    members: Vec<Member>,
    links: BTreeMap<(Rank, Rank), Connection>,
    map: Arc<NodeMap>,
    /// False in a mutant without heartbeats.
    pub(super) has_heartbeats: bool,
}

/// Returns the ranks of each node, with a leader, for the given numbers of ranks.
pub(super) fn layout(counts: &[u32]) -> (Vec<NodeRanks>, Vec<usize>) {
    let (mut nodes, mut node_of, mut next) = (Vec::new(), Vec::new(), 0);
    for (node, count) in counts.iter().enumerate() {
        let ranks: Vec<_> = (next..next + count).map(Rank).collect();
        node_of.extend(ranks.iter().map(|_| node));
        nodes.push(NodeRanks { leader: ranks[0], address: ([127, 0, 0, 1], 1).into(), ranks });
        next += count;
    }
    (nodes, node_of)
}

impl RunningGroup {
    pub(super) fn new(seed: u64, counts: &[u32]) -> Self {
        let (nodes, node_of) = layout(counts);
        let size = u32::try_from(node_of.len()).expect("small");
        let map = Arc::new(NodeMap::new(nodes, size).expect("a valid map"));
        let mut network = Network::new(seed, node_of);
        let (mut members, mut links) = (Vec::new(), BTreeMap::new());
        for rank in (0..size).map(Rank) {
            let tree = Topology::over_nodes(rank, Arc::clone(&map));
            for child in tree.children() {
                let connection = network.connect(rank, child);
                links.extend([((rank, child), connection), ((child, rank), connection)]);
            }
            let remote = tree.neighbours().filter(|other| !tree.is_here(*other));
            let monitors: BTreeMap<_, _> =
                remote.map(|other| (other, LinkMonitor::new(SILENCE, Duration::ZERO))).collect();
            let wait = network.rng.micros(200_000);
            network.at(wait, rank, Event::Begin);
            network.at(network.now, rank, Event::CheckLinks);
            members.push(Member {
                group: GroupState::new(tree.clone()),
                converge: Converge::new(tree.clone(), TIMEOUT, 1u32.to_le_bytes().to_vec(), count),
                tree,
                began: None,
                monitors,
                leader_stopped: Duration::ZERO,
                result: None,
                failed: None,
            });
        }
        Self { network, members, links, map, has_heartbeats: true }
    }

    pub(super) fn size(&self) -> u32 {
        u32::try_from(self.members.len()).expect("small")
    }

    pub(super) fn node(&self, node: usize) -> &[Rank] {
        &self.map.nodes()[node].ranks
    }

    pub(super) fn run(&mut self) {
        while let Some((rank, occurrence)) = self.network.next() {
            match occurrence {
                Occurrence::Message { connection, message } => self.on_message(rank, connection, message),
                Occurrence::Closed { connection, by_peer } => {
                    let peer = self.network.peer(connection, rank);
                    self.step_link(rank, peer, link_monitor::Input::Closed { by_peer });
                }
                Occurrence::Event(event) => self.on_event(rank, event),
            }
        }
    }

    fn on_event(&mut self, rank: Rank, event: Event) {
        let now = self.network.now;
        match event {
            Event::Begin => {
                let member = &mut self.members[rank.index()];
                member.began = Some(now);
                let outputs = member.converge.start();
                self.on_converge(rank, outputs);
                self.network.after(Duration::ZERO, rank, Event::Tick);
            }
            Event::Tick => self.tick(rank),
            Event::CheckLinks => self.check_links(rank),
            Event::Died(dead) => self.on_local_death(rank, dead),
            Event::Probed(peer, result) => self.step_link(rank, peer, link_monitor::Input::Probed(result)),
            Event::Reported(dead) => self.fail(rank, GroupFault::Lost(dead), None),
            Event::Kill => self.kill(rank),
            Event::Stop => drop(self.network.stopped.insert(rank)),
            Event::Continue => {
                for other in (0..self.size()).map(Rank) {
                    self.network.stopped.remove(&other);
                }
            }
            Event::Cut(directions) => {
                directions.into_iter().for_each(|(from, to)| self.network.cut(from, to))
            }
            Event::Heal => self.network.heal(),
            Event::Later(connection, input) => self.on_message(rank, connection, Message::Converge(input)),
            Event::Reset(node) => {
                let (root, leader) = (self.map.nodes()[0].leader, self.map.nodes()[node].leader);
                self.network.reset(self.links[&(root, leader)]);
            }
        }
    }

    fn kill(&mut self, rank: Rank) {
        self.network.kill(rank);
        let tree = self.members[rank.index()].tree.clone();
        for neighbour in tree.neighbours().filter(|other| tree.is_here(*other)) {
            let wait = Duration::from_millis(3) + self.network.rng.micros(20_000);
            self.network.after(wait, neighbour, Event::Died(rank));
        }
    }

    fn on_local_death(&mut self, rank: Rank, dead: Rank) {
        self.fail(rank, GroupFault::Lost(dead), None);
        let tree = self.members[rank.index()].tree.clone();
        let here = &self.map.nodes()[tree.node_of(rank) as usize];
        let mut others = here.ranks.iter().filter(|other| **other != here.leader);
        if dead != here.leader || !others.by_ref().take(2).any(|other| *other == rank) {
            return;
        }
        let is_root = self.map.nodes()[0].leader == dead;
        let receivers = if is_root { &self.map.nodes()[1..] } else { &self.map.nodes()[..1] };
        for leader in receivers.iter().map(|node| node.leader).collect::<Vec<_>>() {
            if self.network.reaches(rank, leader) && self.network.reaches(leader, rank) {
                let wait = 3 * self.network.delay(rank, leader);
                self.network.after(wait, leader, Event::Reported(dead));
            }
        }
    }

    fn tick(&mut self, rank: Rank) {
        let parent_runs = self.members[rank.index()]
            .tree
            .parent()
            .is_none_or(|parent| !self.network.stopped.contains(&parent));
        let (now, member) = (self.network.now, &mut self.members[rank.index()]);
        if member.result.is_some() || member.failed.is_some() {
            return;
        }
        let since = now - member.began.expect("the rank has begun");
        let outputs = member.converge.step(since, converge::Input::Tick { parent_runs });
        let next = member.converge.next_tick(since).saturating_sub(since).max(Duration::from_millis(1));
        self.network.after(next, rank, Event::Tick);
        self.on_converge(rank, outputs);
    }

    fn check_links(&mut self, rank: Rank) {
        let member = &self.members[rank.index()];
        let is_idle = member.failed.is_some() || self.network.now > END;
        let peers: Vec<_> = member.monitors.keys().copied().collect();
        for peer in peers {
            self.step_link(rank, peer, link_monitor::Input::Tick);
        }
        let tree = &self.members[rank.index()].tree;
        if let Some(leader) = tree.parent().filter(|parent| tree.is_here(*parent)) {
            let is_stopped = self.network.stopped.contains(&leader);
            let member = &mut self.members[rank.index()];
            member.leader_stopped = if is_stopped { member.leader_stopped + TICK } else { Duration::ZERO };
            if member.leader_stopped > SILENCE {
                let node = member.tree.node_of(rank);
                self.fail(
                    rank,
                    GroupFault::NodeSilent { node, ranks: vec![leader], milliseconds: 1000 },
                    None,
                );
            }
        }
        if !is_idle {
            self.network.after(TICK, rank, Event::CheckLinks);
        }
    }

    fn step_link(&mut self, rank: Rank, peer: Rank, input: link_monitor::Input) {
        let now = self.network.now;
        let Some(monitor) = self.members[rank.index()].monitors.get_mut(&peer) else { return };
        for output in monitor.step(now, input) {
            match output {
                link_monitor::Output::Heartbeat if self.has_heartbeats => {
                    self.network.send(rank, self.links[&(rank, peer)], Message::Heartbeat);
                }
                link_monitor::Output::Heartbeat => {}
                link_monitor::Output::Probe => {
                    let reaches = self.network.reaches(rank, peer) && self.network.reaches(peer, rank);
                    let (wait, result) = match reaches {
                        true if self.network.dead.contains(&peer) => (Duration::ZERO, ProbeResult::Refused),
                        true if !self.network.stopped.contains(&peer) => {
                            (Duration::ZERO, ProbeResult::Answered)
                        }
                        _ => (SILENCE, ProbeResult::Unknown),
                    };
                    let wait = wait + 2 * self.network.delay(rank, peer);
                    self.network.after(wait, rank, Event::Probed(peer, result));
                }
                link_monitor::Output::LinkFailure(LinkFailure::Lost { .. }) => {
                    self.fail(rank, GroupFault::Lost(peer), None);
                }
                link_monitor::Output::LinkFailure(LinkFailure::Silent) => {
                    let node = self.members[rank.index()].tree.node_of(peer);
                    let ranks = self.map.nodes()[node as usize].ranks.clone();
                    self.fail(rank, GroupFault::NodeSilent { node, ranks, milliseconds: 1000 }, None);
                }
            }
        }
    }

    fn on_message(&mut self, rank: Rank, connection: Connection, message: Message) {
        let peer = self.network.peer(connection, rank);
        self.step_link(rank, peer, link_monitor::Input::Heard);
        match message {
            Message::Heartbeat => {}
            Message::Fault(fault) => self.fail(rank, fault, Some(peer)),
            Message::Converge(input) => {
                let (now, member) = (self.network.now, &mut self.members[rank.index()]);
                let Some(began) = member.began else {
                    // The message waits in the inbox until this rank begins the operation.
                    let wait = Duration::from_millis(1);
                    return self.network.after(wait, rank, Event::Later(connection, input));
                };
                if member.failed.is_none() {
                    let outputs = member.converge.step(now - began, input);
                    self.on_converge(rank, outputs);
                }
            }
        }
    }

    fn on_converge(&mut self, rank: Rank, outputs: Vec<converge::Output>) {
        let tree = self.members[rank.index()].tree.clone();
        for output in outputs {
            match output {
                converge::Output::Up(vote) => {
                    let parent = tree.parent().expect("the root decides");
                    let vote = converge::Input::Vote { child: rank, vote };
                    self.network.send(rank, self.links[&(rank, parent)], Message::Converge(vote));
                }
                converge::Output::Report(missing) => {
                    let parent = tree.parent().expect("the root decides");
                    let report = converge::Input::Report { child: rank, missing };
                    self.network.send(rank, self.links[&(rank, parent)], Message::Converge(report));
                }
                converge::Output::Down(decision) => {
                    for child in tree.children() {
                        let decision = Message::Converge(converge::Input::Decision(decision.clone()));
                        self.network.send(rank, self.links[&(rank, child)], decision);
                    }
                }
                converge::Output::Done(result) => self.members[rank.index()].result = Some(result),
                converge::Output::Failed(missing) => self.fail(rank, GroupFault::Missing(missing), None),
            }
        }
    }

    fn fail(&mut self, rank: Rank, fault: GroupFault, from: Option<Rank>) {
        let now = self.network.now;
        let member = &mut self.members[rank.index()];
        member.failed.get_or_insert(now);
        for neighbour in member.group.fail(fault.clone(), from) {
            self.network.send(rank, self.links[&(rank, neighbour)], Message::Fault(fault.clone()));
        }
    }

    /// Returns the ranks that are alive and run, with the fault of their group and when they learnt of it.
    pub(super) fn survivors(&self) -> Vec<(Rank, Option<(GroupFault, Duration)>)> {
        let runs = |rank: &Rank| !self.network.dead.contains(rank) && !self.network.stopped.contains(rank);
        let fault = |rank: Rank| {
            let member = &self.members[rank.index()];
            Some((member.group.fault()?.clone(), member.failed?))
        };
        (0..self.size()).map(Rank).filter(runs).map(|rank| (rank, fault(rank))).collect()
    }

    pub(super) fn result(&self, rank: Rank) -> Option<&[u8]> {
        self.members[rank.index()].result.as_deref()
    }

    pub(super) fn dead(&self) -> &BTreeSet<Rank> {
        &self.network.dead
    }
}
