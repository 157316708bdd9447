//! Checks that repository paths mentioned in Markdown text exist.
//!
//! Documents refer to code by its path from the root, such as `crates/os/src/memfd.rs`, or by a pattern such as
//! `crates/hal/kernels/*.cu`. In a row of a table, another file name is in the folder of the path before it, or in the root:
//!
//! ```text
//! | a message | `crates/comm/src/wire`: `frame.rs`, `mod.rs`; a test in `crates/comm/tests/fuzz.rs`, `deaths.rs` |
//! ```
//!
//! When a file is moved, the step `docs` reports the documents that still mention its old path.

use std::collections::BTreeSet;

/// The prefixes by which a repository path in Markdown text is recognized.
const ROOTS: [&str; 6] = ["bench/", "crates/", "docs/", "examples/", "packaging/", "xtask/"];

/// The endings by which other file names are recognized in a row of a table.
const ENDINGS: [&str; 7] = [".rs", ".cu", ".cuh", ".py", ".pyi", ".md", ".sh"];

/// Returns true if a text begins with a path of the repository.
pub(crate) fn is_path(text: &str) -> bool {
    ROOTS.iter().any(|root| text.starts_with(root))
}

/// Returns a finding for each repository path in `text`, the content of `page`, that is neither one of `files` nor a folder of
/// one, and for each pattern that matches none of `files`.
pub(crate) fn missing(page: &str, text: &str, files: &BTreeSet<String>) -> Vec<String> {
    let paths = text.split(|letter| !is_part(letter)).map(|word| word.trim_end_matches(['.', '/']));
    let absent = paths.filter(|word| is_path(word) && !exists(word, files));
    let mut findings: Vec<_> =
        absent.map(|path| format!("{page}: mentions `{path}`, which is not in the repository")).collect();
    for row in text.lines().filter(|line| line.starts_with('|')) {
        let names = names_in_row(row).into_iter().filter(|(name, _)| !files.contains(*name));
        let absent = names.filter(|(_, path)| !exists(path, files));
        findings.extend(
            absent.map(|(name, path)| {
                format!("{page}: mentions `{name}`, but `{path}` is not in the repository")
            }),
        );
    }
    findings
}

fn is_part(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || "_-./*".contains(letter)
}

/// Returns the file names in a row of a table that do not begin with a root, each with its path.
fn names_in_row(row: &str) -> Vec<(&str, String)> {
    let mut names = Vec::new();
    let mut folder = None;
    for word in row.split('`').skip(1).step_by(2) {
        if is_path(word) {
            let (parent, last) = word.rsplit_once('/').unwrap_or_default();
            folder = Some(if last.contains(['.', '*']) { parent } else { word.trim_end_matches('/') });
        } else if let Some(folder) = folder
            && ENDINGS.iter().any(|ending| word.ends_with(ending))
            && word.chars().all(is_part)
        {
            names.push((word, format!("{folder}/{word}")));
        }
    }
    names
}

fn exists(path: &str, files: &BTreeSet<String>) -> bool {
    if path.contains('*') {
        return files.iter().any(|file| matches(path, file));
    }
    let is_inside = |file: &String| file.strip_prefix(path).is_some_and(|rest| rest.starts_with('/'));
    files.contains(path) || files.iter().any(is_inside)
}

/// Returns true if a file matches a pattern, in which `*` stands for any text.
fn matches(pattern: &str, file: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| file.strip_prefix(first)) else { return false };
    let last = parts.next_back().unwrap_or_default();
    for part in parts {
        let Some((_, after)) = rest.split_once(part) else { return false };
        rest = after;
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(text: &str) -> Vec<String> {
        let files =
            ["README.md", "crates/os/src/lib.rs", "crates/wholemem/kernels/ptx/rows.ptx"].map(str::to_owned);
        missing("docs/PAGE.md", text, &BTreeSet::from(files))
    }

    #[test]
    fn missing_paths_are_found_in_sentences_and_drawings() {
        let expected = |path| format!("docs/PAGE.md: mentions `{path}`, which is not in the repository");
        assert_eq!(findings("It is in `crates/os/src/old.rs`."), [expected("crates/os/src/old.rs")]);
        assert_eq!(findings("```text\nrun   crates/o/src   runs\n```"), [expected("crates/o/src")]);
    }

    #[test]
    fn patterns_that_match_no_file_are_found() {
        let expected = |path| format!("docs/PAGE.md: mentions `{path}`, which is not in the repository");
        for pattern in ["crates/os/*.cu", "crates/*/kernels/cu/*.ptx", "crates/os/src/lib*lib.rs"] {
            assert_eq!(findings(pattern), [expected(pattern)]);
        }
    }

    #[test]
    fn names_in_a_row_are_in_the_folder_of_the_path_before_them() {
        let expected = |name: &str, path: &str| {
            format!("docs/PAGE.md: mentions `{name}`, but `{path}` is not in the repository")
        };
        assert_eq!(
            findings("| `lib.rs` | `crates/os/src/lib.rs`, `lib.rs`, `old.rs` | `l*.rs`, `io/*.rs` |"),
            [expected("old.rs", "crates/os/src/old.rs"), expected("io/*.rs", "crates/os/src/io/*.rs")]
        );
        assert_eq!(
            findings("| `crates/os/`: `src/lib.rs`, `lib.rs` |"),
            [expected("lib.rs", "crates/os/lib.rs")]
        );
        assert_eq!(findings("Not a row: `crates/os/src`, `old.rs`"), [] as [String; 0]);
    }

    #[test]
    fn files_folders_and_patterns_are_accepted() {
        for text in [
            "`crates/os/src/lib.rs`,",
            "crates/os/src/",
            "(`crates/os`).",
            "crates/wholemem/kernels/ptx/*.ptx",
            "`crates/*/kernels/*.ptx`",
            "a/b.rs",
            "| `crates/os/src`: `lib.rs`, `README.md`, `Type::function`, `cargo xtask abi`, `run(old.rs)` |",
        ] {
            assert_eq!(findings(text), [] as [String; 0], "{text}");
        }
    }
}
