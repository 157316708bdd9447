//! `wholemem serve --metrics`: answers HTTP requests for the metrics of a store.
//!
//! A process of its own, which is a client of the store: neither the keeper nor the server reads anything that comes from its
//! listener. The keeper starts it, and starts another if it dies. It serves one connection at a time, reads at most 8 KiB of each,
//! and waits at most two seconds for it. It listens on the loopback interface or on a Unix socket only, since it does not
//! authenticate its clients.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use wholemem_os::pidfd::Signal;
use wholemem_os::signal::Signals;
use wholemem_os::{Deadline, PidFd};
use wholemem_store::Client;

use super::exposition;

/// The time for which the exporter waits for a request, and for the client to read the answer.
const TIMEOUT: Duration = Duration::from_secs(2);

/// The maximum length of a request.
const MAX_REQUEST: usize = 8 << 10;

/// The delay before the exporter is started again after it has exited, or tries again to listen.
const RETRY: Duration = Duration::from_secs(1);

/// A listening socket for requests of metrics.
#[derive(Debug)]
pub(super) enum MetricsListener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// Returns true if an address is the path of a Unix socket, and not a port.
fn is_path(address: &str) -> bool {
    address.contains('/')
}

fn loopback(address: &str) -> Result<SocketAddr> {
    let mut found =
        address.to_socket_addrs().with_context(|| format!("`{address}` is not an address and a port"))?;
    let socket = found.next().with_context(|| format!("`{address}` has no address"))?;
    ensure!(
        socket.ip().is_loopback(),
        "metrics are served on the loopback interface or a Unix socket only, not at `{address}`"
    );
    Ok(socket)
}

impl MetricsListener {
    /// Listens at an address: a port of the loopback interface, or the path of a Unix socket. The file of a listener that was
    /// killed is replaced.
    pub(super) fn bind(address: &str) -> Result<Self> {
        let context = || format!("cannot serve metrics at `{address}`");
        if !is_path(address) {
            return Ok(Self::Tcp(TcpListener::bind(loopback(address)?).with_context(context)?));
        }
        let bound = UnixListener::bind(address).or_else(|error| {
            let is_stale = error.kind() == std::io::ErrorKind::AddrInUse
                && UnixStream::connect(address)
                    .is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused);
            if !is_stale {
                return Err(error);
            }
            std::fs::remove_file(address)?;
            UnixListener::bind(address)
        });
        let listener = bound.with_context(context)?;
        std::fs::set_permissions(address, std::fs::Permissions::from_mode(0o600)).with_context(context)?;
        Ok(Self::Unix(listener))
    }

    fn share(&self) -> std::io::Result<OwnedFd> {
        match self {
            Self::Tcp(listener) => listener.as_fd().try_clone_to_owned(),
            Self::Unix(listener) => listener.as_fd().try_clone_to_owned(),
        }
    }
}

/// Keeps an exporter running as long as this process lives: starts a thread that starts the exporter, and starts it again when it
/// exits. `listener` is bound by the thread if it is not given.
pub(super) fn supervise(address: String, listener: Option<MetricsListener>, socket: PathBuf) -> Result<()> {
    // The keeper reads these signals from a descriptor, so no thread of this process may receive them otherwise.
    Signals::block(&[Signal::TERM, Signal::INT, Signal::HUP])?;
    std::thread::Builder::new().name("metrics".to_owned()).spawn(move || {
        let mut listener = listener;
        loop {
            let bound = match listener.take() {
                Some(bound) => Ok(bound),
                None => MetricsListener::bind(&address),
            };
            let exited = bound.and_then(|bound| {
                let exited = run_exporter(&address, &bound, &socket)?;
                listener = Some(bound);
                Ok(exited)
            });
            match exited {
                Ok(status) => tracing::warn!(%status, "the exporter of metrics has exited"),
                Err(error) => {
                    tracing::warn!(error = %format!("{error:#}"), "cannot run the exporter of metrics")
                }
            }
            std::thread::sleep(RETRY);
        }
    })?;
    Ok(())
}

fn run_exporter(
    address: &str,
    listener: &MetricsListener,
    socket: &Path,
) -> Result<std::process::ExitStatus> {
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("wholemem")
        .args(["serve", "--role", "metrics", "--metrics", address, "--listen"])
        .arg(socket);
    command.args(["--parent", &std::process::id().to_string()]);
    Ok(command.stdin(Stdio::from(listener.share()?)).stdout(Stdio::null()).spawn()?.wait()?)
}

/// Runs the exporter, whose listener is its stdin, until the process that started it exits.
pub(super) fn run(
    address: Option<&str>,
    listener: OwnedFd,
    socket: &Path,
    parent: Option<u32>,
) -> Result<()> {
    let (Some(address), Some(parent)) = (address, parent) else { bail!("this role is internal") };
    let parent = PidFd::open(parent)?;
    #[expect(clippy::exit, reason = "the store has ended, and the main thread waits for a connection")]
    std::thread::spawn(move || {
        let _ = parent.wait_exit(Deadline::NEVER);
        std::process::exit(0);
    });
    let mut source = MetricsSource { socket: socket.to_owned(), client: None };
    if is_path(address) {
        let listener = UnixListener::from(listener);
        listener.set_nonblocking(false)?;
        loop {
            let (stream, _) = listener.accept()?;
            let timeouts = [stream.set_read_timeout(Some(TIMEOUT)), stream.set_write_timeout(Some(TIMEOUT))];
            report(
                timeouts
                    .into_iter()
                    .collect::<std::io::Result<()>>()
                    .and_then(|()| answer(stream, &mut source)),
            );
        }
    }
    let listener = TcpListener::from(listener);
    listener.set_nonblocking(false)?;
    loop {
        let (stream, _) = listener.accept()?;
        let timeouts = [stream.set_read_timeout(Some(TIMEOUT)), stream.set_write_timeout(Some(TIMEOUT))];
        report(
            timeouts.into_iter().collect::<std::io::Result<()>>().and_then(|()| answer(stream, &mut source)),
        );
    }
}

fn report(outcome: std::io::Result<()>) {
    if let Err(error) = outcome {
        tracing::debug!(%error, "a connection for metrics failed");
    }
}

/// The store whose metrics are served.
struct MetricsSource {
    socket: PathBuf,
    client: Option<Client>,
}

impl MetricsSource {
    fn read(&mut self) -> Result<String, wholemem_store::Error> {
        let client = match self.client.take() {
            Some(client) => client,
            None => Client::connect(&self.socket)?,
        };
        let statistics = client.statistics()?;
        // The connection is kept only if it works.
        self.client = Some(client);
        Ok(exposition::render(&statistics))
    }
}

/// Answers one HTTP request, and closes the connection.
fn answer(mut stream: impl Read + Write, source: &mut MetricsSource) -> std::io::Result<()> {
    let mut request = Vec::new();
    let mut buffer = [0; 1024];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") && request.len() < MAX_REQUEST {
        match stream.read(&mut buffer)? {
            0 => break,
            len => request.extend_from_slice(&buffer[..len]),
        }
    }
    let line = request.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let line = String::from_utf8_lossy(line);
    let mut words = line.split(' ');
    let (status, body) = match (words.next(), words.next()) {
        (Some("GET"), Some("/" | "/metrics")) => match source.read() {
            Ok(text) => ("200 OK", text),
            Err(error) => ("503 Service Unavailable", format!("{error}\n")),
        },
        (Some("GET"), Some(_)) => ("404 Not Found", "the metrics are at /metrics\n".to_owned()),
        _ => ("405 Method Not Allowed", "the method is GET\n".to_owned()),
    };
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(&[head.as_bytes(), body.as_bytes()].concat())
}
