//! The rules every source file keeps: it says what it is, it stays short, and it holds `unsafe` only where permitted.

use std::fs;
use std::io::ErrorKind;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{command, report, source};

/// Crates that exist to hold `unsafe`, in any of their files.
const UNSAFE_CRATES: &[&str] =
    &["crates/os", "crates/hal", "crates/capi", "crates/python", "crates/testkit/fake-cuda"];

/// Single files in other crates that may hold `unsafe`. Their crates cannot forbid it as a whole.
const UNSAFE_FILES: &[&str] = &[
    "crates/wholemem/src/collective/kernel.rs",
    "crates/wholemem/src/cpu/call.rs",
    "crates/wholemem/src/cpu/collective.rs",
    "crates/wholemem/src/cpu/combine/halves.rs",
    "crates/wholemem/src/cpu/combine/machine.rs",
    "crates/wholemem/src/cpu/combine/mod.rs",
    "crates/wholemem/src/cpu/combine/number.rs",
    "crates/wholemem/src/cpu/combine/tests.rs",
    "crates/wholemem/src/cpu/combine/x86_64.rs",
    "crates/wholemem/src/cpu/copy/mod.rs",
    "crates/wholemem/src/cpu/copy/portable.rs",
    "crates/wholemem/src/cpu/copy/x86_64.rs",
    "crates/wholemem/src/cpu/elements.rs",
    "crates/wholemem/src/cpu/mod.rs",
    "crates/wholemem/src/cpu/row_lookup.rs",
    "crates/wholemem/src/cpu/rows.rs",
    "crates/wholemem/src/cpu/rows/tests.rs",
    "crates/wholemem/src/kernels.rs",
    "crates/wholemem/src/table/gather_scatter/launch.rs",
    "examples/all_reduce_device.rs",
    "examples/custom_kernel.rs",
    "crates/testkit/src/conformance/paths.rs",
    "crates/testkit/src/conformance/queue.rs",
    "crates/testkit/src/deferred.rs",
    "crates/testkit/src/driver.rs",
    "crates/testkit/src/fault.rs",
    "crates/testkit/src/forked.rs",
    "crates/testkit/src/no_syscalls.rs",
    "crates/testkit/src/stepper.rs",
];

/// A file longer than this holds more than one idea.
const MOST_LINES: usize = 600;

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
        findings.extend(broken(path, &text));
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
fn broken(path: &str, text: &str) -> Vec<String> {
    let mut findings = Vec::new();
    match source::opening(text) {
        None => findings.push(format!("{path}: does not begin with a `//!` sentence that says what it is")),
        Some(opening) if !is_sentence(&opening) => {
            findings.push(format!("{path}: begins with `//! {opening}`, which is no sentence"));
        }
        Some(_) => {}
    }
    let lines = text.lines().count();
    if lines > MOST_LINES && !path.split('/').any(|folder| folder == "generated") {
        findings
            .push(format!("{path}: has {lines} lines, more than {MOST_LINES}: it holds more than one idea"));
    }
    if !may_be_unsafe(path) {
        for (line, _) in source::words(text).iter().filter(|(_, word)| *word == "unsafe") {
            findings.push(format!(
                "{path}:{line}: unsafe outside the places listed in xtask/src/source_rules.rs"
            ));
        }
    }
    if is_root(path) && must_forbid(path) && !forbids_unsafe(text) {
        findings.push(format!("{path}: lacks #![forbid(unsafe_code)]"));
    }
    findings
}

/// Several words that come to an end. The end may also stand inside the paragraph.
fn is_sentence(opening: &str) -> bool {
    let closed = opening.trim_end_matches(['`', ')', '*']).ends_with(['.', ':', '?', '!']);
    opening.contains(' ') && (closed || opening.contains(". "))
}

fn may_be_unsafe(path: &str) -> bool {
    UNSAFE_CRATES.iter().any(|folder| is_under(path, folder)) || UNSAFE_FILES.contains(&path)
}

/// Whether this is the root file of a library or program.
fn is_root(path: &str) -> bool {
    path.ends_with("src/lib.rs") || path.ends_with("src/main.rs") || path.contains("src/bin/")
}

/// Whether the crate with this root file holds no `unsafe` anywhere.
fn must_forbid(root: &str) -> bool {
    let folder = root.split("src/").next().unwrap_or_default().trim_end_matches('/');
    !UNSAFE_CRATES.contains(&folder) && !UNSAFE_FILES.iter().any(|file| is_under(file, folder))
}

fn forbids_unsafe(text: &str) -> bool {
    text.lines().any(|line| line.starts_with("#![forbid(") && line.contains("unsafe_code"))
}

fn is_under(path: &str, folder: &str) -> bool {
    path.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: Vec<String> = Vec::new();
    const GOOD: &str = "//! A module that says what it is.\n\n#![forbid(unsafe_code)]\n\nfn main() {}\n";

    #[test]
    fn a_good_file_breaks_no_rule() {
        assert_eq!(broken("crates/cli/src/main.rs", GOOD), NOTHING);
    }

    #[test]
    fn a_file_without_an_opening_is_found() {
        assert_eq!(
            broken("crates/cli/src/demo.rs", "use std::fs;\n"),
            ["crates/cli/src/demo.rs: does not begin with a `//!` sentence that says what it is"]
        );
    }

    #[test]
    fn an_opening_that_is_no_sentence_is_found() {
        for opening in ["demo", "the demo", "demo."] {
            assert_eq!(
                broken("crates/cli/src/demo.rs", &format!("//! {opening}\n")),
                [format!("crates/cli/src/demo.rs: begins with `//! {opening}`, which is no sentence")]
            );
        }
        for opening in
            ["The demo.", "The demo of `x`.", "The demo (see `y.`)", "The demo. It has\n//! a tail"]
        {
            assert_eq!(broken("crates/cli/src/demo.rs", &format!("//! {opening}\n")), NOTHING);
        }
    }

    #[test]
    fn unsafe_outside_the_listed_places_is_found_with_its_line() {
        let text = "//! A module of code.\n\n// unsafe in a comment\nfn f() {\n    unsafe { g() }\n}\n";
        assert_eq!(
            broken("crates/cli/src/demo.rs", text),
            ["crates/cli/src/demo.rs:5: unsafe outside the places listed in xtask/src/source_rules.rs"]
        );
        assert_eq!(broken("crates/os/src/demo.rs", text), NOTHING);
        assert_eq!(broken("crates/os/tests/demo.rs", text), NOTHING);
    }

    #[test]
    fn a_crate_whose_name_only_begins_like_a_listed_one_is_not_listed() {
        let found = broken("crates/osier/src/a.rs", "//! A module of code.\nunsafe fn f() {}\n");
        assert_eq!(
            found,
            ["crates/osier/src/a.rs:2: unsafe outside the places listed in xtask/src/source_rules.rs"]
        );
    }

    #[test]
    fn a_safe_crate_that_does_not_forbid_unsafe_is_found() {
        let text = "//! A module of code.\n// #![forbid(unsafe_code)]\n";
        for path in ["xtask/src/main.rs", "crates/cli/src/lib.rs", "crates/cli/src/bin/other.rs"] {
            assert_eq!(broken(path, text), [format!("{path}: lacks #![forbid(unsafe_code)]")]);
        }
        for path in ["crates/os/src/lib.rs", "crates/cli/src/demo.rs"] {
            assert_eq!(broken(path, text), NOTHING, "{path}");
        }
    }

    #[test]
    fn a_long_file_is_found_unless_it_is_generated() {
        let text = format!("//! A module of code.\n{}", "//\n".repeat(600));
        assert_eq!(
            broken("crates/hal/src/long.rs", &text),
            ["crates/hal/src/long.rs: has 601 lines, more than 600: it holds more than one idea"]
        );
        assert_eq!(broken("crates/hal/src/generated/long.rs", &text), NOTHING);
        let shorter = text.strip_suffix("//\n").unwrap();
        assert_eq!(broken("crates/hal/src/long.rs", shorter), NOTHING);
    }
}
