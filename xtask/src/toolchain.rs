//! Checks for components of the Rust toolchain, and installs missing ones with rustup.
//!
//! A step whose tools are missing and cannot be installed is reported as skipped, never as passed.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, anyhow};

use crate::command;

/// The time limit for rustup to install one component or target.
const FETCH_LIMIT: Duration = Duration::from_secs(180);

/// The error of a test step that cannot run on this machine. The test run continues and reports the reason.
#[derive(Debug)]
pub(crate) struct Skip {
    reason: String,
}

impl Skip {
    pub(crate) fn new(reason: impl Into<String>) -> Self {
        Self { reason: reason.into() }
    }
}

impl std::fmt::Display for Skip {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.reason)
    }
}

impl std::error::Error for Skip {}

/// Ensures that `cargo SUBCOMMAND` runs, and installs the toolchain component with the subcommand if necessary.
pub(crate) fn need_component(subcommand: &str, component: &str) -> Result<()> {
    let runs = || command::succeeds(command::cargo().args([subcommand, "--version"]));
    if runs() || (fetch(&["component", "add", component]) && runs()) {
        return Ok(());
    }
    Err(missing(component, &format!("rustup component add {component}")))
}

/// Ensures that the Rust standard library for a target is installed, and installs it if necessary.
pub(crate) fn need_target(target: &str) -> Result<()> {
    let is_installed = || {
        let libdir =
            command::capture(Command::new("rustc").args(["--print", "target-libdir", "--target", target]));
        libdir.is_ok_and(|folder| Path::new(folder.trim()).is_dir())
    };
    if is_installed() || (fetch(&["target", "add", target]) && is_installed()) {
        return Ok(());
    }
    Err(missing(target, &format!("rustup target add {target}")))
}

/// Ensures that the nightly toolchain has Miri and the sources of the standard library. The toolchain itself is not installed
/// automatically.
pub(crate) fn need_miri() -> Result<()> {
    let install = "rustup toolchain install nightly --profile minimal --component miri,rust-src";
    let Ok(toolchains) = command::capture(Command::new("rustup").args(["toolchain", "list"])) else {
        return Err(missing("rustup", install));
    };
    if !has_nightly(&toolchains) {
        return Err(missing("nightly toolchain", install));
    }
    let is_installed = || {
        let list = ["component", "list", "--installed", "--toolchain", "nightly"];
        command::capture(Command::new("rustup").args(list)).is_ok_and(|installed| has_miri(&installed))
    };
    if is_installed()
        || (fetch(&["component", "add", "--toolchain", "nightly", "miri", "rust-src"]) && is_installed())
    {
        return Ok(());
    }
    Err(missing("Miri in the nightly toolchain", "rustup component add --toolchain nightly miri rust-src"))
}

/// Returns true if rustup's list of toolchains has the rolling nightly. A nightly that is pinned to a date does not count.
fn has_nightly(toolchains: &str) -> bool {
    toolchains.lines().filter_map(|line| line.strip_prefix("nightly")).any(|rest| {
        rest.strip_prefix('-').is_none_or(|host| !host.starts_with(|first: char| first.is_ascii_digit()))
    })
}

fn has_miri(installed: &str) -> bool {
    let has = |component: &str| installed.lines().any(|line| line.starts_with(component));
    has("miri") && has("rust-src")
}

fn fetch(arguments: &[&str]) -> bool {
    match command::run_within(Command::new("rustup").args(arguments), FETCH_LIMIT) {
        Ok(()) => true,
        Err(error) => {
            println!("{error:#}");
            false
        }
    }
}

fn missing(tool: &str, install: &str) -> anyhow::Error {
    println!("hint: {install}");
    anyhow!(Skip::new(format!("no {tool}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nightly_pinned_to_a_date_is_not_accepted() {
        assert!(has_nightly("stable-x86_64-unknown-linux-gnu (default)\nnightly-x86_64-unknown-linux-gnu\n"));
        assert!(!has_nightly(
            "stable-x86_64-unknown-linux-gnu\nnightly-2025-06-01-x86_64-unknown-linux-gnu\n"
        ));
        assert!(!has_nightly(""));
    }

    #[test]
    fn miri_needs_the_sources_of_the_standard_library() {
        assert!(has_miri("cargo-x86_64-unknown-linux-gnu\nmiri-x86_64-unknown-linux-gnu\nrust-src\n"));
        assert!(!has_miri("cargo-x86_64-unknown-linux-gnu\nmiri-x86_64-unknown-linux-gnu\n"));
        assert!(!has_miri("rust-src\n"));
    }

    #[test]
    fn a_missing_tool_is_a_skip_with_its_reason() {
        let skip = missing("nightly toolchain", "rustup toolchain install nightly");
        assert_eq!(skip.downcast::<Skip>().unwrap().reason, "no nightly toolchain");
    }
}
