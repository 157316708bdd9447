//! Exchanges arrays with other frameworks through DLPack, which passes a memory descriptor with a deleter in a Python capsule.
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

/// The DLPack version of the structures in this module. Arrays of any minor version with the same major version are accepted.
const VERSION: (u32, u32) = (1, 1);
/// The lowest address that memory can have on a system with virtual memory.
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
    /// An empty DLPack descriptor, which a framework fills in.
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

    /// Returns the shape and the strides of a DLPack descriptor. The strides are empty if the elements are contiguous.
    ///
    /// # Safety
    /// The producer of the descriptor keeps its shape and strides alive for `'a`.
    pub(super) unsafe fn lists<'a>(&self) -> (&'a [i64], &'a [i64]) {
        let numbers = |from: *mut i64| match usize::try_from(self.ndim) {
            Ok(count) if count > 0 && !from.is_null() => {
                // SAFETY: the caller of `lists` guarantees that the producer keeps the shape and strides alive for `'a`; `from`
                // is one of them, not null, with `ndim` values.
                unsafe { std::slice::from_raw_parts(from, count) }
            }
            _ => &[],
        };
        (numbers(self.shape), numbers(self.strides))
    }
}

/// The structure in a DLPack capsule, which has two formats: unversioned and versioned.
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

/// An array exported through DLPack: the structure that the consumer reads, and the view that keeps the memory alive.
struct ExportedTensor<M> {
    managed: M,
    shape: Vec<i64>,
    strides: Vec<i64>,
    _view: View,
}

/// The DLPack deleter of an exported array. The deleter does not use the Python interpreter.
unsafe extern "C" fn delete<M: ManagedTensor>(managed: *mut M) {
    // SAFETY: `managed` is null or the pointer that the consumer received, which stays valid until its deleter is called.
    let Some(managed) = (unsafe { managed.as_ref() }) else { return };
    let exported = managed.context().cast::<ExportedTensor<M>>();
    // SAFETY: `exported` is the pointer of the box that `export_as` leaked, and a consumer calls the deleter only once.
    drop(unsafe { Box::from_raw(exported) });
}

/// Exports a view as a DLPack capsule, in the versioned format if `versioned`. `is_copied` marks a copy made for the consumer.
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
    // SAFETY: `exported` points to the box that was just leaked and is not shared yet.
    let managed = unsafe { &raw mut (*exported.as_ptr()).managed };
    // SAFETY: `managed` points into the box that was just leaked; the replaced value has no destructor.
    unsafe { managed.write(M::new(tensor, exported.as_ptr().cast(), flags)) };
    // SAFETY: `M::NAME` is static, and the destructor `destroy::<M>` expects the pointer to an `M` that this capsule holds.
    let capsule = unsafe { ffi::PyCapsule_New(managed.cast(), M::NAME.as_ptr(), Some(destroy::<M>)) };
    if capsule.is_null() {
        // SAFETY: `managed` was just exported and no consumer has the pointer, so this is the only call of the deleter.
        unsafe { delete(managed) };
        return Err(PyErr::fetch(py));
    }
    // SAFETY: `PyCapsule_New` returned a new reference that is not null.
    Ok(unsafe { Bound::from_owned_ptr(py, capsule) })
}

/// The destructor of a DLPack capsule, which releases the exported array if no consumer has taken it.
unsafe extern "C" fn destroy<M: ManagedTensor>(capsule: *mut ffi::PyObject) {
    // SAFETY: `capsule` is live: the interpreter calls this destructor with the capsule that it destroys.
    if unsafe { ffi::PyCapsule_IsValid(capsule, M::NAME.as_ptr()) } == 0 {
        return;
    }
    // SAFETY: `PyCapsule_IsValid` returned true, so the capsule has the name `M::NAME`.
    let managed = unsafe { ffi::PyCapsule_GetPointer(capsule, M::NAME.as_ptr()) };
    // SAFETY: `managed` is the pointer that `export_as` put into the capsule. No consumer has renamed the capsule, so this is the
    // only call of the deleter.
    unsafe { delete(managed.cast::<M>()) };
}

/// An array imported from another framework through DLPack. Dropping it calls the producer's deleter, from any thread.
struct ImportedTensor<M: ManagedTensor>(NonNull<M>);

// SAFETY: DLPack allows the deleter of a tensor to be called from any thread; nothing else is accessed through the pointer.
unsafe impl<M: ManagedTensor> Send for ImportedTensor<M> {}
// SAFETY: a shared `ImportedTensor` gives no access to its pointer, which only `drop` uses.
unsafe impl<M: ManagedTensor> Sync for ImportedTensor<M> {}

impl<M: ManagedTensor> Drop for ImportedTensor<M> {
    fn drop(&mut self) {
        // SAFETY: `self.0` is the structure of the producer, which keeps it alive until its deleter is called.
        let deleter = unsafe { self.0.as_ref() }.deleter();
        if let Some(deleter) = deleter {
            // SAFETY: `self.0` is the producer's structure, and `drop` of its only owner calls the deleter once.
            unsafe { deleter(self.0.as_ptr()) };
        }
    }
}

/// Imports an array through `__dlpack__`. `stream` is the stream on which a GPU will use the array.
pub(crate) fn import(object: &Bound<'_, PyAny>, stream: Option<i64>) -> PyResult<View> {
    let py = object.py();
    // torch also exports a lazily negated tensor, although DLPack has no flag for the negation, so such a tensor is rejected.
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
        // A producer of an older DLPack version does not accept the argument `max_version`.
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            kwargs.del_item("max_version")?;
            object.call_method("__dlpack__", (), Some(&kwargs))?
        }
        capsule => capsule?,
    };
    let has_name = |name: &CStr| {
        // SAFETY: `PyCapsule_IsValid` accepts any live object, and `capsule` is a live reference.
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
    // SAFETY: `capsule` is live, and the caller of `import_as` checked that its name is `M::NAME`.
    let managed = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), M::NAME.as_ptr()) };
    let Some(managed) = NonNull::new(managed.cast::<M>()) else { return Err(PyErr::fetch(capsule.py())) };
    // SAFETY: `capsule` is live, and `M::USED_NAME` is static. After the capsule is renamed, this function owns the array, and
    // the capsule's destructor does not release it.
    if unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), M::USED_NAME.as_ptr()) } != 0 {
        return Err(PyErr::fetch(capsule.py()));
    }
    let imported = ImportedTensor(managed);
    // SAFETY: by the DLPack protocol, a capsule with the name `M::NAME` holds an `M` that is valid until its deleter is called.
    let managed = unsafe { managed.as_ref() };
    // `readonly` checks the major version first: if it differs, no other field may be read.
    let readonly = managed.readonly()?;
    let tensor = managed.tensor();
    let element = tensor.element()?;
    // SAFETY: the producer keeps the tensor's shape and strides alive until the deleter is called, and both are copied before.
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
