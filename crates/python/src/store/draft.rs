//! Drafts: objects of the store that are not sealed yet, and the arrays by which their memory is written.
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
use crate::array::{Array, DlDevice, FrameworkStream, Layout, View};
use crate::error::{Exception, IntoPyResult};
use crate::stream::{finish, handle_of};
use crate::wait::run_blocking;

/// A draft (an object that is not sealed yet) of one array or of a pack of arrays.
#[derive(Debug)]
pub(super) enum StoreDraft {
    One(wholemem_store::Draft),
    Many(wholemem_store::PackDraft),
}

impl StoreDraft {
    /// Creates the draft of an array, on a GPU if `device` is one. An empty object is always in host memory.
    pub(super) fn one(
        client: &Client,
        name: &str,
        layout: &Layout,
        device: Option<&Device>,
    ) -> Result<Self, Exception> {
        let (meta, len) = (description::describe(layout), layout.len());
        let draft = match device.filter(|_| len > 0) {
            Some(device) => client.create_on_with_meta(device, name, &meta, len)?,
            None => client.create_with_meta(name, &meta, len)?,
        };
        Ok(Self::One(draft))
    }

    /// Creates the draft of a pack of arrays. The name of each member begins with the name of the pack.
    pub(super) fn many<'a>(
        client: &Client,
        name: &str,
        arrays: impl IntoIterator<Item = (&'a str, &'a Layout)>,
        device: Option<&Device>,
    ) -> Result<Self, Exception> {
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

    /// Returns the device of the draft's memory; `None` for a small draft, whose bytes are sent with the request to seal it.
    pub(super) fn device(&self) -> Option<Device> {
        match self {
            Self::One(draft) => draft.device(),
            Self::Many(pack) => pack.device(),
        }
    }

    /// Returns the memory of an array of the draft; `None` for a small draft, whose bytes are sent with the request to seal it.
    pub(super) fn span(&self, member: usize) -> wholemem_store::Result<Option<Span>> {
        match self {
            Self::One(draft) => draft.span(),
            Self::Many(pack) => pack.span(member),
        }
    }

    /// Copies bytes to an array of the draft, from an offset on.
    pub(super) fn copy(
        &mut self,
        member: usize,
        offset: usize,
        bytes: SharedSlice<'_>,
    ) -> wholemem_store::Result<()> {
        match self {
            Self::One(draft) => draft.copy_at(offset, bytes),
            Self::Many(pack) => pack.copy_at(member, offset, bytes),
        }
    }

    /// Seals the draft. If an error left the draft intact, the draft is returned with the error.
    pub(super) fn seal(self) -> Result<Sealed, (Error, Option<Box<Self>>)> {
        match self {
            Self::One(draft) => draft.seal().map_err(|shared| {
                let draft = shared.draft.map(|draft| Box::new(Self::One(*draft)));
                (shared.error, draft)
            }),
            Self::Many(pack) => pack.seal().map_err(|shared| {
                let pack = shared.draft.map(|pack| Box::new(Self::Many(*pack)));
                (shared.error, pack)
            }),
        }
    }
}

/// A draft that is not sealed yet, and its arrays.
#[derive(Debug)]
pub(super) struct OpenDraft {
    target: StoreDraft,
    views: Vec<View>,
    /// True if the arrays are in the memory of the object. Otherwise the bytes of the arrays are sent when the draft is sealed.
    in_place: bool,
}

impl OpenDraft {
    fn new(target: StoreDraft, layouts: Vec<Layout>) -> Result<Self, Exception> {
        let mut in_place = true;
        let dl_device = target.device().map_or(DlDevice::CPU, |device| DlDevice::of(&device));
        let view = |(member, layout): (usize, Layout)| match target.span(member)? {
            Some(span) => View::of_span(span, dl_device, layout),
            None => {
                in_place = false;
                View::zeroed(layout)
            }
        };
        let views = layouts.into_iter().enumerate().map(view).collect::<Result<_, _>>()?;
        Ok(Self { target, views, in_place })
    }

    /// Returns the GPU on which the draft's memory is; `None` for host memory.
    fn gpu(&self) -> Option<Device> {
        self.target.device().filter(|device| DlDevice::of(device).is_cuda())
    }

    /// Returns true if arrays of the draft still exist that prevent sealing.
    fn is_in_use(&self) -> bool {
        self.gpu().is_none() && self.views.iter().any(|view| Arc::strong_count(&view.owner) > 1)
    }

    /// Completes the content of the draft before sealing: waits for a stream on a GPU, or copies the bytes that are sent with the
    /// request.
    fn complete(&mut self, stream: u64) -> Result<(), Exception> {
        if let Some(device) = self.gpu() {
            // SAFETY: the calling Python code guarantees that `stream` is a live stream of the draft's device.
            finish(&unsafe { FrameworkStream::new(&device, stream, None) }.stream())?;
        }
        if !self.in_place {
            for (member, view) in self.views.iter().enumerate() {
                self.target.copy(member, 0, view.bytes("the draft")?)?;
            }
        }
        Ok(())
    }

    /// Seals the draft. If an error left the draft intact, the draft is returned with the error.
    fn seal(mut self, stream: u64) -> Result<Sealed, (Exception, Option<Box<Self>>)> {
        if let Err(raised) = self.complete(stream) {
            return Err((raised, Some(Box::new(self))));
        }
        let Self { target, mut views, in_place } = self;
        let layouts = views.iter().map(|view| view.layout.clone()).collect();
        if in_place {
            // The draft drops its own arrays, because they refer to memory that sealing unmaps.
            views.clear();
        }
        target.seal().map_err(|(error, target)| {
            let draft = target.and_then(|target| match in_place {
                true => Self::new(*target, layouts).ok(),
                false => Some(Self { target: *target, views, in_place }),
            });
            (error.into(), draft.map(Box::new))
        })
    }
}

/// The state of a draft: open, being sealed, or closed.
#[derive(Debug)]
enum DraftState {
    Open(OpenDraft),
    /// A thread is sealing the draft.
    Sealing,
    Closed,
}

/// A draft that is shared by threads until it is sealed or abandoned.
#[derive(Debug)]
struct SharedDraft {
    name: String,
    state: Mutex<DraftState>,
}

impl SharedDraft {
    fn new(name: &str, draft: OpenDraft) -> Self {
        Self { name: name.to_owned(), state: Mutex::new(DraftState::Open(draft)) }
    }

    /// Locks the state of the draft. The lock is held only briefly, because the caller may hold the GIL.
    fn lock(&self) -> MutexGuard<'_, DraftState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn closed_error(&self, state: &DraftState) -> Exception {
        match state {
            DraftState::Sealing => {
                Exception::new("Busy", format!("another thread seals the draft of `{}`", self.name))
            }
            _ => Exception::new("Closed", format!("the draft of `{}` was sealed or abandoned", self.name)),
        }
    }

    fn in_use_error(&self) -> Exception {
        let message = format!("cannot seal the draft of `{}`: arrays of it still exist", self.name);
        Exception::new("InUse", message)
            .hint("drop them and the arrays of its mirrors first: `del array`; then seal again")
            .code("still-mapped")
    }

    /// Calls a function with the open draft, or returns an error if the draft is not open.
    fn with<T>(&self, call: impl FnOnce(&OpenDraft) -> Result<T, Exception>) -> Result<T, Exception> {
        match &*self.lock() {
            DraftState::Open(draft) => call(draft),
            state => Err(self.closed_error(state)),
        }
    }

    fn array(&self, member: usize) -> Result<Array, Exception> {
        let missing = || self.closed_error(&DraftState::Closed);
        self.with(|draft| draft.views.get(member).cloned().map(Array::new).ok_or_else(missing))
    }

    fn repr(&self, kind: &str) -> String {
        let state = match &*self.lock() {
            DraftState::Open(_) => "",
            DraftState::Sealing => ", sealing",
            DraftState::Closed => ", closed",
        };
        format!("{kind}(name='{}'{state})", self.name)
    }

    /// Abandons the draft. A draft that a thread is sealing is then not reopened if sealing fails.
    fn abandon(&self, py: Python<'_>) {
        py.detach(|| drop(self.set(DraftState::Closed)));
    }

    fn set(&self, state: DraftState) -> DraftState {
        mem::replace(&mut *self.lock(), state)
    }

    /// Takes the open draft out of the shared state, for the thread that seals it.
    fn take(&self) -> Result<OpenDraft, Exception> {
        let mut state = self.lock();
        match mem::replace(&mut *state, DraftState::Sealing) {
            DraftState::Open(draft) if draft.is_in_use() => {
                *state = DraftState::Open(draft);
                Err(self.in_use_error())
            }
            DraftState::Open(draft) => Ok(draft),
            other => {
                *state = other;
                Err(self.closed_error(&state))
            }
        }
    }

    /// Reopens the draft after sealing failed, unless it was abandoned meanwhile.
    fn reopen(&self, draft: Option<Box<OpenDraft>>) {
        let mut state = self.lock();
        match (&*state, draft) {
            (DraftState::Sealing, Some(draft)) => *state = DraftState::Open(*draft),
            (_, abandoned) => {
                *state = DraftState::Closed;
                drop(state);
                drop(abandoned);
            }
        }
    }

    fn seal(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<u64> {
        let stream = stream.map_or(Ok(0), handle_of)?;
        let draft = self.take().into_py()?;
        let sealed = run_blocking(py, || match draft.seal(stream) {
            Ok(sealed) => {
                self.set(DraftState::Closed);
                Ok(sealed)
            }
            Err((raised, draft)) => {
                self.reopen(draft);
                Err(raised)
            }
        });
        sealed.map(|sealed| sealed.version)
    }

    /// Ends a `with` block of the draft: seals the draft, or abandons it if the block raised.
    fn exit(&self, py: Python<'_>, has_failed: bool) -> PyResult<()> {
        if has_failed {
            self.abandon(py);
            return Ok(());
        }
        // Code in the `with` block has already sealed or abandoned the draft.
        if matches!(*self.lock(), DraftState::Closed) {
            return Ok(());
        }
        self.seal(py, None).map(drop)
    }
}

/// A draft: an object of the store that is still being written. A ``with`` block seals the draft at its end, or abandons it
/// if the block raises.
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
    shared: SharedDraft,
}

impl Draft {
    pub(super) fn create(
        client: &Client,
        name: &str,
        layout: Layout,
        device: Option<&Device>,
    ) -> Result<Self, Exception> {
        let draft = OpenDraft::new(StoreDraft::one(client, name, &layout, device)?, vec![layout])?;
        Ok(Self { shared: SharedDraft::new(name, draft) })
    }

    /// Creates a mirror (a copy in host memory) of the draft, and returns it with the array that it mirrors.
    pub(super) fn mirror(&self, copy_in: bool) -> Result<(wholemem_store::Mirror, View), Exception> {
        let refused = || {
            Exception::new("Unsupported", "a draft of less than 1 MiB in host memory needs no mirror")
                .hint("write to `draft.array`")
        };
        let (view, span, device) = self.shared.with(|draft| {
            let view = draft.views.first().filter(|_| draft.in_place).cloned();
            let (span, device) = (draft.target.span(0)?, draft.target.device());
            view.zip(span).zip(device).map(|((view, span), device)| (view, span, device)).ok_or_else(refused)
        })?;
        // The lock of the draft's state is not held here, so other threads can use the draft during the copy.
        Ok((wholemem_store::Mirror::of_span(span, &device, copy_in)?, view))
    }
}

#[pymethods]
impl Draft {
    /// The name that the object of the draft will have in the store.
    #[getter]
    fn name(&self) -> &str {
        &self.shared.name
    }

    /// The memory of the draft as a writable array, initially zero.
    #[getter]
    fn array(&self) -> PyResult<Array> {
        self.shared.array(0).into_py()
    }

    /// Seals the draft (makes its object immutable) and publishes the object under its name.
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
        self.shared.seal(py, stream)
    }

    /// Abandons the draft and frees its memory.
    fn abandon(&self, py: Python<'_>) {
        self.shared.abandon(py);
    }

    fn __repr__(&self) -> String {
        self.shared.repr("Draft")
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
        self.shared.exit(py, kind.is_some())
    }
}

/// The draft of a pack: a mapping of names to arrays that are still being written. A ``with`` block seals or abandons it
/// like a :class:`Draft`.
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
    shared: SharedDraft,
    members: Vec<String>,
}

impl PackDraft {
    pub(super) fn create(
        client: &Client,
        name: &str,
        arrays: Vec<(String, Layout)>,
        device: Option<&Device>,
    ) -> Result<Self, Exception> {
        let named = arrays.iter().map(|(name, layout)| (name.as_str(), layout));
        let target = StoreDraft::many(client, name, named, device)?;
        let (members, layouts) = arrays.into_iter().unzip();
        let draft = OpenDraft::new(target, layouts)?;
        Ok(Self { shared: SharedDraft::new(name, draft), members })
    }
}

#[pymethods]
impl PackDraft {
    /// The name that the pack will have in the store.
    #[getter]
    fn name(&self) -> &str {
        &self.shared.name
    }

    fn __len__(&self) -> usize {
        self.members.len()
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        PyList::new(py, &self.members)?.try_iter()
    }

    fn __getitem__(&self, name: &str) -> PyResult<Array> {
        let missing = || {
            let message = format!("the draft of `{}` has no array `{name}`", self.shared.name);
            Exception::new("NotFound", message)
        };
        let member = self.members.iter().position(|member| member == name).ok_or_else(missing);
        self.shared.array(member.into_py()?).into_py()
    }

    /// Seals the pack (makes its arrays immutable) and publishes the pack under its name.
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
        self.shared.seal(py, stream)
    }

    /// Abandons the draft of the pack and frees its memory.
    fn abandon(&self, py: Python<'_>) {
        self.shared.abandon(py);
    }

    fn __repr__(&self) -> String {
        self.shared.repr("PackDraft")
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
        self.shared.exit(py, kind.is_some())
    }
}
