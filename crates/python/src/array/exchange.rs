//! Tensors looked at through the functions that their framework publishes for it: DLPack's C exchange API.
//!
//! Asking a tensor in Python where it is, how long and of which type takes as long as a launch on a GPU. Here it is one call of
//! the framework's own, which makes no object.

use std::ffi::{CStr, c_int, c_void};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyType};
use wholemem_hal::Stream;

use super::dlpack::Tensor;
use super::view::Place;
use crate::communicator::CommState;
use crate::error::Raised;
use crate::raw_tensor::RawTensor;

const ATTRIBUTE: &str = "__dlpack_c_exchange_api__";
const NAME: &CStr = c"dlpack_exchange_api";
const MAJOR: u32 = 1;

/// Kinds of devices.
const CPU: i32 = 1;
const CUDA: i32 = 2;

/// Where memory begins that is taken for such. A tensor that stands for another, or whose memory was given back, has an
/// address all the same: how far its elements are from the beginning of nothing. Memory that GPUs share lies higher.
const LOWEST: u64 = 1 << 32;

/// The table of functions. What is not called here is a pointer of some function's.
#[repr(C)]
#[derive(Debug)]
struct Table {
    major: u32,
    minor: u32,
    earlier: *const Table,
    allocate: *const c_void,
    give: *const c_void,
    take: *const c_void,
    look: Option<unsafe extern "C" fn(*mut c_void, *mut Tensor) -> c_int>,
    stream: Option<unsafe extern "C" fn(c_int, i32, *mut *mut c_void) -> c_int>,
}

const _: () = assert!(size_of::<Table>() == 56);

/// How tensors of a framework are looked at without a call of Python: by the functions that it publishes, if it does.
///
/// >>> from wholemem._native import Exchange
/// >>> Exchange.of(bytes) is None
/// True
#[pyclass(frozen, module = "wholemem")]
#[derive(Debug)]
pub(crate) struct Exchange {
    kinds: Vec<Py<PyType>>,
    look: unsafe extern "C" fn(*mut c_void, *mut Tensor) -> c_int,
    stream: unsafe extern "C" fn(c_int, i32, *mut *mut c_void) -> c_int,
}

#[pymethods]
impl Exchange {
    /// For tensors of exactly these types; ``None`` if their framework publishes nothing that is understood.
    #[staticmethod]
    #[pyo3(signature = (kind, *others))]
    fn of(kind: &Bound<'_, PyType>, others: Vec<Py<PyType>>) -> Option<Self> {
        let capsule = kind.getattr(ATTRIBUTE).ok()?.cast_into::<PyCapsule>().ok()?;
        // SAFETY: the name is what says what a capsule holds; with another one the answer is null, and an error.
        let table = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), NAME.as_ptr()) }.cast::<Table>();
        if table.is_null() {
            drop(PyErr::take(kind.py()));
            return None;
        }
        // SAFETY: a capsule of that name holds a table, which stays for the life of the process and begins with its version,
        // whatever that is.
        if unsafe { (*table).major } != MAJOR {
            return None;
        }
        // SAFETY: the rest is the same in every minor version of this major one.
        let table = unsafe { &*table };
        let is_same = |other: &Py<PyType>| {
            let found = other.bind(kind.py()).getattr(ATTRIBUTE);
            found.is_ok_and(|found| found.is(&capsule))
        };
        if !others.iter().all(is_same) {
            return None;
        }
        let kinds = std::iter::once(kind.clone().unbind()).chain(others).collect();
        Some(Self { kinds, look: table.look?, stream: table.stream? })
    }
}

impl Exchange {
    /// Whether something is a tensor of one of its types.
    pub(crate) fn knows(&self, given: &Bound<'_, PyAny>) -> bool {
        let kind = given.get_type_ptr();
        self.kinds.iter().any(|known| std::ptr::eq(known.as_ptr(), kind.cast()))
    }

    /// A tensor as a call takes it that goes around the dispatcher: `None` unless it is of exactly one of the types, contiguous,
    /// and not complex, since complex elements may have to be conjugated. Whether elements are the negatives of what is in memory,
    /// the caller asks.
    ///
    /// # Safety
    /// As [`look`](Self::look).
    #[inline]
    pub(crate) unsafe fn look_plain<'a>(&self, given: &'a Bound<'_, PyAny>) -> Option<RawTensor<'a>> {
        if !self.knows(given) {
            return None;
        }
        // SAFETY: the object is of a type that the function is for; the rest is the caller's guarantee.
        let Ok(seen) = (unsafe { self.described(given) }) else {
            drop(PyErr::take(given.py()));
            return None;
        };
        (seen.stride.is_empty() && !seen.dtype.is_complex() && (seen.address > 0 || seen.count() == 0))
            .then_some(seen)
    }

    /// A tensor as an operator takes it, of one of the types or derived from the first. `what` names it in errors.
    ///
    /// # Errors
    /// `WrongType`, `WrongValue` for what is no tensor with memory.
    ///
    /// # Safety
    /// The caller keeps the tensor, and does not change its shape or its storage, until the work that uses it has run; or, on a GPU,
    /// has been enqueued on the framework's current [stream](Self::call_stream), in whose order the framework's allocator reuses
    /// memory. No Python code runs between this and the last use of the shape.
    pub(crate) unsafe fn look<'a>(&self, what: &str, given: &'a Bound<'_, PyAny>) -> PyResult<RawTensor<'a>> {
        let py = given.py();
        let is_tensor = self.knows(given)
            || self.kinds.first().is_some_and(|kind| given.is_instance(kind.bind(py)).unwrap_or(false));
        if !is_tensor {
            let message = format!("{what} is a `{}`", given.get_type().name()?);
            return Err(Raised::new("WrongType", message).hint("give a tensor").into());
        }
        // SAFETY: the object is of a type that the function is for; the rest is the caller's guarantee.
        match unsafe { self.described(given) } {
            Ok(seen) => Ok(seen),
            Err(refused) => {
                let cause = PyErr::take(py);
                let says =
                    cause.as_ref().map_or_else(|| refused.to_owned(), |cause| cause.value(py).to_string());
                let message = format!("{what} has no memory that can be used: {says}");
                let error =
                    PyErr::from(Raised::new("WrongValue", message).hint("give one on a processor or a GPU"));
                error.set_cause(py, cause);
                Err(error)
            }
        }
    }

    /// What the framework says of a tensor. If it refuses, its exception is set, or the error says why.
    ///
    /// # Safety
    /// The object is a tensor of the framework; for the memory and the lists of numbers, as [`look`](Self::look).
    #[inline]
    unsafe fn described<'a>(&self, given: &'a Bound<'_, PyAny>) -> Result<RawTensor<'a>, &'static str> {
        let mut tensor = Tensor::EMPTY;
        // SAFETY: the caller guarantees that the object is one that the function is for, and the tensor is writable.
        if unsafe { (self.look)(given.as_ptr().cast(), &raw mut tensor) } != 0 {
            return Err("its framework does not describe it");
        }
        let device = match tensor.device_type {
            CPU => Place::CPU,
            CUDA => Place::cuda(tensor.device_id),
            _ => return Err("it is on another kind of device"),
        };
        // SAFETY: the lists are the object's, which the caller holds, and whose shape does not change meanwhile.
        let (shape, strides) = unsafe { tensor.lists() };
        let Ok(dtype) = tensor.element() else {
            return Err("its elements are of a type that is not known here");
        };
        let address = if tensor.address() < LOWEST { 0 } else { tensor.address() };
        // SAFETY: the framework says that the elements are there, and the caller guarantees that they stay until the work has run.
        Ok(unsafe { RawTensor::borrowed(address, shape, strides, dtype, device) })
    }

    /// The stream to which the framework's work on the communicator's device goes now.
    #[inline]
    pub(crate) fn call_stream(&self, py: Python<'_>, state: &CommState) -> PyResult<Stream> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: the stream is writable; a device that is none is an error.
        if state.place.is_cuda() && unsafe { (self.stream)(CUDA, state.place.id, &raw mut stream) } != 0 {
            return Err(PyErr::fetch(py));
        }
        // SAFETY: the framework has just named it as its stream of this device, and destroys none of its streams.
        Ok(unsafe { state.stream_at(stream.expose_provenance() as u64) })
    }
}
