//! The server: a machine that decides, and the one thread that reads, writes and waits for it.

mod budget;
mod fair_queue;
mod io;
mod machine;

pub(crate) use budget::{Budget, Limits};
pub(crate) use io::run;
pub(crate) use machine::{Input, Now, Output, PinPosition, Server, ServerMemory, Settings, Survivors, Terms};
