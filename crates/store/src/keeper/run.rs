//! The keeper's event loop: holds descriptors, hands them over to the next server, and watches the server's process.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use wholemem_os::packet::{MAX_FDS, MAX_PACKET, PacketListener};
use wholemem_os::pidfd::Signal;
use wholemem_os::signal::Signals;
use wholemem_os::time_slice::Yielder;
use wholemem_os::{Deadline, Errno, Error as OsError, PacketSocket, PidFd};

use super::machine::{KeeperInput, KeeperMachine, KeeperOutput};
use super::messages::{DescriptorKey, ToKeeper, ToServer};
use crate::{Error, Result};

/// The timeout of a hand-over of descriptors between the keeper and the server of a store.
const HANDOVER_TIMEOUT: Duration = Duration::from_secs(60);

/// The maximum number of descriptors in one hand-over between the keeper and the server of a store.
pub(crate) const MAX_DESCRIPTORS: usize = 1 << 20;

/// The role of a process of a store: server or keeper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProcessRole {
    /// The server process, which serves the clients of the store.
    Server,
    /// The keeper process, which holds the file descriptors of the store and restarts the server.
    Keeper,
}

/// The file descriptors that the keeper holds so that they survive the server, by key.
#[derive(Debug, Default)]
pub(crate) struct DescriptorTable(BTreeMap<DescriptorKey, OwnedFd>);

impl DescriptorTable {
    pub(crate) fn insert(&mut self, key: DescriptorKey, fd: OwnedFd) {
        self.0.insert(key, fd);
    }

    pub(crate) fn take(&mut self, key: DescriptorKey) -> Option<OwnedFd> {
        self.0.remove(&key)
    }

    pub(crate) fn into_iter(self) -> impl Iterator<Item = (DescriptorKey, OwnedFd)> {
        self.0.into_iter()
    }

    /// Adds the listening socket, and the descriptor of the socket's file, to the table of descriptors.
    fn keep_listener(&mut self, listener: &PacketListener) -> Result<()> {
        self.insert(DescriptorKey::Listener, listener.share_fd()?);
        if let Some(file) = listener.share_file()? {
            self.insert(DescriptorKey::SocketFile, file);
        }
        Ok(())
    }

    /// Sends all descriptors of the table to the next server or keeper.
    pub(crate) fn send(&self, socket: &PacketSocket) -> Result<()> {
        let fds: Vec<_> = self.0.iter().map(|(key, fd)| (key.encode(), fd.as_fd())).collect();
        Ok(socket.send_tagged(&fds, Deadline::after(HANDOVER_TIMEOUT))?)
    }

    /// Receives the table of all descriptors from the keeper or the server.
    pub(crate) fn receive(socket: &PacketSocket) -> Result<Self> {
        let fds = socket.recv_tagged(MAX_DESCRIPTORS, Deadline::after(HANDOVER_TIMEOUT))?;
        let keyed = fds.into_iter().filter_map(|(key, fd)| Some((DescriptorKey::decode(key)?, fd)));
        Ok(Self(keyed.collect()))
    }
}

/// A function that starts a process of the store in a given role, with the given socket as its standard input.
pub type Launch<'a> = dyn Fn(ProcessRole, OwnedFd) -> std::io::Result<Child> + 'a;

/// The way in which a keeper was started.
#[derive(Debug)]
pub(crate) enum KeeperOrigin {
    /// The first keeper of the store, which has created the listening socket.
    First(PacketListener),
    /// A replacement of a keeper that died. The server has started it, and is at the other end of this socket.
    Replacement { server: PacketSocket, path: PathBuf },
}

/// A running server process, and the keeper's connection to it.
struct ServerProcess {
    socket: PacketSocket,
    process: PidFd,
    /// The child process, if the server is a child of this keeper, which must reap it.
    child: Option<Child>,
}

impl ServerProcess {
    fn start(descriptors: &DescriptorTable, launch: &Launch<'_>) -> Result<Self> {
        let (socket, child_end) = PacketSocket::pair()?;
        let child =
            launch(ProcessRole::Server, child_end.into()).map_err(|source| Error::Launch { source })?;
        let process = PidFd::open(child.id())?;
        let running = Self { socket, process, child: Some(child) };
        match descriptors.send(&running.socket) {
            // If the server dies during the hand-over of descriptors, the keeper's event loop detects its exit.
            Ok(()) | Err(Error::Os(OsError::Closed)) => Ok(running),
            Err(error) => {
                let _ = running.process.kill();
                Err(error)
            }
        }
    }

    fn send(&self, what: &ToServer) {
        if let Ok(bytes) = postcard::to_allocvec(what) {
            // A server that does not read the message is dead or about to be killed, so the error is ignored.
            let _ = self.socket.send(&bytes, &[], Deadline::after(HANDOVER_TIMEOUT));
        }
    }

    /// Reaps a server that is a child of this keeper and has already exited, and logs why it exited. The status of a server that
    /// another keeper has started is unknown.
    fn reap(&mut self, is_stopping: bool) {
        let child = self.child.take().map(|mut child| (child.id(), child.wait()));
        let (server, cause) = match child {
            Some((server, Ok(status))) => (Some(server), status.to_string()),
            Some((server, Err(error))) => (Some(server), error.to_string()),
            None => (None, "unknown: the keeper that started the server has died".to_owned()),
        };
        if is_stopping {
            tracing::debug!(server, %cause, "the server has exited");
        } else {
            tracing::warn!(server, %cause, "the server has died");
        }
    }
}

/// The events that stop a keeper: signals, and the exit of the process that the store was started for.
struct StopSources {
    signals: Signals,
    parent: Option<PidFd>,
    /// True if the process that the store was started for had exited before the keeper started.
    has_ended: bool,
}

impl StopSources {
    fn watch(signals: Signals, parent: Option<u32>) -> Result<Self> {
        match parent.map(PidFd::open).transpose() {
            Err(OsError::Call { errno: Errno::SRCH, .. }) => {
                Ok(Self { signals, parent: None, has_ended: true })
            }
            parent => Ok(Self { signals, parent: parent?, has_ended: false }),
        }
    }
}

/// Runs the keeper of a store until the keeper is stopped. Calls `ready` when the first server is ready.
pub(crate) fn run(
    origin: KeeperOrigin,
    parent: Option<u32>,
    launch: &Launch<'_>,
    ready: &mut dyn FnMut(),
) -> Result<()> {
    wholemem_os::descriptors::raise_limit();
    let signals = Signals::block(&[Signal::TERM, Signal::INT, Signal::HUP])?;
    let mut stops = StopSources::watch(signals, parent)?;
    let mut descriptors = DescriptorTable::default();
    // The file of the listening socket is removed when `_listener` is dropped.
    let (mut keeper, mut running, _listener) = match origin {
        KeeperOrigin::First(listener) => {
            descriptors.keep_listener(&listener)?;
            (KeeperMachine::new(false), Some(ServerProcess::start(&descriptors, launch)?), listener)
        }
        KeeperOrigin::Replacement { server, path } => {
            descriptors = DescriptorTable::receive(&server)?;
            let missing = |what| Error::Incomplete { what };
            let process =
                descriptors.take(DescriptorKey::Server).ok_or_else(|| missing("the server's process"))?;
            let listener =
                descriptors.take(DescriptorKey::Listener).ok_or_else(|| missing("the listening socket"))?;
            let file = descriptors.take(DescriptorKey::SocketFile).map(|file| (file, path));
            let listener = PacketListener::adopt(listener, file)?;
            descriptors.keep_listener(&listener)?;
            let running = ServerProcess { socket: server, process: PidFd::adopt(process)?, child: None };
            (KeeperMachine::new(true), Some(running), listener)
        }
    };
    // The buffer into which messages of the server are received.
    let mut packet = vec![0; MAX_PACKET];
    let start = Instant::now();
    let mut is_stopping = false;
    loop {
        let wake_at = keeper.wake_at();
        let input = wait(&mut descriptors, &mut packet, running.as_ref(), &mut stops, wake_at, start)?;
        if input == KeeperInput::ServerDied
            && let Some(mut dead) = running.take()
        {
            // Descriptors that the server parked before it died count, so its remaining messages are received.
            while receive_message(&dead, &mut descriptors, &mut packet).is_some() {}
            dead.reap(is_stopping);
        }
        is_stopping |= input == KeeperInput::StopRequested;
        let mut output = keeper.step(start.elapsed(), input);
        if let (None, Some(at)) = (output, keeper.wake_at()) {
            let delay = at.saturating_sub(start.elapsed());
            tracing::warn!(?delay, "the server failed early: the next is started after a delay");
        }
        while output == Some(KeeperOutput::StartServer) {
            output = match ServerProcess::start(&descriptors, launch) {
                Ok(started) => {
                    let server = started.child.as_ref().map(Child::id);
                    tracing::info!(server, "another server was started");
                    running = Some(started);
                    None
                }
                Err(error) => {
                    tracing::error!(%error, "cannot start a server");
                    keeper.step(start.elapsed(), KeeperInput::ServerDied)
                }
            };
        }
        match output {
            Some(KeeperOutput::StartServer) | None => {}
            Some(KeeperOutput::ReportReady) => ready(),
            Some(KeeperOutput::StopServer) => {
                if let Some(running) = &running {
                    running.send(&ToServer::Stop);
                }
            }
            Some(KeeperOutput::KillServer) => {
                if let Some(running) = &running {
                    let _ = running.process.kill();
                }
            }
            Some(KeeperOutput::End { success: true }) => return Ok(()),
            Some(KeeperOutput::End { success: false }) => return Err(Error::NeverServed),
        }
    }
}

/// Waits for the next input of the keeper's state machine, and meanwhile processes the server's messages about descriptors.
fn wait(
    descriptors: &mut DescriptorTable,
    packet: &mut [u8],
    running: Option<&ServerProcess>,
    stops: &mut StopSources,
    wake_at: Option<Duration>,
    start: Instant,
) -> Result<KeeperInput> {
    if std::mem::take(&mut stops.has_ended) {
        return Ok(KeeperInput::StopRequested);
    }
    let (mut is_open, mut yielder) = (true, Yielder::new());
    loop {
        let mut polls = vec![PollFd::new(&stops.signals, PollFlags::IN)];
        let mut sources = vec![PollSource::Signal];
        if let Some(parent) = &stops.parent {
            polls.push(PollFd::new(parent, PollFlags::IN));
            sources.push(PollSource::Parent);
        }
        if let Some(running) = running {
            if is_open {
                polls.push(PollFd::new(&running.socket, PollFlags::IN));
                sources.push(PollSource::Server);
            }
            polls.push(PollFd::new(&running.process, PollFlags::IN));
            sources.push(PollSource::Death);
        }
        let left = wake_at.map(|at| at.saturating_sub(start.elapsed()));
        let wait = |left: Option<Duration>| {
            // A time that is too long for the kernel's type is treated as unlimited.
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            poll(&mut polls, left.as_ref())
        };
        match yielder.wait(left.map_or(Deadline::NEVER, Deadline::after), wait) {
            Ok(0) => return Ok(KeeperInput::Tick),
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(OsError::Call { call: "poll", errno }.into()),
        }
        let ready_sources = polls.iter().zip(sources).filter(|(poll, _)| !poll.revents().is_empty());
        for source in ready_sources.map(|(_, source)| source).collect::<Vec<_>>() {
            match source {
                PollSource::Signal => {
                    if let Some(signal) = stops.signals.next()? {
                        tracing::info!(signal = signal_name(signal), "the store is stopped by a signal");
                        return Ok(KeeperInput::StopRequested);
                    }
                }
                PollSource::Parent => {
                    // The exit of the process that the store was started for is reported only once.
                    stops.parent = None;
                    tracing::info!("the store is stopped: the process that it was started for has exited");
                    return Ok(KeeperInput::StopRequested);
                }
                PollSource::Server => {
                    match running.and_then(|running| receive_message(running, descriptors, packet)) {
                        Some(true) => return Ok(KeeperInput::Ready),
                        Some(false) => {}
                        None => is_open = false,
                    }
                }
                PollSource::Death => return Ok(KeeperInput::ServerDied),
            }
        }
    }
}

/// Returns the name of a signal that stops a store.
fn signal_name(signal: Signal) -> &'static str {
    match signal {
        Signal::INT => "SIGINT",
        Signal::HUP => "SIGHUP",
        _ => "SIGTERM",
    }
}

#[derive(Debug, Clone, Copy)]
enum PollSource {
    Signal,
    Parent,
    Server,
    Death,
}

/// Receives one message of the server into `packet`. Returns true if the message is `Ready`; `None` if there is no message.
fn receive_message(
    running: &ServerProcess,
    descriptors: &mut DescriptorTable,
    packet: &mut [u8],
) -> Option<bool> {
    let (len, fds) = match running.socket.recv_with_fds(packet, MAX_FDS, Deadline::NOW) {
        Ok(received) => received,
        Err(OsError::FdsTruncated { .. }) => {
            // The server gets no `Parked` reply for these descriptors, and refuses the request of its client in the end.
            tracing::error!("the keeper has no descriptor left");
            return Some(false);
        }
        Err(_) => return None,
    };
    match postcard::from_bytes::<ToKeeper>(&packet[..len]) {
        Ok(ToKeeper::Ready) => return Some(true),
        Ok(ToKeeper::Park(keys)) if keys.len() == fds.len() => {
            let decoded = keys.iter().map(|key| DescriptorKey::decode(*key));
            for (key, fd) in decoded.zip(fds) {
                if let Some(key) = key {
                    descriptors.insert(key, fd);
                }
            }
            running.send(&ToServer::Parked(keys));
        }
        Ok(ToKeeper::Unpark(keys)) => {
            for key in keys.into_iter().filter_map(DescriptorKey::decode) {
                descriptors.take(key);
            }
        }
        _ => tracing::error!("the keeper received an invalid message of the server"),
    }
    Some(false)
}
