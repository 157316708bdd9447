//! Fast path from torch: gathers and all-reduces that bypass the framework's dispatcher.
//!
//! The dispatcher takes longer than a kernel launch, and so does a check in Python whether a call may bypass it. Here both
//! are native. Observers of calls (modes, profilers, tracers) that must not see a call twice are checked first; then the
//! tensors are read and the call runs; the other observers are checked while the work runs. If a check fails, the caller
//! repeats the call through the dispatcher, which also reports errors; a gather is then repeated.
//!
//! The callables are native too, because a cold Python function takes a microsecond before its first instruction:
//! [`ShortGather`] wraps a function, and [`ShortReduction`] is a base class. Both fall back to Python.

use std::sync::OnceLock;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};
use wholemem::ReduceOp;

use crate::array::{DlDevice, Element, Exchange, Layout};
use crate::communicator::Communicator;
use crate::error::{IntoPyResult, is_bad_index};
use crate::tensor::WholeTensor;

/// The fast path: runs gathers and all-reduces of a framework's tensors without the framework's dispatcher.
///
/// A call takes the fast path only if no observer (mode, profiler, tracer) is active and the tensors are plain: of the classes
/// that ``exchange`` accepts, contiguous and without lazy negation.
///
/// Args:
///     exchange: Reads the tensors.
///     checked_before: Observers that are checked before a call. Each is a function that returns whether the observer is active,
///         or a tuple of a module's ``__dict__``, the name of a variable and the value it has while the observer is inactive.
///     checked_during: Observers that are checked while a call runs, because they may see it again. As ``checked_before``.
///     types: The framework's dtypes that are supported.
///     is_negated: A function that returns whether a tensor is a lazily negated view of its memory.
///     factories: A function that creates a tensor from size, strides, dtype and device number (-1 for the CPU), and ``None``
///         or a tuple of two functions without the device number, for the CPU and for the current GPU, and one that returns the
///         number of the current GPU.
///     mark_written: A function that is called with a tuple of the tensors that were written.
///
/// >>> from wholemem._native import Shortcut
/// >>> callable(Shortcut.gather)
/// True
#[pyclass(frozen, module = "wholemem._native")]
#[derive(Debug)]
pub(crate) struct Shortcut {
    exchange: Py<Exchange>,
    checked_before: Vec<CallObserver>,
    checked_during: Vec<CallObserver>,
    types: Vec<(Element, Py<PyAny>)>,
    is_negated: Py<PyAny>,
    factories: TensorFactory,
    mark_written: Py<PyAny>,
}

/// The check if an observer of the framework's calls, such as a profiler or tracer, is active.
#[derive(Debug, FromPyObject)]
enum CallObserver {
    /// A module variable that shows if the observer is active: the module's `__dict__`, the name, and the value while the
    /// observer is inactive.
    Flag(Py<PyDict>, Py<PyString>, Py<PyAny>),
    /// A Python function that returns whether the observer is active.
    #[pyo3(transparent)]
    Call(Py<PyAny>),
}

impl CallObserver {
    fn is_active(&self, py: Python<'_>) -> PyResult<bool> {
        match self {
            Self::Flag(names, name, inactive) => {
                let found = names.bind(py).get_item(name.bind(py))?;
                Ok(!found.is_some_and(|found| found.is(inactive)))
            }
            Self::Call(check) => check.bind(py).call0()?.is_truthy(),
        }
    }
}

/// Python functions that create tensors: a general one, and faster ones for the CPU and the current GPU.
#[derive(Debug, FromPyObject)]
struct TensorFactory(Py<PyAny>, Option<FastFactories>);

/// Fast Python functions that create tensors on the CPU and on the current GPU, and one that returns the number of the current
/// GPU.
#[derive(Debug, FromPyObject)]
struct FastFactories(Py<PyAny>, Py<PyAny>, Py<PyAny>);

impl TensorFactory {
    fn create<'py>(
        &self,
        size: Bound<'py, PyTuple>,
        strides: Bound<'py, PyTuple>,
        kind: &Py<PyAny>,
        device: i32,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, Self(any, quick)) = (size.py(), self);
        let quick = match quick {
            Some(FastFactories(cpu, ..)) if device < 0 => Some(cpu),
            Some(FastFactories(_, cuda, current))
                if current.bind(py).call0()?.extract::<i32>()? == device =>
            {
                Some(cuda)
            }
            _ => None,
        };
        match quick {
            Some(quick) => quick.bind(py).call1((size, strides, kind)),
            None => any.bind(py).call1((size, strides, kind, device)),
        }
    }
}

#[pymethods]
impl Shortcut {
    #[new]
    #[pyo3(signature = (exchange, *, checked_before, checked_during, types, is_negated, factories, mark_written))]
    fn new(
        exchange: Py<Exchange>,
        checked_before: Vec<CallObserver>,
        checked_during: Vec<CallObserver>,
        types: Vec<Bound<'_, PyAny>>,
        is_negated: Py<PyAny>,
        factories: TensorFactory,
        mark_written: Py<PyAny>,
    ) -> PyResult<Self> {
        let named = |kind: Bound<'_, PyAny>| Ok((kind.extract()?, kind.unbind()));
        let types = types.into_iter().map(named).collect::<PyResult<_>>()?;
        Ok(Self { exchange, checked_before, checked_during, types, is_negated, factories, mark_written })
    }

    /// Gathers rows of a table without going through the framework's dispatcher.
    ///
    /// Args:
    ///     table: A :class:`wholemem.WholeTensor`.
    ///     indices: A tensor of int32 or int64.
    ///     out: The output tensor; ``None`` creates one.
    ///     dtype: The requested dtype; ``None`` is the dtype of the table.
    ///
    /// Returns:
    ///     The rows, or ``None`` if the call must go through the dispatcher.
    #[pyo3(signature = (table, indices, out, dtype))]
    fn gather<'py>(
        &self,
        table: &Bound<'py, PyAny>,
        indices: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
        dtype: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let (py, exchange) = (table.py(), self.exchange.get());
        let Ok(table) = table.cast::<WholeTensor>() else { return Ok(None) };
        let table = table.get();
        if !exchange.accepts(indices)
            || is_observed(py, &self.checked_before)?
            || !self.is_table_dtype(table, dtype)
        {
            return Ok(None);
        }
        let Some(out) = out else {
            let Some(rows) = self.new_rows(table, indices)? else { return Ok(None) };
            let is_complete =
                self.gather_tensors(table, indices, &rows)? && !is_observed(py, &self.checked_during)?;
            return Ok(is_complete.then_some(rows));
        };
        if !exchange.accepts(out) || out.getattr(intern!(py, "requires_grad"))?.is_truthy()? {
            return Ok(None);
        }
        // A lazily negated tensor is a view of a complex tensor, so it has gaps unless it has one element. A contiguous negated
        // output that a user built by hand is detected after the write, and the call is then repeated through the dispatcher.
        let may_be_negated = table.rows.row_len() <= table.element.len();
        if may_be_negated && self.is_negated(out, table.element)? {
            return Ok(None);
        }
        // A gather of rows of up to 8 bytes may overwrite its indices in place, and could then not be repeated.
        if table.rows.row_len() <= size_of::<u64>() && is_observed(py, &self.checked_during)? {
            return Ok(None);
        }
        let gathered = self.gather_tensors(table, indices, out);
        // If an index is bad, the gather still writes the rows of the other indices.
        let is_written = match &gathered {
            Ok(is_filled) => *is_filled,
            Err(error) => is_bad_index(py, error),
        };
        if is_written {
            self.mark_written.bind(py).call1(((out,),))?;
        }
        let is_complete = gathered?
            && !is_observed(py, &self.checked_during)?
            && (may_be_negated || !self.is_negated(out, table.element)?);
        Ok(is_complete.then(|| out.clone()))
    }

    /// Sums a tensor over all ranks, into another tensor or in place, without going through torch's dispatcher.
    ///
    /// Args:
    ///     comm: The communicator.
    ///     input: The tensor of this rank.
    ///     output: The output tensor, which may be ``input``.
    ///
    /// Returns:
    ///     ``False``, without any effect, if the tensors differ in shape or type or are not plain strided tensors.
    #[pyo3(signature = (comm, input, output))]
    fn all_reduce(
        &self,
        comm: &Bound<'_, Communicator>,
        input: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        let (py, exchange) = (input.py(), self.exchange.get());
        let state = comm.get().state().into_py()?;
        // SAFETY: the caller keeps `input` alive and does not change its storage during the call. The work is enqueued on the
        // framework's current stream, and the framework's allocator reuses memory in the order of that stream. No Python code
        // runs before the operands are built, and the operands contain addresses and lengths but no pointer to the tensor's
        // shape.
        let Some(from) = (unsafe { exchange.inspect_plain(input) }) else { return Ok(false) };
        let to = if input.is(output) {
            Some(from)
        } else {
            // SAFETY: the caller keeps `output` alive, and it is used on the same stream as `input`.
            unsafe { exchange.inspect_plain(output) }
        };
        let element = from.dtype;
        let operands = to.and_then(|to| state.operands("the tensor", &from, &to, &[]).ok());
        let (Some(operands), Ok(dtype)) = (operands, element.arithmetic_dtype()) else { return Ok(false) };
        // Lazy negation is checked before the reduction and not while it runs, because the other ranks would not repeat the
        // reduction.
        if self.is_negated(input, element)? || (!input.is(output) && self.is_negated(output, element)?) {
            return Ok(false);
        }
        let on = exchange.call_stream(py, &state)?;
        state.all_reduce(py, &on, &operands, dtype, ReduceOp::Sum)?;
        Ok(true)
    }
}

/// A gather function that bypasses torch's dispatcher if possible, and otherwise calls the wrapped Python function.
///
/// It binds, pickles and is documented like the wrapped function.
///
/// Args:
///     shortcut: The fast path.
///     function: The function that goes through the dispatcher.
///
/// >>> from wholemem._native import ShortGather
/// >>> callable(ShortGather)
/// True
#[pyclass(frozen, dict, weakref, module = "wholemem._native")]
#[derive(Debug)]
pub(crate) struct ShortGather {
    shortcut: Py<Shortcut>,
    function: Py<PyAny>,
}

#[pymethods]
impl ShortGather {
    #[new]
    #[pyo3(signature = (shortcut, function))]
    fn new(shortcut: Py<Shortcut>, function: Bound<'_, PyAny>) -> PyResult<Py<Self>> {
        let py = function.py();
        let gather = Bound::new(py, Self { shortcut, function: function.clone().unbind() })?;
        py.import("functools")?.call_method1("update_wrapper", (&gather, function))?;
        Ok(gather.unbind())
    }

    #[pyo3(signature = (*args, **kwargs))]
    fn __call__<'py>(
        &self,
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = args.py();
        if args.len() == 2 {
            let mut left = kwargs.map_or(0, |kwargs| kwargs.len());
            let mut named = |name| match kwargs {
                Some(kwargs) if left > 0 => {
                    let found = kwargs.get_item(name)?;
                    left -= usize::from(found.is_some());
                    Ok(found)
                }
                _ => PyResult::Ok(None),
            };
            let (out, dtype) = (named(intern!(py, "out"))?, named(intern!(py, "dtype"))?);
            let not_none = |value: Option<Bound<'py, PyAny>>| value.filter(|value| !value.is_none());
            let (table, indices) = (args.get_item(0)?, args.get_item(1)?);
            if left == 0
                && let Some(rows) = self.shortcut.get().gather(
                    &table,
                    &indices,
                    not_none(out).as_ref(),
                    not_none(dtype).as_ref(),
                )?
            {
                return Ok(rows);
            }
        }
        // Calls with wrong arguments are also passed to the Python function, which raises a better error.
        self.function.bind(py).call(args, kwargs)
    }

    /// Makes `torch.jit.script_if_tracing` compile the wrapped function, because torch cannot compile a native callable. The mark
    /// belongs to the class, so that `functools.wraps` does not copy it.
    #[classattr]
    fn __script_if_tracing_wrapper() -> bool {
        true
    }

    #[getter]
    fn __original_fn(&self, py: Python<'_>) -> Py<PyAny> {
        self.function.clone_ref(py)
    }

    /// Returns another attribute of the wrapped function, such as its code or its defaults.
    fn __getattr__<'py>(&self, py: Python<'py>, name: &Bound<'py, PyString>) -> PyResult<Bound<'py, PyAny>> {
        self.function.bind(py).getattr(name)
    }

    /// Binds the callable to an instance as a method, like a function in a class.
    fn __get__<'py>(
        slf: &Bound<'py, Self>,
        instance: Option<&Bound<'py, PyAny>>,
        _owner: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        match instance {
            Some(instance) => slf.py().import("types")?.call_method1("MethodType", (slf, instance)),
            None => Ok(slf.clone().into_any()),
        }
    }

    /// Pickles the callable by its qualified name, like a function.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.getattr(intern!(slf.py(), "__qualname__"))
    }

    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        let name: String = Self::__reduce__(slf)?.extract()?;
        Ok(format!("<function {name} at {:p}>", slf.as_ptr()))
    }
}

/// Base class of objects that sum tensors over all ranks and bypass torch's dispatcher if possible.
///
/// A subclass has the communicator as ``comm``, and the method ``_all_reduce``, which goes through the dispatcher.
///
/// >>> from wholemem._native import ShortReduction
/// >>> class Sums(ShortReduction):
/// ...     def _all_reduce(self, tensor, out):
/// ...         return "dispatched"
/// >>> Sums().all_reduce(None)
/// 'dispatched'
#[pyclass(frozen, subclass, module = "wholemem._native")]
#[derive(Debug, Default)]
pub(crate) struct ShortReduction {
    shortcut: OnceLock<Py<Shortcut>>,
}

#[pymethods]
impl ShortReduction {
    #[new]
    #[pyo3(signature = (*_args, **_kwargs))]
    fn new(_args: &Bound<'_, PyTuple>, _kwargs: Option<&Bound<'_, PyDict>>) -> Self {
        Self::default()
    }

    /// Returns the sum of the tensors of all ranks. Every rank must call this method.
    ///
    /// The result is bitwise equal on all ranks. A tensor that is registered on all ranks is read directly; other tensors are
    /// staged. torch does not see the call: it is not differentiable, and autograd does not notice that ``out`` was overwritten.
    /// Use :func:`wholemem.torch.all_reduce` for training and in compiled code.
    ///
    /// Args:
    ///     tensor: The tensor of this rank.
    ///     out: The output tensor, of the same shape. It may be ``tensor``. ``None`` creates one.
    ///
    /// Returns:
    ///     ``out``, or the new tensor.
    ///
    /// Raises:
    ///     wholemem.errors.PeerLost: A rank exited.
    ///     wholemem.errors.Timeout: A rank did not call in time.
    #[pyo3(signature = (tensor, out=None))]
    fn all_reduce<'py>(
        slf: &Bound<'py, Self>,
        tensor: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        if let Some(shortcut) = slf.get().shortcut.get()
            && let Ok(comm) = slf.getattr(intern!(py, "comm"))?.cast::<Communicator>()
        {
            let shortcut = shortcut.get();
            let new = if out.is_none() { shortcut.new_like(tensor)? } else { None };
            if let Some(out) = out.or(new.as_ref())
                && shortcut.all_reduce(comm, tensor, out)?
            {
                return Ok(out.clone());
            }
        }
        slf.call_method1(intern!(py, "_all_reduce"), (tensor, out))
    }

    /// Enables the fast path, which bypasses torch's dispatcher.
    ///
    /// Args:
    ///     shortcut: The fast path of this process.
    #[pyo3(signature = (shortcut))]
    fn _use_shortcut(&self, shortcut: Py<Shortcut>) {
        // Only the first call has an effect, because a process has one fast path.
        drop(self.shortcut.set(shortcut));
    }
}

/// Returns true if an observer of the framework's calls is active.
fn is_observed(py: Python<'_>, observers: &[CallObserver]) -> PyResult<bool> {
    for observer in observers {
        if observer.is_active(py)? {
            return Ok(true);
        }
    }
    Ok(false)
}

impl Shortcut {
    /// Returns true if no dtype is requested, or the dtype of the table.
    fn is_table_dtype(&self, table: &WholeTensor, dtype: Option<&Bound<'_, PyAny>>) -> bool {
        dtype.is_none_or(|requested| self.type_of(table.element).is_some_and(|own| requested.is(own)))
    }

    fn type_of(&self, element: Element) -> Option<&Py<PyAny>> {
        self.types.iter().find(|(own, _)| *own == element).map(|(_, kind)| kind)
    }

    /// Returns true if a tensor is a lazily negated view of its memory.
    fn is_negated(&self, tensor: &Bound<'_, PyAny>, element: Element) -> PyResult<bool> {
        Ok(element.is_part_of_complex() && self.is_negated.bind(tensor.py()).call1((tensor,))?.is_truthy()?)
    }

    /// Gathers rows if `indices` and `rows` are plain tensors of matching shape and type; otherwise returns false without any
    /// effect.
    fn gather_tensors(
        &self,
        table: &WholeTensor,
        indices: &Bound<'_, PyAny>,
        rows: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        let (py, exchange) = (indices.py(), self.exchange.get());
        // SAFETY: the caller keeps `indices` alive and does not change its storage during the call. The work is enqueued on the
        // framework's current stream, and the framework's allocator reuses memory in the order of that stream. No Python code
        // runs before the operands are built.
        let Some(from) = (unsafe { exchange.inspect_plain(indices) }) else { return Ok(false) };
        // SAFETY: the caller keeps `rows` alive, and they are used on the same stream as `indices`.
        let Some(to) = (unsafe { exchange.inspect_plain(rows) }) else { return Ok(false) };
        let Ok((indices, rows)) = table.gather_operands(&from, &to, false, false) else { return Ok(false) };
        let on = exchange.call_stream(py, &table.state)?;
        table.gather_rows(py, &on, &indices.indices, &rows)?;
        Ok(true)
    }

    /// Creates the output tensor of a gather. Returns `None` if `indices` is not a plain tensor of indices.
    fn new_rows<'py>(
        &self,
        table: &WholeTensor,
        indices: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        // SAFETY: the memory of `indices` is not accessed, and the shape is copied before Python code runs.
        let like = unsafe { self.exchange.get().inspect_plain(indices) };
        let Some(like) = like.filter(|like| like.dtype.is_index()) else { return Ok(None) };
        self.new_tensor(indices.py(), table.element, &table.shape_of(like.shape), like.device)
    }

    /// Creates a tensor with the shape and type of another tensor. Returns `None` if the other tensor is not plain.
    fn new_like<'py>(&self, tensor: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
        // SAFETY: the memory of `tensor` is not accessed, and the shape is copied before Python code runs.
        let Some(like) = (unsafe { self.exchange.get().inspect_plain(tensor) }) else { return Ok(None) };
        self.new_tensor(tensor.py(), like.dtype, like.shape, like.device)
    }

    fn new_tensor<'py>(
        &self,
        py: Python<'py>,
        element: Element,
        shape: &[i64],
        device: DlDevice,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        // If the shape has too many elements, the call goes through the framework, which raises the error.
        let (Some(kind), Ok(layout)) = (self.type_of(element), Layout::contiguous(element, shape)) else {
            return Ok(None);
        };
        let (size, strides) = (PyTuple::new(py, layout.shape)?, PyTuple::new(py, layout.strides)?);
        let device = if device.is_cuda() { device.id } else { -1 };
        self.factories.create(size, strides, kind, device).map(Some)
    }
}
