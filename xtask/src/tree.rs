//! The working tree before and after a run: tests must leave nothing in it.

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::{Result, anyhow};

use crate::{command, report};

/// What git has to say about the working tree: one line for every file that differs from the last commit.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Tree {
    lines: BTreeSet<String>,
}

impl Tree {
    pub(crate) fn look() -> Result<Self> {
        // Without every single file, a new file in a folder that is itself untracked would not show.
        let status = ["status", "--porcelain", "--untracked-files=all"];
        let lines = command::capture(Command::new("git").args(status))?;
        Ok(Self { lines: lines.lines().map(str::to_owned).collect() })
    }

    fn changes_to(&self, after: &Self) -> Vec<String> {
        let appeared = after.lines.difference(&self.lines).map(|line| format!("now `{line}`"));
        let vanished = self.lines.difference(&after.lines).map(|line| format!("no more `{line}`"));
        appeared.chain(vanished).collect()
    }
}

pub(crate) fn check(before: &Result<Tree>) -> Result<()> {
    let before = before.as_ref().map_err(|error| anyhow!("{error:#}").context("cannot look at the tree"))?;
    report::no_findings(before.changes_to(&Tree::look()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(lines: &[&str]) -> Tree {
        Tree { lines: lines.iter().map(|line| (*line).to_owned()).collect() }
    }

    #[test]
    fn a_tree_that_was_dirty_before_may_stay_so() {
        let before = tree(&[" M README.md", "?? notes.txt"]);
        assert_eq!(before.changes_to(&before), Vec::<String>::new());
    }

    #[test]
    fn files_that_appear_change_or_vanish_are_found() {
        let before = tree(&["?? notes.txt"]);
        let after = tree(&[" M Cargo.lock", "?? proptest-regressions/a.txt"]);
        assert_eq!(
            before.changes_to(&after),
            ["now ` M Cargo.lock`", "now `?? proptest-regressions/a.txt`", "no more `?? notes.txt`"]
        );
    }

    #[test]
    fn a_tree_that_could_not_be_looked_at_is_a_failure() {
        let error = check(&Err(anyhow!("cannot start git"))).unwrap_err();
        assert_eq!(format!("{error:#}"), "cannot look at the tree: cannot start git");
    }
}
