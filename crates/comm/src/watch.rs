//! Those who want to hear at once that the group has fallen, or that a rank has left it, while they wait for something else
//! than an operation.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::core::Core;
use crate::{Bootstrap, Error};

type Tell = Arc<dyn Fn(&Error) + Send + Sync>;

/// Who is to be told, by number.
#[derive(Default)]
pub(crate) struct Watchers {
    next: u64,
    all: BTreeMap<u64, Tell>,
}

impl fmt::Debug for Watchers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} watchers", self.all.len())
    }
}

/// A wish to be told, until it is dropped. When the drop returns, a call that was under way may still be.
#[derive(Debug)]
pub struct Watch {
    core: Arc<Core>,
    number: u64,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.core.watchers().all.remove(&self.number);
    }
}

impl Bootstrap {
    /// Calls `tell` with the fault when the group falls: a rank was lost, or aborted, or an operation timed out. Also with
    /// [`Error::PeerLeft`] when another rank leaves, and with [`Error::Closed`] when this one does. At once, if it was so
    /// already. It is called by the thread that watches over the group, which nothing may hold up, or by who leaves.
    ///
    /// ```
    /// use std::sync::mpsc;
    /// use wholemem_comm::{Bootstrap, Error, Rank};
    ///
    /// let ranks = Bootstrap::local(2)?;
    /// let (sender, receiver) = mpsc::channel();
    /// let watch = ranks[0].watch(move |error| drop(sender.send(error.clone())));
    /// ranks[1].abort();
    /// assert_eq!(receiver.recv(), Ok(Error::Aborted { by: Rank(1) }));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn watch(&self, tell: impl Fn(&Error) + Send + Sync + 'static) -> Watch {
        let core = &self.core;
        let tell: Tell = Arc::new(tell);
        let number = {
            let mut watchers = core.watchers();
            watchers.next += 1;
            let number = watchers.next;
            watchers.all.insert(number, Arc::clone(&tell));
            number
        };
        // Looked at after it was entered: what happens in between tells it twice, never not at all.
        let news: Vec<_> = core.state().standing.news().collect();
        news.iter().for_each(|error| tell(error));
        Watch { core: Arc::clone(core), number }
    }
}

impl Core {
    fn watchers(&self) -> MutexGuard<'_, Watchers> {
        self.watchers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells those who want to hear of what has happened.
    pub(crate) fn tell(&self, error: &Error) {
        // Not under the lock: one of them may drop its wish, or another's.
        let all: Vec<_> = self.watchers().all.values().cloned().collect();
        all.iter().for_each(|tell| tell(error));
    }
}

/// The place of the watchers in what a communicator shares.
pub(crate) type Place = Mutex<Watchers>;

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::Rank;

    #[test]
    fn who_watches_is_told_once_and_also_if_late() {
        let ranks = Bootstrap::local(2).unwrap();
        let (sender, receiver) = mpsc::channel();
        let tell = {
            let sender = sender.clone();
            move |error: &Error| sender.send(error.clone()).unwrap()
        };
        let _early = ranks[0].watch(tell);
        let forgotten = ranks[0].watch(|_| panic!("it was dropped"));
        drop(forgotten);
        ranks[1].abort();
        assert_eq!(receiver.recv(), Ok(Error::Aborted { by: Rank(1) }));
        let _late = ranks[0].watch(move |error| sender.send(error.clone()).unwrap());
        assert_eq!(receiver.recv(), Ok(Error::Aborted { by: Rank(1) }));
        assert!(receiver.try_recv().is_err(), "the first one was told already");
    }

    #[test]
    fn who_watches_is_told_once_of_each_that_leaves() {
        let ranks = Bootstrap::local(3).unwrap();
        let (sender, receiver) = mpsc::channel();
        let tell = || {
            let sender = sender.clone();
            move |error: &Error| sender.send(error.clone()).unwrap()
        };
        let _early = ranks[0].watch(tell());
        ranks[2].leave();
        assert_eq!(receiver.recv(), Ok(Error::PeerLeft { rank: Rank(2) }));
        ranks[0].leave();
        assert_eq!(receiver.recv(), Ok(Error::Closed));
        ranks[0].leave();
        let _late = ranks[0].watch(tell());
        assert_eq!(receiver.recv(), Ok(Error::Closed));
        assert_eq!(receiver.recv(), Ok(Error::PeerLeft { rank: Rank(2) }));
        assert!(receiver.try_recv().is_err(), "all was told");
    }
}
