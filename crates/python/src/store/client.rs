//! A connection to a store: see `wholemem.store.Client`.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use wholemem_os::{Deadline, ForkEpoch};
use wholemem_store::{Client as Connection, Error, Refusal};

use super::draft::{Draft, PackDraft};
use super::entry::{Entry, Status};
use super::given::{self, Given};
use super::lease::{self, Named};
use super::share;
use super::watch::Watch;
use crate::array::{self, Element, Layout};
use crate::device::DeviceName;
use crate::error::{Raised, Raises};
use crate::number::Shape;
use crate::wait::{Closed, waiting, waiting_unless};

/// A connection to a store, which ``wholemem serve`` serves. Threads may share it; a forked child makes its own.
///
/// The socket is the one that is given, or that ``WHOLEMEM_SOCKET`` names, or this user's own. Calls that wait give up the
/// interpreter's lock, and Ctrl-C ends them. Used as a context, it is closed at the end; its arrays stay. Once a call has
/// found that the store has ended, every later one raises :class:`wholemem.errors.ServerLost`.
///
/// >>> import numpy
/// >>> from wholemem import store
/// >>> with store.Client() as client:
/// ...     client.put("numbers", numpy.arange(6).reshape(2, 3))
/// ...     numbers = client.get("numbers")
/// 1
/// >>> numbers
/// Array([[0, 1, 2],
///        [3, 4, 5]], shape=(2, 3), dtype=int64, device=cpu, readonly)
/// >>> numbers.numpy().sum()
/// np.int64(15)
#[pyclass(frozen, module = "wholemem.store")]
#[derive(Debug)]
pub(crate) struct Client {
    socket: PathBuf,
    /// `None` once it is closed.
    open: Mutex<Option<Connection>>,
    closed: Closed,
    epoch: ForkEpoch,
}

/// So many seconds, of which there may be no end.
fn seconds_of(seconds: f64) -> Result<Duration, Raised> {
    if seconds == f64::INFINITY {
        return Ok(Duration::MAX);
    }
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| Raised::new("WrongValue", format!("cannot wait for {seconds} seconds")))
}

/// In so many seconds, or never.
pub(super) fn deadline_of(seconds: f64) -> Result<Deadline, Raised> {
    seconds_of(seconds).map(Deadline::after)
}

impl Client {
    /// The connection, unless it was closed, or this is a forked child.
    fn open(&self) -> Result<Connection, Raised> {
        // Before the lock, which in a child may be held by a thread that is not there.
        if !self.epoch.is_current() {
            return Err(Error::Forked.into());
        }
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.clone().ok_or_else(closed)
    }

    /// Makes a call that waits, until it is answered or this client is closed.
    fn waiting<T, E>(&self, py: Python<'_>, call: impl FnOnce() -> Result<T, E> + Send) -> PyResult<T>
    where
        T: Send,
        E: Into<Raised> + Send,
    {
        let closed = self.closed.clone();
        waiting_unless(py, move || closed.is_set(), call)
    }

    /// The connection for who makes something of a name, waiting for room so long where the quota is full. Below, what has
    /// no name is got by its number, which here nobody could.
    fn open_for_room(&self, name: &str, timeout: Option<f64>) -> Result<Connection, Raised> {
        if name.is_empty() {
            return Err(Error::EmptyName.into());
        }
        let client = self.open()?;
        Ok(match timeout {
            Some(timeout) => client.waiting_for_space(seconds_of(timeout)?),
            None => client,
        })
    }
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (socket=None))]
    fn new(py: Python<'_>, socket: Option<PathBuf>) -> PyResult<Self> {
        let epoch = ForkEpoch::current().raised()?;
        let socket = wholemem_store::socket(socket.as_deref()).raised()?;
        let client = waiting(py, || Connection::connect(&socket))?;
        Ok(Self { socket, open: Mutex::new(Some(client)), closed: Closed::default(), epoch })
    }

    /// The socket of the store.
    #[getter]
    fn socket(&self) -> PathBuf {
        self.socket.clone()
    }

    /// Whether it was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.epoch.is_current() && self.open.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// What has a name now: an :class:`Array`, read-only, or a :class:`Pack` of them. Nothing is copied.
    ///
    /// Frameworks that take an array of host memory by DLPack get a copy-on-write map of it, one for each export, since
    /// torch and others write to memory that is read-only: what a tensor writes stays in that tensor. ``array.numpy()`` and
    /// the buffer protocol are the shared memory itself. Of an object on a GPU, ``torch.from_dlpack(array)`` is a tensor of
    /// the same memory: work that writes it fails, and takes the process's GPU context along; ``copy=True`` makes one to
    /// be written. With a ``timeout`` it is waited for, so many seconds. What was got before is got again in a
    /// microsecond, without a system call.
    #[pyo3(signature = (name, timeout=None))]
    fn get(&self, py: Python<'_>, name: &str, timeout: Option<f64>) -> PyResult<Named> {
        let client = self.open().raised()?;
        let object = match client.get_mapped(name).raised()? {
            Some(object) => object,
            None => match timeout {
                None => self.waiting(py, || client.get(name))?,
                Some(seconds) => {
                    let deadline = deadline_of(seconds).raised()?;
                    self.waiting(py, || {
                        client.get_within(name, deadline).map_err(|error| late(error, seconds))
                    })?
                }
            },
        };
        Named::of(object).raised()
    }

    /// Copies an array into the store, or a mapping of names to arrays as a pack, and returns its version.
    ///
    /// What is on a GPU is copied there, behind what its maker has enqueued. Where there is no room, ``timeout`` is for
    /// how many seconds it is waited for. An array of a pack has a name of its own too: ``name/array``.
    #[pyo3(signature = (name, value, *, timeout=None))]
    fn put(
        &self,
        py: Python<'_>,
        name: &str,
        value: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<u64> {
        let (client, given) = (self.open_for_room(name, timeout).raised()?, Given::take(value)?);
        self.waiting(py, || given.put(&client, name))
    }

    /// Makes a name mean an array from now on, and returns the version.
    ///
    /// An array that this client got, by its name or of a pack, gets one more name, and is not copied; it is if it was
    /// deleted meanwhile, or replaced. Anything else is copied, as by :meth:`put`.
    #[pyo3(signature = (name, value, *, timeout=None))]
    fn publish(
        &self,
        py: Python<'_>,
        name: &str,
        value: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<u64> {
        let (client, given) = (self.open_for_room(name, timeout).raised()?, Given::take(value)?);
        let stored = match &given {
            Given::One(view) => lease::stored(&client, view),
            Given::Many(_) => None,
        };
        self.waiting(py, || {
            let named = stored.map(|(object, meta)| client.publish_with_meta(name, &meta, object));
            match named {
                // Held here, and the store's no more.
                Some(Err(Error::Refused(Refusal::NoSuchObject { .. }))) | None => given.put(&client, name),
                Some(sealed) => Ok(sealed?.version),
            }
        })
    }

    /// Makes a name mean an array of a GPU where it lies, without a copy, and returns the version.
    ///
    /// The memory must have been made to be shared: by :func:`wholemem.torch.pool.mem_pool`, as a tensor or window of
    /// this package, or under torch's expandable segments, where the array lies in one piece of it. The store holds
    /// that piece from now on, and all of it counts. The array may be dropped: it is kept until the object has gone.
    /// Nobody is kept from writing it, and nobody should. Only the user who serves the store may share with it.
    #[pyo3(signature = (name, array, *, timeout=None))]
    fn share(
        &self,
        py: Python<'_>,
        name: &str,
        array: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<u64> {
        let (client, view) = (self.open_for_room(name, timeout).raised()?, array::take_settled(array)?);
        self.waiting(py, || share::share(&client, name, &view))
    }

    /// Begins an object, to be written in place and sealed: in host memory, or on the GPU that ``device`` names.
    #[pyo3(signature = (name, shape, dtype, *, device=None, timeout=None))]
    fn create(
        &self,
        py: Python<'_>,
        name: &str,
        shape: Shape,
        dtype: Element,
        device: Option<DeviceName>,
        timeout: Option<f64>,
    ) -> PyResult<Draft> {
        let layout = Layout::contiguous(dtype, &shape.signed()).raised()?;
        let client = self.open_for_room(name, timeout).raised()?;
        self.waiting(py, || Draft::create(&client, name, layout, DeviceName::gpu(device)?.as_ref()))
    }

    /// Begins a pack of arrays whose shapes and types are given, to be written in place and sealed together.
    #[pyo3(signature = (name, arrays, *, device=None, timeout=None))]
    fn create_pack(
        &self,
        py: Python<'_>,
        name: &str,
        arrays: &Bound<'_, PyAny>,
        device: Option<DeviceName>,
        timeout: Option<f64>,
    ) -> PyResult<PackDraft> {
        let layouts = given::layouts(arrays)?;
        let client = self.open_for_room(name, timeout).raised()?;
        self.waiting(py, || PackDraft::create(&client, name, layouts, DeviceName::gpu(device)?.as_ref()))
    }

    /// Deletes what has a name, or the object or draft of an entry. Processes that hold it keep it; its memory is freed when
    /// the last of them lets it go. Only the user who runs the server can delete a draft.
    fn delete(&self, py: Python<'_>, name: Deleted<'_>) -> PyResult<()> {
        let client = self.open().raised()?;
        let given = match &name {
            Deleted::Entry(entry) => Ok(entry.get().object_id()?),
            Deleted::Name(name) => Err(name.clone()),
        };
        self.waiting(py, || {
            let id = given.or_else(|name| client.stat(&name).map(|entry| entry.id));
            let deleted = id.and_then(|id| client.delete(id));
            share::collect();
            deleted.map_err(unfound)
        })
    }

    /// The drafts whose names begin so, by name: what was created by any client and is not sealed yet. A pack is one
    /// draft.
    #[pyo3(signature = (prefix=""))]
    fn drafts(&self, py: Python<'_>, prefix: &str) -> PyResult<Vec<Entry>> {
        let client = self.open().raised()?;
        let entries = self.waiting(py, || client.drafts(prefix))?;
        Ok(entries.into_iter().map(Entry::new).collect())
    }

    /// The objects whose names begin so, by name.
    #[pyo3(signature = (prefix=""))]
    fn list(&self, py: Python<'_>, prefix: &str) -> PyResult<Vec<Entry>> {
        let client = self.open().raised()?;
        let entries = self.waiting(py, || client.list(prefix))?;
        Ok(entries.into_iter().map(Entry::new).collect())
    }

    /// What there is to know of the object that has a name.
    fn stat(&self, py: Python<'_>, name: &str) -> PyResult<Entry> {
        let client = self.open().raised()?;
        self.waiting(py, || client.stat(name).map_err(unfound)).map(Entry::new)
    }

    /// How full the store is.
    fn status(&self, py: Python<'_>) -> PyResult<Status> {
        let client = self.open().raised()?;
        self.waiting(py, || client.status()).map(|status| Status::new(&status))
    }

    /// Begins to be told of what happens to names that begin so.
    #[pyo3(signature = (prefix=""))]
    fn watch(&self, py: Python<'_>, prefix: &str) -> PyResult<Watch> {
        let client = self.open().raised()?;
        Watch::new(self.waiting(py, || client.watch(prefix))?, &self.closed).raised()
    }

    /// Closes the connection, and its watches. Arrays stay; calls of other threads that still wait raise
    /// :class:`wholemem.errors.Closed`, and what they asked for may have been done or not.
    fn close(&self, py: Python<'_>) {
        if self.epoch.is_current() {
            self.closed.set();
            py.detach(|| drop(self.open.lock().unwrap_or_else(PoisonError::into_inner).take()));
        }
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyAny>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        let closed = if self.closed() { ", closed" } else { "" };
        format!("Client('{}'{closed})", self.socket.display())
    }
}

pub(super) fn closed() -> Raised {
    Raised::new("Closed", "the client is closed").hint("make a new one: `Client(socket)`")
}

/// What a wait for a name met.
fn late(error: Error, seconds: f64) -> Raised {
    match error {
        Error::Refused(Refusal::NoSuchName { name }) => {
            let message = format!("no object named `{name}` came within {seconds} seconds");
            Raised::new("Timeout", message).code("no-such-name").hint("`client.list()` names what there is")
        }
        error => error.into(),
    }
}

/// What was met by somebody who does not wait for names.
/// What is to be deleted: what has a name now, or exactly the object of an entry.
#[derive(FromPyObject)]
enum Deleted<'py> {
    Name(String),
    Entry(Bound<'py, Entry>),
}

fn unfound(error: Error) -> Raised {
    match error {
        Error::Refused(Refusal::NoSuchName { .. }) => {
            Raised::from(error).hint("`client.list()` names what there is")
        }
        error => error.into(),
    }
}

/// Lets arrays go that were shared with a store, and whose objects nobody has any more; how many are left.
#[pyfunction]
pub(crate) fn collect_shared(py: Python<'_>) -> usize {
    py.detach(share::collect)
}
