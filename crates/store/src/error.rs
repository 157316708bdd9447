//! The errors of the object store.

use std::io;
use std::path::PathBuf;

use wholemem_os::Visible;

use crate::{IndexError, ObjectId, Refusal};

/// A result of the object store, whose error type is [`Error`] by default.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the object store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The server of the store refused a request of the client.
    #[error(transparent)]
    Refused(#[from] Refusal),

    /// No server of a store is listening on the socket.
    #[error("no store is served at the socket `{socket}`", socket = path.display())]
    NotServed {
        /// The path of the store's socket.
        path: PathBuf,
    },

    /// The caller gives no socket of a store, and the folder of the default socket does not exist.
    #[error(
        "no socket of a store is given, and the folder of the default socket, `{path}`, does not exist; set `WHOLEMEM_SOCKET`",
        path = folder.display()
    )]
    NoSocket {
        /// The folder of the default socket of a store.
        folder: PathBuf,
    },

    /// Another server is already listening on the socket of the store.
    #[error("another server is already listening on the socket `{socket}`", socket = path.display())]
    AlreadyServed {
        /// The path of the store's socket.
        path: PathBuf,
    },

    /// The path for the socket of the store is an existing file that is not a socket.
    #[error("cannot serve a store at `{file}`: the file exists and is not a socket", file = path.display())]
    NotASocket {
        /// The path of the existing file, which is not a socket.
        path: PathBuf,
    },

    /// The socket of the store could not be created or connected to.
    #[error("cannot use the store's socket `{socket}`", socket = path.display())]
    Socket {
        /// The path of the store's socket.
        path: PathBuf,
        /// The error of the failed system call on the socket.
        source: wholemem_os::Error,
    },

    /// The deadline of a request passed before the server of the store answered.
    #[error("the deadline passed before the server of the store answered")]
    TimedOut,

    /// A wait for the server of the store was interrupted by the check of
    /// [`interruptible`](wholemem_os::interrupt::interruptible).
    #[error("the call was interrupted before the server of the store answered")]
    Interrupted,

    /// The server of the store has closed the connection or accepts no more connections, or the store has ended.
    #[error("the store has ended, has closed the connection of this client, or accepts no more connections")]
    Disconnected,

    /// The server that sent the events of a watch was replaced. The watch is registered with the new server; events in between
    /// may be lost.
    #[error(
        "the server of the store was replaced: events of names that begin with `{shown}` may be lost",
        shown = Visible(.prefix)
    )]
    EventsMissed {
        /// The prefix of the watched object names.
        prefix: String,
    },

    /// The server of the store sent a message that violates the protocol.
    #[error("the store violated the protocol: {rule}")]
    Protocol {
        /// The rule of the store's protocol that was violated.
        rule: &'static str,
    },

    /// The client holds the maximum number of objects: all its pins are in use.
    #[error("this client of the store holds {limit} objects, which is the limit")]
    TooManyPins {
        /// The maximum number of objects that one client can hold.
        limit: usize,
    },

    /// The name of an object is empty, although the operation requires a name.
    #[error("the name of an object must not be empty")]
    EmptyName,

    /// A range to be written or mapped exceeds the length of the object.
    #[error("cannot write or map {len} bytes at offset {offset}: the object has {size} bytes")]
    OutOfRange {
        /// The offset of the range in the object, in bytes.
        offset: usize,
        /// The length of the range to be written or mapped, in bytes.
        len: usize,
        /// The length of the object, in bytes.
        size: usize,
    },

    /// The object is in device memory, which the CPU cannot access directly.
    #[error(
        "the CPU cannot access object {object}, which is in device memory: copy the bytes between its `span` and host memory \
         on a stream"
    )]
    OnDevice {
        /// The id of the object in device memory.
        object: ObjectId,
    },

    /// The device of an object is not visible to both this process and the server of the store.
    #[error(
        "the device of the object is not visible to both this process and the store; check `CUDA_VISIBLE_DEVICES`"
    )]
    DeviceHidden,

    /// A forked child used a client that it inherited from its parent; a client works only in the process that created it.
    #[error("a client of a store cannot be used in a forked child")]
    Forked,

    /// The index of the store (the table of all objects) has an unknown layout or is damaged.
    #[error(transparent)]
    Index(#[from] IndexError),

    /// A process or a thread for the store or its client could not be started.
    #[error("cannot start a process or a thread for the store or its client")]
    Launch {
        /// The error of starting the process or the thread.
        source: io::Error,
    },

    /// The server of the store exited before it was ready for clients. The server has reported its own error.
    #[error("the server of the store exited before it was ready")]
    NeverServed,

    /// A hand-over of descriptors between the keeper and the server of a store lacks a descriptor.
    #[error("the keeper or the server of the store did not hand over the file descriptor of {what}")]
    Incomplete {
        /// The resource whose descriptor is missing.
        what: &'static str,
    },

    /// An operation of the device memory layer (`wholemem-hal`) failed.
    #[error(transparent)]
    Memory(#[from] wholemem_hal::Error),

    /// A system call failed.
    #[error(transparent)]
    Os(#[from] wholemem_os::Error),
}

impl Error {
    /// Returns a stable identifier of the kind of this error, for programs.
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

    /// Returns the stable number of the kind of this error, which C programs see as a status. Numbers of errors that only a store has
    /// begin at 2000, those of [refusals](Refusal::number) at 2100.
    #[must_use]
    pub fn number(&self) -> u32 {
        match self {
            Self::Refused(refusal) => refusal.number(),
            Self::NotServed { .. } => 2000,
            Self::NoSocket { .. } => 2001,
            Self::AlreadyServed { .. } => 2002,
            Self::NotASocket { .. } => 2003,
            Self::Socket { .. } => 2004,
            Self::TimedOut => 2005,
            Self::Interrupted => 1018,
            Self::Disconnected => 2006,
            Self::EventsMissed { .. } => 2007,
            Self::Protocol { .. } => 2008,
            Self::TooManyPins { .. } => 2009,
            Self::EmptyName => 2010,
            Self::OutOfRange { .. } => 2011,
            Self::OnDevice { .. } => 2012,
            Self::DeviceHidden => 2013,
            Self::Forked => 18,
            Self::Index(_) => 2014,
            Self::Launch { .. } => 2015,
            Self::NeverServed => 2016,
            Self::Incomplete { .. } => 2017,
            Self::Memory(error) => error.code(),
            Self::Os(_) => 1030,
        }
    }
}
