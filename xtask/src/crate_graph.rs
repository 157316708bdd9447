//! The step `crate-graph`: checks that crates depend on lower crates only, and that the top modules of each crate have no import
//! cycles.
//!
//! ```text
//!   cli
//!   bench
//!   command capi python        testkit
//!    |     |       |         (dev only; it may use
//!    +-----+---+---+          all below this line)
//!   -----------|---------------------------------
//!       +------+------+
//!   wholemem        store
//!       +------+------+
//!       |             |
//!      hal          comm
//!       +------+------+
//!              os                xtask: none
//! ```
//!
//! Modules need no table of allowed imports: any imports without a cycle are accepted. [`module_graph`] defines what counts as an
//! import.

use std::env;

use anyhow::{Context, Result};

use crate::metadata::{self, DependencyKind, Package};
use crate::module_graph::Cycle;
use crate::{module_graph, report};

/// The crates of the workspace, each with the workspace crates that it may depend on.
const ALLOWED: &[(&str, &[&str])] = &[
    ("wholemem-os", &[]),
    ("wholemem-hal", &["wholemem-os"]),
    ("wholemem-comm", &["wholemem-os"]),
    ("wholemem", &["wholemem-hal", "wholemem-comm", "wholemem-os"]),
    ("wholemem-store", &["wholemem-hal", "wholemem-comm", "wholemem-os"]),
    ("wholemem-command", LIBRARIES),
    (
        "wholemem-bench",
        &["wholemem-command", "wholemem", "wholemem-store", "wholemem-hal", "wholemem-comm", "wholemem-os"],
    ),
    (
        "wholemem-cli",
        &[
            "wholemem-bench",
            "wholemem-command",
            "wholemem",
            "wholemem-store",
            "wholemem-hal",
            "wholemem-comm",
            "wholemem-os",
        ],
    ),
    ("wholemem-capi", LIBRARIES),
    ("wholemem-python", LIBRARIES),
    (TESTKIT, &["wholemem", "wholemem-store", "wholemem-hal", "wholemem-comm", "wholemem-os", FAKE_CUDA]),
    (FAKE_CUDA, &[]),
    ("xtask", &[]),
];

/// The crates whose top modules may have import cycles. The check fails if a listed crate has none.
const CYCLIC: &[&str] = &["wholemem-python", FAKE_CUDA];

const LIBRARIES: &[&str] = &["wholemem", "wholemem-store", "wholemem-hal", "wholemem-comm", "wholemem-os"];

/// The crate with test helpers, which every crate may use as a dev-dependency.
const TESTKIT: &str = "wholemem-testkit";

/// The crate with the fake CUDA driver, which only the testkit crate depends on.
const FAKE_CUDA: &str = "wholemem-fake-cuda";

pub(crate) fn check() -> Result<()> {
    let members = metadata::members()?;
    println!("{} crates", members.len());
    let ours: Vec<_> = members.iter().map(|member| member.name.as_str()).collect();
    let mut findings: Vec<_> = members.iter().flat_map(|member| forbidden(member, &ours)).collect();
    for member in &members {
        findings.extend(import_cycles(member)?);
    }
    report::no_findings(findings)
}

/// Returns the findings for import cycles of one crate. Prints the imports of each cycle unless the crate is listed in
/// `CYCLIC`.
fn import_cycles(member: &Package) -> Result<Vec<String>> {
    let here = env::current_dir().context("cannot read the current folder")?;
    let mut cycles = Vec::new();
    for root in &member.roots {
        cycles.extend(module_graph::cycles(root.strip_prefix(&here).unwrap_or(root))?);
    }
    let is_excluded = CYCLIC.contains(&member.name.as_str());
    for cycle in &cycles {
        let how = if is_excluded { "still import" } else { "import" };
        println!("{}: modules that {how} each other: {}", member.name, cycle.modules());
        if !is_excluded {
            print!("{cycle}");
        }
    }
    Ok(cycle_findings(&member.name, &cycles, is_excluded))
}

/// Returns the findings for a crate that has these import cycles.
fn cycle_findings(name: &str, cycles: &[Cycle], is_excluded: bool) -> Vec<String> {
    match cycles {
        [] if is_excluded => {
            vec![format!("{name} has no import cycle: remove it from CYCLIC in xtask/src/crate_graph.rs")]
        }
        _ if is_excluded => Vec::new(),
        cycles => {
            let finding = |cycle: &Cycle| format!("{name}: modules import each other: {}", cycle.modules());
            cycles.iter().map(finding).collect()
        }
    }
}

/// Returns the findings for dependencies of one crate that the table does not allow. `ours` are the names of all crates of the
/// workspace.
fn forbidden(member: &Package, ours: &[&str]) -> Vec<String> {
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
        // Ignores dev-dependencies on the testkit, and of a crate on itself, by which it enables its own features in its tests.
        .filter(|(to, kind)| !(*kind == DependencyKind::Dev && (to == TESTKIT || to == name)))
        .map(|(to, kind)| {
            let how = if *kind == DependencyKind::Dev { "dev-depends" } else { "depends" };
            let permitted =
                if allowed.is_empty() { "no crate of the workspace".to_owned() } else { allowed.join(", ") };
            format!("{name} {how} on {to}, but may depend only on {permitted}")
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(name: &str, dependencies: &[(&str, DependencyKind)]) -> Vec<String> {
        let dependencies = dependencies.iter().map(|(to, kind)| ((*to).to_owned(), *kind)).collect();
        forbidden(
            &Package {
                name: name.to_owned(),
                version: "1.0.0".to_owned(),
                licence: None,
                dependencies,
                roots: Vec::new(),
            },
            &["wholemem-os", "wholemem-hal"],
        )
    }

    #[test]
    fn a_dependency_that_points_upwards_is_found() {
        assert_eq!(
            findings(
                "wholemem-hal",
                &[("wholemem-os", DependencyKind::Build), ("wholemem-store", DependencyKind::Build)]
            ),
            ["wholemem-hal depends on wholemem-store, but may depend only on wholemem-os"]
        );
    }

    #[test]
    fn a_dependency_on_a_crate_of_the_same_layer_is_found() {
        assert_eq!(
            findings("wholemem-comm", &[("wholemem-hal", DependencyKind::Build)]),
            ["wholemem-comm depends on wholemem-hal, but may depend only on wholemem-os"]
        );
    }

    #[test]
    fn a_dev_dependency_that_points_upwards_is_found() {
        assert_eq!(
            findings("wholemem-os", &[("wholemem-hal", DependencyKind::Dev)]),
            ["wholemem-os dev-depends on wholemem-hal, but may depend only on no crate of the workspace"]
        );
    }

    #[test]
    fn only_tests_may_use_the_testkit() {
        assert_eq!(findings("wholemem-hal", &[(TESTKIT, DependencyKind::Dev)]), Vec::<String>::new());
        assert_eq!(
            findings("wholemem-hal", &[(TESTKIT, DependencyKind::Build)]),
            ["wholemem-hal depends on wholemem-testkit, but may depend only on wholemem-os"]
        );
    }

    #[test]
    fn the_testkit_may_not_use_the_program() {
        let findings = findings(
            TESTKIT,
            &[("wholemem-hal", DependencyKind::Build), ("wholemem-cli", DependencyKind::Build)],
        );
        assert_eq!(findings.len(), 1);
        assert!(findings[0].starts_with("wholemem-testkit depends on wholemem-cli, but"), "{findings:?}");
    }

    #[test]
    fn a_crate_may_dev_depend_on_itself() {
        assert_eq!(findings("wholemem-os", &[("wholemem-os", DependencyKind::Dev)]), Vec::<String>::new());
    }

    #[test]
    fn dependencies_from_outside_the_workspace_are_not_checked() {
        assert_eq!(findings("wholemem-os", &[("rustix", DependencyKind::Build)]), Vec::<String>::new());
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
    fn a_cycle_is_found_unless_the_crate_is_excluded() {
        let cycles = [Cycle::new(&["a", "b"]), Cycle::new(&["c", "d"])];
        let expected = ["ours: modules import each other: a, b", "ours: modules import each other: c, d"];
        assert_eq!(cycle_findings("ours", &cycles, false), expected);
        assert_eq!(cycle_findings("ours", &cycles, true), Vec::<String>::new());
        assert_eq!(cycle_findings("ours", &[], false), Vec::<String>::new());
    }

    #[test]
    fn an_excluded_crate_without_a_cycle_is_found() {
        assert_eq!(
            cycle_findings("ours", &[], true),
            ["ours has no import cycle: remove it from CYCLIC in xtask/src/crate_graph.rs"]
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
            assert!(!ready.is_empty(), "ALLOWED has a cycle among the crates that are not in {below:?}");
            below.extend(ready);
        }
    }
}
