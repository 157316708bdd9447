//! Shared parts of the commands of the program `wholemem`: output, errors with hints, sizes, the selection of a backend, and
//! further processes of the program.
//!
//! | module | contents |
//! |---|---|
//! | [`terminal`], [`table`], [`wrap`], [`progress`] | output: data on stdout, the rest on stderr |
//! | [`failure`] | errors with a `hint:` line, and exit codes |
//! | [`log`] | the log events that `WHOLEMEM_LOG` selects, on stderr |
//! | [`size`] | parsing and printing of byte counts |
//! | [`backend`], [`memory`] | the selection of a backend; checks of the available memory |
//! | [`peer`], [`link`] | a second process of this program, and the messages between the two |
//! | [`ranks`] | processes of this program that are the ranks of a group |
//! | [`temporary_store`] | a store that exists as long as a command runs |
//!
//! The crate is used by the commands (`wholemem-cli`) and by the benchmarks (`wholemem-bench`). It has no stable API. A process
//! that it starts ends at the latest when the process that started it ends.

#![forbid(unsafe_code)]

pub mod backend;
pub mod failure;
pub mod link;
pub mod log;
pub mod memory;
pub mod peer;
pub mod progress;
pub mod ranks;
pub mod size;
pub mod table;
pub mod temporary_store;
pub mod terminal;
mod wrap;
