//! The sizes, offsets, constants, prototypes and exported symbols of the interface are those of the committed list.
//!
//! The list only grows: programs that were compiled with an earlier header must work with the library. After an addition,
//! `WHOLEMEM_UPDATE_INTERFACE=1 cargo test -p wholemem-capi interface` appends the new lines; it removes none.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use super::support::{library_folder, repository};

/// The committed list.
const LIST: &str = "crates/capi/interface.txt";

/// Constants that change with every version.
const OF_VERSION: [&str; 2] = ["WM_VERSION", "WM_ABI_"];

/// The declarations of a C header.
#[derive(Debug, Default)]
struct Declarations {
    constants: Vec<String>,
    types: Vec<String>,
    /// The structures with the names of their fields.
    structures: Vec<(String, Vec<String>)>,
    /// The functions with their prototypes.
    functions: Vec<(String, String)>,
}

impl Declarations {
    /// Reads a header that cbindgen has written.
    fn read(header: &str) -> Self {
        let mut read = Self::default();
        let mut rest = without_comments(header);
        while let Some((line, after)) = rest.split_once('\n') {
            let (line, after) = (line.trim().to_owned(), after.to_owned());
            rest = after;
            if let Some(define) = line.strip_prefix("#define WM_") {
                let name = format!("WM_{}", define.split([' ', '(']).next().unwrap());
                if !OF_VERSION.iter().any(|prefix| name.starts_with(prefix)) {
                    read.constants.push(name);
                }
            } else if line.starts_with("typedef struct ") {
                let (body, after) = rest.split_once('}').unwrap();
                let (name, after) = after.split_once(';').unwrap();
                let fields = body.split(';').filter_map(field).collect();
                read.structures.push((name.trim().to_owned(), fields));
                rest = after.to_owned();
            } else if line.starts_with("typedef ") {
                read.types.push(line);
            } else if line.contains(" wm_") || line.contains("*wm_") {
                let (prototype, after) = match line.ends_with(';') {
                    true => (line, rest.as_str()),
                    false => {
                        let (end, after) = rest.split_once(';').unwrap();
                        (format!("{line} {end};"), after)
                    }
                };
                let prototype = prototype.split_whitespace().collect::<Vec<_>>().join(" ");
                let name = prototype.split('(').next().unwrap().rsplit([' ', '*']).next().unwrap();
                read.functions.push((name.to_owned(), prototype.clone()));
                rest = after.to_owned();
            }
        }
        read
    }

    /// Returns a C program that prints the sizes, offsets and values.
    fn program(&self) -> String {
        let mut text = "#include <stdio.h>\n#include <wholemem.h>\nint main(void) {\n".to_owned();
        let mut print = |what: &str, value: &str| {
            text += &format!("    printf(\"{what} %llu\\n\", (unsigned long long)({value}));\n");
        };
        for name in &self.constants {
            print(&format!("constant {name}"), name);
        }
        for (name, fields) in &self.structures {
            // A structure with its size in its first field may grow.
            if fields[0] != "struct_size" {
                print(&format!("size {name}"), &format!("sizeof({name})"));
            }
            for field in fields {
                print(&format!("offset {name}.{field}"), &format!("offsetof({name}, {field})"));
            }
        }
        text + "    return 0;\n}\n"
    }
}

fn without_comments(header: &str) -> String {
    let mut parts = header.split("/*");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| text + part.split_once("*/").unwrap().1)
}

/// Returns the name in the declaration of a field.
fn field(declaration: &str) -> Option<String> {
    let name = declaration.split('[').next()?.trim().rsplit([' ', '*']).next()?;
    (!name.is_empty()).then(|| name.to_owned())
}

/// Returns the lines of the current interface.
fn current() -> BTreeSet<String> {
    let root = repository();
    let declarations = Declarations::read(&fs::read_to_string(root.join("include/wholemem.h")).unwrap());
    let exported = exported();
    let declared: BTreeSet<_> = declarations.functions.iter().map(|(name, _)| name.clone()).collect();
    assert_eq!(declared, exported, "the functions of the header are those that the library exports");

    let folder = tempfile::tempdir().unwrap();
    let (source, program) = (folder.path().join("list.c"), folder.path().join("list"));
    fs::write(&source, declarations.program()).unwrap();
    let include = format!("-I{}", root.join("include").display());
    let mut compile = Command::new("cc");
    compile.args(["-std=c11", "-Wall", "-Wextra", "-pedantic", "-Werror", &include, "-o"]);
    let output = compile.arg(&program).arg(&source).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = Command::new(&program).output().unwrap();
    let values = String::from_utf8(output.stdout).unwrap();
    let functions = declarations.functions.iter().map(|(_, prototype)| format!("function {prototype}"));
    values.lines().map(str::to_owned).chain(functions).chain(declarations.types).collect()
}

/// Returns the symbols that the shared library exports.
fn exported() -> BTreeSet<String> {
    let library = library_folder().join("libwholemem_capi.so");
    let output = Command::new("nm").args(["--dynamic", "--defined-only"]).arg(&library).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| line.rsplit(' ').next().unwrap().to_owned()).collect()
}

#[test]
fn the_interface_has_every_line_of_the_committed_list_and_no_other() {
    let path = repository().join(LIST);
    let committed: BTreeSet<_> =
        fs::read_to_string(&path).unwrap_or_default().lines().map(str::to_owned).collect();
    let current = current();
    let gone: Vec<_> = committed.difference(&current).collect();
    assert!(gone.is_empty(), "the interface may only grow, but these lines of {LIST} changed: {gone:#?}");
    if std::env::var_os("WHOLEMEM_UPDATE_INTERFACE").is_some() {
        let lines: String = current.iter().map(|line| format!("{line}\n")).collect();
        fs::write(&path, lines).unwrap();
        return;
    }
    let new: Vec<_> = current.difference(&committed).collect();
    assert!(
        new.is_empty(),
        "{LIST} lacks these lines: increase `WM_ABI_MINOR` in crates/capi/src/version.rs if the last release has not got them, and \
         run this test with WHOLEMEM_UPDATE_INTERFACE=1: {new:#?}"
    );
}

#[test]
fn declarations_of_a_header_are_read() {
    let header = "/* A (b); */\n#define WM_ABI_MINOR 1\n#define WM_A 7\n\ntypedef uint32_t wm_a_t;\n\n\
                  typedef struct wm_b_t {\n    /** x; */\n    uint8_t a[16];\n    const char *b;\n} wm_b_t;\n\n\
                  wm_a_t wm_c(wm_b_t b,\n            void *c);\n\nconst char *wm_d(void);\n";
    let read = Declarations::read(header);
    assert_eq!(read.constants, ["WM_A"]);
    assert_eq!(read.types, ["typedef uint32_t wm_a_t;"]);
    assert_eq!(read.structures, [("wm_b_t".to_owned(), vec!["a".to_owned(), "b".to_owned()])]);
    let functions: Vec<_> =
        read.functions.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
    assert_eq!(functions, [("wm_c", "wm_a_t wm_c(wm_b_t b, void *c);"), ("wm_d", "const char *wm_d(void);")]);
}
