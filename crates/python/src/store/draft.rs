//! What is being written: arrays over the memory that will be the object, until it is sealed.
//!
//! Nobody may be able to write what is sealed, so that its memory is taken away from whoever wrote it. An array of it that
//! is still there, or a view that a framework made of one, would point to nothing: sealing says so, and leaves the draft
//! as it is.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::{PyIterator, PyList};
use wholemem_hal::Span;
use wholemem_os::SharedSlice;
use wholemem_store::{Client, Pack, Sealed};

use super::description;
use crate::array::{Array, Layout, Place, View};
use crate::error::{Raised, Raises};
use crate::wait::waiting;

/// One object, or many in a pack.
#[derive(Debug)]
enum Target {
    One(wholemem_store::Draft),
    Many(wholemem_store::PackDraft),
}

impl Target {
    /// The place of an array, unless it goes to the server when it is sealed.
    fn span(&self, member: usize) -> wholemem_store::Result<Option<Span>> {
        match self {
            Self::One(draft) => draft.span(),
            Self::Many(pack) => pack.span(member),
        }
    }

    fn copy(&mut self, member: usize, bytes: SharedSlice<'_>) -> wholemem_store::Result<()> {
        match self {
            Self::One(draft) => draft.copy_at(0, bytes),
            Self::Many(pack) => pack.copy_at(member, 0, bytes),
        }
    }

    fn seal(self) -> wholemem_store::Result<Sealed> {
        match self {
            Self::One(draft) => draft.seal(),
            Self::Many(pack) => pack.seal(),
        }
    }
}

/// Memory that is being written, and the arrays it is.
#[derive(Debug)]
pub(super) struct Writing {
    target: Target,
    views: Vec<View>,
    /// Whether the arrays lie where the object will.
    in_place: bool,
}

impl Writing {
    fn new(target: Target, layouts: Vec<Layout>) -> Result<Self, Raised> {
        let mut in_place = true;
        let view = |(member, layout): (usize, Layout)| match target.span(member)? {
            Some(span) => View::of_span(span, Place::CPU, layout),
            None => {
                in_place = false;
                View::zeroed(layout)
            }
        };
        let views = layouts.into_iter().enumerate().map(view).collect::<Result<_, _>>()?;
        Ok(Self { target, views, in_place })
    }

    /// Whether anybody has an array of it.
    fn is_in_use(&self) -> bool {
        self.views.iter().any(|view| Arc::strong_count(&view.owner) > 1)
    }

    fn seal(mut self) -> Result<Sealed, Raised> {
        if !self.in_place {
            for (member, view) in self.views.iter().enumerate() {
                self.target.copy(member, view.bytes("the draft")?)?;
            }
        }
        drop(self.views);
        Ok(self.target.seal()?)
    }
}

/// What is being written until it is sealed, or given up.
#[derive(Debug)]
struct Unsealed {
    name: String,
    writing: Mutex<Option<Writing>>,
}

impl Unsealed {
    fn new(name: &str, writing: Writing) -> Self {
        Self { name: name.to_owned(), writing: Mutex::new(Some(writing)) }
    }

    fn closed(&self) -> Raised {
        Raised::new("Closed", format!("the draft of `{}` is sealed, or given up", self.name))
    }

    fn in_use(&self) -> Raised {
        let message = format!("arrays made of the draft of `{}` are still there", self.name);
        Raised::new("InUse", message)
            .hint("drop them first: `del array`; then seal again")
            .code("still-mapped")
    }

    /// Does something with what is being written.
    fn with<T>(&self, use_it: impl FnOnce(&Writing) -> Result<T, Raised>) -> Result<T, Raised> {
        let writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        use_it(writing.as_ref().ok_or_else(|| self.closed())?)
    }

    fn array(&self, member: usize) -> Result<Array, Raised> {
        self.with(|writing| writing.views.get(member).cloned().map(Array::new).ok_or_else(|| self.closed()))
    }

    fn take(&self) -> Option<Writing> {
        self.writing.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn seal(&self, py: Python<'_>) -> PyResult<u64> {
        let writing = {
            let mut open = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
            match open.as_ref() {
                None => return Err(self.closed().into()),
                Some(writing) if writing.is_in_use() => return Err(self.in_use().into()),
                Some(_) => open.take(),
            }
        };
        let Some(writing) = writing else { return Err(self.closed().into()) };
        waiting(py, || writing.seal()).map(|sealed| sealed.version)
    }

    /// The end of a block: sealed where nothing was raised, and given up otherwise.
    fn leave(&self, py: Python<'_>, has_failed: bool) -> PyResult<()> {
        if has_failed {
            drop(self.take());
            return Ok(());
        }
        // Sealed within the block, or given up there.
        if self.with(|_| Ok(())).is_err() {
            return Ok(());
        }
        self.seal(py).map(drop)
    }
}

/// An object that is being written: see `wholemem.store.Draft`.
#[pyclass(frozen, module = "wholemem.store")]
#[derive(Debug)]
pub(crate) struct Draft {
    unsealed: Unsealed,
}

impl Draft {
    pub(super) fn create(client: &Client, name: &str, layout: Layout) -> Result<Self, Raised> {
        let draft = client.create_described(name, &description::describe(&layout), layout.len())?;
        let writing = Writing::new(Target::One(draft), vec![layout])?;
        Ok(Self { unsealed: Unsealed::new(name, writing) })
    }

    /// A mirror of it, and the array that it mirrors.
    pub(super) fn mirrored(&self, copy_in: bool) -> Result<(wholemem_store::Mirror, View), Raised> {
        self.unsealed.with(|writing| match (&writing.target, writing.views.first()) {
            (Target::One(draft), Some(view)) if writing.in_place => {
                Ok((wholemem_store::Mirror::of_draft(draft, copy_in)?, view.clone()))
            }
            _ => Err(Raised::new("Unsupported", "a draft of less than 1 MiB in host memory needs no mirror")
                .hint("write to `draft.array`")),
        })
    }
}

#[pymethods]
impl Draft {
    #[getter]
    fn name(&self) -> &str {
        &self.unsealed.name
    }

    #[getter]
    fn array(&self) -> PyResult<Array> {
        self.unsealed.array(0).raised()
    }

    fn seal(&self, py: Python<'_>) -> PyResult<u64> {
        self.unsealed.seal(py)
    }

    fn abandon(&self) {
        drop(self.unsealed.take());
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        kind: Option<&Bound<'_, PyAny>>,
        _error: Option<&Bound<'_, PyAny>>,
        _traceback: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.unsealed.leave(py, kind.is_some())
    }
}

/// A pack that is being written: see `wholemem.store.PackDraft`.
#[pyclass(frozen, module = "wholemem.store")]
#[derive(Debug)]
pub(crate) struct PackDraft {
    unsealed: Unsealed,
    members: Vec<String>,
}

impl PackDraft {
    pub(super) fn create(client: &Client, name: &str, arrays: Vec<(String, Layout)>) -> Result<Self, Raised> {
        let pack = client
            .create_pack(&pack_of(name, arrays.iter().map(|(name, layout)| (name.as_str(), layout))))?;
        let (members, layouts) = arrays.into_iter().unzip();
        let writing = Writing::new(Target::Many(pack), layouts)?;
        Ok(Self { unsealed: Unsealed::new(name, writing), members })
    }
}

/// A pack of arrays, each named behind the name of the pack.
pub(super) fn pack_of<'a>(name: &str, arrays: impl IntoIterator<Item = (&'a str, &'a Layout)>) -> Pack {
    let add = |pack: Pack, (member, layout): (&str, &Layout)| {
        pack.add_described(&format!("{name}/{member}"), &description::describe(layout), layout.len())
    };
    arrays.into_iter().fold(Pack::new(name).described(b"safetensors"), add)
}

#[pymethods]
impl PackDraft {
    #[getter]
    fn name(&self) -> &str {
        &self.unsealed.name
    }

    fn __len__(&self) -> usize {
        self.members.len()
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        PyList::new(py, &self.members)?.try_iter()
    }

    fn __getitem__(&self, name: &str) -> PyResult<Array> {
        let missing = || {
            let message =
                format!("there is no array named `{name}` in the draft of `{}`", self.unsealed.name);
            Raised::new("NotFound", message)
        };
        let member = self.members.iter().position(|member| member == name).ok_or_else(missing);
        self.unsealed.array(member.raised()?).raised()
    }

    fn seal(&self, py: Python<'_>) -> PyResult<u64> {
        self.unsealed.seal(py)
    }

    fn abandon(&self) {
        drop(self.unsealed.take());
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        kind: Option<&Bound<'_, PyAny>>,
        _error: Option<&Bound<'_, PyAny>>,
        _traceback: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.unsealed.leave(py, kind.is_some())
    }
}
