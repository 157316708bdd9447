//! The gathers and scatters of a `WholeTensor`.
//!
//! Every call path ends in [`WholeTensor::gather_operands`] or [`WholeTensor::scatter_operands`], which check the
//! arguments, and in [`WholeTensor::gather_rows`] or [`WholeTensor::scatter_rows`], which run or enqueue the work.

use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt, PyList, PyRange, PyTuple};
use wholemem::{Indices, OnBadIndex, Order, RowBuffer};
use wholemem_hal::{Rights, Stream};

use crate::array::{Element, Layout, View};
use crate::error::{Raised, Raises};
use crate::framework::Framework;
use crate::number::signed;
use crate::raw_tensor::RawTensor;
use crate::stream::CallStream;
use crate::tensor::WholeTensor;
use crate::wait::waiting;

/// Indices and their shape.
pub(crate) struct IndexArg<'a> {
    pub(crate) indices: Indices,
    shape: &'a [i64],
}

/// The variant of a scatter.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scatter {
    pub(crate) add: bool,
    pub(crate) order: Order,
}

impl WholeTensor {
    /// Checks and builds the operands of a gather.
    #[inline]
    pub(crate) fn gather_operands<'a>(
        &self,
        indices: &RawTensor<'a>,
        rows: &RawTensor<'_>,
        convert: bool,
        skip_bad: bool,
    ) -> Result<(IndexArg<'a>, RowBuffer), Raised> {
        let indices = self.index_arg(indices, skip_bad)?;
        let rows = self.row_operand(rows, "the output", indices.shape, Rights::ReadWrite, convert)?;
        Ok((indices, rows))
    }

    /// Checks and builds the operands of a scatter.
    pub(crate) fn scatter_operands<'a>(
        &self,
        indices: &RawTensor<'a>,
        rows: &RawTensor<'_>,
        convert: bool,
        skip_bad: bool,
    ) -> Result<(IndexArg<'a>, RowBuffer), Raised> {
        let is_swapped = !indices.dtype.is_index() && rows.dtype.is_index();
        let indices = self.index_arg(indices, skip_bad).map_err(|error| {
            if is_swapped { error.hint("pass the indices first, then the rows") } else { error }
        })?;
        let rows = self.row_operand(rows, "the array of rows", indices.shape, Rights::Read, convert)?;
        Ok((indices, rows))
    }

    #[inline]
    fn index_arg<'a>(&self, given: &RawTensor<'a>, skip_bad: bool) -> Result<IndexArg<'a>, Raised> {
        let what = "the array of indices";
        if !given.dtype.is_index() {
            let message = format!("indices must be int32 or int64, but are {}", given.dtype.name);
            let hint = match given.dtype.name {
                "bool" => "`numpy.flatnonzero(mask)` returns the indices that a mask selects",
                _ => "convert them to int64",
            };
            return Err(Raised::new("WrongType", message).hint(hint));
        }
        given.check_contiguous(what, Rights::Read)?;
        let span = given.span(what, &self.state, Rights::Read)?;
        let indices = if given.dtype.len() == 8 { Indices::i64(span) } else { Indices::i32(span) };
        let indices = if skip_bad { indices.on_bad(OnBadIndex::Skip) } else { indices };
        Ok(IndexArg { indices, shape: given.shape })
    }

    /// The rows of a gather or scatter: one for each index.
    #[inline]
    fn row_operand(
        &self,
        given: &RawTensor<'_>,
        what: &str,
        indices: &[i64],
        rights: Rights,
        convert: bool,
    ) -> Result<RowBuffer, Raised> {
        given.check_shape(what, indices, &self.row_shape)?;
        let is_converted = convert && given.dtype != self.element;
        let (own, dtype) = if is_converted {
            // A conversion requires that both types are numbers.
            (self.element.number()?, given.dtype.number()?)
        } else {
            given.check_dtype(what, self.element, "the tensor")?;
            let own = self.element.stored()?;
            (own, own)
        };
        let span = given.span(what, &self.state, rights)?;
        let row_len = self.rows.row_len() / own.len() * dtype.len();
        let rows =
            RowBuffer::new(span, dtype).stride(given.row_stride(what, indices.len(), row_len, rights)?);
        Ok(if is_converted { rows.converted() } else { rows })
    }

    /// Gathers on a stream.
    pub(crate) fn gather_rows(
        &self,
        py: Python<'_>,
        on: &Stream,
        indices: &Indices,
        rows: &RowBuffer,
    ) -> PyResult<()> {
        if indices.count() == 0 {
            return Ok(());
        }
        waiting(py, || {
            if on.runs_inline() {
                self.rows.gather_sync(on, indices, rows)
            } else {
                self.rows.gather(on, indices, rows)
            }
        })
    }

    /// Scatters on a stream.
    pub(crate) fn scatter_rows(
        &self,
        py: Python<'_>,
        on: &Stream,
        indices: &Indices,
        rows: &RowBuffer,
        Scatter { add, order }: Scatter,
    ) -> PyResult<()> {
        let table = &self.rows;
        if add {
            self.element.number().raised()?;
        }
        waiting(py, || match (add, on.runs_inline()) {
            (false, true) => table.scatter_sync(on, rows, indices, order),
            (false, false) => table.scatter(on, rows, indices, order),
            (true, true) => table.scatter_add_sync(on, rows, indices, order),
            (true, false) => table.scatter_add(on, rows, indices, order),
        })
    }
}

#[pymethods]
impl WholeTensor {
    /// Gathers the rows that the indices name.
    ///
    /// Indices of torch return a torch tensor, and the work runs on torch's current stream unless ``stream`` is given. Indices of
    /// numpy return a numpy array, or an :class:`Array` if numpy does not have the element type. Other indices return an
    /// :class:`Array`. If ``stream`` is given, torch's streams do not wait for it: the caller orders them.
    ///
    /// If the table is on a GPU, indices in host memory are copied to it and a numpy output is copied back; the call waits for each
    /// copy. torch tensors are not copied: a tensor on another device raises an error.
    ///
    /// Rows are copied in any order. If ``out`` is part of a table, it must not overlap the gathered rows.
    ///
    /// Args:
    ///     indices: An array or tensor of int32 or int64, an int, or a list, tuple or range of ints.
    ///     out: The output, of the shape of the indices followed by the shape of a row. ``None`` creates it.
    ///     dtype: The element type of the output. Floats convert to floats, and integers to integers.
    ///     convert: Whether to convert to the element type of ``out``.
    ///     skip_bad: Whether to ignore bad indices. Their rows are zero.
    ///     stream: The CUDA stream of the work.
    ///
    /// Returns:
    ///     ``out``, or the new array.
    ///
    /// Raises:
    ///     wholemem.errors.BadIndex: An index is outside the table. Its row is zero, and the other rows are valid. On a GPU, the
    ///         next call or :meth:`check` raises it.
    ///     wholemem.errors.WrongDevice: A tensor is on another device.
    ///     wholemem.errors.WrongType: The element types differ, or the indices are not integers.
    ///     wholemem.errors.WrongValue: ``out`` has another shape, or another type than ``dtype``.
    #[pyo3(signature = (indices, out=None, *, dtype=None, convert=false, skip_bad=false, stream=None))]
    #[expect(clippy::too_many_arguments, reason = "they have names in Python")]
    fn gather<'py>(
        &self,
        py: Python<'py>,
        indices: &Bound<'py, PyAny>,
        out: Option<Bound<'py, PyAny>>,
        dtype: Option<Element>,
        convert: bool,
        skip_bad: bool,
        stream: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let framework = Framework::of(indices)?;
        let on = CallStream::for_call(&self.state, stream, &framework)?;
        let indices = self.taken(py, &on, &framework, "the array of indices", index_view(indices, &on)?)?;
        let (out, to) = match out {
            Some(out) => {
                let framework = Framework::of(&out)?;
                (out, framework)
            }
            None => {
                let shape = self.shape_of(&indices.layout.shape);
                let layout = Layout::contiguous(dtype.unwrap_or(self.element), &shape).raised()?;
                (framework.output(py, &self.state, layout)?, framework)
            }
        };
        let rows = on.take(&out)?;
        check_asked(dtype, rows.layout.element).raised()?;
        let staged = if to.is_staged() && on.needs_copy(&self.state, &rows) {
            rows.check_writable("the output").raised()?;
            Some(self.state.make(rows.layout.clone()).raised()?)
        } else {
            None
        };
        let (from, into) = (RawTensor::of(&indices), RawTensor::of(staged.as_ref().unwrap_or(&rows)));
        let convert = convert || dtype.is_some();
        let (from, into) = self.gather_operands(&from, &into, convert, skip_bad).raised()?;
        self.gather_rows(py, &on.stream, &from.indices, &into)?;
        if let Some(staged) = &staged {
            on.read_back(py, &self.state, staged, &rows)?;
            // The work has run, so a bad index is reported now instead of by the next call.
            self.rows.check().raised()?;
        }
        Ok(out)
    }

    /// Writes rows to the rows that the indices name. Other ranks see them after the next :meth:`barrier`.
    ///
    /// If the table is on a GPU, indices and rows in host memory are copied to it, and the call waits for the copies. torch
    /// tensors are not copied. Rows are written in any order. If ``array`` is part of a table, it must not overlap the written
    /// rows.
    ///
    /// Args:
    ///     indices: As for :meth:`gather`.
    ///     array: One row for each index.
    ///     order: If several rows go to one index, ``any`` stores one of them. ``fixed`` stores the last row of the last rank; it
    ///         is a collective call.
    ///     convert: Whether to convert the rows to the element type of the table.
    ///     skip_bad: Whether to ignore bad indices.
    ///     stream: The CUDA stream of the work.
    ///
    /// Raises:
    ///     wholemem.errors.BadIndex: An index is outside the table. On a GPU, the next call or :meth:`check` raises it.
    ///     wholemem.errors.WrongDevice: A tensor is on another device.
    ///     wholemem.errors.WrongType: The element types differ, or the indices are not integers.
    ///     wholemem.errors.WrongValue: ``array`` has another shape.
    #[pyo3(signature = (indices, array, *, order="any", convert=false, skip_bad=false, stream=None))]
    #[expect(clippy::too_many_arguments, reason = "they have names in Python")]
    fn scatter(
        &self,
        py: Python<'_>,
        indices: &Bound<'_, PyAny>,
        array: &Bound<'_, PyAny>,
        order: &str,
        convert: bool,
        skip_bad: bool,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let how = Scatter { add: false, order: order_of(order).raised()? };
        self.scatter_arrays(py, [indices, array], how, convert, skip_bad, stream)
    }

    /// Adds rows to the rows that the indices name. Other ranks see the sums after the next :meth:`barrier`.
    ///
    /// With the order ``fixed``, and for a table in host memory, it is a collective call. Otherwise it behaves as
    /// :meth:`scatter`.
    ///
    /// Args:
    ///     indices: As for :meth:`gather`.
    ///     array: One row for each index.
    ///     order: ``any`` adds in any order. ``fixed`` adds in a fixed order, so that sums are bitwise reproducible.
    ///     convert: Whether to convert the rows to the element type of the table.
    ///     skip_bad: Whether to ignore bad indices.
    ///     stream: The CUDA stream of the work.
    ///
    /// Raises:
    ///     wholemem.errors.BadIndex: An index is outside the table. On a GPU, the next call or :meth:`check` raises it.
    ///     wholemem.errors.WrongDevice: A tensor is on another device.
    ///     wholemem.errors.WrongType: The element types differ, or are not numbers, or the indices are not integers.
    ///     wholemem.errors.WrongValue: ``array`` has another shape.
    #[pyo3(signature = (indices, array, *, order="any", convert=false, skip_bad=false, stream=None))]
    #[expect(clippy::too_many_arguments, reason = "they have names in Python")]
    fn scatter_add(
        &self,
        py: Python<'_>,
        indices: &Bound<'_, PyAny>,
        array: &Bound<'_, PyAny>,
        order: &str,
        convert: bool,
        skip_bad: bool,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let how = Scatter { add: true, order: order_of(order).raised()? };
        self.scatter_arrays(py, [indices, array], how, convert, skip_bad, stream)
    }
}

impl WholeTensor {
    fn scatter_arrays(
        &self,
        py: Python<'_>,
        [indices, array]: [&Bound<'_, PyAny>; 2],
        how: Scatter,
        convert: bool,
        skip_bad: bool,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (of_indices, of_rows) = (Framework::of(indices)?, Framework::of(array)?);
        let on = CallStream::for_call(&self.state, stream, &of_rows)?;
        let indices = self.taken(py, &on, &of_indices, "the array of indices", index_view(indices, &on)?)?;
        let rows = self.taken(py, &on, &of_rows, "the array of rows", on.take(array)?)?;
        let (indices, rows) = (RawTensor::of(&indices), RawTensor::of(&rows));
        let (indices, rows) = self.scatter_operands(&indices, &rows, convert, skip_bad).raised()?;
        self.scatter_rows(py, &on.stream, &indices.indices, &rows, how)
    }

    /// An input array, copied to the device if arrays of its framework are staged.
    fn taken(
        &self,
        py: Python<'_>,
        on: &CallStream,
        framework: &Framework<'_>,
        what: &str,
        view: View,
    ) -> PyResult<View> {
        if framework.is_staged() { on.on_device(py, &self.state, what, view) } else { Ok(view) }
    }
}

/// The number of ints that are converted between two checks for signals.
const CHECKED_EVERY: usize = 1 << 16;

/// Imports indices: an array, an int, or a sequence of ints.
fn index_view(given: &Bound<'_, PyAny>, on: &CallStream) -> PyResult<View> {
    if given.is_instance_of::<PyInt>() && !given.is_instance_of::<PyBool>() {
        let (view, index) = (View::of_indices(&[]).raised()?, index_of(given)?);
        view.write_index(0, index).raised()?;
        return Ok(view);
    }
    let is_ints = given.is_instance_of::<PyList>()
        || given.is_instance_of::<PyTuple>()
        || given.is_instance_of::<PyRange>();
    if !is_ints {
        return on.take(given);
    }
    let count = given.len()?;
    let (view, mut written) = (View::of_indices(&[signed(count)]).raised()?, 0);
    for index in given.try_iter()? {
        if written % CHECKED_EVERY == 0 {
            given.py().check_signals()?;
        }
        view.write_index(written, index_of(&index?)?).raised()?;
        written += 1;
    }
    if written < count {
        let message = format!("expected {count} indices, but the sequence had {written} when it was read");
        return Err(Raised::new("WrongValue", message).hint("do not change the sequence during the call").into());
    }
    Ok(view)
}

/// Converts an index to an int. `bool` is not accepted.
fn index_of(given: &Bound<'_, PyAny>) -> PyResult<i64> {
    if !given.is_instance_of::<PyBool>() {
        match given.extract::<i64>() {
            Ok(index) => return Ok(index),
            Err(error) if error.is_instance_of::<PyOverflowError>(given.py()) => {
                let message = format!("the index {given} does not fit in 64 bits");
                return Err(Raised::new("WrongValue", message).into());
            }
            Err(_) => {}
        }
    }
    let message = format!("an index is a `{}`, not an int", given.get_type().name()?);
    Err(Raised::new("WrongType", message).hint("pass ints, or one array of indices").into())
}

/// Parses the name of an order.
pub(crate) fn order_of(name: &str) -> Result<Order, Raised> {
    match name {
        "any" => Ok(Order::Any),
        "fixed" => Ok(Order::Fixed),
        _ => Err(Raised::new("WrongValue", format!("the order `{name}` does not exist"))
    .hint("use `any`, or `fixed`: the same result in every run, by a collective call")),
    }
}

/// Returns an error unless the output has the requested type, if one was requested.
fn check_asked(asked: Option<Element>, given: Element) -> Result<(), Raised> {
    match asked {
        Some(asked) if asked != given => {
            let message = format!("the output has the type {}, but `dtype` is {}", given.name, asked.name);
            Err(Raised::new("WrongValue", message).hint("omit `dtype`"))
        }
        _ => Ok(()),
    }
}
