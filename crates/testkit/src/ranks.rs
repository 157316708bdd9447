//! Runs a test as several processes: the test binary starts itself again once for each rank.
//!
//! ```text
//!   cargo test ── the_test (the harness)
//!                   ├─ the_test as rank 0 ──┐
//!                   ├─ the_test as rank 1 ──┤  a packet socket between each two of them
//!                   └─ the_test as rank 2 ──┘
//! ```
//!
//! Guarantees: every rank is a new program, not a forked copy. All ranks are dead and reaped when the test ends, even
//! if it fails or is killed. A watchdog ends a test that hangs, and the output of every rank is shown. The standard
//! input of a rank is a socket through which it receives the sockets to its peers.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use wholemem_os::pidfd::die_with_parent;
use wholemem_os::{Deadline, PacketSocket, PidFd};

pub(crate) const TEST: &str = "WHOLEMEM_TEST";
const RANK: &str = "WHOLEMEM_TEST_RANK";
const PARENT: &str = "WHOLEMEM_TEST_PARENT";
pub(crate) const PARAMETER: &str = "WHOLEMEM_TEST_PARAMETER";
const IN_NAMESPACE: &str = "WHOLEMEM_TEST_APART";
const TIMEOUT: &str = "WHOLEMEM_TEST_SECONDS";

/// The last message that a rank sends to the test harness.
pub(crate) const DONE: &[u8] = b"done";

/// The default timeout of a test in seconds. The value is far above the time that any test takes: it detects hangs, not
/// slowness.
const DEFAULT_TIMEOUT: u64 = 300;

/// Returns the name of the enclosing test function, in the form that the test binary accepts as a filter.
#[macro_export]
macro_rules! test_name {
    () => {{
        fn here() {}
        let name = ::std::any::type_name_of_val(&here);
        let name = name.strip_suffix("::here").unwrap_or(name).trim_end_matches("::{{closure}}");
        name.split_once("::").map_or(name, |(_crate, test)| test)
    }};
}

/// Configures the rank processes as which a test runs.
#[derive(Debug)]
pub struct Ranks {
    count: usize,
    killed: Vec<usize>,
    users: BTreeMap<usize, u32>,
    variables: BTreeMap<OsString, OsString>,
    parameter: String,
    in_namespaces: Vec<usize>,
    user_namespace_roots: Vec<usize>,
    deadline: Deadline,
}

impl Ranks {
    /// Configures a test of `count` ranks.
    #[must_use]
    pub fn of(count: usize) -> Self {
        let (killed, users, variables) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
        let (parameter, in_namespaces, user_namespace_roots) = (String::new(), Vec::new(), Vec::new());
        Self {
            count,
            killed,
            users,
            variables,
            parameter,
            in_namespaces,
            user_namespace_roots,
            deadline: default_deadline(),
        }
    }

    /// Expects a rank to be killed during the test. The test fails if the rank is not killed.
    #[must_use]
    pub fn killed(mut self, rank: usize) -> Self {
        self.killed.push(rank);
        self
    }

    /// Runs a rank as another user. Only root can do this.
    #[must_use]
    pub fn as_user(mut self, rank: usize, user: u32) -> Self {
        self.users.insert(rank, user);
        self
    }

    /// Sets an environment variable for every rank process.
    #[must_use]
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.variables.insert(name.into(), value.into());
        self
    }

    /// Returns true if this process is a rank of a test.
    #[must_use]
    pub fn is_rank() -> bool {
        std::env::var_os(TEST).is_some()
    }

    /// Sets a text that every rank receives, so that one test function can run several cases.
    #[must_use]
    pub fn parameter(mut self, parameter: impl Into<String>) -> Self {
        self.parameter = parameter.into();
        self
    }

    /// Runs a rank in PID and network namespaces of its own.
    #[must_use]
    pub fn in_own_namespaces(mut self, rank: usize) -> Self {
        self.in_namespaces.push(rank);
        self
    }

    /// Runs a rank as another user, who is root in a user namespace of the rank's own.
    #[must_use]
    pub fn as_user_namespace_root(mut self, rank: usize, user: u32) -> Self {
        self.user_namespace_roots.push(rank);
        self.as_user(rank, user)
    }

    /// Returns true if a rank can run as `user` and be root of a user namespace. In a rank process, the result is
    /// always true.
    #[must_use]
    pub fn can_be_user_namespace_root(user: u32) -> bool {
        let attempt = || {
            let program = std::env::current_exe().ok()?;
            let mut command = unshare_user(program);
            command.arg("--list").uid(user).gid(user).stdout(Stdio::null()).stderr(Stdio::null());
            command.status().ok().filter(ExitStatus::success)
        };
        std::env::var_os(TEST).is_some() || attempt().is_some()
    }

    /// Returns true if ranks can run in namespaces of their own on this machine. In a rank process, the result is
    /// always true.
    #[must_use]
    pub fn can_use_namespaces() -> bool {
        let attempt = || unshare("true").stderr(Stdio::null()).status().is_ok_and(|status| status.success());
        std::env::var_os(TEST).is_some() || attempt()
    }

    /// Replaces the default timeout of the test, to test the watchdog itself.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.deadline = Deadline::after(timeout);
        self
    }

    /// Returns true if ranks can run as another user on this machine. In a rank process, the result is always true.
    #[must_use]
    pub fn can_change_user() -> bool {
        Self::is_rank() || rustix::process::geteuid().is_root()
    }

    /// Runs `body` in every rank process. `test` is [`test_name!`] of the calling test function. That function must do
    /// nothing else.
    ///
    /// # Panics
    /// If a rank fails or does not end, or a rank that should be killed is not.
    pub fn run(self, test: &str, body: impl FnOnce(&Rank)) {
        if std::env::var(TEST).as_deref() == Ok(test) {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                let rank = Rank::join();
                body(&rank);
                rank.harness.send(DONE, &[], default_deadline()).expect("the harness is not alive");
            }));
            // A rank process exits here, because only the harness runs the rest of the test function.
            std::process::exit(if outcome.is_ok() { 0 } else { 101 });
        }
        let mut processes = RankProcesses::start(&self, test);
        processes.connect_peers();
        let failure = processes.watch(&self);
        processes.end();
        if let Some(failure) = failure {
            panic!("{failure}\n{}", processes.output());
        }
    }
}

/// The rank processes of a test, as seen by the test harness that started them.
struct RankProcesses {
    processes: Vec<RankProcess>,
}

struct RankProcess {
    child: Child,
    pidfd: PidFd,
    socket: PacketSocket,
    output: File,
    status: Option<ExitStatus>,
}

impl RankProcesses {
    fn start(ranks: &Ranks, test: &str) -> Self {
        // If starting a process fails, dropping `processes` ends those that were already started.
        let mut processes = Self { processes: Vec::new() };
        for rank in 0..ranks.count {
            processes.processes.push(RankProcess::start(rank, ranks, test));
        }
        processes
    }

    /// Sends a pair of connected sockets to each pair of ranks, and the process ids of all ranks to every rank.
    fn connect_peers(&self) {
        let count = self.processes.len();
        let mut sockets: Vec<Vec<(u64, OwnedFd)>> = (0..count).map(|_| Vec::new()).collect();
        for low in 0..count {
            for high in low + 1..count {
                let (a, b) = PacketSocket::pair().expect("cannot create a socket pair");
                sockets[low].push((high as u64, a.into()));
                sockets[high].push((low as u64, b.into()));
            }
        }
        let pids: Vec<u8> =
            self.processes.iter().flat_map(|process| process.child.id().to_le_bytes()).collect();
        for (process, sockets) in self.processes.iter().zip(&sockets) {
            let tagged: Vec<_> = sockets.iter().map(|(peer, fd)| (*peer, fd.as_fd())).collect();
            // An error is ignored: if the rank has already died, `watch` reports it.
            let _ = process
                .socket
                .send_tagged(&tagged, default_deadline())
                .and_then(|()| process.socket.send(&pids, &[], default_deadline()));
        }
    }

    /// Waits for all ranks to exit. Returns a message at the first failure or when the timeout expires.
    fn watch(&mut self, ranks: &Ranks) -> Option<String> {
        loop {
            let waiting: Vec<_> =
                self.processes.iter().enumerate().filter(|(_, process)| process.status.is_none()).collect();
            if waiting.is_empty() {
                return None;
            }
            let mut polls: Vec<_> =
                waiting.iter().map(|(_, process)| PollFd::new(&process.pidfd, PollFlags::IN)).collect();
            let left =
                ranks.deadline.remaining().map(|left| left.try_into().expect("the timeout fits a timespec"));
            match rustix::event::poll(&mut polls, left.as_ref()) {
                Err(rustix::io::Errno::INTR) => continue,
                result => result.expect("cannot poll pidfds"),
            };
            let ready = waiting.iter().zip(&polls).filter(|(_, poll)| !poll.revents().is_empty());
            let ready: Vec<_> = ready.map(|((rank, _), _)| *rank).collect();
            if ready.is_empty() {
                let hung: Vec<_> = waiting.iter().map(|(rank, _)| *rank).collect();
                return Some(format!("the watchdog ended the test: ranks {hung:?} did not finish"));
            }
            for rank in ready {
                let process = &mut self.processes[rank];
                let status = process.child.wait().expect("cannot wait for a child");
                process.status = Some(status);
                let killed = status.signal() == Some(9);
                match ranks.killed.contains(&rank) {
                    true if !killed => {
                        return Some(format!("rank {rank} should have been killed but ended with {status}"));
                    }
                    false if !status.success() => return Some(format!("rank {rank} failed: {status}")),
                    false if !process.is_done() => {
                        return Some(format!("rank {rank} ended without running the test"));
                    }
                    _ => {}
                }
            }
        }
    }

    /// Kills the rank processes that still run, and reaps them.
    fn end(&mut self) {
        for process in self.processes.iter_mut().filter(|process| process.status.is_none()) {
            let _ = process.child.kill();
            process.status = process.child.wait().ok();
        }
    }

    fn output(&mut self) -> String {
        let outputs = self.processes.iter_mut().enumerate().map(|(rank, process)| {
            let mut text = String::new();
            let _ = process.output.rewind().and_then(|()| process.output.read_to_string(&mut text));
            format!("--- rank {rank} ({:?})\n{text}", process.status)
        });
        outputs.collect()
    }
}

impl Drop for RankProcesses {
    fn drop(&mut self) {
        self.end();
    }
}

impl RankProcess {
    /// Returns true if the rank process has reported that its test body ended.
    fn is_done(&self) -> bool {
        let mut message = [0; 16];
        self.socket.recv(&mut message, Deadline::NOW).is_ok_and(|len| &message[..len] == DONE)
    }

    fn start(rank: usize, ranks: &Ranks, test: &str) -> Self {
        let (here, there) = PacketSocket::pair().expect("cannot create a socket pair");
        let output = rustix::fs::memfd_create("output", rustix::fs::MemfdFlags::CLOEXEC)
            .expect("cannot create a memfd");
        let output = File::from(output);
        let copy = || Stdio::from(output.try_clone().expect("cannot duplicate a descriptor"));
        // The program is started as `/proc/self/exe`, which also works for a user who cannot read the build folder.
        let in_namespace = |unshare: fn(PathBuf) -> Command| {
            let mut command = unshare(std::env::current_exe().expect("cannot find the path of this program"));
            command.env(IN_NAMESPACE, "1");
            command
        };
        let mut command = if ranks.in_namespaces.contains(&rank) {
            in_namespace(unshare)
        } else if ranks.user_namespace_roots.contains(&rank) {
            in_namespace(unshare_user)
        } else {
            Command::new("/proc/self/exe")
        };
        command
            .args([test, "--exact", "--nocapture", "--test-threads=1"])
            .env(TEST, test)
            .env(RANK, rank.to_string())
            .env(PARENT, std::process::id().to_string())
            .env(PARAMETER, &ranks.parameter)
            // A rank process gets only one malloc arena, so that new arenas do not appear as mappings in a census.
            .env("MALLOC_ARENA_MAX", "1")
            .envs(&ranks.variables)
            .stdin(OwnedFd::from(there))
            .stdout(copy())
            .stderr(copy());
        if let Some(&user) = ranks.users.get(&rank) {
            command.uid(user).gid(user);
        }
        let child = command.spawn().expect("cannot start this program again");
        let pidfd = PidFd::open(child.id()).expect("cannot open a pidfd of a child");
        Self { child, pidfd, socket: here, output, status: None }
    }
}

/// Returns a command that runs `program` in PID and network namespaces of its own.
fn unshare(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new("unshare");
    if !rustix::process::geteuid().is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    command.args(["--net", "--pid", "--fork", "--kill-child", "--"]).arg(program);
    command
}

/// Returns a command that runs `program` as root of a user namespace of its own.
fn unshare_user(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--fork", "--kill-child", "--"]).arg(program);
    command
}

pub(crate) fn default_deadline() -> Deadline {
    let seconds = std::env::var(TIMEOUT).ok().and_then(|text| text.parse().ok());
    Deadline::after(Duration::from_secs(seconds.unwrap_or(DEFAULT_TIMEOUT)))
}

/// The number of a rank process in its test, and its connections to the harness and to the other ranks.
#[derive(Debug)]
pub struct Rank {
    rank: usize,
    harness: PacketSocket,
    peers: BTreeMap<usize, PacketSocket>,
    pids: Vec<u32>,
}

impl Rank {
    fn join() -> Self {
        let number = |name: &str| {
            std::env::var(name).ok().and_then(|text| text.parse().ok()).expect("set by the harness")
        };
        // A rank in a PID namespace of its own cannot see its parent. In that case `unshare`, which is killed with its
        // parent, kills the rank.
        if std::env::var_os(IN_NAMESPACE).is_none() {
            die_with_parent(number(PARENT)).expect("the harness is not alive");
        }
        let rank = usize::try_from(number(RANK)).expect("a small number");
        let stdin = std::io::stdin().as_fd().try_clone_to_owned().expect("cannot duplicate a descriptor");
        let harness = PacketSocket::adopt(stdin).expect("the harness's socket");
        let peers = harness.recv_tagged(1024, default_deadline()).expect("sockets of the peers");
        let peers = peers.into_iter().map(|(peer, fd)| {
            (usize::try_from(peer).expect("a rank"), PacketSocket::adopt(fd).expect("a packet socket"))
        });
        let peers = peers.collect();
        let mut pids = [0; 4096];
        let len = harness.recv(&mut pids, default_deadline()).expect("the process ids of all ranks");
        let pids =
            pids[..len].chunks_exact(4).map(|pid| u32::from_le_bytes(pid.try_into().expect("four bytes")));
        Self { rank, harness, peers, pids: pids.collect() }
    }

    /// Returns the number of this rank.
    #[must_use]
    pub fn id(&self) -> usize {
        self.rank
    }

    /// Returns the text that the test has set with [`Ranks::parameter`].
    #[must_use]
    pub fn parameter(&self) -> String {
        std::env::var(PARAMETER).unwrap_or_default()
    }

    /// Returns the process id of a rank.
    #[must_use]
    pub fn pid(&self, rank: usize) -> u32 {
        self.pids[rank]
    }

    /// Returns the number of ranks in the test.
    #[must_use]
    pub fn count(&self) -> usize {
        self.pids.len()
    }

    /// Returns the socket that is connected to another rank.
    ///
    /// # Panics
    /// If there is no such rank.
    #[must_use]
    pub fn peer(&self, rank: usize) -> &PacketSocket {
        self.peers.get(&rank).expect("another rank of this test")
    }

    /// Sends a packet to another rank.
    ///
    /// # Panics
    /// If the packet cannot be sent.
    pub fn send(&self, rank: usize, bytes: &[u8], fds: &[std::os::fd::BorrowedFd<'_>]) {
        self.peer(rank).send(bytes, fds, default_deadline()).expect("cannot send a packet");
    }

    /// Receives a packet from another rank.
    ///
    /// # Panics
    /// If no packet arrives before the timeout.
    #[must_use]
    pub fn recv(&self, rank: usize) -> (Vec<u8>, Vec<OwnedFd>) {
        let mut buffer = vec![0; wholemem_os::packet::MAX_PACKET];
        let max_fds = wholemem_os::packet::MAX_FDS;
        let (len, fds) = self
            .peer(rank)
            .recv_with_fds(&mut buffer, max_fds, default_deadline())
            .expect("cannot receive a packet");
        buffer.truncate(len);
        (buffer, fds)
    }

    /// Waits until every rank of the test has called `barrier`.
    ///
    /// # Panics
    /// If a rank does not call it before the timeout.
    pub fn barrier(&self) {
        self.barrier_with(&self.peers.keys().copied().collect::<Vec<_>>());
    }

    /// Waits until each of the ranks `others` has called `barrier_with` with a list that contains this rank.
    ///
    /// # Panics
    /// If a rank does not call it before the timeout.
    pub fn barrier_with(&self, others: &[usize]) {
        for peer in others {
            self.send(*peer, b"here", &[]);
        }
        for peer in others {
            assert_eq!(self.recv(*peer).0, b"here", "rank {peer} is at the barrier");
        }
    }

    /// Kills another rank with `SIGKILL` and waits until it is dead.
    ///
    /// # Panics
    /// If it cannot be killed.
    pub fn kill(&self, rank: usize) {
        let process = PidFd::open(self.pids[rank]).expect("the other rank is not alive");
        process.kill().expect("cannot kill the other rank");
        assert_eq!(process.wait_exit(default_deadline()), Ok(true), "rank {rank} died");
    }

    /// Blocks until this rank is killed.
    ///
    /// # Panics
    /// If the timeout expires first.
    pub fn wait_to_be_killed(&self) -> ! {
        let (_open_end, idle) = PacketSocket::pair().expect("cannot create a socket pair");
        panic!("rank {} was not killed: {:?}", self.rank, idle.recv(&mut [0], default_deadline()));
    }
}
