//! The wheel that needs nothing: the library, the program, the headers for kernels and the type stubs, for every Python from
//! 3.9 on and every Linux with glibc 2.28 or newer.
//!
//! maturin builds the library; [`wheel_data`] has the rest.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::dist::{self, Arch, GLIBC, PROFILE};
use crate::{command, python, wheel_data};

/// The most bytes that the wheel may have.
const LIMIT: u64 = 12 << 20;

/// Builds the wheel, checks what it says of itself, and returns where it is.
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
    ensure!(python::serves_all(&name), "{name} is not for every Python");
    let wheel = unchecked.join(&name);
    let len = dist::within("the wheel", &wheel, LIMIT)?;
    audit(&python, &wheel, arch)?;
    fs::create_dir_all(out)?;
    let kept = out.join(&name);
    fs::copy(&wheel, &kept).with_context(|| format!("cannot write {}", kept.display()))?;
    println!("{}: {len} bytes", kept.display());
    Ok(kept)
}

/// The version of all crates.
pub(crate) fn version() -> Result<String> {
    let read = command::capture(command::cargo().args(["pkgid", "--locked", "--package", "wholemem-cli"]))?;
    let (_, version) = read.trim().rsplit_once(['#', '@']).context("a package without a version")?;
    Ok(version.to_owned())
}

/// The policy that a wheel keeps, as its name has it.
fn policy() -> String {
    let (major, minor) = GLIBC;
    format!("manylinux_{major}_{minor}")
}

/// Has auditwheel look at every binary in a wheel, the program among them: libraries and symbols that the oldest systems of
/// the policy lack would make it say another policy.
fn audit(python: &Path, wheel: &Path, arch: Arch) -> Result<()> {
    let said = command::capture(Command::new(python).args(["-m", "auditwheel", "show"]).arg(wheel))?;
    print!("{said}");
    let kept = glibc_of_tag(&said, arch).context("auditwheel finds no manylinux tag for the wheel")?;
    ensure!(kept <= GLIBC, "the wheel needs glibc {kept:?}, and {GLIBC:?} is the limit");
    Ok(())
}

/// The version of glibc in the tag that auditwheel says a wheel is consistent with.
fn glibc_of_tag(said: &str, arch: Arch) -> Option<(u32, u32)> {
    let words = said.split_whitespace().collect::<Vec<_>>().join(" ");
    let (_, tag) = words.split_once("is consistent with the following platform tag: \"manylinux_")?;
    let (tag, _) = tag.split_once('"')?;
    let (major, minor) = tag.strip_suffix(arch.name())?.strip_suffix('_')?.split_once('_')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tag_is_read_over_the_breaks_of_lines() {
        let said =
            "x.whl is consistent with\nthe following platform tag: \"manylinux_2_28_x86_64\".\n\nThe wheel";
        assert_eq!(glibc_of_tag(said, Arch::X86_64), Some((2, 28)));
        assert_eq!(glibc_of_tag(said, Arch::Aarch64), None);
        let none = "x.whl is consistent with the following platform tag: \"linux_x86_64\".";
        assert_eq!(glibc_of_tag(none, Arch::X86_64), None);
    }
}
