//! How the ranks of several nodes reach each other, and the TCP sockets between nodes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, sockopt};
use wholemem_os::{Errno, Error as OsError};

use crate::id::SocketLocation;
use crate::{Error, Result, UniqueId};

/// The default time after which a node that does not answer is given up; see [`Network::with_silence`].
pub const DEFAULT_SILENCE: Duration = Duration::from_secs(5);

/// The maximum number of connections that wait to be accepted. The kernel limits it to `net.core.somaxconn`.
const BACKLOG: i32 = 4096;

/// How the ranks of a group on several nodes reach each other: the address of rank 0, and the local addresses and ports
/// to use. The address of rank 0 must be equal on all ranks.
///
/// ```
/// use std::time::Duration;
/// use wholemem_comm::Network;
///
/// let network = Network::new("10.9.0.1:4711".parse().unwrap())
///     .with_ports(4711..=4730) // for a firewall
///     .with_silence(Duration::from_secs(2));
/// # drop(network);
/// ```
#[derive(Debug, Clone)]
pub struct Network {
    root: SocketAddr,
    listen: Option<IpAddr>,
    ports: RangeInclusive<u16>,
    silence: Duration,
    socket_dir: Option<PathBuf>,
    /// The socket at which rank 0 listens, if it was created before.
    listener: Option<Arc<TcpListener>>,
}

impl Network {
    /// Describes the network of a group whose rank 0 listens at `root`.
    #[must_use]
    pub fn new(root: SocketAddr) -> Self {
        Self { root, listen: None, ports: 0..=0, silence: DEFAULT_SILENCE, socket_dir: None, listener: None }
    }

    /// Listens at this local address only, instead of at all addresses of the node.
    #[must_use]
    pub fn with_interface(self, address: IpAddr) -> Self {
        Self { listen: Some(address), ..self }
    }

    /// Sets the ports at which ranks other than rank 0 listen: the first free one is used. By default the kernel chooses.
    #[must_use]
    pub fn with_ports(self, ports: RangeInclusive<u16>) -> Self {
        Self { ports, ..self }
    }

    /// Sets the time after which a node that does not answer is given up: [`DEFAULT_SILENCE`] by default. All ranks
    /// should set the same time.
    #[must_use]
    pub fn with_silence(self, silence: Duration) -> Self {
        Self { silence, ..self }
    }

    /// Makes the ranks of this node find each other by socket files in `directory`, instead of by abstract names in the
    /// network namespace. Ranks that use different directories are on different nodes.
    #[must_use]
    pub fn with_socket_dir(self, directory: &Path) -> Self {
        Self { socket_dir: Some(directory.to_owned()), ..self }
    }

    /// Sets the socket at which rank 0 listens, which other ranks reach at the address of rank 0.
    #[must_use]
    pub fn with_listener(self, listener: TcpListener) -> Self {
        Self { listener: Some(Arc::new(listener)), ..self }
    }

    pub(crate) fn root(&self) -> SocketAddr {
        self.root
    }

    pub(crate) fn silence(&self) -> Duration {
        self.silence
    }

    /// Returns the network of a group whose rank 0 listens at another address.
    pub(crate) fn rooted_at(&self, root: SocketAddr, listener: Option<TcpListener>) -> Self {
        Self { root, listener: listener.map(Arc::new), ..self.clone() }
    }

    /// Returns the id with the location of the Unix sockets of this node.
    pub(crate) fn local_id(&self, id: &UniqueId) -> Result<UniqueId> {
        let location = match &self.socket_dir {
            Some(directory) => SocketLocation::in_directory(directory)?,
            None => SocketLocation::current_namespace()?,
        };
        Ok(id.in_location(location))
    }

    /// Listens for connections from other nodes as rank 0.
    pub(crate) fn listen_as_root(&self) -> Result<TcpListener> {
        if let Some(listener) = &self.listener {
            let listener = listener.try_clone().map_err(|error| os_error("fcntl", &error))?;
            listener.set_nonblocking(true).map_err(|error| os_error("fcntl", &error))?;
            return Ok(listener);
        }
        let ip = self.listen.unwrap_or_else(|| unspecified(self.root));
        listen_at(SocketAddr::new(ip, self.root.port())).map_err(Error::from)
    }

    /// Listens for connections from other nodes at the first free port.
    pub(crate) fn listen(&self) -> Result<TcpListener> {
        let ip = self.listen.unwrap_or_else(|| unspecified(self.root));
        let mut outcome = Err(OsError::Call { call: "bind", errno: Errno::ADDRINUSE });
        for port in self.ports.clone() {
            outcome = listen_at(SocketAddr::new(ip, port));
            if outcome.is_ok() {
                break;
            }
        }
        Ok(outcome?)
    }
}

fn unspecified(root: SocketAddr) -> IpAddr {
    match root {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}

fn os_error(call: &'static str, error: &std::io::Error) -> OsError {
    OsError::Call { call, errno: Errno::from_io_error(error).unwrap_or(Errno::IO) }
}

fn socket(address: SocketAddr) -> Result<std::os::fd::OwnedFd, OsError> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))
        .map_err(|errno| OsError::Call { call: "socket", errno })
}

fn listen_at(address: SocketAddr) -> Result<TcpListener, OsError> {
    let socket = socket(address)?;
    let failed = |call| move |errno| OsError::Call { call, errno };
    sockopt::set_socket_reuseaddr(&socket, true).map_err(failed("setsockopt"))?;
    rustix::net::bind(&socket, &address).map_err(failed("bind"))?;
    rustix::net::listen(&socket, BACKLOG).map_err(failed("listen"))?;
    Ok(socket.into())
}

/// Begins to connect to a rank of another node. The connection is complete, or has failed, when the socket is writable.
pub(crate) fn begin_to_connect(address: SocketAddr) -> Result<TcpStream, OsError> {
    let socket = socket(address)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket.into()),
        Err(errno) => Err(OsError::Call { call: "connect", errno }),
    }
}

/// Sets the options of a connection between nodes: packets are sent at once, and a connection whose packets are not
/// acknowledged ends after `silence`.
pub(crate) fn configure(stream: &TcpStream, silence: Duration) -> Result<(), OsError> {
    let milliseconds = u32::try_from(silence.as_millis()).unwrap_or(u32::MAX);
    stream.set_nonblocking(true).map_err(|error| os_error("fcntl", &error))?;
    sockopt::set_tcp_nodelay(stream, true)
        .and_then(|()| sockopt::set_tcp_user_timeout(stream, milliseconds))
        .map_err(|errno| OsError::Call { call: "setsockopt", errno })
}
