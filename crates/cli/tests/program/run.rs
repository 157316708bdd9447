//! Runs the program `wholemem` in a test, with a timeout.

use std::process::{Command, Output, Stdio};
use std::time::Duration;

use wholemem_os::{Deadline, PidFd};

/// Returns a deadline so late that only a program that hangs misses it.
pub(crate) fn timeout() -> Deadline {
    Deadline::after(Duration::from_secs(120))
}

/// Returns the command that runs the program, without the stdin and the colour settings of the test process.
pub(crate) fn program(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_wholemem"));
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.env_remove("NO_COLOR").env_remove("COLUMNS").env_remove("CLICOLOR_FORCE");
    // A store logs without being asked to.
    command.env("WHOLEMEM_LOG", "off");
    command
}

/// The exit code and the output of one run of the program.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs the program `wholemem`, and returns its exit code and its output. Panics if the program has not exited after 120 s.
/// The output is read only after the exit, so it must fit in a pipe.
pub(crate) fn run(args: &[&str]) -> Run {
    finish(program(args))
}

pub(crate) fn finish(mut command: Command) -> Run {
    let mut child = command.spawn().unwrap();
    let watch = PidFd::open(child.id()).unwrap();
    if !watch.wait_exit(timeout()).unwrap() {
        child.kill().unwrap();
        panic!("{command:?} hangs: {:?}", child.wait_with_output());
    }
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Run { code: status.code(), stdout: text(stdout), stderr: text(stderr) }
}
