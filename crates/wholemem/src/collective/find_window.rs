//! Finds the registered window in which the memory of a call lies, so that the call is in place.

use std::ops::Range;

use wholemem_hal::{Attempt, Rights, Span};

use super::window::{Buffer, Window, WindowCore};
use super::Lane;

/// A range of a window, which memory of this rank turned out to be.
#[derive(Debug)]
pub(super) struct RegisteredRange {
    window: Window,
    range: Range<usize>,
}

impl RegisteredRange {
    pub(super) fn buffer(&self) -> Buffer<'_> {
        self.window.range(self.range.clone())
    }
}

impl Lane {
    /// Returns the range of a window that a buffer is, if the buffer is memory of this rank in a window that every rank has there
    /// and this rank has the needed rights.
    #[inline]
    pub(super) fn find_window(&self, buffer: &Buffer<'_>, needed: Rights) -> Option<RegisteredRange> {
        let Buffer::Own(span) = buffer else { return None };
        let (core, offset) = self.index.find(span.address(), span.len())?;
        let device = self.group.device();
        // A call on memory without the rights is an error, which the checks of memory outside of windows report.
        span.check(device, needed, || Attempt::Access { len: span.len() }).ok()?;
        if !self.is_still_there(&core, span) {
            // The memory was freed, and its address may be that of other memory now, which no other rank has mapped.
            self.index.remove(core.id);
            return None;
        }
        Some(RegisteredRange { window: Window::of(core), range: offset..offset + span.len() })
    }

    /// Returns false if the memory of a span was freed after it was registered. Only the first and the last block of memory are
    /// looked up: an owner frees all blocks of an array.
    fn is_still_there(&self, core: &WindowCore, span: &Span) -> bool {
        let backend = self.group.device().backend();
        let memory_at = |address: u64| {
            let after = core.memory.partition_point(|block| block.address <= address);
            core.memory[..after].last()
        };
        let (first, last) = (span.address(), span.address() + span.len() as u64 - 1);
        let (first_block, last_block) = (memory_at(first), memory_at(last));
        let is_same = |address, block: Option<&wholemem_hal::MemoryBlock>| {
            let Some(id) = block.and_then(|block| block.id) else { return true };
            backend.memory_id(address) == Ok(Some(id))
        };
        is_same(first, first_block) && (first_block == last_block || is_same(last, last_block))
    }
}
