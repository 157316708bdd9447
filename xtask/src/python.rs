//! The Python package, its types checked, built as its users get it: one wheel, in an environment of its own, where its
//! tests run.
//!
//! The wheel is of the `dev` profile, so that it shares what the other steps have compiled.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::toolchain::Skip;
use crate::wheels::{MATURIN, MYPY, NUMPY, PYTEST, PYTEST_NEEDS, Wheel};
use crate::{command, source_rules};

/// What the environment holds beside the package itself.
const PACKAGES: [Wheel; 4] = [MATURIN, MYPY, NUMPY, PYTEST];

/// What of the package is written in Python.
const SOURCES: &str = "crates/python/python/wholemem";

/// Its tests.
const TESTS: &str = "crates/python/tests";

/// What its tests run as it is written: files, and all that lies in folders.
const GUIDES: [&str; 3] = ["README.md", "docs/python/", "examples/python/"];

/// How calls from torch are measured.
const BENCH: &str = "bench/python/from_torch.py";

const FETCH_LIMIT: Duration = Duration::from_secs(300);

pub(crate) fn check() -> Result<()> {
    let python = environment()?;
    let target = command::target_folder()?;
    let types = ["-m", "mypy", "--strict", "--no-error-summary", "--cache-dir"];
    command::run(Command::new(&python).args(types).arg(target.join("mypy")).arg(SOURCES))?;
    install(&python, "dev")?;
    // Ranks are started as a user starts them, and arrays of a GPU are tried without one.
    let needed = ["--package", "wholemem-cli", "--package", "wholemem-fake-cuda"];
    command::run(command::cargo().args(["build", "--quiet", "--locked"]).args(needed))?;
    // What needs torch is tried where there is one, and what needs a store by the tests, which serve one.
    let store = "--ignore-glob=*/wholemem/store.py";
    let examples = ["--doctest-modules", "--doctest-ignore-import-errors", store, "--pyargs", "wholemem"];
    for what in [&[TESTS][..], &examples] {
        let mut pytest = Command::new(&python);
        pytest.args(["-m", "pytest", "--quiet", "-p", "no:cacheprovider"]).args(what);
        pytest.env("PYTHONDONTWRITEBYTECODE", "1");
        pytest.env("WHOLEMEM_PROGRAM", target.join("debug/wholemem"));
        pytest.env("WHOLEMEM_FAKE_CUDA", target.join("debug/libwholemem_fake_cuda.so"));
        command::run(&mut pytest)?;
    }
    Ok(())
}

/// An interpreter that has the package, as fast as it can be.
pub(crate) fn released() -> Result<PathBuf> {
    let python = environment()?;
    install(&python, "release")?;
    Ok(python)
}

/// Gathers what a machine with a GPU needs to try the package with its own Python: the wheel as it is released, the tests
/// and the guides that they play, what measures it, and pytest, should it have none.
pub(crate) fn pack(folder: &Path) -> Result<()> {
    let (tests, pytest) = (folder.join("tests"), folder.join("pytest"));
    fs::create_dir_all(&tests)?;
    let wheel = build(&environment()?, &command::target_folder()?, "release")?;
    fs::copy(&wheel, folder.join(wheel.file_name().context("a wheel has a name")?))?;
    for entry in fs::read_dir(TESTS)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "py") {
            fs::copy(&path, tests.join(path.file_name().context("a file has a name")?))?;
        }
    }
    fs::copy(BENCH, folder.join("from_torch.py")).with_context(|| format!("cannot copy {BENCH}"))?;
    for path in
        source_rules::tracked()?.iter().filter(|path| GUIDES.iter().any(|guide| path.starts_with(guide)))
    {
        let copy = folder.join(path);
        fs::create_dir_all(copy.parent().context("a guide lies in a folder")?)?;
        fs::copy(path, copy).with_context(|| format!("cannot copy {path}"))?;
    }
    [PYTEST].into_iter().chain(PYTEST_NEEDS).try_for_each(|wheel| wheel.fetch(&pytest))
}

/// Builds the wheel with a profile, and installs it.
fn install(python: &Path, profile: &str) -> Result<()> {
    let wheel = build(python, &command::target_folder()?, profile)?;
    let install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"];
    command::run(Command::new(python).args(install).arg("--force-reinstall").arg(&wheel))
}

/// The interpreter of the environment, which is made first if need be. A machine that cannot fetch what belongs into it
/// skips the step.
fn environment() -> Result<PathBuf> {
    let pinned: Vec<_> = PACKAGES.iter().map(Wheel::pinned).collect();
    let folder = Path::new("target/tools/python");
    let (python, complete) = (folder.join("bin/python"), folder.join("complete"));
    // Whatever else it holds, it is made anew when a version changes.
    if fs::read_to_string(&complete).is_ok_and(|text| text == pinned.join("\n")) {
        return Ok(fs::canonicalize(folder)?.join("bin/python"));
    }
    let skip = |error: anyhow::Error| {
        let packages = pinned.join(" ");
        Skip::new(format!(
            "cannot make a Python environment: {error:#}\nhint: python3 -m pip install {packages}"
        ))
    };
    command::run_within(Command::new("python3").args(["-m", "venv", "--clear"]).arg(folder), FETCH_LIMIT)
        .map_err(skip)?;
    let install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
    command::run_within(Command::new(&python).args(install).args(&pinned), FETCH_LIMIT).map_err(skip)?;
    fs::write(&complete, pinned.join("\n"))
        .with_context(|| format!("cannot write {}", complete.display()))?;
    Ok(fs::canonicalize(folder)?.join("bin/python"))
}

/// The wheel, of which there must be one that serves every Python from 3.9 on.
fn build(python: &Path, target: &Path, profile: &str) -> Result<PathBuf> {
    let folder = target.join("wheels/test");
    if folder.is_dir() {
        fs::remove_dir_all(&folder)?;
    }
    let arguments = ["-m", "maturin", "build", "--quiet", "--profile", profile, "--compatibility", "linux"];
    command::run(
        Command::new(python).args(arguments).arg("--interpreter").arg(python).arg("--out").arg(&folder),
    )?;
    let made: Vec<_> = fs::read_dir(&folder)?.collect::<Result<_, _>>()?;
    let wheels: Vec<_> = made.iter().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    match &wheels[..] {
        [wheel] if serves_all(wheel) => Ok(folder.join(wheel)),
        _ => bail!("expected one wheel for cp39-abi3, and found {}", wheels.join(", ")),
    }
}

/// Whether a wheel's name says that it serves every Python from 3.9 on.
fn serves_all(wheel: &str) -> bool {
    wheel.ends_with(".whl") && wheel.contains("-cp39-abi3-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wheel_for_one_python_does_not_serve_all() {
        assert!(serves_all("wholemem-0.1.0-cp39-abi3-linux_x86_64.whl"));
        assert!(!serves_all("wholemem-0.1.0-cp311-cp311-linux_x86_64.whl"));
        assert!(!serves_all("wholemem-0.1.0-cp39-abi3-linux_x86_64.tar.gz"));
    }
}
