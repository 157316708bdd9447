//! Arrays: memory with a shape, an element type and an owner, imported and exported through DLPack and similar protocols.
//!
//! | module | content |
//! |---|---|
//! | `view` | the memory: address, device and owner |
//! | `layout`, `element` | shape and strides; element types |
//! | `dlpack` | import and export through `__dlpack__` |
//! | `exchange` | reads torch tensors through DLPack's C exchange API, without a Python object |
//! | `buffer` | import through the buffer protocol and numpy's array interfaces |
//! | `private` | copy-on-write exports of read-only objects |
//! | `strided` | reads the elements of an array with any strides in order |
//! | `values` | element access through numpy: indexing, numbers, comparison, printing |
//! | `stream_order` | the stream that used an array last, for which the next stream waits |
//!
//! Nothing is copied, except if a DLPack consumer requests a copy, and page by page if a framework writes to a read-only
//! object that it imported through DLPack. Every view and export of an array keeps its memory alive.

mod buffer;
mod dlpack;
mod element;
mod exchange;
mod layout;
mod private;
mod stream_order;
mod strided;
mod values;
mod view;

use std::sync::Arc;

use pyo3::exceptions::{PyAttributeError, PyBufferError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::pyclass::{PyTraverseError, PyVisit};
use pyo3::types::{PyDict, PyTuple};

pub(crate) use element::{Element, element_types};
pub(crate) use exchange::Exchange;
pub(crate) use layout::{Layout, are_contiguous, extent_of};
pub(crate) use stream_order::FrameworkStream;
pub(crate) use view::{DlDevice, Owner, View};

use crate::error::{Exception, IntoPyResult};
use crate::number::Shape;
use stream_order::LastStream;

/// An array: a view of memory that keeps the owner of the memory alive, and that every framework imports without a copy.
///
/// Ints and slices in ``[]`` select views, or a number. ``==``, ``bool``, iteration and printing require numpy. Values on a
/// GPU are copied to the host, and the call waits for the work that uses the array. An array on a GPU with more than 1 MiB is
/// printed without its values.
///
/// >>> import numpy, wholemem
/// >>> array = wholemem.zeros((2, 3), "float32")
/// >>> array.numpy()[1, 2] = 7
/// >>> array
/// Array([[0., 0., 0.],
///        [0., 0., 7.]], shape=(2, 3), dtype=float32, device=cpu)
/// >>> array[1, 2], array[:, 2].tolist()
/// (7.0, [0.0, 7.0])
/// >>> float(numpy.from_dlpack(array).sum())
/// 7.0
#[pyclass(frozen, module = "wholemem")]
#[derive(Debug)]
pub(crate) struct Array {
    view: View,
    last: LastStream,
    /// True if the user promised not to write to the array: a read-only array is then exported directly, as if it were writable.
    is_lent: bool,
}

impl Array {
    pub(crate) fn new(view: View) -> Self {
        Self { view, last: LastStream::default(), is_lent: false }
    }

    /// Returns the memory of the array, for work that the caller enqueues next on a stream. The stream waits for the array's last
    /// stream.
    pub(crate) fn use_on(&self, py: Python<'_>, stream: &FrameworkStream) -> Result<View, Exception> {
        if self.view.dl_device.is_cuda() {
            self.last.update(py, stream)?;
        }
        Ok(self.view.clone())
    }

    /// Returns the memory of the array, for work on the default stream of its device.
    fn on_default_stream(&self, py: Python<'_>) -> Result<View, Exception> {
        match self.last.get(py) {
            Some(last) => self.use_on(py, &FrameworkStream::default_of(last.device())),
            None => Ok(self.view.clone()),
        }
    }
}

/// Imports an array of any framework. `stream` is the stream on which a GPU will use the array.
pub(crate) fn import(object: &Bound<'_, PyAny>, stream: Option<i64>) -> PyResult<View> {
    if let Ok(array) = object.cast::<Array>() {
        return Ok(array.get().view.clone());
    }
    import_foreign(object, stream).map_err(|error| explain(object, error))
}

/// Converts an exception that another framework raised while exporting an array into an exception of wholemem.
fn explain(object: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
    let py = object.py();
    let is_foreign = error.is_instance_of::<PyBufferError>(py)
        || error.is_instance_of::<PyValueError>(py)
        || error.is_instance_of::<PyRuntimeError>(py);
    let has_hint = || error.value(py).hasattr("hint").unwrap_or(false);
    if !is_foreign || has_hint() {
        return error;
    }
    let kind = object.get_type().name().map_or_else(|_| "object".to_owned(), |name| name.to_string());
    let message = format!("this `{kind}` cannot be imported: {}", error.value(py));
    let hint = "pass an array of plain numbers with storage; for a tensor that requires a gradient, `tensor.detach()`";
    let exception = PyErr::from(Exception::new("WrongValue", message).hint(hint));
    exception.set_cause(py, Some(error));
    exception
}

fn import_foreign(object: &Bound<'_, PyAny>, stream: Option<i64>) -> PyResult<View> {
    // The buffer protocol is tried first: it is the fastest, and it reports whether the array is writable.
    let refused = match buffer::is_buffer(object).then(|| buffer::import(object)) {
        Some(Ok(view)) => return Ok(view),
        Some(Err(refused)) => Some(refused),
        None => None,
    };
    if object.hasattr("__dlpack__")? {
        let (kind, id) = object.call_method0("__dlpack_device__")?.extract::<(i32, i32)>()?;
        let on_gpu = DlDevice { kind, id }.is_cuda();
        let imported = dlpack::import(object, stream.filter(|_| on_gpu));
        // DLPack supports more element types than the buffer protocol. If both protocols fail, the error of the buffer protocol
        // is reported.
        return imported.map_err(|error| refused.unwrap_or(error));
    }
    if let Some(refused) = refused {
        return Err(refused);
    }
    if let Ok(interface) = object.getattr("__cuda_array_interface__") {
        return buffer::import_cuda_array_interface(object, interface.cast::<PyDict>()?, stream);
    }
    if let Ok(interface) = object.getattr("__array_interface__") {
        return buffer::import_array_interface(object, interface.cast::<PyDict>()?, DlDevice::CPU);
    }
    let message = format!("`{}` is not an array", object.get_type().name()?);
    let hint = "pass an object with DLPack, the buffer protocol or numpy's array interface: an array of numpy, torch, CuPy \
            or JAX, or `bytes`";
    Err(Exception::new("WrongType", message).hint(hint).into())
}

/// Imports an array of any framework for use on the default stream of its GPU, which waits for the work that is enqueued on the
/// array.
pub(crate) fn import_on_default_stream(object: &Bound<'_, PyAny>) -> PyResult<View> {
    match object.cast::<Array>() {
        Ok(array) => array.get().on_default_stream(object.py()).into_py(),
        Err(_) => import(object, Some(FrameworkStream::DEFAULT)),
    }
}

#[pymethods]
impl Array {
    /// Reports the owner of the array's memory to Python's cycle collector, so that an object that holds an array of its own
    /// memory is freed. The owner is reported only if this array has the only reference to it; other references are cloned only
    /// with the GIL held.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        let owner = &self.view.owner;
        if Arc::strong_count(owner) > 1 {
            return Ok(());
        }
        visit.call(owner.downcast_ref::<Py<PyAny>>())?;
        visit.call(owner.downcast_ref::<buffer::HeldBuffer>().and_then(buffer::HeldBuffer::object))
    }

    /// The shape of the array: the length of each dimension.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.view.layout.shape)
    }

    /// The stride of each dimension of the array, in elements.
    #[getter]
    fn stride<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.view.layout.strides)
    }

    /// The name of the array's element type: a name of numpy such as ``float32``, or of a type that numpy does not have,
    /// such as ``bfloat16``.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.view.layout.element.name
    }

    /// The device that holds the array's memory: ``cpu``, ``cuda:0`` and so on.
    #[getter]
    fn device(&self) -> String {
        self.view.dl_device.to_string()
    }

    /// True if the array is read-only.
    #[getter]
    fn readonly(&self) -> bool {
        self.view.readonly
    }

    /// The number of dimensions of the array.
    #[getter]
    fn ndim(&self) -> usize {
        self.view.layout.shape.len()
    }

    /// The number of elements of the array.
    #[getter]
    fn size(&self) -> usize {
        self.view.layout.count()
    }

    /// The size of one element of the array in bytes.
    #[getter]
    fn itemsize(&self) -> usize {
        self.view.layout.element.len()
    }

    /// The size of all elements of the array in bytes, without the gaps between them.
    #[getter]
    fn nbytes(&self) -> usize {
        self.view.layout.len()
    }

    /// True if the elements of the array are contiguous in C order (the last dimension is the fastest).
    #[getter]
    fn is_contiguous(&self) -> bool {
        self.view.layout.is_contiguous()
    }

    /// Returns the address of the first element of the array.
    fn data_ptr(&self) -> u64 {
        self.view.address
    }

    fn __len__(&self) -> PyResult<usize> {
        let rows = self.view.layout.shape.first().and_then(|rows| usize::try_from(*rows).ok());
        rows.ok_or_else(|| Exception::new("WrongType", "an array without dimensions has no length").into())
    }

    /// Returns a numpy array that shares the memory of this array.
    ///
    /// Raises:
    ///     wholemem.errors.Unsupported: The memory is on a GPU, or numpy does not have the element type.
    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let View { layout, dl_device, .. } = &slf.get().view;
        let refused = |message: String| Exception::new("Unsupported", message);
        if !dl_device.is_host() {
            let hint = "use torch or CuPy: `torch.from_dlpack(array)`";
            return Err(refused(format!("numpy cannot access memory on {dl_device}")).hint(hint).into());
        }
        if layout.element.typestr.is_none() {
            let hint = "use torch, or the bytes: `array.memoryview()`";
            return Err(refused(format!("numpy has no type {}", layout.element.name)).hint(hint).into());
        }
        slf.py().import("numpy")?.call_method1("asarray", (slf,))
    }

    /// Returns a ``memoryview`` of the memory of this array.
    ///
    /// Raises:
    ///     wholemem.errors.Unsupported: The memory is on a GPU.
    ///     wholemem.errors.WrongStride: The array is not contiguous.
    fn memoryview<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let View { dl_device, .. } = &slf.get().view;
        if !dl_device.is_host() {
            return Err(Exception::new(
                "Unsupported",
                format!("the CPU cannot access memory on {dl_device}"),
            )
            .into());
        }
        slf.get().view.check_contiguous("the array").into_py()?;
        slf.py().import("wholemem.buffers")?.call_method1("memoryview_of", (slf,))
    }

    /// Returns an array that shares the memory of this array and is exported as read-only.
    fn as_readonly(&self, py: Python<'_>) -> PyResult<Self> {
        self.with_view(py, View { readonly: true, ..self.view.clone() }, false).into_py()
    }

    /// Returns an array that shares the memory of this array, for a framework without a read-only flag, such as JAX. The
    /// caller promises not to write to the memory.
    ///
    /// DLPack then exports a read-only object directly instead of as a copy-on-write map.
    fn lent(&self, py: Python<'_>) -> PyResult<Self> {
        self.with_view(py, self.view.clone(), true).into_py()
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        let DlDevice { kind, id } = self.view.dl_device.exported();
        (kind, id)
    }

    /// Exports the array through DLPack. A read-only array of a store in host memory is exported as a copy-on-write map, with the
    /// read-only flag in a versioned capsule.
    ///
    /// `stream` is the stream on which the consumer will use the array; -1 if the consumer orders the work itself. Without it,
    /// the default stream is used.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let refused = |message: &str| Exception::new("CannotExport", message);
        if dl_device.is_some_and(|device| device != self.__dlpack_device__()) {
            let message =
                format!("the array is on {}, and cannot be exported to another device", self.view.dl_device);
            return Err(refused(&message)
                .hint("import it on its device, and copy it with your framework")
                .into());
        }
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        let needs_protection = self.view.readonly && !self.is_lent && copy != Some(true);
        let private = if needs_protection { private::map_copy_on_write(&self.view).into_py()? } else { None };
        if needs_protection && private.is_none() && !versioned && self.view.layout.count() > 0 {
            let message = "the array is read-only, and DLPack before version 1 has no read-only flag";
            let hint = "use a newer numpy or torch, or promise not to write to it: pass `array.lent()`";
            return Err(refused(message).hint(hint).into());
        }
        let stream = u64::try_from(stream.unwrap_or(0)).ok();
        if let (Some(last), Some(stream)) = (self.last.get(py), stream) {
            // SAFETY: by the DLPack protocol, `stream` is the handle of a live stream of the array's device.
            unsafe { FrameworkStream::new(last.device(), stream, None) }.wait_for(&last).into_py()?;
        }
        if copy == Some(true) {
            let copy = py.detach(|| self.view.copied(stream)).into_py()?;
            return dlpack::export(py, &copy, versioned, true);
        }
        dlpack::export(py, private.as_ref().unwrap_or(&self.view), versioned, false)
    }

    /// Converts the array to a numpy array. numpy calls this method if the array supports no other protocol.
    #[pyo3(signature = (*arguments, **named))]
    pub(crate) fn __array__<'py>(
        slf: &Bound<'py, Self>,
        arguments: &Bound<'py, PyTuple>,
        named: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        // numpy's own `__array__` converts and copies, because versions of numpy pass different arguments.
        Self::numpy(slf)?.call_method("__array__", arguments, named)
    }

    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if !self.view.dl_device.is_host() {
            // After an `AttributeError`, numpy tries other protocols, and finds none.
            return Err(PyAttributeError::new_err("__array_interface__"));
        }
        self.interface(py)
    }

    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if !self.view.dl_device.is_cuda() {
            return Err(PyAttributeError::new_err("__cuda_array_interface__"));
        }
        let interface = self.interface(py)?;
        interface.set_item("stream", self.last.handle())?;
        Ok(interface)
    }
}

impl Array {
    /// Creates an array from a view of this array's memory. The new array has the same last stream as this array.
    fn with_view(&self, py: Python<'_>, view: View, is_lent: bool) -> Result<Self, Exception> {
        let array = Self { is_lent, ..Self::new(view) };
        if let Some(last) = self.last.get(py) {
            array.last.update(py, &last)?;
        }
        Ok(array)
    }

    fn interface<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let View { address, layout, readonly, .. } = &self.view;
        let Some(typestr) = layout.element.typestr else {
            return Err(PyAttributeError::new_err(format!("numpy has no type {}", layout.element.name)));
        };
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("shape", self.shape(py)?)?;
        interface.set_item("typestr", typestr)?;
        interface.set_item("data", (address, readonly))?;
        let len = i64::try_from(layout.element.len()).unwrap_or(1);
        let strides = PyTuple::new(py, layout.strides.iter().map(|stride| stride * len))?;
        if layout.is_contiguous() {
            interface.set_item("strides", py.None())?;
        } else {
            interface.set_item("strides", strides)?;
        }
        Ok(interface)
    }
}

/// Creates an array of zeros in host memory.
///
/// Args:
///     shape: The length of each dimension, or one int.
///     dtype: The element type: a name such as ``float32``, or a dtype of numpy or torch.
///
/// Returns:
///     A writable array.
///
/// Raises:
///     wholemem.errors.OutOfMemory: The memory cannot be allocated.
///     wholemem.errors.WrongType: The element type does not exist.
///     wholemem.errors.WrongValue: The shape has a negative or too large length.
#[pyfunction]
pub(crate) fn zeros(shape: Shape, dtype: Element) -> PyResult<Array> {
    let layout = Layout::contiguous(dtype, &shape.signed()).into_py()?;
    View::zeroed(layout).map(Array::new).into_py()
}

/// Returns an array that is a view of another framework's array, or of a buffer, without a copy.
///
/// Args:
///     object: An object with DLPack, the buffer protocol or numpy's array interface.
///
/// Returns:
///     An array that keeps ``object`` alive.
///
/// Raises:
///     wholemem.errors.Unsupported: The object uses a DLPack version that is not supported.
///     wholemem.errors.WrongType: The object is not an array, or its element type is not supported.
///     wholemem.errors.WrongValue: The array cannot be imported, for example because it has no memory.
#[pyfunction]
pub(crate) fn asarray(object: &Bound<'_, PyAny>) -> PyResult<Array> {
    import(object, None).map(Array::new)
}
