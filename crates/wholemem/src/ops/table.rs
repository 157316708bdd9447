//! The operations of a tensor that move rows by their indices.

use wholemem_hal::Stream;
use wholemem_os::Deadline;

use super::{Dense, Indices, OnBadIndex, Op, Order};
use crate::memory::Note;
use crate::{Location, Result, WholeTensor};

impl WholeTensor {
    /// Enqueues a gather: row `indices[n]` of the tensor becomes row `n` of `output`, for all of them. Any rank may call it
    /// at any time; it sees what was scattered before the last [`barrier`](crate::Group::barrier).
    ///
    /// Rows are moved in no order: none that is gathered may lie where the output is. A bad index zeroes its row of the
    /// output, and is told of by the next call or by [`check`](Self::check).
    ///
    /// # Errors
    /// What is wrong with the call: [`Error::TypesDiffer`](crate::Error::TypesDiffer), [`Error::TooShort`](crate::Error::TooShort) and the like,
    /// before anything is touched; [`Error::BadIndex`](crate::Error::BadIndex) of a call before this one, which is not made then.
    pub fn gather(&self, stream: &Stream, indices: &Indices, output: &Dense) -> Result<()> {
        self.call(stream, Op::Gather, indices, output)
    }

    /// Gathers, and waits until the rows are there.
    ///
    /// # Errors
    /// As [`gather`](Self::gather); [`Error::BadIndex`](crate::Error::BadIndex) of this call too.
    pub fn gather_sync(&self, stream: &Stream, indices: &Indices, output: &Dense) -> Result<()> {
        self.call_sync(stream, Op::Gather, indices, output)
    }

    /// Enqueues a scatter: row `n` of `input` becomes row `indices[n]` of the tensor, for all of them. Other ranks see it
    /// behind the next [`barrier`](crate::Group::barrier). Rows are moved in no order: none may be written where the input is.
    ///
    /// With [`Order::Fixed`] it is collective, and waits until the rows are there.
    ///
    /// # Errors
    /// As [`gather`](Self::gather).
    pub fn scatter(&self, stream: &Stream, input: &Dense, indices: &Indices, order: Order) -> Result<()> {
        self.put(stream, Op::Scatter, input, indices, order)
    }

    /// Scatters, and waits until the rows are there.
    ///
    /// # Errors
    /// As [`scatter`](Self::scatter); [`Error::BadIndex`](crate::Error::BadIndex) of this call too.
    pub fn scatter_sync(
        &self,
        stream: &Stream,
        input: &Dense,
        indices: &Indices,
        order: Order,
    ) -> Result<()> {
        self.put_sync(stream, Op::Scatter, input, indices, order)
    }

    /// Enqueues an addition: row `n` of `input` is added to row `indices[n]` of the tensor, for all of them. Integers wrap
    /// around; floats are rounded to the tensor's type with each addition.
    ///
    /// With [`Order::Fixed`], and for memory of the [machine](Location::Host), it is collective, and waits until all is added.
    ///
    /// # Errors
    /// As [`gather`](Self::gather).
    pub fn scatter_add(&self, stream: &Stream, input: &Dense, indices: &Indices, order: Order) -> Result<()> {
        self.put(stream, Op::ScatterAdd, input, indices, order)
    }

    /// Adds, and waits until all is added.
    ///
    /// # Errors
    /// As [`scatter_add`](Self::scatter_add); [`Error::BadIndex`](crate::Error::BadIndex) of this call too.
    pub fn scatter_add_sync(
        &self,
        stream: &Stream,
        input: &Dense,
        indices: &Indices,
        order: Order,
    ) -> Result<()> {
        self.put_sync(stream, Op::ScatterAdd, input, indices, order)
    }

    /// Whether work that has run so far met an index that names no row, in any view of this tensor's memory. Asked once,
    /// it is forgotten. Calls that wait tell of their own indices, and nobody else does.
    ///
    /// It does not wait: synchronize the stream first to hear of all that was enqueued.
    ///
    /// # Errors
    /// [`Error::BadIndex`](crate::Error::BadIndex) with the smallest such position.
    pub fn check(&self) -> Result<()> {
        self.memory().check()
    }

    fn put(&self, stream: &Stream, op: Op, input: &Dense, indices: &Indices, order: Order) -> Result<()> {
        if self.is_routed(op, order) {
            return self.put_in_order(stream, op, input, indices);
        }
        self.call(stream, op, indices, input)
    }

    fn put_sync(
        &self,
        stream: &Stream,
        op: Op,
        input: &Dense,
        indices: &Indices,
        order: Order,
    ) -> Result<()> {
        if self.is_routed(op, order) {
            self.put_in_order(stream, op, input, indices)?;
            stream.synchronize(Deadline::NEVER)?;
            return self.check();
        }
        self.call_sync(stream, op, indices, input)
    }

    fn is_routed(&self, op: Op, order: Order) -> bool {
        // Atomic additions of several devices to memory of the machine are no such thing on every machine.
        order == Order::Fixed || op == Op::ScatterAdd && self.memory().location() == Location::Host
    }

    fn call(&self, stream: &Stream, op: Op, indices: &Indices, dense: &Dense) -> Result<()> {
        self.check()?;
        self.launch(stream, op, indices, dense, self.memory().note())
    }

    /// Bad indices of this call are its own error, whoever else calls or checks meanwhile.
    fn call_sync(&self, stream: &Stream, op: Op, indices: &Indices, dense: &Dense) -> Result<()> {
        self.check()?;
        self.memory().with_own_note(|note| {
            self.launch(stream, op, indices, dense, note)?;
            Ok(stream.synchronize(Deadline::NEVER)?)
        })?;
        self.check()
    }

    pub(super) fn launch(
        &self,
        stream: &Stream,
        op: Op,
        indices: &Indices,
        dense: &Dense,
        note: &Note,
    ) -> Result<()> {
        let note = (indices.on_bad == OnBadIndex::Note).then(|| note.span());
        let held = self.memory().operands();
        self.group().kernels().launch(stream, op, (&self.table(), held), indices, dense, note)
    }
}
