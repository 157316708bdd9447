//! Tensors looked at through the functions that their framework publishes for it: DLPack's C exchange API.
//!
//! Asking a tensor in Python where it is, how long and of which type takes as long as a launch on a GPU. Here it is one call of
//! the framework's own, which makes no object.

use std::ffi::{CStr, c_int, c_void};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyType};

use super::dlpack::Tensor;
use super::element::Element;
use super::layout::are_gapless;

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

/// A tensor without gaps between its elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen<'a> {
    pub(crate) address: u64,
    pub(crate) shape: &'a [i64],
    pub(crate) element: Element,
    /// The number of a GPU, or -1 for the processor.
    pub(crate) device: i32,
}

impl Seen<'_> {
    /// How many elements it has.
    pub(crate) fn count(&self) -> usize {
        self.shape.iter().map(|len| usize::try_from(*len).unwrap_or(0)).product()
    }

    /// Whether another one has the same shape, type and device.
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        (self.device, self.element, self.shape) == (other.device, other.element, other.shape)
    }
}

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

    /// Looks at a tensor. `None` if it is not simply one: of another type, with gaps, complex, elsewhere, nowhere, or refused.
    /// Whether its elements are those in its memory, and not their negatives, the caller has asked before.
    ///
    /// What is seen stays so while no other Python runs: between this and the use of it, none is called.
    pub(crate) fn look<'a>(&self, given: &'a Bound<'_, PyAny>) -> Option<Seen<'a>> {
        if !self.knows(given) {
            return None;
        }
        let mut tensor = Tensor::EMPTY;
        // SAFETY: the object is of a type that the function is for, and the tensor is writable.
        if unsafe { (self.look)(given.as_ptr().cast(), &raw mut tensor) } != 0 {
            drop(PyErr::take(given.py()));
            return None;
        }
        let device = match tensor.device_type {
            CPU => -1,
            CUDA => tensor.device_id,
            _ => return None,
        };
        // SAFETY: the lists are the object's, which the caller holds; and nobody changes its shape while the lock is held.
        let (shape, strides) = unsafe { tensor.lists() };
        let seen = Seen { address: tensor.address(), shape, element: tensor.element().ok()?, device };
        if seen.count() == 0 {
            return Some(seen);
        }
        // Complex numbers may be meant to be conjugated.
        let is_plain = seen.address >= LOWEST && !seen.element.is_complex();
        (is_plain && (strides.is_empty() || are_gapless(shape, strides))).then_some(seen)
    }

    /// The stream to which the framework's work on a device goes now.
    pub(crate) fn stream(&self, py: Python<'_>, device: i32) -> PyResult<u64> {
        if device < 0 {
            return Ok(0);
        }
        let mut stream = std::ptr::null_mut();
        // SAFETY: the stream is writable; a device that is none is an error.
        match unsafe { (self.stream)(CUDA, device, &raw mut stream) } {
            0 => Ok(stream.expose_provenance() as u64),
            _ => Err(PyErr::fetch(py)),
        }
    }
}
