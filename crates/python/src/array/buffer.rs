//! Arrays that come as a buffer of Python (`bytes`, `bytearray`, `array.array`, `mmap`), or by an interface of numpy.
//!
//! The two calls for buffers have had the same form in every Python 3; they are part of its stable interface since 3.11,
//! and so not among the declarations for 3.9.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::pin::Pin;
use std::sync::Arc;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use wholemem_os::width::to_u64;

use super::dlpack::FIRST;
use super::element::Element;
use super::layout::Layout;
use super::turn::Turn;
use super::view::{Place, View};
use crate::error::{Raised, Raises};
use crate::stream::finish;
use crate::wait::waiting;

#[repr(C)]
struct Buffer {
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

/// Strides and the format are wanted; whether it can be written is found out. Pointers to rows are not understood.
const STRIDES_AND_FORMAT: c_int = 0x0018 | 0x0004;

unsafe extern "C" {
    fn PyObject_CheckBuffer(object: *mut ffi::PyObject) -> c_int;
    fn PyObject_GetBuffer(object: *mut ffi::PyObject, view: *mut Buffer, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut Buffer);
}

/// A buffer that is held. It must not move: some producers point into it.
pub(super) struct Held(Pin<Box<Buffer>>);

impl Held {
    /// Whose buffer it is.
    pub(super) fn object(&self) -> Option<&Py<PyAny>> {
        let object = &raw const self.0.obj;
        // SAFETY: it is a reference that the buffer has until it is released, if it has one: a `Py` is nothing else.
        (!self.0.obj.is_null()).then(|| unsafe { &*object.cast::<Py<PyAny>>() })
    }
}

// SAFETY: the numbers are read only while it is made; afterwards it is only released, under the interpreter's lock.
unsafe impl Send for Held {}
// SAFETY: a shared reference gives the owner alone, which is a `Py`, and that is `Sync`.
unsafe impl Sync for Held {}

impl Drop for Held {
    fn drop(&mut self) {
        // An interpreter that is ending takes its objects along.
        let _ = Python::try_attach(|_| {
            // SAFETY: it was got once, is released once, and the lock is held.
            unsafe { PyBuffer_Release(&raw mut *self.0) };
        });
    }
}

/// Whether an object has a buffer.
pub(crate) fn is_buffer(given: &Bound<'_, PyAny>) -> bool {
    // SAFETY: any object may be asked.
    unsafe { PyObject_CheckBuffer(given.as_ptr()) == 1 }
}

/// Takes a buffer.
pub(crate) fn take(given: &Bound<'_, PyAny>) -> PyResult<View> {
    let nothing = || std::ptr::null_mut();
    let mut held = Held(Box::pin(Buffer {
        buf: nothing(),
        obj: std::ptr::null_mut(),
        len: 0,
        itemsize: 0,
        readonly: 1,
        ndim: 0,
        format: std::ptr::null_mut(),
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        suboffsets: std::ptr::null_mut(),
        internal: nothing(),
    }));
    // SAFETY: a live object, and a structure of the form that every Python 3 has. Failing, it leaves nothing to release,
    // and releasing nothing is harmless.
    if unsafe { PyObject_GetBuffer(given.as_ptr(), &raw mut *held.0, STRIDES_AND_FORMAT) } != 0 {
        return Err(PyErr::fetch(given.py()));
    }
    let Buffer { buf, itemsize, readonly, ndim, format, shape, strides, .. } = *held.0;
    let format = if format.is_null() {
        "B"
    } else {
        // SAFETY: a string that lives as long as the buffer is held.
        unsafe { CStr::from_ptr(format) }.to_str().unwrap_or("?")
    };
    let element = Element::of_format(format)?;
    let size = usize::try_from(itemsize).unwrap_or(0);
    if element.len() != size {
        return Err(Raised::new(
            "WrongType",
            format!("buffers of `{format}` with {size} bytes are not taken"),
        )
        .into());
    }
    let numbers = |from: *mut isize| match usize::try_from(ndim) {
        Ok(count) if count > 0 && !from.is_null() => {
            // SAFETY: as many numbers as there are dimensions, while the buffer is held.
            unsafe { std::slice::from_raw_parts(from, count) }.iter().map(|number| *number as i64).collect()
        }
        _ => Vec::new(),
    };
    let layout = in_bytes(element, numbers(shape), numbers(strides))?;
    let address = buf.expose_provenance() as u64;
    Ok(View { address, layout, place: Place::CPU, readonly: readonly != 0, owner: Arc::new(held) })
}

/// Takes what CUDA's interface describes, on whichever GPU it is. `stream` is where it will be used, and comes behind what
/// its maker says has to be waited for; where nobody knows, it is waited for here.
pub(crate) fn take_cuda_interface(
    given: &Bound<'_, PyAny>,
    says: &Bound<'_, PyDict>,
    stream: Option<i64>,
) -> PyResult<View> {
    let mut view = take_interface(given, says, Place::cuda(0))?;
    view.place = Place::at(view.address).raised()?;
    let awaited = says.get_item("stream")?.filter(|stream| !stream.is_none());
    if let Some(awaited) = awaited.map(|stream| stream.extract::<u64>()).transpose()?
        && view.layout.count() > 0
    {
        let device = view.place.device().raised()?;
        // SAFETY: by the protocol of CUDA's interface the producer names a stream of the array's device that is to be waited for.
        let before = unsafe { Turn::new(&device, awaited, None) };
        match stream.and_then(|stream| u64::try_from(stream).ok()) {
            Some(stream) => {
                // SAFETY: the calling Python code guarantees that the stream on which it uses the array is one of its device.
                unsafe { Turn::new(&device, stream, None) }.follow(&before).raised()?;
            }
            None => waiting(given.py(), || finish(&before.stream()))?,
        }
    }
    Ok(view)
}

/// Takes what an interface of numpy's kind describes: `__array_interface__`, or CUDA's.
pub(crate) fn take_interface(
    given: &Bound<'_, PyAny>,
    says: &Bound<'_, PyDict>,
    place: Place,
) -> PyResult<View> {
    let item = |name: &str| {
        let missing =
            || Raised::new("WrongType", format!("the interface of the array does not say its `{name}`"));
        says.get_item(name)?.ok_or_else(|| PyErr::from(missing()))
    };
    let (address, readonly) = item("data")?.extract::<(u64, bool)>().map_err(|_: PyErr| {
        Raised::new("WrongType", "the interface of the array names no address").hint("give the array itself")
    })?;
    let element = Element::of_typestr(&item("typestr")?.extract::<String>()?)?;
    let strides = says.get_item("strides")?.filter(|strides| !strides.is_none());
    let strides = strides.map(|strides| strides.extract()).transpose()?.unwrap_or_default();
    let layout = in_bytes(element, item("shape")?.extract()?, strides)?;
    let (before, behind) = layout.extent()?;
    let first = address.checked_sub(to_u64(before)).filter(|first| *first >= FIRST);
    if layout.len() > 0 && (first.is_none() || address.checked_add(to_u64(behind)).is_none()) {
        let message = format!("the interface of the array says that it lies at {address:#x}");
        return Err(Raised::new("WrongValue", message).hint("give the array itself").into());
    }
    Ok(View { address, layout, place, readonly, owner: Arc::new(given.clone().unbind()) })
}

/// A layout whose strides are in bytes; none for elements without gaps.
fn in_bytes(element: Element, shape: Vec<i64>, mut strides: Vec<i64>) -> Result<Layout, Raised> {
    if strides.is_empty() {
        return Layout::contiguous(element, &shape);
    }
    let len = i64::try_from(element.len()).unwrap_or(1);
    for (stride, count) in strides.iter_mut().zip(&shape) {
        if *stride % len != 0 && *count > 1 {
            let message = format!("elements of {len} bytes lie {stride} bytes apart");
            return Err(Raised::new("WrongStride", message).hint("make the array contiguous first"));
        }
        *stride /= len;
    }
    Layout::strided(element, shape, strides)
}
