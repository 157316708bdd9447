//! The agent of `launch --hosts` on a host: starts the ranks of the host for a launcher, which it is connected to by ssh.
//!
//! If the launcher or the connection ends, the agent's stdin is closed, and it terminates its ranks. The group's secret is in
//! a memory file of the agent, which the ranks open by the path in `WHOLEMEM_SECRET_FILE`: only processes of the same user
//! can, as long as the agent lives.

use std::fs::{File, Permissions};
use std::io::Write;
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;

use anyhow::{Context, Result};
use rustix::fs::{MemfdFlags, memfd_create};

use super::group::RankGroup;
use super::protocol::{AgentMessage, ControlInput, LauncherMessage, SecretText, Start, VERSION};
use super::{DESCRIPTORS_PER_RANK, block_signals, orphans, raise_file_limit};

/// The variables that ranks must not inherit from the environment of ssh, because they identify a group.
const REMOVED: [&str; 2] = ["WHOLEMEM_ID", "WHOLEMEM_SECRET"];

pub(crate) fn run() -> Result<()> {
    let signals = block_signals()?;
    let mut control = ControlInput::new();
    send(&AgentMessage::Hello { version: VERSION.to_owned(), ports: free_ports() })?;
    // Without a plan, the launcher has ended, or has reported an error of another host.
    let Some(LauncherMessage::Start(start)) = control.wait() else { return Ok(()) };
    let (mut group, _secret) = match self::start(*start, control) {
        Ok(started) => started,
        Err(error) => return send(&AgentMessage::Error(format!("{error:#}"))),
    };
    // The launcher receives the failure of a rank as a message.
    group.supervise(&signals)?;
    send(&AgentMessage::End)
}

/// Starts the ranks. The returned file is the secret, which the ranks read.
fn start(start: Start, control: ControlInput) -> Result<(RankGroup, File)> {
    let Start { folder, secret, mut plan } = start;
    let folder = folder.to_path();
    std::env::set_current_dir(&folder).with_context(|| format!("cannot run in {}", folder.display()))?;
    let secret = secret_file(&secret)?;
    let path = format!("/proc/{}/fd/{}", std::process::id(), secret.as_raw_fd());
    plan.variables.push(("WHOLEMEM_SECRET_FILE".to_owned(), path));
    raise_file_limit(plan.ranks.into(), DESCRIPTORS_PER_RANK);
    orphans::become_subreaper();
    Ok((RankGroup::start(&plan, &REMOVED, Some(control))?, secret))
}

/// Returns a memory file with the secret, which no other user can open.
fn secret_file(secret: &SecretText) -> Result<File> {
    let file = memfd_create("wholemem-secret", MemfdFlags::CLOEXEC).context("cannot store the secret")?;
    let mut file = File::from(file);
    file.set_permissions(Permissions::from_mode(0o600)).context("cannot protect the secret")?;
    file.write_all(secret.0.as_bytes()).context("cannot store the secret")?;
    Ok(file)
}

/// Returns two unused TCP ports, for rank 0 and for programs that read torchrun's `MASTER_PORT`.
fn free_ports() -> [u16; 2] {
    // Both are bound at once, so that they differ.
    let probes = [29600, 29500].map(|port| (TcpListener::bind(("::", 0)), port));
    let probes = probes.map(|(probe, port)| (probe.or_else(|_| TcpListener::bind(("0.0.0.0", 0))), port));
    probes.each_ref().map(|(probe, port)| {
        let address = probe.as_ref().ok().and_then(|probe| probe.local_addr().ok());
        address.map_or(*port, |address| address.port())
    })
}

fn send(message: &AgentMessage) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(&message.to_line()).and_then(|()| stdout.flush()).context("cannot write to the launcher")
}

#[cfg(test)]
mod tests {
    use wholemem_comm::discovery::Discovery;

    use super::*;

    #[test]
    fn the_ranks_read_the_secret_by_the_path_of_its_file() {
        let secret = "0123456789abcdef";
        let file = secret_file(&SecretText(secret.to_owned())).unwrap();
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        let get = |name: &str| match name {
            "WHOLEMEM_ADDR" => Some("n0:1".to_owned()),
            "WHOLEMEM_SECRET_FILE" => Some(path.clone()),
            _ => None,
        };
        // This also checks that no other user can access the file.
        let discovery = Discovery::read(get, &[], "run").unwrap();
        assert_eq!(discovery.require_secret().unwrap().expose(), secret);
    }

    #[test]
    fn the_free_ports_differ() {
        let [a, b] = free_ports();
        assert!(a != b && a != 0 && b != 0, "{a} {b}");
    }
}
