//! Being told of what happens to names: an iterator that waits for the next event.

use std::sync::{Mutex, MutexGuard, TryLockError};

use pyo3::prelude::*;
use wholemem_os::{Deadline, ForkEpoch};
use wholemem_store::{Error, EventKind};

use super::client::deadline_of;
use crate::error::{Raised, Raises};
use crate::wait::waiting;

/// What happened to an object with a name.
///
/// >>> from wholemem import store
/// >>> client = store.Client()
/// >>> watch = client.watch("told")
/// >>> version = client.put("told", b"bytes")
/// >>> event = watch.next()
/// >>> event.name, event.kind, event.version == version
/// ('told', 'published', True)
#[pyclass(frozen, get_all, module = "wholemem.store")]
#[derive(Debug)]
pub(crate) struct Event {
    /// The name.
    name: String,
    /// The object.
    id: u64,
    /// ``published``: it is what its name means now; or ``deleted``, also because another has taken its name.
    kind: &'static str,
    /// Which object of that name it is, if it was published.
    version: Option<u64>,
}

impl Event {
    fn new(event: wholemem_store::Event) -> Self {
        let (kind, version) = match event.what {
            EventKind::Published { version } => ("published", Some(version)),
            _ => ("deleted", None),
        };
        Self { name: event.name, id: event.object.as_u64(), kind, version }
    }
}

#[pymethods]
impl Event {
    fn __repr__(&self) -> String {
        let Self { name, kind, .. } = self;
        let version = self.version.map(|version| format!(", version={version}")).unwrap_or_default();
        format!("Event(name='{name}', kind='{kind}'{version})")
    }
}

/// What happens to names, one event after the other: an iterator that waits for the next, and that Ctrl-C ends.
///
/// What happens while a server is replaced by another is not told.
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
    epoch: ForkEpoch,
}

impl Watch {
    pub(super) fn new(watch: wholemem_store::Watch) -> Result<Self, Raised> {
        Ok(Self { open: Mutex::new(Some(watch)), epoch: ForkEpoch::current()? })
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
        waiting(py, || {
            let mut open = self.open()?;
            let Some(watch) = open.as_mut() else { return Ok(None) };
            match watch.next(deadline) {
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
        let closed = || Raised::new("Closed", "the watch is closed");
        self.event(py, deadline)?.ok_or_else(|| closed().into())
    }

    /// Ends it: the iteration is over.
    fn close(&self) -> PyResult<()> {
        drop(self.open().raised()?.take());
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
