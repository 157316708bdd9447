//! Direct driver and system calls that benchmarks use as a baseline for the safe types.
//!
//! Each function makes the same calls in the same order as the safe types do, without their checks. The functions are
//! safe because they own the resources they create. They are for benchmarks: the feature `bench` adds them.
//!
//! [`RawDevice`] makes the calls for one device of any backend, and [`EmptyLaunches`] launches empty kernels on a GPU.

pub mod host;
mod launches;

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

pub use launches::{EmptyLaunches, LaunchMethod, LaunchTime};

use crate::cuda::limits as cuda;
use crate::{BackendKind, Device, Error, Result, Span};

/// The error of a baseline call, of any type.
pub type RawError = Box<dyn std::error::Error + Send + Sync>;

/// Makes the baseline calls of benchmarks for one device.
#[derive(Debug)]
pub struct RawDevice(DeviceKind);

#[derive(Debug)]
enum DeviceKind {
    Host,
    Cuda(cuda::CudaCalls),
}

/// Memory that a baseline call created or imported; it is released on drop.
#[derive(Debug)]
pub struct RawDeviceMemory(MemoryKind);

#[derive(Debug)]
enum MemoryKind {
    Host(OwnedFd),
    Cuda(cuda::CudaHandle),
}

/// A mapping that a baseline call created; it is removed on drop.
#[derive(Debug)]
pub struct RawDeviceMapping(MappingKind);

#[derive(Debug)]
enum MappingKind {
    Host(host::HostMap),
    Cuda(cuda::CudaMap),
}

const MIXED: &str = "the memory belongs to another backend";

impl RawDevice {
    /// Prepares the baseline calls of benchmarks for `device`.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn of(device: &Device) -> Result<Self, RawError> {
        Ok(Self(match device.backend().kind() {
            BackendKind::Host => DeviceKind::Host,
            BackendKind::Cuda => DeviceKind::Cuda(cuda::CudaCalls::open(device.id())?),
        }))
    }

    /// Creates `len` bytes of memory on the device.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn create(&self, len: usize) -> Result<RawDeviceMemory, RawError> {
        Ok(RawDeviceMemory(match &self.0 {
            DeviceKind::Host => MemoryKind::Host(host::create(len)?),
            DeviceKind::Cuda(raw) => MemoryKind::Cuda(raw.create(len)?),
        }))
    }

    /// Creates a file descriptor of the memory for another process.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn export(&self, memory: &RawDeviceMemory) -> Result<OwnedFd, RawError> {
        Ok(match (&self.0, &memory.0) {
            (DeviceKind::Host, MemoryKind::Host(file)) => host::export(file.as_fd())?,
            (DeviceKind::Cuda(raw), MemoryKind::Cuda(memory)) => raw.export(memory)?,
            _ => return Err(MIXED.into()),
        })
    }

    /// Imports memory from a file descriptor of another process.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn import(&self, fd: OwnedFd) -> Result<RawDeviceMemory, RawError> {
        Ok(RawDeviceMemory(match &self.0 {
            DeviceKind::Host => {
                host::inspect(fd.as_fd())?;
                MemoryKind::Host(fd)
            }
            DeviceKind::Cuda(raw) => MemoryKind::Cuda(raw.import(&fd)?),
        }))
    }

    /// Maps `len` bytes of memory with read and write access.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn map(&self, memory: &RawDeviceMemory, len: usize) -> Result<RawDeviceMapping, RawError> {
        Ok(RawDeviceMapping(match (&self.0, &memory.0) {
            (DeviceKind::Host, MemoryKind::Host(file)) => {
                MappingKind::Host(host::HostMap::create(file.as_fd(), len)?)
            }
            (DeviceKind::Cuda(raw), MemoryKind::Cuda(memory)) => MappingKind::Cuda(raw.map(memory, len)?),
            _ => return Err(MIXED.into()),
        }))
    }

    /// Reads the first and the last byte of the mapping.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn ends(&self, map: &RawDeviceMapping) -> Result<[u8; 2], RawError> {
        Ok(match (&self.0, &map.0) {
            (DeviceKind::Host, MappingKind::Host(map)) => map.ends(),
            (DeviceKind::Cuda(raw), MappingKind::Cuda(map)) => raw.ends(map)?,
            _ => return Err(MIXED.into()),
        })
    }

    /// Writes the first and the last byte of the mapping.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn set_ends(&self, map: &RawDeviceMapping, ends: [u8; 2]) -> Result<(), RawError> {
        match (&self.0, &map.0) {
            (DeviceKind::Host, MappingKind::Host(map)) => map.set_ends(ends),
            (DeviceKind::Cuda(raw), MappingKind::Cuda(map)) => raw.set_ends(map, ends)?,
            _ => return Err(MIXED.into()),
        }
        Ok(())
    }

    /// Returns the shortest time of several copies between two spans of the same length that do not overlap.
    ///
    /// # Errors
    /// [`Error::LengthsDiffer`], [`Error::Overlap`]; the driver's error.
    pub fn best_copy(&self, to: &Span, from: &Span, times: u32) -> Result<Duration, RawError> {
        if to.len() != from.len() {
            return Err(Error::LengthsDiffer { from: from.len(), to: to.len() }.into());
        }
        if to.overlaps(from) {
            return Err(Error::Overlap { attempt: crate::Attempt::Copy { len: from.len() } }.into());
        }
        Ok(match &self.0 {
            DeviceKind::Cuda(raw) => raw.best_copy(to.address(), from.address(), to.len(), times)?,
            DeviceKind::Host => host::best_copy(to, from, times).ok_or("the CPU cannot address the spans")?,
        })
    }
}
