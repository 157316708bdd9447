//! Generates `include/wholemem.h`, the C header, from the exported functions of `crates/capi`.
//!
//! cbindgen translates the modules of `crates/capi/src` that have exported functions, in the order of [`SOURCES`];
//! `crates/capi/cbindgen.toml` configures it. This module adds the introduction and the version.

use std::fs;
use std::path::Path;

#[cfg(any(test, feature = "abi"))]
use anyhow::bail;
use anyhow::{Context, Result};

use crate::generated;

/// The generated header.
pub(crate) const HEADER: &str = "include/wholemem.h";

/// The configuration file of cbindgen.
const CONFIG: &str = "crates/capi/cbindgen.toml";

/// The introduction of the header: what holds for all functions.
const INTRODUCTION: &str = "crates/capi/src/introduction.h";

/// The folder of the sources.
const FOLDER: &str = "crates/capi/src";

/// The modules whose public items are translated, in the order of the header.
const SOURCES: &[&str] = &[
    "version.rs",
    "status.rs",
    "last_error.rs",
    "argument.rs",
    "device.rs",
    "communicator.rs",
    "dtype.rs",
    "memory.rs",
    "tensor.rs",
    "rows.rs",
    "symmetric.rs",
    "collective.rs",
    "graph.rs",
];

/// A part of the digest in the generated header. Increase it when the output of this generator changes.
const GENERATION: &str = "2";

/// Returns true if the committed header matches the digest of its sources and was not edited.
pub(crate) fn is_current() -> Result<bool> {
    let text = fs::read_to_string(HEADER).unwrap_or_default();
    let body = text.split_once('\n').map_or("", |(_, body)| body);
    Ok(generated::is_current(Path::new(HEADER), &digest(body)?))
}

/// Generates the header. With `check`, fails if the committed header differs.
#[cfg(feature = "abi")]
pub(crate) fn generate(check: bool) -> Result<()> {
    let mut config = cbindgen::Config::from_file(CONFIG).map_err(anyhow::Error::msg)?;
    config.header = Some(read(INTRODUCTION)?.trim_end().to_owned());
    config.after_includes = Some(format!("\n{}", version_macros(&workspace_version()?)?));
    let builder = cbindgen::Builder::new().with_config(config);
    let builder = paths().fold(builder, |builder, path| builder.with_src(path));
    let mut header = Vec::new();
    builder.generate().with_context(|| format!("cannot generate {HEADER}"))?.write(&mut header);
    let body = String::from_utf8(header).context("cbindgen did not write UTF-8")?;
    let body = body.trim_start_matches('\n').to_owned();
    let label = generated::label("/*", "abi", &format!("{} */", digest(&body)?));
    generated::write_or_compare(Path::new(HEADER), &(label + &body), check)
}

/// Returns a digest of all inputs of the header, and of its text `body`.
fn digest(body: &str) -> Result<String> {
    let own = format!("{GENERATION}, cbindgen 0.29.2, {}", workspace_version()?);
    let mut parts = vec![own, read(CONFIG)?, read(INTRODUCTION)?, body.to_owned()];
    for path in paths() {
        parts.push(public_items(&read(&path)?));
    }
    Ok(generated::digest(parts.iter().map(String::as_bytes)))
}

/// Returns the parts of a Rust source that determine the header: public items without the bodies of functions, with their
/// documentation and attributes. Other changes do not affect the header.
fn public_items(source: &str) -> String {
    let (mut text, mut preceding, mut inside) = (String::new(), String::new(), None);
    for line in source.lines() {
        if inside.is_none() && line.starts_with("pub ") {
            text += &std::mem::take(&mut preceding);
            inside = Some(if line.contains(" fn ") { '{' } else { '}' });
        }
        match inside {
            Some(end) => {
                text += &format!("{line}\n");
                if line.ends_with(';') || (end == '{' && line.ends_with(end)) || line.starts_with(end) {
                    inside = None;
                }
            }
            None if line.starts_with("///") || line.starts_with("#[") => preceding += &format!("{line}\n"),
            None => preceding.clear(),
        }
    }
    text
}

fn paths() -> impl Iterator<Item = String> {
    SOURCES.iter().map(|source| format!("{FOLDER}/{source}"))
}

/// Returns the version in the workspace's `Cargo.toml`.
fn workspace_version() -> Result<String> {
    let manifest = read("Cargo.toml")?;
    let section = manifest.split("[workspace.package]").nth(1);
    let version = section.and_then(|section| {
        let line = section.lines().find_map(|line| line.strip_prefix("version = \""))?;
        line.strip_suffix('"')
    });
    version.map(str::to_owned).context("Cargo.toml has no version of the workspace")
}

/// Returns the macros with the version of the header.
#[cfg(any(test, feature = "abi"))]
fn version_macros(version: &str) -> Result<String> {
    let parts: Vec<u32> = version.split('.').filter_map(|part| part.parse().ok()).collect();
    let [major, minor, patch] = parts[..] else { bail!("`{version}` is not a version of three numbers") };
    Ok(format!(
        "/** The version of this header. */\n#define WM_VERSION_MAJOR {major}\n#define WM_VERSION_MINOR {minor}\n\
         #define WM_VERSION_PATCH {patch}\n#define WM_VERSION_STRING \"{version}\"\n\n\
         /** The version of this header as a number, which `wm_version` returns for the library. */\n\
         #define WM_VERSION (WM_VERSION_MAJOR * 1000000 + WM_VERSION_MINOR * 1000 + WM_VERSION_PATCH)\n\n\
         /** The version of the interface that programs pass to `wm_check_version`. */\n\
         #define WM_ABI_VERSION ((uint32_t)((WM_ABI_MAJOR << 16) | WM_ABI_MINOR))"
    ))
}

fn read(path: &str) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {path}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_of_functions_and_private_items_are_not_inputs() {
        let public = "/// A.\npub const A: u32 = 1;\n/// B.\n#[repr(C)]\npub struct B {\n    /// C.\n    pub c: u32,\n}\n\
                      /// D.\n#[unsafe(no_mangle)]\npub extern \"C\" fn d(\n    e: B,\n) -> u32 {\n";
        let (constant, rest) = public.split_once("/// B.").unwrap();
        let source = format!(
            "//! A file.\n\nuse a::b;\n\n{constant}\n/// F.\nfn f() {{\n}}\n\n/// B.{rest}    e.c\n}}\n\nimpl B {{\n}}\n"
        );
        assert_eq!(public_items(&source), public);
    }

    #[test]
    fn the_macros_have_the_parts_of_the_version() {
        let macros = version_macros("1.22.3").unwrap();
        assert!(macros.contains("#define WM_VERSION_MINOR 22\n"), "{macros}");
        assert!(macros.contains("#define WM_VERSION_STRING \"1.22.3\"\n"), "{macros}");
        assert_eq!(version_macros("1.2").unwrap_err().to_string(), "`1.2` is not a version of three numbers");
    }
}
