//! Compares the symbols of the installed libraries with the functions in the committed list of the interface.
//!
//! A test of the crate compares the list with the header; a function is never removed from it.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::{command, report};

/// The committed list of the interface. Each function is a line that begins with the word `function`.
const LIST: &str = "crates/capi/interface.txt";

/// Compares the symbols that a library exports with the committed list.
pub(crate) fn compare(library: &Path) -> Result<()> {
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
    let functions = functions(&fs::read_to_string(LIST).with_context(|| format!("cannot read {LIST}"))?);
    ensure!(!functions.is_empty(), "{LIST} has no function");
    Ok(functions)
}

/// Returns the names of the functions in a list of the interface: the last word before the first opening parenthesis of a prototype.
fn functions(list: &str) -> BTreeSet<String> {
    let prototypes = list.lines().filter_map(|line| line.strip_prefix("function ")?.split_once('('));
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    prototypes
        .filter_map(|(before, _)| before.rsplit(|letter| !is_part(letter)).next())
        .map(str::to_owned)
        .collect()
}

/// Returns the names in the output of `nm --format=posix`: a name and its type on each line, below the name of each archive member.
fn symbols(listing: &str) -> BTreeSet<String> {
    let with_type = listing.lines().filter_map(|line| line.split_once(' '));
    with_type.map(|(name, _)| name.to_owned()).collect()
}

fn differences(what: &str, found: &BTreeSet<String>, listed: &BTreeSet<String>) -> Vec<String> {
    let missing =
        listed.difference(found).map(|name| format!("{what} has no function `{name}`, which is in {LIST}"));
    let extra =
        found.difference(listed).map(|name| format!("{what} exports `{name}`, which is not in {LIST}"));
    missing.chain(extra).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn functions_of_the_list_are_read() {
        let list = "constant WM_OK 0\nfunction const char *wm_last_error(void);\n\
                    function wm_status_t wm_graph_capture(wm_work_t (*work)(void *), void *data);\n";
        assert_eq!(functions(list), set(&["wm_graph_capture", "wm_last_error"]));
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
                "x.so has no function `wm_b`, which is in crates/capi/interface.txt",
                "x.so exports `_ZN3abc`, which is not in crates/capi/interface.txt"
            ]
        );
        assert_eq!(differences("x.so", &set(&["wm_a"]), &set(&["wm_a"])), [] as [String; 0]);
    }
}
