//! `wholemem serve`: the daemon of an object store, whose keeper and server are processes of this program.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use anyhow::Result;
use wholemem_command::backend::BackendChoice;
use wholemem_command::terminal;
use wholemem_hal::{Backend, BackendKind};
use wholemem_store::{ProcessRole, Serve};

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
    let Some(role) = args.role else {
        let path = serve.listen.display().to_string();
        let mut ready = || drop(terminal::print(&format!("serving {path}\n")));
        return Ok(serve.run(&launch, &mut ready)?);
    };
    let socket = std::io::stdin().as_fd().try_clone_to_owned()?;
    let role = match role {
        ServeRole::Keeper => ProcessRole::Keeper,
        ServeRole::Server => ProcessRole::Server,
    };
    let mut part = serve.clone();
    if role == ProcessRole::Server {
        // Only the server of the store opens CUDA: the keeper must not initialize it.
        part.devices = match args.backend {
            BackendChoice::Host => None,
            BackendChoice::Cuda => Some(BackendKind::Cuda),
            BackendChoice::Auto => Backend::open(BackendKind::Cuda).ok().map(|_| BackendKind::Cuda),
        };
    }
    Ok(part.run_role(role, socket, &launch)?)
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
    let backend = match args.backend {
        BackendChoice::Auto => "auto",
        BackendChoice::Host => "host",
        BackendChoice::Cuda => "cuda",
    };
    let role = if role == ProcessRole::Server { "server" } else { "keeper" };
    command.args(["--backend", backend, "--role", role]);
    command.stdin(Stdio::from(socket)).stdout(Stdio::null()).spawn()
}
