//! Drafts: arrays over the memory of an object that is not sealed.
//!
//! A sealed object must not be writable, so sealing unmaps its host memory from the process that wrote it. An array of the
//! draft, or a framework's view of one, would then point to unmapped memory: if any exists, sealing raises an error and the
//! draft stays open. On a GPU nothing is unmapped: references of arrays cannot be told from references of work in flight,
//! and the driver cannot revoke write access. The writer is trusted not to use remaining arrays.

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

/// A draft of the store: one object, or a pack.
#[derive(Debug)]
pub(super) enum Target {
    One(wholemem_store::Draft),
    Many(wholemem_store::PackDraft),
}

impl Target {
    /// Creates an object, on a GPU if `device` is one. An empty object is always in host memory.
    pub(super) fn one(
        client: &Client,
        name: &str,
        layout: &Layout,
        device: Option<&Device>,
    ) -> Result<Self, Raised> {
        let (meta, len) = (description::describe(layout), layout.len());
        let draft = match device.filter(|_| len > 0) {
            Some(device) => client.create_described_on(device, name, &meta, len)?,
            None => client.create_described(name, &meta, len)?,
        };
        Ok(Self::One(draft))
    }

    /// Creates a pack of arrays. The name of each member begins with the name of the pack.
    pub(super) fn many<'a>(
        client: &Client,
        name: &str,
        arrays: impl IntoIterator<Item = (&'a str, &'a Layout)>,
        device: Option<&Device>,
    ) -> Result<Self, Raised> {
        let (mut pack, mut len) = (Pack::new(name).described(description::PACK.as_bytes()), 0);
        for (member, layout) in arrays {
            len += layout.len();
            let meta = description::describe(layout);
            pack = pack.add_described(&format!("{name}/{member}"), &meta, layout.len());
        }
        if let Some(device) = device.filter(|_| len > 0) {
            pack = pack.on(device);
        }
        Ok(Self::Many(client.create_pack(&pack)?))
    }

    /// The device of the memory; `None` if the bytes are sent with the request to seal.
    pub(super) fn device(&self) -> Option<Device> {
        match self {
            Self::One(draft) => draft.device(),
            Self::Many(pack) => pack.device(),
        }
    }

    /// The memory of an array; `None` if the bytes are sent with the request to seal.
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

    /// Seals the draft. On an error that left the draft intact, the draft is returned with it.
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

/// An open draft and its arrays.
#[derive(Debug)]
pub(super) struct Writing {
    target: Target,
    views: Vec<View>,
    /// Whether the arrays are in the memory of the object. If not, their bytes are sent when the draft is sealed.
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

    /// The GPU of the memory, if it is on one.
    fn gpu(&self) -> Option<Device> {
        self.target.device().filter(|device| Place::of(device).is_cuda())
    }

    /// Whether arrays exist that prevent sealing.
    fn is_in_use(&self) -> bool {
        self.gpu().is_none() && self.views.iter().any(|view| Arc::strong_count(&view.owner) > 1)
    }

    /// Completes the content: waits for a stream on a GPU, or copies the bytes that are sent with the request.
    fn settle(&mut self, stream: u64) -> Result<(), Raised> {
        if let Some(device) = self.gpu() {
            // SAFETY: the calling Python code guarantees that the stream belongs to the draft's device.
            finish(&unsafe { Turn::new(&device, stream, None) }.stream())?;
        }
        if !self.in_place {
            for (member, view) in self.views.iter().enumerate() {
                self.target.copy(member, view.bytes("the draft")?)?;
            }
        }
        Ok(())
    }

    /// Seals the draft. On an error that left the draft intact, the draft is returned with it.
    fn seal(mut self, stream: u64) -> Result<Sealed, (Raised, Option<Box<Self>>)> {
        if let Err(raised) = self.settle(stream) {
            return Err((raised, Some(Box::new(self))));
        }
        let Self { target, mut views, in_place } = self;
        let layouts = views.iter().map(|view| view.layout.clone()).collect();
        if in_place {
            // These arrays also refer to memory that sealing unmaps.
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

/// The state of a draft.
#[derive(Debug)]
enum State {
    Open(Writing),
    /// A thread is sealing the draft.
    Sealing,
    Closed,
}

/// A draft that is shared by threads until it is sealed or abandoned.
#[derive(Debug)]
struct Unsealed {
    name: String,
    state: Mutex<State>,
}

impl Unsealed {
    fn new(name: &str, writing: Writing) -> Self {
        Self { name: name.to_owned(), state: Mutex::new(State::Open(writing)) }
    }

    /// The lock is held only briefly, because the caller may hold the GIL.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn closed(&self, state: &State) -> Raised {
        match state {
            State::Sealing => {
                Raised::new("Busy", format!("another thread seals the draft of `{}`", self.name))
            }
            _ => Raised::new("Closed", format!("the draft of `{}` was sealed or abandoned", self.name)),
        }
    }

    fn in_use(&self) -> Raised {
        let message = format!("cannot seal the draft of `{}`: arrays of it still exist", self.name);
        Raised::new("InUse", message)
            .hint("drop them and the arrays of its mirrors first: `del array`; then seal again")
            .code("still-mapped")
    }

    /// Calls a function with the open draft.
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

    /// Abandons the draft. If a thread is sealing it and sealing fails, the draft is not reopened.
    fn abandon(&self, py: Python<'_>) {
        py.detach(|| drop(self.set(State::Closed)));
    }

    fn set(&self, state: State) -> State {
        mem::replace(&mut *self.lock(), state)
    }

    /// Takes the open draft for a thread that seals it.
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

    /// Reopens the draft after sealing failed, unless it was abandoned meanwhile.
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

    /// The end of a `with` block: seals the draft, or abandons it if the block raised.
    fn leave(&self, py: Python<'_>, has_failed: bool) -> PyResult<()> {
        if has_failed {
            self.abandon(py);
            return Ok(());
        }
        // The block itself sealed or abandoned the draft.
        if matches!(*self.lock(), State::Closed) {
            return Ok(());
        }
        self.seal(py, None).map(drop)
    }
}

/// An object that is being written. As a context manager, it is sealed at the end, or abandoned if the block raises.
///
/// Sealing unmaps host memory from this process. If an array of the draft still exists, or a child process that was forked
/// after one was created, :class:`wholemem.errors.InUse` is raised and the draft stays open. On a GPU, arrays may remain, but
/// must not be used to write.
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

    /// A mirror of the draft, and the array that it mirrors.
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
        // The lock is released, so other threads can use the draft during the copy.
        Ok((wholemem_store::Mirror::of_span(span, &device, copy_in)?, view))
    }
}

#[pymethods]
impl Draft {
    /// The name that the object will have.
    #[getter]
    fn name(&self) -> &str {
        &self.unsealed.name
    }

    /// The memory of the object as a writable array, initially zero.
    #[getter]
    fn array(&self) -> PyResult<Array> {
        self.unsealed.array(0).raised()
    }

    /// Seals the object and publishes it under its name.
    ///
    /// Args:
    ///     stream: On a GPU, the CUDA stream whose earlier work is waited for. ``None`` is the default stream.
    ///
    /// Returns:
    ///     The version of the object under its name.
    ///
    /// Raises:
    ///     wholemem.errors.Closed: The draft was sealed or abandoned.
    ///     wholemem.errors.InUse: An array of the draft still exists.
    #[pyo3(signature = (*, stream=None))]
    fn seal(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<u64> {
        self.unsealed.seal(py, stream)
    }

    /// Abandons the draft and frees its memory.
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

/// A pack that is being written: a mapping of names to arrays. As a context manager, it is sealed like a :class:`Draft`.
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
    /// The name that the pack will have.
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
                format!("the draft of `{}` has no array `{name}`", self.unsealed.name);
            Raised::new("NotFound", message)
        };
        let member = self.members.iter().position(|member| member == name).ok_or_else(missing);
        self.unsealed.array(member.raised()?).raised()
    }

    /// Seals the pack and publishes it under its name.
    ///
    /// Args:
    ///     stream: On a GPU, the CUDA stream whose earlier work is waited for. ``None`` is the default stream.
    ///
    /// Returns:
    ///     The version of the pack under its name.
    ///
    /// Raises:
    ///     wholemem.errors.Closed: The draft was sealed or abandoned.
    ///     wholemem.errors.InUse: An array of the draft still exists.
    #[pyo3(signature = (*, stream=None))]
    fn seal(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<u64> {
        self.unsealed.seal(py, stream)
    }

    /// Abandons the draft and frees its memory.
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
