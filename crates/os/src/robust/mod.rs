//! Robust locks in shared memory, which report the death of their owner.
//!
//! A thread [holds](RobustLock::try_lock) the lock for as long as it lives; other processes read its
//! [state](RobustLock::state). If the thread or its whole process ends while it holds the lock, even by `SIGKILL`,
//! the kernel marks the lock (a robust futex): within 0.1 ms, and long before the memory and sockets of the process
//! are released.
//!
//! ```text
//!          try_lock          drop the guard
//!   Free ----------> Alive ----------------> Free
//!                      |
//!                      | the owner dies
//!                      v
//!                    Died    permanently, for every process
//!
//!   0                                     SIZE
//!   | pthread_mutex_t               | died |
//!     its futex word: the owner's     set by the first process that sees FUTEX_OWNER_DIED
//!     thread id, and the bit
//!     FUTEX_OWNER_DIED
//! ```
//!
//! Guarantees: once any process got [`LockState::Died`], every later call in every process returns it. Reading the
//! state does not affect the owner, costs two loads, and any number of processes may do it concurrently.
//!
//! Reading the state does not try to acquire the lock, for two reasons. A thread that acquires the lock to test it is
//! its owner for a moment, so that others take it for the owner, and it may die then. And glibc's
//! `pthread_mutex_trylock` on a lock that is not recoverable after a death locks it again permanently, so that the
//! dead owner then appears to be alive.
//!
//! A robust lock does not protect against untrusted processes: the C library and the kernel follow pointers through
//! the shared bytes, so a process that may write them can make the holding process write to other addresses of its
//! own. All processes must use the same C library. Processes that wait for the lock, rather than read its state, must
//! be in one PID namespace, since the lock stores the thread id of its owner.
//!
//! ```
//! use std::ptr::NonNull;
//! use std::sync::Arc;
//! use std::sync::atomic::AtomicU64;
//! use wholemem_os::robust::{LockState, RobustLock};
//!
//! let memory: Arc<[AtomicU64; 8]> = Arc::default();
//! let address = NonNull::from(&*memory).cast();
//! // SAFETY: the address is aligned, the memory large enough and unused, and it lives as long as `memory`.
//! let lock = unsafe { RobustLock::create_at(address, memory) }?;
//!
//! let guard = lock.try_lock()?;
//! assert_eq!(lock.state(), LockState::Alive);
//! drop(guard);
//! assert_eq!(lock.state(), LockState::Free);
//! # Ok::<(), wholemem_os::Error>(())
//! ```

mod liveness;
mod pthread;

use std::any::Any;
use std::marker::PhantomData;
use std::mem::offset_of;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use libc::pthread_mutex_t;

use self::pthread::{MutexAttributes, clear_pending_lock, pthread, wall_clock_after};
use crate::{Deadline, Errno, Error, Result};

pub use self::liveness::{LivenessLock, LivenessProbe};

/// The time for which a thread that waits for a robust lock sleeps before it checks again whether the owner died: if
/// the lock becomes not recoverable, glibc wakes only two of the waiters.
const WAIT_SLICE: Duration = Duration::from_millis(50);

/// A reference that keeps the memory of a robust lock mapped.
type MappingOwner = Arc<dyn Any + Send + Sync>;

/// The layout of a robust lock in shared memory.
#[repr(C, align(8))]
struct LockLayout {
    mutex: pthread_mutex_t,
    /// Nonzero once a process has seen that the owner of the lock died.
    died: AtomicU32,
}

/// The offset of the futex word in the C library's mutex. [`RobustLock::create_at`] verifies the offset.
const WORD: usize = if cfg!(target_env = "musl") { 4 } else { 0 };

/// A robust lock in shared memory, which reports the death of its owner.
#[doc(alias = "PTHREAD_MUTEX_ROBUST")]
#[doc(alias = "PTHREAD_PROCESS_SHARED")]
#[derive(Debug)]
pub struct RobustLock {
    layout: NonNull<LockLayout>,
    memory: MappingOwner,
}

// SAFETY: any thread may use the process-shared mutex, and `memory` is `Send`.
unsafe impl Send for RobustLock {}
// SAFETY: several threads may use the mutex concurrently, and all other state is atomic.
unsafe impl Sync for RobustLock {}

/// The state of a robust lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockState {
    /// No thread holds the robust lock.
    Free,
    /// A living thread holds the robust lock.
    Alive,
    /// A thread died while it held the robust lock.
    Died,
}

/// A robust lock that this thread holds until it drops the guard or dies.
///
/// The thread's list of held robust locks points into the shared memory, which therefore stays mapped until the guard
/// is dropped, and forever if it is leaked.
#[derive(Debug)]
#[must_use = "the lock is released when the guard is dropped"]
pub struct RobustGuard {
    layout: NonNull<LockLayout>,
    _memory: MappingOwner,
    // `RobustGuard` is not `Send`, since only the thread that acquired the lock may release it.
    _this_thread: PhantomData<*const ()>,
}

impl RobustLock {
    /// The number of bytes that a robust lock occupies in shared memory.
    pub const SIZE: usize = size_of::<LockLayout>();

    /// The required alignment of a robust lock's address in bytes.
    pub const ALIGN: usize = align_of::<LockLayout>();

    /// Creates a free robust lock at `address`, in memory that stays mapped as long as `memory` lives.
    ///
    /// The lock is never destroyed, since other processes may still read it; it ends with its memory.
    ///
    /// # Safety
    ///
    /// [`SIZE`](Self::SIZE) bytes at `address`, a multiple of [`ALIGN`](Self::ALIGN), stay mapped and writable until
    /// the last clone of `memory` is dropped. Only locks opened at this address use them, and none exists yet. All
    /// processes that may write them are trusted.
    #[doc(alias = "pthread_mutex_init")]
    pub unsafe fn create_at(address: NonNull<u8>, memory: MappingOwner) -> Result<Self> {
        // SAFETY: the caller of `create_at` guarantees that `address` is aligned, and mapped and writable as long as
        // `memory` lives.
        let lock = unsafe { Self::open_at(address, memory) };
        lock.died().store(0, Ordering::Relaxed);
        let attributes = MutexAttributes::create()?;
        pthread("pthread_mutex_init", || {
            // SAFETY: the caller of `create_at` guarantees that the mutex's memory is writable, aligned and not used
            // yet; `attributes` is initialised.
            unsafe { libc::pthread_mutex_init(lock.mutex(), attributes.as_ptr()) }
        })?;
        let guard = lock.try_lock()?;
        let owner = lock.word().load(Ordering::Relaxed);
        drop(guard);
        if owner != rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned() {
            return Err(Error::UnknownFormat { subject: "mutex of the C library" });
        }
        Ok(lock)
    }

    /// Opens the robust lock that this or another process created at `address`.
    ///
    /// # Safety
    ///
    /// As for [`create_at`](Self::create_at), which has already returned for this memory.
    #[must_use]
    pub unsafe fn open_at(address: NonNull<u8>, memory: MappingOwner) -> Self {
        let layout = address.cast::<LockLayout>();
        debug_assert!(layout.is_aligned());
        Self { layout, memory }
    }

    /// Acquires the lock if it is free. If another thread holds it, the error is [`Error::TimedOut`] at once.
    pub fn try_lock(&self) -> Result<RobustGuard> {
        self.lock(Deadline::NOW)
    }

    /// Waits for the lock until `deadline`, and acquires it.
    ///
    /// If its owner has died or dies during the wait, the error is [`Error::OwnerDied`], and stays so for every later
    /// call. If this thread holds the lock already, the error is `EDEADLK`.
    ///
    /// The oldest supported C libraries cannot wait on the monotonic clock: if the wall clock is set back during the
    /// wait, the wait is longer by that time.
    #[doc(alias = "pthread_mutex_timedlock")]
    pub fn lock(&self, deadline: Deadline) -> Result<RobustGuard> {
        loop {
            if self.died().load(Ordering::Acquire) != 0 {
                return Err(Error::OwnerDied);
            }
            let left = deadline.remaining().unwrap_or(Duration::MAX);
            let until = wall_clock_after(left.min(WAIT_SLICE));
            // `pthread_mutex_timedlock` is called even if the caller does not wait: `pthread_mutex_trylock` of glibc
            // 2.36 and earlier locks a mutex that it reports as not recoverable, and no thread ever unlocks it.
            let outcome = pthread("pthread_mutex_timedlock", || {
                // SAFETY: the mutex is initialised, and mapped while `self.memory` lives; `until` is a valid time.
                unsafe { libc::pthread_mutex_timedlock(self.mutex(), &raw const until) }
            });
            let Err(error) = outcome else {
                let (layout, memory) = (self.layout, Arc::clone(&self.memory));
                return Ok(RobustGuard { layout, _memory: memory, _this_thread: PhantomData });
            };
            match error {
                Error::Call { errno: Errno::OWNERDEAD, .. } => {
                    self.died().store(1, Ordering::Release);
                    // This thread holds the dead owner's lock now. Unlocking it without `pthread_mutex_consistent` makes it
                    // permanently not recoverable.
                    unlock(self.layout);
                    return Err(Error::OwnerDied);
                }
                Error::Call { errno: Errno::NOTRECOVERABLE, .. } => return Err(Error::OwnerDied),
                Error::Call { errno: Errno::TIMEDOUT, .. } => {
                    clear_pending_lock()?;
                    if deadline.has_passed() {
                        return Err(Error::TimedOut);
                    }
                }
                error => return Err(error),
            }
        }
    }

    /// Returns whether the lock is free, held, or was held by a thread that died.
    #[doc(alias = "FUTEX_OWNER_DIED")]
    #[must_use]
    pub fn state(&self) -> LockState {
        if self.died().load(Ordering::Acquire) != 0 {
            return LockState::Died;
        }
        let word = self.word().load(Ordering::Acquire);
        if word & libc::FUTEX_OWNER_DIED != 0 {
            // A waiter that acquires the lock clears FUTEX_OWNER_DIED, so the death is also recorded in `died`.
            self.died().store(1, Ordering::Release);
            LockState::Died
        } else if word & libc::FUTEX_TID_MASK != 0 {
            LockState::Alive
        } else {
            LockState::Free
        }
    }

    fn mutex(&self) -> *mut pthread_mutex_t {
        self.layout.as_ptr().cast::<u8>().wrapping_add(offset_of!(LockLayout, mutex)).cast()
    }

    fn died(&self) -> &AtomicU32 {
        self.atomic(offset_of!(LockLayout, died))
    }

    fn word(&self) -> &AtomicU32 {
        self.atomic(offset_of!(LockLayout, mutex) + WORD)
    }

    fn atomic(&self, offset: usize) -> &AtomicU32 {
        let address = self.layout.as_ptr().cast::<u8>().wrapping_add(offset).cast();
        // SAFETY: the callers pass offsets that are within the layout and multiples of four; the memory stays mapped
        // while `self.memory` lives; every user of these words, including the C library and the kernel, accesses them
        // atomically.
        unsafe { AtomicU32::from_ptr(address) }
    }
}

impl Drop for RobustGuard {
    fn drop(&mut self) {
        // In a forked child the C library refuses to unlock the mutex, as intended, since the child's thread did not
        // lock it.
        unlock(self.layout);
    }
}

/// Unlocks the mutex of a robust lock. The call does not run through `call`, since fault injection does not apply to
/// calls that only release.
fn unlock(layout: NonNull<LockLayout>) {
    let mutex = layout.as_ptr().cast::<u8>().wrapping_add(offset_of!(LockLayout, mutex)).cast();
    // SAFETY: the callers hold the lock at `layout`, and keep its memory mapped.
    unsafe { libc::pthread_mutex_unlock(mutex) };
}

#[cfg(test)]
mod tests {
    use std::mem::forget;
    use std::os::fd::OwnedFd;
    use std::sync::mpsc;
    use std::thread;

    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
    use rustix::pipe::{PipeFlags, pipe_with};

    use super::*;
    use crate::fork::child;

    const LEN: usize = 4096;

    /// Memory that a forked child shares with the test.
    struct Map(NonNull<u8>);

    // SAFETY: `Map` holds only an address; the memory at the address is accessed through locks.
    unsafe impl Send for Map {}
    // SAFETY: a `&Map` provides only the address; the memory at the address is accessed through locks.
    unsafe impl Sync for Map {}

    impl Drop for Map {
        fn drop(&mut self) {
            // SAFETY: the range was mapped by the function `lock` with this length, and is unused from here on.
            unsafe { munmap(self.0.as_ptr().cast(), LEN) }.expect("munmap");
        }
    }

    fn lock() -> RobustLock {
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: without a fixed address the kernel picks a free range, so no mapping is replaced.
        let address = unsafe { mmap_anonymous(std::ptr::null_mut(), LEN, rights, MapFlags::SHARED) };
        let address = NonNull::new(address.expect("mmap").cast::<u8>()).expect("not null");
        // SAFETY: the mapped page is aligned, large enough and new, and stays mapped while `Map` lives.
        unsafe { RobustLock::create_at(address, Arc::new(Map(address))) }.expect("a lock")
    }

    fn pipe() -> (OwnedFd, OwnedFd) {
        pipe_with(PipeFlags::CLOEXEC).expect("a pipe")
    }

    fn test_deadline() -> Deadline {
        Deadline::after(Duration::from_secs(60))
    }

    #[test]
    fn a_lock_is_free_then_held_then_free() {
        let lock = lock();
        assert_eq!(lock.state(), LockState::Free);
        let guard = lock.try_lock().expect("the lock is free");
        assert_eq!(lock.state(), LockState::Alive, "as seen by its own thread");
        thread::scope(|scope| {
            let seen = scope.spawn(|| lock.state()).join().expect("no panic");
            assert_eq!(seen, LockState::Alive, "as seen by another thread");
        });
        drop(guard);
        assert_eq!(lock.state(), LockState::Free);
        assert_eq!(lock.state(), LockState::Free, "reading the state does not lock");
    }

    #[test]
    fn locking_times_out_while_another_thread_holds_the_lock() {
        let lock = lock();
        let _guard = lock.lock(Deadline::NEVER).expect("the lock is free");
        thread::scope(|scope| {
            let lock = &lock;
            for deadline in [Deadline::NOW, Deadline::after(Duration::from_millis(1))] {
                let outcome = scope.spawn(move || lock_and_release(lock, deadline)).join().expect("no panic");
                assert_eq!(outcome, Err(Error::TimedOut));
            }
            let outcome = scope.spawn(move || lock.try_lock().map(drop)).join().expect("no panic");
            assert_eq!(outcome, Err(Error::TimedOut));
        });
    }

    /// Acquires the lock and drops the guard at once, since a guard cannot be sent to another thread.
    fn lock_and_release(lock: &RobustLock, deadline: Deadline) -> Result<()> {
        lock.lock(deadline).map(drop)
    }

    #[test]
    fn locking_twice_in_one_thread_is_an_error() {
        let lock = lock();
        let _guard = lock.try_lock().expect("the lock is free");
        let error = || Err(Error::Call { call: "pthread_mutex_timedlock", errno: Errno::DEADLK });
        assert_eq!(lock_and_release(&lock, test_deadline()), error());
        assert_eq!(lock_and_release(&lock, Deadline::NEVER), error());
    }

    #[test]
    fn the_lock_excludes_other_threads() {
        let lock = lock();
        let mut counter = 0;
        let shared = Shared(&raw mut counter);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let shared = &shared;
                    for _ in 0..1000 {
                        let _guard = lock.lock(test_deadline()).expect("lock");
                        // SAFETY: this thread holds the lock that protects `counter`, and all threads end before
                        // `counter` is dropped.
                        unsafe { *shared.0 += 1 };
                    }
                });
            }
        });
        assert_eq!(counter, 4000);
    }

    struct Shared(*mut u32);
    // SAFETY: a thread accesses the counter only while it holds the lock.
    unsafe impl Sync for Shared {}

    #[test]
    fn a_thread_that_ends_with_the_lock_is_reported_dead_to_every_caller() {
        let lock = lock();
        thread::scope(|scope| {
            scope.spawn(|| forget(lock.try_lock().expect("the lock is free"))).join().expect("no panic");
        });
        for _ in 0..3 {
            assert_eq!(lock.state(), LockState::Died);
        }
        assert_eq!(lock_and_release(&lock, test_deadline()), Err(Error::OwnerDied));
        assert_eq!(lock_and_release(&lock, Deadline::NEVER), Err(Error::OwnerDied));
        assert_eq!(lock.try_lock().map(drop), Err(Error::OwnerDied));
    }

    #[test]
    fn a_death_detected_by_locking_is_permanent_too() {
        let lock = lock();
        thread::scope(|scope| {
            scope.spawn(|| forget(lock.try_lock().expect("the lock is free"))).join().expect("no panic");
        });
        assert_eq!(lock_and_release(&lock, test_deadline()), Err(Error::OwnerDied));
        assert_eq!(lock_and_release(&lock, test_deadline()), Err(Error::OwnerDied));
        assert_eq!(lock.state(), LockState::Died);
    }

    #[test]
    fn every_waiter_gets_owner_died() {
        let lock = lock();
        let (held, is_held) = mpsc::channel();
        let (go, may_go) = mpsc::channel::<()>();
        thread::scope(|scope| {
            let lock = &lock;
            scope.spawn(move || {
                forget(lock.try_lock().expect("the lock is free"));
                held.send(()).expect("the receiver exists");
                may_go.recv().expect("the sender exists");
            });
            is_held.recv().expect("the owner sends");
            let waiters =
                [Deadline::NEVER; 8].map(|deadline| scope.spawn(move || lock_and_release(lock, deadline)));
            go.send(()).expect("the owner receives");
            for waiter in waiters {
                assert_eq!(waiter.join().expect("no panic"), Err(Error::OwnerDied));
            }
        });
    }

    #[test]
    fn a_killed_owner_is_reported_dead_to_processes_that_share_the_memory() {
        let lock = lock();
        let (reader, writer) = pipe();
        let owner = child::fork(|| {
            let Ok(_guard) = lock.try_lock() else { return 1 };
            let _ = rustix::io::write(&writer, b"h");
            child::sleep()
        });
        assert_eq!(rustix::io::read(&reader, &mut [0; 1]), Ok(1));
        assert_eq!(lock.state(), LockState::Alive);
        owner.kill();
        assert_eq!(lock.state(), LockState::Died);
        assert_eq!(lock_and_release(&lock, test_deadline()), Err(Error::OwnerDied));
    }

    #[test]
    fn a_process_killed_after_it_released_the_lock_leaves_it_free() {
        let lock = lock();
        let (reader, writer) = pipe();
        let owner = child::fork(|| {
            if lock.try_lock().map(drop).is_err() {
                return 1;
            }
            let _ = rustix::io::write(&writer, b"h");
            child::sleep()
        });
        assert_eq!(rustix::io::read(&reader, &mut [0; 1]), Ok(1));
        owner.kill();
        assert_eq!(lock.state(), LockState::Free);
    }

    #[test]
    fn a_forked_child_does_not_release_its_parents_lock() {
        let lock = lock();
        let guard = lock.try_lock().expect("the lock is free");
        let mut inherited = Some(guard);
        let child = child::fork(|| {
            drop(inherited.take());
            if lock.state() == LockState::Alive { 0 } else { 1 }
        });
        assert_eq!(child.wait(), child::ExitStatus::Exited(0));
        assert_eq!(lock.state(), LockState::Alive);
        drop(inherited);
        assert_eq!(lock.state(), LockState::Free);
    }

    /// The head of a thread's list of held robust locks: `struct robust_list_head` of `linux/futex.h`.
    #[repr(C)]
    struct RobustList {
        next: *const u8,
        offset: isize,
        pending: *const u8,
    }

    #[test]
    fn a_wait_that_times_out_leaves_no_pointer_to_the_lock() {
        let lock = lock();
        let _guard = lock.try_lock().expect("the lock is free");
        let pending = thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                assert_eq!(lock_and_release(&lock, Deadline::NOW), Err(Error::TimedOut));
                let mut list: *const RobustList = std::ptr::null();
                let (to, mut len) = (&raw mut list, 0_usize);
                // SAFETY: `get_robust_list` stores the address and the size of this thread's robust list in two writable
                // variables.
                let code = unsafe { libc::syscall(libc::SYS_get_robust_list, 0_u64, to, &raw mut len) };
                assert_eq!((code, len), (0, size_of::<RobustList>()));
                // SAFETY: the C library keeps the robust list of a thread as long as the thread lives.
                unsafe { (*list).pending.is_null() }
            });
            waiter.join()
        });
        assert!(pending.expect("no panic"));
    }

    #[test]
    fn a_reported_death_stays_reported_while_others_lock() {
        let lock = lock();
        thread::scope(|scope| {
            scope.spawn(|| forget(lock.try_lock().expect("the lock is free"))).join().expect("no panic");
            for _ in 0..4 {
                scope.spawn(|| {
                    // Waits until the lock has become not recoverable: before that, the first thread that acquires the dead
                    // owner's lock holds it for a moment.
                    while lock_and_release(&lock, Deadline::NOW) == Err(Error::TimedOut) {}
                    for _ in 0..1000 {
                        assert_eq!(lock.state(), LockState::Died);
                        assert_eq!(lock_and_release(&lock, Deadline::NOW), Err(Error::OwnerDied));
                    }
                });
            }
        });
    }

    #[cfg(feature = "test-hooks")]
    #[test]
    fn creation_fails_if_any_of_its_calls_fails() {
        let memory: Arc<[std::sync::atomic::AtomicU64; 8]> = Arc::default();
        for nth in 1.. {
            let address = NonNull::from(&*memory).cast();
            let owner = Arc::clone(&memory);
            let armed = crate::fault::arm(nth, Errno::NOMEM);
            // SAFETY: the memory at `address` is aligned, large enough, alive as long as `memory`, and not used by an
            // earlier lock any more.
            let created = unsafe { RobustLock::create_at(address, owner) }.map(drop);
            let Some(call) = armed.fired() else {
                assert_eq!((created, nth), (Ok(()), 7));
                break;
            };
            assert_eq!(created, Err(Error::Call { call, errno: Errno::NOMEM }));
        }
        assert_eq!(Arc::strong_count(&memory), 1);
    }

    #[test]
    fn a_leaked_guard_keeps_its_memory_mapped() {
        let memory: Arc<[std::sync::atomic::AtomicU64; 8]> = Arc::default();
        let watch = Arc::downgrade(&memory);
        let address = NonNull::from(&*memory).cast();
        // SAFETY: the memory at `address` is aligned, large enough and new, and lives as long as `memory`.
        let lock = unsafe { RobustLock::create_at(address, memory) }.expect("a lock");
        thread::scope(|scope| {
            scope.spawn(|| forget(lock.try_lock().expect("the lock is free"))).join().expect("no panic");
        });
        drop(lock);
        assert_eq!(watch.strong_count(), 1);
    }
}
