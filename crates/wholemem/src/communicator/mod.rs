//! The communicator: a rank's membership in a group of ranks, each with a device, that share memory and make collective calls.

mod agreement;
mod process_ranks;
mod staging;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use wholemem_comm::{Bootstrap, Rank};
use wholemem_hal::{Backend, BackendKind, Device, HostConfig, Stream};
use wholemem_os::Deadline;

pub(crate) use agreement::{CallTerms, agree, bytes_of, exchange_terms, from_text, to_text, words_of};
use process_ranks::{GroupId, ProcessRanks};
use staging::StagingPool;
pub(crate) use staging::{STAGING_LEN, Staging, lend, lend_mut};

use crate::error::{Error, Result};
use crate::kernels::RowKernels;

/// A rank's membership in a group of ranks. Each rank has one device; several ranks may share a device. Clones refer to the
/// same membership.
///
/// Ranks are processes, threads, or the devices of one process. Several ranks may share a device.
/// Collective calls (creating memory, barriers) are made by all ranks, in the same order.
///
/// ```
/// use wholemem::{Backend, Communicator, HostConfig};
///
/// // One process with four devices: one rank for each device.
/// let backend = Backend::host(HostConfig::virtual_devices(4))?;
/// let devices: Vec<_> = (0..4).map(|id| backend.device(id)).collect::<Result<_, _>>()?;
/// let comms = Communicator::local(&devices)?;
/// let ranks = Communicator::on_each(&comms, |comm| Ok(comm.rank().0))?;
/// assert_eq!(ranks, [0, 1, 2, 3]);
/// # Ok::<(), wholemem::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Communicator {
    core: Arc<CommunicatorState>,
}

#[derive(Debug)]
struct CommunicatorState {
    bootstrap: Bootstrap,
    device: Device,
    /// The device on which this rank's host memory is allocated: its own device if that is a host device.
    host_device: Device,
    kernels: RowKernels,
    process_ranks: Arc<ProcessRanks>,
    /// The number of shared memories that this rank has started to create.
    memories: AtomicU64,
    staging: StagingPool,
}

impl Communicator {
    /// Joins the ranks that a launcher started (`wholemem launch`, torchrun, srun, mpirun), on the device that
    /// [`choose_device`](Self::choose_device) chooses. Collective.
    ///
    /// ```no_run
    /// use wholemem::{Backend, Communicator};
    ///
    /// // wholemem launch -n 4 -- ./my_program
    /// let comm = Communicator::from_env(&Backend::auto()?)?;
    /// # Ok::<(), wholemem::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Bootstrap::from_env`], [`choose_device`](Self::choose_device) and [`create`](Self::create).
    pub fn from_env(backend: &Backend) -> Result<Self> {
        let bootstrap = Bootstrap::from_env()?;
        let device = Self::choose_device(backend, &bootstrap)?;
        Self::create(bootstrap, &device)
    }

    /// Creates a communicator from a bootstrap group. Collective; `device` is this rank's device.
    ///
    /// # Errors
    /// [`Error::OnRank`] if a device cannot load the kernels; [`Error::Comm`], also if rank 0 sends a malformed group id.
    pub fn create(bootstrap: Bootstrap, device: &Device) -> Result<Self> {
        let id = bootstrap.broadcast(Rank(0), &GroupId::random().0)?;
        let id = GroupId::from_bytes(&id)?;
        let process_ranks = ProcessRanks::join(id, bootstrap.rank(), device);
        // When `agree` below returns, all ranks of this process are registered in `ProcessRanks`.
        let loaded = RowKernels::load(device).and_then(|kernels| Ok((kernels, host_device(device)?)));
        let (kernels, host_device) = agree(&bootstrap, loaded)?;
        let (device, memories) = (device.clone(), AtomicU64::new(0));
        let staging = StagingPool::default();
        tracing::debug!(
            target: "wholemem::communicator",
            rank = %bootstrap.rank(),
            ranks = bootstrap.size(),
            device = %device.label(),
            name = device.info().name,
            host_memory = host_device.info().name,
            timeout = ?bootstrap.timeout(),
            "created a communicator",
        );
        let core =
            CommunicatorState { bootstrap, device, host_device, kernels, process_ranks, memories, staging };
        Ok(Self { core: Arc::new(core) })
    }

    /// Chooses the device of a rank that is a process: the device whose number is the
    /// [local rank](Bootstrap::local_rank_from_env), or the rank if the launcher sets no local rank, modulo the number of visible
    /// devices.
    ///
    /// # Errors
    /// [`Error::Comm`] if the launcher's variable is not a number; [`Error::Hal`] if there is no device.
    pub fn choose_device(backend: &Backend, bootstrap: &Bootstrap) -> Result<Device> {
        let number = Bootstrap::local_rank_from_env()?.unwrap_or_else(|| bootstrap.rank().0);
        let visible =
            u32::try_from(backend.devices().len()).expect("the number of devices is a `u32`").max(1);
        Ok(backend.device(number % visible)?)
    }

    /// Creates a group within this process, with one rank for each device. Use each rank in a separate thread, or call
    /// [`on_each`](Self::on_each).
    ///
    /// # Errors
    /// As [`create`](Self::create).
    #[doc(alias = "WmspMalloc")]
    pub fn local(devices: &[Device]) -> Result<Vec<Self>> {
        let count = u32::try_from(devices.len()).expect("the number of devices is a `u32`");
        if count == 0 {
            return Err(Error::NoRanks);
        }
        let members: Vec<_> = Bootstrap::local(count)?.into_iter().zip(devices).collect();
        in_threads(members, |(bootstrap, device)| Self::create(bootstrap, device))
    }

    /// Splits the group: the ranks with the same color form a new group, ordered by key, and by rank if keys are equal. A rank
    /// without a color makes the call too, and gets `None`. Collective. Every rank keeps its device.
    ///
    /// ```
    /// use wholemem::Communicator;
    ///
    /// let pairs = Communicator::run_local(4, |comm| {
    ///     let half = comm.rank().0 / 2;
    ///     // In reverse order.
    ///     let pair = comm.split(Some(half), 9 - comm.rank().0)?.expect("every rank has a color");
    ///     Ok((half, pair.rank().0, pair.size()))
    /// })?;
    /// assert_eq!(pairs, [(0, 1, 2), (0, 0, 2), (1, 1, 2), (1, 0, 2)]);
    /// # Ok::<(), wholemem::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Bootstrap::split`] and [`create`](Self::create).
    #[doc(alias = "ncclCommSplit")]
    pub fn split(&self, color: Option<u32>, key: u32) -> Result<Option<Self>> {
        let part = self.core.bootstrap.split(color, key)?;
        part.map(|part| Self::create(part, self.device())).transpose()
    }

    /// Calls `work` for each rank of `ranks` in its own thread, because collective calls need a thread for each rank of a
    /// process.
    ///
    /// # Errors
    /// The error of the lowest rank that failed.
    pub fn on_each<T: Send>(ranks: &[Self], work: impl Fn(&Self) -> Result<T> + Sync) -> Result<Vec<T>> {
        in_threads(ranks.iter().collect(), work)
    }

    /// Runs `work` on `ranks` ranks that are threads of this process, and returns the results in the order of ranks. The devices
    /// are those of [`Backend::auto`]: rank `n` has device `n`, modulo the number of devices.
    ///
    /// ```
    /// use wholemem::Communicator;
    ///
    /// let ranks = Communicator::run_local(4, |comm| Ok(comm.rank().0))?;
    /// assert_eq!(ranks, [0, 1, 2, 3]);
    /// # Ok::<(), wholemem::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NoRanks`], [`Error::Hal`], as [`create`](Self::create), and the error of the lowest rank whose `work` failed.
    pub fn run_local<T: Send>(ranks: u32, work: impl Fn(&Self) -> Result<T> + Sync) -> Result<Vec<T>> {
        let backend = Backend::auto()?;
        let visible =
            u32::try_from(backend.devices().len()).expect("the number of devices is a `u32`").max(1);
        let devices = (0..ranks).map(|rank| backend.device(rank % visible)).collect::<Result<Vec<_>, _>>()?;
        Self::on_each(&Self::local(&devices)?, work)
    }

    /// Returns the number of this rank in its group.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.core.bootstrap.rank()
    }

    /// Returns the number of ranks in the group.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.core.bootstrap.size()
    }

    /// Returns this rank's device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.core.device
    }

    /// Returns a number for a shared memory of this rank that no earlier memory has.
    pub(crate) fn next_memory(&self) -> u64 {
        self.core.memories.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the connection to the other ranks, which transfers bytes and file descriptors and needs no device.
    #[must_use]
    pub fn bootstrap(&self) -> &Bootstrap {
        &self.core.bootstrap
    }

    /// Waits until all ranks have called `barrier`. After the barrier, every rank sees the data that blocking calls of any rank,
    /// such as [`scatter`](crate::WholeTensor::scatter), wrote before the barrier. Collective.
    ///
    /// It does not wait for work that was enqueued on streams: [`barrier_on`](Self::barrier_on) does.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn barrier(&self) -> Result<()> {
        Ok(self.core.bootstrap.barrier()?)
    }

    /// Orders work between ranks: work that any rank enqueues after the barrier runs after the work that all ranks enqueued
    /// before it. A gather after the barrier sees every scatter of any rank before it. Collective. Blocks until the work of
    /// `stream` has ended and all ranks have called `barrier_on`.
    ///
    /// # Errors
    /// [`Error::Hal`] if the work failed or the stream is being captured; [`Error::Comm`].
    pub fn barrier_on(&self, stream: &Stream) -> Result<()> {
        let waited = stream.synchronize(Deadline::NEVER);
        // A rank whose work failed enters the barrier too. Otherwise the other ranks would wait until the timeout.
        self.core.bootstrap.barrier()?;
        Ok(waited?)
    }

    /// Calls `work` with a stream and staging buffers that no other call uses at the same time.
    pub(crate) fn with_staging<T>(&self, work: impl FnOnce(&mut Staging) -> Result<T>) -> Result<T> {
        self.core.staging.with(&self.core.device, work)
    }

    /// Returns the device on which this rank's host memory is allocated.
    pub(crate) fn host_device(&self) -> &Device {
        &self.core.host_device
    }

    pub(crate) fn kernels(&self) -> &RowKernels {
        &self.core.kernels
    }

    pub(crate) fn process_ranks(&self) -> &Arc<ProcessRanks> {
        &self.core.process_ranks
    }
}

/// Returns the device on which a rank with the given device allocates host memory: on the NUMA node that is nearest to a GPU.
fn host_device(device: &Device) -> Result<Device> {
    if device.backend().kind() == BackendKind::Host {
        return Ok(device.clone());
    }
    // If the node is not known, memory is allocated near the thread that allocates it.
    let config = device.info().numa_node.map_or_else(|| HostConfig::virtual_devices(1), HostConfig::on_node);
    Ok(Backend::host(config)?.device(0)?)
}

/// Runs `work` on each item, each in its own thread, and returns the results in the order of the items.
fn in_threads<I: Send, T: Send>(items: Vec<I>, work: impl Fn(I) -> Result<T> + Sync) -> Result<Vec<T>> {
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = items.into_iter().map(|item| scope.spawn(move || work(item))).collect();
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
    fn local_ranks_are_assigned_devices_round_robin() {
        let count = u32::try_from(Backend::auto().unwrap().devices().len()).unwrap();
        let devices = Communicator::run_local(count + 1, |comm| {
            comm.barrier()?;
            Ok((comm.rank().0, comm.size(), comm.device().id().0))
        });
        let expected: Vec<_> = (0..=count).map(|rank| (rank, count + 1, rank % count)).collect();
        assert_eq!(devices.unwrap(), expected);
        assert_eq!(Communicator::run_local(0, |_| Ok(())), Err(Error::NoRanks));
        let failed = Communicator::run_local(2, |comm| match comm.rank() {
            Rank(0) => Ok(()),
            _ => Err(Error::Interrupted),
        });
        assert_eq!(failed, Err(Error::Interrupted));
    }

    /// Here rank 0 broadcasts a group id of an invalid length.
    #[test]
    fn a_malformed_group_id_is_an_error() {
        let [first, second] = <[_; 2]>::try_from(Bootstrap::local(2).unwrap()).unwrap();
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let outcome = std::thread::scope(|scope| {
            scope.spawn(|| first.broadcast(Rank(0), &[1; 15]).unwrap());
            Communicator::create(second, &device).map(drop)
        });
        let what = "the id of its group has an invalid length";
        let broken = wholemem_comm::Error::Protocol { rank: Rank(0), what };
        assert_eq!(outcome, Err(Error::Comm(broken)));
    }
}
