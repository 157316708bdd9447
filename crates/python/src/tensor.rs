//! Elements over many ranks: see `wholemem.WholeTensor` in Python.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple, PyType};
use wholemem::files::{FileSource, LoadSpec, SaveSpec};
use wholemem::{Kind, LocalRows, Location, Rank, TensorSpec};
use wholemem_hal::{PinnedBuffer, Rights};
use wholemem_os::interrupt::is_interrupted;
use wholemem_os::width::to_usize;
use zerocopy::IntoBytes;

use crate::array::{Array, Element, Layout, Place, View};
use crate::communicator::{CommState, Communicator};
use crate::error::{Raised, Raises};
use crate::handle::Handle;
use crate::number::{Shape, natural, signed};
use crate::raw_tensor::RawTensor;
use crate::stream::CallStream;
use crate::wait::waiting;

/// A tensor whose rows are divided among ranks: each stores its own, and reaches all.
///
/// >>> import numpy, wholemem
/// >>> (comm,) = wholemem.Communicator.local(1, device="cpu")
/// >>> table = wholemem.WholeTensor.create(comm, (1000, 4), "float32")
/// >>> table.scatter_add([7, 7], numpy.ones((2, 4), "float32"))
/// >>> table.gather(numpy.array([7, 8]))
/// array([[2., 2., 2., 2.],
///        [0., 0., 0., 0.]], dtype=float32)
#[pyclass(frozen, weakref, module = "wholemem")]
#[derive(Debug)]
pub(crate) struct WholeTensor {
    pub(crate) rows: wholemem::WholeTensor,
    /// The shape of one row.
    pub(crate) row_shape: Vec<i64>,
    /// What the elements are to Python; the tensor below may only know how long they are.
    pub(crate) element: Element,
    pub(crate) state: Arc<CommState>,
    /// What kernels find rows by, where they can read it.
    reference: OnceLock<PinnedBuffer>,
    handle: Handle,
}

impl WholeTensor {
    fn new(rows: wholemem::WholeTensor, element: Element, state: Arc<CommState>) -> Self {
        let row_shape = rows.shape().iter().skip(1).map(|len| signed(to_usize(*len))).collect();
        Self { rows, row_shape, element, state, reference: OnceLock::new(), handle: Handle::default() }
    }

    /// The shape of some of its rows.
    pub(crate) fn shape_of(&self, rows: &[i64]) -> Vec<i64> {
        [rows, &self.row_shape].concat()
    }

    /// Rows that are one range of addresses, as an array.
    fn array(&self, found: Option<LocalRows>) -> Result<Array, Raised> {
        let Some(LocalRows { rows, span, stride }) = found else {
            return Ok(Array::new(View::zeroed(Layout::contiguous(self.element, &self.shape_of(&[0]))?)?));
        };
        let count = signed(to_usize(rows.end - rows.start));
        let mut layout = Layout::contiguous(self.element, &self.shape_of(&[count]))?;
        if count > 1 {
            layout.strides[0] = signed(stride / self.element.len());
        }
        let device = self.state.comm.device();
        let place = match self.rows.memory().location() {
            Location::Host => Place::beside(device),
            _ => Place::of(device),
        };
        Ok(Array::new(View::of_span(span, place, layout)?))
    }
}

fn kind_of(name: &str) -> Result<Kind, Raised> {
    match name {
        "continuous" => Ok(Kind::Continuous),
        "chunked" => Ok(Kind::Chunked),
        _ => Err(Raised::new("WrongValue", format!("no kind of memory is called `{name}`"))
            .hint("it is `continuous`: one range of addresses, or `chunked`: one for each rank")),
    }
}

fn location_of(name: &str) -> Result<Location, Raised> {
    match name {
        "device" => Ok(Location::Device),
        "host" | "cpu" => Ok(Location::Host),
        _ => Err(Raised::new("WrongValue", format!("memory is not at `{name}`"))
            .hint("it is at the `device` of each rank, or at the `host`")),
    }
}

#[pymethods]
impl WholeTensor {
    /// Makes a tensor, zero. All ranks call it with the same arguments.
    ///
    /// ``kind`` is ``continuous``, one range of addresses, or ``chunked``, one for each rank. ``location`` is the
    /// ``device`` of each rank, or the ``host``. Rows are shared out evenly, or as ``rows_of_each`` says.
    #[classmethod]
    #[pyo3(signature = (comm, shape, dtype, *, kind="continuous", location="device", rows_of_each=None, equal_addresses=false))]
    #[expect(clippy::too_many_arguments, reason = "they have names in Python")]
    fn create(
        _class: &Bound<'_, PyType>,
        py: Python<'_>,
        comm: &Communicator,
        shape: Shape,
        dtype: Element,
        kind: &str,
        location: &str,
        rows_of_each: Option<Shape>,
        equal_addresses: bool,
    ) -> PyResult<Self> {
        let state = comm.state().raised()?;
        let (kind, location) = (kind_of(kind).raised()?, location_of(location).raised()?);
        let spec = TensorSpec {
            dtype: dtype.stored().raised()?,
            shape: shape.0,
            kind,
            location,
            rows_of_each: rows_of_each.map(|rows| rows.0),
            equal_addresses,
        };
        let rows = waiting(py, || wholemem::WholeTensor::create(&state.comm, &spec))?;
        Ok(Self::new(rows, dtype, state))
    }

    /// Makes a tensor of a file: of what was saved, of a ``.npy``, or of a ``.safetensors``, where ``name`` says which.
    ///
    /// All ranks call it; each reads the rows that it has. If the file is replaced between two ranks, all of them raise
    /// :class:`~wholemem.errors.RanksDisagree`; if it is written while it is read, :class:`~wholemem.errors.BadFile`.
    #[classmethod]
    #[pyo3(signature = (comm, path, *, name=None, kind="continuous", location="device", rows_of_each=None))]
    #[expect(clippy::too_many_arguments, reason = "they have names in Python")]
    fn load(
        _class: &Bound<'_, PyType>,
        py: Python<'_>,
        comm: &Communicator,
        path: PathBuf,
        name: Option<&str>,
        kind: &str,
        location: &str,
        rows_of_each: Option<Shape>,
    ) -> PyResult<Self> {
        let state = comm.state().raised()?;
        let source = match name {
            Some(name) => FileSource::tensor(path, name),
            None => FileSource::new(path),
        };
        let (kind, location) = (kind_of(kind).raised()?, location_of(location).raised()?);
        let spec = LoadSpec { kind, location, rows_of_each: rows_of_each.map(|rows| rows.0) };
        let rows =
            waiting(py, || wholemem::WholeTensor::load(&state.comm, &source, &spec, &unless_interrupted))?;
        let element = Element::of(rows.dtype());
        Ok(Self::new(rows, element, state))
    }

    /// Saves the tensor as a folder, which appears when it is complete. All ranks call it.
    #[pyo3(signature = (path, *, overwrite=false))]
    fn save(&self, py: Python<'_>, path: PathBuf, overwrite: bool) -> PyResult<()> {
        waiting(py, || self.rows.save(&path, SaveSpec { overwrite }, &unless_interrupted))
    }

    /// Makes a tensor like this one, zero. All ranks call it.
    fn like(&self, py: Python<'_>) -> PyResult<Self> {
        let rows = waiting(py, || self.rows.like())?;
        Ok(Self::new(rows, self.element, Arc::clone(&self.state)))
    }

    /// Waits until all ranks are here, and what they have done to it so far, on that stream too, can be seen by all.
    #[pyo3(signature = (*, stream=None))]
    fn barrier(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let on = CallStream::of(&self.state, stream)?;
        waiting(py, || -> Result<(), Raised> {
            on.finish()?;
            Ok(self.state.comm.barrier_on(&on.stream)?)
        })
    }

    /// How many elements there are in each dimension, rows first.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.rows.shape())
    }

    /// How many elements lie from one to the next in each dimension.
    #[getter]
    fn stride<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let mut strides = Layout::contiguous(self.element, &self.shape_of(&[1])).raised()?.strides;
        strides[0] = signed(self.rows.stride() / self.element.len());
        PyTuple::new(py, strides)
    }

    /// The type of the elements, by numpy's name.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.element.name
    }

    /// ``continuous`` or ``chunked``.
    #[getter]
    fn kind(&self) -> String {
        self.rows.memory().kind().to_string()
    }

    /// ``device`` or ``host``.
    #[getter]
    fn location(&self) -> String {
        self.rows.memory().location().to_string()
    }

    /// The device by which this rank reaches the rows.
    #[getter]
    fn device(&self) -> String {
        Place::of(self.state.comm.device()).to_string()
    }

    /// The number by which torch's operators find this object: see ``wholemem._handles``.
    #[getter(_handle)]
    fn handle(slf: &Bound<'_, Self>) -> PyResult<u64> {
        slf.get().handle.of(slf)
    }

    /// The first of this rank's rows, and the one behind the last.
    #[getter]
    fn local_rows(&self) -> (u64, u64) {
        self.rows.local().map_or((0, 0), |local| (local.rows.start, local.rows.end))
    }

    fn __len__(&self) -> usize {
        to_usize(self.rows.row_count())
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let (shape, dtype, kind) = (self.shape(py)?, self.element.name, self.kind());
        Ok(format!("WholeTensor(shape={shape}, dtype={dtype}, kind={kind}, location={})", self.location()))
    }

    /// Called by numpy: all rows without a copy, if they are one range of addresses in host memory, as those of a continuous
    /// tensor are; any other tensor raises. It does not wait for work on a GPU: call ``barrier`` first.
    #[pyo3(signature = (*arguments, **named))]
    fn __array__<'py>(
        &self,
        py: Python<'py>,
        arguments: &Bound<'py, PyTuple>,
        named: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        Array::__array__(&Bound::new(py, self.all()?)?, arguments, named)
    }

    /// This rank's rows, without a copy.
    fn local(&self) -> PyResult<Array> {
        self.array(self.rows.local()).raised()
    }

    /// A rank's rows, as this rank reaches them, without a copy.
    fn rows_of(&self, #[pyo3(from_py_with = natural)] rank: u32) -> PyResult<Array> {
        self.array(self.rows.rows_of(Rank(rank)).raised()?).raised()
    }

    /// All rows, without a copy: of a continuous tensor.
    fn all(&self) -> PyResult<Array> {
        let all = self.rows.all_rows().map_err(|error| {
            Raised::from(error)
                .hint("rows of several chunks are no array: take those of each rank by `rows_of`")
        });
        self.array(all.raised()?).raised()
    }

    /// Some of the rows, as a tensor.
    fn rows(
        &self,
        #[pyo3(from_py_with = natural)] start: u64,
        #[pyo3(from_py_with = natural)] stop: u64,
    ) -> PyResult<Self> {
        Ok(Self::new(self.rows.rows(start..stop).raised()?, self.element, Arc::clone(&self.state)))
    }

    /// Some of the columns, as a tensor: a range of the second dimension.
    fn columns(
        &self,
        #[pyo3(from_py_with = natural)] start: u64,
        #[pyo3(from_py_with = natural)] stop: u64,
    ) -> PyResult<Self> {
        Ok(Self::new(self.rows.columns(start..stop).raised()?, self.element, Arc::clone(&self.state)))
    }

    /// Copies the rows of an array to the rows from ``first`` on.
    #[pyo3(signature = (first, array, *, stream=None))]
    fn write(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = natural)] first: u64,
        array: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let on = CallStream::of(&self.state, stream)?;
        let span = self.whole_rows(&on, array, "the array", Rights::Read)?;
        match span {
            Some(span) => waiting(py, || self.rows.copy_rows_in(&on.stream, first, &span)),
            None => Ok(()),
        }
    }

    /// Copies the rows from ``first`` on to the rows of an array.
    #[pyo3(signature = (first, out, *, stream=None))]
    fn read(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = natural)] first: u64,
        out: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let on = CallStream::of(&self.state, stream)?;
        let span = self.whole_rows(&on, out, "the output", Rights::ReadWrite)?;
        match span {
            Some(span) => waiting(py, || self.rows.copy_rows_out(&on.stream, first, &span)),
            None => Ok(()),
        }
    }

    /// Enters all rows into the page table of this process at once, as large pages where the kernel can: worth it once they
    /// are written, before gathering from host memory. On a GPU's there is nothing to do.
    fn populate(&self, py: Python<'_>) -> PyResult<()> {
        waiting(py, || self.rows.memory().populate())
    }

    /// Raises :class:`~wholemem.errors.BadIndex` if work that has run met an index that names no row.
    fn check(&self) -> PyResult<()> {
        self.rows.check().raised()
    }

    /// The address of the ``wholemem::ElementRef`` by which kernels find rows and elements, also those of a view of some rows
    /// and columns: a ``PtrGen`` made of it visits the elements of this tensor. It is good as long as this lives.
    fn reference_ptr(&self) -> PyResult<u64> {
        let reference = match self.reference.get() {
            Some(reference) => reference,
            None => {
                let elements = self.rows.element_ref();
                let bytes = elements.as_bytes();
                let buffer = PinnedBuffer::create(self.state.comm.device(), bytes.len()).raised()?;
                buffer.bytes().raised()?.write_at(0, bytes).raised()?;
                self.reference.get_or_init(|| buffer)
            }
        };
        Ok(reference.all().address())
    }
}

impl WholeTensor {
    /// An array of whole contiguous rows, of this tensor's elements; `None` if it has none.
    fn whole_rows(
        &self,
        on: &CallStream,
        given: &Bound<'_, PyAny>,
        what: &str,
        rights: Rights,
    ) -> PyResult<Option<wholemem_hal::Span>> {
        let view = on.take(given)?;
        let rows = RawTensor::of(&view);
        rows.check_dtype(what, self.element, "the tensor").raised()?;
        rows.check_shape(what, rows.shape.get(..1).unwrap_or(&[0]), &self.row_shape).raised()?;
        rows.check_contiguous(what, rights).raised()?;
        let span = rows.span(what, &self.state, rights).raised()?;
        Ok((!span.is_empty()).then_some(span))
    }
}

/// Goes on until a signal's handler has raised.
fn unless_interrupted(_: wholemem::files::CopyProgress) -> std::ops::ControlFlow<()> {
    if is_interrupted() { std::ops::ControlFlow::Break(()) } else { std::ops::ControlFlow::Continue(()) }
}
