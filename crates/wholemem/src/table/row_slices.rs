//! Reads and writes of contiguous rows from and to slices of host memory, which block until the copy is complete.

use std::ops::Range;

use wholemem_hal::{Span, Stream};
use wholemem_os::Deadline;
use wholemem_os::width::{to_u64, to_usize};
use zerocopy::IntoBytes;

use crate::communicator::lend;
use crate::{Element, Error, Result, WholeTensor};

/// The length in bytes of the buffer from which rows are filled with a value, unless one row is longer.
const FILL_LEN: usize = 1 << 20;

impl WholeTensor {
    /// Reads contiguous rows of any rank, and waits for the result. Not collective. The call sees rows that any rank wrote before
    /// the last [`barrier`](crate::Communicator::barrier).
    ///
    /// ```
    /// use wholemem::{Communicator, TensorSpec, WholeTensor};
    ///
    /// Communicator::run_local(2, |comm| {
    ///     let table = WholeTensor::create(comm, &TensorSpec::of::<u16>(&[10, 3]))?;
    ///     if comm.rank().0 == 0 {
    ///         table.write_rows(4, &[1_u16, 2, 3, 4, 5, 6])?; // rows 4 and 5, of both ranks
    ///     }
    ///     comm.barrier()?;
    ///     assert_eq!(table.read_rows::<u16>(5..7)?, [4, 5, 6, 0, 0, 0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), wholemem::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::TypesDiffer`] if `T` is neither the element type nor its
    /// [storage](crate::Dtype::storage); [`Error::Hal`].
    pub fn read_rows<T: Element>(&self, rows: Range<u64>) -> Result<Vec<T>> {
        self.check_rows(&rows)?;
        let mut values = self.zeros(rows.end - rows.start)?;
        self.read_rows_into(rows.start, &mut values)?;
        Ok(values)
    }

    /// Reads rows as [`read_rows`](Self::read_rows), into a slice: the rows from `first` on, as many as the slice has space for.
    ///
    /// # Errors
    /// As [`read_rows`](Self::read_rows); [`Error::PartialRow`] if the slice ends within a row.
    pub fn read_rows_into<T: Element>(&self, first: u64, rows: &mut [T]) -> Result<()> {
        self.check_whole_rows(rows)?;
        self.group().with_staging(|staging| self.read_rows_on(staging.stream(), first, rows.as_mut_bytes()))
    }

    /// Writes contiguous rows from row `first` on, which can be of any rank. Waits until the rows are written. Not collective.
    /// Other ranks see the rows after the next [`barrier`](crate::Communicator::barrier).
    ///
    /// # Errors
    /// As [`read_rows_into`](Self::read_rows_into).
    pub fn write_rows<T: Element>(&self, first: u64, rows: &[T]) -> Result<()> {
        self.check_whole_rows(rows)?;
        self.group().with_staging(|staging| self.write_rows_on(staging.stream(), first, rows.as_bytes()))
    }

    /// Sets every element of this rank's own rows to a value, and waits until the rows are written. Not collective. Other ranks
    /// see the value after the next [`barrier`](crate::Communicator::barrier).
    ///
    /// # Errors
    /// [`Error::TypesDiffer`] as [`read_rows`](Self::read_rows); [`Error::Hal`].
    pub fn fill_local<T: Element>(&self, value: T) -> Result<()> {
        self.check_type::<T>()?;
        let Some(local) = self.local() else { return Ok(()) };
        let at_once = to_u64((FILL_LEN / self.row_len()).max(1)).min(local.rows.end - local.rows.start);
        let values = vec![value; to_usize(at_once * self.elements())];
        let fill = |stream: &Stream, values: &Span| {
            for first in local.rows.clone().step_by(to_usize(at_once)) {
                let count = at_once.min(local.rows.end - first);
                self.copy_rows_in(stream, first, &values.part(0, to_usize(count) * self.row_len())?)?;
            }
            Ok(stream.synchronize(Deadline::NEVER)?)
        };
        self.group().with_staging(|staging| {
            if staging.stream().runs_inline() {
                return lend(staging.stream(), &values, |values| fill(staging.stream(), values));
            }
            let buffer = staging.buffer(size_of_val(&values[..]))?;
            buffer.bytes()?.write_at(0, values.as_bytes())?;
            fill(staging.stream(), &buffer.all())
        })
    }

    /// Returns a vector of zeros with the elements of `rows` rows.
    pub(super) fn zeros<T: Element>(&self, rows: u64) -> Result<Vec<T>> {
        self.check_type::<T>()?;
        let len = u128::from(rows) * self.row_len() as u128;
        if isize::try_from(len).is_err() {
            return Err(Error::TooLong { rows, row_len: self.row_len() });
        }
        Ok(vec![T::default(); to_usize(rows * self.elements())])
    }

    /// Checks that `T` is the tensor's element type or its storage type, and that `given` elements are exactly `rows` rows.
    pub(super) fn check_slice<T: Element>(&self, rows: u64, given: usize) -> Result<()> {
        self.check_type::<T>()?;
        let expected = u128::from(rows) * u128::from(self.elements());
        if expected == given as u128 { Ok(()) } else { Err(Error::CountDiffers { rows, expected, given }) }
    }

    fn check_whole_rows<T: Element>(&self, rows: &[T]) -> Result<()> {
        self.check_type::<T>()?;
        let (given, row) = (rows.len(), self.elements());
        if to_u64(given).is_multiple_of(row) { Ok(()) } else { Err(Error::PartialRow { given, row }) }
    }

    fn check_type<T: Element>(&self) -> Result<()> {
        let (table, rows) = (self.dtype(), T::DTYPE);
        if rows == table || rows == table.storage() {
            Ok(())
        } else {
            Err(Error::TypesDiffer { table, rows })
        }
    }
}
