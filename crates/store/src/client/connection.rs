//! The connection of a client to the server: one request at a time, repeated when the server was restarted.

use std::collections::BTreeSet;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use wholemem_os::interrupt::{is_interrupted, next_check};
use wholemem_os::packet::{Address, MAX_PACKET};
use wholemem_os::{Deadline, Errno, Error as OsError, ForkEpoch, PacketSocket, memfd};

use crate::convert::to_usize;
use crate::id::ClientId;
use crate::protocol::frame::{self, Assembly, MAX_FDS};
use crate::protocol::{Answer, Ask, Event, PROTOCOL, Request, Response};
use crate::{Error, Result};

/// How long to wait before connecting again.
const RETRY: Duration = Duration::from_millis(1);

/// A connection to the server. It survives a restart of the server. Dropping it sends a goodbye: if a client only closes its
/// connection, the server waits for its process to exit.
pub(super) struct Connection {
    socket: PacketSocket,
    assembly: Assembly,
    packet: Vec<u8>,
    last_id: u64,
    /// Requests whose answer came too late, or may still come.
    given_up: BTreeSet<u64>,
    /// In a forked child the connection belongs to the parent.
    epoch: ForkEpoch,
    /// Whether it sends a goodbye when it is dropped.
    says_goodbye: bool,
}

/// What the server sends when it admits a client.
#[derive(Debug)]
pub(super) struct Greeting {
    pub(super) client: ClientId,
    pub(super) index: OwnedFd,
    pub(super) index_len: usize,
    pub(super) pins: OwnedFd,
    pub(super) devices: Vec<[u8; 16]>,
}

impl Connection {
    /// Connects and sends a hello. If the server is being replaced, this waits for the next one.
    pub(super) fn connect(path: &Path, deadline: Deadline) -> Result<(Self, Greeting)> {
        loop {
            match Self::connect_once(path, deadline) {
                // The server died before the keeper had this connection: its socket exists while the keeper lives. Or too many
                // clients wait to connect.
                Err(Error::Disconnected) if !deadline.has_passed() => std::thread::sleep(RETRY),
                outcome => return outcome,
            }
        }
    }

    fn connect_once(path: &Path, deadline: Deadline) -> Result<(Self, Greeting)> {
        let epoch = ForkEpoch::current()?;
        let socket = match PacketSocket::connect(&Address::Path(path.to_owned())) {
            Ok(socket) => socket,
            Err(OsError::Call { errno: Errno::NOENT | Errno::CONNREFUSED, .. }) => {
                return Err(Error::NotServed { path: path.to_owned() });
            }
            Err(OsError::Call { errno: Errno::AGAIN, .. }) => return Err(Error::Disconnected),
            Err(source) => return Err(Error::Socket { path: path.to_owned(), source }),
        };
        let (assembly, packet, given_up) = (Assembly::default(), vec![0; MAX_PACKET], BTreeSet::new());
        let mut connection =
            Self { socket, assembly, packet, last_id: 0, given_up, epoch, says_goodbye: true };
        let (answer, mut fds) = match connection.request(Ask::Hello { protocol: PROTOCOL }, &[], deadline) {
            // Refused before the hello was received: then the refusal is what can be read.
            Err(Error::Disconnected) => match connection.receive(Deadline::NOW)?.0.answer {
                Answer::Refused(refusal) => return Err(refusal.into()),
                _ => return Err(Error::Disconnected),
            },
            outcome => outcome?,
        };
        let (Answer::Welcome { client, index_len, devices }, 2) = (answer, fds.len()) else {
            return Err(Error::Protocol { rule: "a greeting is answered by a welcome" });
        };
        let (Some(pins), Some(index)) = (fds.pop(), fds.pop()) else {
            return Err(Error::Protocol { rule: "a welcome brings two descriptors" });
        };
        let index_len = to_usize(index_len);
        Ok((connection, Greeting { client, index, index_len, pins, devices }))
    }

    /// The socket alone. No goodbye is sent for it.
    pub(super) fn into_socket(mut self) -> Result<PacketSocket> {
        let socket = PacketSocket::adopt(memfd::share_fd(self.socket.as_fd())?)?;
        self.says_goodbye = false;
        Ok(socket)
    }

    fn check_fork(&self) -> Result<()> {
        if self.epoch.is_current() { Ok(()) } else { Err(Error::Forked) }
    }

    /// The id of the request that was made last.
    pub(super) fn last_id(&self) -> u64 {
        self.last_id
    }

    /// Sends a request and waits for the answer. If the server is restarted meanwhile, the request is repeated.
    pub(super) fn request(
        &mut self,
        ask: Ask,
        payload: &[u8],
        deadline: Deadline,
    ) -> Result<(Answer, Vec<OwnedFd>)> {
        self.request_giving(ask, payload, &[], deadline)
    }

    /// As [`Self::request`], with descriptors.
    pub(super) fn request_giving(
        &mut self,
        ask: Ask,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
        deadline: Deadline,
    ) -> Result<(Answer, Vec<OwnedFd>)> {
        self.check_fork()?;
        self.last_id += 1;
        let request = Request { id: self.last_id, again: 0, ask };
        let outcome = self.ask(request, payload, fds, deadline);
        if matches!(outcome, Err(Error::TimedOut | Error::Interrupted)) {
            self.given_up.insert(self.last_id);
        }
        outcome
    }

    fn ask(
        &mut self,
        mut request: Request,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
        deadline: Deadline,
    ) -> Result<(Answer, Vec<OwnedFd>)> {
        self.send(&request, payload, fds, deadline)?;
        loop {
            let (response, received) = self.receive(deadline)?;
            match response.answer {
                Answer::Restarted => {
                    request.again = request.again.saturating_add(1);
                    self.send(&request, payload, fds, deadline)?;
                }
                // A refusal with an id of zero is for the whole client.
                Answer::Refused(refusal) if [0, request.id].contains(&response.id) => {
                    return Err(refusal.into());
                }
                answer if response.id == request.id => return Ok((answer, received)),
                // An object for a request that has timed out.
                Answer::Created { .. } if self.given_up.remove(&response.id) => {
                    self.tell(Ask::Abandon { create: response.id });
                }
                // A second answer, if a server has processed the request and the next one has received it again.
                _ => {}
            }
        }
    }

    /// Sends a request whose answer is not waited for. If the server does not read, it is dropped.
    pub(super) fn tell(&mut self, ask: Ask) {
        self.last_id += 1;
        let request = Request { id: self.last_id, again: 0, ask };
        let _ = frame::send_message(&self.socket, &request, &[], &[], Deadline::NOW);
    }

    /// The next event; `None` when another server has taken over, and has to be told the prefix.
    pub(super) fn event(&mut self, deadline: Deadline) -> Result<Option<Event>> {
        self.check_fork()?;
        loop {
            match self.receive(deadline)?.0.answer {
                Answer::Event(event) => return Ok(Some(event)),
                Answer::Restarted => return Ok(None),
                _ => {}
            }
        }
    }

    /// Whether keeper and server have both exited, or the server has disconnected this client.
    pub(super) fn is_closed(&self) -> bool {
        self.socket.is_closed() == Ok(true)
    }

    /// The user at the other end.
    pub(super) fn server_user(&self) -> Result<u32> {
        Ok(self.socket.peer_uid()?)
    }

    fn send(
        &mut self,
        request: &Request,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
        deadline: Deadline,
    ) -> Result<()> {
        let sent = frame::send_message(&self.socket, request, payload, fds, deadline);
        sent.map_err(|malformed| Error::Protocol { rule: malformed.0 })?.map_err(said)
    }

    fn receive(&mut self, deadline: Deadline) -> Result<(Response, Vec<OwnedFd>)> {
        let mut all = Vec::new();
        loop {
            let next = next_check(deadline);
            let (len, fds) = match self.socket.recv_with_fds(&mut self.packet, MAX_FDS, next) {
                Err(OsError::TimedOut) if is_interrupted() => return Err(Error::Interrupted),
                Err(OsError::TimedOut) if !deadline.has_passed() => continue,
                received => received.map_err(said)?,
            };
            all.extend(fds);
            let malformed = |malformed: frame::Malformed| Error::Protocol { rule: malformed.0 };
            if let Some(message) = self.assembly.push(&self.packet[..len]).map_err(malformed)? {
                let (response, _) = frame::decode::<Response>(&message).map_err(malformed)?;
                return Ok((response, all));
            }
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if self.says_goodbye && self.epoch.is_current() {
            self.tell(Ask::Goodbye);
        }
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the packet buffer, which is long.
        f.debug_struct("Connection")
            .field("socket", &self.socket)
            .field("last_id", &self.last_id)
            .finish_non_exhaustive()
    }
}

fn said(error: OsError) -> Error {
    match error {
        OsError::TimedOut => Error::TimedOut,
        OsError::Closed => Error::Disconnected,
        error => error.into(),
    }
}
