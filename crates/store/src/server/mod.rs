//! The server: a machine that decides, and the one thread that reads, writes and waits for it.
//!
//! | room | what it holds |
//! |---|---|
//! | [`machine`] | `step(now, input) -> outputs`, and who asks and is told what |
//! | [`create`], [`adopt`], [`retire`] | how objects come about, of new memory or of what a client has, and how they go |
//! | [`pending`], [`resume`] | memory that is being made, and the requests that wait for it |
//! | [`waiting`] | questions that are answered later: for a name, and for room |
//! | [`recover`] | taking over from a server that died |
//! | [`ledger`], [`arenas`], [`slots`], [`stock`] | which memory and which slots are taken, and what is made ahead |
//! | [`index_memory`] | the memory of the index, which every server of a store has |
//! | [`run`](mod@run) | the loop: what happens is told to the machine, and what it says is done |
//! | [`door`], [`connection`], [`outbox`] | how clients come, what they say, and what waits to be sent to them |
//! | [`yard`], [`workers`], [`fair_queue`] | memory and pins, the threads that make memory, and the queue that is fair per user |
//! | [`headroom`] | how much memory there is to be taken, looked at before it is |
//!
//! What it keeps true: an operation counts from one store into the index on, and is answered after that; no sealed object
//! is lost while its keeper lives; no client makes it wait.

mod adopt;
mod arenas;
mod budget;
mod clients;
mod connection;
mod create;
mod door;
mod fair_queue;
mod headroom;
mod index_memory;
mod keeper_link;
mod ledger;
mod machine;
mod made;
mod message_slots;
mod outbox;
mod pending;
mod pin_scan;
mod poller;
mod recover;
#[cfg(test)]
mod replay;
mod resume;
mod retire;
mod run;
mod slots;
mod stock;
mod waiting;
mod watchers;
mod workers;
#[cfg(test)]
mod world;
mod yard;

pub(crate) use budget::{Budget, Limits};
pub(crate) use ledger::Terms;
pub(crate) use machine::{Input, Now, Output, Premises, Server, Settings};
pub(crate) use pin_scan::PinPosition;
pub(crate) use recover::Survivors;
pub(crate) use run::run;
