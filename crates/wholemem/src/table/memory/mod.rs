//! Memory that is divided among all ranks: its rows are stored on the ranks' devices, and every rank maps all rows.
//!
//! ```text
//!   spec on every rank ── the same? ──> plan (pure): partition, placement
//!        each rank allocates its part ──> agree ──> every rank gets every handle ──> maps ──> agree
//!                              \_____ if one rank fails, all ranks fail, and no memory stays allocated _____/
//! ```

mod address;
mod bad_index;
mod create;
mod maps;
mod plan;

use std::ops::Range;
use std::sync::Arc;

use wholemem_comm::Rank;
use wholemem_hal::{Mapping, Span, Stream};

pub(crate) use bad_index::BadIndexFlag;
use bad_index::BadIndexFlags;
use maps::MemoryMappings;
use plan::MemoryPlan;

use crate::{Communicator, ElementRef, GlobalRef, Kind, Location, Partition, Placement, Result};

/// The specification of a memory that is divided among ranks. It must be equal on all ranks.
///
/// ```
/// use wholemem::{Kind, Location, MemorySpec};
///
/// // A hundred rows of 1 KiB, most of them on the first rank.
/// let spec = MemorySpec { kind: Kind::Chunked, rows_of_each: Some(vec![97, 3]), ..MemorySpec::new(100, 1024) };
/// assert_eq!(spec.location, Location::Device);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemorySpec {
    /// The number of rows in the memory.
    pub rows: u64,
    /// The length of a row in bytes. A row is never divided between ranks.
    #[doc(alias = "min_granularity")]
    pub row_len: usize,
    /// The way in which ranks address the memory: as one range, or in one chunk per rank.
    pub kind: Kind,
    /// The location of the memory's bytes: on the devices or on the host.
    pub location: Location,
    /// The number of rows of each rank; `None` to divide the rows evenly.
    pub rows_of_each: Option<Vec<u64>>,
    /// True if the memory must have the same addresses on all ranks, so that ranks can exchange pointers.
    pub equal_addresses: bool,
}

impl MemorySpec {
    /// Returns the specification of continuous device memory whose rows are divided evenly among ranks.
    #[must_use]
    pub fn new(rows: u64, row_len: usize) -> Self {
        let (kind, location) = (Kind::Continuous, Location::Device);
        Self { rows, row_len, kind, location, rows_of_each: None, equal_addresses: false }
    }
}

/// Memory that is divided among all ranks and mapped by every rank. Clones refer to the same memory. Dropping the last clone
/// releases this rank's mappings, without communication.
///
/// ```
/// use wholemem::{Backend, Communicator, HostConfig, MemorySpec, Rank, WholeMemory};
///
/// let backend = Backend::host(HostConfig::virtual_devices(2))?;
/// let groups = Communicator::local(&[backend.device(0)?, backend.device(1)?])?;
/// let memories = Communicator::on_each(&groups, |group| WholeMemory::create(group, &MemorySpec::new(1 << 20, 1)))?;
///
/// // Rank 0 writes across the boundary in the middle, and rank 1 reads it.
/// let middle = (1 << 19) - 2;
/// memories[0].write(&backend.device(0)?.stream()?, middle, b"over")?;
/// let mut seen = [0; 4];
/// memories[1].read(&backend.device(1)?.stream()?, middle, &mut seen)?;
/// assert_eq!(&seen, b"over");
/// # Ok::<(), wholemem::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct WholeMemory {
    core: Arc<MemoryCore>,
}

#[derive(Debug)]
struct MemoryCore {
    group: Communicator,
    /// The number of this memory in the group, equal on all ranks.
    number: u64,
    plan: MemoryPlan,
    maps: MemoryMappings,
    /// The directory of a chunked memory (the chunks' addresses and first rows), on this rank's device.
    _directory: Option<Mapping>,
    table: GlobalRef,
    /// All memory that kernels access through the table description.
    operands: Vec<Span>,
    bad_index_flag: BadIndexFlag,
    bad_index_flags: BadIndexFlags,
}

impl WholeMemory {
    /// Returns the group whose ranks share the memory.
    #[must_use]
    pub fn group(&self) -> &Communicator {
        &self.core.group
    }

    /// Returns the number of this memory in the group, which is equal on all ranks.
    pub(crate) fn number(&self) -> u64 {
        self.core.number
    }

    /// Returns the way in which ranks address the memory: as one range, or in one chunk per rank.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.core.plan.kind
    }

    /// Returns the location of the memory's bytes: on the devices or on the host.
    #[must_use]
    pub fn location(&self) -> Location {
        self.core.plan.location
    }

    /// Returns the length of a row in bytes.
    #[must_use]
    pub fn row_len(&self) -> usize {
        self.core.plan.row_len
    }

    /// Returns the number of bytes in all rows of the memory.
    #[must_use]
    pub fn len(&self) -> usize {
        self.core.plan.placement.len()
    }

    /// Returns true if the memory has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the partition of the memory, which says which rank has which rows.
    #[must_use]
    pub fn partition(&self) -> &Partition {
        &self.core.plan.partition
    }

    /// Returns the placement of the memory, which says which rank stores which bytes.
    #[must_use]
    pub fn placement(&self) -> &Placement {
        &self.core.plan.placement
    }

    /// Returns the addresses of the memory's rows on this rank, for kernels.
    #[must_use]
    pub fn global_ref(&self) -> GlobalRef {
        self.core.table
    }

    /// Returns the addresses of the memory's bytes on this rank, for kernels. Bytes are numbered through all rows as if the rows
    /// were contiguous.
    #[must_use]
    pub fn element_ref(&self) -> ElementRef {
        ElementRef { rows: self.core.table, row_len: self.row_len() as u64 }
    }

    /// Returns `len` bytes at `offset`, if they are one range of addresses: always in continuous memory, and within one rank's
    /// rows in chunked memory.
    ///
    /// # Errors
    /// [`Error::Hal`](crate::Error::Hal) for a range outside the memory, an empty range, and a range of several chunks.
    pub fn span(&self, offset: usize, len: usize) -> Result<Span> {
        let spans = self.spans(offset, len)?;
        Ok(Span::join(&spans)?)
    }

    /// Returns the bytes of this rank's own rows; `None` if the rank has none.
    #[must_use]
    pub fn local(&self) -> Option<Span> {
        let Range { start, end } = self.core.plan.bytes_of(self.group().rank());
        (start < end).then(|| self.span_of_one_rank(start, end - start))
    }

    /// Returns `len` bytes at `offset`, which must belong to one rank's rows.
    pub(super) fn span_of_one_rank(&self, offset: usize, len: usize) -> Span {
        let span = self.span(offset, len);
        // The bytes are contiguous, because the creation of the memory fails unless all parts are mapped at adjacent addresses,
        // and a chunk has no gap.
        span.expect("the rows of one rank are one range of addresses")
    }

    /// Returns the address of the first byte of a rank's rows; `None` if the rank has none.
    #[must_use]
    pub fn address_of(&self, rank: Rank) -> Option<u64> {
        let bytes = self.core.plan.bytes_of(rank);
        self.spans(bytes.start, bytes.len()).ok()?.first().map(Span::address)
    }

    /// Copies `source` into the memory from `offset` on, and waits for the copy.
    ///
    /// # Errors
    /// [`Error::Hal`](crate::Error::Hal) as [`Stream::write`].
    pub fn write(&self, stream: &Stream, offset: usize, source: &[u8]) -> Result<()> {
        let mut rest = source;
        for span in self.spans(offset, source.len())? {
            let (now, later) = rest.split_at(span.len());
            stream.write(&span, now)?;
            rest = later;
        }
        Ok(())
    }

    /// Copies bytes from `offset` on out of the memory to `target`, and waits for the copy.
    ///
    /// # Errors
    /// [`Error::Hal`](crate::Error::Hal) as [`Stream::read`].
    pub fn read(&self, stream: &Stream, offset: usize, target: &mut [u8]) -> Result<()> {
        let mut rest = target;
        for span in self.spans(offset, rest.len())? {
            let (now, later) = rest.split_at_mut(span.len());
            stream.read(&span, now)?;
            rest = later;
        }
        Ok(())
    }

    /// Enqueues a copy of the bytes in `from` to `offset` in the memory.
    ///
    /// # Errors
    /// [`Error::Hal`](crate::Error::Hal) as [`Stream::copy`].
    pub fn copy_in(&self, stream: &Stream, offset: usize, from: &Span) -> Result<()> {
        let mut done = 0;
        for span in self.spans(offset, from.len())? {
            stream.copy(&span, &from.part(done, span.len())?)?;
            done += span.len();
        }
        Ok(())
    }

    /// Enqueues a copy of bytes from `offset` in the memory to `to`.
    ///
    /// # Errors
    /// [`Error::Hal`](crate::Error::Hal) as [`Stream::copy`].
    pub fn copy_out(&self, stream: &Stream, offset: usize, to: &Span) -> Result<()> {
        let mut done = 0;
        for span in self.spans(offset, to.len())? {
            stream.copy(&to.part(done, span.len())?, &span)?;
            done += span.len();
        }
        Ok(())
    }

    /// Populates the page table of this process for the whole memory, so that first accesses need no page faults. Use it before
    /// gathers from host memory. It has no effect on GPU memory.
    ///
    /// # Errors
    /// [`Error::Hal`](crate::Error::Hal) if the kernel does not support it.
    pub fn populate(&self) -> Result<()> {
        self.core.maps.populate()
    }

    /// Reports and clears the bad index (an index that names no row) that finished gathers and scatters have recorded.
    ///
    /// It does not wait: synchronize the stream first to include all enqueued work.
    ///
    /// # Errors
    /// [`Error::BadIndex`](crate::Error::BadIndex) with the smallest position of an index that names no row, and with the index,
    /// unless a GPU kernel recorded it.
    pub fn check(&self) -> Result<()> {
        self.core.bad_index_flag.take()
    }

    /// Returns `len` bytes at `offset`, divided at the ends of mappings. They are copied piece by piece, because the pieces can
    /// be on different devices.
    fn spans(&self, offset: usize, len: usize) -> Result<Vec<Span>> {
        self.core.maps.spans(offset, len, self.len())
    }

    pub(crate) fn operands(&self) -> &[Span] {
        &self.core.operands
    }

    /// Returns the bad-index record for gathers and scatters that do not wait.
    pub(crate) fn bad_index_flag(&self) -> &BadIndexFlag {
        &self.core.bad_index_flag
    }

    /// Calls `work` with a bad-index record of its own, and returns the recorded error. `work` waits for the calls that it
    /// enqueues.
    pub(crate) fn with_own_bad_index_flag(
        &self,
        work: impl FnOnce(&BadIndexFlag) -> Result<()>,
    ) -> Result<()> {
        self.core.bad_index_flags.with(self.group().device(), work)
    }
}
