//! The program `wholemem`: what this machine can do, a tour that checks itself, and benchmarks against the machine's
//! own limits.
//!
//! | module | what it holds |
//! |---|---|
//! | [`cli`] | the command line: words, defaults, help |
//! | [`doctor`] | what this machine can do, each thing tried |
//! | [`demo`] | a tour in steps, each checked |
//! | [`files`] | tables of rows as files |
//! | [`launch`] | a command as several ranks, and what a rank does in benches and the tour |
//! | [`store`] | serving objects, and putting, getting and listing them |
//! | [`peer_role`] | what this program does as a second process |
//!
//! Two crates belong to it: `wholemem-command`, which the commands share, and `wholemem-bench`, the command `bench`.
//!
//! What it keeps true: data goes to stdout and nothing else does; `--json` prints one object in one line; a check that
//! fails is a failing exit code; a second process never outlives the first, however that ends.

#![forbid(unsafe_code)]

mod cli;
mod demo;
mod doctor;
mod files;
mod launch;
mod peer_role;
mod store;

use std::process::ExitCode;

use clap::Parser;
use wholemem_command::failure;

use crate::cli::{Cli, Command};

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Doctor(args) => doctor::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Table(args) => files::run(&args),
        Command::Bench(args) => wholemem_bench::run(&args),
        Command::Peer(args) => peer_role::run(&args),
        Command::Rank(args) => launch::run_role(&args),
        Command::Serve(args) => store::serve(&args),
        Command::Put(args) => store::put(&args),
        Command::Get(args) => store::get(&args),
        Command::Ls(args) => store::list(&args),
        Command::Stat(args) => store::stat(&args),
        Command::Rm(args) => store::remove(&args),
        Command::Watch(args) => store::watch(&args),
        Command::Launch(args) => match launch::run(&args) {
            Ok(code) => return code,
            Err(error) => Err(error),
        },
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure::report(&error),
    }
}
