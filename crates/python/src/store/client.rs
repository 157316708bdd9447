//! Implements `wholemem.store.Client`, a connection to a store.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyIterator, PyList};
use wholemem_os::ForkEpoch;
use wholemem_store::{Client as Connection, Error, Refusal};

use super::arguments::{
    DefaultArg, DeleteArg, deadline_of, exists, or_missing, seconds_of, wait_error, with_list_hint,
};
use super::draft::{Draft, PackDraft};
use super::entry::{Entry, Status};
use super::put_value::{self, PutValue};
use super::share;
use super::stored::{self, StoredValue};
use super::watch::Watch;
use crate::array::{Element, Layout};
use crate::device::DeviceName;
use crate::error::{Exception, IntoPyResult};
use crate::number::{Shape, optional_unsigned};
use crate::wait::{ClosedFlag, run_blocking, run_blocking_unless};

/// A connection to an object store that ``wholemem serve`` runs. Threads may share a connection; a forked child process
/// needs its own.
///
/// A client is used like a dict of names: ``client[name]``, ``name in client``, ``del client[name]``, ``len(client)``, and iteration
/// over the names. Calls that wait release the GIL, and Ctrl-C interrupts them. As a context manager, the connection is closed at the end;
/// its arrays stay valid. After a call has detected that the store has ended, every later call raises
/// :class:`wholemem.errors.ServerLost`.
///
/// Args:
///     socket: The path of the store's socket. ``None`` uses ``WHOLEMEM_SOCKET``, or else this user's default socket.
///
/// Raises:
///     wholemem.errors.NotAllowed: This user may not connect to the socket.
///     wholemem.errors.ServerLost: No store is served at the socket.
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
/// >>> with store.Client() as client:
/// ...     client["answer"] = numpy.array(42)
/// ...     print("answer" in client, int(client["answer"]), client.get("question", default=None))
/// ...     del client["answer"]
/// True 42 None
#[pyclass(frozen, mapping, module = "wholemem.store")]
#[derive(Debug)]
pub(crate) struct Client {
    socket: PathBuf,
    /// The connection to the store; `None` after `close`.
    open: Mutex<Option<Connection>>,
    closed: ClosedFlag,
    epoch: ForkEpoch,
}

impl Client {
    /// Returns the connection to the store, or an error if the client was closed or this process is a forked child.
    fn connection(&self) -> Result<Connection, Exception> {
        // A forked child is detected before the mutex is locked: in a child, a thread that was not forked may hold the mutex.
        if !self.epoch.is_current() {
            return Err(Error::Forked.into());
        }
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.clone().ok_or_else(closed)
    }

    /// Runs a call to the store that may block until the server responds. Closing this client interrupts the call.
    fn run_blocking<T, E>(&self, py: Python<'_>, call: impl FnOnce() -> Result<T, E> + Send) -> PyResult<T>
    where
        T: Send,
        E: Into<Exception> + Send,
    {
        let closed = self.closed.clone();
        run_blocking_unless(py, move || closed.is_set(), call)
    }

    /// Returns the connection for a call that creates an object and waits up to `timeout` seconds for free memory. Objects
    /// without a name exist in the store, but Python has no call to get them, so an empty name is an error.
    fn connection_with_timeout(&self, name: &str, timeout: Option<f64>) -> Result<Connection, Exception> {
        if name.is_empty() {
            return Err(Error::EmptyName.into());
        }
        let client = self.connection()?;
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
        let epoch = ForkEpoch::current().into_py()?;
        let socket = wholemem_store::socket(socket.as_deref()).into_py()?;
        let client = run_blocking(py, || Connection::connect(&socket))?;
        Ok(Self { socket, open: Mutex::new(Some(client)), closed: ClosedFlag::default(), epoch })
    }

    /// The path of the Unix socket of the store.
    #[getter]
    fn socket(&self) -> PathBuf {
        self.socket.clone()
    }

    /// True if the connection to the store was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.epoch.is_current() && self.open.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Returns the object that currently has a name in the store, without a copy.
    ///
    /// DLPack exports an array in host memory as a copy-on-write map, one for each export, because torch and other frameworks
    /// write to read-only memory: the writes of a tensor are visible only in that tensor. ``array.numpy()`` and the buffer
    /// protocol use the shared memory itself. For an object on a GPU, ``torch.from_dlpack(array)`` shares the memory: a kernel
    /// that writes to it fails and destroys the CUDA context of the process. ``torch.from_dlpack(array, copy=True)`` creates a
    /// writable copy.
    ///
    /// Getting an object again takes about a microsecond and no system call. ``client[name]`` is a get without a timeout.
    ///
    /// Args:
    ///     name: The name of the object.
    ///     timeout: Seconds to wait until the name exists. ``None`` does not wait.
    ///     default: The result if the name does not exist, or did not appear in time. Without it, an exception is raised.
    ///
    /// Returns:
    ///     A read-only :class:`Array`, or a :class:`Pack`.
    ///
    /// Raises:
    ///     wholemem.errors.NotFound: The name does not exist.
    ///     wholemem.errors.Timeout: The name did not appear in time.
    #[pyo3(signature = (name, timeout=None, *, default=DefaultArg::MISSING))]
    fn get<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        timeout: Option<f64>,
        default: DefaultArg<'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let client = self.connection().into_py()?;
        let found = match (client.get_mapped(name).into_py()?, timeout) {
            (Some(object), _) => Ok(object),
            (None, None) => self.run_blocking(py, || or_missing(client.get(name)))?,
            (None, Some(seconds)) => {
                let deadline = deadline_of(seconds).into_py()?;
                self.run_blocking(py, || or_missing(client.get_within(name, deadline)))?
            }
        };
        match (found, default.0, timeout) {
            (Ok(object), ..) => StoredValue::of(object).into_py()?.into_bound_py_any(py),
            (Err(_), Some(default), _) => Ok(default),
            (Err(error), None, Some(seconds)) => Err(wait_error(error, seconds).into()),
            (Err(error), None, None) => Err(Exception::from(error).into()),
        }
    }

    /// Returns the object that currently has a name if its memory is already mapped in this process, and ``None``
    /// otherwise. Does not wait.
    fn _get_mapped(&self, name: &str) -> PyResult<Option<StoredValue>> {
        let object = self.connection().into_py()?.get_mapped(name).into_py()?;
        object.map(StoredValue::of).transpose().into_py()
    }

    /// Copies an array into the store, or a mapping of names to arrays as a pack (one object with several arrays).
    ///
    /// Arrays in host memory and tensors of torch may have any strides; objects are contiguous. A parameter of a torch module is put
    /// without its gradient. An array on a GPU is copied on that GPU, after the work that is enqueued on it. An array of a pack also
    /// has its own name: ``name/array``. ``client[name] = value`` is a put without a timeout.
    ///
    /// Args:
    ///     name: The name of the object. An object that has the name is replaced.
    ///     value: An array, a buffer such as ``bytes``, or a mapping of names to arrays, such as the ``state_dict`` of a module.
    ///     timeout: Seconds to wait for free memory if the quota is exhausted. ``None`` does not wait.
    ///
    /// Returns:
    ///     The version of the object under its name.
    ///
    /// Raises:
    ///     wholemem.errors.OutOfMemory: The store has no memory or no free index entry.
    ///     wholemem.errors.OverQuota: The quota is exhausted.
    ///     wholemem.errors.WrongStride: An array on a GPU is not contiguous, and not a tensor of torch.
    #[pyo3(signature = (name, value, *, timeout=None))]
    fn put(
        &self,
        py: Python<'_>,
        name: &str,
        value: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<u64> {
        let (client, value) =
            (self.connection_with_timeout(name, timeout).into_py()?, PutValue::import(value)?);
        self.run_blocking(py, || value.put(&client, name))
    }

    /// Publishes an array under a name, without a copy if the array is already an object of this store.
    ///
    /// An array that this client got, by its name or from a pack, gets a second name. It is copied if it was deleted or replaced
    /// meanwhile. Other values are copied, as by :meth:`put`.
    ///
    /// Args:
    ///     name: The name. An object that has the name is replaced.
    ///     value: An array, a buffer such as ``bytes``, or a mapping of names to arrays.
    ///     timeout: Seconds to wait for free memory if the quota is exhausted. ``None`` does not wait.
    ///
    /// Returns:
    ///     The version of the object under its name.
    ///
    /// Raises:
    ///     wholemem.errors.OverQuota: The quota is exhausted.
    ///     wholemem.errors.WrongStride: An array on a GPU is not contiguous, and not a tensor of torch.
    #[pyo3(signature = (name, value, *, timeout=None))]
    fn publish(
        &self,
        py: Python<'_>,
        name: &str,
        value: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<u64> {
        let (client, value) =
            (self.connection_with_timeout(name, timeout).into_py()?, PutValue::import(value)?);
        let stored_object = match &value {
            PutValue::One(view) => stored::stored_object(&client, view),
            PutValue::Many(_) => None,
        };
        self.run_blocking(py, || {
            let published = stored_object.map(|(object, meta)| client.publish_with_meta(name, &meta, object));
            match published {
                // The store has deleted the object that this process still holds, so the array is copied.
                Some(Err(Error::Refused(Refusal::NoSuchObject { .. }))) | None => value.put(&client, name),
                Some(sealed) => Ok(sealed?.version),
            }
        })
    }

    /// Publishes an array on a GPU as an object of the store, without a copy. The object keeps the array's memory, so the
    /// array may be dropped.
    ///
    /// The memory must be shareable: allocated in :func:`wholemem.torch.pool.mem_pool`, a table or window of this package, or in
    /// torch's expandable segments if the array is inside one segment. The store holds the whole allocation, and all of it counts
    /// towards the quota. The memory is kept until the object is freed. Writing to the array is possible but changes the object.
    /// Only the user who serves the store may call it.
    ///
    /// Args:
    ///     name: The name. An object that has the name is replaced.
    ///     array: A contiguous array on a GPU.
    ///     timeout: Seconds to wait for free quota. ``None`` does not wait.
    ///
    /// Returns:
    ///     The version of the object under its name.
    ///
    /// Raises:
    ///     wholemem.errors.NotAllowed: Another user serves the store.
    ///     wholemem.errors.OverQuota: The quota is exhausted.
    ///     wholemem.errors.Unsupported: The memory was not allocated to be shared.
    #[pyo3(signature = (name, array, *, timeout=None))]
    fn share(
        &self,
        py: Python<'_>,
        name: &str,
        array: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<u64> {
        let (client, view) =
            (self.connection_with_timeout(name, timeout).into_py()?, put_value::import_one(array)?);
        self.run_blocking(py, || share::share(&client, name, &view))
    }

    /// Creates a draft: an object of the store that is written in place and then sealed (made immutable and visible).
    ///
    /// Args:
    ///     name: The name that the object will have.
    ///     shape: The length of each dimension, or one int.
    ///     dtype: The element type: a name such as ``float32``, or a dtype of numpy or torch.
    ///     device: ``cuda`` or ``cuda:1`` for memory of a GPU. ``None`` is host memory.
    ///     timeout: Seconds to wait for free memory if the quota is exhausted. ``None`` does not wait.
    ///
    /// Returns:
    ///     The draft.
    ///
    /// Raises:
    ///     wholemem.errors.OutOfMemory: The store has no memory or no free index entry.
    ///     wholemem.errors.OverQuota: The quota is exhausted.
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
        let layout = Layout::contiguous(dtype, &shape.signed()).into_py()?;
        let client = self.connection_with_timeout(name, timeout).into_py()?;
        self.run_blocking(py, || Draft::create(&client, name, layout, DeviceName::gpu(device)?.as_ref()))
    }

    /// Creates the draft of a pack (several arrays in one allocation), which is written in place and then sealed.
    ///
    /// Args:
    ///     name: The name that the pack will have.
    ///     arrays: A mapping of names to pairs of shape and element type.
    ///     device: ``cuda`` or ``cuda:1`` for memory of a GPU. ``None`` is host memory.
    ///     timeout: Seconds to wait for free memory if the quota is exhausted. ``None`` does not wait.
    ///
    /// Returns:
    ///     The draft of the pack.
    ///
    /// Raises:
    ///     wholemem.errors.OutOfMemory: The store has no memory or no free index entry.
    ///     wholemem.errors.OverQuota: The quota is exhausted.
    #[pyo3(signature = (name, arrays, *, device=None, timeout=None))]
    fn create_pack(
        &self,
        py: Python<'_>,
        name: &str,
        arrays: &Bound<'_, PyAny>,
        device: Option<DeviceName>,
        timeout: Option<f64>,
    ) -> PyResult<PackDraft> {
        let layouts = put_value::layouts(arrays)?;
        let client = self.connection_with_timeout(name, timeout).into_py()?;
        self.run_blocking(py, || PackDraft::create(&client, name, layouts, DeviceName::gpu(device)?.as_ref()))
    }

    /// Deletes an object or a draft from the store. Processes that hold the object can still use it; its memory is freed
    /// when the last of them releases it.
    ///
    /// Args:
    ///     name: The name of an object, or an :class:`Entry` of exactly the object or draft to delete.
    ///
    /// Raises:
    ///     wholemem.errors.NotAllowed: Another user created the object, or it is a draft and another user runs the server.
    ///     wholemem.errors.NotFound: The name or object does not exist.
    fn delete(&self, py: Python<'_>, name: DeleteArg<'_>) -> PyResult<()> {
        let client = self.connection().into_py()?;
        let target = match &name {
            DeleteArg::Entry(entry) => Ok(entry.get().object_id()?),
            DeleteArg::Name(name) => Err(name.clone()),
        };
        self.run_blocking(py, || {
            let id = target.or_else(|name| client.stat(&name).map(|entry| entry.id));
            let deleted = id.and_then(|id| client.delete(id));
            share::collect();
            deleted.map_err(with_list_hint)
        })
    }

    /// Lists the drafts (objects that are not sealed yet) of all clients of the store, sorted by name. A pack is one draft.
    ///
    /// Args:
    ///     prefix: The beginning of the names.
    ///
    /// Returns:
    ///     One entry for each draft.
    #[pyo3(signature = (prefix=""))]
    fn drafts(&self, py: Python<'_>, prefix: &str) -> PyResult<Vec<Entry>> {
        let client = self.connection().into_py()?;
        let entries = self.run_blocking(py, || client.drafts(prefix))?;
        Ok(entries.into_iter().map(Entry::new).collect())
    }

    /// Lists the objects of the store, sorted by name.
    ///
    /// Args:
    ///     prefix: The beginning of the names.
    ///
    /// Returns:
    ///     One entry for each object.
    #[pyo3(signature = (prefix=""))]
    fn list(&self, py: Python<'_>, prefix: &str) -> PyResult<Vec<Entry>> {
        let client = self.connection().into_py()?;
        let entries = self.run_blocking(py, || client.list(prefix))?;
        Ok(entries.into_iter().map(Entry::new).collect())
    }

    /// Returns the names of the objects of the store, sorted. Iterating over the client yields the same names, ``len(client)`` is their
    /// number, ``name in client`` tests whether one exists, and ``del client[name]`` deletes an object.
    ///
    /// Args:
    ///     prefix: The beginning of the names.
    #[pyo3(signature = (prefix=""))]
    fn keys(&self, py: Python<'_>, prefix: &str) -> PyResult<Vec<String>> {
        let client = self.connection().into_py()?;
        let entries = self.run_blocking(py, || client.list(prefix))?;
        // Programs in Rust can create objects without a name.
        Ok(entries.into_iter().map(|entry| entry.name).filter(|name| !name.is_empty()).collect())
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.keys(py, "")?.len())
    }

    /// A client of an empty store is true, unlike an empty dict: programs test whether they have a client.
    fn __bool__(&self) -> bool {
        true
    }

    fn __contains__(&self, py: Python<'_>, name: &Bound<'_, PyAny>) -> PyResult<bool> {
        let client = self.connection().into_py()?;
        match name.extract::<String>() {
            Ok(name) => self.run_blocking(py, || exists(client.stat(&name))),
            Err(_) => Ok(false),
        }
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        PyList::new(py, self.keys(py, "")?)?.try_iter()
    }

    fn __getitem__<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        self.get(py, name, None, DefaultArg::MISSING)
    }

    fn __setitem__(&self, py: Python<'_>, name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
        self.put(py, name, value, None).map(drop)
    }

    fn __delitem__(&self, py: Python<'_>, name: String) -> PyResult<()> {
        self.delete(py, DeleteArg::Name(name))
    }

    /// Returns the description of the object that currently has a name in the store.
    ///
    /// Args:
    ///     name: The name of the object.
    ///
    /// Raises:
    ///     wholemem.errors.NotFound: The name does not exist.
    fn stat(&self, py: Python<'_>, name: &str) -> PyResult<Entry> {
        let client = self.connection().into_py()?;
        self.run_blocking(py, || client.stat(name).map_err(with_list_hint)).map(Entry::new)
    }

    /// Returns the status of the store: the numbers of objects and clients, and the memory in use.
    fn status(&self, py: Python<'_>) -> PyResult<Status> {
        let client = self.connection().into_py()?;
        self.run_blocking(py, || client.status()).map(|status| Status::new(&status))
    }

    /// Subscribes to the events of objects whose names begin with a prefix.
    ///
    /// The events are: an object was published, replaced or deleted, and events were missed.
    ///
    /// Args:
    ///     prefix: The beginning of the names.
    ///     after: The :attr:`Event.revision` of the last event that the program has seen, to resume a watch. The watch first returns the
    ///         events behind it. The server retains the latest events of all names, about 1 MiB of them, and a restarted server
    ///         has none of its predecessor: if events are lost, the first event has the kind ``missed``. ``None`` starts with the
    ///         next event.
    ///
    /// Returns:
    ///     An iterator over the events.
    #[pyo3(signature = (prefix="", *, after=None))]
    fn watch(
        &self,
        py: Python<'_>,
        prefix: &str,
        #[pyo3(from_py_with = optional_unsigned)] after: Option<u64>,
    ) -> PyResult<Watch> {
        let client = self.connection().into_py()?;
        let watch = self.run_blocking(py, || match after {
            Some(revision) => client.watch_after(prefix, revision),
            None => client.watch(prefix),
        })?;
        Watch::new(watch, &self.closed).into_py()
    }

    /// Closes the connection to the store and the watches of the connection. Arrays from the store stay valid.
    ///
    /// Calls of other threads that are waiting raise :class:`wholemem.errors.Closed`; their requests may or may not have been
    /// executed.
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

pub(super) fn closed() -> Exception {
    Exception::new("Closed", "the client is closed").hint("create a new one: `Client(socket)`")
}

/// Releases GPU arrays that were published to a store without a copy and whose objects the store has freed.
///
/// Returns:
///     The number of shared arrays that are still held.
#[pyfunction]
pub(crate) fn collect_shared(py: Python<'_>) -> usize {
    py.detach(share::collect)
}
