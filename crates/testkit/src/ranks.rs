//! A test that runs as several processes: the test binary starts itself again as rank n.
//!
//! ```text
//!   cargo test ── the_test (the harness)
//!                   ├─ the_test as rank 0 ──┐
//!                   ├─ the_test as rank 1 ──┤  a packet socket between each two of them
//!                   └─ the_test as rank 2 ──┘
//! ```
//!
//! What it keeps true: every rank is a new program, not a forked copy; all of them are dead and reaped when the test
//! ends, also when it fails or is killed; a test that hangs is ended by the watchdog, and the output of every rank is
//! shown. Ranks have as standard input the socket through which they get the sockets to their peers.

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

const TEST: &str = "WHOLEMEM_TEST";
const RANK: &str = "WHOLEMEM_TEST_RANK";
const PARENT: &str = "WHOLEMEM_TEST_PARENT";
const PARAMETER: &str = "WHOLEMEM_TEST_PARAMETER";
const APART: &str = "WHOLEMEM_TEST_APART";
const PATIENCE: &str = "WHOLEMEM_TEST_SECONDS";

/// A rank's last word.
const DONE: &[u8] = b"done";

/// How long a test may take before the watchdog ends it. Far above what any takes: it catches hangs, not slowness.
const DEFAULT_PATIENCE: u64 = 300;

/// The name of the test function this stands in, as the test binary knows it.
#[macro_export]
macro_rules! test_name {
    () => {{
        fn here() {}
        let name = ::std::any::type_name_of_val(&here);
        let name = name.strip_suffix("::here").unwrap_or(name).trim_end_matches("::{{closure}}");
        name.split_once("::").map_or(name, |(_crate, test)| test)
    }};
}

/// How many processes a test runs as, and what becomes of them.
#[derive(Debug)]
pub struct Ranks {
    count: usize,
    killed: Vec<usize>,
    users: BTreeMap<usize, u32>,
    variables: BTreeMap<OsString, OsString>,
    parameter: String,
    apart: Vec<usize>,
    rooted: Vec<usize>,
    patience: Deadline,
}

impl Ranks {
    /// A test of `count` ranks.
    #[must_use]
    pub fn of(count: usize) -> Self {
        let (killed, users, variables) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
        let (parameter, apart, rooted) = (String::new(), Vec::new(), Vec::new());
        Self { count, killed, users, variables, parameter, apart, rooted, patience: patience() }
    }

    /// A rank that is to be killed in the course of the test. It is a failure if it is not.
    #[must_use]
    pub fn killed(mut self, rank: usize) -> Self {
        self.killed.push(rank);
        self
    }

    /// A rank that runs as another user. Only root can start one.
    #[must_use]
    pub fn as_user(mut self, rank: usize, user: u32) -> Self {
        self.users.insert(rank, user);
        self
    }

    /// An environment variable of every rank.
    #[must_use]
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.variables.insert(name.into(), value.into());
        self
    }

    /// Whether this process is a rank already.
    #[must_use]
    pub fn is_rank() -> bool {
        std::env::var_os(TEST).is_some()
    }

    /// A text that every rank is given, so that one test can run several times, each time as another case.
    #[must_use]
    pub fn parameter(mut self, parameter: impl Into<String>) -> Self {
        self.parameter = parameter.into();
        self
    }

    /// A rank that runs in PID and network namespaces of its own.
    #[must_use]
    pub fn apart(mut self, rank: usize) -> Self {
        self.apart.push(rank);
        self
    }

    /// A rank that is another user, and root of a user namespace of its own.
    #[must_use]
    pub fn as_root_within(mut self, rank: usize, user: u32) -> Self {
        self.rooted.push(rank);
        self.as_user(rank, user)
    }

    /// Whether a rank can be root of a user namespace here, as that user. In a rank one already is.
    #[must_use]
    pub fn can_be_root_within(user: u32) -> bool {
        let tried = || {
            let program = std::env::current_exe().ok()?;
            let mut command = rooted(program);
            command.arg("--list").uid(user).gid(user).stdout(Stdio::null()).stderr(Stdio::null());
            command.status().ok().filter(ExitStatus::success)
        };
        std::env::var_os(TEST).is_some() || tried().is_some()
    }

    /// Whether ranks can run in namespaces of their own here. In a rank they already do.
    #[must_use]
    pub fn can_be_apart() -> bool {
        let tried = || unshare("true").stderr(Stdio::null()).status().is_ok_and(|status| status.success());
        std::env::var_os(TEST).is_some() || tried()
    }

    /// Ends the test after this long, instead of minutes: to test the watchdog itself.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = Deadline::after(patience);
        self
    }

    /// Whether ranks can run as another user here. In a rank they already do.
    #[must_use]
    pub fn can_change_user() -> bool {
        Self::is_rank() || rustix::process::geteuid().is_root()
    }

    /// Runs `body` in every rank. `test` is [`test_name!`] of the test function, which does nothing else.
    ///
    /// # Panics
    /// When a rank fails, or does not end, or one that was to be killed was not.
    pub fn run(self, test: &str, body: impl FnOnce(&Rank)) {
        if std::env::var(TEST).as_deref() == Ok(test) {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                let rank = Rank::join();
                body(&rank);
                rank.harness.send(DONE, &[], patience()).expect("the harness lives");
            }));
            // This process is a rank: the rest of the test function is the harness's.
            std::process::exit(if outcome.is_ok() { 0 } else { 101 });
        }
        let mut crew = Crew::start(&self, test);
        crew.introduce();
        let failure = crew.watch(&self);
        crew.end();
        if let Some(failure) = failure {
            panic!("{failure}\n{}", crew.output());
        }
    }
}

/// The processes of a test, as the harness sees them.
struct Crew {
    members: Vec<Member>,
}

struct Member {
    child: Child,
    pidfd: PidFd,
    socket: PacketSocket,
    output: File,
    status: Option<ExitStatus>,
}

impl Crew {
    fn start(ranks: &Ranks, test: &str) -> Self {
        // Whatever goes wrong from here on, those already started are ended by the drop of this.
        let mut crew = Self { members: Vec::new() };
        for rank in 0..ranks.count {
            crew.members.push(Member::start(rank, ranks, test));
        }
        crew
    }

    /// Gives each two ranks a socket between them, and all of them everybody's process id.
    fn introduce(&self) {
        let count = self.members.len();
        let mut sockets: Vec<Vec<(u64, OwnedFd)>> = (0..count).map(|_| Vec::new()).collect();
        for low in 0..count {
            for high in low + 1..count {
                let (a, b) = PacketSocket::pair().expect("a socket pair can be had");
                sockets[low].push((high as u64, a.into()));
                sockets[high].push((low as u64, b.into()));
            }
        }
        let pids: Vec<u8> = self.members.iter().flat_map(|member| member.child.id().to_le_bytes()).collect();
        for (member, sockets) in self.members.iter().zip(&sockets) {
            let tagged: Vec<_> = sockets.iter().map(|(peer, fd)| (*peer, fd.as_fd())).collect();
            // A rank that died already is for `watch` to tell of.
            let _ = member
                .socket
                .send_tagged(&tagged, patience())
                .and_then(|()| member.socket.send(&pids, &[], patience()));
        }
    }

    /// Waits for all ranks; at the first failure, or when patience ends, says what happened.
    fn watch(&mut self, ranks: &Ranks) -> Option<String> {
        loop {
            let waiting: Vec<_> =
                self.members.iter().enumerate().filter(|(_, member)| member.status.is_none()).collect();
            if waiting.is_empty() {
                return None;
            }
            let mut polls: Vec<_> =
                waiting.iter().map(|(_, member)| PollFd::new(&member.pidfd, PollFlags::IN)).collect();
            let left =
                ranks.patience.remaining().map(|left| left.try_into().expect("a time that was asked for"));
            match rustix::event::poll(&mut polls, left.as_ref()) {
                Err(rustix::io::Errno::INTR) => continue,
                answer => answer.expect("pidfds can be polled"),
            };
            let ready = waiting.iter().zip(&polls).filter(|(_, poll)| !poll.revents().is_empty());
            let ready: Vec<_> = ready.map(|((rank, _), _)| *rank).collect();
            if ready.is_empty() {
                let hung: Vec<_> = waiting.iter().map(|(rank, _)| *rank).collect();
                return Some(format!("the watchdog ended the test: ranks {hung:?} did not end"));
            }
            for rank in ready {
                let member = &mut self.members[rank];
                let status = member.child.wait().expect("a child can be waited for");
                member.status = Some(status);
                let killed = status.signal() == Some(9);
                match ranks.killed.contains(&rank) {
                    true if !killed => {
                        return Some(format!("rank {rank} was to be killed, and ended with {status}"));
                    }
                    false if !status.success() => return Some(format!("rank {rank} failed: {status}")),
                    false if !member.is_done() => {
                        return Some(format!("rank {rank} ended without running the test"));
                    }
                    _ => {}
                }
            }
        }
    }

    /// Ends whoever is left, and waits until they are gone.
    fn end(&mut self) {
        for member in self.members.iter_mut().filter(|member| member.status.is_none()) {
            let _ = member.child.kill();
            member.status = member.child.wait().ok();
        }
    }

    fn output(&mut self) -> String {
        let outputs = self.members.iter_mut().enumerate().map(|(rank, member)| {
            let mut text = String::new();
            let _ = member.output.rewind().and_then(|()| member.output.read_to_string(&mut text));
            format!("--- rank {rank} ({:?})\n{text}", member.status)
        });
        outputs.collect()
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.end();
    }
}

impl Member {
    /// Whether it said that it came to the end of its body.
    fn is_done(&self) -> bool {
        let mut word = [0; 16];
        self.socket.recv(&mut word, Deadline::NOW).is_ok_and(|len| &word[..len] == DONE)
    }

    fn start(rank: usize, ranks: &Ranks, test: &str) -> Self {
        let (here, there) = PacketSocket::pair().expect("a socket pair can be had");
        let output = rustix::fs::memfd_create("output", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
        let output = File::from(output);
        let copy = || Stdio::from(output.try_clone().expect("a descriptor can be had"));
        // Through /proc, so that a user who may not read the build folder can run it too.
        let elsewhere = |unshare: fn(PathBuf) -> Command| {
            let mut command = unshare(std::env::current_exe().expect("this program has a name"));
            command.env(APART, "1");
            command
        };
        let mut command = if ranks.apart.contains(&rank) {
            elsewhere(unshare)
        } else if ranks.rooted.contains(&rank) {
            elsewhere(rooted)
        } else {
            Command::new("/proc/self/exe")
        };
        command
            .args([test, "--exact", "--nocapture", "--test-threads=1"])
            .env(TEST, test)
            .env(RANK, rank.to_string())
            .env(PARENT, std::process::id().to_string())
            .env(PARAMETER, &ranks.parameter)
            // One heap, so that a census is not told of others coming and going.
            .env("MALLOC_ARENA_MAX", "1")
            .envs(&ranks.variables)
            .stdin(OwnedFd::from(there))
            .stdout(copy())
            .stderr(copy());
        if let Some(&user) = ranks.users.get(&rank) {
            command.uid(user).gid(user);
        }
        let child = command.spawn().expect("this program can be started again");
        let pidfd = PidFd::open(child.id()).expect("a child that was not waited for has a pidfd");
        Self { child, pidfd, socket: here, output, status: None }
    }
}

/// A command that runs `program` in PID and network namespaces of its own.
fn unshare(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new("unshare");
    if !rustix::process::geteuid().is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    command.args(["--net", "--pid", "--fork", "--kill-child", "--"]).arg(program);
    command
}

/// A command that runs `program` as root of a user namespace of its own.
fn rooted(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--fork", "--kill-child", "--"]).arg(program);
    command
}

pub(crate) fn patience() -> Deadline {
    let seconds = std::env::var(PATIENCE).ok().and_then(|text| text.parse().ok());
    Deadline::after(Duration::from_secs(seconds.unwrap_or(DEFAULT_PATIENCE)))
}

/// This process, as one rank of a test.
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
        // In a PID namespace of its own a rank cannot see its parent; `unshare` ends it with itself.
        if std::env::var_os(APART).is_none() {
            die_with_parent(number(PARENT)).expect("the harness lives");
        }
        let rank = usize::try_from(number(RANK)).expect("a small number");
        let stdin = std::io::stdin().as_fd().try_clone_to_owned().expect("a descriptor can be had");
        let harness = PacketSocket::adopt(stdin).expect("the harness's socket");
        let peers = harness.recv_tagged(1024, patience()).expect("sockets of the peers");
        let peers = peers.into_iter().map(|(peer, fd)| {
            (usize::try_from(peer).expect("a rank"), PacketSocket::adopt(fd).expect("a packet socket"))
        });
        let peers = peers.collect();
        let mut pids = [0; 4096];
        let len = harness.recv(&mut pids, patience()).expect("everybody's process id");
        let pids =
            pids[..len].chunks_exact(4).map(|pid| u32::from_le_bytes(pid.try_into().expect("four bytes")));
        Self { rank, harness, peers, pids: pids.collect() }
    }

    /// Which rank this is.
    #[must_use]
    pub fn id(&self) -> usize {
        self.rank
    }

    /// The text that [`Ranks::parameter`] gave.
    #[must_use]
    pub fn parameter(&self) -> String {
        std::env::var(PARAMETER).unwrap_or_default()
    }

    /// The process id of a rank.
    #[must_use]
    pub fn pid(&self, rank: usize) -> u32 {
        self.pids[rank]
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.pids.len()
    }

    /// The socket to another rank.
    ///
    /// # Panics
    /// When there is no such other rank.
    #[must_use]
    pub fn peer(&self, rank: usize) -> &PacketSocket {
        self.peers.get(&rank).expect("another rank of this test")
    }

    /// Sends a packet to another rank.
    ///
    /// # Panics
    /// When it cannot be sent.
    pub fn send(&self, rank: usize, bytes: &[u8], fds: &[std::os::fd::BorrowedFd<'_>]) {
        self.peer(rank).send(bytes, fds, patience()).expect("a packet can be sent");
    }

    /// Waits for a packet from another rank.
    ///
    /// # Panics
    /// When none comes.
    #[must_use]
    pub fn recv(&self, rank: usize) -> (Vec<u8>, Vec<OwnedFd>) {
        let mut buffer = vec![0; wholemem_os::packet::MAX_PACKET];
        let room = wholemem_os::packet::MAX_FDS;
        let (len, fds) =
            self.peer(rank).recv_with_fds(&mut buffer, room, patience()).expect("a packet comes");
        buffer.truncate(len);
        (buffer, fds)
    }

    /// Waits until every rank is here.
    ///
    /// # Panics
    /// When one does not come.
    pub fn barrier(&self) {
        self.barrier_with(&self.peers.keys().copied().collect::<Vec<_>>());
    }

    /// Waits until these other ranks are here, and they for this one.
    ///
    /// # Panics
    /// When one does not come.
    pub fn barrier_with(&self, others: &[usize]) {
        for peer in others {
            self.send(*peer, b"here", &[]);
        }
        for peer in others {
            assert_eq!(self.recv(*peer).0, b"here", "rank {peer} is at the barrier");
        }
    }

    /// Kills another rank with `SIGKILL`, and waits until it is dead.
    ///
    /// # Panics
    /// When it cannot be killed.
    pub fn kill(&self, rank: usize) {
        let process = PidFd::open(self.pids[rank]).expect("the other rank lives");
        process.kill().expect("the other rank can be killed");
        assert_eq!(process.wait_exit(patience()), Ok(true), "rank {rank} died");
    }

    /// Waits for what never comes: for a rank that is to be killed.
    ///
    /// # Panics
    /// When the harness's patience ends first.
    pub fn wait_to_be_killed(&self) -> ! {
        let (_kept, silent) = PacketSocket::pair().expect("a socket pair can be had");
        panic!("rank {} was not killed: {:?}", self.rank, silent.recv(&mut [0], patience()));
    }
}
