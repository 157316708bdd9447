//! The step `capi`: installs the library for C and C++ and tests the installation, with both compilers, sanitizers and valgrind.
//!
//! | module | contents |
//! |---|---|
//! | [`bundle`] | the part of the GPU bundle |
//! | [`tools`] | CMake, Ninja, pkgconf and Clang, which are downloaded |
//! | [`valgrind`] | valgrind, installed or downloaded |
//!
//! The tests are in `crates/capi/tests/native`, and each [`Variant`] configures, builds and runs them anew. The sanitizers instrument
//! the C++ code, and intercept the memory functions of the library, which is not instrumented. The examples use a moved installation.

pub(crate) mod bundle;
mod tools;
mod valgrind;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::wheels::{self, NVCC_13};
use crate::{command, install, kernels};
use tools::{Compilers, Tools};
use valgrind::Valgrind;

/// The folder with the tests in C and C++, and the suppressions of the thread sanitizer.
const TESTS: &str = "crates/capi/tests/native";
const SUPPRESSIONS: &str = "crates/capi/tests/native/thread_sanitizer.txt";

const EXAMPLES: &str = "examples";

/// The kernel of the examples, which NVRTC compiles.
const KERNEL: &str = "examples/cuda/neighbours.cuh";

/// The page whose programs are built and run, with the names of the files that its blocks are, by language.
const GUIDE: &str = "docs/C.md";
const GUIDE_FILES: [(&str, &str); 3] = [("cmake", "CMakeLists.txt"), ("c", "first.c"), ("cpp", "first.cpp")];

const WARNINGS: &str = "-Wall -Wextra -Werror -pedantic";

/// The prefix of the installation for the examples. It is installed below another folder, as packagers do.
const PACKAGED_PREFIX: &str = "/opt/wholemem";

/// A way in which the tests are built and run.
#[derive(Debug, Clone)]
struct Variant {
    name: &'static str,
    compilers: Compilers,
    /// The C++ standard.
    standard: u32,
    flags: String,
    /// The words that precede the commands of tests.
    prefix: Vec<OsString>,
    environment: Vec<(&'static str, OsString)>,
}

impl Variant {
    fn new(name: &'static str, compilers: &Compilers, standard: u32) -> Self {
        let (prefix, environment) = (Vec::new(), Vec::new());
        Self { name, compilers: compilers.clone(), standard, flags: String::new(), prefix, environment }
    }
}

pub(crate) fn check() -> Result<()> {
    let tools = Tools::find_or_fetch()?;
    let (gnu, clang) = (Compilers::gnu()?, Compilers::clang()?);
    let folder = command::target_folder()?.join("capi");
    let prefix = folder.join("prefix");
    install::install(&prefix)?;
    let packaged = install::root(Path::new(PACKAGED_PREFIX), Some(&folder.join("stage")));
    install::install(&packaged)?;

    leak_no_macros(&gnu, &prefix.join("include"), &folder)?;
    kernels::check_user_kernel(Path::new(KERNEL), &prefix.join("include"))?;
    nvcc(&prefix.join("include"), &folder)?;
    pkg_config(&tools, &gnu, &prefix, &folder)?;
    readme(&gnu, &prefix, &folder)?;
    let mut variants = vec![
        Variant::new("gnu-17", &gnu, 17),
        Variant::new("gnu-20", &gnu, 20),
        Variant::new("clang-17", &clang, 17),
        Variant::new("clang-20", &clang, 20),
    ];
    for variant in &variants {
        tools.test(Path::new(TESTS), &folder.join("tests").join(variant.name), &prefix, variant)?;
    }
    for variant in [&variants[0], &variants[3]] {
        let variant = Variant { flags: WARNINGS.to_owned(), ..variant.clone() };
        tools.test(Path::new(EXAMPLES), &folder.join("examples").join(variant.name), &packaged, &variant)?;
    }
    guide(&tools, &folder.join("guide"), &prefix, &variants[0])?;
    let (address, thread) = sanitizers(&gnu)?;
    variants = vec![address, thread];
    for variant in &variants {
        tools.test(Path::new(TESTS), &folder.join("tests").join(variant.name), &prefix, variant)?;
    }
    install::uninstall(&packaged)?;
    ensure!(!has_files(&packaged)?, "files remain in {} after `--uninstall`", packaged.display());
    // Last, because the step is reported as skipped if this valgrind is neither installed nor can be downloaded.
    let valgrind = Valgrind::find_or_fetch()?;
    let mut under = Variant::new("valgrind", &gnu, 17);
    (under.prefix, under.environment) = (valgrind.command(), valgrind.environment());
    tools.test(Path::new(TESTS), &folder.join("tests").join(under.name), &prefix, &under)
}

/// Returns the variants with the address and undefined behaviour sanitizers, and with the thread sanitizer.
fn sanitizers(gnu: &Compilers) -> Result<(Variant, Variant)> {
    let mut address = Variant::new("address-sanitizer", gnu, 17);
    address.flags =
        "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer".to_owned();
    let mut thread = Variant::new("thread-sanitizer", gnu, 17);
    thread.flags = "-fsanitize=thread".to_owned();
    // The runtime of the sanitizer of older compilers does not support the randomization of newer kernels.
    thread.prefix = ["setarch", "-R"].map(OsString::from).to_vec();
    let mut suppressions = OsString::from("suppressions=");
    suppressions.push(fs::canonicalize(SUPPRESSIONS).with_context(|| format!("cannot find {SUPPRESSIONS}"))?);
    thread.environment = vec![("TSAN_OPTIONS", suppressions)];
    Ok((address, thread))
}

/// Checks that the C++ interface defines no macro in addition to those of the headers that it includes, the C header among them.
fn leak_no_macros(gnu: &Compilers, include: &Path, folder: &Path) -> Result<()> {
    let mut included = BTreeSet::new();
    for entry in fs::read_dir("include/wholemem")? {
        let text = fs::read_to_string(entry?.path())?;
        included.extend(text.lines().filter(|line| is_foreign_include(line)).map(str::to_owned));
    }
    let macros = |name: &str, text: String| {
        let source = folder.join(name);
        fs::write(&source, text).with_context(|| format!("cannot write {}", source.display()))?;
        let mut compiler = Command::new(&gnu.cxx);
        compiler.args(["-std=c++20", "-dM", "-E", "-I"]).arg(include).arg(&source);
        Ok::<_, anyhow::Error>(
            command::capture(&mut compiler)?.lines().map(str::to_owned).collect::<BTreeSet<_>>(),
        )
    };
    let own = macros("own.cpp", "#include <wholemem/wholemem.hpp>\n".to_owned())?;
    let others = macros("others.cpp", included.into_iter().map(|line| line + "\n").collect())?;
    ensure!(own.len() > 100 && others.len() > 100, "the compiler listed no macros");
    match own.difference(&others).next() {
        Some(leaked) => bail!("include/wholemem/wholemem.hpp leaks a macro: {leaked}"),
        None => Ok(()),
    }
}

/// Returns true if a line of our headers includes a header that is not one of the C++ interface.
fn is_foreign_include(line: &str) -> bool {
    line.starts_with("#include <") && !line.contains("<wholemem/")
}

/// Compiles the CUDA example, and all headers together, with nvcc. They are not linked, which needs no library of CUDA.
fn nvcc(include: &Path, folder: &Path) -> Result<()> {
    let nvcc = wheels::folder_of(&NVCC_13)?.join("nvidia/cu13/bin/nvcc");
    let headers: BTreeSet<_> = fs::read_dir(include.join("wholemem"))?
        .map(|entry| Ok(format!("#include <wholemem/{}>\n", entry?.file_name().to_string_lossy())))
        .collect::<Result<_>>()?;
    let all = folder.join("headers.cu");
    fs::write(&all, headers.into_iter().collect::<String>())?;
    for source in [all.as_path(), Path::new(EXAMPLES).join("cuda/neighbours.cu").as_path()] {
        for architecture in ["sm_75", "sm_90"] {
            let mut compiler = Command::new(&nvcc);
            compiler.args(["-std=c++17", "-arch", architecture, "-Werror", "all-warnings"]);
            compiler.args(["-Xcompiler", "-Wall,-Wextra,-Werror", "-c", "-o"]).arg(folder.join("nvcc.o"));
            command::run(compiler.arg("-I").arg(include).arg(source))?;
        }
    }
    Ok(())
}

/// Compiles a program with the options that pkg-config prints, and runs it.
fn pkg_config(tools: &Tools, gnu: &Compilers, prefix: &Path, folder: &Path) -> Result<()> {
    let mut query = Command::new(&tools.pkg_config);
    query.args(["--cflags", "--libs", "wholemem >= 0.1"]);
    query.env("PKG_CONFIG_LIBDIR", prefix.join("lib/pkgconfig"));
    let options = command::capture(&mut query)?;
    let program = folder.join("pkg-config");
    let mut compiler = Command::new(&gnu.cc);
    compiler.args(["-std=c11", "-o"]).arg(&program).arg(Path::new(TESTS).join("c_calls.c"));
    command::run(compiler.args(options.split_whitespace()))?;
    command::run(Command::new(&program).env("LD_LIBRARY_PATH", prefix.join("lib")))
}

/// Builds the programs of the guide with its CMake project, and runs each as two ranks.
fn guide(tools: &Tools, folder: &Path, prefix: &Path, variant: &Variant) -> Result<()> {
    fs::create_dir_all(folder)?;
    let page = fs::read_to_string(GUIDE).with_context(|| format!("cannot read {GUIDE}"))?;
    for (language, file) in GUIDE_FILES {
        let [text] = &blocks(&page, language)[..] else {
            bail!("{GUIDE} has not exactly one block of the language {language}");
        };
        fs::write(folder.join(file), text)?;
    }
    let build = folder.join("build");
    tools.build(folder, &build, prefix, variant)?;
    for program in ["first_c", "first_cpp"] {
        let mut launch = Command::new(prefix.join("bin/wholemem"));
        command::run(launch.args(["launch", "-n", "2", "--"]).arg(build.join(program)))?;
    }
    Ok(())
}

/// Builds the C++ program of the README, and runs it as four ranks.
fn readme(gnu: &Compilers, prefix: &Path, folder: &Path) -> Result<()> {
    let page = fs::read_to_string("README.md").context("cannot read README.md")?;
    let [text] = &blocks(&page, "cpp")[..] else { bail!("README.md has not exactly one block in C++") };
    let (source, program) = (folder.join("readme.cpp"), folder.join("readme"));
    fs::write(&source, text)?;
    let mut compiler = Command::new(&gnu.cxx);
    compiler.args(["-std=c++17", "-o"]).arg(&program).arg(&source).args(WARNINGS.split(' '));
    compiler.arg("-I").arg(prefix.join("include")).arg("-L").arg(prefix.join("lib")).arg("-lwholemem");
    compiler.arg(format!("-Wl,-rpath,{}", prefix.join("lib").display()));
    command::run(&mut compiler)?;
    let mut launch = Command::new(prefix.join("bin/wholemem"));
    command::run(launch.args(["launch", "-n", "4", "--"]).arg(&program))
}

/// Returns the texts of the code blocks of a language in a Markdown page.
fn blocks(page: &str, language: &str) -> Vec<String> {
    let begin = format!("\n```{language}\n");
    let after = page.split(&begin).skip(1);
    after.filter_map(|text| text.split("\n```").next()).map(|text| format!("{text}\n")).collect()
}

/// Returns true if there is a file in a folder or below it.
fn has_files(folder: &Path) -> Result<bool> {
    for entry in fs::read_dir(folder)? {
        let path: PathBuf = entry?.path();
        if !path.is_dir() || has_files(&path)? {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn includes_of_the_c_header_and_of_the_system_are_foreign() {
        assert!(is_foreign_include("#include <vector>") && is_foreign_include("#include <wholemem.h>"));
        assert!(!is_foreign_include("#include <wholemem/span.hpp>") && !is_foreign_include("namespace a {"));
    }

    #[test]
    fn blocks_are_selected_by_their_whole_language() {
        let page = "\n```c\nint a;\n\nint b;\n```\ntext\n```cpp\nint c;\n```\n";
        assert_eq!(blocks(page, "c"), ["int a;\n\nint b;\n"]);
        assert_eq!(blocks(page, "cpp"), ["int c;\n"]);
        assert_eq!(blocks(page, "cmake"), [] as [String; 0]);
    }

    #[test]
    fn the_kernel_and_the_suppressions_exist() {
        for path in [KERNEL, SUPPRESSIONS, TESTS, EXAMPLES] {
            assert!(Path::new("..").join(path).exists(), "{path}");
        }
    }
}
