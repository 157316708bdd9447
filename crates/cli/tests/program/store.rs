//! Tests of the commands of an object store: `serve`, `put`, `get`, `ls`, `stat`, `rm` and `watch`.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdout};

use wholemem_os::PidFd;
use wholemem_os::pidfd::Signal;

use crate::run::{Run, finish, program, timeout};

/// A process `wholemem serve` for a test, which is ended on drop.
pub(crate) struct StoreProcess {
    folder: tempfile::TempDir,
    keeper: Child,
    _stdout: BufReader<ChildStdout>,
}

impl StoreProcess {
    pub(crate) fn start() -> Self {
        Self::start_with(&["--size", "64MiB"])
    }

    pub(crate) fn start_with(args: &[&str]) -> Self {
        let folder = tempfile::tempdir_in("/tmp").unwrap();
        let socket = folder.path().join("socket");
        let mut keeper = program(&["serve", "--backend", "host", "--listen"])
            .arg(&socket)
            .args(args)
            .stderr(std::process::Stdio::inherit())
            .spawn()
            .unwrap();
        let mut stdout = BufReader::new(keeper.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        assert_eq!(line, format!("serving {}\n", socket.display()));
        Self { folder, keeper, _stdout: stdout }
    }

    pub(crate) fn run(&self, args: &[&str]) -> Run {
        let mut command = program(args);
        command.env("WHOLEMEM_SOCKET", self.folder.path().join("socket"));
        finish(command)
    }

    pub(crate) fn output(&self, args: &[&str]) -> String {
        let run = self.run(args);
        assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{args:?}");
        run.stdout
    }

    pub(crate) fn file(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    /// Returns the process id of the store's server.
    pub(crate) fn server(&self) -> u32 {
        let stat: serde_json::Value = serde_json::from_str(&self.output(&["stat", "--json"])).unwrap();
        u32::try_from(stat["server"]["pid"].as_u64().unwrap()).unwrap()
    }
}

impl Drop for StoreProcess {
    fn drop(&mut self) {
        if let Ok(process) = PidFd::open(self.keeper.id()) {
            let _ = process.signal(Signal::TERM);
            let _ = process.wait_exit(timeout());
        }
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
    }
}

#[test]
fn a_file_round_trips_through_a_store_whose_server_is_killed() {
    let store = StoreProcess::start();
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|at| (at % 251).to_le_bytes()[0]).collect();
    std::fs::write(store.file("in"), &bytes).unwrap();
    assert_eq!(store.output(&["put", "weights", &store.file("in")]), "weights version 1, 2.9 MiB\n");
    PidFd::open(store.server()).unwrap().kill().unwrap();
    store.output(&["get", "weights", &store.file("out")]);
    assert_eq!(std::fs::read(store.file("out")).unwrap(), bytes);
    let listed = store.output(&["ls"]);
    let words: Vec<_> = listed.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!((&words[..3], &words[4..]), (&["2.9", "MiB", "1"][..], &["bytes", "weights"][..]));
    let again = store.output(&["put", "weights", &store.file("in"), "--json"]);
    assert!(again.contains("\"version\":2,\"len\":3000000,\"objects\":1"), "{again}");
    assert_eq!(store.output(&["rm", "weights"]), "removed weights version 2, 2.9 MiB\n");
    let run = store.run(&["get", "weights", &store.file("out")]);
    assert_eq!((run.code, run.stderr.as_str()), (Some(1), "error: there is no object named `weights`\n"));
}

#[test]
fn the_default_quota_does_not_change_when_the_server_is_replaced() {
    // Without `--size`, the quota of a store is a part of the available memory, which objects reduce.
    let store = StoreProcess::start_with(&[]);
    std::fs::write(store.file("in"), vec![1; 64 << 20]).unwrap();
    let quota = |store: &StoreProcess| {
        let status = store.output(&["stat", "--json"]);
        status.split_once("\"host\":").unwrap().1.split_once('}').unwrap().0.to_owned()
    };
    store.output(&["put", "weights", &store.file("in")]);
    let before = quota(&store);
    PidFd::open(store.server()).unwrap().kill().unwrap();
    assert_eq!(quota(&store), before);
}

#[test]
fn safetensors_and_npy_files_round_trip_through_objects() {
    let store = StoreProcess::start();
    let header = br#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}} "#;
    let len = u64::try_from(header.len()).unwrap().to_le_bytes();
    let file = [&len[..], header, b"xyzuv"].concat();
    std::fs::write(store.file("m.safetensors"), &file).unwrap();
    let text = store.output(&["put", "m", &store.file("m.safetensors")]);
    assert_eq!(text, "m version 1, 5 B, 2 objects\n");
    store.output(&["get", "m/b", &store.file("b")]);
    assert_eq!(std::fs::read(store.file("b")).unwrap(), b"uv");
    store.output(&["get", "m", &store.file("out.safetensors")]);
    let out = std::fs::read(store.file("out.safetensors")).unwrap();
    assert!(out.ends_with(b"xyzuv"));
    let stat = store.output(&["stat", "m/a"]);
    assert!(stat.contains(r#"{"dtype":"U8","shape":[3]}"#), "{stat}");

    let header = "{'descr': '|u1', 'fortran_order': False, 'shape': (4,), }";
    let padded = format!("{header:<117}\n");
    let npy = [b"\x93NUMPY\x01\x00\x76\x00", padded.as_bytes(), b"abcd"].concat();
    std::fs::write(store.file("v.npy"), &npy).unwrap();
    store.output(&["put", "v", &store.file("v.npy")]);
    store.output(&["get", "v", &store.file("raw")]);
    assert_eq!(std::fs::read(store.file("raw")).unwrap(), b"abcd");
    store.output(&["get", "v", &store.file("out.npy")]);
    let out = std::fs::read(store.file("out.npy")).unwrap();
    assert!(out.ends_with(b"abcd") && out[10..].starts_with(header.as_bytes()));
}

#[test]
fn drafts_are_listed_and_deleted_by_their_id() {
    let store = StoreProcess::start();
    let client = wholemem_store::Client::connect(store.file("socket")).unwrap();
    let draft = client.create("weights", 3 << 20).unwrap();
    assert_eq!(store.output(&["ls", "--json"]), "{\"objects\":[]}\n");
    let (listed, id) = (store.output(&["ls", "--drafts"]), client.drafts("").unwrap()[0].id);
    let row = listed.lines().nth(1).unwrap().split_whitespace().collect::<Vec<_>>();
    assert_eq!((&row[..3], row[5], row[7]), (&["3", "MiB", &id.to_string()][..], "host", "weights"));
    let json = store.output(&["ls", "--drafts", "--json", "wei"]);
    let expected = format!("{{\"drafts\":[{{\"name\":\"weights\",\"id\":{},\"len\":3145728,", id.as_u64());
    assert!(json.starts_with(&expected), "{json}");
    assert_eq!(store.output(&["ls", "--drafts", "--json", "other"]), "{\"drafts\":[]}\n");
    assert_eq!(store.output(&["rm", "--id", &id.to_string()]), "removed weights, 3 MiB\n");
    assert_eq!(store.output(&["ls", "--drafts", "--json"]), "{\"drafts\":[]}\n");
    assert_eq!(draft.seal().map(drop).unwrap_err().error.code(), "nothing-to-seal");
    let run = store.run(&["rm", "--id", "1.x"]);
    assert!(
        run.stderr.contains(
            "not an id of an object or allocation: expected a number, or slot and generation such as `12.3`"
        ),
        "{}",
        run.stderr
    );
    assert_eq!(run.code, Some(2));
}

#[test]
fn watch_prints_events_of_a_prefix() {
    let store = StoreProcess::start();
    std::fs::write(store.file("in"), b"x").unwrap();
    let mut watch = program(&["watch", "a/", "--count", "2"]);
    watch.env("WHOLEMEM_SOCKET", store.file("socket"));
    let watching = watch.spawn().unwrap();
    // Waits until the process that watches the store is connected.
    while !store.output(&["stat"]).contains("clients     2") {
        std::thread::yield_now();
    }
    // Puts more objects than the watch prints: it may start after the connection, and then misses the first events.
    for name in ["b/1", "a/1", "a/2", "a/3", "a/4", "a/5"] {
        store.output(&["put", name, &store.file("in")]);
    }
    let output = watching.wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().count(), 2, "{text}");
    assert!(
        text.lines().all(|line| line.starts_with("published a/") && line.ends_with(" version 1")),
        "{text}"
    );
}

#[test]
fn watch_reports_missed_events_when_the_server_is_replaced() {
    let store = StoreProcess::start();
    std::fs::write(store.file("in"), b"x").unwrap();
    let mut watch = program(&["watch", "a/"]);
    watch.env("WHOLEMEM_SOCKET", store.file("socket"));
    let mut watching = watch.spawn().unwrap();
    let mut lines = BufReader::new(watching.stdout.take().unwrap()).lines().map(Result::unwrap);
    while !store.output(&["stat"]).contains("clients     2") {
        std::thread::yield_now();
    }
    for name in ["a/1", "a/2", "a/3", "a/4", "a/5"] {
        store.output(&["put", name, &store.file("in")]);
    }
    assert!(lines.any(|line| line == "published a/5 version 1"));
    PidFd::open(store.server()).unwrap().kill().unwrap();
    assert_eq!(lines.next().unwrap(), "missed    a/");
    store.output(&["put", "a/6", &store.file("in")]);
    assert_eq!(lines.next().unwrap(), "published a/6 version 1");
    watching.kill().unwrap();
    watching.wait().unwrap();
}

#[test]
fn sigterm_ends_a_store_and_removes_its_socket() {
    let store = StoreProcess::start();
    let (keeper, server) = (store.keeper.id(), store.server());
    let socket = store.file("socket");
    let again = store.run(&["serve", "--listen", &socket]);
    assert_eq!(
        again.stderr,
        format!("error: another server is already listening on the socket `{socket}`\n")
    );
    let processes = [keeper, server].map(|pid| PidFd::open(pid).unwrap());
    processes[0].signal(Signal::TERM).unwrap();
    for process in processes {
        assert_eq!(process.wait_exit(timeout()), Ok(true));
    }
    assert!(!Path::new(&socket).exists());
    let run = store.run(&["ls"]);
    let expected = format!(
        "error: no store is served at the socket `{socket}`\n\nhint: `wholemem serve` starts a store; `--socket` or \
         `WHOLEMEM_SOCKET` selects another socket\n"
    );
    assert_eq!((run.code, run.stderr), (Some(1), expected));
}

#[test]
fn a_store_started_with_parent_ends_with_that_process() {
    let folder = tempfile::tempdir_in("/tmp").unwrap();
    let socket = folder.path().join("socket");
    let mut parent = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
    let mut keeper =
        program(&["serve", "--backend", "host", "--parent", &parent.id().to_string(), "--listen"])
            .arg(&socket)
            .spawn()
            .unwrap();
    let mut line = String::new();
    BufReader::new(keeper.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("serving"));
    parent.kill().unwrap();
    parent.wait().unwrap();
    assert_eq!(PidFd::open(keeper.id()).unwrap().wait_exit(timeout()), Ok(true));
    assert!(keeper.wait().unwrap().success() && !socket.exists());
}

/// Returns a descendant of `ancestor` whose command line contains `words`.
fn descendant(ancestor: u32, words: &str) -> Option<u32> {
    let path = format!("/proc/{ancestor}/task/{ancestor}/children");
    let children = std::fs::read_to_string(path).unwrap_or_default();
    children.split_whitespace().filter_map(|pid| pid.parse().ok()).find_map(|pid: u32| {
        let cmdline = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let cmdline = String::from_utf8_lossy(&cmdline).replace('\0', " ");
        if cmdline.contains(words) { Some(pid) } else { descendant(pid, words) }
    })
}

#[test]
fn a_keeper_with_pid_1_in_a_namespace_replaces_its_server() {
    let unshare = ["--user", "--map-root-user", "--pid", "--fork", "--kill-child"];
    let tried = std::process::Command::new("unshare").args(unshare).arg("true").output();
    if !tried.is_ok_and(|tried| tried.status.success()) {
        return wholemem_testkit::skipped("this machine cannot create namespaces");
    }
    let folder = tempfile::tempdir_in("/tmp").unwrap();
    let socket = folder.path().join("socket");
    let mut outer = std::process::Command::new("unshare")
        .args(unshare)
        .arg(env!("CARGO_BIN_EXE_wholemem"))
        .args(["serve", "--backend", "host", "--size", "64MiB", "--listen"])
        .arg(&socket)
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = BufReader::new(outer.stdout.take().unwrap());
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    assert!(line.starts_with("serving"), "{line}");
    let client = wholemem_store::Client::connect(&socket).unwrap();
    client.put("name", b"value").unwrap();
    for round in 2..5 {
        let server = descendant(outer.id(), "--role server").unwrap();
        PidFd::open(server).unwrap().kill().unwrap();
        client.put("more", b"something").unwrap();
        assert_eq!(client.status().unwrap().epoch, round);
        let other = wholemem_store::Client::connect(&socket).unwrap();
        assert_eq!(other.get("name").unwrap().to_vec().unwrap(), b"value");
    }
    let keeper = descendant(outer.id(), "serve").unwrap();
    PidFd::open(keeper).unwrap().signal(Signal::TERM).unwrap();
    assert!(outer.wait().unwrap().success() && !socket.exists());
}
