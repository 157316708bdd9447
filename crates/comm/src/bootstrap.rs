//! [`Bootstrap`]: a rank's membership in a group: creating, joining and leaving it.
//!
//! | module | description |
//! |---|---|
//! | [`collective`] | barrier, broadcast, all_gather, all_to_all and agree |
//! | [`descriptors`] | all_gather_fds |
//! | [`split`] | groups of some of the ranks of a group |
//! | [`env`](mod@env) | from_env: joins the group that a launcher describes in the environment |
//! | [`nodes`] | groups on several nodes |
//! | [`watch`] | callbacks for the failure of a group |

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use wholemem_os::packet::PacketListener;
use wholemem_os::{Deadline, Errno, Error as OsError, interrupt};

use crate::core::{GroupPhase, RankCore};
use crate::fault::GroupFault;
use crate::handshake::Acceptor;
use crate::network::Network;
use crate::operation::Operation;
use crate::progress::ProgressThread;
use crate::rank::Tree;
use crate::{Error, Rank, Result, UniqueId};

mod collective;
mod descriptors;
mod env;
mod nodes;
mod split;
mod watch;

pub use self::collective::VoteResult;
pub use self::watch::FailureWatch;

use self::collective::{WAIT_SLICE, wait_remaining_timeout};

/// The default timeout of an operation; see [`Bootstrap::set_timeout`].
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

/// The maximum number of ranks in a group. A larger requested group size is an error at once, instead of a timeout.
const MAX_RANKS: u32 = 1 << 16;

/// The timeout for joining a group if the caller's deadline never passes: ten years.
const MAX_TIMEOUT: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// The extra time for which a joining caller waits after its timeout, so that a defect of the progress thread does not
/// make the caller hang.
const GRACE: Duration = Duration::from_secs(5);

/// One rank's membership in a group.
///
/// Operations are collective: all ranks call the same operations in the same order. If they do not, or if arguments
/// differ that must be equal (the root of a broadcast, the length of the parts of `all_to_all`), every rank that makes a
/// call gets [`Error::RanksDisagree`]; only a rank that makes no call at all is a timeout. Each operation returns the
/// result, or an error that names the rank at fault; an error that [poisons](Error::poisons) ends the group. An operation fails
/// when its timeout expires, and not before; it may take up to a second longer, in which the ranks inform each other
/// which rank is missing. Dropping the value leaves the group: the other ranks can finish the operations that this
/// rank has finished, and no later ones.
#[derive(Debug)]
pub struct Bootstrap {
    pub(crate) core: Arc<RankCore>,
    pub(crate) timeout: Duration,
    /// True while an operation of this communicator is in progress.
    busy: AtomicBool,
    /// The join handle of the communicator's progress thread, until this rank leaves the group.
    thread: Mutex<Option<JoinHandle<()>>>,
    /// How the nodes reach each other, if the group was created over several.
    network: Option<Network>,
}

impl Bootstrap {
    /// Joins the group of `id` as `rank` of `size`, and returns when all ranks have joined. If ranks are missing, the
    /// call fails when the deadline passes, at most half a second later.
    ///
    /// If ranks die after others have joined them, all survivors get [`Error::PeerLost`] within a second of each
    /// other: when the last of them has called `create`, or else at the deadline. So the survivors can create a new
    /// group. This also holds for deaths of ranks that took the position of a dead rank.
    ///
    /// Raises this process's soft limit on open files to the hard limit.
    ///
    /// # Errors
    /// [`Error::Timeout`] with the ranks that were not authenticated; [`Error::PeerLost`] with a rank that was and
    /// died since; [`Error::RankTaken`], [`Error::SizeDiffers`], [`Error::OtherNamespace`], [`Error::NoSuchRank`],
    /// [`Error::TooManyRanks`].
    pub fn create(id: &UniqueId, rank: Rank, size: u32, deadline: Deadline) -> Result<Self> {
        let timeout = deadline.remaining().map_or(MAX_TIMEOUT, to_milliseconds);
        Self::create_part(id, rank, size, timeout, None)
    }

    /// Joins a group. If the group is split from another group, `split_from` is that original group, which contains all
    /// members of the new group.
    fn create_part(
        id: &UniqueId,
        rank: Rank,
        size: u32,
        timeout: Duration,
        split_from: Option<Arc<RankCore>>,
    ) -> Result<Self> {
        if rank.0 >= size {
            return Err(Error::NoSuchRank { rank, size });
        }
        if size > MAX_RANKS {
            return Err(Error::TooManyRanks { size, limit: MAX_RANKS });
        }
        id.check_location(rank)?;
        // The limit on open files is raised, because a rank may receive file descriptors from every other rank of the group.
        wholemem_os::descriptors::raise_limit();
        let tree = Tree::new(rank, size);
        let core = Arc::new(RankCore::create(id.clone(), tree)?);
        // A rank without children listens too: if its parent dies, other ranks connect to its address to check whether
        // the rank lives.
        let acceptor = match tree.neighbours().next() {
            Some(_) => Some(Acceptor::new(listen(id, rank)?, tree, id.key(), id.has_secret())),
            None => None,
        };
        let is_split = split_from.is_some();
        let progress = ProgressThread::new(Arc::clone(&core), timeout, acceptor, split_from);
        let thread = std::thread::Builder::new()
            .name(format!("wholemem-rank-{rank}"))
            .spawn(move || progress.run())
            .map_err(|error| OsError::Call {
                call: "clone",
                // If starting a thread fails without an errno, the thread name contains a zero byte.
                errno: Errno::from_io_error(&error).unwrap_or(Errno::INVAL),
            })?;
        let (busy, thread) = (AtomicBool::new(false), Mutex::new(Some(thread)));
        let bootstrap = Self { core, timeout: DEFAULT_TIMEOUT, busy, thread, network: None };
        bootstrap.wait_until_ready(timeout)?;
        tracing::debug!(%rank, ranks = size, ?timeout, is_split, "joined a group");
        Ok(bootstrap)
    }

    fn wait_until_ready(&self, timeout: Duration) -> Result<()> {
        let began = Instant::now();
        let mut state = self.core.state();
        loop {
            match &state.phase {
                GroupPhase::Ready => return Ok(()),
                GroupPhase::Failed(error) => {
                    let error = error.clone();
                    drop(state);
                    return Err(wait_remaining_timeout(error, began));
                }
                GroupPhase::Joining => {}
            }
            let left = timeout.saturating_add(GRACE).saturating_sub(began.elapsed());
            if left.is_zero() {
                return Err(Error::Timeout { missing: vec![self.core.tree.rank], timeout, joining: true });
            }
            let wait = self.core.changed.wait_timeout(state, left.min(WAIT_SLICE));
            drop(wait.unwrap_or_else(PoisonError::into_inner).0);
            if interrupt::is_interrupted() {
                return Err(Error::Aborted { by: self.core.tree.rank });
            }
            state = self.core.state();
        }
    }

    /// Creates a group of `count` ranks in this process, for ranks that are threads or devices.
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

    /// Returns the rank of this process.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.core.tree.rank
    }

    /// Returns the number of ranks in the group.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.core.tree.size
    }

    /// Returns the time for which each operation waits for the other ranks.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Sets the time for which each operation waits for the other ranks. All ranks should set the same timeout.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Returns the number of connections of this rank to other ranks: at most five initially, and one more for each
    /// other rank with which it has exchanged long messages.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.core.links().len() + self.core.paths().open()
    }

    /// Checks without waiting whether the group is usable.
    ///
    /// # Errors
    /// The error of the next operation: [`Error::PeerLost`], [`Error::Aborted`], [`Error::Poisoned`],
    /// [`Error::PeerLeft`], [`Error::RanksDisagree`], [`Error::Protocol`], [`Error::Closed`] or [`Error::Forked`].
    pub fn check(&self) -> Result<()> {
        self.check_epoch()?;
        let state = self.core.state();
        state.group.check(state.begun + 1)
    }

    /// Ends the group for all ranks: their current and later operations fail with [`Error::Aborted`].
    ///
    /// It can be called from any thread, also while another thread is in an operation.
    pub fn abort(&self) {
        if self.core.epoch.is_current() {
            self.core.fail_group(GroupFault::Aborted(self.rank()), None);
        }
    }

    /// Leaves the group while other threads may still hold the communicator: their current and later operations fail
    /// with [`Error::Closed`]. The other ranks can finish the operations that this rank has finished, and no later
    /// ones.
    ///
    /// It can be called from any thread, also while another thread is in an operation.
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
            // In a forked child, the progress thread and the membership in the group belong to the parent process.
            return;
        }
        let is_new = {
            let mut state = self.core.state();
            state.stop = true;
            self.core.changed.notify_all();
            state.group.close()
        };
        self.core.wake();
        if is_new {
            self.core.notify(&Error::Closed);
        }
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread
            && thread.join().is_err()
        {
            tracing::error!(rank = %self.rank(), "the progress thread has panicked");
        }
    }

    /// Leaves the group, and returns an error if the group was no longer usable. Dropping the communicator also leaves
    /// the group.
    ///
    /// # Errors
    /// As [`check`](Self::check), except that it is not an error if other ranks left before.
    pub fn close(self) -> Result<()> {
        match self.check() {
            Err(Error::PeerLeft { .. }) => Ok(()),
            outcome => outcome,
        }
    }

    fn check_epoch(&self) -> Result<()> {
        if self.core.epoch.is_current() { Ok(()) } else { Err(Error::Forked) }
    }

    /// Begins an operation: assigns a number to the operation, if no other operation is in progress and the group is
    /// usable.
    fn begin(&self, operation: Operation) -> Result<OperationGuard<'_>> {
        self.check_epoch()?;
        if self.busy.swap(true, Ordering::Acquire) {
            return Err(Error::Busy);
        }
        let guard = OperationGuard { bootstrap: self, operation, began: Instant::now() };
        let mut state = self.core.state();
        let op = state.begun + 1;
        state.group.begin(op, operation)?;
        state.begun = op;
        drop(state);
        Ok(guard)
    }
}

/// Exclusive use of the communicator by one operation.
#[derive(Debug)]
struct OperationGuard<'a> {
    pub(crate) bootstrap: &'a Bootstrap,
    /// The call, which all messages of its steps contain.
    pub(crate) operation: Operation,
    pub(crate) began: Instant,
}

impl Drop for OperationGuard<'_> {
    fn drop(&mut self) {
        self.bootstrap.busy.store(false, Ordering::Release);
    }
}

impl Drop for Bootstrap {
    fn drop(&mut self) {
        self.leave();
        // In a forked child, the progress thread belongs to the parent process and cannot be joined.
        std::mem::forget(self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take());
    }
}

/// Rounds a duration up to whole milliseconds, so that an error message shows 4 s and not 3.999981 s.
fn to_milliseconds(left: Duration) -> Duration {
    let milliseconds = left.as_nanos().div_ceil(1_000_000);
    u64::try_from(milliseconds).map_or(MAX_TIMEOUT, Duration::from_millis)
}

fn listen(id: &UniqueId, rank: Rank) -> Result<PacketListener> {
    match PacketListener::bind(&id.address(rank)) {
        Err(OsError::Call { errno: Errno::ADDRINUSE, .. }) => Err(Error::RankTaken { rank }),
        outcome => Ok(outcome?),
    }
}

/// Calls `work` for each rank in a thread of its own. If one of the threads panics, the calling thread resumes the
/// panic.
fn in_threads<T: Send>(count: u32, work: impl Fn(Rank) -> Result<T> + Sync) -> Result<Vec<T>> {
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = (0..count).map(Rank).map(|rank| scope.spawn(move || work(rank))).collect();
        // All threads are joined before the result of the first thread is examined.
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
    fn a_panic_in_the_thread_of_a_rank_is_resumed_in_the_caller() {
        let work = |rank| if rank == Rank(1) { panic!("rank {rank} has a defect") } else { Ok(rank) };
        let outcome = in_threads(3, work);
        assert_eq!(outcome, Ok(Vec::new()), "the panic was not resumed");
    }
}
