//! What the machine itself can do: the calls beneath this crate, made directly, for benchmarks to measure against.
//!
//! Each function makes the same calls in the same order as the safe types do, with nothing around them. They are safe
//! functions, since they own what they make. They are for benchmarks: the feature `bench` adds them.
//!
//! [`Raw`] is the raw side of one device, whatever its backend.

pub mod host;

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use crate::cuda::limits as cuda;
use crate::{BackendKind, Device, Error, Result, Span};

/// What went wrong below, told as it came.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// The raw calls of one device.
#[derive(Debug)]
pub struct Raw(RawKind);

#[derive(Debug)]
enum RawKind {
    Host,
    Cuda(cuda::RawCuda),
}

/// Memory that was created or imported raw; given back when dropped.
#[derive(Debug)]
pub struct RawMade(MadeKind);

#[derive(Debug)]
enum MadeKind {
    Host(OwnedFd),
    Cuda(cuda::RawMade),
}

/// A raw map of it; given back when dropped.
#[derive(Debug)]
pub struct RawMapped(MappedKind);

#[derive(Debug)]
enum MappedKind {
    Host(host::RawMap),
    Cuda(cuda::RawMap),
}

const MIXED: &str = "raw memory is used with the calls it was made by";

impl Raw {
    /// The raw calls of `device`.
    ///
    /// # Errors
    /// What the driver said.
    pub fn of(device: &Device) -> Result<Self, Failure> {
        Ok(Self(match device.backend().kind() {
            BackendKind::Host => RawKind::Host,
            BackendKind::Cuda => RawKind::Cuda(cuda::RawCuda::open(device.id())?),
        }))
    }

    /// Creates memory.
    ///
    /// # Errors
    /// What the driver said.
    pub fn create(&self, len: usize) -> Result<RawMade, Failure> {
        Ok(RawMade(match &self.0 {
            RawKind::Host => MadeKind::Host(host::create(len)?),
            RawKind::Cuda(raw) => MadeKind::Cuda(raw.create(len)?),
        }))
    }

    /// Makes a descriptor for another process.
    ///
    /// # Errors
    /// What the driver said.
    pub fn export(&self, made: &RawMade) -> Result<OwnedFd, Failure> {
        Ok(match (&self.0, &made.0) {
            (RawKind::Host, MadeKind::Host(file)) => host::export(file.as_fd())?,
            (RawKind::Cuda(raw), MadeKind::Cuda(made)) => raw.export(made)?,
            _ => return Err(MIXED.into()),
        })
    }

    /// Takes over memory from a descriptor.
    ///
    /// # Errors
    /// What the driver said.
    pub fn import(&self, fd: OwnedFd) -> Result<RawMade, Failure> {
        Ok(RawMade(match &self.0 {
            RawKind::Host => {
                host::inspect(fd.as_fd())?;
                MadeKind::Host(fd)
            }
            RawKind::Cuda(raw) => MadeKind::Cuda(raw.import(&fd)?),
        }))
    }

    /// Maps memory of `len` bytes for reading and writing.
    ///
    /// # Errors
    /// What the driver said.
    pub fn map(&self, made: &RawMade, len: usize) -> Result<RawMapped, Failure> {
        Ok(RawMapped(match (&self.0, &made.0) {
            (RawKind::Host, MadeKind::Host(file)) => {
                MappedKind::Host(host::RawMap::create(file.as_fd(), len)?)
            }
            (RawKind::Cuda(raw), MadeKind::Cuda(made)) => MappedKind::Cuda(raw.map(made, len)?),
            _ => return Err(MIXED.into()),
        }))
    }

    /// The first byte and the last.
    ///
    /// # Errors
    /// What the driver said.
    pub fn ends(&self, map: &RawMapped) -> Result<[u8; 2], Failure> {
        Ok(match (&self.0, &map.0) {
            (RawKind::Host, MappedKind::Host(map)) => map.ends(),
            (RawKind::Cuda(raw), MappedKind::Cuda(map)) => raw.ends(map)?,
            _ => return Err(MIXED.into()),
        })
    }

    /// Sets the first byte and the last.
    ///
    /// # Errors
    /// What the driver said.
    pub fn set_ends(&self, map: &RawMapped, ends: [u8; 2]) -> Result<(), Failure> {
        match (&self.0, &map.0) {
            (RawKind::Host, MappedKind::Host(map)) => map.set_ends(ends),
            (RawKind::Cuda(raw), MappedKind::Cuda(map)) => raw.set_ends(map, ends)?,
            _ => return Err(MIXED.into()),
        }
        Ok(())
    }

    /// The shortest of several copies between two spans of one length, which do not overlap.
    ///
    /// # Errors
    /// [`Error::LengthsDiffer`], [`Error::Overlap`]; what the driver said.
    pub fn best_copy(&self, to: &Span, from: &Span, times: u32) -> Result<Duration, Failure> {
        if to.len() != from.len() {
            return Err(Error::LengthsDiffer { from: from.len(), to: to.len() }.into());
        }
        if to.overlaps(from) {
            return Err(Error::Overlap { attempt: crate::Attempt::Copy { len: from.len() } }.into());
        }
        Ok(match &self.0 {
            RawKind::Cuda(raw) => raw.best_copy(to.address(), from.address(), to.len(), times)?,
            RawKind::Host => {
                host::best_copy(to, from, times).ok_or("the spans are not of the processor's memory")?
            }
        })
    }
}
