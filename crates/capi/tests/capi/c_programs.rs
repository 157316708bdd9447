//! A program in C, compiled with every C compiler of this machine, with ranks that are threads and processes.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use wholemem_comm::UniqueId;

use super::support::{library_folder, repository, run_path};
use super::test_store::TestStore;

/// The compilers, of which at least the first must be installed, and the standard.
const COMPILERS: [&str; 2] = ["cc", "clang"];

/// Compiles a C program of `tests/c` with each compiler that is installed, and calls `check` with each of the programs.
fn with_program(name: &str, check: impl Fn(&Path)) {
    let folder = tempfile::tempdir().unwrap();
    for compiler in COMPILERS {
        let is_installed = Command::new(compiler).arg("--version").stdout(Stdio::null()).status().is_ok();
        assert!(is_installed || compiler != COMPILERS[0], "there is no C compiler `{compiler}`");
        if !is_installed {
            wholemem_testkit::skipped(&format!("`{compiler}` is not installed"));
            continue;
        }
        let program = folder.path().join(compiler);
        compile(compiler, name, &program);
        check(&program);
    }
}

fn compile(compiler: &str, name: &str, program: &Path) {
    let (root, libraries) = (repository(), library_folder());
    let include = format!("-I{}", root.join("include").display());
    let source: PathBuf = root.join("crates/capi/tests/c").join(name);
    let mut compile = Command::new(compiler);
    compile.args(["-std=c11", "-O1", "-Wall", "-Wextra", "-pedantic", "-Werror", "-pthread", &include, "-o"]);
    compile.arg(program).arg(source).arg(format!("-L{}", libraries.display()));
    compile.args(["-lwholemem_capi", &run_path(program.parent().unwrap())]);
    let output = compile.output().unwrap();
    assert!(output.status.success(), "{compiler}: {}", String::from_utf8_lossy(&output.stderr));
}

fn succeeded(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {text}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn four_threads_of_a_c_program_get_the_right_results() {
    with_program("ranks.c", |program| {
        let output = Command::new(program).args(["threads", "4"]).output().unwrap();
        let text = succeeded(&output);
        let mut lines: Vec<_> = text.lines().collect();
        lines.sort_unstable();
        assert_eq!(lines, ["rank 0 of 4: ok", "rank 1 of 4: ok", "rank 2 of 4: ok", "rank 3 of 4: ok"]);
    });
}

#[test]
fn four_processes_of_a_c_program_get_the_right_results() {
    with_program("ranks.c", |program| {
        let id = UniqueId::create().unwrap().to_string();
        let start = |rank: u32| -> Child {
            let mut command = Command::new(program);
            command
                .arg("process")
                .env("WHOLEMEM_ID", &id)
                .env("WORLD_SIZE", "4")
                .env("RANK", rank.to_string());
            command.env_remove("LOCAL_WORLD_SIZE").env_remove("LOCAL_RANK");
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let children: Vec<_> = (0..4).map(start).collect();
        let outputs = children.into_iter().map(|child| child.wait_with_output().unwrap());
        for (rank, output) in outputs.enumerate() {
            assert_eq!(succeeded(&output), format!("rank {rank} of 4: ok\n"));
        }
    });
}

#[test]
fn a_c_program_uses_a_store_and_gets_a_report_and_log_events() {
    let served = TestStore::start();
    with_program("store.c", |program| {
        let output = Command::new(program).arg(served.socket().to_str().unwrap()).output().unwrap();
        assert_eq!(succeeded(&output), "ok\n");
    });
}
