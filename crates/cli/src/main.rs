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
//! | [`top`] | the live view of a store |
//! | [`manual`] | completions for shells, and manual pages |
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
mod manual;
mod peer_role;
mod store;
mod table;
mod top;

use std::process::ExitCode;

use clap::Parser;
use wholemem_command::failure::ErrorReport;
use wholemem_command::{failure, log};

use crate::cli::{Cli, Command};

fn main() -> ExitCode {
    let json = is_json_requested();
    let command = match Cli::try_parse() {
        Ok(cli) => cli.command,
        Err(error) => return report_usage(&error, json),
    };
    if let Err(error) = log::start(is_daemon(&command)) {
        return failure::report(&error, json);
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
        Command::Top(args) => top::run(&args),
        Command::Completions(args) => manual::completions(&args),
        Command::Man(args) => manual::man(&args),
        Command::Launch(args) => match launch::run(&args) {
            Ok(code) => return code,
            Err(error) => Err(error),
        },
        Command::Agent => launch::run_agent(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure::report(&error, json),
    }
}

/// Returns true if the command serves a store for its user, and not for another command that starts a temporary one.
fn is_daemon(command: &Command) -> bool {
    matches!(command, Command::Serve(args) if args.parent.is_none())
}

/// Returns true if this command line contains `--json`. The arguments of the command that `launch` runs are not its own.
fn is_json_requested() -> bool {
    let arguments = std::env::args_os().skip(1);
    let mut own = arguments.take_while(|argument| argument != "--" && argument != "launch");
    own.any(|argument| argument == "--json")
}

/// Prints the help that was asked for, or the error of an invalid command line, and returns the exit code.
fn report_usage(error: &clap::Error, json: bool) -> ExitCode {
    if error.use_stderr() && json {
        let text = error.render().to_string();
        let first = text.split("\n\n").next().unwrap_or_default().trim();
        let message = first.strip_prefix("error: ").unwrap_or(first).to_owned();
        let hint = Some("for more information, try `--help`".to_owned());
        failure::print_json(&ErrorReport { message, code: Some("usage"), hint });
    } else {
        // An error is ignored: the reader of the output has closed it.
        let _ = error.print();
    }
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}
