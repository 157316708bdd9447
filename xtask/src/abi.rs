//! Generates the C++ headers with the structures and constants that kernels share with the host, from their Rust definitions.
//!
//! cbindgen translates `crates/wholemem/src/abi/`; `crates/wholemem/kernels/cbindgen.toml` configures it and adds member
//! functions. This module adds a `static_assert` for each size and offset of a `layout!`, which rustc has checked, and replaces
//! the fixed-width integer types, because NVRTC has no `<cstdint>`.

use std::fs;
use std::path::Path;

#[cfg(any(test, feature = "abi"))]
use anyhow::bail;
use anyhow::{Context, Result};

use crate::{c_header, generated};

/// The folder with the Rust definitions of structures that kernels share with the host.
const SOURCES: &str = "crates/wholemem/src";

/// The configuration file of cbindgen, which generates the C++ headers.
const CONFIG: &str = "crates/wholemem/kernels/cbindgen.toml";

/// A part of the digest in generated headers. Increase it when the output of this generator changes.
const GENERATION: &str = "1";

/// A generated C++ header and its Rust sources.
struct Header {
    file: &'static str,
    about: &'static str,
    include: &'static str,
    /// Source files whose public structures, enumerations and constants are all translated.
    sources: &'static [&'static str],
    /// Source files of enumerations that are field types of structures in `sources`.
    field_types: &'static [&'static str],
    /// True if the names of C++ enumerators begin with the name of their enumeration.
    qualified: bool,
}

const HEADERS: &[Header] = &[
    Header {
        file: "crates/wholemem/kernels/include/wholemem/abi.cuh",
        about: "What kernels, users' kernels among them, share with the host: crates/wholemem/src/abi/ in C++.",
        include: "wholemem/types.cuh",
        sources: &[
            "abi/global_ref.rs",
            "abi/element_ref.rs",
            "abi/window_ref.rs",
            "abi/lane_ref.rs",
            "abi/lane_words.rs",
            "abi/call_terms.rs",
            "abi/bad_index.rs",
        ],
        field_types: &[],
        qualified: true,
    },
    Header {
        file: "crates/wholemem/kernels/include/ops/abi.cuh",
        about: "What our own kernels are launched with: the requests of crates/wholemem/src/abi/ in C++.",
        include: "wholemem/abi.cuh",
        sources: &["abi/rows_request.rs", "abi/row_tiles.rs", "abi/collective_request.rs"],
        field_types: &["dtype/mod.rs", "dtype/reduce.rs"],
        qualified: false,
    },
];

/// Checks that the committed C++ headers and the C header match the digest of their Rust definitions and were not edited; if not,
/// generates and compares them.
pub(crate) fn check() -> Result<()> {
    for header in HEADERS {
        let text = fs::read_to_string(header.file).unwrap_or_default();
        let body = text.split_once('\n').map_or("", |(_, body)| body);
        if !generated::is_current(Path::new(header.file), &header.digest(body)?) {
            return generate(true);
        }
    }
    if c_header::is_current()? { Ok(()) } else { generate(true) }
}

/// Runs xtask again with the feature `abi`, which generates the C++ headers from the Rust definitions.
#[cfg(not(feature = "abi"))]
pub(crate) fn generate(check: bool) -> Result<()> {
    generated::run_generator("abi", check)
}

/// Generates the C++ headers with shared structures and constants, and the C header, from the Rust definitions.
#[cfg(feature = "abi")]
pub(crate) fn generate(check: bool) -> Result<()> {
    for header in HEADERS {
        let body = header.translate()?;
        let label = generated::label("//", "abi", &header.digest(&body)?);
        generated::write_or_compare(Path::new(header.file), &(label + &body), check)?;
    }
    c_header::generate(check)
}

impl Header {
    /// Returns a digest of all inputs of the header, and of its text `body`.
    fn digest(&self, body: &str) -> Result<String> {
        let Self { about, include, qualified, .. } = self;
        let own = format!("{GENERATION}, cbindgen 0.29.2, {about}, {include}, {qualified}");
        let mut parts = vec![own, read(CONFIG)?, body.to_owned()];
        for source in self.paths() {
            parts.push(definitions(&read(&source)?));
        }
        Ok(generated::digest(parts.iter().map(String::as_bytes)))
    }

    fn paths(&self) -> impl Iterator<Item = String> {
        self.sources.iter().chain(self.field_types).map(|source| format!("{SOURCES}/{source}"))
    }

    #[cfg(feature = "abi")]
    fn translate(&self) -> Result<String> {
        let mut text = String::new();
        for source in self.sources {
            text += &read(&format!("{SOURCES}/{source}"))?;
        }
        let mut config = cbindgen::Config::from_file(CONFIG).map_err(anyhow::Error::msg)?;
        config.header = Some(format!("// {}", self.about));
        config.includes = vec![self.include.to_owned()];
        config.export.include = public_types(&text);
        config.enumeration.rename_variants = if self.qualified {
            cbindgen::RenameRule::QualifiedScreamingSnakeCase
        } else {
            cbindgen::RenameRule::ScreamingSnakeCase
        };
        let builder = cbindgen::Builder::new().with_config(config);
        let builder = self.paths().fold(builder, |builder, path| builder.with_src(path));
        let mut header = Vec::new();
        builder.generate().with_context(|| format!("cannot generate {}", self.file))?.write(&mut header);
        let header =
            with_portable_types(&String::from_utf8(header).context("cbindgen did not write UTF-8")?)?;
        Ok(header + "\n" + &assertions(&text)?)
    }
}

fn read(path: &str) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {path}"))
}

/// Returns the parts of a Rust source that determine the generated header: public structures, enumerations and constants with
/// their documentation, and layouts. Other changes do not affect the header.
fn definitions(source: &str) -> String {
    let (mut text, mut preceding, mut inside) = (String::new(), String::new(), false);
    for line in source.lines() {
        let starts = ["pub struct ", "pub enum ", "pub const ", "layout!("];
        if starts.iter().any(|start| line.starts_with(start)) {
            text += &std::mem::take(&mut preceding);
            inside = true;
        }
        if inside {
            text += &format!("{line}\n");
            inside = !(line.starts_with('}') || line.ends_with(';'));
        } else if line.starts_with("///") || line.starts_with("#[") {
            preceding += &format!("{line}\n");
        } else {
            preceding.clear();
        }
    }
    text
}

/// Returns the names of the public structures and enumerations of a Rust source.
#[cfg(any(test, feature = "abi"))]
fn public_types(source: &str) -> Vec<String> {
    let name = |line: &str| {
        let rest = line.strip_prefix("pub struct ").or_else(|| line.strip_prefix("pub enum "))?;
        Some(rest.split([' ', '(']).next()?.to_owned())
    };
    source.lines().filter_map(name).collect()
}

/// Returns the output of cbindgen with integer types that NVRTC has, and without Markdown fences around drawings.
#[cfg(any(test, feature = "abi"))]
fn with_portable_types(header: &str) -> Result<String> {
    let mut text = String::new();
    for line in header.lines().filter(|line| !line.trim_start().starts_with("// ```")) {
        let line = line.replace("constexpr static const ", "constexpr ");
        let line = line.replace("uint32_t", "u32").replace("uint64_t", "u64").replace("int64_t", "i64");
        if let Some(word) =
            line.split(|c: char| !c.is_alphanumeric() && c != '_').find(|word| word.ends_with("_t"))
        {
            bail!("NVRTC has no type `{word}`: use u32, u64 or i64");
        }
        text += &line;
        text += "\n";
    }
    Ok(text)
}

/// Returns a `static_assert` for the size and each offset of every `layout!(Type: len { field: offset, ... });` of a Rust
/// source.
#[cfg(any(test, feature = "abi"))]
fn assertions(source: &str) -> Result<String> {
    let mut text = String::new();
    for layout in source.split("\nlayout!(").skip(1) {
        let malformed = || format!("cannot read `layout!({}`", layout.lines().next().unwrap_or_default());
        let (layout, _) = layout.split_once("});").with_context(malformed)?;
        let (head, fields) = layout.split_once('{').with_context(malformed)?;
        let (name, len) = head.split_once(':').with_context(malformed)?;
        let mut checks = vec![format!("sizeof(wholemem::{name}) == {}", len.trim())];
        for field in fields.split(',').map(str::trim).filter(|field| !field.is_empty()) {
            let (field, offset) = field.split_once(':').with_context(malformed)?;
            checks.push(format!("WHOLEMEM_OFFSET_OF(wholemem::{name}, {field}) == {}", offset.trim()));
        }
        for check in checks {
            text += &format!("static_assert({check}, \"Rust has another layout\");\n");
        }
    }
    if text.is_empty() {
        bail!("the Rust definitions of shared structures have no `layout!`");
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn definitions_exclude_functions_and_imports() {
        let expected = "/// One.\n#[repr(C)]\npub struct One {\n    /// Two.\n    pub two: u32,\n}\n\
                    layout!(One: 4 { two: 0 });\n/// Three.\npub const THREE: u32 =\n    3;\n";
        let (one, rest) = expected.split_once("layout").unwrap();
        let source = format!(
            "//! A file.\n\n/// Gone.\nuse a::b;\n{one}\nlayout{rest}\nimpl One {{\n    pub fn a() {{}}\n}}\n"
        );
        assert_eq!(definitions(&source), expected);
    }

    #[test]
    fn only_public_types_are_found() {
        let source =
            "pub struct One {\n    pub struct_len: u32,\n}\npub(crate) struct Two;\npub enum Three {\n}\n";
        assert_eq!(public_types(source), ["One", "Three"]);
    }

    #[test]
    fn fixed_width_types_are_replaced() {
        let header =
            "// ```text\n//   |a|\n// ```\nconstexpr static const uint32_t LEN = 8;\n    int64_t index;\n";
        assert_eq!(
            with_portable_types(header).unwrap(),
            "//   |a|\nconstexpr u32 LEN = 8;\n    i64 index;\n"
        );
        let error = with_portable_types("    uint8_t byte;\n").unwrap_err();
        assert_eq!(error.to_string(), "NVRTC has no type `uint8_t`: use u32, u64 or i64");
    }

    #[test]
    fn every_size_and_offset_of_a_layout_is_asserted() {
        let source = "struct A;\n\nlayout!(A: 16 {\n    one: 0, two: 8,\n});\n";
        assert_eq!(
            assertions(source).unwrap(),
            "static_assert(sizeof(wholemem::A) == 16, \"Rust has another layout\");\n\
             static_assert(WHOLEMEM_OFFSET_OF(wholemem::A, one) == 0, \"Rust has another layout\");\n\
             static_assert(WHOLEMEM_OFFSET_OF(wholemem::A, two) == 8, \"Rust has another layout\");\n"
        );
        let error = assertions("\nlayout!(A 16);\n").unwrap_err();
        assert_eq!(error.to_string(), "cannot read `layout!(A 16);`");
        assert_eq!(
            assertions("struct A;\n").unwrap_err().to_string(),
            "the Rust definitions of shared structures have no `layout!`"
        );
    }
}
