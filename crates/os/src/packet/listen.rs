//! Names that packet sockets listen at, and how a connection to one comes about.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::PacketSocket;
use crate::call::call;
use crate::{Errno, Error, Result};

/// How many connections may wait to be accepted. The kernel lowers it to its own limit.
const BACKLOG: i32 = 4096;

/// Where a listener can be found.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Address {
    /// A file: reached from every network namespace that sees the folder. Its listener removes it.
    Path(PathBuf),
    /// A name that only this network namespace knows, and that is gone with its listener, however that ends.
    Abstract(Vec<u8>),
}

impl Address {
    /// Removes the file of a listener that was killed. One that lives keeps it, and an abstract name has none.
    pub fn clear_away(&self) {
        if matches!(self, Self::Path(_)) && is_dead(self) {
            self.remove();
        }
    }

    /// Removes the file of a listener that is known to be dead, though the kernel may not have closed it yet.
    pub fn remove(&self) {
        if let Self::Path(path) = self {
            let _ = rustix::fs::unlink(path);
        }
    }

    fn encode(&self) -> Result<SocketAddrUnix> {
        call("bind", || match self {
            Self::Path(path) => SocketAddrUnix::new(path.as_path()),
            Self::Abstract(name) => SocketAddrUnix::new_abstract_name(name),
        })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "{}", path.display()),
            Self::Abstract(name) => write!(f, "@{}", name.escape_ascii()),
        }
    }
}

/// A name at which connections are waited for. Dropping it takes the name away.
///
/// ```
/// use wholemem_os::packet::{Address, PacketListener};
/// use wholemem_os::{Deadline, PacketSocket};
///
/// let address = Address::Abstract(format!("example-{}", std::process::id()).into_bytes());
/// let listener = PacketListener::bind(&address)?;
/// assert!(listener.accept()?.is_none(), "nobody has come yet");
///
/// let there = PacketSocket::connect(&address)?;
/// let here = listener.accept()?.unwrap();
/// there.send(b"hello", &[], Deadline::NEVER)?;
/// assert_eq!(here.recv(&mut [0; 8], Deadline::NEVER)?, 5);
/// # Ok::<(), wholemem_os::Error>(())
/// ```
#[derive(Debug)]
#[doc(alias = "listen")]
pub struct PacketListener {
    fd: OwnedFd,
    path: Option<PathBuf>,
}

impl PacketListener {
    /// Listens at a name that nobody has. A file that a killed listener left behind is replaced.
    ///
    /// # Errors
    /// `bind` with `EADDRINUSE` when somebody listens there.
    pub fn bind(address: &Address) -> Result<Self> {
        let name = address.encode()?;
        let fd = socket()?;
        let bind = || call("bind", || rustix::net::bind(&fd, &name));
        match (bind(), address) {
            (Err(Error::Call { errno: Errno::ADDRINUSE, .. }), Address::Path(path)) if is_dead(address) => {
                // Two who find the same dead name race here, and one of them is told that it is taken.
                let _ = call("unlink", || rustix::fs::unlink(path));
                bind()?;
            }
            (outcome, _) => outcome?,
        }
        let path = if let Address::Path(path) = address { Some(path.clone()) } else { None };
        let listener = Self { fd, path };
        call("listen", || rustix::net::listen(&listener.fd, BACKLOG))?;
        Ok(listener)
    }

    /// Takes the next connection that waits, if one does.
    ///
    /// # Errors
    /// `accept4` with `EMFILE` when this process has no descriptor left; the connection goes on waiting.
    #[doc(alias = "accept4")]
    pub fn accept(&self) -> Result<Option<PacketSocket>> {
        loop {
            match call("accept4", || rustix::net::accept_with(&self.fd, SocketFlags::CLOEXEC)) {
                Ok(fd) => return Ok(Some(PacketSocket::trust(fd))),
                Err(Error::Call { errno: Errno::AGAIN, .. }) => return Ok(None),
                Err(Error::Call { errno: Errno::INTR | Errno::CONNABORTED, .. }) => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl AsFd for PacketListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for PacketListener {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            // Gone already, or in a folder that is: nothing to take away.
            let _ = rustix::fs::unlink(path);
        }
    }
}

impl PacketSocket {
    /// Connects to a listener, without waiting.
    ///
    /// # Errors
    /// `connect` with `ECONNREFUSED` or `ENOENT` when nobody listens there, with `EAGAIN` when too many wait there.
    pub fn connect(address: &Address) -> Result<Self> {
        let name = address.encode()?;
        let fd = socket()?;
        call("connect", || rustix::net::connect(&fd, &name))?;
        Ok(Self::trust(fd))
    }
}

/// Not blocking: for a listener `accept` then never waits, and a connection's own calls never do anyway.
fn socket() -> Result<OwnedFd> {
    call("socket", || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
    })
}

/// Whether a socket's file has outlived its listener.
fn is_dead(address: &Address) -> bool {
    matches!(PacketSocket::connect(address), Err(Error::Call { errno: Errno::CONNREFUSED, .. }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Deadline;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("wm-listen-{name}-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        folder
    }

    fn errno<T: fmt::Debug>(outcome: Result<T>) -> Errno {
        match outcome.unwrap_err() {
            Error::Call { errno, .. } => errno,
            error => panic!("{error}"),
        }
    }

    #[test]
    fn a_connection_carries_packets_both_ways_and_knows_its_user() {
        let address = Address::Abstract(format!("wm-both-{}", std::process::id()).into_bytes());
        let listener = PacketListener::bind(&address).unwrap();
        assert!(listener.accept().unwrap().is_none());
        let there = PacketSocket::connect(&address).unwrap();
        let here = listener.accept().unwrap().unwrap();
        let mut buffer = [0; 8];
        there.send(b"up", &[], Deadline::NEVER).unwrap();
        assert_eq!(here.recv(&mut buffer, Deadline::NEVER), Ok(2));
        here.send(b"down", &[], Deadline::NEVER).unwrap();
        assert_eq!(there.recv(&mut buffer, Deadline::NEVER), Ok(4));
        assert_eq!(here.peer_uid(), Ok(rustix::process::geteuid().as_raw()));
    }

    #[test]
    fn a_name_that_is_listened_at_is_refused_to_a_second() {
        let folder = folder("second");
        for address in [
            Address::Path(folder.join("name")),
            Address::Abstract(format!("wm-second-{}", std::process::id()).into_bytes()),
        ] {
            let _listener = PacketListener::bind(&address).unwrap();
            assert_eq!(errno(PacketListener::bind(&address)), Errno::ADDRINUSE);
        }
        std::fs::remove_dir(&folder).expect("the listener has removed its file");
    }

    #[test]
    fn a_file_left_by_a_killed_listener_is_replaced() {
        let folder = folder("dead");
        let address = Address::Path(folder.join("name"));
        let mut killed = PacketListener::bind(&address).unwrap();
        killed.path = None;
        drop(killed);
        assert!(folder.join("name").exists());
        assert_eq!(errno(PacketSocket::connect(&address)), Errno::CONNREFUSED);
        let taken_over = PacketListener::bind(&address).unwrap();
        address.clear_away();
        assert!(PacketSocket::connect(&address).is_ok(), "who lives keeps its file");
        drop(taken_over);
        assert_eq!(errno(PacketSocket::connect(&address)), Errno::NOENT);
        std::fs::remove_dir(&folder).unwrap();
    }

    #[test]
    fn a_path_that_is_too_long_is_refused() {
        let address = Address::Path(PathBuf::from("/".repeat(200)));
        assert_eq!(errno(PacketListener::bind(&address)), Errno::NAMETOOLONG);
    }
}
