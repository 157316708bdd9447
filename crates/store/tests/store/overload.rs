//! A test in which another user attacks the server by thousands of connections, while a client puts small objects.
//!
//! ```text
//!   core 0                                    core 1
//!   rank 2..=9  another user: attack          server, keeper
//!               or spin without connecting    rank 0  puts 10 bytes, and measures
//!   rank 1      measures the memory
//! ```
//!
//! Asserts the memory that the server and the keeper hold, during each attack and after it. The times of the puts are reported,
//! as a ratio to those during a load of the CPU alone.

use std::collections::BTreeSet;
use std::hint::black_box;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use wholemem_os::{Deadline, PacketSocket};
use wholemem_store::{Client, Object};
use wholemem_testkit::{Rank, Ranks, exhaustive, report, skipped, test_name};

use crate::attacks::UNPRIVILEGED_ID;
use crate::raw_protocol::{
    FIRST_AND_MORE, MORE, connect, hello, request, request_kind, request_of, send_now, text, varint,
};
use crate::test_store::TestStore;

const ATTACKERS: usize = 8;

/// The rank that measures the memory. Rank 0 is the client that puts objects.
const OBSERVER: usize = 1;
const FIRST_ATTACKER: usize = 2;
const RANKS: usize = FIRST_ATTACKER + ATTACKERS;

/// The maximum memory of the server and the keeper in bytes, without the memory of objects.
const MAX_HELD: u64 = 128 << 20;

/// The tolerated growth of the memory of server and keeper after an attack, in bytes: partly used pages of the heap.
const SLACK: u64 = 8 << 20;

/// The file in the folder of the store to which rank 0 writes its measurements.
const FIGURES: &str = "figures";

/// The maximum duration of an attack, and of the wait until the server has released the memory of the attack.
const MAX_DURATION: Duration = Duration::from_secs(100);

/// The number of eight-byte cells of a pin page.
const PINS: usize = 8192;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Attack {
    /// Uses the CPU, and does not connect to the server.
    Spin,
    /// Begins long messages and does not finish them, on some connections before the hello.
    Unfinished,
    /// Watches all names and reads no event, while objects are published.
    Watch,
    /// Notifies the server of released pins of a deleted object, while full pin pages still name that object.
    PinReleased,
    /// Waits for a name that no object has, and for a name whose object many clients receive at once.
    Find,
    /// Connects to the server, sends a hello and closes the connection, again and again.
    Churn,
    /// Runs all of these attacks, each in a separate process.
    All,
}

const ATTACKS: [Attack; 7] = [
    Attack::Spin,
    Attack::Unfinished,
    Attack::Watch,
    Attack::PinReleased,
    Attack::Find,
    Attack::Churn,
    Attack::All,
];

fn connections() -> usize {
    if exhaustive() { 3000 / ATTACKERS } else { 240 / ATTACKERS }
}

fn puts() -> usize {
    if exhaustive() { 4000 } else { 200 }
}

/// Returns the first and the last CPU core that this process may use, which may be the same core.
fn cores() -> [usize; 2] {
    let allowed = sched_getaffinity(None).unwrap();
    let mut cores = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core));
    let first = cores.next().unwrap();
    [first, cores.next_back().unwrap_or(first)]
}

/// Binds this thread and its future child processes to a CPU core.
fn bind_to(core: usize) {
    let mut set = CpuSet::new();
    set.set(core);
    sched_setaffinity(None, &set).unwrap();
}

/// One connection of an attacking process to the server.
struct AttackConnection {
    socket: PacketSocket,
    last: u64,
    pins: Option<OwnedFd>,
    sent: usize,
}

struct Attacker<'a> {
    rank: &'a Rank,
    socket: PathBuf,
    connections: Vec<Option<AttackConnection>>,
    /// A regular client of the store, for requests that an attack needs.
    client: Option<Client>,
    buffer: Vec<u8>,
}

impl Attacker<'_> {
    /// Opens a connection to the server, and sends a hello if the connection is to be admitted.
    fn open(&mut self, at: usize, sends_hello: bool) {
        let Ok(socket) = connect(&self.socket) else { return };
        if sends_hello && send_now(&socket, &hello()).is_err() {
            return;
        }
        self.connections[at] = Some(AttackConnection { socket, last: 1, pins: None, sent: 0 });
    }

    /// Reads pending messages. Stores the pin page (the memory of this client's pins) if a message carries it. Returns false if
    /// the connection has ended.
    fn read(&mut self, at: usize) -> bool {
        let Some(connection) = &mut self.connections[at] else { return false };
        loop {
            match connection.socket.recv_with_fds(&mut self.buffer, 2, Deadline::NOW) {
                Ok((_, mut fds)) if fds.len() == 2 => connection.pins = fds.pop(),
                Ok(_) => {}
                Err(wholemem_os::Error::TimedOut) => return true,
                Err(_) => break,
            }
        }
        self.connections[at] = None;
        false
    }

    /// Sends requests on one connection until its socket is full, at most `count`.
    fn send(&mut self, at: usize, count: usize, mut next: impl FnMut(u64) -> Vec<u8>) {
        let Some(connection) = &mut self.connections[at] else { return };
        for _ in 0..count {
            match send_now(&connection.socket, &next(connection.last + 1)) {
                Ok(()) => (connection.last, connection.sent) = (connection.last + 1, connection.sent + 1),
                Err(wholemem_os::Error::TimedOut) => return,
                Err(_) => {
                    self.connections[at] = None;
                    return;
                }
            }
        }
    }

    fn put(&mut self, name: &str) -> Option<u64> {
        if self.client.is_none() {
            self.client = Client::connect(&self.socket).ok();
        }
        self.client.as_ref()?.put(name, b"x").ok().map(|sealed| sealed.id.as_u64())
    }

    /// Creates an object, deletes it, and returns it still pinned.
    fn hold_deleted(&mut self) -> Option<Object> {
        let name = format!("pinned {}", self.rank.id());
        self.put(&name)?;
        let client = self.client.as_ref()?;
        let object = client.get(&name).ok()?;
        client.delete(object.id()).ok()?;
        Some(object)
    }

    /// Runs one step of an attack on one connection.
    fn step(&mut self, attack: Attack, at: usize, round: usize, pinned: u64) {
        let part = vec![0x5a; 60_000];
        let packet = |kind: u8| [&[kind][..], &part].concat();
        let is_open = self.connections[at].is_some();
        match attack {
            Attack::Spin => {
                black_box((0..2000_u64).fold(0, |sum: u64, next| sum.wrapping_mul(31) ^ next));
            }
            Attack::Unfinished => {
                let sends_hello = (at + round).is_multiple_of(2);
                if !is_open {
                    self.open(at, sends_hello);
                    self.send(at, 1, |_| packet(FIRST_AND_MORE));
                }
                self.send(at, 2, |_| packet(MORE));
                let has_sent_enough =
                    self.connections[at].as_ref().is_some_and(|connection| connection.sent > 130);
                if has_sent_enough || !self.read(at) {
                    self.connections[at] = None;
                }
            }
            Attack::Watch => {
                if !is_open {
                    self.open(at, true);
                    self.send(at, 1, |id| request_of(id, request_kind::WATCH, &text("")));
                }
                if at == 0 {
                    self.put("watched");
                }
            }
            Attack::PinReleased => {
                if !is_open {
                    self.open(at, true);
                }
                if !self.read(at) {
                    return;
                }
                if let Some(pins) =
                    self.connections[at].as_mut().and_then(|connection| connection.pins.take())
                {
                    let page: Vec<u8> =
                        [u64::MAX].into_iter().chain([pinned; PINS - 1]).flat_map(u64::to_le_bytes).collect();
                    let _ = rustix::io::pwrite(&pins, &page, 0);
                }
                self.send(at, 16, |id| request(id, request_kind::PIN_RELEASED, &[pinned]));
            }
            Attack::Find => {
                if !is_open {
                    self.open(at, true);
                }
                if !self.read(at) {
                    return;
                }
                let name = if at.is_multiple_of(2) { "awaited" } else { "never" };
                let operands = [text(name), varint(5000)].concat();
                self.send(at, 64, |id| request_of(id, request_kind::FIND, &operands));
                if at == 0
                    && let Some(id) = self.put("awaited")
                {
                    self.send(at, 1, |request_id| request(request_id, request_kind::DELETE, &[id]));
                }
            }
            Attack::Churn => {
                self.connections[at] = None;
                self.open(at, true);
            }
            Attack::All => unreachable!("`All` is resolved to one attack for each process"),
        }
    }

    /// Attacks the server until rank 0 sends a stop.
    fn run(&mut self, attack: Attack) {
        let start = Instant::now();
        self.connections.resize_with(connections(), || None);
        // A deleted object that is retained by pins: every notification about it makes the server read all pins.
        let held = (attack == Attack::PinReleased).then(|| self.hold_deleted()).flatten();
        let pinned = held.as_ref().map_or(1, |object| object.id().as_u64());
        let mut round = 0;
        loop {
            for at in 0..self.connections.len() {
                self.step(attack, at, round, pinned);
                if at.is_multiple_of(16) && must_stop(self.rank) {
                    self.connections.clear();
                    self.client = None;
                    return;
                }
            }
            assert!(start.elapsed() < MAX_DURATION, "rank 0 does not end the attack");
            round += 1;
            if round == 1 {
                self.rank.send(0, b"attacking", &[]);
            }
        }
    }
}

/// Returns the socket of the store, the attack of this run, and the CPU core of the attackers.
fn parameters(rank: &Rank) -> (PathBuf, Attack, usize) {
    let parameter = rank.parameter();
    let mut words = parameter.splitn(3, ' ');
    let mut number = || words.next().unwrap().parse::<usize>().unwrap();
    let (attack, core) = (ATTACKS[number()], number());
    (PathBuf::from(words.next().unwrap()), attack, core)
}

fn attack(rank: &Rank) {
    let (socket, attack, core) = parameters(rank);
    // The process has inherited the CPU core of the server, so it is bound to the core of the attackers.
    bind_to(core);
    wholemem_os::descriptors::raise_limit();
    let buffer = vec![0; wholemem_os::packet::MAX_PACKET];
    let own = ATTACKS[1 + rank.id() % (ATTACKS.len() - 2)];
    let mut attacker = Attacker { rank, socket, connections: Vec::new(), client: None, buffer };
    attacker.run(if attack == Attack::All { own } else { attack });
}

/// Returns the memory of the server and the keeper in bytes, without objects: their private memory, and the pin pages.
fn held(folder: &Path) -> u64 {
    let process = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
    let (mut seen, mut held) = (BTreeSet::new(), 0);
    for pid in ["server", "keeper"].map(process) {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let own = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        held += own.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10;
        let files = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
        for file in files.map(|file| file.path()) {
            let is_page =
                std::fs::read_link(&file).is_ok_and(|link| link.to_string_lossy().contains("wholemem-pins"));
            if is_page
                && let Ok(page) = std::fs::metadata(&file)
                && seen.insert(page.ino())
            {
                held += page.blocks() * 512;
            }
        }
    }
    held
}

/// Measures the durations of puts, and returns them sorted, the shortest first.
fn measure(client: &Client) -> Vec<Duration> {
    let times = (0..puts()).map(|put| {
        let start = Instant::now();
        client.put(&format!("own {}", put % 64), &[7; 10]).unwrap();
        start.elapsed()
    });
    let mut times: Vec<_> = times.collect();
    times.sort_unstable();
    times
}

fn must_stop(rank: &Rank) -> bool {
    rank.peer(0).recv(&mut [0; 16], Deadline::NOW).is_ok()
}

/// Measures the memory of the server and the keeper during the attack, and sends the maximum to rank 0.
fn observe(rank: &Rank) {
    let (socket, _, core) = parameters(rank);
    // The observer does not use the core of the server, where it would take time from the client that measures puts.
    bind_to(core);
    let mut most = 0;
    while !must_stop(rank) {
        most = most.max(held(socket.parent().unwrap()));
    }
    rank.send(0, &most.to_le_bytes(), &[]);
}

/// Puts objects during the attack, and writes the durations of the puts and the maximum memory to the file of measurements.
fn victim(rank: &Rank) {
    let (socket, attack, _) = parameters(rank);
    let client = Client::connect(&socket).unwrap();
    for attacker in FIRST_ATTACKER..RANKS {
        assert_eq!(rank.recv(attacker).0, b"attacking");
    }
    let times = measure(&client);
    let connected = client.status().unwrap().clients - 1;
    for other in OBSERVER..RANKS {
        rank.send(other, b"stop", &[]);
    }
    let held = u64::from_le_bytes(rank.recv(OBSERVER).0.try_into().unwrap());
    assert!(held <= MAX_HELD, "{attack:?}: {} MiB are held", held >> 20);
    let [p50, p99, longest] =
        [50, 99, 100].map(|percent| times[(times.len() - 1) * percent / 100].as_nanos());
    let figures = [p50, p99, longest, connected.into(), held.into()];
    let file = socket.with_file_name(FIGURES);
    std::fs::write(file, figures.map(|figure| figure.to_string()).join(" ")).unwrap();
}

/// Returns the report line of an attack, and the 99th percentile of the durations of puts during the attack.
fn describe(attack: Attack, figures: &str, spinning: Option<u64>, release_time: Duration) -> (String, u64) {
    let figures: Vec<u64> = figures.split(' ').map(|figure| figure.parse().unwrap()).collect();
    let [p50, p99, longest, connected, held] = figures[..] else { panic!("{figures:?}") };
    let [p50, p99, longest] = [p50, p99, longest].map(Duration::from_nanos);
    let ratio = p99.as_secs_f64() / Duration::from_nanos(spinning.unwrap_or(figures[1])).as_secs_f64();
    let line = format!(
        "{attack:?}: p50 {p50:.1?}, p99 {p99:.1?} ({ratio:.1} of spinning), longest {longest:.1?}; \
         {connected} clients; {} MiB held, released after {release_time:.1?}",
        held >> 20,
    );
    (line, figures[1])
}

#[test]
fn thousands_of_connections_of_another_user_do_not_exhaust_memory_or_block_others() {
    let test = test_name!();
    let body = |rank: &Rank| match rank.id() {
        0 => victim(rank),
        OBSERVER => observe(rank),
        _ => attack(rank),
    };
    if Ranks::is_rank() {
        return Ranks::of(RANKS).run(test, body);
    }
    if !Ranks::can_change_user() {
        return skipped("only root can start a process as another user");
    }
    // Processes that this thread starts inherit the thread's CPU core.
    let bound = std::thread::spawn(move || {
        let [of_attackers, of_server] = cores();
        bind_to(of_server);
        let store = TestStore::start();
        store.open_to_all();
        let (client, folder) = (store.client(), store.folder());
        measure(&client);
        let (start, mut spinning) = (held(folder), None);
        for (number, attack) in ATTACKS.into_iter().enumerate() {
            let parameter = format!("{number} {of_attackers} {}", store.socket().display());
            let as_other_user = |ranks: Ranks, rank| ranks.as_user(rank, UNPRIVILEGED_ID);
            let ranks = (FIRST_ATTACKER..RANKS).fold(Ranks::of(RANKS), as_other_user);
            ranks.parameter(parameter).run(test, body);
            let ended = Instant::now();
            while client.status().unwrap().clients > 1 || held(folder) > start + SLACK {
                assert!(
                    ended.elapsed() < MAX_DURATION,
                    "{attack:?}: {} MiB are still held",
                    held(folder) >> 20
                );
                std::thread::yield_now();
            }
            let figures = std::fs::read_to_string(folder.join(FIGURES)).unwrap();
            let (line, p99) = describe(attack, &figures, spinning, ended.elapsed());
            spinning = spinning.or(Some(p99));
            report(&line);
        }
    });
    bound.join().unwrap();
}
