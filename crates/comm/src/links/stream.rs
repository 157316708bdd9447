//! A TCP connection between two authenticated ranks of different nodes. Its packets have boundaries, as those of a packet
//! socket have, and each has a MAC and a sequence number.
//!
//! No call waits. A frame that the socket does not accept whole is kept until it does, and no further frame is accepted
//! meanwhile.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::{Mutex, MutexGuard, PoisonError};

use wholemem_os::packet::MAX_PACKET;
use wholemem_os::{Errno, Error as OsError};

use crate::wire::Malformed;
use crate::wire::session::{Opener, PACKET_HEADER, PacketReader, Sealer};

/// How a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Closing {
    /// The peer has closed the connection: the kernel does so when its process exits.
    Eof,
    /// The connection was reset, or the kernel gave up sending (`TCP_USER_TIMEOUT`).
    Reset,
    /// A frame was forged, repeated or reordered.
    Forged(&'static str),
}

/// A TCP connection to an authenticated rank.
#[derive(Debug)]
pub(crate) struct StreamSocket {
    stream: TcpStream,
    outgoing: Mutex<Outgoing>,
    incoming: Mutex<Incoming>,
}

#[derive(Debug)]
struct Outgoing {
    sealer: Sealer,
    /// The packet that is being sent, and how many of its bytes the socket has accepted.
    packet: Vec<u8>,
    sent: usize,
}

#[derive(Debug)]
struct Incoming {
    opener: Opener,
    packets: PacketReader,
    buffer: Vec<u8>,
    closing: Option<Closing>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn os_error(call: &'static str, error: &std::io::Error) -> OsError {
    match error.kind() {
        ErrorKind::WouldBlock => OsError::TimedOut,
        _ => OsError::Call { call, errno: Errno::from_io_error(error).unwrap_or(Errno::IO) },
    }
}

impl StreamSocket {
    /// Wraps a non-blocking connection whose handshake is complete, with the bytes received after the handshake.
    pub(crate) fn new(stream: TcpStream, (sealer, opener): (Sealer, Opener), packets: PacketReader) -> Self {
        let outgoing = Outgoing { sealer, packet: Vec::new(), sent: 0 };
        let incoming = Incoming { opener, packets, buffer: vec![0; MAX_PACKET], closing: None };
        Self { stream, outgoing: Mutex::new(outgoing), incoming: Mutex::new(incoming) }
    }

    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Sends a frame, or keeps the rest of it.
    ///
    /// # Errors
    /// [`OsError::TimedOut`] if the previous frame has not been sent whole.
    pub(crate) fn send(&self, frame: &[u8]) -> Result<(), OsError> {
        let mut outgoing = lock(&self.outgoing);
        outgoing.flush(&self.stream)?;
        outgoing.packet.clear();
        outgoing.sent = 0;
        let Outgoing { sealer, packet, .. } = &mut *outgoing;
        sealer.seal(frame, packet);
        match outgoing.flush(&self.stream) {
            Err(OsError::TimedOut) => Ok(()),
            outcome => outcome,
        }
    }

    /// Sends the rest of the last frame.
    ///
    /// # Errors
    /// [`OsError::TimedOut`] if the socket did not accept all of it.
    pub(crate) fn flush(&self) -> Result<(), OsError> {
        lock(&self.outgoing).flush(&self.stream)
    }

    /// Receives a frame into `buffer`, and returns its length.
    ///
    /// # Errors
    /// [`OsError::TimedOut`] if none has arrived whole; [`OsError::Closed`] if the connection has ended.
    pub(crate) fn recv(&self, buffer: &mut [u8]) -> Result<usize, OsError> {
        let mut incoming = lock(&self.incoming);
        loop {
            match incoming.next(buffer) {
                Ok(Some(len)) => return Ok(len),
                Ok(None) => {}
                Err(Malformed(violation)) => incoming.closing = Some(Closing::Forged(violation)),
            }
            if incoming.closing.is_some() {
                return Err(OsError::Closed);
            }
            let Incoming { buffer: received, packets, closing, .. } = &mut *incoming;
            match (&self.stream).read(received) {
                Ok(0) => *closing = Some(Closing::Eof),
                Ok(len) => packets.push(&received[..len]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Err(OsError::TimedOut),
                Err(_) => *closing = Some(Closing::Reset),
            }
        }
    }

    /// Returns true if a received frame has not been returned yet: `poll` does not report it.
    pub(crate) fn has_frame(&self) -> bool {
        lock(&self.incoming).packets.has_next(PACKET_HEADER)
    }

    /// Returns how the connection ended, if `recv` has found that it has.
    pub(crate) fn closing(&self) -> Option<Closing> {
        lock(&self.incoming).closing
    }

    /// Ends the sending half: the peer reads the frames sent before, and then the end of the connection.
    pub(crate) fn shut_down_sending(&self) {
        // An error means that the connection has ended.
        let _ = self.stream.shutdown(std::net::Shutdown::Write);
    }
}

impl Outgoing {
    fn flush(&mut self, mut stream: &TcpStream) -> Result<(), OsError> {
        while self.sent < self.packet.len() {
            match stream.write(&self.packet[self.sent..]) {
                Ok(0) => return Err(OsError::Closed),
                Ok(len) => self.sent += len,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(os_error("send", &error)),
            }
        }
        Ok(())
    }
}

impl Incoming {
    fn next(&mut self, buffer: &mut [u8]) -> Result<Option<usize>, Malformed> {
        let Some(packet) = self.packets.next(PACKET_HEADER, MAX_PACKET)? else { return Ok(None) };
        let frame = self.opener.open(packet)?;
        let Some(to) = buffer.get_mut(..frame.len()) else {
            return Err(Malformed("a packet is longer than any message"));
        };
        to.copy_from_slice(frame);
        Ok(Some(frame.len()))
    }
}
