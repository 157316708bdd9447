//! `WholeTensor`: a memory that is divided among all ranks, with an element type and a shape; or a view of some of its rows and
//! columns.

use std::ops::Range;

use wholemem_comm::Rank;
use wholemem_hal::{Span, Stream};

use super::gather_scatter::TableOperand;
use crate::{
    Communicator, Dtype, Element, ElementRef, Error, GlobalRef, Kind, Location, MemorySpec, Placement,
    Result, WholeMemory,
};
use wholemem_os::width::to_usize;

/// The specification of a tensor that is divided among ranks. It must be equal on all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// The type of the tensor's elements.
    pub dtype: Dtype,
    /// The shape of the tensor, rows first.
    pub shape: Vec<u64>,
    /// The way in which ranks address the tensor: as one range, or in one chunk per rank.
    pub kind: Kind,
    /// The location of the tensor's bytes: on the devices or on the host.
    pub location: Location,
    /// The number of rows of each rank; `None` to divide the rows evenly.
    pub rows_of_each: Option<Vec<u64>>,
    /// True if the tensor must have the same addresses on all ranks.
    pub equal_addresses: bool,
}

impl TensorSpec {
    /// Returns the specification of a tensor in continuous device memory whose rows are divided evenly among ranks.
    #[must_use]
    pub fn new(dtype: Dtype, shape: &[u64]) -> Self {
        let (kind, location) = (Kind::Continuous, Location::Device);
        let shape = shape.to_vec();
        Self { dtype, shape, kind, location, rows_of_each: None, equal_addresses: false }
    }

    /// Returns the specification of a tensor whose elements are values of a Rust type: [`new`](Self::new) with the [element
    /// type](Element::DTYPE) of `T`.
    ///
    /// ```
    /// use wholemem::{Dtype, TensorSpec};
    ///
    /// assert_eq!(TensorSpec::of::<f32>(&[1000, 16]), TensorSpec::new(Dtype::F32, &[1000, 16]));
    /// ```
    #[must_use]
    pub fn of<T: Element>(shape: &[u64]) -> Self {
        Self::new(T::DTYPE, shape)
    }

    fn memory(&self) -> Result<MemorySpec> {
        let (rows, inner) = self.shape.split_first().ok_or(Error::NoDimensions)?;
        let elements = inner.iter().try_fold(1_u64, |count, len| count.checked_mul(*len));
        let row_len = elements.and_then(|count| usize::try_from(count).ok()?.checked_mul(self.dtype.len()));
        let row_len = row_len.ok_or(Error::TooLong { rows: *rows, row_len: usize::MAX })?;
        let (kind, location, equal_addresses) = (self.kind, self.location, self.equal_addresses);
        let rows_of_each = self.rows_of_each.clone();
        Ok(MemorySpec { rows: *rows, row_len, kind, location, rows_of_each, equal_addresses })
    }
}

/// A tensor that is divided among all ranks: a [`WholeMemory`] with an element type and a shape. Clones and parts are views of
/// the same memory.
///
/// ```
/// use wholemem::{Backend, Communicator, Dtype, HostConfig, TensorSpec, WholeTensor};
///
/// let backend = Backend::host(HostConfig::virtual_devices(2))?;
/// let groups = Communicator::local(&[backend.device(0)?, backend.device(1)?])?;
/// let spec = TensorSpec::new(Dtype::F32, &[1000, 16]);
/// let tables = Communicator::on_each(&groups, |group| WholeTensor::create(group, &spec))?;
///
/// let part = tables[1].rows(10..20)?.columns(4..8)?;
/// assert_eq!(part.shape(), [10, 4]);
/// # Ok::<(), wholemem::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct WholeTensor {
    memory: WholeMemory,
    dtype: Dtype,
    shape: Vec<u64>,
    first_row: u64,
    /// The offset in bytes of this view's columns in each row of the memory.
    offset: usize,
}

/// Rows of a tensor that are in one range of addresses, usually the rows of one rank.
#[derive(Debug, Clone)]
pub struct LocalRows {
    /// The range of row numbers in the tensor.
    pub rows: Range<u64>,
    /// The bytes of the rows, from the beginning of the first row to the end of the last.
    pub span: Span,
    /// The number of bytes from one row to the next.
    pub stride: usize,
}

impl WholeTensor {
    /// Creates a tensor of zeros. Collective: all ranks of the group call it with the same specification.
    ///
    /// # Errors
    /// [`Error::NoDimensions`], and as [`WholeMemory::create`].
    pub fn create(group: &Communicator, spec: &TensorSpec) -> Result<Self> {
        Self::create_for(group, spec, &[])
    }

    /// Creates a tensor of zeros. `like` identifies the tensor whose type and shape are used, if there is one, and must be equal
    /// on all ranks.
    fn create_for(group: &Communicator, spec: &TensorSpec, like: &[u64]) -> Result<Self> {
        let TensorSpec { dtype, shape, .. } = spec;
        let words = [&[u64::from(dtype.code())], &shape[..], like].concat();
        let memory = WholeMemory::create_if(group, spec.memory(), &words)?;
        Ok(Self { memory, dtype: *dtype, shape: shape.clone(), first_row: 0, offset: 0 })
    }

    /// Creates a tensor of zeros with the type and shape of this tensor, and as many rows on each rank. Collective: all ranks
    /// call it on the same tensor.
    ///
    /// ```
    /// # use wholemem::{Backend, Communicator, Dtype, Error, TensorSpec, WholeTensor};
    /// # let groups = Communicator::local(&[Backend::auto()?.device(0)?])?;
    /// let table = WholeTensor::create(&groups[0], &TensorSpec::new(Dtype::F32, &[10, 16]))?;
    /// let gradients = table.rows(2..10)?.like()?;
    /// assert_eq!(gradients.shape(), [8, 16]);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`WholeMemory::create`]; [`Error::RanksDisagree`] also if ranks call it on different tensors.
    pub fn like(&self) -> Result<Self> {
        let len_of = |rank| {
            let own = self.rows_on(Rank(rank));
            own.map_or(0, |own| own.rows.end - own.rows.start)
        };
        let rows_of_each = (0..self.group().size()).map(len_of).collect();
        let spec = TensorSpec {
            dtype: self.dtype,
            shape: self.shape.clone(),
            kind: self.memory.kind(),
            location: self.memory.location(),
            rows_of_each: Some(rows_of_each),
            equal_addresses: false,
        };
        Self::create_for(self.group(), &spec, &self.identity())
    }

    /// Returns words that identify this tensor and this view of it, which are equal on all ranks.
    pub(crate) fn identity(&self) -> Vec<u64> {
        let words = [self.memory.number(), self.first_row, self.offset as u64, u64::from(self.dtype.code())];
        [&words[..], &self.shape].concat()
    }

    /// Returns a tensor over the rows of a `WholeMemory`, without a copy: row `i` of the tensor is row `i` of the memory.
    ///
    /// # Errors
    /// [`Error::TooShort`] if the elements of a row are longer than a row of the memory; [`Error::EmptyRow`], [`Error::TooLong`].
    pub fn of_memory(memory: &WholeMemory, dtype: Dtype, row_shape: &[u64]) -> Result<Self> {
        let shape = [&[memory.partition().rows()], row_shape].concat();
        let spec = TensorSpec::new(dtype, &shape).memory()?;
        if spec.row_len > memory.row_len() {
            let (needed, len) = (spec.row_len as u128, memory.row_len());
            return Err(Error::TooShort {
                items: "elements of a row",
                count: (spec.row_len / dtype.len()) as u64,
                needed,
                len,
            });
        }
        if spec.row_len == 0 {
            return Err(Error::EmptyRow);
        }
        Ok(Self { memory: memory.clone(), dtype, shape, first_row: 0, offset: 0 })
    }

    /// Returns the memory of which this tensor is a view.
    #[must_use]
    pub fn memory(&self) -> &WholeMemory {
        &self.memory
    }

    /// Returns the group whose ranks share the tensor.
    #[must_use]
    pub fn group(&self) -> &Communicator {
        self.memory.group()
    }

    /// Returns the type of the tensor's elements.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Returns the shape of the tensor, rows first.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Returns the number of rows in the tensor.
    #[must_use]
    pub fn row_count(&self) -> u64 {
        self.shape[0]
    }

    /// Returns the length of a row in bytes.
    #[must_use]
    pub fn row_len(&self) -> usize {
        to_usize(self.elements()) * self.dtype.len()
    }

    /// Returns the number of bytes from one row to the next, within one rank's rows.
    #[must_use]
    pub fn stride(&self) -> usize {
        self.memory.row_len()
    }

    /// Returns the placement of the tensor's memory, which says which rank stores which bytes.
    #[must_use]
    pub fn placement(&self) -> &Placement {
        self.memory.placement()
    }

    /// Returns the addresses of the tensor's rows on this rank, for kernels.
    ///
    /// ```
    /// # use wholemem::{Backend, Communicator, Dtype, Error, TensorSpec, WholeTensor};
    /// # let groups = Communicator::local(&[Backend::auto()?.device(0)?])?;
    /// let table = WholeTensor::create(&groups[0], &TensorSpec::new(Dtype::U8, &[10, 16]))?;
    /// let part = table.rows(2..10)?.columns(4..8)?;
    /// assert_eq!(part.global_ref().base, table.global_ref().base + 2 * 16 + 4);
    /// # Ok::<(), Error>(())
    /// ```
    #[must_use]
    pub fn global_ref(&self) -> GlobalRef {
        self.memory.global_ref().part(self.first_row, self.row_count(), self.offset as u64)
    }

    /// Returns the addresses of the tensor's elements on this rank, for kernels. The tensor may be a view of some columns.
    #[must_use]
    pub fn element_ref(&self) -> ElementRef {
        ElementRef { rows: self.global_ref(), row_len: self.row_len() as u64 }
    }

    /// Returns a view of a range of the tensor's rows.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn rows(&self, rows: Range<u64>) -> Result<Self> {
        self.check_rows(&rows)?;
        let mut part = self.clone();
        part.first_row += rows.start;
        part.shape[0] = rows.end - rows.start;
        Ok(part)
    }

    /// Returns a view of a range of the tensor's columns, which are its second dimension.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], also for a tensor of one dimension; [`Error::EmptyRow`] for an empty range.
    pub fn columns(&self, columns: Range<u64>) -> Result<Self> {
        let count = self.shape.get(1).copied().unwrap_or_default();
        check("columns", &columns, count)?;
        if columns.is_empty() {
            return Err(Error::EmptyRow);
        }
        let inner: u64 = self.shape[2..].iter().product();
        let skipped = to_usize(columns.start * inner);
        let mut part = self.clone();
        part.offset += skipped * self.dtype.len();
        part.shape[1] = columns.end - columns.start;
        Ok(part)
    }

    /// Returns this rank's rows; `None` if the rank has none. They are stored on this rank's device, except for bytes at either
    /// end that [`placement`](Self::placement) assigns to a neighbour.
    #[must_use]
    pub fn local(&self) -> Option<LocalRows> {
        self.rows_on(self.group().rank())
    }

    /// Returns the rows of any rank, at the addresses where this rank has mapped them; `None` if that rank has none.
    ///
    /// ```
    /// # use wholemem::{Backend, Communicator, Dtype, Error, HostConfig, Kind, Rank, TensorSpec, WholeTensor};
    /// # let backend = Backend::host(HostConfig::virtual_devices(2))?;
    /// # let groups = Communicator::local(&[backend.device(0)?, backend.device(1)?])?;
    /// let spec = TensorSpec { kind: Kind::Chunked, ..TensorSpec::new(Dtype::U8, &[10, 3]) };
    /// let tables = Communicator::on_each(&groups, |group| WholeTensor::create(group, &spec))?;
    ///
    /// let part = tables[0].rows(3..7)?;
    /// assert_eq!(part.rows_of(Rank(1))?.map(|own| (own.rows, own.span.len())), Some((2..4, 6)));
    /// assert!(part.all_rows().is_err()); // they are in two chunks
    /// assert!(matches!(part.rows_of(Rank(2)), Err(Error::Comm(_))));
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Comm`] for a rank that does not exist.
    pub fn rows_of(&self, rank: Rank) -> Result<Option<LocalRows>> {
        let size = self.group().size();
        if rank.0 >= size {
            return Err(wholemem_comm::Error::NoSuchRank { rank, size }.into());
        }
        Ok(self.rows_on(rank))
    }

    /// Returns the rows of a rank, which must exist.
    fn rows_on(&self, rank: Rank) -> Option<LocalRows> {
        let own = self.memory.partition().range(rank);
        let start = own.start.clamp(self.first_row, self.first_row + self.row_count());
        let end = own.end.clamp(self.first_row, self.first_row + self.row_count());
        if start == end {
            return None;
        }
        let rows = start - self.first_row..end - self.first_row;
        let (offset, len) = self.bytes_of(&rows);
        let span = self.memory.span_of_one_rank(offset, len);
        Some(LocalRows { rows, span, stride: self.stride() })
    }

    /// Returns all rows of the tensor, if they are one range of addresses: in continuous memory, or if one rank has all rows.
    /// `None` if there are no rows.
    ///
    /// # Errors
    /// [`Error::Hal`] for the rows of several chunks.
    pub fn all_rows(&self) -> Result<Option<LocalRows>> {
        let rows = 0..self.row_count();
        if rows.is_empty() {
            return Ok(None);
        }
        let (offset, len) = self.bytes_of(&rows);
        let span = self.memory.span(offset, len)?;
        Ok(Some(LocalRows { rows, span, stride: self.stride() }))
    }

    /// Returns the offset in the memory of a non-empty range of rows, and the length from the start of the first row to the end
    /// of the last.
    fn bytes_of(&self, rows: &Range<u64>) -> (usize, usize) {
        let (first, last) = (self.offset_of(rows.start), self.offset_of(rows.end - 1));
        (first, last + self.row_len() - first)
    }

    /// Copies contiguous rows from `source` into the tensor from row `first` on, and waits for the copy.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::TooShort`] if the bytes are not whole rows; [`Error::Hal`].
    pub fn write_rows_on(&self, stream: &Stream, first: u64, source: &[u8]) -> Result<()> {
        let mut done = 0;
        self.for_runs(first, source.len(), |offset, len| {
            self.memory.write(stream, offset, &source[done..done + len])?;
            done += len;
            Ok(())
        })
    }

    /// Copies rows of the tensor from row `first` on to contiguous memory, and waits for the copy.
    ///
    /// # Errors
    /// As [`write_rows_on`](Self::write_rows_on).
    pub fn read_rows_on(&self, stream: &Stream, first: u64, target: &mut [u8]) -> Result<()> {
        let mut done = 0;
        self.for_runs(first, target.len(), |offset, len| {
            self.memory.read(stream, offset, &mut target[done..done + len])?;
            done += len;
            Ok(())
        })
    }

    /// Enqueues a copy of the contiguous rows in `from` to the tensor's rows from `first` on.
    ///
    /// # Errors
    /// As [`write_rows_on`](Self::write_rows_on).
    pub fn copy_rows_in(&self, stream: &Stream, first: u64, from: &Span) -> Result<()> {
        let mut done = 0;
        self.for_runs(first, from.len(), |offset, len| {
            self.memory.copy_in(stream, offset, &from.part(done, len)?)?;
            done += len;
            Ok(())
        })
    }

    /// Enqueues a copy of the tensor's rows from `first` on to contiguous memory at `to`.
    ///
    /// # Errors
    /// As [`write_rows_on`](Self::write_rows_on).
    pub fn copy_rows_out(&self, stream: &Stream, first: u64, to: &Span) -> Result<()> {
        let mut done = 0;
        self.for_runs(first, to.len(), |offset, len| {
            self.memory.copy_out(stream, offset, &to.part(done, len)?)?;
            done += len;
            Ok(())
        })
    }

    /// Calls `work` with the offset and length of each contiguous range of bytes in `len` bytes of rows from `first` on: one
    /// range, or one for each row of a view of some columns.
    fn for_runs(
        &self,
        first: u64,
        len: usize,
        mut work: impl FnMut(usize, usize) -> Result<()>,
    ) -> Result<()> {
        let (row_len, rows) = (self.row_len(), (len / self.row_len()) as u64);
        if !len.is_multiple_of(row_len) {
            let needed = (u128::from(rows) + 1) * row_len as u128;
            return Err(Error::TooShort { items: "rows", count: rows + 1, needed, len });
        }
        check("rows", &(first..first.saturating_add(rows)), self.row_count())?;
        if rows == 0 {
            return Ok(());
        }
        if row_len == self.stride() {
            return work(self.offset_of(first), len);
        }
        (first..first + rows).try_for_each(|row| work(self.offset_of(row), row_len))
    }

    /// Returns the offset in the memory of a row of this view.
    fn offset_of(&self, row: u64) -> usize {
        to_usize(self.first_row + row) * self.stride() + self.offset
    }

    /// Checks that a range of rows is within the tensor.
    pub(super) fn check_rows(&self, rows: &Range<u64>) -> Result<()> {
        check("rows", rows, self.row_count())
    }

    /// Returns the number of elements in a row.
    pub(crate) fn elements(&self) -> u64 {
        self.shape[1..].iter().product()
    }

    pub(crate) fn first_row(&self) -> u64 {
        self.first_row
    }

    pub(crate) fn table(&self) -> TableOperand {
        TableOperand { global: self.global_ref(), dtype: self.dtype, elements: self.elements() }
    }
}

fn check(dimension: &'static str, range: &Range<u64>, count: u64) -> Result<()> {
    let Range { start, end } = *range;
    if start <= end && end <= count {
        Ok(())
    } else {
        Err(Error::OutOfRange { dimension, start, end, count })
    }
}
