//! Compares public interfaces with those of the last release, using cargo-semver-checks.
//!
//! No crate has to be on a registry: both releases are unpacked from tarballs, each as one workspace in which the crates depend
//! on each other, and cargo-semver-checks reads their rustdoc JSON. xtask does not install the tool, because no registry has it
//! prebuilt and compiling it takes minutes.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use super::version::Version;
use crate::command;
use crate::package::tarballs::{self, PublishedCrate, UnpackedCrates};

const INSTALL: &str = "cargo install cargo-semver-checks@0.51.0 --locked";

/// The cargo-semver-checks name of the release type that allows breaking changes.
const MAJOR: &str = "major";

/// Returns an error if a library has interface changes that the step from its previous version to `version` does not allow.
pub(crate) fn check(previous: &Path, version: Version) -> Result<()> {
    ensure!(
        command::succeeds(command::cargo().args(["semver-checks", "--version"])),
        "cannot compare with {}: cargo-semver-checks is not installed\nhint: {INSTALL}",
        previous.display()
    );
    let before = archives(previous)?;
    let target = command::target_folder()?;
    let published = tarballs::published()?;
    let packed = tarballs::pack(&published, &target, &["--allow-dirty", "--no-verify"])?;
    let names = published.into_iter().map(|krate| (krate.name, krate.version));
    let after = names.zip(packed).map(|((name, version), path)| (name, version, path)).collect();
    let folder = target.join("semver");
    let old = ReleaseCrates::create(&folder.join("previous"), before)?;
    let new = ReleaseCrates::create(&folder.join("current"), after)?;
    let mut broken = Vec::new();
    for krate in new.crates.iter().filter(|krate| krate.is_library) {
        let Some(previous_crate) = old.crates.iter().find(|previous_crate| previous_crate.name == krate.name)
        else {
            println!("{}: not in {}, so not compared", krate.name, previous.display());
            continue;
        };
        let release_type =
            release_type(previous_crate.version.parse().map_err(anyhow::Error::msg)?, version)?;
        if release_type == MAJOR {
            println!(
                "{}: {version} may have changes that break users of {}",
                krate.name, previous_crate.version
            );
            continue;
        }
        let (old, new) = (old.rustdoc(&previous_crate.name)?, new.rustdoc(&krate.name)?);
        let mut tool = command::cargo();
        tool.args(["semver-checks", "--release-type", release_type]);
        tool.arg("--baseline-rustdoc").arg(old).arg("--current-rustdoc").arg(new);
        if command::run(&mut tool).is_err() {
            broken.push(krate.name.as_str());
        }
    }
    ensure!(
        broken.is_empty(),
        "version {version} has breaking changes that semver does not allow, in these crates: {crates}",
        crates = broken.join(", ")
    );
    Ok(())
}

/// The unpacked crate tarballs of one release.
struct ReleaseCrates {
    unpacked: UnpackedCrates,
    crates: Vec<PublishedCrate>,
}

impl ReleaseCrates {
    fn create(root: &Path, archives: Vec<(String, String, PathBuf)>) -> Result<Self> {
        let paths: Vec<_> = archives.iter().map(|(_, _, path)| path.clone()).collect();
        let unpacked = UnpackedCrates::create(root, &paths)?;
        let describe = |((name, version, _), folder): ((String, String, PathBuf), &PathBuf)| {
            let is_library = folder.join("src/lib.rs").is_file();
            PublishedCrate { name, version, features: Vec::new(), is_library }
        };
        let crates: Vec<_> = archives.into_iter().zip(&unpacked.folders).map(describe).collect();
        unpacked.write_workspace(&[], &crates)?;
        Ok(Self { unpacked, crates })
    }

    /// Writes the public interface of a library as rustdoc JSON, and returns the path of the file. `RUSTC_BOOTSTRAP` allows
    /// this unstable output on stable Rust.
    fn rustdoc(&self, name: &str) -> Result<PathBuf> {
        let target = self.unpacked.root.join("target");
        let mut cargo = self.unpacked.cargo(&target);
        cargo.args(["rustdoc", "--quiet", "--lib", "--package", name, "--"]);
        cargo.args([
            "-Zunstable-options",
            "--output-format=json",
            "--document-hidden-items",
            "--cap-lints=allow",
        ]);
        command::run(cargo.env("RUSTC_BOOTSTRAP", "1"))?;
        Ok(target.join("doc").join(format!("{}.json", name.replace('-', "_"))))
    }
}

/// Returns the crate names, versions and paths of the tarballs in a folder.
fn archives(folder: &Path) -> Result<Vec<(String, String, PathBuf)>> {
    let mut found = Vec::new();
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if let Some((name, version)) = name_and_version(&name) {
            found.push((name, version.to_string(), path));
        }
    }
    ensure!(
        !found.is_empty(),
        "the folder {path} of the previous release contains no crate tarball (`.crate` file)",
        path = folder.display()
    );
    found.sort();
    for pair in found.windows(2) {
        ensure!(
            pair[0].0 != pair[1].0,
            "the folder {path} contains tarballs of two versions of the crate {name}",
            name = pair[0].0,
            path = folder.display()
        );
    }
    Ok(found)
}

/// Splits the file name of a crate tarball into crate name and version.
fn name_and_version(file: &str) -> Option<(String, Version)> {
    let (name, version) = file.strip_suffix(".crate")?.rsplit_once('-')?;
    Some((name.to_owned(), version.parse().ok()?))
}

/// Returns the release type between two versions, as cargo-semver-checks names it. Below 1.0 a minor version may break, as in
/// cargo.
fn release_type(before: Version, after: Version) -> Result<&'static str> {
    let index = match after.first_difference(before) {
        Some(0) => 0,
        Some(part) if after.is_unstable() => part - 1,
        Some(part) => part,
        None => bail!("the tarballs of the previous release have the version of the workspace, {after}"),
    };
    Ok([MAJOR, "minor", "patch"][index])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tarball_names_are_split_into_crate_and_version() {
        let version = "0.1.0".parse().unwrap();
        assert_eq!(name_and_version("wholemem-os-0.1.0.crate"), Some(("wholemem-os".to_owned(), version)));
        for file in ["SHA256SUMS", "wholemem.crate", "wholemem-0.1.crate", "wholemem-0.1.0.tar.gz"] {
            assert_eq!(name_and_version(file), None, "{file}");
        }
    }

    #[test]
    fn the_release_type_below_one_is_shifted_by_one_part() {
        let step = |before: &str, after: &str| release_type(before.parse().unwrap(), after.parse().unwrap());
        let expected = [
            ("1.2.3", "2.0.0", "major"),
            ("1.2.3", "1.3.0", "minor"),
            ("1.2.3", "1.2.4", "patch"),
            ("0.2.3", "1.0.0", "major"),
            ("0.2.3", "0.3.0", "major"),
            ("0.2.3", "0.2.4", "minor"),
        ];
        for (before, after, name) in expected {
            assert_eq!(step(before, after).unwrap(), name, "{before} to {after}");
        }
        let error = step("0.1.0", "0.1.0").unwrap_err();
        assert_eq!(
            error.to_string(),
            "the tarballs of the previous release have the version of the workspace, 0.1.0"
        );
    }
}
