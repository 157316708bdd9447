//! Packs the published crates as tarballs with cargo, unpacks them, and builds them as one workspace.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::command;

/// A crate of the workspace that is published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PublishedCrate {
    pub(crate) name: String,
    pub(crate) version: String,
    /// The features of the crate, without `default`.
    pub(crate) features: Vec<String>,
    /// True if the crate has a library, false if it has programs only.
    pub(crate) is_library: bool,
}

/// The environment variable with the debug setting of the workspace's `dev` profile, so that compiled dependencies are reused.
const DEBUG_INFO: (&str, &str) = ("CARGO_PROFILE_DEV_DEBUG", "line-tables-only");

/// Returns the workspace crates without `publish = false`, in alphabetical order.
pub(crate) fn published() -> Result<Vec<PublishedCrate>> {
    let arguments = ["metadata", "--format-version=1", "--no-deps", "--locked"];
    let metadata = command::capture(command::cargo().args(arguments))?;
    let metadata: Value = serde_json::from_str(&metadata).context("cargo metadata did not write JSON")?;
    read_published(&metadata).context("the output of cargo metadata lacks expected fields")
}

fn read_published(metadata: &Value) -> Option<Vec<PublishedCrate>> {
    let mut published = Vec::new();
    for package in metadata["packages"].as_array()? {
        // cargo reports `publish = false` as an empty list of registries.
        if package["publish"].as_array().is_some_and(Vec::is_empty) {
            continue;
        }
        let features = package["features"].as_object()?.keys().filter(|name| *name != "default").cloned();
        let is_library = package["targets"].as_array()?.iter().any(|target| target["kind"][0] == "lib");
        published.push(PublishedCrate {
            name: package["name"].as_str()?.to_owned(),
            version: package["version"].as_str()?.to_owned(),
            features: features.collect(),
            is_library,
        });
    }
    published.sort_by(|one, other| one.name.cmp(&other.name));
    Some(published)
}

/// Packs the published crates as tarballs with cargo, and returns their paths in the order of the crates.
pub(crate) fn pack(published: &[PublishedCrate], target: &Path, arguments: &[&str]) -> Result<Vec<PathBuf>> {
    // All dependencies are downloaded first. The crates are then packed offline, so that cargo does not look up crates of the
    // workspace in a registry.
    command::run(command::cargo().args(["fetch", "--quiet", "--locked"]))?;
    let mut cargo = command::cargo();
    cargo
        .args(["package", "--quiet", "--locked", "--offline"])
        .args(arguments)
        .env(DEBUG_INFO.0, DEBUG_INFO.1);
    for krate in published {
        cargo.args(["--package", &krate.name]);
    }
    command::run(&mut cargo)?;
    let archive = |krate: &PublishedCrate| format!("{}-{}.crate", krate.name, krate.version);
    Ok(published.iter().map(|krate| target.join("package").join(archive(krate))).collect())
}

/// Unpacked crate tarballs that form one workspace.
#[derive(Debug)]
pub(crate) struct UnpackedCrates {
    pub(crate) root: PathBuf,
    /// The folders of the unpacked crates, in the order of the tarballs.
    pub(crate) folders: Vec<PathBuf>,
}

impl UnpackedCrates {
    /// Unpacks crate tarballs into subfolders of `root`. A tarball that is already unpacked there is not unpacked again.
    pub(crate) fn create(root: &Path, archives: &[PathBuf]) -> Result<Self> {
        fs::create_dir_all(root).with_context(|| format!("cannot create {}", root.display()))?;
        let folders = archives.iter().map(|archive| unpack(root, archive)).collect::<Result<_>>()?;
        Ok(Self { root: root.to_owned(), folders })
    }

    /// Writes the manifest of a workspace with the unpacked crates and `packages`, which are in the same root folder.
    /// Dependencies on `published` crates are resolved to the unpacked crates.
    pub(crate) fn write_workspace(&self, packages: &[&str], published: &[PublishedCrate]) -> Result<()> {
        let folder = |path: &PathBuf| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let folders: Vec<_> = self.folders.iter().map(folder).collect();
        let members = folders.iter().map(String::as_str).chain(packages.iter().copied());
        let mut manifest = "[workspace]\nresolver = \"3\"\nmembers = [\n".to_owned();
        for member in members {
            writeln!(manifest, "    \"{member}\",")?;
        }
        manifest.push_str("]\n\n[patch.crates-io]\n");
        for (krate, folder) in published.iter().zip(&folders).filter(|(krate, _)| krate.is_library) {
            writeln!(manifest, "{} = {{ path = \"{folder}\" }}", krate.name)?;
        }
        let (path, lock) = (self.root.join("Cargo.toml"), self.root.join("Cargo.lock"));
        fs::write(&path, manifest).with_context(|| format!("cannot write {}", path.display()))?;
        // Copies the lock file of the repository, so that the dependencies have the same versions as in the other checks.
        fs::copy("Cargo.lock", &lock).with_context(|| format!("cannot write {}", lock.display()))?;
        Ok(())
    }

    /// Builds every package of the workspace of unpacked crates.
    pub(crate) fn build(&self, target: &Path) -> Result<()> {
        command::run(self.cargo(target).args(["build", "--quiet", "--workspace", "--offline"]))
    }

    /// Returns a cargo command that runs in the workspace of unpacked crates, with the given target folder.
    pub(crate) fn cargo(&self, target: &Path) -> Command {
        let mut cargo = command::cargo();
        cargo.current_dir(&self.root).env("CARGO_TARGET_DIR", target).env(DEBUG_INFO.0, DEBUG_INFO.1);
        cargo
    }
}

/// Unpacks a crate tarball into the folder of its name, and returns the folder. Files get the current time (`-m`), because all
/// tarballs have the same file times and cargo would miss changes.
fn unpack(root: &Path, archive: &Path) -> Result<PathBuf> {
    let name = archive.file_stem().context("the path of a tarball has no file name")?.to_string_lossy();
    let (folder, archive_copy) = (root.join(&*name), root.join(format!("{name}.crate")));
    let bytes = fs::read(archive).with_context(|| format!("cannot read {}", archive.display()))?;
    if folder.is_dir() && fs::read(&archive_copy).is_ok_and(|before| before == bytes) {
        return Ok(folder);
    }
    if folder.is_dir() {
        fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    command::run(Command::new("tar").args(["-xzmf"]).arg(archive).arg("-C").arg(root))?;
    fs::write(&archive_copy, bytes).with_context(|| format!("cannot write {}", archive_copy.display()))?;
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn unpublished_crates_are_excluded() {
        let package = |name: &str, publish: Value, kind: &str| {
            let features = json!({"default": ["fault"], "fault": []});
            json!({"name": name, "version": "0.1.0", "publish": publish, "features": features,
                   "targets": [{"kind": [kind]}]})
        };
        let packages = [
            package("b", Value::Null, "lib"),
            package("tests", json!([]), "lib"),
            package("a", Value::Null, "bin"),
        ];
        let found = read_published(&json!({"packages": packages})).unwrap();
        let expected = |name: &str, is_library| PublishedCrate {
            name: name.to_owned(),
            version: "0.1.0".to_owned(),
            features: vec!["fault".to_owned()],
            is_library,
        };
        assert_eq!(found, [expected("a", false), expected("b", true)]);
    }
}
