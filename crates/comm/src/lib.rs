//! Ranks that find, trust and watch each other, and pass bytes and file descriptors.
//!
//! ```text
//!   launcher ---- UniqueId ----> every rank           a tree of sockets, made in milliseconds
//!
//!                  0
//!               /  |  \                               Bootstrap: barrier, broadcast, all_gather,
//!              1   2   3 ...                          all_to_all, all_gather_fds, agree, split
//!
//!   each watches its neighbours; a death is known to all within 100 ms, and named
//! ```
//!
//! | room | what it holds |
//! |---|---|
//! | [`UniqueId`] | what ranks have in common before they meet |
//! | [`Bootstrap`] | a rank's membership: how to get one, and every operation |
//! | [`Error`] | what can go wrong, with the ranks it went wrong with |
//! | `machine` | what ranks decide, as machines without I/O, with the simulator that tests them |
//! | `wire` | what travels between ranks, as bytes |
//! | `door`, `knock` | joining: the proof of the secret, and the limits of strangers |
//! | `progress/joining` | joining: whom to accept and to connect to, and who takes the place of a rank that dies |
//! | `link`, `core`, `progress` | connections, what threads share, and the one thread that reads and watches |
//! | `paths` | links between ranks that are no neighbours in the tree, made at first use |
//!
//! What it keeps true: every wait ends, when its timeout has passed and not before, at most a second after it. A rank
//! that died is [`Error::PeerLost`] on every survivor, one that
//! is stopped or never came is [`Error::Timeout`], both with its rank; after that every operation returns an error at
//! once, and a new communicator among the survivors works. Nothing is left behind: descriptors, maps, files.
//!
//! What it will not do: hide what is said. Traffic is not encrypted, and processes of the same user are trusted. Several
//! machines are not joined yet.
//!
//! ```
//! use wholemem_comm::{Bootstrap, Rank, UniqueId};
//! use wholemem_os::Deadline;
//! use std::time::Duration;
//!
//! // In one process here; as a rule, each rank is a process and has got the text of the id from a launcher.
//! let id = UniqueId::create()?;
//! std::thread::scope(|scope| {
//!     for rank in 0..3 {
//!         let id = &id;
//!         scope.spawn(move || {
//!             let comm = Bootstrap::create(id, Rank(rank), 3, Deadline::after(Duration::from_secs(30)))?;
//!             let all = comm.all_gather(&[u8::try_from(rank).unwrap()])?;
//!             assert_eq!(all, [[0], [1], [2]]);
//!             comm.close()
//!         });
//!     }
//! });
//! # Ok::<(), wholemem_comm::Error>(())
//! ```

#![forbid(unsafe_code)]

mod bootstrap;
mod collective;
mod core;
mod descriptors;
mod door;
mod env;
mod error;
#[doc(hidden)]
pub mod fuzz;
mod id;
mod knock;
mod link;
mod machine;
mod paths;
mod progress;
mod rank;
mod split;
mod watch;
mod wire;

pub use bootstrap::{Bootstrap, DEFAULT_TIMEOUT};
pub use collective::Verdict;
pub use error::{Error, Result};
pub use id::UniqueId;
pub use rank::Rank;
pub use watch::Watch;
