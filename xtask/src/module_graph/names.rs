//! Collects the paths that one Rust source file names, and the names that its modules define.
//!
//! Paths are absolute: `super` and `self` are resolved against the containing module. A path that begins with another name refers
//! to the same module, to another crate, or to a name that a `use` has imported. Such paths are omitted, except where a module
//! re-exports them.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{Delimiter, Ident, TokenStream, TokenTree};
use syn::parse::Parser;
use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};
use syn::{Attribute, Item, ItemMod, Meta, Stmt, Token, UseTree};

/// The path segments from the crate root to a module or an item.
pub(super) type ModulePath = Vec<String>;

/// A path that the code of a crate names, such as `crate::a::B`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NamedPath {
    /// The module whose code names the path.
    pub(super) module: ModulePath,
    /// The path from the crate root. It is empty for a glob of the root.
    pub(super) path: ModulePath,
    pub(super) line: usize,
}

/// The names that a module defines or imports, except its child modules.
#[derive(Debug, Default)]
pub(super) struct Scope {
    pub(super) items: BTreeSet<String>,
    /// Imported names, and the path segments of the imported items.
    pub(super) imports: Vec<(String, Vec<String>)>,
    /// The path segments of the module's glob imports.
    pub(super) globs: Vec<Vec<String>>,
}

/// A module that is declared as `mod name;` and has its own file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct FileModule {
    pub(super) path: ModulePath,
    /// The inline modules of the declaring file that enclose the declaration.
    pub(super) inline: Vec<String>,
    /// The file name in the attribute `#[path]` of the module.
    pub(super) explicit_file: Option<String>,
}

/// The paths, modules and macros in one source file.
#[derive(Debug, Default)]
pub(super) struct ParsedFile {
    pub(super) named_paths: Vec<NamedPath>,
    pub(super) scopes: BTreeMap<ModulePath, Scope>,
    pub(super) file_modules: Vec<FileModule>,
    /// Macros that are exported to the crate root with `#[macro_export]`, with the module that defines each.
    pub(super) macros: Vec<(String, ModulePath)>,
}

impl ParsedFile {
    /// Parses `text`, the source file of `module`, and collects its names.
    pub(super) fn read(module: &[String], text: &str) -> syn::Result<Self> {
        let file = syn::parse_file(text)?;
        let mut collector =
            PathCollector { depth: module.len(), module: module.to_vec(), source: Self::default() };
        collector.items(&file.items);
        Ok(collector.source)
    }
}

struct PathCollector {
    module: ModulePath,
    /// The number of first segments of `module` that lead to the file; the other segments are inline modules.
    depth: usize,
    source: ParsedFile,
}

impl PathCollector {
    /// Collects the names and paths in the items of the module `self.module`.
    fn items(&mut self, items: &[Item]) {
        let mut scope = Scope::default();
        for item in items.iter().filter(|item| !is_for_tests(attributes_of(item))) {
            match item {
                Item::Use(item) => {
                    for (path, name) in flatten(&item.tree) {
                        let segments = path.iter().map(ToString::to_string).collect();
                        match name {
                            Some(name) => scope.imports.push((name.to_string(), segments)),
                            None => scope.globs.push(segments),
                        }
                    }
                }
                Item::Macro(item) => {
                    if let Some(name) = &item.ident
                        && item.attrs.iter().any(|attribute| attribute.path().is_ident("macro_export"))
                    {
                        self.source.macros.push((name.to_string(), self.module.clone()));
                    }
                }
                item => scope.items.extend(name_of(item).map(ToString::to_string)),
            }
            self.visit_item(item);
        }
        self.source.scopes.insert(self.module.clone(), scope);
    }

    /// Records a path that the code names, if its first segment refers to a module of this crate.
    fn record(&mut self, segments: &[&Ident]) {
        let Some(last) = segments.last() else { return };
        let names: Vec<_> = segments.iter().map(ToString::to_string).collect();
        if let Some(path) = absolute(&self.module, &names) {
            let line = last.span().start().line;
            self.source.named_paths.push(NamedPath { module: self.module.clone(), path, line });
        }
    }

    /// Records the paths in unparsed tokens, which are those of macro calls and attributes.
    fn record_token_paths(&mut self, tokens: TokenStream) {
        let tokens: Vec<_> = tokens.into_iter().collect();
        let is_colon =
            |at: usize| matches!(tokens.get(at), Some(TokenTree::Punct(it)) if it.as_char() == ':');
        let mut at = 0;
        while at < tokens.len() {
            let start = at;
            at += 1;
            match &tokens[start] {
                TokenTree::Group(group) => self.record_token_paths(group.stream()),
                TokenTree::Ident(first) if is_root(first) => {
                    let mut path = vec![first];
                    while is_colon(at) && is_colon(at + 1) {
                        match tokens.get(at + 2) {
                            Some(TokenTree::Ident(name)) => path.push(name),
                            Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
                                self.record_use_branches(&path, group.stream());
                            }
                            _ => break,
                        }
                        at += 3;
                    }
                    if path.len() > 1 {
                        self.record(&path);
                    }
                }
                _ => {}
            }
        }
    }

    /// Records the paths of a `use` tree in braces in the tokens of a macro. Other tokens in braces contain no paths.
    fn record_use_branches(&mut self, prefix: &[&Ident], tokens: TokenStream) {
        let trees = Punctuated::<UseTree, Token![,]>::parse_terminated.parse2(tokens);
        for (path, _) in trees.iter().flatten().flat_map(flatten) {
            self.record(&[prefix, &path].concat());
        }
    }
}

impl<'ast> Visit<'ast> for PathCollector {
    fn visit_item(&mut self, item: &'ast Item) {
        if !is_for_tests(attributes_of(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        let name = item.ident.to_string();
        let path = [&self.module[..], &[name]].concat();
        match &item.content {
            Some((_, items)) => {
                let outer = std::mem::replace(&mut self.module, path);
                self.items(items);
                self.module = outer;
            }
            None => {
                let inline = self.module[self.depth..].to_vec();
                self.source.file_modules.push(FileModule {
                    path,
                    inline,
                    explicit_file: path_attribute(&item.attrs),
                });
            }
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        for (path, _) in flatten(&item.tree) {
            self.record(&path);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments: Vec<_> = path.segments.iter().map(|segment| &segment.ident).collect();
        if path.leading_colon.is_none() && segments.len() > 1 {
            self.record(&segments);
        }
        visit::visit_path(self, path);
    }

    /// Ignores visibilities: their paths refer to the module itself or an ancestor.
    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.visit_path(&call.path);
        self.record_token_paths(call.tokens.clone());
    }

    /// Records the paths in an attribute with a list of tokens. Documentation is also an attribute, but has a literal and no
    /// list.
    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        if let Meta::List(list) = &attribute.meta {
            self.record_token_paths(list.tokens.clone());
        }
    }

    fn visit_impl_item(&mut self, item: &'ast syn::ImplItem) {
        let attributes = match item {
            syn::ImplItem::Const(item) => &item.attrs[..],
            syn::ImplItem::Fn(item) => &item.attrs,
            syn::ImplItem::Type(item) => &item.attrs,
            syn::ImplItem::Macro(item) => &item.attrs,
            _ => &[],
        };
        if !is_for_tests(attributes) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_stmt(&mut self, statement: &'ast Stmt) {
        let attributes = match statement {
            Stmt::Local(local) => &local.attrs[..],
            Stmt::Macro(call) => &call.attrs,
            Stmt::Expr(expression, _) => attributes_of_expression(expression),
            Stmt::Item(_) => &[],
        };
        if !is_for_tests(attributes) {
            visit::visit_stmt(self, statement);
        }
    }

    fn visit_field(&mut self, field: &'ast syn::Field) {
        if !is_for_tests(&field.attrs) {
            visit::visit_field(self, field);
        }
    }

    fn visit_field_value(&mut self, field: &'ast syn::FieldValue) {
        if !is_for_tests(&field.attrs) {
            visit::visit_field_value(self, field);
        }
    }

    fn visit_variant(&mut self, variant: &'ast syn::Variant) {
        if !is_for_tests(&variant.attrs) {
            visit::visit_variant(self, variant);
        }
    }

    fn visit_arm(&mut self, arm: &'ast syn::Arm) {
        if !is_for_tests(&arm.attrs) {
            visit::visit_arm(self, arm);
        }
    }
}

/// Converts a path in `module` to a path from the crate root, if it begins with `crate`, `self` or `super`.
pub(super) fn absolute(module: &[String], segments: &[String]) -> Option<ModulePath> {
    let (first, mut rest) = segments.split_first()?;
    let mut base = match first.as_str() {
        "crate" => &[],
        "self" => module,
        "super" => module.split_last()?.1,
        _ => return None,
    };
    while let Some(("super", behind)) = rest.split_first().map(|(name, behind)| (name.as_str(), behind)) {
        (base, rest) = (base.split_last()?.1, behind);
    }
    Some([base, rest].concat())
}

fn is_root(name: &Ident) -> bool {
    ["crate", "self", "super"].iter().any(|root| name == root)
}

/// Returns the imported paths of a `use` tree, each with the name that it is imported as, or `None` for a glob.
fn flatten(tree: &UseTree) -> Vec<(Vec<&Ident>, Option<&Ident>)> {
    match tree {
        UseTree::Path(path) => flatten(&path.tree)
            .into_iter()
            .map(|(rest, name)| {
                // A path that ends with `self`, such as `a::{self}`, imports the module `a`.
                let (rest, name) = match rest.as_slice() {
                    [only] if *only == "self" => {
                        (Vec::new(), name.map(|name| if name == "self" { &path.ident } else { name }))
                    }
                    _ => (rest, name),
                };
                ([vec![&path.ident], rest].concat(), name)
            })
            .collect(),
        UseTree::Name(name) => vec![(vec![&name.ident], Some(&name.ident))],
        UseTree::Rename(rename) => vec![(vec![&rename.ident], Some(&rename.rename))],
        UseTree::Glob(_) => vec![(Vec::new(), None)],
        UseTree::Group(group) => group.items.iter().flat_map(flatten).collect(),
    }
}

fn name_of(item: &Item) -> Option<&Ident> {
    match item {
        Item::Const(item) => Some(&item.ident),
        Item::Enum(item) => Some(&item.ident),
        Item::Fn(item) => Some(&item.sig.ident),
        Item::Static(item) => Some(&item.ident),
        Item::Struct(item) => Some(&item.ident),
        Item::Trait(item) => Some(&item.ident),
        Item::Type(item) => Some(&item.ident),
        Item::Union(item) => Some(&item.ident),
        _ => None,
    }
}

fn attributes_of(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Returns the attributes of an expression that is used as a statement.
fn attributes_of_expression(expression: &syn::Expr) -> &[Attribute] {
    use syn::Expr;
    match expression {
        Expr::Assign(it) => &it.attrs,
        Expr::Block(it) => &it.attrs,
        Expr::Call(it) => &it.attrs,
        Expr::ForLoop(it) => &it.attrs,
        Expr::If(it) => &it.attrs,
        Expr::Loop(it) => &it.attrs,
        Expr::Macro(it) => &it.attrs,
        Expr::Match(it) => &it.attrs,
        Expr::MethodCall(it) => &it.attrs,
        Expr::Return(it) => &it.attrs,
        Expr::Try(it) => &it.attrs,
        Expr::Unsafe(it) => &it.attrs,
        Expr::While(it) => &it.attrs,
        _ => &[],
    }
}

/// Returns true if an item with these attributes is compiled for tests only.
fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) if list.path.is_ident("cfg") => {
            list.parse_args::<Meta>().is_ok_and(|predicate| needs_test(&predicate))
        }
        _ => false,
    })
}

/// Returns true if a `cfg` predicate is true in test builds only.
fn needs_test(predicate: &Meta) -> bool {
    let parts = |list: &syn::MetaList| {
        list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated).unwrap_or_default()
    };
    match predicate {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) if list.path.is_ident("all") => parts(list).iter().any(needs_test),
        Meta::List(list) if list.path.is_ident("any") => {
            let parts = parts(list);
            !parts.is_empty() && parts.iter().all(needs_test)
        }
        _ => false,
    }
}

fn path_attribute(attributes: &[Attribute]) -> Option<String> {
    attributes.iter().find_map(|attribute| match &attribute.meta {
        Meta::NameValue(pair) if pair.path.is_ident("path") => match &pair.value {
            syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) => Some(text.value()),
            _ => None,
        },
        _ => None,
    })
}
