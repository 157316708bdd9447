//! A lock in shared memory that tells when its owner died.
//!
//! A thread [holds](RobustLock::hold) the lock for as long as it lives; others [look](RobustLock::look). When the
//! thread or its whole process ends with the lock held, even by `SIGKILL`, the kernel marks the lock, in a tenth
//! of a millisecond and long before the memory and sockets of the process are gone.
//!
//! ```text
//!            hold            drop the hold
//!   Free ----------> Alive ----------------> Free
//!                      |
//!                      | the owner dies
//!                      v
//!                    Died    to everybody, for ever
//!
//!   0                                     SIZE
//!   | pthread_mutex_t               | died |
//!     its futex word: the owner's     set by the first who sees that bit
//!     thread number, and the
//!     kernel's bit for its death
//! ```
//!
//! What it keeps true: once anybody has been told [`Owner::Died`], so is everybody after. To look changes nothing
//! for the owner, costs two loads, and may be done by any number of processes at once.
//!
//! Looking reads the word rather than trying the lock, for two reasons. Who tries a lock has it for a moment, in
//! which others take him for the owner, and in which he may die. And glibc's `pthread_mutex_trylock` on a lock
//! that was closed after a death locks it again and for ever, so that from then on the dead look alive.
//!
//! What it will not do: guard anything against processes that are not to be trusted. The C library and the kernel
//! thread pointers of the holding process through the shared bytes, and whoever may write them can make that
//! process write elsewhere in itself. All processes use the same C library. Those that wait for the lock, rather
//! than look at it, live in one PID namespace, as the lock knows its owner by number.
//!
//! ```
//! use std::ptr::NonNull;
//! use std::sync::Arc;
//! use std::sync::atomic::AtomicU64;
//! use wholemem_os::robust::{Owner, RobustLock};
//!
//! let memory: Arc<[AtomicU64; 8]> = Arc::default();
//! let place = NonNull::from(&*memory).cast();
//! // SAFETY: the place is aligned, large enough, unused, and stays as long as `memory`.
//! let lock = unsafe { RobustLock::create_at(place, memory) }?;
//!
//! let hold = lock.hold()?;
//! assert_eq!(lock.look(), Owner::Alive);
//! drop(hold);
//! assert_eq!(lock.look(), Owner::Free);
//! # Ok::<(), wholemem_os::Error>(())
//! ```

mod heart;
mod pthread;

use std::any::Any;
use std::marker::PhantomData;
use std::mem::offset_of;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use libc::pthread_mutex_t;

use self::pthread::{Attributes, forget_wait, on_the_wall, pthread};
use crate::{Deadline, Errno, Error, Result};

pub use self::heart::{Heart, Pulse};

/// How long to wait before looking again whether the owner died: when the lock is closed, glibc wakes two of those
/// who wait, and forgets the others.
const SLICE: Duration = Duration::from_millis(50);

/// What keeps the memory of a lock mapped.
type Keeper = Arc<dyn Any + Send + Sync>;

/// How a lock lies in shared memory.
#[repr(C, align(8))]
struct Place {
    mutex: pthread_mutex_t,
    /// Whether somebody has seen that the owner died.
    died: AtomicU32,
}

/// Where in the mutex the C library keeps the futex word. [`RobustLock::create_at`] looks that it is so.
const WORD: usize = if cfg!(target_env = "musl") { 4 } else { 0 };

/// A lock in shared memory that tells when its owner died.
#[doc(alias = "PTHREAD_MUTEX_ROBUST")]
#[doc(alias = "PTHREAD_PROCESS_SHARED")]
#[derive(Debug)]
pub struct RobustLock {
    place: NonNull<Place>,
    memory: Keeper,
}

// SAFETY: a mutex is made to be used by many threads, and the keeper may be moved to them.
unsafe impl Send for RobustLock {}
// SAFETY: a mutex is made to be used by many threads at once; all other state is an atomic.
unsafe impl Sync for RobustLock {}

/// Who has a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// Nobody.
    Free,
    /// A thread that lives.
    Alive,
    /// A thread that died with it.
    Died,
}

/// The lock, held by this thread until it drops this or dies.
///
/// The thread's list of held locks leads through the shared memory, which therefore stays mapped until the hold
/// is dropped, and for ever if it is leaked.
#[derive(Debug)]
#[must_use = "the lock is let go when this is dropped"]
pub struct Hold {
    place: NonNull<Place>,
    _memory: Keeper,
    // Only the thread that locked may unlock.
    _this_thread: PhantomData<*const ()>,
}

impl RobustLock {
    /// How many bytes a lock takes.
    pub const SIZE: usize = size_of::<Place>();

    /// What the address of a lock must be a multiple of.
    pub const ALIGN: usize = align_of::<Place>();

    /// Makes a free lock at `place`, in memory that lives as long as `memory` does.
    ///
    /// The lock is never destroyed, as others may still look at it; it ends with its memory.
    ///
    /// # Safety
    ///
    /// [`SIZE`](Self::SIZE) bytes at `place`, whose address is a multiple of [`ALIGN`](Self::ALIGN), stay mapped
    /// and writable until the last clone of `memory` is dropped. Nothing but locks opened there uses them, and
    /// none does yet. All processes that may write them are trusted.
    #[doc(alias = "pthread_mutex_init")]
    pub unsafe fn create_at(place: NonNull<u8>, memory: Keeper) -> Result<Self> {
        // SAFETY: the caller's promise.
        let lock = unsafe { Self::open_at(place, memory) };
        lock.died().store(0, Ordering::Relaxed);
        let attributes = Attributes::create()?;
        pthread("pthread_mutex_init", || {
            // SAFETY: the place is writable, aligned, and used by nobody yet; the attributes are initialised.
            unsafe { libc::pthread_mutex_init(lock.mutex(), attributes.as_ptr()) }
        })?;
        let hold = lock.hold()?;
        let owner = lock.word().load(Ordering::Relaxed);
        drop(hold);
        if owner != rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned() {
            return Err(Error::UnknownFormat { what: "mutex of the C library" });
        }
        Ok(lock)
    }

    /// Finds the lock that another process, or this one, has made at `place`.
    ///
    /// # Safety
    ///
    /// As for [`create_at`](Self::create_at), which has returned there before.
    #[must_use]
    pub unsafe fn open_at(place: NonNull<u8>, memory: Keeper) -> Self {
        let place = place.cast::<Place>();
        debug_assert!(place.is_aligned());
        Self { place, memory }
    }

    /// Takes a lock that nobody has, for as long as this thread lives or keeps the answer. If another thread has
    /// it, this is [`Error::TimedOut`] at once.
    pub fn hold(&self) -> Result<Hold> {
        self.lock(Deadline::NOW)
    }

    /// Waits for the lock and takes it.
    ///
    /// If its owner died or dies meanwhile, this is [`Error::OwnerDied`], now and ever after. If this thread has
    /// it already, the error is `EDEADLK`.
    ///
    /// The C libraries of the age we support know no wait on the monotonic clock: if the clock on the wall is set
    /// back during the wait, the wait is that much longer.
    #[doc(alias = "pthread_mutex_timedlock")]
    pub fn lock(&self, deadline: Deadline) -> Result<Hold> {
        loop {
            if self.died().load(Ordering::Acquire) != 0 {
                return Err(Error::OwnerDied);
            }
            let left = deadline.remaining().unwrap_or(Duration::MAX);
            let until = on_the_wall(left.min(SLICE));
            // Even to try without waiting: `pthread_mutex_trylock` of glibc (2.36, and its older sources) locks what
            // it reports as not recoverable, and nobody ever unlocks it.
            let outcome = pthread("pthread_mutex_timedlock", || {
                // SAFETY: the mutex is initialised and stays mapped while `self.memory` lives; the time is valid.
                unsafe { libc::pthread_mutex_timedlock(self.mutex(), &raw const until) }
            });
            let Err(error) = outcome else {
                let (place, memory) = (self.place, Arc::clone(&self.memory));
                return Ok(Hold { place, _memory: memory, _this_thread: PhantomData });
            };
            match error {
                Error::Call { errno: Errno::OWNERDEAD, .. } => {
                    self.died().store(1, Ordering::Release);
                    // We have the lock now. To let go of it without declaring it consistent closes it for ever.
                    unlock(self.place);
                    return Err(Error::OwnerDied);
                }
                Error::Call { errno: Errno::NOTRECOVERABLE, .. } => return Err(Error::OwnerDied),
                Error::Call { errno: Errno::TIMEDOUT, .. } => {
                    forget_wait()?;
                    if deadline.has_passed() {
                        return Err(Error::TimedOut);
                    }
                }
                error => return Err(error),
            }
        }
    }

    /// Sees who has the lock.
    #[doc(alias = "FUTEX_OWNER_DIED")]
    #[must_use]
    pub fn look(&self) -> Owner {
        if self.died().load(Ordering::Acquire) != 0 {
            return Owner::Died;
        }
        let word = self.word().load(Ordering::Acquire);
        if word & libc::FUTEX_OWNER_DIED != 0 {
            // The bit goes when somebody who waits takes the lock over; what we have said stays true.
            self.died().store(1, Ordering::Release);
            Owner::Died
        } else if word & libc::FUTEX_TID_MASK != 0 {
            Owner::Alive
        } else {
            Owner::Free
        }
    }

    fn mutex(&self) -> *mut pthread_mutex_t {
        self.place.as_ptr().cast::<u8>().wrapping_add(offset_of!(Place, mutex)).cast()
    }

    fn died(&self) -> &AtomicU32 {
        self.atomic(offset_of!(Place, died))
    }

    fn word(&self) -> &AtomicU32 {
        self.atomic(offset_of!(Place, mutex) + WORD)
    }

    fn atomic(&self, offset: usize) -> &AtomicU32 {
        let address = self.place.as_ptr().cast::<u8>().wrapping_add(offset).cast();
        // SAFETY: both offsets lie within the place and are multiples of four; it stays mapped while `self.memory`
        // lives; everybody, the C library and the kernel included, reaches these words by atomics.
        unsafe { AtomicU32::from_ptr(address) }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // In a forked child this is refused, as its thread is not the one that locked; rightly so.
        unlock(self.place);
    }
}

/// Not through `call`: what only gives back is never made to fail.
fn unlock(place: NonNull<Place>) {
    let mutex = place.as_ptr().cast::<u8>().wrapping_add(offset_of!(Place, mutex)).cast();
    // SAFETY: callers have locked it just before or hold it, and have what keeps it mapped.
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

    /// Memory that a forked child shares.
    struct Map(NonNull<u8>);

    // SAFETY: an address; the memory behind it is reached through locks only.
    unsafe impl Send for Map {}
    // SAFETY: a shared reference gives the address only; the memory behind it is reached through locks.
    unsafe impl Sync for Map {}

    impl Drop for Map {
        fn drop(&mut self) {
            // SAFETY: mapped in `lock` below, with this length, and nobody uses it any more.
            unsafe { munmap(self.0.as_ptr().cast(), LEN) }.expect("munmap");
        }
    }

    fn lock() -> RobustLock {
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: takes memory that nobody has.
        let address = unsafe { mmap_anonymous(std::ptr::null_mut(), LEN, rights, MapFlags::SHARED) };
        let place = NonNull::new(address.expect("mmap").cast::<u8>()).expect("not null");
        // SAFETY: a page is aligned and large enough, is fresh, and stays mapped while `Map` lives.
        unsafe { RobustLock::create_at(place, Arc::new(Map(place))) }.expect("a lock")
    }

    fn pipe() -> (OwnedFd, OwnedFd) {
        pipe_with(PipeFlags::CLOEXEC).expect("a pipe")
    }

    fn patience() -> Deadline {
        Deadline::after(Duration::from_secs(60))
    }

    #[test]
    fn a_lock_is_free_then_alive_then_free() {
        let lock = lock();
        assert_eq!(lock.look(), Owner::Free);
        let hold = lock.hold().expect("nobody has it");
        assert_eq!(lock.look(), Owner::Alive, "to its own thread");
        thread::scope(|scope| {
            let seen = scope.spawn(|| lock.look()).join().expect("it ran");
            assert_eq!(seen, Owner::Alive, "to another thread");
        });
        drop(hold);
        assert_eq!(lock.look(), Owner::Free);
        assert_eq!(lock.look(), Owner::Free, "to look leaves it free");
    }

    #[test]
    fn a_lock_that_another_thread_has_times_out() {
        let lock = lock();
        let _hold = lock.lock(Deadline::NEVER).expect("nobody has it");
        thread::scope(|scope| {
            let lock = &lock;
            for deadline in [Deadline::NOW, Deadline::after(Duration::from_millis(1))] {
                let outcome = scope.spawn(move || lock_is(lock, deadline)).join().expect("it ran");
                assert_eq!(outcome, Err(Error::TimedOut));
            }
            let outcome = scope.spawn(move || lock.hold().map(drop)).join().expect("it ran");
            assert_eq!(outcome, Err(Error::TimedOut));
        });
    }

    /// Without the hold, which cannot leave its thread.
    fn lock_is(lock: &RobustLock, deadline: Deadline) -> Result<()> {
        lock.lock(deadline).map(drop)
    }

    #[test]
    fn a_thread_that_locks_twice_gets_an_error() {
        let lock = lock();
        let _hold = lock.hold().expect("nobody has it");
        let error = || Err(Error::Call { call: "pthread_mutex_timedlock", errno: Errno::DEADLK });
        assert_eq!(lock_is(&lock, patience()), error());
        assert_eq!(lock_is(&lock, Deadline::NEVER), error());
    }

    #[test]
    fn a_lock_passes_from_thread_to_thread() {
        let lock = lock();
        let mut counter = 0;
        let shared = Shared(&raw mut counter);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let shared = &shared;
                    for _ in 0..1000 {
                        let _hold = lock.lock(patience()).expect("lock");
                        // SAFETY: the lock is held, and all threads end before `counter` does.
                        unsafe { *shared.0 += 1 };
                    }
                });
            }
        });
        assert_eq!(counter, 4000);
    }

    struct Shared(*mut u32);
    // SAFETY: used under a lock only.
    unsafe impl Sync for Shared {}

    #[test]
    fn a_thread_that_ends_with_the_lock_has_died_to_all_who_look() {
        let lock = lock();
        thread::scope(|scope| {
            scope.spawn(|| forget(lock.hold().expect("nobody has it"))).join().expect("it ran");
        });
        for _ in 0..3 {
            assert_eq!(lock.look(), Owner::Died);
        }
        assert_eq!(lock_is(&lock, patience()), Err(Error::OwnerDied));
        assert_eq!(lock_is(&lock, Deadline::NEVER), Err(Error::OwnerDied));
        assert_eq!(lock.hold().map(drop), Err(Error::OwnerDied));
    }

    #[test]
    fn the_first_to_hear_of_a_death_by_locking_closes_the_lock_too() {
        let lock = lock();
        thread::scope(|scope| {
            scope.spawn(|| forget(lock.hold().expect("nobody has it"))).join().expect("it ran");
        });
        assert_eq!(lock_is(&lock, patience()), Err(Error::OwnerDied));
        assert_eq!(lock_is(&lock, patience()), Err(Error::OwnerDied));
        assert_eq!(lock.look(), Owner::Died);
    }

    #[test]
    fn those_who_wait_are_all_told_of_a_death() {
        let lock = lock();
        let (held, is_held) = mpsc::channel();
        let (go, may_go) = mpsc::channel::<()>();
        thread::scope(|scope| {
            let lock = &lock;
            scope.spawn(move || {
                forget(lock.hold().expect("nobody has it"));
                held.send(()).expect("somebody listens");
                may_go.recv().expect("it is sent");
            });
            is_held.recv().expect("it is held");
            let waiters = [Deadline::NEVER; 8].map(|deadline| scope.spawn(move || lock_is(lock, deadline)));
            go.send(()).expect("the owner listens");
            for waiter in waiters {
                assert_eq!(waiter.join().expect("it ran"), Err(Error::OwnerDied));
            }
        });
    }

    #[test]
    fn a_process_killed_with_the_lock_has_died_to_those_who_share_its_memory() {
        let lock = lock();
        let (reader, writer) = pipe();
        let owner = child::fork(|| {
            let Ok(_hold) = lock.hold() else { return 1 };
            let _ = rustix::io::write(&writer, b"h");
            child::sleep()
        });
        assert_eq!(rustix::io::read(&reader, &mut [0; 1]), Ok(1));
        assert_eq!(lock.look(), Owner::Alive);
        owner.kill();
        assert_eq!(lock.look(), Owner::Died);
        assert_eq!(lock_is(&lock, patience()), Err(Error::OwnerDied));
    }

    #[test]
    fn a_process_that_let_go_before_it_was_killed_has_not_died_with_the_lock() {
        let lock = lock();
        let (reader, writer) = pipe();
        let owner = child::fork(|| {
            if lock.hold().map(drop).is_err() {
                return 1;
            }
            let _ = rustix::io::write(&writer, b"h");
            child::sleep()
        });
        assert_eq!(rustix::io::read(&reader, &mut [0; 1]), Ok(1));
        owner.kill();
        assert_eq!(lock.look(), Owner::Free);
    }

    #[test]
    fn a_forked_child_does_not_let_go_of_its_parents_lock() {
        let lock = lock();
        let hold = lock.hold().expect("nobody has it");
        let mut inherited = Some(hold);
        let child = child::fork(|| {
            drop(inherited.take());
            if lock.look() == Owner::Alive { 0 } else { 1 }
        });
        assert_eq!(child.wait(), child::Status::Exited(0));
        assert_eq!(lock.look(), Owner::Alive);
        drop(inherited);
        assert_eq!(lock.look(), Owner::Free);
    }

    /// As `linux/futex.h` has it.
    #[repr(C)]
    struct RobustList {
        next: *const u8,
        offset: isize,
        pending: *const u8,
    }

    #[test]
    fn a_wait_in_vain_leaves_no_pointer_to_the_lock_behind() {
        let lock = lock();
        let _hold = lock.hold().expect("nobody has it");
        let pending = thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                assert_eq!(lock_is(&lock, Deadline::NOW), Err(Error::TimedOut));
                let mut list: *const RobustList = std::ptr::null();
                let (to, mut len) = (&raw mut list, 0_usize);
                // SAFETY: asks for this thread's list; both places are writable.
                let code = unsafe { libc::syscall(libc::SYS_get_robust_list, 0_u64, to, &raw mut len) };
                assert_eq!((code, len), (0, size_of::<RobustList>()));
                // SAFETY: the C library keeps the list as long as the thread lives.
                unsafe { (*list).pending.is_null() }
            });
            waiter.join()
        });
        assert!(pending.expect("it ran"));
    }

    #[test]
    fn who_was_told_of_a_death_is_told_so_for_ever_while_others_lock_and_look() {
        let lock = lock();
        thread::scope(|scope| {
            scope.spawn(|| forget(lock.hold().expect("nobody has it"))).join().expect("it ran");
            for _ in 0..4 {
                scope.spawn(|| {
                    // While the first of us closes the lock, it is his for a moment.
                    while lock_is(&lock, Deadline::NOW) == Err(Error::TimedOut) {}
                    for _ in 0..1000 {
                        assert_eq!(lock.look(), Owner::Died);
                        assert_eq!(lock_is(&lock, Deadline::NOW), Err(Error::OwnerDied));
                    }
                });
            }
        });
    }

    #[cfg(feature = "test-hooks")]
    #[test]
    fn whichever_call_fails_a_lock_is_not_made() {
        let memory: Arc<[std::sync::atomic::AtomicU64; 8]> = Arc::default();
        for nth in 1.. {
            let place = NonNull::from(&*memory).cast();
            let keeper = Arc::clone(&memory);
            let armed = crate::fault::arm(nth, Errno::NOMEM);
            // SAFETY: aligned, large enough, alive as long as `memory`, and used by no earlier lock any more.
            let made = unsafe { RobustLock::create_at(place, keeper) }.map(drop);
            let Some(call) = armed.fired() else {
                assert_eq!((made, nth), (Ok(()), 7));
                break;
            };
            assert_eq!(made, Err(Error::Call { call, errno: Errno::NOMEM }));
        }
        assert_eq!(Arc::strong_count(&memory), 1);
    }

    #[test]
    fn a_leaked_hold_keeps_its_memory_mapped() {
        let memory: Arc<[std::sync::atomic::AtomicU64; 8]> = Arc::default();
        let watch = Arc::downgrade(&memory);
        let place = NonNull::from(&*memory).cast();
        // SAFETY: aligned, large enough, fresh, and alive as long as `memory`.
        let lock = unsafe { RobustLock::create_at(place, memory) }.expect("a lock");
        thread::scope(|scope| {
            scope.spawn(|| forget(lock.hold().expect("nobody has it"))).join().expect("it ran");
        });
        drop(lock);
        assert_eq!(watch.strong_count(), 1);
    }
}
