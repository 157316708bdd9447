//! The reference of the Python package: what its modules say of themselves, as Markdown.
//!
//! `reference.py` reads docstrings and stubs, by Python's own parser, and imports nothing: neither must the package be built,
//! nor must torch be there. The texts are made at every build, and none is committed.

use std::collections::BTreeMap;
use std::process::Command;

use anyhow::{Context, Result};

use super::contents;
use crate::command;

const READER: &str = "xtask/src/site/reference.py";
const PACKAGE: &str = "crates/python/python/wholemem";

/// The text of each module, by the path that its page has.
pub(crate) fn texts() -> Result<BTreeMap<String, String>> {
    let mut python = Command::new("python3");
    python.args([READER, PACKAGE]).args(contents::modules()).env("PYTHONDONTWRITEBYTECODE", "1");
    let said = command::capture(&mut python)?;
    let texts: BTreeMap<String, String> =
        serde_json::from_str(&said).context("what `reference.py` prints")?;
    Ok(texts.into_iter().map(|(module, text)| (format!("python/{module}.md"), text)).collect())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_reader_does_what_its_examples_say() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let mut python = Command::new("python3");
        python.args(["-m", "doctest", READER]).env("PYTHONDONTWRITEBYTECODE", "1").current_dir(root);
        assert_eq!(command::capture(&mut python).unwrap(), "");
    }
}
