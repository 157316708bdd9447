//! `cargo xtask docs`: builds the documentation site as static files in `target/site/`.
//!
//! mdBook builds the site from the README, `docs/` and the examples, which `SUMMARY.md` lists. `reference.py` writes the pages of
//! the Python package, `native_reference.py` those of the C and C++ interfaces, the pages of rustdoc are copied next to them, and
//! `check_links.py` checks the finished site. Source files
//! that pages link to get pages of their own, which are added to the menu.
//!
//! | module | contents |
//! |---|---|
//! | [`links`] | rewrites links to files of the repository |
//! | [`mentions`] | checks that mentioned paths exist |
//! | [`call_paths`] | checks that the functions in call paths exist |
//!
//! The site works under any URL path and from a local disk. Every link leads to an existing file and fragment. Every Markdown
//! document of the repository has a page.

mod call_paths;
mod links;
mod mentions;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::wheels::{BLACK, GRIFFE2MD, GRIFFELIB, LIBCLANG, MDBOOK, Wheel};
use crate::{cargo, command, python, report, source_rules};

const FOLDER: &str = "xtask/src/site";
const SUMMARY: &str = include_str!("SUMMARY.md");

/// The page whose call paths are checked.
const ARCHITECTURE: &str = "docs/ARCHITECTURE.md";

/// The Python packages that build the documentation site.
const PACKAGES: [Wheel; 5] = [MDBOOK, GRIFFE2MD, GRIFFELIB, BLACK, LIBCLANG];

/// The headers whose reference is generated: of C, of C++ and for kernels.
const HEADERS: [&str; 3] =
    ["include/wholemem.h", "include/wholemem", "crates/wholemem/kernels/include/wholemem"];

const FETCH_LIMIT: Duration = Duration::from_secs(300);

/// Builds the documentation site and returns the path of its index. A broken link is an error.
pub(crate) fn build() -> Result<PathBuf> {
    let target = command::target_folder()?;
    let book = target.join("book");
    let (sources, site) = (book.join("src"), target.join("site"));
    if book.is_dir() {
        fs::remove_dir_all(&book)?;
    }
    report::no_findings(stage(&sources)?)?;
    cargo::rustdoc()?;
    let python = python::environment("site", &PACKAGES, FETCH_LIMIT)?;
    for name in ["book.toml", "site.css"] {
        fs::copy(Path::new(FOLDER).join(name), book.join(name))?;
    }

    let script = |name: &str, arguments: &[&OsStr]| {
        let script = Path::new(FOLDER).join(name);
        // With `-B`, Python writes no bytecode files next to the script.
        command::run(Command::new(&python).args(["-B", "-m", "doctest"]).arg(&script))?;
        command::run(Command::new(&python).arg(&script).args(arguments))
    };
    let pages = sources.join("python");
    fs::create_dir_all(&pages)?;
    let modules =
        listed_pages(SUMMARY).into_iter().filter_map(|page| python_module(&page)).collect::<Vec<_>>();
    let mut arguments = vec![OsStr::new("crates/python/python"), pages.as_os_str()];
    arguments.extend(modules.iter().map(OsStr::new));
    script("reference.py", &arguments)?;
    let native = sources.join("c");
    let headers = HEADERS.map(OsStr::new);
    script("native_reference.py", &[native.as_os_str(), headers[0], headers[1], headers[2]])?;

    let mdbook = python.with_file_name("mdbook");
    command::run(Command::new(mdbook).arg("build").arg(&book).arg("--dest-dir").arg(&site))?;
    copy(&target.join("doc"), &site.join("rust"))?;
    script("check_links.py", &[site.as_os_str(), "rust".as_ref()])?;
    Ok(site.join("index.html"))
}

/// Opens the documentation site in a browser.
pub(crate) fn open(index: &Path) -> Result<()> {
    command::run(Command::new("xdg-open").arg(index))
}

/// Copies the repository files that are sources of the documentation site to a folder, with rewritten links, and returns the
/// findings.
fn stage(sources: &Path) -> Result<Vec<String>> {
    let files: BTreeSet<String> =
        source_rules::tracked()?.into_iter().filter(|path| Path::new(path).is_file()).collect();
    let write = |path: &str, text: &[u8]| -> Result<()> {
        let file = sources.join(path);
        fs::create_dir_all(file.parent().context("the path of a page has no parent folder")?)?;
        fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))
    };
    let pages = listed_pages(SUMMARY);
    let mut findings = unlisted_pages(files.iter(), &pages);
    let mut shown = BTreeSet::new();
    for path in pages.iter().filter(|path| files.contains(*path)) {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
        // Paths in the changelog and the measurements are not checked, because they refer to files of earlier versions.
        if path != "CHANGELOG.md" && !path.starts_with("docs/measured/") {
            findings.extend(mentions::missing(path, &text, &files));
        }
        if path == ARCHITECTURE {
            findings.extend(call_paths::wrong(path, &text, |file| fs::read_to_string(file).ok()));
        }
        let linked = links::rewrite_links(path, &text, &files);
        findings.extend(linked.broken);
        shown.extend(linked.files);
        write(&links::staged_path(path), linked.text.as_bytes())?;
    }
    let mut summary = format!("{}\n# Files\n\n", SUMMARY.replace("README.md)", "index.md)"));
    for path in shown.difference(&pages) {
        let bytes = fs::read(path)?;
        if links::is_copied_verbatim(path) {
            write(path, &bytes)?;
            continue;
        }
        let text = String::from_utf8(bytes).with_context(|| format!("{path} is not UTF-8 text"))?;
        let kind = Path::new(path).extension().and_then(|kind| kind.to_str()).unwrap_or("text");
        let kind = if kind.starts_with("cu") { "cpp" } else { kind };
        let page = links::staged_path(path);
        write(&page, format!("# {path}\n\n~~~~{kind}\n{text}\n~~~~\n").as_bytes())?;
        summary.push_str(&format!("- [{path}]({page})\n"));
    }
    write("SUMMARY.md", summary.as_bytes())?;
    write("rust.md", &fs::read(Path::new(FOLDER).join("rust.md"))?)?;
    Ok(findings)
}

/// Returns the paths of the pages in the table of contents of the documentation site.
fn listed_pages(summary: &str) -> BTreeSet<String> {
    summary
        .split("](")
        .skip(1)
        .filter_map(|from| from.split_once(')'))
        .map(|(path, _)| path.to_owned())
        .collect()
}

/// Returns the name of the Python module that a page describes, if it is a reference page.
fn python_module(page: &str) -> Option<String> {
    page.strip_prefix("python/")?.strip_suffix(".md").map(str::to_owned)
}

/// Returns a finding for each Markdown file in the root, `docs/` or `examples/` that is not on the documentation site.
fn unlisted_pages<'a>(files: impl IntoIterator<Item = &'a String>, pages: &BTreeSet<String>) -> Vec<String> {
    let belongs_on_site = |path: &str| {
        path.ends_with(".md")
            && (!path.contains('/') || path.starts_with("docs/") || path.starts_with("examples/"))
    };
    let files = files.into_iter().filter(|path| belongs_on_site(path) && !pages.contains(*path));
    files.map(|path| format!("{path}: not on the site: add it to {FOLDER}/SUMMARY.md")).collect()
}

/// Copies a folder recursively.
fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let entry = entry?;
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type()?.is_dir() {
            copy(&from, &to)?;
        } else if !entry.file_name().to_string_lossy().starts_with('.') {
            fs::copy(&from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_markdown_file_without_a_page_is_found() {
        let files =
            ["README.md", "docs/new.md", "crates/os/README.md", "docs/plots/a.svg"].map(str::to_owned);
        let pages = listed_pages("- [One](README.md)\n- [Two](python/a.b.md)\n");
        assert_eq!(pages.iter().find_map(|page| python_module(page)), Some("a.b".to_owned()));
        assert_eq!(
            unlisted_pages(&files, &pages),
            ["docs/new.md: not on the site: add it to xtask/src/site/SUMMARY.md"]
        );
    }
}
