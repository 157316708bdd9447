//! Random sequences of calls of every function of the header, from several threads: `tests/c/fuzz.c`.
//!
//! The calls are generated from the prototypes of the header, by the types and names of the parameters. A parameter for which there is no
//! rule fails the test, so that no function can be forgotten. No pointer claims more memory than it has.

use std::fmt::Write;
use std::fs;
use std::process::Command;

use super::interface_list::Declarations;
use super::support::{library_folder, repository, run_path};
use super::test_store::TestStore;

/// The number of sequences, each of 12 calls.
const SAMPLE: u64 = 400;
const ALL: u64 = 10_000;
const THREADS: u64 = 4;

/// Functions that free a handle even if they fail for another reason than an invalid handle.
const ALWAYS_FREE: [&str; 1] = ["wm_window_deregister"];

/// Functions that cannot succeed here: no launcher has started the program, and its buffers are no memory that can be registered.
const NEVER_SUCCEED: [&str; 3] = ["wm_communicator_create_from_env", "wm_window_register", "wm_window_adopt"];

/// The handle types of a header, and its functions.
struct Generator<'a> {
    header: &'a Declarations,
    handles: Vec<&'a str>,
}

/// The statements of a generated call.
#[derive(Default)]
struct Statements {
    before: String,
    arguments: Vec<String>,
    /// What is done if the call succeeds.
    after: String,
}

impl<'a> Generator<'a> {
    fn new(header: &'a Declarations) -> Self {
        let handles = header.structures.iter().filter(|(_, fields)| *fields == ["value"]);
        Self { header, handles: handles.map(|(name, _)| name.as_str()).collect() }
    }

    fn fields(&self, name: &str) -> &[(String, String)] {
        let found = self.header.fields.iter().find(|(known, _)| known == name);
        &found.unwrap_or_else(|| panic!("no structure {name}")).1
    }

    /// Generates a C function that calls a function of the interface with random arguments.
    fn call(&self, number: usize, name: &str, prototype: &str) -> String {
        let parameters = prototype.split_once('(').unwrap().1.strip_suffix(");").unwrap();
        let mut made = Statements::default();
        let count = format!("atomic_fetch_add(&successes[{number}], 1);");
        for parameter in parameters.split(", ").filter(|parameter| *parameter != "void") {
            let (kind, parameter) = split(parameter);
            self.argument(name, &kind, &parameter, &mut made);
        }
        let arguments = made.arguments.join(", ");
        let mut text =
            format!("static void fuzz_{name}(struct fuzz *fuzz) {{\n    (void)fuzz;\n{}", made.before);
        match prototype.split_once(' ').unwrap().0 {
            "wm_status_t" if ALWAYS_FREE.contains(&name) => {
                let _ = writeln!(text, "    wm_status_t status = {name}({arguments});");
                let _ = writeln!(text, "    if (is_ok(\"{name}\", status)) {count}");
                let _ = writeln!(text, "    if (status != WM_ERROR_INVALID_HANDLE) {{\n{}    }}", made.after);
            }
            "wm_status_t" => {
                let _ = writeln!(
                    text,
                    "    if (is_ok(\"{name}\", {name}({arguments}))) {{\n        {count}\n{}    }}",
                    made.after
                );
            }
            _ => {
                let _ = writeln!(text, "    (void){name}({arguments});\n    {count}");
            }
        }
        text + "}\n\n"
    }

    fn argument(&self, function: &str, kind: &str, name: &str, made: &mut Statements) {
        let var = format!("own_{name}");
        let (base, is_const) =
            (kind.trim_start_matches("const ").trim_end_matches(" *"), kind.starts_with("const "));
        let structure = base.strip_prefix("struct ");
        let is_pointer = kind.ends_with('*');
        if let Some(base) = structure
            && self.handles.contains(&base)
        {
            match (is_pointer, is_const) {
                (false, _) => {
                    let _ = writeln!(made.before, "    {base} {var} = {{handle_of(fuzz, KIND_{base})}};");
                    made.arguments.push(var.clone());
                    if function.ends_with("_destroy") || ALWAYS_FREE.contains(&function) {
                        let _ = writeln!(made.after, "        forget(KIND_{base}, {var}.value);");
                    }
                }
                (true, true) => {
                    let picks = vec![format!("{{handle_of(fuzz, KIND_{base})}}"); 2].join(", ");
                    let _ = writeln!(made.before, "    {base} {var}[3] = {{{picks}}};");
                    made.arguments.push(format!("output(fuzz, {var})"));
                }
                (true, false) => {
                    let _ =
                        writeln!(made.before, "    {base} {var}[3];\n    memset({var}, 0, sizeof {var});");
                    made.arguments.push(format!("output(fuzz, {var})"));
                    let _ = writeln!(
                        made.after,
                        "        for (unsigned i = 0; i < 2; i++) keep(fuzz, KIND_{base}, {var}[i].value);"
                    );
                }
            }
            return;
        }
        if let (Some(base), true) = (structure, is_pointer) {
            // The structure is longer than it says in its first field.
            let _ = writeln!(
                made.before,
                "    struct {{ {base} value; uint64_t more[4]; }} {var};\n    memset(&{var}, 0, sizeof {var});"
            );
            if base == "wm_unique_id_t" {
                let _ = writeln!(
                    made.before,
                    "    snprintf({var}.value.text, 16, \"%llu\", (unsigned long long)number(fuzz));"
                );
                let _ = writeln!(
                    made.before,
                    "    if (below(fuzz, 4) != 0) (void)wm_unique_id_create(&{var}.value);"
                );
            } else if is_const || self.fields(base)[0].1 == "struct_size" {
                self.fill(base, &format!("{var}.value"), is_const, made);
            }
            let null = if is_const { "below(fuzz, 4) == 0 ? NULL : " } else { "" };
            made.arguments.push(format!("{null}output(fuzz, &{var})"));
            return;
        }
        let value = match (kind, name) {
            ("wm_capture_work_t", _) => "below(fuzz, 4) == 0 ? NULL : work".to_owned(),
            ("wm_log_callback_t", _) => "log_event".to_owned(),
            ("void *", "data") => "below(fuzz, 2) == 0 ? NULL : fuzz".to_owned(),
            ("void *", "stream") => "NULL".to_owned(),
            ("const char *", "path") => "path(fuzz)".to_owned(),
            ("const char *", "socket") => "socket_of(fuzz)".to_owned(),
            ("const char *", _) => "text(fuzz)".to_owned(),
            ("const int64_t *", _) => "indices(fuzz)".to_owned(),
            ("const uint64_t *", _) => "shape(fuzz)".to_owned(),
            ("void *" | "const void *", _) => "buffer(fuzz)".to_owned(),
            ("uint64_t *", "shape") => "output(fuzz, fuzz->scratch)".to_owned(),
            ("int *", "all") => {
                let _ = writeln!(made.before, "    int {var}[4] = {{-1, -1, -1, -1}};");
                let _ = writeln!(
                    made.after,
                    "        for (unsigned i = 0; i < 4; i++) if ({var}[i] >= 0) close({var}[i]);"
                );
                format!("below(fuzz, 8) == 0 ? NULL : {var}")
            }
            ("uint32_t *" | "uint64_t *" | "size_t *" | "void **" | "const void **" | "const char **", _) => {
                let _ = writeln!(made.before, "    uint64_t {var}[2] = {{0, 0}};");
                format!("output(fuzz, {var})")
            }
            ("int", "descriptor") => "descriptor(fuzz)".to_owned(),
            _ => self.number(kind, name, function.contains("create_local")),
        };
        made.arguments.push(value);
    }

    /// Generates the value of a number, by its type and name.
    fn number(&self, kind: &str, name: &str, is_group: bool) -> String {
        match (kind, name) {
            ("uint64_t", _) if name.contains("timeout") => "timeout(fuzz)".to_owned(),
            // A group in this process has at most as many ranks as there are handles.
            ("uint32_t", "count") if is_group => "(uint32_t)below(fuzz, 3)".to_owned(),
            ("uint32_t", "capacity" | "dimensions" | "raw_row_dimensions" | "rows_of_each_count") => {
                "(uint32_t)extent(fuzz, 3)".to_owned()
            }
            ("size_t" | "uint64_t", "len" | "meta_len") => "extent(fuzz, MAX_LEN)".to_owned(),
            ("size_t" | "uint64_t", "count") => "extent(fuzz, 64)".to_owned(),
            ("uint32_t", "size" | "lanes") => "(uint32_t)below(fuzz, 4)".to_owned(),
            // Most values of these flags are valid.
            ("uint32_t", "skip_bad" | "convert") => {
                "below(fuzz, 8) == 0 ? small(fuzz) : below(fuzz, 2)".to_owned()
            }
            ("wm_dtype_t", _) => "dtype(fuzz)".to_owned(),
            ("uint64_t", "id") => "id(fuzz)".to_owned(),
            ("uint32_t", _) => "small(fuzz)".to_owned(),
            ("uint64_t" | "size_t", _) => "number(fuzz)".to_owned(),
            _ if self.header.types.iter().any(|line| *line == format!("typedef uint32_t {kind};")) => {
                "choice(fuzz)".to_owned()
            }
            _ => {
                panic!("there is no rule for the parameter or field `{kind} {name}`: add one to {}", file!())
            }
        }
    }

    /// Generates statements that fill a structure.
    fn fill(&self, structure: &str, to: &str, is_input: bool, made: &mut Statements) {
        for (kind, field) in self.fields(structure) {
            let handle = kind.strip_prefix("struct ").filter(|kind| self.handles.contains(kind));
            let value = match (kind.as_str(), field.as_str(), handle) {
                (_, "struct_size", _) => format!("struct_size(fuzz, sizeof({structure}))"),
                _ if !is_input => continue,
                (_, _, Some(handle)) => {
                    format!("({handle}){{below(fuzz, 2) == 0 ? 0 : handle_of(fuzz, KIND_{handle})}}")
                }
                ("const char *", ..) => "text(fuzz)".to_owned(),
                ("void *" | "const void *", ..) => "buffer(fuzz)".to_owned(),
                ("const uint64_t *", ..) => "shape(fuzz)".to_owned(),
                // Rows at a stride are within the buffer.
                ("uint64_t", "stride", _) => "8 * below(fuzz, 9)".to_owned(),
                (kind, field, _) => self.number(kind, field, false),
            };
            let _ = writeln!(made.before, "    {to}.{field} = {value};");
        }
    }
}

/// Splits the declaration of a parameter or field into its type and its name.
fn split(declaration: &str) -> (String, String) {
    let at = declaration.rfind([' ', '*']).unwrap() + 1;
    (declaration[..at].trim().to_owned(), declaration[at..].to_owned())
}

fn generate(header: &Declarations) -> [(&'static str, String); 3] {
    let generator = Generator::new(header);
    let mut handles = String::new();
    let mut names = "static const char *const kind_names[] = {".to_owned();
    let mut destroy = String::new();
    for name in &generator.handles {
        let _ = writeln!(handles, "HANDLE({name})");
        let _ = write!(names, "\"{name}\", ");
        let function = format!("{}_destroy", name.strip_suffix("_t").unwrap());
        let _ = writeln!(
            destroy,
            "case KIND_{name}: if (is_ok(\"{function}\", {function}(({name}){{handle}}))) forget(kind, handle); break;"
        );
    }
    names += "};\n\n";
    let functions = || header.functions.iter().enumerate();
    let calls: String =
        functions().map(|(number, (name, prototype))| generator.call(number, name, prototype)).collect();
    let list = |begin: &str, item: &dyn Fn(&str) -> String| {
        let items: Vec<_> = functions().map(|(_, (name, _))| item(name)).collect();
        format!("{begin} = {{{}}};\n", items.join(", "))
    };
    let calls = names
        + &calls
        + &list("static void (*const calls[])(struct fuzz *)", &|name| format!("fuzz_{name}"))
        + &list("static const char *const call_names[]", &|name| format!("\"{name}\""));
    [("fuzz_handles.h", handles), ("fuzz_calls.h", calls), ("fuzz_destroy.h", destroy)]
}

#[test]
fn random_calls_from_several_threads_return_statuses_and_leak_nothing() {
    let served = TestStore::start();
    let (root, libraries, folder) = (repository(), library_folder(), tempfile::tempdir().unwrap());
    let header = Declarations::read(&fs::read_to_string(root.join("include/wholemem.h")).unwrap());
    for (file, text) in generate(&header) {
        fs::write(folder.path().join(file), text).unwrap();
    }
    let program = folder.path().join("fuzz");
    let mut compile = Command::new("cc");
    compile.args(["-std=gnu11", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror"]);
    // The sanitizer intercepts the memory functions of the library, which it does not instrument.
    compile.args(["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-o"]).arg(&program);
    compile.arg(root.join("crates/capi/tests/c/fuzz.c")).arg(format!("-I{}", folder.path().display()));
    compile.arg(format!("-I{}", root.join("include").display())).arg(format!("-L{}", libraries.display()));
    compile.args(["-lwholemem_capi", &run_path(folder.path())]);
    let output = compile.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    let files = folder.path().join("files");
    fs::create_dir(&files).unwrap();
    let sequences = if wholemem_testkit::exhaustive() { ALL } else { SAMPLE };
    let mut run = Command::new(&program);
    run.arg(&files).arg(served.socket().to_str().unwrap());
    run.args([wholemem_testkit::seed() >> 8, sequences, THREADS].map(|number| number.to_string()));
    run.env("WHOLEMEM_TIMEOUT", "0.02").env("ASAN_OPTIONS", "detect_leaks=1:fast_unwind_on_malloc=0");
    for name in ["RANK", "WORLD_SIZE", "WHOLEMEM_ID", "WHOLEMEM_SOCKET", "WHOLEMEM_LOG"] {
        run.env_remove(name);
    }
    let output = run.output().unwrap();
    let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}: {text}{errors}", output.status);
    wholemem_testkit::report(&text);
    let never: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("never succeeded: ")).collect();
    if wholemem_testkit::exhaustive() {
        assert_eq!(never, NEVER_SUCCEED);
    }
}

#[test]
#[should_panic(expected = "there is no rule for the parameter or field `double ratio`")]
fn a_function_with_an_unknown_parameter_is_noticed() {
    generate(&Declarations::read("wm_status_t wm_x(double ratio);\n"));
}
