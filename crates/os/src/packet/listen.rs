//! Names that packet sockets listen at, and how a connection to one comes about.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::PacketSocket;
use crate::call::call;
use crate::{Deadline, Errno, Error, Result};

/// How long another process may be binding a socket in the same folder.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);

/// How long to wait before trying to lock again.
const LOCK_RETRY: Duration = Duration::from_millis(1);

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

    /// As the kernel takes it.
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

/// An address as the kernel takes it: connecting to it allocates nothing, as a forked child must not.
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

/// The file of a listener. It is held by a descriptor, so that no later file has its inode number.
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

    /// Whether the path still leads to the file, and not to another's.
    fn is_there(&self) -> bool {
        let (Ok(own), Ok(there)) = (rustix::fs::fstat(&self.file), rustix::fs::lstat(&self.path)) else {
            return false;
        };
        (own.st_dev, own.st_ino) == (there.st_dev, there.st_ino)
    }
}

/// A name at which connections are waited for. Dropping it removes its file, but not one that another listener has made at the same
/// path since.
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
    file: Option<SocketFile>,
}

impl PacketListener {
    /// Listens at a name that nobody has. A socket that a killed listener left behind is replaced, and no other file.
    ///
    /// # Errors
    /// `bind` with `EADDRINUSE` when somebody listens there, or another file is there.
    pub fn bind(address: &Address) -> Result<Self> {
        let _lock = lock_folder(address);
        let listener = Self::bind_only(address)?;
        call("listen", || rustix::net::listen(&listener.fd, BACKLOG))?;
        Ok(listener)
    }

    /// Listens at a name that is not in use, not even by the file that a killed listener left behind. If several processes
    /// call it at the same time, exactly one succeeds.
    ///
    /// # Errors
    /// `bind` with `EADDRINUSE` when the name is in use.
    pub fn bind_unused(address: &Address) -> Result<Self> {
        let listener = Self::bind_once(address)?;
        call("listen", || rustix::net::listen(&listener.fd, BACKLOG))?;
        Ok(listener)
    }

    /// Binds the name; no process can connect yet. A socket that a killed listener left behind is replaced. With the folder
    /// locked: two processes may find the same dead socket, and one that is bound and not listened at yet looks dead too.
    fn bind_only(address: &Address) -> Result<Self> {
        match (Self::bind_once(address), address) {
            (Err(Error::Call { errno: Errno::ADDRINUSE, .. }), Address::Path(path)) if is_dead(address) => {
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

    /// Listens at a file with this mode from the first moment on.
    ///
    /// # Errors
    /// As [`PacketListener::bind`]; `chmod`.
    pub fn bind_with_mode(path: &Path, mode: u32) -> Result<Self> {
        let address = Address::Path(path.to_owned());
        let _lock = lock_folder(&address);
        let listener = Self::bind_only(&address)?;
        // Nobody can connect before `listen`.
        call("chmod", || rustix::fs::chmod(path, Mode::from_raw_mode(mode)))?;
        call("listen", || rustix::net::listen(&listener.fd, BACKLOG))?;
        Ok(listener)
    }

    /// Takes over a listener that another process made. Where its file is given, as [`PacketListener::share_file`] has it and with
    /// its path, the file is removed when this is dropped.
    ///
    /// # Errors
    /// [`Error::WrongDescriptor`] for anything else.
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

    /// Another descriptor of the listener, for another process to adopt.
    ///
    /// # Errors
    /// `fcntl` with `EMFILE` when this process has no descriptor left.
    pub fn share_fd(&self) -> Result<OwnedFd> {
        call("fcntl", || rustix::io::fcntl_dupfd_cloexec(&self.fd, 3))
    }

    /// A descriptor of the listener's file, by which another process knows the file from another's at the same path. `None` where it
    /// has none, or is not the one who removes it.
    ///
    /// # Errors
    /// As [`PacketListener::share_fd`].
    pub fn share_file(&self) -> Result<Option<OwnedFd>> {
        let share = |file: &SocketFile| call("fcntl", || rustix::io::fcntl_dupfd_cloexec(&file.file, 3));
        self.file.as_ref().map(share).transpose()
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
        if let Some(file) = self.file.as_ref().filter(|file| file.is_there()) {
            // Gone already, or in a folder that is: nothing to take away.
            let _ = rustix::fs::unlink(&file.path);
        }
    }
}

impl PacketSocket {
    /// Connects to a listener, without waiting.
    ///
    /// # Errors
    /// `connect` with `ECONNREFUSED` or `ENOENT` when nobody listens there, with `EAGAIN` when too many wait there.
    pub fn connect(address: &Address) -> Result<Self> {
        Self::connect_encoded(&address.encode()?)
    }

    /// The same, without allocating.
    ///
    /// # Errors
    /// As [`PacketSocket::connect`].
    pub fn connect_encoded(address: &EncodedAddress) -> Result<Self> {
        let fd = socket()?;
        call("connect", || rustix::net::connect(&fd, &address.0))?;
        Ok(Self::trust(fd))
    }
}

/// Locks the folder of a path among processes that bind sockets there, until the lock is dropped. `None` where that cannot be
/// done, or another process keeps the lock too long: whoever may read a folder can lock it.
fn lock_folder(address: &Address) -> Option<OwnedFd> {
    let Address::Path(path) = address else { return None };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::open(folder.unwrap_or_else(|| Path::new(".")), flags, Mode::empty()).ok()?;
    let deadline = Deadline::after(LOCK_PATIENCE);
    loop {
        match rustix::fs::flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Some(folder),
            Err(Errno::AGAIN | Errno::INTR) if !deadline.has_passed() => std::thread::sleep(LOCK_RETRY),
            Err(_) => return None,
        }
    }
}

/// Not blocking: for a listener `accept` then never waits, and a connection's own calls never do anyway.
fn socket() -> Result<OwnedFd> {
    call("socket", || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
    })
}

/// Whether a socket's file has outlived its listener. The kernel says the same of a file that never was a socket, and that
/// is somebody's.
fn is_dead(address: &Address) -> bool {
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
            assert_eq!(errno(PacketListener::bind_unused(&address)), Errno::ADDRINUSE);
        }
        std::fs::remove_dir(&folder).expect("the listener has removed its file");
    }

    #[test]
    fn of_several_that_find_the_same_dead_socket_one_listens() {
        let folder = folder("race");
        let path = folder.join("name");
        let address = Address::Path(path.clone());
        for round in 0..200 {
            let dead = PacketListener::bind(&address).unwrap();
            // Its file outlives it.
            std::fs::hard_link(&path, folder.join("kept")).unwrap();
            drop(dead);
            std::fs::rename(folder.join("kept"), &path).unwrap();
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
    fn a_file_left_by_a_killed_listener_is_replaced() {
        let folder = folder("dead");
        let address = Address::Path(folder.join("name"));
        let mut killed = PacketListener::bind(&address).unwrap();
        killed.file = None;
        drop(killed);
        assert!(folder.join("name").exists());
        assert_eq!(errno(PacketSocket::connect(&address)), Errno::CONNREFUSED);
        assert_eq!(errno(PacketListener::bind_unused(&address)), Errno::ADDRINUSE, "the file is in use");
        let taken_over = PacketListener::bind(&address).unwrap();
        address.clear_away();
        assert!(PacketSocket::connect(&address).is_ok(), "who lives keeps its file");
        drop(taken_over);
        assert_eq!(errno(PacketSocket::connect(&address)), Errno::NOENT);
        std::fs::remove_dir(&folder).unwrap();
    }

    #[test]
    fn a_file_that_is_no_socket_is_left_alone() {
        let folder = folder("file");
        let path = folder.join("name");
        let address = Address::Path(path.clone());
        std::fs::write(&path, b"precious").unwrap();
        assert_eq!(errno(PacketListener::bind(&address)), Errno::ADDRINUSE);
        address.clear_away();
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_listener_has_its_mode_and_goes_on_in_another_process() {
        use std::os::unix::fs::PermissionsExt;
        let folder = folder("mode");
        let path = folder.join("name");
        let made = PacketListener::bind_with_mode(&path, 0o600).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let adopted = PacketListener::adopt(made.share_fd().unwrap(), None).unwrap();
        let there = PacketSocket::connect(&Address::Path(path.clone())).unwrap();
        let here = adopted.accept().unwrap().unwrap();
        there.send(b"hello", &[], Deadline::NEVER).unwrap();
        assert_eq!(here.recv(&mut [0; 8], Deadline::NEVER), Ok(5));
        drop(adopted);
        assert!(path.exists());
        let file = made.share_file().unwrap().unwrap();
        drop(PacketListener::adopt(made.share_fd().unwrap(), Some((file, path.clone()))).unwrap());
        assert!(!path.exists());
        let wrong = Error::WrongDescriptor { expected: "a listening packet socket" };
        assert_eq!(PacketListener::adopt(there.into(), None).unwrap_err(), wrong);
        let null = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(PacketListener::adopt(null.into(), None).unwrap_err(), wrong);
        drop(made);
        std::fs::remove_dir(&folder).unwrap();
    }

    #[test]
    fn a_listener_leaves_a_file_that_has_become_anothers() {
        let folder = folder("another");
        let path = folder.join("name");
        let address = Address::Path(path.clone());
        let first = PacketListener::bind_with_mode(&path, 0o600).unwrap();
        std::fs::remove_file(&path).unwrap();
        let second = PacketListener::bind(&address).unwrap();
        drop(first);
        assert!(PacketSocket::connect(&address).is_ok(), "the second listens");
        drop(second);
        std::fs::remove_dir(&folder).expect("the second has removed its file");
    }

    #[test]
    fn a_path_that_is_too_long_is_refused() {
        let address = Address::Path(PathBuf::from("/".repeat(200)));
        assert_eq!(errno(PacketListener::bind(&address)), Errno::NAMETOOLONG);
    }
}
