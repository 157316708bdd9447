//! Wrappers of the C library's robust mutexes, and workarounds for their defects.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::time::Duration;

use libc::pthread_mutexattr_t;
use rustix::time::{ClockId, Timespec, clock_gettime};

use crate::call::call;
use crate::{Errno, Result};

/// Makes the C library forget the robust lock for which a wait of this thread timed out.
///
/// glibc leaves the lock in the thread's `list_op_pending` entry, and the kernel follows that pointer when the thread
/// ends, when other data may be at that address. Locking any other robust mutex clears the entry.
pub(super) fn clear_pending_lock() -> Result<()> {
    let attributes = MutexAttributes::create()?;
    let mut mutex = MaybeUninit::uninit();
    let mutex = mutex.as_mut_ptr();
    pthread("pthread_mutex_init", || {
        // SAFETY: `mutex` is writable memory that is not used otherwise, and `attributes` is initialised.
        unsafe { libc::pthread_mutex_init(mutex, attributes.0.as_ptr()) }
    })?;
    pthread("pthread_mutex_lock", || {
        // SAFETY: `mutex` is initialised, and no other thread has its address.
        unsafe { libc::pthread_mutex_lock(mutex) }
    })?;
    // SAFETY: this thread has locked `mutex` just above.
    unsafe { libc::pthread_mutex_unlock(mutex) };
    Ok(())
}

/// Runs a pthread function, which returns its error code instead of setting `errno`.
pub(super) fn pthread(name: &'static str, run: impl FnOnce() -> c_int) -> Result<()> {
    call(name, || match run() {
        0 => Ok(()),
        code => Err(Errno::from_raw_os_error(code)),
    })
}

/// Returns the wall-clock time at which the duration `left` will have passed.
pub(super) fn wall_clock_after(left: Duration) -> libc::timespec {
    // A wait of zero length ends at time zero, which has passed even if the wall clock is changed.
    let now = if left.is_zero() { Timespec::default() } else { clock_gettime(ClockId::Realtime) };
    let then = Timespec::try_from(left).ok().and_then(|left| now.checked_add(left));
    let then = then.expect("a wait is at most `WAIT_SLICE` long, which the clock can represent");
    libc::timespec { tv_sec: then.tv_sec, tv_nsec: then.tv_nsec }
}

/// The attributes of the mutex in a robust lock: shared between processes, robust, and with an error for locking
/// twice.
pub(super) struct MutexAttributes(MaybeUninit<pthread_mutexattr_t>);

impl MutexAttributes {
    pub(super) fn create() -> Result<Self> {
        let mut attributes = MaybeUninit::uninit();
        pthread("pthread_mutexattr_init", || {
            // SAFETY: `attributes` is writable memory, which `pthread_mutexattr_init` initialises.
            unsafe { libc::pthread_mutexattr_init(attributes.as_mut_ptr()) }
        })?;
        let mut attributes = Self(attributes);
        let to = attributes.0.as_mut_ptr();
        pthread("pthread_mutexattr_setpshared", || {
            // SAFETY: `to` points to the attributes, which are initialised above.
            unsafe { libc::pthread_mutexattr_setpshared(to, libc::PTHREAD_PROCESS_SHARED) }
        })?;
        pthread("pthread_mutexattr_setrobust", || {
            // SAFETY: `to` points to the attributes, which are initialised above.
            unsafe { libc::pthread_mutexattr_setrobust(to, libc::PTHREAD_MUTEX_ROBUST) }
        })?;
        pthread("pthread_mutexattr_settype", || {
            // SAFETY: `to` points to the attributes, which are initialised above.
            unsafe { libc::pthread_mutexattr_settype(to, libc::PTHREAD_MUTEX_ERRORCHECK) }
        })?;
        Ok(attributes)
    }
}

impl MutexAttributes {
    pub(super) fn as_ptr(&self) -> *const pthread_mutexattr_t {
        self.0.as_ptr()
    }
}

impl Drop for MutexAttributes {
    fn drop(&mut self) {
        // SAFETY: `create` has initialised the attributes, and they are not used any more.
        unsafe { libc::pthread_mutexattr_destroy(self.0.as_mut_ptr()) };
    }
}
