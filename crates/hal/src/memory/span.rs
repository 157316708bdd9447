//! A part of some memory, as streams take it: it keeps the memory alive, and knows who may do what with it.

use std::sync::Arc;

use crate::queue::Held;
use crate::raw::Address;
use crate::{Attempt, Backend, Device, DeviceId, Error, Result, Rights};

/// Memory that has an address and outlives the work that uses it.
pub(crate) trait Addressable: Held {
    fn backend(&self) -> &Backend;
    fn rights_of(&self, device: DeviceId) -> Rights;
}

/// A part of a [`Mapping`](crate::Mapping) or of a [`PinnedBuffer`](crate::PinnedBuffer).
///
/// ```
/// use wholemem_hal::{Backend, HostConfig, Rights};
///
/// let device = Backend::host(HostConfig::default())?.device(0)?;
/// let map = device.allocate(1 << 20)?.map(Rights::ReadWrite)?;
/// let header = map.span(0, 4096)?;
/// let field = header.part(64, 8)?;
/// assert_eq!(field.address(), map.address() + 64);
/// # Ok::<(), wholemem_hal::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Span {
    memory: Arc<dyn Addressable>,
    at: Address,
    len: usize,
}

impl Span {
    pub(crate) fn new(memory: Arc<dyn Addressable>, at: Address, len: usize) -> Self {
        Self { memory, at, len }
    }

    /// The part from `offset`, `len` bytes long.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn part(&self, offset: usize, len: usize) -> Result<Span> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => {
                Ok(Self { memory: Arc::clone(&self.memory), at: self.at.after(offset), len })
            }
            _ => Err(Error::OutOfRange { offset, len, size: self.len }),
        }
    }

    /// Where it begins, as the devices see it: what to pass to a kernel.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.at.0
    }

    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn at(&self) -> Address {
        self.at
    }

    pub(crate) fn memory(&self) -> &Arc<dyn Addressable> {
        &self.memory
    }

    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        self.at < other.at.after(other.len) && other.at < self.at.after(self.len)
    }

    /// Checks that work of `device` may use it so.
    pub(crate) fn check(&self, device: &Device, needed: Rights, attempt: impl Fn() -> Attempt) -> Result<()> {
        // First: in a forked child the lock of the rights may be held by a thread that is not there.
        device.backend().check_fork(&attempt)?;
        if self.memory.backend() != device.backend() {
            return Err(Error::WrongBackend { attempt: attempt() });
        }
        let granted = self.memory.rights_of(device.id());
        if granted < needed {
            return Err(Error::Denied { attempt: attempt(), who: device.label(), granted, needed });
        }
        Ok(())
    }
}
