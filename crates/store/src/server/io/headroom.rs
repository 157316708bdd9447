//! The amount of memory that the store server may still allocate. The server checks it before every allocation, however small.
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

/// The number of bytes that must remain available for the server itself, the keeper process and the index when memory for objects
/// is allocated.
const RESERVE: usize = 8 << 20;

/// The number of bytes that must remain available when records and pin pages are allocated, so that requests that free memory can
/// be processed.
const MIN_RESERVE: usize = 2 << 20;

/// The maximum number of bytes that may be claimed without reading the available memory again.
const MAX_ALLOWANCE: usize = 64 << 20;

/// How long a reading of the available memory is valid. It is short, because other processes allocate memory too.
const MAX_AGE: Duration = Duration::from_millis(50);

/// The memory in bytes that the server uses for an object besides the object's own bytes: its record, word and bucket in the
/// index, and its entries in the server's tables.
const PER_OBJECT: usize = 1 << 10;

/// Returns by how many bytes a request makes the server and the index grow, without the object's own memory. A request that is
/// sent again counts as zero, because the previous server may have processed it.
pub(super) fn bookkeeping(request: &Request) -> usize {
    match &request.kind {
        RequestKind::Create { members, .. } if request.resends == 0 => PER_OBJECT * (1 + members.len()),
        RequestKind::Publish { .. } | RequestKind::Adopt { .. } if request.resends == 0 => PER_OBJECT,
        _ => 0,
    }
}

/// The purpose for which memory is claimed, which determines how much memory must remain available.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MemoryPurpose {
    /// Memory for the objects of a request, or for an arena that small objects share.
    Objects,
    /// Host memory that is allocated before a request needs it.
    Prealloc,
    /// Memory for records in the index and for clients' pin pages.
    Bookkeeping,
}

impl MemoryPurpose {
    /// Returns how many of the `free` bytes have to stay free.
    fn reserve(self, free: usize) -> usize {
        match self {
            Self::Objects => RESERVE,
            Self::Prealloc => RESERVE.max(free - free / 4),
            Self::Bookkeeping => MIN_RESERVE,
        }
    }
}

/// The reason why memory cannot be claimed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum MemoryShortage {
    /// Too little memory is available beyond the reserve.
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
    /// Returns the refusal of a client's request for `len` bytes that are not available.
    pub(super) fn refusal(&self, len: usize) -> Refusal {
        Refusal::NoMemory { len: len as u64, reason: self.to_string() }
    }
}

/// A source that reports how much memory is available.
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
    /// The number of bytes that may be claimed without reading the available memory again, until the time `until`.
    allowance: usize,
    until: Option<Instant>,
    /// The number of bytes that were claimed and are still being filled.
    in_flight: usize,
    /// The number of threads that wait until other threads have filled the memory that they claimed.
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

/// The memory that the store server may still allocate, shared by all threads of the server.
#[derive(Debug)]
pub(super) struct Headroom {
    state: Mutex<HeadroomState>,
    /// Notified when claimed memory has been filled or abandoned.
    settled: Condvar,
}

/// A claim of memory that is being filled. The memory counts as used until the claim is dropped.
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
        // A poisoned lock is ignored: the counters are consistent after every call, even if a thread panics.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Claims memory that the caller is about to allocate and fill. Never blocks.
    pub(super) fn claim(
        &self,
        len: usize,
        purpose: MemoryPurpose,
    ) -> Result<HeadroomClaim<'_>, MemoryShortage> {
        self.lock().claim(Instant::now(), len, purpose).map(|()| HeadroomClaim { headroom: self, len })
    }

    /// Claims memory like [`Self::claim`], but waits if too little memory is available while other claims are being filled: the
    /// part of them that is already filled counts twice, as claimed and as used.
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
        // No thread is notified if none waits, because a notification is a system call in any case.
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

    /// A simulated machine with a given amount of memory, which counts how often the amount is read.
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
        // Preallocation reads the available memory again, although the allowance of the last reading would suffice.
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
            // The first claim of memory is abandoned, so the second one succeeds.
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
                    // The simulated process fills the claimed memory at once, so it is no longer in flight.
                    machine.left.store(before - len * MIB, Ordering::SeqCst);
                    state.in_flight -= len * MIB;
                    prop_assert!(len == 0 || before - len * MIB >= RESERVE, "{len} of {before}");
                }
            }
        }
    }
}
