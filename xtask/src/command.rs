//! Runs other programs: prints the command line first, and returns an error if the program fails.
//!
//! Child processes stay in the process group of xtask, so that Ctrl-C in the terminal reaches them too.

use std::env;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Returns a command that runs the cargo that started xtask.
pub(crate) fn cargo() -> Command {
    Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Returns the target folder of cargo.
pub(crate) fn target_folder() -> Result<PathBuf> {
    let metadata = capture(cargo().args(["metadata", "--format-version=1", "--no-deps", "--locked"]))?;
    let metadata: serde_json::Value =
        serde_json::from_str(&metadata).context("cargo metadata did not write JSON")?;
    metadata["target_directory"].as_str().map(PathBuf::from).context("cargo metadata has no target_directory")
}

/// Runs a command with inherited standard output and error.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    print_command(command);
    let status = command.status().with_context(|| format!("cannot start {}", program(command)))?;
    check_status(command, status)
}

/// Runs a command and returns its standard output.
pub(crate) fn capture(command: &mut Command) -> Result<String> {
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start {}", program(command)))?;
    check_status(command, output.status)?;
    String::from_utf8(output.stdout).with_context(|| format!("{} did not write UTF-8", program(command)))
}

/// Runs a command, prints its standard output line by line, and returns the output with the exit status, also on failure.
pub(crate) fn tee(command: &mut Command) -> Result<(ExitStatus, String)> {
    print_command(command);
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {}", program(command)))?;
    let mut output = String::new();
    if let Some(pipe) = child.stdout.take() {
        for line in BufReader::new(pipe).split(b'\n') {
            let line = line.with_context(|| format!("cannot read the output of {}", program(command)))?;
            let line = String::from_utf8_lossy(&line);
            println!("{line}");
            output.push_str(&line);
            output.push('\n');
        }
    }
    let status = child.wait().with_context(|| format!("cannot wait for {}", program(command)))?;
    Ok((status, output))
}

/// Runs a command, and kills the process if it has not exited within the time limit.
pub(crate) fn run_within(command: &mut Command, limit: Duration) -> Result<()> {
    print_command(command);
    let mut child = command.spawn().with_context(|| format!("cannot start {}", program(command)))?;
    let start = Instant::now();
    while start.elapsed() < limit {
        if let Some(status) = child.try_wait()? {
            return check_status(command, status);
        }
        thread::sleep(Duration::from_millis(20));
    }
    child.kill()?;
    child.wait()?;
    bail!(
        "the command `{line}` did not exit within {seconds} s",
        line = command_line(command),
        seconds = limit.as_secs_f64()
    )
}

/// Returns true if a command succeeds; its output is discarded.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    let status = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

/// Returns an error with the command line unless the command succeeded.
pub(crate) fn check_status(command: &Command, status: ExitStatus) -> Result<()> {
    if !status.success() {
        bail!("{}: {status}", command_line(command));
    }
    Ok(())
}

fn print_command(command: &Command) {
    println!("$ {}", command_line(command));
}

/// Returns a command line as typed in a shell, including the environment variables that are set for the command.
fn command_line(command: &Command) -> String {
    let mut words = Vec::new();
    for (name, value) in command.get_envs() {
        let value = value.map(OsStr::to_string_lossy).unwrap_or_default();
        words.push(format!("{}={}", name.to_string_lossy(), quoted(&value)));
    }
    words.push(program(command));
    words.extend(command.get_args().map(|argument| quoted(&argument.to_string_lossy())));
    words.join(" ")
}

fn program(command: &Command) -> String {
    let program = Path::new(command.get_program());
    program.file_name().unwrap_or(program.as_os_str()).to_string_lossy().into_owned()
}

fn quoted(word: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_=+./:,@".contains(&byte);
    if !word.is_empty() && word.bytes().all(plain) { word.to_owned() } else { format!("'{word}'") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_command_line_can_be_pasted_into_a_shell() {
        let mut command = Command::new("/somewhere/bin/cargo");
        command.args(["doc", "--no-deps"]).env("RUSTDOCFLAGS", "-D warnings");
        assert_eq!(command_line(&command), "RUSTDOCFLAGS='-D warnings' cargo doc --no-deps");
    }

    #[test]
    fn the_error_of_a_failing_command_names_it() {
        let error = run(&mut shell("exit 3")).unwrap_err();
        assert_eq!(error.to_string(), "sh -c 'exit 3': exit status: 3");
    }

    #[test]
    fn the_error_of_a_missing_program_names_it() {
        let error = run(&mut Command::new("/nowhere/wholemem-no-such-program")).unwrap_err();
        assert_eq!(error.to_string(), "cannot start wholemem-no-such-program");
    }

    #[test]
    fn tee_returns_what_a_failing_command_wrote() {
        let (status, output) = tee(&mut shell("echo one; printf two; exit 1")).unwrap();
        assert_eq!(output, "one\ntwo\n");
        assert_eq!(status.code(), Some(1));
    }

    #[test]
    fn capture_returns_standard_output() {
        assert_eq!(capture(&mut shell("echo one")).unwrap(), "one\n");
    }

    #[test]
    fn a_command_past_its_limit_is_killed_and_reported() {
        // `cat` never exits in this test, because the write end of its standard input stays open.
        let mut command = Command::new("cat");
        command.stdin(Stdio::piped());
        let error = run_within(&mut command, Duration::from_millis(50)).unwrap_err();
        assert_eq!(error.to_string(), "the command `cat` did not exit within 0.05 s");
    }

    #[test]
    fn within_the_limit_success_and_failure_are_reported() {
        let limit = Duration::from_secs(600);
        run_within(&mut shell("true"), limit).unwrap();
        let error = run_within(&mut shell("false"), limit).unwrap_err();
        assert_eq!(error.to_string(), "sh -c false: exit status: 1");
    }
}
