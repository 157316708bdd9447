//! The step `headers`: compiles the headers for users' kernels with the host's C++ compiler and runs test programs, and compiles the
//! header of the C interface as C and as C++.
//!
//! The same headers are compiled by NVRTC as part of the sample kernels; see `kernels`.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::toolchain::Skip;
use crate::{command, dist};

/// Test programs that include the headers for users' kernels; each exits with 0 on success.
const PROGRAMS: &[&str] =
    &["crates/wholemem/kernels/tests/ptr_gen.cpp", "crates/wholemem/kernels/tests/window.cpp"];

/// The C++ standards that the headers are compiled with: the oldest supported one, and a recent one.
const STANDARDS: &[&str] = &["c++11", "c++17"];

/// The sources of the C interface that every compiler checks: the header alone, and a program.
const C_SOURCES: [&str; 2] = ["include/wholemem.h", "crates/capi/tests/c/ranks.c"];

/// The languages in which the C header is compiled, with their standards.
const LANGUAGES: &[(Language, &[&str])] =
    &[(Language::C, &["c11", "c17"]), (Language::Cpp, &["c++17", "c++20"])];

/// A language in which the C header is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Language {
    C,
    Cpp,
}

impl Language {
    /// Returns the name of the language in the option `-x`.
    fn name(self) -> &'static str {
        if self == Self::C { "c" } else { "c++" }
    }

    /// Returns the commands that compile this language: GCC and Clang, which is part of Zig if it is not installed.
    fn compilers(self) -> Result<[Vec<String>; 2]> {
        let [system, clang, of_zig] =
            if self == Self::C { ["cc", "clang", "cc"] } else { ["c++", "clang++", "c++"] };
        let clang = if command::succeeds(Command::new(clang).arg("--version")) {
            vec![clang.to_owned()]
        } else {
            let python = dist::tools()?.display().to_string();
            vec![python, "-m".to_owned(), "ziglang".to_owned(), of_zig.to_owned()]
        };
        Ok([vec![system.to_owned()], clang])
    }
}

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

/// Compiles the C header alone and a program in C, with GCC and Clang.
fn compile_c_header() -> Result<()> {
    for (language, standards) in LANGUAGES {
        for compiler in language.compilers()? {
            let (program, arguments) = compiler.split_first().context("a compiler has a name")?;
            for (standard, source) in
                standards.iter().flat_map(|standard| C_SOURCES.map(|source| (standard, source)))
            {
                if *language == Language::Cpp && source.ends_with(".c") {
                    continue;
                }
                let mut compile = Command::new(program);
                compile.args(arguments).arg(format!("-std={standard}"));
                compile.args(["-Wall", "-Wextra", "-pedantic", "-Werror", "-Iinclude", "-c"]);
                command::run(compile.args([
                    "-x",
                    language.name(),
                    source,
                    "-o",
                    "target/kernels/wholemem.o",
                ]))?;
            }
        }
    }
    Ok(())
}
