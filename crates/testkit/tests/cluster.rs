//! Tests of the harness that runs tests as ranks on several nodes.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::process::CommandExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use wholemem_os::pidfd::Signal;
use wholemem_os::{Deadline, PidFd};
use wholemem_testkit::cluster::{INTERFACE, LinkCounters};
use wholemem_testkit::{Cluster, ClusterRank, Ranks, test_name};

const PORT: u16 = 7000;

/// A long datagram, which a cut link drops. The harness tests that it does not arrive by receiving the next one.
const LOST: &str = match str::from_utf8(&[b'x'; 1200]) {
    Ok(text) => text,
    Err(_) => panic!(),
};

fn bind(rank: &ClusterRank, is_v6: bool) -> UdpSocket {
    let address: IpAddr = if is_v6 { rank.v6(rank.node()).into() } else { rank.v4(rank.node()).into() };
    UdpSocket::bind((address, PORT)).unwrap()
}

/// Executes commands of the test: `to NODE TEXT` sends a datagram, `recv` receives one and tells its text to the test.
fn exchange_datagrams(rank: &ClusterRank, is_v6: bool) {
    let socket = bind(rank, is_v6);
    rank.send(b"bound");
    loop {
        let command = String::from_utf8(rank.recv()).unwrap();
        let words: Vec<_> = command.split(' ').collect();
        match words[..] {
            ["to", node, text] => {
                let node = node.parse().unwrap();
                let to: IpAddr = if is_v6 { rank.v6(node).into() } else { rank.v4(node).into() };
                assert_eq!(socket.send_to(text.as_bytes(), (to, PORT)).unwrap(), text.len());
                rank.send(b"sent");
            }
            ["recv"] => {
                let mut text = [0; 64];
                let (len, _) = socket.recv_from(&mut text).unwrap();
                rank.send(&text[..len]);
            }
            ["end"] => return,
            _ => panic!("{command}"),
        }
    }
}

/// Lets a rank send a datagram, and returns when it has been sent.
fn send(cluster: &Cluster, from: usize, to: usize, text: &str) {
    cluster.send(from, format!("to {to} {text}").as_bytes());
    assert_eq!(cluster.recv(from), b"sent");
}

/// Returns the next datagram of a rank.
fn recv(cluster: &Cluster, rank: usize) -> String {
    cluster.send(rank, b"recv");
    String::from_utf8(cluster.recv(rank)).unwrap()
}

fn end(cluster: Cluster) {
    (0..cluster.count()).for_each(|rank| cluster.send(rank, b"end"));
    cluster.finish();
}

#[test]
fn nodes_have_their_own_names_processes_interfaces_and_files() {
    let Some(cluster) = Cluster::of(&[1, 2]).start(test_name!(), |rank| {
        let node = rank.node();
        let hostname = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        assert_eq!(hostname.trim(), format!("n{node}"));
        let pids = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().file_name());
        let pids: Vec<u32> = pids.filter_map(|name| name.to_str()?.parse().ok()).collect();
        assert!(pids.contains(&1) && pids.contains(&std::process::id()), "{pids:?}");
        assert!(
            pids.len() <= 1 + rank.ranks_on(node),
            "only the processes of this node are visible: {pids:?}"
        );
        let interfaces = fs::read_dir("/sys/class/net").unwrap().map(|entry| entry.unwrap().file_name());
        let interfaces: BTreeSet<_> = interfaces.map(|name| name.into_string().unwrap()).collect();
        assert!(interfaces.contains(INTERFACE) && interfaces.contains("lo"), "{interfaces:?}");
        assert!(!interfaces.contains("p0"), "the interfaces of the switch are not visible: {interfaces:?}");
        assert_eq!((rank.nodes(), rank.count(), rank.ranks_on(1)), (2, 3, 2));
        assert_eq!((rank.node(), rank.local_rank()), [(0, 0), (1, 0), (1, 1)][rank.id()]);
        for folder in ["/dev/shm", "/tmp"] {
            fs::write(format!("{folder}/of-rank-{}", rank.id()), "").unwrap();
        }
        rank.send(b"written");
        assert_eq!(rank.recv(), b"list");
        for folder in ["/dev/shm", "/tmp"] {
            let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
            let mut names: Vec<_> = names.filter_map(|name| name.into_string().ok()).collect();
            names.retain(|name| name.starts_with("of-rank"));
            names.sort();
            let expected = if node == 0 { &["of-rank-0"][..] } else { &["of-rank-1", "of-rank-2"] };
            assert_eq!(names, expected, "{folder}");
        }
        // Names of nodes are resolved to their addresses.
        let resolved = std::net::ToSocketAddrs::to_socket_addrs(&("n1", 5)).unwrap();
        assert!(resolved.map(|address| address.ip()).any(|ip| ip == rank.v4(1)), "n1 has its address");
    }) else {
        return;
    };
    assert_eq!((cluster.nodes(), cluster.count(), cluster.ranks_of(1), cluster.node_of(2)), (2, 3, 1..3, 1));
    cluster.recv_from_all(b"written");
    (0..3).for_each(|rank| cluster.send(rank, b"list"));
    cluster.finish();
    assert!(!fs::exists("/dev/shm/of-rank-0").unwrap() && !fs::exists("/tmp/of-rank-0").unwrap());
}

#[test]
fn a_folder_in_tmp_is_visible_if_the_test_asks_for_it() {
    let test = test_name!();
    // Only the test itself makes the folder; the other processes get its path.
    let folder = (!Ranks::is_rank()).then(|| tempfile::tempdir_in("/tmp").unwrap());
    let path = folder.as_ref().map(|folder| folder.path().to_str().unwrap().to_owned()).unwrap_or_default();
    let spec = Cluster::of(&[1, 1]).visible(&path).parameter(&path);
    let Some(cluster) = spec.start(test, |rank| {
        fs::write(format!("{}/of-rank-{}", rank.parameter(), rank.id()), "text").unwrap();
        assert!(fs::read_dir("/tmp").unwrap().count() <= 4, "the rest of /tmp is hidden");
    }) else {
        return;
    };
    cluster.finish();
    assert!(
        fs::exists(format!("{path}/of-rank-0")).unwrap() && fs::exists(format!("{path}/of-rank-1")).unwrap()
    );
}

#[test]
fn counters_count_the_traffic_between_nodes() {
    const LEN: usize = 1 << 20;
    let Some(cluster) = Cluster::of(&[1, 1, 0]).start(test_name!(), |rank| {
        for to in [SocketAddr::from((rank.v4(1), PORT)), SocketAddr::from((rank.v6(1), PORT))] {
            if rank.id() == 1 {
                let listener = TcpListener::bind(to).unwrap();
                rank.send(b"listening");
                let mut bytes = Vec::new();
                listener.accept().unwrap().0.read_to_end(&mut bytes).unwrap();
                assert_eq!(bytes.len(), LEN);
                rank.send(b"received");
            } else {
                assert_eq!(rank.recv(), b"go");
                TcpStream::connect(to).unwrap().write_all(&[7; LEN]).unwrap();
            }
        }
    }) else {
        return;
    };
    for _ in 0..2 {
        assert_eq!(cluster.recv(1), b"listening");
        let before: Vec<_> = (0..3).map(|node| cluster.counters(node)).collect();
        cluster.send(0, b"go");
        assert_eq!(cluster.recv(1), b"received");
        let after: Vec<_> = (0..3).map(|node| cluster.counters(node)).collect();
        let grown = |node: usize| LinkCounters {
            sent: after[node].sent - before[node].sent,
            received: after[node].received - before[node].received,
        };
        assert!(grown(0).sent > LEN as u64 && grown(1).received > LEN as u64, "{before:?} {after:?}");
        assert!(grown(1).sent < LEN as u64 / 2 && grown(0).received < LEN as u64 / 2, "{before:?} {after:?}");
        assert!(grown(2).received < LEN as u64 / 2, "{before:?} {after:?}");
    }
    cluster.finish();
}

#[test]
fn a_cut_in_one_direction_stops_only_that_direction() {
    let Some(cluster) =
        Cluster::of(&[1, 1, 1]).start(test_name!(), |rank| exchange_datagrams(rank, rank.id() == 99))
    else {
        return;
    };
    cluster.recv_from_all(b"bound");
    cluster.cut(0, 1);
    let (sent, received) = (cluster.counters(0).sent, cluster.counters(1).received);
    (0..8).for_each(|_| send(&cluster, 0, 1, LOST));
    // The kernel sends a few short packets of its own.
    let len = 8 * LOST.len() as u64;
    assert!(cluster.counters(0).sent - sent > len, "the switch has received the datagrams");
    assert!(cluster.counters(1).received - received < len, "and has dropped them");
    // The other direction, and other nodes, are not cut.
    send(&cluster, 1, 0, "back");
    assert_eq!(recv(&cluster, 0), "back");
    send(&cluster, 0, 2, "third");
    assert_eq!(recv(&cluster, 2), "third");
    send(&cluster, 2, 1, "from-2");
    assert_eq!(recv(&cluster, 1), "from-2");
    // Datagrams on a link keep their order: the first that arrives after the cut is the first that was sent after it.
    cluster.heal(0, 1);
    send(&cluster, 0, 1, "healed");
    assert_eq!(recv(&cluster, 1), "healed");
    end(cluster);
}

#[test]
fn a_cut_in_both_directions_stops_both_until_it_is_healed() {
    for is_v6 in [false, true] {
        let Some(cluster) = Cluster::of(&[1, 1, 1])
            .parameter(if is_v6 { "v6" } else { "v4" })
            .start(test_name!(), |rank| exchange_datagrams(rank, rank.parameter() == "v6"))
        else {
            return;
        };
        cluster.recv_from_all(b"bound");
        // A second cut of the same link has no effect, and one `heal` is enough.
        cluster.isolate(1);
        cluster.cut_between(0, 1);
        for (from, to) in [(0, 1), (1, 0), (1, 2), (2, 1)] {
            let received = cluster.counters(to).received;
            (0..8).for_each(|_| send(&cluster, from, to, LOST));
            assert!(cluster.counters(to).received - received < 8 * LOST.len() as u64, "{from} to {to}");
        }
        send(&cluster, 0, 2, "others");
        assert_eq!(recv(&cluster, 2), "others");
        cluster.heal_between(0, 1);
        for (from, to) in [(0, 1), (1, 0)] {
            send(&cluster, from, to, "healed");
            assert_eq!(recv(&cluster, to), "healed");
        }
        cluster.rejoin(1);
        send(&cluster, 2, 1, "rejoined");
        assert_eq!(recv(&cluster, 1), "rejoined");
        end(cluster);
    }
}

#[test]
fn a_stopped_node_continues_where_it_was() {
    let Some(cluster) = Cluster::of(&[1, 2]).start(test_name!(), |rank| {
        rank.send(std::process::id().to_string().as_bytes());
        assert_eq!(rank.recv(), b"go");
        rank.send(b"went");
    }) else {
        return;
    };
    let pids: Vec<_> = (0..3).map(|rank| String::from_utf8(cluster.recv(rank)).unwrap()).collect();
    cluster.stop_node(1);
    (0..3).for_each(|rank| cluster.send(rank, b"go"));
    let states = |ranks: std::ops::Range<usize>| {
        let node = cluster.node_of(ranks.start);
        let files = ranks.map(|rank| format!("/proc/{}/stat", pids[rank]));
        let output = cluster.command(node, "cut").args(["-d", " ", "-f", "3"]).args(files).run();
        output.stdout.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(states(1..3), ["T", "T"]);
    assert_eq!(cluster.recv(0), b"went");
    cluster.continue_node(1);
    assert_eq!((cluster.recv(1), cluster.recv(2)), (b"went".to_vec(), b"went".to_vec()));
    cluster.finish();
}

#[test]
fn ranks_and_nodes_are_killed() {
    let Some(mut cluster) = Cluster::of(&[2, 2]).start(test_name!(), |rank| {
        rank.send(b"ready");
        if rank.id() == 0 {
            assert_eq!(rank.recv(), b"end");
        } else {
            rank.wait_to_be_killed();
        }
    }) else {
        return;
    };
    cluster.recv_from_all(b"ready");
    // Another process of the node dies with the node.
    let mut other = cluster.command(1, "sleep").arg("1000").spawn();
    cluster.kill(1);
    cluster.kill_node(1);
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&other.wait()), Some(9));
    // The node remains usable for other processes, which get its exit status and output.
    let output = cluster.command(1, "sh").args(["-c", "cat; echo no >&2; exit 7"]).input("text").run();
    assert_eq!((output.status.code(), &output.stdout[..], &output.stderr[..]), (Some(7), "text", "no\n"));
    cluster.send(0, b"end");
    cluster.finish();
}

#[test]
fn a_limited_rate_delays_traffic() {
    const LEN: u64 = 2 << 20;
    let Some(cluster) = Cluster::of(&[1, 1]).start(test_name!(), |rank| {
        for _ in 0..2 {
            if rank.id() == 1 {
                let listener = TcpListener::bind((rank.v4(1), PORT)).unwrap();
                rank.send(b"listening");
                let count = std::io::copy(&mut listener.accept().unwrap().0, &mut std::io::sink()).unwrap();
                assert_eq!(count, LEN);
                rank.send(b"received");
            } else {
                assert_eq!(rank.recv(), b"go");
                let bytes = vec![7; usize::try_from(LEN).unwrap()];
                TcpStream::connect((rank.v4(1), PORT)).unwrap().write_all(&bytes).unwrap();
            }
        }
    }) else {
        return;
    };
    cluster.shape(1, Some(40_000_000));
    assert_eq!(cluster.recv(1), b"listening");
    let start = Instant::now();
    cluster.send(0, b"go");
    assert_eq!(cluster.recv(1), b"received");
    // 2 MiB at 5 MB/s take 0.42 s, less what the token bucket lets through at once.
    assert!(start.elapsed() > Duration::from_millis(300), "{:?}", start.elapsed());
    // Without the limit the traffic passes too.
    cluster.shape(1, None);
    assert_eq!(cluster.recv(1), b"listening");
    cluster.send(0, b"go");
    assert_eq!(cluster.recv(1), b"received");
    cluster.finish();
}

/// Returns the panic message of a failing test.
fn failure(run: impl FnOnce()) -> String {
    let panic = catch_unwind(AssertUnwindSafe(run)).expect_err("the test succeeds");
    *panic.downcast::<String>().expect("the panic has no message")
}

#[test]
fn a_failing_rank_fails_the_test_with_its_output() {
    let mut is_skipped = false;
    let message = failure(|| {
        let Some(cluster) = Cluster::of(&[1, 1]).start(test_name!(), |rank| match rank.id() {
            0 => {}
            _ => panic!("intended by the test"),
        }) else {
            is_skipped = true;
            panic!("{}", String::new());
        };
        cluster.finish();
    });
    assert!(
        is_skipped
            || message.starts_with("rank 1 failed: exit status: 101") && message.contains("intended by"),
        "{message}"
    );
}

#[test]
fn the_watchdog_ends_a_hanging_test() {
    let mut is_skipped = false;
    let message = failure(|| {
        let spec = Cluster::of(&[1, 1]).timeout(Duration::from_millis(200));
        let Some(cluster) = spec.start(test_name!(), |rank| rank.wait_to_be_killed()) else {
            is_skipped = true;
            panic!("{}", String::new());
        };
        cluster.finish();
    });
    assert!(
        is_skipped || message.starts_with("the watchdog ended the test: rank 0 did not finish"),
        "{message}"
    );
}

/// Set in the process of a test that is killed.
const KILLED: &str = "WHOLEMEM_TEST_KILLED";

/// Returns the ids of all descendants of a process.
fn descendants(of: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{of}/task")).into_iter().flatten().flatten();
    let lists = tasks.map(|task| fs::read_to_string(task.path().join("children")).unwrap_or_default());
    let children: Vec<u32> = lists
        .flat_map(|list| list.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<_>>())
        .collect();
    children.iter().flat_map(|child| [vec![*child], descendants(*child)].concat()).collect()
}

/// Returns the network namespaces of all processes, and the interfaces of this one.
fn namespaces_and_interfaces() -> BTreeSet<String> {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let namespaces = processes.filter_map(|process| fs::read_link(process.path().join("ns/net")).ok());
    let namespaces = namespaces.map(|link| link.to_string_lossy().into_owned());
    let interfaces = fs::read_dir("/sys/class/net").unwrap().flatten();
    namespaces.chain(interfaces.map(|entry| entry.file_name().to_string_lossy().into_owned())).collect()
}

#[test]
fn a_killed_test_leaves_no_process_namespace_or_interface() {
    let test = test_name!();
    if std::env::var_os(KILLED).is_some() {
        // The test that is killed.
        let cluster = Cluster::of(&[2, 1]).start(test, |rank| {
            rank.send(b"ready");
            rank.wait_to_be_killed();
        });
        if let Some(cluster) = cluster {
            cluster.recv_from_all(b"ready");
            let _other = cluster.command(1, "sleep").arg("1000").spawn();
            println!("\nready");
            cluster.finish();
        }
        return;
    }
    let mut killed = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(KILLED, "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(killed.stdout.take().unwrap()).lines();
    if !lines.any(|line| line.unwrap() == "ready") {
        // It was skipped, and has said so.
        assert!(killed.wait().unwrap().success());
        return;
    }
    let processes = descendants(killed.id());
    // `unshare` and the first process of the switch and of two nodes, three ranks and `sleep`.
    assert_eq!(processes.len(), 2 * 3 + 3 + 1, "{processes:?}");
    let namespaces: BTreeSet<_> =
        processes.iter().map(|pid| fs::read_link(format!("/proc/{pid}/ns/net")).unwrap()).collect();
    assert_eq!(namespaces.len(), 3, "{namespaces:?}");
    let pidfds: Vec<_> = processes.iter().map(|pid| PidFd::open(*pid).unwrap()).collect();
    killed.kill().unwrap();
    killed.wait().unwrap();
    for (pid, pidfd) in processes.iter().zip(&pidfds) {
        assert_eq!(pidfd.wait_exit(Deadline::after(Duration::from_secs(60))), Ok(true), "process {pid}");
    }
    let left = namespaces_and_interfaces();
    for namespace in namespaces {
        assert!(!left.contains(namespace.to_str().unwrap()), "{namespace:?} {left:?}");
    }
    assert!(!left.contains("br0") && !left.contains("p0"), "{left:?}");
}

#[test]
fn dropping_the_cluster_ends_all_processes_of_the_nodes() {
    let Some(cluster) = Cluster::of(&[1, 1]).start(test_name!(), |rank| {
        rank.send(b"ready");
        rank.wait_to_be_killed();
    }) else {
        return;
    };
    cluster.recv_from_all(b"ready");
    // Other tests run concurrently and have processes of their own: only the children of this thread are listed.
    let children = fs::read_to_string("/proc/thread-self/children").unwrap();
    let children: Vec<u32> = children.split_whitespace().map(|pid| pid.parse().unwrap()).collect();
    let processes: Vec<_> = children.iter().flat_map(|pid| descendants(*pid)).collect();
    assert_eq!(processes.len(), 1 + 2 * 2 + 2, "{processes:?}");
    cluster.signal(1, Signal::STOP);
    let pidfds: Vec<_> = processes.iter().map(|pid| PidFd::open(*pid).unwrap()).collect();
    drop(cluster);
    assert!(pidfds.iter().all(|pidfd| pidfd.has_exited().unwrap()));
    assert_eq!(fs::read_to_string("/proc/thread-self/children").unwrap(), "");
}

#[test]
fn many_ranks_start_on_several_nodes() {
    let ranks = if wholemem_testkit::exhaustive() { 32 } else { 4 };
    let Some(cluster) = Cluster::of(&[ranks; 8]).start(test_name!(), |rank| {
        rank.send(format!("{} on {}", rank.id(), rank.node()).as_bytes());
    }) else {
        return;
    };
    for rank in 0..cluster.count() {
        assert_eq!(cluster.recv(rank), format!("{rank} on {}", rank / ranks).into_bytes());
    }
    cluster.finish();
}

#[test]
fn a_skipped_test_is_a_failure_if_ci_is_true() {
    for (ci, is_success) in [("true", false), ("false", true)] {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["ranks_and_nodes_are_killed", "--exact", "--nocapture", "--test-threads=1"])
            .env("CI", ci)
            // The programs that nodes need are not found.
            .env("PATH", "/nowhere")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.success(), is_success, "{text}");
        assert!(text.contains("cannot make nodes of namespaces: cannot run `ip`"), "{text}");
        assert_eq!(text.contains("SKIPPED"), is_success, "{text}");
    }
}

#[test]
fn nodes_are_made_without_root_in_a_user_namespace() {
    const UNPRIVILEGED_ID: u32 = 65534;
    let can = Ranks::can_change_user() && Ranks::can_be_user_namespace_root(UNPRIVILEGED_ID);
    if !can {
        return wholemem_testkit::skipped(
            "only root can test this, where another user may create user namespaces",
        );
    }
    // `CI=true` makes a skipped test a failure.
    let status = Command::new(std::env::current_exe().unwrap())
        .args([
            "a_cut_in_one_direction_stops_only_that_direction",
            "--exact",
            "--nocapture",
            "--test-threads=1",
        ])
        .env("CI", "true")
        .uid(UNPRIVILEGED_ID)
        .gid(UNPRIVILEGED_ID)
        .stdout(Stdio::null())
        .status();
    assert!(status.unwrap().success());
}
