//! The limit of a store's requests: one round trip of a socket between two processes that carries as many bytes there.
//!
//! A client and its server are two processes, and the bytes of a small object go from the one to the other. So does this: a
//! packet of that length, received by a process that does nothing but answer by a byte, both tied to the same core as the
//! store's processes are. Two threads of one process would be faster by what it takes to change between processes,
//! which no store can leave out. A packet holds 64 KiB; for longer objects, which are mapped and not sent, the
//! limit is a round trip of one byte.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use wholemem_command::link::PeerLink;
use wholemem_command::peer::PeerProcess;
use wholemem_command::peer::PeerRole;
use wholemem_hal::BackendKind;
use wholemem_os::Deadline;
use wholemem_os::packet::MAX_PACKET;

const WARM_UP: u32 = 10;

/// The longest object that a packet brings along.
const LONGEST: usize = 64 << 10;

/// The other process of a round trip.
#[derive(Debug)]
pub(super) struct EchoPeer(PeerProcess);

impl EchoPeer {
    pub(super) fn start() -> Result<Self> {
        Ok(Self(PeerProcess::start(PeerRole::Echo, BackendKind::Host)?))
    }

    /// How long these bytes there and one back take; of more than a packet brings along, one byte.
    pub(super) fn round_trip(&mut self, bytes: &[u8]) -> Result<Duration> {
        let packet = if bytes.is_empty() || bytes.len() > LONGEST { &[7] } else { bytes };
        self.0.with_link(|link| {
            let mut answer = [0; 8];
            let start = Instant::now();
            link.socket().send(packet, &[], Deadline::NEVER)?;
            let got = link.socket().recv(&mut answer, Deadline::NEVER)?;
            let took = start.elapsed();
            ensure!(got == 1, "an answer of {got} bytes came");
            Ok(took)
        })
    }

    /// The same for one byte, again and again.
    pub(super) fn round_trips(&mut self, rounds: u32) -> Result<Vec<Duration>> {
        for _ in 0..WARM_UP {
            self.round_trip(&[])?;
        }
        (0..rounds).map(|_| self.round_trip(&[])).collect()
    }
}

/// Answers every packet, until the other process has no more.
///
/// # Errors
/// What the system said.
pub fn echo(link: &PeerLink) -> Result<()> {
    let mut packet = vec![0; MAX_PACKET];
    loop {
        let len = link.socket().recv(&mut packet, Deadline::NEVER)?;
        link.socket().send(&packet[len - 1..len], &[], Deadline::NEVER)?;
    }
}
