//! Programs from Debian packages that are unpacked in `target/`: they need no root rights and do not change the system.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::command;
use crate::toolchain::Skip;

const FETCH_LIMIT: Duration = Duration::from_secs(300);

/// Downloads packages and unpacks them in `folder`, unless it exists. Returns its absolute path: it has the layout of the
/// system's root. `name` and `hint` are the program and the command that installs it.
///
/// If the download fails, the error is a [`Skip`].
pub(crate) fn fetch(name: &str, folder: &str, packages: &[&str], hint: &str) -> Result<PathBuf> {
    let folder = std::path::absolute(folder)?;
    if folder.is_dir() {
        return Ok(folder);
    }
    let unfinished = folder.with_extension("unfinished");
    if unfinished.is_dir() {
        fs::remove_dir_all(&unfinished)?;
    }
    let downloads = unfinished.join("packages");
    fs::create_dir_all(&downloads)?;
    let mut download = Command::new("apt-get");
    download.arg("download").args(packages).current_dir(&downloads);
    command::run_within(&mut download, FETCH_LIMIT)
        .map_err(|error| Skip::new(format!("cannot fetch {name}: {error:#}\nhint: {hint}")))?;
    for package in fs::read_dir(&downloads)? {
        command::run(Command::new("dpkg").arg("--extract").arg(package?.path()).arg(&unfinished))?;
    }
    fs::rename(&unfinished, &folder).with_context(|| format!("cannot rename to {}", folder.display()))?;
    Ok(folder)
}

/// Returns the folder of the libraries in unpacked packages.
pub(crate) fn libraries(root: &Path) -> PathBuf {
    root.join("usr/lib").join(triple())
}

/// Returns the Debian multiarch name of this machine, such as `x86_64-linux-gnu`.
pub(crate) fn triple() -> String {
    format!("{}-linux-gnu", std::env::consts::ARCH)
}
