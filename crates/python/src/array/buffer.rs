//! Imports arrays through Python's buffer protocol (`bytes`, `bytearray`, `array.array`, `mmap`) or numpy's array interfaces.
//!
//! The buffer functions have the same signature in every Python 3, but they are in the stable ABI only since 3.11. pyo3
//! does not declare them for 3.9, so this module does.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::pin::Pin;
use std::sync::Arc;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use wholemem_os::width::to_u64;

use super::dlpack::LOWEST_ADDRESS;
use super::element::Element;
use super::layout::Layout;
use super::stream_order::FrameworkStream;
use super::view::{DlDevice, View};
use crate::error::{Exception, IntoPyResult};
use crate::stream::finish;
use crate::wait::run_blocking;

#[repr(C)]
struct RawPyBuffer {
    buf: *mut c_void,
    obj: *mut ffi::PyObject,
    len: isize,
    itemsize: isize,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut isize,
    strides: *mut isize,
    suboffsets: *mut isize,
    internal: *mut c_void,
}

/// Flags of `PyObject_GetBuffer` that request strides and the format. Read-only buffers are accepted; buffers with suboffsets are
/// not.
const STRIDES_AND_FORMAT: c_int = 0x0018 | 0x0004;

unsafe extern "C" {
    fn PyObject_CheckBuffer(object: *mut ffi::PyObject) -> c_int;
    fn PyObject_GetBuffer(object: *mut ffi::PyObject, view: *mut RawPyBuffer, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut RawPyBuffer);
}

/// A buffer that was acquired through Python's buffer protocol. The structure is pinned, because some exporters point into it.
pub(super) struct HeldBuffer(Pin<Box<RawPyBuffer>>);

impl HeldBuffer {
    /// Returns the object that exported the buffer.
    pub(super) fn object(&self) -> Option<&Py<PyAny>> {
        let object = &raw const self.0.obj;
        // SAFETY: `obj` is not null and is a strong reference that the buffer holds until it is released. `Py` is a transparent
        // pointer.
        (!self.0.obj.is_null()).then(|| unsafe { &*object.cast::<Py<PyAny>>() })
    }
}

// SAFETY: after construction, only the field `obj` is read, as a `Py`, which is `Send`; `drop` releases the buffer with the GIL
// held.
unsafe impl Send for HeldBuffer {}
// SAFETY: a shared `HeldBuffer` exposes only the exporting object, as a `Py`, which is `Sync`.
unsafe impl Sync for HeldBuffer {}

impl Drop for HeldBuffer {
    fn drop(&mut self) {
        // While the interpreter is finalizing, the buffer is not released: the interpreter itself frees the exporting object.
        let _ = Python::try_attach(|_| {
            // SAFETY: `PyObject_GetBuffer` acquired this buffer, and only `drop` releases it, with the GIL held.
            unsafe { PyBuffer_Release(&raw mut *self.0) };
        });
    }
}

/// Returns true if an object supports Python's buffer protocol.
pub(crate) fn is_buffer(object: &Bound<'_, PyAny>) -> bool {
    // SAFETY: `PyObject_CheckBuffer` accepts any live object, and `object` is a live reference.
    unsafe { PyObject_CheckBuffer(object.as_ptr()) == 1 }
}

/// Imports an object as an array through Python's buffer protocol.
pub(crate) fn import(object: &Bound<'_, PyAny>) -> PyResult<View> {
    let null = || std::ptr::null_mut();
    let mut buffer = HeldBuffer(Box::pin(RawPyBuffer {
        buf: null(),
        obj: std::ptr::null_mut(),
        len: 0,
        itemsize: 0,
        readonly: 1,
        ndim: 0,
        format: std::ptr::null_mut(),
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        suboffsets: std::ptr::null_mut(),
        internal: null(),
    }));
    // SAFETY: `object` is live, and `buffer.0` has the layout of `Py_buffer`. If the call fails, the field `obj` stays null, and
    // releasing the buffer has no effect.
    if unsafe { PyObject_GetBuffer(object.as_ptr(), &raw mut *buffer.0, STRIDES_AND_FORMAT) } != 0 {
        return Err(PyErr::fetch(object.py()));
    }
    let RawPyBuffer { buf, itemsize, readonly, ndim, format, shape, strides, .. } = *buffer.0;
    let format = if format.is_null() {
        "B"
    } else {
        // SAFETY: `format` is not null and points to a NUL-terminated string that lives until the buffer is released.
        unsafe { CStr::from_ptr(format) }.to_str().unwrap_or("?")
    };
    let element = Element::of_format(format)?;
    let size = usize::try_from(itemsize).unwrap_or(0);
    if element.len() != size {
        return Err(Exception::new(
            "WrongType",
            format!("buffers of format `{format}` with {size} bytes per element are not supported"),
        )
        .into());
    }
    let numbers = |from: *mut isize| match usize::try_from(ndim) {
        Ok(count) if count > 0 && !from.is_null() => {
            // SAFETY: `from` is not null and points to the buffer's shape or strides: `ndim` values that the exporter provides
            // until the buffer is released.
            unsafe { std::slice::from_raw_parts(from, count) }.iter().map(|number| *number as i64).collect()
        }
        _ => Vec::new(),
    };
    let layout = layout_from_byte_strides(element, numbers(shape), numbers(strides))?;
    let address = buf.expose_provenance() as u64;
    Ok(View { address, layout, dl_device: DlDevice::CPU, readonly: readonly != 0, owner: Arc::new(buffer) })
}

/// Imports an array through `__cuda_array_interface__`. Work on `stream` is ordered after the stream that the producer
/// names; if `stream` is `None`, the call waits for the producer's stream.
pub(crate) fn import_cuda_array_interface(
    object: &Bound<'_, PyAny>,
    interface: &Bound<'_, PyDict>,
    stream: Option<i64>,
) -> PyResult<View> {
    let mut view = import_array_interface(object, interface, DlDevice::cuda(0))?;
    view.dl_device = DlDevice::at(view.address).into_py()?;
    let producer_stream = interface.get_item("stream")?.filter(|stream| !stream.is_none());
    if let Some(producer_stream) = producer_stream.map(|stream| stream.extract::<u64>()).transpose()?
        && view.layout.count() > 0
    {
        let device = view.dl_device.device().into_py()?;
        // SAFETY: by the protocol of `__cuda_array_interface__`, `producer_stream` is a live stream of the array's device.
        let producer = unsafe { FrameworkStream::new(&device, producer_stream, None) };
        match stream.and_then(|stream| u64::try_from(stream).ok()) {
            Some(stream) => {
                // SAFETY: the calling Python code guarantees that `stream` is a live stream of the array's device.
                unsafe { FrameworkStream::new(&device, stream, None) }.wait_for(&producer).into_py()?;
            }
            None => run_blocking(object.py(), || finish(&producer.stream()))?,
        }
    }
    Ok(view)
}

/// Imports an array through `__array_interface__` or `__cuda_array_interface__`.
pub(crate) fn import_array_interface(
    object: &Bound<'_, PyAny>,
    interface: &Bound<'_, PyDict>,
    dl_device: DlDevice,
) -> PyResult<View> {
    let item = |name: &str| {
        let missing = || Exception::new("WrongType", format!("the array interface has no `{name}`"));
        interface.get_item(name)?.ok_or_else(|| PyErr::from(missing()))
    };
    let (address, readonly) = item("data")?.extract::<(u64, bool)>().map_err(|_: PyErr| {
        Exception::new("WrongType", "the array interface has no address").hint("pass the array itself")
    })?;
    let element = Element::of_typestr(&item("typestr")?.extract::<String>()?)?;
    let strides = interface.get_item("strides")?.filter(|strides| !strides.is_none());
    let strides = strides.map(|strides| strides.extract()).transpose()?.unwrap_or_default();
    let layout = layout_from_byte_strides(element, item("shape")?.extract()?, strides)?;
    let (before, behind) = layout.extent()?;
    let first = address.checked_sub(to_u64(before)).filter(|first| *first >= LOWEST_ADDRESS);
    if layout.len() > 0 && (first.is_none() || address.checked_add(to_u64(behind)).is_none()) {
        let message = format!("the array interface has the invalid address {address:#x}");
        return Err(Exception::new("WrongValue", message).hint("pass the array itself").into());
    }
    Ok(View { address, layout, dl_device, readonly, owner: Arc::new(object.clone().unbind()) })
}

/// Creates a layout from strides in bytes. Empty strides stand for contiguous elements.
fn layout_from_byte_strides(
    element: Element,
    shape: Vec<i64>,
    mut strides: Vec<i64>,
) -> Result<Layout, Exception> {
    if strides.is_empty() {
        return Layout::contiguous(element, &shape);
    }
    let len = i64::try_from(element.len()).unwrap_or(1);
    for (stride, count) in strides.iter_mut().zip(&shape) {
        if *stride % len != 0 && *count > 1 {
            let message = format!("elements of {len} bytes have a stride of {stride} bytes");
            return Err(Exception::new("WrongStride", message).hint("make the array contiguous first"));
        }
        *stride /= len;
    }
    Layout::strided(element, shape, strides)
}
