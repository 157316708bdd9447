//! Round trips of a TCP connection between two ranks whose both ends block.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use wholemem_testkit::ClusterRank;

/// The number of timed calls of a round.
pub(crate) const ROUNDS: usize = 300;

const PORT: u16 = 4720;

/// The connection of rank 0 to rank 1.
pub(crate) struct Connection {
    stream: TcpStream,
    begins: bool,
}

impl Connection {
    pub(crate) fn create(rank: &ClusterRank) -> Self {
        let address = SocketAddr::new(rank.v4(1).into(), PORT);
        let stream = if rank.id() == 1 {
            TcpListener::bind(address).and_then(|listener| listener.accept()).expect("a connection").0
        } else {
            // The other rank may not listen yet.
            loop {
                match TcpStream::connect(address) {
                    Ok(stream) => break stream,
                    Err(_) => std::thread::yield_now(),
                }
            }
        };
        stream.set_nodelay(true).expect("an option");
        Self { stream, begins: rank.id() == 0 }
    }

    pub(crate) fn round_trip(&self) {
        let mut bytes = [0; 64];
        if self.begins {
            (&self.stream).write_all(&bytes).expect("a connection");
        }
        (&self.stream).read_exact(&mut bytes).expect("a connection");
        if !self.begins {
            (&self.stream).write_all(&bytes).expect("a connection");
        }
    }
}

/// Returns the median time of a call.
pub(crate) fn median(call: impl Fn()) -> Duration {
    let mut times: Vec<_> = (0..ROUNDS)
        .map(|_| {
            let began = Instant::now();
            call();
            began.elapsed()
        })
        .collect();
    times.sort();
    times[ROUNDS / 2]
}
