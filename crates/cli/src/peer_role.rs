//! The tasks of the second process that the demo and some benchmarks start.

use std::io;
use std::os::fd::AsFd;

use anyhow::{Context, Result};
use wholemem_command::backend;
use wholemem_command::link::PeerLink;
use wholemem_command::peer::{PeerRole, is_closed};
use wholemem_hal::Backend;
use wholemem_os::pidfd;

use crate::cli::PeerArgs;
use crate::demo;

/// Runs the task of the second process of the demo or of a benchmark, until the first process closes the connection.
pub(crate) fn run(args: &PeerArgs) -> Result<()> {
    let link = PeerLink::adopt(io::stdin().as_fd().try_clone_to_owned()?)
        .context("this command is internal: only wholemem starts it")?;
    pidfd::die_with_parent(args.parent)?;
    let outcome =
        backend::open(args.backend).and_then(|selected| run_role(args.role, &link, &selected.backend));
    match outcome {
        Err(error) if is_closed(&error) => Ok(()),
        Err(error) => link.send_error(&error),
        Ok(()) => Ok(()),
    }
}

fn run_role(role: PeerRole, link: &PeerLink, backend: &Backend) -> Result<()> {
    let device = backend.device(0)?;
    match role {
        PeerRole::Creator => demo::creator(link, &device),
        PeerRole::Receiver => wholemem_bench::receiver(link, &device),
        PeerRole::Echo => wholemem_bench::echo(link),
    }
}
