//! Rewrites links between Markdown files of the repository to pages of the documentation site.
//!
//! The site has the folder structure of the repository. A link to a file that is neither Markdown nor an image leads to a page
//! that shows the file, and a link to a folder leads to its `README.md`.

use std::collections::BTreeSet;

use pulldown_cmark::{Event, Options, Parser, Tag};

/// A page of the documentation site with rewritten links.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct LinkedPage {
    pub(crate) text: String,
    /// The files of the repository that the page links to.
    pub(crate) files: BTreeSet<String>,
    /// One finding for each broken link of the page.
    pub(crate) broken: Vec<String>,
}

/// Rewrites the links of `text`, the content of the Markdown file `page`, to pages of the documentation site.
pub(crate) fn rewrite_links(page: &str, text: &str, files: &BTreeSet<String>) -> LinkedPage {
    let mut linked = LinkedPage { text: text.to_owned(), files: BTreeSet::new(), broken: Vec::new() };
    let mut changes = Vec::new();
    for (event, range) in Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter() {
        let Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) = event else { continue };
        if dest_url.starts_with('#') || dest_url.contains("://") {
            continue;
        }
        let (path, fragment) = dest_url.find('#').map_or((&*dest_url, ""), |at| dest_url.split_at(at));
        let Some(file) = resolve_path(page, path, files) else {
            linked.broken.push(format!("{page}: `{dest_url}` is not a file or folder of the repository"));
            continue;
        };
        // A reference-style link has its address elsewhere in the text, and is not rewritten here.
        if let Some(at) = text[range.clone()].rfind(&*dest_url) {
            let up = "../".repeat(page.matches('/').count());
            let start = range.start + at;
            changes.push((start..start + dest_url.len(), format!("{up}{}{fragment}", staged_path(&file))));
        }
        linked.files.insert(file);
    }
    for (range, address) in changes.into_iter().rev() {
        linked.text.replace_range(range, &address);
    }
    linked
}

/// Returns the path of a repository file among the sources of the site: a `README.md` is the index of its folder, and source
/// code is shown on a generated page.
pub(crate) fn staged_path(path: &str) -> String {
    match path.strip_suffix("README.md") {
        Some(folder) if folder.is_empty() || folder.ends_with('/') => format!("{folder}index.md"),
        _ if is_copied_verbatim(path) => path.to_owned(),
        _ => format!("{path}.md"),
    }
}

/// Returns true if a file is copied to the documentation site unchanged: Markdown or an image.
pub(crate) fn is_copied_verbatim(path: &str) -> bool {
    [".md", ".svg", ".png"].iter().any(|end| path.ends_with(end))
}

/// Resolves a link of `page` to a file of the repository. A link to a folder leads to its `README.md`.
fn resolve_path(page: &str, path: &str, files: &BTreeSet<String>) -> Option<String> {
    if path.starts_with('/') {
        return None;
    }
    let folder = page.rsplit_once('/').map_or("", |(folder, _)| folder);
    let mut parts: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    let file = parts.join("/");
    parts.push("README.md");
    [file, parts.join("/")].into_iter().find(|path| files.contains(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on_page(text: &str) -> LinkedPage {
        on("docs/a.md", text)
    }

    fn on(page: &str, text: &str) -> LinkedPage {
        let files =
            ["README.md", "LICENSE", "docs/a.md", "docs/measured/README.md", "docs/p.svg", "examples/x.py"];
        rewrite_links(page, text, &files.map(str::to_owned).into())
    }

    #[test]
    fn links_are_rewritten_to_pages_of_files_and_folders() {
        for (text, expected) in [
            ("[x](../README.md#top)", "[x](../index.md#top)"),
            ("| [x](../examples/x.py) |\n|---|\n", "| [x](../examples/x.py.md) |\n|---|\n"),
            ("[x](measured) [y](measured/)", "[x](../docs/measured/index.md) [y](../docs/measured/index.md)"),
            ("![x](p.svg)", "![x](../docs/p.svg)"),
            (
                "[x](https://example.org) [y](#below) `[z](gone)`",
                "[x](https://example.org) [y](#below) `[z](gone)`",
            ),
        ] {
            let linked = on_page(text);
            assert_eq!((linked.text.as_str(), linked.broken), (expected, Vec::new()));
        }
        assert_eq!(on_page("[x](../LICENSE)").files, BTreeSet::from(["LICENSE".to_owned()]));
    }

    #[test]
    fn broken_links_are_found() {
        for link in ["b.md", "../../README.md", "/docs/b.md", "plots"] {
            let expected = format!("docs/a.md: `{link}` is not a file or folder of the repository");
            assert_eq!(on_page(&format!("[x]({link})")).broken, [expected]);
        }
        assert_eq!(on("README.md", "[x](/LICENSE)").broken.len(), 1);
    }
}
