//! What can go wrong between this process and the kernel.

use std::fmt;

use crate::{Errno, Size};

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong between this process and the kernel, with the values it went wrong on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A system call answered with an error.
    #[error("`{call}` failed: {errno}")]
    Call {
        /// The call, by its C name.
        call: &'static str,
        /// What it answered.
        errno: Errno,
    },

    /// Memory of no bytes was asked for.
    #[error("cannot use 0 bytes of memory")]
    ZeroLength,

    /// A file descriptor that should have been a memory file is something else.
    #[error("the file descriptor is {found}, not a memory file")]
    NotAMemfd {
        /// What it is.
        found: FileKind,
    },

    /// A memory file could still be resized by its other holders, which would be our `SIGBUS`.
    #[error("the memory file is not sealed against resizing (missing {missing})")]
    Unsealed {
        /// The seals it lacks, by their C names.
        missing: &'static str,
    },

    /// A memory file has another length than was promised.
    #[error("the memory file holds {}, not {}", Size(*actual), Size(*expected))]
    WrongLength {
        /// What was promised.
        expected: usize,
        /// What it has.
        actual: usize,
    },

    /// A writable view of memory that was received read-only.
    #[error("the memory is read-only here")]
    ReadOnly,

    /// An access outside the bytes it was made on.
    #[error("cannot access {len} bytes at offset {offset}: there are {size}")]
    OutOfRange {
        /// Where it began.
        offset: usize,
        /// How long it was.
        len: usize,
        /// How many bytes there are.
        size: usize,
    },

    /// An atomic at an address that is no multiple of its size.
    #[error(
        "cannot reach an atomic of {align} bytes at offset {offset}: its address is not a multiple of {align}"
    )]
    Misaligned {
        /// Where it was asked for.
        offset: usize,
        /// The alignment it needs.
        align: usize,
    },

    /// The deadline came first.
    #[error("the deadline passed")]
    TimedOut,

    /// The other end of a socket is gone.
    #[error("the other end closed the connection")]
    Closed,

    /// A file descriptor is of another kind than the handle it was to become.
    #[error("the file descriptor is not {expected}")]
    WrongDescriptor {
        /// What it should have been.
        expected: &'static str,
    },

    /// A packet of no bytes, which its receiver could not tell from the end of the connection.
    #[error("cannot send an empty packet")]
    EmptyPacket,

    /// A packet longer than a packet may be.
    #[error("cannot send {len} bytes in one packet: the limit is {limit}")]
    PacketTooLong {
        /// How long it was.
        len: usize,
        /// How long it may be.
        limit: usize,
    },

    /// More file descriptors than one packet carries.
    #[error("cannot send {count} file descriptors in one packet: the limit is {limit}")]
    TooManyFds {
        /// How many there were.
        count: usize,
        /// How many there may be.
        limit: usize,
    },

    /// A packet was longer than the buffer it was received into.
    #[error("a packet of {len} bytes arrived where at most {room} were expected")]
    PacketTruncated {
        /// How long it was.
        len: usize,
        /// How long it could be.
        room: usize,
    },

    /// File descriptors were lost on the way: unexpected, too many, or beyond this process's limit.
    #[error("file descriptors were lost on receipt (expected at most {room})")]
    FdsTruncated {
        /// How many were expected at most.
        room: usize,
    },

    /// More file descriptors than the receiver takes in one transfer. Both ends get this one.
    #[error("cannot transfer {count} file descriptors: the receiver takes at most {limit}")]
    TransferTooLarge {
        /// How many were offered.
        count: usize,
        /// How many the receiver takes.
        limit: usize,
    },

    /// A peer sent what the protocol does not allow.
    #[error("the peer broke the protocol: {what}")]
    Protocol {
        /// The rule it broke.
        what: &'static str,
    },

    /// The last owner of a robust lock died, and the lock is closed for ever.
    #[error("the owner of the lock died")]
    OwnerDied,

    /// The kernel or the C library keeps something in another form than this library knows.
    #[error("cannot make out the {what}: it is not in a form known here")]
    UnknownFormat {
        /// What it is.
        what: &'static str,
    },
}

impl Error {
    /// Whether this process, or the system, has as many descriptors open as it may.
    #[must_use]
    #[doc(alias = "EMFILE")]
    #[doc(alias = "ENFILE")]
    pub fn is_no_descriptor_left(&self) -> bool {
        matches!(self, Self::Call { errno: Errno::MFILE | Errno::NFILE, .. })
    }
}

/// What a file descriptor refers to, as far as `fstat` tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileKind {
    /// A pipe.
    Pipe,
    /// A socket.
    Socket,
    /// A regular file, on disk or in a tmpfs.
    File,
    /// A directory.
    Directory,
    /// A device node.
    Device,
    /// A memory file of huge pages, whose holes cannot always be filled again.
    HugePages,
    /// An anonymous kernel object (eventfd, epoll, a driver's handle) or anything newer than this library.
    Other,
}

impl fmt::Display for FileKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pipe => "a pipe",
            Self::Socket => "a socket",
            Self::File => "a file",
            Self::Directory => "a directory",
            Self::Device => "a device",
            Self::HugePages => "a file of huge pages",
            Self::Other => "another kernel object",
        })
    }
}
