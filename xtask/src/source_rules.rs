//! The step `source-rules`: checks that source files begin with a summary sentence and are not too long.

use std::fs;
use std::io::ErrorKind;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{command, report};

/// The maximum number of lines of a source file.
const MAX_LINES: usize = 600;

pub(crate) fn check() -> Result<()> {
    let mut files = 0;
    let mut findings = Vec::new();
    for path in tracked()?.iter().filter(|path| path.ends_with(".rs")) {
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            // A file that is deleted, but still in the git index, is skipped.
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => return Err(error).with_context(|| format!("cannot read {path}")),
        };
        files += 1;
        findings.extend(rule_findings(path, &text));
    }
    println!("{files} files");
    if files == 0 {
        bail!("git lists no source file");
    }
    report::no_findings(findings)
}

/// Returns the files of the repository: tracked files, and untracked files that are not ignored.
pub(crate) fn tracked() -> Result<Vec<String>> {
    let list = ["ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate", "-z"];
    let listed = command::capture(Command::new("git").args(list))?;
    Ok(listed.split('\0').filter(|path| !path.is_empty()).map(str::to_owned).collect())
}

/// Returns a finding for each rule that a source file violates.
fn rule_findings(path: &str, text: &str) -> Vec<String> {
    let mut findings = Vec::new();
    if !is_sentence(&opening(text)) {
        findings.push(format!("{path}: does not begin with a `//!` summary sentence"));
    }
    let lines = text.lines().count();
    if lines > MAX_LINES && !path.split('/').any(|folder| folder == "generated") {
        findings.push(format!("{path}: has {lines} lines, more than {MAX_LINES}: split it by concept"));
    }
    findings
}

/// Returns the first paragraph of the `//!` comment at the start of a file, or an empty string.
fn opening(text: &str) -> String {
    let comment = text.lines().map_while(|line| line.strip_prefix("//!")).map(str::trim);
    comment.take_while(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
}

/// Returns true if a paragraph has several words and contains the end of a sentence.
fn is_sentence(opening: &str) -> bool {
    let closed = opening.trim_end_matches(['`', ')', '*']).ends_with(['.', ':', '?', '!']);
    opening.contains(' ') && (closed || opening.contains(". "))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_FINDINGS: Vec<String> = Vec::new();

    #[test]
    fn a_file_that_begins_with_a_sentence_is_accepted() {
        for opening in
            ["The demo.", "The demo of `x`.", "The demo (see `y.`)", "The demo. It has\n//! a tail"]
        {
            assert_eq!(
                rule_findings("src/demo.rs", &format!("//! {opening}\n\nfn main() {{}}\n")),
                NO_FINDINGS
            );
        }
    }

    #[test]
    fn a_file_that_does_not_begin_with_a_sentence_is_found() {
        let text =
            ["", "use std::fs;\n", "// The demo.", "//!\n//! After a gap.", "//! demo\n", "//! demo.\n"];
        for text in text {
            assert_eq!(
                rule_findings("src/demo.rs", text),
                ["src/demo.rs: does not begin with a `//!` summary sentence"]
            );
        }
    }

    #[test]
    fn a_file_that_is_too_long_is_found_unless_it_is_generated() {
        let text = format!("//! A long file.\n{}", "\n".repeat(MAX_LINES));
        assert_eq!(
            rule_findings("src/demo.rs", &text),
            ["src/demo.rs: has 601 lines, more than 600: split it by concept"]
        );
        assert_eq!(rule_findings("src/generated/demo.rs", &text), NO_FINDINGS);
    }
}
