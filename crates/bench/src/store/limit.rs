//! The lower limit of the time of a store request: a round trip over a socket between two processes, with as many bytes in the
//! request.
//!
//! A client sends the bytes of a small object to the server, which is another process. The limit does the same: it sends a
//! packet of that length to a process that replies with one byte. Both are pinned to the core of the store's processes. Two
//! threads of one process would be faster by the cost of switching between processes, which a store cannot avoid. A packet has
//! at most 64 KiB. Longer objects are mapped and not sent, so their limit is a round trip of one byte.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use wholemem_command::link::PeerLink;
use wholemem_command::peer::PeerProcess;
use wholemem_command::peer::PeerRole;
use wholemem_hal::BackendKind;
use wholemem_os::Deadline;
use wholemem_os::packet::MAX_PACKET;

const WARM_UP: u32 = 10;

/// The maximum length of an object whose bytes the round trip sends in a packet.
const LONGEST: usize = 64 << 10;

/// The second process of a round trip, which replies to packets.
#[derive(Debug)]
pub(super) struct EchoPeer(PeerProcess);

impl EchoPeer {
    pub(super) fn start() -> Result<Self> {
        Ok(Self(PeerProcess::start(PeerRole::Echo, BackendKind::Host)?))
    }

    /// Measures a round trip that sends `bytes`, or one byte if `bytes` is empty or does not fit in a packet.
    pub(super) fn round_trip(&mut self, bytes: &[u8]) -> Result<Duration> {
        let packet = if bytes.is_empty() || bytes.len() > LONGEST { &[7] } else { bytes };
        self.0.with_link(|link| {
            let mut answer = [0; 8];
            let start = Instant::now();
            link.socket().send(packet, &[], Deadline::NEVER)?;
            let got = link.socket().recv(&mut answer, Deadline::NEVER)?;
            let took = start.elapsed();
            ensure!(got == 1, "the reply to a packet has {got} bytes instead of 1");
            Ok(took)
        })
    }

    /// Returns the times of `rounds` round trips of one byte.
    pub(super) fn round_trips(&mut self, rounds: u32) -> Result<Vec<Duration>> {
        for _ in 0..WARM_UP {
            self.round_trip(&[])?;
        }
        (0..rounds).map(|_| self.round_trip(&[])).collect()
    }
}

/// Replies to every packet with one byte, until the other process closes the connection.
///
/// # Errors
/// If the connection is closed, or the error of a call.
pub fn echo(link: &PeerLink) -> Result<()> {
    let mut packet = vec![0; MAX_PACKET];
    loop {
        let len = link.socket().recv(&mut packet, Deadline::NEVER)?;
        link.socket().send(&packet[len - 1..len], &[], Deadline::NEVER)?;
    }
}
