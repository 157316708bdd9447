//! Rows moved by their indices: the gathers and scatters of a `WholeTensor`.
//!
//! Every way to them ends in [`WholeTensor::gather_operands`] or [`WholeTensor::scatter_operands`], which check, and in
//! [`WholeTensor::gather_rows`] or [`WholeTensor::scatter_rows`], which run or enqueue the work.

use pyo3::prelude::*;
use wholemem::{Indices, OnBadIndex, Order, RowBuffer};
use wholemem_hal::{Rights, Stream};

use crate::array::{Array, Element, Layout};
use crate::error::{Raised, Raises};
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
        let indices = self.index_arg(indices, skip_bad)?;
        let rows = self.row_operand(rows, "the array of rows", indices.shape, Rights::Read, convert)?;
        Ok((indices, rows))
    }

    fn index_arg<'a>(&self, given: &RawTensor<'a>, skip_bad: bool) -> Result<IndexArg<'a>, Raised> {
        let what = "the array of indices";
        if !given.dtype.is_index() {
            let message = format!("indices are int32 or int64, and not {}", given.dtype.name);
            return Err(Raised::new("WrongType", message).hint("convert them to int64"));
        }
        given.check_contiguous(what, Rights::Read)?;
        let span = given.span(what, &self.state, Rights::Read)?;
        let indices = if given.dtype.len() == 8 { Indices::i64(span) } else { Indices::i32(span) };
        let on_bad = if skip_bad { OnBadIndex::Skip } else { OnBadIndex::Note };
        Ok(IndexArg { indices: indices.on_bad(on_bad), shape: given.shape })
    }

    /// A row for each index of an array of this shape.
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
    /// The rows that the indices name, in ``out`` or in a new :class:`Array`.
    ///
    /// They are moved in no order: none may lie where ``out`` is, if that is a part of a tensor itself.
    ///
    /// Elements are converted where ``dtype`` or ``convert`` asks for it: floats to floats, integers to integers. An
    /// index that names no row raises :class:`~wholemem.errors.BadIndex`, of a GPU's work in the next call or in
    /// :meth:`check`; its row is zero, and nothing else is touched. With ``skip_bad`` nobody is told.
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
        let on = CallStream::of(&self.state, stream)?;
        let indices = on.take(indices)?;
        let out = match out {
            Some(out) => out,
            None => {
                let shape = self.shape_of(&indices.layout.shape);
                let layout = Layout::contiguous(dtype.unwrap_or(self.element), &shape).raised()?;
                Bound::new(py, Array::new(self.state.make(layout).raised()?))?.into_any()
            }
        };
        let rows = on.take(&out)?;
        check_asked(dtype, rows.layout.element).raised()?;
        let (indices, rows) = (RawTensor::of(&indices), RawTensor::of(&rows));
        let (indices, rows) =
            self.gather_operands(&indices, &rows, convert || dtype.is_some(), skip_bad).raised()?;
        self.gather_rows(py, &on.stream, &indices.indices, &rows)?;
        Ok(out)
    }

    /// Writes rows to where the indices say. Other ranks see them behind the next ``barrier``.
    ///
    /// They are moved in no order: none may go where ``array`` is, if that is a part of a tensor itself.
    ///
    /// Where several go to one place, the order ``fixed`` leaves the last of the last rank, and is a call of all ranks.
    #[pyo3(signature = (array, indices, *, order="any", convert=false, skip_bad=false, stream=None))]
    #[expect(clippy::too_many_arguments, reason = "they have names in Python")]
    fn scatter(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        indices: &Bound<'_, PyAny>,
        order: &str,
        convert: bool,
        skip_bad: bool,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let how = Scatter { add: false, order: order_of(order).raised()? };
        self.scatter_arrays(py, indices, array, how, convert, skip_bad, stream)
    }

    /// Adds rows to where the indices say. With the order ``fixed``, and at the ``host``, it is a call of all ranks.
    #[pyo3(signature = (array, indices, *, order="any", convert=false, skip_bad=false, stream=None))]
    #[expect(clippy::too_many_arguments, reason = "they have names in Python")]
    fn scatter_add(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        indices: &Bound<'_, PyAny>,
        order: &str,
        convert: bool,
        skip_bad: bool,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let how = Scatter { add: true, order: order_of(order).raised()? };
        self.scatter_arrays(py, indices, array, how, convert, skip_bad, stream)
    }
}

impl WholeTensor {
    #[expect(clippy::too_many_arguments, reason = "they have names in Python")]
    fn scatter_arrays(
        &self,
        py: Python<'_>,
        indices: &Bound<'_, PyAny>,
        array: &Bound<'_, PyAny>,
        how: Scatter,
        convert: bool,
        skip_bad: bool,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let on = CallStream::of(&self.state, stream)?;
        let (indices, rows) = (on.take(indices)?, on.take(array)?);
        let (indices, rows) = (RawTensor::of(&indices), RawTensor::of(&rows));
        let (indices, rows) = self.scatter_operands(&indices, &rows, convert, skip_bad).raised()?;
        self.scatter_rows(py, &on.stream, &indices.indices, &rows, how)
    }
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
