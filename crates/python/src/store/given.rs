//! What is put: one array, or several with names, wherever they are.
//!
//! What is on a GPU stays there: it is copied into memory that the store has on that GPU, behind whatever its maker has
//! enqueued, and nobody has it before the copy is over.

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

/// What a mapping has for each name, as `take` takes it; what is refused is named.
fn members<T>(
    mapping: &Bound<'_, PyMapping>,
    take: impl Fn(&Bound<'_, PyAny>) -> PyResult<T>,
) -> PyResult<Vec<(String, T)>> {
    let (mut members, mut names) = (Vec::with_capacity(mapping.len()?), HashSet::new());
    for item in mapping.items()?.iter() {
        let (name, value) = item.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>()?;
        let Ok(name) = name.extract::<String>() else {
            let message = format!("{} is no name of an array", name.repr()?);
            return Err(Raised::new("WrongType", message).hint("names are of `str`").into());
        };
        if !names.insert(name.clone()) {
            let raised = Raised::new("WrongValue", format!("two arrays are named `{name}`"));
            return Err(raised.hint("give each array of a pack a name of its own").into());
        }
        let taken = take(&value).map_err(|error| about(value.py(), &format!("`{name}`"), error))?;
        members.push((name, taken));
    }
    Ok(members)
}

/// The arrays that a pack is to have, of which shapes and types are given.
pub(super) fn layouts(arrays: &Bound<'_, PyAny>) -> PyResult<Vec<(String, Layout)>> {
    let Ok(mapping) = arrays.cast::<PyMapping>() else {
        let message = format!("`{}` is no mapping", arrays.get_type().name()?);
        let hint = "give shapes and types by name, such as `{\"weight\": ((2, 3), \"float32\")}`";
        return Err(Raised::new("WrongType", message).hint(hint).into());
    };
    members(mapping, |value| {
        let Ok((shape, dtype)) = value.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>() else {
            let raised = Raised::new("WrongType", format!("{} is no shape and type", value.repr()?));
            return Err(raised.hint("give a pair, such as `((2, 3), \"float32\")`").into());
        };
        let (shape, dtype) = (shape.extract::<Shape>()?, dtype.extract::<Element>()?);
        Layout::contiguous(dtype, &shape.signed()).raised()
    })
}

/// What is put: one array, or several with names.
pub(super) enum Given {
    One(View),
    Many(Vec<(String, View)>),
}

impl Given {
    pub(super) fn take(value: &Bound<'_, PyAny>) -> PyResult<Self> {
        let Ok(mapping) = value.cast::<PyMapping>() else { return array::take_settled(value).map(Self::One) };
        members(mapping, array::take_settled).map(Self::Many)
    }

    /// The arrays, each with what errors call it.
    fn views(&self) -> Vec<(String, &View)> {
        match self {
            Self::One(view) => vec![("the array".to_owned(), view)],
            Self::Many(arrays) => arrays.iter().map(|(name, view)| (format!("`{name}`"), view)).collect(),
        }
    }

    /// The GPU that all of it is on; `None` for what is on the host, or has no elements.
    fn device(&self) -> Result<Option<Device>, Raised> {
        let views = self.views();
        let mut views = views.iter().filter(|(_, view)| view.layout.count() > 0);
        let Some((first, view)) = views.next() else { return Ok(None) };
        let is_same = |other: &View| {
            if view.place.is_host() { other.place.is_host() } else { other.place == view.place }
        };
        if let Some((what, other)) = views.find(|(_, other)| !is_same(other)) {
            let message = format!("{first} is on {}, and {what} on {}", view.place, other.place);
            return Err(Raised::new("WrongDevice", message)
                .hint("a pack lies in one place: move them to one device, or put two"));
        }
        if view.place.is_host() { Ok(None) } else { view.place.device().map(Some) }
    }

    /// Copies it into the store, and says which version of its name it is.
    pub(super) fn put(&self, client: &Client, name: &str) -> Result<u64, Raised> {
        let (device, views) = (self.device()?, self.views());
        // Before anything is taken of the store.
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

/// Copies arrays of a GPU, and returns when they are there.
fn copy_on_gpu(target: &Target, views: &[(String, &View)]) -> Result<(), Raised> {
    let Some(device) = target.device() else { return Ok(()) };
    // Arrays were asked for on the default stream.
    let stream = Turn::of_default(&device).stream();
    for (member, (what, view)) in views.iter().enumerate() {
        if let Some(to) = target.span(member)?.filter(|to| !to.is_empty()) {
            stream.copy(&to, &view.span(what, &device, Rights::Read)?)?;
        }
    }
    Ok(finish(&stream)?)
}
