//! Checks that repository paths mentioned in Markdown text exist.
//!
//! Documents refer to code by its path from the root, such as `crates/os/src/memfd.rs`. When a file is moved, the step `docs`
//! reports the documents that still mention its old path.

use std::collections::BTreeSet;

/// The prefixes by which a repository path in Markdown text is recognized.
const ROOTS: [&str; 4] = ["crates/", "docs/", "examples/", "xtask/"];

/// Returns a finding for each repository path in `text`, the content of `page`, that is neither one of `files` nor a folder of
/// one.
pub(crate) fn missing(page: &str, text: &str, files: &BTreeSet<String>) -> Vec<String> {
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || "_-./*".contains(letter);
    text.split(|letter| !is_part(letter))
        .map(|word| word.trim_end_matches(['.', '/']))
        .filter(|word| ROOTS.iter().any(|root| word.starts_with(root)) && !word.contains('*'))
        .filter(|path| !exists(path, files))
        .map(|path| format!("{page}: mentions `{path}`, which is not in the repository"))
        .collect()
}

fn exists(path: &str, files: &BTreeSet<String>) -> bool {
    let is_inside = |file: &String| file.strip_prefix(path).is_some_and(|rest| rest.starts_with('/'));
    files.contains(path) || files.iter().any(is_inside)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(text: &str) -> Vec<String> {
        let files = ["crates/os/src/lib.rs", "crates/wholemem/kernels/ptx/rows.ptx"].map(str::to_owned);
        missing("docs/PAGE.md", text, &BTreeSet::from(files))
    }

    #[test]
    fn missing_paths_are_found_in_sentences_and_drawings() {
        let expected = |path| format!("docs/PAGE.md: mentions `{path}`, which is not in the repository");
        assert_eq!(findings("It is in `crates/os/src/old.rs`."), [expected("crates/os/src/old.rs")]);
        assert_eq!(findings("```text\nrun   crates/o/src   runs\n```"), [expected("crates/o/src")]);
    }

    #[test]
    fn files_folders_and_patterns_are_accepted() {
        for text in [
            "`crates/os/src/lib.rs`,",
            "crates/os/src/",
            "(`crates/os`).",
            "crates/hal/kernels/*.cu",
            "a/b.rs",
        ] {
            assert_eq!(findings(text), [] as [String; 0], "{text}");
        }
    }
}
