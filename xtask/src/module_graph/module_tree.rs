//! Finds the modules of a crate, and the top module that defines the item of a path.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};

use super::names::{FileModule, ModulePath, NamedPath, ParsedFile, Scope, absolute};

/// The maximum length of a chain of re-exports that is followed to the definition of an item.
const MAX_REEXPORTS: usize = 16;

/// All modules of a crate except those for tests only.
#[derive(Debug, Default)]
pub(super) struct ModuleTree {
    scopes: BTreeMap<ModulePath, Scope>,
    macros: BTreeMap<String, ModulePath>,
    /// The paths that the code of each file names.
    files: Vec<(String, Vec<NamedPath>)>,
}

impl ModuleTree {
    /// Reads the modules of a crate from its root file. `read` returns `None` for a file that does not exist.
    pub(super) fn read(root: &Path, read: &dyn Fn(&Path) -> Result<Option<String>>) -> Result<Self> {
        let mut tree = Self::default();
        let text = read(root)?.with_context(|| format!("{} does not exist", root.display()))?;
        let mut next = vec![(ModulePath::new(), root.to_owned(), text)];
        while let Some((module, file, text)) = next.pop() {
            let source = ParsedFile::read(&module, &text).map_err(|error| {
                anyhow!(
                    "cannot parse {path}:{line}: {error}",
                    path = file.display(),
                    line = error.span().start().line
                )
            })?;
            for declared in &source.file_modules {
                if let Some((file, text)) = module_file(&file, &module, declared, read)? {
                    next.push((declared.path.clone(), file, text));
                }
            }
            tree.scopes.extend(source.scopes);
            tree.macros.extend(source.macros);
            tree.files.push((file.display().to_string(), source.named_paths));
        }
        tree.files.sort_by(|(one, _), (other, _)| one.cmp(other));
        Ok(tree)
    }

    /// Returns the paths that the code of the crate names, with their files.
    pub(super) fn named_paths(&self) -> impl Iterator<Item = (&str, &NamedPath)> {
        self.files.iter().flat_map(|(file, named)| named.iter().map(move |named| (file.as_str(), named)))
    }

    /// Returns the top module that a path from the crate root refers to, if any, or all top modules for a glob of the root.
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
                let top = top.or_else(|| self.defining_module(&[], first, MAX_REEXPORTS));
                top.and_then(<[String]>::first).map(String::as_str).into_iter().collect()
            }
        }
    }

    /// Returns the module that defines the item `name` of `module`, or `None` for items of other crates and unknown names.
    fn defining_module(&self, module: &[String], name: &str, steps: usize) -> Option<&[String]> {
        let (module, scope) = self.scopes.get_key_value(module)?;
        if scope.items.contains(name) {
            return Some(module);
        }
        let steps = steps.checked_sub(1)?;
        let imported = scope.imports.iter().filter(|(imported_name, _)| imported_name == name);
        let mut found = imported.filter_map(|(_, segments)| self.import_target(module, segments, steps));
        if let Some(found) = found.next() {
            return Some(found);
        }
        let globs = scope.globs.iter().filter_map(|segments| self.module_at(module, segments));
        let mut found = globs.filter_map(|target| self.defining_module(target, name, steps));
        found.next().or_else(|| self.macros.get(name).filter(|_| module.is_empty()).map(Vec::as_slice))
    }

    /// Returns the module that an import in `module` refers to: the imported module, or the one that defines the imported item.
    fn import_target(&self, module: &[String], segments: &[String], steps: usize) -> Option<&[String]> {
        if let Some(target) = self.module_at(module, segments) {
            return Some(target);
        }
        let (name, parent) = segments.split_last()?;
        let parent = self.module_at(module, parent)?;
        // An unknown item, such as one that a macro generates, is taken as defined in the module of the path.
        Some(self.defining_module(parent, name, steps).unwrap_or(parent))
    }

    /// Returns the module that a path in `module` refers to, if any.
    fn module_at(&self, module: &[String], segments: &[String]) -> Option<&[String]> {
        let path = absolute(module, segments).unwrap_or_else(|| [module, segments].concat());
        self.scopes.get_key_value(&path).map(|(module, _)| module.as_slice())
    }
}

/// Returns the path and text of a module's source file, or `None` for a file of tests.
fn module_file(
    file: &Path,
    module: &[String],
    declared: &FileModule,
    read: &dyn Fn(&Path) -> Result<Option<String>>,
) -> Result<Option<(PathBuf, String)>> {
    let Some(name) = declared.path.last() else { return Ok(None) };
    let folder = file.parent().unwrap_or_else(|| Path::new(""));
    let mut child_folder = folder.to_owned();
    // The child modules of `a.rs` are in the folder `a`; those of the crate root and of `mod.rs` are in the same folder as
    // their parent.
    if !module.is_empty() && !file.ends_with("mod.rs") {
        child_folder.push(file.file_stem().unwrap_or_default());
    }
    child_folder.extend(&declared.inline);
    let candidates = match &declared.explicit_file {
        Some(explicit) if declared.inline.is_empty() => vec![folder.join(explicit)],
        Some(explicit) => vec![child_folder.join(explicit)],
        None => vec![child_folder.join(format!("{name}.rs")), child_folder.join(name).join("mod.rs")],
    };
    for candidate in &candidates {
        if candidate.ends_with("tests.rs") {
            return Ok(None);
        }
        if let Some(text) = read(candidate)? {
            return Ok(Some((candidate.clone(), text)));
        }
    }
    let candidates: Vec<_> =
        candidates.iter().map(|candidate| format!("no {}", candidate.display())).collect();
    Err(anyhow!(
        "{path} declares `mod {name}`, but there is {missing}",
        path = file.display(),
        missing = candidates.join(" and ")
    ))
}
