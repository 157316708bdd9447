//! The real program, run as people and scripts run it: what it prints, how it ends, and what it leaves behind.

#![expect(clippy::unwrap_used, reason = "all of this is tests")]

mod bench;
mod cleanup;
mod collective;
mod demo;
mod doctor;
mod errors;
mod examples;
mod help;
mod json;
mod launch;
mod run;
mod store;
mod table;
mod transfer;
