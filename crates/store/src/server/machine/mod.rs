//! The decisions of the server as a state machine: `step(now, input) -> outputs`, without I/O.

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
