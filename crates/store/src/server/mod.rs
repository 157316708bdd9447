//! The server: a machine that decides, and the one thread that reads, writes and waits for it.
//!
//! | room | what it holds |
//! |---|---|
//! | [`machine`] | `step(now, input) -> outputs`, and who asks and is told what |
//! | [`create`], [`retire`] | how objects come about, and how they go |
//! | [`recover`] | taking over from a server that died |
//! | [`ledger`], [`slots`] | which memory and which slots are taken |
//!
//! What it keeps true: an operation counts from one store into the index on, and is answered after that; no sealed object
//! is lost while its keeper lives; no client makes it wait.

mod create;
mod ledger;
mod machine;
mod recover;
#[cfg(test)]
mod replay;
mod retire;
mod slots;

pub(crate) use ledger::Terms;
pub(crate) use machine::{Input, Now, Output, Premises, Server, Settings, Share};
pub(crate) use recover::Survivors;
