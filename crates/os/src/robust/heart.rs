//! A page that tells other processes whether a thread of this one lives, and that it runs.
//!
//! ```text
//!   0                    256
//!   | RobustLock ...     | beats | status |  one page of a sealed memory file
//!     held by the thread   counted  set by it, and still there after its death
//!                          up by it
//!
//!   Heart: the maker's side, the only writable map there ever is
//!   Pulse: everybody else's side, mapped read-only from a read-only descriptor
//! ```
//!
//! What it keeps true: the bytes of the lock are reached by the C library, the kernel and this file alone. The
//! writable descriptor is closed before anybody could be given it, so that a [`Pulse`] held by another user cannot
//! lead the owner's C library astray; a process of the same user could, and is trusted. A pulse only ever reads,
//! whatever its file holds.
//!
//! What it will not do: say that a thread makes progress. A thread that is stopped lives, and its beats stand still.
//!
//! ```
//! use wholemem_os::robust::{Heart, Owner, Pulse};
//!
//! let heart = Heart::create()?;
//! let pulse = Pulse::import(heart.pulse_fd()?)?; // in another process, as a rule
//! assert_eq!(pulse.owner(), Owner::Free);
//!
//! let hold = heart.hold()?;
//! heart.beat();
//! heart.set_status(7);
//! assert_eq!((pulse.owner(), pulse.beats(), pulse.status()), (Owner::Alive, 1, 7));
//! drop(hold);
//! assert_eq!(pulse.owner(), Owner::Free);
//! # Ok::<(), wholemem_os::Error>(())
//! ```

use std::mem::offset_of;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Hold, Owner, Place, RobustLock, WORD};
use crate::vm::Protection;
use crate::{Memfd, Result, SharedMap, memfd};

/// How long the file is, on every machine: the kernel maps whole pages anyway.
const LEN: usize = 4096;

/// Where the count of beats is.
const BEATS: usize = 256;

/// Where the status is.
const STATUS: usize = BEATS + size_of::<u64>();

/// The maker's side: a lock to hold, a count to raise, and a status to set.
#[derive(Debug)]
pub struct Heart {
    lock: RobustLock,
    map: Arc<SharedMap>,
    fd: OwnedFd,
}

impl Heart {
    /// Makes a page whose lock nobody holds.
    ///
    /// # Errors
    /// The call that failed; `open` with `ENOENT` where `/proc` is not mounted.
    pub fn create() -> Result<Self> {
        let memory = Memfd::create("wholemem-heart", LEN)?;
        let map = Arc::new(SharedMap::create(&memory, Protection::ReadWrite)?);
        let fd = memory.read_only_fd()?;
        let keeper: super::Keeper = map.clone();
        // SAFETY: a page is aligned and large enough, it is fresh, and it stays mapped and writable while `map` lives.
        // The only other writable descriptor, `memory`, ends with this function, and `beat` keeps away from the lock.
        let lock = unsafe { RobustLock::create_at(map.address(), keeper) }?;
        Ok(Self { lock, map, fd })
    }

    /// Takes the lock for this thread, until it drops the answer or dies.
    ///
    /// # Errors
    /// [`TimedOut`](crate::Error::TimedOut) when another thread holds it.
    pub fn hold(&self) -> Result<Hold> {
        self.lock.hold()
    }

    /// Counts one beat.
    pub fn beat(&self) {
        if let Ok(beats) = self.beats() {
            beats.fetch_add(1, Ordering::Release);
        }
    }

    /// Sets a number that others read with [`Pulse::status`]; 0 at first. If the owner dies, its last status stays readable,
    /// so that others learn how far it had come.
    pub fn set_status(&self, status: u64) {
        if let Ok(place) = self.map.bytes().atomic_u64(STATUS) {
            place.store(status, Ordering::Release);
        }
    }

    fn beats(&self) -> Result<&AtomicU64> {
        self.map.bytes().atomic_u64(BEATS)
    }

    /// A descriptor for another process to make a [`Pulse`] of.
    ///
    /// # Errors
    /// `fcntl` with `EMFILE` when this process has no descriptor left.
    pub fn pulse_fd(&self) -> Result<OwnedFd> {
        memfd::share_fd(self.fd.as_fd())
    }
}

/// The side of everybody else: to look, and nothing more.
#[derive(Debug)]
pub struct Pulse {
    map: SharedMap,
}

impl Pulse {
    /// Takes a descriptor that [`Heart::pulse_fd`] made, in whichever process, and closes it.
    ///
    /// # Errors
    /// As [`Memfd::import`]: a foreign file is refused.
    pub fn import(fd: OwnedFd) -> Result<Self> {
        let memory = Memfd::import(fd, LEN)?;
        Ok(Self { map: SharedMap::create(&memory, Protection::Read)? })
    }

    /// Who holds the lock. [`Owner::Died`] stays so for ever: nobody ever waits for this lock, and so nobody takes
    /// it over.
    #[must_use]
    pub fn owner(&self) -> Owner {
        // The offset lies within the page and is a multiple of four, so the read cannot fail.
        let word = self.map.bytes().read_u32(offset_of!(Place, mutex) + WORD);
        match word.map(|word| word.load_acquire()) {
            Ok(word) if word & libc::FUTEX_OWNER_DIED != 0 => Owner::Died,
            Ok(word) if word & libc::FUTEX_TID_MASK != 0 => Owner::Alive,
            _ => Owner::Free,
        }
    }

    /// How often the owner's thread has come round. A number that stands still is a thread that does not run.
    #[must_use]
    pub fn beats(&self) -> u64 {
        self.map.bytes().read_u64(BEATS).map_or(0, |beats| beats.load_acquire())
    }

    /// The last number that the owner has set with [`Heart::set_status`], also after its death.
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
    fn a_pulse_sees_the_owner_live_leave_and_beat() {
        let heart = Heart::create().unwrap();
        let pulse = Pulse::import(heart.pulse_fd().unwrap()).unwrap();
        assert_eq!((pulse.owner(), pulse.beats()), (Owner::Free, 0));
        let hold = heart.hold().unwrap();
        heart.beat();
        heart.beat();
        assert_eq!((pulse.owner(), pulse.beats()), (Owner::Alive, 2));
        drop(hold);
        assert_eq!(pulse.owner(), Owner::Free);
    }

    #[test]
    fn a_pulse_sees_a_thread_die_with_the_lock() {
        let heart = Heart::create().unwrap();
        let pulse = Pulse::import(heart.pulse_fd().unwrap()).unwrap();
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| std::mem::forget(heart.hold().unwrap()));
            thread.join().unwrap();
        });
        assert_eq!(pulse.owner(), Owner::Died);
        assert_eq!(pulse.owner(), Owner::Died, "for ever");
    }

    #[test]
    fn a_pulse_sees_a_process_die_with_the_lock() {
        let heart = Heart::create().unwrap();
        let pulse = Pulse::import(heart.pulse_fd().unwrap()).unwrap();
        let child = child::fork(|| match heart.hold() {
            Ok(hold) => {
                heart.set_status(7);
                std::mem::forget(hold);
                0
            }
            Err(_) => 1,
        });
        assert_eq!(child.wait(), child::Status::Exited(0));
        assert_eq!((pulse.owner(), pulse.status()), (Owner::Died, 7));
    }

    #[test]
    fn nobody_who_is_given_the_page_can_write_it() {
        let heart = Heart::create().unwrap();
        let fd = heart.pulse_fd().unwrap();
        assert_eq!(rustix::io::write(&fd, b"x"), Err(Errno::BADF));
        let memory = Memfd::import(fd, LEN).unwrap();
        assert_eq!(SharedMap::create(&memory, Protection::ReadWrite).unwrap_err(), Error::ReadOnly);
    }

    #[test]
    fn import_refuses_what_is_no_page_of_a_heart() {
        let (pipe, _writer) = rustix::pipe::pipe().unwrap();
        assert_eq!(Pulse::import(pipe).unwrap_err(), Error::NotAMemfd { found: FileKind::Pipe });
        let long = Memfd::create("test", 2 * LEN).unwrap().into_fd();
        assert_eq!(Pulse::import(long).unwrap_err(), Error::WrongLength { expected: LEN, actual: 2 * LEN });
    }
}
