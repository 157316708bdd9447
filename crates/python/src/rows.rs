//! Rows moved by their indices: the gathers and scatters of a `WholeTensor`.

use pyo3::prelude::*;
use wholemem::{Indices, OnBadIndex, Order, RowBuffer};
use wholemem_hal::Rights;

use crate::array::{Array, Element, Layout};
use crate::error::{Raised, Raises};
use crate::stream::Target;
use crate::tensor::WholeTensor;
use crate::wait::waiting;

/// Indices, and the shape they have.
struct Asked {
    indices: Indices,
    shape: Vec<i64>,
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
        let target = Target::of(&self.open, stream)?;
        let Asked { indices, shape } = self.asked(&target, indices, skip_bad)?;
        let out = match out {
            Some(out) => out,
            None => {
                let layout =
                    Layout::contiguous(dtype.unwrap_or(self.element), &self.shape_of(&shape)).raised()?;
                Bound::new(py, Array::new(self.open.make(layout).raised()?))?.into_any()
            }
        };
        let given = target.take(&out)?.layout.element;
        if let Some(asked) = dtype
            && asked != given
        {
            let message = format!("the output holds {}, and {} was asked for", given.name, asked.name);
            return Err(Raised::new("WrongValue", message).hint("leave out `dtype`").into());
        }
        let convert = convert || dtype.is_some();
        let rows = self.beside(&target, &out, "the output", &shape, Rights::ReadWrite, convert)?;
        let (table, on) = (&self.rows, &target.stream);
        if indices.count() > 0 {
            waiting(py, || {
                if target.runs_inline() {
                    table.gather_sync(on, &indices, &rows)
                } else {
                    table.gather(on, &indices, &rows)
                }
            })?;
        }
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
        let (target, order) = (Target::of(&self.open, stream)?, order_of(order).raised()?);
        let Asked { indices, shape } = self.asked(&target, indices, skip_bad)?;
        let rows = self.beside(&target, array, "the array", &shape, Rights::Read, convert)?;
        let (table, on) = (&self.rows, &target.stream);
        waiting(py, || {
            if target.runs_inline() {
                table.scatter_sync(on, &rows, &indices, order)
            } else {
                table.scatter(on, &rows, &indices, order)
            }
        })
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
        self.element.number().raised()?;
        let (target, order) = (Target::of(&self.open, stream)?, order_of(order).raised()?);
        let Asked { indices, shape } = self.asked(&target, indices, skip_bad)?;
        let rows = self.beside(&target, array, "the array", &shape, Rights::Read, convert)?;
        let (table, on) = (&self.rows, &target.stream);
        waiting(py, || {
            if target.runs_inline() {
                table.scatter_add_sync(on, &rows, &indices, order)
            } else {
                table.scatter_add(on, &rows, &indices, order)
            }
        })
    }
}

fn order_of(name: &str) -> Result<Order, Raised> {
    match name {
        "any" => Ok(Order::Any),
        "fixed" => Ok(Order::Fixed),
        _ => Err(Raised::new("WrongValue", format!("no order is called `{name}`"))
            .hint("it is `any`, or `fixed`: the same in every run, and a call of all ranks")),
    }
}

impl WholeTensor {
    fn asked(&self, target: &Target, given: &Bound<'_, PyAny>, skip_bad: bool) -> PyResult<Asked> {
        let view = target.take(given)?;
        view.layout.check_contiguous("the array of indices", Rights::Read).raised()?;
        let span = view.span("the array of indices", self.open.comm.device(), Rights::Read).raised()?;
        let indices = match view.layout.element.name {
            "int32" => Indices::i32(span),
            "int64" => Indices::i64(span),
            name => {
                let message = format!("indices are int32 or int64, and not {name}");
                return Err(Raised::new("WrongType", message).hint("convert them to int64").into());
            }
        };
        let on_bad = if skip_bad { OnBadIndex::Skip } else { OnBadIndex::Note };
        Ok(Asked { indices: indices.on_bad(on_bad), shape: view.layout.shape })
    }

    /// The rows that stand beside indices of some shape.
    fn beside(
        &self,
        target: &Target,
        given: &Bound<'_, PyAny>,
        what: &str,
        shape: &[i64],
        rights: Rights,
        convert: bool,
    ) -> PyResult<RowBuffer> {
        let view = target.take(given)?;
        view.layout.check_shape(what, &self.shape_of(shape)).raised()?;
        let element = view.layout.element;
        let span = view.span(what, self.open.comm.device(), rights).raised()?;
        let dense = if convert && element != self.element {
            // Both must be numbers, and of one kind.
            self.element.number().raised()?;
            RowBuffer::new(span, element.number().raised()?).converted()
        } else {
            self.check_element(what, element)?;
            RowBuffer::new(span, self.element.stored().raised()?)
        };
        if shape.len() == 1 {
            let rows = view.layout.rows(what, rights).raised()?;
            return Ok(dense.stride(rows.stride.max(rows.len)));
        }
        view.layout.check_contiguous(what, rights).raised()?;
        Ok(dense)
    }
}
