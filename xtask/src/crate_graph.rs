//! The dependencies between the crates of the workspace, which point downwards only.
//!
//! ```text
//!   cli   capi   python        testkit
//!    |     |       |         (dev only; it may use
//!    +-----+---+---+          all below this line)
//!   -----------|---------------------------------
//!       +------+------+
//!   wholemem        store
//!       +------+------+
//!       |             |
//!      hal          comm
//!       +------+------+
//!              os                xtask: nothing
//! ```

use anyhow::Result;

use crate::metadata::{self, Kind, Member};
use crate::report;

/// Every crate, and the crates of the workspace it may depend on.
const ALLOWED: &[(&str, &[&str])] = &[
    ("wholemem-os", &[]),
    ("wholemem-hal", &["wholemem-os"]),
    ("wholemem-comm", &["wholemem-os"]),
    ("wholemem", &["wholemem-hal", "wholemem-comm", "wholemem-os"]),
    ("wholemem-store", &["wholemem-hal", "wholemem-comm", "wholemem-os"]),
    ("wholemem-cli", LIBRARIES),
    ("wholemem-capi", LIBRARIES),
    ("wholemem-python", LIBRARIES),
    (TESTKIT, &["wholemem", "wholemem-store", "wholemem-hal", "wholemem-comm", "wholemem-os", FAKE_CUDA]),
    (FAKE_CUDA, &[]),
    ("xtask", &[]),
];

const LIBRARIES: &[&str] = &["wholemem", "wholemem-store", "wholemem-hal", "wholemem-comm", "wholemem-os"];

/// The crate that tests may use, wherever they are.
const TESTKIT: &str = "wholemem-testkit";

/// The driver without a GPU, which only the testkit names.
const FAKE_CUDA: &str = "wholemem-fake-cuda";

pub(crate) fn check() -> Result<()> {
    let members = metadata::members()?;
    println!("{} crates", members.len());
    let ours: Vec<_> = members.iter().map(|member| member.name.as_str()).collect();
    report::no_findings(members.iter().flat_map(|member| forbidden(member, &ours)).collect())
}

/// The dependencies of one crate that the table does not allow. `ours` are the names of all crates in the workspace.
fn forbidden(member: &Member, ours: &[&str]) -> Vec<String> {
    let name = member.name.as_str();
    let Some((_, allowed)) = ALLOWED.iter().find(|(row, _)| *row == name) else {
        return vec![format!(
            "{name} has no row in the table of crates: add it to ALLOWED in xtask/src/crate_graph.rs"
        )];
    };
    let is_ours =
        |dependency: &str| ours.contains(&dependency) || ALLOWED.iter().any(|(row, _)| *row == dependency);
    member
        .dependencies
        .iter()
        .filter(|(to, _)| is_ours(to) && !allowed.contains(&to.as_str()))
        // Naming oneself is how a crate switches on its own features in its tests.
        .filter(|(to, kind)| !(*kind == Kind::Dev && (to == TESTKIT || to == name)))
        .map(|(to, kind)| {
            let how = if *kind == Kind::Dev { "dev-depends" } else { "depends" };
            let may =
                if allowed.is_empty() { "no crate of the workspace".to_owned() } else { allowed.join(", ") };
            format!("{name} {how} on {to}, but may depend only on {may}")
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(name: &str, dependencies: &[(&str, Kind)]) -> Vec<String> {
        let dependencies = dependencies.iter().map(|(to, kind)| ((*to).to_owned(), *kind)).collect();
        forbidden(&Member { name: name.to_owned(), dependencies }, &["wholemem-os", "wholemem-hal"])
    }

    #[test]
    fn a_dependency_that_points_upwards_is_found() {
        assert_eq!(
            findings("wholemem-hal", &[("wholemem-os", Kind::Build), ("wholemem-store", Kind::Build)]),
            ["wholemem-hal depends on wholemem-store, but may depend only on wholemem-os"]
        );
    }

    #[test]
    fn a_dependency_between_neighbours_is_found() {
        assert_eq!(
            findings("wholemem-comm", &[("wholemem-hal", Kind::Build)]),
            ["wholemem-comm depends on wholemem-hal, but may depend only on wholemem-os"]
        );
    }

    #[test]
    fn a_dev_dependency_that_points_upwards_is_found() {
        assert_eq!(
            findings("wholemem-os", &[("wholemem-hal", Kind::Dev)]),
            ["wholemem-os dev-depends on wholemem-hal, but may depend only on no crate of the workspace"]
        );
    }

    #[test]
    fn only_tests_may_use_the_testkit() {
        assert_eq!(findings("wholemem-hal", &[(TESTKIT, Kind::Dev)]), Vec::<String>::new());
        assert_eq!(
            findings("wholemem-hal", &[(TESTKIT, Kind::Build)]),
            ["wholemem-hal depends on wholemem-testkit, but may depend only on wholemem-os"]
        );
    }

    #[test]
    fn the_testkit_may_not_use_the_program() {
        let findings = findings(TESTKIT, &[("wholemem-hal", Kind::Build), ("wholemem-cli", Kind::Build)]);
        assert_eq!(findings.len(), 1);
        assert!(findings[0].starts_with("wholemem-testkit depends on wholemem-cli, but"), "{findings:?}");
    }

    #[test]
    fn a_crate_may_name_itself_in_its_tests() {
        assert_eq!(findings("wholemem-os", &[("wholemem-os", Kind::Dev)]), Vec::<String>::new());
    }

    #[test]
    fn dependencies_from_outside_the_workspace_are_not_checked() {
        assert_eq!(findings("wholemem-os", &[("rustix", Kind::Build)]), Vec::<String>::new());
    }

    #[test]
    fn a_crate_without_a_row_is_found() {
        assert_eq!(
            findings("wholemem-extra", &[]),
            [
                "wholemem-extra has no row in the table of crates: add it to ALLOWED in xtask/src/crate_graph.rs"
            ]
        );
    }

    #[test]
    fn the_table_itself_has_no_cycle() {
        let mut below: Vec<&str> = Vec::new();
        while below.len() < ALLOWED.len() {
            let ready: Vec<_> = ALLOWED
                .iter()
                .filter(|(name, allowed)| {
                    !below.contains(name) && allowed.iter().all(|to| below.contains(to))
                })
                .map(|(name, _)| *name)
                .collect();
            assert!(!ready.is_empty(), "a cycle among the crates other than {below:?}");
            below.extend(ready);
        }
    }
}
