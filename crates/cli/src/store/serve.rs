//! `wholemem serve`: the daemon of an object store, whose keeper and server are processes of this program.

use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use anyhow::Result;
use wholemem_command::backend::BackendChoice;
use wholemem_command::terminal;
use wholemem_hal::{Backend, BackendKind};
use wholemem_os::activation;
use wholemem_store::{Launch, ProcessRole, Serve};

use super::metrics::{self, MetricsListener};
use crate::cli::{ServeArgs, ServeRole};

pub(crate) fn serve(args: &ServeArgs) -> Result<()> {
    let mut serve = Serve::at(wholemem_store::socket(args.listen.as_deref())?);
    serve.size = args.size.map(|size| size.0 as u64);
    serve.device_size = args.device_size.map(|size| size.0 as u64);
    if let Some(objects) = args.objects {
        serve.objects = objects as usize;
    }
    serve.parent = args.parent;
    let launch = |role: ProcessRole, socket: OwnedFd| start(args, &serve, role, socket);
    let Some(role) = args.role else { return serve_first(args, &serve, &launch) };
    let socket = std::io::stdin().as_fd().try_clone_to_owned()?;
    match role {
        ServeRole::Keeper => {
            if let Some(address) = &args.metrics {
                // The exporter of the keeper that has died may still hold the address, so binding is tried again.
                metrics::supervise(address.clone(), None, serve.listen.clone())?;
            }
            Ok(serve.run_role(ProcessRole::Keeper, socket, &launch)?)
        }
        ServeRole::Server => {
            let mut part = serve.clone();
            // Only the server of the store opens CUDA: the keeper must not initialize it.
            part.devices = match args.backend {
                BackendChoice::Host => None,
                BackendChoice::Cuda => Some(BackendKind::Cuda),
                BackendChoice::Auto => Backend::open(BackendKind::Cuda).ok().map(|_| BackendKind::Cuda),
            };
            Ok(part.run_role(ProcessRole::Server, socket, &launch)?)
        }
        ServeRole::Metrics => metrics::run(args.metrics.as_deref(), socket, &serve.listen, args.parent),
    }
}

/// Runs the first process of a store: the keeper.
fn serve_first(args: &ServeArgs, serve: &Serve, launch: &Launch<'_>) -> Result<()> {
    // An address that cannot be used is an error of this command.
    let listener = args.metrics.as_deref().map(MetricsListener::bind).transpose()?;
    let activated = activation::take_listener()?;
    if let Some(address) = &args.metrics {
        metrics::supervise(address.clone(), listener, serve.listen.clone())?;
    }
    let path = serve.listen.display().to_string();
    let mut ready = || {
        // An error is ignored: the reader of stdout has closed it.
        let _ = terminal::print(&format!("serving {path}\n"));
        notify_ready();
    };
    match activated {
        Some(socket) => Ok(serve.run_on(socket, launch, &mut ready)?),
        None => Ok(serve.run(launch, &mut ready)?),
    }
}

/// Tells systemd that the store accepts clients, if this is a service of `Type=notify`.
fn notify_ready() {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let send = || -> std::io::Result<()> {
        let address = match path.as_encoded_bytes().strip_prefix(b"@") {
            Some(name) => SocketAddr::from_abstract_name(name)?,
            None => SocketAddr::from_pathname(&path)?,
        };
        UnixDatagram::unbound()?.send_to_addr(b"READY=1", &address).map(drop)
    };
    if let Err(error) = send() {
        tracing::warn!(%error, "cannot notify systemd");
    }
}

/// Starts the keeper or the server of a store as a process of this program, with the same options.
fn start(args: &ServeArgs, serve: &Serve, role: ProcessRole, socket: OwnedFd) -> std::io::Result<Child> {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("wholemem").arg("serve").arg("--listen").arg(&serve.listen);
    for (name, size) in [("--size", args.size), ("--device-size", args.device_size)] {
        if let Some(size) = size {
            command.args([name, &format!("{}B", size.0)]);
        }
    }
    if let Some(objects) = args.objects {
        command.args(["--objects", &objects.to_string()]);
    }
    if let Some(parent) = args.parent {
        command.args(["--parent", &parent.to_string()]);
    }
    if let Some(address) = &args.metrics {
        command.args(["--metrics", address]);
    }
    let backend = match args.backend {
        BackendChoice::Auto => "auto",
        BackendChoice::Host => "host",
        BackendChoice::Cuda => "cuda",
    };
    let role = if role == ProcessRole::Server { "server" } else { "keeper" };
    command.args(["--backend", backend, "--role", role]);
    command.stdin(Stdio::from(socket)).stdout(Stdio::null()).spawn()
}
