//! A store that a benchmark or the demo starts for itself, and that ends with the command.

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

/// A store whose keeper (parent) and server processes belong to this command. They end when this value is dropped or when this
/// process ends.
#[derive(Debug)]
pub struct TemporaryStore {
    folder: PathBuf,
    keeper: Child,
}

impl TemporaryStore {
    /// Starts a temporary store of host memory.
    ///
    /// # Errors
    /// If the server does not start.
    pub fn start() -> Result<Self> {
        Self::start_on("host")
    }

    /// Starts a temporary store of host memory and of the memory of a backend's devices.
    ///
    /// # Errors
    /// If the server does not start.
    pub fn start_on(backend: &str) -> Result<Self> {
        let folder = std::env::temp_dir().join(format!("wholemem-store-{}", std::process::id()));
        std::fs::DirBuilder::new().mode(0o700).create(&folder).context("cannot create a folder")?;
        let mut keeper = Command::new("/proc/self/exe")
            .arg0("wholemem")
            .args(["serve", "--backend", backend, "--parent", &std::process::id().to_string(), "--listen"])
            .arg(folder.join("socket"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the store")?;
        let stdout = keeper.stdout.take();
        let store = Self { folder, keeper };
        let mut line = String::new();
        stdout.map(|stdout| BufReader::new(stdout).read_line(&mut line)).transpose()?;
        ensure!(line.starts_with("serving"), "the store did not start to serve");
        Ok(store)
    }

    /// Connects a client to the temporary store.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn connect(&self) -> Result<Client> {
        Ok(Client::connect(self.folder.join("socket"))?)
    }

    /// Connects a client that can map device memory to the temporary store.
    ///
    /// # Errors
    /// As [`Client::connect_with`].
    pub fn connect_with(&self, devices: &Backend) -> Result<Client> {
        Ok(Client::connect_with(self.folder.join("socket"), Some(devices.clone()))?)
    }

    /// Returns a handle of the store's current server process, which is the only child of the keeper.
    ///
    /// # Errors
    /// If no server runs.
    pub fn server(&self) -> Result<PidFd> {
        let path = format!("/proc/{0}/task/{0}/children", self.keeper.id());
        let children = std::fs::read_to_string(path).context("cannot list the children of the keeper")?;
        let server = children.split_whitespace().next().and_then(|pid| pid.parse().ok());
        Ok(PidFd::open(server.context("the keeper has no server process")?)?)
    }
}

impl Drop for TemporaryStore {
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
