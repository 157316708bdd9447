//! The value that `put` copies into a store: one array, or several arrays with names, in host memory or on a GPU.
//!
//! An array on a GPU is copied to memory of the store on the same GPU, after the work that is enqueued on it. The object is
//! published when the copy is complete. Objects are contiguous in C order, whatever the strides of the arrays are.

use std::collections::HashSet;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyMapping, PyString};
use wholemem_hal::{Device, Rights};
use wholemem_store::Client;

use super::draft::StoreDraft;
use crate::array::{self, Element, FrameworkStream, Layout, View};
use crate::error::{Exception, IntoPyResult, name_argument};
use crate::number::Shape;
use crate::stream::finish;

/// Converts the values of a Python mapping. If a value cannot be converted, the error names its key.
fn members<T>(
    mapping: &Bound<'_, PyMapping>,
    convert: impl Fn(&Bound<'_, PyAny>) -> PyResult<T>,
) -> PyResult<Vec<(String, T)>> {
    let (mut members, mut names) = (Vec::with_capacity(mapping.len()?), HashSet::new());
    for item in mapping.items()?.iter() {
        let (name, value) = item.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>()?;
        let Ok(name) = name.extract::<String>() else {
            let message = format!("{} is not a name of an array", name.repr()?);
            return Err(Exception::new("WrongType", message).hint("names are `str`").into());
        };
        if !names.insert(name.clone()) {
            let raised = Exception::new("WrongValue", format!("two arrays are named `{name}`"));
            return Err(raised.hint("give each array of a pack its own name").into());
        }
        let converted =
            convert(&value).map_err(|error| name_argument(value.py(), &format!("`{name}`"), error))?;
        members.push((name, converted));
    }
    Ok(members)
}

/// Parses the shapes and element types of the arrays of a pack (several arrays in one object).
pub(super) fn layouts(arrays: &Bound<'_, PyAny>) -> PyResult<Vec<(String, Layout)>> {
    let Ok(mapping) = arrays.cast::<PyMapping>() else {
        let message = format!("`{}` is not a mapping", arrays.get_type().name()?);
        let hint = "pass shapes and types by name, such as `{\"weight\": ((2, 3), \"float32\")}`";
        return Err(Exception::new("WrongType", message).hint(hint).into());
    };
    members(mapping, |value| {
        let Ok((shape, dtype)) = value.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>() else {
            let raised =
                Exception::new("WrongType", format!("{} is not a pair of shape and type", value.repr()?));
            return Err(raised.hint("pass a pair such as `((2, 3), \"float32\")`").into());
        };
        let (shape, dtype) = (shape.extract::<Shape>()?, dtype.extract::<Element>()?);
        Layout::contiguous(dtype, &shape.signed()).into_py()
    })
}

/// The value that `put` copies into a store: one array, or several arrays with names, in host memory or on a GPU.
pub(super) enum PutValue {
    One(View),
    Many(Vec<(String, View)>),
}

/// Returns a tensor of torch as one that can be exported: without a gradient, as a parameter of a module has one; with elements that
/// are stored as they are, and not to be conjugated or negated by every reader; and on a GPU contiguous. Other values are returned
/// unchanged.
fn exportable<'py>(value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = value.py();
    let is_true = |value: &Bound<'py, PyAny>, name: &Bound<'py, PyString>| match value.getattr_opt(name)? {
        Some(found) if found.is_callable() => found.call0()?.is_truthy(),
        Some(found) => found.is_truthy(),
        None => Ok(false),
    };
    // Only tensors of torch have this attribute.
    if value.getattr_opt(intern!(py, "requires_grad"))?.is_none() {
        return Ok(value.clone());
    }
    let mut tensor = value.call_method0(intern!(py, "detach"))?;
    if is_true(&tensor, intern!(py, "is_conj"))? {
        tensor = tensor.call_method0(intern!(py, "resolve_conj"))?;
    }
    if is_true(&tensor, intern!(py, "is_neg"))? {
        tensor = tensor.call_method0(intern!(py, "resolve_neg"))?;
    }
    if is_true(&tensor, intern!(py, "is_cuda"))? {
        tensor = tensor.call_method0(intern!(py, "contiguous"))?;
    }
    Ok(tensor)
}

pub(super) fn import_one(value: &Bound<'_, PyAny>) -> PyResult<View> {
    array::import_on_default_stream(&exportable(value)?)
}

impl PutValue {
    pub(super) fn import(value: &Bound<'_, PyAny>) -> PyResult<Self> {
        match value.cast::<PyMapping>() {
            Ok(mapping) => members(mapping, import_one).map(Self::Many),
            Err(_) => import_one(value).map(Self::One),
        }
    }

    /// Returns the arrays, each with its name for errors.
    fn views(&self) -> Vec<(String, &View)> {
        match self {
            Self::One(view) => vec![("the array".to_owned(), view)],
            Self::Many(arrays) => arrays.iter().map(|(name, view)| (format!("`{name}`"), view)).collect(),
        }
    }

    /// Returns the GPU on which all arrays are; `None` if they are in host memory or empty.
    fn device(&self) -> Result<Option<Device>, Exception> {
        let views = self.views();
        let mut views = views.iter().filter(|(_, view)| view.layout.count() > 0);
        let Some((first, view)) = views.next() else { return Ok(None) };
        let is_same_device = |other: &View| {
            if view.dl_device.is_host() {
                other.dl_device.is_host()
            } else {
                other.dl_device == view.dl_device
            }
        };
        if let Some((argument, other)) = views.find(|(_, other)| !is_same_device(other)) {
            let message =
                format!("{first} is on {}, but {argument} is on {}", view.dl_device, other.dl_device);
            return Err(Exception::new("WrongDevice", message)
                .hint("a pack is on one device: move the arrays to one device, or put two packs"));
        }
        if view.dl_device.is_host() { Ok(None) } else { view.dl_device.device().map(Some) }
    }

    /// Copies the arrays into the store, and returns the version of the new object under its name.
    pub(super) fn put(&self, client: &Client, name: &str) -> Result<u64, Exception> {
        let (device, views) = (self.device()?, self.views());
        if device.is_some() {
            // The strides of the arrays are checked before memory of the store is allocated.
            views.iter().try_for_each(|(argument, view)| view.check_contiguous(argument))?;
        }
        let mut draft = match self {
            Self::One(view) => StoreDraft::one(client, name, &view.layout, device.as_ref())?,
            Self::Many(arrays) => {
                let layouts = arrays.iter().map(|(name, view)| (name.as_str(), &view.layout));
                StoreDraft::many(client, name, layouts, device.as_ref())?
            }
        };
        if device.is_some() {
            copy_on_gpu(&draft, &views)?;
        } else {
            for (member, (_, view)) in views.iter().enumerate() {
                view.read_in_order(|offset, bytes| Ok(draft.copy(member, offset, bytes)?))?;
            }
        }
        let sealed = draft.seal().map_err(|(error, _)| error)?;
        Ok(sealed.version)
    }
}

/// Copies arrays on a GPU to a draft on the same GPU, and waits for the copies.
fn copy_on_gpu(draft: &StoreDraft, views: &[(String, &View)]) -> Result<(), Exception> {
    let Some(device) = draft.device() else { return Ok(()) };
    // The copies run on the default stream, because the arrays were imported for that stream.
    let stream = FrameworkStream::default_of(&device).stream();
    for (member, (argument, view)) in views.iter().enumerate() {
        if let Some(to) = draft.span(member)?.filter(|to| !to.is_empty()) {
            stream.copy(&to, &view.span(argument, &device, Rights::Read)?)?;
        }
    }
    Ok(finish(&stream)?)
}
