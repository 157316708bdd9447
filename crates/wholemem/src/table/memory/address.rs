//! Reservation of addresses that are free on all ranks, so that a pointer is valid on every rank.

use std::hash::{BuildHasher, RandomState};

use wholemem_comm::Rank;
use wholemem_hal::{Backend, Granule, Reservation};

use crate::communicator::words_of;
use crate::{Communicator, Error, Result};

/// The number of places to try. Address spaces are nearly empty, so each place is probably free.
const TRIES: u32 = 16;

/// The range of places to try first: far from programs, libraries and stacks, on CPUs with addresses of 47 bits and more.
const FROM: u64 = 32 << 40;
const TO: u64 = 80 << 40;

/// The distance of places: at least any granule.
const STEP: u64 = 1 << 30;

/// Reserves `len` bytes of addresses that begin on a granule, at any free place.
pub(super) fn reserve(backend: &Backend, len: usize, granule: Granule) -> wholemem_hal::Result<Reservation> {
    Reservation::create_aligned(backend, len, granule.len())
}

/// Reserves `len` bytes of addresses at the same place on all ranks. Collective; only ranks that give a backend reserve,
/// and only they get a reservation. Rank 0 gives one.
pub(super) fn reserve_common(
    group: &Communicator,
    backend: Option<&Backend>,
    len: usize,
    granule: Granule,
) -> Result<Option<Reservation>> {
    let comm = group.bootstrap();
    // Held until the end. Otherwise the same place would be found again.
    let mut refused = Vec::new();
    for attempt in 0..TRIES {
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
    Err(Error::NoCommonAddress { len, tried: TRIES })
}

/// Reserves a place that is free on this rank: a remote one, and in every other attempt one that the system chooses.
fn propose(backend: &Backend, len: usize, granule: Granule, attempt: u32) -> Result<Reservation> {
    let anywhere = || reserve(backend, len, granule).map_err(Error::from);
    if attempt % 2 == 1 {
        return anywhere();
    }
    let places = (TO - FROM) / STEP;
    let place = FROM + RandomState::new().hash_one(attempt) % places * STEP;
    Reservation::create_at(backend, len, place).or_else(|_| anywhere())
}
