//! Handles through which memory goes to another process.

use std::fmt;
use std::os::fd::OwnedFd;

/// The kinds of handle there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[doc(alias = "CUmemAllocationHandleType")]
pub enum HandleKind {
    /// A file descriptor, for processes of one machine.
    Fd,
    /// A token that works between machines of one NVLink fabric.
    Fabric,
    /// CUDA's older token, for memory from `cudaMalloc`.
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

/// Memory on its way to another process. It keeps the memory alive as long as the kernel or the driver does: a
/// file descriptor for ever, the others while an allocation lives.
#[derive(Debug)]
#[non_exhaustive]
pub enum ShareHandle {
    /// A file descriptor, to be sent over a Unix socket.
    Fd(OwnedFd),
    /// A fabric token, to be sent anyhow.
    Fabric([u8; 64]),
    /// CUDA's older token, to be sent anyhow, and where in its allocation the memory begins.
    CudaIpc {
        /// The token.
        token: [u8; 64],
        /// Where the memory begins behind it.
        offset: usize,
    },
}

impl ShareHandle {
    /// Which kind it is.
    #[must_use]
    pub fn kind(&self) -> HandleKind {
        match self {
            Self::Fd(_) => HandleKind::Fd,
            Self::Fabric(_) => HandleKind::Fabric,
            Self::CudaIpc { .. } => HandleKind::CudaIpc,
        }
    }

    /// The file descriptor, if that is what it is.
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
