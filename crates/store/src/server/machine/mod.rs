//! The decisions of the server as a state machine: `step(now, input) -> outputs`, without I/O.

mod adopt;
mod arenas;
mod create;
mod ledger;
mod made;
mod pending;
mod pin_scan;
mod prealloc;
mod recover;
#[cfg(test)]
mod replay;
mod resume;
mod retire;
mod server;
#[cfg(test)]
mod simulation;
mod slots;
mod waiting;

pub(crate) use ledger::Terms;
pub(crate) use pin_scan::{PinPosition, WORK_OF_A_PAGE};
pub(crate) use recover::Survivors;
pub(crate) use server::{Input, Now, Output, Requester, Server, ServerMemory, Settings, Share};
