//! A store of this program's own: for benches and the tour, and gone with them.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use wholemem_hal::Backend;
use wholemem_os::pidfd::Signal;
use wholemem_os::{Deadline, PidFd};
use wholemem_store::Client;

/// A store that is served by this program, started again. It ends when this is dropped, and when this process does.
#[derive(Debug)]
pub struct OwnStore {
    folder: PathBuf,
    keeper: Child,
}

impl OwnStore {
    /// Serves host memory.
    ///
    /// # Errors
    /// That the server does not start.
    pub fn start() -> Result<Self> {
        Self::start_on("host")
    }

    /// Serves the memory of a backend's devices too.
    pub fn start_on(backend: &str) -> Result<Self> {
        let folder = std::env::temp_dir().join(format!("wholemem-store-{}", std::process::id()));
        std::fs::DirBuilder::new().mode(0o700).create(&folder).context("cannot make a folder")?;
        let mut keeper = Command::new("/proc/self/exe")
            .arg0("wholemem")
            .args(["serve", "--backend", backend, "--parent", &std::process::id().to_string(), "--listen"])
            .arg(folder.join("socket"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the store")?;
        let stdout = keeper.stdout.take();
        let own = Self { folder, keeper };
        let mut line = String::new();
        stdout.map(|stdout| BufReader::new(stdout).read_line(&mut line)).transpose()?;
        ensure!(line.starts_with("serving"), "the store did not begin to serve");
        Ok(own)
    }

    /// Connects a client.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn connect(&self) -> Result<Client> {
        Ok(Client::connect(self.folder.join("socket"))?)
    }

    /// Connects a client that maps memory of devices.
    ///
    /// # Errors
    /// As [`Client::connect_with`].
    pub fn connect_with(&self, devices: &Backend) -> Result<Client> {
        Ok(Client::connect_with(self.folder.join("socket"), Some(devices.clone()))?)
    }

    /// The process that serves now: the keeper's one child.
    pub fn server(&self) -> Result<PidFd> {
        let path = format!("/proc/{0}/task/{0}/children", self.keeper.id());
        let children = std::fs::read_to_string(path).context("cannot tell which process serves")?;
        let server = children.split_whitespace().next().and_then(|pid| pid.parse().ok());
        Ok(PidFd::open(server.context("no process serves")?)?)
    }
}

impl Drop for OwnStore {
    fn drop(&mut self) {
        if let Ok(process) = PidFd::open(self.keeper.id()) {
            let _ = process.signal(Signal::TERM);
            let _ = process.wait_exit(Deadline::after(Duration::from_secs(10)));
        }
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
