//! Signals that are read from a descriptor (signalfd) instead of interrupting the process.
//!
//! Guarantees: a signal blocked by [`Signals`] has no effect on this process until it is read. Programs that this
//! process starts inherit the blocked signals, and must [unblock them](unblock_all).
//!
//! Threads that were started before are not affected: create a [`Signals`] before any other thread.
//!
//! ```
//! use wholemem_os::pidfd::Signal;
//! use wholemem_os::{PidFd, signal::Signals};
//!
//! let signals = Signals::block(&[Signal::USR1])?;
//! assert_eq!(signals.next()?, None);
//! # // Documentation tests have several threads, any of which could receive a signal of the process.
//! # Ok::<(), wholemem_os::Error>(())
//! ```

use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use crate::call::{call, call_libc};
use crate::pidfd::Signal;
use crate::{Errno, Error, Result};

/// Blocked signals, which can be read one by one.
#[derive(Debug)]
#[doc(alias = "signalfd")]
pub struct Signals(OwnedFd);

impl Signals {
    /// Blocks the given signals in this thread and in the threads that it starts later, and makes the signals
    /// readable from a descriptor.
    ///
    /// # Errors
    /// The error of `pthread_sigmask` or `signalfd`.
    #[doc(alias = "pthread_sigmask")]
    pub fn block(signals: &[Signal]) -> Result<Self> {
        let mut set = MaybeUninit::uninit();
        // SAFETY: `set` is writable, and `sigemptyset` initialises it.
        unsafe { libc::sigemptyset(set.as_mut_ptr()) };
        for signal in signals {
            // SAFETY: `set` is initialised above, and a named signal has a valid number.
            unsafe { libc::sigaddset(set.as_mut_ptr(), signal.as_raw()) };
        }
        call("pthread_sigmask", || {
            // SAFETY: `set` is initialised above, and the old set is not requested.
            match unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), ptr::null_mut()) } {
                0 => Ok(()),
                code => Err(Errno::from_raw_os_error(code)),
            }
        })?;
        let fd = call_libc("signalfd4", || {
            let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
            // SAFETY: `set` is initialised above, and -1 requests a new descriptor.
            let fd = unsafe { libc::signalfd(-1, set.as_ptr(), flags) };
            fd.into()
        })?;
        let fd = i32::try_from(fd).map_err(|_| Error::Call { call: "signalfd4", errno: Errno::BADF })?;
        // SAFETY: `signalfd` has just created `fd`, and no other code owns it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Returns the next pending signal, or `None` if no signal is pending.
    ///
    /// # Errors
    /// The error of `read`.
    pub fn next(&self) -> Result<Option<Signal>> {
        const SIZE: usize = size_of::<libc::signalfd_siginfo>();
        let mut info = [0; SIZE];
        match call("read", || rustix::io::read(&self.0, &mut info)) {
            Ok(SIZE) => {}
            Err(Error::Call { errno: Errno::AGAIN | Errno::INTR, .. }) | Ok(_) => return Ok(None),
            Err(error) => return Err(error),
        }
        // The signal number is the first field of `signalfd_siginfo`.
        let number = i32::from_ne_bytes(std::array::from_fn(|n| info[n]));
        Ok(Signal::from_named_raw(number))
    }
}

/// Unblocks all signals in this thread, before the thread executes another program, which expects that.
///
/// # Errors
/// The error of `pthread_sigmask`.
pub fn unblock_all() -> Result<()> {
    let mut set = MaybeUninit::uninit();
    // SAFETY: `set` is writable, and `sigemptyset` initialises it.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    call("pthread_sigmask", || {
        // SAFETY: `set` is initialised above, and the old set is not requested.
        match unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, set.as_ptr(), ptr::null_mut()) } {
            0 => Ok(()),
            code => Err(Errno::from_raw_os_error(code)),
        }
    })
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fork::child;

    #[test]
    fn an_unblocked_signal_takes_effect() {
        let child = child::fork(|| {
            let signals = Signals::block(&[Signal::TERM]);
            let own = rustix::process::getpid();
            if signals.is_err() || rustix::process::kill_process(own, Signal::TERM).is_err() {
                return 1;
            }
            // When `SIGTERM` is unblocked, the pending signal kills the child.
            let _ = unblock_all();
            2
        });
        assert_eq!(child.wait(), child::ExitStatus::Killed(libc::SIGTERM));
    }

    #[test]
    fn a_blocked_signal_is_read_and_has_no_other_effect() {
        // The test runs in a child process, which has one thread, since a signal to a process may be delivered to any
        // of its threads.
        let child = child::fork(|| {
            let Ok(signals) = Signals::block(&[Signal::TERM, Signal::USR1]) else { return 1 };
            if signals.next() != Ok(None) {
                return 2;
            }
            for signal in [Signal::TERM, Signal::USR1] {
                let own = rustix::process::getpid();
                if rustix::process::kill_process(own, signal).is_err() {
                    return 3;
                }
                if signals.next() != Ok(Some(signal)) {
                    return 4;
                }
            }
            0
        });
        assert_eq!(child.wait(), child::ExitStatus::Exited(0));
    }
}
