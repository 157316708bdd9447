//! Signals read from a descriptor, instead of interrupting whatever the process is at.
//!
//! What it keeps true: a signal that was taken in by [`Signals`] does nothing to this process by itself; it waits to be
//! read. Programs started meanwhile inherit that it is held back, and so must [let all through](let_all_through).
//!
//! What it will not do: hold back signals for threads that were started before. Make one before any other thread.
//!
//! ```
//! use wholemem_os::pidfd::Signal;
//! use wholemem_os::{PidFd, signal::Signals};
//!
//! let signals = Signals::take(&[Signal::USR1])?;
//! assert_eq!(signals.next()?, None);
//! # // Documentation tests have several threads, any of which would get a signal of the process.
//! # Ok::<(), wholemem_os::Error>(())
//! ```

use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use crate::call::{call, call_libc};
use crate::pidfd::Signal;
use crate::{Errno, Error, Result};

/// Signals that wait to be read.
#[derive(Debug)]
#[doc(alias = "signalfd")]
pub struct Signals(OwnedFd);

impl Signals {
    /// Holds these signals back from this thread, and from those it starts from now on, and lets them be read.
    ///
    /// # Errors
    /// What `pthread_sigmask` or `signalfd` said.
    #[doc(alias = "pthread_sigmask")]
    pub fn take(signals: &[Signal]) -> Result<Self> {
        let mut set = MaybeUninit::uninit();
        // SAFETY: the place is writable, and this makes it a set.
        unsafe { libc::sigemptyset(set.as_mut_ptr()) };
        for signal in signals {
            // SAFETY: the set was made above; the kernel knows the signal, as it has a name.
            unsafe { libc::sigaddset(set.as_mut_ptr(), signal.as_raw()) };
        }
        call("pthread_sigmask", || {
            // SAFETY: the set was made above; the old one is not asked for.
            match unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), ptr::null_mut()) } {
                0 => Ok(()),
                code => Err(Errno::from_raw_os_error(code)),
            }
        })?;
        let fd = call_libc("signalfd4", || {
            let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
            // SAFETY: the set was made above.
            let fd = unsafe { libc::signalfd(-1, set.as_ptr(), flags) };
            fd.into()
        })?;
        let fd = i32::try_from(fd).map_err(|_| Error::Call { call: "signalfd4", errno: Errno::BADF })?;
        // SAFETY: the kernel has just made this descriptor for us, and nobody else knows it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// The next signal that has come, if one has.
    ///
    /// # Errors
    /// What `read` said.
    pub fn next(&self) -> Result<Option<Signal>> {
        const SIZE: usize = size_of::<libc::signalfd_siginfo>();
        let mut info = [0; SIZE];
        match call("read", || rustix::io::read(&self.0, &mut info)) {
            Ok(SIZE) => {}
            Err(Error::Call { errno: Errno::AGAIN | Errno::INTR, .. }) | Ok(_) => return Ok(None),
            Err(error) => return Err(error),
        }
        // The number comes first.
        let number = i32::from_ne_bytes(std::array::from_fn(|n| info[n]));
        Ok(Signal::from_named_raw(number))
    }
}

/// Holds nothing back from this thread any more: for a program about to become another, which expects that.
///
/// # Errors
/// What `pthread_sigmask` said.
pub fn let_all_through() -> Result<()> {
    let mut set = MaybeUninit::uninit();
    // SAFETY: the place is writable, and this makes it a set.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    call("pthread_sigmask", || {
        // SAFETY: the set was made above; the old one is not asked for.
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
    fn a_signal_that_is_let_through_again_does_what_it_does() {
        let child = child::fork(|| {
            let taken = Signals::take(&[Signal::TERM]);
            let own = rustix::process::getpid();
            if taken.is_err() || rustix::process::kill_process(own, Signal::TERM).is_err() {
                return 1;
            }
            // It has been waiting, and ends us here.
            let _ = let_all_through();
            2
        });
        assert_eq!(child.wait(), child::Status::Killed(libc::SIGTERM));
    }

    #[test]
    fn a_signal_that_was_taken_in_is_read_and_does_nothing_else() {
        // In a child, which has one thread: a signal of a process goes to any of its threads.
        let child = child::fork(|| {
            let Ok(signals) = Signals::take(&[Signal::TERM, Signal::USR1]) else { return 1 };
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
        assert_eq!(child.wait(), child::Status::Exited(0));
    }
}
