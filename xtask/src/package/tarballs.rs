//! The tarballs of the published crates: made by cargo, unpacked, and built as one workspace.

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
    /// Its features, without `default`.
    pub(crate) features: Vec<String>,
    /// Whether it has a library, or programs only.
    pub(crate) is_library: bool,
}

/// The profile of the workspace's `dev` builds, so that what others have compiled is used again.
const DEBUG_INFO: (&str, &str) = ("CARGO_PROFILE_DEV_DEBUG", "line-tables-only");

/// The crates of the workspace that do not have `publish = false`, in alphabetical order.
pub(crate) fn published() -> Result<Vec<PublishedCrate>> {
    let arguments = ["metadata", "--format-version=1", "--no-deps", "--locked"];
    let metadata = command::capture(command::cargo().args(arguments))?;
    let metadata: Value = serde_json::from_str(&metadata).context("cargo metadata did not write JSON")?;
    read_published(&metadata).context("the output of cargo metadata lacks expected fields")
}

fn read_published(metadata: &Value) -> Option<Vec<PublishedCrate>> {
    let mut published = Vec::new();
    for package in metadata["packages"].as_array()? {
        // `publish = false` is an empty list of registries.
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

/// Has cargo make the tarballs, and returns their paths in the order of the crates.
pub(crate) fn pack(published: &[PublishedCrate], target: &Path, arguments: &[&str]) -> Result<Vec<PathBuf>> {
    // Behind this nothing is asked of a registry: a crate that is not on this machine is one of ours, or missing.
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

/// Tarballs as folders of one workspace.
#[derive(Debug)]
pub(crate) struct UnpackedCrates {
    pub(crate) root: PathBuf,
    /// The folders, in the order of the tarballs.
    pub(crate) folders: Vec<PathBuf>,
}

impl UnpackedCrates {
    /// Unpacks tarballs below `root`. One that was unpacked there before is left as it is.
    pub(crate) fn create(root: &Path, archives: &[PathBuf]) -> Result<Self> {
        fs::create_dir_all(root).with_context(|| format!("cannot create {}", root.display()))?;
        let folders = archives.iter().map(|archive| unpack(root, archive)).collect::<Result<_>>()?;
        Ok(Self { root: root.to_owned(), folders })
    }

    /// Makes the folders and `packages`, which lie beside them, a workspace in which `published` are what was unpacked.
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
        // The versions that the other checks run with.
        fs::copy("Cargo.lock", &lock).with_context(|| format!("cannot write {}", lock.display()))?;
        Ok(())
    }

    /// Builds every package of the workspace.
    pub(crate) fn build(&self, target: &Path) -> Result<()> {
        command::run(self.cargo(target).args(["build", "--quiet", "--workspace", "--offline"]))
    }

    /// Cargo in the workspace, with the folder of build outputs of ours.
    pub(crate) fn cargo(&self, target: &Path) -> Command {
        let mut cargo = command::cargo();
        cargo.current_dir(&self.root).env("CARGO_TARGET_DIR", target).env(DEBUG_INFO.0, DEBUG_INFO.1);
        cargo
    }
}

/// Unpacks a tarball into the folder of its name, and returns it. Files get the present time: those of a tarball have all
/// the same, by which cargo could not see that one has changed.
fn unpack(root: &Path, archive: &Path) -> Result<PathBuf> {
    let name = archive.file_stem().context("a tarball has a name")?.to_string_lossy();
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
