//! Runs an object store: the keeper process, and the server process that the keeper starts.

use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use wholemem_hal::{Backend, BackendKind};
use wholemem_os::packet::PacketListener;
use wholemem_os::{Errno, Error as OsError, PacketSocket, meminfo};

use crate::index::Geometry;
use crate::keeper::{self, KeeperOrigin, Launch, ProcessRole};
use crate::protocol::SMALL;
use crate::server::{self, AllocationPolicy, ServerSettings};
use crate::{Error, Result};

const HOST_GRANULE: u64 = 64 << 10;
const DEVICE_GRANULE: u64 = 2 << 20;
const LARGE_PAGE: u64 = wholemem_os::vm::LARGE_PAGE as u64;

/// The settings of an object store, and the entry points of its processes.
///
/// A store consists of two processes. The keeper is the process that calls [`Serve::run`]; it starts the server. Each is started
/// by a function that gets its role and the socket that becomes its standard input; the new process calls [`Serve::run_role`]
/// with the same settings.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Serve {
    /// The path of the socket at which clients connect to the store.
    pub listen: PathBuf,
    /// The file mode of the store's socket, which decides who may connect.
    pub mode: u32,
    /// The quota of the store's host memory, in bytes; three quarters of the available memory by default. An object of 1 MiB or
    /// more takes whole pages of 2 MiB.
    pub size: Option<u64>,
    /// The quota of the store's device memory, in bytes; nine tenths of the memory of all devices by default.
    pub device_size: Option<u64>,
    /// The backend whose device memory the store offers to clients, if any.
    pub devices: Option<BackendKind>,
    /// The maximum number of objects of the store.
    pub objects: usize,
    /// The process id of a process whose exit ends the store, if any.
    pub parent: Option<u32>,
}

impl Serve {
    /// Creates the settings of a store at this socket, which is accessible to the current user only and has no device memory.
    #[must_use]
    pub fn at(listen: impl AsRef<Path>) -> Self {
        let (size, device_size, devices) = (None, None, None);
        Self {
            listen: listen.as_ref().to_owned(),
            mode: 0o600,
            size,
            device_size,
            devices,
            objects: 64 << 10,
            parent: None,
        }
    }

    /// Runs the store until a signal stops this process. Calls `ready` when clients can connect.
    ///
    /// # Errors
    /// [`Error::AlreadyServed`], [`Error::NotASocket`], [`Error::Socket`]; [`Error::NeverServed`] if the server cannot start.
    pub fn run(&self, launch: &Launch<'_>, ready: &mut dyn FnMut()) -> Result<()> {
        let listener = PacketListener::bind_with_mode(&self.listen, self.mode).map_err(|source| {
            let path = self.listen.clone();
            let is_taken = matches!(source, OsError::Call { errno: Errno::ADDRINUSE, .. });
            let is_socket = || path.symlink_metadata().is_ok_and(|file| file.file_type().is_socket());
            match is_taken {
                true if is_socket() => Error::AlreadyServed { path },
                true => Error::NotASocket { path },
                false => Error::Socket { path, source },
            }
        })?;
        keeper::run(KeeperOrigin::First(listener), self.parent, launch, ready)
    }

    /// Runs the store as [`Serve::run`] does, on a listening socket that another process has created, such as systemd. The file
    /// of the socket is not removed at the end.
    ///
    /// # Errors
    /// [`Error::Os`] if the descriptor is not a listening packet socket; [`Error::NeverServed`] if the server cannot start.
    pub fn run_on(&self, listener: OwnedFd, launch: &Launch<'_>, ready: &mut dyn FnMut()) -> Result<()> {
        let listener = PacketListener::adopt(listener, None)?;
        keeper::run(KeeperOrigin::First(listener), self.parent, launch, ready)
    }

    /// Runs the keeper or the server of a store in a process that was started by `launch`.
    ///
    /// # Errors
    /// [`Error::Index`] if the index has another layout; errors of system calls.
    pub fn run_role(&self, role: ProcessRole, socket: OwnedFd, launch: &Launch<'_>) -> Result<()> {
        let socket = PacketSocket::adopt(socket)?;
        match role {
            ProcessRole::Keeper => {
                let origin = KeeperOrigin::Replacement { server: socket, path: self.listen.clone() };
                keeper::run(origin, self.parent, launch, &mut || {})
            }
            ProcessRole::Server => self.serve(socket, launch),
        }
    }

    fn serve(&self, socket: PacketSocket, launch: &Launch<'_>) -> Result<()> {
        let devices = self.devices.map(Backend::open).transpose()?;
        let infos = devices.as_ref().map_or(&[][..], Backend::devices);
        let size = match self.size {
            Some(size) => size,
            None => meminfo::available()? as u64 / 4 * 3,
        };
        let all = || infos.iter().map(|info| info.memory_len as u64).sum::<u64>() / 10 * 9;
        let device_size = self.device_size.unwrap_or_else(all);
        let settings = ServerSettings {
            host: AllocationPolicy {
                quota: size,
                granule: HOST_GRANULE,
                page: LARGE_PAGE,
                small: SMALL,
                arena: 16 << 20,
            },
            device: AllocationPolicy {
                quota: device_size,
                granule: DEVICE_GRANULE,
                page: DEVICE_GRANULE,
                small: DEVICE_GRANULE,
                arena: 32 << 20,
            },
            devices: infos.iter().map(|info| info.uuid).collect(),
            user: rustix::process::geteuid().as_raw(),
            // The limit of preallocated memory is computed when the index is opened, because it depends on the quota, which an
            // existing index already contains.
            prealloc_limit: 0,
        };
        let geometry = Geometry { slots: self.objects, allocations: self.objects.min(16 << 10) };
        server::run(socket, settings, geometry, devices.as_ref(), launch)
    }
}
