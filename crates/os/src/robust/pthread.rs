//! The mutexes of the C library, and what it takes to use them without its traps.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::time::Duration;

use libc::pthread_mutexattr_t;
use rustix::time::{ClockId, Timespec, clock_gettime};

use crate::call::call;
use crate::{Errno, Result};

/// Makes the C library forget the lock that this thread has waited for in vain.
///
/// glibc leaves it noted as "being locked", and the kernel follows that note when the thread ends, when something
/// else may be in the lock's place. Locking any other robust mutex clears the note.
pub(super) fn forget_wait() -> Result<()> {
    let attributes = Attributes::create()?;
    let mut mutex = MaybeUninit::uninit();
    let mutex = mutex.as_mut_ptr();
    pthread("pthread_mutex_init", || {
        // SAFETY: the place is writable and used by nobody; the attributes are initialised.
        unsafe { libc::pthread_mutex_init(mutex, attributes.0.as_ptr()) }
    })?;
    pthread("pthread_mutex_lock", || {
        // SAFETY: it is initialised, and nobody else knows it.
        unsafe { libc::pthread_mutex_lock(mutex) }
    })?;
    // SAFETY: locked just above.
    unsafe { libc::pthread_mutex_unlock(mutex) };
    Ok(())
}

/// Runs a function that returns its error rather than setting `errno`.
pub(super) fn pthread(name: &'static str, run: impl FnOnce() -> c_int) -> Result<()> {
    call(name, || match run() {
        0 => Ok(()),
        code => Err(Errno::from_raw_os_error(code)),
    })
}

/// The time on the wall when `left` will have passed.
pub(super) fn on_the_wall(left: Duration) -> libc::timespec {
    // To wait for nothing is to wait for a time that is past whatever anybody does to the clock.
    let now = if left.is_zero() { Timespec::default() } else { clock_gettime(ClockId::Realtime) };
    let then = Timespec::try_from(left).ok().and_then(|left| now.checked_add(left));
    let then = then.expect("a wait is cut into slices, and the clock counts many years on");
    libc::timespec { tv_sec: then.tv_sec, tv_nsec: then.tv_nsec }
}

/// What a mutex is made with: shared between processes, robust, and one that tells a thread that locks twice.
pub(super) struct Attributes(MaybeUninit<pthread_mutexattr_t>);

impl Attributes {
    pub(super) fn create() -> Result<Self> {
        let mut attributes = MaybeUninit::uninit();
        pthread("pthread_mutexattr_init", || {
            // SAFETY: the place is writable.
            unsafe { libc::pthread_mutexattr_init(attributes.as_mut_ptr()) }
        })?;
        let mut attributes = Self(attributes);
        let to = attributes.0.as_mut_ptr();
        pthread("pthread_mutexattr_setpshared", || {
            // SAFETY: the attributes are initialised.
            unsafe { libc::pthread_mutexattr_setpshared(to, libc::PTHREAD_PROCESS_SHARED) }
        })?;
        pthread("pthread_mutexattr_setrobust", || {
            // SAFETY: the attributes are initialised.
            unsafe { libc::pthread_mutexattr_setrobust(to, libc::PTHREAD_MUTEX_ROBUST) }
        })?;
        pthread("pthread_mutexattr_settype", || {
            // SAFETY: the attributes are initialised.
            unsafe { libc::pthread_mutexattr_settype(to, libc::PTHREAD_MUTEX_ERRORCHECK) }
        })?;
        Ok(attributes)
    }
}

impl Attributes {
    pub(super) fn as_ptr(&self) -> *const pthread_mutexattr_t {
        self.0.as_ptr()
    }
}

impl Drop for Attributes {
    fn drop(&mut self) {
        // SAFETY: they are initialised, and used no more.
        unsafe { libc::pthread_mutexattr_destroy(self.0.as_mut_ptr()) };
    }
}
