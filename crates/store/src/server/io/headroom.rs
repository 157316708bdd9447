//! How much memory the server may still fill: it is looked at before any is taken, however little.
//!
//! The kernel does not refuse memory that is not there, but kills. A look at what is available takes tens of microseconds, so a part
//! of what a look has found is handed out without another one:
//!
//! ```text
//!   look:  |<------------------- available ------------------->|
//!          | claimed, not filled | allowance |     | reserve   |
//!                                  used up, or old: look again
//! ```
//!
//! Guarantees: memory that was claimed and is still being filled counts as taken, by whichever thread; objects leave a reserve for
//! the server's own memory; memory that is made ahead takes at most a quarter of what is left. Not guaranteed: that other
//! processes leave what was found.

use std::fmt;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use wholemem_os::Size;
use wholemem_os::meminfo::{Available, MemoryProbe};

use crate::protocol::{Ask, Refusal, Request};

/// What objects leave for the memory of the server itself, of its keeper and of the index.
const RESERVE: usize = 8 << 20;

/// What is left of that at least, for what has to be done to free memory.
const LAST: usize = 2 << 20;

/// The most that is handed out without a look.
const MOST_ALLOWED: usize = 64 << 20;

/// How long what was found is relied on: other processes take memory too.
const FRESH: Duration = Duration::from_millis(50);

/// What one object costs besides its bytes: its record and word in the index, its bucket, and what the server knows of it.
const PER_OBJECT: usize = 1 << 10;

/// How much the server and the index grow by what a request makes, its memory aside. One that another server has heard may have been
/// done already, and then takes nothing.
pub(super) fn bookkeeping(request: &Request) -> usize {
    match &request.ask {
        Ask::Create { members, .. } if request.again == 0 => PER_OBJECT * (1 + members.len()),
        Ask::Publish { .. } | Ask::Adopt { .. } if request.again == 0 => PER_OBJECT,
        _ => 0,
    }
}

/// What memory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Objects that a client has asked for, or an arena for them.
    Objects,
    /// Memory that is made ahead.
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

/// Why memory is not taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Shortage {
    /// There is too little, since some of it stays free.
    Short { found: Available, reserve: usize },
    /// How much there is cannot be read.
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
    /// The same as what a client is told that has asked for so many bytes.
    pub(super) fn refusal(&self, len: usize) -> Refusal {
        Refusal::NoMemory { len: len as u64, reason: self.to_string() }
    }
}

/// Where a look is at.
pub(super) trait Look: fmt::Debug + Send {
    fn look(&mut self) -> wholemem_os::Result<Available>;
}

impl Look for MemoryProbe {
    fn look(&mut self) -> wholemem_os::Result<Available> {
        self.read()
    }
}

#[derive(Debug)]
struct State {
    source: Box<dyn Look>,
    /// What may be claimed without a look, and until when.
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
        let found = self.source.look().map_err(Shortage::Unknown)?;
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
    /// Notified when something that was claimed has been filled, or given up.
    settled: Condvar,
}

/// Memory that is being filled, until this is dropped.
#[derive(Debug)]
pub(super) struct Claim<'a> {
    headroom: &'a Headroom,
    len: usize,
}

impl Headroom {
    pub(super) fn new(source: impl Look + 'static) -> Self {
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

    /// The same. While other claims are being filled, what they have filled so far counts twice: they are waited for before
    /// there is too little.
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
        // To notify is a system call, also where no thread waits.
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

    /// A machine with as much memory as a test says, which counts looks.
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

    impl Look for Machine {
        fn look(&mut self) -> wholemem_os::Result<Available> {
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
        // Though the allowance would do, nothing that is made ahead takes it.
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
    fn what_another_thread_fills_counts_and_is_waited_for() {
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
