//! The decisions of the store server as a state machine without I/O: `step(now, input) -> outputs`.
//!
//! A part is a struct with private fields. A part that needs another one gets it as an argument, and returns its decisions as
//! outputs or return values. Only [`state`] composes several parts.
//!
//! | module | contents |
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
//! | [`readers`] | counts the clients that have objects pinned |
//! | [`waiting`] | requests for a name or for free space that are answered later |
//! | [`recovery`] | derives the state from the index of a previous server |
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
mod readers;
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

pub(crate) use interface::{
    Input, Output, Requester, ServerMemory, ServerSettings, SharedAllocation, StepTime, WatchStart,
};
pub(crate) use ledger::{AllocationPolicy, HOST};
pub(crate) use pin_scan::{PAGE_WORK, PinPosition};
pub(crate) use recovery::InheritedState;
pub(crate) use server::Server;
