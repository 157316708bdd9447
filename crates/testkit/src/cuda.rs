//! GPUs for tests: opens the real CUDA backend, installs a fake driver, and contains kernels for both.

use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;
use wholemem_hal::{Backend, BackendKind};
use wholemem_os::PidFd;

use crate::ranks::{Ranks, default_deadline};

/// The PTX of `kernels/testing.cu`.
pub const TESTING_PTX: &str = include_str!("../kernels/ptx/testing.ptx");

/// The PTX of the collectives with mutants, which are deliberate errors that a test can enable.
pub const COLLECTIVE_PTX: &str = include_str!("../../wholemem/kernels/ptx/collective.testing.ptx");

/// Opens the CUDA backend, or reports that the test is skipped. With `WHOLEMEM_REQUIRE_CUDA=1` a skip is a failure.
///
/// # Panics
/// If CUDA is required but not available.
#[must_use]
pub fn backend() -> Option<Backend> {
    match Backend::open(BackendKind::Cuda) {
        Ok(backend) => Some(backend),
        Err(error) => {
            let required = std::env::var_os("WHOLEMEM_REQUIRE_CUDA").is_some_and(|value| value != "0");
            assert!(!required, "CUDA is required here: {error}");
            crate::skipped(&error.to_string());
            None
        }
    }
}

/// The file name of the CUDA driver library.
const LIBRARY: &str = "libcuda.so.1";

/// The environment variable with the search path of the dynamic loader.
const SEARCH: &str = "LD_LIBRARY_PATH";

/// A folder from which programs load the fake CUDA driver instead of the real one.
#[derive(Debug)]
pub struct FakeCuda {
    folder: TempDir,
}

impl FakeCuda {
    /// Installs the fake CUDA driver that cargo built next to this test. If the test binary was moved without the
    /// driver, reports that the test is skipped.
    ///
    /// # Panics
    /// If cargo runs the test and the fake driver is missing.
    #[must_use]
    pub fn install() -> Option<Self> {
        let Some(library) = library() else {
            assert!(std::env::var_os("CARGO").is_none(), "cargo builds the fake driver next to the tests");
            crate::skipped("the fake driver is not next to this test binary");
            return None;
        };
        let fake = Self::with_library(|path| symlink(&library, path).expect("cannot create a symbolic link"));
        Some(fake)
    }

    /// Installs the driver library that `create` writes at the given path.
    ///
    /// # Panics
    /// If no temporary folder can be created.
    pub fn with_library(create: impl FnOnce(&Path)) -> Self {
        let folder = tempfile::tempdir().expect("cannot create a folder for the driver");
        create(&folder.path().join(LIBRARY));
        Self { folder }
    }

    /// Returns the search path with which the dynamic loader finds the fake driver.
    fn search_path(&self) -> OsString {
        let mut path = self.folder.path().as_os_str().to_owned();
        if let Some(rest) = std::env::var_os(SEARCH) {
            path.push(":");
            path.push(rest);
        }
        path
    }

    /// Configures a test of `count` rank processes that load the fake driver.
    #[must_use]
    pub fn ranks(&self, count: usize) -> Ranks {
        Ranks::of(count).env(SEARCH, self.search_path()).env("WHOLEMEM_REQUIRE_CUDA", "1")
    }

    /// Runs those tests of this binary again whose names contain one of `filters`, with the fake driver and the
    /// environment variables `settings`. Returns the number of passed tests.
    ///
    /// # Panics
    /// If a test fails, or the tests do not end before the timeout.
    pub fn rerun(&self, filters: &[&str], settings: &[(&str, &str)]) -> usize {
        let mut output = tempfile::tempfile().expect("cannot create a file for the output");
        let copy = |output: &File| Stdio::from(output.try_clone().expect("cannot duplicate a descriptor"));
        let mut child = Command::new("/proc/self/exe")
            .args(filters)
            .env(SEARCH, self.search_path())
            .env("WHOLEMEM_REQUIRE_CUDA", "1")
            .envs(settings.iter().copied())
            .stdin(Stdio::null())
            .stdout(copy(&output))
            .stderr(copy(&output))
            .spawn()
            .expect("cannot start this program again");
        let process = PidFd::open(child.id()).expect("cannot open a pidfd of a child");
        let ended = process.wait_exit(default_deadline()).expect("cannot wait for a child");
        if !ended {
            child.kill().expect("cannot kill a child");
        }
        let status = child.wait().expect("cannot wait for a child");
        let mut text = String::new();
        output.rewind().and_then(|()| output.read_to_string(&mut text)).expect("the output is text");
        assert!(ended && status.success(), "on the fake driver ({status}):\n{text}");
        let passed = text.lines().filter_map(|line| line.strip_prefix("test result: ok. "));
        let passed = passed.filter_map(|line| line.split(' ').next()?.parse::<usize>().ok());
        passed.sum()
    }
}

/// Returns the path of the fake driver that cargo built, if it exists.
fn library() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    let folders = program.ancestors().skip(1).take(2);
    let mut candidates = folders.map(|folder| folder.join("libwholemem_fake_cuda.so"));
    candidates.find(|path| path.exists())
}
