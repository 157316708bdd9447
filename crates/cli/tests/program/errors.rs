//! Tests of the error messages, hints and exit codes of the program.

use std::process::Stdio;

use wholemem_hal::{Backend, BackendKind};

use crate::run::{finish, program, run};

#[test]
fn the_error_for_an_unknown_backend_lists_the_backends() {
    let run = run(&["demo", "--backend", "metal"]);
    assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""));
    insta::assert_snapshot!(run.stderr, @r"
    error: invalid value 'metal' for '--backend <BACKEND>'
      [possible values: auto, host, cuda]

    For more information, try '--help'.
    ");
}

#[test]
fn the_error_for_an_invalid_size_has_the_reason() {
    let run = run(&["demo", "--size", "1GB"]);
    assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""));
    insta::assert_snapshot!(run.stderr, @r"
    error: invalid value '1GB' for '--size <SIZE>': `GB` is not a unit: use B, KiB, MiB, GiB or TiB, or K, M, G or T

    For more information, try '--help'.
    ");
}

#[test]
fn the_error_for_an_unavailable_backend_has_a_hint() {
    let Err(error) = Backend::open(BackendKind::Cuda) else {
        println!("skipped: this machine has the cuda backend");
        return;
    };
    let commands: [&[&str]; 3] = [&["demo"], &["bench", "alloc"], &["bench", "share"]];
    for command in commands {
        let run = run(&[command, &["--backend", "cuda"]].concat());
        assert_eq!((run.code, run.stdout.as_str()), (Some(1), ""), "{command:?}");
        let hint = "hint: `wholemem doctor` shows what was tried; `--backend host` needs no GPU";
        assert_eq!(run.stderr, format!("error: {error}\n\n{hint}\n"), "{command:?}");
    }
}

#[test]
fn the_error_for_too_little_memory_has_a_hint() {
    let run = run(&["bench", "alloc", "--backend", "host", "--sizes", "4096TiB"]);
    assert_eq!((run.code, run.stdout.as_str()), (Some(1), ""));
    let (error, hint) = run.stderr.split_once("\n\n").unwrap();
    assert!(error.starts_with("error: cannot fill 4096 TiB of memory: "), "{error}");
    assert!(error.ends_with(" are available"), "{error}");
    let expected =
        "hint: use a smaller `--size`, `--sizes`, `--max-size` or `--table`, or free some memory\n";
    assert_eq!(hint, expected);
}

#[test]
fn the_internal_command_peer_cannot_be_started_from_a_shell() {
    let run = run(&["peer", "creator", "--parent", "1", "--backend", "host"]);
    assert_eq!((run.code, run.stdout.as_str()), (Some(1), ""));
    let expected = "error: this command is internal: only wholemem starts it: the file descriptor is not a packet socket\n";
    assert_eq!(run.stderr, expected);
}

#[test]
fn a_closed_stdout_is_not_a_failure() {
    let commands: [&[&str]; 5] = [
        &["--help"],
        &["doctor"],
        &["doctor", "--json"],
        &["demo", "--backend", "host", "--size", "64KiB"],
        &["bench", "alloc", "--backend", "host", "--sizes", "64KiB", "--rounds", "1"],
    ];
    for args in commands {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = program(args);
        command.stdout(Stdio::from(writer));
        let run = finish(command);
        assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{args:?}");
    }
}

#[test]
fn a_full_disk_is_a_failure() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut command = program(&["doctor"]);
    command.stdout(Stdio::from(full));
    let run = finish(command);
    assert_eq!(run.code, Some(1));
    assert_eq!(run.stderr, "error: cannot write to stdout: No space left on device (os error 28)\n");
}
