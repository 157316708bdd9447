//! Pinned memory that was given up, kept for whoever wants as much next.
//!
//! A driver that frees pinned memory waits for whatever runs on the device. Where ranks of one process wait for each other
//! in kernels, the one that frees would wait for a kernel that waits for it. So buffers of moderate size are kept, up to
//! a limit: what programs pin, they pin again and again.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::raw::Address;

/// The shortest buffer there is.
const SHORTEST: usize = 4 << 10;

/// The longest that is kept.
const LONGEST: usize = 8 << 20;

/// How much is kept in all.
const MOST: usize = 128 << 20;

/// Buffers that nobody uses, by their lengths.
#[derive(Debug, Default)]
pub(super) struct Parked {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    free: BTreeMap<usize, Vec<Address>>,
    len: usize,
}

impl Parked {
    /// How long a buffer is made for somebody who wants `len` bytes.
    pub(super) fn round_up(len: usize) -> usize {
        if len > LONGEST { len } else { len.max(SHORTEST).next_power_of_two() }
    }

    /// A buffer of at least `len` bytes, if one is kept.
    pub(super) fn take(&self, len: usize) -> Option<Address> {
        let len = Self::round_up(len);
        let mut state = self.state();
        let at = state.free.get_mut(&len)?.pop()?;
        state.len -= len;
        Some(at)
    }

    /// Keeps the buffer that was made for `len` bytes; `false` if it is not worth it, or there are enough.
    pub(super) fn keep(&self, at: Address, len: usize) -> bool {
        let len = Self::round_up(len);
        let mut state = self.state();
        if len > LONGEST || state.len + len > MOST {
            return false;
        }
        state.len += len;
        state.free.entry(len).or_default().push(at);
        true
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Changed in steps that cannot panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_kept_is_found_by_who_wants_about_as_much() {
        let parked = Parked::default();
        assert!(parked.keep(Address(1), 5000) && parked.keep(Address(2), 1));
        assert_eq!(parked.take(8192), Some(Address(1)));
        assert_eq!(parked.take(8192), None);
        assert_eq!(parked.take(4096), Some(Address(2)));
    }

    #[test]
    fn neither_too_long_nor_too_many_are_kept() {
        let parked = Parked::default();
        assert!(!parked.keep(Address(1), LONGEST + 1));
        assert!((0..16).all(|at| parked.keep(Address(at), LONGEST)));
        assert!(!parked.keep(Address(99), 1));
        assert!(parked.take(LONGEST).is_some() && parked.keep(Address(99), 1));
    }
}
