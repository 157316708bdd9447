//! The licences of everything we build with: each must let us ship it under MIT or Apache-2.0.

use std::fs;

use anyhow::Result;

use crate::metadata::{self, Graph};
use crate::{report, spdx};

/// Licences that ask for no more than their text beside the program.
const ALLOWED: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Tools that only xtask depends on, and their licences: nothing that ships contains them.
const TOOLS: &[(&str, &str)] = &[("cbindgen", "MPL-2.0")];

/// The texts of our own licences.
const OURS: &[&str] = &["LICENSE-MIT", "LICENSE-APACHE"];

pub(crate) fn check() -> Result<()> {
    let graph = metadata::graph()?;
    println!("{} packages", graph.packages.len());
    let mut findings = refused(&graph);
    for name in OURS {
        match fs::read_to_string(name) {
            Ok(text) if text.trim().is_empty() => findings.push(format!("{name} is empty")),
            Ok(_) => {}
            Err(error) => findings.push(format!("cannot read {name}: {error}")),
        }
    }
    report::no_findings(findings)
}

/// The packages that we may not ship, and who brings them.
fn refused(graph: &Graph) -> Vec<String> {
    let mut findings = Vec::new();
    for (id, package) in &graph.packages {
        let reason = match package.licence.as_deref() {
            None => "names no licence".to_owned(),
            Some(licence) if TOOLS.contains(&(&package.name, licence)) && is_tool(graph, id) => continue,
            Some(licence) => match spdx::satisfiable(licence, ALLOWED) {
                Ok(true) => continue,
                Ok(false) => {
                    format!("is under `{licence}`, which the list in xtask/src/licences.rs does not allow")
                }
                Err(malformed) => format!("has the malformed licence `{licence}`, which {malformed}"),
            },
        };
        findings.push(format!("{} {} {reason} (by {})", package.name, package.version, graph.way_to(id)));
    }
    findings
}

/// Whether xtask alone depends on a package.
fn is_tool(graph: &Graph, id: &str) -> bool {
    let mut dependents = graph.dependencies.iter().filter(|(_, all)| all.iter().any(|one| one == id));
    dependents
        .all(|(dependent, _)| graph.packages.get(dependent).is_some_and(|package| package.name == "xtask"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::Package;

    fn graph(licence: Option<&str>) -> Graph {
        let package = |name: &str, licence: Option<&str>| Package {
            name: name.to_owned(),
            version: "1.2.3".to_owned(),
            licence: licence.map(str::to_owned),
        };
        Graph {
            packages: [
                ("ours".to_owned(), package("ours", Some("MIT OR Apache-2.0"))),
                ("theirs".to_owned(), package("theirs", licence)),
            ]
            .into(),
            dependencies: [("ours".to_owned(), vec!["theirs".to_owned()])].into(),
            members: ["ours".to_owned()].into(),
        }
    }

    #[test]
    fn an_allowed_licence_is_no_finding() {
        assert_eq!(refused(&graph(Some("(MIT OR Apache-2.0) AND Unicode-3.0"))), Vec::<String>::new());
    }

    #[test]
    fn a_licence_off_the_list_is_found_with_who_brings_it() {
        assert_eq!(
            refused(&graph(Some("GPL-3.0-only"))),
            ["theirs 1.2.3 is under `GPL-3.0-only`, which the list in xtask/src/licences.rs does not allow \
              (by ours 1.2.3 -> theirs 1.2.3)"]
        );
    }

    #[test]
    fn a_tool_may_have_its_own_licence_for_xtask_alone() {
        let graph = |dependent: &str| {
            let mut graph = graph(Some("MPL-2.0"));
            for (id, name) in [("ours", dependent), ("theirs", "cbindgen")] {
                name.clone_into(&mut graph.packages.get_mut(id).unwrap().name);
            }
            graph
        };
        assert_eq!(refused(&graph("xtask")), Vec::<String>::new());
        assert_eq!(
            refused(&graph("wholemem")),
            ["cbindgen 1.2.3 is under `MPL-2.0`, which the list in xtask/src/licences.rs does not allow \
              (by wholemem 1.2.3 -> cbindgen 1.2.3)"]
        );
    }

    #[test]
    fn a_package_without_a_licence_is_found() {
        assert_eq!(refused(&graph(None)), ["theirs 1.2.3 names no licence (by ours 1.2.3 -> theirs 1.2.3)"]);
    }

    #[test]
    fn a_malformed_licence_is_found() {
        assert_eq!(
            refused(&graph(Some("MIT OR"))),
            ["theirs 1.2.3 has the malformed licence `MIT OR`, which ends where a licence should stand \
              (by ours 1.2.3 -> theirs 1.2.3)"]
        );
    }
}
