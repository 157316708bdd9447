//! Watches: iterators that wait for the events (published, deleted) of names with a prefix.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Mutex, MutexGuard, TryLockError};

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use wholemem_os::{Deadline, ForkEpoch};
use wholemem_store::{Error, EventKind};

use super::arguments::deadline_of;
use crate::error::{Exception, IntoPyResult};
use crate::wait::{ClosedFlag, run_blocking_unless};

const PUBLISHED: &str = "published";
const DELETED: &str = "deleted";
const MISSED: &str = "missed";
const KINDS: [&str; 3] = [PUBLISHED, DELETED, MISSED];

/// An event of a watch: an object of the store was published under a name, or deleted, or events were missed.
///
/// >>> from wholemem import store
/// >>> client = store.Client()
/// >>> watch = client.watch("watched")
/// >>> version = client.put("watched", b"bytes")
/// >>> event = watch.next()
/// >>> event.name, event.kind, event.version == version
/// ('watched', 'published', True)
#[pyclass(frozen, eq, hash, get_all, module = "wholemem.store")]
#[derive(Debug, PartialEq, Eq, Hash)]
pub(crate) struct Event {
    /// The name of the event's object; if the kind is ``missed``, the prefix of the watch.
    name: String,
    /// The id of the event's object; 0 if the kind is ``missed``.
    id: u64,
    /// The kind of the event. ``published``: the object is now the current object of its name. ``deleted``: the object was
    /// deleted, and no object has its name now. ``missed``: the server was restarted, and events of names with the prefix may be lost.
    kind: &'static str,
    /// The version that the published object has under its name; ``None`` for other kinds of events.
    version: Option<u64>,
}

impl Event {
    fn new(event: wholemem_store::Event) -> Self {
        let (kind, version) = match event.kind {
            EventKind::Published { version } | EventKind::Replaced { version, .. } => {
                (PUBLISHED, Some(version))
            }
            _ => (DELETED, None),
        };
        Self { name: event.name, id: event.object.as_u64(), kind, version }
    }

    /// Creates the event for a restart of the server: events of names with the given prefix may be lost.
    fn missed(prefix: String) -> Self {
        Self { name: prefix, id: 0, kind: MISSED, version: None }
    }
}

#[pymethods]
impl Event {
    /// Creates an event of a watch from its pickled values.
    #[staticmethod]
    #[pyo3(signature = (*values))]
    fn _restored(values: &Bound<'_, PyTuple>) -> PyResult<Self> {
        let (name, id, pickled, version) = values.extract::<(String, u64, String, Option<u64>)>()?;
        let unknown = || Exception::new("WrongValue", format!("the event kind `{pickled}` does not exist"));
        let kind = KINDS.into_iter().find(|kind| *kind == pickled).ok_or_else(unknown).into_py()?;
        Ok(Self { name, id, kind, version })
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let Self { name, id, kind, version } = slf.get();
        Ok((slf.get_type().getattr("_restored")?, (name, id, kind, version).into_pyobject(slf.py())?))
    }

    fn __repr__(&self) -> String {
        let Self { name, kind, .. } = self;
        let version = self.version.map(|version| format!(", version={version}")).unwrap_or_default();
        format!("Event(name='{name}', kind='{kind}'{version})")
    }
}

/// A watch: an iterator over the events (published, deleted) of names with a prefix. The iterator waits for the next event;
/// Ctrl-C interrupts the wait.
///
/// If the server is restarted, the next event has the kind ``missed``: earlier events may be lost, and later events are
/// delivered. List the objects again after it.
///
/// >>> from wholemem import store
/// >>> client = store.Client()
/// >>> with client.watch("seen/") as watch:
/// ...     version = client.put("seen/this", b"bytes")
/// ...     print(watch.next(timeout=60))
/// Event(name='seen/this', kind='published', version=1)
#[pyclass(frozen, module = "wholemem.store")]
#[derive(Debug)]
pub(crate) struct Watch {
    /// The connection that receives events of the store; `None` after `close`.
    open: Mutex<Option<wholemem_store::Watch>>,
    /// Two flags, one for the watch and one for its client. The watch ends when either is closed.
    closed: [ClosedFlag; 2],
    epoch: ForkEpoch,
}

impl Watch {
    pub(super) fn new(watch: wholemem_store::Watch, client: &ClosedFlag) -> Result<Self, Exception> {
        let closed = [ClosedFlag::default(), client.clone()];
        Ok(Self { open: Mutex::new(Some(watch)), closed, epoch: ForkEpoch::current()? })
    }

    /// Locks the watch for this thread. Returns an error in a forked child, or if another thread waits for an event.
    fn open(&self) -> Result<MutexGuard<'_, Option<wholemem_store::Watch>>, Exception> {
        if !self.epoch.is_current() {
            return Err(Error::Forked.into());
        }
        match self.open.try_lock() {
            Ok(open) => Ok(open),
            Err(TryLockError::Poisoned(open)) => Ok(open.into_inner()),
            Err(TryLockError::WouldBlock) => {
                let raised =
                    Exception::new("Busy", "another thread is waiting for the next event of this watch");
                Err(raised.hint("each thread needs its own watch"))
            }
        }
    }

    /// Calls a function that does not wait with the open watch.
    fn with_open<T>(&self, call: impl FnOnce(&mut wholemem_store::Watch) -> T) -> Result<T, Exception> {
        let mut open = self.open()?;
        open.take_if(|_| self.closed.iter().any(ClosedFlag::is_set));
        open.as_mut().map(call).ok_or_else(closed)
    }

    /// Waits for the next event of the watch, and returns `None` if the watch is closed.
    fn event(&self, py: Python<'_>, deadline: Deadline) -> PyResult<Option<Event>> {
        let closed = self.closed.clone();
        let is_closed = move || closed.iter().any(ClosedFlag::is_set);
        run_blocking_unless(py, is_closed.clone(), || {
            let mut open = self.open()?;
            open.take_if(|_| is_closed());
            let Some(watch) = open.as_mut() else { return Ok(None) };
            match watch.next(deadline) {
                Err(Error::Interrupted) if is_closed() => {
                    drop(open.take());
                    Ok(None)
                }
                Err(Error::EventsMissed { prefix }) => Ok(Some(Event::missed(prefix))),
                Err(Error::TimedOut) => {
                    Err(Exception::new("Timeout", "no event arrived in time").code("timed-out"))
                }
                outcome => Ok(outcome.map(|event| Some(Event::new(event)))?),
            }
        })
    }
}

fn closed() -> Exception {
    Exception::new("Closed", "the watch is closed").hint("create another one: `client.watch(prefix)`")
}

#[pymethods]
impl Watch {
    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Event>> {
        self.event(py, Deadline::NEVER)
    }

    /// Waits for the next event of the watched names and returns the event.
    ///
    /// Args:
    ///     timeout: Seconds to wait. ``None`` waits without a limit.
    ///
    /// Returns:
    ///     The event.
    ///
    /// Raises:
    ///     wholemem.errors.Busy: Another thread is waiting.
    ///     wholemem.errors.Closed: The watch or its client is closed.
    ///     wholemem.errors.ServerLost: The store has ended.
    ///     wholemem.errors.Timeout: No event arrived in time.
    #[pyo3(signature = (timeout=None))]
    fn next(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Event> {
        let deadline = timeout.map_or(Ok(Deadline::NEVER), deadline_of).into_py()?;
        self.event(py, deadline)?.ok_or_else(|| closed().into())
    }

    /// Returns the next event if it has already arrived, and ``None`` otherwise. It does not wait, so it is for event loops:
    /// :meth:`fileno` is readable when events have arrived.
    ///
    /// It also returns ``None`` if :attr:`is_registered` is false; :meth:`next` then registers the watch.
    ///
    /// Raises:
    ///     wholemem.errors.Busy: Another thread is waiting.
    ///     wholemem.errors.Closed: The watch or its client is closed.
    ///     wholemem.errors.ServerLost: The store has ended.
    fn try_next(&self) -> PyResult<Option<Event>> {
        let event = self.with_open(wholemem_store::Watch::try_next).into_py()?;
        event.map(|event| event.map(Event::new)).map_err(Exception::from).into_py()
    }

    /// Returns the file descriptor of the watch, for event loops. It is readable if an event has arrived, if the server was
    /// restarted, or if the store has ended. It is closed with the watch.
    ///
    /// Raises:
    ///     wholemem.errors.Closed: The watch or its client is closed.
    fn fileno(&self) -> PyResult<i32> {
        self.with_open(|watch| watch.as_fd().as_raw_fd()).into_py()
    }

    /// False if the server was restarted and the watch is not registered with the new one yet: the next call of :meth:`next`
    /// registers it, and returns the event ``missed``.
    #[getter]
    fn is_registered(&self) -> PyResult<bool> {
        self.with_open(|watch| watch.is_registered()).into_py()
    }

    /// Closes the watch, from any thread. Iterations over the watch end, and a thread that waits in :meth:`next` gets
    /// :class:`wholemem.errors.Closed`.
    fn close(&self) -> PyResult<()> {
        if !self.epoch.is_current() {
            return Err(Exception::from(Error::Forked).into());
        }
        self.closed[0].set();
        // If another thread is waiting for an event, it holds the lock of `open`. The line above wakes that thread, and it
        // drops the connection of the watch itself.
        if let Ok(mut open) = self.open.try_lock() {
            drop(open.take());
        }
        Ok(())
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, _error: &Bound<'_, PyAny>) -> PyResult<()> {
        self.close()
    }
}
