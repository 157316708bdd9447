//! Compares the functions of the C header and of the libraries with a committed list, from which no function is ever removed.
//!
//! `cargo xtask abi` appends new functions of the header to the list. A function that is in the list but not in the header or in a
//! library is an error: programs that use it could no longer be linked or started.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::{command, report};

/// The committed list: one function on each line, sorted.
const LIST: &str = "crates/capi/exports.txt";

/// The prefix of all functions.
const PREFIX: &str = "wm_";

/// Compares the functions that a header declares with the committed list. Without `check`, appends new functions to the list.
pub(crate) fn compare_header(header: &str, check: bool) -> Result<()> {
    let (declared, mut listed) = (declared(header), listed().unwrap_or_default());
    if !check {
        listed.extend(declared.iter().cloned());
        let text: String = listed.iter().map(|name| format!("{name}\n")).collect();
        fs::write(LIST, text).with_context(|| format!("cannot write {LIST}"))?;
    }
    report::no_findings(differences("include/wholemem.h", &declared, &listed))
}

/// Compares the symbols that a library exports with the committed list.
pub(crate) fn compare_library(library: &Path) -> Result<()> {
    let mut nm = Command::new("nm");
    nm.args(["--defined-only", "--extern-only", "--format=posix"]);
    if library.extension().is_some_and(|extension| extension == "so") {
        nm.arg("--dynamic");
    }
    let symbols = symbols(&command::capture(nm.arg(library))?);
    report::no_findings(differences(&library.display().to_string(), &symbols, &listed()?))
}

/// Returns the names of all exported functions.
pub(crate) fn listed() -> Result<BTreeSet<String>> {
    let text = fs::read_to_string(LIST).with_context(|| format!("cannot read {LIST}"))?;
    Ok(text.lines().map(str::to_owned).collect())
}

/// Returns the functions that a header declares: names with our prefix before an opening parenthesis, outside of comments.
fn declared(header: &str) -> BTreeSet<String> {
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    let code: String = header
        .split("*/")
        .map(|part| part.split("/*").next().unwrap_or_default())
        .flat_map(str::lines)
        .filter(|line| !line.starts_with('#'))
        .fold(String::new(), |code, line| code + line + "\n");
    let before_parentheses = code.match_indices('(').map(|(at, _)| &code[..at]);
    let names = before_parentheses.filter_map(|before| before.rsplit(|letter| !is_part(letter)).next());
    names.filter(|name| name.starts_with(PREFIX)).map(str::to_owned).collect()
}

/// Returns the names in the output of `nm --format=posix`: a name and its type on each line, below the name of each archive member.
fn symbols(listing: &str) -> BTreeSet<String> {
    let with_type = listing.lines().filter_map(|line| line.split_once(' '));
    with_type.map(|(name, _)| name.to_owned()).collect()
}

fn differences(what: &str, found: &BTreeSet<String>, listed: &BTreeSet<String>) -> Vec<String> {
    let missing = listed.difference(found).map(|name| {
        format!("{what} has no function `{name}`, which {LIST} promises to programs that use it")
    });
    let extra = found
        .difference(listed)
        .map(|name| format!("{what} has `{name}`, which is not in {LIST}: run `cargo xtask abi`"));
    missing.chain(extra).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn declarations_are_found_and_comments_and_macros_are_not() {
        let header = "/** Calls wm_other(1). */\n#define WM_X (wm_macro(2))\nuint32_t wm_version(void);\n\
                      /* wm_third(3) */ wm_status_t wm_open(uint32_t kind,\n  struct wm_backend_t *backend);\n";
        assert_eq!(declared(header), set(&["wm_open", "wm_version"]));
    }

    #[test]
    fn symbols_of_archives_and_libraries_are_read() {
        let listing = "lib.a[wholemem.o]:\nwm_open T 40 12\nrust_begin_unwind T 0 5\n\n";
        assert_eq!(symbols(listing), set(&["rust_begin_unwind", "wm_open"]));
    }

    #[test]
    fn removed_and_unlisted_functions_are_found() {
        assert_eq!(
            differences("x.so", &set(&["wm_a", "_ZN3abc"]), &set(&["wm_a", "wm_b"])),
            [
                "x.so has no function `wm_b`, which crates/capi/exports.txt promises to programs that use it",
                "x.so has `_ZN3abc`, which is not in crates/capi/exports.txt: run `cargo xtask abi`"
            ]
        );
        assert_eq!(differences("x.so", &set(&["wm_a"]), &set(&["wm_a"])), [] as [String; 0]);
    }
}
