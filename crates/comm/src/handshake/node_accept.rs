//! Accepts connections from other nodes, and authenticates the ranks that made them.
//!
//! Unauthenticated connections are bounded: at most 64 at a time, one second and 256 bytes each. If the limit is reached,
//! one of them is evicted: of the address with the most connections, first one that has sent nothing, then the oldest.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use super::NodePeer;
use crate::id::{GroupKey, random};
use crate::links::StreamSocket;
use crate::network::configure;
use crate::wire::session::{
    Hello, MAX_HANDSHAKE, NodeChallenge, NodeHandshake, PacketReader, Purpose, SessionTranscript, Side,
};
use crate::{Rank, Result};

/// The maximum number of connections that are not authenticated.
const MAX_PENDING: usize = 64;

/// The time in which a connected peer must complete the handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(1);

/// The maximum number of bytes that a peer may send before it is authenticated.
const MAX_RECEIVED: usize = 256;

/// The listening socket of a leader, and the connections whose handshakes are not complete.
#[derive(Debug)]
pub(crate) struct NodeAcceptor {
    listener: TcpListener,
    rank: Rank,
    size: u32,
    key: GroupKey,
    silence: Duration,
    pending: Vec<PendingNode>,
}

#[derive(Debug)]
struct PendingNode {
    stream: TcpStream,
    address: IpAddr,
    since: Instant,
    received: usize,
    packets: PacketReader,
    transcript: Option<SessionTranscript>,
}

enum PendingOutcome {
    Pending,
    Close,
    Authenticated(SessionTranscript),
}

impl NodeAcceptor {
    pub(crate) fn new(
        listener: TcpListener,
        (rank, size): (Rank, u32),
        key: GroupKey,
        silence: Duration,
    ) -> Self {
        Self { listener, rank, size, key, silence, pending: Vec::new() }
    }

    pub(crate) fn listener(&self) -> &TcpListener {
        &self.listener
    }

    /// Returns the listening socket and the sockets of all pending connections, which the caller polls for reading.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        std::iter::once(self.listener.as_fd()).chain(self.pending.iter().map(|peer| peer.stream.as_fd()))
    }

    /// Accepts connections, reads the handshake messages, and returns the ranks that are authenticated now.
    pub(crate) fn serve(&mut self) -> Vec<NodePeer> {
        let mut authenticated = Vec::new();
        self.read_all(&mut authenticated);
        // `accept` also fails if the descriptor table is full; the connections then wait in the backlog of the socket.
        while let Ok((stream, address)) = self.listener.accept() {
            self.add(stream, address.ip());
            // The new connection is read at once: a rank has usually sent its hello by now, so it is not evicted as a
            // silent one.
            self.read_all(&mut authenticated);
        }
        authenticated
    }

    fn add(&mut self, stream: TcpStream, address: IpAddr) {
        if configure(&stream, self.silence).is_err() {
            return;
        }
        if self.pending.len() >= MAX_PENDING {
            let of_address = |address| self.pending.iter().filter(|peer| peer.address == address).count();
            let key = |peer: &PendingNode| {
                (of_address(peer.address), peer.transcript.is_none(), std::cmp::Reverse(peer.since))
            };
            let evicted =
                self.pending.iter().enumerate().max_by_key(|(_, peer)| key(peer)).map(|(index, _)| index);
            if let Some(index) = evicted {
                self.pending.swap_remove(index);
            }
        }
        let (since, packets) = (Instant::now(), PacketReader::default());
        self.pending.push(PendingNode { stream, address, since, received: 0, packets, transcript: None });
    }

    fn read_all(&mut self, authenticated: &mut Vec<NodePeer>) {
        let mut index = 0;
        while index < self.pending.len() {
            match self.read(index) {
                Ok(PendingOutcome::Pending) => index += 1,
                Ok(PendingOutcome::Authenticated(transcript)) => {
                    let peer = self.pending.swap_remove(index);
                    let session = transcript.session(&self.key, Side::Accepting);
                    let socket = StreamSocket::new(peer.stream, session, peer.packets);
                    authenticated.push(NodePeer { rank: transcript.hello.rank, socket });
                }
                Ok(PendingOutcome::Close) | Err(_) => drop(self.pending.swap_remove(index)),
            }
        }
    }

    fn read(&mut self, index: usize) -> Result<PendingOutcome> {
        let own = (self.rank, self.size);
        let peer = &mut self.pending[index];
        if peer.since.elapsed() > HANDSHAKE_TIMEOUT {
            return Ok(PendingOutcome::Close);
        }
        let mut buffer = [0; MAX_RECEIVED];
        loop {
            match peer.packets.next(4, MAX_HANDSHAKE) {
                Err(_) => return Ok(PendingOutcome::Close),
                Ok(Some(packet)) => match (NodeHandshake::decode(&packet[4..]), peer.transcript) {
                    (Ok(NodeHandshake::Hello(hello)), None) => {
                        let (transcript, challenge) = challenge(&self.key, own, hello)?;
                        peer.transcript = Some(transcript);
                        let bytes = NodeHandshake::Challenge(challenge).encode();
                        // The buffer of a new connection has space for the challenge.
                        if !matches!(peer.stream.write(&bytes), Ok(len) if len == bytes.len()) {
                            return Ok(PendingOutcome::Close);
                        }
                    }
                    (Ok(NodeHandshake::Response(proof)), Some(transcript))
                        if transcript.hello.purpose == Purpose::Report
                            && transcript.verify(&self.key, Side::Connecting, proof)
                            && transcript.hello.size == self.size
                            && transcript.hello.rank.0 < self.size =>
                    {
                        return Ok(PendingOutcome::Authenticated(transcript));
                    }
                    _ => return Ok(PendingOutcome::Close),
                },
                Ok(None) => {
                    // A peer may send the first frame together with its response, so the limit is checked only while the
                    // response is incomplete.
                    if peer.received > MAX_RECEIVED {
                        return Ok(PendingOutcome::Close);
                    }
                    match peer.stream.read(&mut buffer) {
                        Ok(0) => return Ok(PendingOutcome::Close),
                        Ok(len) => {
                            peer.received += len;
                            peer.packets.push(&buffer[..len]);
                        }
                        Err(error) if error.kind() == ErrorKind::Interrupted => {}
                        Err(error) if error.kind() == ErrorKind::WouldBlock => {
                            return Ok(PendingOutcome::Pending);
                        }
                        Err(_) => return Ok(PendingOutcome::Close),
                    }
                }
            }
        }
    }
}

fn challenge(
    key: &GroupKey,
    (rank, size): (Rank, u32),
    hello: Hello,
) -> Result<(SessionTranscript, NodeChallenge)> {
    let transcript = SessionTranscript { hello, rank, size, nonce: random()? };
    let proof = transcript.proof(key, Side::Accepting);
    Ok((transcript, NodeChallenge { rank, size, nonce: transcript.nonce, proof }))
}

#[cfg(test)]
mod tests;
