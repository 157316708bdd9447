//! The collectives of a communicator: all-reduce, all-gather, broadcast, and a barrier on a stream.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyString;
use wholemem::{Dtype, Rank, ReduceOp, SymmetricMemory, SymmetricSpec, UnknownReduceOp};
use wholemem_hal::{Rights, Span, Stream};

use crate::array::{Element, Layout};
use crate::communicator::{CommState, Communicator};
use crate::error::{Exception, IntoPyResult};
use crate::framework::Framework;
use crate::number::unsigned;
use crate::raw_tensor::RawTensor;
use crate::stream::CallStream;
use crate::wait::run_blocking;

impl CommState {
    /// Returns the symmetric memory of the group, by which collectives run. The first call creates it, which is a collective
    /// call.
    pub(crate) fn symmetric(&self) -> Result<&SymmetricMemory, Exception> {
        if let Some(symmetric) = self.symmetric.get() {
            return Ok(symmetric);
        }
        let spec = SymmetricSpec { timeout: self.comm.bootstrap().timeout(), ..SymmetricSpec::default() };
        let symmetric = SymmetricMemory::create(&self.comm, &spec)?;
        Ok(self.symmetric.get_or_init(|| symmetric))
    }
}

/// The contiguous input and output of a collective. If they are in a window, the call finds it by their addresses.
#[derive(Debug)]
pub(crate) struct Operands {
    from: Span,
    to: Span,
    /// The type of the elements; `U8` for a type that tables do not support.
    element: Dtype,
}

/// Runs the collectives for all callers: the methods of `Communicator`, torch operators, and the fast path (calls from
/// torch that bypass its dispatcher).
impl CommState {
    /// Checks the tensors of a collective and builds its operands. The output must have the input's type, and the shape `outer`
    /// followed by the input's shape. `argument` names the input in errors.
    pub(crate) fn operands(
        &self,
        argument: &str,
        from: &RawTensor<'_>,
        to: &RawTensor<'_>,
        outer: &[i64],
    ) -> Result<Operands, Exception> {
        to.check_dtype("the output", from.dtype, argument)?;
        to.check_shape("the output", outer, from.shape)?;
        let element = from.dtype.table_dtype().unwrap_or(Dtype::U8);
        let rights = if from.address == to.address { Rights::ReadWrite } else { Rights::Read };
        let from = self.contiguous(from, argument, rights)?;
        Ok(Operands { from, to: self.contiguous(to, "the output", Rights::ReadWrite)?, element })
    }

    fn contiguous(&self, tensor: &RawTensor<'_>, argument: &str, rights: Rights) -> Result<Span, Exception> {
        tensor.check_contiguous(argument, rights)?;
        tensor.span(argument, self, rights)
    }

    pub(crate) fn all_reduce(
        &self,
        py: Python<'_>,
        on: &Stream,
        Operands { from, to, .. }: &Operands,
        dtype: Dtype,
        op: ReduceOp,
    ) -> PyResult<()> {
        run_blocking(py, || -> Result<(), Exception> {
            Ok(self.symmetric()?.all_reduce(on, from, to, dtype, op)?)
        })
    }

    pub(crate) fn all_gather(
        &self,
        py: Python<'_>,
        on: &Stream,
        Operands { from, to, element }: &Operands,
    ) -> PyResult<()> {
        run_blocking(py, || -> Result<(), Exception> {
            Ok(self.symmetric()?.all_gather_elements(on, from, to, *element)?)
        })
    }

    pub(crate) fn broadcast(
        &self,
        py: Python<'_>,
        on: &Stream,
        root: Rank,
        Operands { from, to, element }: &Operands,
    ) -> PyResult<()> {
        run_blocking(py, || -> Result<(), Exception> {
            Ok(self.symmetric()?.broadcast_elements(on, root, from, to, *element)?)
        })
    }
}

/// The checked arguments of a collective that Python called as a method of `Communicator`, with arrays of any
/// framework.
struct CollectiveArgs<'py> {
    state: Arc<CommState>,
    on: CallStream,
    operands: Operands,
    element: Element,
    /// The output array, which the collective returns to Python.
    out: Bound<'py, PyAny>,
}

impl<'py> CollectiveArgs<'py> {
    /// Checks the arguments of a collective, and allocates the output if there is none. The output has the shape `outer` followed
    /// by the input's shape.
    fn prepare(
        comm: &Communicator,
        array: &Bound<'py, PyAny>,
        out: Option<Bound<'py, PyAny>>,
        stream: Option<&Bound<'py, PyAny>>,
        outer: &[i64],
    ) -> PyResult<Self> {
        let state = comm.state().into_py()?;
        let framework = Framework::of(array)?;
        let on = CallStream::for_call(&state, stream, &framework)?;
        let input = on.import(array)?;
        let out = match out {
            Some(out) => out,
            None => {
                let shape = [outer, &input.layout.shape].concat();
                let layout = Layout::contiguous(input.layout.element, &shape).into_py()?;
                framework.output(array.py(), &state, layout)?
            }
        };
        let output = if out.is(array) { input.clone() } else { on.import(&out)? };
        let (from, to) = (RawTensor::of(&input), RawTensor::of(&output));
        let operands = state.operands("the array", &from, &to, outer).into_py()?;
        Ok(Self { state, on, operands, element: input.layout.element, out })
    }
}

/// A reduction operation, parsed from its name.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reduction(pub(crate) ReduceOp);

impl<'py> FromPyObject<'_, 'py> for Reduction {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let Ok(name) = object.cast::<PyString>() else {
            return Err(Exception::new(
                "WrongType",
                format!("the operation is a `{}`, not a str", object.get_type().name()?),
            )
            .hint("pass its name, such as `sum`, `avg`, `min` or `max`")
            .into());
        };
        let unknown = |unknown: UnknownReduceOp| Exception::new("WrongValue", unknown.to_string());
        Ok(Self(name.to_cow()?.parse().map_err(unknown)?))
    }
}

#[pymethods]
impl Communicator {
    /// Reduces the arrays of all ranks element by element. Every rank must call this method, and gets a bitwise equal
    /// result.
    ///
    /// If the input is in a window or registered on all ranks, at the same offset, it is read directly. It must be so on all ranks
    /// or on none.
    ///
    /// Args:
    ///     array: The array of this rank.
    ///     out: The output, of the same shape and type. It may be ``array``. ``None`` creates an array of the same framework: a
    ///         torch tensor, a numpy array, or an :class:`Array`.
    ///     op: ``sum``, ``avg``, ``min``, ``max``, ``prod``, ``and``, ``or`` or ``xor``.
    ///     stream: The CUDA stream of the work. ``None`` is torch's current stream for torch tensors, else the default stream.
    ///
    /// Returns:
    ///     ``out``, or the new array.
    ///
    /// Raises:
    ///     wholemem.errors.PeerLost: A rank exited.
    ///     wholemem.errors.Timeout: A rank did not call in time.
    ///     wholemem.errors.WrongType: The element type does not support the operation.
    #[pyo3(
        signature = (array, out=None, *, op=Reduction(ReduceOp::Sum), stream=None),
        text_signature = "($self, array, out=None, *, op='sum', stream=None)"
    )]
    fn all_reduce<'py>(
        &self,
        py: Python<'py>,
        array: &Bound<'py, PyAny>,
        out: Option<Bound<'py, PyAny>>,
        op: Reduction,
        stream: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let CollectiveArgs { state, on, operands, element, out } =
            CollectiveArgs::prepare(self, array, out, stream, &[])?;
        state.all_reduce(py, &on.stream, &operands, element.arithmetic_dtype().into_py()?, op.0)?;
        Ok(out)
    }

    /// Concatenates the arrays of all ranks along a new first dimension, in rank order. Every rank must call this method.
    ///
    /// Args:
    ///     array: The array of this rank.
    ///     out: The output, of the shape ``(size, *array.shape)``. ``None`` creates an array of the same framework.
    ///     stream: The CUDA stream of the work. ``None`` is torch's current stream for torch tensors, else the default stream.
    ///
    /// Returns:
    ///     ``out``, or the new array.
    ///
    /// Raises:
    ///     wholemem.errors.PeerLost: A rank exited.
    ///     wholemem.errors.Timeout: A rank did not call in time.
    #[pyo3(signature = (array, out=None, *, stream=None))]
    fn all_gather<'py>(
        &self,
        py: Python<'py>,
        array: &Bound<'py, PyAny>,
        out: Option<Bound<'py, PyAny>>,
        stream: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let ranks = [i64::from(self.size())];
        let CollectiveArgs { state, on, operands, out, .. } =
            CollectiveArgs::prepare(self, array, out, stream, &ranks)?;
        state.all_gather(py, &on.stream, &operands)?;
        Ok(out)
    }

    /// Copies the array of the root rank to the arrays of all ranks. Every rank must call this method.
    ///
    /// Args:
    ///     array: The array of this rank, which is overwritten except on the root.
    ///     root: The rank whose array is copied.
    ///     stream: The CUDA stream of the work. ``None`` is torch's current stream for torch tensors, else the default stream.
    ///
    /// Returns:
    ///     ``array``.
    ///
    /// Raises:
    ///     wholemem.errors.PeerLost: A rank exited.
    ///     wholemem.errors.Timeout: A rank did not call in time.
    #[pyo3(signature = (array, root=0, *, stream=None))]
    fn broadcast<'py>(
        &self,
        py: Python<'py>,
        array: Bound<'py, PyAny>,
        #[pyo3(from_py_with = unsigned)] root: u32,
        stream: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let out = Some(array.clone());
        let CollectiveArgs { state, on, operands, out, .. } =
            CollectiveArgs::prepare(self, &array, out, stream, &[])?;
        state.broadcast(py, &on.stream, Rank(root), &operands)?;
        Ok(out)
    }

    /// Enqueues a barrier of all ranks on a stream. Every rank must call this method.
    ///
    /// On a GPU the streams wait and the call returns immediately, except that the first collective call of a communicator waits for
    /// all ranks. On a CPU the call waits.
    ///
    /// Args:
    ///     stream: The CUDA stream. ``None`` is the default stream.
    ///
    /// Raises:
    ///     wholemem.errors.PeerLost: A rank exited.
    #[pyo3(signature = (*, stream=None))]
    fn stream_barrier(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let state = self.state().into_py()?;
        let on = CallStream::of(&state, stream)?;
        run_blocking(py, || -> Result<(), Exception> { Ok(state.symmetric()?.barrier(&on.stream)?) })
    }
}
