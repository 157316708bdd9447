//! A pool that keeps released pinned buffers for reuse, since freeing pinned memory waits for running work.
//!
//! Freeing pinned memory makes the driver wait for all work on the device. If ranks of one process wait for each other in
//! kernels, the rank that frees would wait for a kernel that waits for this rank: a deadlock. So buffers of moderate size are
//! pooled, up to a limit; programs tend to pin buffers of the same sizes again.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::raw::Address;

/// The minimum length of a pinned buffer in bytes.
const MIN_LEN: usize = 4 << 10;

/// The maximum length of a pinned buffer that the pool keeps.
const MAX_LEN: usize = 8 << 20;

/// The maximum total length of the pinned buffers in the pool.
const MAX_POOL_LEN: usize = 128 << 20;

/// A pool of unused pinned buffers, by length.
#[derive(Debug, Default)]
pub(super) struct PinnedPool {
    state: Mutex<PoolState>,
}

#[derive(Debug, Default)]
struct PoolState {
    free: BTreeMap<usize, Vec<Address>>,
    len: usize,
}

impl PinnedPool {
    /// Returns the length of the pinned buffer that is allocated for a request of `len` bytes.
    pub(super) fn round_up(len: usize) -> usize {
        if len > MAX_LEN { len } else { len.max(MIN_LEN).next_power_of_two() }
    }

    /// Takes a pinned buffer of at least `len` bytes from the pool, if there is one.
    pub(super) fn take(&self, len: usize) -> Option<Address> {
        let len = Self::round_up(len);
        let mut state = self.state();
        let at = state.free.get_mut(&len)?.pop()?;
        state.len -= len;
        Some(at)
    }

    /// Puts the pinned buffer of a request for `len` bytes into the pool. Returns `false` if the buffer is too long or the pool
    /// is full.
    pub(super) fn put(&self, at: Address, len: usize) -> bool {
        let len = Self::round_up(len);
        let mut state = self.state();
        if len > MAX_LEN || state.len + len > MAX_POOL_LEN {
            return false;
        }
        state.len += len;
        state.free.entry(len).or_default().push(at);
        true
    }

    fn state(&self) -> MutexGuard<'_, PoolState> {
        // No operation under the lock of the pool can panic halfway, so the pool is consistent even if the lock is poisoned.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pooled_buffer_is_reused_for_a_similar_length() {
        let pool = PinnedPool::default();
        assert!(pool.put(Address(1), 5000) && pool.put(Address(2), 1));
        assert_eq!(pool.take(8192), Some(Address(1)));
        assert_eq!(pool.take(8192), None);
        assert_eq!(pool.take(4096), Some(Address(2)));
    }

    #[test]
    fn long_buffers_and_buffers_beyond_the_limit_are_not_pooled() {
        let pool = PinnedPool::default();
        assert!(!pool.put(Address(1), MAX_LEN + 1));
        assert!((0..16).all(|at| pool.put(Address(at), MAX_LEN)));
        assert!(!pool.put(Address(99), 1));
        assert!(pool.take(MAX_LEN).is_some() && pool.put(Address(99), 1));
    }
}
