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
        /// The C name of the system call.
        call: &'static str,
        /// The error code that the system call returned.
        errno: Errno,
    },

    /// An operation on zero bytes of memory was requested.
    #[error("cannot use 0 bytes of memory")]
    ZeroLength,

    /// A descriptor that is required to be a memory file (memfd) refers to something else.
    #[error("the file descriptor refers to {found}, not to a memory file (memfd)")]
    NotAMemfd {
        /// The kind of file that the descriptor refers to.
        found: FileKind,
    },

    /// A memory file is not sealed against resizing, so another process could truncate it and cause a `SIGBUS` in
    /// this process.
    #[error("the memory file is not sealed against resizing (missing {missing})")]
    Unsealed {
        /// The seals that the memory file lacks, by their C names.
        missing: &'static str,
    },

    /// A memory file does not have the expected length.
    #[error(
        "the length of the memory file is {actual_size}, expected {expected_size}",
        actual_size = Size(*actual), expected_size = Size(*expected)
    )]
    WrongLength {
        /// The expected length of the memory file in bytes.
        expected: usize,
        /// The actual length of the memory file in bytes.
        actual: usize,
    },

    /// Write access was requested to memory that this process may only read.
    #[error("cannot access the memory for writing: it is read-only in this process")]
    ReadOnly,

    /// An access to shared memory is out of bounds.
    #[error("cannot access {len} bytes at offset {offset}: the memory has {size} bytes")]
    OutOfRange {
        /// The offset at which the access begins.
        offset: usize,
        /// The length of the access in bytes.
        len: usize,
        /// The size of the accessed memory in bytes.
        size: usize,
    },

    /// An atomic access to shared memory is misaligned.
    #[error(
        "cannot access an atomic of {align} bytes at offset {offset}: its address is not a multiple of {align}"
    )]
    Misaligned {
        /// The offset of the misaligned access.
        offset: usize,
        /// The alignment in bytes that the atomic access requires.
        align: usize,
    },

    /// The deadline of a wait passed before the wait ended.
    #[error("the deadline of the wait passed")]
    TimedOut,

    /// The peer closed its end of the connection.
    #[error("the peer closed the connection")]
    Closed,

    /// A file descriptor does not refer to the required kind of object, such as a packet socket.
    #[error("the file descriptor is not {expected}")]
    WrongDescriptor {
        /// The kind of object that the descriptor must refer to, such as `a pidfd`.
        expected: &'static str,
    },

    /// A packet to send is empty. The receiver could not distinguish it from the end of the connection.
    #[error("cannot send an empty packet")]
    EmptyPacket,

    /// A packet to send exceeds the maximum length.
    #[error("cannot send {len} bytes in one packet: the limit is {limit}")]
    PacketTooLong {
        /// The length of the packet to send in bytes.
        len: usize,
        /// The maximum length of a packet in bytes.
        limit: usize,
    },

    /// A packet to send has more file descriptors than one packet can carry.
    #[error("cannot send {count} file descriptors in one packet: the limit is {limit}")]
    TooManyFds {
        /// The number of file descriptors of the packet to send.
        count: usize,
        /// The maximum number of file descriptors in one packet.
        limit: usize,
    },

    /// A received packet is longer than the receive buffer.
    #[error("received a packet of {len} bytes, expected at most {capacity}")]
    PacketTruncated {
        /// The length of the received packet in bytes.
        len: usize,
        /// The length of the receive buffer in bytes.
        capacity: usize,
    },

    /// File descriptors of a received packet were dropped: the receiver expected none or fewer, or reached its limit
    /// on open files.
    #[error("file descriptors of a packet were lost (the receiver expected at most {capacity})")]
    FdsTruncated {
        /// The maximum number of file descriptors that the receiver expected in the packet.
        capacity: usize,
    },

    /// A transfer has more file descriptors than the receiver accepts. Both ends of the connection get this error.
    #[error(
        "the receiver refused a transfer of {count} file descriptors: it accepts at most {limit} in a transfer"
    )]
    TransferTooLarge {
        /// The number of descriptors in the transfer.
        count: usize,
        /// The maximum number of descriptors that the receiver accepts in a transfer.
        limit: usize,
    },

    /// The peer sent a message that violates the protocol.
    #[error("the peer violated the protocol: {violation}")]
    Protocol {
        /// A description of the protocol violation.
        violation: &'static str,
    },

    /// The owner of a robust lock died, so the lock can never be acquired again.
    #[error("the thread that held the robust lock died")]
    OwnerDied,

    /// The kernel or the C library returned a value that is wrong or has an unsupported format.
    #[error("the kernel or the C library returned an unexpected value or format: {subject}")]
    UnknownFormat {
        /// A description of the data that is wrong or has an unsupported format.
        subject: &'static str,
    },
}

impl Error {
    /// Returns true if a system call failed because this process or the system has no file descriptor left (`EMFILE`
    /// or `ENFILE`).
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
    /// The descriptor refers to a pipe.
    Pipe,
    /// The descriptor refers to a socket.
    Socket,
    /// The descriptor refers to a regular file, on disk or in tmpfs.
    File,
    /// The descriptor refers to a directory.
    Directory,
    /// The descriptor refers to a device node.
    Device,
    /// The descriptor refers to a memory file of huge pages (hugetlbfs). Holes in such a file cannot always be filled
    /// again.
    HugePages,
    /// The descriptor refers to an anonymous kernel object (eventfd, epoll, a driver handle) or to a file of a type
    /// that this library does not know.
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
