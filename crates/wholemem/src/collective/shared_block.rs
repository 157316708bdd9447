//! The description of memory that a rank registers, as the ranks send it to each other: blocks, and the parts of windows in them.
//!
//! ```text
//!   block 0 of a rank: one `cudaMalloc`, or adjacent allocations      [        part 0 ]---[ part 2 ]     ]
//!   block 1                                                           [ part 1 ]                         ]
//! ```
//!
//! Allocators of frameworks place many tensors in one block. Each block is described once, with a handle by which other ranks map
//! it, and with ids by which they recognize a block that they have mapped already.

use wholemem_comm::Rank;
use wholemem_hal::{Allocation, Attempt, Device, Error as HalError, MemoryBlock, Rights, ShareHandle, Span};
use wholemem_os::width::{to_u64, to_usize};

use super::window_part::malformed;
use crate::Result;
use crate::communicator::bytes_of;

/// The length in words of a CUDA IPC handle.
const HANDLE_WORDS: usize = 8;

/// The description of all memory that one rank registers in one collective call.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct SharedMemory {
    pub(super) blocks: Vec<SharedBlock>,
    /// This rank's part of each window, in the order in which the windows are created, which is the same on all ranks.
    pub(super) parts: Vec<SharedPart>,
}

/// Memory that other ranks map as a whole.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct SharedBlock {
    pub(super) handle: BlockHandle,
    /// The allocations of the block at adjacent addresses: their ids in the process of the rank, and their lengths in bytes.
    pub(super) segments: Vec<BlockSegment>,
}

/// The handle by which other processes map a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum BlockHandle {
    /// Each allocation of the block has a file descriptor, which is sent separately.
    Descriptors,
    /// The block is the memory of one `cudaMalloc`.
    CudaIpc([u8; 8 * HANDLE_WORDS]),
}

/// An allocation in a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct BlockSegment {
    /// The id of the memory; `None` if the driver has no ids of such memory.
    pub(super) id: Option<u64>,
    pub(super) len: usize,
}

/// The part of a window in a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SharedPart {
    /// The index of the block.
    pub(super) block: usize,
    /// The offset in bytes of the part in the block.
    pub(super) skip: usize,
    /// The length of the part in bytes. If it is zero, the rank has no memory in the window.
    pub(super) len: usize,
}

impl SharedBlock {
    pub(super) fn len(&self) -> usize {
        self.segments.iter().fold(0, |sum, segment| sum.saturating_add(segment.len))
    }

    /// Returns the number of file descriptors with which other ranks map the block.
    pub(super) fn descriptors(&self) -> usize {
        match self.handle {
            BlockHandle::Descriptors => self.segments.len(),
            BlockHandle::CudaIpc(_) => 0,
        }
    }

    /// Returns true if every allocation of the block has an id, so that the block can be recognized.
    pub(super) fn is_identified(&self) -> bool {
        self.segments.iter().all(|segment| segment.id.is_some())
    }
}

/// The memory that this rank registers, with the addresses and allocations by which it shares the memory.
#[derive(Debug, Default)]
pub(super) struct OwnMemory {
    pub(super) shared: SharedMemory,
    /// The addresses of the blocks.
    starts: Vec<u64>,
    /// The allocations of all blocks with file descriptors, in the order of the blocks.
    pub(super) allocations: Vec<Allocation>,
    /// For each part, the blocks of memory in which it lies.
    pub(super) memory: Vec<Vec<MemoryBlock>>,
}

impl OwnMemory {
    /// Finds the blocks in which `spans` lie, one span for each window, and exports them.
    ///
    /// # Errors
    /// [`Error::Hal`](crate::Error::Hal) if memory cannot be shared: it is neither a mapping of shareable memory nor from
    /// `cudaMalloc`, or the device cannot write it.
    pub(super) fn of(device: &Device, spans: &[Span]) -> Result<Self> {
        let mut own = Self::default();
        for span in spans {
            own.add(device, span)?;
        }
        Ok(own)
    }

    fn add(&mut self, device: &Device, span: &Span) -> Result<()> {
        if span.is_empty() {
            self.shared.parts.push(SharedPart { block: 0, skip: 0, len: 0 });
            self.memory.push(Vec::new());
            return Ok(());
        }
        span.check(device, Rights::ReadWrite, || Attempt::Adopt { len: span.len(), device: device.label() })?;
        let (start, block, allocations, memory) = block_of(device, span)?;
        let index = match self.shared.blocks.iter().position(|known| *known == block && block.is_identified())
        {
            Some(known) => known,
            None => {
                self.shared.blocks.push(block);
                self.starts.push(start);
                self.allocations.extend(allocations);
                self.shared.blocks.len() - 1
            }
        };
        let skip = to_usize(span.address().checked_sub(start).expect("a block contains the address"));
        self.shared.parts.push(SharedPart { block: index, skip, len: span.len() });
        self.memory.push(memory);
        Ok(())
    }
}

/// Returns the block in which a span lies: its first address, its description, its allocations if they have file descriptors,
/// and where each of its memories is.
fn block_of(device: &Device, span: &Span) -> Result<(u64, SharedBlock, Vec<Allocation>, Vec<MemoryBlock>)> {
    let segments = match Allocation::adopt(device, span.address(), span.len()) {
        Ok(segments) => segments,
        Err(error @ HalError::Unsupported { .. }) => {
            // Memory from `cudaMalloc` has no allocation. If it has no CUDA IPC handle either, the first error explains what can be
            // shared.
            let Ok(ShareHandle::CudaIpc { token, .. }) = span.export_cuda_ipc(device) else {
                return Err(error.into());
            };
            let memory = device.backend().block_at(span.address())?;
            let segment = BlockSegment { id: memory.id, len: memory.len };
            let block = SharedBlock { handle: BlockHandle::CudaIpc(token), segments: vec![segment] };
            return Ok((memory.address, block, Vec::new(), vec![memory]));
        }
        Err(error) => return Err(error.into()),
    };
    let Some(start) = segments.first().map(|segment| segment.address) else {
        unreachable!("a successful `adopt` returns at least one segment")
    };
    let memory = segments.iter().map(|segment| {
        let (address, len) = (segment.address, segment.allocation.len());
        Ok(MemoryBlock { address, len, id: device.backend().memory_id(address)? })
    });
    let memory = memory.collect::<Result<Vec<_>>>()?;
    let described = memory.iter().map(|memory| BlockSegment { id: memory.id, len: memory.len }).collect();
    let block = SharedBlock { handle: BlockHandle::Descriptors, segments: described };
    Ok((start, block, segments.into_iter().map(|segment| segment.allocation).collect(), memory))
}

impl SharedMemory {
    /// Encodes the description of the registered memory as a message to the other ranks.
    ///
    /// ```text
    ///   blocks, parts | per block: kind, segments, (id + 1, len) of each, handle | per part: block, skip, len
    /// ```
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut words = vec![to_u64(self.blocks.len()), to_u64(self.parts.len())];
        for SharedBlock { handle, segments } in &self.blocks {
            let kind = match handle {
                BlockHandle::Descriptors => 0,
                BlockHandle::CudaIpc(_) => 1,
            };
            words.extend([kind, to_u64(segments.len())]);
            for BlockSegment { id, len } in segments {
                words.extend([id.map_or(0, |id| id.wrapping_add(1)), to_u64(*len)]);
            }
            if let BlockHandle::CudaIpc(bytes) = handle {
                words.extend(bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)));
            }
        }
        for SharedPart { block, skip, len } in &self.parts {
            words.extend([block, skip, len].map(|word| to_u64(*word)));
        }
        bytes_of(&words)
    }

    /// Decodes the description of the registered memory that `rank` sent.
    pub(super) fn from_bytes(rank: Rank, bytes: &[u8]) -> Result<Self> {
        let decode = || {
            let (words, []) = bytes.as_chunks() else { return None };
            let mut words = words.iter().map(|word| u64::from_le_bytes(*word));
            let [blocks, parts] = [words.next()?, words.next()?];
            let mut memory = Self::default();
            for _ in 0..blocks {
                memory.blocks.push(decode_block(&mut words)?);
            }
            for _ in 0..parts {
                let [block, skip, len] = [words.next()?, words.next()?, words.next()?].map(to_usize);
                let is_inside =
                    |block: &SharedBlock| skip.checked_add(len).is_some_and(|end| end <= block.len());
                if len > 0 && !memory.blocks.get(block).is_some_and(is_inside) {
                    return None;
                }
                memory.parts.push(SharedPart { block, skip, len });
            }
            words.next().is_none().then_some(memory)
        };
        decode().ok_or_else(|| malformed(rank))
    }

    /// Returns the number of file descriptors with which other ranks map all blocks.
    pub(super) fn descriptors(&self) -> usize {
        self.blocks.iter().map(SharedBlock::descriptors).sum()
    }
}

fn decode_block(words: &mut impl Iterator<Item = u64>) -> Option<SharedBlock> {
    let kind = words.next()?;
    let count = words.next()?;
    let mut segments = Vec::new();
    for _ in 0..count {
        let id = words.next()?.checked_sub(1);
        segments.push(BlockSegment { id, len: to_usize(words.next()?) });
    }
    let handle = match kind {
        0 => BlockHandle::Descriptors,
        1 => {
            let mut bytes = [0; 8 * HANDLE_WORDS];
            for chunk in bytes.as_chunks_mut().0 {
                *chunk = words.next()?.to_le_bytes();
            }
            BlockHandle::CudaIpc(bytes)
        }
        _ => return None,
    };
    Some(SharedBlock { handle, segments })
}

#[cfg(test)]
mod tests {
    use wholemem_hal::{Backend, HostConfig};

    use super::*;

    fn memory() -> SharedMemory {
        let segment = |id, len| BlockSegment { id, len };
        let plain =
            SharedBlock { handle: BlockHandle::CudaIpc([7; 64]), segments: vec![segment(Some(3), 100)] };
        let segments = vec![segment(Some(0), 4096), segment(None, 8192)];
        let mapped = SharedBlock { handle: BlockHandle::Descriptors, segments };
        let part = |block, skip, len| SharedPart { block, skip, len };
        SharedMemory {
            blocks: vec![plain, mapped],
            parts: vec![part(1, 4000, 200), part(0, 0, 100), part(9, 0, 0)],
        }
    }

    #[test]
    fn a_description_round_trips() {
        let memory = memory();
        assert_eq!(SharedMemory::from_bytes(Rank(1), &memory.to_bytes()), Ok(memory.clone()));
        assert_eq!(memory.descriptors(), 2);
        assert_eq!(memory.blocks.iter().map(SharedBlock::is_identified).collect::<Vec<_>>(), [true, false]);
        let nothing = SharedMemory::default();
        assert_eq!(SharedMemory::from_bytes(Rank(1), &nothing.to_bytes()), Ok(nothing));
    }

    #[test]
    fn a_malformed_description_is_an_error() {
        let bytes = memory().to_bytes();
        for len in 0..bytes.len() {
            assert_eq!(SharedMemory::from_bytes(Rank(2), &bytes[..len]), Err(malformed(Rank(2))), "{len}");
        }
        let refused = |memory: &SharedMemory| {
            let bytes = memory.to_bytes();
            assert_eq!(SharedMemory::from_bytes(Rank(2), &bytes), Err(malformed(Rank(2))), "{memory:?}");
        };
        refused(&SharedMemory { parts: vec![SharedPart { block: 0, skip: 1, len: 100 }], ..memory() });
        refused(&SharedMemory { parts: vec![SharedPart { block: 2, skip: 0, len: 1 }], ..memory() });
        refused(&SharedMemory { parts: vec![SharedPart { block: 1, skip: usize::MAX, len: 2 }], ..memory() });
        let longer = [&bytes[..], &[0; 8]].concat();
        assert_eq!(SharedMemory::from_bytes(Rank(2), &longer), Err(malformed(Rank(2))));
        let mut unknown = bytes;
        unknown[16] = 2;
        assert_eq!(SharedMemory::from_bytes(Rank(2), &unknown), Err(malformed(Rank(2))));
    }

    #[test]
    fn spans_of_one_block_are_described_once() {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let [one, other] =
            [(); 2].map(|()| device.allocate(256 << 10).unwrap().map(Rights::ReadWrite).unwrap());
        let span = |at, len| one.span(at, len).unwrap();
        let spans = [span(100, 50), other.span(7, 8).unwrap(), span(4096, 4096), span(9, 0)];
        let own = OwnMemory::of(&device, &spans).unwrap();
        let part = |block, skip, len| SharedPart { block, skip, len };
        assert_eq!(own.shared.parts, [part(0, 100, 50), part(1, 7, 8), part(0, 4096, 4096), part(0, 0, 0)]);
        assert_eq!((own.shared.blocks.len(), own.allocations.len(), own.shared.descriptors()), (2, 2, 2));
        assert_eq!(own.memory[2], [device.backend().block_at(one.address()).unwrap()]);
    }

    #[test]
    fn memory_that_cannot_be_shared_is_rejected() {
        use wholemem_hal::{Capability, PinnedBuffer};
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let pinned = PinnedBuffer::create(&device, 64).unwrap().all();
        let error = OwnMemory::of(&device, &[pinned]).unwrap_err();
        let crate::Error::Hal(HalError::Unsupported { capability, .. }) = error else { panic!("{error:?}") };
        assert_eq!(capability, Capability::ShareFd);
        let map = device.allocate(256 << 10).unwrap().map(Rights::Read).unwrap();
        let (label, attempt) = (device.label(), Attempt::Adopt { len: 5, device: device.label() });
        let (granted, needed) = (Rights::Read, Rights::ReadWrite);
        let denied = HalError::Denied { attempt, device: label, granted, needed };
        assert_eq!(OwnMemory::of(&device, &[map.span(0, 5).unwrap()]).unwrap_err(), denied.into());
    }
}
