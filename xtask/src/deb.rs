//! Builds and tests the Debian package of the program, which depends on glibc only: the program, its manual pages and
//! completions, and systemd units.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::dist::{self, Arch, GLIBC};
use crate::empty::Empty;
use crate::toolchain::Skip;
use crate::{command, manual_files, wheel};

/// The paths of the program and of its licences in the Debian package.
const PROGRAM: &str = "usr/bin/wholemem";
const DOC: &str = "usr/share/doc/wholemem";

/// The folder of the systemd units of users in the Debian package.
const UNITS: &str = "usr/lib/systemd/user";

/// Builds the Debian package and returns its path.
pub(crate) fn build(arch: Arch, out: &Path) -> Result<PathBuf> {
    if !command::succeeds(Command::new("dpkg-deb").arg("--version")) {
        return Err(Skip::new("no `dpkg-deb`\nhint: install the package dpkg").into());
    }
    let program = dist::program(arch)?;
    let version = wheel::version()?;
    let root = Path::new("target/deb-root").join(arch.name());
    if root.is_dir() {
        fs::remove_dir_all(&root)?;
    }
    let size = place(&program, &root.join(PROGRAM), 0o755)?;
    place(Path::new("LICENSE-APACHE"), &root.join(DOC).join("LICENSE-APACHE"), 0o644)?;
    place(Path::new("LICENSE-MIT"), &root.join(DOC).join("LICENSE-MIT"), 0o644)?;
    place(Path::new("packaging/copyright"), &root.join(DOC).join("copyright"), 0o644)?;
    for unit in ["wholemem.service", "wholemem.socket"] {
        place(&Path::new("packaging/systemd").join(unit), &root.join(UNITS).join(unit), 0o644)?;
    }
    manual_files::write(&root.join("usr/share"), "vendor-completions")?;
    fs::create_dir_all(root.join("DEBIAN"))?;
    fs::write(root.join("DEBIAN/control"), control(&version, arch, size.div_ceil(1024)))?;
    fs::create_dir_all(out)?;
    let package = out.join(format!("wholemem_{version}_{}.deb", arch.debian()));
    let options = ["--root-owner-group", "-Zxz", "--build"];
    command::run(Command::new("dpkg-deb").args(options).arg(&root).arg(&package))?;
    println!("{}: {} bytes", package.display(), fs::metadata(&package)?.len());
    Ok(package)
}

/// Copies a file, creates its parent folders, sets its mode, and returns its length.
fn place(file: &Path, to: &Path, mode: u32) -> Result<u64> {
    fs::create_dir_all(to.parent().context("the destination has no parent folder")?)?;
    let len = fs::copy(file, to).with_context(|| format!("cannot copy {}", file.display()))?;
    fs::set_permissions(to, fs::Permissions::from_mode(mode))?;
    Ok(len)
}

fn control(version: &str, arch: Arch, kib: u64) -> String {
    let (major, minor) = GLIBC;
    format!(
        "Package: wholemem\n\
         Version: {version}\n\
         Architecture: {}\n\
         Maintainer: The wholemem authors\n\
         Installed-Size: {kib}\n\
         Depends: libc6 (>= {major}.{minor})\n\
         Section: utils\n\
         Priority: optional\n\
         Description: one memory over many GPUs, processes and threads\n \
         The program wholemem: a store of named objects in shared memory of hosts and\n \
         GPUs, a launcher of ranks, and checks and benchmarks of what a machine can do.\n",
        arch.debian()
    )
}

/// Extracts a Debian package for the architecture of this machine, and runs the program in it.
pub(crate) fn check(package: &Path) -> Result<()> {
    let info = command::capture(Command::new("dpkg-deb").arg("--info").arg(package))?;
    let contents = command::capture(Command::new("dpkg-deb").arg("--contents").arg(package))?;
    print!("{info}{contents}");
    for name in ["LICENSE-APACHE", "LICENSE-MIT", "copyright"] {
        ensure!(contents.contains(&format!("./{DOC}/{name}\n")), "the package does not contain {name}");
    }
    let share = [
        "man/man1/wholemem-ls.1",
        "bash-completion/completions/wholemem",
        "zsh/vendor-completions/_wholemem",
    ];
    for name in
        share.map(|name| format!("usr/share/{name}")).into_iter().chain([format!("{UNITS}/wholemem.socket")])
    {
        ensure!(contents.contains(&format!("./{name}\n")), "the package does not contain {name}");
    }
    ensure!(
        contents.lines().all(|line| line.contains(" root/root ")),
        "the package has files that root does not own"
    );
    let empty = Empty::create()?;
    command::run(Command::new("dpkg-deb").arg("--extract").arg(package).arg(&empty.folder))?;
    let program = empty.folder.join(PROGRAM);
    let version = command::capture(empty.command(&program)?.arg("--version"))?;
    ensure!(
        version == format!("wholemem {}\n", wheel::version()?),
        "the program printed the version {version}"
    );
    command::run(empty.command(&program)?.args(["launch", "-n", "2", "--", PROGRAM, "doctor"]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_control_file_has_one_field_on_each_line() {
        let text = control("0.1.0", Arch::Aarch64, 8904);
        let names: Vec<_> = text
            .lines()
            .filter(|line| !line.starts_with(' '))
            .filter_map(|line| line.split_once(": "))
            .collect();
        assert_eq!(names.len(), 9);
        assert!(
            names.contains(&("Architecture", "arm64")) && names.contains(&("Depends", "libc6 (>= 2.28)"))
        );
        assert!(text.ends_with(".\n"));
    }
}
