//! The step `vocabulary`: finds former names and phrases that are listed in `xtask/vocabulary.txt`.
//!
//! A line of the list has three columns, separated by `|`: the name or phrase, the path prefix in which it is banned (`*` for the
//! whole repository), and the replacement. A single word with a capital letter or an underscore is an identifier and is compared
//! exactly. Other phrases also match with a capital first letter, and with underscores for spaces. Both match whole words only.

use std::fs;

use anyhow::{Context, Result, ensure};

use crate::{report, source_rules};

const LIST: &str = "xtask/vocabulary.txt";

/// Files that may contain banned names and phrases.
const EXEMPT: &[&str] = &["CHANGELOG.md", "docs/GLOSSARY.md", LIST, "xtask/src/vocabulary.rs"];

/// The suffixes of the files that are searched for banned phrases.
const CHECKED: &[&str] = &[".rs", ".py", ".pyi", ".md", ".cu", ".cuh", ".cpp", ".h", ".toml", ".sh"];

/// A line of `xtask/vocabulary.txt`, the list of banned names and phrases.
#[derive(Debug, Clone, PartialEq, Eq)]
struct BannedPhrase {
    phrase: String,
    folder: String,
    instead: String,
}

pub(crate) fn check() -> Result<()> {
    let list = fs::read_to_string(LIST).with_context(|| format!("cannot read {LIST}"))?;
    let banned = parse(&list)?;
    let mut findings = Vec::new();
    for path in source_rules::tracked()? {
        if EXEMPT.contains(&path.as_str()) || !CHECKED.iter().any(|ending| path.ends_with(ending)) {
            continue;
        }
        // A file that is deleted but still tracked cannot be read, and is skipped.
        let Ok(text) = fs::read_to_string(&path) else { continue };
        findings.extend(find(&path, &text, &banned));
    }
    println!("{} names and phrases", banned.len());
    report::no_findings(findings)
}

fn parse(list: &str) -> Result<Vec<BannedPhrase>> {
    let lines =
        list.lines().enumerate().filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'));
    lines
        .map(|(index, line)| {
            let columns: Vec<_> = line.split('|').map(str::trim).collect();
            let complete = columns.len() == 3 && columns.iter().all(|column| !column.is_empty());
            ensure!(
                complete,
                "{LIST}:{number}: the line `{line}` of the list does not have three columns",
                number = index + 1
            );
            let [phrase, folder, instead] = [columns[0], columns[1], columns[2]].map(str::to_owned);
            Ok(BannedPhrase { phrase, folder, instead })
        })
        .collect()
}

/// Returns a finding for each occurrence of a banned phrase in a file.
fn find(path: &str, text: &str, banned: &[BannedPhrase]) -> Vec<String> {
    let below = |folder: &str| folder == "*" || path.starts_with(folder);
    let banned: Vec<_> = banned.iter().filter(|entry| below(&entry.folder)).collect();
    if banned.is_empty() {
        return Vec::new();
    }
    let mut findings = Vec::new();
    let mut lines = text.lines().peekable();
    let mut number = 0;
    while let Some(line) = lines.next() {
        number += 1;
        // A banned phrase may continue on the next line, behind the marker of a comment.
        let next =
            lines.peek().map_or("", |next| next.trim_start().trim_start_matches(['/', '!', '#', '*', ' ']));
        let joined = format!("{line} {next}");
        for entry in &banned {
            if let Some(start) = position(&joined, &entry.phrase)
                && start < line.len()
            {
                findings.push(format!("{path}:{number}: `{}`: write {}", entry.phrase, entry.instead));
            }
        }
    }
    findings
}

/// Returns the position at which a phrase first occurs as whole words.
fn position(text: &str, phrase: &str) -> Option<usize> {
    let is_identifier =
        phrase.chars().all(is_word) && phrase.contains(|letter: char| letter.is_uppercase() || letter == '_');
    if is_identifier {
        return whole_words(text, phrase);
    }
    let text = text.replace('_', " ");
    let capitalized: String = phrase[..1].to_uppercase() + &phrase[1..];
    [phrase, &capitalized].into_iter().filter_map(|phrase| whole_words(&text, phrase)).min()
}

fn whole_words(text: &str, phrase: &str) -> Option<usize> {
    let starts = text.match_indices(phrase).map(|(start, _)| start);
    starts.into_iter().find(|&start| {
        let before = text[..start].chars().next_back();
        let after = text[start + phrase.len()..].chars().next();
        !before.is_some_and(is_word) && !after.is_some_and(is_word)
    })
}

fn is_word(letter: char) -> bool {
    letter.is_alphanumeric() || letter == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    fn banned(phrase: &str, folder: &str) -> BannedPhrase {
        BannedPhrase { phrase: phrase.to_owned(), folder: folder.to_owned(), instead: "better".to_owned() }
    }

    #[test]
    fn identifiers_match_exactly_and_as_whole_words() {
        let list = [banned("House", "*"), banned("stream_at", "*")];
        let text = "struct House;\nstruct Houses;\n// the house\nfn stream_at() {}\nfn upstream_at() {}\n";
        assert_eq!(
            find("a.rs", text, &list),
            ["a.rs:1: `House`: write better", "a.rs:4: `stream_at`: write better"]
        );
    }

    #[test]
    fn phrases_match_capitalized_in_names_and_across_lines() {
        let list = [banned("without a word", "*")];
        let text = "// Without a word.\n// it fails without\n// a word, and\n// without a wording\nfn fails_without_a_word() {}\n";
        assert_eq!(
            find("a.rs", text, &list),
            [1, 2, 5].map(|line| format!("a.rs:{line}: `without a word`: write better"))
        );
    }

    #[test]
    fn a_word_is_banned_below_its_folder_only() {
        let list = [banned("put", "crates/python/src/")];
        assert_eq!(find("crates/store/src/a.rs", "fn put() {}\n", &list), [] as [String; 0]);
        assert_eq!(
            find("crates/python/src/a.rs", "fn put() {}\n", &list),
            ["crates/python/src/a.rs:1: `put`: write better"]
        );
    }

    #[test]
    fn a_line_without_three_columns_is_an_error() {
        assert_eq!(
            parse("# comment\n\na | * | b\n").unwrap(),
            [BannedPhrase { instead: "b".to_owned(), ..banned("a", "*") }]
        );
        assert_eq!(
            parse("a | b\n").unwrap_err().to_string(),
            "xtask/vocabulary.txt:1: the line `a | b` of the list does not have three columns"
        );
    }
}
