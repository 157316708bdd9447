//! Tests of the log events that `WHOLEMEM_LOG` selects, in all processes of the program.

use std::io::{BufRead, BufReader};

use wholemem_os::PidFd;
use wholemem_os::pidfd::Signal;

use crate::run::{Run, finish, program, timeout};

fn run_with(variables: &[(&str, &str)], args: &[&str]) -> Run {
    let mut command = program(args);
    command.env_remove("WHOLEMEM_LOG").env_remove("NCCL_DEBUG").envs(variables.iter().copied());
    finish(command)
}

const BENCH: [&str; 13] = [
    "bench",
    "allreduce",
    "--backend",
    "host",
    "--json",
    "--ranks",
    "2",
    "--sizes",
    "64KiB",
    "--rounds",
    "2",
    "--calls",
    "10",
];

#[test]
fn an_invalid_filter_is_an_error_of_every_command() {
    let run = run_with(&[("WHOLEMEM_LOG", "verbose")], &["doctor", "--json"]);
    assert_eq!((run.code, run.stdout.as_str()), (Some(1), ""));
    let error = "error: the environment variable `WHOLEMEM_LOG` has the invalid value `verbose`: \
                 `verbose` is neither a level (off, error, warn, info, debug, trace) nor a \
                 target of wholemem, with or without a level, such as `wholemem::collective=debug` or \
                 `wholemem::collective`\n";
    assert_eq!(run.stderr, error);
}

#[test]
fn ranks_log_the_memory_path_of_their_calls_to_stderr() {
    let run = run_with(&[("WHOLEMEM_LOG", "wholemem::collective=debug")], &BENCH);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    assert!(run.stdout.starts_with('{') && run.stdout.lines().count() == 1, "{}", run.stdout);
    for rank in 0..2 {
        let staged =
            format!("first collective call of this kind rank={rank} call=\"all_reduce\" dtype=f32 len=65536");
        let line =
            run.stderr.lines().find(|line| line.contains(&staged) && line.contains("input=\"staged\""));
        let line = line.unwrap_or_else(|| panic!("rank {rank} logged:\n{}", run.stderr));
        assert!(line.starts_with("debug: wholemem::collective: "), "{line}");
        assert!(line.contains("reason=\"the input is in no window, and not registered\""), "{line}");
    }
}

#[test]
fn nothing_is_logged_without_the_variable() {
    let run = run_with(&[], &BENCH);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
}

#[test]
fn the_server_of_a_store_logs_to_the_stderr_of_its_keeper() {
    let folder = tempfile::tempdir_in("/tmp").unwrap();
    let socket = folder.path().join("socket");
    let mut command = program(&["serve", "--backend", "host", "--size", "64MiB", "--listen"]);
    let mut keeper = command.arg(&socket).env("WHOLEMEM_LOG", "info").spawn().unwrap();
    let mut line = String::new();
    BufReader::new(keeper.stderr.take().unwrap()).read_line(&mut line).unwrap();
    let watch = PidFd::open(keeper.id()).unwrap();
    watch.signal(Signal::TERM).unwrap();
    assert!(watch.wait_exit(timeout()).unwrap());
    keeper.wait().unwrap();
    assert_eq!(
        line,
        "info: wholemem_store::server::io::startup: a server serves the store epoch=1 clients=0\n"
    );
}
