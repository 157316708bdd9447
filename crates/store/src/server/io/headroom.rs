//! The memory that the server may still allocate. It is checked before every allocation, however small.
//!
//! If memory runs out, the kernel kills processes instead of failing a call. Reading the available memory takes tens of
//! microseconds, so a part of it may be claimed without reading again:
//!
//! ```text
//!   read:  |<------------------- available ------------------->|
//!          | claimed, not filled | allowance |     | reserve   |
//!                                  used up, or too old: read again
//! ```
//!
//! Memory that was claimed and is still being filled counts as used, for all threads. Objects leave a reserve for the server's
//! own memory. Preallocation uses at most a quarter of the free memory. Not guaranteed: other processes may use the memory that
//! was read as available.

use std::fmt;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use wholemem_os::Size;
use wholemem_os::meminfo::{Available, MemoryProbe};

use crate::protocol::{Refusal, Request, RequestKind};

/// The memory that objects leave for the server itself, the keeper and the index.
const RESERVE: usize = 8 << 20;

/// The part of the reserve that is left for requests that free memory.
const MIN_RESERVE: usize = 2 << 20;

/// The maximum that may be claimed without reading again.
const MAX_ALLOWANCE: usize = 64 << 20;

/// How long a reading is valid: other processes allocate memory too.
const MAX_AGE: Duration = Duration::from_millis(50);

/// The memory of one object besides its bytes: its record, word and bucket in the index, and its entries in the server's tables.
const PER_OBJECT: usize = 1 << 10;

/// The growth of the server and the index by a request, without the object's memory. A request that is sent again may have been
/// processed by the previous server; it counts as zero.
pub(super) fn bookkeeping(request: &Request) -> usize {
    match &request.kind {
        RequestKind::Create { members, .. } if request.resends == 0 => PER_OBJECT * (1 + members.len()),
        RequestKind::Publish { .. } | RequestKind::Adopt { .. } if request.resends == 0 => PER_OBJECT,
        _ => 0,
    }
}

/// The purpose of memory that is claimed; it determines the reserve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MemoryPurpose {
    /// Objects of a request, or an arena for them.
    Objects,
    /// Preallocated memory.
    Prealloc,
    /// Records and pin pages.
    Bookkeeping,
}

impl MemoryPurpose {
    /// The part of the free memory that has to stay free.
    fn reserve(self, free: usize) -> usize {
        match self {
            Self::Objects => RESERVE,
            Self::Prealloc => RESERVE.max(free - free / 4),
            Self::Bookkeeping => MIN_RESERVE,
        }
    }
}

/// The reason for which memory cannot be claimed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum MemoryShortage {
    /// Too little memory is available, besides the reserve.
    Short { found: Available, reserve: usize },
    /// The available memory cannot be read.
    Unknown(wholemem_os::Error),
}

impl fmt::Display for MemoryShortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Short { found, reserve } => write!(f, "{found}, of which {} are reserved", Size(*reserve)),
            Self::Unknown(error) => write!(f, "cannot read the available memory: {error}"),
        }
    }
}

impl MemoryShortage {
    /// The refusal of a request for `len` bytes.
    pub(super) fn refusal(&self, len: usize) -> Refusal {
        Refusal::NoMemory { len: len as u64, reason: self.to_string() }
    }
}

/// A source of the amount of available memory.
pub(super) trait MemorySource: fmt::Debug + Send {
    fn read_available(&mut self) -> wholemem_os::Result<Available>;
}

impl MemorySource for MemoryProbe {
    fn read_available(&mut self) -> wholemem_os::Result<Available> {
        self.read()
    }
}

#[derive(Debug)]
struct HeadroomState {
    source: Box<dyn MemorySource>,
    /// The bytes that may be claimed without reading again, and until when.
    allowance: usize,
    until: Option<Instant>,
    /// Bytes that were claimed, and are being filled.
    in_flight: usize,
    /// The number of threads that wait for claims to be filled.
    waiting: usize,
}

impl HeadroomState {
    fn claim(&mut self, now: Instant, len: usize, purpose: MemoryPurpose) -> Result<(), MemoryShortage> {
        let is_fresh = self.until.is_some_and(|until| now < until);
        if purpose != MemoryPurpose::Prealloc && is_fresh && len <= self.allowance {
            self.allowance -= len;
            self.in_flight += len;
            return Ok(());
        }
        let found = self.source.read_available().map_err(MemoryShortage::Unknown)?;
        let free = found.len.saturating_sub(self.in_flight);
        let reserve = purpose.reserve(free);
        self.allowance = 0;
        if len > free.saturating_sub(reserve) {
            return Err(MemoryShortage::Short { found, reserve });
        }
        self.in_flight += len;
        self.allowance = ((free - len).saturating_sub(RESERVE) / 8).min(MAX_ALLOWANCE);
        self.until = Some(now + MAX_AGE);
        Ok(())
    }
}

/// The memory that may be allocated, shared by all threads of the server.
#[derive(Debug)]
pub(super) struct Headroom {
    state: Mutex<HeadroomState>,
    /// Notified when claimed memory has been filled or abandoned.
    settled: Condvar,
}

/// Memory that is being filled, until this is dropped.
#[derive(Debug)]
pub(super) struct HeadroomClaim<'a> {
    headroom: &'a Headroom,
    len: usize,
}

impl Headroom {
    pub(super) fn new(source: impl MemorySource + 'static) -> Self {
        let state =
            HeadroomState { source: Box::new(source), allowance: 0, until: None, in_flight: 0, waiting: 0 };
        Self { state: Mutex::new(state), settled: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, HeadroomState> {
        // The counters are consistent after every call, even if a thread panics.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Claims memory that is about to be filled. Never blocks.
    pub(super) fn claim(
        &self,
        len: usize,
        purpose: MemoryPurpose,
    ) -> Result<HeadroomClaim<'_>, MemoryShortage> {
        self.lock().claim(Instant::now(), len, purpose).map(|()| HeadroomClaim { headroom: self, len })
    }

    /// As [`Self::claim`], but if there is too little memory while other claims are being filled, waits for them first: the part
    /// that they have filled so far counts twice.
    pub(super) fn claim_waiting(
        &self,
        len: usize,
        purpose: MemoryPurpose,
    ) -> Result<HeadroomClaim<'_>, MemoryShortage> {
        let mut state = self.lock();
        loop {
            match state.claim(Instant::now(), len, purpose) {
                Ok(()) => return Ok(HeadroomClaim { headroom: self, len }),
                Err(MemoryShortage::Short { .. }) if state.in_flight > 0 => {
                    state.waiting += 1;
                    state = self.settled.wait(state).unwrap_or_else(PoisonError::into_inner);
                    state.waiting -= 1;
                }
                Err(shortage) => return Err(shortage),
            }
        }
    }
}

impl Drop for HeadroomClaim<'_> {
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

    /// A machine with a given amount of memory, which counts the readings.
    #[derive(Debug, Clone, Default)]
    pub(crate) struct TestMachine {
        pub(crate) left: Arc<AtomicUsize>,
        readings: Arc<AtomicUsize>,
    }

    impl TestMachine {
        pub(crate) fn with(left: usize) -> Self {
            let machine = Self::default();
            machine.left.store(left, Ordering::SeqCst);
            machine
        }

        fn readings(&self) -> usize {
            self.readings.load(Ordering::SeqCst)
        }
    }

    impl MemorySource for TestMachine {
        fn read_available(&mut self) -> wholemem_os::Result<Available> {
            self.readings.fetch_add(1, Ordering::SeqCst);
            let len = self.left.load(Ordering::SeqCst);
            Ok(Available { len, limit: MemoryLimit::Machine })
        }
    }

    fn short_of(len: usize, reserve: usize) -> MemoryShortage {
        MemoryShortage::Short { found: Available { len, limit: MemoryLimit::Machine }, reserve }
    }

    fn short(len: usize) -> MemoryShortage {
        short_of(len, RESERVE)
    }

    fn state(machine: &TestMachine) -> HeadroomState {
        HeadroomState {
            source: Box::new(machine.clone()),
            allowance: 0,
            until: None,
            in_flight: 0,
            waiting: 0,
        }
    }

    #[test]
    fn available_memory_is_checked_before_small_claims() {
        let machine = TestMachine::with(RESERVE + 4 * MIB - 1);
        let headroom = Headroom::new(machine.clone());
        assert_eq!(
            headroom.claim(4 * MIB, MemoryPurpose::Objects).unwrap_err(),
            short(RESERVE + 4 * MIB - 1)
        );
        assert_eq!(headroom.claim(MIB, MemoryPurpose::Objects).map(drop), Ok(()));
        machine.left.store(RESERVE, Ordering::SeqCst);
        assert_eq!(headroom.claim(MIB, MemoryPurpose::Objects).unwrap_err(), short(RESERVE));
        assert_eq!(
            headroom.claim(64 << 10, MemoryPurpose::Bookkeeping).map(drop),
            Ok(()),
            "bookkeeping may use the reserve"
        );
        machine.left.store(MIN_RESERVE, Ordering::SeqCst);
        assert_eq!(
            headroom.claim(64 << 10, MemoryPurpose::Bookkeeping).unwrap_err(),
            short_of(MIN_RESERVE, MIN_RESERVE)
        );
        let text = short(RESERVE + MIB).to_string();
        assert_eq!(text, "only 9 MiB are available on this machine, of which 8 MiB are reserved");
    }

    #[test]
    fn a_part_is_claimed_without_reading_until_it_is_too_old() {
        let machine = TestMachine::with(RESERVE + 81 * MIB);
        let mut state = state(&machine);
        let start = Instant::now();
        let mut claim = |at, len| state.claim(at, len, MemoryPurpose::Objects).map(|()| machine.readings());
        assert_eq!(claim(start, MIB), Ok(1));
        for _ in 0..10 {
            assert_eq!(claim(start, MIB), Ok(1), "an eighth of the free memory");
        }
        assert_eq!(claim(start, MIB), Ok(2));
        assert_eq!(claim(start + MAX_AGE, 1), Ok(3));
        // Preallocation does not use the allowance, although it would suffice.
        assert_eq!(state.claim(start + MAX_AGE, 1, MemoryPurpose::Prealloc), Ok(()));
        assert_eq!(machine.readings(), 4);
    }

    #[test]
    fn preallocation_uses_at_most_a_quarter_of_the_free_memory() {
        let headroom = Headroom::new(TestMachine::with(80 * MIB));
        assert_eq!(
            headroom.claim(20 * MIB + 1, MemoryPurpose::Prealloc).unwrap_err(),
            short_of(80 * MIB, 60 * MIB)
        );
        let first = headroom.claim(20 * MIB, MemoryPurpose::Prealloc).unwrap();
        assert_eq!(
            headroom.claim(15 * MIB + 1, MemoryPurpose::Prealloc).unwrap_err(),
            short_of(80 * MIB, 45 * MIB)
        );
        drop(first);
        let headroom = Headroom::new(TestMachine::with(RESERVE + 1));
        assert_eq!(headroom.claim(2, MemoryPurpose::Prealloc).unwrap_err(), short(RESERVE + 1));
    }

    #[test]
    fn memory_that_another_thread_fills_counts_as_used_and_is_waited_for() {
        let machine = TestMachine::with(RESERVE + 10 * MIB);
        let headroom = Headroom::new(machine.clone());
        let first = headroom.claim_waiting(8 * MIB, MemoryPurpose::Objects).unwrap();
        assert_eq!(headroom.claim(4 * MIB, MemoryPurpose::Objects).unwrap_err(), short(RESERVE + 10 * MIB));
        let readings = machine.readings();
        std::thread::scope(|scope| {
            let second = scope.spawn(|| headroom.claim_waiting(4 * MIB, MemoryPurpose::Objects).map(drop));
            while machine.readings() == readings {
                std::thread::yield_now();
            }
            // The first claim is abandoned, and the second one succeeds.
            drop(first);
            assert_eq!(second.join().unwrap(), Ok(()));
        });
        machine.left.store(RESERVE + 2 * MIB, Ordering::SeqCst);
        let shortage = headroom.claim_waiting(4 * MIB, MemoryPurpose::Objects).unwrap_err();
        assert_eq!(shortage, short(RESERVE + 2 * MIB));
    }

    proptest! {
        #[test]
        fn objects_never_use_the_reserve(
            left in 0_usize..200,
            steps in prop::collection::vec((0_usize..40, 0_u8..3, 0_u64..100), 0..50),
        ) {
            let machine = TestMachine::with(left * MIB);
            let mut state = state(&machine);
            let mut now = Instant::now();
            for (len, purpose, millis) in steps {
                now += Duration::from_millis(millis);
                let purpose = [MemoryPurpose::Objects, MemoryPurpose::Prealloc, MemoryPurpose::Objects][usize::from(purpose)];
                let before = machine.left.load(Ordering::SeqCst);
                if state.claim(now, len * MIB, purpose).is_ok() {
                    // The claim is filled at once.
                    machine.left.store(before - len * MIB, Ordering::SeqCst);
                    state.in_flight -= len * MIB;
                    prop_assert!(len == 0 || before - len * MIB >= RESERVE, "{len} of {before}");
                }
            }
        }
    }
}
