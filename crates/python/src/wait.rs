//! Runs blocking calls without the GIL, interruptible by Ctrl-C and by closing the object they wait for.
//!
//! Python runs signal handlers in the main thread, which may be the thread that waits. So the waits of the crates below
//! call an interrupt check at intervals, which runs pending signal handlers. If a handler raises, the wait ends and the
//! call raises the handler's exception. The check also ends the wait if another thread has closed the object.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::prelude::*;
use wholemem_os::interrupt::{InterruptCheck, interruptible, interruptible_by};

use crate::error::Exception;
use crate::log;

/// A flag that any thread sets when an object is closed.
#[derive(Debug, Clone, Default)]
pub(crate) struct ClosedFlag(Arc<AtomicBool>);

impl ClosedFlag {
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// The interrupt check of a blocking call, and the exception that a signal handler raised.
struct SignalCheck {
    raised: Rc<RefCell<Option<PyErr>>>,
    question: InterruptCheck,
}

thread_local! {
    /// An interrupt check that the next call of this thread reuses: most calls do not block, and allocating a check would take as
    /// long as the call.
    static CACHED: Cell<Option<SignalCheck>> = const { Cell::new(None) };
}

impl SignalCheck {
    fn new() -> Self {
        let raised = Rc::new(RefCell::new(None));
        let in_check = Rc::clone(&raised);
        let question = move || {
            // An interpreter that is finalizing runs no signal handlers, so none can raise an exception.
            let result = Python::try_attach(|py| py.check_signals());
            if let Some(Err(error)) = result {
                *in_check.borrow_mut() = Some(error);
            }
            in_check.borrow().is_some()
        };
        Self { raised, question: Rc::new(question) }
    }

    /// Takes the cached interrupt check of this thread. Creates one if another call of the thread uses it, or the thread is
    /// ending.
    fn cached() -> Self {
        CACHED.try_with(Cell::take).ok().flatten().unwrap_or_else(Self::new)
    }

    /// Puts the interrupt check back into the cache, and returns the exception that a signal handler raised.
    fn end(self) -> Option<PyErr> {
        let raised = self.raised.take();
        let _ = CACHED.try_with(|cached| cached.set(Some(self)));
        raised
    }
}

/// Runs a call that may block, without the GIL. A signal handler that raises interrupts the call.
pub(crate) fn run_blocking<T, E>(py: Python<'_>, call: impl FnOnce() -> Result<T, E> + Send) -> PyResult<T>
where
    T: Send,
    E: Into<Exception> + Send,
{
    run_detached(py, |question| interruptible_by(question, call))
}

/// Runs a call that may block, without the GIL. The call is interrupted if `is_closed` returns true or a signal handler raises.
pub(crate) fn run_blocking_unless<T, E>(
    py: Python<'_>,
    is_closed: impl Fn() -> bool + Send + 'static,
    call: impl FnOnce() -> Result<T, E> + Send,
) -> PyResult<T>
where
    T: Send,
    E: Into<Exception> + Send,
{
    run_detached(py, |question| interruptible(move || question() || is_closed(), call))
}

/// Runs a call without the GIL. If a signal handler raises an exception, the exception replaces the result of the call.
fn run_detached<T, E>(py: Python<'_>, call: impl FnOnce(InterruptCheck) -> Result<T, E> + Send) -> PyResult<T>
where
    T: Send,
    E: Into<Exception> + Send,
{
    let (outcome, raised) = py.detach(|| {
        let check = SignalCheck::cached();
        let outcome = call(Rc::clone(&check.question));
        (outcome, check.end())
    });
    let delivered = log::deliver_pending(py);
    match (outcome, raised) {
        (_, Some(raised)) => Err(raised),
        (Ok(value), None) => delivered.map(|()| value),
        (Err(error), None) => Err(error.into().into()),
    }
}
