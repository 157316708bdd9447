//! The step `package`: packs the published crates as tarballs, builds them, and runs the programs of READMEs with them.
//!
//! ```text
//!   cargo package                   target/package/*.crate        dependencies between crates are resolved without a registry
//!     |  unpack                     target/unpacked/NAME-VERSION/
//!     |  readme programs            target/unpacked/readme-*/     a package for each README, a program for each block
//!     v  cargo build, then run      a separate workspace, with the same target folder
//! ```
//!
//! All crates are built once, in one workspace. Verification by `cargo package` would build each crate with all its dependencies
//! again, and the README programs are built from the unpacked folders in any case. `cargo xtask release` lets cargo verify each
//! tarball.

pub(crate) mod readme;
pub(crate) mod tarballs;

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::toolchain::Skip;
use crate::{command, report};
use tarballs::{PublishedCrate, UnpackedCrates};

/// The files that every crate tarball must contain.
const REQUIRED: [&str; 4] = ["Cargo.toml", "README.md", "LICENSE-MIT", "LICENSE-APACHE"];

/// The folders that no crate tarball may contain: tests, which depend on unpublished crates.
const FORBIDDEN: [&str; 3] = ["tests", "fuzz", "kernels/tests"];

/// The content of the README section `Features` of a crate without features.
const NO_FEATURES: &str = "None.";

/// The first minor version of cargo that can pack crates which depend on each other and are not in a registry.
const FIRST_CARGO: u32 = 90;

pub(crate) fn check() -> Result<()> {
    let version = command::capture(command::cargo().arg("--version"))?;
    if minor_version(&version).is_some_and(|minor| minor < FIRST_CARGO) {
        let reason = format!("{} cannot pack crates whose dependencies are not published", version.trim());
        return Err(Skip::new(format!("{reason}\nhint: rustup update stable")).into());
    }
    let published = tarballs::published()?;
    ensure!(!published.is_empty(), "the workspace has no crate that may be published");
    let target = command::target_folder()?;
    let archives = tarballs::pack(&published, &target, &["--allow-dirty", "--no-verify"])?;
    let unpacked = UnpackedCrates::create(&target.join("unpacked"), &archives)?;

    let mut findings = Vec::new();
    let mut programs = vec![("readme-of-repository".to_owned(), read(Path::new("README.md"))?)];
    for (krate, folder) in published.iter().zip(&unpacked.folders) {
        findings.extend(tarball_findings(&krate.name, |path| folder.join(path).exists()));
        let text = read(&folder.join("README.md")).unwrap_or_default();
        let docs = read(&folder.join("src/lib.rs")).unwrap_or_default();
        findings.extend(feature_findings(krate, &text, &docs));
        programs.push((format!("readme-of-{}", krate.name), text));
    }
    report::no_findings(findings)?;

    let mut to_run = Vec::new();
    for (package, text) in &programs {
        let blocks = readme::blocks(text);
        let folder = unpacked.root.join(package);
        readme::write_package(&folder, package, &blocks, &published)?;
        to_run.extend(blocks.iter().filter(|block| block.runs).map(|block| block.program(package)));
    }
    let packages: Vec<_> = programs.iter().map(|(package, _)| package.as_str()).collect();
    unpacked.write_workspace(&packages, &published)?;
    unpacked.build(&target)?;
    run(&to_run, &target, &unpacked.root)
}

fn run(programs: &[String], target: &Path, folder: &Path) -> Result<()> {
    ensure!(!programs.is_empty(), "no README contains a program to run");
    for program in programs {
        command::run(Command::new(target.join("debug").join(program)).current_dir(folder))?;
    }
    println!("{} programs of READMEs ran", programs.len());
    Ok(())
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Returns the minor version in the output `cargo 1.95.0 (...)`.
fn minor_version(text: &str) -> Option<u32> {
    text.strip_prefix("cargo 1.")?.split('.').next()?.parse().ok()
}

/// Returns the findings for missing and forbidden files of a crate tarball. `has` returns whether a path exists in the tarball.
fn tarball_findings(name: &str, has: impl Fn(&str) -> bool) -> Vec<String> {
    let lacks = REQUIRED.iter().filter(|path| !has(path)).map(|path| format!("{name}: {path} is missing"));
    let forbidden = FORBIDDEN
        .iter()
        .filter(|path| has(path))
        .map(|path| format!("{name}: has {path}, which is for tests"));
    lacks.chain(forbidden).collect()
}

/// Returns the findings for the description of a crate's features: a feature that neither the README nor the documentation of
/// `lib.rs` mentions, or a feature in the README's list that does not exist.
fn feature_findings(krate: &PublishedCrate, readme: &str, library: &str) -> Vec<String> {
    let docs: Vec<_> = library.lines().filter_map(|line| line.strip_prefix("//!")).map(str::trim).collect();
    let lines = || readme.lines().chain(docs.iter().copied());
    let mut findings = Vec::new();
    if !lines().any(is_features_heading) {
        findings.push(format!("{}: no section `Features` in README.md or src/lib.rs", krate.name));
    }
    let is_described = |feature: &str| lines().any(|line| line.contains(&format!("`{feature}`")));
    for feature in krate.features.iter().filter(|feature| !is_described(feature)) {
        findings.push(format!("{}: feature `{feature}` is not in README.md or src/lib.rs", krate.name));
    }
    let section = readme.lines().skip_while(|line| !is_features_heading(line)).skip(1);
    for line in section.take_while(|line| !line.starts_with('#')) {
        if line == NO_FEATURES && !krate.features.is_empty() {
            let features = krate.features.join(", ");
            findings
                .push(format!("{}: README.md lists no features, but the crate has {features}", krate.name));
        }
        let listed = line.strip_prefix("- `").and_then(|rest| rest.split('`').next());
        if let Some(feature) = listed.filter(|feature| !krate.features.iter().any(|known| known == feature)) {
            findings.push(format!("{}: README.md lists `{feature}`, which is not a feature", krate.name));
        }
    }
    findings
}

fn is_features_heading(line: &str) -> bool {
    line.starts_with('#') && line.trim_start_matches('#').trim() == "Features"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_features(features: &[&str]) -> PublishedCrate {
        let features = features.iter().map(|&feature| feature.to_owned()).collect();
        PublishedCrate { name: "ours".to_owned(), version: "1.2.3".to_owned(), features, is_library: true }
    }

    #[test]
    fn missing_licences_and_included_tests_are_found() {
        assert_eq!(tarball_findings("ours", |path| REQUIRED.contains(&path)), [] as [String; 0]);
        assert_eq!(
            tarball_findings("ours", |path| path != "LICENSE-MIT" && !FORBIDDEN.contains(&path)),
            ["ours: LICENSE-MIT is missing"]
        );
        assert_eq!(
            tarball_findings("ours", |path| REQUIRED.contains(&path) || path == "fuzz"),
            ["ours: has fuzz, which is for tests"]
        );
    }

    #[test]
    fn the_version_of_cargo_is_read() {
        assert_eq!(minor_version("cargo 1.89.0 (c24e10642 2025-06-23)\n"), Some(89));
        assert_eq!(minor_version("cargo 1.95.0-nightly (f2d3ce0bd 2026-03-21)"), Some(95));
        assert_eq!(minor_version("cargo 2.0.0"), None);
    }

    #[test]
    fn features_are_described_in_the_readme_or_in_the_library() {
        let krate = with_features(&["slow", "loud"]);
        let (readme, library) =
            ("# ours\n\n## Features\n\n- `slow`: waits.\n", "//! With `loud` it prints.\n");
        assert_eq!(feature_findings(&krate, readme, library), [] as [String; 0]);
        assert_eq!(
            feature_findings(&krate, readme, "// `loud`\n"),
            ["ours: feature `loud` is not in README.md or src/lib.rs"]
        );
    }

    #[test]
    fn a_readme_lists_only_features_that_exist() {
        let readme = "# ours\n\n## Features\n\n- `slow`: waits.\n- `old`: is gone.\n";
        let stale = "ours: README.md lists `old`, which is not a feature";
        assert_eq!(feature_findings(&with_features(&["slow"]), readme, ""), [stale]);
        let none = "# ours\n\n## Features\n\nNone.\n";
        assert_eq!(feature_findings(&with_features(&[]), none, ""), [] as [String; 0]);
        let wrong = "ours: README.md lists no features, but the crate has slow";
        assert_eq!(feature_findings(&with_features(&["slow"]), none, "//! `slow` waits.\n"), [wrong]);
    }

    #[test]
    fn a_crate_without_features_needs_a_features_section() {
        let krate = with_features(&[]);
        assert_eq!(feature_findings(&krate, "# ours\n", "//! # Features\n"), [] as [String; 0]);
        assert_eq!(
            feature_findings(&krate, "# ours\nFeatures\n", ""),
            ["ours: no section `Features` in README.md or src/lib.rs"]
        );
    }
}
