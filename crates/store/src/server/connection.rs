//! A client as the server sees it: its connection, its process, its page of pins.

use std::os::fd::OwnedFd;
use std::rc::Rc;

use wholemem_os::{Deadline, Error as OsError, Memfd, PacketSocket, PidFd, memfd};

use super::outbox::{Flushed, Outbox};
use crate::Result;
use crate::id::ClientId;
use crate::keeper::{Kept, Key};
use crate::pin::PINS_LEN;
use crate::protocol::frame::{self, Assembly, MOST_PACKETS, Payload};
use crate::protocol::{Ask, Request, Response};

/// What may wait for a client in any case, in bytes. For one that is told of the many objects of a pack more may, and for all
/// together [`MOST_FOR_ALL`].
const MOST_WAITING: usize = 256 << 10;

/// What may wait for all clients that have more waiting than any may, in bytes. Then one that is told something is let go.
pub(super) const MOST_FOR_ALL: usize = 64 << 20;

/// How many descriptors may: they are the server's own until they are sent, and it has few for all its clients.
const MOST_DESCRIPTORS: usize = 64;

const EARLY: frame::Malformed =
    frame::Malformed("a descriptor that is not on the last packet of its message");
const UNWANTED: frame::Malformed = frame::Malformed("a descriptor that nobody has asked for");

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
    /// Whether it has closed its end.
    is_deaf: bool,
    assembly: Assembly,
}

/// A message of a client.
#[derive(Debug)]
pub(super) enum Heard<'a> {
    /// A request, the bytes behind it, and a descriptor that came along.
    Request(Request, Payload<'a>, Option<OwnedFd>),
    /// The connection is at its end, or the client broke the protocol.
    End,
}

/// How a client reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    Good,
    /// More waits for it than for any in any case.
    Slow,
    /// It is to be let go.
    Bad,
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
        Self { socket, process, pins, user, is_parked: false, outbox, is_deaf: false, assembly }
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

    /// Ends the connection. Nothing that waited for it is kept: its process may live for long.
    pub(super) fn close(&mut self) {
        self.socket = None;
        self.outbox = Outbox::default();
        self.assembly = Assembly::default();
    }

    pub(super) fn has_to_say(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// How many bytes more than any client may have waiting for it this one has.
    pub(super) fn excess(&self) -> usize {
        self.outbox.len().saturating_sub(MOST_WAITING)
    }

    /// Says something, now or when the client reads, and says how it stands with it.
    pub(super) fn say(&mut self, response: &Response, fds: Vec<Rc<OwnedFd>>) -> Standing {
        if self.is_deaf || self.socket.is_none() {
            return Standing::Good;
        }
        match frame::encode(response, &[]) {
            Ok(packets) => self.outbox.push(packets, fds),
            Err(malformed) => tracing::error!(%malformed, "an answer cannot be said"),
        }
        self.flush();
        match () {
            () if self.outbox.descriptors() > MOST_DESCRIPTORS => Standing::Bad,
            () if self.excess() > 0 => Standing::Slow,
            () => Standing::Good,
        }
    }

    /// Sends what the client takes now. One that has closed its end hears nothing more, but what it said before, such as
    /// goodbye, is still to be read.
    pub(super) fn flush(&mut self) {
        if let Some(socket) = &self.socket
            && self.outbox.flush(socket) == Flushed::Broken
        {
            self.is_deaf = true;
            self.outbox = Outbox::default();
        }
    }

    /// Reads the next message, if it has come, or as many packets as one may have; then it is another's turn. `packet` is
    /// room for one. Descriptors are taken from a user who is trusted, and one at a time.
    pub(super) fn hear<'a>(&mut self, packet: &'a mut [u8], trusted: u32) -> Option<Heard<'a>> {
        let socket = self.socket.as_ref()?;
        let room = usize::from(self.user == trusted);
        let mut read = 0;
        let (len, fd) = loop {
            if read == MOST_PACKETS {
                return None;
            }
            read += 1;
            let (len, mut fds) = match socket.recv_with_fds(packet, room, Deadline::NOW) {
                Ok(received) => received,
                Err(OsError::TimedOut) => return None,
                Err(_) => return Some(Heard::End),
            };
            // Only the last packet of a message can be one that the next is not read over, or bring something along.
            if frame::is_last(&packet[..len]) {
                break (len, fds.pop());
            }
            if !fds.is_empty() {
                return Some(self.broken(EARLY));
            }
            if let Err(malformed) = self.assembly.push(&packet[..len]) {
                return Some(self.broken(malformed));
            }
        };
        match self.assembly.push(&packet[..len]).map(|message| message.map(Payload::split::<Request>)) {
            Ok(None) => None,
            Ok(Some(Ok((request, payload)))) => {
                let is_wanted = matches!(request.ask, Ask::Adopt { .. });
                if fd.is_some() && !is_wanted {
                    return Some(self.broken(UNWANTED));
                }
                Some(Heard::Request(request, payload, fd))
            }
            Ok(Some(Err(malformed))) | Err(malformed) => Some(self.broken(malformed)),
        }
    }

    fn broken(&self, malformed: frame::Malformed) -> Heard<'static> {
        tracing::warn!(user = self.user, %malformed, "a client broke the protocol");
        Heard::End
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Answer;

    fn connection() -> (Connection, PacketSocket) {
        let (here, there) = PacketSocket::pair().unwrap();
        let pins = Memfd::create("wholemem-pins", PINS_LEN).unwrap();
        (Connection::new(Some(here), None, pins, 0), there)
    }

    #[test]
    fn nothing_is_kept_for_a_connection_that_is_closed() {
        let (mut connection, there) = connection();
        let done = Response { id: 1, answer: Answer::Done };
        // It does not read, and has begun to say something long.
        while connection.say(&done, Vec::new()) == Standing::Good {}
        there.send(&[&[3][..], &[0; 1000]].concat(), &[], Deadline::NOW).unwrap();
        assert!(connection.hear(&mut [0; 2000], 0).is_none());
        assert!(connection.excess() > 0 && connection.assembly != Assembly::default());
        connection.close();
        let good = |_| connection.say(&done, Vec::new()) == Standing::Good;
        assert!((0..100).all(good), "it is not closed again");
        assert_eq!((connection.outbox.len(), connection.assembly), (0, Assembly::default()));
    }

    #[test]
    fn who_asks_for_memory_and_does_not_read_is_let_go_before_the_server_has_no_descriptors_left() {
        let (mut connection, _there) = connection();
        let done = Response { id: 1, answer: Answer::Done };
        let fd = Rc::new(OwnedFd::from(std::fs::File::open("/dev/zero").unwrap()));
        while connection.say(&done, vec![Rc::clone(&fd)]) != Standing::Bad {}
        assert_eq!(connection.outbox.descriptors(), MOST_DESCRIPTORS + 1);
        connection.close();
        assert_eq!(Rc::strong_count(&fd), 1);
    }

    #[test]
    fn who_never_comes_to_an_end_is_heard_in_turn_with_others() {
        let (mut connection, there) = connection();
        // Behind a message whose beginning another server has read, any number of packets may be.
        connection.assembly = Assembly::inherited();
        let mut left = 0;
        while there.send(&[1], &[], Deadline::NOW).is_ok() {
            left += 1;
        }
        assert!(left > MOST_PACKETS, "{left} packets");
        assert!(connection.hear(&mut [0; 8], 0).is_none());
        let mut rest = 0;
        while connection.socket.as_ref().unwrap().recv(&mut [0; 8], Deadline::NOW).is_ok() {
            rest += 1;
        }
        assert_eq!(rest, left - MOST_PACKETS);
    }
}
