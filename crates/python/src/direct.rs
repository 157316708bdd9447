//! Calls by address: for a framework that spares every detour on the way here.
//!
//! Tensors come as numbers: an address, a count, the code of a type, the device, a stream; or as they are, where their
//! framework tells the numbers in one call. Python code that calls a method whose name ends in `_at` promises that the
//! memory is there, without gaps, until what is enqueued on the stream has run; an allocator that works in the order of
//! streams, as torch's does, keeps it that long. No `&` or `&mut` to it exists: Python's tensors are pointers. What can be
//! checked here is: the device, and everything that the calls below check anyway. In Rust, what trusts an address is `unsafe`.

use std::sync::Arc;

use pyo3::prelude::*;
use wholemem::{Buffer, Dtype, Indices, Order, Rank, ReduceOp, RowBuffer};
use wholemem_hal::Span;

use crate::array::{Element, Exchange, Place};
use crate::collective::Reduction;
use crate::communicator::{Communicator, Open};
use crate::error::{Raised, Raises};
use crate::number::natural;
use crate::tensor::WholeTensor;
use crate::wait::waiting;
use crate::window::Kept;

/// The number of a type of elements, as the calls by address take it.
#[pyfunction]
pub(crate) fn dtype_code(dtype: Element) -> PyResult<u32> {
    dtype.number().map(Dtype::code).raised()
}

/// The number of a reduction, likewise.
#[pyfunction]
pub(crate) fn op_code(op: Reduction) -> u32 {
    op.0.code()
}

fn dtype_of(code: u32) -> Result<Dtype, Raised> {
    Dtype::from_code(code)
        .ok_or_else(|| Raised::new("WrongType", format!("no type of elements has the code {code}")))
}

pub(crate) fn reduction_of(code: u32) -> Result<ReduceOp, Raised> {
    ReduceOp::from_code(code)
        .ok_or_else(|| Raised::new("WrongValue", format!("no reduction has the code {code}")))
}

impl Open {
    /// `len` bytes of a framework's memory on `device`: a GPU's number, or -1 for the processor's.
    ///
    /// # Safety
    /// If `device` is this communicator's, the memory is as [`FrameworkMemory::part`] has it.
    unsafe fn memory(&self, device: i32, address: u64, len: usize) -> Result<Span, Raised> {
        if device != self.device {
            let there = Place::of(self.comm.device());
            let here = if device < 0 { Place::CPU } else { Place::cuda(device) };
            let message = format!("the tensor is on {here}, and the communicator on {there}");
            return Err(Raised::new("WrongDevice", message).hint(format!("move it to {there} first")));
        }
        // SAFETY: as the caller promises.
        unsafe { self.framework.part(address, len) }
    }
}

#[pymethods]
impl WholeTensor {
    /// :meth:`gather` by address, which the caller guarantees to be valid: indices of eight bytes or four, and rows
    /// ``stride`` bytes apart, or one after the other if that is 0; converted where a type is named, on a GPU's number, or
    /// -1, on a stream's.
    #[pyo3(signature = (indices, count, wide, rows, stride, dtype, device, stream))]
    #[expect(clippy::too_many_arguments, reason = "numbers are passed one by one")]
    fn gather_at(
        &self,
        py: Python<'_>,
        indices: u64,
        count: usize,
        wide: bool,
        rows: u64,
        stride: usize,
        dtype: Option<u32>,
        device: i32,
        stream: u64,
    ) -> PyResult<()> {
        if count == 0 {
            return Ok(());
        }
        // SAFETY: the calling Python code promises that the memory is there, as written at the top.
        let indices = unsafe { self.indices_at(indices, count, wide, device) }.raised()?;
        // SAFETY: the calling Python code promises that the memory is there, as written at the top.
        let rows = unsafe { self.rows_at(rows, count, stride, dtype, device) }.raised()?;
        self.gather_on(py, stream, &indices, &rows)
    }

    /// :meth:`scatter`, or :meth:`scatter_add`, by address.
    #[pyo3(signature = (add, rows, stride, dtype, indices, count, wide, device, stream))]
    #[expect(clippy::too_many_arguments, reason = "numbers are passed one by one")]
    fn scatter_at(
        &self,
        py: Python<'_>,
        add: bool,
        rows: u64,
        stride: usize,
        dtype: Option<u32>,
        indices: u64,
        count: usize,
        wide: bool,
        device: i32,
        stream: u64,
    ) -> PyResult<()> {
        if add {
            self.element.number().raised()?;
        }
        // SAFETY: the calling Python code promises that the memory is there, as written at the top.
        let indices = unsafe { self.indices_at(indices, count, wide, device) }.raised()?;
        // SAFETY: the calling Python code promises that the memory is there, as written at the top.
        let rows = unsafe { self.rows_at(rows, count, stride, dtype, device) }.raised()?;
        let (table, on, any) = (&self.rows, &self.open.stream_at(stream), Order::Any);
        waiting(py, || match (add, on.runs_inline()) {
            (false, true) => table.scatter_sync(on, &rows, &indices, any),
            (false, false) => table.scatter(on, &rows, &indices, any),
            (true, true) => table.scatter_add_sync(on, &rows, &indices, any),
            (true, false) => table.scatter_add(on, &rows, &indices, any),
        })
    }
}

impl WholeTensor {
    /// Gathers by tensors that can be looked at and fit; otherwise nothing is done, and it is false.
    pub(crate) fn gather_seen(
        &self,
        exchange: &Exchange,
        indices: &Bound<'_, PyAny>,
        rows: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        let (Some(from), Some(to)) = (exchange.look(indices), exchange.look(rows)) else { return Ok(false) };
        let fits = (to.device, to.element) == (from.device, self.element);
        if !fits || !from.element.is_index() || !self.has_shape(from.shape, to.shape) {
            return Ok(false);
        }
        let (count, wide) = (from.count(), from.element.len() == 8);
        if count > 0 {
            // SAFETY: what was seen of a tensor is there while the caller has the tensor, and longer by the order of streams.
            let indices_at = unsafe { self.indices_at(from.address, count, wide, from.device) }.raised()?;
            // SAFETY: likewise; and the shape was compared, so that the tensor has all of these rows.
            let rows_at = unsafe { self.rows_at(to.address, count, 0, None, to.device) }.raised()?;
            let stream = exchange.stream(indices.py(), from.device)?;
            self.gather_on(indices.py(), stream, &indices_at, &rows_at)?;
        }
        Ok(true)
    }

    fn gather_on(&self, py: Python<'_>, stream: u64, indices: &Indices, rows: &RowBuffer) -> PyResult<()> {
        let (table, on) = (&self.rows, &self.open.stream_at(stream));
        waiting(py, || {
            if on.runs_inline() {
                table.gather_sync(on, indices, rows)
            } else {
                table.gather(on, indices, rows)
            }
        })
    }

    /// Whether a shape is that of rows which stand beside indices.
    fn has_shape(&self, indices: &[i64], shape: &[i64]) -> bool {
        let inner = &self.rows.shape()[1..];
        let is_same = |(len, own): (&i64, &u64)| u64::try_from(*len) == Ok(*own);
        shape
            .strip_prefix(indices)
            .is_some_and(|rest| rest.len() == inner.len() && rest.iter().zip(inner).all(is_same))
    }

    /// # Safety
    /// So many indices lie at the address, as [`Open::memory`] has it.
    unsafe fn indices_at(
        &self,
        address: u64,
        count: usize,
        wide: bool,
        device: i32,
    ) -> Result<Indices, Raised> {
        let len = count.saturating_mul(if wide { 8 } else { 4 });
        // SAFETY: as the caller promises.
        let span = unsafe { self.open.memory(device, address, len) }?;
        Ok(if wide { Indices::i64(span) } else { Indices::i32(span) })
    }

    /// Rows of this tensor's own type, or of another one that is converted on the way.
    ///
    /// # Safety
    /// So many rows lie at the address, `stride` bytes apart, as [`Open::memory`] has it.
    unsafe fn rows_at(
        &self,
        address: u64,
        count: usize,
        stride: usize,
        dtype: Option<u32>,
        device: i32,
    ) -> Result<RowBuffer, Raised> {
        let own = self.element.stored()?;
        let (dtype, row_len) = match dtype.map(dtype_of).transpose()? {
            Some(other) => (other, self.rows.row_len() / own.len() * other.len()),
            None => (own, self.rows.row_len()),
        };
        // One after the other, if nothing else is said.
        let stride = stride.max(row_len);
        let len = if count == 0 { 0 } else { stride.saturating_mul(count - 1).saturating_add(row_len) };
        // SAFETY: as the caller promises.
        let span = unsafe { self.open.memory(device, address, len) }?;
        let dense = RowBuffer::new(span, dtype).stride(stride);
        if dtype == own {
            return Ok(dense);
        }
        self.element.number()?;
        Ok(dense.converted())
    }
}

/// A tensor as a collective call takes it: memory of this rank, or its part of a window.
struct Operand {
    span: Span,
    window: Option<(Arc<Kept>, usize)>,
}

impl Operand {
    /// # Safety
    /// The memory is as [`Open::memory`] has it.
    unsafe fn at(open: &Open, device: i32, address: u64, len: usize) -> Result<Self, Raised> {
        // SAFETY: as the caller promises.
        let span = unsafe { open.memory(device, address, len) }?;
        Ok(Self { span, window: open.windows.find(address, len) })
    }

    fn buffer(&self) -> Buffer<'_> {
        match &self.window {
            Some((kept, offset)) => kept.parts.range(*offset..*offset + self.span.len()),
            None => Buffer::Own(&self.span),
        }
    }
}

impl Open {
    /// Reduces elements by address.
    ///
    /// # Safety
    /// So many elements lie at both addresses, as [`Open::memory`] has it.
    pub(crate) unsafe fn reduce_at(
        &self,
        py: Python<'_>,
        [input, output]: [u64; 2],
        count: usize,
        (dtype, op): (Dtype, ReduceOp),
        device: i32,
        stream: u64,
    ) -> PyResult<()> {
        let len = count.saturating_mul(dtype.len());
        // SAFETY: as the caller promises.
        let from = unsafe { Operand::at(self, device, input, len) }.raised()?;
        // SAFETY: as the caller promises.
        let to = unsafe { Operand::at(self, device, output, len) }.raised()?;
        let on = self.stream_at(stream);
        waiting(py, || -> Result<(), Raised> {
            Ok(self.symmetric()?.all_reduce(&on, from.buffer(), to.buffer(), dtype, op)?)
        })
    }
}

#[pymethods]
impl Communicator {
    /// :meth:`all_reduce` by address, which the caller guarantees to be valid: of ``count`` elements on a GPU's number,
    /// or -1, on a stream's.
    #[pyo3(signature = (input, output, count, dtype, op, device, stream))]
    #[expect(clippy::too_many_arguments, reason = "numbers are passed one by one")]
    fn all_reduce_at(
        &self,
        py: Python<'_>,
        input: u64,
        output: u64,
        count: usize,
        dtype: u32,
        op: u32,
        device: i32,
        stream: u64,
    ) -> PyResult<()> {
        let open = self.open().raised()?;
        let dtype = dtype_of(dtype).raised()?;
        let op = reduction_of(op).raised()?;
        // SAFETY: the calling Python code promises that the memory is there, as written at the top.
        unsafe { open.reduce_at(py, [input, output], count, (dtype, op), device, stream) }
    }

    /// :meth:`all_gather` by address: ``len`` bytes of each rank.
    #[pyo3(signature = (input, output, len, device, stream))]
    fn all_gather_at(
        &self,
        py: Python<'_>,
        input: u64,
        output: u64,
        len: usize,
        device: i32,
        stream: u64,
    ) -> PyResult<()> {
        let open = self.open().raised()?;
        let all = len.saturating_mul(open.comm.size() as usize);
        // SAFETY: the calling Python code promises that the memory is there, as written at the top.
        let from = unsafe { Operand::at(&open, device, input, len) }.raised()?;
        // SAFETY: the calling Python code promises that the memory is there, as written at the top.
        let to = unsafe { Operand::at(&open, device, output, all) }.raised()?;
        let on = open.stream_at(stream);
        waiting(py, || -> Result<(), Raised> {
            Ok(open.symmetric()?.all_gather(&on, from.buffer(), to.buffer())?)
        })
    }

    /// :meth:`broadcast` by address: ``len`` bytes of the root.
    #[pyo3(signature = (input, output, len, root, device, stream))]
    #[expect(clippy::too_many_arguments, reason = "numbers are passed one by one")]
    fn broadcast_at(
        &self,
        py: Python<'_>,
        input: u64,
        output: u64,
        len: usize,
        #[pyo3(from_py_with = natural)] root: u32,
        device: i32,
        stream: u64,
    ) -> PyResult<()> {
        let open = self.open().raised()?;
        // SAFETY: the calling Python code promises that the memory is there, as written at the top.
        let from = unsafe { Operand::at(&open, device, input, len) }.raised()?;
        // SAFETY: the calling Python code promises that the memory is there, as written at the top.
        let to = unsafe { Operand::at(&open, device, output, len) }.raised()?;
        let on = open.stream_at(stream);
        waiting(py, || -> Result<(), Raised> {
            Ok(open.symmetric()?.broadcast(&on, Rank(root), from.buffer(), to.buffer())?)
        })
    }
}
