//! Callbacks that are called when the group fails or a rank leaves it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, MutexGuard, PoisonError};

use super::RankCore;
use crate::Error;

pub(crate) type FailureCallback = Arc<dyn Fn(&Error) + Send + Sync>;

/// The registered failure callbacks of a communicator, by number.
#[derive(Default)]
pub(super) struct Watchers {
    next: u64,
    all: BTreeMap<u64, FailureCallback>,
}

impl fmt::Debug for Watchers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} watchers", self.all.len())
    }
}

impl RankCore {
    fn watchers(&self) -> MutexGuard<'_, Watchers> {
        self.watchers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a failure callback, and returns the number that identifies it.
    pub(crate) fn add_watcher(&self, notify: FailureCallback) -> u64 {
        let mut watchers = self.watchers();
        watchers.next += 1;
        let number = watchers.next;
        watchers.all.insert(number, notify);
        number
    }

    pub(crate) fn remove_watcher(&self, number: u64) {
        self.watchers().all.remove(&number);
    }

    /// Calls all registered failure callbacks with an error.
    pub(crate) fn notify(&self, error: &Error) {
        // The callbacks run after the lock is released, because a callback may unregister itself or another callback.
        let all: Vec<_> = self.watchers().all.values().cloned().collect();
        all.iter().for_each(|notify| notify(error));
    }
}
