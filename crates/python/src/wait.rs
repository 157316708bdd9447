//! Calls that may wait: without the interpreter's lock, and ended by Ctrl-C, or by whoever closes what they wait for.
//!
//! A handler of Python runs in the main thread, which may be the one that waits. So the waits below look now and then
//! whether a signal has come; where its handler raises, they give up, and what it raised is what the call raises. They
//! look at the same time whether another thread has closed what they wait for.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::prelude::*;
use wholemem_os::interrupt::interruptible;

use crate::error::Raised;

/// Whether something was closed, by whatever thread.
#[derive(Debug, Clone, Default)]
pub(crate) struct Closed(Arc<AtomicBool>);

impl Closed {
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Makes a call that may wait.
pub(crate) fn waiting<T, E>(py: Python<'_>, call: impl FnOnce() -> Result<T, E> + Send) -> PyResult<T>
where
    T: Send,
    E: Into<Raised> + Send,
{
    waiting_unless(py, || false, call)
}

/// The same, given up as soon as something is said to be closed.
pub(crate) fn waiting_unless<T, E>(
    py: Python<'_>,
    is_closed: impl Fn() -> bool + Send,
    call: impl FnOnce() -> Result<T, E> + Send,
) -> PyResult<T>
where
    T: Send,
    E: Into<Raised> + Send,
{
    let (outcome, raised) = py.detach(move || {
        let raised = RefCell::new(None);
        let look = || {
            // An interpreter that is ending has no handlers to run.
            let seen = Python::try_attach(|py| py.check_signals());
            if let Some(Err(error)) = seen {
                *raised.borrow_mut() = Some(error);
            }
            raised.borrow().is_some() || is_closed()
        };
        let outcome = interruptible(look, call);
        (outcome, raised.into_inner())
    });
    match (outcome, raised) {
        (_, Some(raised)) => Err(raised),
        (Ok(value), None) => Ok(value),
        (Err(error), None) => Err(error.into().into()),
    }
}
