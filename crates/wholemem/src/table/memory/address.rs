//! Reserves addresses that are free on all ranks, so that a pointer is valid on every rank.

use std::hash::{BuildHasher, RandomState};

use wholemem_comm::Rank;
use wholemem_hal::{Backend, Granule, Reservation};

use crate::communicator::words_of;
use crate::{Communicator, Error, Result};

/// The maximum number of address ranges to try. Address spaces are nearly empty, so each range is probably free.
const MAX_ATTEMPTS: u32 = 16;

/// The addresses from which a range is chosen first: far from programs, libraries and stacks, on CPUs with at least 47 address
/// bits.
const FROM: u64 = 32 << 40;
const TO: u64 = 80 << 40;

/// The distance in bytes between two address ranges to try: at least the largest granule.
const STEP: u64 = 1 << 30;

/// Reserves `len` bytes of addresses, aligned to a granule, at any free address.
pub(super) fn reserve(backend: &Backend, len: usize, granule: Granule) -> wholemem_hal::Result<Reservation> {
    Reservation::create_aligned(backend, len, granule.len())
}

/// Reserves `len` bytes of addresses at the same address on all ranks. Collective. Only ranks that pass a backend reserve
/// addresses and get a reservation. Rank 0 must pass a backend.
pub(super) fn reserve_common(
    group: &Communicator,
    backend: Option<&Backend>,
    len: usize,
    granule: Granule,
) -> Result<Option<Reservation>> {
    let comm = group.bootstrap();
    // Reservations that some rank could not make are held until the end, so that the system does not choose the same range again.
    let mut refused = Vec::new();
    for attempt in 0..MAX_ATTEMPTS {
        let proposed = match backend {
            Some(backend) if group.rank() == Rank(0) => propose(backend, len, granule, attempt).ok(),
            _ => None,
        };
        let address =
            comm.broadcast(Rank(0), &proposed.as_ref().map_or(0, Reservation::address).to_le_bytes())?;
        let [address] = words_of(Rank(0), &address)?;
        let (reserved, done) = match (backend, proposed) {
            _ if address == 0 => (None, false),
            (None, _) => (None, true),
            (Some(_), Some(proposed)) => (Some(proposed), true),
            (Some(backend), None) => {
                let reserved = Reservation::create_at(backend, len, address).ok();
                let done = reserved.is_some();
                (reserved, done)
            }
        };
        let all_done = comm.all_gather(&[u8::from(done)])?.iter().all(|done| done == &[1]);
        if all_done {
            return Ok(reserved);
        }
        refused.push(reserved);
    }
    Err(Error::NoCommonAddress { len, tried: MAX_ATTEMPTS })
}

/// Reserves an address range that is free on this rank: one far from programs and libraries, or in every second attempt one that
/// the system chooses.
fn propose(backend: &Backend, len: usize, granule: Granule, attempt: u32) -> Result<Reservation> {
    let anywhere = || reserve(backend, len, granule).map_err(Error::from);
    if attempt % 2 == 1 {
        return anywhere();
    }
    let places = (TO - FROM) / STEP;
    let place = FROM + RandomState::new().hash_one(attempt) % places * STEP;
    Reservation::create_at(backend, len, place).or_else(|_| anywhere())
}
