//! The keeper: a small process that holds every descriptor of a store, so that its server may die.
//!
//! ```text
//!   keeper                                    server
//!   starts it ------------------------------> takes over what is kept
//!   <---------------------------- park (fds)  for memory, clients and the index
//!   parked ---------------------------------> only now is it written down
//!   <-------------------------------- unpark  after it was struck out
//!   sees it die by its pidfd, starts another
//! ```
//!
//! It is the parent: `serve` takes the name, and starts the server as its child. It speaks to no client, maps nothing and
//! knows no CUDA, so that there is little in it to go wrong. Should it die all the same, the server starts another one and
//! parks everything again.
//!
//! What it keeps true: there is never a second server while the first one lives, since nothing but the death of its
//! process counts. What it will not do: outlive both. Then the memory goes with the last process that has it mapped.

mod machine;
mod run;
mod wire;

pub use run::Role;
pub(crate) use run::{Kept, Launch, Origin, run};
pub(crate) use wire::{Key, ToKeeper, ToServer};
