//! Memory with a shape, a type and an owner, in and out by DLPack and its like.
//!
//! | room | what it holds |
//! |---|---|
//! | `view` | the memory itself: where it is, and who keeps it |
//! | `layout`, `element` | how its elements lie, and what they are |
//! | `dlpack` | arrays of other frameworks, taken and given |
//! | `exchange` | the same only looked at, by one call and without an object |
//! | `buffer` | buffers of Python, and numpy's interfaces |
//! | `private` | arrays of objects mapped copy-on-write, for frameworks that may write what they must not |
//! | `values` | what the elements are, as numpy has them: indexing, numbers, comparison, printing |
//! | `turn` | the stream that used an array last, for which the next one waits |
//!
//! What it keeps true: nothing is copied, but where DLPack asks for a copy, and page by page where a framework writes a
//! read-only object that it took by DLPack. Whatever was made of an array, by however many
//! frameworks, keeps its memory.

mod buffer;
mod dlpack;
mod element;
mod exchange;
mod layout;
mod private;
mod turn;
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
pub(crate) use turn::Turn;
pub(crate) use view::{Owner, Place, View};

use crate::error::{Raised, Raises};
use crate::number::Shape;
use turn::LastTurn;

/// A view of memory that keeps its owner, and that every framework takes without a copy.
///
/// Ints and slices in ``[]`` select views, or a number; ``==``, ``bool``, iteration and printing are numpy's, which has to be
/// installed for them. Values of a GPU's array are copied to the host, and the call waits for the work that uses the array; one of
/// more than 1 MiB is printed without its values.
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
    last: LastTurn,
    /// Whether its users promise not to write it, so that it is given away as it is, and as if it could be written.
    is_lent: bool,
}

impl Array {
    pub(crate) fn new(view: View) -> Self {
        Self { view, last: LastTurn::default(), is_lent: false }
    }

    /// Its memory, for work that is going to be enqueued on a stream.
    pub(crate) fn used_in(&self, py: Python<'_>, turn: &Turn) -> Result<View, Raised> {
        if self.view.place.is_cuda() {
            self.last.pass(py, turn)?;
        }
        Ok(self.view.clone())
    }

    /// Its memory, for work on the default stream of its device.
    fn settled(&self, py: Python<'_>) -> Result<View, Raised> {
        match self.last.get(py) {
            Some(last) => self.used_in(py, &Turn::of_default(last.device())),
            None => Ok(self.view.clone()),
        }
    }
}

/// An array of whatever kind, as a call takes it. `stream` is where a GPU will use it.
pub(crate) fn take(given: &Bound<'_, PyAny>, stream: Option<i64>) -> PyResult<View> {
    if let Ok(array) = given.cast::<Array>() {
        return Ok(array.get().view.clone());
    }
    take_foreign(given, stream).map_err(|error| explained(given, error))
}

/// What keeps somebody else's array from being taken, as an exception of ours.
fn explained(given: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
    let py = given.py();
    let is_theirs = error.is_instance_of::<PyBufferError>(py)
        || error.is_instance_of::<PyValueError>(py)
        || error.is_instance_of::<PyRuntimeError>(py);
    let is_ours = || error.value(py).hasattr("hint").unwrap_or(false);
    if !is_theirs || is_ours() {
        return error;
    }
    let kind = given.get_type().name().map_or_else(|_| "object".to_owned(), |name| name.to_string());
    let message = format!("this `{kind}` does not give its memory away: {}", error.value(py));
    let hint =
        "give an array of plain numbers that are there; of a tensor with a gradient, `tensor.detach()`";
    let explained = PyErr::from(Raised::new("WrongValue", message).hint(hint));
    explained.set_cause(py, Some(error));
    explained
}

fn take_foreign(given: &Bound<'_, PyAny>, stream: Option<i64>) -> PyResult<View> {
    // First, since it is the quickest, and says of every array whether it can be written.
    let refused = match buffer::is_buffer(given).then(|| buffer::take(given)) {
        Some(Ok(view)) => return Ok(view),
        Some(Err(refused)) => Some(refused),
        None => None,
    };
    if given.hasattr("__dlpack__")? {
        let (kind, id) = given.call_method0("__dlpack_device__")?.extract::<(i32, i32)>()?;
        let on_gpu = Place { kind, id }.is_cuda();
        let taken = dlpack::take(given, stream.filter(|_| on_gpu));
        // Types that buffers do not have come this way; what comes neither way is refused for the first reason.
        return taken.map_err(|error| refused.unwrap_or(error));
    }
    if let Some(refused) = refused {
        return Err(refused);
    }
    if let Ok(says) = given.getattr("__cuda_array_interface__") {
        return buffer::take_cuda_interface(given, says.cast::<PyDict>()?, stream);
    }
    if let Ok(says) = given.getattr("__array_interface__") {
        return buffer::take_interface(given, says.cast::<PyDict>()?, Place::CPU);
    }
    let message = format!("`{}` is no array", given.get_type().name()?);
    let hint = "give what has DLPack, a buffer or numpy's interface: an array of numpy, torch, CuPy or JAX, or `bytes`";
    Err(Raised::new("WrongType", message).hint(hint).into())
}

/// An array of whatever kind, of which a GPU's default stream may use what is enqueued so far.
pub(crate) fn take_settled(given: &Bound<'_, PyAny>) -> PyResult<View> {
    match given.cast::<Array>() {
        Ok(array) => array.get().settled(given.py()).raised(),
        Err(_) => take(given, Some(Turn::DEFAULT)),
    }
}

#[pymethods]
impl Array {
    /// Shows the collector whose memory it is, so that an object which has an array of itself goes. Only if nobody else keeps
    /// the owner, and would show it again; others begin to by a clone, which nobody takes without the interpreter's lock.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        let owner = &self.view.owner;
        if Arc::strong_count(owner) > 1 {
            return Ok(());
        }
        visit.call(owner.downcast_ref::<Py<PyAny>>())?;
        visit.call(owner.downcast_ref::<buffer::Held>().and_then(buffer::Held::object))
    }

    /// How many elements there are in each dimension.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.view.layout.shape)
    }

    /// How many elements lie from one to the next in each dimension.
    #[getter]
    fn stride<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.view.layout.strides)
    }

    /// The type of the elements, by numpy's name: ``float32``; also ``bfloat16`` and ``float8_e4m3fn``.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.view.layout.element.name
    }

    /// Where the memory is: ``cpu``, or ``cuda:0`` and so on.
    #[getter]
    fn device(&self) -> String {
        self.view.place.to_string()
    }

    /// Whether the elements must not be written.
    #[getter]
    fn readonly(&self) -> bool {
        self.view.readonly
    }

    /// How many dimensions there are.
    #[getter]
    fn ndim(&self) -> usize {
        self.view.layout.shape.len()
    }

    /// How many elements there are.
    #[getter]
    fn size(&self) -> usize {
        self.view.layout.count()
    }

    /// How many bytes an element takes.
    #[getter]
    fn itemsize(&self) -> usize {
        self.view.layout.element.len()
    }

    /// How many bytes all elements take, without gaps.
    #[getter]
    fn nbytes(&self) -> usize {
        self.view.layout.len()
    }

    /// Whether the elements follow each other without gaps, the last dimension fastest.
    #[getter]
    fn is_contiguous(&self) -> bool {
        self.view.layout.is_contiguous()
    }

    /// The address of the first element.
    fn data_ptr(&self) -> u64 {
        self.view.address
    }

    fn __len__(&self) -> PyResult<usize> {
        let rows = self.view.layout.shape.first().and_then(|rows| usize::try_from(*rows).ok());
        rows.ok_or_else(|| Raised::new("WrongType", "a single number has no length").into())
    }

    /// The array as numpy has it, without a copy.
    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let View { layout, place, .. } = &slf.get().view;
        let refused = |message: String| Raised::new("Unsupported", message);
        if !place.is_host() {
            let hint = "take it with torch or CuPy: `torch.from_dlpack(array)`";
            return Err(refused(format!("numpy does not reach memory of {place}")).hint(hint).into());
        }
        if layout.element.typestr.is_none() {
            let hint = "take it with torch, or as bytes: `array.memoryview()`";
            return Err(refused(format!("numpy has no type like {}", layout.element.name)).hint(hint).into());
        }
        slf.py().import("numpy")?.call_method1("asarray", (slf,))
    }

    /// The array as a buffer of Python, without a copy.
    fn memoryview<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let View { place, .. } = &slf.get().view;
        if !place.is_host() {
            return Err(Raised::new(
                "Unsupported",
                format!("the processor does not reach memory of {place}"),
            )
            .into());
        }
        slf.get().view.check_contiguous("the array").raised()?;
        slf.py().import("wholemem.buffers")?.call_method1("memoryview_of", (slf,))
    }

    /// The same memory, of which frameworks are told that they must not write it.
    fn as_readonly(&self, py: Python<'_>) -> PyResult<Self> {
        self.same(py, View { readonly: true, ..self.view.clone() }, false).raised()
    }

    /// The same memory for a framework that cannot be told whether it may be written, such as JAX: its user promises
    /// not to. By DLPack an array of an object is given as it is then, not in a copy-on-write map.
    fn lent(&self, py: Python<'_>) -> PyResult<Self> {
        self.same(py, self.view.clone(), true).raised()
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        let Place { kind, id } = self.view.place.told();
        (kind, id)
    }

    /// A read-only array of an object in host memory is exported in a copy-on-write map of its own, with the flag that says
    /// that it is read-only where there is one.
    ///
    /// `stream` is where the array will be used: minus one for whoever sees to the order himself, and the default one for
    /// whoever does not say.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let refused = |message: &str| Raised::new("CannotExport", message);
        if dl_device.is_some_and(|device| device != self.__dlpack_device__()) {
            let message = format!("the array is on {}, and is given away where it is", self.view.place);
            return Err(refused(&message).hint("take it there, and copy it with your framework").into());
        }
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        let is_exposed = self.view.readonly && !self.is_lent && copy != Some(true);
        let private = if is_exposed { private::mapped_private(&self.view).raised()? } else { None };
        if is_exposed && private.is_none() && !versioned && self.view.layout.count() > 0 {
            let message = "the array is read-only, which DLPack cannot say before version 1";
            let hint = "use a newer numpy or torch, or promise not to write it: give `array.lent()`";
            return Err(refused(message).hint(hint).into());
        }
        let stream = u64::try_from(stream.unwrap_or(0)).ok();
        if let (Some(last), Some(stream)) = (self.last.get(py), stream) {
            // SAFETY: by DLPack's protocol the consumer names a stream of the array's device on which it will use the array.
            unsafe { Turn::new(last.device(), stream, None) }.follow(&last).raised()?;
        }
        if copy == Some(true) {
            let copy = py.detach(|| self.view.copied(stream)).raised()?;
            return dlpack::give(py, &copy, versioned, true);
        }
        dlpack::give(py, private.as_ref().unwrap_or(&self.view), versioned, false)
    }

    /// Asked by numpy when it finds no other way.
    #[pyo3(signature = (*arguments, **named))]
    pub(crate) fn __array__<'py>(
        slf: &Bound<'py, Self>,
        arguments: &Bound<'py, PyTuple>,
        named: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        // Types and copies are seen to by numpy, whose versions take different arguments.
        Self::numpy(slf)?.call_method("__array__", arguments, named)
    }

    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if !self.view.place.is_host() {
            // numpy then looks for other ways, and finds none.
            return Err(PyAttributeError::new_err("__array_interface__"));
        }
        self.interface(py)
    }

    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if !self.view.place.is_cuda() {
            return Err(PyAttributeError::new_err("__cuda_array_interface__"));
        }
        let says = self.interface(py)?;
        says.set_item("stream", self.last.told())?;
        Ok(says)
    }
}

impl Array {
    /// A view of the same memory, in the same turn.
    fn same(&self, py: Python<'_>, view: View, is_lent: bool) -> Result<Self, Raised> {
        let same = Self { is_lent, ..Self::new(view) };
        if let Some(last) = self.last.get(py) {
            same.last.pass(py, &last)?;
        }
        Ok(same)
    }

    fn interface<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let View { address, layout, readonly, .. } = &self.view;
        let Some(typestr) = layout.element.typestr else {
            return Err(PyAttributeError::new_err(format!("numpy has no type like {}", layout.element.name)));
        };
        let says = PyDict::new(py);
        says.set_item("version", 3)?;
        says.set_item("shape", self.shape(py)?)?;
        says.set_item("typestr", typestr)?;
        says.set_item("data", (address, readonly))?;
        let len = i64::try_from(layout.element.len()).unwrap_or(1);
        let strides = PyTuple::new(py, layout.strides.iter().map(|stride| stride * len))?;
        if layout.is_contiguous() {
            says.set_item("strides", py.None())?;
        } else {
            says.set_item("strides", strides)?;
        }
        Ok(says)
    }
}

/// New memory of this process, zero.
#[pyfunction]
pub(crate) fn zeros(shape: Shape, dtype: Element) -> PyResult<Array> {
    let layout = Layout::contiguous(dtype, &shape.signed()).raised()?;
    View::zeroed(layout).map(Array::new).raised()
}

/// A view of an array of any framework, or of a buffer of Python, without a copy.
#[pyfunction]
pub(crate) fn asarray(object: &Bound<'_, PyAny>) -> PyResult<Array> {
    take(object, None).map(Array::new)
}
