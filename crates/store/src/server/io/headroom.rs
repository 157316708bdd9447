//! How much memory the server may still fill. It is checked before any memory is filled, however little.
//!
//! If memory runs out, the kernel kills processes instead of refusing. Reading how much is available takes tens of microseconds, so
//! a part of what was read is handed out without reading again:
//!
//! ```text
//!   read:  |<------------------- available ------------------->|
//!          | claimed, not filled | allowance |     | reserve   |
//!                                  used up, or old: read again
//! ```
//!
//! Guarantees: memory that was claimed and is still being filled counts as taken, for all threads; objects leave a reserve for
//! the server's own memory; preallocated memory takes at most a quarter of what is left. Not guaranteed: that other
//! processes leave the memory that was found.

use std::fmt;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use wholemem_os::Size;
use wholemem_os::meminfo::{Available, MemoryProbe};

use crate::protocol::{Refusal, Request, RequestKind};

/// What objects leave for the memory of the server itself, of its keeper and of the index.
const RESERVE: usize = 8 << 20;

/// The least that is left of it, for requests that free memory.
const LAST: usize = 2 << 20;

/// The most that is handed out without reading again.
const MOST_ALLOWED: usize = 64 << 20;

/// How long a reading is used: other processes take memory too.
const FRESH: Duration = Duration::from_millis(50);

/// What one object costs besides its bytes: its record, word and bucket in the index, and its entries in the server's tables.
const PER_OBJECT: usize = 1 << 10;

/// How much the server and the index grow by what a request creates, without its memory. A repeated request may have been
/// processed by another server, and takes nothing then.
pub(super) fn bookkeeping(request: &Request) -> usize {
    match &request.kind {
        RequestKind::Create { members, .. } if request.resends == 0 => PER_OBJECT * (1 + members.len()),
        RequestKind::Publish { .. } | RequestKind::Adopt { .. } if request.resends == 0 => PER_OBJECT,
        _ => 0,
    }
}

/// What memory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Objects that a client has asked for, or an arena for them.
    Objects,
    /// Preallocated memory.
    Ahead,
    /// Records and pages of pins.
    Bookkeeping,
}

impl Purpose {
    /// How much of what is free has to stay free.
    fn reserve(self, free: usize) -> usize {
        match self {
            Self::Objects => RESERVE,
            Self::Ahead => RESERVE.max(free - free / 4),
            Self::Bookkeeping => LAST,
        }
    }
}

/// Why memory cannot be claimed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Shortage {
    /// There is too little, since some of it stays free.
    Short { found: Available, reserve: usize },
    /// How much is available cannot be read.
    Unknown(wholemem_os::Error),
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Short { found, reserve } => write!(f, "{found}, and {} stay free", Size(*reserve)),
            Self::Unknown(error) => write!(f, "what is available cannot be read: {error}"),
        }
    }
}

impl Shortage {
    /// The refusal for a client that has asked for so many bytes.
    pub(super) fn refusal(&self, len: usize) -> Refusal {
        Refusal::NoMemory { len: len as u64, reason: self.to_string() }
    }
}

/// Where the amount of available memory is read from.
pub(super) trait MemorySource: fmt::Debug + Send {
    fn read_available(&mut self) -> wholemem_os::Result<Available>;
}

impl MemorySource for MemoryProbe {
    fn read_available(&mut self) -> wholemem_os::Result<Available> {
        self.read()
    }
}

#[derive(Debug)]
struct State {
    source: Box<dyn MemorySource>,
    /// What may be claimed without reading again, and until when.
    allowance: usize,
    until: Option<Instant>,
    /// Bytes that were claimed, and are being filled.
    in_flight: usize,
    /// How many threads wait for some of that to be filled.
    waiting: usize,
}

impl State {
    fn claim(&mut self, now: Instant, len: usize, purpose: Purpose) -> Result<(), Shortage> {
        let is_fresh = self.until.is_some_and(|until| now < until);
        if purpose != Purpose::Ahead && is_fresh && len <= self.allowance {
            self.allowance -= len;
            self.in_flight += len;
            return Ok(());
        }
        let found = self.source.read_available().map_err(Shortage::Unknown)?;
        let free = found.len.saturating_sub(self.in_flight);
        let reserve = purpose.reserve(free);
        self.allowance = 0;
        if len > free.saturating_sub(reserve) {
            return Err(Shortage::Short { found, reserve });
        }
        self.in_flight += len;
        self.allowance = ((free - len).saturating_sub(RESERVE) / 8).min(MOST_ALLOWED);
        self.until = Some(now + FRESH);
        Ok(())
    }
}

/// The memory that may be filled, as all threads of the server share it.
#[derive(Debug)]
pub(super) struct Headroom {
    state: Mutex<State>,
    /// Notified when memory that was claimed has been filled or given up.
    settled: Condvar,
}

/// Memory that is being filled, until this is dropped.
#[derive(Debug)]
pub(super) struct Claim<'a> {
    headroom: &'a Headroom,
    len: usize,
}

impl Headroom {
    pub(super) fn new(source: impl MemorySource + 'static) -> Self {
        let state = State { source: Box::new(source), allowance: 0, until: None, in_flight: 0, waiting: 0 };
        Self { state: Mutex::new(state), settled: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The numbers are consistent between calls.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Claims memory that is about to be filled. Never waits.
    pub(super) fn claim(&self, len: usize, purpose: Purpose) -> Result<Claim<'_>, Shortage> {
        self.lock().claim(Instant::now(), len, purpose).map(|()| Claim { headroom: self, len })
    }

    /// As [`Self::claim`]. While other claims are being filled, what they have filled so far counts twice: if there is too little, this
    /// waits for them first.
    pub(super) fn claim_in_turn(&self, len: usize, purpose: Purpose) -> Result<Claim<'_>, Shortage> {
        let mut state = self.lock();
        loop {
            match state.claim(Instant::now(), len, purpose) {
                Ok(()) => return Ok(Claim { headroom: self, len }),
                Err(Shortage::Short { .. }) if state.in_flight > 0 => {
                    state.waiting += 1;
                    state = self.settled.wait(state).unwrap_or_else(PoisonError::into_inner);
                    state.waiting -= 1;
                }
                Err(shortage) => return Err(shortage),
            }
        }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut state = self.headroom.lock();
        state.in_flight -= self.len;
        // A notification is a system call even if no thread waits.
        if state.waiting > 0 {
            self.headroom.settled.notify_all();
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use proptest::prelude::*;
    use wholemem_os::meminfo::MemoryLimit;

    use super::*;

    const MIB: usize = 1 << 20;

    /// A machine with as much memory as a test says, which counts how often it is read.
    #[derive(Debug, Clone, Default)]
    pub(crate) struct Machine {
        pub(crate) left: Arc<AtomicUsize>,
        looks: Arc<AtomicUsize>,
    }

    impl Machine {
        pub(crate) fn with(left: usize) -> Self {
            let machine = Self::default();
            machine.left.store(left, Ordering::SeqCst);
            machine
        }

        fn looks(&self) -> usize {
            self.looks.load(Ordering::SeqCst)
        }
    }

    impl MemorySource for Machine {
        fn read_available(&mut self) -> wholemem_os::Result<Available> {
            self.looks.fetch_add(1, Ordering::SeqCst);
            let len = self.left.load(Ordering::SeqCst);
            Ok(Available { len, limit: MemoryLimit::Machine })
        }
    }

    fn short_of(len: usize, reserve: usize) -> Shortage {
        Shortage::Short { found: Available { len, limit: MemoryLimit::Machine }, reserve }
    }

    fn short(len: usize) -> Shortage {
        short_of(len, RESERVE)
    }

    fn state(machine: &Machine) -> State {
        State { source: Box::new(machine.clone()), allowance: 0, until: None, in_flight: 0, waiting: 0 }
    }

    #[test]
    fn little_memory_is_looked_at_before_it_is_taken() {
        let machine = Machine::with(RESERVE + 4 * MIB - 1);
        let headroom = Headroom::new(machine.clone());
        assert_eq!(headroom.claim(4 * MIB, Purpose::Objects).unwrap_err(), short(RESERVE + 4 * MIB - 1));
        assert_eq!(headroom.claim(MIB, Purpose::Objects).map(drop), Ok(()));
        machine.left.store(RESERVE, Ordering::SeqCst);
        assert_eq!(headroom.claim(MIB, Purpose::Objects).unwrap_err(), short(RESERVE));
        assert_eq!(headroom.claim(64 << 10, Purpose::Bookkeeping).map(drop), Ok(()), "the reserve is for it");
        machine.left.store(LAST, Ordering::SeqCst);
        assert_eq!(headroom.claim(64 << 10, Purpose::Bookkeeping).unwrap_err(), short_of(LAST, LAST));
        let text = short(RESERVE + MIB).to_string();
        assert_eq!(text, "only 9 MiB are available on this machine, and 8 MiB stay free");
    }

    #[test]
    fn a_part_of_what_was_found_is_handed_out_without_a_look_until_it_is_old() {
        let machine = Machine::with(RESERVE + 81 * MIB);
        let mut state = state(&machine);
        let start = Instant::now();
        let mut claim = |at, len| state.claim(at, len, Purpose::Objects).map(|()| machine.looks());
        assert_eq!(claim(start, MIB), Ok(1));
        for _ in 0..10 {
            assert_eq!(claim(start, MIB), Ok(1), "an eighth of what is left");
        }
        assert_eq!(claim(start, MIB), Ok(2));
        assert_eq!(claim(start + FRESH, 1), Ok(3));
        // Preallocation does not take the allowance, although that would be enough.
        assert_eq!(state.claim(start + FRESH, 1, Purpose::Ahead), Ok(()));
        assert_eq!(machine.looks(), 4);
    }

    #[test]
    fn memory_made_ahead_takes_a_quarter_of_what_is_left_at_most() {
        let headroom = Headroom::new(Machine::with(80 * MIB));
        assert_eq!(headroom.claim(20 * MIB + 1, Purpose::Ahead).unwrap_err(), short_of(80 * MIB, 60 * MIB));
        let first = headroom.claim(20 * MIB, Purpose::Ahead).unwrap();
        assert_eq!(headroom.claim(15 * MIB + 1, Purpose::Ahead).unwrap_err(), short_of(80 * MIB, 45 * MIB));
        drop(first);
        let headroom = Headroom::new(Machine::with(RESERVE + 1));
        assert_eq!(headroom.claim(2, Purpose::Ahead).unwrap_err(), short(RESERVE + 1));
    }

    #[test]
    fn memory_that_another_thread_fills_counts_and_is_waited_for() {
        let machine = Machine::with(RESERVE + 10 * MIB);
        let headroom = Headroom::new(machine.clone());
        let first = headroom.claim_in_turn(8 * MIB, Purpose::Objects).unwrap();
        assert_eq!(headroom.claim(4 * MIB, Purpose::Objects).unwrap_err(), short(RESERVE + 10 * MIB));
        let looks = machine.looks();
        std::thread::scope(|scope| {
            let second = scope.spawn(|| headroom.claim_in_turn(4 * MIB, Purpose::Objects).map(drop));
            while machine.looks() == looks {
                std::thread::yield_now();
            }
            // The first could not be made after all, and the second finds what there is.
            drop(first);
            assert_eq!(second.join().unwrap(), Ok(()));
        });
        machine.left.store(RESERVE + 2 * MIB, Ordering::SeqCst);
        let alone = headroom.claim_in_turn(4 * MIB, Purpose::Objects).unwrap_err();
        assert_eq!(alone, short(RESERVE + 2 * MIB));
    }

    proptest! {
        #[test]
        fn objects_never_take_the_reserve(
            left in 0_usize..200,
            steps in prop::collection::vec((0_usize..40, 0_u8..3, 0_u64..100), 0..50),
        ) {
            let machine = Machine::with(left * MIB);
            let mut state = state(&machine);
            let mut now = Instant::now();
            for (len, purpose, millis) in steps {
                now += Duration::from_millis(millis);
                let purpose = [Purpose::Objects, Purpose::Ahead, Purpose::Objects][usize::from(purpose)];
                let before = machine.left.load(Ordering::SeqCst);
                if state.claim(now, len * MIB, purpose).is_ok() {
                    // Filled at once.
                    machine.left.store(before - len * MIB, Ordering::SeqCst);
                    state.in_flight -= len * MIB;
                    prop_assert!(len == 0 || before - len * MIB >= RESERVE, "{len} of {before}");
                }
            }
        }
    }
}
