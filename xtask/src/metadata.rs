//! What cargo knows about the packages: their names, licences and dependencies.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::PathBuf;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::command;

/// How one package depends on another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Needed to build the package, or its build script.
    Build,
    /// Needed by its tests, examples and benches only.
    Dev,
}

/// A crate of this workspace, with the names its manifest depends on.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) name: String,
    pub(crate) dependencies: Vec<(String, Kind)>,
    /// The root files of its library and its programs.
    pub(crate) roots: Vec<PathBuf>,
}

/// A package somewhere in the resolved graph.
#[derive(Debug)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) licence: Option<String>,
}

/// Every package that cargo may build for us, on any platform, and who depends on whom.
#[derive(Debug, Default)]
pub(crate) struct Graph {
    pub(crate) packages: BTreeMap<String, Package>,
    pub(crate) dependencies: BTreeMap<String, Vec<String>>,
    pub(crate) members: BTreeSet<String>,
}

impl Graph {
    /// A shortest way from a crate of the workspace to a package, as `ours 0.1.0 -> theirs 2.0.1`.
    pub(crate) fn way_to(&self, id: &str) -> String {
        let mut from: BTreeMap<&str, &str> = BTreeMap::new();
        let mut next: VecDeque<&str> = self.members.iter().map(String::as_str).collect();
        while let Some(at) = next.pop_front() {
            if at == id {
                break;
            }
            for dependency in self.dependencies.get(at).into_iter().flatten() {
                if !self.members.contains(dependency) && !from.contains_key(dependency.as_str()) {
                    from.insert(dependency, at);
                    next.push_back(dependency);
                }
            }
        }
        let mut way = vec![self.label(id)];
        let mut at = id;
        while let Some(&before) = from.get(at) {
            way.push(self.label(before));
            at = before;
        }
        way.reverse();
        way.join(" -> ")
    }

    fn label(&self, id: &str) -> String {
        match self.packages.get(id) {
            Some(package) => format!("{} {}", package.name, package.version),
            None => id.to_owned(),
        }
    }
}

/// The crates of the workspace.
pub(crate) fn members() -> Result<Vec<Member>> {
    read_members(&ask(&["--no-deps"])?).context("cannot read what cargo metadata wrote")
}

/// The whole resolved graph.
pub(crate) fn graph() -> Result<Graph> {
    read_graph(&ask(&[])?).context("cannot read what cargo metadata wrote")
}

/// Where cargo builds.
pub(crate) fn target_folder() -> Result<PathBuf> {
    let metadata = ask(&["--no-deps"])?;
    metadata["target_directory"]
        .as_str()
        .map(PathBuf::from)
        .context("cargo metadata names no target directory")
}

fn ask(arguments: &[&str]) -> Result<Value> {
    let mut cargo = command::cargo();
    cargo.args(["metadata", "--format-version", "1", "--locked"]).args(arguments);
    serde_json::from_str(&command::capture(&mut cargo)?).context("cargo metadata did not write JSON")
}

/// The kinds of targets that are no tests, examples, benches or build scripts.
const SHIPPED: &[&str] = &["lib", "rlib", "dylib", "cdylib", "staticlib", "proc-macro", "bin"];

fn read_members(metadata: &Value) -> Option<Vec<Member>> {
    let mut members = Vec::new();
    for package in metadata["packages"].as_array()? {
        let mut dependencies = Vec::new();
        for dependency in package["dependencies"].as_array()? {
            let kind = if dependency["kind"] == "dev" { Kind::Dev } else { Kind::Build };
            dependencies.push((dependency["name"].as_str()?.to_owned(), kind));
        }
        let mut roots = Vec::new();
        for target in package["targets"].as_array()? {
            if strings(&target["kind"])?.iter().any(|kind| SHIPPED.contains(&kind.as_str())) {
                roots.push(PathBuf::from(target["src_path"].as_str()?));
            }
        }
        members.push(Member { name: package["name"].as_str()?.to_owned(), dependencies, roots });
    }
    Some(members)
}

fn read_graph(metadata: &Value) -> Option<Graph> {
    let mut graph = Graph::default();
    for package in metadata["packages"].as_array()? {
        let read = Package {
            name: package["name"].as_str()?.to_owned(),
            version: package["version"].as_str()?.to_owned(),
            licence: package["license"].as_str().map(str::to_owned),
        };
        graph.packages.insert(package["id"].as_str()?.to_owned(), read);
    }
    for node in metadata["resolve"]["nodes"].as_array()? {
        graph.dependencies.insert(node["id"].as_str()?.to_owned(), strings(&node["dependencies"])?);
    }
    graph.members = strings(&metadata["workspace_members"])?.into_iter().collect();
    Some(graph)
}

fn strings(list: &Value) -> Option<Vec<String>> {
    list.as_array()?.iter().map(|item| item.as_str().map(str::to_owned)).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn build_scripts_count_as_building_and_dev_dependencies_do_not() {
        let metadata = json!({"packages": [{"name": "ours", "targets": [], "dependencies": [
            {"name": "normal", "kind": null}, {"name": "script", "kind": "build"}, {"name": "test", "kind": "dev"},
        ]}]});
        let members = read_members(&metadata).unwrap();
        assert_eq!(members[0].name, "ours");
        let expected = [("normal", Kind::Build), ("script", Kind::Build), ("test", Kind::Dev)];
        assert_eq!(members[0].dependencies, expected.map(|(name, kind)| (name.to_owned(), kind)));
    }

    #[test]
    fn libraries_and_programs_are_roots_and_tests_are_not() {
        let target = |kind: &[&str], file: &str| json!({"kind": kind, "src_path": file});
        let targets = [
            target(&["cdylib", "rlib"], "src/lib.rs"),
            target(&["test"], "tests/a.rs"),
            target(&["bin"], "src/main.rs"),
            target(&["custom-build"], "build.rs"),
        ];
        let metadata = json!({"packages": [{"name": "ours", "dependencies": [], "targets": targets}]});
        let members = read_members(&metadata).unwrap();
        assert_eq!(members[0].roots, ["src/lib.rs", "src/main.rs"].map(PathBuf::from));
    }

    #[test]
    fn metadata_without_a_resolved_graph_is_refused() {
        let metadata = json!({"packages": [], "resolve": null, "workspace_members": []});
        assert!(read_graph(&metadata).is_none());
    }

    #[test]
    fn the_way_to_a_package_is_a_shortest_one_from_our_crates() {
        let package = |id: &str| json!({"id": id, "name": id, "version": "1.0.0", "license": null});
        let node = |id: &str, dependencies: &[&str]| json!({"id": id, "dependencies": dependencies});
        let metadata = json!({
            "packages": [package("ours"), package("near"), package("far"), package("deep")],
            "resolve": {"nodes": [
                node("ours", &["far", "near"]), node("far", &["middle"]), node("middle", &["deep"]),
                node("near", &["deep"]), node("deep", &[]),
            ]},
            "workspace_members": ["ours"],
        });
        let graph = read_graph(&metadata).unwrap();
        assert_eq!(graph.way_to("deep"), "ours 1.0.0 -> near 1.0.0 -> deep 1.0.0");
        assert_eq!(graph.way_to("ours"), "ours 1.0.0");
    }
}
