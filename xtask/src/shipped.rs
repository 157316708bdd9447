//! The step `shipped`: checks that the program, the C library and the Python package contain no test hooks.
//!
//! Two checks are made, because each alone can miss a hook. cargo's JSON messages list the features that each crate was built
//! with, which shows an enabled feature even if the linker removed its code. The unstripped artefacts are searched for symbols of
//! hook modules and for test PTX, which shows hooks that were compiled in without a feature.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::{command, report, source_rules};

/// The shipped packages, each with the features of workspace crates that may be enabled in its build.
const SHIPPED_PACKAGES: &[(&str, &[&str])] =
    &[("wholemem-cli", &["wholemem-hal/bench"]), ("wholemem-capi", &[]), ("wholemem-python", &[])];

/// Modules that exist for tests only, as paths that begin with the crate.
const HOOK_MODULES: &[&[&str]] = &[
    &["wholemem_os", "fault"],
    &["wholemem_comm", "fuzz"],
    &["wholemem_store", "fuzz"],
    &["wholemem", "cpu", "call", "hooks", "enabled"],
    &["wholemem", "collective", "hooks", "enabled"],
    &["wholemem_testkit"],
];

/// A module that every shipped artefact contains. If its symbols are missing, the artefact has no symbol table.
const ALWAYS_PRESENT: &[&str] = &["wholemem_os", "futex"];

/// The paths of PTX files that only tests load.
const TEST_PTX: [&str; 2] =
    ["crates/testkit/kernels/ptx/", "crates/wholemem/kernels/ptx/collective.testing.ptx"];

pub(crate) fn check() -> Result<()> {
    let ptx = test_ptx()?;
    let mut findings = Vec::new();
    for (package, allowed) in SHIPPED_PACKAGES {
        let mut build = command::cargo();
        build.args(["build", "--release", "--locked", "--message-format=json", "--package", package]);
        let messages = command::capture(&mut build)?;
        let messages: Vec<Value> =
            messages.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        findings.extend(forbidden_features(&messages, package, allowed));
        let artefact =
            artefact(&messages, package).with_context(|| format!("cargo built no artefact of {package}"))?;
        let bytes = fs::read(&artefact).with_context(|| format!("cannot read {}", artefact.display()))?;
        println!("{}: {} bytes, unstripped", artefact.display(), bytes.len());
        ensure!(has_symbols_of(&bytes, ALWAYS_PRESENT), "{} has no symbol table", artefact.display());
        findings
            .extend(find_hooks(&bytes, &ptx).into_iter().map(|found| format!("{package} contains {found}")));
    }
    report::no_findings(findings)
}

/// Returns the PTX files of tests, each with a prefix of its text that no other PTX file contains.
fn test_ptx() -> Result<Vec<(String, Vec<u8>)>> {
    let (mut tests, mut others) = (Vec::new(), Vec::new());
    for path in source_rules::tracked()?.into_iter().filter(|path| path.ends_with(".ptx")) {
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        if TEST_PTX.iter().any(|prefix| path.starts_with(prefix)) {
            tests.push((path, text));
        } else {
            others.push(text);
        }
    }
    ensure!(!tests.is_empty() && !others.is_empty(), "git lists no test PTX, or no shipped PTX");
    let own = |(path, text): (String, String)| {
        let own = unique_prefix(&text, &others);
        ensure!(!own.is_empty(), "no prefix of {path} is unique among the PTX files");
        Ok((path, own.into_bytes()))
    };
    tests.into_iter().map(own).collect()
}

/// Returns the shortest sequence of first lines of a text that no other text contains.
fn unique_prefix(text: &str, others: &[String]) -> String {
    let ends = text.match_indices('\n').map(|(at, _)| at + 1);
    let own = ends.map(|end| &text[..end]).find(|lines| !others.iter().any(|other| other.contains(lines)));
    own.unwrap_or_default().to_owned()
}

/// Returns the enabled features of workspace crates that are not allowed in a build.
fn forbidden_features(messages: &[Value], package: &str, allowed: &[&str]) -> Vec<String> {
    let mut findings = Vec::new();
    for message in messages.iter().filter(|message| message["reason"] == "compiler-artifact") {
        let Some(name) = message["target"]["name"].as_str().map(|name| name.replace('_', "-")) else {
            continue;
        };
        // cargo's ids of workspace packages begin with `path+file:`.
        let is_in_workspace = message["package_id"].as_str().is_some_and(|id| id.starts_with("path+file:"));
        let on = message["features"].as_array().into_iter().flatten().filter_map(Value::as_str);
        for feature in on.map(|feature| format!("{name}/{feature}")) {
            if is_in_workspace && !allowed.contains(&feature.as_str()) {
                findings.push(format!("{package} is built with the feature {feature}"));
            }
        }
    }
    findings
}

/// Returns the path of the file that cargo built for a package: a program, or a library that Python loads.
fn artefact(messages: &[Value], package: &str) -> Option<PathBuf> {
    let of_package = messages.iter().filter(|message| {
        message["reason"] == "compiler-artifact"
            && message["manifest_path"].as_str().map(Path::new).and_then(Path::parent).is_some_and(|folder| {
                folder.file_name().is_some_and(|name| format!("wholemem-{}", name.display()) == package)
            })
    });
    of_package
        .flat_map(|message| {
            let libraries = message["filenames"].as_array().into_iter().flatten().filter_map(Value::as_str);
            message["executable"].as_str().into_iter().chain(libraries.filter(|file| file.ends_with(".so")))
        })
        .map(PathBuf::from)
        .next()
}

/// Returns the test hooks in a shipped artefact, which are found by their symbols and by their PTX.
fn find_hooks(bytes: &[u8], ptx: &[(String, Vec<u8>)]) -> Vec<String> {
    let symbols = HOOK_MODULES.iter().filter(|module| has_symbols_of(bytes, module));
    let symbols = symbols.map(|module| format!("symbols of {}", module.join("::")));
    let texts = ptx.iter().filter(|(_, text)| contains(bytes, text)).map(|(path, _)| path.clone());
    symbols.chain(texts).collect()
}

/// Returns true if the bytes of an artefact contain a symbol of a module. Both Rust manglings write each name after its length.
fn has_symbols_of(bytes: &[u8], module: &[&str]) -> bool {
    let mangled: String = module.iter().map(|name| format!("{}{name}", name.len())).collect();
    contains(bytes, mangled.as_bytes())
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    let Some((first, rest)) = part.split_first() else { return true };
    let starts = bytes.iter().enumerate().filter(|(_, byte)| *byte == first).map(|(at, _)| at + 1);
    starts.into_iter().any(|at| bytes[at..].starts_with(rest))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Checks that the listed modules exist: if a module is renamed, the search for symbols of its old name always passes.
    #[test]
    fn hook_modules_exist() {
        for module in HOOK_MODULES.iter().filter(|module| module.len() > 1) {
            let (folder, rest) = (module[0].trim_start_matches("wholemem_"), &module[1..]);
            let (name, parents) = rest.split_last().unwrap();
            let source = Path::new("../crates").join(folder).join("src");
            let file = match parents {
                [] => source.join("lib.rs"),
                parents => source.join(parents.join("/")).with_extension("rs"),
            };
            let text = fs::read_to_string(&file).unwrap();
            assert!(text.contains(&format!("mod {name}")), "{} has no module {name}", file.display());
        }
    }

    #[test]
    fn hook_symbols_are_found_in_both_manglings() {
        let legacy = b"\0_ZN11wholemem_os5fault4pass17h0123456789abcdefE\0";
        let v0 = b"\0_RNvMs_NtNtNtNtCs1_8wholemem3cpu4call5hooks7enabledNtB6_14CollectiveCall5delay\0";
        assert_eq!(find_hooks(legacy, &[]), ["symbols of wholemem_os::fault"]);
        assert_eq!(find_hooks(v0, &[]), ["symbols of wholemem::cpu::call::hooks::enabled"]);
    }

    #[test]
    fn other_symbols_are_not_hooks() {
        let others = b"_ZN13wholemem_comm5fault5Fault17hE _ZN8wholemem3cpu4call14CollectiveCall5begin17hE";
        assert_eq!(find_hooks(others, &[]), Vec::<String>::new());
        assert!(!has_symbols_of(others, ALWAYS_PRESENT));
    }

    #[test]
    fn test_ptx_is_found_by_a_prefix_that_no_shipped_ptx_contains() {
        let own = unique_prefix("// same\nentry a\nentry b\n", &["// same\nentry b\n".to_owned()]);
        assert_eq!(own, "// same\nentry a\n");
        let ptx = [("a.ptx".to_owned(), own.into_bytes())];
        assert_eq!(find_hooks(b"..// same\nentry a\n..", &ptx), ["a.ptx"]);
        assert_eq!(find_hooks(b"..// same\nentry b\n..", &ptx), Vec::<String>::new());
        assert_eq!(unique_prefix("// same\n", &["// same\nmore\n".to_owned()]), "");
    }

    fn artifact_message(name: &str, id: &str, features: &[&str]) -> Value {
        json!({
            "reason": "compiler-artifact", "package_id": id, "target": {"name": name}, "features": features,
            "manifest_path": format!("/w/crates/{}/Cargo.toml", name.trim_start_matches("wholemem_")),
            "executable": null, "filenames": [format!("/w/target/lib{name}.so")],
        })
    }

    #[test]
    fn enabled_features_are_found_unless_allowed() {
        let messages = [
            artifact_message("wholemem_os", "path+file:///w/crates/os#wholemem-os@0.1.0", &["test-hooks"]),
            artifact_message("wholemem_hal", "path+file:///w/crates/hal#wholemem-hal@0.1.0", &["bench"]),
            artifact_message("serde", "registry+https://example.org#serde@1.0.0", &["derive"]),
        ];
        let allowed = ["wholemem-hal/bench"];
        assert_eq!(
            forbidden_features(&messages, "wholemem-cli", &allowed),
            ["wholemem-cli is built with the feature wholemem-os/test-hooks"]
        );
        assert_eq!(forbidden_features(&messages, "wholemem-cli", &[]).len(), 2);
    }

    #[test]
    fn the_artefact_is_selected_by_package() {
        let messages = [
            artifact_message("wholemem_os", "path+file:///w/crates/os#wholemem-os@0.1.0", &[]),
            artifact_message("wholemem_python", "path+file:///w/crates/python#wholemem-python@0.1.0", &[]),
        ];
        assert_eq!(
            artefact(&messages, "wholemem-python"),
            Some(PathBuf::from("/w/target/libwholemem_python.so"))
        );
        assert_eq!(artefact(&messages, "wholemem-cli"), None);
    }
}
