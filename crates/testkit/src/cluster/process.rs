//! Processes in a node: [`NodeCommand`] starts one, [`NodeProcess`] signals it and waits for it.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{PipeReader, Read, Seek};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::{Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags};
use wholemem_os::pidfd::Signal;
use wholemem_os::{Deadline, PacketSocket, PidFd};

use super::message::{Request, Spawn};
use super::node::OK;
use crate::ranks::default_deadline;

/// The connection to the first process of a node.
#[derive(Debug)]
pub(super) struct NodeSocket(Mutex<PacketSocket>);

impl NodeSocket {
    pub(super) fn new(socket: PacketSocket) -> Self {
        Self(Mutex::new(socket))
    }

    /// Sends a request and returns the process that it has started, if any, with its id in the node.
    pub(super) fn request(
        &self,
        request: &Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<Option<(u32, PidFd)>, String> {
        let socket = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let failed = |error: wholemem_os::Error| format!("the first process of a node: {error}");
        socket.send(&request.encode(), fds, default_deadline()).map_err(failed)?;
        let mut answer = [0; 4096];
        let (len, mut fds) = socket.recv_with_fds(&mut answer, 1, default_deadline()).map_err(failed)?;
        match (&answer[..len], fds.pop()) {
            (&[OK], None) => Ok(None),
            (&[OK, ref pid @ ..], Some(fd)) => {
                let pid = std::str::from_utf8(pid).ok().and_then(|pid| pid.parse().ok());
                Ok(Some((pid.expect("a process id"), PidFd::adopt(fd).map_err(failed)?)))
            }
            (error, _) => Err(String::from_utf8_lossy(error).into_owned()),
        }
    }
}

/// Configures a process in a node. Without other settings its stdin is empty, and its output is kept in memory.
#[derive(Debug)]
#[must_use]
pub struct NodeCommand<'a> {
    node: &'a NodeSocket,
    spawn: Spawn,
    stdin: Option<OwnedFd>,
    stdout: Option<OwnedFd>,
    stderr: Option<OwnedFd>,
}

impl<'a> NodeCommand<'a> {
    pub(super) fn new(node: &'a NodeSocket, program: impl AsRef<OsStr>) -> Self {
        Self { node, spawn: Spawn::of(program), stdin: None, stdout: None, stderr: None }
    }

    /// Adds an argument.
    pub fn arg(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.spawn.command.push(argument.as_ref().to_owned());
        self
    }

    /// Adds arguments.
    pub fn args(mut self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        self.spawn.command.extend(arguments.into_iter().map(|argument| argument.as_ref().to_owned()));
        self
    }

    /// Sets an environment variable.
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.spawn.variables.push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Sets the stdin of the process.
    pub fn stdin(mut self, stdin: impl Into<OwnedFd>) -> Self {
        self.stdin = Some(stdin.into());
        self
    }

    /// Sets the stdin of the process to a text.
    ///
    /// # Panics
    /// If it cannot be stored.
    pub fn input(self, text: &str) -> Self {
        use std::io::Write;
        let mut file = memory_file();
        file.write_all(text.as_bytes()).and_then(|()| file.rewind()).expect("cannot write to a memfd");
        self.stdin(file)
    }

    /// Sets the stdout of the process, which is then not kept.
    pub fn stdout(mut self, stdout: impl Into<OwnedFd>) -> Self {
        self.stdout = Some(stdout.into());
        self
    }

    /// Sets the stderr of the process, which is then not kept.
    pub fn stderr(mut self, stderr: impl Into<OwnedFd>) -> Self {
        self.stderr = Some(stderr.into());
        self
    }

    /// Starts the process.
    ///
    /// # Panics
    /// If it cannot be started.
    #[must_use]
    pub fn spawn(self) -> NodeProcess {
        self.try_spawn().unwrap_or_else(|error| panic!("{error}"))
    }

    /// Runs the process and returns its exit status and output.
    ///
    /// # Panics
    /// If it cannot be started or does not end.
    #[must_use]
    pub fn run(self) -> NodeOutput {
        let mut process = self.spawn();
        let status = process.wait();
        NodeOutput { status, stdout: process.stdout(), stderr: process.stderr() }
    }

    pub(super) fn try_spawn(self) -> Result<NodeProcess, String> {
        let (stdout, stderr) = (memory_file(), memory_file());
        let copy = |file: &File| OwnedFd::from(file.try_clone().expect("cannot duplicate a descriptor"));
        let (status, status_there) = std::io::pipe().expect("cannot create a pipe");
        let fds = [
            self.stdin.unwrap_or_else(|| memory_file().into()),
            self.stdout.unwrap_or_else(|| copy(&stdout)),
            self.stderr.unwrap_or_else(|| copy(&stderr)),
            status_there.into(),
        ];
        let command = self.spawn.command.clone();
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let (pid, pidfd) = self.node.request(&Request::Spawn(self.spawn), &fds)?.expect("a process");
        Ok(NodeProcess { command, pid, pidfd, pipe: status, status: None, stdout, stderr })
    }
}

/// The exit status and the output of a process that has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeOutput {
    /// The exit status.
    pub status: ExitStatus,
    /// The output, if it was not redirected.
    pub stdout: String,
    /// The error output, if it was not redirected.
    pub stderr: String,
}

/// A process that was started in a node. Dropping it does not end it: it ends with its node.
#[derive(Debug)]
pub struct NodeProcess {
    command: Vec<std::ffi::OsString>,
    pid: u32,
    pidfd: PidFd,
    pipe: PipeReader,
    status: Option<ExitStatus>,
    stdout: File,
    stderr: File,
}

impl NodeProcess {
    /// Returns the process id in the node.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Sends a signal to the process.
    ///
    /// # Panics
    /// If the process has exited.
    pub fn signal(&self, signal: Signal) {
        self.pidfd.signal(signal).expect("cannot signal a process of a node");
    }

    /// Kills the process with `SIGKILL` and waits until it is dead.
    ///
    /// # Panics
    /// If it does not die.
    pub fn kill(&mut self) -> ExitStatus {
        self.pidfd.kill().expect("cannot kill a process of a node");
        self.wait()
    }

    /// Waits until the process has exited.
    ///
    /// # Panics
    /// If the timeout of the test expires first.
    pub fn wait(&mut self) -> ExitStatus {
        let status = self.wait_until(default_deadline());
        status.unwrap_or_else(|| {
            panic!("{:?} did not end\n{}{}", self.command, self.stdout(), self.stderr());
        })
    }

    /// Waits until the process has exited. Returns `None` if the deadline passes first.
    ///
    /// # Panics
    /// If the wait fails.
    pub fn wait_until(&mut self, deadline: Deadline) -> Option<ExitStatus> {
        if self.status.is_none() {
            let left = deadline.remaining().map(|left| left.try_into().expect("the timeout fits a timespec"));
            let mut polls = [PollFd::new(&self.pipe, PollFlags::IN)];
            if rustix::event::poll(&mut polls, left.as_ref()).expect("cannot wait for a process") == 0 {
                return None;
            }
            let mut status = [0; 4];
            // If its node has ended, the process was killed with it.
            let status = self.pipe.read_exact(&mut status).map_or(9, |()| i32::from_le_bytes(status));
            self.status = Some(ExitStatus::from_raw(status));
        }
        self.status
    }

    /// Returns what the process has written to its stdout so far, if it was not redirected.
    ///
    /// # Panics
    /// If it cannot be read.
    #[must_use]
    pub fn stdout(&self) -> String {
        contents(&self.stdout)
    }

    /// Returns what the process has written to its stderr so far, if it was not redirected.
    ///
    /// # Panics
    /// If it cannot be read.
    #[must_use]
    pub fn stderr(&self) -> String {
        contents(&self.stderr)
    }
}

/// Returns the contents of a file without moving its offset, which the writing process shares.
pub(super) fn contents(file: &File) -> String {
    use std::os::unix::fs::FileExt;
    let len = file.metadata().expect("cannot read a memfd").len();
    let mut bytes = vec![0; usize::try_from(len).expect("a small file")];
    file.read_exact_at(&mut bytes, 0).expect("cannot read a memfd");
    String::from_utf8_lossy(&bytes).into_owned()
}

pub(super) fn memory_file() -> File {
    let file = rustix::fs::memfd_create("node", rustix::fs::MemfdFlags::CLOEXEC);
    file.expect("cannot create a memfd").into()
}
