//! The benchmarks of `wholemem bench`, which compare wholemem with raw system calls or plain copies in the same run.
//!
//! | module | what it measures |
//! |---|---|
//! | `alloc`, `share` | creating memory and mapping it; passing it to another process |
//! | `copy` | copies within and between devices |
//! | `launch` | launches of empty kernels |
//! | `bootstrap`, `comm`, `death` | ranks that join, exchange bytes, and detect a killed rank |
//! | `rows` | gather and scatter |
//! | `collective` | all-reduce, all-gather, broadcast, barrier |
//! | `store` | objects of a store |
//! | `sweep`, `sample`, `sizes`, `comparison` | alternating measurements of wholemem and raw calls, over many sizes |
//! | `workers` | processes of this program that measure as ranks |
//! | `report`, `case_report` | results as tables and JSON |
//! | `args` | the options |
//!
//! The program calls [`run`] for its command, and the other public functions in the processes and ranks that benchmarks start
//! ([`wholemem_command::peer`], [`wholemem_command::ranks`]). `wholemem demo` uses the benchmarks of ranks. Every result is
//! verified outside of the measured time.
//!
//! This crate is internal to the program and has no stable API.

#![forbid(unsafe_code)]

mod alloc;
mod args;
mod bootstrap;
mod case_report;
mod collective;
mod comm;
mod command;
mod comparison;
mod copy;
mod death;
mod launch;
mod report;
mod rows;
mod sample;
mod share;
mod sizes;
mod store;
mod sweep;
mod workers;

pub use args::BenchArgs;
pub use collective::{demo as reduce_demo, rank as collective_rank};
pub use command::run;
pub use death::VictimGroup;
pub use rows::{RowOp, RowsResult, demo as rows_demo, rank as rows_rank};
pub use share::receiver;
pub use store::echo;
