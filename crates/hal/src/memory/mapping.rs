//! A whole allocation at a place of a reservation, with rights for each device.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use wholemem_os::{PrivateMap, SharedSlice};

use super::{Addressable, Allocation, AllocationCore, Reservation, ReservationCore, Span};
use crate::backend::{Operand, Owned, Teardown};
use crate::raw::Address;
use crate::values::RightsTable;
use crate::{Attempt, Backend, Device, DeviceId, Error, Grant, Result, Rights};

/// A whole allocation, mapped. It holds the allocation and the reservation; enqueued work holds it.
///
/// Clones are the same map, which is removed when the last of them, and the last work that uses it, is gone.
#[derive(Debug, Clone)]
#[doc(alias = "cuMemMap")]
pub struct Mapping {
    core: Arc<MappingCore>,
}

#[derive(Debug)]
struct MappingCore {
    owned: Owned,
    allocation: Arc<AllocationCore>,
    at: Address,
    len: usize,
    rights: Mutex<RightsTable>,
}

impl MappingCore {
    fn rights(&self) -> MutexGuard<'_, RightsTable> {
        // The table is replaced in one assignment, so a panic elsewhere does not spoil it.
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
    /// Maps all of `allocation` at `offset` of `reservation`, and grants rights to devices.
    ///
    /// # Errors
    /// [`Error::UnalignedOffset`], [`Error::BeyondReservation`], [`Error::Occupied`], [`Error::NoSuchDevice`],
    /// [`Error::ReadOnlyHandle`], [`Error::WrongBackend`]; [`Error::Failed`] when the driver refuses. Nothing is mapped
    /// then.
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
        reservation.take(offset, len)?;
        let place = Place { reservation: Arc::clone(reservation), offset, _allocation: Arc::clone(memory) };
        let at = reservation.address(offset);
        // SAFETY: the place is inside the reservation, aligned, and ours alone since `take`; the allocation is live and
        // `len` is all of it; this is no forked child.
        unsafe { backend.memory().map(at, len, memory.raw()) }
            .map_err(|cause| backend.refused(memory.device(), attempt(), cause))?;
        let owned = Owned::new(backend, Teardown::Unmap { at, len, _place: Arc::new(place) });
        let rights = Mutex::default();
        let mapping =
            Self { core: Arc::new(MappingCore { owned, allocation: Arc::clone(memory), at, len, rights }) };
        mapping.grant(grants)?;
        Ok(mapping)
    }

    /// Grants more rights. Rights only grow while a map lives, so that nothing enqueued or viewed loses them midway;
    /// to take rights away, map again.
    ///
    /// # Errors
    /// [`Error::NoSuchDevice`], [`Error::ReadOnlyHandle`]; [`Error::Failed`] when the driver refuses. Rights are as
    /// before then.
    #[doc(alias = "cuMemSetAccess")]
    pub fn grant(&self, grants: &[Grant]) -> Result<()> {
        let Some(first) = grants.first() else { return Ok(()) };
        let attempt = || Attempt::Grant { device: first.device, rights: first.rights };
        let backend = self.backend();
        backend.check_fork(attempt)?;
        check_grants(backend, self.core.allocation.rights(), grants)?;
        let mut rights = self.core.rights();
        let wider = rights.with(grants);
        // SAFETY: the range is mapped as long as `self` lives, and no right goes.
        unsafe { backend.memory().set_access(self.core.at, self.core.len, wider.grants()) }
            .map_err(|cause| backend.refused(first.device, attempt(), cause))?;
        *rights = wider;
        Ok(())
    }

    /// What a device may do with it.
    #[must_use]
    pub fn rights_of(&self, device: impl Into<DeviceId>) -> Rights {
        self.core.rights_of(device.into())
    }

    /// Where it begins, as the devices see it.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.core.at.0
    }

    /// Its length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "an allocation is never empty")]
    pub fn len(&self) -> usize {
        self.core.len
    }

    /// The device whose memory it shows.
    #[must_use]
    pub fn device(&self) -> Device {
        Device::new(self.backend().clone(), self.core.allocation.device())
    }

    /// The bytes, for the processor, as shared bytes are to be reached. They are writable if any device may write.
    ///
    /// # Errors
    /// [`Error::NotHostVisible`] for memory of a GPU; [`Error::Denied`] when no right was granted; [`Error::Failed`].
    pub fn bytes(&self) -> Result<SharedSlice<'_>> {
        let attempt = || Attempt::Access { len: self.core.len };
        self.backend().check_fork(attempt)?;
        let who = self.backend().label(self.core.allocation.device());
        let at = self.backend().memory().host_pointer(self.core.at);
        let device = self.core.allocation.device();
        let at = at.map_err(|cause| self.backend().refused(device, attempt(), cause))?;
        let Some(at) = at else {
            return Err(Error::NotHostVisible { device: who });
        };
        let granted = self.core.rights().highest();
        if granted == Rights::None {
            return Err(Error::Denied { attempt: attempt(), who, granted, needed: Rights::Read });
        }
        // SAFETY: the range is mapped with these rights as long as `self` is borrowed, rights only grow, its memory
        // cannot shrink, and nothing here makes references to its bytes.
        Ok(unsafe { SharedSlice::new(at, self.core.len, granted == Rights::ReadWrite) })
    }

    /// Enters all of it into the processor's page table at once, instead of a page with each first touch.
    ///
    /// # Errors
    /// [`Error::Denied`] when no right was granted; [`Error::Failed`] where the kernel cannot: it is a matter of speed
    /// alone.
    pub fn populate(&self) -> Result<()> {
        let attempt = || Attempt::Populate { len: self.core.len };
        let backend = self.backend();
        backend.check_fork(attempt)?;
        let rights = self.core.rights().highest();
        if rights == Rights::None {
            let who = backend.label(self.core.allocation.device());
            return Err(Error::Denied { attempt: attempt(), who, granted: rights, needed: Rights::Read });
        }
        // SAFETY: the range is mapped with these rights as long as `self` lives.
        unsafe { backend.memory().populate(self.core.at, self.core.len, rights) }
            .map_err(|cause| backend.refused(self.core.allocation.device(), attempt(), cause))
    }

    /// Puts its pages together to large ones, once for all who map the memory, so that the processor finds them faster when
    /// it touches them in no order. For that the map must lie at a multiple of the
    /// [recommended](crate::Granularity::recommended) granule. Populates too, and takes about as long.
    ///
    /// # Errors
    /// [`Error::Failed`] where the kernel cannot, or not now: it is a matter of speed alone.
    pub fn enlarge_pages(&self) -> Result<()> {
        let attempt = || Attempt::EnlargePages { len: self.core.len };
        let backend = self.backend();
        backend.check_fork(attempt)?;
        // SAFETY: the range is mapped as long as `self` lives.
        unsafe { backend.memory().enlarge_pages(self.core.at, self.core.len) }
            .map_err(|cause| backend.refused(self.core.allocation.device(), attempt(), cause))
    }

    /// Says whether children that are forked from now on have the map as well, as they do unless this was said. Nothing is at
    /// its addresses in a child that has not: this is for maps whose addresses nobody else has been told, and it lets their
    /// memory be closed for writing while the child lives.
    ///
    /// # Errors
    /// [`Error::Failed`] where the kernel cannot.
    pub fn set_inherited(&self, is_inherited: bool) -> Result<()> {
        let attempt = || Attempt::SetInherited { len: self.core.len };
        let backend = self.backend();
        backend.check_fork(attempt)?;
        // SAFETY: the range is mapped as long as `self` lives.
        unsafe { backend.memory().set_inherited(self.core.at, self.core.len, is_inherited) }
            .map_err(|cause| backend.refused(self.core.allocation.device(), attempt(), cause))
    }

    /// Maps part of the same memory once more, copy-on-write: for code that may write it though it must not. The new map is
    /// independent of this one, and shows what this one does where it was not written. A forked child may ask too.
    ///
    /// # Errors
    /// [`Error::NotHostVisible`] for memory of a GPU; [`Error::Failed`] when the kernel refuses, also a part of no bytes or
    /// one that is not within the memory.
    #[doc(alias = "MAP_PRIVATE")]
    pub fn map_private(&self, offset: usize, len: usize) -> Result<PrivateMap> {
        let backend = self.backend();
        let (device, raw) = (self.core.allocation.device(), self.core.allocation.raw());
        // SAFETY: the allocation is live as long as `self`.
        let mapped = unsafe { backend.memory().map_private(raw, offset, len) }
            .map_err(|cause| backend.refused(device, Attempt::Map { len, offset }, cause))?;
        mapped.ok_or_else(|| Error::NotHostVisible { device: backend.label(device) })
    }

    /// In a forked child that has inherited the map, takes the processor's access to it away: whatever still reads it there is
    /// stopped by a `SIGSEGV`. For memory whose bytes are kept for the parent alone. It allocates nothing.
    ///
    /// # Errors
    /// [`Error::InUse`] in the process that made the map; [`Error::Failed`] when the kernel refuses.
    pub fn revoke_in_child(&self) -> Result<()> {
        let attempt = Attempt::Access { len: self.core.len };
        let backend = self.backend();
        if backend.check_fork(|| attempt.clone()).is_ok() {
            return Err(Error::InUse { attempt });
        }
        // SAFETY: the range stays mapped in a child, which gives nothing back; who uses it there is meant to be stopped.
        unsafe { backend.memory().revoke(self.core.at, self.core.len) }
            .map_err(|cause| backend.refused(self.core.allocation.device(), attempt, cause))
    }

    /// A dma-buf of it, for a network card.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where there is no such thing; [`Error::Failed`].
    #[doc(alias = "cuMemGetHandleForAddressRange")]
    pub fn dma_buf(&self) -> Result<OwnedFd> {
        let attempt = || Attempt::Access { len: self.core.len };
        let backend = self.backend();
        backend.check_fork(attempt)?;
        // SAFETY: the range is mapped as long as `self` lives.
        unsafe { backend.memory().dma_buf(self.core.at, self.core.len) }
            .map_err(|cause| backend.refused(self.core.allocation.device(), attempt(), cause))
    }

    /// A part of it, for a stream to work on.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn span(&self, offset: usize, len: usize) -> Result<Span> {
        self.all().part(offset, len)
    }

    /// All of it, for a stream to work on.
    #[must_use]
    pub fn all(&self) -> Span {
        let memory: Arc<dyn Addressable> = Arc::<MappingCore>::clone(&self.core);
        Span::new(memory, self.core.at, self.core.len)
    }

    /// Whether a clone, a span or enqueued work holds it as well: then it cannot be [removed](Mapping::unmap).
    #[must_use]
    pub fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.core) > 1
    }

    /// Removes the map, and says what came of it. Dropping does the same, silently.
    ///
    /// # Errors
    /// [`Error::InUse`] while a clone, a span or enqueued work holds it; [`Error::Failed`] when the driver refuses, in
    /// which case it is tried again later.
    pub fn unmap(self) -> Result<()> {
        let (backend, device) = (self.backend().clone(), self.core.allocation.device());
        backend.check_fork(|| Attempt::Unmap)?;
        let core = Arc::into_inner(self.core).ok_or(Error::InUse { attempt: Attempt::Unmap })?;
        core.owned.give_back().map_err(|cause| backend.refused(device, Attempt::Unmap, cause))
    }

    /// What keeps it mapped.
    pub(super) fn operand(&self) -> Operand {
        Arc::<MappingCore>::clone(&self.core)
    }

    fn backend(&self) -> &Backend {
        self.core.owned.backend()
    }
}

/// A taken place in a reservation, with the memory mapped there: both stay until the place is empty again.
#[derive(Debug)]
struct Place {
    reservation: Arc<ReservationCore>,
    offset: usize,
    _allocation: Arc<AllocationCore>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.reservation.vacate(self.offset);
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
    use crate::{Cause, HostConfig};

    #[test]
    fn a_private_map_is_written_alone() {
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
    fn access_is_not_taken_away_in_the_process_that_made_the_map() {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let map = device.allocate(1 << 20).unwrap().map(Rights::Read).unwrap();
        let attempt = Attempt::Access { len: 1 << 20 };
        assert_eq!(map.revoke_in_child(), Err(Error::InUse { attempt }));
        map.bytes().unwrap().read_at(0, &mut [0]).unwrap();
    }

    #[test]
    fn a_private_map_beyond_the_memory_is_refused() {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let map = device.allocate(1 << 20).unwrap().map(Rights::Read).unwrap();
        let (offset, len) = ((1 << 20) - 8, 9);
        let cause = Cause::Os(OsError::OutOfRange { offset, len, size: 1 << 20 });
        let refused = Error::Failed { attempt: Attempt::Map { len, offset }, cause };
        assert_eq!(map.map_private(offset, len).unwrap_err(), refused);
    }
}
