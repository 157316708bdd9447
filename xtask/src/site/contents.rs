//! The table of contents: what the site has, in the order of its menu.

/// A part of the menu.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) title: &'static str,
    pub(crate) entries: &'static [Entry],
}

/// A page, by the name that the menu gives it.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) title: &'static str,
    pub(crate) source: Source,
}

/// What a page is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// A Markdown file of the repository.
    Text(&'static str),
    /// What a module of the Python package says of itself.
    Module(&'static str),
    /// The documentation of a crate, as rustdoc makes it.
    Crate(&'static str),
}

const fn text(title: &'static str, path: &'static str) -> Entry {
    Entry { title, source: Source::Text(path) }
}

const fn module(name: &'static str) -> Entry {
    Entry { title: name, source: Source::Module(name) }
}

const fn library(title: &'static str, name: &'static str) -> Entry {
    Entry { title, source: Source::Crate(name) }
}

/// The whole menu.
pub(crate) const PARTS: &[Part] = &[
    Part {
        title: "Start",
        entries: &[
            text("What wholemem is", "README.md"),
            text("Examples in Rust", "examples/README.md"),
            text("Examples in Python", "examples/python/README.md"),
        ],
    },
    Part {
        title: "Tutorials",
        entries: &[
            text("Inference engines", "docs/python/inference.md"),
            text("Graph learning", "docs/python/graph.md"),
            text("Collectives", "docs/python/collectives.md"),
        ],
    },
    Part {
        title: "Python",
        entries: &[
            module("wholemem"),
            module("wholemem.torch"),
            module("wholemem.torch.pool"),
            module("wholemem.store"),
            module("wholemem.errors"),
            module("wholemem.diagnosis"),
        ],
    },
    Part {
        title: "Rust",
        entries: &[
            library("wholemem", "wholemem"),
            library("wholemem-store", "wholemem_store"),
            library("wholemem-comm", "wholemem_comm"),
            library("wholemem-hal", "wholemem_hal"),
            library("wholemem-os", "wholemem_os"),
        ],
    },
    Part {
        title: "Background",
        entries: &[
            text("Architecture", "docs/ARCHITECTURE.md"),
            text("Measured", "docs/measured/README.md"),
            text("Environment", "docs/ENVIRONMENT.md"),
            text("Security", "docs/SECURITY.md"),
            text("Protocol of the store", "docs/PROTOCOL.md"),
        ],
    },
    Part {
        title: "Project",
        entries: &[text("Changes", "CHANGELOG.md"), text("Contributing", "CONTRIBUTING.md")],
    },
];

/// All entries.
pub(crate) fn entries() -> impl Iterator<Item = &'static Entry> {
    PARTS.iter().flat_map(|part| part.entries)
}

/// The modules that have a page, in the order of the menu.
pub(crate) fn modules() -> impl Iterator<Item = &'static str> {
    entries().filter_map(|entry| match entry.source {
        Source::Module(name) => Some(name),
        Source::Text(_) | Source::Crate(_) => None,
    })
}

/// What is written for people, and on no page: Markdown in these folders, or beside them at the root.
pub(crate) fn forgotten<'a>(files: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    let is_ours = |path: &str| {
        path.ends_with(".md")
            && (!path.contains('/') || path.starts_with("docs/") || path.starts_with("examples/"))
    };
    let has_page =
        |path: &str| entries().any(|entry| matches!(entry.source, Source::Text(there) if there == path));
    files
        .into_iter()
        .filter(|path| is_ours(path) && !has_page(path))
        .map(|path| format!("{path}: on no page: xtask/src/site/contents.rs has the menu"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_without_a_page_is_found() {
        let files = ["README.md", "docs/new.md", "crates/os/README.md", "docs/plots/a.svg"];
        assert_eq!(forgotten(files), ["docs/new.md: on no page: xtask/src/site/contents.rs has the menu"]);
    }

    #[test]
    fn no_page_is_in_the_menu_twice() {
        let mut sources: Vec<_> = entries().map(|entry| format!("{:?}", entry.source)).collect();
        sources.sort();
        let count = sources.len();
        sources.dedup();
        assert_eq!(sources.len(), count);
    }
}
