//! What the ranks of a communicator do together: reduce, gather, broadcast, and wait for each other on a stream.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyString;
use wholemem::{Buffer, Rank, ReduceOp, SymmetricMemory, SymmetricSpec, UnknownReduceOp};
use wholemem_hal::{Rights, Span};

use crate::array::{Array, Layout, View};
use crate::communicator::{Communicator, Open};
use crate::error::{Raised, Raises};
use crate::number::natural;
use crate::stream::Target;
use crate::wait::waiting;
use crate::window::Kept;

impl Open {
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

/// An array as a collective call takes it: memory of this rank, or its part of a window.
#[derive(Clone)]
struct Operand {
    layout: Layout,
    span: Span,
    window: Option<(Arc<Kept>, usize)>,
}

impl Operand {
    fn new(open: &Open, view: View, what: &str, rights: Rights) -> Result<Self, Raised> {
        view.layout.check_contiguous(what, rights)?;
        let span = view.span(what, open.comm.device(), rights)?;
        let window = open.windows.find(view.address, view.layout.len());
        Ok(Self { layout: view.layout, span, window })
    }

    fn buffer(&self) -> Buffer<'_> {
        match &self.window {
            Some((kept, offset)) => kept.parts.range(*offset..*offset + self.span.len()),
            None => Buffer::Own(&self.span),
        }
    }
}

/// One call's operands.
struct Call<'py> {
    open: Arc<Open>,
    target: Target,
    input: Operand,
    output: Operand,
    /// What the caller gets.
    out: Bound<'py, PyAny>,
}

impl<'py> Call<'py> {
    /// `shape_of` says what the output is like, by the input.
    fn prepare(
        comm: &Communicator,
        array: &Bound<'py, PyAny>,
        out: Option<Bound<'py, PyAny>>,
        stream: Option<&Bound<'py, PyAny>>,
        shape_of: impl FnOnce(&[i64]) -> Vec<i64>,
    ) -> PyResult<Self> {
        let open = comm.open().raised()?;
        let target = Target::of(&open, stream)?;
        let in_place = out.as_ref().is_some_and(|out| out.is(array));
        let rights = if in_place { Rights::ReadWrite } else { Rights::Read };
        let input = Operand::new(&open, target.take(array)?, "the array", rights).raised()?;
        let (element, shape) = (input.layout.element, shape_of(&input.layout.shape));
        let out = match out {
            Some(out) => out,
            None => {
                let layout = Layout::contiguous(element, &shape).raised()?;
                Bound::new(array.py(), Array::new(open.make(layout).raised()?))?.into_any()
            }
        };
        let output = if in_place {
            input.clone()
        } else {
            Operand::new(&open, target.take(&out)?, "the output", Rights::ReadWrite).raised()?
        };
        output.layout.check_shape("the output", &shape).raised()?;
        if output.layout.element != element {
            let message =
                format!("the output holds {}, and the array {}", output.layout.element.name, element.name);
            return Err(Raised::new("WrongType", message).hint("give an output of the array's type").into());
        }
        Ok(Self { open, target, input, output, out })
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
    /// which may be ``array`` itself, or in a new :class:`Array`. Arrays that lie in a window are read where they are;
    /// all ranks give such ones, at the same place, or none does.
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
        let Call { open, target, input, output, out } =
            Call::prepare(self, array, out, stream, <[i64]>::to_vec)?;
        let dtype = input.layout.element.number().raised()?;
        waiting(py, || -> Result<(), Raised> {
            let (from, to) = (input.buffer(), output.buffer());
            Ok(open.symmetric()?.all_reduce(&target.stream, from, to, dtype, op.0)?)
        })?;
        Ok(out)
    }

    /// Gives every rank's array to all ranks, one after the other.
    #[pyo3(signature = (array, out=None, *, stream=None))]
    fn all_gather<'py>(
        &self,
        py: Python<'py>,
        array: &Bound<'py, PyAny>,
        out: Option<Bound<'py, PyAny>>,
        stream: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let size = i64::from(self.open().raised()?.comm.size());
        let shape_of = |shape: &[i64]| [&[size], shape].concat();
        let Call { open, target, input, output, out } = Call::prepare(self, array, out, stream, shape_of)?;
        waiting(py, || -> Result<(), Raised> {
            Ok(open.symmetric()?.all_gather(&target.stream, input.buffer(), output.buffer())?)
        })?;
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
        let Call { open, target, input, output, out } =
            Call::prepare(self, &array, out, stream, <[i64]>::to_vec)?;
        waiting(py, || -> Result<(), Raised> {
            let (from, to) = (input.buffer(), output.buffer());
            Ok(open.symmetric()?.broadcast(&target.stream, Rank(root), from, to)?)
        })?;
        Ok(out)
    }

    /// A barrier for what is enqueued on a stream: on a GPU nobody waits but the streams.
    #[pyo3(signature = (*, stream=None))]
    fn stream_barrier(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let open = self.open().raised()?;
        let target = Target::of(&open, stream)?;
        waiting(py, || -> Result<(), Raised> { Ok(open.symmetric()?.barrier(&target.stream)?) })
    }
}
