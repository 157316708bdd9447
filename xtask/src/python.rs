//! The steps `python` and `torch`: check the types of the Python package, build it as a wheel, install it in a virtual
//! environment and run its tests.
//!
//! The wheel is built with the `dev` profile, to reuse the compiled crates of the other steps.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};

use crate::toolchain::Skip;
use crate::wheels::{MATURIN, MYPY, NUMPY, PYTEST, PYTEST_NEEDS, TORCH, TORCH_GEOMETRIC, Wheel};
use crate::{command, source_rules, wheel_data};

/// The Python packages of the virtual environment for builds and tests.
const PACKAGES: [Wheel; 4] = [MATURIN, MYPY, NUMPY, PYTEST];

/// The Python packages of the virtual environment for tests that need torch.
const TORCH_PACKAGES: [Wheel; 4] = [NUMPY, PYTEST, TORCH, TORCH_GEOMETRIC];

/// The folder of the Python package's sources.
const SOURCES: &str = "crates/python/python/wholemem";

/// The folder of the Python package's tests.
const TESTS: &str = "crates/python/tests";

/// Files and folders whose code blocks and examples the Python tests run.
const GUIDES: [&str; 3] = ["README.md", "docs/python/", "examples/python/"];

/// The script that measures calls from torch.
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
    // The doctests of the modules that need torch run in the step `torch`; those of `store` need a store and are run by the
    // tests.
    let store = "--ignore-glob=*/wholemem/store/*";
    let examples = ["--doctest-modules", "--doctest-ignore-import-errors", store, "--pyargs", "wholemem"];
    command::run(pytest(&python, &target).arg(TESTS))?;
    command::run(pytest(&python, &target).args(examples))
}

/// Runs the tests that need torch in an environment with torch. Without `--torch`, nothing is downloaded and the step is skipped.
pub(crate) fn torch(wanted: bool) -> Result<()> {
    if !wanted {
        return Err(Skip::new(format!(
            "{} and its dependencies are 3 GB; --torch downloads them",
            TORCH.pinned()
        ))
        .into());
    }
    let python = with_torch()?;
    let files = torch_tests()?;
    ensure!(!files.is_empty(), "the folder {TESTS} contains no test file that needs torch");
    let target = command::target_folder()?;
    install(&python, "dev")?;
    build_what_tests_start()?;
    // With `WHOLEMEM_REQUIRE_TORCH`, a skipped test fails the run, unless it is skipped because there is no GPU.
    command::run(pytest(&python, &target).args(files).env("WHOLEMEM_REQUIRE_TORCH", "1"))?;
    command::run(pytest(&python, &target).args(["--doctest-modules", "--pyargs", "wholemem.torch"]))
}

/// Returns the interpreter of the virtual environment with torch. A failed download is an error and not a skip, because the
/// user requested torch.
pub(crate) fn with_torch() -> Result<PathBuf> {
    environment("torch", &TORCH_PACKAGES, TORCH_FETCH_LIMIT).map_err(|error| anyhow!("{error:#}"))
}

/// Returns the Python test files that need torch.
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

/// Returns true if a test file skips tests when torch is missing: it imports torch by name, or from a helper module that does.
fn needs_torch(text: &str) -> bool {
    ["(\"torch\"", "from torch_world import", "from gpu import"].iter().any(|sign| text.contains(sign))
}

/// Builds the program, which the tests start as ranks, and the fake CUDA driver.
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

/// Returns an interpreter with the Python package installed, built with the `release` profile.
pub(crate) fn released() -> Result<PathBuf> {
    let python = tools()?;
    install(&python, "release")?;
    Ok(python)
}

/// Copies to a folder the files that a machine with a GPU needs to test the package with its own Python: the release wheel, the
/// tests, the guides that they run, the benchmark, and pytest in case it is not installed.
pub(crate) fn pack(folder: &Path) -> Result<()> {
    let (tests, pytest) = (folder.join("tests"), folder.join("pytest"));
    fs::create_dir_all(&tests)?;
    let wheel = build(&tools()?, &command::target_folder()?, "release")?;
    fs::copy(&wheel, folder.join(wheel.file_name().context("the path of the wheel has no file name")?))?;
    for entry in fs::read_dir(TESTS)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "py") {
            fs::copy(&path, tests.join(path.file_name().context("the path of a test has no file name")?))?;
        }
    }
    fs::copy(BENCH, folder.join("from_torch.py")).with_context(|| format!("cannot copy {BENCH}"))?;
    for path in
        source_rules::tracked()?.iter().filter(|path| GUIDES.iter().any(|guide| path.starts_with(guide)))
    {
        let copy = folder.join(path);
        fs::create_dir_all(copy.parent().context("the path of a guide has no parent folder")?)?;
        fs::copy(path, copy).with_context(|| format!("cannot copy {path}"))?;
    }
    [PYTEST].into_iter().chain(PYTEST_NEEDS).try_for_each(|wheel| wheel.fetch(&pytest))
}

/// Builds the wheel with a cargo profile, and installs it into a virtual environment.
fn install(python: &Path, profile: &str) -> Result<()> {
    let wheel = build(&tools()?, &command::target_folder()?, profile)?;
    let install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"];
    command::run(Command::new(python).args(install).arg("--force-reinstall").arg(&wheel))
}

/// Returns the interpreter of the virtual environment for builds and tests.
fn tools() -> Result<PathBuf> {
    environment("python", &PACKAGES, FETCH_LIMIT)
}

/// Returns the interpreter of a virtual environment, which is created if necessary. If the packages cannot be downloaded, the
/// error is a [`Skip`].
pub(crate) fn environment(name: &str, packages: &[Wheel], limit: Duration) -> Result<PathBuf> {
    environment_of(Path::new("python3"), name, packages, limit)
}

/// Returns the interpreter of a virtual environment that is based on `interpreter`, and is created if necessary.
pub(crate) fn environment_of(
    interpreter: &Path,
    name: &str,
    packages: &[Wheel],
    limit: Duration,
) -> Result<PathBuf> {
    let pinned: Vec<_> = packages.iter().map(Wheel::pinned).collect();
    let folder = &Path::new("target/tools").join(name);
    let (python, complete) = (folder.join("bin/python"), folder.join("complete"));
    // The virtual environment is created again if a pinned version has changed.
    if fs::read_to_string(&complete).is_ok_and(|text| text == pinned.join("\n")) {
        return Ok(fs::canonicalize(folder)?.join("bin/python"));
    }
    let skip = |error: anyhow::Error| {
        let packages = pinned.join(" ");
        Skip::new(format!(
            "cannot create a Python environment: {error:#}\nhint: python3 -m pip install {packages}"
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

/// Builds the wheel. Returns an error unless there is exactly one, for Python 3.9 and newer.
fn build(python: &Path, target: &Path, profile: &str) -> Result<PathBuf> {
    let folder = target.join("wheels/test");
    if folder.is_dir() {
        fs::remove_dir_all(&folder)?;
    }
    // The wheel does not include the program; the tests get its path in `WHOLEMEM_PROGRAM`.
    wheel_data::stage(None)?;
    let arguments = ["-m", "maturin", "build", "--quiet", "--profile", profile, "--compatibility", "linux"];
    command::run(
        Command::new(python).args(arguments).arg("--interpreter").arg(python).arg("--out").arg(&folder),
    )?;
    let entries: Vec<_> = fs::read_dir(&folder)?.collect::<Result<_, _>>()?;
    let wheels: Vec<_> =
        entries.iter().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    match &wheels[..] {
        [wheel] if serves_all(wheel) => Ok(folder.join(wheel)),
        _ => bail!(
            "expected one cp39-abi3 wheel in {path}, found {count} files: {names}",
            path = folder.display(),
            count = wheels.len(),
            names = wheels.join(", ")
        ),
    }
}

/// Returns true if the name of a wheel has the tag for Python 3.9 and newer.
pub(crate) fn serves_all(wheel: &str) -> bool {
    wheel.ends_with(".whl") && wheel.contains("-cp39-abi3-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_file_that_imports_torch_needs_torch() {
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
    fn without_the_option_the_torch_step_is_skipped_with_a_reason() {
        let reason = torch(false).unwrap_err().downcast::<Skip>().unwrap().to_string();
        assert_eq!(reason, "torch==2.11.0 and its dependencies are 3 GB; --torch downloads them");
    }

    #[test]
    fn a_wheel_for_one_python_version_is_rejected() {
        assert!(serves_all("wholemem-0.1.0-cp39-abi3-linux_x86_64.whl"));
        assert!(!serves_all("wholemem-0.1.0-cp311-cp311-linux_x86_64.whl"));
        assert!(!serves_all("wholemem-0.1.0-cp39-abi3-linux_x86_64.tar.gz"));
    }
}
