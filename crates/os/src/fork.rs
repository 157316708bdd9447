//! Detects that this process is a forked child, which must not use or release inherited handles.
//!
//! A handle stores the [`ForkEpoch`] in which it was created. In a forked child that epoch is over: the memory and
//! connections behind the handle belong to the parent, so the child must neither use nor release them.
//!
//! Guarantees: the epoch of a child differs from the epochs of all its ancestors; work done [without
//! forks](without_forks) is never half done in a child. Children created without the C library's `fork` (by a bare
//! `clone` or by `_Fork`) are not detected. Children of `posix_spawn` and `vfork` execute another program at once and
//! are not detected either.
//!
//! A layer above can [register] hooks that run around each fork, for example to pass state to children.
//!
//! ```
//! use wholemem_os::ForkEpoch;
//!
//! struct Handle(ForkEpoch);
//!
//! impl Drop for Handle {
//!     fn drop(&mut self) {
//!         if self.0.is_current() {
//!             // Release what the handle owns.
//!         }
//!     }
//! }
//!
//! let handle = Handle(ForkEpoch::current()?);
//! assert!(handle.0.is_current());
//! # Ok::<(), wholemem_os::Error>(())
//! ```

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};

use crate::call::call;
use crate::{Errno, Error, Result};

static EPOCH: AtomicU64 = AtomicU64::new(0);
static IS_REGISTERED: AtomicBool = AtomicBool::new(false);

/// The fork epoch of a process: every fork starts a new epoch in the child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForkEpoch(u64);

impl ForkEpoch {
    /// Returns the current fork epoch of this process. The first call registers the `pthread_atfork` handlers.
    #[doc(alias = "pthread_atfork")]
    pub fn current() -> Result<Self> {
        // A `Once` is not used: if another thread were inside it during a fork, the child would wait without end. If
        // two threads make the first call at the same time, both register the fork handlers, and a child counts two
        // epochs, which is harmless.
        if !IS_REGISTERED.load(Ordering::Acquire) {
            call("pthread_atfork", || {
                // SAFETY: the handlers that run in a forked child allocate nothing, and acquire no lock that another
                // thread may have held.
                match unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) } {
                    0 => Ok(()),
                    code => Err(Errno::from_raw_os_error(code)),
                }
            })?;
            IS_REGISTERED.store(true, Ordering::Release);
        }
        Ok(Self(EPOCH.load(Ordering::Relaxed)))
    }

    /// Returns whether this process is the one in which the epoch was read, and not a forked child of that process.
    #[must_use]
    #[inline]
    pub fn is_current(&self) -> bool {
        // A relaxed load suffices: a child has one thread, the one that forked, and that thread has run the fork
        // handler.
        self.0 == EPOCH.load(Ordering::Relaxed)
    }
}

/// `FORKING` counts the threads that are forking, and `HOLDING` the threads that make forks wait. A thread of either
/// kind increments its own counter, then reads the other counter (Dekker, sequentially consistent): at least one of
/// two threads sees the other.
static FORKING: AtomicU32 = AtomicU32::new(0);
static HOLDING: AtomicU32 = AtomicU32::new(0);

/// Functions that run around each fork of this process, in the forking thread.
#[derive(Debug)]
pub struct ForkHooks {
    /// A function that runs before the fork. It may allocate and wait.
    pub before: fn(),
    /// A function that runs after the fork in the parent, also if the fork failed.
    pub in_parent: fn(),
    /// A function that runs after the fork in the child, before `fork` returns there. The child has one thread, and
    /// locks that other threads of the parent held stay locked: the hook must neither allocate nor wait for a lock
    /// that another thread may have held.
    pub in_child: fn(),
}

/// The maximum number of fork hooks that a process can register.
const MAX_HOOKS: usize = 4;

static HOOKS: [AtomicPtr<ForkHooks>; MAX_HOOKS] = [const { AtomicPtr::new(ptr::null_mut()) }; MAX_HOOKS];

fn hooks() -> impl DoubleEndedIterator<Item = &'static ForkHooks> {
    // SAFETY: each pointer in `HOOKS` is null, or a `&'static ForkHooks` that `register` stored.
    HOOKS.iter().filter_map(|hooks| unsafe { hooks.load(Ordering::Acquire).as_ref() })
}

/// Registers hooks that run around every later fork of this process. Registering the same hooks again has no effect.
///
/// If two threads register or read the [epoch](ForkEpoch::current) for the first time at the same time, hooks may run
/// twice around a fork, so they must be idempotent.
///
/// # Errors
/// `pthread_atfork` with `ENOMEM`, also if four other hooks are registered already.
#[doc(alias = "pthread_atfork")]
pub fn register(hooks: &'static ForkHooks) -> Result<()> {
    ForkEpoch::current()?;
    let new = ptr::from_ref(hooks).cast_mut();
    for slot in &HOOKS {
        let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
        match slot.compare_exchange(ptr::null_mut(), new, success, failure) {
            Ok(_) => return Ok(()),
            Err(current) if ptr::eq(current, new) => return Ok(()),
            Err(_) => {}
        }
    }
    Err(Error::Call { call: "pthread_atfork", errno: Errno::NOMEM })
}

extern "C" fn before() {
    // The hooks run before this thread counts as forking, since they may call `without_forks`, which waits for
    // threads that fork.
    hooks().rev().for_each(|hooks| (hooks.before)());
    FORKING.fetch_add(1, Ordering::SeqCst);
    while HOLDING.load(Ordering::SeqCst) != 0 {
        std::thread::yield_now();
    }
}

extern "C" fn in_parent() {
    FORKING.fetch_sub(1, Ordering::SeqCst);
    hooks().for_each(|hooks| (hooks.in_parent)());
}

extern "C" fn in_child() {
    EPOCH.fetch_add(1, Ordering::Relaxed);
    // The threads that the two counters count do not exist in the child.
    FORKING.store(0, Ordering::SeqCst);
    HOLDING.store(0, Ordering::SeqCst);
    hooks().for_each(|hooks| (hooks.in_child)());
}

/// Runs `work` while other threads that fork have to wait, so that no child process sees the work half done. `work`
/// must be short and must not fork.
///
/// # Errors
/// `pthread_atfork` with `ENOMEM`.
pub fn without_forks<T>(work: impl FnOnce() -> T) -> Result<T> {
    /// Decrements `HOLDING` when dropped, also if `work` panics.
    struct ForkHold;
    impl Drop for ForkHold {
        fn drop(&mut self) {
            HOLDING.fetch_sub(1, Ordering::SeqCst);
        }
    }
    ForkEpoch::current()?;
    let _hold = loop {
        HOLDING.fetch_add(1, Ordering::SeqCst);
        let hold = ForkHold;
        if FORKING.load(Ordering::SeqCst) == 0 {
            break hold;
        }
        drop(hold);
        std::thread::yield_now();
    };
    Ok(work())
}

/// Forks child processes for the tests of this crate.
#[cfg(test)]
pub(crate) mod child {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    /// A child process of a test, which is killed and reaped on drop.
    #[derive(Debug)]
    pub(crate) struct Child(libc::pid_t);

    /// The exit code of a child process, or the signal that killed it.
    #[derive(Debug, PartialEq, Eq)]
    pub(crate) enum ExitStatus {
        Exited(i32),
        Killed(i32),
    }

    /// Forks a child process that calls `run` and exits with the code that `run` returns.
    ///
    /// The child has one thread, and locks that other threads of the test program held stay locked in it: `run` may
    /// make system calls and allocate (glibc resets its own locks), but neither print nor panic.
    pub(crate) fn fork(run: impl FnOnce() -> u8) -> Child {
        // SAFETY: the child calls only `_exit` and `run`, which needs no lock that another thread may have held, as
        // the documentation of this function requires.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let code = catch_unwind(AssertUnwindSafe(run)).unwrap_or(101);
            // SAFETY: `_exit` ends the child without running the exit handlers of the test program.
            unsafe { libc::_exit(code.into()) }
        }
        assert!(pid > 0, "fork failed: {}", std::io::Error::last_os_error());
        Child(pid)
    }

    /// Sleeps until the process is killed: a function for the child processes of tests.
    pub(crate) fn sleep() -> u8 {
        loop {
            // SAFETY: `pause` has no preconditions: it only waits for a signal.
            unsafe { libc::pause() };
        }
    }

    impl Child {
        pub(crate) fn id(&self) -> u32 {
            self.0.cast_unsigned()
        }

        /// Waits until the child process ends without being killed by this function, and returns how it ended.
        pub(crate) fn wait(self) -> ExitStatus {
            let status = self.reap();
            std::mem::forget(self);
            status
        }

        /// Kills the child process and reaps it.
        pub(crate) fn kill(self) {
            drop(self);
        }

        fn reap(&self) -> ExitStatus {
            let mut status = 0;
            // SAFETY: `status` is writable, and the process id is that of a child that is not reaped yet.
            while unsafe { libc::waitpid(self.0, &raw mut status, 0) } != self.0 {}
            if libc::WIFEXITED(status) {
                ExitStatus::Exited(libc::WEXITSTATUS(status))
            } else {
                ExitStatus::Killed(libc::WTERMSIG(status))
            }
        }
    }

    impl Drop for Child {
        fn drop(&mut self) {
            // SAFETY: the child is not reaped yet, so its process id refers to no other process.
            unsafe { libc::kill(self.0, libc::SIGKILL) };
            self.reap();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_epoch_does_not_change_without_a_fork() {
        let first = ForkEpoch::current().expect("an epoch");
        let second = ForkEpoch::current().expect("an epoch");
        assert_eq!(first, second);
        assert!(first.is_current());
    }

    #[test]
    fn a_fork_ends_the_epoch_for_the_child_and_its_children_but_not_for_the_parent() {
        let ours = ForkEpoch::current().expect("an epoch");
        let child = child::fork(|| {
            if ours.is_current() {
                return 1;
            }
            let Ok(childs) = ForkEpoch::current() else { return 2 };
            if !childs.is_current() || childs == ours {
                return 3;
            }
            let grandchild = child::fork(|| match ForkEpoch::current() {
                _ if ours.is_current() || childs.is_current() => 4,
                Ok(own) if own.is_current() && own != ours && own != childs => 0,
                _ => 5,
            });
            match grandchild.wait() {
                child::ExitStatus::Exited(0) if childs.is_current() => 0,
                _ => 6,
            }
        });
        assert_eq!(child.wait(), child::ExitStatus::Exited(0));
        assert!(ours.is_current());
    }

    #[test]
    fn hooks_run_around_a_fork_in_the_thread_that_forks() {
        static BEFORE: AtomicU32 = AtomicU32::new(0);
        static IN_PARENT: AtomicU32 = AtomicU32::new(0);
        static IN_CHILD: AtomicU32 = AtomicU32::new(0);
        static COUNTING: ForkHooks = ForkHooks {
            before: || {
                BEFORE.fetch_add(1, Ordering::SeqCst);
            },
            in_parent: || {
                IN_PARENT.fetch_add(1, Ordering::SeqCst);
            },
            in_child: || {
                IN_CHILD.fetch_add(1, Ordering::SeqCst);
            },
        };
        // The test runs in a child process, so that the forks of other tests are not counted.
        let child = child::fork(|| {
            if register(&COUNTING).is_err() || register(&COUNTING).is_err() {
                return 1;
            }
            let counts = || [&BEFORE, &IN_PARENT, &IN_CHILD].map(|count| count.load(Ordering::SeqCst));
            // A count may exceed one, since two threads may have registered the fork handlers.
            let runs = |counts: [u32; 3], expected: [bool; 3]| counts.map(|count| count > 0) == expected;
            let grandchild = child::fork(|| u8::from(!runs(counts(), [true, false, true])));
            match grandchild.wait() {
                child::ExitStatus::Exited(0) if runs(counts(), [true, true, false]) => 0,
                _ => 2,
            }
        });
        assert_eq!(child.wait(), child::ExitStatus::Exited(0));
    }

    #[cfg(feature = "test-hooks")]
    #[test]
    fn a_failed_registration_of_the_fork_handlers_is_an_error_and_is_retried() {
        // The test runs in a child process, where it can reset `IS_REGISTERED` without affecting other tests.
        let child = child::fork(|| {
            IS_REGISTERED.store(false, Ordering::Relaxed);
            let armed = crate::fault::arm(1, Errno::NOMEM);
            let error = Error::Call { call: "pthread_atfork", errno: Errno::NOMEM };
            let failed = ForkEpoch::current() == Err(error);
            drop(armed);
            let retried = ForkEpoch::current().is_ok() && IS_REGISTERED.load(Ordering::Relaxed);
            if failed && retried { 0 } else { 1 }
        });
        assert_eq!(child.wait(), child::ExitStatus::Exited(0));
    }
}
