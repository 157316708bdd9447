//! The rules for source files that neither rustc nor clippy checks: a file says what it is, and stays short.

use std::fs;
use std::io::ErrorKind;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{command, report};

/// A file longer than this holds more than one idea.
const MAX_LINES: usize = 600;

pub(crate) fn check() -> Result<()> {
    let mut files = 0;
    let mut findings = Vec::new();
    for path in tracked()?.iter().filter(|path| path.ends_with(".rs")) {
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            // Deleted, but git has not been told yet.
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => return Err(error).with_context(|| format!("cannot read {path}")),
        };
        files += 1;
        findings.extend(rule_findings(path, &text));
    }
    println!("{files} files");
    if files == 0 {
        bail!("git names no source file");
    }
    report::no_findings(findings)
}

/// The files of the repository, tracked or about to be.
pub(crate) fn tracked() -> Result<Vec<String>> {
    let list = ["ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate", "-z"];
    let listed = command::capture(Command::new("git").args(list))?;
    Ok(listed.split('\0').filter(|path| !path.is_empty()).map(str::to_owned).collect())
}

/// The rules that one source file breaks.
fn rule_findings(path: &str, text: &str) -> Vec<String> {
    let mut findings = Vec::new();
    if !is_sentence(&opening(text)) {
        findings.push(format!("{path}: does not begin with a `//!` sentence that says what it is"));
    }
    let lines = text.lines().count();
    if lines > MAX_LINES && !path.split('/').any(|folder| folder == "generated") {
        findings
            .push(format!("{path}: has {lines} lines, more than {MAX_LINES}: it holds more than one idea"));
    }
    findings
}

/// The first paragraph of the `//!` comment that a file begins with; empty if there is none.
fn opening(text: &str) -> String {
    let comment = text.lines().map_while(|line| line.strip_prefix("//!")).map(str::trim);
    comment.take_while(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
}

/// Several words that come to an end. The end may also stand inside the paragraph.
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
                ["src/demo.rs: does not begin with a `//!` sentence that says what it is"]
            );
        }
    }

    #[test]
    fn a_file_that_is_too_long_is_found_unless_it_is_generated() {
        let text = format!("//! A long file.\n{}", "\n".repeat(MAX_LINES));
        assert_eq!(
            rule_findings("src/demo.rs", &text),
            ["src/demo.rs: has 601 lines, more than 600: it holds more than one idea"]
        );
        assert_eq!(rule_findings("src/generated/demo.rs", &text), NO_FINDINGS);
    }
}
