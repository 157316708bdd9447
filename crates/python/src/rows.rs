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
use crate::error::{Exception, IntoPyResult};
use crate::framework::Framework;
use crate::number::signed;
use crate::raw_tensor::RawTensor;
use crate::stream::CallStream;
use crate::tensor::WholeTensor;
use crate::wait::run_blocking;

/// The indices of a gather or scatter, and their shape.
pub(crate) struct IndexArg<'a> {
    pub(crate) indices: Indices,
    shape: &'a [i64],
}

/// The variant of a scatter: whether rows are written or added, and the order for repeated indices.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scatter {
    pub(crate) add: bool,
    pub(crate) order: Order,
}

impl WholeTensor {
    /// Checks the tensors of a gather and builds its operands.
    #[inline]
    pub(crate) fn gather_operands<'a>(
        &self,
        indices: &RawTensor<'a>,
        rows: &RawTensor<'_>,
        convert: bool,
        skip_bad: bool,
    ) -> Result<(IndexArg<'a>, RowBuffer), Exception> {
        let indices = self.index_arg(indices, skip_bad)?;
        let rows = self.row_operand(rows, "the output", indices.shape, Rights::ReadWrite, convert)?;
        Ok((indices, rows))
    }

    /// Checks the tensors of a scatter and builds its operands.
    pub(crate) fn scatter_operands<'a>(
        &self,
        indices: &RawTensor<'a>,
        rows: &RawTensor<'_>,
        convert: bool,
        skip_bad: bool,
    ) -> Result<(IndexArg<'a>, RowBuffer), Exception> {
        let is_swapped = !indices.dtype.is_index() && rows.dtype.is_index();
        let indices = self.index_arg(indices, skip_bad).map_err(|error| {
            if is_swapped { error.hint("pass the indices first, then the rows") } else { error }
        })?;
        let rows = self.row_operand(rows, "the array of rows", indices.shape, Rights::Read, convert)?;
        Ok((indices, rows))
    }

    #[inline]
    fn index_arg<'a>(&self, tensor: &RawTensor<'a>, skip_bad: bool) -> Result<IndexArg<'a>, Exception> {
        let argument = "the array of indices";
        if !tensor.dtype.is_index() {
            let message = format!("indices must be int32 or int64, but are {}", tensor.dtype.name);
            let hint = match tensor.dtype.name {
                "bool" => "`numpy.flatnonzero(mask)` returns the indices that a mask selects",
                _ => "convert them to int64",
            };
            return Err(Exception::new("WrongType", message).hint(hint));
        }
        tensor.check_contiguous(argument, Rights::Read)?;
        let span = tensor.span(argument, &self.state, Rights::Read)?;
        let indices = if tensor.dtype.len() == 8 { Indices::i64(span) } else { Indices::i32(span) };
        let indices = if skip_bad { indices.on_bad(OnBadIndex::Skip) } else { indices };
        Ok(IndexArg { indices, shape: tensor.shape })
    }

    /// Checks the tensor of rows of a gather or scatter, which has one row for each index, and builds its operand.
    #[inline]
    fn row_operand(
        &self,
        tensor: &RawTensor<'_>,
        argument: &str,
        indices: &[i64],
        rights: Rights,
        convert: bool,
    ) -> Result<RowBuffer, Exception> {
        tensor.check_shape(argument, indices, &self.row_shape)?;
        let is_converted = convert && tensor.dtype != self.element;
        let (own, dtype) = if is_converted {
            // A conversion requires that both element types support arithmetic.
            (self.element.arithmetic_dtype()?, tensor.dtype.arithmetic_dtype()?)
        } else {
            tensor.check_dtype(argument, self.element, "the tensor")?;
            let own = self.element.table_dtype()?;
            (own, own)
        };
        let span = tensor.span(argument, &self.state, rights)?;
        let row_len = self.rows.row_len() / own.len() * dtype.len();
        let rows = RowBuffer::new(span, dtype).stride(tensor.row_stride(
            argument,
            indices.len(),
            row_len,
            rights,
        )?);
        Ok(if is_converted { rows.converted() } else { rows })
    }

    /// Gathers rows of the table on a stream.
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
        run_blocking(py, || {
            if on.runs_inline() {
                self.rows.gather_on_sync(on, indices, rows)
            } else {
                self.rows.gather_on(on, indices, rows)
            }
        })
    }

    /// Scatters rows to the table on a stream.
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
            self.element.arithmetic_dtype().into_py()?;
        }
        run_blocking(py, || match (add, on.runs_inline()) {
            (false, true) => table.scatter_on_sync(on, indices, rows, order),
            (false, false) => table.scatter_on(on, indices, rows, order),
            (true, true) => table.scatter_add_on_sync(on, indices, rows, order),
            (true, false) => table.scatter_add_on(on, indices, rows, order),
        })
    }
}

#[pymethods]
impl WholeTensor {
    /// Copies the rows of the table at the given indices to an array (gather).
    ///
    /// Indices of torch return a torch tensor, and the work runs on torch's current stream unless ``stream`` is given. Indices of
    /// numpy return a numpy array, or an :class:`Array` if numpy does not have the element type. Other indices return an
    /// :class:`Array`. If ``stream`` is given, torch's streams do not wait for it: the caller orders them.
    ///
    /// If the table is on a GPU, indices in host memory are copied to it and a numpy output is copied back; the call waits for
    /// each copy. torch tensors are not copied: a tensor on another device raises an error.
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
    #[expect(clippy::too_many_arguments, reason = "Python passes them by keyword")]
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
        let indices =
            self.stage_input(py, &on, &framework, "the array of indices", index_view(indices, &on)?)?;
        let (out, to) = match out {
            Some(out) => {
                let framework = Framework::of(&out)?;
                (out, framework)
            }
            None => {
                let shape = self.shape_of(&indices.layout.shape);
                let layout = Layout::contiguous(dtype.unwrap_or(self.element), &shape).into_py()?;
                (framework.output(py, &self.state, layout)?, framework)
            }
        };
        let rows = on.import(&out)?;
        check_requested_dtype(dtype, rows.layout.element).into_py()?;
        let staged = if to.is_staged() && on.needs_copy(&self.state, &rows) {
            rows.check_writable("the output").into_py()?;
            Some(self.state.allocate(rows.layout.clone()).into_py()?)
        } else {
            None
        };
        let (from, into) = (RawTensor::of(&indices), RawTensor::of(staged.as_ref().unwrap_or(&rows)));
        let convert = convert || dtype.is_some();
        let (from, into) = self.gather_operands(&from, &into, convert, skip_bad).into_py()?;
        self.gather_rows(py, &on.stream, &from.indices, &into)?;
        if let Some(staged) = &staged {
            on.read_back(py, &self.state, staged, &rows)?;
            // The gather has run, so a bad index is reported now instead of by the next call.
            self.rows.check().into_py()?;
        }
        Ok(out)
    }

    /// Writes rows of an array to the rows of the table at the given indices (scatter). Other ranks see the writes after
    /// the next :meth:`barrier`.
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
    #[expect(clippy::too_many_arguments, reason = "Python passes them by keyword")]
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
        let scatter = Scatter { add: false, order: order_of(order).into_py()? };
        self.scatter_arrays(py, [indices, array], scatter, convert, skip_bad, stream)
    }

    /// Adds rows of an array to the rows of the table at the given indices (scatter-add). Other ranks see the sums after
    /// the next :meth:`barrier`.
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
    #[expect(clippy::too_many_arguments, reason = "Python passes them by keyword")]
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
        let scatter = Scatter { add: true, order: order_of(order).into_py()? };
        self.scatter_arrays(py, [indices, array], scatter, convert, skip_bad, stream)
    }
}

impl WholeTensor {
    fn scatter_arrays(
        &self,
        py: Python<'_>,
        [indices, array]: [&Bound<'_, PyAny>; 2],
        scatter: Scatter,
        convert: bool,
        skip_bad: bool,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (of_indices, of_rows) = (Framework::of(indices)?, Framework::of(array)?);
        let on = CallStream::for_call(&self.state, stream, &of_rows)?;
        let indices =
            self.stage_input(py, &on, &of_indices, "the array of indices", index_view(indices, &on)?)?;
        let rows = self.stage_input(py, &on, &of_rows, "the array of rows", on.import(array)?)?;
        let (indices, rows) = (RawTensor::of(&indices), RawTensor::of(&rows));
        let (indices, rows) = self.scatter_operands(&indices, &rows, convert, skip_bad).into_py()?;
        self.scatter_rows(py, &on.stream, &indices.indices, &rows, scatter)
    }

    /// Returns an input array in memory that the device can access: copies a host array to a GPU, but returns a torch
    /// tensor as it is, because a torch tensor on another device is an error.
    fn stage_input(
        &self,
        py: Python<'_>,
        on: &CallStream,
        framework: &Framework<'_>,
        argument: &str,
        view: View,
    ) -> PyResult<View> {
        if framework.is_staged() { on.on_device(py, &self.state, argument, view) } else { Ok(view) }
    }
}

/// The number of Python ints that are converted to indices between two checks for signals.
const CHECKED_EVERY: usize = 1 << 16;

/// Imports indices: an array, an int, or a sequence of ints.
fn index_view(object: &Bound<'_, PyAny>, on: &CallStream) -> PyResult<View> {
    if object.is_instance_of::<PyInt>() && !object.is_instance_of::<PyBool>() {
        let (view, index) = (View::of_indices(&[]).into_py()?, index_of(object)?);
        view.write_index(0, index).into_py()?;
        return Ok(view);
    }
    let is_ints = object.is_instance_of::<PyList>()
        || object.is_instance_of::<PyTuple>()
        || object.is_instance_of::<PyRange>();
    if !is_ints {
        return on.import(object);
    }
    let count = object.len()?;
    let (view, mut written) = (View::of_indices(&[signed(count)]).into_py()?, 0);
    for index in object.try_iter()? {
        if written % CHECKED_EVERY == 0 {
            object.py().check_signals()?;
        }
        view.write_index(written, index_of(&index?)?).into_py()?;
        written += 1;
    }
    if written < count {
        let message = format!("expected {count} indices, but the sequence had {written} when it was read");
        return Err(Exception::new("WrongValue", message)
            .hint("do not change the sequence during the call")
            .into());
    }
    Ok(view)
}

/// Converts a Python object to an index. `bool` is not accepted.
fn index_of(object: &Bound<'_, PyAny>) -> PyResult<i64> {
    if !object.is_instance_of::<PyBool>() {
        match object.extract::<i64>() {
            Ok(index) => return Ok(index),
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => {
                let message = format!("the index {object} does not fit in 64 bits");
                return Err(Exception::new("WrongValue", message).into());
            }
            Err(_) => {}
        }
    }
    let message = format!("an index is a `{}`, not an int", object.get_type().name()?);
    Err(Exception::new("WrongType", message).hint("pass ints, or one array of indices").into())
}

/// Parses the name of a scatter order: `any` or `fixed`.
pub(crate) fn order_of(name: &str) -> Result<Order, Exception> {
    match name {
        "any" => Ok(Order::Any),
        "fixed" => Ok(Order::Fixed),
        _ => Err(Exception::new("WrongValue", format!("the order `{name}` does not exist"))
            .hint("use `any`, or `fixed`: the same result in every run, by a collective call")),
    }
}

/// Returns an error if a type was requested and the output of the gather has another type.
fn check_requested_dtype(requested: Option<Element>, output: Element) -> Result<(), Exception> {
    match requested {
        Some(requested) if requested != output => {
            let message =
                format!("the output has the type {}, but `dtype` is {}", output.name, requested.name);
            Err(Exception::new("WrongValue", message).hint("omit `dtype`"))
        }
        _ => Ok(()),
    }
}
