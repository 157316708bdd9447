//! The paths that one source text names, and the names that its modules define.
//!
//! Paths are absolute: `super` and `self` are resolved against the module that contains them. Paths that begin with
//! another name stay in their module or lead to another crate, or to something that a `use` has named already, so they
//! are left out, except where a module re-exports them.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{Delimiter, Ident, TokenStream, TokenTree};
use syn::parse::Parser;
use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};
use syn::{Attribute, Item, ItemMod, Meta, Stmt, Token, UseTree};

/// The names from the crate root to a module, or to an item.
pub(super) type ModulePath = Vec<String>;

/// A path that some code names.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NamedPath {
    /// The module that contains the code.
    pub(super) module: ModulePath,
    /// The path from the crate root; empty for a glob of the root.
    pub(super) path: ModulePath,
    pub(super) line: usize,
}

/// What a module makes visible under its own path, other than its child modules.
#[derive(Debug, Default)]
pub(super) struct Scope {
    pub(super) items: BTreeSet<String>,
    /// Imported names, and the segments of what they stand for.
    pub(super) imports: Vec<(String, Vec<String>)>,
    /// The segments of what is imported with all its names.
    pub(super) globs: Vec<Vec<String>>,
}

/// A module whose text is in a file of its own.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct FileModule {
    pub(super) path: ModulePath,
    /// The inline modules between the file and the declaration.
    pub(super) inline: Vec<String>,
    /// The file that the attribute `path` names.
    pub(super) explicit_file: Option<String>,
}

/// What one source file holds.
#[derive(Debug, Default)]
pub(super) struct ParsedFile {
    pub(super) named_paths: Vec<NamedPath>,
    pub(super) scopes: BTreeMap<ModulePath, Scope>,
    pub(super) file_modules: Vec<FileModule>,
    /// Macros that the crate root has by `#[macro_export]`, by the module that defines them.
    pub(super) macros: Vec<(String, ModulePath)>,
}

impl ParsedFile {
    /// Reads the text of `module`.
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
    /// How many of the names of `module` lead to the file.
    depth: usize,
    source: ParsedFile,
}

impl PathCollector {
    /// Reads the items of the module `self.module`.
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

    /// Notes a path, if its first segment leads to a module of this crate.
    fn record(&mut self, segments: &[&Ident]) {
        let Some(last) = segments.last() else { return };
        let names: Vec<_> = segments.iter().map(ToString::to_string).collect();
        if let Some(path) = absolute(&self.module, &names) {
            let line = last.span().start().line;
            self.source.named_paths.push(NamedPath { module: self.module.clone(), path, line });
        }
    }

    /// Notes the paths among tokens that are not parsed: those of macros and attributes.
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

    /// Notes the branches of a `use` tree in braces among the tokens of a macro. What is no such tree has no paths.
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

    /// A visibility names the module itself or one around it.
    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.visit_path(&call.path);
        self.record_token_paths(call.tokens.clone());
    }

    /// Documentation is an attribute too, but its value is a literal.
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

/// A path of code in `module`, from the crate root, if it begins with `crate`, `self` or `super`.
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

/// The branches of a `use` tree, each with the name it gives; `None` for a glob.
fn flatten(tree: &UseTree) -> Vec<(Vec<&Ident>, Option<&Ident>)> {
    match tree {
        UseTree::Path(path) => flatten(&path.tree)
            .into_iter()
            .map(|(rest, name)| {
                // `a::{self}` is `a`.
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

/// The attributes of the expressions that stand alone as statements.
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

/// Whether these attributes keep something out of all builds but those for tests.
fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) if list.path.is_ident("cfg") => {
            list.parse_args::<Meta>().is_ok_and(|predicate| needs_test(&predicate))
        }
        _ => false,
    })
}

/// Whether a predicate of `cfg` holds in builds for tests only.
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
