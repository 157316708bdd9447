//! A liveness page: memory that shows other processes whether a thread of this process is alive and running.
//!
//! ```text
//!   0                    256
//!   | RobustLock ...     | heartbeats | status |  one page of a sealed memory file
//!     held by the thread   incremented  set by it, and readable after its death
//!                          by it
//!
//!   LivenessLock:  the owner's side, the only writable mapping
//!   LivenessProbe: every other process, a read-only mapping of a read-only descriptor
//! ```
//!
//! Guarantees: only the C library, the kernel and this file access the bytes of the lock. The writable descriptor is
//! closed before any other process could receive it, so a process of another user that holds a [`LivenessProbe`]
//! cannot corrupt the owner's C library; a process of the same user could, and is trusted. A probe only reads,
//! whatever its file contains.
//!
//! The page does not show that a thread makes progress: a stopped thread is alive, and its heartbeats do not change.
//!
//! ```
//! use wholemem_os::robust::{LivenessLock, LivenessProbe, LockState};
//!
//! let liveness = LivenessLock::create()?;
//! let probe = LivenessProbe::import(liveness.probe_fd()?)?; // usually in another process
//! assert_eq!(probe.state(), LockState::Free);
//!
//! let guard = liveness.acquire()?;
//! liveness.add_heartbeat();
//! liveness.set_status(7);
//! assert_eq!((probe.state(), probe.heartbeats(), probe.status()), (LockState::Alive, 1, 7));
//! drop(guard);
//! assert_eq!(probe.state(), LockState::Free);
//! # Ok::<(), wholemem_os::Error>(())
//! ```

use std::mem::offset_of;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{LockLayout, LockState, RobustGuard, RobustLock, WORD};
use crate::vm::Protection;
use crate::{Memfd, Result, SharedMap, memfd};

/// The length in bytes of the memory file of a liveness page. It is the same for every page size, since the kernel
/// maps whole pages.
const LEN: usize = 4096;

/// The offset of the heartbeat counter in a liveness page.
const HEARTBEATS: usize = 256;

/// The offset of the status in a liveness page.
const STATUS: usize = HEARTBEATS + size_of::<u64>();

/// The owner's side of a liveness page: a robust lock, a heartbeat counter and a status.
#[derive(Debug)]
pub struct LivenessLock {
    lock: RobustLock,
    map: Arc<SharedMap>,
    fd: OwnedFd,
}

impl LivenessLock {
    /// Creates a liveness page whose robust lock is free.
    ///
    /// # Errors
    /// The failed call; `open` with `ENOENT` if `/proc` is not mounted.
    pub fn create() -> Result<Self> {
        let memory = Memfd::create("wholemem-liveness", LEN)?;
        let map = Arc::new(SharedMap::create(&memory, Protection::ReadWrite)?);
        let fd = memory.read_only_fd()?;
        let owner: super::MappingOwner = map.clone();
        // SAFETY: the page at `map.address()` is aligned, large enough and new, and it stays mapped and writable
        // while `map` lives. The only other writable descriptor, `memory`, is closed by this function, and the
        // heartbeats and the status do not overlap the lock.
        let lock = unsafe { RobustLock::create_at(map.address(), owner) }?;
        Ok(Self { lock, map, fd })
    }

    /// Acquires the lock of the liveness page for this thread, until the thread drops the guard or dies.
    ///
    /// # Errors
    /// [`TimedOut`](crate::Error::TimedOut) if another thread holds it.
    pub fn acquire(&self) -> Result<RobustGuard> {
        self.lock.try_lock()
    }

    /// Increments the heartbeat counter of the liveness page.
    pub fn add_heartbeat(&self) {
        if let Ok(heartbeats) = self.heartbeats() {
            heartbeats.fetch_add(1, Ordering::Release);
        }
    }

    /// Sets the status, a number that other processes read with [`LivenessProbe::status`]. It is 0 at first. If the
    /// owner dies, its last status stays readable.
    pub fn set_status(&self, status: u64) {
        if let Ok(word) = self.map.bytes().atomic_u64(STATUS) {
            word.store(status, Ordering::Release);
        }
    }

    fn heartbeats(&self) -> Result<&AtomicU64> {
        self.map.bytes().atomic_u64(HEARTBEATS)
    }

    /// Returns a read-only descriptor of the liveness page, from which another process creates a [`LivenessProbe`].
    ///
    /// # Errors
    /// `fcntl` with `EMFILE` if this process has no descriptor left.
    pub fn probe_fd(&self) -> Result<OwnedFd> {
        memfd::share_fd(self.fd.as_fd())
    }
}

/// The read-only side of another process's liveness page.
#[derive(Debug)]
pub struct LivenessProbe {
    map: SharedMap,
}

impl LivenessProbe {
    /// Maps the liveness page of any process from the descriptor that [`LivenessLock::probe_fd`] returned, and closes
    /// the descriptor.
    ///
    /// # Errors
    /// As [`Memfd::import`]: a foreign file is refused.
    pub fn import(fd: OwnedFd) -> Result<Self> {
        let memory = Memfd::import(fd, LEN)?;
        Ok(Self { map: SharedMap::create(&memory, Protection::Read)? })
    }

    /// Returns the state of the lock of the liveness page. [`LockState::Died`] is permanent: no thread waits for this
    /// lock, so no thread acquires it after a death.
    #[must_use]
    pub fn state(&self) -> LockState {
        // The futex word of the lock is within the page at a multiple of four, so the read cannot fail.
        let word = self.map.bytes().read_u32(offset_of!(LockLayout, mutex) + WORD);
        match word.map(|word| word.load_acquire()) {
            Ok(word) if word & libc::FUTEX_OWNER_DIED != 0 => LockState::Died,
            Ok(word) if word & libc::FUTEX_TID_MASK != 0 => LockState::Alive,
            _ => LockState::Free,
        }
    }

    /// Returns the heartbeat counter of the liveness page. If it does not change, the owner's thread does not run.
    #[must_use]
    pub fn heartbeats(&self) -> u64 {
        self.map.bytes().read_u64(HEARTBEATS).map_or(0, |heartbeats| heartbeats.load_acquire())
    }

    /// Returns the last status that the owner set with [`LivenessLock::set_status`], also after the owner's death.
    #[must_use]
    pub fn status(&self) -> u64 {
        self.map.bytes().read_u64(STATUS).map_or(0, |status| status.load_acquire())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fork::child;
    use crate::{Errno, Error, FileKind};

    #[test]
    fn a_probe_sees_the_owner_acquire_release_and_count_heartbeats() {
        let liveness = LivenessLock::create().unwrap();
        let probe = LivenessProbe::import(liveness.probe_fd().unwrap()).unwrap();
        assert_eq!((probe.state(), probe.heartbeats()), (LockState::Free, 0));
        let guard = liveness.acquire().unwrap();
        liveness.add_heartbeat();
        liveness.add_heartbeat();
        assert_eq!((probe.state(), probe.heartbeats()), (LockState::Alive, 2));
        drop(guard);
        assert_eq!(probe.state(), LockState::Free);
    }

    #[test]
    fn a_probe_sees_a_thread_die_with_the_lock() {
        let liveness = LivenessLock::create().unwrap();
        let probe = LivenessProbe::import(liveness.probe_fd().unwrap()).unwrap();
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| std::mem::forget(liveness.acquire().unwrap()));
            thread.join().unwrap();
        });
        assert_eq!(probe.state(), LockState::Died);
        assert_eq!(probe.state(), LockState::Died, "the state is permanent");
    }

    #[test]
    fn a_probe_sees_a_process_die_with_the_lock() {
        let liveness = LivenessLock::create().unwrap();
        let probe = LivenessProbe::import(liveness.probe_fd().unwrap()).unwrap();
        let child = child::fork(|| match liveness.acquire() {
            Ok(guard) => {
                liveness.set_status(7);
                std::mem::forget(guard);
                0
            }
            Err(_) => 1,
        });
        assert_eq!(child.wait(), child::ExitStatus::Exited(0));
        assert_eq!((probe.state(), probe.status()), (LockState::Died, 7));
    }

    #[test]
    fn a_probe_descriptor_cannot_be_written() {
        let liveness = LivenessLock::create().unwrap();
        let fd = liveness.probe_fd().unwrap();
        assert_eq!(rustix::io::write(&fd, b"x"), Err(Errno::BADF));
        let memory = Memfd::import(fd, LEN).unwrap();
        assert_eq!(SharedMap::create(&memory, Protection::ReadWrite).unwrap_err(), Error::ReadOnly);
    }

    #[test]
    fn import_refuses_a_descriptor_that_is_not_a_liveness_page() {
        let (pipe, _writer) = rustix::pipe::pipe().unwrap();
        assert_eq!(LivenessProbe::import(pipe).unwrap_err(), Error::NotAMemfd { found: FileKind::Pipe });
        let long = Memfd::create("test", 2 * LEN).unwrap().into_fd();
        let error = Error::WrongLength { expected: LEN, actual: 2 * LEN };
        assert_eq!(LivenessProbe::import(long).unwrap_err(), error);
    }
}
