//! Restores the default disposition of SIGINT, which child processes inherit.
//!
//! A shell without job control starts background commands with SIGINT ignored. Python then installs no handler for SIGINT, and
//! tests that send it hang.

use std::env;
use std::fs;
use std::os::unix::process::CommandExt;
use std::process::Command;

const SIGINT: u32 = 2;

/// If SIGINT is ignored, executes xtask again with the default disposition, through `env` of GNU coreutils.
pub(crate) fn restore_default_sigint() {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    if !ignores(&status, SIGINT) {
        return;
    }
    println!("SIGINT is ignored: restarting with the default disposition");
    if let Ok(program) = env::current_exe() {
        // `exec` returns an error only, because on success it replaces this process.
        let error =
            Command::new("env").arg("--default-signal=INT").arg(program).args(env::args_os().skip(1)).exec();
        println!("cannot start env: {error}");
    }
    println!("hint: run this command in the foreground");
}

/// Returns true if a process ignores a signal. `status` is the text of its `/proc/PID/status`.
fn ignores(status: &str, signal: u32) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & (1 << (signal - 1)) != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ignored_signal_is_read_from_the_mask() {
        let status = "Name:\tcargo\nSigBlk:\t0000000000000002\nSigIgn:\t0000000000001002\nSigCgt:\t0\n";
        assert!(ignores(status, 2));
        assert!(ignores(status, 13));
        assert!(!ignores(status, 1));
    }

    #[test]
    fn a_signal_that_is_only_blocked_is_not_ignored() {
        assert!(!ignores("SigBlk:\t0000000000000002\nSigIgn:\t0000000000001000\n", SIGINT));
        assert!(!ignores("", SIGINT));
    }
}
