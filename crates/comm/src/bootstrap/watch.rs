//! Callbacks for the failure of a group and for ranks that leave the group, called even while no operation is in
//! progress.

use std::sync::Arc;

use crate::core::{FailureCallback, RankCore};
use crate::{Bootstrap, Error};

/// A registered failure callback. Dropping this value unregisters the callback; a call that has begun may continue
/// after the drop.
#[derive(Debug)]
pub struct FailureWatch {
    core: Arc<RankCore>,
    number: u64,
}

impl Drop for FailureWatch {
    fn drop(&mut self) {
        self.core.remove_watcher(self.number);
    }
}

impl Bootstrap {
    /// Registers a callback for the failure of the group: a rank died or aborted, or an operation timed out. The
    /// callback is also called with [`Error::PeerLeft`] when another rank leaves, and with [`Error::Closed`] when this
    /// rank leaves. Events that have already occurred are reported at once. The callback runs in the progress thread of
    /// the group, which it must not block, or in the thread that leaves.
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
    pub fn watch(&self, callback: impl Fn(&Error) + Send + Sync + 'static) -> FailureWatch {
        let core = &self.core;
        let notify: FailureCallback = Arc::new(callback);
        let number = core.add_watcher(Arc::clone(&notify));
        // Past events are read after the callback is registered: an event in between is reported twice, but never lost.
        let events: Vec<_> = core.state().group.past_events().collect();
        events.iter().for_each(|error| notify(error));
        FailureWatch { core: Arc::clone(core), number }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::Rank;

    #[test]
    fn a_failure_is_reported_once_to_each_callback_and_also_to_late_ones() {
        let ranks = Bootstrap::local(2).unwrap();
        let (sender, receiver) = mpsc::channel();
        let callback = {
            let sender = sender.clone();
            move |error: &Error| sender.send(error.clone()).unwrap()
        };
        let _early = ranks[0].watch(callback);
        let dropped = ranks[0].watch(|_| panic!("the callback was removed"));
        drop(dropped);
        ranks[1].abort();
        assert_eq!(receiver.recv(), Ok(Error::Aborted { by: Rank(1) }));
        let _late = ranks[0].watch(move |error| sender.send(error.clone()).unwrap());
        assert_eq!(receiver.recv(), Ok(Error::Aborted { by: Rank(1) }));
        assert!(receiver.try_recv().is_err(), "each callback was called once");
    }

    #[test]
    fn each_rank_that_leaves_is_reported_once() {
        let ranks = Bootstrap::local(3).unwrap();
        let (sender, receiver) = mpsc::channel();
        let callback = || {
            let sender = sender.clone();
            move |error: &Error| sender.send(error.clone()).unwrap()
        };
        let _early = ranks[0].watch(callback());
        ranks[2].leave();
        assert_eq!(receiver.recv(), Ok(Error::PeerLeft { rank: Rank(2) }));
        ranks[0].leave();
        assert_eq!(receiver.recv(), Ok(Error::Closed));
        ranks[0].leave();
        let _late = ranks[0].watch(callback());
        assert_eq!(receiver.recv(), Ok(Error::Closed));
        assert_eq!(receiver.recv(), Ok(Error::PeerLeft { rank: Rank(2) }));
        assert!(receiver.try_recv().is_err(), "no further event is reported");
    }
}
