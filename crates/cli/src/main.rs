//! The program `wholemem`: launches ranks, serves and uses a store, handles table files, and diagnoses and measures the machine.
//!
//! | module | contents |
//! |---|---|
//! | [`cli`] | the command line: options, defaults, help |
//! | [`doctor`] | tries every feature on this machine |
//! | [`demo`] | shows the features in steps and verifies each step |
//! | [`launch`] | starts a command as several ranks; the tasks of ranks in benchmarks and in the demo |
//! | [`store`] | the server of a store, and its client commands |
//! | [`table`] | table files |
//! | [`peer_role`] | the tasks of the second process of a benchmark or of the demo |
//!
//! The crate `wholemem-command` has the parts that all commands use, and `wholemem-bench` has the command `bench`.
//!
//! Guarantees: only data is written to stdout; `--json` prints one object in one line; a failed check sets a failing exit
//! code; processes that the program starts end at the latest with the program.

#![forbid(unsafe_code)]

mod cli;
mod demo;
mod doctor;
mod launch;
mod peer_role;
mod store;
mod table;

use std::process::ExitCode;

use clap::Parser;
use wholemem_command::{failure, log};

use crate::cli::{Cli, Command};

fn main() -> ExitCode {
    let command = Cli::parse().command;
    if let Err(error) = log::start() {
        return failure::report(&error);
    }
    let outcome = match command {
        Command::Doctor(args) => doctor::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Table(args) => table::run(&args),
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
        Command::Agent => launch::run_agent(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure::report(&error),
    }
}
