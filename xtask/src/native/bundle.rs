//! Packs the C and C++ interface for a machine with a GPU: the installation, the examples, a test program, and a benchmark.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::native::tools::Compilers;
use crate::native::{EXAMPLES, TESTS};
use crate::{command, install};

/// The benchmark that compares calls through C with those through Rust.
const BENCHMARK: &str = "device_cost";

/// Writes `capi.tar.gz` to a folder. It has `include`, `lib` with the shared library, `examples`, and `bin` with the test program `ranks`
/// and the benchmark. The program `wholemem` is elsewhere in the bundle.
pub(crate) fn pack(folder: &Path) -> Result<()> {
    let target = command::target_folder()?;
    let prefix = target.join("capi/bundle");
    install::install(&prefix)?;
    let bin = prefix.join("bin");
    let mut compiler = Command::new(Compilers::gnu()?.cxx);
    compiler
        .args(["-std=c++17", "-O1", "-pthread", "-o"])
        .arg(bin.join("ranks"))
        .arg("-I")
        .arg(prefix.join("include"));
    compiler.args(["ranks.cpp", "checks.cpp"].map(|name| Path::new(TESTS).join(name)));
    compiler.arg("-L").arg(prefix.join("lib")).args(["-lwholemem", "-Wl,-rpath,$ORIGIN/../lib"]);
    command::run(&mut compiler)?;
    let mut build = command::cargo();
    build.args(["build", "--release", "--locked", "--package", "wholemem-capi", "--example", BENCHMARK]);
    command::run(&mut build)?;
    let benchmark = target.join("release/examples").join(BENCHMARK);
    command::run(Command::new("strip").arg("-o").arg(bin.join(BENCHMARK)).arg(benchmark))?;

    let packed = std::path::absolute(folder.join("capi.tar.gz"))?;
    let mut tar = Command::new("tar");
    // tar applies only the exclusions that precede the names.
    tar.args(["--exclude=bin/wholemem", "--exclude=*.a", "--exclude=examples/python"]);
    tar.args(["--create", "--gzip", "--file"]).arg(&packed).arg("--directory").arg(&prefix);
    tar.args(["include", "lib", "bin", "--directory"]);
    let root = std::env::current_dir().context("cannot read the current folder")?;
    command::run(tar.arg(root).arg(EXAMPLES))?;
    println!("{}: {} bytes", packed.display(), fs::metadata(&packed)?.len());
    Ok(())
}
