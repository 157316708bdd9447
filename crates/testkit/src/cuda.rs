//! The GPU in tests: the real one where there is one, the fake driver where there is none, and kernels for both.

use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;
use wholemem_hal::{Backend, BackendKind};
use wholemem_os::PidFd;

use crate::ranks::{Ranks, patience};

/// The kernels of `kernels/testing.cu`.
pub const TESTING_PTX: &str = include_str!("../kernels/ptx/testing.ptx");

/// The collectives, which make mistakes where a test asks for them.
pub const COLLECTIVE_PTX: &str = include_str!("../../wholemem/kernels/ptx/collective.testing.ptx");

/// The CUDA backend, or a visible skip. With `WHOLEMEM_REQUIRE_CUDA=1` a skip is a failure.
///
/// # Panics
/// When CUDA is required and is not there.
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

/// The name by which the driver is loaded.
const LIBRARY: &str = "libcuda.so.1";

/// Where the dynamic loader looks first.
const SEARCH: &str = "LD_LIBRARY_PATH";

/// A folder in which the fake driver is what a program loads as CUDA's.
#[derive(Debug)]
pub struct FakeCuda {
    folder: TempDir,
}

impl FakeCuda {
    /// Installs the fake driver that cargo built beside this test; or a visible skip, where the test binary was taken
    /// elsewhere without it.
    ///
    /// # Panics
    /// Under cargo, when it is not there.
    #[must_use]
    pub fn install() -> Option<Self> {
        let Some(library) = library() else {
            assert!(std::env::var_os("CARGO").is_none(), "cargo builds the fake driver beside the tests");
            crate::skipped("the fake driver does not lie beside this test");
            return None;
        };
        let fake = Self::around(|place| symlink(&library, place).expect("a link can be made"));
        Some(fake)
    }

    /// Installs whatever `make` puts at the path that it is given.
    ///
    /// # Panics
    /// When there can be no folder for it.
    pub fn around(make: impl FnOnce(&Path)) -> Self {
        let folder = tempfile::tempdir().expect("a folder for the driver");
        make(&folder.path().join(LIBRARY));
        Self { folder }
    }

    /// What the loader is to be told, so that it finds this one.
    fn search_path(&self) -> OsString {
        let mut path = self.folder.path().as_os_str().to_owned();
        if let Some(rest) = std::env::var_os(SEARCH) {
            path.push(":");
            path.push(rest);
        }
        path
    }

    /// Ranks that load this driver.
    #[must_use]
    pub fn ranks(&self, count: usize) -> Ranks {
        Ranks::of(count).env(SEARCH, self.search_path()).env("WHOLEMEM_REQUIRE_CUDA", "1")
    }

    /// Runs the tests of this binary whose names hold one of `filters` again, over this driver with these settings, and
    /// returns how many passed.
    ///
    /// # Panics
    /// When one fails, or they do not end.
    pub fn rerun(&self, filters: &[&str], settings: &[(&str, &str)]) -> usize {
        let mut output = tempfile::tempfile().expect("a file for the output");
        let copy = |output: &File| Stdio::from(output.try_clone().expect("a descriptor can be had"));
        let mut child = Command::new("/proc/self/exe")
            .args(filters)
            .env(SEARCH, self.search_path())
            .env("WHOLEMEM_REQUIRE_CUDA", "1")
            .envs(settings.iter().copied())
            .stdin(Stdio::null())
            .stdout(copy(&output))
            .stderr(copy(&output))
            .spawn()
            .expect("this program can be started again");
        let process = PidFd::open(child.id()).expect("a child that was not waited for has a pidfd");
        let ended = process.wait_exit(patience()).expect("a child can be waited for");
        if !ended {
            child.kill().expect("a child can be ended");
        }
        let status = child.wait().expect("a child can be waited for");
        let mut text = String::new();
        output.rewind().and_then(|()| output.read_to_string(&mut text)).expect("the output is text");
        assert!(ended && status.success(), "over the fake driver ({status}):\n{text}");
        let passed = text.lines().filter_map(|line| line.strip_prefix("test result: ok. "));
        let passed = passed.filter_map(|line| line.split(' ').next()?.parse::<usize>().ok());
        passed.sum()
    }
}

/// The fake driver, where cargo put it.
fn library() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    let folders = program.ancestors().skip(1).take(2);
    let mut places = folders.map(|folder| folder.join("libwholemem_fake_cuda.so"));
    places.find(|place| place.exists())
}
