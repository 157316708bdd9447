//! Spans of memory that the callers of a foreign function interface keep alive.

use std::sync::Arc;

use super::Span;
use crate::{Device, Result, Rights};

/// Creates spans of memory that callers keep alive, for interfaces that are called from other languages. All spans are parts of one
/// span, which is created once, so that a call does not allocate an owner.
///
/// ```
/// use wholemem_hal::{Backend, BorrowedMemory, HostConfig};
///
/// let device = Backend::host(HostConfig::default())?.device(0)?;
/// let memory = BorrowedMemory::new(&device);
/// let mut bytes = [0_u8; 5];
/// let address = bytes.as_mut_ptr().expose_provenance() as u64;
///
/// // SAFETY: the array outlives the fill, which has run when the call returns, and is not used meanwhile.
/// let span = unsafe { memory.part(address, bytes.len()) }?;
/// device.stream()?.fill(&span, 7)?;
/// drop(span);
/// assert_eq!(bytes, [7; 5]);
/// # Ok::<(), wholemem_hal::Error>(())
/// ```
#[derive(Debug)]
pub struct BorrowedMemory {
    /// A span of the whole address space of the device. Only parts of it are returned.
    all: Span,
}

impl BorrowedMemory {
    /// Creates a value from which spans of memory that `device` accesses are created.
    #[must_use]
    pub fn new(device: &Device) -> Self {
        // SAFETY: nothing is accessed through `all` itself. Its only use is `part`, whose caller guarantees that the device can
        // access the returned part and that no reference to the part is used.
        let all = unsafe { Span::foreign(device, 0, usize::MAX, Rights::ReadWrite, Arc::new(())) };
        Self { all }
    }

    /// Returns a span of `len` bytes at an address of borrowed memory.
    ///
    /// # Errors
    /// [`Error::OutOfRange`](crate::Error::OutOfRange) if the range ends beyond the last address.
    ///
    /// # Safety
    /// The device can read and write the bytes until all work that uses the span, its parts or its clones has run, and no `&` or
    /// `&mut` to them is used while work accesses them. If work only reads them, it suffices that the device can read them.
    #[inline]
    pub unsafe fn part(&self, address: u64, len: usize) -> Result<Span> {
        self.all.part(wholemem_os::width::to_usize(address), len)
    }
}
