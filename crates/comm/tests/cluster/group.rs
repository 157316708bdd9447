//! Groups of ranks that are on several nodes.

use std::net::SocketAddr;
use std::time::Duration;

use wholemem_comm::{Bootstrap, Error, Network, Rank, UniqueId};
use wholemem_os::Deadline;
use wholemem_testkit::{Cluster, ClusterRank};

/// The time after which a silent node is given up in these tests.
pub(crate) const SILENCE: Duration = Duration::from_secs(1);

pub(crate) fn number(of: usize) -> u32 {
    u32::try_from(of).expect("small")
}

pub(crate) fn join(
    root: SocketAddr,
    id: &str,
    rank: usize,
    size: usize,
    timeout: Duration,
) -> Result<Bootstrap, Error> {
    let network = Network::new(root).with_silence(SILENCE);
    let id: UniqueId = id.parse()?;
    let deadline = Deadline::after(timeout);
    Bootstrap::create_over(&network, &id, Rank(number(rank)), number(size), deadline)
}

/// Returns the kind of an error, and the ranks or the node that it names.
pub(crate) fn describe(error: &Error) -> String {
    let list = |ranks: &[Rank]| ranks.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    match error {
        Error::PeerLost { rank } => format!("lost {rank}"),
        Error::NodeTimeout { node, timeout: SILENCE, .. } => format!("silent {node}"),
        Error::Timeout { missing, joining: true, .. } => format!("joining {}", list(missing)),
        other => format!("other {other}"),
    }
}

pub(crate) fn open_fds() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("/proc is mounted").count()
}

/// Joins a group of the ranks that the test names.
pub(crate) fn join_second_group(rank: &ClusterRank, id: &str) {
    let message = String::from_utf8(rank.recv()).expect("a text");
    let (root, ranks) = message.split_once(' ').expect("an address and ranks");
    let ranks: Vec<usize> = ranks.split(' ').map(|rank| rank.parse().expect("a number")).collect();
    let own = ranks.iter().position(|of| *of == rank.id()).expect("a rank of the new group");
    let root = root.parse().expect("an address");
    let comm = join(root, id, own, ranks.len(), Duration::from_secs(60)).expect("a second group");
    let all = comm.all_gather(&number(rank.id()).to_le_bytes()).expect("all_gather");
    assert_eq!(all, ranks.iter().map(|rank| number(*rank).to_le_bytes()).collect::<Vec<_>>());
    rank.send(b"again");
}

/// Lets the living ranks of a test join a second group.
pub(crate) fn check_second_group(cluster: &Cluster, living: &[usize]) {
    let root = SocketAddr::new(cluster.v4(cluster.node_of(living[0])).into(), 4712);
    let ranks: Vec<_> = living.iter().map(ToString::to_string).collect();
    let message = format!("{root} {}", ranks.join(" "));
    living.iter().for_each(|rank| cluster.send(*rank, message.as_bytes()));
    for rank in living {
        assert_eq!(cluster.recv(*rank).escape_ascii().to_string(), "again", "rank {rank}");
    }
}
