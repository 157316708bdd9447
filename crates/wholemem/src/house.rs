//! Ranks of one process, which share one map of each memory.
//!
//! ```text
//!   process A                                   process B
//!   rank 0 (device 0), rank 1 (device 1)        rank 2
//!        \________ one map ________/               one map        of all three ranks' memory
//! ```
//!
//! A process has one set of addresses, so that two ranks in it could not have the same memory at equal addresses, and
//! two maps would cost twice the page tables. The lowest rank of those that opened the same backend maps, for all their
//! devices; the others take the maps over. What one leaves here, another finds: the agreement between the two orders
//! it, so nobody waits.

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

use wholemem_comm::Rank;
use wholemem_hal::{Device, Grant, Rights};

use crate::Result;

/// What tells one group from another in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Nonce(pub(crate) [u8; 16]);

impl Nonce {
    pub(crate) fn fresh() -> Self {
        let word = || RandomState::new().build_hasher().finish().to_ne_bytes();
        let mut nonce = [0; 16];
        nonce[..8].copy_from_slice(&word());
        nonce[8..].copy_from_slice(&word());
        Self(nonce)
    }

    /// The nonce that rank 0 has told.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let what = "the nonce of its group has another length";
        let broken = |_| wholemem_comm::Error::Protocol { rank: Rank(0), what };
        Ok(Self(bytes.try_into().map_err(broken)?))
    }
}

/// The houses of this process, for as long as somebody lives in them.
static HOUSES: LazyLock<Mutex<HashMap<Nonce, Weak<House>>>> = LazyLock::new(Mutex::default);

/// Where the ranks of one group that are in this process meet.
#[derive(Debug)]
pub(crate) struct House {
    nonce: Nonce,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    members: BTreeMap<Rank, Device>,
    /// What was left by a rank for another.
    left: HashMap<(Rank, Rank), Box<dyn Any + Send>>,
}

impl House {
    /// Enters as a rank with a device.
    pub(crate) fn enter(nonce: Nonce, rank: Rank, device: &Device) -> Arc<Self> {
        let mut houses = lock(&HOUSES);
        let house = houses.get(&nonce).and_then(Weak::upgrade).unwrap_or_else(|| {
            let house = Arc::new(Self { nonce, state: Mutex::default() });
            houses.insert(nonce, Arc::downgrade(&house));
            house
        });
        drop(houses);
        house.state().members.insert(rank, device.clone());
        house
    }

    /// The ranks here that share maps with `rank`, itself among them, lowest first. All have entered.
    pub(crate) fn family(&self, rank: Rank) -> Vec<Rank> {
        let state = self.state();
        let Some(own) = state.members.get(&rank) else { return vec![rank] };
        let related = state.members.iter().filter(|(_, device)| device.backend() == own.backend());
        related.map(|(rank, _)| *rank).collect()
    }

    /// Full rights for the device of each of `ranks`, each device once.
    pub(crate) fn grants(&self, ranks: &[Rank]) -> Vec<Grant> {
        let state = self.state();
        let mut devices: Vec<_> =
            ranks.iter().filter_map(|rank| Some(state.members.get(rank)?.id())).collect();
        devices.sort_unstable();
        devices.dedup();
        devices.into_iter().map(|device| Grant { device, rights: Rights::ReadWrite }).collect()
    }

    /// Leaves something for another rank.
    pub(crate) fn leave(&self, from: Rank, to: Rank, what: impl Any + Send) {
        self.state().left.insert((from, to), Box::new(what));
    }

    /// Takes what another rank has left.
    pub(crate) fn take<T: Any>(&self, from: Rank, to: Rank) -> Option<T> {
        let left = self.state().left.remove(&(from, to))?;
        left.downcast().ok().map(|left| *left)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl Drop for House {
    fn drop(&mut self) {
        let mut houses = lock(&HOUSES);
        // Another rank may have come back to an empty house in the meantime, and built a new one.
        if houses.get(&self.nonce).is_some_and(|house| house.strong_count() == 0) {
            houses.remove(&self.nonce);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is one insert or one remove, so a panic elsewhere does not spoil it.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use wholemem_hal::{Backend, DeviceId, HostConfig};

    use super::*;

    #[test]
    fn ranks_of_one_backend_are_a_family() {
        let backend = Backend::host(HostConfig::virtual_devices(2)).unwrap();
        let other = Backend::host(HostConfig::default()).unwrap();
        let nonce = Nonce::fresh();
        let devices = [backend.device(0), other.device(0), backend.device(1), backend.device(0)];
        let houses: Vec<_> = (0..)
            .map(Rank)
            .zip(devices)
            .map(|(rank, device)| House::enter(nonce, rank, &device.unwrap()))
            .collect();
        assert!(houses.iter().all(|house| Arc::ptr_eq(house, &houses[0])));
        assert_eq!(houses[0].family(Rank(2)), [Rank(0), Rank(2), Rank(3)]);
        assert_eq!(houses[0].family(Rank(1)), [Rank(1)]);
        let granted: Vec<_> =
            houses[0].grants(&houses[0].family(Rank(0))).iter().map(|grant| grant.device).collect();
        assert_eq!(granted, [DeviceId(0), DeviceId(1)]);
    }

    #[test]
    fn what_is_left_for_a_rank_is_taken_once_and_by_it_alone() {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let house = House::enter(Nonce::fresh(), Rank(0), &device);
        house.leave(Rank(0), Rank(1), 7_u32);
        assert_eq!(house.take::<u32>(Rank(0), Rank(2)), None);
        assert_eq!(house.take::<u32>(Rank(0), Rank(1)), Some(7));
        assert_eq!(house.take::<u32>(Rank(0), Rank(1)), None);
    }

    #[test]
    fn an_empty_house_is_forgotten() {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let nonce = Nonce::fresh();
        drop(House::enter(nonce, Rank(0), &device));
        assert!(!lock(&HOUSES).contains_key(&nonce));
    }
}
