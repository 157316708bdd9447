//! The program as it is distributed: for any Linux with glibc 2.28 or newer, stripped, and within its size limit.
//!
//! The linker is that of Zig, which has the symbols of every version of glibc. It comes from the Python index, pinned, with
//! what calls it and what builds and checks wheels.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;

use crate::wheels::{AUDITWHEEL, CARGO_ZIGBUILD, MATURIN, Wheel, ZIG};
use crate::{command, python, toolchain};

/// The profile of cargo that everything distributed is built with.
pub(crate) const PROFILE: &str = "dist";

/// The oldest glibc that it runs with: that of RHEL 8, and older than those of Debian 10 and Ubuntu 20.04.
pub(crate) const GLIBC: (u32, u32) = (2, 28);

/// The most bytes that the program may have.
const PROGRAM_LIMIT: u64 = 10 << 20;

const PACKAGES: [Wheel; 4] = [MATURIN, ZIG, CARGO_ZIGBUILD, AUDITWHEEL];

const FETCH_LIMIT: Duration = Duration::from_secs(300);

/// A machine that binaries are built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum Arch {
    #[value(name = "x86_64")]
    X86_64,
    Aarch64,
}

impl Arch {
    /// The machine that this runs on, if binaries are built for it.
    pub(crate) fn of_this_machine() -> Result<Self> {
        let arch = std::env::consts::ARCH;
        Self::from_str(arch, false).ok().with_context(|| format!("no binaries are built for {arch}"))
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Aarch64 => "aarch64",
        }
    }

    /// The name in Debian.
    pub(crate) fn debian(self) -> &'static str {
        match self {
            Self::X86_64 => "amd64",
            Self::Aarch64 => "arm64",
        }
    }

    /// Rust's name of the target.
    pub(crate) fn target(self) -> String {
        format!("{}-unknown-linux-gnu", self.name())
    }
}

/// The interpreter of the environment that holds Zig and what builds and checks wheels.
pub(crate) fn tools() -> Result<PathBuf> {
    python::environment(PROFILE, &PACKAGES, FETCH_LIMIT)
}

/// Has a command that calls cargo link for an architecture, and sees to the standard library for it.
///
/// All of them use the same linker, since cargo compiles everything again if its path changes: `maturin --zig` and
/// `cargo zigbuild` have one each.
pub(crate) fn link_for(command: &mut Command, arch: Arch) -> Result<&mut Command> {
    toolchain::need_target(&arch.target())?;
    let python = tools()?;
    let bin = python.parent().context("an interpreter lies in a folder")?;
    // Also for this machine, which build scripts and macros are linked for: they are shared by all architectures.
    for arch in [Arch::of_this_machine()?, arch] {
        let linker = bin.join(format!("zigcc-{}", arch.name()));
        let script = linker_script(&python, arch);
        if !fs::read_to_string(&linker).is_ok_and(|text| text == script) {
            fs::write(&linker, script).with_context(|| format!("cannot write {}", linker.display()))?;
            fs::set_permissions(&linker, fs::Permissions::from_mode(0o755))?;
        }
        let variable = arch.target().to_uppercase().replace('-', "_");
        command.env(format!("CARGO_TARGET_{variable}_LINKER"), linker);
    }
    Ok(command)
}

/// Calls Zig through cargo-zigbuild, which leaves out the options that only GNU's linker has.
fn linker_script(python: &Path, arch: Arch) -> String {
    let (python, (major, minor)) = (python.display(), GLIBC);
    format!(
        "#!/bin/sh\n\
         export CARGO_ZIGBUILD_ZIG_VERSION={}\n\
         export CARGO_ZIGBUILD_ZIG_COMMAND='{python}' CARGO_ZIGBUILD_ZIG_COMMAND_ARGS='-m ziglang'\n\
         exec \"$(dirname '{python}')/cargo-zigbuild\" zig cc -- \\\n    \
         -fno-sanitize=all -target {}-linux-gnu.{major}.{minor} \"$@\"\n",
        ZIG.version,
        arch.name()
    )
}

/// Builds the program, and returns where it is.
pub(crate) fn program(arch: Arch) -> Result<PathBuf> {
    let mut build = command::cargo();
    build.args(["build", "--locked", "--profile", PROFILE, "--package", "wholemem-cli", "--target"]);
    command::run(link_for(build.arg(arch.target()), arch)?)?;
    let program = command::target_folder()?.join(arch.target()).join(PROFILE).join("wholemem");
    let len = within("the program", &program, PROGRAM_LIMIT)?;
    let read = |what| command::capture(Command::new("readelf").args(["--wide", what]).arg(&program));
    ensure!(!read("--sections")?.contains(".symtab"), "{} is not stripped", program.display());
    let newest = newest_glibc(&read("--version-info")?).context("the program needs no version of glibc")?;
    ensure!(newest <= GLIBC, "the program needs glibc {newest:?}, and {GLIBC:?} is the limit");
    println!("{}: {len} bytes, glibc {}.{} or newer", program.display(), newest.0, newest.1);
    Ok(program)
}

/// The length of a file, unless it is longer than a limit.
pub(crate) fn within(what: &str, path: &Path, limit: u64) -> Result<u64> {
    let len = fs::metadata(path).with_context(|| format!("cannot read {}", path.display()))?.len();
    if len >= limit {
        bail!("{what} has {len} bytes, and the limit is {limit}: {}", path.display());
    }
    Ok(len)
}

/// The newest version of glibc among those that `readelf --version-info` lists.
fn newest_glibc(versions: &str) -> Option<(u32, u32)> {
    let names = versions.split_whitespace().filter_map(|word| word.strip_prefix("GLIBC_"));
    names
        .filter_map(|name| {
            let mut numbers = name.split('.').map(str::parse);
            Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
        })
        .max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_glibc_is_found_by_number() {
        let listed = "  0x0010:   Name: GLIBC_2.2.5  Flags: none  Version: 4\n  0x0020:   Name: GLIBC_2.28  Flags: none\n\
                      0x30: Name: GLIBC_2.3.4 Flags: none\n 0x40: Name: GCC_3.0";
        assert_eq!(newest_glibc(listed), Some((2, 28)));
        assert_eq!(newest_glibc("No version information found in this file."), None);
    }

    #[test]
    fn a_file_of_the_limit_is_refused() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
        let len = fs::metadata(&path).unwrap().len();
        assert_eq!(within("it", &path, len + 1).unwrap(), len);
        let refused = within("it", &path, len).unwrap_err().to_string();
        assert_eq!(refused, format!("it has {len} bytes, and the limit is {len}: {}", path.display()));
    }

    #[test]
    fn architectures_have_the_names_of_the_command_line() {
        for arch in Arch::value_variants() {
            assert_eq!(Arch::from_str(arch.name(), false).as_ref(), Ok(arch));
        }
    }
}
