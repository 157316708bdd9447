//! Tests of special cases of `wholemem put` and `get`: invalid files and names, full disks, signals, links and modes.

use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use wholemem_os::PidFd;
use wholemem_os::pidfd::Signal;

use crate::run::{finish, program, timeout};
use crate::store::StoreProcess;

fn fails(store: &StoreProcess, args: &[&str]) -> String {
    let run = store.run(args);
    assert_eq!((run.code, run.stdout.as_str()), (Some(1), ""), "{args:?}");
    run.stderr
}

fn create_fifo(path: &str) {
    let path = Path::new(std::ffi::OsStr::from_bytes(path.as_bytes()));
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
}

#[test]
fn put_rejects_files_that_are_not_regular() {
    let store = StoreProcess::start();
    let pipe = store.file("pipe");
    create_fifo(&pipe);
    for path in [&pipe, "/dev/null", "/tmp"] {
        let expected = format!(
            "error: cannot put {path}: not a regular file: its length is not known in advance; `-` reads stdin\n"
        );
        assert_eq!(fails(&store, &["put", "name", path]), expected);
    }
    // `stat` reports a length of 0 for files in /proc.
    let text = fails(&store, &["put", "name", "/proc/self/status"]);
    assert_eq!(
        text,
        "error: cannot put /proc/self/status: the file is longer than the 0 bytes that stat reports\n"
    );
    assert_eq!(store.output(&["stat"]).lines().next(), Some("  objects     0"));
}

#[test]
fn put_rejects_an_empty_name() {
    let store = StoreProcess::start();
    std::fs::write(store.file("in"), b"x").unwrap();
    let run = store.run(&["put", "", &store.file("in")]);
    assert_eq!(run.code, Some(2));
    assert!(run.stderr.contains("a value is required for '<NAME>'"), "{}", run.stderr);
}

#[test]
fn control_characters_in_names_are_escaped() {
    let store = StoreProcess::start();
    std::fs::write(store.file("in"), b"x").unwrap();
    let name = "red\u{1b}[31m\nnext \u{9b}é gpj.\u{202e}exe\u{200b}";
    let shown = r"red\u{1b}[31m\nnext \u{9b}é gpj.\u{202e}exe\u{200b}";
    assert_eq!(store.output(&["put", name, &store.file("in")]), format!("{shown} version 1, 1 B\n"));
    assert_eq!(store.output(&["get", name, &store.file("out")]), format!("{shown} version 1, 1 B\n"));
    for args in [vec!["ls"], vec!["stat", name]] {
        let text = store.output(&args);
        assert!(text.contains(shown) && !text.contains('\u{1b}'), "{text:?}");
    }
    let error = fails(&store, &["rm", "no\u{1b}[2J\u{2066}\nhint: no"]);
    assert_eq!(error, "error: there is no object named `no\\u{1b}[2J\\u{2066}\\nhint: no`\n");
    let exact = "\"red\\u001b[31m\\nnext \u{9b}é gpj.\u{202e}exe\u{200b}\"";
    assert!(store.output(&["ls", "--json"]).contains(exact), "JSON has the exact name");
}

#[test]
fn get_writes_a_format_only_if_the_object_was_put_in_it() {
    let store = StoreProcess::start();
    std::fs::write(store.file("in"), b"x").unwrap();
    store.output(&["put", "plain", &store.file("in")]);
    for (file, kind) in [("out.npy", ".npy file"), ("out.safetensors", ".safetensors file")] {
        let path = store.file(file);
        let expected = format!(
            "error: cannot write {path}: `plain` was not put as a {kind}; with `--format bytes` its bytes are written without a header\n"
        );
        assert_eq!(fails(&store, &["get", "plain", &path]), expected);
        assert!(!Path::new(&path).exists());
    }
}

#[test]
fn put_rejects_truncated_and_invalid_npy_files() {
    let store = StoreProcess::start();
    let npy = |header: &str, elements: &[u8]| {
        let len = u16::try_from(header.len()).unwrap().to_le_bytes();
        [b"\x93NUMPY\x01\x00", &len[..], header.as_bytes(), elements].concat()
    };
    let path = store.file("v.npy");
    let whole = "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }\n";
    for (file, reason) in [
        (npy(whole, &[0; 47]), "the file has 117 bytes, but its header requires 118"),
        (npy("{'x': 1}", &[0; 47]), "invalid .npy file: the header is not a dictionary"),
        (
            npy("{'descr': '<f4'}", &[0; 4]),
            "invalid .npy file: the header lacks `descr`, `fortran_order` or `shape`",
        ),
        (b"\x93NUMPY\x01\x00\xff\xff".to_vec(), "invalid .npy file: the header is truncated"),
        (Vec::new(), "invalid .npy file: it does not begin with the magic bytes"),
    ] {
        std::fs::write(&path, file).unwrap();
        assert_eq!(fails(&store, &["put", "v", &path]), format!("error: cannot put {path}: {reason}\n"));
    }
    // If a .npy file has an unknown element type, its length cannot be checked, and its bytes are stored unchanged.
    std::fs::write(
        &path,
        npy("{'descr': [('a', '<f4')], 'fortran_order': True, 'shape': (2, 1), }", b"12345678"),
    )
    .unwrap();
    store.output(&["put", "v", &path]);
    std::fs::write(store.file("m.safetensors"), b"abc").unwrap();
    let path = store.file("m.safetensors");
    let expected = format!(
        "error: cannot put {path}: not a .safetensors file: it is shorter than the 8 bytes with the length of its header\n"
    );
    assert_eq!(fails(&store, &["put", "m", &path]), expected);
}

#[test]
fn safetensors_metadata_round_trips_through_a_pack() {
    let store = StoreProcess::start();
    let file = |header: &str, elements: &[u8]| {
        let len = u64::try_from(header.len()).unwrap().to_le_bytes();
        [&len[..], header.as_bytes(), elements].concat()
    };
    let (path, out) = (store.file("m.safetensors"), store.file("out.safetensors"));
    let header = r#"{"__metadata__":{"format":"pt"},"a":{"data_offsets":[0,3],"dtype":"U8","shape":[3]}} "#;
    std::fs::write(&path, file(header, b"xyz")).unwrap();
    store.output(&["put", "m", &path]);
    store.output(&["get", "m", &out]);
    let written = std::fs::read(&out).unwrap();
    assert!(String::from_utf8_lossy(&written).contains(r#""__metadata__":{"format":"pt"}"#), "{written:?}");
    assert!(written.ends_with(b"xyz"));
    // If the `__metadata__` of a file is too long for the description of an object, it is not stored, and a note is printed.
    let long = "x".repeat(300);
    let header = format!(r#"{{"__metadata__":{{"by":"{long}"}}}}"#);
    std::fs::write(&path, file(&header, b"")).unwrap();
    let run = store.run(&["put", "m", &path]);
    assert_eq!((run.code, run.stdout.as_str()), (Some(0), "m version 2, 0 B, 0 objects\n"));
    assert_eq!(run.stderr, "note: `__metadata__` is not stored: it has 309 bytes, the limit is 204\n");
}

#[test]
fn get_writes_an_object_that_is_deleted_meanwhile() {
    let store = StoreProcess::start();
    std::fs::write(store.file("in"), b"bytes").unwrap();
    let pipe = store.file("pipe");
    create_fifo(&pipe);
    store.output(&["put", "name", &store.file("in")]);
    let mut get = program(&["get", "name", &pipe, "--wait", "60"]);
    let get = get.env("WHOLEMEM_SOCKET", store.file("socket")).spawn().unwrap();
    // Waits until `get` is connected to the store. `get` holds the object while it waits for a reader of the FIFO.
    while !store.output(&["stat"]).contains("clients     2") {
        std::thread::yield_now();
    }
    let (mut deleted, deadline) = (false, timeout());
    while !deleted {
        assert!(!deadline.has_passed(), "no client holds the object");
        deleted =
            store.run(&["rm", "name"]).code == Some(0) && store.output(&["stat"]).contains("retired     1");
        if !deleted {
            store.run(&["put", "name", &store.file("in")]);
        }
    }
    let mut bytes = Vec::new();
    std::fs::File::open(&pipe).unwrap().read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes, b"bytes");
    let output = get.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "name version 1, 5 B\n");
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr)), (Some(0), "".into()));
}

#[test]
fn a_full_disk_is_not_reported_as_out_of_memory() {
    let store = StoreProcess::start();
    std::fs::write(store.file("in"), b"x").unwrap();
    store.output(&["put", "name", &store.file("in")]);
    let text = fails(&store, &["get", "name", "/dev/full"]);
    assert_eq!(text, "error: cannot write /dev/full: No space left on device (os error 28)\n");
}

/// Returns the names of the files in the folder of a store, without its socket.
fn names(store: &StoreProcess) -> Vec<String> {
    let folder = std::fs::read_dir(Path::new(&store.file("."))).unwrap();
    let names = folder.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.filter(|name| name != "socket").collect();
    names.sort();
    names
}

#[test]
fn a_get_that_exceeds_the_file_size_limit_keeps_the_old_file() {
    let store = StoreProcess::start();
    std::fs::write(store.file("in"), vec![7; 3_000_000]).unwrap();
    store.output(&["put", "name", &store.file("in")]);
    let header = r#"{"a":{"data_offsets":[0,3000000],"dtype":"U8","shape":[3000000]}} "#;
    let len = u64::try_from(header.len()).unwrap().to_le_bytes();
    let tensors = [&len[..], header.as_bytes(), &vec![7; 3_000_000]].concat();
    std::fs::write(store.file("in.safetensors"), tensors).unwrap();
    store.output(&["put", "tensors", &store.file("in.safetensors")]);
    // The size of files is limited to 1 MiB, in a process that ignores SIGXFSZ and in one that does not.
    for (trap, name, file) in
        [("trap '' XFSZ", "name", "out"), ("true", "name", "out"), ("true", "tensors", "out.safetensors")]
    {
        let path = store.file(file);
        std::fs::write(&path, b"old").unwrap();
        let before = names(&store);
        let script = format!("{trap}; ulimit -c 0; ulimit -f 1024; exec \"$@\"");
        let mut limited = std::process::Command::new("bash");
        limited.args(["-c", &script, "sh", env!("CARGO_BIN_EXE_wholemem"), "get", name, &path]);
        limited.env("WHOLEMEM_SOCKET", store.file("socket"));
        limited.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::piped());
        limited.stderr(std::process::Stdio::piped());
        let run = finish(limited);
        let expected = format!("error: cannot write {path}: File too large (os error 27)\n");
        assert_eq!((run.code, run.stderr), (Some(1), expected));
        assert!(std::fs::read(&path).unwrap() == b"old", "the old file has changed");
        assert_eq!(names(&store), before);
    }
}

#[test]
fn an_interrupted_get_keeps_the_old_file() {
    let store = StoreProcess::start();
    std::fs::write(store.file("in"), vec![7; 48 << 20]).unwrap();
    store.output(&["put", "name", &store.file("in")]);
    std::fs::write(store.file("out"), b"old").unwrap();
    let before = names(&store);
    let deadline = timeout();
    loop {
        assert!(!deadline.has_passed(), "`get` is never found while it writes");
        let mut get = program(&["get", "name", &store.file("out")]);
        let mut get = get.env("WHOLEMEM_SOCKET", store.file("socket")).spawn().unwrap();
        let process = PidFd::open(get.id()).unwrap();
        while names(&store) == before && get.try_wait().unwrap().is_none() {}
        // Stops `get`, so that the signal arrives while it writes.
        let _ = process.signal(Signal::STOP);
        let is_writing = names(&store) != before;
        let _ = process.signal(Signal::INT).and_then(|()| process.signal(Signal::CONT));
        let output = get.wait_with_output().unwrap();
        assert_eq!(names(&store), before, "{output:?}");
        if is_writing && output.status.code() != Some(0) {
            let text = String::from_utf8(output.stderr).unwrap();
            let expected = format!(
                "error: cannot write {}: interrupted by a signal before the output file was complete\n",
                store.file("out")
            );
            assert_eq!((output.status.code(), text), (Some(1), expected));
            assert!(std::fs::read(store.file("out")).unwrap() == b"old", "the old file has changed");
            return;
        }
        std::fs::write(store.file("out"), b"old").unwrap();
    }
}

#[test]
fn get_preserves_symlinks_and_modes_and_writes_to_descriptors() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    let store = StoreProcess::start();
    std::fs::write(store.file("in"), b"bytes").unwrap();
    store.output(&["put", "name", &store.file("in")]);
    std::fs::write(store.file("out"), b"old").unwrap();
    std::fs::set_permissions(store.file("out"), std::fs::Permissions::from_mode(0o640)).unwrap();
    symlink("out", store.file("link")).unwrap();
    store.output(&["get", "name", &store.file("link")]);
    assert!(Path::new(&store.file("link")).is_symlink());
    assert_eq!(std::fs::read(store.file("out")).unwrap(), b"bytes");
    assert_eq!(std::fs::metadata(store.file("out")).unwrap().mode() & 0o777, 0o640);
    assert_eq!(store.output(&["get", "name", "/dev/stdout"]), "bytesname version 1, 5 B\n");
    assert_eq!(store.output(&["get", "name", "/dev/null"]), "name version 1, 5 B\n");
}
