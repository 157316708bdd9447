//! Process groups on one or several nodes: ranks authenticate each other, detect deaths, and exchange bytes and, on one
//! node, file descriptors.
//!
//! ```text
//!   launcher ---- UniqueId ----> every rank           the ranks connect as a tree, within milliseconds
//!
//!                  0
//!               /  |  \                               Bootstrap: barrier, broadcast, all_gather,
//!              1   2   3 ...                          all_to_all, all_gather_fds, agree, split
//!
//!   each rank watches its neighbours; within 100 ms of a death, every rank knows which rank has died
//! ```
//!
//! The modules are layers. Each uses only those below it in this drawing:
//!
//! ```text
//!   bootstrap       Bootstrap: creating a group, collectives, descriptors, split, launchers' environment, watch
//!   progress        the thread of a communicator: joins, reads, forwards, detects deaths
//!   core            the state that callers and that thread share
//!   links           connections between ranks        handshake       authentication of ranks
//!   machine         the protocols as state machines without I/O, and the simulator that tests them
//!   wire            frames and handshake messages as bytes
//!   network         how nodes reach each other; TCP sockets
//!   topology        the tree along which messages travel, on one node and over several
//!   fault, id       why a group failed, UniqueId
//!   operation       the collective operations, with the arguments that must be equal on all ranks
//!   error, rank     Error, Rank and the tree
//!   discovery       reads where the other nodes of a group are
//! ```
//!
//! | item | description |
//! |---|---|
//! | [`UniqueId`] | the address and the secret of a group, which the launcher passes to every rank |
//! | [`Bootstrap`] | a rank's membership in a group, with every operation |
//! | [`Network`] | how the ranks of several nodes reach each other |
//! | [`FailureWatch`] | a callback for the failure of a group |
//! | [`VoteResult`] | the result of a vote |
//! | [`discovery`] | reads where the other nodes of a group are, for [`Bootstrap::from_env`] and launchers |
//! | [`Error`] | errors, which name the ranks that caused them |
//!
//! **Guarantees.** Every wait ends when its timeout expires, not before, and at most a second after it. If a rank
//! dies, every survivor gets [`Error::PeerLost`]. If a rank is stopped or was not started, every other rank gets
//! [`Error::Timeout`]. Both errors name the rank. If ranks make different calls, every rank gets
//! [`Error::RanksDisagree`] with two of the calls, without waiting for its timeout. After that, every operation of the group fails at once, and the
//! survivors can create a new group. A group that has ended leaves no descriptor, mapping or file.
//!
//! **Several nodes.** [`Bootstrap::create_over`] joins ranks on several nodes over TCP. A node or a rank that does not answer
//! for five seconds, or the time that [`Network::with_silence`] sets, is given up: every rank that can still be reached gets
//! [`Error::NodeTimeout`], which names the node and its ranks, also if no operation is in progress. An interrupted
//! connection between two running nodes ends the group too. Descriptors cannot be passed over several nodes.
//! [`Bootstrap::from_env`] does so if the launcher's variables describe several nodes.
//!
//! **Limits.** Traffic is not encrypted, and processes of the same user are trusted.
//!
//! ```
//! use wholemem_comm::{Bootstrap, Rank, UniqueId};
//! use wholemem_os::Deadline;
//! use std::time::Duration;
//!
//! // The ranks are threads here. Usually each rank is a process, to which a launcher passes the text of the id.
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
//!
//! The feature `test-hooks`, off by default, adds entry points for fuzzing. It is for this crate's own tests.

#![forbid(unsafe_code)]

mod bootstrap;
mod core;
pub mod discovery;
mod error;
mod fault;
#[cfg(feature = "test-hooks")]
#[doc(hidden)]
pub mod fuzz;
mod handshake;
mod id;
mod links;
mod machine;
mod network;
mod operation;
mod progress;
mod rank;
mod topology;
mod wire;

pub use bootstrap::{Bootstrap, DEFAULT_TIMEOUT, FailureWatch, VoteResult};
pub use error::{Error, Result};
pub use id::UniqueId;
pub use network::{DEFAULT_SILENCE, Network};
pub use rank::Rank;
