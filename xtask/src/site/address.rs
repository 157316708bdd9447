//! Addresses: where a file of the repository is on the site, and what a link in one of them leads to.
//!
//! The site has the folders of the repository, so that pages keep their neighbours: `docs/SECURITY.md` is
//! `docs/SECURITY.html`, a `README.md` the `index.html` of its folder. Addresses are relative and name files, never folders:
//! the site works below any path of a server, and from a disk without one.

use std::collections::BTreeSet;

/// What a link in a text leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// Another site, or a place on the same page: taken as it is.
    AsItIs,
    /// A file of the repository, and the place in it with its `#`, if one is named.
    File { path: String, place: String },
    /// Nothing that there is.
    Nowhere,
}

/// What a link means in a file of the repository.
pub(crate) fn target(file: &str, link: &str, files: &BTreeSet<String>) -> Target {
    if link.starts_with('#') || link.contains("://") || link.starts_with("mailto:") {
        return Target::AsItIs;
    }
    let (path, place) = link.find('#').map_or((link, ""), |at| link.split_at(at));
    let folder = file.rsplit_once('/').map_or("", |(folder, _)| folder);
    let Some(path) = joined(folder, path) else { return Target::Nowhere };
    let readme = if path.is_empty() { "README.md".to_owned() } else { format!("{path}/README.md") };
    match [path, readme].into_iter().find(|path| files.contains(path)) {
        Some(path) => Target::File { path, place: place.to_owned() },
        None => Target::Nowhere,
    }
}

/// A path relative to a folder, as one relative to the root; `None` if it leaves the repository.
pub(crate) fn joined(folder: &str, path: &str) -> Option<String> {
    let mut parts: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
    if path.starts_with('/') {
        return None;
    }
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// Where a file of the repository is on the site: a text as a page, a picture as it is, and other files, which are shown
/// as they are written, on a page of their own.
pub(crate) fn on_site(path: &str) -> String {
    if is_picture(path) {
        return path.to_owned();
    }
    match path.strip_suffix(".md") {
        Some(text) => match text.strip_suffix("README") {
            Some(folder) if folder.is_empty() || folder.ends_with('/') => format!("{folder}index.html"),
            _ => format!("{text}.html"),
        },
        None => format!("{path}.html"),
    }
}

pub(crate) fn is_picture(path: &str) -> bool {
    path.ends_with(".svg") || path.ends_with(".png")
}

/// From a page up to the root of the site, to be put before an address.
pub(crate) fn root_from(page: &str) -> String {
    "../".repeat(page.matches('/').count())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files() -> BTreeSet<String> {
        ["README.md", "LICENSE", "docs/a.md", "docs/measured/README.md", "docs/plots/p.svg", "examples/x.py"]
            .map(str::to_owned)
            .into()
    }

    fn file(path: &str, place: &str) -> Target {
        Target::File { path: path.to_owned(), place: place.to_owned() }
    }

    #[test]
    fn links_mean_files_folders_places_or_other_sites() {
        let files = files();
        assert_eq!(target("README.md", "docs/a.md#top", &files), file("docs/a.md", "#top"));
        assert_eq!(target("docs/a.md", "../examples/x.py", &files), file("examples/x.py", ""));
        assert_eq!(target("docs/a.md", "measured", &files), file("docs/measured/README.md", ""));
        assert_eq!(target("docs/a.md", "measured/", &files), file("docs/measured/README.md", ""));
        assert_eq!(target("docs/a.md", "..", &files), file("README.md", ""));
        assert_eq!(target("docs/a.md", "#below", &files), Target::AsItIs);
        assert_eq!(target("docs/a.md", "https://example.org/x", &files), Target::AsItIs);
    }

    #[test]
    fn links_that_lead_nowhere_are_told() {
        let files = files();
        for link in ["b.md", "../../README.md", "/docs/a.md", "plots"] {
            assert_eq!(target("docs/a.md", link, &files), Target::Nowhere, "{link}");
        }
    }

    #[test]
    fn files_keep_their_folders_on_the_site() {
        let places = [
            "README.md",
            "docs/a.md",
            "docs/measured/README.md",
            "docs/plots/p.svg",
            "examples/x.py",
            "LICENSE",
        ]
        .map(on_site);
        assert_eq!(
            places,
            [
                "index.html",
                "docs/a.html",
                "docs/measured/index.html",
                "docs/plots/p.svg",
                "examples/x.py.html",
                "LICENSE.html"
            ]
        );
        assert_eq!(on_site("docs/NOT-README.md"), "docs/NOT-README.html");
    }

    #[test]
    fn a_page_knows_its_way_to_the_root() {
        assert_eq!(root_from("index.html"), "");
        assert_eq!(root_from("docs/python/graph.html"), "../../");
    }
}
