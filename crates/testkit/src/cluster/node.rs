//! The first process of a node: it prepares the node's namespaces, starts processes in them, and reaps them.
//!
//! It is PID 1 of the node. When the test that started it closes the socket to it, or dies, it exits, and the kernel
//! kills all other processes of the node. The switch, to which all nodes are connected, is the same program.

#![allow(
    unsafe_code,
    reason = "unblocks signals between fork and exec; sends a signal to all processes of a node"
)]

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::mount::{MountFlags, mount, mount_bind};
use rustix::process::WaitOptions;
use wholemem_os::packet::MAX_PACKET;
use wholemem_os::pidfd::Signal;
use wholemem_os::{Deadline, PacketSocket, PidFd};

use super::message::{NodeSetUp, Request, Spawn};

/// The first byte of the answer to a request that has succeeded. For a started process, its id follows.
pub(super) const OK: u8 = b'=';

/// The time after which orphaned processes are reaped at the latest.
const REAP_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// The first process of a node, with the processes that it has started.
struct NodeProcesses {
    socket: PacketSocket,
    /// The processes that it has started by their ids, with the pipes for their exit status.
    started: BTreeMap<i32, (PidFd, File)>,
}

/// Serves the requests of the test until it closes the socket, which is the stdin of this process.
#[expect(clippy::exit, reason = "the rest of the test function is not for this process")]
pub(super) fn serve() -> ! {
    let stdin = io::stdin().as_fd().try_clone_to_owned().expect("cannot duplicate a descriptor");
    let socket = PacketSocket::adopt(stdin).expect("the socket of the test");
    let mut node = NodeProcesses { socket, started: BTreeMap::new() };
    let mut buffer = vec![0; MAX_PACKET];
    loop {
        let mut polls = vec![PollFd::new(&node.socket, PollFlags::IN)];
        polls.extend(node.started.values().map(|(pidfd, _)| PollFd::new(pidfd, PollFlags::IN)));
        // An interrupted wait is like one that has timed out.
        let _ = rustix::event::poll(&mut polls, Some(&REAP_INTERVAL));
        let has_request = !polls[0].revents().is_empty();
        drop(polls);
        node.reap();
        if has_request {
            let Ok((len, fds)) = node.socket.recv_with_fds(&mut buffer, 4, Deadline::NEVER) else {
                std::process::exit(0);
            };
            let answer = Request::decode(&buffer[..len]).ok_or_else(|| "a malformed request".to_owned());
            let answer = answer.and_then(|request| node.handle(request, fds));
            let sent = match &answer {
                Ok(Some((pid, pidfd))) => {
                    let answer = [&[OK], pid.to_string().as_bytes()].concat();
                    node.socket.send(&answer, &[pidfd.as_fd()], Deadline::NEVER)
                }
                Ok(None) => node.socket.send(&[OK], &[], Deadline::NEVER),
                Err(error) => node.socket.send(error.as_bytes(), &[], Deadline::NEVER),
            };
            if sent.is_err() {
                std::process::exit(0);
            }
        }
    }
}

impl NodeProcesses {
    fn handle(&mut self, request: Request, fds: Vec<OwnedFd>) -> Result<Option<(u32, PidFd)>, String> {
        match request {
            Request::SetUp(set_up) => set_up_node(&set_up).map(|()| None),
            Request::Spawn(spawn) => self.spawn(&spawn, fds).map(Some),
            Request::SignalAll(signal) => self.signal_all(signal).map(|()| None),
        }
    }

    fn spawn(&mut self, spawn: &Spawn, fds: Vec<OwnedFd>) -> Result<(u32, PidFd), String> {
        let [stdin, stdout, stderr, status]: [OwnedFd; 4] =
            fds.try_into().map_err(|_| "a request without its descriptors".to_owned())?;
        let (program, arguments) = spawn.command.split_first().ok_or("a command without a program")?;
        let mut command = Command::new(program);
        command
            .args(arguments)
            .envs(spawn.variables.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::from(stdin))
            .stdout(Stdio::from(stdout))
            .stderr(Stdio::from(stderr));
        let unblock = || wholemem_os::signal::unblock_all().map_err(io::Error::other);
        // SAFETY: the closure only calls `sigprocmask`, which is allowed between fork and exec.
        unsafe { command.pre_exec(unblock) };
        let failed = |error: &dyn std::fmt::Display| format!("cannot start `{}`: {error}", program.display());
        let child = command.spawn().map_err(|error| failed(&error))?;
        let pidfd = PidFd::open(child.id()).map_err(|error| failed(&error))?;
        let copy = pidfd.as_fd().try_clone_to_owned().map_err(|error| failed(&error))?;
        let copy = PidFd::adopt(copy).map_err(|error| failed(&error))?;
        let pid = i32::try_from(child.id()).map_err(|error| failed(&error))?;
        self.started.insert(pid, (copy, File::from(status)));
        Ok((child.id(), pidfd))
    }

    /// Reaps all children that have exited, and reports the status of those that the test has started.
    fn reap(&mut self) {
        while let Ok(Some((pid, status))) = rustix::process::waitpid(None, WaitOptions::NOHANG) {
            if let Some((_, mut pipe)) = self.started.remove(&pid.as_raw_nonzero().get()) {
                // The test may have dropped the other end.
                let _ = pipe.write_all(&status.as_raw().to_le_bytes());
            }
        }
    }

    fn signal_all(&mut self, signal: i32) -> Result<(), String> {
        // SAFETY: `kill` has no memory operands. The id -1 means all processes of this PID namespace but PID 1, which is
        // this process: `serve` runs nowhere else.
        let result = unsafe { libc::kill(-1, signal) };
        let error = io::Error::last_os_error();
        // There may be no other process.
        if result == -1 && error.raw_os_error() != Some(libc::ESRCH) {
            return Err(format!("cannot signal the processes of the node: {error}"));
        }
        if signal == Signal::STOP.as_raw() {
            while !other_threads("/proc").iter().all(|state| matches!(state, b'T' | b't' | b'Z' | b'X')) {
                std::thread::yield_now();
            }
        }
        if signal == Signal::KILL.as_raw() {
            while !other_threads("/proc").is_empty() {
                self.reap();
                std::thread::yield_now();
            }
        }
        Ok(())
    }
}

/// Returns the states of all threads of the other processes in a PID namespace.
fn other_threads(proc: &str) -> Vec<u8> {
    let numbers = |folder: &Path| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.filter(|entry| entry.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit))
    };
    let others = numbers(Path::new(proc)).filter(|entry| entry.file_name() != OsStr::new("1"));
    let threads = others.flat_map(|process| numbers(&process.path().join("task")).collect::<Vec<_>>());
    // A thread that has exited meanwhile has no file.
    let stats = threads.filter_map(|thread| fs::read(thread.path().join("stat")).ok());
    // The state is after the name, which is in parentheses and may itself contain some.
    stats.filter_map(|stat| stat.get(stat.iter().rposition(|byte| *byte == b')')? + 2).copied()).collect()
}

fn set_up_node(set_up: &NodeSetUp) -> Result<(), String> {
    let failed = |what: &'static str| move |error: rustix::io::Errno| format!("cannot {what}: {error}");
    let none = MountFlags::empty();
    mount("proc", "/proc", "proc", none, None).map_err(failed("mount /proc"))?;
    mount("sysfs", "/sys", "sysfs", none, None).map_err(failed("mount /sys"))?;
    rustix::system::sethostname(set_up.hostname.as_encoded_bytes()).map_err(failed("set the hostname"))?;
    if !set_up.is_node {
        return Ok(());
    }
    // Folders in /tmp are opened before another file system covers them.
    let open = |folder: &std::ffi::OsString| File::open(folder).map(|file| (folder.clone(), file));
    let visible: io::Result<Vec<_>> = set_up.visible.iter().map(open).collect();
    let visible = visible.map_err(|error| format!("cannot open a folder: {error}"))?;
    for folder in ["/dev/shm", "/tmp"] {
        let mode = c"mode=1777";
        mount("tmpfs", folder, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, Some(mode))
            .map_err(|errno| format!("cannot mount {folder}: {errno}"))?;
    }
    for (folder, file) in visible {
        use std::os::fd::AsRawFd;
        if Path::new(&folder).starts_with("/tmp") {
            fs::create_dir_all(&folder).map_err(|error| format!("cannot create a folder: {error}"))?;
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            mount_bind(path, &folder).map_err(failed("mount a folder in /tmp"))?;
        }
    }
    let hosts = "/tmp/.hosts";
    fs::write(hosts, set_up.hosts.as_encoded_bytes())
        .map_err(|error| format!("cannot write hosts: {error}"))?;
    mount_bind(hosts, "/etc/hosts").map_err(failed("mount /etc/hosts"))
}
