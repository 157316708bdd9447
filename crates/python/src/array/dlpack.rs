//! DLPack: arrays handed from one framework to another as a pointer, with a function that lets them go.
//!
//! ```text
//!   producer: a capsule `dltensor_versioned` ──> consumer renames it `used_dltensor_versioned`, and owns it:
//!                                                 it calls the deleter, once, from whichever thread
//!             nobody took it ──> the capsule's destructor calls the deleter
//! ```
//!
//! Versioned capsules say whether the array may be written; not every consumer heeds that. Old ones cannot say it, so that
//! read-only arrays are not given away in them, other than in copy-on-write maps (`private`), and arrays that come in them
//! are taken as they were meant: writable.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};
use wholemem_os::width::to_usize;

use super::element::Element;
use super::layout::Layout;
use super::view::{Place, View};
use crate::error::Raised;

const OLD: &CStr = c"dltensor";
const OLD_TAKEN: &CStr = c"used_dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
const VERSIONED_TAKEN: &CStr = c"used_dltensor_versioned";

/// The version of the structures below; readers take any minor one of the same major.
const VERSION: (u32, u32) = (1, 1);
/// Below this no memory begins, on any system with virtual memory.
pub(super) const FIRST: u64 = 4096;

const READ_ONLY: u64 = 1;
const IS_COPIED: u64 = 2;

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
#[derive(Debug)]
pub(super) struct Tensor {
    data: *mut c_void,
    pub(super) device_type: i32,
    pub(super) device_id: i32,
    ndim: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

impl Tensor {
    /// None, before somebody fills it in.
    pub(super) const EMPTY: Self = Self {
        data: std::ptr::null_mut(),
        device_type: 0,
        device_id: 0,
        ndim: 0,
        dtype: DataType { code: 0, bits: 0, lanes: 0 },
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };

    pub(super) fn element(&self) -> Result<Element, Raised> {
        Element::of_code(self.dtype.code, self.dtype.bits, self.dtype.lanes)
    }

    pub(super) fn address(&self) -> u64 {
        self.data.expose_provenance() as u64 + self.byte_offset
    }

    /// Its shape, and how far its elements are apart; nothing of the latter where they follow each other.
    ///
    /// # Safety
    /// Whoever has filled it in keeps its lists as long as `'a`.
    pub(super) unsafe fn lists<'a>(&self) -> (&'a [i64], &'a [i64]) {
        let numbers = |from: *mut i64| match usize::try_from(self.ndim) {
            Ok(count) if count > 0 && !from.is_null() => {
                // SAFETY: as many numbers as there are dimensions, kept as the caller says.
                unsafe { std::slice::from_raw_parts(from, count) }
            }
            _ => &[],
        };
        (numbers(self.shape), numbers(self.strides))
    }
}

/// The two ways in which a tensor is managed: who keeps it, and who lets it go.
trait Managed: Sized + 'static {
    const NAME: &'static CStr;
    const TAKEN: &'static CStr;

    fn new(tensor: Tensor, context: *mut c_void, flags: u64) -> Self;
    fn tensor(&self) -> &Tensor;
    fn context(&self) -> *mut c_void;
    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)>;
    fn readonly(&self) -> Result<bool, Raised>;
}

#[repr(C)]
struct OldTensor {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

#[repr(C)]
struct VersionedTensor {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: Tensor,
}

const _: () = assert!(size_of::<Tensor>() == 48 && size_of::<OldTensor>() == 64);
const _: () = assert!(size_of::<VersionedTensor>() == 80);

impl Managed for OldTensor {
    const NAME: &'static CStr = OLD;
    const TAKEN: &'static CStr = OLD_TAKEN;

    fn new(tensor: Tensor, context: *mut c_void, _: u64) -> Self {
        Self { tensor, context, deleter: Some(delete::<Self>) }
    }

    fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    fn context(&self) -> *mut c_void {
        self.context
    }

    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)> {
        self.deleter
    }

    fn readonly(&self) -> Result<bool, Raised> {
        Ok(false)
    }
}

impl Managed for VersionedTensor {
    const NAME: &'static CStr = VERSIONED;
    const TAKEN: &'static CStr = VERSIONED_TAKEN;

    fn new(tensor: Tensor, context: *mut c_void, flags: u64) -> Self {
        let (major, minor) = VERSION;
        Self { major, minor, context, deleter: Some(delete::<Self>), flags, tensor }
    }

    fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    fn context(&self) -> *mut c_void {
        self.context
    }

    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)> {
        self.deleter
    }

    fn readonly(&self) -> Result<bool, Raised> {
        if self.major != VERSION.0 {
            let message = format!("an array came in version {}.{} of DLPack", self.major, self.minor);
            return Err(Raised::new("Unsupported", message).hint("version 1 is understood here"));
        }
        Ok(self.flags & READ_ONLY != 0)
    }
}

/// One of our arrays, given away.
struct Given<M> {
    managed: M,
    shape: Vec<i64>,
    strides: Vec<i64>,
    _view: View,
}

/// Lets go of one of our arrays. Needs nothing of the interpreter.
unsafe extern "C" fn delete<M: Managed>(managed: *mut M) {
    // SAFETY: the consumer gives back what it was given.
    let Some(managed) = (unsafe { managed.as_ref() }) else { return };
    let given = managed.context().cast::<Given<M>>();
    // SAFETY: the context is the box that `give` leaked, and this is called once.
    drop(unsafe { Box::from_raw(given) });
}

/// A capsule with a view of the array, which may be a copy made for this: versioned for those who understand it.
pub(crate) fn give<'py>(
    py: Python<'py>,
    view: &View,
    versioned: bool,
    is_copied: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let flags = if view.readonly { READ_ONLY } else { 0 } | if is_copied { IS_COPIED } else { 0 };
    if versioned {
        give_as::<VersionedTensor>(py, view, flags)
    } else {
        give_as::<OldTensor>(py, view, flags)
    }
}

fn give_as<'py, M: Managed>(py: Python<'py>, view: &View, flags: u64) -> PyResult<Bound<'py, PyAny>> {
    let Layout { element, shape, strides } = view.layout.clone();
    let mut given = Box::new(Given::<M> {
        managed: M::new(Tensor::EMPTY, std::ptr::null_mut(), flags),
        shape,
        strides,
        _view: view.clone(),
    });
    let tensor = Tensor {
        data: std::ptr::with_exposed_provenance_mut(to_usize(view.address)),
        device_type: view.place.told().kind,
        device_id: view.place.told().id,
        ndim: i32::try_from(given.shape.len()).expect("an array has few dimensions"),
        dtype: DataType { code: element.code, bits: element.bits, lanes: 1 },
        shape: given.shape.as_mut_ptr(),
        strides: given.strides.as_mut_ptr(),
        byte_offset: 0,
    };
    let given = NonNull::from(Box::leak(given));
    // SAFETY: just leaked, and nobody else's yet.
    let place = unsafe { &raw mut (*given.as_ptr()).managed };
    // SAFETY: `place` is in the box that was just leaked; the value that is replaced has nothing to drop.
    unsafe { place.write(M::new(tensor, given.as_ptr().cast(), flags)) };
    // SAFETY: the name lives for ever, and the destructor knows what a capsule of that name holds.
    let capsule = unsafe { ffi::PyCapsule_New(place.cast(), M::NAME.as_ptr(), Some(destroy::<M>)) };
    if capsule.is_null() {
        // SAFETY: nobody has it, so that it is let go here, once.
        unsafe { delete(place) };
        return Err(PyErr::fetch(py));
    }
    // SAFETY: a new reference, which was not null.
    Ok(unsafe { Bound::from_owned_ptr(py, capsule) })
}

/// The end of a capsule: lets go of the array if nobody has taken it.
unsafe extern "C" fn destroy<M: Managed>(capsule: *mut ffi::PyObject) {
    // SAFETY: the interpreter calls this with a live capsule.
    if unsafe { ffi::PyCapsule_IsValid(capsule, M::NAME.as_ptr()) } == 0 {
        return;
    }
    // SAFETY: a capsule of this name, as was just asked.
    let managed = unsafe { ffi::PyCapsule_GetPointer(capsule, M::NAME.as_ptr()) };
    // SAFETY: nobody has taken it, so that it is let go here, once.
    unsafe { delete(managed.cast::<M>()) };
}

/// Somebody else's array, taken. Dropping it tells them, whichever thread does.
struct Taken<M: Managed>(NonNull<M>);

// SAFETY: DLPack's deleters are called from any thread; nothing else is reached through the pointer.
unsafe impl<M: Managed> Send for Taken<M> {}
// SAFETY: nothing is reached through a shared reference: the pointer is used by `drop` alone.
unsafe impl<M: Managed> Sync for Taken<M> {}

impl<M: Managed> Drop for Taken<M> {
    fn drop(&mut self) {
        // SAFETY: the producer keeps the structure until its deleter is called.
        let deleter = unsafe { self.0.as_ref() }.deleter();
        if let Some(deleter) = deleter {
            // SAFETY: called once, by the one who took it.
            unsafe { deleter(self.0.as_ptr()) };
        }
    }
}

/// Takes an array that says `__dlpack__`. `stream` is where GPUs will use it.
pub(crate) fn take(given: &Bound<'_, PyAny>, stream: Option<i64>) -> PyResult<View> {
    let py = given.py();
    // Nothing in DLPack says that elements are yet to be negated, and torch gives them away all the same.
    if let Ok(is_neg) = given.getattr(intern!(py, "is_neg"))
        && is_neg.call0()?.is_truthy()?
    {
        let message = "the tensor is the negative of what is in its memory";
        return Err(Raised::new("WrongValue", message).hint("give `tensor.resolve_neg()`").into());
    }
    let says = PyDict::new(py);
    if let Some(stream) = stream {
        says.set_item("stream", stream)?;
    }
    says.set_item("max_version", VERSION)?;
    let capsule = match given.call_method("__dlpack__", (), Some(&says)) {
        // Older producers know no versions.
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            says.del_item("max_version")?;
            given.call_method("__dlpack__", (), Some(&says))?
        }
        capsule => capsule?,
    };
    let is = |name: &CStr| {
        // SAFETY: any object may be asked.
        unsafe { ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) == 1 }
    };
    if is(VERSIONED) {
        take_as::<VersionedTensor>(&capsule)
    } else if is(OLD) {
        take_as::<OldTensor>(&capsule)
    } else {
        let what = if capsule.is_instance_of::<PyCapsule>() {
            "a capsule that was taken already"
        } else {
            "no capsule"
        };
        Err(Raised::new("WrongType", format!("`__dlpack__` returned {what}")).into())
    }
}

fn take_as<M: Managed>(capsule: &Bound<'_, PyAny>) -> PyResult<View> {
    // SAFETY: a capsule of this name, as was asked before.
    let managed = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), M::NAME.as_ptr()) };
    let Some(managed) = NonNull::new(managed.cast::<M>()) else { return Err(PyErr::fetch(capsule.py())) };
    // SAFETY: the name lives for ever. From here on the array is ours, and the capsule's destructor leaves it alone.
    if unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), M::TAKEN.as_ptr()) } != 0 {
        return Err(PyErr::fetch(capsule.py()));
    }
    let taken = Taken(managed);
    // SAFETY: what a capsule of this name holds, by the rules of DLPack, until its deleter is called.
    let managed = unsafe { managed.as_ref() };
    // Of another version nothing else may be looked at.
    let readonly = managed.readonly()?;
    let tensor = managed.tensor();
    let element = tensor.element()?;
    // SAFETY: its lists stay as long as it does.
    let (shape, strides) = unsafe { tensor.lists() };
    let layout = if strides.is_empty() {
        Layout::contiguous(element, shape)?
    } else {
        Layout::strided(element, shape.to_vec(), strides.to_vec())?
    };
    if tensor.address() < FIRST && layout.len() > 0 {
        let hint = "give one that is not only described: no tensor of `meta`, nor a fake one";
        return Err(Raised::new("WrongValue", "the array has no memory").hint(hint).into());
    }
    let (address, place) = (tensor.address(), Place { kind: tensor.device_type, id: tensor.device_id });
    Ok(View { address, layout, place, readonly, owner: Arc::new(taken) })
}
