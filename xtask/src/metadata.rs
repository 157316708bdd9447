//! Reads the packages, their licences and their dependencies from `cargo metadata`.

use std::path::PathBuf;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::command;

/// How one package depends on another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DependencyKind {
    /// A normal or build dependency.
    Build,
    /// A dependency of tests, examples and benches.
    Dev,
}

/// A package of the workspace or a dependency, with the names of the packages that its manifest depends on.
#[derive(Debug)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) licence: Option<String>,
    pub(crate) dependencies: Vec<(String, DependencyKind)>,
    /// The root source files of the package's library and programs.
    pub(crate) roots: Vec<PathBuf>,
}

/// Reads the crates of the workspace.
pub(crate) fn members() -> Result<Vec<Package>> {
    read(&query(&["--no-deps"])?).context("the output of cargo metadata lacks expected fields")
}

/// Reads every package that cargo may build for the workspace, on any platform.
pub(crate) fn packages() -> Result<Vec<Package>> {
    read(&query(&[])?).context("the output of cargo metadata lacks expected fields")
}

fn query(arguments: &[&str]) -> Result<Value> {
    let mut cargo = command::cargo();
    cargo.args(["metadata", "--format-version", "1", "--locked"]).args(arguments);
    serde_json::from_str(&command::capture(&mut cargo)?).context("cargo metadata did not write JSON")
}

/// The kinds of cargo targets that are libraries or programs.
const ROOT_KINDS: &[&str] = &["lib", "rlib", "dylib", "cdylib", "staticlib", "proc-macro", "bin"];

fn read(metadata: &Value) -> Option<Vec<Package>> {
    let mut packages = Vec::new();
    for package in metadata["packages"].as_array()? {
        let mut dependencies = Vec::new();
        for dependency in package["dependencies"].as_array()? {
            let kind = if dependency["kind"] == "dev" { DependencyKind::Dev } else { DependencyKind::Build };
            dependencies.push((dependency["name"].as_str()?.to_owned(), kind));
        }
        let mut roots = Vec::new();
        for target in package["targets"].as_array()? {
            if target["kind"]
                .as_array()?
                .iter()
                .any(|kind| ROOT_KINDS.iter().any(|root_kind| kind == root_kind))
            {
                roots.push(PathBuf::from(target["src_path"].as_str()?));
            }
        }
        packages.push(Package {
            name: package["name"].as_str()?.to_owned(),
            version: package["version"].as_str()?.to_owned(),
            licence: package["license"].as_str().map(str::to_owned),
            dependencies,
            roots,
        });
    }
    Some(packages)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn normal_and_build_dependencies_differ_from_dev_dependencies() {
        let metadata = json!({"packages": [{"name": "ours", "version": "1.0.0", "targets": [], "dependencies": [
            {"name": "normal", "kind": null}, {"name": "script", "kind": "build"}, {"name": "test", "kind": "dev"},
        ]}]});
        let packages = read(&metadata).unwrap();
        assert_eq!(packages[0].name, "ours");
        let expected = [
            ("normal", DependencyKind::Build),
            ("script", DependencyKind::Build),
            ("test", DependencyKind::Dev),
        ];
        assert_eq!(packages[0].dependencies, expected.map(|(name, kind)| (name.to_owned(), kind)));
    }

    #[test]
    fn only_libraries_and_programs_are_roots() {
        let target = |kind: &[&str], file: &str| json!({"kind": kind, "src_path": file});
        let targets = [
            target(&["cdylib", "rlib"], "src/lib.rs"),
            target(&["test"], "tests/a.rs"),
            target(&["bin"], "src/main.rs"),
            target(&["custom-build"], "build.rs"),
        ];
        let package = json!({"name": "ours", "version": "1.0.0", "dependencies": [], "targets": targets});
        let packages = read(&json!({"packages": [package]})).unwrap();
        assert_eq!(packages[0].roots, ["src/lib.rs", "src/main.rs"].map(PathBuf::from));
    }
}
