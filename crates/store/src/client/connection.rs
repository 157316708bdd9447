//! The connection of a client to the server of a store: one request at a time, which is sent again if the server is replaced.

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
use crate::protocol::frame::{self, MAX_FDS, MessageAssembler};
use crate::protocol::{Answer, Event, PROTOCOL, Request, RequestKind, Response};
use crate::{Error, Result};

/// The delay between two attempts to connect to the server of a store.
const RETRY: Duration = Duration::from_millis(1);

/// A client's connection to the server of a store, which survives a replacement of the server. Dropping the connection sends a
/// goodbye message; if a client closes the connection without one, the server waits for the client's process to exit.
pub(super) struct Connection {
    socket: PacketSocket,
    assembler: MessageAssembler,
    packet: Vec<u8>,
    last_id: u64,
    /// The ids of requests that timed out, whose answers may still arrive.
    timed_out: BTreeSet<u64>,
    /// The process generation that opened the connection. A forked child must not use the connection, which belongs to its
    /// parent.
    epoch: ForkEpoch,
    /// True if dropping the connection sends a goodbye message to the server.
    sends_goodbye: bool,
}

/// The response of the server that admits a client.
#[derive(Debug)]
pub(super) struct Welcome {
    pub(super) client: ClientId,
    pub(super) index: OwnedFd,
    pub(super) index_len: usize,
    pub(super) pins: OwnedFd,
    pub(super) devices: Vec<[u8; 16]>,
}

impl Connection {
    /// Connects to the server of a store and sends a hello message. If the server is being replaced, waits for the next server.
    pub(super) fn connect(path: &Path, deadline: Deadline) -> Result<(Self, Welcome)> {
        loop {
            match Self::connect_once(path, deadline) {
                // The server died before the keeper held this connection, or the backlog of the socket is full. The client
                // connects again, because the socket exists while the keeper lives.
                Err(Error::Disconnected) if is_interrupted() => return Err(Error::Interrupted),
                Err(Error::Disconnected) if !deadline.has_passed() => std::thread::sleep(RETRY),
                outcome => return outcome,
            }
        }
    }

    fn connect_once(path: &Path, deadline: Deadline) -> Result<(Self, Welcome)> {
        let epoch = ForkEpoch::current()?;
        let socket = match PacketSocket::connect(&Address::Path(path.to_owned())) {
            Ok(socket) => socket,
            Err(OsError::Call { errno: Errno::NOENT | Errno::CONNREFUSED, .. }) => {
                return Err(Error::NotServed { path: path.to_owned() });
            }
            Err(OsError::Call { errno: Errno::AGAIN, .. }) => return Err(Error::Disconnected),
            Err(source) => return Err(Error::Socket { path: path.to_owned(), source }),
        };
        let (assembler, packet, timed_out) =
            (MessageAssembler::default(), vec![0; MAX_PACKET], BTreeSet::new());
        let mut connection =
            Self { socket, assembler, packet, last_id: 0, timed_out, epoch, sends_goodbye: true };
        let (answer, mut fds) =
            match connection.request(RequestKind::Hello { protocol: PROTOCOL }, &[], deadline) {
                // If the server refused the connection before it received the hello message, the client can still read the
                // refusal.
                Err(Error::Disconnected) => match connection.receive(Deadline::NOW)?.0.answer {
                    Answer::Refused(refusal) => return Err(refusal.into()),
                    _ => return Err(Error::Disconnected),
                },
                outcome => outcome?,
            };
        let (Answer::Welcome { client, index_len, devices }, 2) = (answer, fds.len()) else {
            return Err(Error::Protocol { rule: "a hello is answered by a welcome" });
        };
        let (Some(pins), Some(index)) = (fds.pop(), fds.pop()) else {
            return Err(Error::Protocol { rule: "a welcome has two descriptors" });
        };
        let index_len = to_usize(index_len);
        Ok((connection, Welcome { client, index, index_len, pins, devices }))
    }

    /// Extracts the socket from the connection, without sending a goodbye message.
    pub(super) fn into_socket(mut self) -> Result<PacketSocket> {
        let socket = PacketSocket::adopt(memfd::share_fd(self.socket.as_fd())?)?;
        self.sends_goodbye = false;
        Ok(socket)
    }

    fn check_fork(&self) -> Result<()> {
        if self.epoch.is_current() { Ok(()) } else { Err(Error::Forked) }
    }

    /// Returns the id of the last request on this connection.
    pub(super) fn last_id(&self) -> u64 {
        self.last_id
    }

    /// Sends a request to the server and waits for its answer. If the server is replaced meanwhile, sends the request again.
    pub(super) fn request(
        &mut self,
        kind: RequestKind,
        payload: &[u8],
        deadline: Deadline,
    ) -> Result<(Answer, Vec<OwnedFd>)> {
        self.request_with_fds(kind, payload, &[], deadline)
    }

    /// Sends a request with file descriptors and waits for its answer, as [`Self::request`] does.
    pub(super) fn request_with_fds(
        &mut self,
        kind: RequestKind,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
        deadline: Deadline,
    ) -> Result<(Answer, Vec<OwnedFd>)> {
        self.check_fork()?;
        self.last_id += 1;
        let request = Request { id: self.last_id, resends: 0, kind };
        let outcome = self.exchange(request, payload, fds, deadline);
        if matches!(outcome, Err(Error::TimedOut | Error::Interrupted)) {
            self.timed_out.insert(self.last_id);
        }
        outcome
    }

    fn exchange(
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
                    request.resends = request.resends.saturating_add(1);
                    self.send(&request, payload, fds, deadline)?;
                }
                // A refusal with the id zero concerns the whole connection, not one request.
                Answer::Refused(refusal) if [0, request.id].contains(&response.id) => {
                    return Err(refusal.into());
                }
                answer if response.id == request.id => return Ok((answer, received)),
                // The server has created an object for an earlier request that timed out, so the client abandons the object.
                Answer::Created { .. } if self.timed_out.remove(&response.id) => {
                    self.notify(RequestKind::Abandon { create: response.id });
                }
                // Ignores an answer to an earlier request, and a second answer if both the old and the new server have processed
                // a request.
                _ => {}
            }
        }
    }

    /// Sends a message that the server does not answer. If the socket is full, the message is dropped.
    pub(super) fn notify(&mut self, kind: RequestKind) {
        self.last_id += 1;
        let request = Request { id: self.last_id, resends: 0, kind };
        let _ = frame::send_message(&self.socket, &request, &[], &[], Deadline::NOW);
    }

    /// Returns the next event of a watch; `None` if a new server has taken over, which does not know the watch yet.
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

    /// Returns true if the keeper and the server of the store have both exited, or if the server has closed this connection.
    pub(super) fn is_closed(&self) -> bool {
        self.socket.is_closed() == Ok(true)
    }

    /// Returns the user id of the server's process.
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
        sent.map_err(|malformed| Error::Protocol { rule: malformed.0 })?.map_err(connection_error)
    }

    fn receive(&mut self, deadline: Deadline) -> Result<(Response, Vec<OwnedFd>)> {
        let mut all = Vec::new();
        loop {
            let next = next_check(deadline);
            let (len, fds) = match self.socket.recv_with_fds(&mut self.packet, MAX_FDS, next) {
                Err(OsError::TimedOut) if is_interrupted() => return Err(Error::Interrupted),
                Err(OsError::TimedOut) if !deadline.has_passed() => continue,
                received => received.map_err(connection_error)?,
            };
            all.extend(fds);
            let malformed = |malformed: frame::MalformedMessage| Error::Protocol { rule: malformed.0 };
            if let Some(message) = self.assembler.push(&self.packet[..len]).map_err(malformed)? {
                let (response, _) = frame::decode::<Response>(&message).map_err(malformed)?;
                return Ok((response, all));
            }
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if self.sends_goodbye && self.epoch.is_current() {
            self.notify(RequestKind::Goodbye);
        }
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The debug output omits the packet buffer, because it is long.
        f.debug_struct("Connection")
            .field("socket", &self.socket)
            .field("last_id", &self.last_id)
            .finish_non_exhaustive()
    }
}

fn connection_error(error: OsError) -> Error {
    match error {
        OsError::TimedOut => Error::TimedOut,
        OsError::Closed => Error::Disconnected,
        error => error.into(),
    }
}
