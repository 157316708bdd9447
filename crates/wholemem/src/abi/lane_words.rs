//! The words that the kernels of a lane share with the host: control, report and debug words.
//!
//! A word is a `u64`. Its address is that of the first word plus eight times its number.
//!
//! ```text
//!   LaneRef::control   ControlWord   this rank's device memory
//!   LaneRef::report    ReportWord    pinned host memory
//!   LaneRef::debug     DebugWord     this rank's device memory
//! ```

use wholemem_comm::Rank;

/// A word that only the kernels of its rank access.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ControlWord {
    /// Nonzero after a call of the lane has failed. Every later call does nothing.
    Poison = 0,
    /// Nonzero after a block has started to write the report. GPU ranks only.
    #[expect(dead_code, reason = "only CUDA code names it")]
    Claim = 1,
    /// How long a call waits for other ranks, in nanoseconds. Zero is no limit.
    Timeout = 2,
    /// The lock that threads of this rank hold during a call. CPU ranks only.
    CallLock = 3,
    /// How often a rank polls before it yields. CPU ranks only.
    Spins = 4,
    /// The first of `MAX_BLOCKS` words, one for each block: the number of the next call. All are equal between calls.
    Sequence = 16,
}

/// A word of the report, which the host reads.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReportWord {
    /// The cause to abort, stored by the host.
    Abort = 0,
    /// Nonzero after a kernel has aborted; stored after the other words.
    Aborted = 1,
    /// The number of the aborted call.
    Call = 2,
    /// The phase of the call in which it was aborted.
    Phase = 3,
    /// Why it was aborted: a `Cause` shifted by `CAUSE_SHIFT`, plus 1 + the rank at fault.
    Cause = 4,
    /// Nonzero while the thread of this rank sleeps. CPU ranks only.
    Asleep = 5,
    /// The first word of a bit for each rank that did not arrive before the timeout.
    Missing = 6,
}

/// Why a call was aborted.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// A rank was lost.
    Lost = 1,
    /// A rank aborted.
    Aborted = 2,
    /// A rank did not arrive before the timeout.
    TimedOut = 3,
    /// A rank left the group.
    Left = 4,
}

/// The position of a `Cause` in a word; below it is 1 + the rank at fault.
pub const CAUSE_SHIFT: u32 = 32;

/// A word in which a test asks for faults. Kernels read them only if `LaneRef::debug` is not zero.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DebugWord {
    /// The bits of a `Mutant`, or zero.
    Mutant = 0,
    /// The seed of random delays.
    Seed = 1,
    /// The longest random delay, in nanoseconds.
    MaxDelay = 2,
    /// The first word of the fixed delays in nanoseconds, one for each block at each of the `DEBUG_POINTS`.
    Delays = 16,
}

/// The number of points of a call at which a rank can be delayed: its start, between sending and receiving packets, and
/// before and after each of the first barriers.
pub const DEBUG_POINTS: u32 = 8;

/// A synchronization rule that kernels break on request of a test.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutant {
    /// Buffers do not alternate.
    OneBuffer = 1,
    /// No rank waits at the first barrier.
    NoFirstBarrier = 2,
    /// No rank waits at the second barrier.
    NoSecondBarrier = 4,
    /// No rank waits at the end of a call that took several pieces.
    NoLastBarrier = 8,
    /// Packet slots are not cleared when flags wrap around.
    NoClearing = 16,
    /// A packet is read without a check of its flag.
    AnyFlag = 32,
}

impl Cause {
    const ALL: [Self; 4] = [Self::Lost, Self::Aborted, Self::TimedOut, Self::Left];

    /// The word for this cause and the rank at fault.
    pub(crate) fn word(self, rank: Rank) -> u64 {
        u64::from(self as u32) << CAUSE_SHIFT | (u64::from(rank.0) + 1)
    }

    /// The cause and the rank at fault of a word; `None` if there is no such cause, or no rank.
    pub(crate) fn of_word(word: u64) -> Option<(Self, Rank)> {
        let cause = Self::ALL.into_iter().find(|cause| u64::from(*cause as u32) == word >> CAUSE_SHIFT)?;
        let rank = u32::try_from(word & 0xffff_ffff).expect("masked to 32 bits").checked_sub(1)?;
        Some((cause, Rank(rank)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_read_back_with_its_rank() {
        for cause in Cause::ALL {
            for rank in [0, 7, u32::MAX - 1].map(Rank) {
                assert_eq!(Cause::of_word(cause.word(rank)), Some((cause, rank)));
            }
        }
        assert_eq!(Cause::TimedOut.word(Rank(2)), 3 << 32 | 3);
        for word in [0, 1, 5 << 32 | 1, 3 << 32] {
            assert_eq!(Cause::of_word(word), None, "{word}");
        }
    }
}
