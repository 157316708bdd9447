//! Ranks that have devices: those among whom a memory is divided.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use wholemem_comm::{Communicator, Rank};
use wholemem_hal::{Backend, BackendKind, Device, HostConfig, Stream};
use wholemem_os::Deadline;

use crate::house::{House, Nonce};
use crate::ops::Kernels;
use crate::verdict::agree;
use crate::{Error, Location, Result};

/// A rank's membership in a group of ranks, each with a device. Clones are the same membership.
///
/// Ranks may be processes, threads, or the devices of one process, and several of them may share a device.
/// Whatever makes, frees or orders memory among them is called on all of them, in the same order.
///
/// ```
/// use wholemem::Group;
/// use wholemem_hal::{Backend, HostConfig};
///
/// // One process with four devices: a rank each.
/// let backend = Backend::host(HostConfig::virtual_devices(4))?;
/// let devices: Vec<_> = (0..4).map(|id| backend.device(id)).collect::<Result<_, _>>()?;
/// let groups = Group::local(&devices)?;
/// let ranks = Group::on_each(&groups, |group| Ok(group.rank().0))?;
/// assert_eq!(ranks, [0, 1, 2, 3]);
/// # Ok::<(), wholemem::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Group {
    core: Arc<GroupCore>,
}

#[derive(Debug)]
struct GroupCore {
    comm: Communicator,
    device: Device,
    /// Where this rank's host memory is made: another backend's device, unless the rank's own is the machine itself.
    machine: Device,
    kernels: Kernels,
    house: Arc<House>,
    /// How many memories were tried to be made.
    memories: AtomicU64,
}

impl Group {
    /// Makes a group of the ranks of a communicator. Collective; `device` is this rank's own.
    ///
    /// ```no_run
    /// use wholemem::{Communicator, Group};
    /// use wholemem_hal::Backend;
    ///
    /// // wholemem launch -n 4 -- ./my_program
    /// let comm = Communicator::from_env()?;
    /// let device = Group::choose_device(&Backend::auto()?, &comm)?;
    /// let group = Group::create(comm, &device)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::OnRank`] where a device cannot load the kernels; [`Error::Comm`], also where rank 0 tells no valid nonce.
    pub fn create(comm: Communicator, device: &Device) -> Result<Self> {
        let nonce = comm.broadcast(Rank(0), &Nonce::fresh().0)?;
        let nonce = Nonce::from_bytes(&nonce)?;
        let house = House::enter(nonce, comm.rank(), device);
        // All have entered when all have voted.
        let (kernels, machine) =
            agree(&comm, Kernels::load(device).and_then(|kernels| Ok((kernels, machine(device)?))))?;
        let (device, memories) = (device.clone(), AtomicU64::new(0));
        Ok(Self { core: Arc::new(GroupCore { comm, device, machine, kernels, house, memories }) })
    }

    /// The device for a rank that is a process: the number is that of the process among those of its node, as its
    /// [launcher](Communicator::local_rank_from_env) has set it, else its rank, modulo the number of visible devices.
    ///
    /// # Errors
    /// [`Error::Comm`] where the launcher's variable is no number; [`Error::Hal`] where there is no device.
    pub fn choose_device(backend: &Backend, comm: &Communicator) -> Result<Device> {
        let number = Communicator::local_rank_from_env()?.unwrap_or_else(|| comm.rank().0);
        let visible = u32::try_from(backend.devices().len()).unwrap_or(u32::MAX).max(1);
        Ok(backend.device(number % visible)?)
    }

    /// Makes a group within this process: a rank for each device. They may be used by a thread each, or
    /// [together](Self::on_each).
    ///
    /// # Errors
    /// As [`create`](Self::create).
    #[doc(alias = "WmspMalloc")]
    pub fn local(devices: &[Device]) -> Result<Vec<Self>> {
        let count = u32::try_from(devices.len()).unwrap_or(u32::MAX);
        if count == 0 {
            return Err(Error::NoRanks);
        }
        let members: Vec<_> = Communicator::local(count)?.into_iter().zip(devices).collect();
        in_threads(members, |(comm, device)| Self::create(comm, device))
    }

    /// Calls `work` for each of these ranks, all at once: what a collective call needs where one process has several.
    ///
    /// # Errors
    /// The first rank's of those that failed.
    pub fn on_each<T: Send>(groups: &[Self], work: impl Fn(&Self) -> Result<T> + Sync) -> Result<Vec<T>> {
        in_threads(groups.iter().collect(), work)
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.core.comm.rank()
    }

    /// How many ranks there are.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.core.comm.size()
    }

    /// This rank's device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.core.device
    }

    /// A number that no memory of this rank in the group has had.
    pub(crate) fn next_memory(&self) -> u64 {
        self.core.memories.fetch_add(1, Ordering::Relaxed)
    }

    /// What the ranks talk through.
    #[must_use]
    pub fn communicator(&self) -> &Communicator {
        &self.core.comm
    }

    /// Makes what the ranks enqueue from here on come after what all of them have enqueued so far: a gather behind it
    /// sees every scatter before it, on whichever rank, and no other. Collective; it waits for the work of `stream`, and
    /// for all ranks.
    ///
    /// # Errors
    /// [`Error::Hal`] when the work failed, or the stream is being captured; [`Error::Comm`].
    pub fn barrier(&self, stream: &Stream) -> Result<()> {
        let waited = stream.synchronize(Deadline::NEVER);
        // A rank whose work failed comes all the same: the others do not wait for it in vain.
        self.core.comm.barrier()?;
        Ok(waited?)
    }

    /// The device on which memory of `location` is made.
    pub(crate) fn device_of(&self, location: Location) -> &Device {
        match location {
            Location::Device => &self.core.device,
            Location::Host => &self.core.machine,
        }
    }

    pub(crate) fn kernels(&self) -> &Kernels {
        &self.core.kernels
    }

    pub(crate) fn house(&self) -> &Arc<House> {
        &self.core.house
    }
}

/// The device that stands for the machine's own memory.
fn machine(device: &Device) -> Result<Device> {
    if device.backend().kind() == BackendKind::Host {
        return Ok(device.clone());
    }
    Ok(Backend::host(HostConfig::default())?.device(0)?)
}

/// Runs `work` on each item in a thread of its own.
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

    /// The first rank of the group runs something else, and tells a number of another length.
    #[test]
    fn a_malformed_group_nonce_is_an_error_and_not_zeros() {
        let [first, second] = <[_; 2]>::try_from(Communicator::local(2).unwrap()).unwrap();
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let outcome = std::thread::scope(|scope| {
            scope.spawn(|| first.broadcast(Rank(0), &[1; 15]).unwrap());
            Group::create(second, &device).map(drop)
        });
        let what = "the nonce of its group has another length";
        let broken = wholemem_comm::Error::Protocol { rank: Rank(0), what };
        assert_eq!(outcome, Err(Error::Comm(broken)));
    }
}
