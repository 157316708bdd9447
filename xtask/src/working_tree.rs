//! The step `clean-tree`: compares the working tree before and after a run, because tests must not leave files in it.

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::{Result, anyhow};

use crate::{command, report};

/// The output of `git status`, with one line for each file that differs from the last commit.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct WorkingTree {
    lines: BTreeSet<String>,
}

impl WorkingTree {
    pub(crate) fn read_status() -> Result<Self> {
        // `--untracked-files=all` lists the files in untracked folders too; otherwise a new file in such a folder would be
        // missed.
        let status = ["status", "--porcelain", "--untracked-files=all"];
        let lines = command::capture(Command::new("git").args(status))?;
        Ok(Self { lines: lines.lines().map(str::to_owned).collect() })
    }

    fn changes_to(&self, after: &Self) -> Vec<String> {
        let added = after.lines.difference(&self.lines).map(|line| format!("new in `git status`: `{line}`"));
        let removed =
            self.lines.difference(&after.lines).map(|line| format!("no longer in `git status`: `{line}`"));
        added.chain(removed).collect()
    }
}

pub(crate) fn check(before: &Result<WorkingTree>) -> Result<()> {
    let before = before
        .as_ref()
        .map_err(|error| anyhow!("{error:#}").context("cannot read the state of the working tree"))?;
    report::no_findings(before.changes_to(&WorkingTree::read_status()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(lines: &[&str]) -> WorkingTree {
        WorkingTree { lines: lines.iter().map(|line| (*line).to_owned()).collect() }
    }

    #[test]
    fn files_that_were_changed_before_the_run_are_ignored() {
        let before = tree(&[" M README.md", "?? notes.txt"]);
        assert_eq!(before.changes_to(&before), Vec::<String>::new());
    }

    #[test]
    fn added_changed_and_removed_files_are_reported() {
        let before = tree(&["?? notes.txt"]);
        let after = tree(&[" M Cargo.lock", "?? proptest-regressions/a.txt"]);
        assert_eq!(
            before.changes_to(&after),
            [
                "new in `git status`: ` M Cargo.lock`",
                "new in `git status`: `?? proptest-regressions/a.txt`",
                "no longer in `git status`: `?? notes.txt`"
            ]
        );
    }

    #[test]
    fn an_unreadable_working_tree_is_an_error() {
        let error = check(&Err(anyhow!("cannot start git"))).unwrap_err();
        assert_eq!(format!("{error:#}"), "cannot read the state of the working tree: cannot start git");
    }
}
