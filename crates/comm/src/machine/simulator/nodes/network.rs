//! The simulated network: connections whose messages stay in order and take a random time, that are reset, cut in one or
//! both directions and healed, and slow nodes. Messages of different connections overtake each other.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::time::Duration;

use super::super::Rng;
use crate::Rank;

/// The maximum delay of a message between and within nodes, in microseconds.
const DELAY: u64 = 2_000;

/// The additional delay of messages to and from a slow node, in microseconds.
const SLOW_DELAY: u64 = 60_000;

/// The time between two attempts to send a message over a cut link, as TCP sends it again.
const RETRANSMISSION: Duration = Duration::from_millis(40);

/// The time from which ranks that are stopped and links that are cut stay so.
const MAX_WAIT: Duration = Duration::from_secs(12);

pub(super) type Connection = usize;

/// What happens at a rank.
#[derive(Debug, Clone)]
pub(super) enum Occurrence<M, E> {
    Message {
        connection: Connection,
        message: M,
    },
    /// The connection has ended: the other process has exited, or it was reset.
    Closed {
        connection: Connection,
        by_peer: bool,
    },
    Event(E),
}

#[derive(Debug)]
enum Item<M> {
    Message(M),
    End,
}

#[derive(Debug)]
struct Ends<M> {
    ranks: [Rank; 2],
    /// The messages to each end.
    queues: [VecDeque<Item<M>>; 2],
    is_reset: bool,
    last: [Duration; 2],
}

#[derive(Debug)]
enum Scheduled<E> {
    Deliver(Connection, usize),
    Reset(Connection, usize),
    Event(Rank, E),
}

pub(super) struct Network<M, E> {
    pub(super) rng: Rng,
    pub(super) now: Duration,
    order: u64,
    schedule: BinaryHeap<Reverse<(Duration, u64)>>,
    events: BTreeMap<u64, Scheduled<E>>,
    connections: Vec<Ends<M>>,
    node_of: Vec<usize>,
    /// Cut directions, by node.
    cut: BTreeSet<(usize, usize)>,
    pub(super) slow: BTreeSet<usize>,
    pub(super) stopped: BTreeSet<Rank>,
    pub(super) dead: BTreeSet<Rank>,
    /// The number of messages that each rank has sent.
    pub(super) sent: Vec<u64>,
}

impl<M, E> Network<M, E> {
    pub(super) fn new(seed: u64, node_of: Vec<usize>) -> Self {
        Self {
            rng: Rng(seed),
            now: Duration::ZERO,
            order: 0,
            schedule: BinaryHeap::new(),
            events: BTreeMap::new(),
            connections: Vec::new(),
            sent: vec![0; node_of.len()],
            node_of,
            cut: BTreeSet::new(),
            slow: BTreeSet::new(),
            stopped: BTreeSet::new(),
            dead: BTreeSet::new(),
        }
    }

    pub(super) fn node(&self, rank: Rank) -> usize {
        self.node_of[rank.index()]
    }

    pub(super) fn cut(&mut self, from: usize, to: usize) {
        self.cut.insert((from, to));
    }

    pub(super) fn heal(&mut self) {
        self.cut.clear();
    }

    /// Returns true if packets from one rank reach the other.
    pub(super) fn reaches(&self, from: Rank, to: Rank) -> bool {
        !self.cut.contains(&(self.node(from), self.node(to)))
    }

    fn push(&mut self, at: Duration, scheduled: Scheduled<E>) {
        self.order += 1;
        self.schedule.push(Reverse((at, self.order)));
        self.events.insert(self.order, scheduled);
    }

    pub(super) fn at(&mut self, at: Duration, rank: Rank, event: E) {
        self.push(at, Scheduled::Event(rank, event));
    }

    pub(super) fn after(&mut self, wait: Duration, rank: Rank, event: E) {
        self.at(self.now + wait, rank, event);
    }

    pub(super) fn delay(&mut self, one: Rank, other: Rank) -> Duration {
        let is_slow = [one, other].iter().any(|rank| self.slow.contains(&self.node(*rank)));
        let slow = if is_slow { self.rng.micros(SLOW_DELAY) } else { Duration::ZERO };
        self.rng.micros(DELAY) + slow
    }

    pub(super) fn connect(&mut self, one: Rank, other: Rank) -> Connection {
        let queues = [VecDeque::new(), VecDeque::new()];
        self.connections.push(Ends { ranks: [one, other], queues, is_reset: false, last: [self.now; 2] });
        self.connections.len() - 1
    }

    fn end(&self, connection: Connection, rank: Rank) -> usize {
        usize::from(self.connections[connection].ranks[1] == rank)
    }

    pub(super) fn peer(&self, connection: Connection, rank: Rank) -> Rank {
        self.connections[connection].ranks[1 - self.end(connection, rank)]
    }

    pub(super) fn send(&mut self, from: Rank, connection: Connection, message: M) {
        if !self.dead.contains(&from) {
            self.sent[from.index()] += 1;
            self.enqueue(from, connection, Item::Message(message));
        }
    }

    fn enqueue(&mut self, from: Rank, connection: Connection, item: Item<M>) {
        let to = 1 - self.end(connection, from);
        let delay = self.delay(from, self.connections[connection].ranks[to]);
        let ends = &mut self.connections[connection];
        if ends.is_reset {
            return;
        }
        ends.queues[to].push_back(item);
        ends.last[to] = ends.last[to].max(self.now + delay);
        let at = ends.last[to];
        self.push(at, Scheduled::Deliver(connection, to));
    }

    /// Closes a connection in order, as the kernel does when a process exits.
    pub(super) fn close(&mut self, by: Rank, connection: Connection) {
        self.enqueue(by, connection, Item::End);
    }

    /// Resets a connection: messages in flight are lost.
    pub(super) fn reset(&mut self, connection: Connection) {
        self.connections[connection].is_reset = true;
        for end in 0..2 {
            self.connections[connection].queues[end].clear();
            let delay = self.rng.micros(DELAY);
            self.push(self.now + delay, Scheduled::Reset(connection, end));
        }
    }

    /// Kills a rank: its connections are closed.
    pub(super) fn kill(&mut self, rank: Rank) {
        self.dead.insert(rank);
        for connection in 0..self.connections.len() {
            if self.connections[connection].ranks.contains(&rank) {
                self.close(rank, connection);
            }
        }
    }

    /// Returns the next occurrence at a rank that runs.
    pub(super) fn next(&mut self) -> Option<(Rank, Occurrence<M, E>)> {
        while let Some(Reverse((at, number))) = self.schedule.pop() {
            self.now = self.now.max(at);
            let scheduled = self.events.remove(&number).expect("scheduled once");
            let (rank, again) = match &scheduled {
                Scheduled::Event(rank, _) => (*rank, Duration::from_millis(20)),
                Scheduled::Deliver(connection, to) | Scheduled::Reset(connection, to) => {
                    (self.connections[*connection].ranks[*to], RETRANSMISSION)
                }
            };
            if self.dead.contains(&rank) {
                continue;
            }
            let is_cut = matches!(&scheduled, Scheduled::Deliver(connection, _)
                if !self.reaches(self.peer(*connection, rank), rank));
            if self.stopped.contains(&rank) || is_cut {
                // A simulation ends even if a rank stays stopped, or a link cut.
                if self.now < MAX_WAIT {
                    self.push(self.now + again, scheduled);
                }
                continue;
            }
            let occurrence = match scheduled {
                Scheduled::Event(_, event) => Occurrence::Event(event),
                Scheduled::Reset(connection, _) => Occurrence::Closed { connection, by_peer: false },
                Scheduled::Deliver(connection, to) => {
                    match self.connections[connection].queues[to].pop_front() {
                        None => continue,
                        Some(Item::Message(message)) => Occurrence::Message { connection, message },
                        Some(Item::End) => Occurrence::Closed { connection, by_peer: true },
                    }
                }
            };
            return Some((rank, occurrence));
        }
        None
    }
}
