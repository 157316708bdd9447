//! `wholemem.WholeTensor`: a table whose rows are divided among ranks.

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

use crate::array::{Array, DlDevice, Element, Layout, View};
use crate::communicator::{CommState, Communicator};
use crate::error::{Exception, IntoPyResult};
use crate::handle::Handle;
use crate::number::{Shape, signed, unsigned};
use crate::raw_tensor::RawTensor;
use crate::stream::CallStream;
use crate::wait::run_blocking;

/// A table: a tensor whose rows are divided among ranks. Each rank stores its own rows and can access all rows.
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
    /// The shape of one row of the table.
    pub(crate) row_shape: Vec<i64>,
    /// The element type of the arrays that contain rows of the table.
    pub(crate) element: Element,
    pub(crate) state: Arc<CommState>,
    /// The `ElementRef` of the table in pinned memory, through which CUDA kernels of users access the table.
    reference: OnceLock<PinnedBuffer>,
    handle: Handle,
}

impl WholeTensor {
    fn new(rows: wholemem::WholeTensor, element: Element, state: Arc<CommState>) -> Self {
        let row_shape = rows.shape().iter().skip(1).map(|len| signed(to_usize(*len))).collect();
        Self { rows, row_shape, element, state, reference: OnceLock::new(), handle: Handle::default() }
    }

    /// Returns the shape of an array of rows: the given outer shape, followed by the shape of one row.
    pub(crate) fn shape_of(&self, rows: &[i64]) -> Vec<i64> {
        [rows, &self.row_shape].concat()
    }

    /// Returns rows of the table that are in one range of addresses as an array.
    fn array(&self, rows: Option<LocalRows>) -> Result<Array, Exception> {
        let Some(LocalRows { rows, span, stride }) = rows else {
            return Ok(Array::new(View::zeroed(Layout::contiguous(self.element, &self.shape_of(&[0]))?)?));
        };
        let count = signed(to_usize(rows.end - rows.start));
        let mut layout = Layout::contiguous(self.element, &self.shape_of(&[count]))?;
        if count > 1 {
            layout.strides[0] = signed(stride / self.element.len());
        }
        let device = self.state.comm.device();
        let dl_device = match self.rows.memory().location() {
            Location::Host => DlDevice::pinned_for(device),
            _ => DlDevice::of(device),
        };
        Ok(Array::new(View::of_span(span, dl_device, layout)?))
    }
}

fn kind_of(name: &str) -> Result<Kind, Exception> {
    match name {
        "continuous" => Ok(Kind::Continuous),
        "chunked" => Ok(Kind::Chunked),
        _ => Err(Exception::new("WrongValue", format!("the kind `{name}` does not exist"))
            .hint("use `continuous` (one range of addresses) or `chunked` (one range for each rank)")),
    }
}

fn location_of(name: &str) -> Result<Location, Exception> {
    match name {
        "device" => Ok(Location::Device),
        "host" | "cpu" => Ok(Location::Host),
        _ => Err(Exception::new("WrongValue", format!("the location `{name}` does not exist"))
            .hint("use `device` (the device of each rank) or `host`")),
    }
}

#[pymethods]
impl WholeTensor {
    /// Creates a table filled with zeros. Every rank must call this method with the same arguments.
    ///
    /// Args:
    ///     comm: The communicator.
    ///     shape: The shape, rows first.
    ///     dtype: The element type: a name such as ``float32``, or a dtype of numpy or torch.
    ///     kind: ``continuous`` has one range of addresses, ``chunked`` one range for each rank.
    ///     location: ``device`` is the device of each rank, ``host`` is host memory.
    ///     rows_of_each: The number of rows of each rank. ``None`` divides them evenly.
    ///     equal_addresses: Whether the table has the same address on all ranks.
    ///
    /// Returns:
    ///     The table.
    ///
    /// Raises:
    ///     wholemem.errors.OutOfMemory: The memory cannot be allocated on a rank.
    ///     wholemem.errors.RanksDisagree: Ranks passed different arguments.
    ///     wholemem.errors.WrongType: Tables cannot store the element type.
    ///     wholemem.errors.WrongValue: The shape, kind, location or partition is invalid.
    #[classmethod]
    #[pyo3(signature = (comm, shape, dtype, *, kind="continuous", location="device", rows_of_each=None, equal_addresses=false))]
    #[expect(clippy::too_many_arguments, reason = "Python passes them by keyword")]
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
        let state = comm.state().into_py()?;
        let (kind, location) = (kind_of(kind).into_py()?, location_of(location).into_py()?);
        let spec = TensorSpec {
            dtype: dtype.table_dtype().into_py()?,
            shape: shape.0,
            kind,
            location,
            rows_of_each: rows_of_each.map(|rows| rows.0),
            equal_addresses,
        };
        let rows = run_blocking(py, || wholemem::WholeTensor::create(&state.comm, &spec))?;
        Ok(Self::new(rows, dtype, state))
    }

    /// Creates a table from a file: a saved table, a ``.npy`` file or a tensor of a ``.safetensors`` file.
    ///
    /// All ranks call it; each reads its own rows.
    ///
    /// Args:
    ///     comm: The communicator.
    ///     path: The file, or the folder of a saved table.
    ///     name: The tensor in a ``.safetensors`` file.
    ///     kind: ``continuous`` has one range of addresses, ``chunked`` one range for each rank.
    ///     location: ``device`` is the device of each rank, ``host`` is host memory.
    ///     rows_of_each: The number of rows of each rank. ``None`` divides them evenly.
    ///
    /// Returns:
    ///     The table.
    ///
    /// Raises:
    ///     wholemem.errors.BadFile: The file cannot be read, is invalid, or changed while it was read.
    ///     wholemem.errors.OutOfMemory: The memory cannot be allocated on a rank.
    ///     wholemem.errors.RanksDisagree: The file was replaced, and ranks opened different versions; or ranks passed different
    ///         arguments.
    #[classmethod]
    #[pyo3(signature = (comm, path, *, name=None, kind="continuous", location="device", rows_of_each=None))]
    #[expect(clippy::too_many_arguments, reason = "Python passes them by keyword")]
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
        let state = comm.state().into_py()?;
        let source = match name {
            Some(name) => FileSource::tensor(path, name),
            None => FileSource::new(path),
        };
        let (kind, location) = (kind_of(kind).into_py()?, location_of(location).into_py()?);
        let spec = LoadSpec { kind, location, rows_of_each: rows_of_each.map(|rows| rows.0) };
        let rows = run_blocking(py, || {
            wholemem::WholeTensor::load(&state.comm, &source, &spec, &unless_interrupted)
        })?;
        let element = Element::of(rows.dtype());
        Ok(Self::new(rows, element, state))
    }

    /// Saves the table as a folder, which appears only when it is completely written. Every rank must call this method.
    ///
    /// Args:
    ///     path: The folder.
    ///     overwrite: Whether to replace an existing saved table.
    ///
    /// Raises:
    ///     wholemem.errors.BadFile: The folder exists or cannot be written.
    #[pyo3(signature = (path, *, overwrite=false))]
    fn save(&self, py: Python<'_>, path: PathBuf, overwrite: bool) -> PyResult<()> {
        run_blocking(py, || self.rows.save(&path, SaveSpec { overwrite }, &unless_interrupted))
    }

    /// Creates a zeroed table with the shape, type, kind, location and partition of this table. Every rank must call this
    /// method.
    ///
    /// Returns:
    ///     The new table.
    ///
    /// Raises:
    ///     wholemem.errors.OutOfMemory: The memory cannot be allocated on a rank.
    fn like(&self, py: Python<'_>) -> PyResult<Self> {
        let rows = run_blocking(py, || self.rows.like())?;
        Ok(Self::new(rows, self.element, Arc::clone(&self.state)))
    }

    /// Waits until all ranks have called this method, and makes their earlier writes to the table visible to all ranks.
    ///
    /// Args:
    ///     stream: The CUDA stream whose earlier work is included. ``None`` is the default stream.
    ///
    /// Raises:
    ///     wholemem.errors.PeerLost: A rank exited.
    ///     wholemem.errors.Timeout: A rank did not call in time.
    #[pyo3(signature = (*, stream=None))]
    fn barrier(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let on = CallStream::of(&self.state, stream)?;
        run_blocking(py, || -> Result<(), Exception> {
            on.finish()?;
            Ok(self.state.comm.barrier_on(&on.stream)?)
        })
    }

    /// The shape of the table: the length of each dimension, rows first.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.rows.shape())
    }

    /// The stride of each dimension of the table, in elements.
    #[getter]
    fn stride<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let mut strides = Layout::contiguous(self.element, &self.shape_of(&[1])).into_py()?.strides;
        strides[0] = signed(self.rows.stride() / self.element.len());
        PyTuple::new(py, strides)
    }

    /// The name of the table's element type, as in numpy.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.element.name
    }

    /// The kind of the table: ``continuous`` (one range of addresses for all rows) or ``chunked`` (one range for each
    /// rank's rows).
    #[getter]
    fn kind(&self) -> String {
        self.rows.memory().kind().to_string()
    }

    /// The location of the table's rows: ``device`` memory or ``host`` memory.
    #[getter]
    fn location(&self) -> String {
        self.rows.memory().location().to_string()
    }

    /// The device with which this rank accesses the rows of the table.
    #[getter]
    fn device(&self) -> String {
        DlDevice::of(self.state.comm.device()).to_string()
    }

    /// The integer handle by which torch operators refer to this table: see ``wholemem._handles``.
    #[getter(_handle)]
    fn handle(slf: &Bound<'_, Self>) -> PyResult<u64> {
        slf.get().handle.of(slf)
    }

    /// The range of the table's rows that this rank stores: the first row, and one past the last row.
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

    /// Returns all rows to numpy without a copy if the table is continuous and in host memory; otherwise raises. Does not
    /// wait for work on a GPU: call ``barrier`` first.
    #[pyo3(signature = (*arguments, **named))]
    fn __array__<'py>(
        &self,
        py: Python<'py>,
        arguments: &Bound<'py, PyTuple>,
        named: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        Array::__array__(&Bound::new(py, self.all()?)?, arguments, named)
    }

    /// Returns an array of the table's rows that this rank stores, without a copy.
    fn local(&self) -> PyResult<Array> {
        self.array(self.rows.local()).into_py()
    }

    /// Returns an array of the table's rows that another rank stores, without a copy. This rank accesses them directly.
    ///
    /// Args:
    ///     rank: The rank.
    ///
    /// Returns:
    ///     An array that shares the memory.
    ///
    /// Raises:
    ///     wholemem.errors.WrongValue: The rank does not exist.
    fn rows_of(&self, #[pyo3(from_py_with = unsigned)] rank: u32) -> PyResult<Array> {
        self.array(self.rows.rows_of(Rank(rank)).into_py()?).into_py()
    }

    /// Returns an array of all rows of a continuous table, without a copy.
    ///
    /// Raises:
    ///     wholemem.errors.WrongValue: The table is chunked.
    fn all(&self) -> PyResult<Array> {
        let all = self.rows.all_rows().map_err(|error| {
            Exception::from(error)
                .hint("a chunked table is not one range of addresses: use `rows_of` for each rank")
        });
        self.array(all.into_py()?).into_py()
    }

    /// Returns a range of this table's rows as a table that shares the memory of this table.
    ///
    /// Args:
    ///     start: The first row.
    ///     stop: One past the last row.
    ///
    /// Raises:
    ///     wholemem.errors.WrongValue: The range is not inside the table.
    fn rows(
        &self,
        #[pyo3(from_py_with = unsigned)] start: u64,
        #[pyo3(from_py_with = unsigned)] stop: u64,
    ) -> PyResult<Self> {
        Ok(Self::new(self.rows.rows(start..stop).into_py()?, self.element, Arc::clone(&self.state)))
    }

    /// Returns a range of this table's columns (the second dimension) as a table that shares the memory of this table.
    ///
    /// Args:
    ///     start: The first column.
    ///     stop: One past the last column.
    ///
    /// Raises:
    ///     wholemem.errors.WrongValue: The range is not inside the table, or the table has one dimension.
    fn columns(
        &self,
        #[pyo3(from_py_with = unsigned)] start: u64,
        #[pyo3(from_py_with = unsigned)] stop: u64,
    ) -> PyResult<Self> {
        Ok(Self::new(self.rows.columns(start..stop).into_py()?, self.element, Arc::clone(&self.state)))
    }

    /// Copies the rows of an array to consecutive rows of the table.
    ///
    /// Args:
    ///     first: The first row of the table.
    ///     array: The rows, contiguous and of the table's element type, on this rank's device.
    ///     stream: The CUDA stream of the copy. ``None`` is the default stream.
    ///
    /// Raises:
    ///     wholemem.errors.WrongStride: The array is not contiguous.
    ///     wholemem.errors.WrongType: The element types differ.
    ///     wholemem.errors.WrongValue: The shape differs, or the rows are not inside the table.
    #[pyo3(signature = (first, array, *, stream=None))]
    fn write(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = unsigned)] first: u64,
        array: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let on = CallStream::of(&self.state, stream)?;
        let span = self.import_rows(&on, array, "the array", Rights::Read)?;
        match span {
            Some(span) => run_blocking(py, || self.rows.copy_rows_in(&on.stream, first, &span)),
            None => Ok(()),
        }
    }

    /// Copies consecutive rows of the table to an array.
    ///
    /// Args:
    ///     first: The first row of the table.
    ///     out: The output, contiguous and of the table's element type, on this rank's device.
    ///     stream: The CUDA stream of the copy. ``None`` is the default stream.
    ///
    /// Raises:
    ///     wholemem.errors.WrongStride: The output is not contiguous.
    ///     wholemem.errors.WrongType: The element types differ.
    ///     wholemem.errors.WrongValue: The shape differs, or the rows are not inside the table.
    #[pyo3(signature = (first, out, *, stream=None))]
    fn read(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = unsigned)] first: u64,
        out: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let on = CallStream::of(&self.state, stream)?;
        let span = self.import_rows(&on, out, "the output", Rights::ReadWrite)?;
        match span {
            Some(span) => run_blocking(py, || self.rows.copy_rows_out(&on.stream, first, &span)),
            None => Ok(()),
        }
    }

    /// Maps all rows of the table into the page table of this process, as huge pages if the kernel supports them.
    ///
    /// Call it after the rows are written and before gathers from host memory. It has no effect on GPU memory.
    fn populate(&self, py: Python<'_>) -> PyResult<()> {
        run_blocking(py, || self.rows.memory().populate())
    }

    /// Raises an error if finished work on the table had an index outside the table.
    ///
    /// Raises:
    ///     wholemem.errors.BadIndex: An index was outside the table.
    fn check(&self) -> PyResult<()> {
        self.rows.check().into_py()
    }

    /// Returns the address of a ``wholemem::ElementRef``, through which CUDA kernels of users access the elements of this
    /// table.
    ///
    /// A ``PtrGen`` of it computes the addresses of elements, also for a table that is a range of rows and columns. The address
    /// is valid while this object lives.
    fn reference_ptr(&self) -> PyResult<u64> {
        let reference = match self.reference.get() {
            Some(reference) => reference,
            None => {
                let elements = self.rows.element_ref();
                let bytes = elements.as_bytes();
                let buffer = PinnedBuffer::create(self.state.comm.device(), bytes.len()).into_py()?;
                buffer.bytes().into_py()?.write_at(0, bytes).into_py()?;
                self.reference.get_or_init(|| buffer)
            }
        };
        Ok(reference.all().address())
    }
}

impl WholeTensor {
    /// Imports an array of contiguous rows with the row shape and type of this table. Returns `None` if the array has no
    /// elements.
    fn import_rows(
        &self,
        on: &CallStream,
        object: &Bound<'_, PyAny>,
        argument: &str,
        rights: Rights,
    ) -> PyResult<Option<wholemem_hal::Span>> {
        let view = on.import(object)?;
        let rows = RawTensor::of(&view);
        rows.check_dtype(argument, self.element, "the tensor").into_py()?;
        rows.check_shape(argument, rows.shape.get(..1).unwrap_or(&[0]), &self.row_shape).into_py()?;
        rows.check_contiguous(argument, rights).into_py()?;
        let span = rows.span(argument, &self.state, rights).into_py()?;
        Ok((!span.is_empty()).then_some(span))
    }
}

/// Ends the load or save of a table if a signal handler has raised an exception.
fn unless_interrupted(_: wholemem::files::CopyProgress) -> std::ops::ControlFlow<()> {
    if is_interrupted() { std::ops::ControlFlow::Break(()) } else { std::ops::ControlFlow::Continue(()) }
}
