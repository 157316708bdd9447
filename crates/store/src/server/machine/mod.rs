//! The decisions of the server as a state machine: `step(now, input) -> outputs`, without I/O.
//!
//! A part is a struct with private fields. A part that needs another one gets it as an argument, and a decision is an output
//! or a return value. Only [`state`] composes several parts.
//!
//! | module | what it holds |
//! |---|---|
//! | [`interface`] | inputs, outputs, and the memory that a step may access |
//! | [`server`] | the step, and the dispatch of requests |
//! | [`creation`], [`plan`], [`pending`] | creating objects, and requests that wait for memory |
//! | [`sealing`] | sealing drafts |
//! | [`state`] | the parts below together, and changes that involve several of them |
//! | [`objects`], [`slots`] | the table of objects |
//! | [`memory_pool`], [`ledger`], [`arenas`], [`prealloc`] | memory accounting |
//! | [`sessions`], [`request_history`] | clients, and which object each request has created |
//! | [`retirement`], [`pin_scan`] | deleted objects, until no client has them pinned |
//! | [`waiting`] | requests for a name or for room that are answered later |
//! | [`recovery`] | the state derived from an index that another server has written |
//!
//! Tests: `simulation` kills the server after every store of a step and recovers it.

mod arenas;
mod creation;
mod interface;
mod ledger;
mod memory_pool;
mod objects;
mod outputs;
mod pending;
mod pin_scan;
mod plan;
mod prealloc;
mod recovery;
mod request_history;
mod retirement;
mod sealing;
mod server;
mod sessions;
#[cfg(test)]
mod simulation;
mod slots;
mod state;
#[cfg(test)]
mod tests;
mod waiting;

pub(crate) use interface::{Input, Now, Output, Requester, ServerMemory, Settings, Share};
pub(crate) use ledger::{HOST, Terms};
pub(crate) use pin_scan::{PinPosition, WORK_OF_A_PAGE};
pub(crate) use recovery::Survivors;
pub(crate) use server::Server;
