//! `cargo xtask gpu-bundle`: packs the tests, the program and the benchmarks for a machine with a GPU into one folder.
//!
//! The folder has stripped and compressed test binaries, the program likewise, the Python package with its tests, the C and C++ interface
//! with its examples, and the script `run`. It
//! runs on any machine with a CUDA driver and a C library that is at least as new as the one of the build machine; nothing has to
//! be installed there.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command;

const FOLDER: &str = "target/gpu-bundle";

/// The maximum size of the bundle for a machine with a GPU, and of the peer libraries in addition.
const MAX_BYTES: u64 = 25 << 20;
const MAX_PEERS_BYTES: u64 = 44 << 20;

/// The packages and test targets that have tests for a GPU.
const TESTS: &[(&str, &str)] = &[
    ("wholemem-hal", "cuda"),
    ("wholemem", "rows"),
    ("wholemem", "slices"),
    ("wholemem", "whole"),
    ("wholemem", "symmetric"),
    ("wholemem-store", "store"),
];

const SCRIPT: &str = include_str!("bundle-run.sh");

pub(crate) fn pack(with_peers: bool) -> Result<()> {
    let folder = Path::new(FOLDER);
    if folder.is_dir() {
        fs::remove_dir_all(folder)?;
    }
    fs::create_dir_all(folder)?;
    for (package, target) in TESTS {
        let binary = test_binary(package, target)?;
        let stripped = folder.join(format!("test-{target}"));
        strip(&binary, &stripped)?;
        command::run(Command::new("gzip").arg("-9").arg(&stripped))?;
    }
    let mut build = command::cargo();
    build.args(["build", "--release", "--locked", "--package", "wholemem-cli"]);
    command::run(&mut build)?;
    let program = folder.join("wholemem");
    strip(&command::target_folder()?.join("release/wholemem"), &program)?;
    command::run(Command::new("gzip").arg("-9").arg(&program))?;
    let script = folder.join("run");
    fs::write(&script, SCRIPT)?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    fs::write(folder.join("commit"), commit()?)?;
    fs::copy("bench/compare.py", folder.join("compare.py")).context("cannot copy bench/compare.py")?;

    crate::python::pack(&folder.join("python"))?;
    crate::peers::pack_allreduce(folder)?;
    crate::native::bundle::pack(folder)?;
    let mut max_bytes = MAX_BYTES;
    if with_peers {
        crate::peers::pack_gather(&folder.join("peers"))?;
        max_bytes += MAX_PEERS_BYTES;
    }
    let mut total = 0;
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let len = len_of(&path)?;
        println!("{:>8} KiB  {}", len / 1024, path.display());
        total += len;
    }
    if total > max_bytes {
        bail!("the GPU bundle has {total} bytes, which exceeds the limit of {max_bytes} bytes");
    }
    println!("on a machine with a GPU: {FOLDER}/run REPORT-FOLDER");
    Ok(())
}

/// Returns the length of a file, or the total length of all files in a folder.
fn len_of(path: &Path) -> Result<u64> {
    if !path.is_dir() {
        return Ok(path.metadata()?.len());
    }
    fs::read_dir(path)?.try_fold(0, |sum, entry| Ok(sum + len_of(&entry?.path())?))
}

/// Returns the commit that the bundle was built from, and whether the working tree has changes.
fn commit() -> Result<String> {
    let hash = command::capture(Command::new("git").args(["rev-parse", "--short=12", "HEAD"]))?;
    let changed =
        command::capture(Command::new("git").args(["status", "--porcelain", "--untracked-files=no"]))?;
    Ok(format!("{}{}\n", hash.trim(), if changed.is_empty() { "" } else { " with changes" }))
}

/// Builds a test target in release mode, and returns the path of its binary.
fn test_binary(package: &str, target: &str) -> Result<PathBuf> {
    let mut build = command::cargo();
    build.args(["test", "--release", "--locked", "--no-run", "--message-format=json"]);
    build.args(["--package", package, "--test", target]);
    let messages = command::capture(&mut build)?;
    binary_in(&messages, target).with_context(|| format!("cargo built no test `{target}` of {package}"))
}

/// Returns the path of the executable that cargo's JSON messages report for a test target.
fn binary_in(messages: &str, target: &str) -> Option<PathBuf> {
    messages.lines().find_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        let is_target = message["target"]["name"] == target && message["target"]["kind"][0] == "test";
        message["executable"].as_str().filter(|_| is_target).map(PathBuf::from)
    })
}

fn strip(from: &Path, to: &Path) -> Result<()> {
    let mut strip = Command::new("strip");
    strip.arg("-o").arg(to).arg(from);
    if command::succeeds(&mut strip) {
        return Ok(());
    }
    // If `strip` is not installed, the copied binary is only larger.
    fs::copy(from, to).with_context(|| format!("cannot copy {}", from.display()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_binary_is_selected_by_target_name_and_kind() {
        let messages = concat!(
            r#"{"target":{"name":"cuda","kind":["lib"]},"executable":null}"#,
            "\nnot json\n",
            r#"{"target":{"name":"other","kind":["test"]},"executable":"/x/other"}"#,
            "\n",
            r#"{"target":{"name":"cuda","kind":["test"]},"executable":"/x/cuda"}"#,
        );
        assert_eq!(binary_in(messages, "cuda"), Some(PathBuf::from("/x/cuda")));
        assert_eq!(binary_in(messages, "none"), None);
    }

    #[test]
    fn every_step_of_the_script_has_a_time_limit() {
        let steps = SCRIPT.lines().map(str::trim).filter_map(|line| line.strip_prefix("step \""));
        let limits = steps.map(|step| {
            let limit = step.split_once("\" ").and_then(|(_, rest)| rest.split(' ').next());
            limit.is_some_and(|limit| limit.parse::<u32>().is_ok() || limit == "\"$limit\"")
        });
        assert!(limits.clone().count() >= 5 && limits.into_iter().all(|limited| limited), "{SCRIPT}");
    }
}
