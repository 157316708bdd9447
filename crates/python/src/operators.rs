//! The kernels of torch's operators: calls on tensors that the framework's exchange API describes, on its current stream.
//!
//! An operator of torch receives tensors, and the number of a table or a communicator, which `wholemem._handles` finds. Here
//! the tensors are passed as they are. The dispatcher has resolved views of negated or conjugated elements before, and
//! autograd has seen the call.

use std::sync::Arc;

use pyo3::prelude::*;
use wholemem::Rank;

use crate::array::{Element, Exchange};
use crate::collective::{Operands, Reduction};
use crate::communicator::{CommState, Communicator};
use crate::error::Raises;
use crate::number::natural;
use crate::rows::{Scatter, order_of};
use crate::tensor::WholeTensor;

#[pymethods]
impl Exchange {
    /// Gathers rows of a table into a tensor, and converts them to its type.
    #[pyo3(signature = (table, indices, out))]
    fn gather(
        &self,
        py: Python<'_>,
        table: &WholeTensor,
        indices: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        // SAFETY: the caller of the operator keeps the tensor during the call, and the work goes to the framework's current
        // stream, in whose order its allocator reuses memory.
        let indices = unsafe { self.look("the tensor of indices", indices) }?;
        // SAFETY: the output is kept by the operator, and used on the same stream, as the indices are.
        let rows = unsafe { self.look("the output", out) }?;
        let (indices, rows) = table.gather_operands(&indices, &rows, true, false).raised()?;
        let on = self.call_stream(py, &table.state)?;
        table.gather_rows(py, &on, &indices.indices, &rows)
    }

    /// Writes rows of a table, or adds to them, converted to its type.
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
        let order = order_of(order).raised()?;
        // SAFETY: the caller of the operator keeps the tensor during the call, and the work goes to the framework's current
        // stream, in whose order its allocator reuses memory.
        let indices = unsafe { self.look("the tensor of indices", indices) }?;
        // SAFETY: the values are kept by the operator, and used on the same stream, as the indices are.
        let rows = unsafe { self.look("the tensor of values", values) }?;
        let (indices, rows) = table.scatter_operands(&indices, &rows, true, false).raised()?;
        let on = self.call_stream(py, &table.state)?;
        table.scatter_rows(py, &on, &indices.indices, &rows, Scatter { add, order })
    }

    /// Reduces a tensor of all ranks to another, or in its place.
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
        let dtype = element.number().raised()?;
        state.all_reduce(py, &self.call_stream(py, &state)?, &operands, dtype, op.0)
    }

    /// Gives every rank's tensor to all ranks.
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

    /// Gives the root's tensor to all ranks.
    #[pyo3(signature = (comm, input, output, root))]
    fn broadcast(
        &self,
        py: Python<'_>,
        comm: &Communicator,
        input: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = natural)] root: u32,
    ) -> PyResult<()> {
        let (state, operands, _) = self.operands(comm, input, output, &[])?;
        state.broadcast(py, &self.call_stream(py, &state)?, Rank(root), &operands)
    }
}

impl Exchange {
    /// The operands of a collective. They keep addresses, and no shape.
    fn operands(
        &self,
        comm: &Communicator,
        input: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        outer: &[i64],
    ) -> PyResult<(Arc<CommState>, Operands, Element)> {
        let state = comm.state().raised()?;
        // SAFETY: the caller of the operator keeps the tensor during the call, and the work goes to the framework's current
        // stream, in whose order its allocator reuses memory.
        let from = unsafe { self.look("the tensor", input) }?;
        // SAFETY: the output is kept by the operator, and used on the same stream, as the input is.
        let to = unsafe { self.look("the output", output) }?;
        let operands = state.operands("the tensor", &from, &to, outer).raised()?;
        Ok((state, operands, from.dtype))
    }
}
