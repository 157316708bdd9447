//! The gather and scatter methods of `WholeTensor` that take a stream and device-accessible buffers.

use wholemem_hal::Stream;
use wholemem_os::Deadline;

use super::{Indices, OnBadIndex, Order, RowBuffer, RowOp};
use crate::abi::names_a_row;
use crate::table::memory::BadIndexFlag;
use crate::{Error, Location, Result, WholeTensor};

impl WholeTensor {
    /// Enqueues a gather: row `indices[n]` of the tensor is copied to row `n` of `output`, for all `n`. Not collective. The
    /// gather sees rows that any rank scattered before the last [`barrier_on`](crate::Communicator::barrier_on).
    ///
    /// Rows are copied in no defined order, so the output must not overlap gathered rows. A bad index zeroes its row of the output
    /// and is reported by the next call or by [`check`](Self::check).
    ///
    /// # Errors
    /// [`Error::TypesDiffer`], [`Error::TooShort`] and other errors of the arguments, before memory is accessed;
    /// [`Error::BadIndex`] of an earlier call, and then this call does nothing.
    pub fn gather_on(&self, stream: &Stream, indices: &Indices, output: &RowBuffer) -> Result<()> {
        self.call(stream, RowOp::Gather, indices, output)
    }

    /// Gathers as [`gather_on`](Self::gather_on), and waits for the result.
    ///
    /// # Errors
    /// As [`gather_on`](Self::gather_on); [`Error::BadIndex`] of this call too.
    pub fn gather_on_sync(&self, stream: &Stream, indices: &Indices, output: &RowBuffer) -> Result<()> {
        self.call_sync(stream, RowOp::Gather, indices, output)
    }

    /// Enqueues a scatter: row `n` of `input` is copied to row `indices[n]` of the tensor, for all `n`. Other ranks see the rows
    /// after the next [`barrier_on`](crate::Communicator::barrier_on). Rows are copied in no defined order, so the input must not
    /// overlap the rows that are written.
    ///
    /// With [`Order::Fixed`] it is collective, and waits for the result.
    ///
    /// # Errors
    /// As [`gather_on`](Self::gather_on).
    pub fn scatter_on(
        &self,
        stream: &Stream,
        indices: &Indices,
        input: &RowBuffer,
        order: Order,
    ) -> Result<()> {
        self.scatter_op(stream, RowOp::Scatter, indices, input, order)
    }

    /// Scatters as [`scatter_on`](Self::scatter_on), and waits for the result.
    ///
    /// # Errors
    /// As [`scatter_on`](Self::scatter_on); [`Error::BadIndex`] of this call too.
    pub fn scatter_on_sync(
        &self,
        stream: &Stream,
        indices: &Indices,
        input: &RowBuffer,
        order: Order,
    ) -> Result<()> {
        self.scatter_op_sync(stream, RowOp::Scatter, indices, input, order)
    }

    /// Enqueues a scatter-add: row `n` of `input` is added to row `indices[n]` of the tensor, for all `n`. Integers wrap around;
    /// floats are rounded to the tensor's type after each addition.
    ///
    /// With [`Order::Fixed`], and for [host memory](Location::Host), it is collective, and waits for the result.
    ///
    /// # Errors
    /// As [`gather_on`](Self::gather_on).
    pub fn scatter_add_on(
        &self,
        stream: &Stream,
        indices: &Indices,
        input: &RowBuffer,
        order: Order,
    ) -> Result<()> {
        self.scatter_op(stream, RowOp::ScatterAdd, indices, input, order)
    }

    /// Adds rows as [`scatter_add_on`](Self::scatter_add_on), and waits for the result.
    ///
    /// # Errors
    /// As [`scatter_add_on`](Self::scatter_add_on); [`Error::BadIndex`] of this call too.
    pub fn scatter_add_on_sync(
        &self,
        stream: &Stream,
        indices: &Indices,
        input: &RowBuffer,
        order: Order,
    ) -> Result<()> {
        self.scatter_op_sync(stream, RowOp::ScatterAdd, indices, input, order)
    }

    /// Reports and clears the bad index (an index that names no row) that finished gathers and scatters have recorded, in any
    /// view of this tensor's memory. Calls that wait report their own bad indices instead.
    ///
    /// It does not wait: synchronize the stream first to include all enqueued work.
    ///
    /// # Errors
    /// [`Error::BadIndex`] with the smallest position of an index that names no row, and with the index, unless a GPU kernel
    /// recorded it.
    pub fn check(&self) -> Result<()> {
        self.memory().check()
    }

    fn scatter_op(
        &self,
        stream: &Stream,
        op: RowOp,
        indices: &Indices,
        input: &RowBuffer,
        order: Order,
    ) -> Result<()> {
        if self.goes_through_owners(op, order) {
            return self.scatter_in_order(stream, op, Ok((indices, input)));
        }
        self.call(stream, op, indices, input)
    }

    fn scatter_op_sync(
        &self,
        stream: &Stream,
        op: RowOp,
        indices: &Indices,
        input: &RowBuffer,
        order: Order,
    ) -> Result<()> {
        if self.goes_through_owners(op, order) {
            return self.scatter_in_order_sync(stream, op, Ok((indices, input)));
        }
        self.call_sync(stream, op, indices, input)
    }

    /// Scatters or adds rows in a fixed order, and waits for the result. Collective: a rank with invalid operands passes its
    /// error, and all ranks fail.
    pub(super) fn scatter_in_order_sync(
        &self,
        stream: &Stream,
        op: RowOp,
        operands: Result<(&Indices, &RowBuffer)>,
    ) -> Result<()> {
        self.scatter_in_order(stream, op, operands)?;
        stream.synchronize(Deadline::NEVER)?;
        self.check()
    }

    /// Returns true if the call sends rows to the ranks that own the destination rows, instead of writing them directly.
    pub(super) fn goes_through_owners(&self, op: RowOp, order: Order) -> bool {
        // On some nodes, additions of several devices to host memory are not atomic with each other.
        order == Order::Fixed || op == RowOp::ScatterAdd && self.memory().location() == Location::Host
    }

    fn call(&self, stream: &Stream, op: RowOp, indices: &Indices, buffer: &RowBuffer) -> Result<()> {
        self.check()?;
        self.launch(stream, op, indices, buffer, self.memory().bad_index_flag())
    }

    fn call_sync(&self, stream: &Stream, op: RowOp, indices: &Indices, buffer: &RowBuffer) -> Result<()> {
        self.check()?;
        self.launch_and_wait(stream, op, indices, buffer)?;
        self.check()
    }

    /// Launches a gather or scatter and waits for it. A bad index is returned by this call only, even if other threads call or
    /// check concurrently.
    pub(super) fn launch_and_wait(
        &self,
        stream: &Stream,
        op: RowOp,
        indices: &Indices,
        buffer: &RowBuffer,
    ) -> Result<()> {
        let outcome = self.memory().with_own_bad_index_flag(|flag| {
            self.launch(stream, op, indices, buffer, flag)?;
            Ok(stream.synchronize(Deadline::NEVER)?)
        });
        outcome.map_err(|error| match error {
            Error::BadIndex { position, index: None, .. } => self.bad_index(stream, indices, position),
            error => error,
        })
    }

    /// Returns the error for the bad index at a position, with the index, which is read from the operands.
    fn bad_index(&self, stream: &Stream, indices: &Indices, position: u64) -> Error {
        let rows = self.row_count();
        let index = indices.read(stream, position).ok();
        // If the index names a row now, another writer has replaced it since the call, and the bad index is unknown.
        let index = index.filter(|index| !names_a_row(*index, rows));
        Error::BadIndex { position, index, rows: Some(rows) }
    }

    pub(super) fn launch(
        &self,
        stream: &Stream,
        op: RowOp,
        indices: &Indices,
        buffer: &RowBuffer,
        flag: &BadIndexFlag,
    ) -> Result<()> {
        let flag = (indices.on_bad == OnBadIndex::Note).then(|| flag.span_for(self.row_count()));
        let table_memory = self.memory().operands();
        self.group().kernels().launch(stream, op, (&self.table(), table_memory), indices, buffer, flag)
    }
}

#[cfg(test)]
mod tests {
    use wholemem_hal::{Backend, HostConfig, PinnedBuffer};

    use super::*;
    use crate::{Communicator, Dtype, TensorSpec};

    /// Tests the error of a call that waited, if a GPU kernel recorded only the position of the bad index.
    #[test]
    fn the_bad_index_is_read_from_the_operands() {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let group = Communicator::local(std::slice::from_ref(&device)).unwrap().remove(0);
        let stream = device.stream().unwrap();
        let tensor = WholeTensor::create(&group, &TensorSpec::new(Dtype::U8, &[10, 4])).unwrap();
        let buffer = |bytes: &[u8]| {
            let buffer = PinnedBuffer::create(&device, bytes.len()).unwrap();
            buffer.bytes().unwrap().write_at(0, bytes).unwrap();
            buffer
        };
        let long = buffer(&[3_i64, 1 << 40, -7].map(i64::to_ne_bytes).concat());
        let short = buffer(&[3_i32, 10, i32::MIN].map(i32::to_ne_bytes).concat());
        let (long, short) = (Indices::i64(long.all()), Indices::i32(short.all()));
        let error_at = |indices: &Indices, position| tensor.bad_index(&stream, indices, position);
        let bad = |position, index| Error::BadIndex { position, index, rows: Some(10) };
        assert_eq!([error_at(&long, 1), error_at(&long, 2)], [bad(1, Some(1 << 40)), bad(2, Some(-7))]);
        assert_eq!(
            [error_at(&short, 1), error_at(&short, 2)],
            [bad(1, Some(10)), bad(2, Some(i32::MIN.into()))]
        );
        assert_eq!(error_at(&short, 0), bad(0, None), "the index is valid now");

        let message = "index 10 at position 1 is out of range: valid indices are 0..10";
        assert_eq!(error_at(&short, 1).to_string(), message);
        let message = "the index at position 0 is out of range: valid indices are 0..10";
        assert_eq!(error_at(&short, 0).to_string(), message);
    }
}
