//! Calls that may wait: without the interpreter's lock, and ended by Ctrl-C, or by whoever closes what they wait for.
//!
//! A handler of Python runs in the main thread, which may be the one that waits. So the waits below look now and then
//! whether a signal has come; where its handler raises, they give up, and what it raised is what the call raises. They
//! look at the same time whether another thread has closed what they wait for.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::prelude::*;
use wholemem_os::interrupt::{InterruptCheck, interruptible, interruptible_by};

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

/// What a wait asks, and what a handler has raised meanwhile.
struct Asking {
    raised: Rc<RefCell<Option<PyErr>>>,
    question: InterruptCheck,
}

thread_local! {
    /// Kept for the next call: most have nothing to wait for, and would take as long as the making of it.
    static IDLE: Cell<Option<Asking>> = const { Cell::new(None) };
}

impl Asking {
    fn new() -> Self {
        let raised = Rc::new(RefCell::new(None));
        let kept = Rc::clone(&raised);
        let question = move || {
            // An interpreter that is ending has no handlers to run.
            let seen = Python::try_attach(|py| py.check_signals());
            if let Some(Err(error)) = seen {
                *kept.borrow_mut() = Some(error);
            }
            kept.borrow().is_some()
        };
        Self { raised, question: Rc::new(question) }
    }

    /// The one that no other call of this thread uses now. A thread that is ending keeps none.
    fn idle() -> Self {
        IDLE.try_with(Cell::take).ok().flatten().unwrap_or_else(Self::new)
    }

    /// What was raised, once the call is over.
    fn end(self) -> Option<PyErr> {
        let raised = self.raised.take();
        let _ = IDLE.try_with(|idle| idle.set(Some(self)));
        raised
    }
}

/// Makes a call that may wait.
pub(crate) fn waiting<T, E>(py: Python<'_>, call: impl FnOnce() -> Result<T, E> + Send) -> PyResult<T>
where
    T: Send,
    E: Into<Raised> + Send,
{
    asking(py, |question| interruptible_by(question, call))
}

/// The same, given up as soon as something is said to be closed.
pub(crate) fn waiting_unless<T, E>(
    py: Python<'_>,
    is_closed: impl Fn() -> bool + Send + 'static,
    call: impl FnOnce() -> Result<T, E> + Send,
) -> PyResult<T>
where
    T: Send,
    E: Into<Raised> + Send,
{
    asking(py, |question| interruptible(move || question() || is_closed(), call))
}

/// Makes a call without the interpreter's lock; what a handler raises meanwhile is what it raises.
fn asking<T, E>(py: Python<'_>, call: impl FnOnce(InterruptCheck) -> Result<T, E> + Send) -> PyResult<T>
where
    T: Send,
    E: Into<Raised> + Send,
{
    let (outcome, raised) = py.detach(|| {
        let asking = Asking::idle();
        let outcome = call(Rc::clone(&asking.question));
        (outcome, asking.end())
    });
    match (outcome, raised) {
        (_, Some(raised)) => Err(raised),
        (Ok(value), None) => Ok(value),
        (Err(error), None) => Err(error.into().into()),
    }
}
