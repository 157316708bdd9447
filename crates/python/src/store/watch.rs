//! Watches: iterators that wait for the events (published, replaced, deleted) of names with a prefix.

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
const REPLACED: &str = "replaced";
const DELETED: &str = "deleted";
const MISSED: &str = "missed";
const KINDS: [&str; 4] = [PUBLISHED, REPLACED, DELETED, MISSED];

/// The values of a pickled event: its fields in their order.
type Pickled = (String, u64, String, Option<u64>, Option<u64>, u64, u64);

/// An event of a watch: an object of the store was published, replaced or deleted, or events were missed. The objects of a pack
/// change in one event.
///
/// >>> from wholemem import store
/// >>> client = store.Client()
/// >>> watch = client.watch("watched")
/// >>> versions = client.put("watched", b"old"), client.put("watched", b"new")
/// >>> watch.next()
/// Event(name='watched', kind='published', version=1)
/// >>> event = watch.next()
/// >>> event.kind, (event.previous, event.version) == versions
/// ('replaced', True)
/// >>> client.watch("watched", after=event.revision).try_next() is None
/// True
#[pyclass(frozen, eq, hash, get_all, module = "wholemem.store")]
#[derive(Debug, PartialEq, Eq, Hash)]
pub(crate) struct Event {
    /// The name of the event's object, for a pack that of the pack; if the kind is ``missed``, the prefix of the watch.
    name: String,
    /// The id of the event's object, for a pack that of the pack; 0 if the kind is ``missed``.
    id: u64,
    /// The kind of the event. ``published``: the object has its name now, and no object had the name before. ``replaced``: the object
    /// has its name now, and the object that had the name before is deleted. ``deleted``: the object was deleted, and no object has
    /// its name now. ``missed``: events of names with the prefix may be lost, because the server was restarted or, if the watch was
    /// resumed, because the server has not retained them.
    kind: &'static str,
    /// The version of the event's object under its name; ``None`` if the kind is ``missed``.
    version: Option<u64>,
    /// The version of the object that had the name before; ``None`` unless the kind is ``replaced``.
    previous: Option<u64>,
    /// The number of objects that changed: 1, or for a pack one more than the arrays in it; 0 if the kind is ``missed``.
    objects: u64,
    /// The number of the event in its store, which is larger than that of every earlier event: ``client.watch(after=...)`` resumes a
    /// watch behind it. If the kind is ``missed``, the next event is behind this number.
    revision: u64,
}

impl Event {
    fn new(event: wholemem_store::Event) -> Self {
        let (kind, version, previous) = match event.kind {
            EventKind::Published { version } => (PUBLISHED, version, None),
            EventKind::Replaced { version, previous } => (REPLACED, version, Some(previous)),
            EventKind::Deleted { version } => (DELETED, version, None),
            other => unreachable!("this package and the store library have one version: {other:?}"),
        };
        let wholemem_store::Event { name, object, objects, revision, .. } = event;
        Self { name, id: object.as_u64(), kind, version: Some(version), previous, objects, revision }
    }

    /// Creates the event for lost events: events of names with the prefix up to the revision may be lost.
    fn missed(prefix: String, revision: u64) -> Self {
        Self { name: prefix, id: 0, kind: MISSED, version: None, previous: None, objects: 0, revision }
    }

    /// Returns the event of an outcome of a watch: lost events are an event, too.
    fn from_outcome(
        outcome: Result<wholemem_store::Event, Error>,
        watch: &wholemem_store::Watch,
    ) -> Result<Self, Error> {
        match outcome {
            Err(Error::EventsMissed { prefix }) => Ok(Self::missed(prefix, watch.revision())),
            outcome => outcome.map(Self::new),
        }
    }
}

#[pymethods]
impl Event {
    /// Creates an event of a watch from its pickled values.
    #[staticmethod]
    #[pyo3(signature = (*values))]
    fn _restored(values: &Bound<'_, PyTuple>) -> PyResult<Self> {
        let (name, id, pickled, version, previous, objects, revision) = values.extract::<Pickled>()?;
        let unknown = || Exception::new("WrongValue", format!("the event kind `{pickled}` does not exist"));
        let kind = KINDS.into_iter().find(|kind| *kind == pickled).ok_or_else(unknown).into_py()?;
        Ok(Self { name, id, kind, version, previous, objects, revision })
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let Self { name, id, kind, version, previous, objects, revision } = slf.get();
        let values = (name, id, kind, version, previous, objects, revision);
        Ok((slf.get_type().getattr("_restored")?, values.into_pyobject(slf.py())?))
    }

    fn __repr__(&self) -> String {
        let Self { name, kind, .. } = self;
        let version = self.version.map(|version| format!(", version={version}")).unwrap_or_default();
        let previous = self.previous.map(|previous| format!(", previous={previous}")).unwrap_or_default();
        let objects = if self.objects > 1 { format!(", objects={}", self.objects) } else { String::new() };
        format!("Event(name='{name}', kind='{kind}'{version}{previous}{objects})")
    }
}

/// A watch: an iterator over the events (published, replaced, deleted) of names with a prefix. The iterator waits for the next
/// event; Ctrl-C interrupts the wait.
///
/// If the server is restarted, or has not retained all events behind the revision at which the watch is resumed, the next event
/// has the kind ``missed``: earlier events may be lost, and later events are delivered. List the objects again after it.
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
            let outcome = watch.next(deadline);
            match Event::from_outcome(outcome, watch) {
                Err(Error::Interrupted) if is_closed() => {
                    drop(open.take());
                    Ok(None)
                }
                Err(Error::TimedOut) => {
                    Err(Exception::new("Timeout", "no event arrived in time").code("timed-out"))
                }
                outcome => Ok(outcome.map(Some)?),
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
    /// :meth:`fileno` is readable when events have arrived. Call it once before waiting for that: the descriptor is not readable
    /// for the event ``missed`` of a resumed watch.
    ///
    /// It also returns ``None`` if :attr:`is_registered` is false; :meth:`next` then registers the watch.
    ///
    /// Raises:
    ///     wholemem.errors.Busy: Another thread is waiting.
    ///     wholemem.errors.Closed: The watch or its client is closed.
    ///     wholemem.errors.ServerLost: The store has ended.
    fn try_next(&self) -> PyResult<Option<Event>> {
        let event = self.with_open(|watch| {
            let outcome = watch.try_next().transpose();
            outcome.map(|outcome| Event::from_outcome(outcome, watch)).transpose()
        });
        event.into_py()?.map_err(Exception::from).into_py()
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
