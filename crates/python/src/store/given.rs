//! The value of a `put`: one array, or several with names, in host memory or on a GPU.
//!
//! An array on a GPU is copied to memory of the store on the same GPU, after the work that is enqueued on it. The object is
//! published when the copy is complete.

use std::collections::HashSet;

use pyo3::prelude::*;
use pyo3::types::PyMapping;
use wholemem_hal::{Device, Rights};
use wholemem_store::Client;

use super::draft::Target;
use crate::array::{self, Element, Layout, Turn, View};
use crate::error::{Raised, Raises, about};
use crate::number::Shape;
use crate::stream::finish;

/// Converts the values of a mapping. An error names the key.
fn members<T>(
    mapping: &Bound<'_, PyMapping>,
    take: impl Fn(&Bound<'_, PyAny>) -> PyResult<T>,
) -> PyResult<Vec<(String, T)>> {
    let (mut members, mut names) = (Vec::with_capacity(mapping.len()?), HashSet::new());
    for item in mapping.items()?.iter() {
        let (name, value) = item.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>()?;
        let Ok(name) = name.extract::<String>() else {
            let message = format!("{} is not a name of an array", name.repr()?);
            return Err(Raised::new("WrongType", message).hint("names are `str`").into());
        };
        if !names.insert(name.clone()) {
            let raised = Raised::new("WrongValue", format!("two arrays are named `{name}`"));
            return Err(raised.hint("give each array of a pack its own name").into());
        }
        let taken = take(&value).map_err(|error| about(value.py(), &format!("`{name}`"), error))?;
        members.push((name, taken));
    }
    Ok(members)
}

/// Parses the shapes and types of the arrays of a pack.
pub(super) fn layouts(arrays: &Bound<'_, PyAny>) -> PyResult<Vec<(String, Layout)>> {
    let Ok(mapping) = arrays.cast::<PyMapping>() else {
        let message = format!("`{}` is not a mapping", arrays.get_type().name()?);
        let hint = "pass shapes and types by name, such as `{\"weight\": ((2, 3), \"float32\")}`";
        return Err(Raised::new("WrongType", message).hint(hint).into());
    };
    members(mapping, |value| {
        let Ok((shape, dtype)) = value.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>() else {
            let raised = Raised::new("WrongType", format!("{} is not a pair of shape and type", value.repr()?));
            return Err(raised.hint("pass a pair such as `((2, 3), \"float32\")`").into());
        };
        let (shape, dtype) = (shape.extract::<Shape>()?, dtype.extract::<Element>()?);
        Layout::contiguous(dtype, &shape.signed()).raised()
    })
}

/// The value of a `put`: one array, or several with names.
pub(super) enum Given {
    One(View),
    Many(Vec<(String, View)>),
}

impl Given {
    pub(super) fn take(value: &Bound<'_, PyAny>) -> PyResult<Self> {
        let Ok(mapping) = value.cast::<PyMapping>() else { return array::take_settled(value).map(Self::One) };
        members(mapping, array::take_settled).map(Self::Many)
    }

    /// The arrays, each with its name in errors.
    fn views(&self) -> Vec<(String, &View)> {
        match self {
            Self::One(view) => vec![("the array".to_owned(), view)],
            Self::Many(arrays) => arrays.iter().map(|(name, view)| (format!("`{name}`"), view)).collect(),
        }
    }

    /// The GPU of all arrays; `None` if they are in host memory or empty.
    fn device(&self) -> Result<Option<Device>, Raised> {
        let views = self.views();
        let mut views = views.iter().filter(|(_, view)| view.layout.count() > 0);
        let Some((first, view)) = views.next() else { return Ok(None) };
        let is_same = |other: &View| {
            if view.place.is_host() { other.place.is_host() } else { other.place == view.place }
        };
        if let Some((what, other)) = views.find(|(_, other)| !is_same(other)) {
            let message = format!("{first} is on {}, but {what} is on {}", view.place, other.place);
            return Err(Raised::new("WrongDevice", message)
                .hint("a pack is on one device: move the arrays to one device, or put two packs"));
        }
        if view.place.is_host() { Ok(None) } else { view.place.device().map(Some) }
    }

    /// Copies the value into the store, and returns the version of the object under its name.
    pub(super) fn put(&self, client: &Client, name: &str) -> Result<u64, Raised> {
        let (device, views) = (self.device()?, self.views());
        // Before memory of the store is allocated.
        views.iter().try_for_each(|(what, view)| view.check_contiguous(what))?;
        let mut target = match self {
            Self::One(view) => Target::one(client, name, &view.layout, device.as_ref())?,
            Self::Many(arrays) => {
                let layouts = arrays.iter().map(|(name, view)| (name.as_str(), &view.layout));
                Target::many(client, name, layouts, device.as_ref())?
            }
        };
        if device.is_some() {
            copy_on_gpu(&target, &views)?;
        } else {
            for (member, (what, view)) in views.iter().enumerate() {
                target.copy(member, view.bytes(what)?)?;
            }
        }
        let sealed = target.seal().map_err(|(error, _)| error)?;
        Ok(sealed.version)
    }
}

/// Copies arrays on a GPU, and waits for the copies.
fn copy_on_gpu(target: &Target, views: &[(String, &View)]) -> Result<(), Raised> {
    let Some(device) = target.device() else { return Ok(()) };
    // The arrays were imported for the default stream.
    let stream = Turn::of_default(&device).stream();
    for (member, (what, view)) in views.iter().enumerate() {
        if let Some(to) = target.span(member)?.filter(|to| !to.is_empty()) {
            stream.copy(&to, &view.span(what, &device, Rights::Read)?)?;
        }
    }
    Ok(finish(&stream)?)
}
