//! The step `headers`: compiles the headers for users' kernels with the host's C++ compiler and runs test programs, and compiles the
//! header of the C interface as C and as C++.
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

/// The C header, and the compilers and standards that it is compiled with.
const C_HEADER: &str = "include/wholemem.h";
const C_COMPILERS: &[(&str, &[&str])] = &[
    ("cc", &["c11", "c17"]),
    ("clang", &["c11", "c17"]),
    ("c++", &["c++17", "c++20"]),
    ("clang++", &["c++17", "c++20"]),
];

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
    compile_c_header()
}

/// Compiles the C header alone, with every compiler that is installed.
fn compile_c_header() -> Result<()> {
    for (compiler, standards) in C_COMPILERS {
        if !command::succeeds(Command::new(compiler).arg("--version")) {
            println!("`{compiler}` is not installed, so {C_HEADER} is not compiled with it");
            continue;
        }
        for standard in *standards {
            let language = if standard.starts_with("c++") { "c++" } else { "c" };
            let mut compile = Command::new(compiler);
            compile.arg(format!("-std={standard}")).args(["-Wall", "-Wextra", "-pedantic", "-Werror"]);
            compile.args(["-fsyntax-only", "-x", language, C_HEADER]);
            command::run(&mut compile)?;
        }
    }
    Ok(())
}
