//! Tests of the log events that `WHOLEMEM_LOG` selects, in all processes of the program.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStderr};

use serde_json::{Value, json};
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
    let run = run_with(&[("WHOLEMEM_LOG", "verbose")], &["doctor"]);
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

/// A store whose log is read line by line.
struct LoggedStore {
    _folder: tempfile::TempDir,
    socket: std::path::PathBuf,
    keeper: Child,
    log: std::io::Lines<BufReader<ChildStderr>>,
}

impl LoggedStore {
    fn start(format: &str) -> Self {
        let folder = tempfile::tempdir_in("/tmp").unwrap();
        let socket = folder.path().join("socket");
        let mut command = program(&["serve", "--backend", "host", "--size", "64MiB", "--listen"]);
        command.env_remove("WHOLEMEM_LOG").env_remove("NCCL_DEBUG").env("WHOLEMEM_LOG_FORMAT", format);
        let mut keeper = command.arg(&socket).spawn().unwrap();
        let log = BufReader::new(keeper.stderr.take().unwrap()).lines();
        Self { _folder: folder, socket, keeper, log }
    }

    /// Returns the next event as JSON that has this message.
    fn event(&mut self, message: &str) -> Value {
        let events = self.log.by_ref().map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
        let found = events.into_iter().find(|event| event["message"] == message);
        found.unwrap_or_else(|| panic!("the log ends without `{message}`"))
    }

    fn stop(&mut self, signal: Signal) {
        let watch = PidFd::open(self.keeper.id()).unwrap();
        watch.signal(signal).unwrap();
        assert!(watch.wait_exit(timeout()).unwrap());
        self.keeper.wait().unwrap();
    }
}

impl Drop for LoggedStore {
    fn drop(&mut self) {
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
    }
}

#[test]
fn a_store_logs_its_start_each_kill_with_its_cause_and_what_its_end_drops() {
    let mut store = LoggedStore::start("json");
    let start = store.event("a server serves the store");
    assert_eq!((&start["level"], &start["fields"]["epoch"]), (&json!("info"), &json!(1)));
    let client = wholemem_store::Client::connect(&store.socket).unwrap();
    client.put("name", b"value").unwrap();
    let mut server = client.statistics().unwrap().server;
    assert_eq!(start["fields"]["server"], server);
    for (epoch, (signal, cause)) in (2..).zip([
        (Signal::KILL, "signal: 9 (SIGKILL)"),
        (Signal::USR1, "signal: 10"),
        (Signal::KILL, "signal: 9"),
    ]) {
        PidFd::open(server).unwrap().signal(signal).unwrap();
        let death = store.event("the server has died");
        assert_eq!((&death["level"], &death["fields"]["server"]), (&json!("warn"), &json!(server)));
        assert!(death["fields"]["cause"].as_str().unwrap().starts_with(cause), "{death}");
        let next = store.event("a server serves the store");
        assert_eq!((&next["fields"]["epoch"], &next["fields"]["objects"]), (&json!(epoch), &json!(1)));
        server = client.statistics().unwrap().server;
        assert_eq!(next["fields"]["server"], server);
    }
    store.stop(Signal::INT);
    let signal = store.event("the store is stopped by a signal");
    assert_eq!(signal["fields"]["signal"], "SIGINT");
    let end = store.event("the store ends: its objects are dropped");
    assert_eq!((&end["level"], &end["fields"]["objects"]), (&json!("warn"), &json!(1)));
    assert!(end["fields"]["host"].as_u64().unwrap() > 0, "{end}");
}

#[test]
fn lines_for_journald_have_a_priority() {
    let mut store = LoggedStore::start("journal");
    let first = store.log.next().unwrap().unwrap();
    assert!(first.starts_with("<6>wholemem_store::"), "{first}");
    store.stop(Signal::TERM);
}

#[test]
fn an_unknown_log_format_is_an_error() {
    let run = run_with(&[("WHOLEMEM_LOG", "info"), ("WHOLEMEM_LOG_FORMAT", "xml")], &["doctor"]);
    let error = "error: `WHOLEMEM_LOG_FORMAT` is `xml`: the formats are text, journal and json\n";
    assert_eq!((run.code, run.stdout.as_str(), run.stderr.as_str()), (Some(1), "", error));
}
