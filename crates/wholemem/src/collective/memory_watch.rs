//! Detects that registered memory was freed by its owner, which is possible if the memory was registered by its address only.
//!
//! The address may be that of other memory by then, which the other ranks have not mapped. The driver gives every memory an id that
//! no other memory gets, which is compared before each call and before each launch of a graph.

use std::sync::OnceLock;

use wholemem_hal::{Attempt, Backend, Error as HalError, LaunchCheck, MemoryBlock, Span};

/// The blocks in which registered memory of this rank lies.
#[derive(Debug)]
pub(super) struct MemoryWatch {
    backend: Backend,
    /// The blocks by address. They are unknown until the recording of captured calls is finished.
    blocks: OnceLock<Vec<MemoryBlock>>,
}

impl MemoryWatch {
    pub(super) fn new(backend: &Backend) -> Self {
        Self { backend: backend.clone(), blocks: OnceLock::new() }
    }

    /// Sets the blocks that are watched. Only the first call has an effect.
    pub(super) fn set(&self, blocks: Vec<MemoryBlock>) {
        let _ = self.blocks.set(blocks);
    }

    /// Returns false if the memory of a span was freed after it was registered. Only the first and the last block of memory are
    /// looked up: an owner frees all blocks of an array.
    pub(super) fn has(&self, span: &Span) -> bool {
        let Some(blocks) = self.blocks.get() else { return true };
        let block_of = |address| blocks[..blocks.partition_point(|block| block.address <= address)].last();
        let (first, last) = (span.address(), span.address() + (span.len() as u64).saturating_sub(1));
        let (first_block, last_block) = (block_of(first), block_of(last));
        let is_there = |block: Option<&MemoryBlock>| block.is_none_or(|block| self.is_there(block));
        is_there(first_block) && (first_block == last_block || is_there(last_block))
    }

    fn is_there(&self, block: &MemoryBlock) -> bool {
        block.id.is_none() || self.backend.memory_id(block.address) == Ok(block.id)
    }
}

impl LaunchCheck for MemoryWatch {
    fn check(&self) -> wholemem_hal::Result<()> {
        let Some(blocks) = self.blocks.get() else {
            return Err(HalError::Capturing { attempt: Attempt::LaunchGraph });
        };
        match blocks.iter().find(|block| !self.is_there(block)) {
            Some(block) => Err(HalError::Freed { address: block.address }),
            None => Ok(()),
        }
    }
}
