//! Parses versions, and reads and sets the version in the workspace manifest.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, Result, bail, ensure};

/// A version `major.minor.patch`, without a pre-release part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version {
    major: u32,
    minor: u32,
    patch: u32,
}

impl Version {
    /// Returns the index of the first part in which two versions differ: 0 is major, 1 minor, 2 patch.
    pub(crate) fn first_difference(self, other: Self) -> Option<usize> {
        let parts = |version: Self| [version.major, version.minor, version.patch];
        parts(self).iter().zip(parts(other)).position(|(&one, other)| one != other)
    }

    /// Returns true if the version is below 1.0.
    pub(crate) fn is_unstable(self) -> bool {
        self.major == 0
    }
}

impl FromStr for Version {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |part: &str| {
            let number = part.parse().ok()?;
            // Parts of a version with leading zeros or signs are rejected.
            (u32::to_string(&number) == part).then_some(number)
        };
        let parts: Option<Vec<u32>> = text.split('.').map(number).collect();
        match parts.as_deref() {
            Some(&[major, minor, patch]) => Ok(Self { major, minor, patch }),
            _ => Err(format!("`{text}` is not a version such as 0.2.0")),
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// Reads the version of the workspace from its `Cargo.toml`.
pub(crate) fn current(manifest: &str) -> Result<Version> {
    let mut section = "";
    for line in manifest.lines() {
        if line.starts_with('[') {
            section = line;
        }
        if let ("[workspace.package]", Some(rest)) = (section, line.strip_prefix("version = \"")) {
            let text = rest.strip_suffix('"').context("the version of the workspace is not a string")?;
            return text.parse().map_err(anyhow::Error::msg);
        }
    }
    bail!("the manifest has no `version` in [workspace.package]")
}

/// Returns the text of the workspace's `Cargo.toml` with a new version, for the workspace and for the dependencies between its
/// crates.
pub(crate) fn set(manifest: &str, version: Version) -> Result<String> {
    let before = format!("version = \"{}\"", current(manifest)?);
    let after = format!("version = \"{version}\"");
    let (mut section, mut crates) = ("", 0);
    let mut edited = String::new();
    for line in manifest.lines() {
        if line.starts_with('[') {
            section = line;
        }
        let is_workspace_version = match section {
            "[workspace.package]" => line == before,
            "[workspace.dependencies]" if line.contains("path = ") && line.contains("version = ") => {
                ensure!(
                    line.contains(&before),
                    "the version of a dependency differs from that of the workspace: {line}"
                );
                crates += 1;
                true
            }
            _ => false,
        };
        edited.push_str(&if is_workspace_version { line.replace(&before, &after) } else { line.to_owned() });
        edited.push('\n');
    }
    ensure!(
        crates > 0,
        "[workspace.dependencies] of the manifest contains no crate of the workspace with a version"
    );
    Ok(edited)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANIFEST: &str = "[workspace.package]\nversion = \"0.1.0\"\nedition = \"2024\"\n\n\
                            [workspace.dependencies]\nours = { path = \"ours\", version = \"0.1.0\" }\n\
                            tests = { path = \"tests\" }\ntheirs = { version = \"0.1.0\", features = [] }\n\n\
                            [other]\nversion = \"0.1.0\"\n";

    fn version(text: &str) -> Version {
        text.parse().unwrap()
    }

    #[test]
    fn versions_are_compared_as_numbers() {
        assert!(version("0.10.0") > version("0.9.9"));
        assert!(version("1.0.0") > version("0.10.0"));
        assert_eq!(version("0.10.0").to_string(), "0.10.0");
    }

    #[test]
    fn only_three_plain_numbers_are_a_version() {
        for text in ["", "1", "1.2", "1.2.3.4", "v1.2.3", "1.2.x", "1.02.3", "+1.2.3", "1.2.3-rc1"] {
            let error = format!("`{text}` is not a version such as 0.2.0");
            assert_eq!(text.parse::<Version>(), Err(error), "{text}");
        }
    }

    #[test]
    fn only_versions_of_workspace_crates_are_set() {
        assert_eq!(current(MANIFEST).unwrap(), version("0.1.0"));
        let edited = set(MANIFEST, version("0.2.0")).unwrap();
        let expected = MANIFEST
            .replacen("version = \"0.1.0\"", "version = \"0.2.0\"", 1)
            .replace("path = \"ours\", version = \"0.1.0\"", "path = \"ours\", version = \"0.2.0\"");
        assert_eq!(edited, expected);
    }

    #[test]
    fn a_crate_version_that_differs_from_the_workspace_is_rejected() {
        let manifest = MANIFEST.replace("\"ours\", version = \"0.1.0\"", "\"ours\", version = \"0.0.9\"");
        let error = set(&manifest, version("0.2.0")).unwrap_err().to_string();
        assert!(
            error.starts_with("the version of a dependency differs from that of the workspace: ours = "),
            "{error}"
        );
    }

    #[test]
    fn a_manifest_without_a_version_is_rejected() {
        let error = current("[package]\nversion = \"0.1.0\"\n").unwrap_err();
        assert_eq!(error.to_string(), "the manifest has no `version` in [workspace.package]");
    }
}
