//! Tests of what the commands of a store print at 80 columns, and of their JSON.

use std::io::Write;
use std::process::Stdio;

use serde_json::{Value, json};

use crate::json::{assert_keys, list, object};
use crate::run::{Run, finish, program, run};
use crate::store::StoreProcess;

/// Runs a command for a terminal of 80 columns.
fn on_80_columns(store: &StoreProcess, args: &[&str]) -> Run {
    let mut command = program(args);
    command.env("WHOLEMEM_SOCKET", store.file("socket")).env("COLUMNS", "80");
    finish(command)
}

/// Returns the output of a command, each line of which fits 80 columns.
fn screen(store: &StoreProcess, args: &[&str]) -> String {
    let run = on_80_columns(store, args);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{args:?}");
    assert!(run.stdout.lines().all(|line| line.chars().count() <= 80), "{args:?}:\n{}", run.stdout);
    run.stdout
}

fn json_of(store: &StoreProcess, args: &[&str]) -> Value {
    object(&store.run(args))
}

/// Returns the value of an entry of `stat`.
fn value<'a>(screen: &'a str, name: &str) -> &'a str {
    let line = screen.lines().find(|line| line.starts_with(&format!("  {name} "))).unwrap();
    line[name.len() + 2..].trim()
}

/// Starts a store with a pack of 24 tensors, an array, and an object with a long name.
fn filled() -> StoreProcess {
    let store = StoreProcess::start();
    let names = (0..12).flat_map(|layer| ["mlp.down_proj", "self_attn.q_proj"].map(|part| (layer, part)));
    let mut header = serde_json::Map::new();
    for (at, (layer, part)) in names.enumerate() {
        let tensor =
            json!({ "dtype": "F32", "shape": [16, 64], "data_offsets": [4096 * at, 4096 * (at + 1)] });
        header.insert(format!("layers.{layer}.{part}.weight"), tensor);
    }
    let header = serde_json::to_string(&header).unwrap();
    let len = (header.len() as u64).to_le_bytes();
    let file = [&len[..], header.as_bytes(), &vec![7; 24 * 4096]].concat();
    std::fs::write(store.file("model.safetensors"), file).unwrap();
    let header = format!("{:<117}\n", "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }");
    let array = [b"\x93NUMPY\x01\x00\x76\x00", header.as_bytes(), &[0; 24]].concat();
    std::fs::write(store.file("a.npy"), array).unwrap();
    store.output(&["put", "model", &store.file("model.safetensors")]);
    store.output(&["put", "features/10", &store.file("a.npy")]);
    store.output(&["put", "features/9", &store.file("a.npy")]);
    std::fs::write(store.file("bytes"), vec![0; 3_000_000]).unwrap();
    store.output(&["put", "experiments/2026-11-19/a.run.with.a.long.name/checkpoint", &store.file("bytes")]);
    store
}

/// Returns the lines of a screen with single spaces, and with `user` in place of the owner's name.
fn squeezed(store: &StoreProcess, screen: &str) -> String {
    let stat = store.output(&["stat", "model"]);
    let owner = value(&stat, "owner");
    let word = |word: &str| if word == owner { "user".to_owned() } else { word.to_owned() };
    let line = |line: &str| line.split_whitespace().map(word).collect::<Vec<_>>().join(" ");
    screen.lines().map(line).collect::<Vec<_>>().join("\n")
}

#[test]
fn ls_folds_packs_and_fits_80_columns() {
    let store = filled();
    insta::assert_snapshot!(squeezed(&store, &screen(&store, &["ls"])), @r"
    all rows: owner user

    size version content name
    2.9 MiB 1 bytes experiments/2026-11-19/a.run.with.a.long.name/
    checkpoint
    24 B 1 f32[2,3] features/9
    24 B 1 f32[2,3] features/10
    96 KiB 1 24 objects model
    ");
    insta::assert_snapshot!(squeezed(&store, &screen(&store, &["ls", "features/*"])), @r"
    size version owner content name
    24 B 1 user f32[2,3] features/9
    24 B 1 user f32[2,3] features/10
    ");
    let all = screen(&store, &["ls", "--all", "model"]);
    let names: Vec<_> = all.lines().skip(1).filter_map(|line| line.split_whitespace().last()).collect();
    assert_eq!((names.len(), names[0], names[5]), (25, "model", "model/layers.2.mlp.down_proj.weight"));
    assert_eq!(names[24], "model/layers.11.self_attn.q_proj.weight");
    // The objects of a pack that is not listed itself are listed.
    assert_eq!(screen(&store, &["ls", "model/"]).lines().count(), 25);
}

#[test]
fn ls_shows_readers_and_its_json_agrees_with_that_of_stat() {
    let store = filled();
    let client = wholemem_store::Client::connect(store.file("socket")).unwrap();
    let _held = client.get("features/9").unwrap();
    let long = screen(&store, &["ls", "-l", "features/"]);
    let rows: Vec<Vec<_>> = long.lines().map(|line| line.split_whitespace().collect()).collect();
    let heading = ["size", "version", "age", "readers", "place", "owner", "content", "name"];
    assert_eq!(rows[0], heading);
    assert_eq!((rows[1][5], rows[2][5]), ("1", "0"), "readers of both: {long}");
    let listed = json_of(&store, &["ls", "--json"]);
    for entry in list(&listed["objects"]) {
        let name = entry["name"].as_str().unwrap();
        assert_eq!(&json_of(&store, &["stat", name, "--json"]), entry);
        let shown = screen(&store, &["stat", name]);
        assert_eq!(value(&shown, "version"), entry["version"].to_string());
        assert_eq!(value(&shown, "owner"), entry["owner_name"].as_str().unwrap());
        assert_eq!(value(&shown, "readers"), entry["readers"].to_string());
        assert!(value(&shown, "size").ends_with(&format!("({} bytes)", entry["len"])));
    }
    let array = &json_of(&store, &["ls", "features/9", "--json"])["objects"][0];
    assert_eq!(
        (&array["type"], &array["shape"], &array["readers"]),
        (&json!("f32"), &json!([2, 3]), &json!(1))
    );
    let pack = &json_of(&store, &["ls", "model", "--json"])["objects"][0];
    assert_eq!((&pack["objects"], &pack["type"]), (&json!(24), &Value::Null));
}

#[test]
fn stat_shows_the_server_that_is_killed_by_its_pid() {
    let store = filled();
    let before = json_of(&store, &["stat", "--json"]);
    let keys = ["objects", "unsealed", "retired", "clients", "host", "device", "epoch", "server"];
    assert_keys(&before, &keys);
    assert_keys(&before["server"], &["pid", "number", "started_ms"]);
    assert_eq!(before["server"]["number"], 1);
    wholemem_os::PidFd::open(store.server()).unwrap().kill().unwrap();
    let after = json_of(&store, &["stat", "--json"]);
    assert_eq!(after["server"]["number"], 2);
    assert_ne!(after["server"]["pid"], before["server"]["pid"]);
    let shown = screen(&store, &["stat"]);
    let server = format!("process {}, number 2, started 0 s ago", after["server"]["pid"]);
    assert!(value(&shown, "server").starts_with(&server[..server.len() - 7]), "{shown}");
}

#[test]
fn rm_reports_each_object_and_goes_on_after_a_failure() {
    let store = filled();
    let run = on_80_columns(&store, &["rm", "features/*", "missing", "model"]);
    assert_eq!(run.code, Some(1));
    insta::assert_snapshot!(run.stdout, @r"
    removed features/9 version 1, 24 B
    removed features/10 version 1, 24 B
    removed model version 1, 96 KiB, 24 objects
    ");
    assert_eq!(run.stderr, "error: there is no object named `missing`\n");
    assert_eq!(json_of(&store, &["stat", "--json"])["objects"], 1);
    let run = store.run(&["rm", "--json", "experiments/*", "none*"]);
    assert_eq!((run.code, run.stderr.as_str()), (Some(1), ""));
    let report: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(report["removed"][0]["len"], 3_000_000);
    assert_eq!(report["failed"], json!([{ "message": "no object has a name that matches `none*`" }]));
}

#[test]
fn a_name_that_looks_like_a_pattern_is_removed_by_itself() {
    let store = filled();
    for name in ["a*", "ab"] {
        store.output(&["put", name, &store.file("bytes")]);
    }
    assert_eq!(store.output(&["rm", "a*"]), "removed a* version 1, 2.9 MiB\n");
    assert_eq!(store.output(&["rm", "a*"]), "removed ab version 1, 2.9 MiB\n");
}

#[test]
fn errors_are_json_if_json_is_requested() {
    let store = StoreProcess::start();
    let error = |run: &Run| -> Value { serde_json::from_str(&run.stderr).unwrap() };
    let run = store.run(&["stat", "x", "--json"]);
    assert_eq!((run.code, run.stdout.as_str()), (Some(1), ""));
    let missing = json!({ "message": "there is no object named `x`", "code": "no-such-name" });
    assert_eq!(error(&run), json!({ "error": missing }));
    let run = store.run(&["ls", "--json", "--josn"]);
    assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""));
    assert_eq!(error(&run)["error"]["message"], "unexpected argument '--josn' found");
    let mut command = program(&["ls", "--json"]);
    command.env("WHOLEMEM_SOCKET", store.file("none"));
    let run = finish(command);
    assert_eq!((&error(&run)["error"]["code"], run.code), (&json!("not-served"), Some(1)));
    assert!(error(&run)["error"]["hint"].as_str().unwrap().contains("wholemem serve"));
    // The arguments of the command that `launch` runs are not those of the program.
    let run = crate::run::run(&["launch", "-n", "0", "--", "true", "--json"]);
    assert!(run.stderr.starts_with("error: "), "{}", run.stderr);
}

#[test]
fn put_and_get_use_stdin_and_stdout() {
    let store = StoreProcess::start();
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|at| (at % 251).to_le_bytes()[0]).collect();
    let mut put = program(&["put", "piped", "-"]);
    put.env("WHOLEMEM_SOCKET", store.file("socket")).stdin(Stdio::piped());
    let mut put = put.spawn().unwrap();
    put.stdin.take().unwrap().write_all(&bytes).unwrap();
    let output = put.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "piped version 1, 2.9 MiB\n");
    // A file on stdin is not read into memory first.
    std::fs::write(store.file("in"), &bytes).unwrap();
    let mut put = program(&["put", "piped", "-"]);
    put.env("WHOLEMEM_SOCKET", store.file("socket")).stdin(std::fs::File::open(store.file("in")).unwrap());
    assert_eq!(finish(put).stdout, "piped version 2, 2.9 MiB\n");
    let mut get = program(&["get", "piped", "-", "--json"]);
    let output = get.env("WHOLEMEM_SOCKET", store.file("socket")).output().unwrap();
    assert!(output.stdout == bytes, "stdout has the bytes of the object");
    let report: Value = serde_json::from_slice(&output.stderr).unwrap();
    assert_eq!((&report["version"], &report["len"]), (&json!(2), &json!(3_000_000)));
    // A closed pipe ends `get` without an error.
    let mut get = program(&["get", "piped", "-"]);
    let mut get = get.env("WHOLEMEM_SOCKET", store.file("socket")).spawn().unwrap();
    drop(get.stdout.take());
    let output = get.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]));
}

#[test]
fn the_format_of_stdin_and_stdout_is_an_option() {
    let store = filled();
    let mut put = program(&["put", "copy", "-", "--format", "safetensors"]);
    let file = std::fs::File::open(store.file("model.safetensors")).unwrap();
    put.env("WHOLEMEM_SOCKET", store.file("socket")).stdin(file);
    assert_eq!(finish(put).stdout, "copy version 1, 96 KiB, 24 objects\n");
    let mut get = program(&["get", "features/9", "-", "--format", "npy"]);
    let output = get.env("WHOLEMEM_SOCKET", store.file("socket")).output().unwrap();
    assert!(output.stdout.starts_with(b"\x93NUMPY"), "{output:?}");
}

#[test]
fn doctor_and_demo_fit_80_columns() {
    let on_80 = |args: &[&str]| {
        let mut command = program(args);
        command.env("COLUMNS", "80");
        let run = finish(command);
        assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{args:?}");
        for line in run.stdout.lines() {
            assert!(line.chars().count() <= 80, "{args:?}: {line}");
        }
        run.stdout
    };
    assert!(on_80(&["doctor"]).contains("host: available"));
    assert!(on_80(&["demo", "--size", "64KiB"]).contains("all checks passed"));
    let table = "--table 1MiB --row-bytes 64 --rounds 1 --rows 100 --calls 1 --backend host";
    let gather: Vec<_> = ["bench", "gather"].into_iter().chain(table.split(' ')).collect();
    assert!(on_80(&gather).contains("all rows: "));
    // Without a terminal and without the variable, each row is one line.
    assert!(run(&["doctor"]).stdout.lines().any(|line| line.chars().count() > 80));
}

#[test]
fn watch_reports_replaced_objects_and_packs_and_is_resumed() {
    let store = StoreProcess::start();
    std::fs::write(store.file("in"), b"x").unwrap();
    store.output(&["put", "a", &store.file("in")]);
    // The first event of the store has the first revision of the first server.
    let first = (1_u64 << 32) + 1;
    for _ in 0..2 {
        store.output(&["put", "a", &store.file("in")]);
    }
    store.output(&["rm", "a"]);
    let after = (first - 1).to_string();
    let text = store.output(&["watch", "a", "--after", &after, "--count", "4"]);
    insta::assert_snapshot!(text, @r"
    published a version 1
    replaced  a version 2, before 1
    replaced  a version 3, before 2
    deleted   a version 3
    ");
    let lines = store.output(&["watch", "--after", &first.to_string(), "--count", "2", "--json"]);
    let events: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_keys(&events[0], &["event", "name", "id", "version", "previous", "objects", "revision"]);
    assert_eq!((&events[0]["previous"], &events[0]["revision"]), (&json!(1), &json!(first + 1)));
    assert_eq!((&events[1]["previous"], &events[1]["version"]), (&json!(2), &json!(3)));
}
