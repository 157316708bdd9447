//! Checks that the functions in the call paths of `docs/ARCHITECTURE.md` are defined in the files beside them.
//!
//! The call paths are the code blocks of the section `Call paths`. A line has up to three columns, with at least two spaces
//! between them: names, files and a note.
//!
//! ```text
//! Client::put                  crates/store/src/client/mod.rs                                         a note
//!   Creation::create, begin    crates/store/src/server/machine/creation.rs, creation/attempt.rs
//!     Attempt::new                                                                                    also in these files
//! ```
//!
//! - A name is a function, a type or a constant, with or without the type to which it belongs.
//! - The first file of a line is a path from the root of the repository. Other files of the line are in the folder of the first.
//! - A line without files has the files of the line above it.
//!
//! Each name must be defined in one of the files of its line, and its type must occur in the same file. A definition is a name
//! after a keyword such as `fn` or `class`. In CUDA C++, where functions have no keyword and macros define kernels, it is also a
//! name before or after an opening parenthesis.

use crate::site::mentions;

const SECTION: &str = "\n## Call paths\n";

/// The keywords of Rust, Python and C++ after which a name is defined.
const KEYWORDS: [&str; 8] = ["class", "const", "def", "enum", "fn", "static", "struct", "trait"];

/// Returns a finding for each name in the call paths of `text`, the content of `page`, that is not defined in the files beside
/// it. `read` returns the content of a file of the repository, or `None` if there is no such file.
pub(crate) fn wrong(page: &str, text: &str, read: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let section = text.split_once(SECTION).map_or("", |(_, rest)| rest);
    let section = section.split("\n## ").next().unwrap_or_default();
    let mut findings = Vec::new();
    let mut has_paths = false;
    for block in section.split("\n```").skip(1).step_by(2) {
        let mut files = Vec::new();
        for line in block.lines().skip(1).filter(|line| !line.trim().is_empty()) {
            has_paths = true;
            let mut columns = line.split("  ").map(str::trim).filter(|column| !column.is_empty());
            let names = columns.next().unwrap_or_default();
            if let Some(column) = columns.next().filter(|column| mentions::is_path(column)) {
                files = paths(column).into_iter().map(|path| (read(&path), path)).collect();
            }
            findings
                .extend(findings_of_line(names, &files).into_iter().map(|what| format!("{page}: {what}")));
        }
    }
    if !has_paths {
        findings.push(format!("{page}: has no call paths in a section `Call paths`"));
    }
    findings
}

/// Returns the paths in the column of files of a line.
fn paths(column: &str) -> Vec<String> {
    let mut paths = column.split(", ").map(str::to_owned).collect::<Vec<_>>();
    let folder = paths[0].rsplit_once('/').map_or("", |(folder, _)| folder).to_owned();
    paths.iter_mut().skip(1).for_each(|path| *path = format!("{folder}/{path}"));
    paths
}

/// Returns the findings for the names of one line. Each of its files has its content, unless it does not exist.
fn findings_of_line(names: &str, files: &[(Option<String>, String)]) -> Vec<String> {
    if files.is_empty() {
        return vec![format!("no file is beside `{names}` or above it")];
    }
    let absent = files.iter().filter(|(text, _)| text.is_none());
    let mut findings: Vec<_> =
        absent.map(|(_, path)| format!("`{names}`: {path} is not in the repository")).collect();
    let paths = files.iter().map(|(_, path)| path.as_str()).collect::<Vec<_>>().join(" or ");
    for name in names.split(", ") {
        let (owner, name_in_file) = name.rsplit_once("::").unwrap_or(("", name));
        let is_defined = |(text, path): &(Option<String>, String)| {
            let Some(text) = text else { return false };
            (owner.is_empty() || occurrences(text, owner).next().is_some())
                && defines(text, path, name_in_file)
        };
        if !files.iter().any(is_defined) {
            findings.push(format!("`{name}` is not defined in {paths}"));
        }
    }
    findings
}

fn defines(text: &str, path: &str, name: &str) -> bool {
    let is_cuda = [".cu", ".cuh"].iter().any(|ending| path.ends_with(ending));
    occurrences(text, name).any(|(before, after)| {
        let keyword = before.trim_end().rsplit(|letter| !is_part(letter)).next().unwrap_or_default();
        KEYWORDS.contains(&keyword) || is_cuda && (before.ends_with('(') || after.starts_with('('))
    })
}

/// Returns the text before and after each occurrence of a name as a whole word.
fn occurrences<'t>(text: &'t str, name: &'t str) -> impl Iterator<Item = (&'t str, &'t str)> {
    let split = move |(at, _): (usize, &str)| (&text[..at], &text[at + name.len()..]);
    text.match_indices(name)
        .map(split)
        .filter(|(before, after)| !before.ends_with(is_part) && !after.starts_with(is_part))
}

fn is_part(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || letter == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(path: &str) -> Option<String> {
        let text = match path {
            "crates/a/src/put.rs" => {
                "// A fn that puts.\nimpl Client {\n    pub fn put(self) { self.send() }\n}\n"
            }
            "crates/a/src/io/send.rs" => "impl Client {\n    fn send(self) {}\n}\nconst SENT: u32 = 1;\n",
            "crates/a/wm.py" => "class Table:\n    def __call__(self) -> None: ...\n",
            "crates/a/k.cuh" => {
                "// put: see gather_all\ntemplate <class T> __device__ void gather_all(T at)\nROWS(gather_rows, 6)\nstruct Any {};\n"
            }
            _ => return None,
        };
        Some(text.to_owned())
    }

    fn findings(block: &str) -> Vec<String> {
        let text = format!(
            "# Page\n\n```text\nold\n```\n\n## Call paths\n\n### One\n\n```text\n{block}\n```\n\n## Other\n\n```text\nold\n```\n"
        );
        wrong("docs/P.md", &text, read)
    }

    #[test]
    fn names_that_the_files_define_are_accepted() {
        for block in [
            "Client::put    crates/a/src/put.rs    a note",
            "Client::put, SENT, send    crates/a/src/put.rs, io/send.rs",
            "Client::put    crates/a/src/put.rs\n\n  put          a note without a file\n    SENT    crates/a/src/io/send.rs",
            "Table, Table::__call__  crates/a/wm.py",
            "gather_all, gather_rows, Any   crates/a/k.cuh",
        ] {
            assert_eq!(findings(block), [] as [String; 0], "{block}");
        }
    }

    #[test]
    fn a_name_that_no_file_beside_it_defines_is_found() {
        for (block, name, files) in [
            ("Client::get    crates/a/src/put.rs", "Client::get", "crates/a/src/put.rs"),
            ("Store::put    crates/a/src/put.rs", "Store::put", "crates/a/src/put.rs"),
            ("lient::put    crates/a/src/put.rs", "lient::put", "crates/a/src/put.rs"),
            ("Clien::put    crates/a/src/put.rs", "Clien::put", "crates/a/src/put.rs"),
            (
                "put, sends    crates/a/src/put.rs, io/send.rs",
                "sends",
                "crates/a/src/put.rs or crates/a/src/io/send.rs",
            ),
            ("put    crates/a/src/put.rs\n  SENT    a note", "SENT", "crates/a/src/put.rs"),
            ("put and get    crates/a/src/put.rs", "put and get", "crates/a/src/put.rs"),
            ("put   crates/a/k.cuh", "put", "crates/a/k.cuh"),
        ] {
            assert_eq!(
                findings(block),
                [format!("docs/P.md: `{name}` is not defined in {files}")],
                "{block}"
            );
        }
    }

    #[test]
    fn a_call_or_a_comment_is_not_a_definition() {
        let finding = |name| format!("docs/P.md: `{name}` is not defined in crates/a/src/put.rs");
        assert_eq!(findings("send    crates/a/src/put.rs"), [finding("send")]);
        assert_eq!(findings("puts    crates/a/src/put.rs"), [finding("puts")]);
    }

    #[test]
    fn a_line_needs_files_that_exist() {
        assert_eq!(
            findings("Client::put    a note"),
            ["docs/P.md: no file is beside `Client::put` or above it"]
        );
        assert_eq!(
            findings("put    crates/a/src/put.rs, get.rs"),
            ["docs/P.md: `put`: crates/a/src/get.rs is not in the repository"]
        );
    }

    #[test]
    fn a_page_without_call_paths_is_found() {
        let expected = ["docs/P.md: has no call paths in a section `Call paths`"];
        assert_eq!(wrong("docs/P.md", "# Page\n\n## Paths\n\n```text\nput\n```\n", read), expected);
        assert_eq!(wrong("docs/P.md", "# Page\n\n## Call paths\n\nNone.\n\n## Other\n", read), expected);
    }
}
