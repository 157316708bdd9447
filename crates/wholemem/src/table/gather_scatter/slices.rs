//! Gather and scatter calls on slices of host memory, which block until the result is complete.
//!
//! On the host backend kernels access the slices directly. On other devices slices are staged in pinned memory, piece by
//! piece.

use std::ops::Range;

use wholemem_hal::{PinnedBuffer, Span};
use wholemem_os::width::{to_u64, to_usize};
use zerocopy::IntoBytes;

use super::{Indices, Order, RowBuffer, RowOp};
use crate::communicator::{STAGING_LEN, Staging, lend, lend_mut};
use crate::{Element, Error, ReduceOp, Result, WholeTensor};

/// The alignment in bytes of rows in a staging buffer: more than that of any element, and enough for wide copies.
const ROWS_ALIGN: usize = 256;

/// The rows of a gather or scatter call, in a slice of host memory.
enum SliceRows<'a, T> {
    /// The rows that a scatter reads.
    Input(&'a [T]),
    /// The slice that a gather fills with rows.
    Output(&'a mut [T]),
}

impl WholeTensor {
    /// Gathers rows of any rank: row `indices[n]` of the tensor is row `n` of the result. Waits for the result. Not collective.
    /// The gather sees rows that any rank wrote before the last [`barrier`](crate::Communicator::barrier).
    ///
    /// [`gather_on`](Self::gather_on) enqueues a gather on a stream, between buffers that the device can access, and can convert
    /// elements.
    ///
    /// ```
    /// use wholemem::{Communicator, TensorSpec, WholeTensor};
    ///
    /// Communicator::run_local(2, |comm| {
    ///     let table = WholeTensor::create(comm, &TensorSpec::of::<f32>(&[1000, 2]))?;
    ///     table.fill_local(comm.rank().0 as f32)?;
    ///     comm.barrier()?;
    ///     assert_eq!(table.gather::<f32>(&[999, 0])?, [1.0, 1.0, 0.0, 0.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), wholemem::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::TypesDiffer`] if `T` is neither the element type nor its [storage](crate::Dtype::storage); [`Error::BadIndex`]
    /// with the first bad index of this call, or of an earlier call that did not wait; [`Error::TooLong`];
    /// [`Error::Hal`].
    pub fn gather<T: Element>(&self, indices: &[i64]) -> Result<Vec<T>> {
        let mut rows = self.zeros(to_u64(indices.len()))?;
        self.gather_into(indices, &mut rows)?;
        Ok(rows)
    }

    /// Gathers rows as [`gather`](Self::gather), into a slice that has exactly one row for each index. The row of a [bad
    /// index](Error::BadIndex) is zero.
    ///
    /// # Errors
    /// As [`gather`](Self::gather); [`Error::CountDiffers`] if the slice is shorter or longer than the rows.
    pub fn gather_into<T: Element>(&self, indices: &[i64], rows: &mut [T]) -> Result<()> {
        self.check_slice::<T>(to_u64(indices.len()), rows.len())?;
        self.call_slices(RowOp::Gather, indices, SliceRows::Output(rows))
    }

    /// Scatters rows to any rank: row `n` of `rows` replaces row `indices[n]` of the tensor. Waits until the rows are written.
    /// Not collective. Other ranks see the rows after the next [`barrier`](crate::Communicator::barrier).
    ///
    /// If several rows have the same index, each element comes from one of them; use [`scatter_on`](Self::scatter_on) with
    /// [`Order::Fixed`] for a defined order. If the call returns [`Error::BadIndex`], rows with valid indices have been written.
    ///
    /// ```
    /// use wholemem::{Communicator, TensorSpec, WholeTensor};
    ///
    /// Communicator::run_local(2, |comm| {
    ///     let table = WholeTensor::create(comm, &TensorSpec::of::<i32>(&[1000, 2]))?;
    ///     if comm.rank().0 == 0 {
    ///         table.scatter(&[999, 0], &[1, 2, 3, 4])?;
    ///     }
    ///     comm.barrier()?;
    ///     assert_eq!(table.gather::<i32>(&[0, 999])?, [3, 4, 1, 2]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), wholemem::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`gather_into`](Self::gather_into).
    pub fn scatter<T: Element>(&self, indices: &[i64], rows: &[T]) -> Result<()> {
        self.check_slice::<T>(to_u64(indices.len()), rows.len())?;
        self.call_slices(RowOp::Scatter, indices, SliceRows::Input(rows))
    }

    /// Adds rows to rows of any rank: row `n` of `rows` is added to row `indices[n]` of the tensor, for all `n`, even if indices
    /// repeat. Waits until the rows are added. Integers wrap around; floats are rounded to the tensor's type after each addition,
    /// in no defined order; use [`scatter_add_on`](Self::scatter_add_on) with [`Order::Fixed`] for a defined order.
    ///
    /// Not collective, except for [host memory](crate::Location::Host): there all ranks call it, also with no rows.
    ///
    /// ```
    /// use wholemem::{Communicator, TensorSpec, WholeTensor};
    ///
    /// Communicator::run_local(2, |comm| {
    ///     let counters = WholeTensor::create(comm, &TensorSpec::of::<i64>(&[100]))?;
    ///     counters.scatter_add(&[7, 90, 90], &[1_i64, 1, 1])?;
    ///     comm.barrier()?;
    ///     assert_eq!(counters.gather::<i64>(&[7, 90])?, [2, 4]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), wholemem::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`gather_into`](Self::gather_into); [`Error::OpNotForType`] if the elements are not numbers. If the call is
    /// collective, an error of the arguments on one rank is [`Error::OnRank`] on all ranks.
    pub fn scatter_add<T: Element>(&self, indices: &[i64], rows: &[T]) -> Result<()> {
        let (op, dtype) = (ReduceOp::Sum, self.dtype());
        let is_number = if dtype.is_number() { Ok(()) } else { Err(Error::OpNotForType { op, dtype }) };
        let checked = is_number.and_then(|()| self.check_slice::<T>(to_u64(indices.len()), rows.len()));
        if self.goes_through_owners(RowOp::ScatterAdd, Order::Any) {
            return self.add_through_owners(checked, indices, rows);
        }
        checked?;
        self.call_slices(RowOp::ScatterAdd, indices, SliceRows::Input(rows))
    }

    /// Runs a gather or scatter on slices whose lengths have been checked, and waits for the result.
    fn call_slices<T: Element>(&self, op: RowOp, indices: &[i64], rows: SliceRows<'_, T>) -> Result<()> {
        self.check()?;
        self.group().with_staging(|staging| {
            let stream = staging.stream();
            if !stream.runs_inline() {
                return self.call_staged(staging, op, indices, rows);
            }
            lend(stream, indices, |indices| {
                let indices = Indices::i64(indices.clone());
                let call = |rows: &Span| {
                    self.launch_and_wait(stream, op, &indices, &RowBuffer::new(rows.clone(), T::DTYPE))
                };
                match rows {
                    SliceRows::Input(rows) => lend(stream, rows, call),
                    SliceRows::Output(rows) => lend_mut(stream, rows, call),
                }
            })
        })?;
        self.check()
    }

    /// Runs a gather or scatter in pieces that fit in a staging buffer. If a piece has a bad index, the other pieces are still
    /// processed.
    fn call_staged<T: Element>(
        &self,
        staging: &mut Staging,
        op: RowOp,
        indices: &[i64],
        mut rows: SliceRows<'_, T>,
    ) -> Result<()> {
        let width = to_usize(self.elements());
        let row_len = width * size_of::<T>();
        let at_once = rows_at_once(row_len);
        let mut bad = Ok(());
        for (piece, indices) in indices.chunks(at_once).enumerate() {
            let first = piece * at_once;
            let elements = first * width..(first + indices.len()) * width;
            let input = match &rows {
                SliceRows::Input(rows) => Some(&rows[elements.clone()]),
                SliceRows::Output(_) => None,
            };
            let staged = StagedRows::create(staging, indices, input, row_len)?;
            let outcome = self.launch_and_wait(staging.stream(), op, &staged.indices, &staged.rows);
            match outcome {
                Err(Error::BadIndex { position, index, rows }) => {
                    let position = position + to_u64(first);
                    bad = bad.and(Err(Error::BadIndex { position, index, rows }));
                }
                outcome => outcome?,
            }
            if let SliceRows::Output(rows) = &mut rows {
                staged.read_rows(&mut rows[elements])?;
            }
        }
        bad
    }

    /// Adds rows by sending them to the ranks that own the destination rows. Collective, so a rank with invalid arguments also
    /// takes part.
    fn add_through_owners<T: Element>(&self, checked: Result<()>, indices: &[i64], rows: &[T]) -> Result<()> {
        let op = RowOp::ScatterAdd;
        self.group().with_staging(|staging| {
            if let Err(error) = checked {
                return self.scatter_in_order_sync(staging.stream(), op, Err(error));
            }
            if !staging.stream().runs_inline() {
                let row_len = to_usize(self.elements()) * size_of::<T>();
                let staged = StagedRows::create(staging, indices, Some(rows), row_len);
                let operands = staged.as_ref().map(|staged| (&staged.indices, &staged.rows));
                return self.scatter_in_order_sync(staging.stream(), op, operands.map_err(Clone::clone));
            }
            let stream = staging.stream();
            lend(stream, indices, |indices| {
                lend(stream, rows, |rows| {
                    let rows = RowBuffer::new(rows.clone(), T::DTYPE);
                    self.scatter_in_order_sync(stream, op, Ok((&Indices::i64(indices.clone()), &rows)))
                })
            })
        })
    }
}

/// Returns the number of rows that fit in a staging buffer together with their indices; at least one.
fn rows_at_once(row_len: usize) -> usize {
    ((STAGING_LEN - ROWS_ALIGN) / (row_len + size_of::<i64>())).max(1)
}

/// Returns the offset of the rows in a staging buffer, which follow `count` indices.
fn rows_offset(count: usize) -> usize {
    (count * size_of::<i64>()).next_multiple_of(ROWS_ALIGN)
}

/// The indices and rows of a gather or scatter in a pinned staging buffer.
struct StagedRows {
    buffer: PinnedBuffer,
    rows_at: usize,
    indices: Indices,
    rows: RowBuffer,
}

impl StagedRows {
    /// Copies the indices, and the rows if there are any, to a staging buffer with space for both.
    fn create<T: Element>(
        staging: &mut Staging,
        indices: &[i64],
        rows: Option<&[T]>,
        row_len: usize,
    ) -> Result<Self> {
        let rows_at = rows_offset(indices.len());
        let len = indices.len() * row_len;
        // At least one byte is allocated, because a pinned buffer must not be empty.
        let buffer = staging.buffer((rows_at + len).max(1))?;
        let bytes = buffer.bytes()?;
        bytes.write_at(0, indices.as_bytes())?;
        if let Some(rows) = rows {
            bytes.write_at(rows_at, rows.as_bytes())?;
        }
        let all = buffer.all();
        let part = |Range { start, end }: Range<usize>| all.part(start, end - start);
        let indices = Indices::i64(part(0..size_of_val(indices))?);
        let rows = RowBuffer::new(part(rows_at..rows_at + len)?, T::DTYPE);
        Ok(Self { buffer, rows_at, indices, rows })
    }

    /// Copies the gathered rows from the staging buffer to a slice.
    fn read_rows<T: Element>(&self, rows: &mut [T]) -> Result<()> {
        Ok(self.buffer.bytes()?.read_at(self.rows_at, rows.as_mut_bytes())?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A piece of rows must fit in a pooled staging buffer, because a longer buffer would be allocated again for every piece.
    #[test]
    fn a_piece_fits_in_a_pooled_buffer() {
        for row_len in (1..3000).chain([STAGING_LEN / 2, STAGING_LEN - 264]) {
            let rows = rows_at_once(row_len);
            let len = |rows| rows_offset(rows) + rows * row_len;
            assert!(len(rows) <= STAGING_LEN, "{rows} rows of {row_len} bytes");
            let most = STAGING_LEN / (row_len + 8);
            assert!(most - rows <= 1 + ROWS_ALIGN / (row_len + 8), "{rows} of {most} rows");
        }
        assert_eq!([STAGING_LEN, usize::MAX - 8].map(rows_at_once), [1, 1]);
    }
}
