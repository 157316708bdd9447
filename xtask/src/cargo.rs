//! The steps that only call cargo: fmt, clippy, tests, doctests, rustdoc and aarch64.

use anyhow::Result;

use crate::{command, openssh, toolchain};

const AARCH64: &str = "aarch64-unknown-linux-gnu";

/// The number of proptest cases in an exhaustive test run.
const EXHAUSTIVE_CASES: &str = "4096";

pub(crate) fn fmt() -> Result<()> {
    toolchain::need_component("fmt", "rustfmt")?;
    // `cargo fmt` runs without `--locked`, because it does not accept the option.
    command::run(command::cargo().args(["fmt", "--all", "--check"]))
}

pub(crate) fn clippy() -> Result<()> {
    toolchain::need_component("clippy", "clippy")?;
    let all = ["--workspace", "--all-targets"];
    // Tests enable features for the whole workspace, so the shipped packages are checked separately to find code that is unused
    // without these features.
    let [program, library, package] =
        ["wholemem-cli", "wholemem-capi", "wholemem-python"].map(|package| ["--package", package]);
    for selected in [all, program, library, package] {
        let mut clippy = command::cargo();
        clippy.arg("clippy").args(selected).args(["--locked", "--", "-D", "warnings"]);
        command::run(&mut clippy)?;
    }
    Ok(())
}

pub(crate) fn tests(exhaustive: bool) -> Result<()> {
    let mut cargo = command::cargo();
    cargo.args(["test", "--workspace", "--all-targets", "--no-fail-fast", "--locked"]);
    // The Python extension module cannot be linked as a test program, so it is tested from Python.
    cargo.args(["--exclude", "wholemem-python"]);
    if exhaustive {
        cargo.env("WHOLEMEM_EXHAUSTIVE", "1").env("PROPTEST_CASES", EXHAUSTIVE_CASES);
    }
    match openssh::environment() {
        Ok(variables) => {
            cargo.envs(variables);
        }
        Err(error) => println!("the tests that need an ssh server will be skipped: {error:#}"),
    }
    command::run(&mut cargo)
}

/// Runs the documentation tests in a step of their own, because `--all-targets` does not include them.
pub(crate) fn doctests() -> Result<()> {
    command::run(command::cargo().args(["test", "--workspace", "--doc", "--no-fail-fast", "--locked"]))
}

pub(crate) fn rustdoc() -> Result<()> {
    let arguments = ["doc", "--workspace", "--no-deps", "--locked"];
    command::run(command::cargo().args(arguments).env("RUSTDOCFLAGS", "-D warnings"))
}

pub(crate) fn aarch64() -> Result<()> {
    toolchain::need_target(AARCH64)?;
    command::run(command::cargo().args(["check", "--workspace", "--target", AARCH64, "--locked"]))
}
