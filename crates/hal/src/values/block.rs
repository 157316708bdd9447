//! A block: the memory of one allocation or mapping that contains an address.

/// A block of memory, found by [`Backend::block_at`](crate::Backend::block_at): the memory of one `cudaMalloc`, or one mapping.
/// Allocators of frameworks place many tensors in one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemoryBlock {
    /// The address of the first byte of the block.
    pub address: u64,
    /// The length of the block in bytes.
    pub len: usize,
    /// An id that no other block of this process ever gets; `None` if the backend has no ids of such memory.
    #[doc(alias = "CU_POINTER_ATTRIBUTE_BUFFER_ID")]
    pub id: Option<u64>,
}
