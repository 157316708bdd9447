//! Groups on several nodes: creating one, and which rank is on which node.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use wholemem_os::robust::LivenessLock;
use wholemem_os::{Deadline, Errno, Error as OsError, interrupt};

use super::collective::{WAIT_SLICE, wait_remaining_timeout};
use super::{DEFAULT_TIMEOUT, GRACE, MAX_RANKS, MAX_TIMEOUT, to_milliseconds};
use crate::core::{GroupPhase, RankCore};
use crate::network::Network;
use crate::progress::ProgressThread;
use crate::progress::assemble::{JoinRequest, assemble};
use crate::{Bootstrap, Error, Rank, Result, UniqueId};

impl Bootstrap {
    /// Joins the group of `id` as `rank` of `size`, as [`create`](Self::create) does, if the ranks are on several nodes.
    /// Ranks of one node find each other by Unix sockets, and pass each other descriptors: only ranks that can do so are on
    /// the same node. Nodes are connected by TCP.
    ///
    /// ```
    /// use std::net::TcpListener;
    /// use std::time::Duration;
    /// use wholemem_comm::{Bootstrap, Network, Rank, UniqueId};
    /// use wholemem_os::Deadline;
    ///
    /// // Two threads that use different directories for their sockets are on different nodes.
    /// let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    /// let network = Network::new(listener.local_addr().unwrap()).with_listener(listener);
    /// let folder = tempfile::tempdir().unwrap();
    /// let id = UniqueId::create()?;
    /// std::thread::scope(|scope| {
    ///     for rank in 0..2 {
    ///         let network = network.clone().with_socket_dir(&folder.path().join(rank.to_string()));
    ///         let id = &id;
    ///         scope.spawn(move || {
    ///             let deadline = Deadline::after(Duration::from_secs(30));
    ///             let comm = Bootstrap::create_over(&network, id, Rank(rank), 2, deadline)?;
    ///             assert_eq!((comm.nodes(), comm.node_of(Rank(1))), (2, Some(1)));
    ///             comm.barrier()
    ///         });
    ///     }
    /// });
    /// # Ok::<(), wholemem_comm::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`create`](Self::create); [`Error::NoSecret`]; the errors of the sockets. If rank 0 dies, ranks that have joined
    /// get [`Error::PeerLost`], and ranks that start later get [`Error::Timeout`].
    pub fn create_over(
        network: &Network,
        id: &UniqueId,
        rank: Rank,
        size: u32,
        deadline: Deadline,
    ) -> Result<Self> {
        let timeout = deadline.remaining().map_or(MAX_TIMEOUT, to_milliseconds);
        Self::create_part_over(network, id, rank, size, timeout, None)
    }

    /// Joins a group on several nodes. If the group is split from another group, `split_from` is that original group.
    pub(super) fn create_part_over(
        network: &Network,
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
        if !id.has_secret() {
            return Err(Error::NoSecret);
        }
        let id = network.local_id(id)?;
        wholemem_os::descriptors::raise_limit();
        let (sender, receiver) = channel();
        let stop = Arc::new(AtomicBool::new(false));
        let request = JoinRequest { id: id.clone(), network: network.clone(), rank, size, timeout };
        let (stopped, liveness) = (Arc::clone(&stop), LivenessLock::create()?);
        let join = move || {
            let guard = liveness.acquire()?;
            let check = || {
                split_from.as_ref().map_or(Ok(()), |group| group.state().group.error().map_or(Ok(()), Err))
            };
            let assembled = assemble(&request, &liveness, &stopped, check)?;
            let core = RankCore::with_liveness(request.id, assembled.topology.clone(), liveness)?;
            core.state().phase = GroupPhase::Ready;
            Ok((guard, Arc::new(core), assembled))
        };
        let thread = std::thread::Builder::new()
            .name(format!("wholemem-rank-{rank}"))
            .spawn(move || match join() {
                Ok((guard, core, assembled)) => {
                    let progress = ProgressThread::over_nodes(Arc::clone(&core), assembled);
                    // The receiver is gone if the caller was interrupted: then this rank leaves at once.
                    if sender.send(Ok(Arc::clone(&core))).is_err() {
                        core.state().stop = true;
                    }
                    progress.run_holding(guard);
                }
                Err(error) => drop(sender.send(Err(error))),
            })
            .map_err(|error| OsError::Call {
                call: "clone",
                // If starting a thread fails without an errno, the thread name contains a zero byte.
                errno: Errno::from_io_error(&error).unwrap_or(Errno::INVAL),
            })?;
        let began = Instant::now();
        let core = loop {
            match receiver.recv_timeout(WAIT_SLICE) {
                Ok(Ok(core)) => break core,
                Ok(Err(error)) => {
                    let _ = thread.join();
                    return Err(wait_remaining_timeout(error, began));
                }
                Err(RecvTimeoutError::Timeout) if interrupt::is_interrupted() => {
                    stop.store(true, Ordering::Relaxed);
                    return Err(Error::Aborted { by: rank });
                }
                Err(RecvTimeoutError::Timeout) if began.elapsed() < timeout.saturating_add(GRACE) => {}
                // The thread has a defect: it has panicked, or it hangs.
                Err(_) => {
                    stop.store(true, Ordering::Relaxed);
                    return Err(Error::Timeout { missing: vec![rank], timeout, joining: true });
                }
            }
        };
        let nodes = core.tree.nodes();
        tracing::debug!(%rank, ranks = size, nodes, ?timeout, "joined a group on several nodes");
        let (busy, thread) = (AtomicBool::new(false), Mutex::new(Some(thread)));
        Ok(Self { core, timeout: DEFAULT_TIMEOUT, busy, thread, network: Some(network.clone()) })
    }

    /// Returns the number of nodes of the group: 1, unless it was created with [`create_over`](Self::create_over).
    #[must_use]
    pub fn nodes(&self) -> u32 {
        self.core.tree.nodes()
    }

    /// Returns the number of the node of a rank, or `None` if the group has no such rank. Rank 0 is on node 0; the other
    /// nodes are numbered in the order of their lowest ranks.
    #[must_use]
    pub fn node_of(&self, rank: Rank) -> Option<u32> {
        (rank.0 < self.size()).then(|| self.core.tree.node_of(rank))
    }

    /// Returns an error if the group is on several nodes, for operations that need memory or descriptors of all ranks.
    ///
    /// # Errors
    /// [`Error::AcrossNodes`]. `what` is what cannot be done over several nodes, such as `share memory`.
    pub fn require_one_node(&self, what: &'static str) -> Result<()> {
        match self.nodes() {
            1 => Ok(()),
            nodes => Err(Error::AcrossNodes { what, nodes }),
        }
    }
}
