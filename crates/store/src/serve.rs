//! Serving a store: the keeper, and the server it starts.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::Child;

use wholemem_hal::{Backend, BackendKind};
use wholemem_os::packet::PacketListener;
use wholemem_os::{Errno, Error as OsError, PacketSocket, meminfo};

use crate::index::Geometry;
use crate::keeper::{self, Origin, Role};
use crate::protocol::SMALL;
use crate::server::{self, Settings, Terms};
use crate::{Error, Result};

const HOST_GRANULE: u64 = 64 << 10;
const DEVICE_GRANULE: u64 = 2 << 20;
const LARGE_PAGE: u64 = wholemem_os::vm::LARGE_PAGE as u64;

/// How a store is served.
///
/// Two processes serve it: the keeper, which is the one that calls [`Serve::run`], and the server, which the keeper has
/// started. Either is started by a function that is given its role and the socket to have as standard input; there, it
/// calls [`Serve::take_part`] with the same settings.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Serve {
    /// The socket at which clients come.
    pub listen: PathBuf,
    /// Who may connect, as the mode of that file.
    pub mode: u32,
    /// How much host memory objects may take, in bytes; by default three quarters of what is available. An object of a
    /// mebibyte or more takes whole large pages of two.
    pub size: Option<u64>,
    /// How much device memory objects may take, in bytes; by default nine tenths of what the devices have.
    pub device_size: Option<u64>,
    /// Whose devices' memory is handed out, if any's.
    pub devices: Option<BackendKind>,
    /// How many objects there may be.
    pub objects: usize,
    /// The store ends when the process with this number does, if one is named.
    pub parent: Option<u32>,
}

/// Starts a process of the store, with this socket as its standard input.
pub type Launch<'a> = dyn Fn(Role, OwnedFd) -> io::Result<Child> + 'a;

impl Serve {
    /// Serves at this socket, for this user alone, objects in host memory.
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

    /// Serves until this process is told to end by a signal. `ready` is called when clients can come.
    ///
    /// # Errors
    /// [`Error::AlreadyServed`], [`Error::NotASocket`], [`Error::Socket`]; [`Error::NeverServed`] when the server could not
    /// begin.
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
        keeper::run(Origin::First(listener), self.parent, launch, ready)
    }

    /// Does the part of a process that was launched.
    ///
    /// # Errors
    /// [`Error::Index`] for an index of another version; what the kernel refused.
    pub fn take_part(&self, role: Role, socket: OwnedFd, launch: &Launch<'_>) -> Result<()> {
        let socket = PacketSocket::adopt(socket)?;
        match role {
            Role::Keeper => {
                let origin = Origin::Replacement { server: socket, path: self.listen.clone() };
                keeper::run(origin, self.parent, launch, &mut || {})
            }
            Role::Server => self.serve(socket, launch),
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
        let settings = Settings {
            host: Terms {
                quota: size,
                granule: HOST_GRANULE,
                page: LARGE_PAGE,
                small: SMALL,
                arena: 16 << 20,
            },
            device: Terms {
                quota: device_size,
                granule: DEVICE_GRANULE,
                page: DEVICE_GRANULE,
                small: DEVICE_GRANULE,
                arena: 32 << 20,
            },
            devices: infos.iter().map(|info| info.uuid).collect(),
            user: rustix::process::geteuid().as_raw(),
            // Follows from the quota, which the index may know better.
            ahead: 0,
        };
        let geometry = Geometry { slots: self.objects, allocations: self.objects.min(16 << 10) };
        server::run(socket, settings, geometry, devices.as_ref(), launch)
    }
}
