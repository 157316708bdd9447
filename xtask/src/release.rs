//! `cargo xtask release VERSION`: sets the version, dates the changelog, builds all artefacts, commits and tags. Nothing is
//! uploaded.
//!
//! ```text
//!   check          fails for a dirty tree, an older version, or an existing tag
//!   edit           Cargo.toml, Cargo.lock, CHANGELOG.md, include/wholemem.h
//!   semver         each library against its previous tarball, by cargo-semver-checks
//!   commit         first, so that the tarballs contain the hash of the release commit
//!   artefacts      target/release-VERSION/: a folder for each entry of BUILDERS, and SHA256SUMS
//!   tag            last, so that an incomplete release has no tag
//! ```

mod changelog;
mod semver;
mod version;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;

use crate::dist::Arch;
use crate::package::tarballs;
use crate::{abi, c_header, command, deb, wheel};
use version::Version;

const MANIFEST: &str = "Cargo.toml";
const LOCK: &str = "Cargo.lock";
const CHANGELOG: &str = "CHANGELOG.md";
const SUMS: &str = "SHA256SUMS";

#[derive(clap::Args, Debug)]
pub(crate) struct ReleaseArguments {
    /// The version to release, such as 0.2.0.
    version: Version,
    /// Do not change the working tree: print the changes, and build those artefacts of the current version that build quickly.
    #[arg(long)]
    dry_run: bool,
    /// The folder with the crate tarballs of the last release, for the comparison of public interfaces; relative to the root of
    /// the repository.
    #[arg(long, value_name = "DIR")]
    previous: Option<PathBuf>,
}

/// Builds one kind of release artefact, such as wheels.
struct ArtefactBuilder {
    /// The name of the artefacts in messages, and of their folder.
    name: &'static str,
    /// Builds the artefacts into a folder.
    build: fn(&Path) -> Result<()>,
    /// Builds the artefacts quickly for a dry run, or `None` if that is not possible.
    dry_run: Option<fn(&Path) -> Result<()>>,
    /// The command with which a person publishes the artefacts. `{}` is replaced with their folder.
    publish: &'static str,
}

/// The builders of all kinds of release artefacts.
const BUILDERS: &[ArtefactBuilder] = &[
    ArtefactBuilder {
        name: "crates",
        build: verified_crates,
        dry_run: Some(unverified_crates),
        publish: "cargo publish --workspace --locked",
    },
    ArtefactBuilder {
        name: "wheels",
        build: wheels,
        dry_run: None,
        publish: "python3 -m twine upload {}/*.whl",
    },
    ArtefactBuilder {
        name: "debian",
        build: debian,
        dry_run: None,
        publish: "attach {}/*.deb to the release",
    },
];

/// Builds the crate tarballs, each of which cargo also compiles.
fn verified_crates(folder: &Path) -> Result<()> {
    crates(folder, &[])
}

fn unverified_crates(folder: &Path) -> Result<()> {
    crates(folder, &["--allow-dirty", "--no-verify"])
}

fn crates(folder: &Path, arguments: &[&str]) -> Result<()> {
    for archive in tarballs::pack(&tarballs::published()?, &command::target_folder()?, arguments)? {
        let name = archive.file_name().context("the path of a tarball has no file name")?;
        fs::copy(&archive, folder.join(name))
            .with_context(|| format!("cannot copy {}", archive.display()))?;
    }
    Ok(())
}

fn wheels(folder: &Path) -> Result<()> {
    Arch::value_variants().iter().try_for_each(|&arch| wheel::build(arch, folder).map(drop))
}

fn debian(folder: &Path) -> Result<()> {
    Arch::value_variants().iter().try_for_each(|&arch| deb::build(arch, folder).map(drop))
}

pub(crate) fn release(arguments: &ReleaseArguments) -> Result<()> {
    let (version, tag) = (arguments.version, format!("v{}", arguments.version));
    let manifest = read(MANIFEST)?;
    let before = version::current(&manifest)?;
    let reasons = release_blockers(version, before, &status()?, tag_exists)?;
    if arguments.dry_run {
        reasons.iter().for_each(|reason| println!("the release would fail: {reason}"));
    } else {
        ensure!(reasons.is_empty(), "{}", reasons.join("\n"));
    }
    let edits = [
        (MANIFEST, version::set(&manifest, version)?),
        (CHANGELOG, changelog::add_release(&read(CHANGELOG)?, version, &today()?)?),
    ];
    let target = command::target_folder()?;
    if arguments.dry_run {
        print_diffs(&edits, &target.join("release-plan"))?;
        semver(arguments)?;
        return dry_run_build(&target.join(format!("release-{version}-dry-run")), before);
    }
    let folder = target.join(format!("release-{version}"));
    for (path, text) in &edits {
        fs::write(path, text).with_context(|| format!("cannot write {path}"))?;
    }
    let undo = "nothing was committed\nhint: `git restore Cargo.toml Cargo.lock CHANGELOG.md include` undoes the edits";
    // Updates the versions of the workspace crates in `Cargo.lock`, and no others.
    command::run(command::cargo().args(["update", "--workspace", "--offline", "--quiet"])).context(undo)?;
    // The header has the version as macros.
    abi::generate(false).context(undo)?;
    semver(arguments).context(undo)?;
    let message = format!("release: Version {version}");
    git(&["commit", "--quiet", "--message", &message, "--", MANIFEST, LOCK, CHANGELOG, c_header::HEADER])
        .context(undo)?;
    build(&folder)
        .context("the release commit has no tag\nhint: `git reset --keep HEAD~1` undoes the commit")?;
    git(&["tag", "--annotate", &tag, "--message", &format!("wholemem {version}")])?;
    println!("\nThe artefacts are in {}. The commit and the tag {tag} are local.\nNext:", folder.display());
    println!("  git push origin HEAD {tag}");
    for builder in BUILDERS {
        println!("  {}", builder.publish.replace("{}", &folder.join(builder.name).display().to_string()));
    }
    println!("  keep {}: the next release is compared with it (--previous)", folder.join("crates").display());
    Ok(())
}

/// Returns the reasons that prevent a release.
fn release_blockers(
    version: Version,
    before: Version,
    status: &str,
    exists: impl Fn(&str) -> Result<bool>,
) -> Result<Vec<String>> {
    let mut reasons = Vec::new();
    if !status.is_empty() {
        reasons.push(format!("the working tree is not clean:\n{}", status.trim_end()));
    }
    if exists(&format!("v{version}"))? {
        reasons.push(format!("the tag v{version} exists"));
    }
    // The version of the workspace is that of the last release, except before the first release.
    if version < before {
        reasons.push(format!("{version} is older than {before}, the version of the workspace"));
    }
    Ok(reasons)
}

/// Compares the public interfaces of the libraries with those of the last release.
fn semver(arguments: &ReleaseArguments) -> Result<()> {
    match &arguments.previous {
        Some(folder) => semver::check(folder, arguments.version),
        None => {
            println!(
                "semver: not checked, because --previous is not given (the first release has no previous tarballs)"
            );
            Ok(())
        }
    }
}

/// Prints the planned changes to files as unified diffs.
fn print_diffs(edits: &[(&str, String)], folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    for (path, text) in edits {
        let planned = folder.join(path);
        fs::write(&planned, text).with_context(|| format!("cannot write {}", planned.display()))?;
        let (before, after) = (format!("--label=a/{path}"), format!("--label=b/{path}"));
        let status = Command::new("diff").args(["-u", &before, &after, path]).arg(&planned).status()?;
        // `diff` exits with status 1 if the files differ.
        ensure!(matches!(status.code(), Some(0 | 1)), "`diff` of the planned changes failed: {status}");
    }
    fs::remove_dir_all(folder).with_context(|| format!("cannot remove {}", folder.display()))
}

/// Builds those artefacts of the current version that build quickly.
fn dry_run_build(folder: &Path, before: Version) -> Result<()> {
    recreate(folder)?;
    for builder in BUILDERS {
        match builder.dry_run {
            Some(dry_run) => build_into(folder, builder.name, dry_run)?,
            None => println!("{}: not built in a dry run", builder.name),
        }
    }
    write_sums(folder)?;
    println!("\nThe artefacts of {before} are in {}. The working tree is unchanged.", folder.display());
    Ok(())
}

/// Builds all release artefacts into a folder.
fn build(folder: &Path) -> Result<()> {
    recreate(folder)?;
    for builder in BUILDERS {
        build_into(folder, builder.name, builder.build)?;
    }
    write_sums(folder)
}

fn build_into(folder: &Path, name: &str, build: fn(&Path) -> Result<()>) -> Result<()> {
    let folder = folder.join(name);
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    build(&folder).with_context(|| format!("cannot build the {name}"))?;
    ensure!(fs::read_dir(&folder)?.next().is_some(), "the builder of the {name} wrote no files");
    Ok(())
}

fn recreate(folder: &Path) -> Result<()> {
    if folder.is_dir() {
        fs::remove_dir_all(folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))
}

/// Writes the SHA-256 digests of all release artefacts in the format of `sha256sum --check`.
fn write_sums(folder: &Path) -> Result<()> {
    let mut files = Vec::new();
    for builder in BUILDERS {
        for entry in fs::read_dir(folder.join(builder.name)).into_iter().flatten() {
            files.push(Path::new(builder.name).join(entry?.file_name()));
        }
    }
    files.sort();
    let sums = command::capture(Command::new("sha256sum").arg("--").args(&files).current_dir(folder))?;
    print!("{sums}");
    fs::write(folder.join(SUMS), sums).with_context(|| format!("cannot write {SUMS}"))
}

fn read(path: &str) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {path}"))
}

fn status() -> Result<String> {
    command::capture(Command::new("git").args(["status", "--porcelain"]))
}

fn tag_exists(tag: &str) -> Result<bool> {
    let list = ["tag", "--list", tag];
    Ok(!command::capture(Command::new("git").args(list))?.trim().is_empty())
}

fn git(arguments: &[&str]) -> Result<()> {
    command::run(Command::new("git").args(arguments))
}

/// Returns the current UTC date, such as 2026-01-31.
fn today() -> Result<String> {
    let date = command::capture(Command::new("date").args(["--utc", "+%F"]))?;
    match date.trim() {
        "" => bail!("the program `date` printed nothing"),
        date => Ok(date.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reasons(version: &str, before: &str, status: &str, tags: &[&str]) -> Vec<String> {
        let exists = |tag: &str| Ok(tags.contains(&tag));
        release_blockers(version.parse().unwrap(), before.parse().unwrap(), status, exists).unwrap()
    }

    #[test]
    fn the_first_release_may_have_the_current_version() {
        assert_eq!(reasons("0.1.0", "0.1.0", "", &[]), [] as [String; 0]);
        assert_eq!(reasons("0.1.0", "0.1.0", "", &["v0.1.0"]), ["the tag v0.1.0 exists"]);
    }

    #[test]
    fn a_dirty_tree_and_an_older_version_are_rejected() {
        assert_eq!(
            reasons("0.2.0", "0.1.0", " M a\n", &["v0.1.0"]),
            ["the working tree is not clean:\n M a"]
        );
        let older = "0.9.0 is older than 0.10.0, the version of the workspace";
        assert_eq!(reasons("0.9.0", "0.10.0", "", &[]), [older]);
    }

    #[test]
    fn the_manifest_and_the_changelog_of_this_repository_can_be_edited() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let manifest = fs::read_to_string(root.join(MANIFEST)).unwrap();
        let version: Version = "99.0.1".parse().unwrap();
        let set = version::set(&manifest, version).unwrap();
        assert_eq!(version::current(&set).unwrap(), version);
        let text = fs::read_to_string(root.join(CHANGELOG)).unwrap();
        assert!(text.contains("## [Unreleased]"));
        // The section `Unreleased` is empty right after a release, so `add_release` may fail.
        match changelog::add_release(&text, version, "2026-01-31") {
            Ok(cut) => assert!(cut.contains("## [99.0.1] - 2026-01-31")),
            Err(error) => {
                assert_eq!(error.to_string(), "the section `## [Unreleased]` of the changelog is empty")
            }
        }
    }
}
