//! The step `licences`: checks that the licence of every dependency allows distribution under MIT or Apache-2.0.
//!
//! cargo-deny is not available prebuilt for current versions of cargo, and takes 159 s of CPU time to compile. The crate `spdx`
//! of the same authors parses the licence expressions.

use std::fs;

use anyhow::Result;
use spdx::{Expression, ParseMode};

use crate::metadata::{self, Package};
use crate::report;

/// The allowed licences of dependencies. They require at most that their text is distributed with the program.
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

/// Dependencies of xtask alone, which may have other licences. Shipped packages do not contain them.
const TOOLS: &[(&str, &str)] = &[("cbindgen", "MPL-2.0")];

/// The files with the licences of this project.
const OWN_LICENCES: &[&str] = &["LICENSE-MIT", "LICENSE-APACHE"];

pub(crate) fn check() -> Result<()> {
    let packages = metadata::packages()?;
    println!("{} packages", packages.len());
    let mut findings = disallowed(&packages);
    for name in OWN_LICENCES {
        match fs::read_to_string(name) {
            Ok(text) if text.trim().is_empty() => findings.push(format!("{name} is empty")),
            Ok(_) => {}
            Err(error) => findings.push(format!("cannot read {name}: {error}")),
        }
    }
    report::no_findings(findings)
}

/// Returns a finding for each package with a disallowed licence.
fn disallowed(packages: &[Package]) -> Vec<String> {
    let mut findings = Vec::new();
    for package in packages {
        let reason = match package.licence.as_deref() {
            None => "names no licence".to_owned(),
            Some(licence)
                if TOOLS.contains(&(&package.name, licence)) && is_tool(&package.name, packages) =>
            {
                continue;
            }
            Some(licence) => match is_allowed(licence) {
                Ok(true) => continue,
                Ok(false) => {
                    format!("is under `{licence}`, which the list in xtask/src/licences.rs does not allow")
                }
                Err(error) => format!("has the malformed licence `{licence}`: {}", error.reason),
            },
        };
        let Package { name, version, .. } = package;
        findings.push(format!("{name} {version} {reason} (see `cargo tree --invert {name} --target all`)"));
    }
    findings
}

/// Returns true if a licence expression can be satisfied with allowed licences. Old manifests write `/` for `OR`.
fn is_allowed(licence: &str) -> Result<bool, spdx::ParseError> {
    let mode = ParseMode { allow_slash_as_or_operator: true, ..ParseMode::STRICT };
    let expression = Expression::parse_mode(licence, mode)?;
    Ok(expression.evaluate(|required| ALLOWED.contains(&required.to_string().as_str())))
}

/// Returns true if only xtask depends on a package.
fn is_tool(name: &str, packages: &[Package]) -> bool {
    let mut dependents =
        packages.iter().filter(|package| package.dependencies.iter().any(|(needed, _)| needed == name));
    dependents.all(|dependent| dependent.name == "xtask")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::DependencyKind;

    fn package(name: &str, licence: Option<&str>, needed: &[&str]) -> Package {
        Package {
            name: name.to_owned(),
            version: "1.2.3".to_owned(),
            licence: licence.map(str::to_owned),
            dependencies: needed.iter().map(|name| ((*name).to_owned(), DependencyKind::Build)).collect(),
            roots: Vec::new(),
        }
    }

    #[test]
    fn expressions_are_evaluated_against_the_allowed_licences() {
        for (licence, expected) in [
            ("(MIT OR Apache-2.0) AND Unicode-3.0", true),
            ("MIT/Apache-2.0", true),
            ("GPL-2.0-only OR Apache-2.0 WITH LLVM-exception", true),
            ("MIT WITH LLVM-exception", false),
            ("MIT AND GPL-3.0-only", false),
            ("GPL-3.0-only", false),
        ] {
            assert_eq!(is_allowed(licence), Ok(expected), "{licence}");
        }
    }

    #[test]
    fn packages_with_disallowed_licences_are_found() {
        for (licence, reason) in [
            (Some("MPL-2.0"), "is under `MPL-2.0`, which the list in xtask/src/licences.rs does not allow"),
            (Some("MIT OR"), "has the malformed licence `MIT OR`: expected one of `<license>`, `(` here"),
            (None, "names no licence"),
        ] {
            assert_eq!(
                disallowed(&[package("theirs", licence, &[])]),
                [format!("theirs 1.2.3 {reason} (see `cargo tree --invert theirs --target all`)")]
            );
        }
    }

    #[test]
    fn a_tool_licence_is_allowed_for_dependencies_of_xtask_only() {
        let packages = |dependent| {
            [package(dependent, Some("MIT"), &["cbindgen"]), package("cbindgen", Some("MPL-2.0"), &[])]
        };
        assert_eq!(disallowed(&packages("xtask")), Vec::<String>::new());
        assert_eq!(disallowed(&packages("wholemem")).len(), 1);
    }
}
