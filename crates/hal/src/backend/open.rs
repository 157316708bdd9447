//! An open backend: its raw implementation, its devices and the list of deferred teardowns.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use wholemem_os::ForkEpoch;

use super::{Device, DrainingStream, Retired, Teardown};
use crate::raw::{Address, RawMemory, RawQueue};
use crate::{
    AllocationSpec, Attempt, BackendError, BackendFact, BackendKind, Capability, CapabilityProbe, DeviceId,
    DeviceInfo, DeviceLabel, Error, Granularity, HostConfig, MemoryBlock, Result, cuda, host,
};

/// An open backend, the CUDA or the host implementation of devices. Clones refer to the same backend. Memory of two
/// separately opened backends cannot be mixed.
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
    core: Arc<BackendCore>,
}

impl PartialEq for Backend {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.core, &other.core)
    }
}

impl Eq for Backend {}

#[derive(Debug)]
struct BackendCore {
    memory: Arc<dyn RawMemory>,
    queue: Arc<dyn RawQueue>,
    epoch: ForkEpoch,
    retired: Mutex<Vec<Retired>>,
    probes: Mutex<HashMap<(DeviceId, Capability), CapabilityProbe>>,
}

impl Backend {
    /// Opens CUDA if it works on this machine, otherwise the host backend.
    ///
    /// # Errors
    /// [`Error::Failed`] if the host backend cannot be opened either.
    pub fn auto() -> Result<Self> {
        Self::open(BackendKind::Cuda).or_else(|_| Self::open(BackendKind::Host))
    }

    /// Opens a backend with its default configuration.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with the reason, for CUDA; as [`host`](Self::host), for the host backend; [`Error::Failed`].
    pub fn open(kind: BackendKind) -> Result<Self> {
        match kind {
            BackendKind::Host => Self::host(HostConfig::default()),
            BackendKind::Cuda => {
                let (memory, queue) = cuda::open()?;
                Self::from_raw(Arc::new(memory), Arc::new(queue))
            }
        }
    }

    /// Opens the host backend with the given devices and granule.
    ///
    /// # Errors
    /// [`Error::BadConfig`]; [`Error::Failed`] if the kernel's memory information cannot be read.
    pub fn host(config: HostConfig) -> Result<Self> {
        let memory = host::HostMemory::open(config)?;
        let queue = host::HostQueue::inline();
        Self::from_raw(Arc::new(memory), Arc::new(queue))
    }

    /// Creates a backend from implementations of the raw traits, for test kits.
    ///
    /// # Errors
    /// [`Error::Failed`] if the fork handler cannot be registered.
    #[doc(hidden)]
    pub fn from_raw(memory: Arc<dyn RawMemory>, queue: Arc<dyn RawQueue>) -> Result<Self> {
        let attempt = || Attempt::Open { backend: memory.kind() };
        let epoch = ForkEpoch::current()
            .map_err(|cause| Error::Failed { attempt: attempt(), cause: cause.into() })?;
        let (retired, probes) = (Mutex::default(), Mutex::default());
        Ok(Self { core: Arc::new(BackendCore { memory, queue, epoch, retired, probes }) })
    }

    /// Returns the kind of the backend.
    #[must_use]
    pub fn kind(&self) -> BackendKind {
        self.core.memory.kind()
    }

    /// Returns the properties of the backend's devices; device `n` has index `n`.
    #[must_use]
    pub fn devices(&self) -> &[DeviceInfo] {
        self.core.memory.devices()
    }

    /// Returns additional facts about the backend, mostly versions.
    #[must_use]
    pub fn facts(&self) -> Vec<BackendFact> {
        self.core.memory.facts()
    }

    /// Returns the device with the given number.
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

    /// Returns the device that owns the memory at an address of this process, or for which that memory is pinned;
    /// `None` if the backend does not know the address.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the backend does not track addresses; [`Error::Failed`].
    #[doc(alias = "cuPointerGetAttribute")]
    pub fn device_at(&self, address: u64) -> Result<Option<Device>> {
        self.check_fork(|| Attempt::Inspect)?;
        // SAFETY: the process is not a forked child, and `device_at` accepts any address.
        let found = unsafe { self.core.memory.device_at(Address(address)) };
        let found = found.map_err(|cause| self.to_error(DeviceId(0), Attempt::Inspect, cause))?;
        Ok(found.map(|id| Device::new(self.clone(), id)))
    }

    /// Returns an id of the memory at an address of this process; `None` if the backend does not know the address. No other memory
    /// of this process ever gets the same id, so a caller notices that an address was freed and used again.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the backend does not track addresses; [`Error::Failed`].
    #[doc(alias = "CU_POINTER_ATTRIBUTE_BUFFER_ID")]
    pub fn memory_id(&self, address: u64) -> Result<Option<u64>> {
        self.check_fork(|| Attempt::Inspect)?;
        // SAFETY: the process is not a forked child, and `memory_id` accepts any address.
        unsafe { self.core.memory.memory_id(Address(address)) }
            .map_err(|cause| self.to_error(DeviceId(0), Attempt::Inspect, cause))
    }

    /// Returns the block of memory that contains an address of this process: the memory of one `cudaMalloc`, or one mapping.
    ///
    /// ```
    /// use wholemem_hal::{Backend, HostConfig, Rights};
    ///
    /// let backend = Backend::host(HostConfig::default())?;
    /// let map = backend.device(0)?.allocate(1 << 20)?.map(Rights::ReadWrite)?;
    /// let block = backend.block_at(map.address() + 100)?;
    /// assert_eq!((block.address, block.len), (map.address(), map.len()));
    /// # Ok::<(), wholemem_hal::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the backend does not track addresses, or does not know this address; [`Error::Failed`].
    #[doc(alias = "cuMemGetAddressRange")]
    pub fn block_at(&self, address: u64) -> Result<MemoryBlock> {
        self.check_fork(|| Attempt::Inspect)?;
        // SAFETY: the process is not a forked child, and `address_range` accepts any address.
        let (start, len) = unsafe { self.core.memory.address_range(Address(address)) }
            .map_err(|cause| self.to_error(DeviceId(0), Attempt::Inspect, cause))?;
        Ok(MemoryBlock { address: start.0, len, id: self.memory_id(start.0)? })
    }

    /// Returns the granularity of memory that is created with `spec`, whose length is ignored.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::Failed`].
    pub fn granularity(&self, spec: &AllocationSpec) -> Result<Granularity> {
        self.check_fork(|| Attempt::Inspect)?;
        let granularity = self.core.memory.granularity(spec);
        granularity.map_err(|cause| self.to_error(spec.device, Attempt::Inspect, cause))
    }

    /// Retries the releases that failed or had to wait: dropped streams with unfinished work, the memory which that
    /// work uses, and resources that the driver refused to release. Returns the number of resources that are still not
    /// released.
    ///
    /// Every drop retries too, so a call is needed only if nothing else is dropped any more. In a forked child it does
    /// nothing.
    pub fn collect(&self) -> usize {
        // Whether this process is a forked child is checked before the lock is taken: if another thread of the parent held the
        // lock at the fork, it is never released in the child.
        if !self.core.epoch.is_current() {
            return 0;
        }
        // The list of retired resources is emptied before the releases are retried, since a release may retire
        // another resource.
        let mut round =
            RetryPass { backend: self, untried: std::mem::take(&mut *self.retired()), left: Vec::new() };
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

    /// Returns [`Error::Forked`] if this process is a forked child of the one that opened the backend.
    #[inline]
    pub(crate) fn check_fork(&self, attempt: impl FnOnce() -> Attempt) -> Result<()> {
        if self.core.epoch.is_current() { Ok(()) } else { Err(Error::Forked { attempt: attempt() }) }
    }

    /// Returns the cached result of testing a capability of a device, or runs `test`. Success and missing support are
    /// cached, other failures are not.
    pub(crate) fn cached_probe(
        &self,
        device: DeviceId,
        capability: Capability,
        test: impl FnOnce() -> Result<()>,
    ) -> CapabilityProbe {
        let probes = || self.core.probes.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (device, capability);
        // In a forked child the parent's results are not valid, and the lock may be held.
        if let Err(forked) = self.check_fork(|| Attempt::Inspect) {
            return CapabilityProbe { capability, outcome: Err(forked) };
        }
        if let Some(probe) = probes().get(&key) {
            return probe.clone();
        }
        // The lock is not held while the test runs, since a test may take long.
        let probe = CapabilityProbe { capability, outcome: test() };
        // A failure of a capability test may be temporary, such as a lack of descriptors or memory, so it is not
        // cached.
        if !matches!(probe.outcome, Err(Error::Failed { .. })) {
            probes().insert(key, probe.clone());
        }
        probe
    }

    pub(crate) fn label(&self, id: DeviceId) -> DeviceLabel {
        DeviceLabel { backend: self.kind(), id }
    }

    /// Converts an error of the backend to an error of this crate.
    pub(crate) fn to_error(&self, device: DeviceId, attempt: Attempt, cause: BackendError) -> Error {
        match cause {
            BackendError::Unsupported { capability, reason } => {
                Error::Unsupported { capability, device: self.label(device), reason }
            }
            cause => Error::Failed { attempt, cause },
        }
    }

    /// Runs a teardown (a call that releases a resource). If the driver refuses it, the teardown is retried later.
    ///
    /// A forked child releases nothing: the resources belong to the parent.
    pub(crate) fn tear_down(&self, teardown: Teardown) -> Result<(), BackendError> {
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
                tracing::warn!(%cause, ?teardown, "cannot release a resource; retrying later");
                self.retire(Retired::Refused(teardown));
                Err(cause)
            }
        }
    }

    /// Releases a dropped stream now if its work has finished; otherwise keeps the stream until then.
    pub(crate) fn drain(&self, mut drain: DrainingStream) {
        if !self.core.epoch.is_current() {
            std::mem::forget(drain);
        } else if !drain.has_finished() {
            self.retire(Retired::Draining(drain));
        }
    }

    pub(crate) fn retire(&self, item: Retired) {
        self.retired().push(item);
    }

    fn retired(&self) -> MutexGuard<'_, Vec<Retired>> {
        // The list of retired resources is never left half-changed, so a panic under the lock does not corrupt it.
        self.core.retired.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One pass over the list of retired resources that retries their releases. Dropping the pass puts unreleased
/// resources back, even if a host kernel panics during the pass.
struct RetryPass<'a> {
    backend: &'a Backend,
    untried: Vec<Retired>,
    left: Vec<Retired>,
}

impl Drop for RetryPass<'_> {
    fn drop(&mut self) {
        let mut retired = self.backend.retired();
        retired.append(&mut self.left);
        retired.append(&mut self.untried);
    }
}
