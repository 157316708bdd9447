//! The step `wheel`: builds the binary packages for this machine and tests them in an environment without Rust.
//!
//! Each installed Python from 3.9 to 3.13 gets a virtual environment in `target/tools`. The wheel is installed there without a
//! package index, and `wheel_check.py` runs the commands of the README in an empty folder, with an empty home folder and a PATH
//! without Rust.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::dist::{self, Arch};
use crate::empty::Empty;
use crate::toolchain::Skip;
use crate::wheels::{NUMPY, NUMPY_OF_39, NUMPY_OF_310, Wheel};
use crate::{command, deb, empty, python, wheel, wheel_data};

/// The minor versions of Python 3 with which the wheel is tested.
const MINORS: std::ops::RangeInclusive<u32> = 9..=13;

const CHECK: &str = "xtask/src/wheel_check.py";

/// The time limit for the tests with one Python interpreter.
const LIMIT: Duration = Duration::from_secs(300);

/// The maximum number of lines that pip prints, including the build backend's, if Rust is missing.
const REFUSAL_LINES: usize = 20;

pub(crate) fn check(exhaustive: bool, torch: bool) -> Result<()> {
    let interpreters = interpreters();
    if interpreters.is_empty() {
        return Err(Skip::new("no Python from 3.9 to 3.13\nhint: install one, with venv").into());
    }
    let arch = Arch::of_this_machine()?;
    let package = deb::build(arch, Path::new("target/deb"))?;
    deb::check(&package)?;
    let built = wheel::build(arch, Path::new("target/wheel"))?;
    // All Python versions load the same binary, so the oldest and the newest are enough for a normal run.
    let last = interpreters.len() - 1;
    for (index, (minor, interpreter)) in interpreters.iter().enumerate() {
        if exhaustive || index == 0 || index == last {
            let name = format!("wheel-3.{minor}");
            let python = python::environment_of(interpreter, &name, &[numpy_for(*minor)], LIMIT)?;
            try_wheel(&python, &built)?;
        }
    }
    if torch {
        try_wheel(&python::with_torch()?, &built)?;
    }
    refuse_without_rust()?;
    if exhaustive {
        try_source()?;
        if arch != Arch::Aarch64 {
            wheel::build(Arch::Aarch64, Path::new("target/wheel"))?;
        }
    }
    Ok(())
}

/// Returns the installed Python interpreters with their minor versions: those of pyenv first, then those on the PATH.
fn interpreters() -> Vec<(u32, PathBuf)> {
    let pyenv = env::var_os("PYENV_ROOT").map(PathBuf::from);
    let pyenv = pyenv.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".pyenv")));
    let versions = pyenv.and_then(|root| fs::read_dir(root.join("versions")).ok());
    let versions: Vec<_> =
        versions.into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path())).collect();
    let found = |minor: u32| {
        let has = |folder: &&PathBuf| {
            let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
            name.starts_with(&format!("3.{minor}."))
        };
        let of_pyenv = versions.iter().find(has).map(|folder| folder.join("bin/python3"));
        let on_path = PathBuf::from(format!("python3.{minor}"));
        let script = format!("import sys, venv; assert sys.version_info[:2] == (3, {minor})");
        let runs = |python: &PathBuf| command::succeeds(Command::new(python).args(["-c", &script]));
        of_pyenv.into_iter().chain([on_path]).find(runs).map(|python| (minor, python))
    };
    MINORS.filter_map(found).collect()
}

fn numpy_for(minor: u32) -> Wheel {
    match minor {
        ..=9 => NUMPY_OF_39,
        10 => NUMPY_OF_310,
        _ => NUMPY,
    }
}

/// Installs the wheel in a virtual environment without a package index, and tests it.
fn try_wheel(python: &Path, wheel: &Path) -> Result<()> {
    let uninstall = ["-m", "pip", "uninstall", "--quiet", "--disable-pip-version-check", "--yes", "wholemem"];
    command::run(Command::new(python).args(uninstall))?;
    let install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"];
    let extra = format!("{}[numpy]", wheel.display());
    command::run(Command::new(python).args(install).arg(extra))?;
    try_installed(python)
}

fn try_installed(python: &Path) -> Result<()> {
    let (check, readme) = (fs::canonicalize(CHECK)?, fs::canonicalize("README.md")?);
    let empty = Empty::create()?;
    let mut command = empty.command(python)?;
    command.arg(check).arg(readme).arg(&empty.folder);
    command::run_within(&mut command, LIMIT)
}

/// Checks that `pip install` from source without Rust fails with one line that tells the user to install Rust.
fn refuse_without_rust() -> Result<()> {
    if empty::system_has_rust() {
        println!(
            "note: the installation without Rust is not tested, because the system folders contain cargo"
        );
        return Ok(());
    }
    let root = env::current_dir()?;
    let empty = Empty::create()?;
    let mut pip = empty.command(&dist::tools()?)?;
    pip.args(["-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation"]).arg(root);
    let result = pip.output().context("cannot start pip")?;
    let output =
        format!("{}{}", String::from_utf8_lossy(&result.stdout), String::from_utf8_lossy(&result.stderr));
    print!("{output}");
    ensure!(
        !result.status.success(),
        "pip installed the source package although Rust is not installed; it should have failed"
    );
    let lines: Vec<_> = output.lines().filter(|line| line.contains("install Rust")).collect();
    ensure!(
        lines.len() == 1,
        "{count} lines of the output of pip say `install Rust`, instead of one",
        count = lines.len()
    );
    let count = output.lines().count();
    ensure!(count <= REFUSAL_LINES, "pip printed {count} lines, which exceeds the limit of {REFUSAL_LINES}");
    Ok(())
}

/// Installs the Python package from its source archive with Rust, and tests it.
fn try_source() -> Result<()> {
    let folder = command::target_folder()?.join("wheels/source");
    if folder.is_dir() {
        fs::remove_dir_all(&folder)?;
    }
    let python = python::environment("source", &[crate::wheels::MATURIN, NUMPY], LIMIT)?;
    wheel_data::stage(None)?;
    command::run(Command::new(&python).args(["-m", "maturin", "sdist", "--out"]).arg(&folder))?;
    let archives: Vec<_> = fs::read_dir(&folder)?.collect::<Result<_, _>>()?;
    let [archive] = &archives[..] else {
        bail!(
            "expected one Python source archive (sdist) in {path}, found {count} files",
            path = folder.display(),
            count = archives.len()
        )
    };
    let install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"];
    let mut pip = Command::new(&python);
    pip.args(install).args(["--no-index", "--no-build-isolation", "--force-reinstall"]).arg(archive.path());
    pip.env("CARGO_TARGET_DIR", command::target_folder()?.join("source"));
    // The build backend starts `maturin` by name, so the folder of `maturin` must be on the PATH.
    let bin = python.parent().context("the path of the interpreter has no parent folder")?.to_path_buf();
    let inherited = env::var_os("PATH").unwrap_or_default();
    pip.env("PATH", env::join_paths([bin].into_iter().chain(env::split_paths(&inherited)))?);
    command::run(&mut pip)?;
    try_installed(&python)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_python_has_a_numpy_that_supports_it() {
        assert_eq!(
            MINORS.map(|minor| numpy_for(minor).version).collect::<Vec<_>>(),
            ["2.0.2", "2.2.6", "2.3.5", "2.3.5", "2.3.5"]
        );
    }
}
