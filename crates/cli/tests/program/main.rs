//! Tests of the program `wholemem` as a process: its output, its exit codes, and the processes and files that it leaves.

#![expect(clippy::unwrap_used, reason = "all of this is tests")]

mod bench;
mod cleanup;
mod collective;
mod demo;
mod doctor;
mod errors;
mod examples;
mod help;
mod hosts;
mod joined;
mod json;
mod launch;
mod log;
mod manual;
mod metrics;
mod run;
mod screens;
mod ssh_nodes;
mod store;
mod table;
mod transfer;
mod worker;
