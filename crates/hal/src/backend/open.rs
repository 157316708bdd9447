//! A backend, opened: its devices, and what it still has to give back.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use wholemem_os::ForkEpoch;

use super::{Device, Drain, Retired, Teardown};
use crate::raw::{Address, RawMemory, RawQueue};
use crate::{
    AllocationSpec, Attempt, BackendKind, Capability, Cause, DeviceId, DeviceInfo, DeviceLabel, Error, Fact,
    Granularity, HostConfig, Proof, Result, cuda, host,
};

/// An open backend. Clones are the same backend; memory of one opening cannot be mixed with memory of another.
///
/// ```
/// use wholemem_hal::{Backend, BackendKind};
///
/// let backend = Backend::auto()?;
/// for device in backend.devices() {
///     println!("{} has {} bytes", device.name, device.memory_len);
/// }
/// # Ok::<(), wholemem_hal::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Backend {
    core: Arc<Core>,
}

impl PartialEq for Backend {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.core, &other.core)
    }
}

impl Eq for Backend {}

#[derive(Debug)]
struct Core {
    memory: Arc<dyn RawMemory>,
    queue: Arc<dyn RawQueue>,
    epoch: ForkEpoch,
    retired: Mutex<Vec<Retired>>,
    proofs: Mutex<HashMap<(DeviceId, Capability), Proof>>,
}

impl Backend {
    /// The best backend this machine has: CUDA where it works, otherwise the host.
    ///
    /// # Errors
    /// [`Error::Failed`] when not even the host backend can be opened.
    pub fn auto() -> Result<Self> {
        Self::open(BackendKind::Cuda).or_else(|_| Self::open(BackendKind::Host))
    }

    /// One backend, as this machine has it.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with the reason.
    pub fn open(kind: BackendKind) -> Result<Self> {
        match kind {
            BackendKind::Host => Self::host(HostConfig::default()),
            BackendKind::Cuda => {
                let (memory, queue) = cuda::open()?;
                Self::from_raw(Arc::new(memory), Arc::new(queue))
            }
        }
    }

    /// The host backend, with devices and granule of one's choice.
    ///
    /// # Errors
    /// [`Error::BadConfig`]; [`Error::Failed`] when the machine's memory cannot be read from the kernel.
    pub fn host(config: HostConfig) -> Result<Self> {
        let memory = host::HostMemory::open(config)?;
        let queue = host::HostQueue::inline();
        Self::from_raw(Arc::new(memory), Arc::new(queue))
    }

    /// A backend made of raw parts: for test kits.
    ///
    /// # Errors
    /// [`Error::Failed`] when the fork handler cannot be registered.
    #[doc(hidden)]
    pub fn from_raw(memory: Arc<dyn RawMemory>, queue: Arc<dyn RawQueue>) -> Result<Self> {
        let attempt = || Attempt::Open { backend: memory.kind() };
        let epoch = ForkEpoch::current()
            .map_err(|cause| Error::Failed { attempt: attempt(), cause: cause.into() })?;
        let (retired, proofs) = (Mutex::default(), Mutex::default());
        Ok(Self { core: Arc::new(Core { memory, queue, epoch, retired, proofs }) })
    }

    /// Which backend it is.
    #[must_use]
    pub fn kind(&self) -> BackendKind {
        self.core.memory.kind()
    }

    /// Its devices; device `n` is number `n`.
    #[must_use]
    pub fn devices(&self) -> &[DeviceInfo] {
        self.core.memory.devices()
    }

    /// What else is worth knowing of it: versions, mostly.
    #[must_use]
    pub fn facts(&self) -> Vec<Fact> {
        self.core.memory.facts()
    }

    /// One of its devices.
    ///
    /// # Errors
    /// [`Error::NoSuchDevice`].
    pub fn device(&self, id: impl Into<DeviceId>) -> Result<Device> {
        let device = id.into();
        let count = self.devices().len();
        if (device.0 as usize) < count {
            Ok(Device::new(self.clone(), device))
        } else {
            Err(Error::NoSuchDevice { backend: self.kind(), device, count })
        }
    }

    /// The device that the memory at an address of this process belongs to, or is pinned for; `None` for memory that the
    /// backend does not know.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the backend keeps no record of addresses; [`Error::Failed`].
    #[doc(alias = "cuPointerGetAttribute")]
    pub fn device_at(&self, address: u64) -> Result<Option<Device>> {
        self.check_fork(|| Attempt::Inspect)?;
        // SAFETY: this is no forked child; the address may be anything.
        let found = unsafe { self.core.memory.device_at(Address(address)) };
        let found = found.map_err(|cause| self.refused(DeviceId(0), Attempt::Inspect, cause))?;
        Ok(found.map(|id| Device::new(self.clone(), id)))
    }

    /// The granules of memory made to `spec`, whose length is not looked at.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::Failed`].
    pub fn granularity(&self, spec: &AllocationSpec) -> Result<Granularity> {
        self.check_fork(|| Attempt::Inspect)?;
        let granularity = self.core.memory.granularity(spec);
        granularity.map_err(|cause| self.refused(spec.device, Attempt::Inspect, cause))
    }

    /// Tries again to give back what could not be given back before: streams dropped with work still to do, with the
    /// memory that work uses, and whatever the driver refused to take. Returns how much is left.
    ///
    /// Dropping anything does this too, so it is needed only where nothing else happens any more.
    /// A forked child has nothing to give back.
    pub fn collect(&self) -> usize {
        // Before the lock, which in a forked child may be held by a thread that is not there.
        if !self.core.epoch.is_current() {
            return 0;
        }
        // Taken out first: giving one thing back may retire another.
        let mut round =
            Round { backend: self, untried: std::mem::take(&mut *self.retired()), left: Vec::new() };
        while let Some(item) = round.untried.pop() {
            round.left.extend(item.retry(self));
        }
        drop(round);
        self.retired().len()
    }

    pub(crate) fn memory(&self) -> &dyn RawMemory {
        &*self.core.memory
    }

    pub(crate) fn queue(&self) -> &dyn RawQueue {
        &*self.core.queue
    }

    /// Refuses to go on in a forked child.
    #[inline]
    pub(crate) fn check_fork(&self, attempt: impl FnOnce() -> Attempt) -> Result<()> {
        if self.core.epoch.is_current() { Ok(()) } else { Err(Error::Forked { attempt: attempt() }) }
    }

    /// The outcome of `try_it`, remembered for this device and capability once it worked or was found not to be there.
    pub(crate) fn proof(
        &self,
        device: DeviceId,
        capability: Capability,
        try_it: impl FnOnce() -> Result<()>,
    ) -> Proof {
        let proofs = || self.core.proofs.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (device, capability);
        // What the parent found out is not this process's, and its lock may be held.
        if let Err(forked) = self.check_fork(|| Attempt::Inspect) {
            return Proof { capability, outcome: Err(forked) };
        }
        if let Some(proof) = proofs().get(&key) {
            return proof.clone();
        }
        // Not under the lock: an experiment may take its time.
        let proof = Proof { capability, outcome: try_it() };
        // A failure may be of the moment: no descriptor left, no memory. It is tried again.
        if !matches!(proof.outcome, Err(Error::Failed { .. })) {
            proofs().insert(key, proof.clone());
        }
        proof
    }

    pub(crate) fn label(&self, id: DeviceId) -> DeviceLabel {
        DeviceLabel { backend: self.kind(), id }
    }

    /// An answer of the backend as an error of ours.
    pub(crate) fn refused(&self, device: DeviceId, attempt: Attempt, cause: Cause) -> Error {
        match cause {
            Cause::Unsupported { capability, reason } => {
                Error::Unsupported { capability, device: self.label(device), reason }
            }
            cause => Error::Failed { attempt, cause },
        }
    }

    /// Gives something back, or keeps it to be given back later.
    ///
    /// In a forked child nothing is given back: it belongs to the parent.
    pub(crate) fn give_back(&self, teardown: Teardown) -> Result<(), Cause> {
        if !self.core.epoch.is_current() {
            std::mem::forget(teardown);
            return Ok(());
        }
        if !self.retired().is_empty() {
            self.collect();
        }
        match teardown.run(self) {
            Ok(()) => Ok(()),
            Err(cause) => {
                tracing::warn!(%cause, ?teardown, "could not give something back; will try again");
                self.retire(Retired::Refused(teardown));
                Err(cause)
            }
        }
    }

    /// Lets a stream go whose owner has gone, now or when its work is over.
    pub(crate) fn drain(&self, mut drain: Drain) {
        if !self.core.epoch.is_current() {
            std::mem::forget(drain);
        } else if !drain.is_over() {
            self.retire(Retired::Draining(drain));
        }
    }

    pub(crate) fn retire(&self, item: Retired) {
        self.retired().push(item);
    }

    fn retired(&self) -> MutexGuard<'_, Vec<Retired>> {
        // The list is never left half-changed, so a panic elsewhere does not spoil it.
        self.core.retired.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One round of giving back. What is left goes back to be tried again, also when a host kernel panics in between.
struct Round<'a> {
    backend: &'a Backend,
    untried: Vec<Retired>,
    left: Vec<Retired>,
}

impl Drop for Round<'_> {
    fn drop(&mut self) {
        let mut retired = self.backend.retired();
        retired.append(&mut self.left);
        retired.append(&mut self.untried);
    }
}
