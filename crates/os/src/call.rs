//! A wrapper through which every system call runs: it puts the name of the call into the error, and lets a test fail
//! the nth call.

use crate::{Errno, Error, Result};

/// Runs one system call. If the call fails, the error contains its `name`.
#[inline]
pub(crate) fn call<T>(name: &'static str, run: impl FnOnce() -> rustix::io::Result<T>) -> Result<T> {
    #[cfg(feature = "test-hooks")]
    crate::fault::pass(name)?;
    run().map_err(|errno| Error::Call { call: name, errno })
}

/// Runs a libc function that returns -1 and sets `errno` on failure.
#[inline]
pub(crate) fn call_libc(name: &'static str, run: impl FnOnce() -> libc::c_long) -> Result<libc::c_long> {
    call(name, || match run() {
        -1 => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
        value => Ok(value),
    })
}
