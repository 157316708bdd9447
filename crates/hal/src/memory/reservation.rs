//! Reserved address ranges into which memory is mapped.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::backend::{OwnedResource, Teardown};
use crate::raw::Address;
use crate::{Attempt, Backend, DeviceId, Error, Result};

/// A reserved range of addresses. Allocations, also of different devices, are [mapped](crate::Mapping) into it next to
/// each other to form one contiguous range.
///
/// ```
/// use wholemem_hal::{Backend, Grant, HostConfig, Mapping, Reservation, Rights};
///
/// let backend = Backend::host(HostConfig::virtual_devices(2))?;
/// let whole = Reservation::create(&backend, 2 << 20)?;
/// let grants = [0, 1].map(|id| Grant { device: id.into(), rights: Rights::ReadWrite });
///
/// let halves = [0, 1].map(|id| backend.device(id)?.allocate(1 << 20));
/// let mut maps = Vec::new();
/// for (index, half) in halves.into_iter().enumerate() {
///     maps.push(Mapping::create(&whole, index << 20, &half?, &grants)?);
/// }
/// assert_eq!(maps[1].address(), maps[0].address() + (1 << 20));
/// # Ok::<(), wholemem_hal::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Reservation {
    core: Arc<ReservationCore>,
}

#[derive(Debug)]
pub(crate) struct ReservationCore {
    owned: OwnedResource,
    at: Address,
    len: usize,
    /// The mapped ranges of the reservation: length by offset, without overlaps.
    mapped: Mutex<BTreeMap<usize, usize>>,
}

impl ReservationCore {
    pub(crate) fn backend(&self) -> &Backend {
        self.owned.backend()
    }

    pub(crate) fn address(&self, offset: usize) -> Address {
        self.at.after(offset)
    }

    /// Claims a range of the reservation for a mapping, unless the range is out of bounds or overlaps another
    /// mapping.
    pub(crate) fn claim(&self, offset: usize, len: usize) -> Result<()> {
        let attempt = || Attempt::Map { len, offset };
        let Some(end) = offset.checked_add(len).filter(|&end| end <= self.len) else {
            return Err(Error::BeyondReservation { attempt: attempt(), reserved: self.len });
        };
        let mut mapped = self.mapped();
        // Of the mapped ranges that begin before the end of the new one, only the last can overlap it.
        if let Some((&taken_offset, &taken_len)) = mapped.range(..end).next_back()
            && taken_offset + taken_len > offset
        {
            return Err(Error::Occupied { attempt: attempt(), taken_offset, taken_len });
        }
        mapped.insert(offset, len);
        Ok(())
    }

    /// Removes the claim of the range at `offset`, whose mapping is gone.
    pub(crate) fn unclaim(&self, offset: usize) {
        self.mapped().remove(&offset);
    }

    fn mapped(&self) -> MutexGuard<'_, BTreeMap<usize, usize>> {
        // Each change of the mapped ranges is one insert or one remove, so a panic under the lock does not corrupt
        // the map.
        self.mapped.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reservation {
    /// Reserves `len` bytes of addresses at any free address.
    ///
    /// # Errors
    /// [`Error::ZeroLength`]; [`Error::UnalignedLength`]; [`Error::Failed`] if no free range is large enough.
    pub fn create(backend: &Backend, len: usize) -> Result<Self> {
        Self::reserve(backend, len, None, None)
    }

    /// Reserves `len` bytes of addresses that begin at a multiple of `align`.
    ///
    /// # Errors
    /// As [`Reservation::create`]; [`Error::BadAlignment`] unless `align` is a power of two.
    pub fn create_aligned(backend: &Backend, len: usize, align: usize) -> Result<Self> {
        if !align.is_power_of_two() {
            return Err(Error::BadAlignment { attempt: Attempt::Reserve { len }, align });
        }
        Self::reserve(backend, len, Some(align), None)
    }

    /// Reserves `len` bytes of addresses at `address`, so that several processes can map memory at the same address.
    ///
    /// # Errors
    /// As [`Reservation::create`]; [`Error::Failed`] if the range is not free.
    pub fn create_at(backend: &Backend, len: usize, address: u64) -> Result<Self> {
        Self::reserve(backend, len, None, Some(Address(address)))
    }

    fn reserve(backend: &Backend, len: usize, align: Option<usize>, wanted: Option<Address>) -> Result<Self> {
        let attempt = || Attempt::Reserve { len };
        // Addresses belong to all devices of the backend; the granule of the first device is used for all of them.
        let first = backend.device(0)?;
        backend.check_fork(attempt)?;
        if len == 0 {
            return Err(Error::ZeroLength { attempt: attempt() });
        }
        let granule = first.granularity()?.minimum;
        if !granule.divides(len) {
            return Err(Error::UnalignedLength { attempt: attempt(), granule: granule.len() });
        }
        // SAFETY: the length is a nonzero multiple of the granule, and the process is not a forked child.
        let at = unsafe { backend.memory().reserve(len, align, wanted) }
            .map_err(|cause| backend.to_error(first.id(), attempt(), cause))?;
        let owned = OwnedResource::new(backend, Teardown::Free { at, len });
        Ok(Self { core: Arc::new(ReservationCore { owned, at, len, mapped: Mutex::default() }) })
    }

    /// Returns the first device address of the reservation.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.core.at.0
    }

    /// Returns the length of the reservation in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a reservation is never empty")]
    pub fn len(&self) -> usize {
        self.core.len
    }

    /// Frees the reserved addresses and returns the result. Dropping the reservation does the same but ignores
    /// errors.
    ///
    /// # Errors
    /// [`Error::InUse`] while memory is mapped in it or a clone of it exists; [`Error::Failed`] if the driver refuses,
    /// in which case the call is retried later.
    pub fn free(self) -> Result<()> {
        let backend = self.core.backend().clone();
        backend.check_fork(|| Attempt::Free)?;
        let core = Arc::into_inner(self.core).ok_or(Error::InUse { attempt: Attempt::Free })?;
        core.owned.tear_down().map_err(|cause| backend.to_error(DeviceId(0), Attempt::Free, cause))
    }

    pub(crate) fn core(&self) -> &Arc<ReservationCore> {
        &self.core
    }
}
