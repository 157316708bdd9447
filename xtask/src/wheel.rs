//! Builds the Python wheel that users install: the library, the program, the headers for kernels and the type stubs, for Python
//! 3.9 and newer and Linux with glibc 2.28 or newer.
//!
//! maturin builds the library and the wheel; [`wheel_data`] provides the other files.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::dist::{self, Arch, GLIBC, PROFILE};
use crate::{command, python, wheel_data};

/// The maximum size of the Python wheel in bytes.
const LIMIT: u64 = 12 << 20;

/// Builds the Python wheel, checks its tags and its size, and returns its path.
pub(crate) fn build(arch: Arch, out: &Path) -> Result<PathBuf> {
    wheel_data::stage(Some(&dist::program(arch)?))?;
    let python = dist::tools()?;
    let unchecked = command::target_folder()?.join("wheels").join(arch.name());
    if unchecked.is_dir() {
        fs::remove_dir_all(&unchecked)?;
    }
    let mut maturin = Command::new(&python);
    maturin.args(["-m", "maturin", "build", "--quiet", "--profile", PROFILE, "--target"]);
    maturin.arg(arch.target()).args(["--compatibility", &policy()]).arg("--out").arg(&unchecked);
    if arch == Arch::of_this_machine()? {
        maturin.arg("--interpreter").arg(&python);
    }
    command::run(dist::link_for(&mut maturin, arch)?)?;

    let name = format!("wholemem-{}-cp39-abi3-{}_{}.whl", version()?, policy(), arch.name());
    ensure!(python::serves_all(&name), "the wheel {name} is not tagged cp39-abi3");
    let wheel = unchecked.join(&name);
    let len = dist::within("the wheel", &wheel, LIMIT)?;
    audit(&python, &wheel, arch)?;
    fs::create_dir_all(out)?;
    let copy = out.join(&name);
    fs::copy(&wheel, &copy).with_context(|| format!("cannot write {}", copy.display()))?;
    println!("{}: {len} bytes", copy.display());
    Ok(copy)
}

/// Returns the version of all crates of the workspace.
pub(crate) fn version() -> Result<String> {
    let pkgid = command::capture(command::cargo().args(["pkgid", "--locked", "--package", "wholemem-cli"]))?;
    let (_, version) =
        pkgid.trim().rsplit_once(['#', '@']).context("the output of cargo pkgid has no version")?;
    Ok(version.to_owned())
}

/// Returns the manylinux policy of the wheel, as in its file name.
fn policy() -> String {
    let (major, minor) = GLIBC;
    format!("manylinux_{major}_{minor}")
}

/// Checks all binaries of a wheel, including the program, with auditwheel. If one needs libraries or symbols that the manylinux
/// policy does not allow, auditwheel reports another policy.
fn audit(python: &Path, wheel: &Path, arch: Arch) -> Result<()> {
    let output = command::capture(Command::new(python).args(["-m", "auditwheel", "show"]).arg(wheel))?;
    print!("{output}");
    let newest = glibc_of_tag(&output, arch).context("auditwheel reports no manylinux tag for the wheel")?;
    ensure!(newest <= GLIBC, "the wheel needs glibc {newest:?}, which is newer than the limit {GLIBC:?}");
    Ok(())
}

/// Returns the glibc version in the platform tag that auditwheel reports for a wheel.
fn glibc_of_tag(output: &str, arch: Arch) -> Option<(u32, u32)> {
    let words = output.split_whitespace().collect::<Vec<_>>().join(" ");
    let (_, tag) = words.split_once("is consistent with the following platform tag: \"manylinux_")?;
    let (tag, _) = tag.split_once('"')?;
    let (major, minor) = tag.strip_suffix(arch.name())?.strip_suffix('_')?.split_once('_')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_platform_tag_may_be_split_across_lines() {
        let output =
            "x.whl is consistent with\nthe following platform tag: \"manylinux_2_28_x86_64\".\n\nThe wheel";
        assert_eq!(glibc_of_tag(output, Arch::X86_64), Some((2, 28)));
        assert_eq!(glibc_of_tag(output, Arch::Aarch64), None);
        let none = "x.whl is consistent with the following platform tag: \"linux_x86_64\".";
        assert_eq!(glibc_of_tag(none, Arch::X86_64), None);
    }
}
