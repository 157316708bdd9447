//! Listening packet sockets (`SOCK_SEQPACKET`): their addresses, and how connections are established.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::PacketSocket;
use crate::call::call;
use crate::{Deadline, Errno, Error, Result};

/// The maximum time for which `bind` waits for another process that binds a socket in the same directory.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// The pause between two attempts to lock the directory of a socket file.
const LOCK_RETRY: Duration = Duration::from_millis(1);

/// The maximum number of connections of a listening socket that wait to be accepted. The kernel reduces the number to
/// its own limit.
const BACKLOG: i32 = 4096;

/// The address of a listening Unix socket.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Address {
    /// The path of a socket file, which can be reached from every network namespace that sees the directory. The
    /// listener removes the file.
    Path(PathBuf),
    /// A name in the abstract socket namespace of this network namespace. The kernel removes the name when the
    /// listener ends, even if it is killed.
    Abstract(Vec<u8>),
}

impl Address {
    /// Removes the socket file of a listener that was killed. Does nothing if the listener is alive or the address is
    /// abstract.
    pub fn remove_stale(&self) {
        if matches!(self, Self::Path(_)) && is_stale(self) {
            self.remove();
        }
    }

    /// Removes the socket file of a listener that is known to be dead, even if the kernel has not closed its socket
    /// yet.
    pub fn remove(&self) {
        if let Self::Path(path) = self {
            let _ = rustix::fs::unlink(path);
        }
    }

    /// Encodes the socket address in the kernel's format.
    ///
    /// # Errors
    /// `bind` with `ENAMETOOLONG`, or with `EINVAL` for a zero byte in a path.
    pub fn encode(&self) -> Result<EncodedAddress> {
        self.to_kernel().map(EncodedAddress)
    }

    fn to_kernel(&self) -> Result<SocketAddrUnix> {
        call("bind", || match self {
            Self::Path(path) => SocketAddrUnix::new(path.as_path()),
            Self::Abstract(name) => SocketAddrUnix::new_abstract_name(name),
        })
    }
}

/// A socket address in the kernel's format. Connecting to it does not allocate, so a forked child can connect.
#[derive(Debug, Clone)]
pub struct EncodedAddress(SocketAddrUnix);

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "{}", path.display()),
            Self::Abstract(name) => write!(f, "@{}", name.escape_ascii()),
        }
    }
}

/// The socket file of a listener. The file is held open, so that its inode number is not reused.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    file: OwnedFd,
}

impl SocketFile {
    fn open(path: &Path) -> Result<Self> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = call("open", || rustix::fs::open(path, flags, Mode::empty()))?;
        Ok(Self { path: path.to_owned(), file })
    }

    /// Returns whether the path of the socket file still refers to this file.
    fn is_at_path(&self) -> bool {
        let (Ok(own), Ok(current)) = (rustix::fs::fstat(&self.file), rustix::fs::lstat(&self.path)) else {
            return false;
        };
        (own.st_dev, own.st_ino) == (current.st_dev, current.st_ino)
    }
}

/// A listening packet socket. Dropping it removes its socket file, unless another listener has replaced the file
/// since.
///
/// ```
/// use wholemem_os::packet::{Address, PacketListener};
/// use wholemem_os::{Deadline, PacketSocket};
///
/// let address = Address::Abstract(format!("example-{}", std::process::id()).into_bytes());
/// let listener = PacketListener::bind(&address)?;
/// assert!(listener.accept()?.is_none(), "no connection is waiting");
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
    file: Option<SocketFile>,
}

impl PacketListener {
    /// Listens at an unused socket address. A socket file that a killed listener left behind is replaced; other files
    /// are not.
    ///
    /// # Errors
    /// `bind` with `EADDRINUSE` if a process listens there, or if another file exists at the path.
    pub fn bind(address: &Address) -> Result<Self> {
        let _lock = lock_directory(address);
        let listener = Self::bind_only(address)?;
        call("listen", || rustix::net::listen(&listener.fd, BACKLOG))?;
        Ok(listener)
    }

    /// Listens at an unused socket address, and does not replace the socket file of a killed listener. If several
    /// processes bind one address with this function at the same time, exactly one succeeds.
    ///
    /// # Errors
    /// `bind` with `EADDRINUSE` if the address is in use.
    pub fn bind_unused(address: &Address) -> Result<Self> {
        let listener = Self::bind_once(address)?;
        call("listen", || rustix::net::listen(&listener.fd, BACKLOG))?;
        Ok(listener)
    }

    /// Binds a socket to the address, and replaces the socket file of a killed listener; no process can connect yet.
    /// The caller holds the directory lock: otherwise two processes could replace the same stale file, and a socket
    /// that is bound but does not listen yet would look stale.
    fn bind_only(address: &Address) -> Result<Self> {
        match (Self::bind_once(address), address) {
            (Err(Error::Call { errno: Errno::ADDRINUSE, .. }), Address::Path(path)) if is_stale(address) => {
                let _ = call("unlink", || rustix::fs::unlink(path));
                Self::bind_once(address)
            }
            (outcome, _) => outcome,
        }
    }

    fn bind_once(address: &Address) -> Result<Self> {
        let name = address.to_kernel()?;
        let fd = socket()?;
        call("bind", || rustix::net::bind(&fd, &name))?;
        let Address::Path(path) = address else { return Ok(Self { fd, file: None }) };
        let file = SocketFile::open(path).inspect_err(|_| address.remove())?;
        Ok(Self { fd, file: Some(file) })
    }

    /// Listens at a socket file, which gets the given mode before any process can connect.
    ///
    /// # Errors
    /// As [`PacketListener::bind`]; `chmod`.
    pub fn bind_with_mode(path: &Path, mode: u32) -> Result<Self> {
        let address = Address::Path(path.to_owned());
        let _lock = lock_directory(&address);
        let listener = Self::bind_only(&address)?;
        // The mode is set before `listen`, since no process can connect until then.
        call("chmod", || rustix::fs::chmod(path, Mode::from_raw_mode(mode)))?;
        call("listen", || rustix::net::listen(&listener.fd, BACKLOG))?;
        Ok(listener)
    }

    /// Converts a received descriptor of a listening socket to a listener. If `file` is given (the descriptor from
    /// [`PacketListener::share_file`] and the path), the listener removes the socket file on drop.
    ///
    /// # Errors
    /// [`Error::WrongDescriptor`] if the descriptor is not a listening packet socket.
    pub fn adopt(fd: OwnedFd, file: Option<(OwnedFd, PathBuf)>) -> Result<Self> {
        const WRONG: Error = Error::WrongDescriptor { expected: "a listening packet socket" };
        let socket: OwnedFd = PacketSocket::adopt(fd)
            .map_err(|error| match error {
                Error::WrongDescriptor { .. } => WRONG,
                error => error,
            })?
            .into();
        if !call("getsockopt", || rustix::net::sockopt::socket_acceptconn(&socket))? {
            return Err(WRONG);
        }
        let file = file.map(|(file, path)| SocketFile { path, file });
        Ok(Self { fd: socket, file })
    }

    /// Duplicates the descriptor of the listening socket, for another process to [adopt](Self::adopt).
    ///
    /// # Errors
    /// `fcntl` with `EMFILE` if this process has no descriptor left.
    pub fn share_fd(&self) -> Result<OwnedFd> {
        call("fcntl", || rustix::io::fcntl_dupfd_cloexec(&self.fd, 3))
    }

    /// Duplicates the descriptor of the socket file, which identifies the file even if another file replaces it at
    /// its path. Returns `None` if the listener has no file, or does not remove it.
    ///
    /// # Errors
    /// As [`PacketListener::share_fd`].
    pub fn share_file(&self) -> Result<Option<OwnedFd>> {
        let share = |file: &SocketFile| call("fcntl", || rustix::io::fcntl_dupfd_cloexec(&file.file, 3));
        self.file.as_ref().map(share).transpose()
    }

    /// Accepts the next connection that waits at the listener, or returns `None` if there is none.
    ///
    /// # Errors
    /// `accept4` with `EMFILE` if this process has no descriptor left; the connection stays in the queue.
    #[doc(alias = "accept4")]
    pub fn accept(&self) -> Result<Option<PacketSocket>> {
        loop {
            match call("accept4", || rustix::net::accept_with(&self.fd, SocketFlags::CLOEXEC)) {
                Ok(fd) => return Ok(Some(PacketSocket::from_kernel(fd))),
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
        if let Some(file) = self.file.as_ref().filter(|file| file.is_at_path()) {
            // An error is ignored: the socket file or its directory no longer exists.
            let _ = rustix::fs::unlink(&file.path);
        }
    }
}

impl PacketSocket {
    /// Connects to a listening packet socket without waiting.
    ///
    /// # Errors
    /// `connect` with `ECONNREFUSED` or `ENOENT` if no process listens there, `EAGAIN` if the accept queue is full.
    pub fn connect(address: &Address) -> Result<Self> {
        Self::connect_encoded(&address.encode()?)
    }

    /// Connects like [`PacketSocket::connect`], without allocating.
    ///
    /// # Errors
    /// As [`PacketSocket::connect`].
    pub fn connect_encoded(address: &EncodedAddress) -> Result<Self> {
        let fd = socket()?;
        call("connect", || rustix::net::connect(&fd, &address.0))?;
        Ok(Self::from_kernel(fd))
    }
}

/// Locks the directory of a socket file against other processes that bind sockets in it, until the returned
/// descriptor is dropped. Returns `None` if the directory cannot be locked, or if another process holds the lock too
/// long: every process that may read a directory can lock it.
fn lock_directory(address: &Address) -> Option<OwnedFd> {
    let Address::Path(path) = address else { return None };
    let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty());
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory =
        rustix::fs::open(directory.unwrap_or_else(|| Path::new(".")), flags, Mode::empty()).ok()?;
    let deadline = Deadline::after(LOCK_TIMEOUT);
    loop {
        match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Some(directory),
            Err(Errno::AGAIN | Errno::INTR) if !deadline.has_passed() => std::thread::sleep(LOCK_RETRY),
            Err(_) => return None,
        }
    }
}

/// Creates a non-blocking packet socket, so that `accept` does not wait. Sending and receiving pass `MSG_DONTWAIT`
/// anyway.
fn socket() -> Result<OwnedFd> {
    call("socket", || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
    })
}

/// Returns whether a socket address has no listener. For a path, the function also checks that the file is a socket,
/// since `connect` to any other file fails with the same error.
fn is_stale(address: &Address) -> bool {
    let is_socket = match address {
        Address::Path(path) => rustix::fs::lstat(path)
            .is_ok_and(|file| rustix::fs::FileType::from_raw_mode(file.st_mode).is_socket()),
        Address::Abstract(_) => true,
    };
    is_socket && matches!(PacketSocket::connect(address), Err(Error::Call { errno: Errno::CONNREFUSED, .. }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test_directory(name: &str) -> PathBuf {
        let directory = std::env::temp_dir().join(format!("wm-listen-{name}-{}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        directory
    }

    fn errno<T: fmt::Debug>(outcome: Result<T>) -> Errno {
        match outcome.unwrap_err() {
            Error::Call { errno, .. } => errno,
            error => panic!("{error}"),
        }
    }

    #[test]
    fn a_connection_carries_packets_both_ways_and_reports_the_peers_user() {
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
    fn an_address_in_use_is_refused() {
        let folder = test_directory("second");
        for address in [
            Address::Path(folder.join("name")),
            Address::Abstract(format!("wm-second-{}", std::process::id()).into_bytes()),
        ] {
            let _listener = PacketListener::bind(&address).unwrap();
            assert_eq!(errno(PacketListener::bind(&address)), Errno::ADDRINUSE);
            assert_eq!(errno(PacketListener::bind_unused(&address)), Errno::ADDRINUSE);
        }
        std::fs::remove_dir(&folder).expect("the listener has removed its file");
    }

    #[test]
    fn of_several_processes_that_replace_a_stale_socket_exactly_one_listens() {
        let folder = test_directory("race");
        let path = folder.join("name");
        let address = Address::Path(path.clone());
        for round in 0..200 {
            let dead = PacketListener::bind(&address).unwrap();
            // A hard link preserves the socket file when its listener is dropped.
            std::fs::hard_link(&path, folder.join("link")).unwrap();
            drop(dead);
            std::fs::rename(folder.join("link"), &path).unwrap();
            let start = std::sync::Barrier::new(4);
            let bind = || {
                start.wait();
                PacketListener::bind_with_mode(&path, 0o600)
            };
            let bound: Vec<_> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(bind)).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let listeners: Vec<_> = bound.into_iter().filter_map(Result::ok).collect();
            assert_eq!(listeners.len(), 1, "round {round}");
            let _there = PacketSocket::connect(&address).unwrap();
            assert!(listeners[0].accept().unwrap().is_some());
        }
        std::fs::remove_dir(&folder).unwrap();
    }

    #[test]
    fn the_socket_file_of_a_killed_listener_is_replaced() {
        let folder = test_directory("dead");
        let address = Address::Path(folder.join("name"));
        let mut killed = PacketListener::bind(&address).unwrap();
        killed.file = None;
        drop(killed);
        assert!(folder.join("name").exists());
        assert_eq!(errno(PacketSocket::connect(&address)), Errno::CONNREFUSED);
        assert_eq!(errno(PacketListener::bind_unused(&address)), Errno::ADDRINUSE, "the file is in use");
        let replacement = PacketListener::bind(&address).unwrap();
        address.remove_stale();
        assert!(PacketSocket::connect(&address).is_ok(), "the file of a living listener is not removed");
        drop(replacement);
        assert_eq!(errno(PacketSocket::connect(&address)), Errno::NOENT);
        std::fs::remove_dir(&folder).unwrap();
    }

    #[test]
    fn a_file_that_is_not_a_socket_is_not_replaced() {
        let folder = test_directory("file");
        let path = folder.join("name");
        let address = Address::Path(path.clone());
        std::fs::write(&path, b"precious").unwrap();
        assert_eq!(errno(PacketListener::bind(&address)), Errno::ADDRINUSE);
        address.remove_stale();
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_listener_has_its_mode_and_can_be_adopted() {
        use std::os::unix::fs::PermissionsExt;
        let folder = test_directory("mode");
        let path = folder.join("name");
        let original = PacketListener::bind_with_mode(&path, 0o600).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let adopted = PacketListener::adopt(original.share_fd().unwrap(), None).unwrap();
        let there = PacketSocket::connect(&Address::Path(path.clone())).unwrap();
        let here = adopted.accept().unwrap().unwrap();
        there.send(b"hello", &[], Deadline::NEVER).unwrap();
        assert_eq!(here.recv(&mut [0; 8], Deadline::NEVER), Ok(5));
        drop(adopted);
        assert!(path.exists());
        let file = original.share_file().unwrap().unwrap();
        drop(PacketListener::adopt(original.share_fd().unwrap(), Some((file, path.clone()))).unwrap());
        assert!(!path.exists());
        let wrong = Error::WrongDescriptor { expected: "a listening packet socket" };
        assert_eq!(PacketListener::adopt(there.into(), None).unwrap_err(), wrong);
        let null = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(PacketListener::adopt(null.into(), None).unwrap_err(), wrong);
        drop(original);
        std::fs::remove_dir(&folder).unwrap();
    }

    #[test]
    fn a_listener_does_not_remove_the_file_of_its_successor() {
        let folder = test_directory("another");
        let path = folder.join("name");
        let address = Address::Path(path.clone());
        let first = PacketListener::bind_with_mode(&path, 0o600).unwrap();
        std::fs::remove_file(&path).unwrap();
        let second = PacketListener::bind(&address).unwrap();
        drop(first);
        assert!(PacketSocket::connect(&address).is_ok(), "the second listener is reachable");
        drop(second);
        std::fs::remove_dir(&folder).expect("the second listener has removed its file");
    }

    #[test]
    fn a_path_that_is_too_long_is_refused() {
        let address = Address::Path(PathBuf::from("/".repeat(200)));
        assert_eq!(errno(PacketListener::bind(&address)), Errno::NAMETOOLONG);
    }
}
