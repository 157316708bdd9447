//! Rows moved by their indices: the gathers and scatters of a `WholeTensor`.
//!
//! Every way to them ends in [`WholeTensor::gather_operands`] or [`WholeTensor::scatter_operands`], which check, and in
//! [`WholeTensor::gather_rows`] or [`WholeTensor::scatter_rows`], which run or enqueue the work.

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

/// Indices, and the shape they have.
pub(crate) struct IndexArg<'a> {
    pub(crate) indices: Indices,
    shape: &'a [i64],
}

/// How rows are scattered.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scatter {
    pub(crate) add: bool,
    pub(crate) order: Order,
}

impl WholeTensor {
    /// The operands of a gather.
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

    /// The operands of a scatter.
    pub(crate) fn scatter_operands<'a>(
        &self,
        indices: &RawTensor<'a>,
        rows: &RawTensor<'_>,
        convert: bool,
        skip_bad: bool,
    ) -> Result<(IndexArg<'a>, RowBuffer), Raised> {
        let is_swapped = !indices.dtype.is_index() && rows.dtype.is_index();
        let indices = self.index_arg(indices, skip_bad).map_err(|error| {
            if is_swapped { error.hint("give the indices first, then the rows") } else { error }
        })?;
        let rows = self.row_operand(rows, "the array of rows", indices.shape, Rights::Read, convert)?;
        Ok((indices, rows))
    }

    #[inline]
    fn index_arg<'a>(&self, given: &RawTensor<'a>, skip_bad: bool) -> Result<IndexArg<'a>, Raised> {
        let what = "the array of indices";
        if !given.dtype.is_index() {
            let message = format!("indices are int32 or int64, and not {}", given.dtype.name);
            let hint = match given.dtype.name {
                "bool" => "`numpy.flatnonzero(mask)` gives the indices that a mask selects",
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

    /// A row for each index of an array of this shape.
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
            // Both must be numbers.
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
                self.rows.gather_on_sync(on, indices, rows)
            } else {
                self.rows.gather_on(on, indices, rows)
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
            (false, true) => table.scatter_on_sync(on, indices, rows, order),
            (false, false) => table.scatter_on(on, indices, rows, order),
            (true, true) => table.scatter_add_on_sync(on, indices, rows, order),
            (true, false) => table.scatter_add_on(on, indices, rows, order),
        })
    }
}

#[pymethods]
impl WholeTensor {
    /// The rows that the indices name, in ``out`` or in a new array of the framework that the indices belong to.
    ///
    /// Indices are a tensor of torch, an array of numpy or of another framework, an int, or a list, tuple or range of ints. Indices
    /// of torch give a tensor of torch, on torch's current stream if no ``stream`` is given; indices of numpy give an array of
    /// numpy; others give an :class:`Array`, and so does numpy where it has no type like the tensor's. No stream of torch waits for
    /// another ``stream``: the caller orders them.
    ///
    /// If the tensor is on a GPU, indices in host memory are copied there, and an array of numpy is copied back: each is one copy,
    /// for which the call waits. Tensors of torch are not copied: one on another device raises.
    ///
    /// Rows are moved in no order: none may lie where ``out`` is, if that is a part of a tensor itself.
    ///
    /// Elements are converted where ``dtype`` or ``convert`` asks for it: floats to floats, integers to integers. An
    /// index that names no row raises :class:`~wholemem.errors.BadIndex`, of a GPU's work in the next call or in
    /// :meth:`check`; its row is zero, and nothing else is touched. With ``skip_bad`` nothing is raised.
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
            // The work has run: what it met with need not wait for the next call.
            self.rows.check().raised()?;
        }
        Ok(out)
    }

    /// Writes rows to where the indices say. Other ranks see them behind the next ``barrier``.
    ///
    /// Indices are what :meth:`gather` takes, and come first there and here. If the tensor is on a GPU, indices and rows in host
    /// memory are copied there, and the call waits for the copies; tensors of torch are not.
    ///
    /// Rows are moved in no order: none may go where ``array`` is, if that is a part of a tensor itself.
    ///
    /// Where several go to one place, the order ``fixed`` leaves the last of the last rank, and is a call of all ranks.
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

    /// Adds rows to where the indices say. With the order ``fixed``, and at the ``host``, it is a call of all ranks.
    ///
    /// Its arguments are those of :meth:`scatter`.
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

    /// An array that is read, copied to the device if the framework's arrays are.
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

/// How many ints are read between two looks at whether the caller is interrupted.
const CHECKED_EVERY: usize = 1 << 16;

/// Indices as a view: those of an array, or of ints.
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
        let message = format!("{count} indices were {written} when they were read");
        return Err(Raised::new("WrongValue", message).hint("do not change them meanwhile").into());
    }
    Ok(view)
}

/// An index that is an int, or can stand for one; truth values cannot.
fn index_of(given: &Bound<'_, PyAny>) -> PyResult<i64> {
    if !given.is_instance_of::<PyBool>() {
        match given.extract::<i64>() {
            Ok(index) => return Ok(index),
            Err(error) if error.is_instance_of::<PyOverflowError>(given.py()) => {
                let message = format!("no row has the index {given}");
                return Err(Raised::new("WrongValue", message).into());
            }
            Err(_) => {}
        }
    }
    let message = format!("an index is a `{}`", given.get_type().name()?);
    Err(Raised::new("WrongType", message).hint("give ints, or one array of indices").into())
}

/// An order by its name.
pub(crate) fn order_of(name: &str) -> Result<Order, Raised> {
    match name {
        "any" => Ok(Order::Any),
        "fixed" => Ok(Order::Fixed),
        _ => Err(Raised::new("WrongValue", format!("no order is called `{name}`"))
            .hint("it is `any`, or `fixed`: the same in every run, and a call of all ranks")),
    }
}

/// An error unless an output holds what was asked for, if anything was.
fn check_asked(asked: Option<Element>, given: Element) -> Result<(), Raised> {
    match asked {
        Some(asked) if asked != given => {
            let message = format!("the output holds {}, and {} was asked for", given.name, asked.name);
            Err(Raised::new("WrongValue", message).hint("leave out `dtype`"))
        }
        _ => Ok(()),
    }
}
