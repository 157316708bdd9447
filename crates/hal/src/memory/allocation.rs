//! Physical memory on a device.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use wholemem_os::memfd;

use super::{Mapping, Reservation};
use crate::backend::{OwnedResource, Teardown};
use crate::raw::{Address, AllocationProperties, RawAllocation};
use crate::{
    AllocationSpec, Attempt, Backend, Capability, Device, DeviceId, Error, Grant, Granularity, HandleKind,
    Result, Rights, ShareHandle,
};

const NOT_SHAREABLE: &str = "the memory was created without a shareable handle; \
                             in PyTorch set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`";

/// Physical memory on a device, created in this process or imported from another one. It has no address: to use it,
/// [map](Mapping) it. Clones refer to the same memory, which is freed when the last reference to it in any process is released.
///
/// ```
/// use wholemem_hal::{Allocation, Backend, HandleKind, HostConfig, Rights};
///
/// let device = Backend::host(HostConfig::default())?.device(0)?;
/// let created = device.allocate(1 << 20)?;
/// created.map(Rights::ReadWrite)?.bytes()?.write_at(0, b"hello")?;
///
/// // A real program would send the handle to another process.
/// let handle = created.export(HandleKind::Fd, Rights::Read)?;
/// drop(created);
///
/// let received = Allocation::import(&device, handle, 1 << 20)?;
/// let mut seen = [0; 5];
/// received.map(Rights::Read)?.bytes()?.read_at(0, &mut seen)?;
/// assert_eq!(&seen, b"hello");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Allocation {
    core: Arc<AllocationCore>,
}

/// A range of memory that other code in this process mapped, found by [`Allocation::adopt`].
#[derive(Debug, Clone)]
pub struct Segment {
    /// The address of the memory in this process.
    pub address: u64,
    /// The memory that is mapped at the address.
    pub allocation: Allocation,
}

#[derive(Debug)]
pub(crate) struct AllocationCore {
    owned: OwnedResource,
    device: DeviceId,
    raw: RawAllocation,
    len: usize,
    /// The highest access rights to the memory that may be granted.
    rights: Rights,
    granularity: Granularity,
    /// The file descriptor of the first export of the memory, cached if creating one is slow.
    exported: Mutex<Option<OwnedFd>>,
}

impl AllocationCore {
    pub(crate) fn raw(&self) -> RawAllocation {
        self.raw
    }

    pub(crate) fn backend(&self) -> &Backend {
        self.owned.backend()
    }

    pub(crate) fn device(&self) -> DeviceId {
        self.device
    }

    pub(crate) fn rights(&self) -> Rights {
        self.rights
    }
}

impl Allocation {
    /// Creates physical memory on a device.
    ///
    /// # Errors
    /// [`Error::ZeroLength`], [`Error::UnalignedLength`], [`Error::NoSuchDevice`], [`Error::Unsupported`] if the device lacks the
    /// kind of handle or memory, [`Error::Failed`] if there is not enough memory.
    pub fn create(backend: &Backend, spec: &AllocationSpec) -> Result<Self> {
        let device = backend.device(spec.device)?;
        let attempt = || Attempt::Create { len: spec.len, device: device.label() };
        backend.check_fork(attempt)?;
        let granularity = check_len(backend, spec, attempt)?;
        // SAFETY: the length is a nonzero multiple of the granule, and the process is not a forked child.
        let raw = unsafe { backend.memory().create(spec) }
            .map_err(|cause| backend.to_error(spec.device, attempt(), cause))?;
        Ok(Self::own(&device, raw, spec.len, Rights::ReadWrite, granularity))
    }

    /// Imports memory from a handle of another process or of this one. The call consumes the handle, even if it fails.
    ///
    /// The sender is not trusted: the handle must refer to memory of this kind with exactly `len` bytes that no process can
    /// shrink. If a driver cannot report the length, it refuses a longer mapping instead.
    ///
    /// # Errors
    /// [`Error::ZeroLength`], [`Error::UnalignedLength`], [`Error::Unsupported`] for a kind of handle this backend does not
    /// support, [`Error::Failed`] if the handle is invalid.
    pub fn import(device: &Device, handle: ShareHandle, len: usize) -> Result<Self> {
        let backend = device.backend();
        let attempt = || Attempt::Import { len, device: device.label() };
        backend.check_fork(attempt)?;
        let granularity = check_len(backend, &AllocationSpec::new(device, len), attempt)?;
        // SAFETY: the length is a nonzero multiple of the granule, and the process is not a forked child.
        let imported = unsafe { backend.memory().import(device.id(), handle, len) }
            .map_err(|cause| backend.to_error(device.id(), attempt(), cause))?;
        Ok(Self::own(device, imported.raw, len, imported.rights, granularity))
    }

    /// Returns a new reference to the memory that other code mapped at an address of this process.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the backend does not track addresses, and for memory from `cudaMalloc`; [`Error::Failed`].
    #[doc(alias = "cuMemRetainAllocationHandle")]
    pub fn retain(device: &Device, address: u64, len: usize) -> Result<Self> {
        let backend = device.backend();
        backend.check_fork(|| Attempt::Inspect)?;
        let spec = AllocationSpec::new(device, len);
        let granularity = backend.granularity(&spec)?;
        // SAFETY: the process is not a forked child, and `retain` accepts any address.
        let raw = unsafe { backend.memory().retain(Address(address)) }
            .map_err(|cause| backend.to_error(device.id(), Attempt::Inspect, cause))?;
        let retained = Self::own(device, raw, len, Rights::ReadWrite, granularity);
        // The length is checked last, because memory from `cudaMalloc`, which is another error, has any length.
        check_len(backend, &spec, || Attempt::Inspect)?;
        Ok(retained)
    }

    /// Returns references to all memory that other code in this process mapped between `address` and `address + len`, so that,
    /// for example, segments of PyTorch's allocator can be shared.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the backend does not track addresses, or the memory cannot be shared, such as memory from
    /// `cudaMalloc`; [`Error::Failed`] if nothing is mapped at the address.
    pub fn adopt(device: &Device, address: u64, len: usize) -> Result<Vec<Segment>> {
        let attempt = || Attempt::Adopt { len, device: device.label() };
        let backend = device.backend();
        backend.check_fork(attempt)?;
        if len == 0 {
            return Err(Error::ZeroLength { attempt: attempt() });
        }
        let to_error = |cause| backend.to_error(device.id(), attempt(), cause);
        let (mut segments, mut at) = (Vec::new(), address);
        let end = address.saturating_add(len as u64);
        // The first address is looked up even if the end of the range overflows.
        loop {
            // SAFETY: the process is not a forked child, and `address_range` accepts any address.
            let (base, segment_len) =
                unsafe { backend.memory().address_range(Address(at)) }.map_err(to_error)?;
            let allocation = Self::retain(device, base.0, segment_len)?;
            if !allocation.properties()?.handles.contains(&HandleKind::Fd) {
                return Err(device.unsupported(Capability::ShareFd, NOT_SHAREABLE));
            }
            segments.push(Segment { address: base.0, allocation });
            at = base.after(segment_len).0;
            if at >= end {
                return Ok(segments);
            }
        }
    }

    fn own(
        device: &Device,
        raw: RawAllocation,
        len: usize,
        rights: Rights,
        granularity: Granularity,
    ) -> Self {
        let owned = OwnedResource::new(device.backend(), Teardown::Release(raw));
        let (device, exported) = (device.id(), Mutex::default());
        Self { core: Arc::new(AllocationCore { owned, device, raw, len, rights, granularity, exported }) }
    }

    /// Returns the length of the memory in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "an allocation is never empty")]
    pub fn len(&self) -> usize {
        self.core.len
    }

    /// Returns the device of the memory.
    #[must_use]
    pub fn device(&self) -> Device {
        Device::new(self.backend().clone(), self.core.device)
    }

    /// Returns the highest access rights to the memory that may be granted: only reads, if the memory was imported through a
    /// read-only handle.
    #[must_use]
    pub fn rights(&self) -> Rights {
        self.core.rights
    }

    /// Returns the granularity of this kind of memory.
    #[must_use]
    pub fn granularity(&self) -> Granularity {
        self.core.granularity
    }

    /// Creates a handle with which another process gets at most the access `rights` to the memory.
    ///
    /// If a driver creates the first file descriptor slowly, the descriptor is cached and later exports duplicate it: export
    /// memory once in advance if latency matters. GPU drivers export only memory that this process created; to pass on
    /// [imported](Self::import) memory, send the received handle.
    ///
    /// # Errors
    /// [`Error::NoRights`] for [`Rights::None`]; [`Error::ReadOnlyHandle`] for more rights than this process has;
    /// [`Error::Unsupported`] for a kind of handle or a restriction the device does not support; [`Error::Failed`], for example
    /// if no file descriptor is left.
    pub fn export(&self, kind: HandleKind, rights: Rights) -> Result<ShareHandle> {
        let attempt = || Attempt::Export { kind, rights };
        let backend = self.backend();
        backend.check_fork(attempt)?;
        if rights == Rights::None {
            return Err(Error::NoRights { attempt: attempt() });
        }
        if rights > self.core.rights {
            return Err(Error::ReadOnlyHandle { attempt: attempt() });
        }
        let to_error = |cause| backend.to_error(self.core.device, attempt(), cause);
        // SAFETY: the allocation is live, since `self` holds it.
        let export = || unsafe { backend.memory().export(self.core.raw, kind, rights) }.map_err(to_error);
        // Only a descriptor with all rights is cached: the backend must create, or refuse, each restricted one.
        let widest = kind == HandleKind::Fd && rights == Rights::ReadWrite;
        if !widest || !backend.memory().caches_exports() {
            return export();
        }
        let mut cached = self.core.exported.lock().unwrap_or_else(PoisonError::into_inner);
        let fd = match cached.take() {
            Some(fd) => fd,
            None => match export()? {
                ShareHandle::Fd(fd) => fd,
                other => return Ok(other),
            },
        };
        let fd: &OwnedFd = cached.insert(fd);
        memfd::share_fd(fd.as_fd()).map(ShareHandle::Fd).map_err(|error| to_error(error.into()))
    }

    /// Maps the memory at a new address and grants `rights` to its own device.
    ///
    /// # Errors
    /// As [`Reservation::create`] and [`Mapping::create`].
    pub fn map(&self, rights: Rights) -> Result<Mapping> {
        let reservation = Reservation::create(self.backend(), self.len())?;
        Mapping::create(&reservation, 0, self, &[Grant { device: self.core.device, rights }])
    }

    /// Returns the properties that the backend reports for the memory.
    ///
    /// # Errors
    /// [`Error::Failed`].
    pub fn properties(&self) -> Result<AllocationProperties> {
        let backend = self.backend();
        backend.check_fork(|| Attempt::Inspect)?;
        // SAFETY: the allocation is live, since `self` holds it.
        unsafe { backend.memory().properties(self.core.raw) }
            .map_err(|cause| backend.to_error(self.core.device, Attempt::Inspect, cause))
    }

    /// Releases this process's reference to the memory and returns the result. Dropping the allocation does the same but ignores
    /// errors.
    ///
    /// # Errors
    /// [`Error::InUse`] while it is mapped or a clone of it exists; [`Error::Failed`] if the driver refuses, in which case the
    /// release is retried later.
    pub fn release(self) -> Result<()> {
        let (backend, device) = (self.backend().clone(), self.core.device);
        backend.check_fork(|| Attempt::Release)?;
        let core = Arc::into_inner(self.core).ok_or(Error::InUse { attempt: Attempt::Release })?;
        core.owned.tear_down().map_err(|cause| backend.to_error(device, Attempt::Release, cause))
    }

    fn backend(&self) -> &Backend {
        self.core.backend()
    }

    pub(crate) fn core(&self) -> &Arc<AllocationCore> {
        &self.core
    }
}

impl Device {
    /// Creates `len` bytes of memory on this device that can be shared as a file descriptor.
    ///
    /// # Errors
    /// As [`Allocation::create`].
    pub fn allocate(&self, len: usize) -> Result<Allocation> {
        Allocation::create(self.backend(), &AllocationSpec::new(self, len))
    }
}

fn check_len(backend: &Backend, spec: &AllocationSpec, attempt: impl Fn() -> Attempt) -> Result<Granularity> {
    if spec.len == 0 {
        return Err(Error::ZeroLength { attempt: attempt() });
    }
    let granularity = backend.granularity(spec)?;
    if !granularity.minimum.divides(spec.len) {
        return Err(Error::UnalignedLength { attempt: attempt(), granule: granularity.minimum.len() });
    }
    Ok(granularity)
}
