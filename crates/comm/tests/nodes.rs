//! Tests of groups on several nodes. The nodes are simulated on one machine: ranks of different nodes use different
//! directories for their Unix sockets, and reach each other by TCP over the loopback interface only.

use std::net::TcpListener;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use wholemem_comm::{Bootstrap, Error, Network, Rank, UniqueId, VoteResult};
use wholemem_os::{Deadline, Memfd, PidFd};
use wholemem_testkit::{Ranks, test_name};

const TIMEOUT: Duration = Duration::from_secs(60);

/// The time after which a silent node is given up in these tests.
const SILENCE: Duration = Duration::from_secs(1);

/// The nodes of a test: the ranks of each.
type Layout = &'static [&'static [u32]];

const TWO_NODES: Layout = &[&[0], &[1]];
const LAYOUTS: [Layout; 5] = [
    TWO_NODES,
    &[&[0, 1], &[2, 3]],
    &[&[0, 1], &[2, 3], &[4, 5]],
    &[&[0], &[1, 2, 3]],
    &[&[0, 3], &[1, 4], &[2]],
];

fn node_of(layout: Layout, rank: u32) -> usize {
    layout.iter().position(|ranks| ranks.contains(&rank)).expect("a rank of the layout")
}

fn size(layout: Layout) -> u32 {
    u32::try_from(layout.iter().map(|ranks| ranks.len()).sum::<usize>()).expect("small")
}

/// Returns an address at which no process listens.
fn free_address() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("an address").to_string()
}

/// The parameter of a test's ranks: the address of rank 0, the id, and the directory with those of the nodes.
struct Parameter {
    text: String,
    /// `None` in the processes of ranks, which exit without removing it.
    folder: Option<tempfile::TempDir>,
}

fn parameter() -> Parameter {
    if Ranks::is_rank() {
        return Parameter { text: String::new(), folder: None };
    }
    let folder = tempfile::tempdir_in("/tmp").expect("a directory");
    let id = UniqueId::create().expect("an id");
    Parameter { text: format!("{} {id} {}", free_address(), folder.path().display()), folder: Some(folder) }
}

impl Parameter {
    fn assert_no_socket_file_is_left(&self, layout: Layout) {
        let folder = self.folder.as_ref().expect("the harness").path();
        let files = |node: usize| std::fs::read_dir(folder.join(node.to_string())).expect("the directory");
        let left: Vec<_> = (0..layout.len()).flat_map(files).collect();
        assert_eq!(left.len(), 0, "no socket file is left: {left:?}");
    }
}

fn join_within(parameter: &str, layout: Layout, rank: u32, timeout: Duration) -> Result<Bootstrap, Error> {
    let mut parts = parameter.split(' ');
    let mut next = || parts.next().expect("three parts");
    let (address, id, folder) = (next(), next().parse::<UniqueId>()?, next());
    let directory = Path::new(folder).join(node_of(layout, rank).to_string());
    let network =
        Network::new(address.parse().expect("an address")).with_silence(SILENCE).with_socket_dir(&directory);
    let mut comm = Bootstrap::create_over(&network, &id, Rank(rank), size(layout), Deadline::after(timeout))?;
    comm.set_timeout(timeout);
    Ok(comm)
}

fn bytes(from: u32, to: u32, len: usize) -> Vec<u8> {
    (0..len).map(|n| (from as usize * 31 + to as usize * 7 + n).to_le_bytes()[0]).collect()
}

fn every_operation(comm: &Bootstrap, layout: Layout) {
    let (rank, size) = (comm.rank(), comm.size());
    assert_eq!(comm.nodes() as usize, layout.len());
    for other in 0..size {
        assert_eq!(comm.node_of(Rank(other)).map(|node| node as usize), Some(node_of(layout, other)));
    }
    assert_eq!(comm.node_of(Rank(size)), None);
    for len in [0, 1, 4096, 300_000] {
        let all = comm.all_gather(&bytes(rank.0, 0, len + rank.index())).expect("all_gather");
        assert_eq!(all, (0..size).map(|from| bytes(from, 0, len + from as usize)).collect::<Vec<_>>());
        let parts: Vec<_> = (0..size).map(|to| bytes(rank.0, to, len + to as usize)).collect();
        let parts: Vec<_> = parts.iter().map(Vec::as_slice).collect();
        let got = comm.all_to_allv(&parts).expect("all_to_allv");
        assert_eq!(got, (0..size).map(|from| bytes(from, rank.0, len + rank.index())).collect::<Vec<_>>());
    }
    for root in 0..size {
        let sent = comm.broadcast(Rank(root), &bytes(rank.0, 1, 100)).expect("a broadcast");
        assert_eq!(sent, bytes(root, 1, 100));
    }
    let last = size - 1;
    let vote = if rank.0 == last { Err("no") } else { Ok(()) };
    let refused = VoteResult::Refused { rank: Rank(last), reason: "no".to_owned() };
    assert_eq!(comm.agree(vote), Ok(refused));
    let memory = Memfd::create("test", 4096).expect("memory");
    let nodes = comm.nodes();
    let refused = Error::AcrossNodes { what: "pass file descriptors", nodes };
    assert_eq!(comm.all_gather_fds(&[memory.as_fd()]).map(drop), Err(refused));
    // The even ranks in reverse order, which are on several nodes or on one.
    let part = comm.split(rank.0.is_multiple_of(2).then_some(7), size - rank.0).expect("a split");
    assert_eq!(part.is_some(), rank.0.is_multiple_of(2));
    if let Some(part) = part {
        let even: Vec<_> = (0..size).filter(|rank| rank.is_multiple_of(2)).rev().collect();
        let all = part.all_gather(&rank.0.to_le_bytes()).expect("all_gather");
        assert_eq!(all, even.iter().map(|rank| rank.to_le_bytes()).collect::<Vec<_>>());
    }
    let here = comm.split_by_node().expect("a split");
    assert_eq!((here.nodes(), here.size() as usize), (1, layout[node_of(layout, rank.0)].len()));
    let all = here.all_gather_fds(&[memory.as_fd()]).expect("descriptors");
    assert_eq!(all.len(), here.size() as usize);
    for _ in 0..100 {
        comm.barrier().expect("a barrier");
    }
}

#[test]
fn every_operation_works_over_several_nodes() {
    for (number, layout) in (0..).zip(LAYOUTS) {
        let shared = parameter();
        Ranks::of(size(layout) as usize).parameter(format!("{number} {}", shared.text)).run(
            test_name!(),
            |rank| {
                let parameter = rank.parameter();
                let (number, shared) = parameter.split_once(' ').expect("a layout");
                let layout = LAYOUTS[number.parse::<usize>().expect("a number")];
                let own = u32::try_from(rank.id()).expect("small");
                let comm = join_within(shared, layout, own, TIMEOUT).expect("a group");
                every_operation(&comm, layout);
                comm.close().expect("the group is usable");
            },
        );
        shared.assert_no_socket_file_is_left(layout);
    }
}

/// Returns the layout with number `n` in the parameter, and the rest of the parameter.
fn shared(rank: &wholemem_testkit::Rank) -> (Layout, String, u32) {
    let parameter = rank.parameter();
    let (number, shared) = parameter.split_once(' ').expect("a layout");
    let layout = LAYOUTS[number.parse::<usize>().expect("a number")];
    (layout, shared.to_owned(), u32::try_from(rank.id()).expect("small"))
}

/// Makes rank `at` wait until all ranks have left the barrier before this call. If a rank died or stopped earlier, ranks that are still
/// in the barrier would get an error.
fn wait_until_all_have_left(rank: &wholemem_testkit::Rank, at: usize) {
    if rank.id() != at {
        return rank.send(at, b"ready", &[]);
    }
    for peer in (0..rank.count()).filter(|peer| *peer != at) {
        assert_eq!(rank.recv(peer).0, b"ready");
    }
}

/// Kills ranks of a group that waits in a barrier, and checks the error of every survivor.
fn kill(test: &str, number: usize, victims: &'static [usize]) {
    let layout = LAYOUTS[number];
    let parameter = parameter();
    let mut ranks = Ranks::of(size(layout) as usize).parameter(format!("{number} {}", parameter.text));
    for victim in victims {
        ranks = ranks.killed(*victim);
    }
    ranks.run(test, |rank| {
        let (layout, shared, own) = shared(rank);
        let comm = join_within(&shared, layout, own, TIMEOUT).expect("a group");
        comm.barrier().expect("all ranks take part");
        let killer = (0..rank.count()).find(|rank| !victims.contains(rank)).expect("a survivor");
        wait_until_all_have_left(rank, killer);
        if victims.contains(&rank.id()) {
            rank.wait_to_be_killed();
        }
        if rank.id() == killer {
            victims.iter().for_each(|victim| rank.kill(*victim));
        }
        let error = comm.barrier().expect_err("a rank has died");
        let is_victim = |rank: &Rank| victims.contains(&rank.index());
        assert!(matches!(&error, Error::PeerLost { rank } if is_victim(rank)), "{error}");
        assert_eq!(comm.check(), Err(error));
    });
    parameter.assert_no_socket_file_is_left(layout);
}

#[test]
fn a_killed_rank_that_is_no_leader_is_reported_to_all_nodes() {
    kill(test_name!(), 2, &[3]);
}

#[test]
fn a_killed_leader_is_reported_to_all_nodes() {
    kill(test_name!(), 2, &[2]);
}

#[test]
fn the_death_of_the_only_rank_of_a_node_is_reported() {
    kill(test_name!(), 0, &[1]);
}

#[test]
fn the_death_of_rank_0_is_reported_to_all_nodes() {
    kill(test_name!(), 2, &[0]);
}

#[test]
fn the_death_of_all_ranks_of_a_node_is_reported_to_all_others() {
    kill(test_name!(), 2, &[2, 3]);
}

/// Stops ranks of a group that waits in a barrier, and checks that every other rank reports their node.
fn stop(test: &str, number: usize, victims: &'static [usize]) {
    let parameter = parameter();
    let mut ranks =
        Ranks::of(size(LAYOUTS[number]) as usize).parameter(format!("{number} {}", parameter.text));
    for victim in victims {
        ranks = ranks.killed(*victim);
    }
    ranks.run(test, |rank| {
        let (layout, shared, own) = shared(rank);
        let comm = join_within(&shared, layout, own, TIMEOUT).expect("a group");
        comm.barrier().expect("all ranks take part");
        let others: Vec<_> = (0..rank.count()).filter(|rank| !victims.contains(rank)).collect();
        wait_until_all_have_left(rank, others[0]);
        if victims.contains(&rank.id()) {
            rank.wait_to_be_killed();
        }
        let processes: Vec<_> =
            victims.iter().map(|victim| PidFd::open(rank.pid(*victim)).expect("it lives")).collect();
        if rank.id() == others[0] {
            for process in &processes {
                process.signal(Signal::STOP).expect("it can be stopped");
            }
        }
        // No operation is in progress on this rank when the node is given up, or one is.
        if rank.id().is_multiple_of(2) {
            let (sender, receiver) = std::sync::mpsc::channel();
            let _watch = comm.watch(move |error| drop(sender.send(error.clone())));
            let error = receiver.recv().expect("a failure");
            assert_eq!(comm.check(), Err(error));
        }
        let error = comm.barrier().expect_err("a node is stopped");
        let node = u32::try_from(node_of(layout, u32::try_from(victims[0]).expect("small"))).expect("small");
        assert!(
            matches!(&error, Error::NodeTimeout { node: silent, timeout: SILENCE, .. } if *silent == node),
            "{error}"
        );
        assert!(error.to_string().contains(&format!("node {node}")), "{error}");
        let peers: Vec<_> = others.iter().copied().filter(|other| *other != rank.id()).collect();
        rank.barrier_with(&peers);
        if rank.id() == others[0] {
            processes.iter().for_each(|process| process.kill().expect("it can be killed"));
        }
    });
}

#[test]
fn a_stopped_node_is_named_on_all_others() {
    stop(test_name!(), 2, &[2, 3]);
}

#[test]
fn a_stopped_rank_is_named_on_all_nodes() {
    stop(test_name!(), 2, &[4]);
}

#[test]
fn the_stopped_node_of_rank_0_is_named_on_all_others() {
    stop(test_name!(), 1, &[0, 1]);
}

fn open_fds() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("/proc is mounted").count()
}

/// The operation number `n` of a sequence that all ranks make, with splits or without.
fn some_operation(comm: &Bootstrap, n: u64, splits: bool) -> Result<(), Error> {
    match n % if splits { 5 } else { 4 } {
        0 => comm.barrier(),
        1 => comm.all_gather(&[7; 3000]).map(drop),
        2 => comm.all_to_allv(&vec![&[7; 5000][..]; comm.size() as usize]).map(drop),
        3 => comm.agree(Ok(())).map(drop),
        _ => comm.split(Some(comm.rank().0 % 2), 0).map(drop),
    }
}

#[test]
fn ranks_killed_at_random_moments_are_reported_to_all_and_nothing_is_left() {
    let layout = LAYOUTS[2];
    let seed = if Ranks::is_rank() { 0 } else { wholemem_testkit::seed() };
    let cases = if wholemem_testkit::exhaustive() { 500 } else { 20 };
    for case in 0..cases {
        let parameter = parameter();
        let random = seed.wrapping_add(case).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(17);
        let victim = if Ranks::is_rank() { 0 } else { random % 6 };
        // Half of the ranks are killed while they join, and the others in a sequence of operations.
        let micros = random / 6 % 50_000;
        let splits = case.is_multiple_of(4);
        let text = format!("2 {} {} {victim} {micros}", parameter.text, u64::from(splits));
        let victim = usize::try_from(victim).expect("small");
        Ranks::of(6).killed(victim).parameter(text).run(test_name!(), |rank| {
            // A first group starts threads and raises limits before the census.
            drop(Bootstrap::local(2).expect("a group"));
            let (layout, shared, own) = shared(rank);
            let mut numbers = shared.rsplit(' ');
            let mut next = || numbers.next().expect("a number").parse::<u64>().expect("a number");
            let (micros, victim, splits) = (next(), next(), next() == 1);
            let victim = usize::try_from(victim).expect("small");
            let before = open_fds();
            rank.barrier();
            std::thread::scope(|scope| {
                if rank.id() == (victim + 1) % 6 {
                    scope.spawn(|| {
                        // The moment of the death is random.
                        std::thread::sleep(Duration::from_micros(micros));
                        rank.kill(victim);
                    });
                }
                let failed = |comm: &Bootstrap, n| Some((Some(n), some_operation(comm, n, splits).err()?));
                let (at, error) = match join_within(&shared, layout, own, Duration::from_secs(5)) {
                    Err(error) => (None, error),
                    Ok(comm) => (0..).find_map(|n| failed(&comm, n)).expect("a rank is killed"),
                };
                if rank.id() == victim {
                    rank.wait_to_be_killed();
                }
                let victim = Rank(u32::try_from(victim).expect("small"));
                match &error {
                    Error::PeerLost { rank } => assert_eq!(*rank, victim, "in operation {at:?}"),
                    // The victim was killed before it had joined.
                    Error::Timeout { missing, joining: true, .. } => {
                        assert!(missing.contains(&victim), "{error}")
                    }
                    other => panic!("{other}"),
                }
            });
            assert_eq!(open_fds(), before, "no descriptor is left");
        });
        // The file of a rank that was killed in a split is left if no other rank of its node knows the part yet.
        if !splits {
            parameter.assert_no_socket_file_is_left(layout);
        }
    }
}

/// A relay between the nodes of two ranks, which stands for the network between them.
mod relay {
    use std::io::{Read, Write};
    use std::net::{SocketAddr, TcpListener, TcpStream};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU8, Ordering};
    use std::time::Duration;

    /// The directions in which bytes are held back: 1 from the connecting node, 2 to it, 3 both, 0 none.
    pub(super) type Cut = Arc<AtomicU8>;

    /// Relays connections to `target` until the process ends, and returns the address of the relay.
    pub(super) fn start(target: SocketAddr, cut: Cut) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("an address");
        std::thread::spawn(move || {
            for inner in listener.incoming() {
                let inner = inner.expect("a connection");
                // A new connection is not made over a cut link: it waits, as packets that are lost do.
                while cut.load(Ordering::SeqCst) != 0 {
                    std::thread::sleep(Duration::from_millis(5));
                }
                let Ok(outer) = TcpStream::connect(target) else { continue };
                copy(
                    inner.try_clone().expect("a descriptor"),
                    outer.try_clone().expect("a descriptor"),
                    1,
                    &cut,
                );
                copy(outer, inner, 2, &cut);
            }
        });
        address
    }

    fn copy(mut from: TcpStream, mut to: TcpStream, direction: u8, cut: &Cut) {
        let cut = Arc::clone(cut);
        std::thread::spawn(move || {
            let mut buffer = [0; 65_536];
            loop {
                let len = from.read(&mut buffer).unwrap_or(0);
                while cut.load(Ordering::SeqCst) & direction != 0 {
                    std::thread::sleep(Duration::from_millis(5));
                }
                if len == 0 || to.write_all(&buffer[..len]).is_err() {
                    let _ = to.shutdown(std::net::Shutdown::Write);
                    return;
                }
            }
        });
    }
}

/// Cuts the link between two nodes of two ranks each in the given directions, and checks the errors on both sides.
fn cut(test: &str, directions: u8) {
    use std::sync::atomic::Ordering;
    let layout = LAYOUTS[1];
    let parameter = parameter();
    Ranks::of(4).parameter(format!("1 {}", parameter.text)).run(test, |rank| {
        let (layout, shared, own) = shared(rank);
        let link = relay::Cut::default();
        // Rank 2 runs the relay, and leads its node, because it joins first.
        let (address, rest) = shared.split_once(' ').expect("an address");
        let target = address.parse().expect("an address");
        let shared = if node_of(layout, own) == 0 {
            shared.clone()
        } else if own == 2 {
            let relay = relay::start(target, link.clone()).to_string();
            rank.send(3, relay.as_bytes(), &[]);
            format!("{relay} {rest}")
        } else {
            format!("{} {rest}", String::from_utf8(rank.recv(2).0).expect("an address"))
        };
        let comm = join_within(&shared, layout, own, TIMEOUT).expect("a group");
        comm.barrier().expect("all ranks take part");
        rank.barrier();
        if own == 2 {
            link.store(directions, Ordering::SeqCst);
        }
        rank.barrier();
        // A barrier may finish on the side that still receives messages.
        let error = std::iter::repeat_with(|| comm.barrier()).find_map(Result::err).expect("the link is cut");
        let Error::NodeTimeout { node, ranks, timeout } = &error else { panic!("{error}") };
        assert_eq!((ranks, *timeout), (&layout[*node as usize].iter().copied().map(Rank).collect(), SILENCE));
        // If both directions are cut, each side reports the other.
        if directions == 3 {
            assert_ne!(*node as usize, node_of(layout, own), "{error}");
        }
        assert_eq!(comm.check(), Err(error));
        rank.barrier();
    });
    parameter.assert_no_socket_file_is_left(layout);
}

#[test]
fn a_cut_link_is_reported_on_both_sides() {
    cut(test_name!(), 3);
}

#[test]
fn a_link_that_is_cut_towards_rank_0_is_reported_on_both_sides() {
    cut(test_name!(), 1);
}

#[test]
fn a_link_that_is_cut_from_rank_0_is_reported_on_both_sides() {
    cut(test_name!(), 2);
}

#[test]
fn the_survivors_of_a_death_form_a_new_group_over_several_nodes() {
    let layout = LAYOUTS[1];
    let (first, second) = (parameter(), parameter());
    Ranks::of(4).killed(2).parameter(format!("{};{}", first.text, second.text)).run(test_name!(), |rank| {
        let own = u32::try_from(rank.id()).expect("small");
        let parameter = rank.parameter();
        let (first, second) = parameter.split_once(';').expect("two groups");
        let comm = join_within(first, LAYOUTS[1], own, TIMEOUT).expect("a group");
        comm.barrier().expect("all ranks take part");
        wait_until_all_have_left(rank, 0);
        if own == 2 {
            rank.wait_to_be_killed();
        }
        if own == 0 {
            rank.kill(2);
        }
        assert_eq!(comm.barrier(), Err(Error::PeerLost { rank: Rank(2) }));
        let survivors: Layout = &[&[0, 1], &[2]];
        let again = join_within(second, survivors, if own == 3 { 2 } else { own }, TIMEOUT).expect("a group");
        assert_eq!(again.all_gather(&[7]).expect("all_gather"), [[7]; 3]);
    });
    first.assert_no_socket_file_is_left(layout);
}

#[test]
fn ranks_join_over_ipv6() {
    let Ok(listener) = TcpListener::bind("[::1]:0") else {
        return wholemem_testkit::skipped("there is no IPv6 loopback address here");
    };
    let network = Network::new(listener.local_addr().expect("an address")).with_listener(listener);
    let folder = tempfile::tempdir_in("/tmp").expect("a directory");
    let id = UniqueId::create().expect("an id");
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let network = network.clone().with_socket_dir(&folder.path().join(rank.to_string()));
            let id = &id;
            scope.spawn(move || {
                let comm = Bootstrap::create_over(&network, id, Rank(rank), 2, Deadline::after(TIMEOUT));
                every_operation(&comm.expect("a group"), TWO_NODES);
            });
        }
    });
}

#[test]
fn an_id_without_a_secret_is_refused_at_once() {
    let text = "wm1-0123456789abcdef-00000000000000000000000000000000-n1";
    let network = Network::new(free_address().parse().expect("an address"));
    let id = text.parse().expect("an id");
    let outcome = Bootstrap::create_over(&network, &id, Rank(0), 2, Deadline::NEVER);
    assert_eq!(outcome.map(drop), Err(Error::NoSecret));
    assert!(Error::NoSecret.to_string().contains("WHOLEMEM_SECRET_FILE"));
}

#[test]
fn missing_ranks_are_named() {
    let layout = LAYOUTS[3];
    let shared = parameter();
    let timeout = Duration::from_secs(2);
    let missing = |missing: &[u32]| {
        let missing = missing.iter().copied().map(Rank).collect();
        Err(Error::Timeout { missing, timeout, joining: true })
    };
    std::thread::scope(|scope| {
        // Rank 2 does not join.
        let text = &shared.text;
        let join = |rank| scope.spawn(move || join_within(text, layout, rank, timeout).map(drop));
        let joins = [0, 1, 3].map(join);
        for join in joins {
            assert_eq!(join.join().expect("a thread"), missing(&[2]));
        }
    });
}

#[test]
fn of_two_processes_on_different_nodes_with_the_same_rank_one_is_refused() {
    let layout = LAYOUTS[3];
    let shared = parameter();
    let (sender, receiver) = std::sync::mpsc::channel();
    let join = |layout: Layout, rank| join_within(&shared.text, layout, rank, TIMEOUT).map(drop);
    let join = &join;
    std::thread::scope(|scope| {
        let others = [0, 3].map(|rank| scope.spawn(move || join(layout, rank)));
        // Rank 1 of the layout, and a process on a third node.
        let contenders: [Layout; 2] = [layout, &[&[0, 2, 3], &[], &[1]]];
        for contender in contenders {
            let sender = sender.clone();
            scope.spawn(move || match join(contender, 1) {
                Ok(()) => {}
                Err(error) => sender.send(error).expect("the test waits"),
            });
        }
        // The group is incomplete until one of the two is refused.
        assert_eq!(receiver.recv(), Ok(Error::RankTaken { rank: Rank(1) }));
        assert_eq!(join(layout, 2), Ok(()));
        others.into_iter().for_each(|other| assert_eq!(other.join().expect("a thread"), Ok(())));
    });
    assert!(receiver.try_recv().is_err(), "the other one has joined");
}

#[test]
fn eight_nodes_of_32_ranks_join() {
    const NODES: u32 = 8;
    const RANKS: u32 = 32;
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let network = Network::new(listener.local_addr().expect("an address")).with_listener(listener);
    let folder = tempfile::tempdir_in("/tmp").expect("a directory");
    let id = UniqueId::create().expect("an id");
    let began = std::time::Instant::now();
    std::thread::scope(|scope| {
        let joins: Vec<_> = (0..NODES * RANKS)
            .map(|rank| {
                let network =
                    network.clone().with_socket_dir(&folder.path().join((rank / RANKS).to_string()));
                let id = &id;
                scope.spawn(move || {
                    let deadline = Deadline::after(TIMEOUT);
                    let comm = Bootstrap::create_over(&network, id, Rank(rank), NODES * RANKS, deadline);
                    let (comm, joined) = (comm.expect("a group"), began.elapsed());
                    let all = comm.all_gather(&rank.to_le_bytes()).expect("all_gather");
                    assert_eq!(all, (0..NODES * RANKS).map(u32::to_le_bytes).collect::<Vec<_>>());
                    assert_eq!((comm.nodes(), comm.node_of(Rank(rank))), (NODES, Some(rank / RANKS)));
                    joined
                })
            })
            .collect();
        let last = joins.into_iter().map(|join| join.join().expect("a thread")).max();
        wholemem_testkit::report(&format!(
            "{NODES} nodes of {RANKS} ranks, as threads, joined within {last:?}"
        ));
    });
}
