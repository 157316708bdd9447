//! Physical memory on a device.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use wholemem_os::memfd;

use super::{Mapping, Reservation};
use crate::backend::{Owned, Teardown};
use crate::raw::{Address, Properties, RawAllocation};
use crate::{
    AllocationSpec, Attempt, Backend, Capability, Device, DeviceId, Error, Grant, Granularity, HandleKind,
    Result, Rights, ShareHandle,
};

const NOT_SHAREABLE: &str = "the memory was made without a shareable handle; \
                             in PyTorch set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`";

/// Physical memory on a device, made here or received from another process. It has no address: [map](Mapping) it to
/// use it. Clones are the same memory, which goes when the last holder of it, in any process, has gone.
///
/// ```
/// use wholemem_hal::{Allocation, Backend, HandleKind, HostConfig, Rights};
///
/// let device = Backend::host(HostConfig::default())?.device(0)?;
/// let made = device.allocate(1 << 20)?;
/// made.map(Rights::ReadWrite)?.bytes()?.write_at(0, b"hello")?;
///
/// // The handle would go to another process; here it comes back to this one.
/// let handle = made.export(HandleKind::Fd, Rights::Read)?;
/// drop(made);
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

/// A piece of memory that something else mapped, adopted.
#[derive(Debug, Clone)]
pub struct Segment {
    /// Where it is mapped in this process.
    pub address: u64,
    /// The memory there.
    pub allocation: Allocation,
}

#[derive(Debug)]
pub(crate) struct AllocationCore {
    owned: Owned,
    device: DeviceId,
    raw: RawAllocation,
    len: usize,
    /// The most that may be granted to it.
    rights: Rights,
    granularity: Granularity,
    /// The descriptor made by the first export, where making one takes long.
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
    /// Creates memory.
    ///
    /// # Errors
    /// [`Error::ZeroLength`], [`Error::UnalignedLength`], [`Error::NoSuchDevice`], [`Error::Unsupported`] for a handle
    /// or a place the device has not, [`Error::Failed`] when there is not enough memory.
    pub fn create(backend: &Backend, spec: &AllocationSpec) -> Result<Self> {
        let device = backend.device(spec.device)?;
        let attempt = || Attempt::Create { len: spec.len, device: device.label() };
        backend.check_fork(attempt)?;
        let granularity = check_len(backend, spec, attempt)?;
        // SAFETY: the length is whole granules and not zero, and this is no forked child.
        let raw = unsafe { backend.memory().create(spec) }
            .map_err(|cause| backend.refused(spec.device, attempt(), cause))?;
        Ok(Self::own(&device, raw, spec.len, Rights::ReadWrite, granularity))
    }

    /// Takes over memory from a handle made by another process, or by this one. The handle is used up, whatever the
    /// answer.
    ///
    /// The sender is not trusted: what arrives must be memory of this kind, exactly `len` bytes of it, and nobody may
    /// be able to take them away again. A driver that does not tell the length refuses a longer map instead.
    ///
    /// # Errors
    /// [`Error::ZeroLength`], [`Error::UnalignedLength`], [`Error::Unsupported`] for a handle this backend does not
    /// know, [`Error::Failed`] naming what the handle is instead.
    pub fn import(device: &Device, handle: ShareHandle, len: usize) -> Result<Self> {
        let backend = device.backend();
        let attempt = || Attempt::Import { len, device: device.label() };
        backend.check_fork(attempt)?;
        let granularity = check_len(backend, &AllocationSpec::new(device, len), attempt)?;
        // SAFETY: the length is whole granules and not zero, and this is no forked child.
        let imported = unsafe { backend.memory().import(device.id(), handle, len) }
            .map_err(|cause| backend.refused(device.id(), attempt(), cause))?;
        Ok(Self::own(device, imported.raw, len, imported.rights, granularity))
    }

    /// The memory behind an address of this process that something else mapped there, held once more.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the backend keeps no record of addresses, and for memory of the older allocator;
    /// [`Error::Failed`].
    #[doc(alias = "cuMemRetainAllocationHandle")]
    pub fn retain(device: &Device, address: u64, len: usize) -> Result<Self> {
        let backend = device.backend();
        backend.check_fork(|| Attempt::Inspect)?;
        let granularity = check_len(backend, &AllocationSpec::new(device, len), || Attempt::Inspect)?;
        // SAFETY: this is no forked child; the address may be anything.
        let raw = unsafe { backend.memory().retain(Address(address)) }
            .map_err(|cause| backend.refused(device.id(), Attempt::Inspect, cause))?;
        Ok(Self::own(device, raw, len, Rights::ReadWrite, granularity))
    }

    /// The memory that something else in this process mapped at `address`, `len` bytes of it, piece by piece: a framework's
    /// segments become allocations that can be shared.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the backend keeps no record of addresses, or for memory that was not made to be
    /// shared, all of the older allocator's among it; [`Error::Failed`] for an address that is no memory.
    pub fn adopt(device: &Device, address: u64, len: usize) -> Result<Vec<Segment>> {
        let attempt = || Attempt::Adopt { len, device: device.label() };
        let backend = device.backend();
        backend.check_fork(attempt)?;
        if len == 0 {
            return Err(Error::ZeroLength { attempt: attempt() });
        }
        let refused = |cause| backend.refused(device.id(), attempt(), cause);
        let (mut segments, mut at) = (Vec::new(), address);
        let end = address.saturating_add(len as u64);
        // The first address is asked for also where the range would end behind the last address there is.
        loop {
            // SAFETY: this is no forked child; the address may be anything.
            let (base, segment_len) =
                unsafe { backend.memory().address_range(Address(at)) }.map_err(refused)?;
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
        let owned = Owned::new(device.backend(), Teardown::Release(raw));
        let (device, exported) = (device.id(), Mutex::default());
        Self { core: Arc::new(AllocationCore { owned, device, raw, len, rights, granularity, exported }) }
    }

    /// Its length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "an allocation is never empty")]
    pub fn len(&self) -> usize {
        self.core.len
    }

    /// The device it is on.
    #[must_use]
    pub fn device(&self) -> Device {
        Device::new(self.backend().clone(), self.core.device)
    }

    /// The most that may be granted to it: reading only, if it came through a read-only handle.
    #[must_use]
    pub fn rights(&self) -> Rights {
        self.core.rights
    }

    /// The granules of its kind of memory.
    #[must_use]
    pub fn granularity(&self) -> Granularity {
        self.core.granularity
    }

    /// Makes a handle for another process, with which it can do at most `rights`.
    ///
    /// Where a driver takes long to make the first file descriptor, it is kept, and later ones are copies of it: export
    /// memory once ahead of time if the moment of handing it over counts. Drivers of GPUs hand on only what this process has
    /// made: what was [imported](Self::import) goes further as the handle that it came by.
    ///
    /// # Errors
    /// [`Error::NoRights`] for [`Rights::None`]; [`Error::ReadOnlyHandle`] for more rights than this process has; [`Error::Unsupported`] for a kind or a
    /// restriction the device does not know; [`Error::Failed`] when, for instance, no file descriptor is left.
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
        let refused = |cause| backend.refused(self.core.device, attempt(), cause);
        // SAFETY: the allocation is live because `self` holds it.
        let export = || unsafe { backend.memory().export(self.core.raw, kind, rights) }.map_err(refused);
        // What is kept allows everything: a narrower one is the backend's to make, or to refuse.
        let widest = kind == HandleKind::Fd && rights == Rights::ReadWrite;
        if !widest || !backend.memory().keeps_exports() {
            return export();
        }
        let mut kept = self.core.exported.lock().unwrap_or_else(PoisonError::into_inner);
        let fd = match kept.take() {
            Some(fd) => fd,
            None => match export()? {
                ShareHandle::Fd(fd) => fd,
                other => return Ok(other),
            },
        };
        let fd: &OwnedFd = kept.insert(fd);
        memfd::share_fd(fd.as_fd()).map(ShareHandle::Fd).map_err(|error| refused(error.into()))
    }

    /// Maps all of it at an address of its own, with `rights` for its own device.
    ///
    /// # Errors
    /// As [`Reservation::create`] and [`Mapping::create`].
    pub fn map(&self, rights: Rights) -> Result<Mapping> {
        let reservation = Reservation::create(self.backend(), self.len())?;
        Mapping::create(&reservation, 0, self, &[Grant { device: self.core.device, rights }])
    }

    /// What the backend itself says of it.
    ///
    /// # Errors
    /// [`Error::Failed`].
    pub fn properties(&self) -> Result<Properties> {
        let backend = self.backend();
        backend.check_fork(|| Attempt::Inspect)?;
        // SAFETY: the allocation is live because `self` holds it.
        unsafe { backend.memory().properties(self.core.raw) }
            .map_err(|cause| backend.refused(self.core.device, Attempt::Inspect, cause))
    }

    /// Gives up this process's hold of the memory, and says what came of it. Dropping does the same, silently.
    ///
    /// # Errors
    /// [`Error::InUse`] while it is mapped or a clone of it lives; [`Error::Failed`] when the driver refuses, in which
    /// case it is tried again later.
    pub fn release(self) -> Result<()> {
        let (backend, device) = (self.backend().clone(), self.core.device);
        backend.check_fork(|| Attempt::Release)?;
        let core = Arc::into_inner(self.core).ok_or(Error::InUse { attempt: Attempt::Release })?;
        core.owned.give_back().map_err(|cause| backend.refused(device, Attempt::Release, cause))
    }

    fn backend(&self) -> &Backend {
        self.core.backend()
    }

    pub(crate) fn core(&self) -> &Arc<AllocationCore> {
        &self.core
    }
}

impl Device {
    /// Creates `len` bytes of memory here, to be shared as a file descriptor.
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
