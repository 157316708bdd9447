//! Events of the host backend: counters that streams raise and anybody may wait for, also in another process.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use wholemem_os::vm::{Protection, SharedMap, page_size};
use wholemem_os::{Deadline, Error, Memfd, Result, futex, memfd};

/// A count of records asked for, and a count of records reached.
///
/// A record takes the next ticket; when the stream gets there, the ticket is reached. Waiting means waiting for the
/// ticket that was the latest when the wait was asked for, so a record made later neither prolongs nor ends it.
///
/// Streams that run late may reach the records of one event in another order than they were made, so that a private
/// event knows each ticket that is not reached. A shared one has a word for the highest: its records run at once.
#[derive(Debug)]
pub struct HostEvent {
    storage: Storage,
}

#[derive(Debug)]
enum Storage {
    Private(Box<Counters>),
    Shared { memory: Memfd, map: SharedMap },
}

#[derive(Debug, Default)]
struct Counters {
    words: [AtomicU64; WORDS],
    bell: AtomicU32,
    waiters: AtomicU32,
    /// The tickets that were taken and are not reached.
    late: Mutex<BTreeSet<u64>>,
}

impl Counters {
    fn late(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        // Each change is one insert or one remove, so a panic elsewhere does not spoil it.
        self.late.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The places of the words; in shared storage eight bytes each, the two small ones behind them.
const TICKETS: usize = 0;
const ASKED: usize = 1;
const REACHED: usize = 2;
const MOMENT: usize = 3;
const WORDS: usize = 4;
const BELL_OFFSET: usize = WORDS * size_of::<u64>();
const WAITERS_OFFSET: usize = BELL_OFFSET + size_of::<u32>();

const MAPPED: &str = "an event's words lie in its first page, aligned, in a writable map";

impl HostEvent {
    /// An event of this process alone.
    #[must_use]
    pub fn private() -> Self {
        Self { storage: Storage::Private(Box::default()) }
    }

    /// An event that other processes can be given.
    ///
    /// # Errors
    /// What the operating system said.
    pub fn shared() -> Result<Self> {
        Self::over(Memfd::create("wholemem-event", page_size())?)
    }

    /// Another process's event.
    ///
    /// # Errors
    /// What the descriptor is instead; [`Error::ReadOnly`] if it cannot be recorded through it.
    pub fn import(fd: OwnedFd) -> Result<Self> {
        Self::over(Memfd::import(fd, page_size())?)
    }

    fn over(memory: Memfd) -> Result<Self> {
        let map = SharedMap::create(&memory, Protection::ReadWrite)?;
        Ok(Self { storage: Storage::Shared { memory, map } })
    }

    /// The descriptor for another process, unless the event is private.
    ///
    /// # Errors
    /// What the operating system said.
    pub fn export(&self) -> Result<Option<OwnedFd>> {
        match &self.storage {
            Storage::Private(_) => Ok(None),
            Storage::Shared { memory, .. } => memfd::share_fd(memory.as_fd()).map(Some),
        }
    }

    /// Whether other processes may wait for it.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        matches!(self.storage, Storage::Shared { .. })
    }

    /// Takes the ticket of a new record.
    #[must_use]
    pub fn next_ticket(&self) -> u64 {
        // Wraps rather than panics: another process may have put anything there.
        let ticket = self.word(TICKETS).fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        if let Storage::Private(counters) = &self.storage {
            counters.late().insert(ticket);
        }
        ticket
    }

    /// Makes waits from here on wait for `ticket`. Comes after the record was submitted: if it runs inline, no
    /// moment is left in which this process could die with a record asked for and never reached.
    pub fn ask(&self, ticket: u64) {
        self.word(ASKED).fetch_max(ticket, Ordering::Release);
    }

    /// The ticket of the latest record.
    #[must_use]
    pub fn asked(&self) -> u64 {
        self.word(ASKED).load(Ordering::Acquire)
    }

    /// Whether the record with this ticket was reached.
    #[must_use]
    pub fn has_reached(&self, ticket: u64) -> bool {
        match &self.storage {
            Storage::Private(counters) => !counters.late().contains(&ticket),
            Storage::Shared { .. } => self.word(REACHED).load(Ordering::Acquire) >= ticket,
        }
    }

    /// Says that the stream got to the record with this ticket.
    pub fn reach(&self, ticket: u64, moment: Duration) {
        let nanos = u64::try_from(moment.as_nanos()).expect("the machine has run for less than 500 years");
        self.word(MOMENT).store(nanos, Ordering::Relaxed);
        match &self.storage {
            Storage::Private(counters) => drop(counters.late().remove(&ticket)),
            Storage::Shared { .. } => drop(self.word(REACHED).fetch_max(ticket, Ordering::Release)),
        }
        self.bell().fetch_add(1, Ordering::SeqCst);
        // A waiter counts itself before it looks at the bell: either it is counted here, or it sees the new bell.
        if self.waiters().load(Ordering::SeqCst) > 0
            && let Err(error) = futex::wake_all(self.bell())
        {
            tracing::warn!(%error, "could not wake those who wait for an event");
        }
    }

    /// Waits until the record with this ticket is reached; `false` when the deadline came first.
    ///
    /// # Errors
    /// What the operating system said.
    pub fn wait(&self, ticket: u64, deadline: Deadline) -> Result<bool> {
        if self.has_reached(ticket) {
            return Ok(true);
        }
        self.waiters().fetch_add(1, Ordering::SeqCst);
        let answer = loop {
            let bell = self.bell().load(Ordering::SeqCst);
            if self.has_reached(ticket) {
                break Ok(true);
            }
            match futex::wait(self.bell(), bell, deadline) {
                Ok(()) => {}
                Err(Error::TimedOut) => break Ok(false),
                Err(error) => break Err(error),
            }
        };
        self.waiters().fetch_sub(1, Ordering::SeqCst);
        answer
    }

    /// When the latest reached record was reached, on the monotonic clock.
    #[must_use]
    pub fn moment(&self) -> Duration {
        Duration::from_nanos(self.word(MOMENT).load(Ordering::Acquire))
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        match &self.storage {
            Storage::Private(counters) => &counters.words[index],
            Storage::Shared { map, .. } => map.bytes().atomic_u64(index * size_of::<u64>()).expect(MAPPED),
        }
    }

    fn bell(&self) -> &AtomicU32 {
        match &self.storage {
            Storage::Private(counters) => &counters.bell,
            Storage::Shared { map, .. } => map.bytes().atomic_u32(BELL_OFFSET).expect(MAPPED),
        }
    }

    fn waiters(&self) -> &AtomicU32 {
        match &self.storage {
            Storage::Private(counters) => &counters.waiters,
            Storage::Shared { map, .. } => map.bytes().atomic_u32(WAITERS_OFFSET).expect(MAPPED),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_never_recorded_is_done() {
        let event = HostEvent::private();
        assert!(event.has_reached(event.asked()));
    }

    #[test]
    fn a_wait_is_for_the_record_that_was_latest_when_it_began() {
        let event = HostEvent::private();
        let first = event.next_ticket();
        event.ask(first);
        let waiting_for = event.asked();
        let second = event.next_ticket();
        event.ask(second);
        event.reach(first, Duration::ZERO);
        assert!(event.has_reached(waiting_for));
        assert!(!event.has_reached(event.asked()));
        assert_eq!(event.wait(second, Deadline::NOW), Ok(false));
        event.reach(second, Duration::ZERO);
        assert_eq!(event.wait(second, Deadline::NOW), Ok(true));
    }

    #[test]
    fn records_reached_in_another_order_than_they_were_made_are_told_apart() {
        let event = HostEvent::private();
        let (first, second) = (event.next_ticket(), event.next_ticket());
        event.reach(second, Duration::ZERO);
        assert!(event.has_reached(second) && !event.has_reached(first));
        event.reach(first, Duration::ZERO);
        assert!(event.has_reached(first) && event.has_reached(second));
    }

    #[test]
    fn a_shared_record_reached_late_does_not_take_back_a_later_one() {
        let event = HostEvent::shared().unwrap();
        let (first, second) = (event.next_ticket(), event.next_ticket());
        event.reach(second, Duration::ZERO);
        event.reach(first, Duration::ZERO);
        assert!(event.has_reached(second));
        event.ask(second);
        event.ask(first);
        assert_eq!(event.asked(), second);
    }

    #[test]
    fn whatever_a_peer_puts_into_the_words_nothing_panics() {
        let event = HostEvent::shared().unwrap();
        let Storage::Shared { map, .. } = &event.storage else { unreachable!("just made shared") };
        map.bytes().fill(0xFF).unwrap();
        let ticket = event.next_ticket();
        event.ask(ticket);
        event.reach(ticket, Duration::from_nanos(u64::MAX));
        assert_eq!(event.wait(event.asked(), Deadline::NOW), Ok(true));
        let _ = event.moment();
    }

    #[test]
    fn a_ticket_that_was_only_taken_is_not_waited_for() {
        for event in [HostEvent::private(), HostEvent::shared().unwrap()] {
            let _taken = event.next_ticket();
            assert_eq!(event.asked(), 0);
            assert_eq!(event.wait(event.asked(), Deadline::NOW), Ok(true));
        }
    }

    #[test]
    fn the_words_of_a_shared_event_lie_where_other_processes_look() {
        let event = HostEvent::shared().unwrap();
        let tickets = [(); 4].map(|()| event.next_ticket());
        assert_eq!(tickets, [1, 2, 3, 4]);
        event.ask(3);
        event.reach(2, Duration::from_nanos(77));
        assert_eq!(event.wait(3, Deadline::NOW), Ok(false));
        let Storage::Shared { map, .. } = &event.storage else { unreachable!("just made shared") };
        let word = |index: usize| map.bytes().read_u64(8 * index).unwrap().load_acquire();
        assert_eq!([0, 1, 2, 3].map(word), [4, 3, 2, 77]);
        let small = |offset| map.bytes().read_u32(offset).unwrap().load_acquire();
        assert_eq!((small(32), small(36)), (1, 0), "the bell was rung once, and nobody waits any more");
    }

    #[test]
    fn a_waiter_of_an_imported_event_is_woken() {
        let here = HostEvent::shared().unwrap();
        let there = HostEvent::import(here.export().unwrap().unwrap()).unwrap();
        let ticket = here.next_ticket();
        here.ask(ticket);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| there.wait(there.asked(), Deadline::NEVER));
            while here.waiters().load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            here.reach(ticket, Duration::ZERO);
            assert_eq!(waiter.join().unwrap(), Ok(true));
        });
    }

    #[test]
    fn a_read_only_handle_is_no_event() {
        let HostEvent { storage: Storage::Shared { memory, .. } } = HostEvent::shared().unwrap() else {
            unreachable!("just made shared");
        };
        assert_eq!(HostEvent::import(memory.read_only_fd().unwrap()).unwrap_err(), Error::ReadOnly);
    }
}
