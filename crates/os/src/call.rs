//! The one door to the kernel: names each system call in its error, and lets a test make the nth one fail.

use crate::{Errno, Error, Result};

/// Runs one system call. `name` is what the error will say.
#[inline]
pub(crate) fn call<T>(name: &'static str, run: impl FnOnce() -> rustix::io::Result<T>) -> Result<T> {
    #[cfg(feature = "test-hooks")]
    crate::fault::pass(name)?;
    run().map_err(|errno| Error::Call { call: name, errno })
}

/// The same for a libc function that returns -1 and sets `errno`.
#[inline]
pub(crate) fn call_libc(name: &'static str, run: impl FnOnce() -> libc::c_long) -> Result<libc::c_long> {
    call(name, || match run() {
        -1 => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
        value => Ok(value),
    })
}
