//! Open MPI, the rival on a host: the one that is installed, or Debian's packages, unpacked below `target/`.
//!
//! Unpacked, it needs no root and changes nothing of the machine: variables tell it where it is.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::command;
use crate::toolchain::Skip;

const FOLDER: &str = "target/tools/open-mpi";

const FETCH_LIMIT: Duration = Duration::from_secs(300);

/// The programs, the libraries with what they are linked to, and the headers.
const PACKAGES: [&str; 18] = [
    "openmpi-bin",
    "openmpi-common",
    "libopenmpi3",
    "libopenmpi-dev",
    "libpmix2",
    "libhwloc15",
    "libhwloc-plugins",
    "libevent-core-2.1-7",
    "libevent-pthreads-2.1-7",
    "libucx0",
    "libfabric1",
    "libpsm2-2",
    "libpsm-infinipath1",
    "librdmacm1",
    "libibverbs1",
    "libnl-3-200",
    "libnl-route-3-200",
    "libmunge2",
];

/// Where it is.
#[derive(Debug)]
pub(crate) enum OpenMpi {
    /// Where the system has it.
    Installed,
    /// In a folder that has the system's structure.
    Unpacked(PathBuf),
}

impl OpenMpi {
    /// Finds it, fetching it first if need be.
    ///
    /// A machine that cannot fetch it skips the step that asked.
    pub(crate) fn find_or_fetch() -> Result<Self> {
        let is_installed = |program: &str| command::succeeds(Command::new(program).arg("--version"));
        if is_installed("mpirun") && is_installed("mpicc") {
            return Ok(Self::Installed);
        }
        let folder = std::path::absolute(FOLDER)?;
        if folder.is_dir() {
            return Ok(Self::Unpacked(folder));
        }
        let unfinished = folder.with_extension("unfinished");
        if unfinished.is_dir() {
            fs::remove_dir_all(&unfinished)?;
        }
        let packages = unfinished.join("packages");
        fs::create_dir_all(&packages)?;
        let mut download = Command::new("apt-get");
        download.arg("download").args(PACKAGES).current_dir(&packages);
        command::run_within(&mut download, FETCH_LIMIT).map_err(|error| {
            let hint = "apt-get install openmpi-bin libopenmpi-dev";
            Skip::new(format!("cannot fetch Open MPI: {error:#}\nhint: {hint}"))
        })?;
        for package in fs::read_dir(&packages)? {
            command::run(Command::new("dpkg").arg("--extract").arg(package?.path()).arg(&unfinished))?;
        }
        fs::rename(&unfinished, &folder).with_context(|| format!("cannot keep {}", folder.display()))?;
        Ok(Self::Unpacked(folder))
    }

    /// What starts ranks.
    pub(crate) fn mpirun(&self) -> PathBuf {
        match self {
            Self::Installed => PathBuf::from("mpirun"),
            Self::Unpacked(root) => root.join("usr/bin/mpirun.openmpi"),
        }
    }

    /// Compiles a program of one file.
    pub(crate) fn compile(&self, source: &Path, program: &Path) -> Result<()> {
        let mut compiler = Command::new(if matches!(self, Self::Installed) { "mpicc" } else { "cc" });
        compiler.args(["-O2", "-Wall"]).arg(source).arg("-o").arg(program).arg("-lm");
        if let Self::Unpacked(root) = self {
            let libraries = libraries(root);
            compiler.arg("-I").arg(libraries.join("openmpi/include")).arg(libraries.join("libmpi.so.40"));
            // What its libraries need is found when the program runs.
            compiler.arg("-Wl,--allow-shlib-undefined");
        }
        command::run(&mut compiler)
    }

    /// What has to be in the environment of whatever runs it.
    pub(crate) fn environment(&self) -> Result<Vec<(&'static str, OsString)>> {
        let Self::Unpacked(root) = self else { return Ok(Vec::new()) };
        let libraries = libraries(root);
        let library_folders =
            [libraries.clone(), root.join("lib").join(debian_triple()), libraries.join("openmpi/lib")];
        let paths = std::env::var_os("PATH").unwrap_or_default();
        let paths = [root.join("usr/bin")].into_iter().chain(std::env::split_paths(&paths));
        Ok(vec![
            ("OPAL_PREFIX", root.join("usr").into()),
            ("PMIX_INSTALL_PREFIX", libraries.join("pmix2").into()),
            (
                "LD_LIBRARY_PATH",
                std::env::join_paths(library_folders).context("a folder has a colon in its name")?,
            ),
            ("PATH", std::env::join_paths(paths).context("a folder has a colon in its name")?),
        ])
    }
}

fn libraries(root: &Path) -> PathBuf {
    root.join("usr/lib").join(debian_triple())
}

/// What Debian calls this kind of machine.
fn debian_triple() -> String {
    format!("{}-linux-gnu", std::env::consts::ARCH)
}
