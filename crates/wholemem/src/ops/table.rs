//! The operations of a tensor that move rows by their indices.

use wholemem_hal::Stream;
use wholemem_os::Deadline;

use super::{Dense, Indices, OnBadIndex, Op, Order};
use crate::{Location, Result, WholeTensor};

impl WholeTensor {
    /// Enqueues a gather: row `indices[n]` of the tensor becomes row `n` of `output`, for all of them. Any rank may call it
    /// at any time; it sees what was scattered before the last [`barrier`](crate::Group::barrier).
    ///
    /// A bad index zeroes its row of the output, and is told of by the next call or by [`check`](Self::check).
    ///
    /// # Errors
    /// What is wrong with the call: [`Error::TypesDiffer`](crate::Error::TypesDiffer), [`Error::TooShort`](crate::Error::TooShort) and the like,
    /// before anything is touched; [`Error::BadIndex`](crate::Error::BadIndex) of a call before this one, which is not made then.
    pub fn gather(&self, stream: &Stream, indices: &Indices, output: &Dense) -> Result<()> {
        self.check()?;
        self.launch(stream, Op::Gather, indices, output)
    }

    /// Gathers, and waits until the rows are there.
    ///
    /// # Errors
    /// As [`gather`](Self::gather); [`Error::BadIndex`](crate::Error::BadIndex) of this call too.
    pub fn gather_sync(&self, stream: &Stream, indices: &Indices, output: &Dense) -> Result<()> {
        self.gather(stream, indices, output)?;
        self.finish(stream)
    }

    /// Enqueues a scatter: row `n` of `input` becomes row `indices[n]` of the tensor, for all of them. Other ranks see it
    /// behind the next [`barrier`](crate::Group::barrier).
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
        self.scatter(stream, input, indices, order)?;
        self.finish(stream)
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
        self.scatter_add(stream, input, indices, order)?;
        self.finish(stream)
    }

    /// Whether work that has run so far met an index that names no row, in any view of this tensor's memory. Asked once,
    /// it is forgotten.
    ///
    /// It does not wait: synchronize the stream first to hear of all that was enqueued.
    ///
    /// # Errors
    /// [`Error::BadIndex`](crate::Error::BadIndex) with the smallest such position.
    pub fn check(&self) -> Result<()> {
        self.memory().check()
    }

    fn put(&self, stream: &Stream, op: Op, input: &Dense, indices: &Indices, order: Order) -> Result<()> {
        // Atomic additions of several devices to memory of the machine are no such thing on every machine.
        let routed =
            order == Order::Fixed || op == Op::ScatterAdd && self.memory().location() == Location::Host;
        if routed {
            return self.put_in_order(stream, op, input, indices);
        }
        self.check()?;
        self.launch(stream, op, indices, input)
    }

    pub(super) fn launch(&self, stream: &Stream, op: Op, indices: &Indices, dense: &Dense) -> Result<()> {
        let note = (indices.on_bad == OnBadIndex::Note).then(|| self.memory().note().span());
        let held = self.memory().operands();
        self.group().kernels().launch(stream, op, (&self.table(), held), indices, dense, note)
    }

    fn finish(&self, stream: &Stream) -> Result<()> {
        stream.synchronize(Deadline::NEVER)?;
        self.check()
    }
}
