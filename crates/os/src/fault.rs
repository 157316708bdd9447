//! Makes the nth system call of this thread fail, so that a test can walk every error path.
//!
//! Compiled in only with the feature `test-hooks`, which the test kit turns on. The failing call is not made at all:
//! whatever was acquired before it has to be given back by the code under test. Calls that only give back
//! (`close`) are never made to fail; Linux does not let them.
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
struct Plan {
    calls_left: u64,
    errno: Errno,
    fired: Option<&'static str>,
}

thread_local! {
    static PLAN: Cell<Option<Plan>> = const { Cell::new(None) };
}

/// While this lives, the chosen call of this thread fails; dropping it ends the plan.
#[derive(Debug)]
#[must_use = "dropping this disarms the fault"]
pub struct Armed {
    // The plan is this thread's, so its owner must not move to another one.
    _this_thread: PhantomData<*const ()>,
}

/// Makes the `nth` system call from now on (counted from 1) fail with `errno`, once.
pub fn arm(nth: u64, errno: Errno) -> Armed {
    PLAN.set(Some(Plan { calls_left: nth, errno, fired: None }));
    Armed { _this_thread: PhantomData }
}

impl Armed {
    /// The name of the call that was made to fail, if the code under test got that far.
    #[must_use]
    pub fn fired(&self) -> Option<&'static str> {
        PLAN.get().and_then(|plan| plan.fired)
    }
}

impl Drop for Armed {
    fn drop(&mut self) {
        PLAN.set(None);
    }
}

pub(crate) fn pass(name: &'static str) -> Result<()> {
    let Some(mut plan) = PLAN.get() else { return Ok(()) };
    if plan.calls_left == 0 {
        return Ok(());
    }
    plan.calls_left -= 1;
    if plan.calls_left == 0 {
        plan.fired = Some(name);
    }
    PLAN.set(Some(plan));
    if plan.calls_left == 0 { Err(Error::Call { call: name, errno: plan.errno }) } else { Ok(()) }
}
