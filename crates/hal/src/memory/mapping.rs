//! A whole allocation mapped at an offset of a reservation, with access rights for each device.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use wholemem_os::{PrivateMap, SharedSlice};

use super::{Addressable, Allocation, AllocationCore, Reservation, ReservationCore, Span};
use crate::backend::{Operand, OwnedResource, Teardown};
use crate::raw::Address;
use crate::values::RightsTable;
use crate::{Attempt, Backend, Device, DeviceId, Error, Grant, Result, Rights};

/// A whole allocation that is mapped into a reservation (a range of addresses). The mapping holds both of them, and enqueued work
/// holds the mapping.
///
/// Clones refer to the same mapping, which is removed when its last clone is dropped and the last work that uses it has run.
#[derive(Debug, Clone)]
#[doc(alias = "cuMemMap")]
pub struct Mapping {
    core: Arc<MappingCore>,
}

#[derive(Debug)]
struct MappingCore {
    owned: OwnedResource,
    allocation: Arc<AllocationCore>,
    at: Address,
    len: usize,
    rights: Mutex<RightsTable>,
}

impl MappingCore {
    fn rights(&self) -> MutexGuard<'_, RightsTable> {
        // The table of rights is replaced in one assignment, so a panic under the lock does not corrupt it.
        self.rights.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Addressable for MappingCore {
    fn backend(&self) -> &Backend {
        self.owned.backend()
    }

    fn rights_of(&self, device: DeviceId) -> Rights {
        self.rights().of(device)
    }
}

impl Mapping {
    /// Maps all of `allocation` at `offset` of `reservation`, and grants access rights to devices.
    ///
    /// # Errors
    /// [`Error::UnalignedOffset`], [`Error::BeyondReservation`], [`Error::Occupied`], [`Error::NoSuchDevice`],
    /// [`Error::ReadOnlyHandle`], [`Error::WrongBackend`]; [`Error::Failed`] if the driver refuses. After an error nothing is
    /// mapped.
    pub fn create(
        reservation: &Reservation,
        offset: usize,
        allocation: &Allocation,
        grants: &[Grant],
    ) -> Result<Self> {
        let len = allocation.len();
        let attempt = || Attempt::Map { len, offset };
        let (reservation, memory) = (reservation.core(), allocation.core());
        let backend = memory.backend();
        backend.check_fork(attempt)?;
        if reservation.backend() != backend {
            return Err(Error::WrongBackend { attempt: attempt() });
        }
        let granule = allocation.granularity().minimum;
        if !granule.divides(offset) {
            return Err(Error::UnalignedOffset { attempt: attempt(), granule: granule.len() });
        }
        check_grants(backend, allocation.rights(), grants)?;
        reservation.claim(offset, len)?;
        let range =
            ClaimedRange { reservation: Arc::clone(reservation), offset, _allocation: Arc::clone(memory) };
        let at = reservation.address(offset);
        // SAFETY: the range is inside the reservation, aligned, and claimed for this mapping; the allocation is live and `len` is
        // its whole length; the process is not a forked child.
        unsafe { backend.memory().map(at, len, memory.raw()) }
            .map_err(|cause| backend.to_error(memory.device(), attempt(), cause))?;
        let owned = OwnedResource::new(backend, Teardown::Unmap { at, len, _place: Arc::new(range) });
        let rights = Mutex::default();
        let mapping =
            Self { core: Arc::new(MappingCore { owned, allocation: Arc::clone(memory), at, len, rights }) };
        mapping.grant(grants)?;
        Ok(mapping)
    }

    /// Grants more access rights to the mapping. Rights never shrink while a mapping lives, so enqueued work and views stay
    /// valid; to revoke rights, create a new mapping.
    ///
    /// # Errors
    /// [`Error::NoSuchDevice`], [`Error::ReadOnlyHandle`]; [`Error::Failed`] if the driver refuses. After an error the rights are
    /// unchanged.
    #[doc(alias = "cuMemSetAccess")]
    pub fn grant(&self, grants: &[Grant]) -> Result<()> {
        let Some(first) = grants.first() else { return Ok(()) };
        let attempt = || Attempt::Grant { device: first.device, rights: first.rights };
        let backend = self.backend();
        backend.check_fork(attempt)?;
        check_grants(backend, self.core.allocation.rights(), grants)?;
        let mut rights = self.core.rights();
        let wider = rights.with(grants);
        // SAFETY: the range is mapped while `self` lives, and `wider` revokes no right.
        unsafe { backend.memory().set_access(self.core.at, self.core.len, wider.grants()) }
            .map_err(|cause| backend.to_error(first.device, attempt(), cause))?;
        *rights = wider;
        Ok(())
    }

    /// Returns the access rights of a device to the mapping.
    #[must_use]
    pub fn rights_of(&self, device: impl Into<DeviceId>) -> Rights {
        self.core.rights_of(device.into())
    }

    /// Returns the device address of the first byte of the mapping.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.core.at.0
    }

    /// Returns the length of the mapping in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "an allocation is never empty")]
    pub fn len(&self) -> usize {
        self.core.len
    }

    /// Returns the device that owns the mapped memory.
    #[must_use]
    pub fn device(&self) -> Device {
        Device::new(self.backend().clone(), self.core.allocation.device())
    }

    /// Returns a CPU view of the bytes of the mapping. The view is writable if any device has write access.
    ///
    /// # Errors
    /// [`Error::NotHostVisible`] for GPU memory; [`Error::Denied`] if no rights were granted; [`Error::Failed`].
    pub fn bytes(&self) -> Result<SharedSlice<'_>> {
        let attempt = || Attempt::Access { len: self.core.len };
        self.backend().check_fork(attempt)?;
        let at = self.backend().memory().host_pointer(self.core.at);
        let device = self.core.allocation.device();
        let at = at.map_err(|cause| self.backend().to_error(device, attempt(), cause))?;
        let Some(at) = at else {
            return Err(Error::NotHostVisible { device: self.backend().label(device) });
        };
        let granted = self.core.rights().highest();
        if granted == Rights::None {
            let device = self.backend().label(device);
            return Err(Error::Denied { attempt: attempt(), device, granted, needed: Rights::Read });
        }
        // SAFETY: the range is mapped with the `granted` rights while `self` is borrowed, rights only grow, the memory cannot
        // shrink, and this crate creates no references to the bytes.
        Ok(unsafe { SharedSlice::new(at, self.core.len, granted == Rights::ReadWrite) })
    }

    /// Creates the CPU's page table entries for the whole mapping at once, instead of by one page fault per page at the first
    /// access.
    ///
    /// # Errors
    /// [`Error::Denied`] if no rights were granted; [`Error::Failed`] if the kernel cannot do it, which affects only speed.
    pub fn populate(&self) -> Result<()> {
        let attempt = || Attempt::Populate { len: self.core.len };
        let backend = self.backend();
        backend.check_fork(attempt)?;
        let rights = self.core.rights().highest();
        if rights == Rights::None {
            let device = backend.label(self.core.allocation.device());
            return Err(Error::Denied { attempt: attempt(), device, granted: rights, needed: Rights::Read });
        }
        // SAFETY: the range is mapped with `rights` while `self` lives.
        unsafe { backend.memory().populate(self.core.at, self.core.len, rights) }
            .map_err(|cause| backend.to_error(self.core.allocation.device(), attempt(), cause))
    }

    /// Collapses the pages of the mapping into huge pages, for all processes that map the memory, which makes random access
    /// faster. The mapping must start at a multiple of the [recommended](crate::Granularity::recommended) granule. The call also
    /// populates the mapping and takes about as long as [`Self::populate`].
    ///
    /// # Errors
    /// [`Error::Failed`] if the kernel cannot do it now, which affects only speed.
    pub fn enlarge_pages(&self) -> Result<()> {
        let attempt = || Attempt::EnlargePages { len: self.core.len };
        let backend = self.backend();
        backend.check_fork(attempt)?;
        // SAFETY: the range is mapped while `self` lives.
        unsafe { backend.memory().enlarge_pages(self.core.at, self.core.len) }
            .map_err(|cause| backend.to_error(self.core.allocation.device(), attempt(), cause))
    }

    /// Sets whether children that are forked from now on inherit the mapping; by default they do. In a child that does not
    /// inherit it, nothing is mapped at its addresses, so use this only if no other code uses the addresses in the child. A
    /// mapping that is not inherited does not prevent sealing the memory against writes while the child lives.
    ///
    /// # Errors
    /// [`Error::Failed`] if the kernel cannot do it.
    pub fn set_inherited(&self, is_inherited: bool) -> Result<()> {
        let attempt = || Attempt::SetInherited { len: self.core.len };
        let backend = self.backend();
        backend.check_fork(attempt)?;
        // SAFETY: the range is mapped while `self` lives.
        unsafe { backend.memory().set_inherited(self.core.at, self.core.len, is_inherited) }
            .map_err(|cause| backend.to_error(self.core.allocation.device(), attempt(), cause))
    }

    /// Maps part of the memory again, copy-on-write, for code that must not change the memory but may write to its own view.
    /// Pages that were not written show the shared memory. The new mapping is independent of this one. A forked child may call
    /// this function too.
    ///
    /// # Errors
    /// [`Error::NotHostVisible`] for GPU memory; [`Error::Failed`] if the kernel refuses, or the range is empty or not inside the
    /// memory.
    #[doc(alias = "MAP_PRIVATE")]
    pub fn map_private(&self, offset: usize, len: usize) -> Result<PrivateMap> {
        let backend = self.backend();
        let (device, raw) = (self.core.allocation.device(), self.core.allocation.raw());
        // SAFETY: the allocation is live, since `self` holds it.
        let mapped = unsafe { backend.memory().map_private(raw, offset, len) }
            .map_err(|cause| backend.to_error(device, Attempt::Map { len, offset }, cause))?;
        mapped.ok_or_else(|| Error::NotHostVisible { device: backend.label(device) })
    }

    /// Revokes the CPU's access to the mapping in a forked child that inherited it: a later access in the child raises `SIGSEGV`.
    /// Use this function for memory that only the parent may read. The call allocates nothing.
    ///
    /// # Errors
    /// [`Error::InUse`] in the process that created the mapping; [`Error::Failed`] if the kernel refuses.
    pub fn revoke_in_child(&self) -> Result<()> {
        let attempt = Attempt::Access { len: self.core.len };
        let backend = self.backend();
        if backend.check_fork(|| attempt.clone()).is_ok() {
            return Err(Error::InUse { attempt });
        }
        // SAFETY: the range stays mapped in a forked child, which releases nothing; a fault on a later access in the child is
        // intended.
        unsafe { backend.memory().revoke(self.core.at, self.core.len) }
            .map_err(|cause| backend.to_error(self.core.allocation.device(), attempt, cause))
    }

    /// Exports the mapping as a dma-buf for a network card.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the backend has no dma-buf; [`Error::Failed`].
    #[doc(alias = "cuMemGetHandleForAddressRange")]
    pub fn dma_buf(&self) -> Result<OwnedFd> {
        let attempt = || Attempt::Access { len: self.core.len };
        let backend = self.backend();
        backend.check_fork(attempt)?;
        // SAFETY: the range is mapped while `self` lives.
        unsafe { backend.memory().dma_buf(self.core.at, self.core.len) }
            .map_err(|cause| backend.to_error(self.core.allocation.device(), attempt(), cause))
    }

    /// Returns a span of `len` bytes of the mapping at `offset`, for use on a stream.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn span(&self, offset: usize, len: usize) -> Result<Span> {
        self.all().part(offset, len)
    }

    /// Returns a span of the whole mapping, for use on a stream.
    #[must_use]
    pub fn all(&self) -> Span {
        let memory: Arc<dyn Addressable> = Arc::<MappingCore>::clone(&self.core);
        Span::new(memory, self.core.at, self.core.len)
    }

    /// Returns whether a clone, a span or enqueued work also holds the mapping, so that [`Mapping::unmap`] fails.
    #[must_use]
    pub fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.core) > 1
    }

    /// Removes the mapping and returns the result. Dropping the mapping does the same but ignores errors.
    ///
    /// # Errors
    /// [`Error::InUse`] while a clone, a span or enqueued work holds it; [`Error::Failed`] if the driver refuses, in which case
    /// the call is retried later.
    pub fn unmap(self) -> Result<()> {
        let (backend, device) = (self.backend().clone(), self.core.allocation.device());
        backend.check_fork(|| Attempt::Unmap)?;
        let core = Arc::into_inner(self.core).ok_or(Error::InUse { attempt: Attempt::Unmap })?;
        core.owned.tear_down().map_err(|cause| backend.to_error(device, Attempt::Unmap, cause))
    }

    /// Returns a reference that keeps the memory mapped.
    pub(super) fn operand(&self) -> Operand {
        Arc::<MappingCore>::clone(&self.core)
    }

    fn backend(&self) -> &Backend {
        self.core.owned.backend()
    }
}

/// A claimed range of a reservation, and the memory that is mapped there. Both are held until the range is unmapped.
#[derive(Debug)]
struct ClaimedRange {
    reservation: Arc<ReservationCore>,
    offset: usize,
    _allocation: Arc<AllocationCore>,
}

impl Drop for ClaimedRange {
    fn drop(&mut self) {
        self.reservation.unclaim(self.offset);
    }
}

fn check_grants(backend: &Backend, most: Rights, grants: &[Grant]) -> Result<()> {
    for &Grant { device, rights } in grants {
        backend.device(device)?;
        if rights > most {
            return Err(Error::ReadOnlyHandle { attempt: Attempt::Grant { device, rights } });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use wholemem_os::Error as OsError;

    use super::*;
    use crate::{BackendError, HostConfig};

    #[test]
    fn writes_to_a_private_mapping_do_not_reach_the_shared_memory() {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let map = device.allocate(1 << 20).unwrap().map(Rights::ReadWrite).unwrap();
        map.bytes().unwrap().write_at(100, b"shared").unwrap();
        let private = map.map_private(100, 6).unwrap();
        private.bytes().write_at(0, b"own").unwrap();
        let (mut here, mut there) = ([0; 6], [0; 6]);
        private.bytes().read_at(0, &mut here).unwrap();
        map.bytes().unwrap().read_at(100, &mut there).unwrap();
        assert_eq!((&here, &there), (b"ownred", b"shared"));
    }

    #[test]
    fn revoke_in_child_fails_in_the_process_that_created_the_mapping() {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let map = device.allocate(1 << 20).unwrap().map(Rights::Read).unwrap();
        let attempt = Attempt::Access { len: 1 << 20 };
        assert_eq!(map.revoke_in_child(), Err(Error::InUse { attempt }));
        map.bytes().unwrap().read_at(0, &mut [0]).unwrap();
    }

    #[test]
    fn a_private_mapping_beyond_the_memory_is_rejected() {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let map = device.allocate(1 << 20).unwrap().map(Rights::Read).unwrap();
        let (offset, len) = ((1 << 20) - 8, 9);
        let cause = BackendError::Os(OsError::OutOfRange { offset, len, size: 1 << 20 });
        let rejected = Error::Failed { attempt: Attempt::Map { len, offset }, cause };
        assert_eq!(map.map_private(offset, len).unwrap_err(), rejected);
    }
}
