//! This program, started again as a second process that cannot be left behind.
//!
//! ```text
//!   wholemem demo                             wholemem peer creator --parent <pid>
//!   Peer::start  ---------- exec ---------->  peer_role::serve
//!   link         <---- packets, fds ------->  stdin
//!   watch        <---- pidfd: it died ------
//!                ------ SIGKILL when the first process ends, however it ends ---->
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
use crate::link::Link;

/// What the second process does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PeerRole {
    /// Creates the memory of the tour
    Creator,
    /// Receives what `bench share` creates
    Receiver,
    /// Answers every packet by one byte
    Echo,
}

/// A second process, killed and reaped when this is dropped.
#[derive(Debug)]
pub struct Peer {
    process: Process,
    watch: PidFd,
    link: Link,
}

#[derive(Debug)]
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // If it is gone already, both are as it should be.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Peer {
    /// Starts this program again in a role, with the same backend.
    pub fn start(role: PeerRole, kind: BackendKind) -> Result<Self> {
        let (here, there) = Link::pair()?;
        let word = |value: Option<clap::builder::PossibleValue>| {
            value.map(|value| value.get_name().to_owned()).unwrap_or_default()
        };
        let mut command = Command::new("/proc/self/exe");
        command
            .arg0("wholemem")
            .args(["peer", &word(role.to_possible_value())])
            .args(["--parent", &std::process::id().to_string()])
            .args(["--backend", &word(backend::choice_of(kind).to_possible_value())])
            .stdin(Stdio::from(OwnedFd::from(there)))
            .stdout(Stdio::null());
        let process = Process(command.spawn().context("cannot start a second process")?);
        // The command holds the other end of the connection, whose closing tells us that the process is gone.
        drop(command);
        let watch = PidFd::open(process.0.id())?;
        Ok(Self { process, watch, link: here })
    }

    /// The id of the process.
    pub fn id(&self) -> u32 {
        self.process.0.id()
    }

    /// Does something with the connection. If the process is gone, the error says how it ended.
    pub fn with<T>(&mut self, act: impl FnOnce(&Link) -> Result<T>) -> Result<T> {
        act(&self.link).map_err(|error| {
            if !is_closed(&error) {
                return error;
            }
            let pid = self.id();
            match self.process.0.wait() {
                Ok(status) => anyhow!("the other process ({pid}) ended before its work did: {status}"),
                Err(_) => error,
            }
        })
    }

    /// Kills the process, and returns when the kernel says that it has died of it.
    pub fn kill(mut self) -> Result<()> {
        ensure!(!self.watch.has_exited()?, "the other process ({}) is dead already", self.id());
        self.watch.kill()?;
        ensure!(self.watch.wait_exit(Deadline::NEVER)?, "the other process ({}) did not die", self.id());
        let status: ExitStatus = self.process.0.wait()?;
        let by_us = status.signal() == Some(Signal::KILL.as_raw());
        ensure!(by_us, "the other process ({}) was to be killed, and ended otherwise: {status}", self.id());
        Ok(())
    }
}

/// Whether the other end of the connection is closed, as this library or a raw call tells it.
pub fn is_closed(error: &anyhow::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    let raw = error.downcast_ref::<io::Error>().map(io::Error::kind);
    matches!(error.downcast_ref(), Some(wholemem_os::Error::Closed))
        || matches!(raw, Some(BrokenPipe | ConnectionReset | UnexpectedEof))
}
