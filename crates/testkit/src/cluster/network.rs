//! The network of the nodes: a bridge, with a veth pair to each node; cut links, limited rates and counters.
//!
//! A link is cut by a filter at the end of the path, where the bridge sends to the destination: it drops the frames with
//! the source's hardware address. So the sender does not notice, as with a broken cable between two switches.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::{Mutex, PoisonError};

use super::process::{NodeCommand, NodeSocket};

/// The name of a node's interface.
pub const INTERFACE: &str = "eth0";

/// The maximum number of nodes: each has a number from 1 in the last byte of its addresses.
pub(super) const MAX_NODES: usize = 200;

/// The numbers of bytes that crossed a node's link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkCounters {
    /// Bytes that the node sent.
    pub sent: u64,
    /// Bytes that the node received.
    pub received: u64,
}

/// The switch, to which all nodes are connected.
#[derive(Debug)]
pub(super) struct Network {
    pub(super) switch: NodeSocket,
    /// The cut links, from a node to another.
    cut: Mutex<BTreeSet<(usize, usize)>>,
}

pub(super) fn v4(node: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, 0, number(node))
}

pub(super) fn v6(node: usize) -> Ipv6Addr {
    Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, number(node).into())
}

pub(super) fn hostname(node: usize) -> String {
    format!("n{node}")
}

/// Returns the contents of `/etc/hosts` of all nodes.
pub(super) fn hosts(nodes: usize) -> String {
    let lines =
        (0..nodes).map(|node| format!("{} {name}\n{} {name}\n", v4(node), v6(node), name = hostname(node)));
    let local = "127.0.0.1 localhost\n::1 localhost\n".to_owned();
    std::iter::once(local).chain(lines).collect()
}

fn number(node: usize) -> u8 {
    u8::try_from(node + 1).expect("fewer nodes than `MAX_NODES`")
}

fn hardware_address(node: usize) -> String {
    format!("02:77:00:00:00:{:02x}", number(node))
}

fn port(node: usize) -> String {
    format!("p{node}")
}

impl Network {
    pub(super) fn new(switch: NodeSocket) -> Self {
        Self { switch, cut: Mutex::new(BTreeSet::new()) }
    }

    /// Creates the bridge and the links to all nodes. `pids` are the ids of a process in each node's network namespace.
    pub(super) fn connect(&self, nodes: &[NodeSocket], pids: &[u32]) -> Result<(), String> {
        let mut links =
            "link set lo up\nlink add br0 type bridge mcast_snooping 0\nlink set br0 up\n".to_owned();
        let mut filters = String::new();
        for (node, pid) in pids.iter().enumerate() {
            let (port, address) = (port(node), hardware_address(node));
            links += &format!(
                "link add {port} type veth peer name {INTERFACE} address {address} netns {pid}\n\
                 link set {port} master br0 addrgenmode none\nlink set {port} up\n"
            );
            filters += &format!("qdisc add dev {port} clsact\n");
        }
        run(&self.switch, &["ip", "-batch", "-"], &links)?;
        run(&self.switch, &["tc", "-batch", "-"], &filters)?;
        for (node, socket) in nodes.iter().enumerate() {
            let mut lines = format!(
                "link set lo up\nlink set {INTERFACE} addrgenmode none\naddr add {}/24 dev {INTERFACE}\naddr add {}/64 dev {INTERFACE} nodad\n\
                 link set {INTERFACE} up\n",
                v4(node),
                v6(node)
            );
            // The nodes know each other's hardware addresses, so that a cut link does not become an error of the
            // neighbour discovery at the sender.
            for other in (0..nodes.len()).filter(|other| *other != node) {
                for address in [v4(other).to_string(), v6(other).to_string()] {
                    let hardware = hardware_address(other);
                    lines +=
                        &format!("neigh add {address} lladdr {hardware} dev {INTERFACE} nud permanent\n");
                }
            }
            run(socket, &["ip", "-batch", "-"], &lines)?;
        }
        Ok(())
    }

    /// Drops all frames from a node to another.
    pub(super) fn cut(&self, from: usize, to: usize) {
        let mut cut = self.cut.lock().unwrap_or_else(PoisonError::into_inner);
        if cut.insert((from, to)) {
            // A program for packets: loads the last four bytes of the source's hardware address, and drops the frame
            // (TC_ACT_SHOT, 2) if they are those of the node; otherwise the next filter decides (TC_ACT_UNSPEC, -1).
            let program = format!("4,32 0 0 8,21 0 1 {},6 0 0 2,6 0 0 {},", number(from), u32::MAX);
            let (port, preference) = (port(to), (from + 1).to_string());
            let filter = ["tc", "filter", "add", "dev", &port, "egress", "pref", &preference];
            let filter = [&filter[..], &["bpf", "da", "bytecode", &program]].concat();
            run(&self.switch, &filter, "").expect("cannot cut a link");
        }
    }

    /// Stops dropping frames from a node to another.
    pub(super) fn heal(&self, from: usize, to: usize) {
        let mut cut = self.cut.lock().unwrap_or_else(PoisonError::into_inner);
        if cut.remove(&(from, to)) {
            let (port, preference) = (port(to), (from + 1).to_string());
            let filter = ["tc", "filter", "del", "dev", &port, "egress", "pref", &preference];
            run(&self.switch, &filter, "").expect("cannot heal a link");
        }
    }

    /// Limits the rate of a node's link in both directions, or removes the limit.
    pub(super) fn shape(&self, node: usize, socket: &NodeSocket, bits_per_second: Option<u64>) {
        for (at, device) in [(&self.switch, port(node)), (socket, INTERFACE.to_owned())] {
            let result = match bits_per_second {
                Some(rate) => {
                    // The bucket holds ten milliseconds of traffic, and at least one packet of maximum length.
                    let burst = (rate / 800).max(64 << 10).to_string();
                    let rate = format!("{rate}bit");
                    let qdisc = ["tc", "qdisc", "replace", "dev", &device, "root", "tbf"];
                    let limit = ["rate", &rate, "burst", &burst, "latency", "50ms"];
                    run(at, &[&qdisc[..], &limit].concat(), "")
                }
                None => run(at, &["tc", "qdisc", "del", "dev", &device, "root"], ""),
            };
            result.expect("cannot limit the rate of a link");
        }
    }

    pub(super) fn counters(&self, node: usize) -> LinkCounters {
        let path = format!("/sys/class/net/{}/statistics", port(node));
        let files = [format!("{path}/rx_bytes"), format!("{path}/tx_bytes")];
        let text = run(&self.switch, &["cat", &files[0], &files[1]], "").expect("cannot read counters");
        let numbers: Vec<_> = text.lines().map(|line| line.parse().expect("a number")).collect();
        // What the port of the switch receives, the node has sent.
        LinkCounters { sent: numbers[0], received: numbers[1] }
    }
}

/// Runs a program in a node and returns its output, or its error.
fn run(node: &NodeSocket, command: &[impl AsRef<OsStr>], input: &str) -> Result<String, String> {
    let (program, arguments) = command.split_first().expect("a program");
    let mut process = NodeCommand::new(node, program).args(arguments).input(input).try_spawn()?;
    let status = process.wait();
    if status.success() {
        return Ok(process.stdout());
    }
    let command: Vec<_> = command.iter().map(|text| text.as_ref().to_string_lossy()).collect();
    Err(format!("`{}`: {status}\n{input}{}", command.join(" "), process.stderr()))
}
