//! A client as the server sees it: its connection, its process, its page of pins.

use std::os::fd::OwnedFd;
use std::rc::Rc;

use wholemem_os::packet::MAX_PACKET;
use wholemem_os::{Deadline, Error as OsError, Memfd, PacketSocket, PidFd, memfd};

use super::outbox::{Flushed, Outbox};
use crate::Result;
use crate::id::ClientId;
use crate::keeper::{Kept, Key};
use crate::pin::PINS_LEN;
use crate::protocol::frame::{self, Assembly};
use crate::protocol::{Request, Response};

/// What may wait for a client that does not read, in bytes. A slower one is let go.
const MOST_WAITING: usize = 256 << 10;

/// How many packets of one client are read before it is another's turn.
const TURN: usize = 32;

#[derive(Debug)]
pub(super) struct Connection {
    /// `None` when it was closed, and only the process is waited for.
    pub(super) socket: Option<PacketSocket>,
    /// `None` where the kernel does not tell: then the connection stands for it.
    pub(super) process: Option<PidFd>,
    pub(super) pins: Memfd,
    pub(super) user: u32,
    /// Whether the keeper has it, so that it outlives this process.
    pub(super) is_parked: bool,
    outbox: Outbox,
    assembly: Assembly,
}

/// A message of a client.
#[derive(Debug)]
pub(super) enum Heard {
    Request(Request, Vec<u8>),
    /// The connection is at its end, or the client broke the protocol.
    End,
}

impl Connection {
    /// A client that has just come.
    pub(super) fn accept(socket: PacketSocket) -> Result<Self> {
        let user = socket.peer_uid()?;
        let process = socket.peer_pidfd().ok();
        let pins = Memfd::create("wholemem-pins", PINS_LEN)?;
        Ok(Self::new(Some(socket), process, pins, user))
    }

    /// A client of a server that died.
    pub(super) fn take_over(client: ClientId, kept: &mut Kept) -> Result<Option<Self>> {
        let socket = kept.take(Key::Socket(client)).map(PacketSocket::adopt).transpose()?;
        let process = kept.take(Key::Process(client)).map(PidFd::adopt).transpose()?;
        let Some(pins) = kept.take(Key::Pins(client)) else { return Ok(None) };
        let pins = Memfd::import(pins, PINS_LEN)?;
        let user = socket.as_ref().map(PacketSocket::peer_uid).transpose()?.unwrap_or(u32::MAX);
        let mut connection = Self::new(socket, process, pins, user);
        connection.is_parked = true;
        connection.assembly = Assembly::inherited();
        Ok(Some(connection))
    }

    fn new(socket: Option<PacketSocket>, process: Option<PidFd>, pins: Memfd, user: u32) -> Self {
        let (outbox, assembly) = (Outbox::default(), Assembly::default());
        Self { socket, process, pins, user, is_parked: false, outbox, assembly }
    }

    /// Descriptors for the keeper.
    pub(super) fn park(&self, client: ClientId) -> Result<Vec<(Key, OwnedFd)>> {
        use std::os::fd::AsFd;
        let mut fds = vec![(Key::Pins(client), self.pins.share_fd()?)];
        if let Some(socket) = &self.socket {
            fds.push((Key::Socket(client), memfd::share_fd(socket.as_fd())?));
        }
        if let Some(process) = &self.process {
            fds.push((Key::Process(client), memfd::share_fd(process.as_fd())?));
        }
        Ok(fds)
    }

    pub(super) fn has_to_say(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Says something, now or when the client reads. `false` if it has not read for too long.
    pub(super) fn say(&mut self, response: &Response, fds: Vec<Rc<OwnedFd>>) -> bool {
        match frame::encode(response, &[]) {
            Ok(packets) => self.outbox.push(packets, fds),
            Err(malformed) => tracing::error!(%malformed, "an answer cannot be said"),
        }
        self.flush() && self.outbox.len() <= MOST_WAITING
    }

    /// Sends what the client takes now. `false` if it is gone.
    pub(super) fn flush(&mut self) -> bool {
        let Some(socket) = &self.socket else { return true };
        self.outbox.flush(socket) != Flushed::Broken
    }

    /// Reads what has come, up to a turn's worth.
    pub(super) fn hear(&mut self) -> Vec<Heard> {
        let mut heard = Vec::new();
        let Some(socket) = &self.socket else { return heard };
        let mut packet = [0; MAX_PACKET];
        for _ in 0..TURN {
            let len = match socket.recv(&mut packet, Deadline::NOW) {
                Ok(len) => len,
                Err(OsError::TimedOut) => break,
                Err(_) => {
                    heard.push(Heard::End);
                    break;
                }
            };
            match self.assembly.push(&packet[..len]).map(|message| message.map(|message| decode(&message))) {
                Ok(None) => {}
                Ok(Some(Ok((request, payload)))) => heard.push(Heard::Request(request, payload)),
                Ok(Some(Err(malformed))) | Err(malformed) => {
                    tracing::warn!(user = self.user, %malformed, "a client broke the protocol");
                    heard.push(Heard::End);
                    break;
                }
            }
        }
        heard
    }
}

fn decode(message: &[u8]) -> Result<(Request, Vec<u8>), frame::Malformed> {
    frame::decode(message).map(|(request, payload)| (request, payload.to_vec()))
}
