//! DLPack: exchanges arrays between frameworks as a pointer with a deleter.
//!
//! ```text
//!   producer: a capsule `dltensor_versioned` ──> consumer renames it to `used_dltensor_versioned` and owns it:
//!                                                 it calls the deleter once, from any thread
//!             the capsule is not consumed ──> the capsule's destructor calls the deleter
//! ```
//!
//! A versioned capsule has a read-only flag, which some consumers ignore. An unversioned capsule has none: a read-only
//! array is exported in one only as a copy-on-write map (`private`), and an imported one counts as writable.

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
use super::view::{DlDevice, View};
use crate::error::Exception;

const UNVERSIONED: &CStr = c"dltensor";
const UNVERSIONED_USED: &CStr = c"used_dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
const VERSIONED_USED: &CStr = c"used_dltensor_versioned";

/// The version of the structures below. Any minor version of the same major version is accepted.
const VERSION: (u32, u32) = (1, 1);
/// No memory is located below this address on a system with virtual memory.
pub(super) const LOWEST_ADDRESS: u64 = 4096;

const READ_ONLY: u64 = 1;
const IS_COPIED: u64 = 2;

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct DlDataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
#[derive(Debug)]
pub(super) struct DlTensor {
    data: *mut c_void,
    pub(super) device_type: i32,
    pub(super) device_id: i32,
    ndim: i32,
    dtype: DlDataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

impl DlTensor {
    /// A descriptor before the framework fills it in.
    pub(super) const EMPTY: Self = Self {
        data: std::ptr::null_mut(),
        device_type: 0,
        device_id: 0,
        ndim: 0,
        dtype: DlDataType { code: 0, bits: 0, lanes: 0 },
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };

    pub(super) fn element(&self) -> Result<Element, Exception> {
        Element::of_code(self.dtype.code, self.dtype.bits, self.dtype.lanes)
    }

    pub(super) fn address(&self) -> u64 {
        self.data.expose_provenance() as u64 + self.byte_offset
    }

    /// The shape and the strides. The strides are empty if the elements are contiguous.
    ///
    /// # Safety
    /// The producer of the descriptor keeps its shape and strides alive for `'a`.
    pub(super) unsafe fn lists<'a>(&self) -> (&'a [i64], &'a [i64]) {
        let numbers = |from: *mut i64| match usize::try_from(self.ndim) {
            Ok(count) if count > 0 && !from.is_null() => {
                // SAFETY: the caller guarantees that the producer keeps `ndim` values alive for `'a`.
                unsafe { std::slice::from_raw_parts(from, count) }
            }
            _ => &[],
        };
        (numbers(self.shape), numbers(self.strides))
    }
}

/// The two capsule formats of DLPack: unversioned and versioned.
trait ManagedTensor: Sized + 'static {
    const NAME: &'static CStr;
    const USED_NAME: &'static CStr;

    fn new(tensor: DlTensor, context: *mut c_void, flags: u64) -> Self;
    fn tensor(&self) -> &DlTensor;
    fn context(&self) -> *mut c_void;
    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)>;
    fn readonly(&self) -> Result<bool, Exception>;
}

#[repr(C)]
struct UnversionedTensor {
    tensor: DlTensor,
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
    tensor: DlTensor,
}

const _: () = assert!(size_of::<DlTensor>() == 48 && size_of::<UnversionedTensor>() == 64);
const _: () = assert!(size_of::<VersionedTensor>() == 80);

impl ManagedTensor for UnversionedTensor {
    const NAME: &'static CStr = UNVERSIONED;
    const USED_NAME: &'static CStr = UNVERSIONED_USED;

    fn new(tensor: DlTensor, context: *mut c_void, _: u64) -> Self {
        Self { tensor, context, deleter: Some(delete::<Self>) }
    }

    fn tensor(&self) -> &DlTensor {
        &self.tensor
    }

    fn context(&self) -> *mut c_void {
        self.context
    }

    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)> {
        self.deleter
    }

    fn readonly(&self) -> Result<bool, Exception> {
        Ok(false)
    }
}

impl ManagedTensor for VersionedTensor {
    const NAME: &'static CStr = VERSIONED;
    const USED_NAME: &'static CStr = VERSIONED_USED;

    fn new(tensor: DlTensor, context: *mut c_void, flags: u64) -> Self {
        let (major, minor) = VERSION;
        Self { major, minor, context, deleter: Some(delete::<Self>), flags, tensor }
    }

    fn tensor(&self) -> &DlTensor {
        &self.tensor
    }

    fn context(&self) -> *mut c_void {
        self.context
    }

    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)> {
        self.deleter
    }

    fn readonly(&self) -> Result<bool, Exception> {
        if self.major != VERSION.0 {
            let message = format!("the array uses version {}.{} of DLPack", self.major, self.minor);
            return Err(Exception::new("Unsupported", message).hint("only version 1 is supported"));
        }
        Ok(self.flags & READ_ONLY != 0)
    }
}

/// An exported array: the structure that the consumer reads, and the view that keeps the memory alive.
struct ExportedTensor<M> {
    managed: M,
    shape: Vec<i64>,
    strides: Vec<i64>,
    _view: View,
}

/// The deleter of an exported array. It does not use the interpreter.
unsafe extern "C" fn delete<M: ManagedTensor>(managed: *mut M) {
    // SAFETY: the consumer passes the pointer that it received.
    let Some(managed) = (unsafe { managed.as_ref() }) else { return };
    let exported = managed.context().cast::<ExportedTensor<M>>();
    // SAFETY: the context is the box that `export_as` leaked, and a consumer calls the deleter once.
    drop(unsafe { Box::from_raw(exported) });
}

/// Exports a view as a capsule, versioned if the consumer accepts that. `is_copied` marks a copy made for the consumer.
pub(crate) fn export<'py>(
    py: Python<'py>,
    view: &View,
    versioned: bool,
    is_copied: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let flags = if view.readonly { READ_ONLY } else { 0 } | if is_copied { IS_COPIED } else { 0 };
    if versioned {
        export_as::<VersionedTensor>(py, view, flags)
    } else {
        export_as::<UnversionedTensor>(py, view, flags)
    }
}

fn export_as<'py, M: ManagedTensor>(py: Python<'py>, view: &View, flags: u64) -> PyResult<Bound<'py, PyAny>> {
    let Layout { element, shape, strides } = view.layout.clone();
    let mut exported = Box::new(ExportedTensor::<M> {
        managed: M::new(DlTensor::EMPTY, std::ptr::null_mut(), flags),
        shape,
        strides,
        _view: view.clone(),
    });
    let tensor = DlTensor {
        data: std::ptr::with_exposed_provenance_mut(to_usize(view.address)),
        device_type: view.dl_device.exported().kind,
        device_id: view.dl_device.exported().id,
        ndim: i32::try_from(exported.shape.len()).expect("an array has fewer than 2^31 dimensions"),
        dtype: DlDataType { code: element.code, bits: element.bits, lanes: 1 },
        shape: exported.shape.as_mut_ptr(),
        strides: exported.strides.as_mut_ptr(),
        byte_offset: 0,
    };
    let exported = NonNull::from(Box::leak(exported));
    // SAFETY: the box was just leaked and is not shared yet.
    let managed = unsafe { &raw mut (*exported.as_ptr()).managed };
    // SAFETY: `managed` points into the box that was just leaked; the replaced value has no destructor.
    unsafe { managed.write(M::new(tensor, exported.as_ptr().cast(), flags)) };
    // SAFETY: the name is static, and the destructor matches the content of a capsule with this name.
    let capsule = unsafe { ffi::PyCapsule_New(managed.cast(), M::NAME.as_ptr(), Some(destroy::<M>)) };
    if capsule.is_null() {
        // SAFETY: no consumer has the pointer, so this is the only call of the deleter.
        unsafe { delete(managed) };
        return Err(PyErr::fetch(py));
    }
    // SAFETY: `PyCapsule_New` returned a new reference that is not null.
    Ok(unsafe { Bound::from_owned_ptr(py, capsule) })
}

/// The destructor of a capsule: releases the array if no consumer has taken it.
unsafe extern "C" fn destroy<M: ManagedTensor>(capsule: *mut ffi::PyObject) {
    // SAFETY: the interpreter passes a live capsule.
    if unsafe { ffi::PyCapsule_IsValid(capsule, M::NAME.as_ptr()) } == 0 {
        return;
    }
    // SAFETY: the capsule has this name, as checked above.
    let managed = unsafe { ffi::PyCapsule_GetPointer(capsule, M::NAME.as_ptr()) };
    // SAFETY: no consumer has renamed the capsule, so this is the only call of the deleter.
    unsafe { delete(managed.cast::<M>()) };
}

/// An array imported from another framework. Dropping it calls the producer's deleter, from any thread.
struct ImportedTensor<M: ManagedTensor>(NonNull<M>);

// SAFETY: DLPack allows deleters to be called from any thread; nothing else is accessed through the pointer.
unsafe impl<M: ManagedTensor> Send for ImportedTensor<M> {}
// SAFETY: a shared reference gives no access to the pointer, which only `drop` uses.
unsafe impl<M: ManagedTensor> Sync for ImportedTensor<M> {}

impl<M: ManagedTensor> Drop for ImportedTensor<M> {
    fn drop(&mut self) {
        // SAFETY: the producer keeps the structure alive until its deleter is called.
        let deleter = unsafe { self.0.as_ref() }.deleter();
        if let Some(deleter) = deleter {
            // SAFETY: this owner calls the deleter once.
            unsafe { deleter(self.0.as_ptr()) };
        }
    }
}

/// Imports an array through `__dlpack__`. `stream` is the stream on which a GPU will use the array.
pub(crate) fn import(object: &Bound<'_, PyAny>, stream: Option<i64>) -> PyResult<View> {
    let py = object.py();
    // torch exports tensors with a lazy negation, but DLPack has no flag for it.
    if let Ok(is_neg) = object.getattr(intern!(py, "is_neg"))
        && is_neg.call0()?.is_truthy()?
    {
        let message = "the tensor is a lazily negated view of its memory";
        return Err(Exception::new("WrongValue", message).hint("pass `tensor.resolve_neg()`").into());
    }
    let kwargs = PyDict::new(py);
    if let Some(stream) = stream {
        kwargs.set_item("stream", stream)?;
    }
    kwargs.set_item("max_version", VERSION)?;
    let capsule = match object.call_method("__dlpack__", (), Some(&kwargs)) {
        // Older producers do not accept `max_version`.
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            kwargs.del_item("max_version")?;
            object.call_method("__dlpack__", (), Some(&kwargs))?
        }
        capsule => capsule?,
    };
    let has_name = |name: &CStr| {
        // SAFETY: the function accepts any live object.
        unsafe { ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) == 1 }
    };
    if has_name(VERSIONED) {
        import_as::<VersionedTensor>(&capsule)
    } else if has_name(UNVERSIONED) {
        import_as::<UnversionedTensor>(&capsule)
    } else {
        let returned = if capsule.is_instance_of::<PyCapsule>() {
            "a capsule that was consumed before"
        } else {
            "an object that is not a capsule"
        };
        Err(Exception::new("WrongType", format!("`__dlpack__` returned {returned}")).into())
    }
}

fn import_as<M: ManagedTensor>(capsule: &Bound<'_, PyAny>) -> PyResult<View> {
    // SAFETY: the caller checked that the capsule has this name.
    let managed = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), M::NAME.as_ptr()) };
    let Some(managed) = NonNull::new(managed.cast::<M>()) else { return Err(PyErr::fetch(capsule.py())) };
    // SAFETY: the name is static. From here on this process owns the array, and the capsule's destructor ignores it.
    if unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), M::USED_NAME.as_ptr()) } != 0 {
        return Err(PyErr::fetch(capsule.py()));
    }
    let imported = ImportedTensor(managed);
    // SAFETY: by the DLPack protocol, a capsule of this name holds this structure until its deleter is called.
    let managed = unsafe { managed.as_ref() };
    // If the major version differs, no other field may be read.
    let readonly = managed.readonly()?;
    let tensor = managed.tensor();
    let element = tensor.element()?;
    // SAFETY: the producer keeps shape and strides alive until the deleter is called; both are copied below.
    let (shape, strides) = unsafe { tensor.lists() };
    let layout = if strides.is_empty() {
        Layout::contiguous(element, shape)?
    } else {
        Layout::strided(element, shape.to_vec(), strides.to_vec())?
    };
    if tensor.address() < LOWEST_ADDRESS && layout.len() > 0 {
        let hint = "pass a tensor with storage, not a `meta` or fake tensor";
        return Err(Exception::new("WrongValue", "the array has no memory").hint(hint).into());
    }
    let (address, dl_device) =
        (tensor.address(), DlDevice { kind: tensor.device_type, id: tensor.device_id });
    Ok(View { address, layout, dl_device, readonly, owner: Arc::new(imported) })
}
