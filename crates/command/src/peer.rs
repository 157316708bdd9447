//! A second process of the program `wholemem`, which is killed when the first process ends.
//!
//! ```text
//!   wholemem demo                              wholemem peer creator --parent <pid>
//!   PeerProcess::start  ------- exec ------->  peer_role::run
//!   link                <---- packets, fds -->  stdin
//!   pidfd               <---- exit -----------
//!                       ---- SIGKILL when the first process ends (PR_SET_PDEATHSIG) ---->
//! ```

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};

use anyhow::{Context, Result, anyhow, ensure};
use clap::ValueEnum;
use wholemem_hal::BackendKind;
use wholemem_os::pidfd::Signal;
use wholemem_os::{Deadline, PidFd};

use crate::backend;
use crate::link::PeerLink;

/// The task of a second process that a command starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PeerRole {
    /// Creates the memory that the demo shares
    Creator,
    /// Maps the memory that `bench share` and `bench hand` send
    Receiver,
    /// Replies to every packet with one byte
    Echo,
}

/// A second process that this process started. It is killed and reaped when this value is dropped.
#[derive(Debug)]
pub struct PeerProcess {
    process: ChildGuard,
    pidfd: PidFd,
    link: PeerLink,
}

#[derive(Debug)]
struct ChildGuard(Child);

impl Drop for ChildGuard {
    fn drop(&mut self) {
        // The errors of `kill` and `wait` are ignored: both calls fail if the process was reaped before.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl PeerProcess {
    /// Starts a second process of the program `wholemem` with a task, and with the backend `kind`.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub fn start(role: PeerRole, kind: BackendKind) -> Result<Self> {
        let (here, there) = PeerLink::pair()?;
        let argument = |value: Option<clap::builder::PossibleValue>| {
            value.map(|value| value.get_name().to_owned()).unwrap_or_default()
        };
        let mut command = Command::new("/proc/self/exe");
        command
            .arg0("wholemem")
            .args(["peer", &argument(role.to_possible_value())])
            .args(["--parent", &std::process::id().to_string()])
            .args(["--backend", &argument(backend::choice_for(kind).to_possible_value())])
            .stdin(Stdio::from(OwnedFd::from(there)))
            .stdout(Stdio::null());
        let process = ChildGuard(command.spawn().context("cannot start a second process")?);
        // `command` holds a copy of the second process's end of the connection. With this copy open, the exit of that process
        // would not close the connection.
        drop(command);
        let pidfd = PidFd::open(process.0.id())?;
        Ok(Self { process, pidfd, link: here })
    }

    /// Returns the process id of the second process.
    pub fn id(&self) -> u32 {
        self.process.0.id()
    }

    /// Calls `exchange` with the connection to the second process.
    ///
    /// # Errors
    /// The error of `exchange`. If the process has exited, the error contains its exit status instead.
    pub fn with_link<T>(&mut self, exchange: impl FnOnce(&PeerLink) -> Result<T>) -> Result<T> {
        exchange(&self.link).map_err(|error| {
            if !is_closed(&error) {
                return error;
            }
            let pid = self.id();
            match self.process.0.wait() {
                Ok(status) => anyhow!("the other process ({pid}) exited before its work was done: {status}"),
                Err(_) => error,
            }
        })
    }

    /// Kills the second process and waits until it has exited.
    ///
    /// # Errors
    /// If the process exited before or for another reason.
    pub fn kill(mut self) -> Result<()> {
        ensure!(!self.pidfd.has_exited()?, "the other process ({pid}) has already exited", pid = self.id());
        self.pidfd.kill()?;
        ensure!(
            self.pidfd.wait_exit(Deadline::NEVER)?,
            "the other process ({pid}) did not exit",
            pid = self.id()
        );
        let status: ExitStatus = self.process.0.wait()?;
        let is_killed = status.signal() == Some(Signal::KILL.as_raw());
        ensure!(
            is_killed,
            "the other process ({pid}) exited with {status} instead of SIGKILL",
            pid = self.id()
        );
        Ok(())
    }
}

/// Returns true if an error of wholemem or of a system call means that the other end of the connection is closed.
pub fn is_closed(error: &anyhow::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    let raw = error.downcast_ref::<io::Error>().map(io::Error::kind);
    matches!(error.downcast_ref(), Some(wholemem_os::Error::Closed))
        || matches!(raw, Some(BrokenPipe | ConnectionReset | UnexpectedEof))
}
