//! Builds the shared library, the static library and the program of an installation, and checks them.
//!
//! cargo names the libraries after the crate, so they are copied to `target/native/` under the names of the package. The shared
//! library is stripped. The objects of the static library are linked to one object, in which only our functions are global: it can
//! then be linked into a program together with other static libraries written in Rust.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::install::exports;
use crate::{command, dist, wheel};

/// The system libraries that the static library needs.
pub(crate) const STATIC_LIBRARIES: [&str; 6] = ["gcc_s", "pthread", "m", "rt", "util", "dl"];

/// The maximum size of the stripped shared library in bytes.
const SIZE_LIMIT: u64 = 10 << 20;

const HEADER: &str = "include/wholemem.h";

/// The files of an installation that are built.
#[derive(Debug)]
pub(crate) struct Built {
    pub(crate) shared: PathBuf,
    pub(crate) archive: PathBuf,
    pub(crate) program: PathBuf,
    /// The version of wholemem.
    pub(crate) version: String,
    /// The first part of the version of the interface, which is the number of the soname.
    pub(crate) abi: u32,
}

/// Builds the libraries and the program in release mode.
pub(crate) fn build() -> Result<Built> {
    for tool in ["strip", "objcopy", "ar", "nm", "ld", "readelf"] {
        ensure!(
            command::succeeds(Command::new(tool).arg("--version")),
            "the program `{tool}` is missing\nhint: install the package binutils"
        );
    }
    // Separate builds: cargo would otherwise enable the features that the program needs in the library too.
    for package in ["wholemem-capi", "wholemem-cli"] {
        command::run(command::cargo().args(["build", "--release", "--locked", "--package", package]))?;
    }
    let target = command::target_folder()?;
    let folder = target.join("native");
    fs::create_dir_all(&folder)?;
    let release = target.join("release");
    let (shared, archive, program) =
        (folder.join("libwholemem.so"), folder.join("libwholemem.a"), folder.join("wholemem"));
    strip(&release.join("libwholemem_capi.so"), &shared)?;
    strip(&release.join("wholemem"), &program)?;
    make_archive(&release.join("libwholemem_capi.a"), &archive)?;
    let header = fs::read_to_string(HEADER).with_context(|| format!("cannot read {HEADER}"))?;
    let abi = abi_major(&header).with_context(|| format!("{HEADER} has no version of the interface"))?;
    let built = Built { shared, archive, program, version: wheel::version()?, abi };
    check(&built)?;
    Ok(built)
}

fn strip(from: &Path, to: &Path) -> Result<()> {
    command::run(Command::new("strip").arg("-o").arg(to).arg(from))
}

/// Links the functions of a static library, and what they use, to an archive with one object.
fn make_archive(from: &Path, to: &Path) -> Result<()> {
    let (object, options) = (to.with_file_name("wholemem.o"), to.with_file_name("functions"));
    let undefined: String = exports::listed()?.iter().map(|name| format!("--undefined={name}\n")).collect();
    fs::write(&options, undefined)?;
    let mut link = Command::new("ld");
    link.args(["--relocatable", "--gc-sections"]).arg(format!("@{}", options.display()));
    command::run(link.arg("-o").arg(&object).arg(from))?;
    let mut localize = Command::new("objcopy");
    localize.args(["--strip-debug", "--wildcard", "--keep-global-symbol=wm_*"]);
    // The standard library has sections with LLVM bitcode, at which `ar` fails if it has the plugin of another LLVM.
    localize.args(["--remove-section=.llvmbc", "--remove-section=.llvmcmd", "--remove-section=.comment"]);
    command::run(localize.arg(&object))?;
    if to.exists() {
        fs::remove_file(to)?;
    }
    command::run(Command::new("ar").arg("crsD").arg(to).arg(&object))
}

/// Checks the soname, the size, and the exported symbols.
fn check(built: &Built) -> Result<()> {
    let len = dist::within("the library", &built.shared, SIZE_LIMIT)?;
    println!("{}: {len} bytes, stripped", built.shared.display());
    println!("{}: {} bytes", built.archive.display(), fs::metadata(&built.archive)?.len());
    let readelf =
        |option| command::capture(Command::new("readelf").args(["--wide", option]).arg(&built.shared));
    ensure!(!readelf("--sections")?.contains(".symtab"), "{} is not stripped", built.shared.display());
    let expected = format!("libwholemem.so.{}", built.abi);
    let dynamic = readelf("--dynamic")?;
    let found = soname(&dynamic).with_context(|| format!("{} has no soname", built.shared.display()))?;
    ensure!(found == expected, "the soname of the library is {found}, not {expected}");
    exports::compare(&built.shared)?;
    exports::compare(&built.archive)
}

/// Returns the soname in the output of `readelf --dynamic`.
fn soname(dynamic: &str) -> Option<&str> {
    let line = dynamic.lines().find(|line| line.contains("(SONAME)"))?;
    line.split_once('[')?.1.split(']').next()
}

/// Returns the first part of the version of the interface, from the C header.
fn abi_major(header: &str) -> Option<u32> {
    header.lines().find_map(|line| line.strip_prefix("#define WM_ABI_MAJOR ")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soname_is_read() {
        let dynamic = " 0x0e (NEEDED)  Shared library: [libc.so.6]\n 0x0e (SONAME)  Library soname: [libwholemem.so.0]\n";
        assert_eq!(soname(dynamic), Some("libwholemem.so.0"));
        assert_eq!(soname(" 0x0e (NEEDED)  Shared library: [libc.so.6]\n"), None);
    }

    #[test]
    fn the_committed_header_has_a_version_of_the_interface() {
        let header = fs::read_to_string(Path::new("..").join(HEADER)).unwrap();
        assert!(abi_major(&header).is_some());
        assert_eq!(abi_major("#define WM_ABI_MAJOR 3\n"), Some(3));
        assert_eq!(abi_major("#define WM_ABI_MINOR 3\n"), None);
    }
}
