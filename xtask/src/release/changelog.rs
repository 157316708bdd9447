//! Moves the section `Unreleased` of the changelog to a section for the released version.

use anyhow::{Context, Result, ensure};

use super::version::Version;

const UNRELEASED: &str = "## [Unreleased]\n";

/// Returns the changelog with the unreleased changes under the new version and date, below an empty `Unreleased`.
pub(crate) fn add_release(text: &str, version: Version, date: &str) -> Result<String> {
    let heading = format!("## [{version}]");
    ensure!(!text.contains(&heading), "the changelog already has a section `{heading}`");
    let (before, after) = text.split_once(UNRELEASED).context("the changelog has no `## [Unreleased]`")?;
    let changes = after.split("\n## ").next().unwrap_or_default();
    ensure!(!changes.trim().is_empty(), "the section `## [Unreleased]` of the changelog is empty");
    Ok(format!("{before}{UNRELEASED}\n{heading} - {date}\n{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHANGELOG: &str =
        "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- All.\n\n## [0.1.0] - 2026-01-01\n\n- One.\n";

    fn add_release_to(text: &str, version: &str) -> Result<String> {
        add_release(text, version.parse().unwrap(), "2026-02-03")
    }

    #[test]
    fn unreleased_changes_get_a_version_and_a_date() {
        let expected = "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-02-03\n\n### Added\n\n- All.\n\n\
                        ## [0.1.0] - 2026-01-01\n\n- One.\n";
        assert_eq!(add_release_to(CHANGELOG, "0.2.0").unwrap(), expected);
    }

    #[test]
    fn empty_releases_and_existing_versions_are_rejected() {
        let released = add_release_to(CHANGELOG, "0.2.0").unwrap();
        let error = add_release_to(&released, "0.3.0").unwrap_err();
        assert_eq!(error.to_string(), "the section `## [Unreleased]` of the changelog is empty");
        let error = add_release_to(CHANGELOG, "0.1.0").unwrap_err();
        assert_eq!(error.to_string(), "the changelog already has a section `## [0.1.0]`");
        let error = add_release_to("# Changelog\n", "0.1.0").unwrap_err();
        assert_eq!(error.to_string(), "the changelog has no `## [Unreleased]`");
    }
}
