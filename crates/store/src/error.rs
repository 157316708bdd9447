//! Errors of the store.

use std::io;
use std::path::PathBuf;

use wholemem_os::Visible;

use crate::{IndexError, ObjectId, Refusal};

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The server refused the request.
    #[error(transparent)]
    Refused(#[from] Refusal),

    /// No server listens at the socket.
    #[error("no store is served at `{}`", path.display())]
    NotServed {
        /// The path of the socket.
        path: PathBuf,
    },

    /// No socket is given, and the folder of the default socket does not exist.
    #[error(
        "no socket of a store is given, and the folder of the default socket, `{}`, does not exist; set `WHOLEMEM_SOCKET`",
        folder.display()
    )]
    NoSocket {
        /// The folder of the default socket.
        folder: PathBuf,
    },

    /// Another server listens at the socket.
    #[error("another server already listens at `{}`", path.display())]
    AlreadyServed {
        /// The path of the socket.
        path: PathBuf,
    },

    /// The path of the socket is an existing file that is not a socket.
    #[error("`{}` exists and is not a socket", path.display())]
    NotASocket {
        /// The path of the file.
        path: PathBuf,
    },

    /// The socket can be neither created nor connected to.
    #[error("cannot use the socket `{}`", path.display())]
    Socket {
        /// The path of the socket.
        path: PathBuf,
        /// The failed system call.
        source: wholemem_os::Error,
    },

    /// The deadline passed before the server answered.
    #[error("the deadline passed before the server answered")]
    TimedOut,

    /// The wait was interrupted by [`interruptible`](wholemem_os::interrupt::interruptible).
    #[error("the call was interrupted before the server answered")]
    Interrupted,

    /// The server has closed the connection, or the store has ended.
    #[error("the store has closed the connection")]
    Disconnected,

    /// The server that sent events was replaced. The watch is registered with the new server; events in between may be lost.
    #[error(
        "the server was replaced: events of names that begin with `{}` may be lost", Visible(.prefix)
    )]
    EventsMissed {
        /// The prefix of the watched names.
        prefix: String,
    },

    /// The server sent a message that violates the protocol.
    #[error("the store violated the protocol: {rule}")]
    Protocol {
        /// The rule of the protocol that was violated.
        rule: &'static str,
    },

    /// All pins of this client are in use.
    #[error("this process holds {limit} objects, which is the limit")]
    TooManyPins {
        /// The number of objects that a client can hold.
        limit: usize,
    },

    /// The name of an object is empty where a name is required.
    #[error("the name of an object must not be empty")]
    EmptyName,

    /// A write exceeds the length of the object.
    #[error("cannot write {len} bytes at offset {offset}: the object has {size} bytes")]
    OutOfRange {
        /// The offset of the write, in bytes.
        offset: usize,
        /// The length of the write, in bytes.
        len: usize,
        /// The length of the object, in bytes.
        size: usize,
    },

    /// The object is in device memory, which the CPU cannot access directly.
    #[error("object {object} is in device memory: copy its bytes with a stream")]
    OnDevice {
        /// The id of the object.
        object: ObjectId,
    },

    /// The object is on a device of the server that is not visible to this process.
    #[error("the object is on a device that is not visible to this process; check `CUDA_VISIBLE_DEVICES`")]
    DeviceHidden,

    /// The client was inherited by a forked child, where it cannot be used.
    #[error("a client of a store cannot be used in a forked child")]
    Forked,

    /// The index cannot be used.
    #[error(transparent)]
    Index(#[from] IndexError),

    /// A process of the store could not be started.
    #[error("cannot start the keeper or the server of the store")]
    Launch {
        /// The error of the launch.
        source: io::Error,
    },

    /// The server exited before it was ready. It has reported its own error.
    #[error("the server exited before it was ready")]
    NeverServed,

    /// A hand-over between the processes of a store lacks a descriptor.
    #[error("the hand-over between the processes of the store lacks the descriptor of {what}")]
    Incomplete {
        /// The missing descriptor.
        what: &'static str,
    },

    /// An operation of the memory layer failed.
    #[error(transparent)]
    Memory(#[from] wholemem_hal::Error),

    /// A system call failed.
    #[error(transparent)]
    Os(#[from] wholemem_os::Error),
}

impl Error {
    /// A stable identifier of the kind of error, for programs.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Refused(refusal) => refusal.code(),
            Self::NotServed { .. } => "not-served",
            Self::NoSocket { .. } => "no-socket",
            Self::AlreadyServed { .. } => "already-served",
            Self::NotASocket { .. } => "not-a-socket",
            Self::Socket { .. } => "socket",
            Self::TimedOut => "timed-out",
            Self::Interrupted => "interrupted",
            Self::Disconnected => "disconnected",
            Self::EventsMissed { .. } => "events-missed",
            Self::Protocol { .. } => "protocol",
            Self::TooManyPins { .. } => "too-many-pins",
            Self::EmptyName => "empty-name",
            Self::OutOfRange { .. } => "out-of-range",
            Self::OnDevice { .. } => "on-device",
            Self::DeviceHidden => "device-hidden",
            Self::Forked => "forked",
            Self::Index(_) => "index",
            Self::Launch { .. } => "launch",
            Self::NeverServed => "never-served",
            Self::Incomplete { .. } => "incomplete",
            Self::Memory(_) => "memory",
            Self::Os(_) => "os",
        }
    }
}
