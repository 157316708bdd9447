//! Implements the torch operators: they read tensors through DLPack's exchange API and run on torch's current stream.
//!
//! A torch operator receives tensors and the handle of a table or communicator, which `wholemem._handles` resolves. The
//! dispatcher has already resolved lazily negated and conjugated tensors, and autograd has recorded the call.

use std::sync::Arc;

use pyo3::prelude::*;
use wholemem::Rank;

use crate::array::{Element, Exchange};
use crate::collective::{Operands, Reduction};
use crate::communicator::{CommState, Communicator};
use crate::error::IntoPyResult;
use crate::number::unsigned;
use crate::rows::{Scatter, order_of};
use crate::tensor::WholeTensor;

#[pymethods]
impl Exchange {
    /// Gathers rows of a table into a tensor, and converts the elements to the tensor's type.
    ///
    /// Args:
    ///     table: The table.
    ///     indices: A tensor of int32 or int64.
    ///     out: The output tensor.
    ///
    /// Raises:
    ///     wholemem.errors.BadIndex: An index is outside the table.
    ///     wholemem.errors.WrongDevice: A tensor is on another device.
    ///     wholemem.errors.WrongType: The types cannot be converted.
    ///     wholemem.errors.WrongValue: ``out`` has another shape.
    #[pyo3(signature = (table, indices, out))]
    fn gather(
        &self,
        py: Python<'_>,
        table: &WholeTensor,
        indices: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        // SAFETY: the caller of the operator keeps `indices` alive and does not change its storage during the call. The work is
        // enqueued on the framework's current stream, and the framework's allocator reuses memory in the order of that stream.
        let indices = unsafe { self.inspect("the tensor of indices", indices) }?;
        // SAFETY: the caller of the operator keeps `out` alive, and it is used on the same stream as `indices`.
        let rows = unsafe { self.inspect("the output", out) }?;
        let (indices, rows) = table.gather_operands(&indices, &rows, true, false).into_py()?;
        let on = self.call_stream(py, &table.state)?;
        table.gather_rows(py, &on, &indices.indices, &rows)
    }

    /// Scatters rows to a table: writes or adds them, converted to the table's element type.
    ///
    /// Args:
    ///     table: The table.
    ///     indices: A tensor of int32 or int64.
    ///     values: One row for each index.
    ///     add: Whether to add instead of write.
    ///     order: ``any`` or ``fixed``.
    ///
    /// Raises:
    ///     wholemem.errors.BadIndex: An index is outside the table.
    ///     wholemem.errors.WrongDevice: A tensor is on another device.
    ///     wholemem.errors.WrongType: The types cannot be converted.
    ///     wholemem.errors.WrongValue: ``values`` has another shape, or the order does not exist.
    #[pyo3(signature = (table, indices, values, add, order))]
    fn scatter(
        &self,
        py: Python<'_>,
        table: &WholeTensor,
        indices: &Bound<'_, PyAny>,
        values: &Bound<'_, PyAny>,
        add: bool,
        order: &str,
    ) -> PyResult<()> {
        let order = order_of(order).into_py()?;
        // SAFETY: the caller of the operator keeps `indices` alive and does not change its storage during the call. The work is
        // enqueued on the framework's current stream, and the framework's allocator reuses memory in the order of that stream.
        let indices = unsafe { self.inspect("the tensor of indices", indices) }?;
        // SAFETY: the caller of the operator keeps `values` alive, and they are used on the same stream as `indices`.
        let rows = unsafe { self.inspect("the tensor of values", values) }?;
        let (indices, rows) = table.scatter_operands(&indices, &rows, true, false).into_py()?;
        let on = self.call_stream(py, &table.state)?;
        table.scatter_rows(py, &on, &indices.indices, &rows, Scatter { add, order })
    }

    /// Reduces the tensors of all ranks element by element (all-reduce).
    ///
    /// Args:
    ///     comm: The communicator.
    ///     input: The tensor of this rank.
    ///     output: The output tensor, which may be ``input``.
    ///     op: The name of the operation.
    ///
    /// Raises:
    ///     wholemem.errors.PeerLost: A rank exited.
    ///     wholemem.errors.Timeout: A rank did not call in time.
    #[pyo3(signature = (comm, input, output, op))]
    fn all_reduce(
        &self,
        py: Python<'_>,
        comm: &Communicator,
        input: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        op: Reduction,
    ) -> PyResult<()> {
        let (state, operands, element) = self.operands(comm, input, output, &[])?;
        let dtype = element.arithmetic_dtype().into_py()?;
        state.all_reduce(py, &self.call_stream(py, &state)?, &operands, dtype, op.0)
    }

    /// Concatenates the tensors of all ranks along a new first dimension (all-gather).
    ///
    /// Args:
    ///     comm: The communicator.
    ///     input: The tensor of this rank.
    ///     output: The output tensor.
    ///
    /// Raises:
    ///     wholemem.errors.PeerLost: A rank exited.
    ///     wholemem.errors.Timeout: A rank did not call in time.
    #[pyo3(signature = (comm, input, output))]
    fn all_gather(
        &self,
        py: Python<'_>,
        comm: &Communicator,
        input: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (state, operands, _) = self.operands(comm, input, output, &[i64::from(comm.size())])?;
        state.all_gather(py, &self.call_stream(py, &state)?, &operands)
    }

    /// Copies the tensor of the root rank to all ranks (broadcast).
    ///
    /// Args:
    ///     comm: The communicator.
    ///     input: The tensor that the root sends.
    ///     output: The output tensor.
    ///     root: The rank whose tensor is copied.
    ///
    /// Raises:
    ///     wholemem.errors.PeerLost: A rank exited.
    ///     wholemem.errors.Timeout: A rank did not call in time.
    #[pyo3(signature = (comm, input, output, root))]
    fn broadcast(
        &self,
        py: Python<'_>,
        comm: &Communicator,
        input: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = unsigned)] root: u32,
    ) -> PyResult<()> {
        let (state, operands, _) = self.operands(comm, input, output, &[])?;
        state.broadcast(py, &self.call_stream(py, &state)?, Rank(root), &operands)
    }
}

impl Exchange {
    /// Checks the tensors of a collective and builds its operands, which hold addresses, but no shapes.
    fn operands(
        &self,
        comm: &Communicator,
        input: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        outer: &[i64],
    ) -> PyResult<(Arc<CommState>, Operands, Element)> {
        let state = comm.state().into_py()?;
        // SAFETY: the caller of the operator keeps `input` alive and does not change its storage during the call. The work is
        // enqueued on the framework's current stream, and the framework's allocator reuses memory in the order of that stream.
        let from = unsafe { self.inspect("the tensor", input) }?;
        // SAFETY: the caller of the operator keeps `output` alive, and it is used on the same stream as `input`.
        let to = unsafe { self.inspect("the output", output) }?;
        let operands = state.operands("the tensor", &from, &to, outer).into_py()?;
        Ok((state, operands, from.dtype))
    }
}
