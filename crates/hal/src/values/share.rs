//! Handles that share memory with another process.

use std::fmt;
use std::os::fd::OwnedFd;

/// The kinds of handle that share memory between processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[doc(alias = "CUmemAllocationHandleType")]
pub enum HandleKind {
    /// A file descriptor, for processes on one node.
    Fd,
    /// A fabric handle, for processes on nodes of one NVLink fabric.
    Fabric,
    /// A CUDA IPC handle, for memory from `cudaMalloc`.
    CudaIpc,
}

impl fmt::Display for HandleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fd => "a file descriptor",
            Self::Fabric => "a fabric handle",
            Self::CudaIpc => "a CUDA IPC handle",
        })
    }
}

/// A handle from which another process imports memory. A file descriptor keeps the memory alive; a handle of another
/// kind is valid only while an allocation of the memory exists.
#[derive(Debug)]
#[non_exhaustive]
pub enum ShareHandle {
    /// A file descriptor; send it over a Unix socket (`SCM_RIGHTS`).
    Fd(OwnedFd),
    /// A fabric handle; send its bytes over any channel.
    Fabric([u8; 64]),
    /// A CUDA IPC handle; send its bytes and the offset over any channel.
    CudaIpc {
        /// The bytes of the CUDA IPC handle.
        token: [u8; 64],
        /// The offset of the shared memory in the driver's allocation.
        offset: usize,
    },
}

impl ShareHandle {
    /// Returns the kind of the handle.
    #[must_use]
    pub fn kind(&self) -> HandleKind {
        match self {
            Self::Fd(_) => HandleKind::Fd,
            Self::Fabric(_) => HandleKind::Fabric,
            Self::CudaIpc { .. } => HandleKind::CudaIpc,
        }
    }

    /// Returns the file descriptor, if the handle is one.
    #[must_use]
    pub fn into_fd(self) -> Option<OwnedFd> {
        match self {
            Self::Fd(fd) => Some(fd),
            _ => None,
        }
    }
}

impl From<OwnedFd> for ShareHandle {
    fn from(fd: OwnedFd) -> Self {
        Self::Fd(fd)
    }
}
