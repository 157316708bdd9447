//! Callbacks that are called when the group fails or a rank leaves it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, MutexGuard, PoisonError};

use super::Core;
use crate::Error;

pub(crate) type Notify = Arc<dyn Fn(&Error) + Send + Sync>;

/// The callbacks of a communicator, by number.
#[derive(Default)]
pub(super) struct Watchers {
    next: u64,
    all: BTreeMap<u64, Notify>,
}

impl fmt::Debug for Watchers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} watchers", self.all.len())
    }
}

impl Core {
    fn watchers(&self) -> MutexGuard<'_, Watchers> {
        self.watchers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a callback, and returns its number.
    pub(crate) fn add_watcher(&self, notify: Notify) -> u64 {
        let mut watchers = self.watchers();
        watchers.next += 1;
        let number = watchers.next;
        watchers.all.insert(number, notify);
        number
    }

    pub(crate) fn remove_watcher(&self, number: u64) {
        self.watchers().all.remove(&number);
    }

    /// Calls all callbacks.
    pub(crate) fn notify(&self, error: &Error) {
        // Not under the lock: a callback may remove itself, or another.
        let all: Vec<_> = self.watchers().all.values().cloned().collect();
        all.iter().for_each(|notify| notify(error));
    }
}
