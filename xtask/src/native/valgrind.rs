//! Finds valgrind, installed or as a Debian package that is unpacked in `target/`.
//!
//! Older versions do not support `pidfd_open`, without which ranks cannot join a group. Debian 12 has such a version, so the package of
//! Debian 13 is unpacked: its tools are linked statically, and run on any Linux. The lists of packages are private, so the system does
//! not change.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::command;
use crate::toolchain::Skip;

/// The oldest version that is used.
const OLDEST: (u32, u32) = (3, 24);

const FOLDER: &str = "target/tools/valgrind";

/// The Debian release that has the package.
const RELEASE: &str = "trixie";

/// The keys of Debian's archive.
const KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

const FETCH_LIMIT: Duration = Duration::from_secs(300);

/// The number of bytes of addresses for windows under valgrind, which cannot reserve as many as wholemem does by default.
const WINDOW_SPACE: u64 = 32 << 30;

/// A valgrind that can be used.
#[derive(Debug)]
pub(crate) enum Valgrind {
    Installed,
    /// Unpacked in a folder with the layout of the system's root.
    Unpacked(PathBuf),
}

impl Valgrind {
    /// Finds valgrind; downloads and unpacks it if it is not installed. If that fails, the error is a [`Skip`].
    pub(crate) fn find_or_fetch() -> Result<Self> {
        let installed = command::capture(Command::new("valgrind").arg("--version"));
        if installed.is_ok_and(|version| version_of(&version).is_some_and(|version| version >= OLDEST)) {
            return Ok(Self::Installed);
        }
        let folder = std::path::absolute(FOLDER)?;
        if folder.is_dir() {
            return Ok(Self::Unpacked(folder));
        }
        fetch(&folder).map_err(|error| {
            let (major, minor) = OLDEST;
            Skip::new(format!(
                "valgrind {major}.{minor} cannot be fetched, and the tests were not run under it: {error:#}\n\
                 hint: install valgrind {major}.{minor} or newer"
            ))
        })?;
        Ok(Self::Unpacked(folder))
    }

    /// Returns the words that precede the command of a program. Leaks that are certain are errors; memory that the library holds until
    /// the process exits is not.
    pub(crate) fn command(&self) -> Vec<OsString> {
        let program = match self {
            Self::Installed => "valgrind".into(),
            Self::Unpacked(root) => root.join("usr/bin/valgrind").into_os_string(),
        };
        let options = [
            "--quiet",
            "--error-exitcode=9",
            "--leak-check=full",
            "--show-leak-kinds=definite",
            "--errors-for-leak-kinds=definite",
        ];
        [program].into_iter().chain(options.map(OsString::from)).collect()
    }

    pub(crate) fn environment(&self) -> Vec<(&'static str, OsString)> {
        let mut variables = vec![("WHOLEMEM_WINDOW_SPACE", WINDOW_SPACE.to_string().into())];
        if let Self::Unpacked(root) = self {
            variables.push(("VALGRIND_LIB", root.join("usr/libexec/valgrind").into_os_string()));
        }
        variables
    }
}

/// Downloads the package with private lists of packages, and unpacks it.
fn fetch(folder: &Path) -> Result<()> {
    let unfinished = folder.with_extension("unfinished");
    if unfinished.is_dir() {
        fs::remove_dir_all(&unfinished)?;
    }
    let apt = unfinished.join("apt");
    for part in ["lists/partial", "cache/archives/partial", "state"] {
        fs::create_dir_all(apt.join(part))?;
    }
    let archive = debian_archive(&apt)?;
    fs::write(apt.join("sources.list"), format!("deb [signed-by={KEYS}] {archive} {RELEASE} main\n"))?;
    fs::write(apt.join("state/status"), "")?;
    let get = |arguments: &[&str]| {
        let mut get = Command::new("apt-get");
        for (option, value) in [
            ("Dir::Etc::SourceList", apt.join("sources.list")),
            ("Dir::Etc::SourceParts", PathBuf::from("/dev/null")),
            ("Dir::State::Lists", apt.join("lists")),
            ("Dir::Cache", apt.join("cache")),
            ("Dir::State::status", apt.join("state/status")),
            // Another user could not write to these folders.
            ("APT::Sandbox::User", PathBuf::from("root")),
        ] {
            get.arg("-o").arg(format!("{option}={}", value.display()));
        }
        get.arg("--quiet").args(arguments).current_dir(&apt);
        command::run_within(&mut get, FETCH_LIMIT)
    };
    get(&["update"])?;
    get(&["download", "valgrind"])?;
    let packages: Vec<_> = fs::read_dir(&apt)?.collect::<std::io::Result<_>>()?;
    let package =
        packages.iter().map(fs::DirEntry::path).find(|path| path.extension().is_some_and(|end| end == "deb"));
    let Some(package) = package else { bail!("apt-get downloaded no package") };
    command::run(Command::new("dpkg").arg("--extract").arg(package).arg(&unfinished))?;
    fs::remove_dir_all(&apt)?;
    fs::rename(&unfinished, folder).with_context(|| format!("cannot rename to {}", folder.display()))
}

/// Returns the address of the Debian archive from which this system installs packages, also if its lists of packages are empty.
fn debian_archive(apt: &Path) -> Result<String> {
    let lists = format!("Dir::State::Lists={}", apt.join("lists").display());
    let files = command::capture(Command::new("apt-get").args(["update", "--print-uris", "-o", &lists]))?;
    archive_of(&files).context("apt has no archive of Debian among its sources")
}

/// Returns the address of Debian's archive in the output of `apt-get update --print-uris`.
fn archive_of(files: &str) -> Option<String> {
    let mut archives = files.lines().filter_map(|line| line.trim_start_matches('\'').split_once("/dists/"));
    archives.find(|(archive, _)| archive.ends_with("/debian")).map(|(archive, _)| archive.to_owned())
}

/// Returns the version in the output of `valgrind --version`, such as `valgrind-3.24.0`.
fn version_of(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.trim().strip_prefix("valgrind-")?.split('.').map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_archive_of_debian_is_found_among_other_sources() {
        let files = "'http://mirror.example/debian-security/dists/bookworm-security/InRelease' a_InRelease 0\n\
                     'http://mirror.example/debian/dists/bookworm/InRelease' b_InRelease 0\n";
        assert_eq!(archive_of(files).as_deref(), Some("http://mirror.example/debian"));
        assert_eq!(archive_of("'http://mirror.example/ubuntu/dists/noble/InRelease' a_InRelease 0\n"), None);
    }

    #[test]
    fn versions_are_compared_as_numbers() {
        assert_eq!(version_of("valgrind-3.24.0\n"), Some((3, 24)));
        assert!(
            version_of("valgrind-3.19.0") < Some(OLDEST) && version_of("valgrind-3.100.0") > Some(OLDEST)
        );
        assert_eq!(version_of("3.24"), None);
    }
}
