//! The keeper: a small process that holds every descriptor of a store, so that the store survives the death of its server.
//!
//! ```text
//!   keeper                                    server
//!   starts it ------------------------------> receives all descriptors
//!   <---------------------------- park (fds)  for memory, clients and the index
//!   parked ---------------------------------> only now writes it to the index
//!   <-------------------------------- unpark  after removal from the index
//!   sees it die by its pidfd, starts another
//! ```
//!
//! The keeper is the parent process: `serve` creates the socket and starts the server as a child. The keeper has no connection to
//! clients, maps no memory and does not load CUDA, so that little can fail in it. If it dies nevertheless, the server starts
//! another keeper and parks all descriptors again.
//!
//! There is never a second server while the first one lives: a server is replaced only after its process has exited. If the
//! keeper and the server die together, the memory is freed with the last process that has it mapped.

mod machine;
mod messages;
mod run;

pub(crate) use messages::{DescriptorKey, ToKeeper, ToServer};
pub(crate) use run::{DescriptorTable, KeeperOrigin, run};
pub use run::{Launch, ProcessRole};
