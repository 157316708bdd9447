//! Tests of the metrics of a store, of `wholemem top`, and of sockets that systemd passes.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use wholemem_os::PidFd;
use wholemem_os::packet::{Address, PacketListener};
use wholemem_os::pidfd::Signal;
use wholemem_store::Client;

use crate::json::{assert_keys, list, object};
use crate::run::{finish, program, timeout};
use crate::store::StoreProcess;

/// Sends an HTTP request, and returns the answer.
fn request(mut stream: impl Read + Write, text: &str) -> String {
    stream.write_all(text.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// Returns a connection to the exporter, which the keeper starts beside the server.
fn connect(path: &str) -> UnixStream {
    let deadline = timeout();
    loop {
        if let Ok(stream) = UnixStream::connect(path) {
            return stream;
        }
        assert!(!deadline.has_passed(), "the exporter does not listen");
        std::thread::yield_now();
    }
}

/// Returns the value of a metric with its labels.
fn metric(text: &str, name: &str) -> f64 {
    let line = text.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(' ')));
    let line = line.unwrap_or_else(|| panic!("no {name} in:\n{text}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

const GET: &str = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";

#[test]
fn metrics_agree_with_the_statistics_of_the_server() {
    let folder = tempfile::tempdir_in("/tmp").unwrap();
    let path = folder.path().join("metrics").to_str().unwrap().to_owned();
    let store = StoreProcess::start_with(&["--size", "64MiB", "--metrics", &path]);
    let client = Client::connect(store.file("socket")).unwrap();
    for name in ["a", "a", "b"] {
        client.put(name, &[7; 1000]).unwrap();
    }
    assert!(client.get("missing").is_err());
    let answer = request(connect(&path), GET);
    let (head, text) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4"), "{head}");
    assert!(head.contains(&format!("Content-Length: {}\r\n", text.len())), "{head}");
    let statistics = client.statistics().unwrap();
    let of = |name: &str| metric(text, &format!("wholemem_store_{name}"));
    assert_eq!((of("objects"), of("objects_sealed_total"), of("bytes_sealed_total")), (2.0, 3.0, 3000.0));
    assert_eq!((of("clients"), of("server_restarts_total")), (2.0, 0.0), "the exporter is a client");
    let host = statistics.status.host;
    assert!(text.contains(&format!("wholemem_store_memory_quota_bytes{{kind=\"host\"}} {}\n", host.quota)));
    assert!(text.contains(&format!("wholemem_store_memory_used_bytes{{kind=\"host\"}} {}\n", host.used)));
    assert_eq!(of("request_duration_seconds_count{kind=\"create\"}"), 3.0);
    assert_eq!(of("request_duration_seconds_bucket{kind=\"create\",le=\"+Inf\"}"), 3.0);
    assert_eq!(of("requests_refused_total{kind=\"find\"}"), 1.0);
    // Each metric has its help and its type, and bounds only grow.
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let name = line.split(['{', ' ']).next().unwrap();
        let base =
            ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
        assert!(text.contains(&format!("# TYPE {base} ")), "{line}");
    }
    // The exporter reconnects to the next server.
    PidFd::open(store.server()).unwrap().kill().unwrap();
    let answer = request(connect(&path), GET);
    assert_eq!(metric(&answer, "wholemem_store_server_restarts_total"), 1.0);
    for (text, status) in [
        ("GET /other HTTP/1.1\r\n\r\n", "HTTP/1.1 404 "),
        ("POST /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 405 "),
        ("\r\n\r\n", "HTTP/1.1 405 "),
    ] {
        assert!(request(connect(&path), text).starts_with(status), "{text:?}");
    }
}

#[test]
fn metrics_are_served_on_the_loopback_interface_only() {
    let run = crate::run::run(&["serve", "--metrics", "192.0.2.1:9464", "--listen", "/tmp/never"]);
    let error = "error: metrics are served on the loopback interface or a Unix socket only, not at `192.0.2.1:9464`\n";
    assert_eq!((run.code, run.stderr.as_str()), (Some(1), error));
    // Port 0 lets the kernel choose; this test takes a free one before.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap().to_string();
    let run = crate::run::run(&["serve", "--metrics", &address, "--listen", "/tmp/never"]);
    assert_eq!(run.code, Some(1));
    assert!(
        run.stderr.starts_with(&format!("error: cannot serve metrics at `{address}`: Address")),
        "{}",
        run.stderr
    );
    drop(free);
    let _store = StoreProcess::start_with(&["--size", "64MiB", "--metrics", &address]);
    let answer = request(TcpStream::connect(&address).unwrap(), GET);
    assert!(answer.contains("wholemem_store_objects 0\n"), "{answer}");
}

#[test]
fn top_prints_the_state_once_if_stdout_is_not_a_terminal() {
    let store = StoreProcess::start();
    let client = Client::connect(store.file("socket")).unwrap();
    client.put("weights", &[7; 1000]).unwrap();
    let text = store.output(&["top", "--interval", "0.05"]);
    assert!(text.starts_with("wholemem top  "), "{text}");
    assert!(text.contains("  objects 1  drafts 0  retired 0  clients 2  "), "{text}");
    assert!(text.lines().last().unwrap().ends_with("bytes    weights"), "{text}");
    let view = object(&store.run(&["top", "--json", "--interval", "0.05"]));
    let keys = [
        "socket",
        "pid",
        "uptime_seconds",
        "status",
        "arena_bytes",
        "preallocated_bytes",
        "sealed_bytes_per_second",
        "events_per_second",
        "requests",
        "objects",
    ];
    assert_keys(&view, &keys);
    assert_eq!(view["pid"], store.server());
    assert_eq!(view["objects"][0]["name"], "weights");
    let create = list(&view["requests"]).iter().find(|request| request["kind"] == "create").unwrap();
    assert_eq!((create["total"].as_u64(), create["per_second"].as_f64()), (Some(1), Some(0.0)));
    assert_eq!(create["mean_us"], Value::Null);
}

/// Starts `serve` as systemd does: with a listening socket as descriptor 3, and with a socket for notifications.
fn start_activated(listener: &PacketListener, socket: &str, notify: &str) -> Child {
    // The shell moves the socket to descriptor 3 and becomes the program, so that its process id stays.
    let script = "exec 3<&0 </dev/null; export LISTEN_PID=$$ LISTEN_FDS=1; exec \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", script, "sh", env!("CARGO_BIN_EXE_wholemem"), "serve", "--backend", "host"]);
    command
        .args(["--size", "64MiB", "--listen", socket])
        .env("NOTIFY_SOCKET", notify)
        .env("WHOLEMEM_LOG", "off");
    command.stdin(Stdio::from(listener.share_fd().unwrap())).stdout(Stdio::piped());
    command.process_group(0).spawn().unwrap()
}

#[test]
fn a_store_serves_on_a_socket_that_systemd_passes() {
    let folder = tempfile::tempdir_in("/tmp").unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (socket, notify) = (file("socket"), file("notify"));
    let notified = UnixDatagram::bind(&notify).unwrap();
    let listener = PacketListener::bind(&Address::Path(socket.clone().into())).unwrap();
    for round in 0..2 {
        let mut keeper = start_activated(&listener, &socket, &notify);
        let mut line = String::new();
        BufReader::new(keeper.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, format!("serving {socket}\n"));
        let mut message = [0; 64];
        let len = notified.recv(&mut message).unwrap();
        assert_eq!(&message[..len], b"READY=1");
        let client = Client::connect(&socket).unwrap();
        client.put("name", b"value").unwrap();
        PidFd::open(client.statistics().unwrap().server).unwrap().kill().unwrap();
        assert_eq!(client.status().unwrap().epoch, 2, "{round}");
        assert_eq!(Client::connect(&socket).unwrap().get("name").unwrap().to_vec().unwrap(), b"value");
        let process = PidFd::open(keeper.id()).unwrap();
        process.signal(Signal::TERM).unwrap();
        assert!(process.wait_exit(timeout()).unwrap());
        assert!(keeper.wait().unwrap().success());
        // The socket belongs to systemd, which starts the service again for the next client.
        assert!(std::path::Path::new(&socket).exists(), "{round}");
    }
}

#[test]
fn a_descriptor_that_is_not_a_packet_socket_is_refused() {
    let folder = tempfile::tempdir_in("/tmp").unwrap();
    let script = "exec 3</dev/null; export LISTEN_PID=$$ LISTEN_FDS=1; exec \"$@\"";
    let mut command = Command::new("sh");
    command.args([
        "-c",
        script,
        "sh",
        env!("CARGO_BIN_EXE_wholemem"),
        "serve",
        "--backend",
        "host",
        "--listen",
    ]);
    command
        .arg(folder.path().join("socket"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let run = finish(command);
    let error = "error: the file descriptor is not a listening packet socket\n";
    assert_eq!((run.code, run.stderr.as_str()), (Some(1), error));
    // Variables of another process do not count.
    let mut command = program(&["stat", "--socket", "/tmp/never"]);
    command.env("LISTEN_PID", "1").env("LISTEN_FDS", "1");
    assert!(finish(command).stderr.starts_with("error: no store is served at"));
}
