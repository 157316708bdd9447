//! `cargo xtask docs`: the documentation as a site of plain files, below `target/site/`.
//!
//! | module | what it holds |
//! |---|---|
//! | [`contents`] | the menu: every page there is |
//! | [`address`] | where a file of the repository is on the site |
//! | [`markdown`], [`highlight`] | texts as HTML |
//! | [`mod@reference`] | what the Python package says of itself, as texts |
//! | [`layout`] | a page around its text |
//! | [`links`] | that every link leads somewhere |
//! | [`mentions`] | that every path which a text mentions exists |
//!
//! The front page is the README. A file that a page links to, and that is none, gets one that shows it. Beside our pages
//! lies what rustdoc makes. What it keeps true: the site works below any path, from a disk too, and without scripts; no
//! link of ours is broken, neither to a file nor to a place in one; every text for people has its page.

mod address;
mod contents;
mod highlight;
mod layout;
mod links;
mod markdown;
mod mentions;
mod reference;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::{cargo, command, report, source_rules};
use address::Target;
use contents::Source;
use markdown::Rendered;

const STYLE: &str = include_str!("style.css");

/// Builds the site, and fails if anything of it leads nowhere.
pub(crate) fn build() -> Result<PathBuf> {
    cargo::rustdoc()?;
    let target = command::target_folder()?;
    let mut files: BTreeSet<String> =
        source_rules::tracked()?.into_iter().filter(|path| Path::new(path).is_file()).collect();
    let mut findings = contents::forgotten(files.iter().map(String::as_str));
    let mut texts = BTreeMap::new();
    for entry in contents::entries() {
        if let Source::Text(path) = entry.source {
            texts.insert(
                path.to_owned(),
                fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?,
            );
        }
    }
    // What changed, and what was measured, is about trees of other days.
    let is_of_today = |path: &str| path != "CHANGELOG.md" && !path.starts_with("docs/measured/");
    for (path, text) in texts.iter().filter(|(path, _)| is_of_today(path)) {
        findings.extend(mentions::missing(path, text, &files));
    }
    texts.extend(reference::texts()?);
    files.extend(texts.keys().cloned());

    let mut site = Site { folder: target.join("site"), pages: BTreeMap::new() };
    if site.folder.is_dir() {
        fs::remove_dir_all(&site.folder)?;
    }
    let mut shown = BTreeSet::new();
    for (path, text) in &texts {
        let root = address::root_from(&address::on_site(path));
        let rendered = markdown::render(text, |link| match address::target(path, link, &files) {
            Target::AsItIs => link.to_owned(),
            Target::File { path, place } => {
                let to = format!("{root}{}{place}", address::on_site(&path));
                shown.insert(path);
                to
            }
            Target::Nowhere => {
                findings.push(format!("{path}: `{link}` leads to nothing in the repository"));
                link.to_owned()
            }
        });
        site.page(path, &rendered)?;
    }
    for path in shown.iter().filter(|path| !texts.contains_key(*path)) {
        if address::is_picture(path) {
            site.put(path, &fs::read(path)?)?;
        } else {
            let text = fs::read_to_string(path).with_context(|| format!("{path} is no text to show"))?;
            site.page(path, &as_written(path, &text))?;
        }
    }
    site.put(layout::STYLE, STYLE.as_bytes())?;
    copy(&target.join("doc"), &site.folder.join("rust"))?;

    findings.extend(site.broken_links());
    println!("{} pages in {}", site.pages.len(), site.folder.display());
    report::no_findings(findings)?;
    Ok(site.folder.join("index.html"))
}

/// Shows the site in a browser.
pub(crate) fn open(index: &Path) -> Result<()> {
    command::run(Command::new("xdg-open").arg(index))
}

/// What is written so far.
#[derive(Debug)]
struct Site {
    folder: PathBuf,
    /// Our pages, by their addresses.
    pages: BTreeMap<String, links::Page>,
}

impl Site {
    /// Writes the page of a file of the repository.
    fn page(&mut self, path: &str, text: &Rendered) -> Result<()> {
        let at = address::on_site(path);
        let html = layout::page(&at, text);
        self.put(&at, html.as_bytes())?;
        self.pages.insert(at, links::read(&html));
        Ok(())
    }

    fn put(&self, at: &str, bytes: &[u8]) -> Result<()> {
        let file = self.folder.join(at);
        let folder = file.parent().context("a page lies in a folder")?;
        fs::create_dir_all(folder)?;
        fs::write(&file, bytes).with_context(|| format!("cannot write {}", file.display()))
    }

    fn broken_links(&self) -> Vec<String> {
        let places = |file: &str| match self.pages.get(file) {
            Some(page) => Some(page.places.clone()),
            // What rustdoc has made, and what has no places.
            None => fs::read(self.folder.join(file))
                .ok()
                .map(|bytes| links::read(&String::from_utf8_lossy(&bytes)).places),
        };
        self.pages.iter().flat_map(|(name, page)| links::broken(name, page, places)).collect()
    }
}

/// A file that is no Markdown, as it is written.
fn as_written(path: &str, text: &str) -> Rendered {
    let kind = Path::new(path).extension().and_then(|kind| kind.to_str()).unwrap_or_default();
    let html = format!(
        "<h1>{}</h1>\n<pre><code>{}</code></pre>\n",
        highlight::escaped(path),
        highlight::code(kind, text)
    );
    Rendered { title: path.to_owned(), html, sections: Vec::new() }
}

/// Copies a folder with all that is in it.
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
