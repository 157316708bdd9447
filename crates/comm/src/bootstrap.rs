//! [`Bootstrap`]: a rank's membership in a group, how it joins and leaves.
//!
//! | module | what it holds |
//! |---|---|
//! | [`collective`] | barrier, broadcast, all_gather, all_to_all and agree |
//! | [`descriptors`] | all_gather_fds |
//! | [`split`] | groups of some of the ranks of a group |
//! | [`env`](mod@env) | from_env: joining as a launcher asks for |
//! | [`watch`] | callbacks for the failure of a group |

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use wholemem_os::packet::PacketListener;
use wholemem_os::{Deadline, Errno, Error as OsError, interrupt};

use crate::core::{Core, Phase};
use crate::fault::Fault;
use crate::handshake::Acceptor;
use crate::progress::Progress;
use crate::rank::Tree;
use crate::{Error, Rank, Result, UniqueId};

mod collective;
mod descriptors;
mod env;
mod split;
mod watch;

pub use self::collective::Verdict;
pub use self::watch::Watch;

use self::collective::{GLANCE, wait_out};

/// How long an operation waits for the other ranks unless [`Bootstrap::set_timeout`] says otherwise.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

/// The largest group: a number of ranks that is a mistake is told at once, and not by ranks that never come.
const MOST_RANKS: u32 = 1 << 16;

/// What a deadline that never comes is taken for.
const LONGEST: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// How much longer than its own thread a caller waits: it is there so that not even our own mistakes make it hang.
const GRACE: Duration = Duration::from_secs(5);

/// One rank's membership in a group.
///
/// Operations are collective: all ranks call the same ones in the same order. Each returns the result, or the error that
/// names the rank at fault; an error that [poisons](Error::poisons) ends the group. An operation whose timeout passes
/// fails then, and not before; it may take up to a second longer, in which the ranks inform each other which rank is missing.
/// Dropping it leaves the group; the others may finish what this rank has finished, and nothing after that.
#[derive(Debug)]
pub struct Bootstrap {
    pub(crate) core: Arc<Core>,
    pub(crate) timeout: Duration,
    /// Whether an operation is under way.
    busy: AtomicBool,
    /// Until this rank leaves.
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Bootstrap {
    /// Joins the group of `id` as `rank` of `size`, and returns when all ranks have. If ranks are missing, it fails when the
    /// deadline has passed, at most half a second later.
    ///
    /// If ranks die after others have joined them, all survivors return [`Error::PeerLost`] within a second of each other: when
    /// the last of them has called `create`, or else at the deadline. So a new group of the survivors can be created. That also
    /// holds for deaths of the ranks that took the place of a dead one.
    ///
    /// Raises this process's limit on open files to its hard limit.
    ///
    /// # Errors
    /// [`Error::Timeout`] naming the ranks that have not proved themselves; [`Error::PeerLost`] naming one that did and
    /// died since; [`Error::RankTaken`], [`Error::SizeDiffers`], [`Error::OtherNamespace`], [`Error::NoSuchRank`],
    /// [`Error::TooManyRanks`].
    pub fn create(id: &UniqueId, rank: Rank, size: u32, deadline: Deadline) -> Result<Self> {
        let timeout = deadline.remaining().map_or(LONGEST, to_milliseconds);
        Self::create_part(id, rank, size, timeout, None)
    }

    /// Joins a group whose members, if it is a part of another, are all known to be members of that.
    fn create_part(
        id: &UniqueId,
        rank: Rank,
        size: u32,
        timeout: Duration,
        whole: Option<Arc<Core>>,
    ) -> Result<Self> {
        if rank.0 >= size {
            return Err(Error::NoSuchRank { rank, size });
        }
        if size > MOST_RANKS {
            return Err(Error::TooManyRanks { size, limit: MOST_RANKS });
        }
        id.check_home(rank)?;
        // A rank may receive a descriptor from every other one.
        wholemem_os::descriptors::raise_limit();
        let tree = Tree::new(rank, size);
        let core = Arc::new(Core::create(id.clone(), tree)?);
        // Also a rank without children listens: if its parent dies, others find out there whether it lives.
        let acceptor = match tree.neighbours().next() {
            Some(_) => Some(Acceptor::new(listen(id, rank)?, tree, id.key(), id.has_secret())),
            None => None,
        };
        let progress = Progress::new(Arc::clone(&core), timeout, acceptor, whole);
        let thread = std::thread::Builder::new()
            .name(format!("wholemem-rank-{rank}"))
            .spawn(move || progress.run())
            .map_err(|error| OsError::Call {
                call: "clone",
                // An error without a number is that of a name with a zero byte.
                errno: Errno::from_io_error(&error).unwrap_or(Errno::INVAL),
            })?;
        let (busy, thread) = (AtomicBool::new(false), Mutex::new(Some(thread)));
        let bootstrap = Self { core, timeout: DEFAULT_TIMEOUT, busy, thread };
        bootstrap.wait_until_up(timeout)?;
        Ok(bootstrap)
    }

    fn wait_until_up(&self, timeout: Duration) -> Result<()> {
        let began = Instant::now();
        let mut state = self.core.state();
        loop {
            match &state.phase {
                Phase::Up => return Ok(()),
                Phase::Failed(error) => {
                    let error = error.clone();
                    drop(state);
                    return Err(wait_out(error, began));
                }
                Phase::Joining => {}
            }
            let left = timeout.saturating_add(GRACE).saturating_sub(began.elapsed());
            if left.is_zero() {
                return Err(Error::Timeout { missing: vec![self.core.tree.rank], timeout, joining: true });
            }
            let wait = self.core.changed.wait_timeout(state, left.min(GLANCE));
            drop(wait.unwrap_or_else(PoisonError::into_inner).0);
            if interrupt::is_interrupted() {
                return Err(Error::Aborted { by: self.core.tree.rank });
            }
            state = self.core.state();
        }
    }

    /// Makes a group of `count` ranks in this process, for ranks that are threads or devices.
    ///
    /// ```
    /// use wholemem_comm::Bootstrap;
    ///
    /// let ranks = Bootstrap::local(4)?;
    /// std::thread::scope(|scope| {
    ///     for comm in &ranks {
    ///         scope.spawn(|| {
    ///             let names = comm.all_gather(format!("rank {}", comm.rank()).as_bytes())?;
    ///             assert_eq!(names[3], b"rank 3");
    ///             comm.barrier()
    ///         });
    ///     }
    /// });
    /// # Ok::<(), wholemem_comm::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn local(count: u32) -> Result<Vec<Self>> {
        let id = UniqueId::create_private()?;
        in_threads(count, |rank| Self::create_part(&id, rank, count, DEFAULT_TIMEOUT, None))
    }

    /// This process's rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.core.tree.rank
    }

    /// How many ranks there are.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.core.tree.size
    }

    /// How long each operation waits for the other ranks.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Sets how long each operation waits for the other ranks. It should be the same on all of them.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// How many connections to other ranks there are: at most five from the start, and one more for each other rank that
    /// long messages are exchanged with.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.core.links().len() + self.core.paths().open()
    }

    /// Says whether the group still stands, without waiting.
    ///
    /// # Errors
    /// What the next operation would answer: [`Error::PeerLost`], [`Error::Aborted`], [`Error::Poisoned`],
    /// [`Error::PeerLeft`].
    pub fn check(&self) -> Result<()> {
        self.check_epoch()?;
        let state = self.core.state();
        state.group.check(state.begun + 1)
    }

    /// Ends the group for all ranks: what they are at, and whatever they call later, is [`Error::Aborted`].
    ///
    /// Works from any thread, while another is in an operation.
    pub fn abort(&self) {
        if self.core.epoch.is_current() {
            self.core.fall(Fault::Aborted(self.rank()), None);
        }
    }

    /// Leaves the group, for whoever shares the communicator with others: what they are at, and whatever they call later, is
    /// [`Error::Closed`]. The other ranks may finish what this one has finished, and nothing after that.
    ///
    /// Works from any thread, while another is in an operation.
    ///
    /// ```
    /// use wholemem_comm::{Bootstrap, Error, Rank};
    ///
    /// let ranks = Bootstrap::local(2)?;
    /// ranks[1].leave();
    /// assert_eq!(ranks[0].barrier(), Err(Error::PeerLeft { rank: Rank(1) }));
    /// assert_eq!(ranks[1].barrier(), Err(Error::Closed));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn leave(&self) {
        if !self.core.epoch.is_current() {
            // The thread is the parent's, and so is the group.
            return;
        }
        let is_news = {
            let mut state = self.core.state();
            state.stop = true;
            self.core.changed.notify_all();
            state.group.close()
        };
        self.core.wake();
        if is_news {
            self.core.notify(&Error::Closed);
        }
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread
            && thread.join().is_err()
        {
            tracing::error!(rank = %self.rank(), "the progress thread has panicked");
        }
    }

    /// Leaves the group, and says whether it still stood. Dropping it does the same without the word.
    ///
    /// # Errors
    /// As [`check`](Self::check); that others have left before is none.
    pub fn close(self) -> Result<()> {
        match self.check() {
            Err(Error::PeerLeft { .. }) => Ok(()),
            outcome => outcome,
        }
    }

    fn check_epoch(&self) -> Result<()> {
        if self.core.epoch.is_current() { Ok(()) } else { Err(Error::Forked) }
    }

    /// Begins an operation: gives it its number, if no other is under way and the group stands.
    fn begin(&self) -> Result<Turn<'_>> {
        self.check_epoch()?;
        if self.busy.swap(true, Ordering::Acquire) {
            return Err(Error::Busy);
        }
        let turn = Turn { bootstrap: self, began: Instant::now() };
        let mut state = self.core.state();
        state.group.check(state.begun + 1)?;
        state.begun += 1;
        drop(state);
        Ok(turn)
    }
}

/// The time in which one operation has the communicator for itself.
#[derive(Debug)]
struct Turn<'a> {
    pub(crate) bootstrap: &'a Bootstrap,
    pub(crate) began: Instant,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.bootstrap.busy.store(false, Ordering::Release);
    }
}

impl Drop for Bootstrap {
    fn drop(&mut self) {
        self.leave();
        // What is left of it in a child of a fork is the parent's.
        std::mem::forget(self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take());
    }
}

/// Rounds up to whole milliseconds: what is left of "in 4 s" is told as 4 s, and not as 3.999981 s.
fn to_milliseconds(left: Duration) -> Duration {
    let milliseconds = left.as_nanos().div_ceil(1_000_000);
    u64::try_from(milliseconds).map_or(LONGEST, Duration::from_millis)
}

fn listen(id: &UniqueId, rank: Rank) -> Result<PacketListener> {
    match PacketListener::bind(&id.address(rank)) {
        Err(OsError::Call { errno: Errno::ADDRINUSE, .. }) => Err(Error::RankTaken { rank }),
        outcome => Ok(outcome?),
    }
}

/// Calls `work` for each rank in a thread of its own. A panic in one of them is raised again in the caller's.
fn in_threads<T: Send>(count: u32, work: impl Fn(Rank) -> Result<T> + Sync) -> Result<Vec<T>> {
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = (0..count).map(Rank).map(|rank| scope.spawn(move || work(rank))).collect();
        // All end before the first outcome is looked at.
        let outcomes: Vec<_> = threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        outcomes
            .into_iter()
            .map(|outcome| outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "rank 1 has a defect")]
    fn a_panic_in_the_thread_of_a_rank_is_a_panic() {
        let work = |rank| if rank == Rank(1) { panic!("rank {rank} has a defect") } else { Ok(rank) };
        let outcome = in_threads(3, work);
        assert_eq!(outcome, Ok(Vec::new()), "the panic was taken for an error");
    }
}
