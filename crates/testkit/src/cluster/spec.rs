//! [`ClusterSpec`]: configures and starts the nodes and ranks of a test.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use wholemem_os::{Deadline, PacketSocket};

use super::message::{NodeSetUp, Request};
use super::network::{self, MAX_NODES, Network};
use super::process::{NodeCommand, NodeSocket, contents, memory_file};
use super::rank::{RANK, RANKS_PER_NODE};
use super::{Cluster, ClusterRank, RunningRank, node};
use crate::ranks::{PARAMETER, TEST, default_deadline};

/// What a process of a test on several nodes is: [`ROLE_NODE`] or [`ROLE_RANK`].
const ROLE: &str = "WHOLEMEM_TEST_CLUSTER";
const ROLE_NODE: &str = "node";
const ROLE_RANK: &str = "rank";

/// The command that runs a program in the namespaces of a node.
const UNSHARE: [&str; 8] = ["unshare", "--net", "--pid", "--mount", "--uts", "--ipc", "--kill-child", "--"];

/// Configures the nodes and ranks as which a test runs.
#[derive(Debug)]
#[must_use]
pub struct ClusterSpec {
    ranks_per_node: Vec<usize>,
    variables: BTreeMap<OsString, OsString>,
    parameter: String,
    visible: Vec<OsString>,
    deadline: Deadline,
}

impl ClusterSpec {
    pub(super) fn new(ranks_per_node: &[usize]) -> Self {
        assert!(ranks_per_node.len() <= MAX_NODES, "at most {MAX_NODES} nodes");
        Self {
            ranks_per_node: ranks_per_node.to_vec(),
            variables: BTreeMap::new(),
            parameter: String::new(),
            visible: Vec::new(),
            deadline: default_deadline(),
        }
    }

    /// Sets an environment variable for every rank process.
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.variables.insert(name.into(), value.into());
        self
    }

    /// Sets a text that every rank receives, so that one test function can run several cases.
    pub fn parameter(mut self, parameter: impl Into<String>) -> Self {
        self.parameter = parameter.into();
        self
    }

    /// Keeps a folder of the machine visible in all nodes, although it is in `/tmp`.
    pub fn visible(mut self, folder: impl Into<OsString>) -> Self {
        self.visible.push(folder.into());
        self
    }

    /// Replaces the default timeout of the test, to test the watchdog itself.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.deadline = Deadline::after(timeout);
        self
    }

    /// Starts the nodes and the ranks, which run `body`. `test` is [`test_name!`](crate::test_name) of the calling test
    /// function. That function calls `start` only once, and before anything else that a rank should not do: in a rank,
    /// the call does not return.
    ///
    /// Returns `None` and reports that the test was skipped if this machine does not allow namespaces.
    ///
    /// # Panics
    /// If a rank cannot be started; if namespaces are not allowed and `CI` is `true`.
    #[must_use]
    pub fn start(self, test: &str, body: impl FnOnce(&ClusterRank)) -> Option<Cluster> {
        if std::env::var(TEST).as_deref() == Ok(test) {
            match std::env::var(ROLE).as_deref() {
                Ok(ROLE_NODE) => node::serve(),
                Ok(ROLE_RANK) => run_rank(body),
                _ => panic!("a test of ranks on one node starts ranks on several nodes"),
            }
        }
        wholemem_os::descriptors::raise_limit();
        match self.start_nodes(test) {
            Ok(mut cluster) => {
                cluster.ranks = self.start_ranks(&cluster, test);
                Some(cluster)
            }
            Err(reason) => {
                crate::skipped_unless_ci(&format!("cannot make nodes of namespaces: {reason}"));
                None
            }
        }
    }

    /// Starts the switch and the nodes, and connects them. The error is the reason why this machine does not allow it.
    fn start_nodes(&self, test: &str) -> Result<Cluster, String> {
        for program in ["ip", "tc"] {
            let found = Command::new(program).arg("-V").stdout(Stdio::null()).status();
            found.map_err(|error| {
                format!("cannot run `{program}`: {error}; hint: apt-get install iproute2")
            })?;
        }
        let set_up = |node: Option<usize>| {
            Request::SetUp(NodeSetUp {
                hostname: node.map_or_else(|| "switch".to_owned(), network::hostname).into(),
                hosts: network::hosts(self.ranks_per_node.len()).into(),
                visible: self.visible_folders(),
                is_node: node.is_some(),
            })
        };
        let (socket, there) = PacketSocket::pair().map_err(|error| error.to_string())?;
        let output = memory_file();
        let switch = start_switch(test, there.into(), &output)?;
        // From here on, dropping the cluster ends the switch.
        let mut cluster = Cluster {
            ranks: Vec::new(),
            ranks_per_node: self.ranks_per_node.clone(),
            nodes: Vec::new(),
            network: Some(Network::new(NodeSocket::new(socket))),
            switch,
            deadline: self.deadline,
        };
        let failed = |error: String| format!("{error}\n{}", contents(&output));
        cluster.network().switch.request(&set_up(None), &[]).map_err(failed)?;
        let mut pids = Vec::new();
        for number in 0..self.ranks_per_node.len() {
            let (socket, there) = PacketSocket::pair().map_err(|error| error.to_string())?;
            let program = std::env::current_exe().map_err(|error| error.to_string())?;
            let [unshare, options @ ..] = UNSHARE;
            let command = NodeCommand::new(&cluster.network().switch, unshare).args(options);
            let command = command.arg(program).args(arguments(test)).env(ROLE, ROLE_NODE).env(TEST, test);
            let process = command.stdin(OwnedFd::from(there)).try_spawn()?;
            let socket = NodeSocket::new(socket);
            let answer = socket.request(&set_up(Some(number)), &[]);
            answer.map_err(|error| format!("{error}\n{}{}", process.stdout(), process.stderr()))?;
            pids.push(process.pid());
            cluster.nodes.push(socket);
        }
        cluster.network().connect(&cluster.nodes, &pids)?;
        Ok(cluster)
    }

    /// Returns the folders that stay visible in `/tmp`: those of the test, and that of the test program.
    fn visible_folders(&self) -> Vec<OsString> {
        let program = std::env::current_exe().ok();
        let build = program.as_deref().and_then(Path::parent).and_then(Path::parent);
        self.visible.iter().cloned().chain(build.map(Into::into)).collect()
    }

    fn start_ranks(&self, cluster: &Cluster, test: &str) -> Vec<RunningRank> {
        let ranks_per_node: Vec<_> = self.ranks_per_node.iter().map(ToString::to_string).collect();
        let start = |rank: usize| {
            let (socket, there) = PacketSocket::pair().expect("cannot create a socket pair");
            let mut command = cluster
                .command(cluster.node_of(rank), "/proc/self/exe")
                .args(arguments(test))
                .env(ROLE, ROLE_RANK)
                .env(TEST, test)
                .env(RANK, rank.to_string())
                .env(RANKS_PER_NODE, ranks_per_node.join(","))
                .env(PARAMETER, &self.parameter)
                .stdin(OwnedFd::from(there));
            for (name, value) in &self.variables {
                command = command.env(name, value);
            }
            RunningRank { process: command.spawn(), socket, is_killed: false }
        };
        (0..self.ranks_per_node.iter().sum()).map(start).collect()
    }
}

/// Starts the switch, which holds the network that connects the nodes.
fn start_switch(test: &str, socket: OwnedFd, output: &File) -> Result<Child, String> {
    let [unshare, options @ ..] = UNSHARE;
    let mut command = Command::new(unshare);
    if !rustix::process::geteuid().is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    let copy = || output.try_clone().map_err(|error| error.to_string());
    command
        .args(options)
        .arg(std::env::current_exe().map_err(|error| error.to_string())?)
        .args(arguments(test))
        .env(ROLE, ROLE_NODE)
        .env(TEST, test)
        .stdin(socket)
        .stdout(copy()?)
        .stderr(copy()?);
    command.spawn().map_err(|error| format!("cannot run `unshare`: {error}"))
}

/// The arguments with which the test program runs one test.
fn arguments(test: &str) -> [&str; 4] {
    [test, "--exact", "--nocapture", "--test-threads=1"]
}

#[expect(clippy::exit, reason = "the rest of the test function is not for this process")]
fn run_rank(body: impl FnOnce(&ClusterRank)) -> ! {
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let rank = ClusterRank::join();
        body(&rank);
        rank.finish();
    }));
    std::process::exit(if outcome.is_ok() { 0 } else { 101 })
}
