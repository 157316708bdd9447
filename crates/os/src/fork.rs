//! Noticing that this process is a forked child, where the handles it inherited must do nothing.
//!
//! A handle remembers the [`ForkEpoch`] it was made in. In a forked child that epoch is over: the memory and the
//! connections behind the handle still belong to the parent, so that the child must neither use them nor give
//! them back.
//!
//! What it keeps true: the epoch of a child, of its children, and so on, differs from all that came before it in
//! its line; and what is done [without forks](without_forks) is not half done in a child. What it will not do: see
//! children that are made without the C library's `fork`: by a bare `clone`, or by `_Fork`. Children that `posix_spawn` and
//! `vfork` make run another program at once, and are not seen either.
//!
//! A layer above that has something to hand to children [registers](register) what is to run around each fork.
//!
//! ```
//! use wholemem_os::ForkEpoch;
//!
//! struct Handle(ForkEpoch);
//!
//! impl Drop for Handle {
//!     fn drop(&mut self) {
//!         if self.0.is_current() {
//!             // Give back what the handle holds.
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

/// The time from one fork to the next, in the line of processes that led to this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForkEpoch(u64);

impl ForkEpoch {
    /// The epoch this process is in. The first call starts the watch for forks.
    #[doc(alias = "pthread_atfork")]
    pub fn current() -> Result<Self> {
        // No `Once`: a child forked while another thread is inside it would wait for ever. Two threads that both
        // come first register twice, and a child counts two epochs, which does no harm.
        if !IS_REGISTERED.load(Ordering::Acquire) {
            call("pthread_atfork", || {
                // SAFETY: in a child the handlers allocate nothing, and take no lock that may stay taken there.
                match unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) } {
                    0 => Ok(()),
                    code => Err(Errno::from_raw_os_error(code)),
                }
            })?;
            IS_REGISTERED.store(true, Ordering::Release);
        }
        Ok(Self(EPOCH.load(Ordering::Relaxed)))
    }

    /// Whether this process is still the one that asked for the epoch, and no child of it.
    #[must_use]
    #[inline]
    pub fn is_current(&self) -> bool {
        // The thread that forked is the only one of a child, and has run the handler itself.
        self.0 == EPOCH.load(Ordering::Relaxed)
    }
}

/// Threads that are forking, and those that hold forks back. Each looks at the other's number once its own is there, so that
/// one of two sees the other.
static FORKING: AtomicU32 = AtomicU32::new(0);
static HOLDING: AtomicU32 = AtomicU32::new(0);

/// What runs around each fork of this process, in the thread that forks.
#[derive(Debug)]
pub struct ForkHooks {
    /// Before the fork: may allocate and wait.
    pub before: fn(),
    /// After it, in the parent, also where the fork has failed.
    pub in_parent: fn(),
    /// After it, in the child, before `fork` returns there. Of a process that had several threads, only this one is left, and
    /// locks that others held stay taken: it must neither allocate nor wait for a lock that another thread may hold.
    pub in_child: fn(),
}

/// The most that can be registered.
const MOST_HOOKS: usize = 4;

static HOOKS: [AtomicPtr<ForkHooks>; MOST_HOOKS] = [const { AtomicPtr::new(ptr::null_mut()) }; MOST_HOOKS];

fn hooks() -> impl DoubleEndedIterator<Item = &'static ForkHooks> {
    // SAFETY: null, or what `register` was given for the life of the process.
    HOOKS.iter().filter_map(|hooks| unsafe { hooks.load(Ordering::Acquire).as_ref() })
}

/// Has hooks run around each fork from now on. Registering the same hooks again does nothing.
///
/// If two threads register or ask for the [epoch](ForkEpoch::current) first at the same time, hooks may run twice around a
/// fork: what has run is to do nothing the second time.
///
/// # Errors
/// `pthread_atfork` with `ENOMEM`, also where four others are registered already.
#[doc(alias = "pthread_atfork")]
pub fn register(hooks: &'static ForkHooks) -> Result<()> {
    ForkEpoch::current()?;
    let wanted = ptr::from_ref(hooks).cast_mut();
    for place in &HOOKS {
        let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
        match place.compare_exchange(ptr::null_mut(), wanted, success, failure) {
            Ok(_) => return Ok(()),
            Err(found) if ptr::eq(found, wanted) => return Ok(()),
            Err(_) => {}
        }
    }
    Err(Error::Call { call: "pthread_atfork", errno: Errno::NOMEM })
}

extern "C" fn before() {
    // First, since what they do may hold forks back itself.
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
    // Whoever was counted is not here.
    FORKING.store(0, Ordering::SeqCst);
    HOLDING.store(0, Ordering::SeqCst);
    hooks().for_each(|hooks| (hooks.in_child)());
}

/// Does something that no child may see half done: forks of other threads wait until it is over. It is to be short, and must not
/// fork itself.
///
/// # Errors
/// `pthread_atfork` with `ENOMEM`.
pub fn without_forks<T>(work: impl FnOnce() -> T) -> Result<T> {
    /// Ends when dropped, also where the work panics.
    struct Held;
    impl Drop for Held {
        fn drop(&mut self) {
            HOLDING.fetch_sub(1, Ordering::SeqCst);
        }
    }
    ForkEpoch::current()?;
    let _held = loop {
        HOLDING.fetch_add(1, Ordering::SeqCst);
        let held = Held;
        if FORKING.load(Ordering::SeqCst) == 0 {
            break held;
        }
        drop(held);
        std::thread::yield_now();
    };
    Ok(work())
}

/// Children for the tests of this crate.
#[cfg(test)]
pub(crate) mod child {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    /// A child process, killed and reaped when dropped.
    #[derive(Debug)]
    pub(crate) struct Child(libc::pid_t);

    /// How a child ended.
    #[derive(Debug, PartialEq, Eq)]
    pub(crate) enum Status {
        Exited(i32),
        Killed(i32),
    }

    /// Runs `run` in a child and exits with its answer.
    ///
    /// The child has one thread, and locks that other threads of the test program held stay locked in it: `run`
    /// may make system calls and allocate (glibc takes care of its own locks), but neither print nor panic.
    pub(crate) fn fork(run: impl FnOnce() -> u8) -> Child {
        // SAFETY: the child runs nothing but `run`, which keeps to the rules above, and `_exit`.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let code = catch_unwind(AssertUnwindSafe(run)).unwrap_or(101);
            // SAFETY: ends the child without running the test program's exit handlers.
            unsafe { libc::_exit(code.into()) }
        }
        assert!(pid > 0, "fork failed: {}", std::io::Error::last_os_error());
        Child(pid)
    }

    /// What a child does that waits to be killed.
    pub(crate) fn sleep() -> u8 {
        loop {
            // SAFETY: only waits for a signal.
            unsafe { libc::pause() };
        }
    }

    impl Child {
        pub(crate) fn id(&self) -> u32 {
            self.0.cast_unsigned()
        }

        /// Waits for the child to end by itself.
        pub(crate) fn wait(self) -> Status {
            let status = self.reap();
            std::mem::forget(self);
            status
        }

        /// Kills the child and waits until it is gone.
        pub(crate) fn kill(self) {
            drop(self);
        }

        fn reap(&self) -> Status {
            let mut status = 0;
            // SAFETY: `status` is writable, and the child is ours and not reaped yet.
            while unsafe { libc::waitpid(self.0, &raw mut status, 0) } != self.0 {}
            if libc::WIFEXITED(status) {
                Status::Exited(libc::WEXITSTATUS(status))
            } else {
                Status::Killed(libc::WTERMSIG(status))
            }
        }
    }

    impl Drop for Child {
        fn drop(&mut self) {
            // SAFETY: the child is not reaped yet, so that its number is still its own.
            unsafe { libc::kill(self.0, libc::SIGKILL) };
            self.reap();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_does_not_fork_stays_in_its_epoch() {
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
                child::Status::Exited(0) if childs.is_current() => 0,
                _ => 6,
            }
        });
        assert_eq!(child.wait(), child::Status::Exited(0));
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
        // In a child, whose forks other tests do not count.
        let child = child::fork(|| {
            if register(&COUNTING).is_err() || register(&COUNTING).is_err() {
                return 1;
            }
            let counts = || [&BEFORE, &IN_PARENT, &IN_CHILD].map(|count| count.load(Ordering::SeqCst));
            // More than one, where the watch for forks was begun twice.
            let runs = |counts: [u32; 3], expected: [bool; 3]| counts.map(|count| count > 0) == expected;
            let grandchild = child::fork(|| u8::from(!runs(counts(), [true, false, true])));
            match grandchild.wait() {
                child::Status::Exited(0) if runs(counts(), [true, true, false]) => 0,
                _ => 2,
            }
        });
        assert_eq!(child.wait(), child::Status::Exited(0));
    }

    #[cfg(feature = "test-hooks")]
    #[test]
    fn a_watch_that_cannot_be_started_is_an_error_and_is_tried_again() {
        // In a child, whose own flag can be reset without disturbing other tests.
        let child = child::fork(|| {
            IS_REGISTERED.store(false, Ordering::Relaxed);
            let armed = crate::fault::arm(1, Errno::NOMEM);
            let error = Error::Call { call: "pthread_atfork", errno: Errno::NOMEM };
            let failed = ForkEpoch::current() == Err(error);
            drop(armed);
            let tried_again = ForkEpoch::current().is_ok() && IS_REGISTERED.load(Ordering::Relaxed);
            if failed && tried_again { 0 } else { 1 }
        });
        assert_eq!(child.wait(), child::Status::Exited(0));
    }
}
