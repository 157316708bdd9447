//! Finds import cycles among the top modules of a crate.
//!
//! A top module is a direct child of the crate root. There is an edge `a -> b` if code in `a` or a descendant of it names
//! `crate::b`, directly or through `super`, in a `use` tree, an expression, a type or the tokens of a macro. A name that the
//! crate root re-exports counts as an edge to the top module that defines it: `crate::Error` is an edge to `error`.
//!
//! Test-only code, files named `tests.rs`, documentation and the crate root itself are ignored. The check is syntactic: a method
//! call has no path, so a method that another module adds to a type in its own `impl` block is not an edge.
//!
//! | module | contents |
//! |---|---|
//! | [`names`] | the paths in one source file, and the names that its modules define |
//! | [`module_tree`] | the modules of a crate, and the resolution of a path to the module that defines it |
//! | [`components`] | strongly connected components |

mod components;
mod module_tree;
mod names;

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Result};

use module_tree::ModuleTree;

/// A source location at which one top module of a crate names another top module.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ImportSite {
    file: String,
    line: usize,
    /// The imported path as written in the source, with braces expanded.
    path: String,
}

/// An import cycle: top modules that import each other, directly or through others, with one source location for each import.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Cycle {
    modules: Vec<String>,
    edges: Vec<(String, String, ImportSite)>,
}

impl Cycle {
    /// Creates an import cycle of these modules, without source locations.
    #[cfg(test)]
    pub(crate) fn new(modules: &[&str]) -> Self {
        Self { modules: modules.iter().map(|name| (*name).to_owned()).collect(), edges: Vec::new() }
    }

    pub(crate) fn modules(&self) -> String {
        self.modules.join(", ")
    }
}

impl fmt::Display for Cycle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (from, to, ImportSite { file, line, path }) in &self.edges {
            writeln!(f, "    {from} -> {to}: {file}:{line} names `{path}`")?;
        }
        Ok(())
    }
}

/// Returns the import cycles among the top modules of the crate with this root file.
pub(crate) fn cycles(root: &Path) -> Result<Vec<Cycle>> {
    cycles_in(root, &|path| match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    })
}

fn cycles_in(root: &Path, read: &dyn Fn(&Path) -> Result<Option<String>>) -> Result<Vec<Cycle>> {
    let sites = edges(&ModuleTree::read(root, read)?);
    let mut graph: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (from, to) in sites.keys() {
        graph.entry(from).or_default().push(to);
    }
    let components = components::strongly_connected(&graph).into_iter();
    let cycle = |modules: Vec<&str>| Cycle {
        edges: sites
            .iter()
            .filter(|((from, to), _)| modules.contains(&from.as_str()) && modules.contains(&to.as_str()))
            .map(|((from, to), site)| (from.clone(), to.clone(), site.clone()))
            .collect(),
        modules: modules.into_iter().map(str::to_owned).collect(),
    };
    Ok(components.map(cycle).collect())
}

/// Returns the imports between top modules, each with its first source location.
fn edges(tree: &ModuleTree) -> BTreeMap<(String, String), ImportSite> {
    let mut edges = BTreeMap::new();
    for (file, named) in tree.named_paths() {
        let Some(from) = named.module.first() else { continue };
        for to in tree.top_modules_of(&named.path) {
            if to != from {
                let site = ImportSite {
                    file: file.to_owned(),
                    line: named.line,
                    path: format!("crate::{}", named.path.join("::")),
                };
                edges.entry((from.clone(), to.to_owned())).or_insert(site);
            }
        }
    }
    edges
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the imports between the top modules of a crate that consists of these files, as `from -> to file:line`.
    fn edges_of(files: &[(&str, &str)]) -> Vec<String> {
        let tree = ModuleTree::read(Path::new("src/lib.rs"), &|path| Ok(text_of(files, path))).unwrap();
        let edges = edges(&tree);
        let text = |((from, to), site): (&(String, String), &ImportSite)| {
            format!("{from} -> {to} {}:{}", site.file, site.line)
        };
        edges.iter().map(text).collect()
    }

    fn text_of(files: &[(&str, &str)], path: &Path) -> Option<String> {
        files.iter().find(|(name, _)| Path::new(name) == path).map(|(_, text)| (*text).to_owned())
    }

    /// Returns the imports of module `a`, whose source is this text, in a crate with the modules `a`, `b`, `c` and `d`, whose root re-exports
    /// `b::Bee` and `c::{Sea, deep::Deep as Depth}`.
    fn from_a(text: &str) -> Vec<String> {
        let root = "mod a; mod b { pub struct Bee; }\n\
                    mod c { pub struct Sea; pub mod deep { pub struct Deep; } }\n\
                    mod d { pub use crate::b::Bee as FromB; pub use super::c::*; }\n\
                    pub use {b::Bee, c::{Sea, deep::Deep as Depth}};\n\
                    pub use d::FromB as Indirect;\n\
                    pub use std::fmt::Debug as Foreign;\n\
                    pub struct AtTheRoot;\n";
        let edges = edges_of(&[("src/lib.rs", root), ("src/a.rs", text)]);
        edges.into_iter().filter_map(|edge| Some(edge.strip_prefix("a -> ")?.to_owned())).collect()
    }

    #[test]
    fn every_branch_of_a_use_tree_is_an_edge() {
        let text = "use std::fmt;\n\nuse crate::{\n    b::{self, Bee},\n    c::{deep::{Deep, *}},\n};\n";
        assert_eq!(from_a(text), ["b src/a.rs:4", "c src/a.rs:5"]);
        assert_eq!(from_a("use {crate::d as other, std::fmt};\n"), ["d src/a.rs:1"]);
    }

    #[test]
    fn paths_in_expressions_types_and_patterns_are_edges() {
        let text = "fn f(x: &crate::b::Bee) -> Vec<crate::c::Sea> {\n    if let crate::d::X = x {}\n}\n";
        assert_eq!(from_a(text), ["b src/a.rs:1", "c src/a.rs:1", "d src/a.rs:2"]);
        assert_eq!(
            from_a("fn f() {\n    crate::b::new::<crate::c::Sea>();\n}"),
            ["b src/a.rs:2", "c src/a.rs:2"]
        );
        assert_eq!(from_a("fn f() {\n    use crate::b;\n}"), ["b src/a.rs:2"]);
    }

    #[test]
    fn paths_in_macros_and_attributes_are_edges() {
        assert_eq!(from_a("fn f() { assert!([crate::b::X].is_empty()); }"), ["b src/a.rs:1"]);
        assert_eq!(from_a("macro_rules! m {\n () => { $crate::c::new() };\n}"), ["c src/a.rs:2"]);
        assert_eq!(
            from_a("macro_rules! m { () => { use crate::{b::Bee, c}; } }"),
            ["b src/a.rs:1", "c src/a.rs:1"]
        );
        assert_eq!(from_a("#[error(\"{}\", crate::b::text(.0))]\nstruct E;"), ["b src/a.rs:1"]);
    }

    #[test]
    fn super_is_resolved_from_the_containing_module() {
        assert_eq!(from_a("use super::b::Bee;"), ["b src/a.rs:1"]);
        let text = "mod b {}\nmod inner {\n    use super::b;\n    use super::super::c::Sea;\n}\n";
        assert_eq!(from_a(text), ["c src/a.rs:4"]);
        assert_eq!(from_a("fn f() { self::g(); super::d::g() }"), ["d src/a.rs:1"]);
    }

    #[test]
    fn a_re_export_of_the_root_is_an_edge_to_the_module_that_defines_it() {
        assert_eq!(from_a("use crate::Bee;"), ["b src/a.rs:1"]);
        assert_eq!(from_a("use super::{Depth, Sea};"), ["c src/a.rs:1"]);
        assert_eq!(from_a("use crate::Indirect;"), ["b src/a.rs:1"]);
        assert_eq!(from_a("use crate::{AtTheRoot, Foreign};"), Vec::<String>::new());
    }

    #[test]
    fn naming_a_module_is_an_edge_to_it_even_if_the_item_is_defined_elsewhere() {
        assert_eq!(from_a("use crate::d::FromB;"), ["d src/a.rs:1"]);
    }

    #[test]
    fn a_glob_of_the_root_is_an_edge_to_every_module() {
        assert_eq!(from_a("use crate::*;"), ["b src/a.rs:1", "c src/a.rs:1", "d src/a.rs:1"]);
        assert_eq!(from_a("use super::*;"), ["b src/a.rs:1", "c src/a.rs:1", "d src/a.rs:1"]);
    }

    #[test]
    fn a_glob_that_the_root_re_exports_is_followed() {
        let root = "mod a { use crate::Bee; } mod b { pub struct Bee; } mod c { pub struct Sea; }\n\
                    pub use {c::*, b::*};";
        assert_eq!(edges_of(&[("src/lib.rs", root)]), ["a -> b src/lib.rs:1"]);
    }

    #[test]
    fn an_exported_macro_is_an_edge_to_the_module_that_defines_it() {
        let root =
            "mod a { fn f() { crate::made!(); } }\nmod b { #[macro_export] macro_rules! made { () => {} } }";
        assert_eq!(edges_of(&[("src/lib.rs", root)]), ["a -> b src/lib.rs:1"]);
    }

    #[test]
    fn code_for_tests_is_not_an_edge() {
        for text in [
            "#[cfg(test)]\nmod checks { use crate::b::Bee; }",
            "#[cfg(test)]\nuse crate::b;",
            "#[cfg(all(test, unix))]\nfn f() { crate::b::g(); }",
            "#[test]\nfn f() { crate::b::g(); }",
            "fn f() {\n    #[cfg(test)]\n    crate::b::g();\n    #[cfg(test)]\n    let _ = crate::b::g();\n}",
            "struct S { #[cfg(test)] field: crate::b::Bee }\nimpl S { #[cfg(test)] fn f() { crate::b::g() } }",
            "fn f(x: u8) { match x { #[cfg(test)] 1 => crate::b::g(), _ => {} } }",
            "mod tests;",
        ] {
            let files = [
                ("src/lib.rs", "mod a; mod b {}"),
                ("src/a.rs", text),
                ("src/a/tests.rs", "use crate::b::Bee;"),
            ];
            assert_eq!(edges_of(&files), Vec::<String>::new(), "{text}");
        }
        for text in ["#[cfg(any(test, unix))]\nuse crate::b;", "#[cfg(not(test))]\nuse crate::b;"] {
            assert_eq!(from_a(text), ["b src/a.rs:2"], "{text}");
        }
    }

    #[test]
    fn links_in_documentation_are_not_edges() {
        let text = "//! Uses [`crate::b::Bee`].\n\n/// See [b](crate::b) and [`Sea`](super::c::Sea).\nfn f() {\n    \
                    // crate::d\n    g(\"crate::d\");\n}\n";
        assert_eq!(from_a(text), Vec::<String>::new());
    }

    #[test]
    fn a_visibility_is_not_an_edge() {
        assert_eq!(
            from_a("pub(crate) fn f() {}\nmod inner { pub(in super::super::a) fn g() {} }"),
            Vec::<String>::new()
        );
    }

    #[test]
    fn code_of_the_crate_root_is_not_an_edge() {
        assert_eq!(
            edges_of(&[("src/main.rs", ""), ("src/lib.rs", "mod a {} use crate::a;")]),
            Vec::<String>::new()
        );
    }

    #[test]
    fn module_files_are_found_as_rustc_finds_them() {
        let files = [
            ("src/lib.rs", "mod a;\nmod b;\nmod c {}\nmod d {}"),
            ("src/a/mod.rs", "mod deep;\n#[path = \"odd/place.rs\"]\nmod odd;"),
            ("src/a/deep.rs", "mod deeper;\nuse super::super::b;"),
            ("src/a/deep/deeper.rs", "use crate::c;"),
            ("src/a/odd/place.rs", "use super::super::d;"),
            ("src/b.rs", "mod inner { mod file; }"),
            ("src/b/inner/file.rs", "use crate::c;"),
        ];
        let expected = [
            "a -> b src/a/deep.rs:2",
            "a -> c src/a/deep/deeper.rs:1",
            "a -> d src/a/odd/place.rs:1",
            "b -> c src/b/inner/file.rs:1",
        ];
        assert_eq!(edges_of(&files), expected);
    }

    #[test]
    fn a_module_without_a_file_is_an_error() {
        let files = [("src/lib.rs", "mod a;")];
        let error = ModuleTree::read(Path::new("src/lib.rs"), &|path| Ok(text_of(&files, path))).unwrap_err();
        assert_eq!(
            error.to_string(),
            "src/lib.rs declares `mod a`, but there is no src/a.rs and no src/a/mod.rs"
        );
    }

    #[test]
    fn a_file_that_is_not_rust_is_an_error() {
        let error = ModuleTree::read(Path::new("src/lib.rs"), &|_| Ok(Some("mod a {}\nmod 3;".to_owned())))
            .unwrap_err();
        assert!(error.to_string().starts_with("cannot parse src/lib.rs:2"), "{error}");
    }

    #[test]
    fn a_cycle_is_reported_with_its_own_edges_only() {
        let root = "mod a { use crate::b; }\nmod b { use crate::{c, d}; }\nmod c { use crate::a::X; }\nmod d {}\n\
                    mod e { use crate::a; }\nmod f { use super::g; }\nmod g { use super::f; }\n";
        let found = cycles_in(Path::new("src/lib.rs"), &|_| Ok(Some(root.to_owned()))).unwrap();
        let texts: Vec<_> = found.iter().map(|cycle| (cycle.modules(), cycle.to_string())).collect();
        let first = "    a -> b: src/lib.rs:1 names `crate::b`\n    b -> c: src/lib.rs:2 names `crate::c`\n    \
                     c -> a: src/lib.rs:3 names `crate::a::X`\n";
        let second = "    f -> g: src/lib.rs:6 names `crate::g`\n    g -> f: src/lib.rs:7 names `crate::f`\n";
        assert_eq!(texts, [("a, b, c".to_owned(), first.to_owned()), ("f, g".to_owned(), second.to_owned())]);
    }
}
