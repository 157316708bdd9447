//! What the commands of the program `wholemem` share: output, errors with hints, sizes, the choice of a backend, and the
//! program as further processes.
//!
//! | module | what it holds |
//! |---|---|
//! | [`terminal`], [`table`], [`progress`] | output: data on stdout, the rest on stderr |
//! | [`failure`] | errors with a `hint:` line, and exit codes |
//! | [`size`] | byte counts as text |
//! | [`backend`], [`memory`] | the choice of a backend; how much memory there is |
//! | [`peer`], [`link`] | this program as a second process, and the messages between the two |
//! | [`ranks`] | this program as the ranks of a group |
//! | [`own_store`] | this program as the server of a store |
//!
//! It is the part of the program that its commands and the benchmarks (`wholemem-bench`) both need, and no interface for
//! others: it changes with the program. A process that it starts does not outlive the process that started it.

#![forbid(unsafe_code)]

pub mod backend;
pub mod failure;
pub mod link;
pub mod memory;
pub mod own_store;
pub mod peer;
pub mod progress;
pub mod ranks;
pub mod size;
pub mod table;
pub mod terminal;
