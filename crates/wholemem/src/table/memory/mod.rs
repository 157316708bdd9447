//! Memory over all ranks: divided in rows, stored on the ranks' devices, mapped by every rank.
//!
//! ```text
//!   spec on every rank ── the same? ──> plan (pure): partition, placement
//!        each rank allocates its part ──> agree ──> every rank gets every handle ──> maps ──> agree
//!                              \_____ an error of one rank is the error of all, and nothing is left allocated _____/
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
use maps::Maps;
use plan::Plan;

use crate::{Communicator, ElementRef, GlobalRef, Kind, Location, Partition, Placement, Result};

/// What memory to make. It is the same on all ranks.
///
/// ```
/// use wholemem::{Kind, Location, MemorySpec};
///
/// // A hundred rows of 1 KiB, of which the first rank has most.
/// let spec = MemorySpec { kind: Kind::Chunked, rows_of_each: Some(vec![97, 3]), ..MemorySpec::new(100, 1024) };
/// assert_eq!(spec.location, Location::Device);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemorySpec {
    /// How many rows there are.
    pub rows: u64,
    /// How many bytes a row has. A row is never divided between ranks.
    #[doc(alias = "min_granularity")]
    pub row_len: usize,
    /// How ranks see it.
    pub kind: Kind,
    /// Where its bytes are.
    pub location: Location,
    /// How many rows each rank has; evenly shared out if not given.
    pub rows_of_each: Option<Vec<u64>>,
    /// Whether it is to have the same addresses on all ranks, so that pointers into it can be shared.
    pub equal_addresses: bool,
}

impl MemorySpec {
    /// Continuous memory of the ranks' devices, evenly shared out.
    #[must_use]
    pub fn new(rows: u64, row_len: usize) -> Self {
        let (kind, location) = (Kind::Continuous, Location::Device);
        Self { rows, row_len, kind, location, rows_of_each: None, equal_addresses: false }
    }
}

/// Bytes over many ranks. Clones are the same memory; dropping the last one frees this rank's hold of it, and asks
/// nobody.
///
/// ```
/// use wholemem::{Communicator, MemorySpec, Rank, WholeMemory};
/// use wholemem_hal::{Backend, HostConfig};
///
/// let backend = Backend::host(HostConfig::virtual_devices(2))?;
/// let groups = Communicator::local(&[backend.device(0)?, backend.device(1)?])?;
/// let memories = Communicator::on_each(&groups, |group| WholeMemory::create(group, &MemorySpec::new(1 << 20, 1)))?;
///
/// // Rank 0 writes over the boundary in the middle, rank 1 reads what it says.
/// let middle = (1 << 19) - 2;
/// memories[0].write(&backend.device(0)?.stream()?, middle, b"over")?;
/// let mut seen = [0; 4];
/// memories[1].read(&backend.device(1)?.stream()?, middle, &mut seen)?;
/// assert_eq!(&seen, b"over");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct WholeMemory {
    core: Arc<MemoryCore>,
}

#[derive(Debug)]
struct MemoryCore {
    group: Communicator,
    /// Which memory of the group it is: the same number on all ranks.
    number: u64,
    plan: Plan,
    maps: Maps,
    /// The chunks' addresses and first rows, on this rank's device.
    _directory: Option<Mapping>,
    table: GlobalRef,
    /// All that kernels touch when they use the table.
    operands: Vec<Span>,
    bad_index_flag: BadIndexFlag,
    bad_index_flags: BadIndexFlags,
}

impl WholeMemory {
    /// The group it is divided among.
    #[must_use]
    pub fn group(&self) -> &Communicator {
        &self.core.group
    }

    /// Which memory of the group it is: ranks that have the same number mean the same one.
    pub(crate) fn number(&self) -> u64 {
        self.core.number
    }

    /// How ranks see it.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.core.plan.kind
    }

    /// Where its bytes are.
    #[must_use]
    pub fn location(&self) -> Location {
        self.core.plan.location
    }

    /// How many bytes a row has.
    #[must_use]
    pub fn row_len(&self) -> usize {
        self.core.plan.row_len
    }

    /// How many bytes there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.core.plan.placement.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Which rank has which rows.
    #[must_use]
    pub fn partition(&self) -> &Partition {
        &self.core.plan.partition
    }

    /// Where the bytes really are.
    #[must_use]
    pub fn placement(&self) -> &Placement {
        &self.core.plan.placement
    }

    /// What kernels find rows by, on this rank.
    #[must_use]
    pub fn global_ref(&self) -> GlobalRef {
        self.core.table
    }

    /// What kernels find bytes by, on this rank, counted through all rows as if they were contiguous.
    #[must_use]
    pub fn element_ref(&self) -> ElementRef {
        ElementRef { rows: self.core.table, row_len: self.row_len() as u64 }
    }

    /// The bytes from `offset` on, `len` of them, where they are one range of addresses: anywhere in continuous memory,
    /// and within one rank's rows in chunked.
    ///
    /// # Errors
    /// [`Error::Hal`](crate::Error::Hal) for bytes that are not there, none at all, or several chunks'.
    pub fn span(&self, offset: usize, len: usize) -> Result<Span> {
        let spans = self.spans(offset, len)?;
        Ok(Span::join(&spans)?)
    }

    /// The bytes of this rank's own rows; `None` if it has none.
    ///
    /// # Errors
    /// [`Error::Hal`](crate::Error::Hal).
    pub fn local(&self) -> Result<Option<Span>> {
        let Range { start, end } = self.core.plan.bytes_of(self.group().rank());
        if start == end { Ok(None) } else { self.span(start, end - start).map(Some) }
    }

    /// The address of each rank's first byte in chunked memory, or of all of them in continuous; `None` where there are
    /// none.
    #[must_use]
    pub fn address_of(&self, rank: Rank) -> Option<u64> {
        let bytes = self.core.plan.bytes_of(rank);
        self.spans(bytes.start, bytes.len()).ok()?.first().map(Span::address)
    }

    /// Copies bytes in from `offset` on, and waits until they are there.
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

    /// Copies bytes out from `offset` on, and waits until they are there.
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

    /// Enqueues a copy of `from` to `offset`.
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

    /// Enqueues a copy from `offset` to `to`.
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

    /// Enters all of it into the page table of this process at once, instead of a page with each first touch: worth it
    /// before gathering from host memory, and nothing on a GPU's.
    ///
    /// # Errors
    /// [`Error::Hal`](crate::Error::Hal) where the kernel cannot.
    pub fn populate(&self) -> Result<()> {
        self.core.maps.populate()
    }

    /// Whether work that has run so far met an index that names no row. Asked once, it is forgotten.
    ///
    /// It does not wait: synchronize the stream first to hear of all that was enqueued.
    ///
    /// # Errors
    /// [`Error::BadIndex`](crate::Error::BadIndex) with the smallest such position, and the index there unless it was a GPU
    /// that met it.
    pub fn check(&self) -> Result<()> {
        self.core.bad_index_flag.take()
    }

    /// The bytes of a range, divided where maps meet. Copies are made piece by piece, since pieces may lie on different
    /// devices.
    fn spans(&self, offset: usize, len: usize) -> Result<Vec<Span>> {
        self.core.maps.spans(offset, len, self.len())
    }

    pub(crate) fn operands(&self) -> &[Span] {
        &self.core.operands
    }

    /// The record for calls that do not wait.
    pub(crate) fn bad_index_flag(&self) -> &BadIndexFlag {
        &self.core.bad_index_flag
    }

    /// Calls `work`, which waits for what it has enqueued, with a record for it alone, and answers what was noted there.
    pub(crate) fn with_own_bad_index_flag(
        &self,
        work: impl FnOnce(&BadIndexFlag) -> Result<()>,
    ) -> Result<()> {
        self.core.bad_index_flags.with(self.group().device(), work)
    }
}
