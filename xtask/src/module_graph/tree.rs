//! The modules of a crate, read from its files, and the top module that defines a path.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};

use super::names::{FileModule, ModulePath, Named, Scope, Source, absolute};

/// How many re-exports of re-exports are followed.
const MOST_STEPS: usize = 16;

/// All modules of a crate that are not for tests.
#[derive(Debug, Default)]
pub(super) struct Tree {
    scopes: BTreeMap<ModulePath, Scope>,
    macros: BTreeMap<String, ModulePath>,
    /// What each file names.
    files: Vec<(String, Vec<Named>)>,
}

impl Tree {
    /// Reads a crate from its root file; `read` answers `None` for a file that does not exist.
    pub(super) fn read(root: &Path, read: &dyn Fn(&Path) -> Result<Option<String>>) -> Result<Self> {
        let mut tree = Self::default();
        let text = read(root)?.with_context(|| format!("there is no {}", root.display()))?;
        let mut next = vec![(ModulePath::new(), root.to_owned(), text)];
        while let Some((module, file, text)) = next.pop() {
            let source = Source::read(&module, &text).map_err(|error| {
                anyhow!("cannot parse {}:{}: {error}", file.display(), error.span().start().line)
            })?;
            for declared in &source.file_modules {
                if let Some((file, text)) = find(&file, &module, declared, read)? {
                    next.push((declared.path.clone(), file, text));
                }
            }
            tree.scopes.extend(source.scopes);
            tree.macros.extend(source.macros);
            tree.files.push((file.display().to_string(), source.named));
        }
        tree.files.sort_by(|(one, _), (other, _)| one.cmp(other));
        Ok(tree)
    }

    /// What the code of the crate names, with the file that names it.
    pub(super) fn named(&self) -> impl Iterator<Item = (&str, &Named)> {
        self.files.iter().flat_map(|(file, named)| named.iter().map(move |named| (file.as_str(), named)))
    }

    /// The top module that a path from the crate root leads to, where one does; all of them for the root itself.
    pub(super) fn top_modules_of(&self, path: &[String]) -> BTreeSet<&str> {
        match path {
            [] => self
                .scopes
                .keys()
                .filter(|module| module.len() == 1)
                .map(|module| module[0].as_str())
                .collect(),
            [first, ..] => {
                let top = self.scopes.get_key_value(&path[..1]).map(|(module, _)| module.as_slice());
                let top = top.or_else(|| self.definer(&[], first, MOST_STEPS));
                top.and_then(<[String]>::first).map(String::as_str).into_iter().collect()
            }
        }
    }

    /// The module that defines what `module` has under a name that is not one of its child modules; `None` for what comes
    /// from another crate, and what it does not have.
    fn definer(&self, module: &[String], name: &str, steps: usize) -> Option<&[String]> {
        let (module, scope) = self.scopes.get_key_value(module)?;
        if scope.items.contains(name) {
            return Some(module);
        }
        let steps = steps.checked_sub(1)?;
        let imported = scope.imports.iter().filter(|(given, _)| given == name);
        let mut found = imported.filter_map(|(_, segments)| self.target(module, segments, steps));
        if let Some(found) = found.next() {
            return Some(found);
        }
        let globs = scope.globs.iter().filter_map(|segments| self.child(module, segments));
        let mut found = globs.filter_map(|target| self.definer(target, name, steps));
        found.next().or_else(|| self.macros.get(name).filter(|_| module.is_empty()).map(Vec::as_slice))
    }

    /// The module that an import of `module` leads to: the one imported, or the one that defines what is imported.
    fn target(&self, module: &[String], segments: &[String], steps: usize) -> Option<&[String]> {
        if let Some(target) = self.child(module, segments) {
            return Some(target);
        }
        let (name, parent) = segments.split_last()?;
        let parent = self.child(module, parent)?;
        // An item that the reader does not know, such as one that a macro makes, is taken for defined where it is named.
        Some(self.definer(parent, name, steps).unwrap_or(parent))
    }

    /// The module that a path in `module` names.
    fn child(&self, module: &[String], segments: &[String]) -> Option<&[String]> {
        let path = absolute(module, segments).unwrap_or_else(|| [module, segments].concat());
        self.scopes.get_key_value(&path).map(|(module, _)| module.as_slice())
    }
}

/// The file of a module and its text; `None` for a file of tests.
fn find(
    file: &Path,
    module: &[String],
    declared: &FileModule,
    read: &dyn Fn(&Path) -> Result<Option<String>>,
) -> Result<Option<(PathBuf, String)>> {
    let Some(name) = declared.path.last() else { return Ok(None) };
    let folder = file.parent().unwrap_or_else(|| Path::new(""));
    let mut own = folder.to_owned();
    // `a.rs` has its children in `a`, while the root and `mod.rs` have them beside themselves.
    if !module.is_empty() && !file.ends_with("mod.rs") {
        own.push(file.file_stem().unwrap_or_default());
    }
    own.extend(&declared.inline);
    let places = match &declared.at {
        Some(at) if declared.inline.is_empty() => vec![folder.join(at)],
        Some(at) => vec![own.join(at)],
        None => vec![own.join(format!("{name}.rs")), own.join(name).join("mod.rs")],
    };
    for place in &places {
        if place.ends_with("tests.rs") {
            return Ok(None);
        }
        if let Some(text) = read(place)? {
            return Ok(Some((place.clone(), text)));
        }
    }
    let places: Vec<_> = places.iter().map(|place| format!("no {}", place.display())).collect();
    Err(anyhow!("{} declares `mod {name}`, but there is {}", file.display(), places.join(" and ")))
}
