//! Notifies a caller of the failure of the group, or of a rank that leaves it, while the caller is in no operation.

use std::sync::Arc;

use crate::core::{Core, Notify};
use crate::{Bootstrap, Error};

/// A registered callback. Dropping it removes the callback; a call that has begun may still be under way when the drop returns.
#[derive(Debug)]
pub struct Watch {
    core: Arc<Core>,
    number: u64,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.core.remove_watcher(self.number);
    }
}

impl Bootstrap {
    /// Calls `tell` with the error when the group fails: a rank was lost, or aborted, or an operation timed out. Also with
    /// [`Error::PeerLeft`] when another rank leaves, and with [`Error::Closed`] when this one does. If that was so before, it is
    /// called at once. The caller is the progress thread of the group, which the callback must not block, or the thread that leaves.
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
        let notify: Notify = Arc::new(tell);
        let number = core.add_watcher(Arc::clone(&notify));
        // Read after the callback was added: an event in between is reported twice, never not at all.
        let news: Vec<_> = core.state().group.news().collect();
        news.iter().for_each(|error| notify(error));
        Watch { core: Arc::clone(core), number }
    }
}

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
