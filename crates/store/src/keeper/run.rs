//! The keeper's loop: it holds, hands over, and watches.

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

use super::machine::{Input, Keeper, Output};
use super::wire::{Key, ToKeeper, ToServer};
use crate::{Error, Result};

/// How long a server may take to take over, and a keeper.
const HANDOVER: Duration = Duration::from_secs(60);

/// The most descriptors that are handed over.
pub(crate) const MOST_KEPT: usize = 1 << 20;

/// What a process of a store is there for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Role {
    /// It serves clients.
    Server,
    /// It holds what the server has.
    Keeper,
}

/// Descriptors, by what they are of.
#[derive(Debug, Default)]
pub(crate) struct Kept(BTreeMap<Key, OwnedFd>);

impl Kept {
    pub(crate) fn insert(&mut self, key: Key, fd: OwnedFd) {
        self.0.insert(key, fd);
    }

    pub(crate) fn take(&mut self, key: Key) -> Option<OwnedFd> {
        self.0.remove(&key)
    }

    pub(crate) fn into_iter(self) -> impl Iterator<Item = (Key, OwnedFd)> {
        self.0.into_iter()
    }

    /// Keeps a listener, and the descriptor of its file.
    fn keep_listener(&mut self, listener: &PacketListener) -> Result<()> {
        self.insert(Key::Listener, listener.share_fd()?);
        if let Some(file) = listener.share_file()? {
            self.insert(Key::SocketFile, file);
        }
        Ok(())
    }

    /// Hands all of them over to the other end.
    pub(crate) fn send(&self, socket: &PacketSocket) -> Result<()> {
        let fds: Vec<_> = self.0.iter().map(|(key, fd)| (key.encode(), fd.as_fd())).collect();
        Ok(socket.send_tagged(&fds, Deadline::after(HANDOVER))?)
    }

    /// Takes over what the other end sends.
    pub(crate) fn receive(socket: &PacketSocket) -> Result<Self> {
        let fds = socket.recv_tagged(MOST_KEPT, Deadline::after(HANDOVER))?;
        let keyed = fds.into_iter().filter_map(|(key, fd)| Some((Key::decode(key)?, fd)));
        Ok(Self(keyed.collect()))
    }
}

/// Starts a process of the store, with this socket as its standard input.
pub(crate) type Launch<'a> = dyn Fn(Role, OwnedFd) -> std::io::Result<Child> + 'a;

/// Where the keeper's things come from.
#[derive(Debug)]
pub(crate) enum Origin {
    /// It is the first, and has made the socket for clients.
    First(PacketListener),
    /// Another keeper has died, and the server at this end has started this one.
    Replacement { server: PacketSocket, path: PathBuf },
}

/// A server that runs.
struct Running {
    socket: PacketSocket,
    process: PidFd,
    /// For a child of ours, which is to be reaped.
    child: Option<Child>,
}

impl Running {
    fn start(kept: &Kept, launch: &Launch<'_>) -> Result<Self> {
        let (socket, theirs) = PacketSocket::pair()?;
        let child = launch(Role::Server, theirs.into()).map_err(|source| Error::Launch { source })?;
        let process = PidFd::open(child.id())?;
        let running = Self { socket, process, child: Some(child) };
        match kept.send(&running.socket) {
            // One that dies meanwhile is noticed by its death.
            Ok(()) | Err(Error::Os(OsError::Closed)) => Ok(running),
            Err(error) => {
                let _ = running.process.kill();
                Err(error)
            }
        }
    }

    fn say(&self, what: &ToServer) {
        if let Ok(bytes) = postcard::to_allocvec(what) {
            // A server that does not read is dead or will be.
            let _ = self.socket.send(&bytes, &[], Deadline::after(HANDOVER));
        }
    }

    /// Waits for a child that has exited already.
    fn reap(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.wait();
        }
    }
}

/// What ends a keeper: a signal, or the end of the process it was started for.
struct Ends {
    signals: Signals,
    parent: Option<PidFd>,
    /// The process it was started for has ended before this one began.
    is_over: bool,
}

impl Ends {
    fn watch(signals: Signals, parent: Option<u32>) -> Result<Self> {
        match parent.map(PidFd::open).transpose() {
            Err(OsError::Call { errno: Errno::SRCH, .. }) => {
                Ok(Self { signals, parent: None, is_over: true })
            }
            parent => Ok(Self { signals, parent: parent?, is_over: false }),
        }
    }
}

/// Keeps until somebody stops it: `ready` is called when the first server serves.
pub(crate) fn run(
    origin: Origin,
    parent: Option<u32>,
    launch: &Launch<'_>,
    ready: &mut dyn FnMut(),
) -> Result<()> {
    wholemem_os::descriptors::raise_limit();
    let signals = Signals::block(&[Signal::TERM, Signal::INT, Signal::HUP])?;
    let mut ends = Ends::watch(signals, parent)?;
    let mut kept = Kept::default();
    // Its file goes when this ends, and not before.
    let (mut keeper, mut running, _listener) = match origin {
        Origin::First(listener) => {
            kept.keep_listener(&listener)?;
            (Keeper::new(false), Some(Running::start(&kept, launch)?), listener)
        }
        Origin::Replacement { server, path } => {
            kept = Kept::receive(&server)?;
            let missing = |what| Error::Incomplete { what };
            let process = kept.take(Key::Server).ok_or_else(|| missing("the server's process"))?;
            let listener = kept.take(Key::Listener).ok_or_else(|| missing("the listening socket"))?;
            let file = kept.take(Key::SocketFile).map(|file| (file, path));
            let listener = PacketListener::adopt(listener, file)?;
            kept.keep_listener(&listener)?;
            let running = Running { socket: server, process: PidFd::adopt(process)?, child: None };
            (Keeper::new(true), Some(running), listener)
        }
    };
    // Room for what the server says.
    let mut packet = vec![0; MAX_PACKET];
    let start = Instant::now();
    loop {
        let wake_at = keeper.wake_at();
        let input = wait(&mut kept, &mut packet, running.as_ref(), &mut ends, wake_at, start)?;
        if input == Input::Died
            && let Some(mut dead) = running.take()
        {
            // What it parked before it died counts.
            while listen(&dead, &mut kept, &mut packet).is_some() {}
            dead.reap();
        }
        let mut output = keeper.step(start.elapsed(), input);
        while output == Some(Output::StartServer) {
            output = match Running::start(&kept, launch) {
                Ok(started) => {
                    running = Some(started);
                    None
                }
                Err(error) => {
                    tracing::error!(%error, "cannot start a server");
                    keeper.step(start.elapsed(), Input::Died)
                }
            };
        }
        match output {
            Some(Output::StartServer) | None => {}
            Some(Output::TellReady) => ready(),
            Some(Output::TellServerToStop) => {
                if let Some(running) = &running {
                    running.say(&ToServer::Stop);
                }
            }
            Some(Output::KillServer) => {
                if let Some(running) = &running {
                    let _ = running.process.kill();
                }
            }
            Some(Output::End { well: true }) => return Ok(()),
            Some(Output::End { well: false }) => return Err(Error::NeverServed),
        }
    }
}

/// Waits for the next thing to happen, and takes in what the server says meanwhile.
fn wait(
    kept: &mut Kept,
    packet: &mut [u8],
    running: Option<&Running>,
    ends: &mut Ends,
    wake_at: Option<Duration>,
    start: Instant,
) -> Result<Input> {
    if std::mem::take(&mut ends.is_over) {
        return Ok(Input::StopAsked);
    }
    let (mut is_open, mut yielder) = (true, Yielder::new());
    loop {
        let mut polls = vec![PollFd::new(&ends.signals, PollFlags::IN)];
        let mut who = vec![Source::Signal];
        if let Some(parent) = &ends.parent {
            polls.push(PollFd::new(parent, PollFlags::IN));
            who.push(Source::Parent);
        }
        if let Some(running) = running {
            if is_open {
                polls.push(PollFd::new(&running.socket, PollFlags::IN));
                who.push(Source::Server);
            }
            polls.push(PollFd::new(&running.process, PollFlags::IN));
            who.push(Source::Death);
        }
        let left = wake_at.map(|at| at.saturating_sub(start.elapsed()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        match yielder.wait(|| poll(&mut polls, left.as_ref())) {
            Ok(0) => return Ok(Input::Tick),
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(OsError::Call { call: "poll", errno }.into()),
        }
        let happened = polls.iter().zip(who).filter(|(poll, _)| !poll.revents().is_empty());
        for source in happened.map(|(_, source)| source).collect::<Vec<_>>() {
            match source {
                Source::Signal if ends.signals.next()?.is_some() => return Ok(Input::StopAsked),
                Source::Signal => {}
                Source::Parent => {
                    // Said once.
                    ends.parent = None;
                    return Ok(Input::StopAsked);
                }
                Source::Server => match running.and_then(|running| listen(running, kept, packet)) {
                    Some(true) => return Ok(Input::Ready),
                    Some(false) => {}
                    None => is_open = false,
                },
                Source::Death => return Ok(Input::Died),
            }
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Source {
    Signal,
    Parent,
    Server,
    Death,
}

/// Receives one message of the server into `packet`, and returns whether it says that the server is ready; `None` if there is none.
fn listen(running: &Running, kept: &mut Kept, packet: &mut [u8]) -> Option<bool> {
    let (len, fds) = match running.socket.recv_with_fds(packet, MAX_FDS, Deadline::NOW) {
        Ok(received) => received,
        Err(OsError::FdsTruncated { .. }) => {
            // The server waits for an answer that will not come, and refuses what it was asked for in the end.
            tracing::error!("the keeper has no descriptor left");
            return Some(false);
        }
        Err(_) => return None,
    };
    match postcard::from_bytes::<ToKeeper>(&packet[..len]) {
        Ok(ToKeeper::Ready) => return Some(true),
        Ok(ToKeeper::Park(keys)) if keys.len() == fds.len() => {
            let decoded = keys.iter().map(|key| Key::decode(*key));
            for (key, fd) in decoded.zip(fds) {
                if let Some(key) = key {
                    kept.insert(key, fd);
                }
            }
            running.say(&ToServer::Parked(keys));
        }
        Ok(ToKeeper::Unpark(keys)) => {
            for key in keys.into_iter().filter_map(Key::decode) {
                kept.take(key);
            }
        }
        _ => tracing::error!("the server says what its keeper does not understand"),
    }
    Some(false)
}
