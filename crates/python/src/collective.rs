//! What the ranks of a communicator do together: reduce, gather, broadcast, and wait for each other on a stream.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyString;
use wholemem::{Buffer, Dtype, Rank, ReduceOp, SymmetricMemory, SymmetricSpec, UnknownReduceOp};
use wholemem_hal::{Rights, Span, Stream};

use crate::array::{Element, Layout};
use crate::communicator::{CommState, Communicator};
use crate::error::{Raised, Raises};
use crate::framework::Framework;
use crate::number::natural;
use crate::raw_tensor::RawTensor;
use crate::stream::CallStream;
use crate::wait::waiting;
use crate::window::Kept;

impl CommState {
    /// What the ranks meet through. The first call makes it, which all ranks do together.
    pub(crate) fn symmetric(&self) -> Result<&SymmetricMemory, Raised> {
        if let Some(symmetric) = self.symmetric.get() {
            return Ok(symmetric);
        }
        let spec = SymmetricSpec { timeout: self.comm.bootstrap().timeout(), ..SymmetricSpec::default() };
        let made = SymmetricMemory::create(&self.comm, &spec)?;
        Ok(self.symmetric.get_or_init(|| made))
    }
}

/// A tensor as a collective takes it: memory of this rank, or its part of a window.
#[derive(Debug)]
struct Operand {
    span: Span,
    window: Option<(Arc<Kept>, usize)>,
}

impl Operand {
    fn new(state: &CommState, tensor: &RawTensor<'_>, what: &str, rights: Rights) -> Result<Self, Raised> {
        tensor.check_contiguous(what, rights)?;
        let span = tensor.span(what, state, rights)?;
        let window = state.windows.find(tensor.address, span.len());
        Ok(Self { span, window })
    }

    fn buffer(&self) -> Buffer<'_> {
        match &self.window {
            Some((kept, offset)) => kept.window.range(*offset..*offset + self.span.len()),
            None => Buffer::Own(&self.span),
        }
    }
}

/// What a collective reads and writes.
#[derive(Debug)]
pub(crate) struct Operands {
    from: Operand,
    to: Operand,
}

/// The collectives, as every way to them calls them.
impl CommState {
    /// The operands of a collective whose output has the input's type, and its shape behind the dimensions `outer`. `what` names
    /// the input in errors.
    pub(crate) fn operands(
        &self,
        what: &str,
        from: &RawTensor<'_>,
        to: &RawTensor<'_>,
        outer: &[i64],
    ) -> Result<Operands, Raised> {
        to.check_dtype("the output", from.dtype, what)?;
        to.check_shape("the output", outer, from.shape)?;
        let rights = if from.address == to.address { Rights::ReadWrite } else { Rights::Read };
        let from = Operand::new(self, from, what, rights)?;
        Ok(Operands { from, to: Operand::new(self, to, "the output", Rights::ReadWrite)? })
    }

    pub(crate) fn all_reduce(
        &self,
        py: Python<'_>,
        on: &Stream,
        Operands { from, to }: &Operands,
        dtype: Dtype,
        op: ReduceOp,
    ) -> PyResult<()> {
        waiting(py, || -> Result<(), Raised> {
            Ok(self.symmetric()?.all_reduce(on, from.buffer(), to.buffer(), dtype, op)?)
        })
    }

    pub(crate) fn all_gather(
        &self,
        py: Python<'_>,
        on: &Stream,
        Operands { from, to }: &Operands,
    ) -> PyResult<()> {
        waiting(py, || -> Result<(), Raised> {
            Ok(self.symmetric()?.all_gather(on, from.buffer(), to.buffer())?)
        })
    }

    pub(crate) fn broadcast(
        &self,
        py: Python<'_>,
        on: &Stream,
        root: Rank,
        Operands { from, to }: &Operands,
    ) -> PyResult<()> {
        waiting(py, || -> Result<(), Raised> {
            Ok(self.symmetric()?.broadcast(on, root, from.buffer(), to.buffer())?)
        })
    }
}

/// A collective called with arrays.
struct Call<'py> {
    state: Arc<CommState>,
    on: CallStream,
    operands: Operands,
    element: Element,
    /// What the caller gets.
    out: Bound<'py, PyAny>,
}

impl<'py> Call<'py> {
    /// The output has the input's shape behind the dimensions `outer`.
    fn prepare(
        comm: &Communicator,
        array: &Bound<'py, PyAny>,
        out: Option<Bound<'py, PyAny>>,
        stream: Option<&Bound<'py, PyAny>>,
        outer: &[i64],
    ) -> PyResult<Self> {
        let state = comm.state().raised()?;
        let framework = Framework::of(array)?;
        let on = CallStream::for_call(&state, stream, &framework)?;
        let input = on.take(array)?;
        let out = match out {
            Some(out) => out,
            None => {
                let shape = [outer, &input.layout.shape].concat();
                let layout = Layout::contiguous(input.layout.element, &shape).raised()?;
                framework.output(array.py(), &state, layout)?
            }
        };
        let output = if out.is(array) { input.clone() } else { on.take(&out)? };
        let (from, to) = (RawTensor::of(&input), RawTensor::of(&output));
        let operands = state.operands("the array", &from, &to, outer).raised()?;
        Ok(Self { state, on, operands, element: input.layout.element, out })
    }
}

/// A reduction by its name.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reduction(pub(crate) ReduceOp);

impl<'py> FromPyObject<'_, 'py> for Reduction {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let Ok(name) = given.cast::<PyString>() else {
            return Err(Raised::new(
                "WrongType",
                format!("the operation is a `{}`", given.get_type().name()?),
            )
            .hint("give its name: `sum`, `avg`, `min`, `max` and so on")
            .into());
        };
        let unknown = |unknown: UnknownReduceOp| Raised::new("WrongValue", unknown.to_string());
        Ok(Self(name.to_cow()?.parse().map_err(unknown)?))
    }
}

#[pymethods]
impl Communicator {
    /// Combines the elements of all ranks, and gives all of them the outcome, the same to the bit.
    ///
    /// ``op`` is ``sum``, ``avg``, ``min``, ``max``, ``prod``, ``and``, ``or`` or ``xor``. The outcome is in ``out``,
    /// which may be ``array`` itself, or in a new array of the same framework: a tensor of torch for one of torch, an array of
    /// numpy for one of numpy, else an :class:`Array`. Arrays that lie in a window are read where they are; all ranks give
    /// such ones, at the same place, or none does.
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
        let Call { state, on, operands, element, out } = Call::prepare(self, array, out, stream, &[])?;
        state.all_reduce(py, &on.stream, &operands, element.number().raised()?, op.0)?;
        Ok(out)
    }

    /// Gives every rank's array to all ranks, one after the other, in ``out`` or in a new array of the same framework.
    #[pyo3(signature = (array, out=None, *, stream=None))]
    fn all_gather<'py>(
        &self,
        py: Python<'py>,
        array: &Bound<'py, PyAny>,
        out: Option<Bound<'py, PyAny>>,
        stream: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let ranks = [i64::from(self.size())];
        let Call { state, on, operands, out, .. } = Call::prepare(self, array, out, stream, &ranks)?;
        state.all_gather(py, &on.stream, &operands)?;
        Ok(out)
    }

    /// Makes every rank's array what the root's is, and returns it.
    #[pyo3(signature = (array, root=0, *, stream=None))]
    fn broadcast<'py>(
        &self,
        py: Python<'py>,
        array: Bound<'py, PyAny>,
        #[pyo3(from_py_with = natural)] root: u32,
        stream: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let out = Some(array.clone());
        let Call { state, on, operands, out, .. } = Call::prepare(self, &array, out, stream, &[])?;
        state.broadcast(py, &on.stream, Rank(root), &operands)?;
        Ok(out)
    }

    /// A barrier for what is enqueued on a stream: on a GPU nobody waits but the streams.
    #[pyo3(signature = (*, stream=None))]
    fn stream_barrier(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let state = self.state().raised()?;
        let on = CallStream::of(&state, stream)?;
        waiting(py, || -> Result<(), Raised> { Ok(state.symmetric()?.barrier(&on.stream)?) })
    }
}
