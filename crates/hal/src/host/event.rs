//! Events of the host backend: counters that streams advance and that any thread or process can wait for.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use wholemem_os::vm::{Protection, SharedMap, page_size};
use wholemem_os::{Deadline, Error, Memfd, Result, futex, memfd};

/// An event of the host backend: the counters of its issued and of its completed records.
///
/// Each record gets the next ticket; the ticket completes when the stream reaches the record. A wait is for the ticket
/// that was the latest when the wait began, so a later record neither prolongs nor ends it.
///
/// Streams with a deferred schedule may complete the records of one event out of order, so a private event stores every
/// pending ticket. A shared event stores only the highest completed ticket: its records run inline.
#[derive(Debug)]
pub struct HostEvent {
    storage: EventStorage,
}

#[derive(Debug)]
enum EventStorage {
    Private(Box<PrivateCounters>),
    Shared { memory: Memfd, map: SharedMap },
}

#[derive(Debug, Default)]
struct PrivateCounters {
    words: [AtomicU64; WORDS],
    wake_word: AtomicU32,
    waiters: AtomicU32,
    /// The tickets (numbers of event records) that were issued and have not completed.
    pending: Mutex<BTreeSet<u64>>,
}

impl PrivateCounters {
    fn pending(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        // Each change of the pending tickets is one insert or one remove, so a panic under the lock does not corrupt the set.
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The indices of the 64-bit words of an event. In shared memory, the two 32-bit words follow them.
const TICKETS: usize = 0;
const LATEST: usize = 1;
const COMPLETED: usize = 2;
const COMPLETED_AT: usize = 3;
const WORDS: usize = 4;
const WAKE_WORD_OFFSET: usize = WORDS * size_of::<u64>();
const WAITERS_OFFSET: usize = WAKE_WORD_OFFSET + size_of::<u32>();

const MAPPED: &str = "the words are aligned and inside the first page of a writable mapping";

impl HostEvent {
    /// Creates an event that only this process can use.
    #[must_use]
    pub fn private() -> Self {
        Self { storage: EventStorage::Private(Box::default()) }
    }

    /// Creates an event that can be exported to other processes.
    ///
    /// # Errors
    /// Returns an error of the operating system.
    pub fn shared() -> Result<Self> {
        Self::from_memfd(Memfd::create("wholemem-event", page_size())?)
    }

    /// Opens an event that another process exported.
    ///
    /// # Errors
    /// Returns the error of an invalid descriptor; [`Error::ReadOnly`] if it is not writable.
    pub fn import(fd: OwnedFd) -> Result<Self> {
        Self::from_memfd(Memfd::import(fd, page_size())?)
    }

    fn from_memfd(memory: Memfd) -> Result<Self> {
        let map = SharedMap::create(&memory, Protection::ReadWrite)?;
        Ok(Self { storage: EventStorage::Shared { memory, map } })
    }

    /// Duplicates the event's descriptor for another process. Returns `None` if the event is private.
    ///
    /// # Errors
    /// Returns an error of the operating system.
    pub fn export(&self) -> Result<Option<OwnedFd>> {
        match &self.storage {
            EventStorage::Private(_) => Ok(None),
            EventStorage::Shared { memory, .. } => memfd::share_fd(memory.as_fd()).map(Some),
        }
    }

    /// Returns whether other processes can wait for the event.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        matches!(self.storage, EventStorage::Shared { .. })
    }

    /// Issues the ticket (the number) of a new record of the event.
    #[must_use]
    pub fn next_ticket(&self) -> u64 {
        // The ticket counter wraps instead of panicking, since another process may have written any value.
        let ticket = self.word(TICKETS).fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        if let EventStorage::Private(counters) = &self.storage {
            counters.pending().insert(ticket);
        }
        ticket
    }

    /// Makes later waits wait for the record with this `ticket`. The caller has submitted the record before: if records run
    /// inline, this process cannot die in between and leave other processes waiting for a record that never completes.
    pub fn set_latest(&self, ticket: u64) {
        self.word(LATEST).fetch_max(ticket, Ordering::Release);
    }

    /// Returns the ticket (the number) of the latest record of the event.
    #[must_use]
    pub fn latest(&self) -> u64 {
        self.word(LATEST).load(Ordering::Acquire)
    }

    /// Returns whether the event record with this ticket has completed.
    #[must_use]
    pub fn is_complete(&self, ticket: u64) -> bool {
        match &self.storage {
            EventStorage::Private(counters) => !counters.pending().contains(&ticket),
            EventStorage::Shared { .. } => self.word(COMPLETED).load(Ordering::Acquire) >= ticket,
        }
    }

    /// Completes the event record with this ticket, and wakes the waiters.
    pub fn complete(&self, ticket: u64, now: Duration) {
        let nanos = u64::try_from(now.as_nanos())
            .expect("the monotonic clock fits 64 bits of nanoseconds for 500 years");
        self.word(COMPLETED_AT).store(nanos, Ordering::Relaxed);
        match &self.storage {
            EventStorage::Private(counters) => drop(counters.pending().remove(&ticket)),
            EventStorage::Shared { .. } => drop(self.word(COMPLETED).fetch_max(ticket, Ordering::Release)),
        }
        self.wake_word().fetch_add(1, Ordering::SeqCst);
        // Dekker: a waiter increments the waiter count before it reads the wake word, and this thread changes the wake
        // word before it reads the count. Either the waiter is counted here, or it reads the new wake word.
        if self.waiters().load(Ordering::SeqCst) > 0
            && let Err(error) = futex::wake_all(self.wake_word())
        {
            tracing::warn!(%error, "cannot wake the waiters of an event");
        }
    }

    /// Waits until the event record with this ticket completes. Returns `false` if the deadline passed first.
    ///
    /// # Errors
    /// Returns an error of the operating system.
    pub fn wait(&self, ticket: u64, deadline: Deadline) -> Result<bool> {
        if self.is_complete(ticket) {
            return Ok(true);
        }
        self.waiters().fetch_add(1, Ordering::SeqCst);
        let answer = loop {
            let wake_word = self.wake_word().load(Ordering::SeqCst);
            if self.is_complete(ticket) {
                break Ok(true);
            }
            match futex::wait(self.wake_word(), wake_word, deadline) {
                Ok(()) => {}
                Err(Error::TimedOut) => break Ok(false),
                Err(error) => break Err(error),
            }
        };
        self.waiters().fetch_sub(1, Ordering::SeqCst);
        answer
    }

    /// Returns the monotonic time at which the latest completed record of the event completed.
    #[must_use]
    pub fn completed_at(&self) -> Duration {
        Duration::from_nanos(self.word(COMPLETED_AT).load(Ordering::Acquire))
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        match &self.storage {
            EventStorage::Private(counters) => &counters.words[index],
            EventStorage::Shared { map, .. } => {
                map.bytes().atomic_u64(index * size_of::<u64>()).expect(MAPPED)
            }
        }
    }

    fn wake_word(&self) -> &AtomicU32 {
        match &self.storage {
            EventStorage::Private(counters) => &counters.wake_word,
            EventStorage::Shared { map, .. } => map.bytes().atomic_u32(WAKE_WORD_OFFSET).expect(MAPPED),
        }
    }

    fn waiters(&self) -> &AtomicU32 {
        match &self.storage {
            EventStorage::Private(counters) => &counters.waiters,
            EventStorage::Shared { map, .. } => map.bytes().atomic_u32(WAITERS_OFFSET).expect(MAPPED),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_that_was_never_recorded_is_complete() {
        let event = HostEvent::private();
        assert!(event.is_complete(event.latest()));
    }

    #[test]
    fn a_wait_is_for_the_record_that_was_latest_when_it_began() {
        let event = HostEvent::private();
        let first = event.next_ticket();
        event.set_latest(first);
        let waiting_for = event.latest();
        let second = event.next_ticket();
        event.set_latest(second);
        event.complete(first, Duration::ZERO);
        assert!(event.is_complete(waiting_for));
        assert!(!event.is_complete(event.latest()));
        assert_eq!(event.wait(second, Deadline::NOW), Ok(false));
        event.complete(second, Duration::ZERO);
        assert_eq!(event.wait(second, Deadline::NOW), Ok(true));
    }

    #[test]
    fn private_records_may_complete_out_of_order() {
        let event = HostEvent::private();
        let (first, second) = (event.next_ticket(), event.next_ticket());
        event.complete(second, Duration::ZERO);
        assert!(event.is_complete(second) && !event.is_complete(first));
        event.complete(first, Duration::ZERO);
        assert!(event.is_complete(first) && event.is_complete(second));
    }

    #[test]
    fn an_older_shared_record_does_not_reset_a_newer_one() {
        let event = HostEvent::shared().unwrap();
        let (first, second) = (event.next_ticket(), event.next_ticket());
        event.complete(second, Duration::ZERO);
        event.complete(first, Duration::ZERO);
        assert!(event.is_complete(second));
        event.set_latest(second);
        event.set_latest(first);
        assert_eq!(event.latest(), second);
    }

    #[test]
    fn hostile_event_words_never_panic() {
        let event = HostEvent::shared().unwrap();
        let EventStorage::Shared { map, .. } = &event.storage else { unreachable!("the event is shared") };
        map.bytes().fill(0xFF).unwrap();
        let ticket = event.next_ticket();
        event.set_latest(ticket);
        event.complete(ticket, Duration::from_nanos(u64::MAX));
        assert_eq!(event.wait(event.latest(), Deadline::NOW), Ok(true));
        let _ = event.completed_at();
    }

    #[test]
    fn a_ticket_is_not_waited_for_before_set_latest() {
        for event in [HostEvent::private(), HostEvent::shared().unwrap()] {
            let _taken = event.next_ticket();
            assert_eq!(event.latest(), 0);
            assert_eq!(event.wait(event.latest(), Deadline::NOW), Ok(true));
        }
    }

    #[test]
    fn the_layout_of_a_shared_event_is_fixed() {
        let event = HostEvent::shared().unwrap();
        let tickets = [(); 4].map(|()| event.next_ticket());
        assert_eq!(tickets, [1, 2, 3, 4]);
        event.set_latest(3);
        event.complete(2, Duration::from_nanos(77));
        assert_eq!(event.wait(3, Deadline::NOW), Ok(false));
        let EventStorage::Shared { map, .. } = &event.storage else { unreachable!("the event is shared") };
        let word = |index: usize| map.bytes().read_u64(8 * index).unwrap().load_acquire();
        assert_eq!([0, 1, 2, 3].map(word), [4, 3, 2, 77]);
        let small = |offset| map.bytes().read_u32(offset).unwrap().load_acquire();
        assert_eq!((small(32), small(36)), (1, 0), "one wake-up was signalled, and no waiter is left");
    }

    #[test]
    fn a_waiter_of_an_imported_event_is_woken() {
        let here = HostEvent::shared().unwrap();
        let there = HostEvent::import(here.export().unwrap().unwrap()).unwrap();
        let ticket = here.next_ticket();
        here.set_latest(ticket);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| there.wait(there.latest(), Deadline::NEVER));
            while here.waiters().load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            here.complete(ticket, Duration::ZERO);
            assert_eq!(waiter.join().unwrap(), Ok(true));
        });
    }

    #[test]
    fn import_rejects_a_read_only_event_handle() {
        let HostEvent { storage: EventStorage::Shared { memory, .. } } = HostEvent::shared().unwrap() else {
            unreachable!("the event is shared");
        };
        assert_eq!(HostEvent::import(memory.read_only_fd().unwrap()).unwrap_err(), Error::ReadOnly);
    }
}
