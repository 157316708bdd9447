//! Reads tensors through DLPack's C exchange API, which a framework such as torch publishes.
//!
//! Reading the address, shape and type of a tensor in Python takes as long as a kernel launch. The exchange API does it in
//! one C call that creates no Python object.

use std::ffi::{CStr, c_int, c_void};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyType};
use wholemem_hal::Stream;

use super::dlpack::DlTensor;
use super::view::DlDevice;
use crate::communicator::CommState;
use crate::error::Exception;
use crate::raw_tensor::RawTensor;

const ATTRIBUTE: &str = "__dlpack_c_exchange_api__";
const NAME: &CStr = c"dlpack_exchange_api";
const MAJOR: u32 = 1;

/// The number of the CPU among DLPack's device types.
const CPU: i32 = 1;
const CUDA: i32 = 2;

/// The lowest address that certainly is memory. A fake tensor, or a tensor whose storage was freed, has a null base address, so
/// its address is only an offset. A lower address may be such an offset or memory of the heap, which may begin below 4 GiB, so
/// the storage is then asked for its base address.
const CERTAIN_ADDRESS: u64 = 1 << 32;

/// The function table of DLPack's C exchange API. Functions that this module does not call are opaque pointers.
#[repr(C)]
#[derive(Debug)]
struct ExchangeTable {
    major: u32,
    minor: u32,
    previous: *const ExchangeTable,
    allocate: *const c_void,
    export: *const c_void,
    import: *const c_void,
    inspect: Option<unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int>,
    stream: Option<unsafe extern "C" fn(c_int, i32, *mut *mut c_void) -> c_int>,
}

const _: () = assert!(size_of::<ExchangeTable>() == 56);

/// Reads tensors of a framework through DLPack's C exchange API, without calls into Python.
///
/// >>> from wholemem._native import Exchange
/// >>> Exchange.of(bytes) is None
/// True
#[pyclass(frozen, module = "wholemem")]
#[derive(Debug)]
pub(crate) struct Exchange {
    types: Vec<Py<PyType>>,
    inspect: unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int,
    stream: unsafe extern "C" fn(c_int, i32, *mut *mut c_void) -> c_int,
}

#[pymethods]
impl Exchange {
    /// Opens a framework's DLPack C exchange API, by which native code reads tensors.
    ///
    /// Args:
    ///     kind: The tensor class, which publishes ``__dlpack_c_exchange_api__``.
    ///     others: Further classes whose tensors are accepted.
    ///
    /// Returns:
    ///     The exchange API for instances of exactly these classes; ``None`` if the framework does not publish a supported
    ///     version, or if the classes publish different ones.
    #[staticmethod]
    #[pyo3(signature = (kind, *others))]
    fn of(kind: &Bound<'_, PyType>, others: Vec<Py<PyType>>) -> Option<Self> {
        let capsule = kind.getattr(ATTRIBUTE).ok()?.cast_into::<PyCapsule>().ok()?;
        // SAFETY: `capsule` is live. If its name is not `NAME`, the function returns null and sets an error.
        let table =
            unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), NAME.as_ptr()) }.cast::<ExchangeTable>();
        if table.is_null() {
            drop(PyErr::take(kind.py()));
            return None;
        }
        // SAFETY: a capsule with the name `NAME` holds a table that is never freed. Every version of the table begins with its
        // version number.
        if unsafe { (*table).major } != MAJOR {
            return None;
        }
        // SAFETY: `table` is never freed, and all minor versions of the major version `MAJOR` have the layout of `ExchangeTable`.
        let table = unsafe { &*table };
        let is_same = |other: &Py<PyType>| {
            let found = other.bind(kind.py()).getattr(ATTRIBUTE);
            found.is_ok_and(|found| found.is(&capsule))
        };
        if !others.iter().all(is_same) {
            return None;
        }
        let types = std::iter::once(kind.clone().unbind()).chain(others).collect();
        Some(Self { types, inspect: table.inspect?, stream: table.stream? })
    }
}

impl Exchange {
    /// Returns true if the class of an object is exactly one of the accepted tensor classes.
    pub(crate) fn accepts(&self, object: &Bound<'_, PyAny>) -> bool {
        let kind = object.get_type_ptr();
        self.types.iter().any(|accepted| std::ptr::eq(accepted.as_ptr(), kind.cast()))
    }

    /// Reads a tensor for a call that bypasses the dispatcher. Returns `None` unless the tensor's class is exactly one of the
    /// accepted classes, and the tensor is contiguous and not complex (complex elements may be lazily conjugated). The caller
    /// checks for lazy negation.
    ///
    /// # Safety
    /// The same as for [`inspect`](Self::inspect).
    #[inline]
    pub(crate) unsafe fn inspect_plain<'a>(&self, object: &'a Bound<'_, PyAny>) -> Option<RawTensor<'a>> {
        if !self.accepts(object) {
            return None;
        }
        // SAFETY: `accepts` returned true, so `object` is a tensor of the framework. The caller of `inspect_plain` guarantees
        // that the tensor's memory, shape and strides stay valid.
        let Ok(tensor) = (unsafe { self.describe(object) }) else {
            drop(PyErr::take(object.py()));
            return None;
        };
        (tensor.stride.is_empty()
            && !tensor.dtype.is_complex()
            && (tensor.address > 0 || tensor.count() == 0))
            .then_some(tensor)
    }

    /// Reads a tensor for a torch operator: an instance of an accepted tensor class or of a subclass of the first one. `argument`
    /// names the tensor in errors.
    ///
    /// # Errors
    /// `WrongType` if the object is not a tensor, `WrongValue` if the tensor has no memory.
    ///
    /// # Safety
    /// The caller keeps the tensor alive and does not change its shape or its storage until the work that uses it has run. On a
    /// GPU it is enough that the work is enqueued on the framework's current [stream](Self::call_stream): the framework's
    /// allocator reuses memory in the order of that stream. No Python code runs between this call and the last use of the shape.
    pub(crate) unsafe fn inspect<'a>(
        &self,
        argument: &str,
        object: &'a Bound<'_, PyAny>,
    ) -> PyResult<RawTensor<'a>> {
        let py = object.py();
        let is_tensor = self.accepts(object)
            || self.types.first().is_some_and(|kind| object.is_instance(kind.bind(py)).unwrap_or(false));
        if !is_tensor {
            let message = format!("{argument} is a `{}`", object.get_type().name()?);
            return Err(Exception::new("WrongType", message).hint("pass a tensor").into());
        }
        // SAFETY: `is_tensor` is true, so `object` is a tensor of the framework. The caller of `inspect` guarantees that the
        // tensor's memory, shape and strides stay valid.
        match unsafe { self.describe(object) } {
            Ok(tensor) => Ok(tensor),
            Err(error_reason) => {
                let cause = PyErr::take(py);
                let reason = cause
                    .as_ref()
                    .map_or_else(|| error_reason.to_owned(), |cause| cause.value(py).to_string());
                let message = format!("{argument} has no usable memory: {reason}");
                let error = PyErr::from(
                    Exception::new("WrongValue", message).hint("pass a tensor on a CPU or a GPU"),
                );
                error.set_cause(py, cause);
                Err(error)
            }
        }
    }

    /// Reads a tensor through the function that its framework publishes. The error is a reason for the message; an exception of
    /// the framework may also be set.
    ///
    /// # Safety
    /// The object is a tensor of the framework. For its memory, shape and strides, the same as for [`inspect`](Self::inspect).
    #[inline]
    unsafe fn describe<'a>(&self, object: &'a Bound<'_, PyAny>) -> Result<RawTensor<'a>, &'static str> {
        let mut raw = DlTensor::EMPTY;
        // SAFETY: the caller of `describe` guarantees that `object` is a tensor of the framework, and `raw` is a writable
        // descriptor.
        if unsafe { (self.inspect)(object.as_ptr().cast(), &raw mut raw) } != 0 {
            return Err("its framework does not describe it");
        }
        let mut address = raw.address();
        if address > 0 && address < CERTAIN_ADDRESS {
            if !has_storage(object) {
                address = 0;
            }
            // Python code has run since the tensor was read, so the tensor is read again.
            // SAFETY: the caller of `describe` guarantees that `object` is a tensor of the framework, and `raw` is a writable
            // descriptor.
            let result = unsafe { (self.inspect)(object.as_ptr().cast(), &raw mut raw) };
            if result != 0 || (address > 0 && raw.address() != address) {
                return Err("its memory changed while it was read");
            }
        }
        let device = match raw.device_type {
            CPU => DlDevice::CPU,
            CUDA => DlDevice::cuda(raw.device_id),
            _ => return Err("its device type is not supported"),
        };
        // SAFETY: the shape and strides in `raw` belong to `object`, which the caller of `describe` keeps alive and whose shape
        // does not change.
        let (shape, strides) = unsafe { raw.lists() };
        let Ok(dtype) = raw.element() else {
            return Err("its element type is not supported");
        };
        // SAFETY: `address` is that of the tensor's elements, or zero, and the caller of `describe` guarantees that they exist
        // until the work on them has run.
        Ok(unsafe { RawTensor::borrowed(address, shape, strides, dtype, device) })
    }

    /// Returns the framework's current stream on the communicator's device.
    #[inline]
    pub(crate) fn call_stream(&self, py: Python<'_>, state: &CommState) -> PyResult<Stream> {
        let mut stream = std::ptr::null_mut();
        if state.dl_device.is_cuda() {
            // SAFETY: the pointer to `stream` is writable; for an invalid device the function returns an error.
            let result = unsafe { (self.stream)(CUDA, state.dl_device.id, &raw mut stream) };
            if result != 0 {
                return Err(PyErr::fetch(py));
            }
        }
        // SAFETY: `stream` is the framework's current stream of the communicator's device, and the framework never destroys its
        // streams. On the host, the handle is ignored.
        Ok(unsafe { state.streams.at(stream.expose_provenance() as u64) }.into_owned())
    }
}

/// Returns true if the storage of a torch tensor has a base address other than null.
#[cold]
fn has_storage(object: &Bound<'_, PyAny>) -> bool {
    let base = object.call_method0("untyped_storage").and_then(|storage| storage.call_method0("data_ptr"));
    base.and_then(|base| base.extract::<u64>()).is_ok_and(|base| base > 0)
}
