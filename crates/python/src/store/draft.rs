//! What is being written: arrays over the memory that will be the object, until it is sealed.
//!
//! Nobody may be able to write what is sealed, so that its memory is taken away from whoever wrote it. An array of it that
//! is still there, or a view that a framework made of one, would point to nothing: sealing says so, and leaves the draft
//! as it is. On a GPU nothing is taken away: there is no telling an array from work that is not known to be over, and the
//! driver could not keep anybody from writing anyway. Who has an array of it left is trusted not to.

use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::types::{PyIterator, PyList};
use wholemem_hal::{Device, Span};
use wholemem_os::SharedSlice;
use wholemem_store::{Client, Error, Pack, Sealed};

use super::description;
use crate::array::{Array, Layout, Place, Turn, View};
use crate::error::{Raised, Raises};
use crate::stream::{finish, handle_of};
use crate::wait::waiting;

/// One object, or many in a pack.
#[derive(Debug)]
pub(super) enum Target {
    One(wholemem_store::Draft),
    Many(wholemem_store::PackDraft),
}

impl Target {
    /// Begins an object, on a GPU if one is named. What has no elements is nowhere, and on the host as well.
    pub(super) fn one(
        client: &Client,
        name: &str,
        layout: &Layout,
        device: Option<&Device>,
    ) -> Result<Self, Raised> {
        let (meta, len) = (description::describe(layout), layout.len());
        let draft = match device.filter(|_| len > 0) {
            Some(device) => client.create_on_with_meta(device, name, &meta, len)?,
            None => client.create_with_meta(name, &meta, len)?,
        };
        Ok(Self::One(draft))
    }

    /// Begins a pack of arrays, each named behind the name of the pack.
    pub(super) fn many<'a>(
        client: &Client,
        name: &str,
        arrays: impl IntoIterator<Item = (&'a str, &'a Layout)>,
        device: Option<&Device>,
    ) -> Result<Self, Raised> {
        let (mut pack, mut len) = (Pack::new(name).with_meta(description::PACK.as_bytes()), 0);
        for (member, layout) in arrays {
            len += layout.len();
            let meta = description::describe(layout);
            pack = pack.add_with_meta(&format!("{name}/{member}"), &meta, layout.len());
        }
        if let Some(device) = device.filter(|_| len > 0) {
            pack = pack.on(device);
        }
        Ok(Self::Many(client.create_pack(&pack)?))
    }

    /// The device that it is on; `None` for what goes to the server when it is sealed.
    pub(super) fn device(&self) -> Option<Device> {
        match self {
            Self::One(draft) => draft.device(),
            Self::Many(pack) => pack.device(),
        }
    }

    /// The place of an array, unless it goes to the server when it is sealed.
    pub(super) fn span(&self, member: usize) -> wholemem_store::Result<Option<Span>> {
        match self {
            Self::One(draft) => draft.span(),
            Self::Many(pack) => pack.span(member),
        }
    }

    pub(super) fn copy(&mut self, member: usize, bytes: SharedSlice<'_>) -> wholemem_store::Result<()> {
        match self {
            Self::One(draft) => draft.copy_at(0, bytes),
            Self::Many(pack) => pack.copy_at(member, 0, bytes),
        }
    }

    /// Seals it, or says why not, and gives it back if it is as it was.
    pub(super) fn seal(self) -> Result<Sealed, (Error, Option<Box<Self>>)> {
        match self {
            Self::One(draft) => draft.seal().map_err(|unsealed| {
                let draft = unsealed.draft.map(|draft| Box::new(Self::One(*draft)));
                (unsealed.error, draft)
            }),
            Self::Many(pack) => pack.seal().map_err(|unsealed| {
                let pack = unsealed.draft.map(|pack| Box::new(Self::Many(*pack)));
                (unsealed.error, pack)
            }),
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
        let place = target.device().map_or(Place::CPU, |device| Place::of(&device));
        let view = |(member, layout): (usize, Layout)| match target.span(member)? {
            Some(span) => View::of_span(span, place, layout),
            None => {
                in_place = false;
                View::zeroed(layout)
            }
        };
        let views = layouts.into_iter().enumerate().map(view).collect::<Result<_, _>>()?;
        Ok(Self { target, views, in_place })
    }

    /// The GPU that it is on, if it is on one.
    fn gpu(&self) -> Option<Device> {
        self.target.device().filter(|device| Place::of(device).is_cuda())
    }

    /// Whether anybody has an array of it, who must not.
    fn is_in_use(&self) -> bool {
        self.gpu().is_none() && self.views.iter().any(|view| Arc::strong_count(&view.owner) > 1)
    }

    /// Has all of it where it will be sealed; on a GPU, when a stream has done what it was given so far.
    fn settle(&mut self, stream: u64) -> Result<(), Raised> {
        if let Some(device) = self.gpu() {
            // SAFETY: the calling Python code guarantees that the stream it names is one of the draft's device.
            finish(&unsafe { Turn::new(&device, stream, None) }.stream())?;
        }
        if !self.in_place {
            for (member, view) in self.views.iter().enumerate() {
                self.target.copy(member, view.bytes("the draft")?)?;
            }
        }
        Ok(())
    }

    /// Seals it, or says why not, and gives it back if it is as it was.
    fn seal(mut self, stream: u64) -> Result<Sealed, (Raised, Option<Box<Self>>)> {
        if let Err(raised) = self.settle(stream) {
            return Err((raised, Some(Box::new(self))));
        }
        let Self { target, mut views, in_place } = self;
        let layouts = views.iter().map(|view| view.layout.clone()).collect();
        if in_place {
            // Its own arrays are of memory that is taken away as well.
            views.clear();
        }
        target.seal().map_err(|(error, target)| {
            let writing = target.and_then(|target| match in_place {
                true => Self::new(*target, layouts).ok(),
                false => Some(Self { target: *target, views, in_place }),
            });
            (error.into(), writing.map(Box::new))
        })
    }
}

/// How far it is with what is being written.
#[derive(Debug)]
enum State {
    Open(Writing),
    /// A thread has it.
    Sealing,
    Closed,
}

/// What is being written until it is sealed, or given up.
#[derive(Debug)]
struct Unsealed {
    name: String,
    state: Mutex<State>,
}

impl Unsealed {
    fn new(name: &str, writing: Writing) -> Self {
        Self { name: name.to_owned(), state: Mutex::new(State::Open(writing)) }
    }

    /// Never for long: the interpreter's lock may be held meanwhile.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn closed(&self, state: &State) -> Raised {
        match state {
            State::Sealing => {
                Raised::new("Busy", format!("another thread seals the draft of `{}`", self.name))
            }
            _ => Raised::new("Closed", format!("the draft of `{}` is sealed, or given up", self.name)),
        }
    }

    fn in_use(&self) -> Raised {
        let message = format!("arrays made of the draft of `{}` are still there", self.name);
        Raised::new("InUse", message)
            .hint("drop them first, and those of its mirrors: `del array`; then seal again")
            .code("still-mapped")
    }

    /// Does something with what is being written.
    fn with<T>(&self, use_it: impl FnOnce(&Writing) -> Result<T, Raised>) -> Result<T, Raised> {
        match &*self.lock() {
            State::Open(writing) => use_it(writing),
            state => Err(self.closed(state)),
        }
    }

    fn array(&self, member: usize) -> Result<Array, Raised> {
        let missing = || self.closed(&State::Closed);
        self.with(|writing| writing.views.get(member).cloned().map(Array::new).ok_or_else(missing))
    }

    fn repr(&self, kind: &str) -> String {
        let state = match &*self.lock() {
            State::Open(_) => "",
            State::Sealing => ", sealing",
            State::Closed => ", closed",
        };
        format!("{kind}(name='{}'{state})", self.name)
    }

    /// Gives it up, also for a thread that seals it, if that is refused.
    fn abandon(&self, py: Python<'_>) {
        py.detach(|| drop(self.set(State::Closed)));
    }

    fn set(&self, state: State) -> State {
        mem::replace(&mut *self.lock(), state)
    }

    /// What is being written, for a thread that seals it.
    fn take(&self) -> Result<Writing, Raised> {
        let mut state = self.lock();
        match mem::replace(&mut *state, State::Sealing) {
            State::Open(writing) if writing.is_in_use() => {
                *state = State::Open(writing);
                Err(self.in_use())
            }
            State::Open(writing) => Ok(writing),
            other => {
                *state = other;
                Err(self.closed(&state))
            }
        }
    }

    /// What was not sealed is written further, unless somebody has given it up meanwhile.
    fn give_back(&self, writing: Option<Box<Writing>>) {
        let mut state = self.lock();
        match (&*state, writing) {
            (State::Sealing, Some(writing)) => *state = State::Open(*writing),
            (_, given_up) => {
                *state = State::Closed;
                drop(state);
                drop(given_up);
            }
        }
    }

    fn seal(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<u64> {
        let stream = stream.map_or(Ok(0), handle_of)?;
        let writing = self.take().raised()?;
        let sealed = waiting(py, || match writing.seal(stream) {
            Ok(sealed) => {
                self.set(State::Closed);
                Ok(sealed)
            }
            Err((raised, writing)) => {
                self.give_back(writing);
                Err(raised)
            }
        });
        sealed.map(|sealed| sealed.version)
    }

    /// The end of a block: sealed where nothing was raised, and given up otherwise.
    fn leave(&self, py: Python<'_>, has_failed: bool) -> PyResult<()> {
        if has_failed {
            self.abandon(py);
            return Ok(());
        }
        // Sealed within the block, or given up there.
        if matches!(*self.lock(), State::Closed) {
            return Ok(());
        }
        self.seal(py, None).map(drop)
    }
}

/// An object that is being written. As a context it is sealed at the end, and given up if something was raised.
///
/// Sealing takes host memory away from who wrote it, so that no array of it may be left, nor a child that was forked
/// after one was made: then :class:`wholemem.errors.InUse` is raised, and the draft stays as it is. On a GPU whoever has
/// an array left is trusted not to write it.
///
/// >>> from wholemem import store
/// >>> client = store.Client()
/// >>> with client.create("drafted", (2, 2), "float32") as draft:
/// ...     draft.array.numpy()[:] = 7
/// >>> client.get("drafted").numpy().tolist()
/// [[7.0, 7.0], [7.0, 7.0]]
#[pyclass(frozen, module = "wholemem.store")]
#[derive(Debug)]
pub(crate) struct Draft {
    unsealed: Unsealed,
}

impl Draft {
    pub(super) fn create(
        client: &Client,
        name: &str,
        layout: Layout,
        device: Option<&Device>,
    ) -> Result<Self, Raised> {
        let writing = Writing::new(Target::one(client, name, &layout, device)?, vec![layout])?;
        Ok(Self { unsealed: Unsealed::new(name, writing) })
    }

    /// A mirror of it, and the array that it mirrors.
    pub(super) fn mirrored(&self, copy_in: bool) -> Result<(wholemem_store::Mirror, View), Raised> {
        let refused = || {
            Raised::new("Unsupported", "a draft of less than 1 MiB in host memory needs no mirror")
                .hint("write to `draft.array`")
        };
        let (view, span, device) = self.unsealed.with(|writing| {
            let view = writing.views.first().filter(|_| writing.in_place).cloned();
            let (span, device) = (writing.target.span(0)?, writing.target.device());
            view.zip(span).zip(device).map(|((view, span), device)| (view, span, device)).ok_or_else(refused)
        })?;
        // Others may look at the draft while it is copied.
        Ok((wholemem_store::Mirror::of_span(span, &device, copy_in)?, view))
    }
}

#[pymethods]
impl Draft {
    /// The name it will have.
    #[getter]
    fn name(&self) -> &str {
        &self.unsealed.name
    }

    /// The memory, zero at first, to be written.
    #[getter]
    fn array(&self) -> PyResult<Array> {
        self.unsealed.array(0).raised()
    }

    /// Makes it everybody's, and returns its version; on a GPU, when that stream, or the default one, has come so far.
    #[pyo3(signature = (*, stream=None))]
    fn seal(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<u64> {
        self.unsealed.seal(py, stream)
    }

    /// Gives it up.
    fn abandon(&self, py: Python<'_>) {
        self.unsealed.abandon(py);
    }

    fn __repr__(&self) -> String {
        self.unsealed.repr("Draft")
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

/// A pack that is being written: its arrays by name. As a context it is sealed at the end, as a :class:`Draft`.
///
/// >>> from wholemem import store
/// >>> client = store.Client()
/// >>> with client.create_pack("layer", {"weight": ((2, 3), "float32"), "bias": ((3,), "float32")}) as draft:
/// ...     for name in draft:
/// ...         draft[name].numpy()[:] = 1
/// >>> client.get("layer")
/// Pack(name='layer', arrays=2, nbytes=36)
#[pyclass(frozen, module = "wholemem.store")]
#[derive(Debug)]
pub(crate) struct PackDraft {
    unsealed: Unsealed,
    members: Vec<String>,
}

impl PackDraft {
    pub(super) fn create(
        client: &Client,
        name: &str,
        arrays: Vec<(String, Layout)>,
        device: Option<&Device>,
    ) -> Result<Self, Raised> {
        let named = arrays.iter().map(|(name, layout)| (name.as_str(), layout));
        let target = Target::many(client, name, named, device)?;
        let (members, layouts) = arrays.into_iter().unzip();
        let writing = Writing::new(target, layouts)?;
        Ok(Self { unsealed: Unsealed::new(name, writing), members })
    }
}

#[pymethods]
impl PackDraft {
    /// The name it will have.
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

    /// Makes it everybody's, and returns its version; on a GPU, when that stream, or the default one, has come so far.
    #[pyo3(signature = (*, stream=None))]
    fn seal(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<u64> {
        self.unsealed.seal(py, stream)
    }

    /// Gives it up.
    fn abandon(&self, py: Python<'_>) {
        self.unsealed.abandon(py);
    }

    fn __repr__(&self) -> String {
        self.unsealed.repr("PackDraft")
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
