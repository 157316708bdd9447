//! Calls that may wait: without the interpreter's lock, and ended by Ctrl-C.
//!
//! A handler of Python runs in the main thread, which may be the one that waits. So the waits below look now and then
//! whether a signal has come; where its handler raises, they give up, and what it raised is what the call raises.

use std::cell::RefCell;
use std::rc::Rc;

use pyo3::prelude::*;
use wholemem_os::interrupt::interruptible;

use crate::error::Raised;

/// Makes a call that may wait.
pub(crate) fn waiting<T, E>(py: Python<'_>, call: impl FnOnce() -> Result<T, E> + Send) -> PyResult<T>
where
    T: Send,
    E: Into<Raised> + Send,
{
    let (outcome, raised) = py.detach(|| {
        let raised = Rc::new(RefCell::new(None));
        let kept = Rc::clone(&raised);
        let look = move || {
            // An interpreter that is ending has no handlers to run.
            let seen = Python::try_attach(|py| py.check_signals());
            if let Some(Err(error)) = seen {
                *kept.borrow_mut() = Some(error);
            }
            kept.borrow().is_some()
        };
        let outcome = interruptible(look, call);
        (outcome, raised.take())
    });
    match (outcome, raised) {
        (_, Some(raised)) => Err(raised),
        (Ok(value), None) => Ok(value),
        (Err(error), None) => Err(error.into().into()),
    }
}
