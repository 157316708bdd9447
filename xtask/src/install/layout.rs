//! The files of an installation, with their paths in the prefix.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::install::library::{Built, STATIC_LIBRARIES};

/// The folders whose headers are installed in `include/wholemem`: those for C++, and those for users' kernels.
const HEADERS: [&str; 2] = ["include/wholemem", "crates/wholemem/kernels/include/wholemem"];

/// The templates of the files that pkg-config and CMake read, and the paths of the files.
const TEMPLATES: [(&str, &str); 3] = [
    ("packaging/c/wholemem.pc.in", "lib/pkgconfig/wholemem.pc"),
    ("packaging/c/wholemem-config.cmake.in", "lib/cmake/wholemem/wholemem-config.cmake"),
    ("packaging/c/wholemem-config-version.cmake.in", "lib/cmake/wholemem/wholemem-config-version.cmake"),
];

const LICENCES: [&str; 2] = ["LICENSE-APACHE", "LICENSE-MIT"];

/// What a file of an installation is.
#[derive(Debug)]
pub(crate) enum Content {
    Bytes(Vec<u8>),
    /// A symbolic link to another file in the same folder.
    Link(String),
}

/// A file of an installation.
#[derive(Debug)]
pub(crate) struct InstalledFile {
    /// The path in the prefix.
    pub(crate) path: String,
    pub(crate) content: Content,
    pub(crate) mode: u32,
}

/// Returns the files of an installation of built libraries.
pub(crate) fn files(built: &Built) -> Result<Vec<InstalledFile>> {
    let (version, abi) = (&built.version, built.abi);
    let library = format!("libwholemem.so.{}", library_version(version, abi));
    let mut files = vec![
        copy(&built.program, "bin/wholemem".to_owned(), 0o755)?,
        copy(&built.shared, format!("lib/{library}"), 0o755)?,
        copy(&built.archive, "lib/libwholemem.a".to_owned(), 0o644)?,
        copy(Path::new("include/wholemem.h"), "include/wholemem.h".to_owned(), 0o644)?,
    ];
    let soname = format!("libwholemem.so.{abi}");
    for (link, to) in [(soname.as_str(), library.as_str()), ("libwholemem.so", soname.as_str())] {
        files.push(InstalledFile {
            path: format!("lib/{link}"),
            content: Content::Link(to.to_owned()),
            mode: 0o777,
        });
    }
    for folder in HEADERS {
        for entry in fs::read_dir(folder).with_context(|| format!("cannot list {folder}"))? {
            let path = entry?.path();
            let name = path.file_name().context("a header has no name")?.to_string_lossy().into_owned();
            files.push(copy(&path, format!("include/wholemem/{name}"), 0o644)?);
        }
    }
    for (template, path) in TEMPLATES {
        let text = fs::read_to_string(template).with_context(|| format!("cannot read {template}"))?;
        let text = fill(&text, version, abi);
        files.push(InstalledFile {
            path: path.to_owned(),
            content: Content::Bytes(text.into_bytes()),
            mode: 0o644,
        });
    }
    for licence in LICENCES {
        files.push(copy(Path::new(licence), format!("share/doc/wholemem/{licence}"), 0o644)?);
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

fn copy(from: &Path, path: String, mode: u32) -> Result<InstalledFile> {
    let bytes = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
    Ok(InstalledFile { path, content: Content::Bytes(bytes), mode })
}

/// Returns the version in the name of the library. It begins with the version of the interface, as the soname does, so that
/// `ldconfig` creates the same link.
fn library_version(version: &str, abi: u32) -> String {
    match version.split_once('.') {
        Some((major, rest)) if major == abi.to_string() => format!("{abi}.{rest}"),
        _ => format!("{abi}.{version}"),
    }
}

fn fill(template: &str, version: &str, abi: u32) -> String {
    let compatible: Vec<_> = version.split('.').take(2).collect();
    template
        .replace("@VERSION@", version)
        .replace("@COMPATIBLE@", &compatible.join("."))
        .replace("@ABI@", &abi.to_string())
        .replace(
            "@STATIC_LIBRARIES@",
            &STATIC_LIBRARIES.map(|name| format!("-l{name}")).join(if template.contains("cmake") {
                ";"
            } else {
                " "
            }),
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_the_library_begins_with_the_soname() {
        assert_eq!(library_version("0.1.0", 0), "0.1.0");
        assert_eq!(library_version("1.4.2", 1), "1.4.2");
        assert_eq!(library_version("0.9.1", 2), "2.0.9.1");
    }

    #[test]
    fn the_templates_are_filled_completely() {
        for (template, _) in TEMPLATES {
            let text = fs::read_to_string(Path::new("..").join(template)).unwrap();
            let filled = fill(&text, "0.12.3", 7);
            assert!(!filled.contains('@'), "{filled}");
            assert!(filled.contains("0.12") || filled.contains("so.7"), "{filled}");
        }
    }
}
