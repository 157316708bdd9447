//! Finds Open MPI, which host benchmarks are compared with: an installed one, or Debian packages unpacked in `target/`.
//!
//! The unpacked packages need no root rights and do not change the system: environment variables point to them.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::{command, debian};

const FOLDER: &str = "target/tools/open-mpi";

/// The Debian packages with the programs and libraries of Open MPI, their dependencies and the headers.
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

/// An Open MPI that can be used: installed in the system, or unpacked in a folder.
#[derive(Debug)]
pub(crate) enum OpenMpi {
    /// Open MPI is installed in the system.
    Installed,
    /// Open MPI is unpacked in a folder with the layout of the system's root.
    Unpacked(PathBuf),
}

impl OpenMpi {
    /// Finds Open MPI; downloads and unpacks it if it is not installed.
    ///
    /// If the download fails, the error is a [`Skip`](crate::toolchain::Skip).
    pub(crate) fn find_or_fetch() -> Result<Self> {
        let is_installed = |program: &str| command::succeeds(Command::new(program).arg("--version"));
        if is_installed("mpirun") && is_installed("mpicc") {
            return Ok(Self::Installed);
        }
        let hint = "apt-get install openmpi-bin libopenmpi-dev";
        debian::fetch("Open MPI", FOLDER, &PACKAGES, hint).map(Self::Unpacked)
    }

    /// Returns the path of `mpirun`, the program that starts ranks.
    pub(crate) fn mpirun(&self) -> PathBuf {
        match self {
            Self::Installed => PathBuf::from("mpirun"),
            Self::Unpacked(root) => root.join("usr/bin/mpirun.openmpi"),
        }
    }

    /// Compiles an MPI program that has one source file.
    pub(crate) fn compile(&self, source: &Path, program: &Path) -> Result<()> {
        let mut compiler = Command::new(if matches!(self, Self::Installed) { "mpicc" } else { "cc" });
        compiler.args(["-O2", "-Wall"]).arg(source).arg("-o").arg(program).arg("-lm");
        if let Self::Unpacked(root) = self {
            let libraries = debian::libraries(root);
            compiler.arg("-I").arg(libraries.join("openmpi/include")).arg(libraries.join("libmpi.so.40"));
            // The linker ignores undefined symbols of the MPI libraries, whose dependencies are resolved when the program runs.
            compiler.arg("-Wl,--allow-shlib-undefined");
        }
        command::run(&mut compiler)
    }

    /// Returns the environment variables for programs that use Open MPI.
    pub(crate) fn environment(&self) -> Result<Vec<(&'static str, OsString)>> {
        let Self::Unpacked(root) = self else { return Ok(Vec::new()) };
        let libraries = debian::libraries(root);
        let library_folders =
            [libraries.clone(), root.join("lib").join(debian::triple()), libraries.join("openmpi/lib")];
        let paths = std::env::var_os("PATH").unwrap_or_default();
        let paths = [root.join("usr/bin")].into_iter().chain(std::env::split_paths(&paths));
        Ok(vec![
            ("OPAL_PREFIX", root.join("usr").into()),
            ("PMIX_INSTALL_PREFIX", libraries.join("pmix2").into()),
            (
                "LD_LIBRARY_PATH",
                std::env::join_paths(library_folders).context("the path of a folder contains a colon")?,
            ),
            ("PATH", std::env::join_paths(paths).context("the path of a folder contains a colon")?),
        ])
    }
}
