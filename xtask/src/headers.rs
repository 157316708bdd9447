//! The step `headers`: compiles the headers for users' kernels with the host's C++ compiler and runs test programs.
//!
//! The same headers are compiled by NVRTC as part of the sample kernels; see `kernels`.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use crate::command;
use crate::toolchain::Skip;

/// Test programs that include the headers for users' kernels; each exits with 0 on success.
const PROGRAMS: &[&str] =
    &["crates/wholemem/kernels/tests/ptr_gen.cpp", "crates/wholemem/kernels/tests/window.cpp"];

/// The C++ standards that the headers are compiled with: the oldest supported one, and a recent one.
const STANDARDS: &[&str] = &["c++11", "c++17"];

/// The time limit of a test program.
const LIMIT: Duration = Duration::from_secs(120);

pub(crate) fn check() -> Result<()> {
    if !command::succeeds(Command::new("c++").arg("--version")) {
        return Err(Skip::new("no C++ compiler `c++`\nhint: install one, such as g++").into());
    }
    let folder = Path::new("target/kernels");
    fs::create_dir_all(folder)?;
    let binary = folder.join("headers");
    for program in PROGRAMS {
        for standard in STANDARDS {
            let mut compiler = Command::new("c++");
            compiler
                .arg(format!("-std={standard}"))
                .args([
                    "-O1",
                    "-Wall",
                    "-Wextra",
                    "-Wpedantic",
                    "-Werror",
                    "-Icrates/wholemem/kernels/include",
                    "-o",
                ])
                .args([binary.as_path(), Path::new(program)]);
            command::run(&mut compiler)?;
            command::run_within(&mut Command::new(&binary), LIMIT)?;
        }
    }
    Ok(())
}
