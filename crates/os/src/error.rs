//! The error type of this crate: failed system calls, and descriptors, packets and accesses that are refused.

use std::fmt;

use crate::{Errno, Size};

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failed system call, or an operation that this crate refuses, with the values involved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A system call failed.
    #[error("`{call}` failed: {errno}")]
    Call {
        /// The C name of the call.
        call: &'static str,
        /// The error code that it returned.
        errno: Errno,
    },

    /// An operation on zero bytes was requested.
    #[error("cannot use 0 bytes of memory")]
    ZeroLength,

    /// A descriptor that is required to be a memory file (memfd) refers to something else.
    #[error("the file descriptor is {found}, not a memory file")]
    NotAMemfd {
        /// The kind of file that it refers to.
        found: FileKind,
    },

    /// A memory file is not sealed against resizing, so another process could truncate it and cause a `SIGBUS` here.
    #[error("the memory file is not sealed against resizing (missing {missing})")]
    Unsealed {
        /// The missing seals, by their C names.
        missing: &'static str,
    },

    /// A memory file does not have the expected length.
    #[error("the memory file has {}, expected {}", Size(*actual), Size(*expected))]
    WrongLength {
        /// The expected length in bytes.
        expected: usize,
        /// The length in bytes that the file has.
        actual: usize,
    },

    /// Write access was requested to memory that this process may only read.
    #[error("the memory is read-only in this process")]
    ReadOnly,

    /// An access is out of bounds.
    #[error("cannot access {len} bytes at offset {offset}: the memory has {size} bytes")]
    OutOfRange {
        /// The offset of the access.
        offset: usize,
        /// The length of the access in bytes.
        len: usize,
        /// The size of the memory in bytes.
        size: usize,
    },

    /// An atomic access is misaligned.
    #[error(
        "cannot access an atomic of {align} bytes at offset {offset}: its address is not a multiple of {align}"
    )]
    Misaligned {
        /// The requested offset.
        offset: usize,
        /// The required alignment.
        align: usize,
    },

    /// The deadline passed before the wait ended.
    #[error("the deadline passed")]
    TimedOut,

    /// The peer closed its end of the socket.
    #[error("the other end closed the connection")]
    Closed,

    /// A file descriptor does not have the type that the handle requires.
    #[error("the file descriptor is not {expected}")]
    WrongDescriptor {
        /// The required type.
        expected: &'static str,
    },

    /// The packet to send is empty. The receiver could not distinguish it from the end of the connection.
    #[error("cannot send an empty packet")]
    EmptyPacket,

    /// A packet exceeds the maximum length.
    #[error("cannot send {len} bytes in one packet: the limit is {limit}")]
    PacketTooLong {
        /// The length of the packet.
        len: usize,
        /// The maximum length.
        limit: usize,
    },

    /// More file descriptors than one packet can carry.
    #[error("cannot send {count} file descriptors in one packet: the limit is {limit}")]
    TooManyFds {
        /// The number of descriptors.
        count: usize,
        /// The maximum number.
        limit: usize,
    },

    /// A received packet is longer than the receive buffer.
    #[error("received a packet of {len} bytes, expected at most {capacity}")]
    PacketTruncated {
        /// The length of the packet.
        len: usize,
        /// The length of the buffer.
        capacity: usize,
    },

    /// File descriptors of a received packet were dropped: unexpected, too many, or above this process's limit.
    #[error("file descriptors were lost on receipt (expected at most {capacity})")]
    FdsTruncated {
        /// The maximum number that the receiver expected.
        capacity: usize,
    },

    /// More file descriptors than the receiver accepts in one transfer. Both ends get this error.
    #[error("cannot transfer {count} file descriptors: the receiver accepts at most {limit}")]
    TransferTooLarge {
        /// The number of descriptors in the transfer.
        count: usize,
        /// The number that the receiver accepts.
        limit: usize,
    },

    /// The peer violated the protocol.
    #[error("the peer violated the protocol: {violation}")]
    Protocol {
        /// The violation.
        violation: &'static str,
    },

    /// The owner of a robust lock died, so the lock can never be acquired again.
    #[error("the owner of the lock died")]
    OwnerDied,

    /// The kernel or the C library returned a value that is wrong or has an unsupported format.
    #[error("the {subject} has an unexpected value or format")]
    UnknownFormat {
        /// A description of the data.
        subject: &'static str,
    },
}

impl Error {
    /// Returns whether the call failed because this process or the system has no file descriptor left.
    #[must_use]
    #[doc(alias = "EMFILE")]
    #[doc(alias = "ENFILE")]
    pub fn is_no_descriptor_left(&self) -> bool {
        matches!(self, Self::Call { errno: Errno::MFILE | Errno::NFILE, .. })
    }
}

/// The kind of file that a descriptor refers to, as reported by `fstat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileKind {
    /// A pipe.
    Pipe,
    /// A socket.
    Socket,
    /// A regular file, on disk or in tmpfs.
    File,
    /// A directory.
    Directory,
    /// A device node.
    Device,
    /// A memory file of huge pages (hugetlbfs). Holes in such a file cannot always be filled again.
    HugePages,
    /// An anonymous kernel object (eventfd, epoll, a driver handle) or a file type unknown to this library.
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
            Self::HugePages => "a hugetlbfs file",
            Self::Other => "another kernel object",
        })
    }
}
