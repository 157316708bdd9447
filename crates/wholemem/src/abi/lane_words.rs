//! The words that the kernels of a lane share with the host: control, report and debug words.
//!
//! ```text
//!   control   this rank's device memory     [0] poison  [2] timeout  [3] call lock  [4] spins  [16..] call counters
//!   report    pinned host memory            [0] abort   [1] given up  [2] call  [3] phase  [4] cause  [5] asleep  [6..] missing
//!   debug     this rank's device memory     [0] broken rules  [1] seed  [2] longest random delay  [16..] fixed delays
//! ```
//!
//! A cause holds what happened in its upper half and 1 + the rank in its lower half.

use wholemem_comm::Rank;

/// Control: nonzero after a call of the lane has failed. Every later call does nothing.
pub(crate) const POISON: usize = 0;
/// Control: how long a call waits for other ranks, in nanoseconds. Zero is no limit.
pub(crate) const TIMEOUT: usize = 2;
/// Control: the lock that CPU threads of this rank hold during a call. CPU ranks only.
pub(crate) const CALL_LOCK: usize = 3;
/// Control: how often a rank polls before it yields. CPU ranks only.
pub(crate) const SPINS: usize = 4;
/// Control: the number of the next call, one word for each block.
pub(crate) const FIRST_COUNTER: usize = 16;

/// Report: the cause to abort, stored by the host.
pub(crate) const ABORT: usize = 0;
/// Report: nonzero after a kernel has aborted; stored after the other words.
pub(crate) const GIVEN_UP: usize = 1;
/// Report: the number of the aborted call.
pub(crate) const SEQUENCE: usize = 2;
/// Report: the phase of the call in which it was aborted.
pub(crate) const PHASE: usize = 3;
/// Report: why it was aborted.
pub(crate) const CAUSE: usize = 4;
/// Report: nonzero while the thread of this rank sleeps. CPU ranks only.
pub(crate) const ASLEEP: usize = 5;
/// Report: the first word of a bit for each rank that did not arrive before the timeout.
pub(crate) const MISSING: usize = 6;

/// Cause: a rank was lost.
pub(crate) const LOST: u64 = 1;
/// Cause: a rank aborted.
pub(crate) const ABORTED: u64 = 2;
/// Cause: a rank did not arrive before the timeout.
pub(crate) const MISSED: u64 = 3;
/// Cause: a rank left the group.
pub(crate) const LEFT: u64 = 4;

/// Encodes a cause and the rank that caused it.
pub(crate) fn cause(what: u64, blamed: Rank) -> u64 {
    what << 32 | (u64::from(blamed.0) + 1)
}

/// Debug: the first word of the delays, one for each block at each point.
pub(crate) const DELAYS: usize = 16;

/// Debug: the number of points of a call at which a rank can be delayed: its start, between sending and receiving packets,
/// and before and after each of the first barriers.
pub(crate) const POINTS: usize = 8;

/// Synchronization rules that kernels break on request of a test, one bit each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Mutants(pub u64);

impl Mutants {
    /// Buffers do not alternate.
    pub const ONE_BUFFER: Self = Self(1);
    /// No rank waits at the first barrier.
    pub const NO_FIRST_BARRIER: Self = Self(2);
    /// No rank waits at the second barrier.
    pub const NO_SECOND_BARRIER: Self = Self(4);
    /// No rank waits at the end of a call that took several pieces.
    pub const NO_LAST_BARRIER: Self = Self(8);
    /// Packet slots are not cleared when flags wrap around.
    pub const NO_CLEARING: Self = Self(16);
    /// A packet is read without a check of its flag.
    pub const ANY_FLAG: Self = Self(32);
}
