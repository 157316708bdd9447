//! Being told of what happens to names: an iterator that waits for the next event.

use std::sync::{Mutex, MutexGuard, TryLockError};

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use wholemem_os::{Deadline, ForkEpoch};
use wholemem_store::{Error, EventKind};

use super::client::deadline_of;
use crate::error::{Raised, Raises};
use crate::wait::{Closed, waiting_unless};

const PUBLISHED: &str = "published";
const DELETED: &str = "deleted";
const MISSED: &str = "missed";
const KINDS: [&str; 3] = [PUBLISHED, DELETED, MISSED];

/// What happened to an object with a name.
///
/// >>> from wholemem import store
/// >>> client = store.Client()
/// >>> watch = client.watch("told")
/// >>> version = client.put("told", b"bytes")
/// >>> event = watch.next()
/// >>> event.name, event.kind, event.version == version
/// ('told', 'published', True)
#[pyclass(frozen, eq, hash, get_all, module = "wholemem.store")]
#[derive(Debug, PartialEq, Eq, Hash)]
pub(crate) struct Event {
    /// The name; where events were missed, what was watched for.
    name: String,
    /// The object; zero where events were missed.
    id: u64,
    /// ``published``: it is what its name means now; ``deleted``, also because another has taken its name; or
    /// ``missed``: the server was replaced, and anything may have happened to names that begin so.
    kind: &'static str,
    /// Which object of that name it is, if it was published.
    version: Option<u64>,
}

impl Event {
    fn new(event: wholemem_store::Event) -> Self {
        let (kind, version) = match event.kind {
            EventKind::Published { version } => (PUBLISHED, Some(version)),
            _ => (DELETED, None),
        };
        Self { name: event.name, id: event.object.as_u64(), kind, version }
    }

    /// Anything may have happened to names that begin so.
    fn missed(prefix: String) -> Self {
        Self { name: prefix, id: 0, kind: MISSED, version: None }
    }
}

#[pymethods]
impl Event {
    /// One that was pickled.
    #[staticmethod]
    #[pyo3(signature = (*values))]
    fn _restored(values: &Bound<'_, PyTuple>) -> PyResult<Self> {
        let (name, id, said, version) = values.extract::<(String, u64, String, Option<u64>)>()?;
        let unknown = || Raised::new("WrongValue", format!("there is no event of the kind `{said}`"));
        let kind = KINDS.into_iter().find(|kind| *kind == said).ok_or_else(unknown).raised()?;
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

/// What happens to names, one event after the other: an iterator that waits for the next, and that Ctrl-C ends.
///
/// When a server is replaced by another, the next event is of the kind ``missed``: what happened until then was told by
/// nobody, and what happens from then on is. Look at what there is when you meet it.
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
    /// The connection on which events come; `None` once it is closed.
    open: Mutex<Option<wholemem_store::Watch>>,
    /// Whether it is closed, or its client: the one ends it as the other does.
    closed: [Closed; 2],
    epoch: ForkEpoch,
}

impl Watch {
    pub(super) fn new(watch: wholemem_store::Watch, client: &Closed) -> Result<Self, Raised> {
        let closed = [Closed::default(), client.clone()];
        Ok(Self { open: Mutex::new(Some(watch)), closed, epoch: ForkEpoch::current()? })
    }

    /// The watch, for this thread alone, and not for a forked child.
    fn open(&self) -> Result<MutexGuard<'_, Option<wholemem_store::Watch>>, Raised> {
        if !self.epoch.is_current() {
            return Err(Error::Forked.into());
        }
        match self.open.try_lock() {
            Ok(open) => Ok(open),
            Err(TryLockError::Poisoned(open)) => Ok(open.into_inner()),
            Err(TryLockError::WouldBlock) => {
                let raised = Raised::new("Busy", "another thread waits for the next event");
                Err(raised.hint("a thread that watches needs a watch of its own"))
            }
        }
    }

    /// The next event; `None` of a watch that is closed.
    fn event(&self, py: Python<'_>, deadline: Deadline) -> PyResult<Option<Event>> {
        let closed = self.closed.clone();
        let is_closed = move || closed.iter().any(Closed::is_set);
        waiting_unless(py, is_closed.clone(), || {
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
                    Err(Raised::new("Timeout", "nothing happened in time").code("timed-out"))
                }
                outcome => Ok(outcome.map(|event| Some(Event::new(event)))?),
            }
        })
    }
}

#[pymethods]
impl Watch {
    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Event>> {
        self.event(py, Deadline::NEVER)
    }

    /// The next event, within so many seconds.
    #[pyo3(signature = (timeout=None))]
    fn next(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Event> {
        let deadline = timeout.map_or(Ok(Deadline::NEVER), deadline_of).raised()?;
        let closed =
            || Raised::new("Closed", "the watch is closed").hint("`client.watch(prefix)` makes another one");
        self.event(py, deadline)?.ok_or_else(|| closed().into())
    }

    /// Ends it, from any thread: the iteration is over, and a thread in :meth:`next` has
    /// :class:`wholemem.errors.Closed` raised.
    fn close(&self) -> PyResult<()> {
        if !self.epoch.is_current() {
            return Err(Raised::from(Error::Forked).into());
        }
        self.closed[0].set();
        // A thread that waits for the next event lets it go itself.
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
