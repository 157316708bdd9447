//! Memory of frameworks by its addresses: the one place where a number becomes memory.
//!
//! A framework names its tensors by address and length, and nothing here can tell whether the memory is there. So every
//! function that makes a [`Span`] of such a number is `unsafe`, up to the calls of Python that take the number: there the
//! caller's promise is written down.

use std::sync::Arc;

use wholemem_hal::{Device, Rights, Span};

use crate::error::Raised;

/// All memory that frameworks have on a device. It keeps nothing, so that work holds the same operand over and over, which
/// costs nothing.
#[derive(Debug)]
pub(crate) struct FrameworkMemory {
    /// Every address of the device. It never leaves this type as a whole.
    all: Span,
}

impl FrameworkMemory {
    pub(crate) fn new(device: &Device) -> Self {
        // SAFETY: nothing is reached through the whole: `part` is the only use of it, and its caller promises for the part
        // what is promised here.
        let all = unsafe { Span::foreign(device, 0, usize::MAX, Rights::ReadWrite, Arc::new(())) };
        Self { all }
    }

    /// `len` bytes at an address.
    ///
    /// # Errors
    /// `WrongValue` for bytes at address zero; `OutOfRange` for bytes beyond the last address.
    ///
    /// # Safety
    /// The device reaches so many bytes at the address, for reading and writing, until all work has run that uses the span,
    /// its parts or its clones; and no `&` or `&mut` to them is used meanwhile.
    pub(crate) unsafe fn part(&self, address: u64, len: usize) -> Result<Span, Raised> {
        if address == 0 && len > 0 {
            let message = "the tensor has no memory";
            return Err(Raised::new("WrongValue", message).hint("give one that holds its elements"));
        }
        // No length that the caller states reaches beyond the last address.
        let at = usize::try_from(address).unwrap_or(usize::MAX);
        Ok(self.all.part(at, len)?)
    }
}
