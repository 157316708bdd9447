//! The headers that users' kernels include: compiled by the host's C++ compiler, and run against a plain loop.
//!
//! The same headers under NVRTC are the kernels' own business: the samples among them are compiled and assembled like every
//! other.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use crate::command;
use crate::toolchain::Skip;

/// Programs that include the headers and check them; each ends with 0 if all is well.
const PROGRAMS: &[&str] =
    &["crates/wholemem/kernels/tests/ptr_gen.cpp", "crates/wholemem/kernels/tests/window.cpp"];

/// The oldest C++ that the headers promise to work with, and one of today.
const STANDARDS: &[&str] = &["c++11", "c++17"];

/// How long a program may run.
const LIMIT: Duration = Duration::from_secs(120);

pub(crate) fn check() -> Result<()> {
    if !command::succeeds(Command::new("c++").arg("--version")) {
        return Err(Skip::new("there is no c++\nhint: install a C++ compiler, g++ for one").into());
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
