//! Fault injection: makes the nth system call of this thread fail, so that a test can execute every error path.
//!
//! Compiled only with the feature `test-hooks`, which the test kit enables. The failing call is not executed: the code
//! under test has to release what it acquired before. Calls that only release (`close`) never fail this way, as on
//! Linux.
//!
//! ```
//! # #[cfg(feature = "test-hooks")] {
//! use wholemem_os::{fault, Errno, Error, Memfd};
//!
//! let armed = fault::arm(2, Errno::NOSPC);
//! let error = Memfd::create("example", 4096).unwrap_err();
//! assert_eq!(error, Error::Call { call: "fallocate", errno: Errno::NOSPC });
//! assert_eq!(armed.fired(), Some("fallocate"));
//! # }
//! ```

use std::cell::Cell;
use std::marker::PhantomData;

use crate::{Errno, Error, Result};

#[derive(Clone, Copy)]
struct PendingFault {
    calls_left: u64,
    errno: Errno,
    fired: Option<&'static str>,
}

thread_local! {
    static FAULT: Cell<Option<PendingFault>> = const { Cell::new(None) };
}

/// An armed fault, which makes one system call of this thread fail. Dropping it disarms the fault.
#[derive(Debug)]
#[must_use = "dropping this disarms the fault"]
pub struct Armed {
    // `Armed` is not `Send`, since the fault belongs to the thread that armed it.
    _this_thread: PhantomData<*const ()>,
}

/// Makes the `nth` system call of this thread, counted from 1 from now on, fail once with `errno`.
pub fn arm(nth: u64, errno: Errno) -> Armed {
    FAULT.set(Some(PendingFault { calls_left: nth, errno, fired: None }));
    Armed { _this_thread: PhantomData }
}

impl Armed {
    /// Returns the name of the system call that was made to fail, or `None` if the code under test did not get that
    /// far.
    #[must_use]
    pub fn fired(&self) -> Option<&'static str> {
        FAULT.get().and_then(|fault| fault.fired)
    }
}

impl Drop for Armed {
    fn drop(&mut self) {
        FAULT.set(None);
    }
}

/// Counts a system call of this thread, and returns an error if a test has armed a fault for it.
pub(crate) fn pass(name: &'static str) -> Result<()> {
    let Some(mut fault) = FAULT.get() else { return Ok(()) };
    if fault.calls_left == 0 {
        return Ok(());
    }
    fault.calls_left -= 1;
    if fault.calls_left == 0 {
        fault.fired = Some(name);
    }
    FAULT.set(Some(fault));
    if fault.calls_left == 0 { Err(Error::Call { call: name, errno: fault.errno }) } else { Ok(()) }
}
