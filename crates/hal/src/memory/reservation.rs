//! Addresses, reserved before there is memory for them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::backend::{Owned, Teardown};
use crate::raw::Address;
use crate::{Attempt, Backend, DeviceId, Error, Result};

/// A range of addresses with nothing behind it yet. Allocations, also of different devices, are [mapped](crate::Mapping)
/// into it side by side, and become one memory.
///
/// ```
/// use wholemem_hal::{Backend, Grant, HostConfig, Mapping, Reservation, Rights};
///
/// let backend = Backend::host(HostConfig::virtual_devices(2))?;
/// let whole = Reservation::create(&backend, 2 << 20)?;
/// let everyone = [0, 1].map(|id| Grant { device: id.into(), rights: Rights::ReadWrite });
///
/// let halves = [0, 1].map(|id| backend.device(id)?.allocate(1 << 20));
/// let mut maps = Vec::new();
/// for (index, half) in halves.into_iter().enumerate() {
///     maps.push(Mapping::create(&whole, index << 20, &half?, &everyone)?);
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
    owned: Owned,
    at: Address,
    len: usize,
    /// What is mapped: length by offset, without overlaps.
    taken: Mutex<BTreeMap<usize, usize>>,
}

impl ReservationCore {
    pub(crate) fn backend(&self) -> &Backend {
        self.owned.backend()
    }

    pub(crate) fn address(&self, offset: usize) -> Address {
        self.at.after(offset)
    }

    /// Takes a place, unless it lies outside or overlaps another.
    pub(crate) fn take(&self, offset: usize, len: usize) -> Result<()> {
        let attempt = || Attempt::Map { len, offset };
        let Some(end) = offset.checked_add(len).filter(|&end| end <= self.len) else {
            return Err(Error::BeyondReservation { attempt: attempt(), reserved: self.len });
        };
        let mut taken = self.taken();
        // The last place that begins before our end is the only one that can reach into ours.
        if let Some((&taken_offset, &taken_len)) = taken.range(..end).next_back()
            && taken_offset + taken_len > offset
        {
            return Err(Error::Occupied { attempt: attempt(), taken_offset, taken_len });
        }
        taken.insert(offset, len);
        Ok(())
    }

    /// Gives a place up again.
    pub(crate) fn vacate(&self, offset: usize) {
        self.taken().remove(&offset);
    }

    fn taken(&self) -> MutexGuard<'_, BTreeMap<usize, usize>> {
        // Each change is one insert or one remove, so a panic elsewhere does not spoil it.
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reservation {
    /// Reserves `len` bytes of addresses, wherever they are free.
    ///
    /// # Errors
    /// [`Error::ZeroLength`]; [`Error::UnalignedLength`]; [`Error::Failed`] when no such range is free.
    pub fn create(backend: &Backend, len: usize) -> Result<Self> {
        Self::place(backend, len, None, None)
    }

    /// Reserves `len` bytes of addresses that begin at a multiple of `align`.
    ///
    /// # Errors
    /// As [`Reservation::create`]; [`Error::BadAlignment`] unless `align` is a power of two.
    pub fn create_aligned(backend: &Backend, len: usize, align: usize) -> Result<Self> {
        if !align.is_power_of_two() {
            return Err(Error::BadAlignment { attempt: Attempt::Reserve { len }, align });
        }
        Self::place(backend, len, Some(align), None)
    }

    /// Reserves `len` bytes of addresses that begin at `address`, so that several processes can have the same memory
    /// at the same place.
    ///
    /// # Errors
    /// As [`Reservation::create`]; [`Error::Failed`] when something is there already.
    pub fn create_at(backend: &Backend, len: usize, address: u64) -> Result<Self> {
        Self::place(backend, len, None, Some(Address(address)))
    }

    fn place(backend: &Backend, len: usize, align: Option<usize>, wanted: Option<Address>) -> Result<Self> {
        let attempt = || Attempt::Reserve { len };
        // Addresses belong to all devices; the first one's granule stands for them.
        let first = backend.device(0)?;
        backend.check_fork(attempt)?;
        if len == 0 {
            return Err(Error::ZeroLength { attempt: attempt() });
        }
        let granule = first.granularity()?.minimum;
        if !granule.divides(len) {
            return Err(Error::UnalignedLength { attempt: attempt(), granule: granule.len() });
        }
        // SAFETY: the length is whole granules and not zero, and this is no forked child.
        let at = unsafe { backend.memory().reserve(len, align, wanted) }
            .map_err(|cause| backend.refused(first.id(), attempt(), cause))?;
        let owned = Owned::new(backend, Teardown::Free { at, len });
        Ok(Self { core: Arc::new(ReservationCore { owned, at, len, taken: Mutex::default() }) })
    }

    /// Where it begins, as the devices see it.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.core.at.0
    }

    /// Its length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a reservation is never empty")]
    pub fn len(&self) -> usize {
        self.core.len
    }

    /// Gives the addresses back, and says what came of it. Dropping does the same, silently.
    ///
    /// # Errors
    /// [`Error::InUse`] while something is mapped in it or a clone of it lives; [`Error::Failed`] when the driver
    /// refuses, in which case it is tried again later.
    pub fn free(self) -> Result<()> {
        let backend = self.core.backend().clone();
        backend.check_fork(|| Attempt::Free)?;
        let core = Arc::into_inner(self.core).ok_or(Error::InUse { attempt: Attempt::Free })?;
        core.owned.give_back().map_err(|cause| backend.refused(DeviceId(0), Attempt::Free, cause))
    }

    pub(crate) fn core(&self) -> &Arc<ReservationCore> {
        &self.core
    }
}
