//! Tests of groups on nodes that are network namespaces: traffic crosses links, which are cut and healed; nodes are
//! stopped and killed.

mod cluster {
    pub(crate) mod group;
    pub(crate) mod round_trip;
}

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::time::Duration;

use cluster::group::{SILENCE, check_second_group, describe, join, join_second_group, number, open_fds};
use cluster::round_trip;
use wholemem_comm::{Bootstrap, Error, Rank, UniqueId};
use wholemem_os::Memfd;
use wholemem_testkit::cluster::LinkCounters;
use wholemem_testkit::{Cluster, ClusterRank, seed, test_name};

const TIMEOUT: Duration = Duration::from_secs(60);

/// The length of the part of each rank in the data that must cross the links.
const LEN: usize = 200_000;

fn bytes(rank: usize, len: usize) -> Vec<u8> {
    (0..len).map(|n| (rank * 31 + n).to_le_bytes()[0]).collect()
}

/// Returns the parameter of the ranks of a test: the ids of two groups.
fn ids() -> String {
    let id = || UniqueId::create().expect("an id");
    format!("{} {}", id(), id())
}

fn operations(rank: &ClusterRank, root: IpAddr) {
    let parameter = rank.parameter();
    let (id, _) = parameter.split_once(' ').expect("two ids");
    let comm = join(SocketAddr::new(root, 4711), id, rank.id(), rank.count(), TIMEOUT).expect("a group");
    assert_eq!(comm.nodes() as usize, rank.nodes());
    let mut first = 0;
    for node in 0..rank.nodes() {
        for other in first..first + rank.ranks_on(node) {
            assert_eq!(comm.node_of(Rank(number(other))), Some(number(node)), "rank {other}");
        }
        first += rank.ranks_on(node);
    }
    comm.barrier().expect("a barrier");
    for len in [0, 1, LEN] {
        let all = comm.all_gather(&bytes(rank.id(), len)).expect("all_gather");
        assert!(all == (0..rank.count()).map(|from| bytes(from, len)).collect::<Vec<_>>(), "{len} bytes");
    }
    let memory = Memfd::create("test", 4096).expect("memory");
    let refused = Error::AcrossNodes { what: "pass file descriptors", nodes: comm.nodes() };
    assert_eq!(comm.all_gather_fds(&[memory.as_fd()]).map(drop), Err(refused));
    // The ranks in reverse order, so that another node has rank 0.
    let part = comm.split(Some(1), number(rank.count() - rank.id())).expect("a split").expect("a part");
    let all = part.all_gather(&bytes(rank.id(), 10)).expect("all_gather");
    assert_eq!(all, (0..rank.count()).rev().map(|from| bytes(from, 10)).collect::<Vec<_>>());
    let here = comm.split_by_node().expect("a split");
    assert_eq!((here.nodes(), here.size() as usize), (1, rank.ranks_on(rank.node())));
    assert_eq!(here.all_gather_fds(&[memory.as_fd()]).map(|all| all.len()), Ok(here.size() as usize));
    comm.barrier().expect("a barrier");
}

/// Runs operations on nodes with the given numbers of ranks, and checks that their data crossed the links.
fn operations_on(test: &str, ranks_per_node: &[usize], root: fn(&ClusterRank) -> IpAddr) {
    let Some(cluster) = Cluster::of(ranks_per_node).parameter(ids()).start(test, |rank| {
        assert_eq!(rank.recv(), b"begin");
        operations(rank, root(rank));
        rank.send(b"end");
    }) else {
        return;
    };
    assert_eq!(cluster.nodes(), ranks_per_node.len());
    let before: Vec<LinkCounters> = (0..cluster.nodes()).map(|node| cluster.counters(node)).collect();
    (0..cluster.count()).for_each(|rank| cluster.send(rank, b"begin"));
    cluster.recv_from_all(b"end");
    for (node, before) in before.iter().enumerate() {
        let after = cluster.counters(node);
        let here = ranks_per_node[node];
        let (sent, received) = (after.sent - before.sent, after.received - before.received);
        assert!(sent > (here * LEN) as u64, "node {node} has sent {sent} bytes");
        let others = cluster.count() - here;
        assert!(received > (others * LEN) as u64, "node {node} has received {received} bytes");
    }
    cluster.finish();
}

fn v4(rank: &ClusterRank) -> IpAddr {
    rank.v4(0).into()
}

fn v6(rank: &ClusterRank) -> IpAddr {
    rank.v6(0).into()
}

#[test]
fn two_nodes_of_one_rank() {
    operations_on(test_name!(), &[1, 1], v4);
}

#[test]
fn two_nodes_of_two_ranks() {
    operations_on(test_name!(), &[2, 2], v4);
}

#[test]
fn three_nodes_of_two_ranks() {
    operations_on(test_name!(), &[2, 2, 2], v4);
}

#[test]
fn nodes_of_one_and_three_ranks() {
    operations_on(test_name!(), &[1, 3], v4);
}

#[test]
fn nodes_that_are_connected_by_ipv6() {
    operations_on(test_name!(), &[1, 3], v6);
}

#[test]
fn eight_nodes_of_32_ranks_join() {
    let Some(cluster) = Cluster::of(&[32; 8]).parameter(ids()).start(test_name!(), |rank| {
        let parameter = rank.parameter();
        let (id, _) = parameter.split_once(' ').expect("two ids");
        rank.send(b"ready");
        assert_eq!(rank.recv(), b"begin");
        let root = SocketAddr::new(v4(rank), 4711);
        let comm = join(root, id, rank.id(), rank.count(), TIMEOUT).expect("a group");
        rank.send(b"joined");
        assert_eq!((comm.size(), comm.nodes()), (256, 8));
        let all = comm.all_gather(&number(rank.id()).to_le_bytes()).expect("all_gather");
        assert_eq!(all, (0..256).map(u32::to_le_bytes).collect::<Vec<_>>());
    }) else {
        return;
    };
    cluster.recv_from_all(b"ready");
    let began = std::time::Instant::now();
    (0..cluster.count()).for_each(|rank| cluster.send(rank, b"begin"));
    cluster.recv_from_all(b"joined");
    wholemem_testkit::report(&format!("8 nodes of 32 ranks joined within {:?}", began.elapsed()));
    cluster.finish();
}

/// A fault of the network, of ranks or of nodes.
#[derive(Debug, Clone, Copy)]
enum Fault {
    Kill(usize),
    KillNode(usize),
    StopNode(usize),
    /// Packets from a node to another are lost.
    CutOneWay(usize, usize),
    Cut(usize, usize),
}

impl Fault {
    fn inject(self, cluster: &mut Cluster) {
        match self {
            Self::Kill(rank) => cluster.kill(rank),
            Self::KillNode(node) => cluster.kill_node(node),
            Self::StopNode(node) => cluster.stop_node(node),
            Self::CutOneWay(from, to) => cluster.cut(from, to),
            Self::Cut(a, b) => cluster.cut_between(a, b),
        }
    }

    fn end(self, cluster: &Cluster) {
        match self {
            Self::Kill(_) | Self::KillNode(_) => {}
            Self::StopNode(node) => cluster.continue_node(node),
            Self::CutOneWay(a, b) | Self::Cut(a, b) => cluster.heal_between(a, b),
        }
    }

    /// Returns the ranks that are killed or stopped.
    fn victims(self, cluster: &Cluster) -> Vec<usize> {
        match self {
            Self::Kill(rank) => vec![rank],
            Self::KillNode(node) | Self::StopNode(node) => cluster.ranks_of(node).collect(),
            Self::CutOneWay(..) | Self::Cut(..) => Vec::new(),
        }
    }

    /// Checks the error of a rank that is no victim.
    fn check(self, cluster: &Cluster, rank: usize, error: &str) {
        let words: Vec<_> = error.split(' ').collect();
        let named: Vec<usize> = words[1..].iter().filter_map(|word| word.parse().ok()).collect();
        let victims = self.victims(cluster);
        let names_a_victim = named.iter().any(|named| victims.contains(named));
        let is_right = match (self, words[0]) {
            // The fault came before the rank had joined.
            (Self::CutOneWay(..) | Self::Cut(..), "joining") => !named.is_empty(),
            (_, "joining") | (Self::Kill(_) | Self::KillNode(_), "lost") => names_a_victim,
            (Self::StopNode(node), "silent") => named[0] == node,
            (Self::CutOneWay(a, b) | Self::Cut(a, b), "silent") => named[0] == a || named[0] == b,
            _ => false,
        };
        assert!(is_right, "{self:?}: rank {rank} reported: {error}");
    }
}

/// Injects a fault while the ranks of a group make calls, checks the error of each of them, ends the fault, and checks that
/// the living ranks form a new group.
fn fault(test: &str, ranks_per_node: &[usize], fault: Fault) {
    let Some(mut cluster) = Cluster::of(ranks_per_node).parameter(ids()).start(test, |rank| {
        let parameter = rank.parameter();
        let (first, second) = parameter.split_once(' ').expect("two ids");
        let root = SocketAddr::new(v4(rank), 4711);
        let comm = join(root, first, rank.id(), rank.count(), TIMEOUT).expect("a group");
        comm.barrier().expect("all ranks take part");
        rank.send(b"ready");
        // A barrier may finish on the side that still receives messages.
        let error = std::iter::repeat_with(|| comm.barrier()).find_map(Result::err).expect("a fault");
        assert_eq!(comm.check(), Err(error.clone()));
        rank.send(describe(&error).as_bytes());
        drop(comm);
        join_second_group(rank, second);
    }) else {
        return;
    };
    cluster.recv_from_all(b"ready");
    fault.inject(&mut cluster);
    check_outcome(cluster, fault);
}

/// Checks the errors of the ranks after a fault, and that the living ranks form a new group when it has ended.
fn check_outcome(cluster: Cluster, fault: Fault) {
    let victims = fault.victims(&cluster);
    let others: Vec<_> = (0..cluster.count()).filter(|rank| !victims.contains(rank)).collect();
    for rank in &others {
        let error = String::from_utf8(cluster.recv(*rank)).expect("a text");
        fault.check(&cluster, *rank, &error);
    }
    fault.end(&cluster);
    let mut living = others;
    if let Fault::StopNode(_) = fault {
        // The group has ended for the ranks that were stopped, too.
        for rank in victims {
            let error = String::from_utf8(cluster.recv(rank)).expect("a text");
            assert!(!error.starts_with("other"), "{fault:?}: rank {rank} reported: {error}");
            living.push(rank);
        }
        living.sort_unstable();
    }
    check_second_group(&cluster, &living);
    cluster.finish();
}

#[test]
fn a_killed_rank_is_reported_on_all_nodes() {
    fault(test_name!(), &[2, 2, 2], Fault::Kill(3));
}

#[test]
fn a_killed_leader_is_reported_on_all_nodes() {
    fault(test_name!(), &[2, 2, 2], Fault::Kill(2));
}

#[test]
fn a_killed_rank_0_is_reported_on_all_nodes() {
    fault(test_name!(), &[1, 3], Fault::Kill(0));
}

#[test]
fn the_death_of_all_ranks_of_a_node_is_reported_on_the_others() {
    fault(test_name!(), &[2, 2, 2], Fault::KillNode(1));
}

#[test]
fn a_stopped_node_is_named_on_the_others() {
    fault(test_name!(), &[2, 2, 2], Fault::StopNode(2));
}

#[test]
fn the_stopped_node_of_rank_0_is_named_on_the_others() {
    fault(test_name!(), &[2, 2], Fault::StopNode(0));
}

#[test]
fn a_cut_link_ends_the_group_on_both_sides() {
    fault(test_name!(), &[2, 2, 2], Fault::Cut(0, 1));
}

#[test]
fn a_link_that_is_cut_towards_rank_0_ends_the_group_on_both_sides() {
    fault(test_name!(), &[1, 3], Fault::CutOneWay(1, 0));
}

#[test]
fn a_link_that_is_cut_from_rank_0_ends_the_group_on_both_sides() {
    fault(test_name!(), &[2, 2], Fault::CutOneWay(0, 1));
}

/// The operation number `n` of a sequence that all ranks make.
fn some_operation(comm: &Bootstrap, n: u64) -> Result<(), Error> {
    match n % 4 {
        0 => comm.barrier(),
        1 => comm.all_gather(&[7; 3000]).map(drop),
        2 => comm.all_to_allv(&vec![&[7; 5000][..]; comm.size() as usize]).map(drop),
        _ => comm.agree(Ok(())).map(drop),
    }
}

fn random_fault(random: u64) -> Fault {
    let pick = |from: u64| usize::try_from(random / 8 % from).expect("small");
    match random % 6 {
        0 => Fault::Kill(pick(6)),
        1 => Fault::KillNode(pick(3)),
        2 => Fault::StopNode(pick(3)),
        // Leaders are connected to rank 0 only: other links have no traffic.
        3 => Fault::CutOneWay(0, 1 + pick(2)),
        4 => Fault::CutOneWay(1 + pick(2), 0),
        _ => Fault::Cut(0, 1 + pick(2)),
    }
}

#[test]
fn every_rank_reports_a_fault_at_a_random_moment_and_a_new_group_can_be_made() {
    let cases = if wholemem_testkit::exhaustive() { 500 } else { 20 };
    // A rank gets its parameter from the test, and does not print the seed again.
    let seed = if wholemem_testkit::Ranks::is_rank() { 0 } else { seed() };
    for case in 0..cases {
        let random = seed.wrapping_add(case).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(17);
        let started = Cluster::of(&[2, 2, 2]).parameter(ids()).start(test_name!(), |rank| {
            // A first group starts threads and raises limits before the census.
            drop(Bootstrap::local(2).expect("a group"));
            let before = open_fds();
            let parameter = rank.parameter();
            let (first, second) = parameter.split_once(' ').expect("two ids");
            rank.send(b"ready");
            assert_eq!(rank.recv(), b"begin");
            let root = SocketAddr::new(v4(rank), 4711);
            let failed = |comm: &Bootstrap| (0..).find_map(|n| some_operation(comm, n).err());
            let error = match join(root, first, rank.id(), rank.count(), 4 * SILENCE) {
                Err(error) => error,
                Ok(comm) => failed(&comm).expect("a fault"),
            };
            rank.send(describe(&error).as_bytes());
            assert_eq!(open_fds(), before, "no descriptor is left");
            join_second_group(rank, second);
        });
        let Some(mut cluster) = started else { return };
        cluster.recv_from_all(b"ready");
        (0..6).for_each(|rank| cluster.send(rank, b"begin"));
        // The moment of the fault is random.
        std::thread::sleep(Duration::from_micros(random / 64 % 100_000));
        let fault = random_fault(random);
        fault.inject(&mut cluster);
        check_outcome(cluster, fault);
    }
}

/// Measures small operations between two nodes, beside round trips of a TCP connection whose both ends block. The rounds
/// alternate.
#[test]
fn small_operations_beside_round_trips_of_tcp() {
    let Some(cluster) = Cluster::of(&[1, 1]).parameter(ids()).start(test_name!(), |rank| {
        let parameter = rank.parameter();
        let (id, _) = parameter.split_once(' ').expect("two ids");
        let comm =
            join(SocketAddr::new(v4(rank), 4711), id, rank.id(), rank.count(), TIMEOUT).expect("a group");
        let raw = round_trip::Connection::create(rank);
        let mut medians = [Vec::new(), Vec::new(), Vec::new()];
        for _ in 0..7 {
            medians[0].push(round_trip::median(|| comm.barrier().expect("a barrier")));
            comm.barrier().expect("a barrier");
            medians[1].push(round_trip::median(|| drop(comm.all_gather(&[7; 64]).expect("all_gather"))));
            comm.barrier().expect("a barrier");
            medians[2].push(round_trip::median(|| raw.round_trip()));
            comm.barrier().expect("a barrier");
        }
        let [barrier, all_gather, raw] = medians.map(|mut of| {
            of.sort();
            of[of.len() / 2]
        });
        let ratio = |of: Duration| of.as_secs_f64() / raw.as_secs_f64();
        rank.send(
            format!(
                "barrier {barrier:?}, all_gather of 64 bytes {all_gather:?}, blocking TCP round trip {raw:?}: {:.2} and {:.2} of it",
                ratio(barrier),
                ratio(all_gather)
            )
            .as_bytes(),
        );
    }) else {
        return;
    };
    for rank in 0..2 {
        let text = String::from_utf8(cluster.recv(rank)).expect("a text");
        wholemem_testkit::report(&format!("rank {rank} of 2 nodes: {text}"));
    }
    assert!(cluster.counters(0).received > 7 * round_trip::ROUNDS as u64 * 64);
    cluster.finish();
}
