//! The Python package, its types checked, built as its users get it: one wheel, in an environment of its own, where its
//! tests run.
//!
//! The wheel is of the `dev` profile, so that it shares what the other steps have compiled.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};

use crate::toolchain::Skip;
use crate::wheels::{MATURIN, MYPY, NUMPY, PYTEST, PYTEST_NEEDS, TORCH, TORCH_GEOMETRIC, Wheel};
use crate::{command, source_rules, wheel_data};

/// What the environment holds beside the package itself.
const PACKAGES: [Wheel; 4] = [MATURIN, MYPY, NUMPY, PYTEST];

/// What the environment of the tests that need torch holds.
const TORCH_PACKAGES: [Wheel; 4] = [NUMPY, PYTEST, TORCH, TORCH_GEOMETRIC];

/// What of the package is written in Python.
const SOURCES: &str = "crates/python/python/wholemem";

/// Its tests.
const TESTS: &str = "crates/python/tests";

/// What its tests run as it is written: files, and all that lies in folders.
const GUIDES: [&str; 3] = ["README.md", "docs/python/", "examples/python/"];

/// How calls from torch are measured.
const BENCH: &str = "bench/python/from_torch.py";

const FETCH_LIMIT: Duration = Duration::from_secs(300);

const TORCH_FETCH_LIMIT: Duration = Duration::from_secs(900);

pub(crate) fn check() -> Result<()> {
    let python = tools()?;
    let target = command::target_folder()?;
    let types = ["-m", "mypy", "--strict", "--no-error-summary", "--cache-dir"];
    command::run(Command::new(&python).args(types).arg(target.join("mypy")).arg(SOURCES))?;
    install(&python, "dev")?;
    build_what_tests_start()?;
    // The step `torch` tries what needs torch, and the tests try what needs a store, which they serve.
    let store = "--ignore-glob=*/wholemem/store.py";
    let examples = ["--doctest-modules", "--doctest-ignore-import-errors", store, "--pyargs", "wholemem"];
    command::run(pytest(&python, &target).arg(TESTS))?;
    command::run(pytest(&python, &target).args(examples))
}

/// The tests that need torch, in an environment that has it. Without `--torch` nothing of it is fetched.
pub(crate) fn torch(wanted: bool) -> Result<()> {
    if !wanted {
        return Err(Skip::new(format!(
            "{} and what it needs are 3 GB; --torch fetches them",
            TORCH.pinned()
        ))
        .into());
    }
    let python = with_torch()?;
    let files = torch_tests()?;
    ensure!(!files.is_empty(), "no file in {TESTS} needs torch");
    let target = command::target_folder()?;
    install(&python, "dev")?;
    build_what_tests_start()?;
    // Under this variable the tests fail the run if one of them is skipped, unless for lack of a GPU.
    command::run(pytest(&python, &target).args(files).env("WHOLEMEM_REQUIRE_TORCH", "1"))?;
    command::run(pytest(&python, &target).args(["--doctest-modules", "--pyargs", "wholemem.torch"]))
}

/// The interpreter of the environment with torch. It is used if it was asked for, so a machine that cannot fetch it fails.
pub(crate) fn with_torch() -> Result<PathBuf> {
    environment("torch", &TORCH_PACKAGES, TORCH_FETCH_LIMIT).map_err(|error| anyhow!("{error:#}"))
}

/// The files with tests that need torch.
fn torch_tests() -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(TESTS)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.starts_with("test_") && name.ends_with(".py") && needs_torch(&fs::read_to_string(&path)?) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Whether a file of tests skips some of them without torch: it asks for the module by name, or takes it from the files that
/// do.
fn needs_torch(text: &str) -> bool {
    ["(\"torch\"", "from torch_world import", "from gpu import"].iter().any(|sign| text.contains(sign))
}

/// The program, as which ranks are started, and the driver of a GPU that is not there.
fn build_what_tests_start() -> Result<()> {
    let needed = ["--package", "wholemem-cli", "--package", "wholemem-fake-cuda"];
    command::run(command::cargo().args(["build", "--quiet", "--locked"]).args(needed))
}

fn pytest(python: &Path, target: &Path) -> Command {
    let mut pytest = Command::new(python);
    pytest.args(["-m", "pytest", "--quiet", "-p", "no:cacheprovider"]);
    pytest.env("PYTHONDONTWRITEBYTECODE", "1");
    pytest.env("WHOLEMEM_PROGRAM", target.join("debug/wholemem"));
    pytest.env("WHOLEMEM_FAKE_CUDA", target.join("debug/libwholemem_fake_cuda.so"));
    pytest
}

/// An interpreter that has the package, as fast as it can be.
pub(crate) fn released() -> Result<PathBuf> {
    let python = tools()?;
    install(&python, "release")?;
    Ok(python)
}

/// Gathers what a machine with a GPU needs to try the package with its own Python: the wheel as it is released, the tests
/// and the guides that they play, what measures it, and pytest, should it have none.
pub(crate) fn pack(folder: &Path) -> Result<()> {
    let (tests, pytest) = (folder.join("tests"), folder.join("pytest"));
    fs::create_dir_all(&tests)?;
    let wheel = build(&tools()?, &command::target_folder()?, "release")?;
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

/// Builds the wheel with a profile, and installs it into an environment.
fn install(python: &Path, profile: &str) -> Result<()> {
    let wheel = build(&tools()?, &command::target_folder()?, profile)?;
    let install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"];
    command::run(Command::new(python).args(install).arg("--force-reinstall").arg(&wheel))
}

/// The interpreter of the environment with the tools.
fn tools() -> Result<PathBuf> {
    environment("python", &PACKAGES, FETCH_LIMIT)
}

/// The interpreter of an environment, which is made first if need be. A machine that cannot fetch what belongs into it
/// skips the step.
pub(crate) fn environment(name: &str, packages: &[Wheel], limit: Duration) -> Result<PathBuf> {
    environment_of(Path::new("python3"), name, packages, limit)
}

/// An environment of a certain interpreter.
pub(crate) fn environment_of(
    interpreter: &Path,
    name: &str,
    packages: &[Wheel],
    limit: Duration,
) -> Result<PathBuf> {
    let pinned: Vec<_> = packages.iter().map(Wheel::pinned).collect();
    let folder = &Path::new("target/tools").join(name);
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
    let venv = ["-m", "venv", "--clear"];
    command::run_within(Command::new(interpreter).args(venv).arg(folder), FETCH_LIMIT).map_err(skip)?;
    let install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
    command::run_within(Command::new(&python).args(install).args(&pinned), limit).map_err(skip)?;
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
    // Without the program: the tests are told which one to start.
    wheel_data::stage(None)?;
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
pub(crate) fn serves_all(wheel: &str) -> bool {
    wheel.ends_with(".whl") && wheel.contains("-cp39-abi3-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_needs_torch_if_it_asks_for_the_module() {
        for text in [
            "torch: Any = pytest.importorskip(\"torch\", reason=\"torch is not installed\")",
            "    if not there_is(\"torch\"):",
            "from torch_world import torch",
            "from gpu import bits, torch",
        ] {
            assert!(needs_torch(text), "{text}");
        }
        assert!(!needs_torch("# As torch does.\nassert array.dtype == \"torch.float32\""));
    }

    #[test]
    fn torch_is_skipped_with_the_reason_unless_it_is_wanted() {
        let reason = torch(false).unwrap_err().downcast::<Skip>().unwrap().to_string();
        assert_eq!(reason, "torch==2.11.0 and what it needs are 3 GB; --torch fetches them");
    }

    #[test]
    fn a_wheel_for_one_python_does_not_serve_all() {
        assert!(serves_all("wholemem-0.1.0-cp39-abi3-linux_x86_64.whl"));
        assert!(!serves_all("wholemem-0.1.0-cp311-cp311-linux_x86_64.whl"));
        assert!(!serves_all("wholemem-0.1.0-cp39-abi3-linux_x86_64.tar.gz"));
    }
}
