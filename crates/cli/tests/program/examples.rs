//! Runs the Rust examples and compares their output with `examples/README.md`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::run::{finish, program};

const README: &str = include_str!("../../../../examples/README.md");

/// A command in `examples/README.md` that runs a Rust example, and its expected output.
#[derive(Debug, PartialEq, Eq)]
struct DocumentedRun {
    command: String,
    lines: Vec<String>,
}

fn documented_runs() -> Vec<DocumentedRun> {
    let blocks = README.split("```console\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let runs = blocks.map(|block| {
        let mut lines = block.lines().map(str::to_owned);
        let command = lines.next().unwrap().strip_prefix("$ ").unwrap().to_owned();
        DocumentedRun { command, lines: lines.collect() }
    });
    // The step `capi` of `cargo xtask test` builds and runs the examples in C, C++ and CUDA.
    runs.filter(|run| run.command.contains("--example ")).collect()
}

/// Builds the Rust examples, unless they are up to date, and returns their paths by name.
fn examples() -> BTreeMap<String, PathBuf> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--locked", "--package", "wholemem", "--examples", "--message-format=json"]);
    if !cfg!(debug_assertions) {
        cargo.arg("--release");
    }
    let output = cargo.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let messages = String::from_utf8(output.stdout).unwrap();
    let examples = messages.lines().filter_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        let is_example = message["target"]["kind"][0] == "example";
        let path = PathBuf::from(message["executable"].as_str().filter(|_| is_example)?);
        Some((message["target"]["name"].as_str()?.to_owned(), path))
    });
    examples.collect()
}

#[test]
fn every_example_prints_its_documented_output() {
    let (examples, runs) = (examples(), documented_runs());
    assert_eq!(runs.len(), examples.len(), "each example is documented once");
    for DocumentedRun { command, lines: mut expected } in runs {
        let name = command.split("--example ").nth(1).unwrap().trim();
        let path = examples.get(name).unwrap_or_else(|| panic!("there is no example `{name}`"));
        let command = match command.split_once("launch -n ") {
            None => {
                let mut plain = Command::new(path);
                plain.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
                plain
            }
            Some((_, rest)) => {
                let ranks = rest.split(' ').next().unwrap();
                program(&["launch", "-n", ranks, "--", path.to_str().unwrap()])
            }
        };
        let run = finish(command);
        assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{name}");
        let mut lines: Vec<_> = run.stdout.lines().map(str::to_owned).collect();
        // Lines are sorted, because the order of the output of different ranks is not defined.
        lines.sort();
        expected.sort();
        assert_eq!(lines, expected, "{name}");
    }
}
