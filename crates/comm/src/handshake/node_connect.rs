//! One attempt to connect to a rank of another node, with the handshake in which both prove that they know the secret.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use wholemem_os::Errno;

use super::NodePeer;
use crate::id::{GroupKey, random};
use crate::links::StreamSocket;
use crate::network::{begin_to_connect, configure};
use crate::wire::session::{
    Hello, MAX_HANDSHAKE, NodeHandshake, PacketReader, Purpose, SessionTranscript, Side,
};
use crate::{Rank, Result};

/// An attempt to connect to a rank of another node.
#[derive(Debug)]
pub(crate) struct NodeAttempt {
    stream: TcpStream,
    hello: Hello,
    is_connected: bool,
    packets: PacketReader,
    deadline: Instant,
}

/// The state of an attempt after one step.
#[derive(Debug)]
pub(crate) enum AttemptOutcome {
    Pending,
    /// The node refused the connection: no process listens at the address.
    Refused,
    /// The connection failed or was closed, or the process at the address does not know the secret.
    Failed,
    /// The ranks were started with different group sizes: the size and rank of the peer.
    OtherSize(Rank, u32),
    Authenticated(Box<NodePeer>),
}

impl NodeAttempt {
    /// Begins an attempt that fails after `limit`. Returns the outcome instead if it is known at once.
    pub(crate) fn begin(
        address: SocketAddr,
        (purpose, rank, size): (Purpose, Rank, u32),
        limit: Duration,
    ) -> Result<Result<Self, AttemptOutcome>> {
        let hello = Hello { purpose, rank, size, nonce: random()? };
        let stream = match begin_to_connect(address) {
            Ok(stream) => stream,
            Err(wholemem_os::Error::Call { errno: Errno::CONNREFUSED, .. }) => {
                return Ok(Err(AttemptOutcome::Refused));
            }
            Err(_) => return Ok(Err(AttemptOutcome::Failed)),
        };
        let (packets, deadline) = (PacketReader::default(), Instant::now() + limit);
        Ok(Ok(Self { stream, hello, is_connected: false, packets, deadline }))
    }

    /// Returns the socket for `poll`.
    pub(crate) fn poll(&self) -> PollFd<'_> {
        let flags = if self.is_connected { PollFlags::IN } else { PollFlags::OUT };
        PollFd::from_borrowed_fd(self.stream.as_fd(), flags)
    }

    /// Advances the attempt without waiting. After another outcome than `Pending`, the attempt is over.
    pub(crate) fn step(&mut self, key: &GroupKey, silence: Duration) -> AttemptOutcome {
        if !self.is_connected {
            match self.stream.take_error() {
                Ok(None) if self.stream.peer_addr().is_ok() => {}
                Ok(None) => return self.pending(),
                Ok(Some(error)) | Err(error) => {
                    let is_refused = error.kind() == ErrorKind::ConnectionRefused;
                    return if is_refused { AttemptOutcome::Refused } else { AttemptOutcome::Failed };
                }
            }
            self.is_connected = true;
            let hello = NodeHandshake::Hello(self.hello).encode();
            if configure(&self.stream, silence).is_err() || !self.send(&hello) {
                return AttemptOutcome::Failed;
            }
        }
        let mut buffer = [0; MAX_HANDSHAKE];
        loop {
            match self.packets.next(4, MAX_HANDSHAKE) {
                Err(_) => return AttemptOutcome::Failed,
                Ok(Some(packet)) => {
                    let Ok(NodeHandshake::Challenge(challenge)) = NodeHandshake::decode(&packet[4..]) else {
                        return AttemptOutcome::Failed;
                    };
                    let transcript = SessionTranscript {
                        hello: self.hello,
                        rank: challenge.rank,
                        size: challenge.size,
                        nonce: challenge.nonce,
                    };
                    if !transcript.verify(key, Side::Accepting, challenge.proof) {
                        return AttemptOutcome::Failed;
                    }
                    if challenge.size != self.hello.size {
                        return AttemptOutcome::OtherSize(challenge.rank, challenge.size);
                    }
                    return self.respond(key, &transcript);
                }
                Ok(None) => {}
            }
            match self.stream.read(&mut buffer) {
                Ok(0) => return AttemptOutcome::Failed,
                Ok(len) => self.packets.push(&buffer[..len]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return self.pending(),
                Err(_) => return AttemptOutcome::Failed,
            }
        }
    }

    fn pending(&self) -> AttemptOutcome {
        if Instant::now() >= self.deadline { AttemptOutcome::Failed } else { AttemptOutcome::Pending }
    }

    fn respond(&mut self, key: &GroupKey, transcript: &SessionTranscript) -> AttemptOutcome {
        let response = NodeHandshake::Response(transcript.proof(key, Side::Connecting)).encode();
        // The challenge already proves that the process runs, so a probe ends here.
        if self.hello.purpose == Purpose::Report && !self.send(&response) {
            return AttemptOutcome::Failed;
        }
        let Ok(stream) = self.stream.try_clone() else { return AttemptOutcome::Failed };
        let session = transcript.session(key, Side::Connecting);
        let socket = StreamSocket::new(stream, session, std::mem::take(&mut self.packets));
        AttemptOutcome::Authenticated(Box::new(NodePeer { rank: transcript.rank, socket }))
    }

    /// Sends a handshake message: the buffer of a new connection has space for it.
    fn send(&mut self, bytes: &[u8]) -> bool {
        matches!(self.stream.write(bytes), Ok(len) if len == bytes.len())
    }
}
