//! The way around a framework's dispatcher, for calls that nobody but the caller has to see.
//!
//! A dispatcher takes longer than a launch on a GPU, and so does asking in Python whether anybody needs it. Here both are
//! spared: whoever must not see a call twice is asked first, then tensors are looked at, and the call is made; all others are
//! asked while it runs. Where anything is not plain, the caller goes the long way, which also says what is wrong: rows that were
//! gathered in vain are gathered again.
//!
//! Also what is called is native, since a function of Python that is not warm takes a microsecond before it does anything:
//! [`ShortGather`] stands before a function, and [`ShortReduction`] below a class. Both know the long way, in Python.

use std::sync::OnceLock;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};
use wholemem::ReduceOp;

use crate::array::{Element, Exchange, Layout, Place};
use crate::communicator::Communicator;
use crate::error::{Raises, is_bad_index};
use crate::tensor::WholeTensor;

/// The way around the dispatcher of a framework.
///
/// It is for tensors that ``exchange`` knows, of the ``types``, and while nobody looks: neither ``first``, who are asked before a call
/// is made, nor ``then``, who are asked while it runs, and may see it again. Each is a function that says so, or the names of a
/// module, one of them, and what that is while nobody does. ``is_other`` tells of a tensor whether its elements are not those in its
/// memory, and ``written`` is told which were written. ``new`` is a function that makes one of a size, strides, a type and a device's
/// number, and, if there are such, two that do without the number, for the processor and for the GPU whose number the last one tells.
///
/// >>> from wholemem._native import Shortcut
/// >>> callable(Shortcut.gather)
/// True
#[pyclass(frozen, module = "wholemem._native")]
#[derive(Debug)]
pub(crate) struct Shortcut {
    exchange: Py<Exchange>,
    first: Vec<Watcher>,
    then: Vec<Watcher>,
    types: Vec<(Element, Py<PyAny>)>,
    is_other: Py<PyAny>,
    new: Maker,
    written: Py<PyAny>,
}

/// Who may look at calls of the framework.
#[derive(Debug, FromPyObject)]
enum Watcher {
    /// The names of a module, one of them, and what that is while nobody looks.
    Flag(Py<PyDict>, Py<PyString>, Py<PyAny>),
    /// A function that says so.
    #[pyo3(transparent)]
    Call(Py<PyAny>),
}

impl Watcher {
    fn looks(&self, py: Python<'_>) -> PyResult<bool> {
        match self {
            Self::Flag(names, name, quiet) => {
                let found = names.bind(py).get_item(name.bind(py))?;
                Ok(!found.is_some_and(|found| found.is(quiet)))
            }
            Self::Call(asked) => asked.bind(py).call0()?.is_truthy(),
        }
    }
}

/// Makes tensors: a function that makes any, and those that make them quickly where they can.
#[derive(Debug, FromPyObject)]
struct Maker(Py<PyAny>, Option<Quick>);

/// For the processor, and for the GPU whose number the last function tells.
#[derive(Debug, FromPyObject)]
struct Quick(Py<PyAny>, Py<PyAny>, Py<PyAny>);

impl Maker {
    fn make<'py>(
        &self,
        size: Bound<'py, PyTuple>,
        strides: Bound<'py, PyTuple>,
        kind: &Py<PyAny>,
        device: i32,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, Self(any, quick)) = (size.py(), self);
        let quick = match quick {
            Some(Quick(cpu, ..)) if device < 0 => Some(cpu),
            Some(Quick(_, cuda, current)) if current.bind(py).call0()?.extract::<i32>()? == device => {
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
    #[pyo3(signature = (exchange, *, first, then, types, is_other, new, written))]
    fn new(
        exchange: Py<Exchange>,
        first: Vec<Watcher>,
        then: Vec<Watcher>,
        types: Vec<Bound<'_, PyAny>>,
        is_other: Py<PyAny>,
        new: Maker,
        written: Py<PyAny>,
    ) -> PyResult<Self> {
        let named = |kind: Bound<'_, PyAny>| Ok((kind.extract()?, kind.unbind()));
        let types = types.into_iter().map(named).collect::<PyResult<_>>()?;
        Ok(Self { exchange, first, then, types, is_other, new, written })
    }

    /// The rows of a table that the indices name, in ``out`` or in a new tensor; ``None`` if anything is not as usual.
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
        if !exchange.knows(indices) || is_watched(py, &self.first)? || !self.is_asked(table, dtype) {
            return Ok(None);
        }
        let Some(out) = out else {
            let Some(rows) = self.new_rows(table, indices)? else { return Ok(None) };
            let is_done = self.gather_plain(table, indices, &rows)? && !is_watched(py, &self.then)?;
            return Ok(is_done.then_some(rows));
        };
        if !exchange.knows(out) || out.getattr(intern!(py, "requires_grad"))?.is_truthy()? {
            return Ok(None);
        }
        // Negatives are views of complex numbers, with gaps, but for those of one number; and those that are laid out by hand, which
        // are refused when they have been written.
        let may_be_other = table.rows.row_len() <= table.element.len();
        if may_be_other && self.is_other(out, table.element)? {
            return Ok(None);
        }
        // Rows as long as an index may take the place of their indices, which are then not there to be gathered by again.
        if table.rows.row_len() <= size_of::<u64>() && is_watched(py, &self.then)? {
            return Ok(None);
        }
        let gathered = self.gather_plain(table, indices, out);
        // Of a bad index, the other rows are there.
        let is_written = match &gathered {
            Ok(is_filled) => *is_filled,
            Err(error) => is_bad_index(py, error),
        };
        if is_written {
            self.written.bind(py).call1(((out,),))?;
        }
        let is_done = gathered?
            && !is_watched(py, &self.then)?
            && (may_be_other || !self.is_other(out, table.element)?);
        Ok(is_done.then(|| out.clone()))
    }

    /// Sums a tensor over all ranks, into another tensor or in place, without torch's dispatcher. Returns ``False`` and does
    /// nothing if the tensors differ in shape or type, or if they are not plain strided tensors.
    #[pyo3(signature = (comm, input, output))]
    fn all_reduce(
        &self,
        comm: &Bound<'_, Communicator>,
        input: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        let (py, exchange) = (input.py(), self.exchange.get());
        let state = comm.get().state().raised()?;
        // SAFETY: the caller of the reduction keeps the tensor during the call, and the work goes to the framework's current stream,
        // in whose order its allocator reuses memory. No Python code runs before the operands are made, which keep no shape.
        let Some(from) = (unsafe { exchange.look_plain(input) }) else { return Ok(false) };
        let to = if input.is(output) {
            Some(from)
        } else {
            // SAFETY: the output is kept by the caller, and used on the same stream, as the input is.
            unsafe { exchange.look_plain(output) }
        };
        let element = from.dtype;
        let operands = to.and_then(|to| state.operands("the tensor", &from, &to, &[]).ok());
        let (Some(operands), Ok(dtype)) = (operands, element.number()) else { return Ok(false) };
        // Not while it runs: the other ranks would not do it again.
        if self.is_other(input, element)? || (!input.is(output) && self.is_other(output, element)?) {
            return Ok(false);
        }
        let on = exchange.call_stream(py, &state)?;
        state.all_reduce(py, &on, &operands, dtype, ReduceOp::Sum)?;
        Ok(true)
    }
}

/// A gather that goes the short way where it can, and else calls the function that goes the long one.
///
/// To those who hold it it is that function: it binds, pickles and is described as one.
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
        let made = Bound::new(py, Self { shortcut, function: function.clone().unbind() })?;
        py.import("functools")?.call_method1("update_wrapper", (&made, function))?;
        Ok(made.unbind())
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
            let given = |found: Option<Bound<'py, PyAny>>| found.filter(|found| !found.is_none());
            let (table, indices) = (args.get_item(0)?, args.get_item(1)?);
            if left == 0
                && let Some(rows) = self.shortcut.get().gather(
                    &table,
                    &indices,
                    given(out).as_ref(),
                    given(dtype).as_ref(),
                )?
            {
                return Ok(rows);
            }
        }
        // Also with other arguments than it takes, which it says better.
        self.function.bind(py).call(args, kwargs)
    }

    /// What is native cannot be compiled; this and the next say that a compiler is to take the function instead. The names are
    /// torch's, for `torch.jit.script_if_tracing`. They are the class's, so that who wraps a gather does not take them over.
    #[classattr]
    fn __script_if_tracing_wrapper() -> bool {
        true
    }

    #[getter]
    fn __original_fn(&self, py: Python<'_>) -> Py<PyAny> {
        self.function.clone_ref(py)
    }

    /// What else a function has: its code, its defaults.
    fn __getattr__<'py>(&self, py: Python<'py>, name: &Bound<'py, PyString>) -> PyResult<Bound<'py, PyAny>> {
        self.function.bind(py).getattr(name)
    }

    /// As a function that is part of a class is bound.
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

    /// As a function is found again by another process: by its name.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.getattr(intern!(slf.py(), "__qualname__"))
    }

    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        let name: String = Self::__reduce__(slf)?.extract()?;
        Ok(format!("<function {name} at {:p}>", slf.as_ptr()))
    }
}

/// Sums of all ranks' tensors that go the short way where they can: what a class has that knows the long one, and has the ranks as
/// ``comm``.
///
/// >>> from wholemem._native import ShortReduction
/// >>> class Sums(ShortReduction):
/// ...     def _all_reduce(self, tensor, out):
/// ...         return "the long way"
/// >>> Sums().all_reduce(None)
/// 'the long way'
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

    /// The sum of all ranks' tensors, in ``out``, of the same shape, or in a new tensor. All ranks call it.
    ///
    /// The outcome is the same to the bit on all of them. ``out`` may be ``tensor`` itself. A tensor that is registered, on all
    /// ranks, is read where it is; others are copied on the way.
    ///
    /// torch does not see the call: no gradient comes back through it, and a backward pass that needs what was in ``out`` is not
    /// told that it is gone. :func:`wholemem.torch.all_reduce` is for training, and for what is compiled.
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
            let made = if out.is_none() { shortcut.new_like(tensor)? } else { None };
            if let Some(out) = out.or(made.as_ref())
                && shortcut.all_reduce(comm, tensor, out)?
            {
                return Ok(out.clone());
            }
        }
        slf.call_method1(intern!(py, "_all_reduce"), (tensor, out))
    }

    /// Goes the short way from now on.
    #[pyo3(signature = (shortcut))]
    fn _go_short(&self, shortcut: Py<Shortcut>) {
        // Once is enough: there is one.
        drop(self.shortcut.set(shortcut));
    }
}

/// Whether somebody else looks at calls of the framework now.
fn is_watched(py: Python<'_>, watchers: &[Watcher]) -> PyResult<bool> {
    for watcher in watchers {
        if watcher.looks(py)? {
            return Ok(true);
        }
    }
    Ok(false)
}

impl Shortcut {
    /// Whether elements come out as they are in the table.
    fn is_asked(&self, table: &WholeTensor, dtype: Option<&Bound<'_, PyAny>>) -> bool {
        dtype.is_none_or(|asked| self.type_of(table.element).is_some_and(|own| asked.is(own)))
    }

    fn type_of(&self, element: Element) -> Option<&Py<PyAny>> {
        self.types.iter().find(|(known, _)| *known == element).map(|(_, kind)| kind)
    }

    /// Whether elements of a tensor are not those in its memory.
    fn is_other(&self, tensor: &Bound<'_, PyAny>, element: Element) -> PyResult<bool> {
        Ok(element.is_part_of_complex() && self.is_other.bind(tensor.py()).call1((tensor,))?.is_truthy()?)
    }

    /// Gathers if indices and rows are plain tensors that fit; if not, it does nothing and returns false.
    fn gather_plain(
        &self,
        table: &WholeTensor,
        indices: &Bound<'_, PyAny>,
        rows: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        let (py, exchange) = (indices.py(), self.exchange.get());
        // SAFETY: the caller of the gather keeps the tensor during the call, and the work goes to the framework's current stream, in
        // whose order its allocator reuses memory. No Python code runs before the operands are made.
        let Some(from) = (unsafe { exchange.look_plain(indices) }) else { return Ok(false) };
        // SAFETY: the rows are kept by the caller, and used on the same stream, as the indices are.
        let Some(to) = (unsafe { exchange.look_plain(rows) }) else { return Ok(false) };
        let Ok((indices, rows)) = table.gather_operands(&from, &to, false, false) else { return Ok(false) };
        let on = exchange.call_stream(py, &table.state)?;
        table.gather_rows(py, &on, &indices.indices, &rows)?;
        Ok(true)
    }

    /// A tensor for the rows that indices name, if they can be indices.
    fn new_rows<'py>(
        &self,
        table: &WholeTensor,
        indices: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        // SAFETY: nothing is reached through the address, and the shape is copied before any Python code runs.
        let seen = unsafe { self.exchange.get().look_plain(indices) };
        let Some(seen) = seen.filter(|seen| seen.dtype.is_index()) else { return Ok(None) };
        self.new_tensor(indices.py(), table.element, &table.shape_of(seen.shape), seen.device)
    }

    /// A tensor like one that can be looked at.
    fn new_like<'py>(&self, tensor: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
        // SAFETY: nothing is reached through the address, and the shape is copied before any Python code runs.
        let Some(seen) = (unsafe { self.exchange.get().look_plain(tensor) }) else { return Ok(None) };
        self.new_tensor(tensor.py(), seen.dtype, seen.shape, seen.device)
    }

    fn new_tensor<'py>(
        &self,
        py: Python<'py>,
        element: Element,
        shape: &[i64],
        device: Place,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        // Of more elements than there can be, the framework says so.
        let (Some(kind), Ok(layout)) = (self.type_of(element), Layout::contiguous(element, shape)) else {
            return Ok(None);
        };
        let (size, strides) = (PyTuple::new(py, layout.shape)?, PyTuple::new(py, layout.strides)?);
        let device = if device.is_cuda() { device.id } else { -1 };
        self.new.make(size, strides, kind, device).map(Some)
    }
}
