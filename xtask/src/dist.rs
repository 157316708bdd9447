//! Builds the program for distribution: stripped, within its size limit, for Linux with glibc 2.28 or newer.
//!
//! The linker is Zig, which has the symbols of every glibc version. Zig, cargo-zigbuild, maturin and auditwheel are pinned
//! packages of the Python index.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;

use crate::wheels::{AUDITWHEEL, CARGO_ZIGBUILD, MATURIN, Wheel, ZIG};
use crate::{command, python, toolchain};

/// The cargo profile of all distributed binaries.
pub(crate) const PROFILE: &str = "dist";

/// The oldest supported glibc, that of RHEL 8. Those of Debian 10 and Ubuntu 20.04 are newer.
pub(crate) const GLIBC: (u32, u32) = (2, 28);

/// The maximum size of the distributed program in bytes.
const PROGRAM_LIMIT: u64 = 10 << 20;

const PACKAGES: [Wheel; 4] = [MATURIN, ZIG, CARGO_ZIGBUILD, AUDITWHEEL];

const FETCH_LIMIT: Duration = Duration::from_secs(300);

/// A CPU architecture that binaries are built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum Arch {
    #[value(name = "x86_64")]
    X86_64,
    Aarch64,
}

impl Arch {
    /// Returns the CPU architecture of this machine, or an error if no binaries are built for it.
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

    /// Returns the Debian name of the CPU architecture.
    pub(crate) fn debian(self) -> &'static str {
        match self {
            Self::X86_64 => "amd64",
            Self::Aarch64 => "arm64",
        }
    }

    /// Returns the Rust target triple of the CPU architecture.
    pub(crate) fn target(self) -> String {
        format!("{}-unknown-linux-gnu", self.name())
    }
}

/// Returns the Python interpreter of the virtual environment with Zig, maturin and auditwheel.
pub(crate) fn tools() -> Result<PathBuf> {
    python::environment(PROFILE, &PACKAGES, FETCH_LIMIT)
}

/// Makes a command that runs cargo link with Zig, and ensures that the Rust standard library for the architecture is installed.
///
/// All commands use the same linker script, because cargo recompiles everything if the path of the linker changes; `maturin
/// --zig` and `cargo zigbuild` would each use a script of their own.
pub(crate) fn link_for(command: &mut Command, arch: Arch) -> Result<&mut Command> {
    toolchain::need_target(&arch.target())?;
    let python = tools()?;
    let bin = python.parent().context("the path of the interpreter has no parent folder")?;
    // Zig is set as the linker for the architecture of this machine too, because build scripts and procedural macros are linked
    // with it for all targets.
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

/// Returns a script that runs Zig through cargo-zigbuild, which removes options that only the GNU linker supports.
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

/// Builds the program for distribution, checks its size and its glibc version, and returns its path.
pub(crate) fn program(arch: Arch) -> Result<PathBuf> {
    let mut build = command::cargo();
    build.args(["build", "--locked", "--profile", PROFILE, "--package", "wholemem-cli", "--target"]);
    command::run(link_for(build.arg(arch.target()), arch)?)?;
    let program = command::target_folder()?.join(arch.target()).join(PROFILE).join("wholemem");
    let len = within("the program", &program, PROGRAM_LIMIT)?;
    let readelf = |option| command::capture(Command::new("readelf").args(["--wide", option]).arg(&program));
    ensure!(!readelf("--sections")?.contains(".symtab"), "{} is not stripped", program.display());
    let newest =
        newest_glibc(&readelf("--version-info")?).context("the program has no glibc version requirement")?;
    ensure!(newest <= GLIBC, "the program needs glibc {newest:?}, which is newer than the limit {GLIBC:?}");
    println!("{}: {len} bytes, glibc {}.{} or newer", program.display(), newest.0, newest.1);
    Ok(program)
}

/// Returns the length of a file, or an error if it is not below the limit.
pub(crate) fn within(what: &str, path: &Path, limit: u64) -> Result<u64> {
    let len = fs::metadata(path).with_context(|| format!("cannot read {}", path.display()))?.len();
    if len >= limit {
        bail!(
            "{what} has {len} bytes, which is not below the limit of {limit} bytes: {file}",
            file = path.display()
        );
    }
    Ok(len)
}

/// Returns the newest glibc version in the output of `readelf --version-info`.
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
    fn glibc_versions_are_compared_as_numbers() {
        let listed = "  0x0010:   Name: GLIBC_2.2.5  Flags: none  Version: 4\n  0x0020:   Name: GLIBC_2.28  Flags: none\n\
                      0x30: Name: GLIBC_2.3.4 Flags: none\n 0x40: Name: GCC_3.0";
        assert_eq!(newest_glibc(listed), Some((2, 28)));
        assert_eq!(newest_glibc("No version information found in this file."), None);
    }

    #[test]
    fn a_file_at_the_size_limit_is_rejected() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
        let len = fs::metadata(&path).unwrap().len();
        assert_eq!(within("the file", &path, len + 1).unwrap(), len);
        let error = within("the file", &path, len).unwrap_err().to_string();
        assert_eq!(
            error,
            format!(
                "the file has {len} bytes, which is not below the limit of {len} bytes: {}",
                path.display()
            )
        );
    }

    #[test]
    fn architecture_names_equal_their_command_line_names() {
        for arch in Arch::value_variants() {
            assert_eq!(Arch::from_str(arch.name(), false).as_ref(), Ok(arch));
        }
    }
}
