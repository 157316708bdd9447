//! `cargo xtask release VERSION`: version, changelog, artefacts, commit and tag by one command. Nothing leaves the machine.
//!
//! ```text
//!   refuse         a dirty tree, a version that is not newer, a tag that exists
//!   edit           Cargo.toml, Cargo.lock, CHANGELOG.md
//!   semver         each library against its previous tarball, by cargo-semver-checks
//!   commit         so that the tarballs name the commit they are of
//!   artefacts      target/release-VERSION/: each builder of BUILDERS in its folder, and SHA256SUMS
//!   tag            last: a release that is not complete has no tag
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
use crate::{command, deb, wheel};
use version::Version;

const MANIFEST: &str = "Cargo.toml";
const LOCK: &str = "Cargo.lock";
const CHANGELOG: &str = "CHANGELOG.md";
const SUMS: &str = "SHA256SUMS";

#[derive(clap::Args, Debug)]
pub(crate) struct ReleaseArguments {
    /// The version, such as 0.2.0.
    version: Version,
    /// Change nothing in the tree: print what would change, and build what is quick to build, of the present version.
    #[arg(long)]
    dry_run: bool,
    /// The tarballs of the last release, to compare public interfaces with; from the root of the repository.
    #[arg(long, value_name = "DIR")]
    previous: Option<PathBuf>,
}

/// What makes a kind of artefact.
struct ArtefactBuilder {
    /// The folder that it gets.
    name: &'static str,
    /// Builds into that folder.
    build: fn(&Path) -> Result<()>,
    /// Builds what is quick to build, for a dry run.
    dry_run: Option<fn(&Path) -> Result<()>>,
    /// The command that publishes them, for a person to run. `{}` is the folder.
    publish: &'static str,
}

/// All kinds of artefacts. Another kind is another line.
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

/// The tarballs, each of which cargo has built alone.
fn verified_crates(folder: &Path) -> Result<()> {
    crates(folder, &[])
}

fn unverified_crates(folder: &Path) -> Result<()> {
    crates(folder, &["--allow-dirty", "--no-verify"])
}

fn crates(folder: &Path, arguments: &[&str]) -> Result<()> {
    for archive in tarballs::pack(&tarballs::published()?, &command::target_folder()?, arguments)? {
        let name = archive.file_name().context("a tarball has a name")?;
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
        reasons.iter().for_each(|reason| println!("would be refused: {reason}"));
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
    let undo =
        "nothing was committed\nhint: `git restore Cargo.toml Cargo.lock CHANGELOG.md` undoes the edits";
    // Of the workspace's own crates only.
    command::run(command::cargo().args(["update", "--workspace", "--offline", "--quiet"])).context(undo)?;
    semver(arguments).context(undo)?;
    let message = format!("release: Version {version}");
    git(&["commit", "--quiet", "--message", &message, "--", MANIFEST, LOCK, CHANGELOG]).context(undo)?;
    build(&folder).context("the commit has no tag\nhint: `git reset --keep HEAD~1` undoes it")?;
    git(&["tag", "--annotate", &tag, "--message", &format!("wholemem {version}")])?;
    println!("\n{} holds the release; the commit and the tag {tag} are local.\nNext:", folder.display());
    println!("  git push origin HEAD {tag}");
    for builder in BUILDERS {
        println!("  {}", builder.publish.replace("{}", &folder.join(builder.name).display().to_string()));
    }
    println!("  keep {}: the next release is compared with it (--previous)", folder.join("crates").display());
    Ok(())
}

/// Why a release cannot be made now.
fn release_blockers(
    version: Version,
    before: Version,
    status: &str,
    exists: impl Fn(&str) -> Result<bool>,
) -> Result<Vec<String>> {
    let mut reasons = Vec::new();
    if !status.is_empty() {
        reasons.push(format!("the tree is not clean:\n{}", status.trim_end()));
    }
    if exists(&format!("v{version}"))? {
        reasons.push(format!("the tag v{version} exists"));
    }
    // The version in the tree is that of the last release, except before the first.
    if version < before {
        reasons.push(format!("{version} is older than {before}, the version of the workspace"));
    }
    Ok(reasons)
}

/// Compares the libraries with those of the last release.
fn semver(arguments: &ReleaseArguments) -> Result<()> {
    match &arguments.previous {
        Some(folder) => semver::check(folder, arguments.version),
        None => {
            println!("semver: not checked, since no --previous was given; the first release has none");
            Ok(())
        }
    }
}

/// Prints the differences between files and what they would be.
fn print_diffs(edits: &[(&str, String)], folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    for (path, text) in edits {
        let planned = folder.join(path);
        fs::write(&planned, text).with_context(|| format!("cannot write {}", planned.display()))?;
        let (before, after) = (format!("--label=a/{path}"), format!("--label=b/{path}"));
        let status = Command::new("diff").args(["-u", &before, &after, path]).arg(&planned).status()?;
        // One is that they differ.
        ensure!(matches!(status.code(), Some(0 | 1)), "diff: {status}");
    }
    fs::remove_dir_all(folder).with_context(|| format!("cannot remove {}", folder.display()))
}

/// Builds what is quick to build, of the version of the tree.
fn dry_run_build(folder: &Path, before: Version) -> Result<()> {
    recreate(folder)?;
    for builder in BUILDERS {
        match builder.dry_run {
            Some(dry_run) => build_into(folder, builder.name, dry_run)?,
            None => println!("{}: not built in a dry run", builder.name),
        }
    }
    write_sums(folder)?;
    println!("\n{} holds artefacts of {before}; nothing in the tree has changed", folder.display());
    Ok(())
}

/// Builds all artefacts.
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
    ensure!(fs::read_dir(&folder)?.next().is_some(), "the {name} are no files");
    Ok(())
}

fn recreate(folder: &Path) -> Result<()> {
    if folder.is_dir() {
        fs::remove_dir_all(folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))
}

/// Writes the digests of all artefacts, as `sha256sum --check` reads them.
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

/// The date in UTC, as 2026-01-31.
fn today() -> Result<String> {
    let date = command::capture(Command::new("date").args(["--utc", "+%F"]))?;
    match date.trim() {
        "" => bail!("date wrote nothing"),
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
        assert_eq!(reasons("0.2.0", "0.1.0", " M a\n", &["v0.1.0"]), ["the tree is not clean:\n M a"]);
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
        // It is empty right after a release.
        match changelog::add_release(&text, version, "2026-01-31") {
            Ok(cut) => assert!(cut.contains("## [99.0.1] - 2026-01-31")),
            Err(error) => assert_eq!(error.to_string(), "nothing is written below `## [Unreleased]`"),
        }
    }
}
