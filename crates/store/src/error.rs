//! What can go wrong with a store.

use std::io;
use std::path::PathBuf;

use wholemem_os::Visible;

use crate::{IndexError, ObjectId, Refusal};

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong with a store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The server did not do what was asked.
    #[error(transparent)]
    Refused(#[from] Refusal),

    /// No server is there.
    #[error("no store is served at `{}`", path.display())]
    NotServed {
        /// The socket where one was looked for.
        path: PathBuf,
    },

    /// No socket is named, and there is no folder where it would be by itself.
    #[error(
        "cannot tell where the store is: there is no folder {}; name its socket in `WHOLEMEM_SOCKET`",
        folder.display()
    )]
    NoSocket {
        /// The folder where it would be.
        folder: PathBuf,
    },

    /// Another store is served there.
    #[error("a store is served at `{}` already", path.display())]
    AlreadyServed {
        /// Its socket.
        path: PathBuf,
    },

    /// A file is where the socket was to be, and is none.
    #[error("`{}` is a file already, and no socket", path.display())]
    NotASocket {
        /// The file.
        path: PathBuf,
    },

    /// The socket can be neither made nor connected to.
    #[error("cannot use the socket `{}`", path.display())]
    Socket {
        /// Where it is, or was to be.
        path: PathBuf,
        /// What the kernel said.
        source: wholemem_os::Error,
    },

    /// The deadline came before the answer.
    #[error("the deadline passed before the server answered")]
    TimedOut,

    /// Whoever waited was told not to, by [`interruptible`](wholemem_os::interrupt::interruptible).
    #[error("the call was interrupted before the server answered")]
    Interrupted,

    /// The server has disconnected this client, or the store has ended.
    #[error("the store has closed the connection")]
    Disconnected,

    /// The server that told of what happens to names was replaced, and the next one has just been asked to.
    #[error(
        "the server was replaced: what happened to names that begin with `{}` may have been missed", Visible(.prefix)
    )]
    EventsMissed {
        /// What was watched for.
        prefix: String,
    },

    /// The other side said what is no message of the protocol.
    #[error("the store broke the protocol: {rule}")]
    Protocol {
        /// The rule it broke.
        rule: &'static str,
    },

    /// All pins of this client are in use.
    #[error("this process holds {limit} objects at once, and can hold no more")]
    TooManyPins {
        /// How many it can hold.
        limit: usize,
    },

    /// A name without a letter, where an object is to be found by it.
    #[error("an empty name is no name")]
    EmptyName,

    /// More bytes than the object has.
    #[error("cannot write {len} bytes at offset {offset}: the object has {size}")]
    OutOfRange {
        /// Where they were to begin.
        offset: usize,
        /// How many there were.
        len: usize,
        /// How long the object is.
        size: usize,
    },

    /// An object whose bytes are not the processor's to reach.
    #[error("object {object} is on a device, and its bytes are reached by a stream")]
    OnDevice {
        /// Which one.
        object: ObjectId,
    },

    /// A device that the server has and this process does not see.
    #[error("the object is on a device that this process does not see; look at `CUDA_VISIBLE_DEVICES`")]
    DeviceHidden,

    /// This process is a forked child, where inherited clients do nothing.
    #[error("a store's client cannot be used in a forked child")]
    Forked,

    /// The index cannot be used.
    #[error(transparent)]
    Index(#[from] IndexError),

    /// A process of the store could not be started.
    #[error("cannot start a process of the store")]
    Launch {
        /// Why.
        source: io::Error,
    },

    /// No server came to serve, and the reason is what it said.
    #[error("the server ended before it served")]
    NeverServed,

    /// What one process of a store hands over to another is not all there.
    #[error("the store handed over no descriptor of {what}")]
    Incomplete {
        /// What is missing.
        what: &'static str,
    },

    /// The memory layer refused something.
    #[error(transparent)]
    Memory(#[from] wholemem_hal::Error),

    /// The kernel refused something.
    #[error(transparent)]
    Os(#[from] wholemem_os::Error),
}

impl Error {
    /// A name for the kind of error that stays the same between versions, for programs.
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
