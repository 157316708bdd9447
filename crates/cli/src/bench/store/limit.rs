//! The limit of a store's requests: one round trip of a socket between two processes that carries as many bytes there.
//!
//! A client and its server are two processes, and the bytes of a small object go from the one to the other. So does this: a
//! packet of that length, received by a process that does nothing but answer by a byte, both tied to the same core as the
//! store's processes are. Two threads of one process would be faster by what it takes to change between processes,
//! which no store can leave out. A packet holds 64 KiB; for longer objects, which are mapped and not sent, the
//! limit is a round trip of one byte.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use wholemem_hal::BackendKind;
use wholemem_os::Deadline;
use wholemem_os::packet::MAX_PACKET;

use crate::cli::PeerRole;
use crate::link::Link;
use crate::peer::Peer;

const WARM_UP: u32 = 10;

/// The longest object that a packet brings along.
const LONGEST: usize = 64 << 10;

/// The other process of a round trip.
#[derive(Debug)]
pub(super) struct Limit(Peer);

impl Limit {
    pub(super) fn start() -> Result<Self> {
        Ok(Self(Peer::start(PeerRole::Echo, BackendKind::Host)?))
    }

    /// How long so many bytes there and one back take.
    pub(super) fn round_trips(&mut self, len: usize, rounds: u32) -> Result<Vec<Duration>> {
        let len = if len > LONGEST { 1 } else { len.max(1) };
        self.0.with(|link| {
            let (packet, mut answer) = (vec![7; len], [0; 8]);
            let mut times = Vec::new();
            for round in 0..WARM_UP + rounds {
                let start = Instant::now();
                link.socket().send(&packet, &[], Deadline::NEVER)?;
                let got = link.socket().recv(&mut answer, Deadline::NEVER)?;
                let took = start.elapsed();
                ensure!(got == 1, "an answer of {got} bytes came");
                if round >= WARM_UP {
                    times.push(took);
                }
            }
            Ok(times)
        })
    }
}

/// Answers every packet, until the other process has no more.
pub(crate) fn echo(link: &Link) -> Result<()> {
    let mut packet = vec![0; MAX_PACKET];
    loop {
        let len = link.socket().recv(&mut packet, Deadline::NEVER)?;
        link.socket().send(&packet[len - 1..len], &[], Deadline::NEVER)?;
    }
}
