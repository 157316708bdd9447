//! The tools that build the tests and examples in C and C++: CMake, Ninja and pkgconf of the Python index, GCC of the system, and Clang.
//!
//! Clang is that of Zig, which the binary packages are linked with: the Python index has no other package with the compiler.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::native::Variant;
use crate::toolchain::Skip;
use crate::wheels::{CMAKE, NINJA, PKGCONF};
use crate::{command, dist};

/// The time limit of all tests of one variant.
const LIMIT: Duration = Duration::from_secs(900);

/// A C and a C++ compiler of the same kind.
#[derive(Debug, Clone)]
pub(crate) struct Compilers {
    pub(crate) cc: PathBuf,
    pub(crate) cxx: PathBuf,
}

impl Compilers {
    /// Returns GCC, or the compilers of the system if they have other names.
    pub(crate) fn gnu() -> Result<Self> {
        let runs = |(cc, cxx): &(&str, &str)| {
            [cc, cxx].iter().all(|program| command::succeeds(Command::new(program).arg("--version")))
        };
        let found = [("gcc", "g++"), ("cc", "c++")].into_iter().find(runs);
        let (cc, cxx) =
            found.ok_or_else(|| Skip::new("no C++ compiler\nhint: install the packages gcc and g++"))?;
        Ok(Self { cc: cc.into(), cxx: cxx.into() })
    }

    /// Returns Clang, which is downloaded if necessary.
    pub(crate) fn clang() -> Result<Self> {
        let python = dist::tools()?;
        let folder = std::path::absolute("target/tools/clang")?;
        fs::create_dir_all(&folder)?;
        let script = |name: &str| {
            let path = folder.join(name);
            let text = format!("#!/bin/sh\nexec '{}' -m ziglang {name} \"$@\"\n", python.display());
            if !fs::read_to_string(&path).is_ok_and(|old| old == text) {
                fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
                fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
            }
            Ok::<_, anyhow::Error>(path)
        };
        Ok(Self { cc: script("cc")?, cxx: script("c++")? })
    }
}

/// The programs that configure, build and run tests.
#[derive(Debug)]
pub(crate) struct Tools {
    cmake: PathBuf,
    ctest: PathBuf,
    ninja: PathBuf,
    pub(crate) pkg_config: PathBuf,
}

impl Tools {
    pub(crate) fn find_or_fetch() -> Result<Self> {
        let programs = std::path::absolute(CMAKE.folder()?.join("cmake/data/bin"))?;
        Ok(Self {
            cmake: programs.join("cmake"),
            ctest: programs.join("ctest"),
            ninja: std::path::absolute(NINJA.folder()?.join("bin/ninja"))?,
            pkg_config: std::path::absolute(PKGCONF.folder()?.join("pkgconf/.bin/pkgconf"))?,
        })
    }

    /// Configures the CMake project in `source` for the installation in `prefix`, and builds it in `build`.
    pub(crate) fn build(&self, source: &Path, build: &Path, prefix: &Path, variant: &Variant) -> Result<()> {
        // A cache of an earlier configuration would keep its compiler.
        if build.is_dir() {
            fs::remove_dir_all(build)?;
        }
        let mut configure = Command::new(&self.cmake);
        configure.args(["-G", "Ninja", "-S"]).arg(source).arg("-B").arg(build);
        let set = |name: &str, value: &std::ffi::OsStr| {
            let mut option = OsString::from(format!("-D{name}="));
            option.push(value);
            option
        };
        configure.args([
            set("CMAKE_MAKE_PROGRAM", self.ninja.as_os_str()),
            set("CMAKE_PREFIX_PATH", prefix.as_os_str()),
            set("CMAKE_C_COMPILER", variant.compilers.cc.as_os_str()),
            set("CMAKE_CXX_COMPILER", variant.compilers.cxx.as_os_str()),
            set("CMAKE_CXX_STANDARD", variant.standard.to_string().as_ref()),
            set("CMAKE_C_FLAGS", variant.flags.as_ref()),
            set("CMAKE_CXX_FLAGS", variant.flags.as_ref()),
            set("CMAKE_BUILD_TYPE", "RelWithDebInfo".as_ref()),
            set("WHOLEMEM_TEST_PREFIX", variant.prefix.join(std::ffi::OsStr::new(";")).as_os_str()),
            OsString::from("--no-warn-unused-cli"),
        ]);
        command::run(&mut configure)?;
        command::run(Command::new(&self.cmake).arg("--build").arg(build))
    }

    /// Builds a CMake project, and runs its tests.
    pub(crate) fn test(&self, source: &Path, build: &Path, prefix: &Path, variant: &Variant) -> Result<()> {
        self.build(source, build, prefix, variant)?;
        let mut tests = Command::new(&self.ctest);
        tests.args(["--output-on-failure", "--no-tests=error", "--test-dir"]).arg(build);
        tests.envs(variant.environment.iter().map(|(name, value)| (name, value)));
        command::run_within(&mut tests, LIMIT)
    }
}
