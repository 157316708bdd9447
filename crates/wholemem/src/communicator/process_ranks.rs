//! The ranks of a group that are in this process. They share one mapping of each shared memory.
//!
//! ```text
//!   process A                                   process B
//!   rank 0 (device 0), rank 1 (device 1)        rank 2
//!        \________ one mapping ____/               one mapping    of all three ranks' memory
//! ```
//!
//! Ranks of one process share an address space, so two ranks cannot map the same memory at equal addresses, and two mappings would
//! need twice the page tables. Of the ranks that opened the same backend, the lowest one maps the memory
//! for all their devices, and passes the mappings to the others ([`put`](ProcessRanks::put), [`take`](ProcessRanks::take)). The
//! collective vote between the two calls orders them, so no rank waits.

use std::any::{Any, TypeId};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

use wholemem_comm::Rank;
use wholemem_hal::{Device, Grant, Rights};

use crate::error::Result;

/// Identifies a group of ranks within a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct GroupId(pub(crate) [u8; 16]);

impl GroupId {
    pub(crate) fn random() -> Self {
        let word = || RandomState::new().build_hasher().finish().to_ne_bytes();
        let mut id = [0; 16];
        id[..8].copy_from_slice(&word());
        id[8..].copy_from_slice(&word());
        Self(id)
    }

    /// Decodes the group id that rank 0 broadcast.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let what = "the id of its group has an invalid length";
        let broken = |_| wholemem_comm::Error::Protocol { rank: Rank(0), what };
        Ok(Self(bytes.try_into().map_err(broken)?))
    }
}

/// All groups that have a rank in this process.
static GROUPS: LazyLock<Mutex<HashMap<GroupId, Weak<ProcessRanks>>>> = LazyLock::new(Mutex::default);

/// The ranks of one group that are in this process.
#[derive(Debug)]
pub(crate) struct ProcessRanks {
    id: GroupId,
    state: Mutex<ProcessRanksState>,
}

#[derive(Debug, Default)]
struct ProcessRanksState {
    members: BTreeMap<Rank, Device>,
    /// The values that one rank of this process passes to another, by the sending and the receiving rank and the type. A rank may pass
    /// the value of its next collective call before the other rank has taken that of this call.
    passed: HashMap<(Rank, Rank, TypeId), VecDeque<Box<dyn Any + Send>>>,
}

impl ProcessRanks {
    /// Adds a rank with its device to the ranks of its group in this process.
    pub(crate) fn join(id: GroupId, rank: Rank, device: &Device) -> Arc<Self> {
        let mut groups = lock(&GROUPS);
        let group = groups.get(&id).and_then(Weak::upgrade).unwrap_or_else(|| {
            let group = Arc::new(Self { id, state: Mutex::default() });
            groups.insert(id, Arc::downgrade(&group));
            group
        });
        drop(groups);
        group.state().members.insert(rank, device.clone());
        group
    }

    /// Returns the ranks of this process on the same backend as `rank`, including itself, in ascending order. They share
    /// mappings. All ranks must have joined.
    pub(crate) fn ranks_on_backend(&self, rank: Rank) -> Vec<Rank> {
        let state = self.state();
        let own = state.members.get(&rank).expect("a rank joins before its communicator is created");
        let on_backend = state.members.iter().filter(|(_, device)| device.backend() == own.backend());
        on_backend.map(|(rank, _)| *rank).collect()
    }

    /// Returns grants of read and write access for the devices of `ranks`, each device once.
    pub(crate) fn grants(&self, ranks: &[Rank]) -> Vec<Grant> {
        let state = self.state();
        let mut devices: Vec<_> =
            ranks.iter().filter_map(|rank| Some(state.members.get(rank)?.id())).collect();
        devices.sort_unstable();
        devices.dedup();
        devices.into_iter().map(|device| Grant { device, rights: Rights::ReadWrite }).collect()
    }

    /// Stores a value that rank `from` passes to rank `to` of this process.
    pub(crate) fn put<T: Any + Send>(&self, from: Rank, to: Rank, value: T) {
        self.state().passed.entry((from, to, TypeId::of::<T>())).or_default().push_back(Box::new(value));
    }

    /// Takes the oldest value of a type that rank `from` of this process has stored for rank `to`.
    pub(crate) fn take<T: Any>(&self, from: Rank, to: Rank) -> Option<T> {
        let mut state = self.state();
        let values = state.passed.get_mut(&(from, to, TypeId::of::<T>()))?;
        let value = values.pop_front()?;
        drop(state);
        value.downcast().ok().map(|value| *value)
    }

    fn state(&self) -> MutexGuard<'_, ProcessRanksState> {
        lock(&self.state)
    }
}

impl Drop for ProcessRanks {
    fn drop(&mut self) {
        let mut groups = lock(&GROUPS);
        // A rank may have joined the group again and inserted a new entry, which must remain.
        if groups.get(&self.id).is_some_and(|group| group.strong_count() == 0) {
            groups.remove(&self.id);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change under this lock is one insert, one push or one pop, so the map is consistent after a panic.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use wholemem_hal::{Backend, DeviceId, HostConfig};

    use super::*;

    #[test]
    fn ranks_on_one_backend_share_mappings() {
        let backend = Backend::host(HostConfig::virtual_devices(2)).unwrap();
        let other = Backend::host(HostConfig::default()).unwrap();
        let id = GroupId::random();
        let devices = [backend.device(0), other.device(0), backend.device(1), backend.device(0)];
        let groups: Vec<_> = (0..)
            .map(Rank)
            .zip(devices)
            .map(|(rank, device)| ProcessRanks::join(id, rank, &device.unwrap()))
            .collect();
        assert!(groups.iter().all(|group| Arc::ptr_eq(group, &groups[0])));
        assert_eq!(groups[0].ranks_on_backend(Rank(2)), [Rank(0), Rank(2), Rank(3)]);
        assert_eq!(groups[0].ranks_on_backend(Rank(1)), [Rank(1)]);
        let granted: Vec<_> =
            groups[0].grants(&groups[0].ranks_on_backend(Rank(0))).iter().map(|grant| grant.device).collect();
        assert_eq!(granted, [DeviceId(0), DeviceId(1)]);
    }

    #[test]
    fn a_value_is_taken_once_and_only_by_its_receiver() {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let group = ProcessRanks::join(GroupId::random(), Rank(0), &device);
        group.put(Rank(0), Rank(1), 7_u32);
        assert_eq!(group.take::<u32>(Rank(0), Rank(2)), None);
        assert_eq!(group.take::<u32>(Rank(0), Rank(1)), Some(7));
        assert_eq!(group.take::<u32>(Rank(0), Rank(1)), None);
    }

    #[test]
    fn values_are_taken_in_the_order_in_which_they_were_put() {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let group = ProcessRanks::join(GroupId::random(), Rank(0), &device);
        [1_u32, 2].into_iter().for_each(|value| group.put(Rank(0), Rank(1), value));
        group.put(Rank(0), Rank(1), 'a');
        assert_eq!(group.take::<char>(Rank(0), Rank(1)), Some('a'));
        assert_eq!([(); 3].map(|()| group.take::<u32>(Rank(0), Rank(1))), [Some(1), Some(2), None]);
    }

    #[test]
    fn a_group_without_members_is_removed() {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let id = GroupId::random();
        drop(ProcessRanks::join(id, Rank(0), &device));
        assert!(!lock(&GROUPS).contains_key(&id));
    }
}
